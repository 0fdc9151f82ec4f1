"""
Kills runs with SIGKILL at random moments, resumes them, and compares with the run that was never touched: metrics
(except times), sample tables and final weights must be equal bit for bit.

Every second kill waits for a checkpoint being written, and strikes while it is. Results go to
benchmark/results/kill_resume.md.

    python benchmark/checks/kill_resume.py --kills 20        # the toy RLOO and PPO, on the stages in models/toy
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 12  # of 64 episodes, with a checkpoint after every second one


@dataclass
class Args:
    algorithms: tuple[str, ...] = ("rloo", "ppo")
    """scripts to kill"""
    kills: int = 20
    """kills of each"""
    jobs: int = 2
    """runs at a time; each on one thread"""
    out: str = "benchmark/results/kill_resume.md"
    """where the table goes"""


def start(algorithm, name, *flags):
    """A run in a process group of its own, on one thread."""
    command = [sys.executable, ROOT / "rlhf_details" / f"train_{algorithm}.py", "--run_name", name]
    command += ["--output_dir", f"models/kill_resume/{name}", "--batch_size", 64, "--total_episodes", 64 * UPDATES]
    command += ["--checkpoint_every", 2, "--num_sample_generations", 3, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True, **pipes)


def finish(process):
    """Waits for a run; its output."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"a run ended with {process.returncode}:\n{output}")
    return output


def rows_of(name):
    """Rows of metrics.jsonl that are complete."""
    path = Path("runs") / name / "metrics.jsonl"
    return path.read_text().split("\n")[:-1] if path.exists() else []


# The kills below look into a run from outside, which tells nobody when a row or a folder is there, so they poll. The
# waits after that are the experiment itself: they make the moment random.
def wait_for_rows(process, name, count):
    """Until a run has its folder and has logged so many rows, or has ended."""
    while process.poll() is None and not (Path("runs", name, "config.json").exists() and len(rows_of(name)) >= count):
        time.sleep(0.001)  # another process's file: there is nothing to wait on


def kill_somewhere(process, name, chance, seconds_an_update, while_writing):
    """Strikes at a random moment of a random update, or while its checkpoint is written. Returns what was there."""
    update = chance.randint(0, UPDATES - 1)
    wait_for_rows(process, name, update)
    folder = Path("runs") / name / "checkpoints"
    if while_writing:
        while process.poll() is None and not list(folder.glob("*.partial")):
            time.sleep(0.0002)  # as short as a checkpoint's folder may be there
        time.sleep(chance.uniform(0, 0.03))  # the moment of death is to be random
    else:
        time.sleep(chance.uniform(0, seconds_an_update))  # likewise
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    files = [len(list(partial.iterdir())) for partial in folder.glob("*.partial")]
    return len(rows_of(name)), f"{files[0]} files of it there" if files else "no"


def differences(name, other):
    """What differs between two runs, in words; empty where nothing does."""

    def content(run):
        rows = [json.loads(line) for line in rows_of(run)]
        metrics = [{k: v for k, v in row.items() if k != "eps" and not k.startswith("time/")} for row in rows]
        weights = Path("models/kill_resume", run, "model.safetensors").read_bytes()
        return {"metrics": metrics, "weights": weights, "samples": Path("runs", run, "samples.jsonl").read_text()}

    a, b = content(name), content(other)
    return [key for key in a if a[key] != b[key]]


def one_kill(algorithm, number, seconds):
    """A row of the table: kills a run once, resumes it, compares it with the uninterrupted one."""
    name, chance = f"kill_{algorithm}_{number}", random.Random(f"1 {algorithm} {number}")
    shutil.rmtree(Path("runs") / name, ignore_errors=True)
    process = start(algorithm, name, "--overwrite")
    rows, partial = kill_somewhere(process, name, chance, seconds, number % 2 == 1)
    output = finish(start(algorithm, name, "--resume"))
    said = next((line for line in output.splitlines() if line.startswith("--resume")), "")
    wrong = differences(name, f"kill_{algorithm}")
    from_update = said.split("after update ")[1].split(" ")[0] if "after update" in said else "the start"
    for folder in (Path("runs") / name, Path("models/kill_resume") / name):
        shutil.rmtree(folder)
    what = f"killed after {rows} rows, writing: {partial}, from {from_update}: {wrong or 'equal'}"
    print(f"{algorithm} {number}: {what}", flush=True)
    return [algorithm, str(number), str(rows), partial, from_update, ", ".join(wrong) or "nothing"]


def main(args):
    table = []
    for algorithm in args.algorithms:
        name = f"kill_{algorithm}"
        finish(start(algorithm, name, "--overwrite"))
        seconds = json.loads(rows_of(name)[-1])["time/update"]
        with ThreadPoolExecutor(args.jobs) as pool:
            table += pool.map(lambda n, a=algorithm, s=seconds: one_kill(a, n, s), range(args.kills))
    bad = [row for row in table if row[-1] != "nothing"]
    head = ["script", "kill", "updates logged when killed", "checkpoint being written", "resumed from update"]
    head += ["differs from the uninterrupted run"]
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *table)]
    text = f"{len(table)} kills, {len(bad)} resumed runs that differ. Commit {commit}: `python "
    text += f"benchmark/checks/kill_resume.py {' '.join(sys.argv[1:])}`, one thread a run.\n\n"
    text += "".join(f"| {line} |\n" for line in lines)
    Path(args.out).write_text(text)
    print(text)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(tyro.cli(Args))
