"""Real processes, really killed, interrupted and resumed, on the same and on another number of processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import ENVIRONMENT, assert_same_curves, launch, read_metrics
from processes import has_rows, wait_until
from short_runs import arguments, assert_same_run, checkpoints, updates

from rlhf_details.plumbing.outputs import checkpoint

pytestmark = pytest.mark.slow
STARTER = """
import importlib, json, os, signal, sys
import torch
from rlhf_details.plumbing import console
from rlhf_details.plumbing.outputs.run import Run
console.keep_printing()
with open(f"pid{os.environ.get('RANK', 0)}", "w") as file:
    file.write(str(os.getpid()))
script, values = json.loads(open(sys.argv[1]).read())
log = Run.log
def deadly(self, update, *args, **more):
    log(self, update, *args, **more)
    if self.is_main and str(update) == os.environ.get("DIES_AFTER"):
        os.kill(os.getpid(), signal.SIGKILL)
Run.log = deadly
page = importlib.import_module(script)
page.main(page.Args(**values))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def written(folder, tiny, case, **changes):
    """Writes a starter of a case and its arguments into a folder; returns their paths."""
    folder.mkdir(exist_ok=True)
    page, args = arguments(tiny, case, **changes)
    file = folder / f"args{len(list(folder.glob('args*')))}.json"
    (folder / "start.py").write_text(STARTER)
    file.write_text(json.dumps([page.__name__, vars(args)]))
    return str(folder / "start.py"), str(file)


# ---- SIGKILL ---------------------------------------------------------------------------------------------------------
def killed_when(folder, files, condition):
    """Starts, waits for a condition, and kills with SIGKILL; returns whether the process was still running."""
    with open(folder / "output", "a") as output:
        options = dict(cwd=folder, env=os.environ | ENVIRONMENT, stdout=output, stderr=output)
        process = subprocess.Popen([sys.executable, *files], **options)
        try:
            end = time.time() + 120
            while process.poll() is None and not condition():
                assert time.time() < end
        finally:
            process.kill()
        return process.wait() == -signal.SIGKILL


def test_three_kills_change_nothing(tiny, tmp_path, case="ppo-moments"):
    """One of them while a checkpoint is written."""
    options = dict(total_episodes=16 * 14, checkpoint_every=1)
    file = written(tmp_path / "whole", tiny, case, **options)
    done = launch(file[0], file[1:], cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "killed"
    first, again = written(folder, tiny, case, **options), written(folder, tiny, case, resume=True, **options)

    def is_writing():
        return any(int(path.name[:6]) > 6 for path in (folder / "runs/run/checkpoints").glob("*.partial"))

    assert killed_when(folder, first, lambda: has_rows(folder, 3))
    assert killed_when(folder, again, is_writing)
    assert killed_when(folder, again, lambda: has_rows(folder, 11))
    done = launch(again[0], again[1:], cwd=folder)
    assert done.returncode == 0 and "goes on after update" in done.stdout, done.stderr
    assert_same_run(folder, tmp_path / "whole")
    assert checkpoints(folder / "runs/run") == ["000013", "000014"]


# ---- SIGTERM and Ctrl-C ----------------------------------------------------------------------------------------------
def signalled(folder, command, number, close_output=False, rank=None):
    """Starts a long run and sends its launcher, or the process of a rank, a signal after some updates; returns (exit
    code, what it said).
    """
    with open(folder / "errors", "w") as errors:
        options = dict(cwd=folder, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True)
        process = subprocess.Popen([sys.executable, *command], **options)
        try:
            wait_until(lambda: has_rows(folder, 4), process, (folder / "errors").read_text)
            if close_output:
                process.stdout.close()
            os.kill(process.pid if rank is None else int((folder / f"pid{rank}").read_text()), number)
            return process.wait(60), "" if close_output else process.stdout.read()
        finally:
            process.kill()


def test_ctrl_c_leaves_a_checkpoint_though_the_reader_of_the_output_is_gone(tiny, tmp_path):
    """`train .. | tee log`: the terminal interrupts both, so nobody reads what the run says."""
    file = written(tmp_path, tiny, "rloo", total_episodes=16 * 1000, checkpoint_every=0)
    code, _ = signalled(tmp_path, file, signal.SIGINT, close_output=True)
    assert code == 130, (tmp_path / "errors").read_text()
    (name,) = checkpoints(tmp_path / "runs/run")
    assert updates(tmp_path / "runs/run")[-1] == int(name)


POOL = """
import multiprocessing, time
kept = []
def slow(text):
    time.sleep(0.25)  # so long that the signal meets workers that are busy
    return float(len(text))
def f(prompts, completions):
    kept or kept.append(multiprocessing.get_context("fork").Pool(2))
    return kept[0].map(slow, completions)
"""


@pytest.mark.parametrize(("rank", "rewards"), [(None, ()), (1, ()), (None, ("mine.py:f",))])
def test_a_signal_to_the_launcher_of_two_or_to_one_of_them_leaves_a_checkpoint(tiny, tmp_path, rank, rewards):
    """The launcher sends it to a process and all that belong to its group, but not to the workers of a pool."""
    (tmp_path / "mine.py").write_text(POOL)
    options = dict(reward_fn=rewards, total_episodes=16 * 1000, checkpoint_every=0)
    file = written(tmp_path, tiny, "ppo-overlap", **options)
    code, said = signalled(tmp_path, [*TORCHRUN, *file], signal.SIGTERM, rank=rank)
    assert code != 0 and "SIGTERM: stopped after update" in said, (tmp_path / "errors").read_text()
    (name,) = checkpoints(tmp_path / "runs/run")
    assert checkpoint.all_of(tmp_path / "runs/run")[0].name == name
    assert updates(tmp_path / "runs/run")[-1] == int(name)


# ---- another number of processes -------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["ppo-overlap", "reward-gain"])
def test_a_run_goes_on_with_another_number_of_processes(tiny, tmp_path, case):
    """On 1 process and then 2, and the other way round: the curve is that of 1."""
    changes = dict(learning_rate=3e-4)
    file = written(tmp_path / "whole", tiny, case, **changes)
    done = launch(file[0], file[1:], cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    for before, after in ((1, 2), (2, 1)):
        folder = tmp_path / f"{before}-{after}"
        first, again = written(folder, tiny, case, **changes), written(folder, tiny, case, resume=True, **changes)
        done = launch(first[0], first[1:], before, cwd=folder, DIES_AFTER="5")
        assert done.returncode not in (0, 2), done.stderr
        assert checkpoints(folder / "runs/run") == ["000002", "000004"], done.stderr
        done = launch(again[0], again[1:], after, cwd=folder)
        assert done.returncode == 0 and "goes on after update 4 of 6" in done.stdout, done.stderr
        assert_same_curves(read_metrics(folder / "runs/run"), read_metrics(tmp_path / "whole/runs/run"))
        config = json.loads((folder / "runs/run/config.json").read_text())
        assert (config["num_processes"], config["engine"]) == (after, "DDP" if after == 2 else "one process")
