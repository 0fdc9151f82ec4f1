"""Two nodes, which are two launchers on this machine: the curve of one process, the death of a node, and SLURM."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import ENVIRONMENT, ROOT, assert_same_curves, launch, read_metrics
from processes import has_rows, wait_until, words_of
from short_runs import arguments, checkpoints

pytestmark = pytest.mark.slow
# In the pages a process waits 15 minutes for the others before it ends.
IMPATIENT = """
from datetime import timedelta
from rlhf_details import train_rloo
from rlhf_details.plumbing.inputs import cli, flags
from rlhf_details.plumbing.machine import engines
engines.PATIENCE = timedelta(seconds=20)
cli.main(train_rloo.main, train_rloo.Args)
"""
SRUN = """#!{python}
import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1" and sys.argv[2] == "--cpu-bind=none"
nodes = [subprocess.Popen(sys.argv[3:], env=os.environ | {{"SLURM_NODEID": node}}) for node in "01"]
signal.signal(signal.SIGTERM, lambda number, frame: [node.send_signal(number) for node in nodes])
sys.exit(max(node.wait() for node in nodes))
"""
SCONTROL = """#!/bin/sh
case $1 in
    show) echo 127.0.0.1; echo other ;;
    requeue) echo "$2" >>requeued ;;
esac
"""


def command(tiny, case="rloo-steps", **changes):
    """A script and its flags: a run of 30 updates, with a checkpoint after every second one."""
    page, args = arguments(tiny, case, **(dict(total_episodes=16 * 30, learning_rate=3e-4) | changes))
    return [f"{ROOT}/rlhf_details/{page.__name__.split('.')[1]}.py", *words_of(args)]


def c10d(node, address):
    """What torchrun is told on a node, where node 0 is host of the rendezvous."""
    words = ["--rdzv_backend", "c10d", "--rdzv_endpoint", address, "--rdzv_id", "run"]
    return [*words, "--rdzv_conf", f"is_host={node == 0}"]


def static(node, address):
    return ["--node_rank", str(node), "--rdzv_backend", "static", "--rdzv_endpoint", address]


class Nodes:
    """Two launchers of one process each, in the same folder. Afterwards none of them runs."""

    def __init__(self, folder, words, rendezvous=c10d):
        """words: a script and its flags."""
        self.folder, self.logs, self.launchers = folder, [folder / f"node{node}" for node in (0, 1)], []
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
        with socket.create_server(("", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        for node in (0, 1):
            with open(self.logs[node], "w") as log:
                command = [*torchrun, *rendezvous(node, address), *words]
                self.launchers += [
                    subprocess.Popen(command, cwd=folder, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)
                ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for node in (0, 1):
            self.kill(node)

    def processes(self, node):
        """The launcher of a node, while it runs, and all that it has started."""
        try:
            launcher = psutil.Process(self.launchers[node].pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, node):
        """SIGKILL to all of a node at once."""
        for process in self.processes(node):
            process.kill()
        self.launchers[node].wait()

    def wait_for(self, count):
        """Waits until the run has logged so many rows."""
        wait_until(lambda: has_rows(self.folder, count), self.launchers[0], self.said)

    def seconds_until(self, left, lose):
        """lose() takes the other node away. Returns how long the one that is left goes on. It leaves no process."""
        seen = self.processes(left)
        assert len(seen) == 2
        lose()
        start = time.time()
        assert self.launchers[left].wait(200), self.said()
        assert not any(process.is_running() for process in seen)
        return time.time() - start

    def said(self):
        return "\n".join(log.read_text()[-4000:] for log in self.logs)


@pytest.fixture(scope="session")
def one(tiny, tmp_path_factory):
    """{case: rows of metrics of one process}."""
    found = {}
    for case in ("rloo-steps", "grpo-steps"):
        (script, *flags), folder = command(tiny, case), tmp_path_factory.mktemp(case)
        done = launch(script, flags, cwd=folder)
        assert done.returncode == 0, done.stderr
        found[case] = read_metrics(folder / "runs/run")
    return found


# ---- torchrun --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case, dead", [("rloo-steps", 0), ("grpo-steps", 1)])
def test_when_a_node_is_killed_the_other_ends_and_the_run_goes_on(tiny, tmp_path, one, case, dead):
    with Nodes(tmp_path, command(tiny, case)) as nodes:
        nodes.wait_for(10)
        assert nodes.seconds_until(1 - dead, lambda: nodes.kill(dead)) < 60
    assert 10 <= len(read_metrics(tmp_path / "runs/run")) < 30
    with Nodes(tmp_path, command(tiny, case, resume=True)) as nodes:
        assert [launcher.wait(300) for launcher in nodes.launchers] == [0, 0], nodes.said()
        assert "goes on after update" in nodes.said()
    assert_same_curves(read_metrics(tmp_path / "runs/run"), one[case])
    config = json.loads((tmp_path / "runs/run/config.json").read_text())
    assert (config["num_processes"], config["engine"]) == (2, "DDP")


def test_when_a_node_hangs_the_other_ends_once_it_has_waited_long_enough(tiny, tmp_path):
    """No connection is closed then, as when a node has no power."""
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    words = ["impatient.py", *command(tiny, total_episodes=16 * 10_000)[1:]]
    with Nodes(tmp_path, words, static) as nodes:
        nodes.wait_for(10)
        assert nodes.seconds_until(0, lambda: [process.suspend() for process in nodes.processes(1)]) < 60


# ---- SLURM -----------------------------------------------------------------------------------------------------------
def test_the_slurm_script_runs_on_all_nodes_and_goes_on_after_the_time_limit(tiny, tmp_path, one):
    """With stand-ins for srun and scontrol, and accelerate's own launchers."""
    for name in ("rlhf_details", "benchmark"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = (ROOT / "benchmark/recipes/accelerate/multi_node.yaml").read_text().replace("bf16\n", "'no'\n")
    (tmp_path / "fp32.yaml").write_text(config)
    found = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = dict(SLURM_JOB_ID="4217", SLURM_JOB_NODELIST="nodes", SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="1")
    environment = os.environ | ENVIRONMENT | job | {"PATH": found, "CONFIG": "fp32.yaml"}
    script, *flags = command(tiny)
    flags = [word for word in flags if word not in ("--run_name", "run", "--no_resume")]

    def submit(*more):
        words = ["bash", "benchmark/recipes/slurm.sh", Path(script).stem, "run", *flags, *more]
        options = dict(stdout=open(tmp_path / "output", "a"), stderr=subprocess.STDOUT)
        return subprocess.Popen(words, cwd=tmp_path, env=environment, **options)

    submitted = submit()
    wait_until(lambda: has_rows(tmp_path, 10), submitted, (tmp_path / "output").read_text)
    submitted.send_signal(signal.SIGUSR1)
    assert submitted.wait(60) == 0, (tmp_path / "output").read_text()
    rows = read_metrics(tmp_path / "runs/run")
    assert len(rows) < 30 and checkpoints(tmp_path / "runs/run")[-1] == f"{rows[-1]['update']:06d}"
    assert (tmp_path / "requeued").read_text() == "4217\n"
    assert submit().wait(120) == 0, (tmp_path / "output").read_text()
    assert_same_curves(read_metrics(tmp_path / "runs/run"), one["rloo-steps"])
    assert submit("--learning_rate", "1").wait(120) != 0  # It says that the checkpoint has other arguments.
    assert (tmp_path / "requeued").read_text() == "4217\n"
