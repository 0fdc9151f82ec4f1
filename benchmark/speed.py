"""
The seconds of an update and the memory of two versions, side by side: a command in this tree, and in another tree or
another command.

    python benchmark/speed.py "train_rloo.py --total_episodes 1280" --tree ../before
    python benchmark/speed.py "train_rloo.py --total_episodes 1280" "train_grpo.py --total_episodes 1280"

The two run in turn, A B A B ..., each time in a process of its own, from the same seed, and in the current folder,
where their models are. Of a run counts the median over its updates but the first, which warms up. Ratios are taken
within a turn, so that what else the machine does meets both. The table has their median and range. Memory is the peak
of the resident set of a run's first process, in GB.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from intervals import ROOT, words


@dataclass
class Args:
    command: tyro.conf.Positional[str]
    """a script of rlhf_details, or FOLDER/script.py of the tree, with its flags"""
    other: tyro.conf.Positional[str | None] = None
    """the command of the other side; None: the same"""
    tree: str = str(ROOT)
    """the tree of the other side, such as a `git worktree` of an older commit"""
    turns: int = 3
    """how often each side runs"""


def measured(tree, command, name):
    """{phase: median seconds of an update} of a run, and "memory, GB": its peak."""
    script, *flags = shlex.split(command)
    flags += ["--run_name", name, "--output_dir", f"models/{name}", "--overwrite"]
    place = Path(tree).resolve() / ("" if "/" in script else "rlhf_details")
    process = [sys.executable, str(place / script), *flags]
    environment = os.environ | {"PYTHONPATH": str(Path(tree).resolve())}
    run = subprocess.Popen(process, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(run.pid, 0)
    if status:
        raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), process)
    rows = map(json.loads, Path("runs", name, "metrics.jsonl").read_text().splitlines())
    updates = [row for row in rows if row["update"] > 1]
    phases = [phase for phase in updates[0] if phase.startswith("time/") and phase != "time/from_scratch"]
    seconds = {phase.removeprefix("time/"): np.median([row[phase] for row in updates]) for phase in phases}
    return seconds | {"memory, GB": used.ru_maxrss / 2**20}


def spread(values):
    """Median (lowest .. highest)."""
    return words((np.median(values), min(values), max(values)), ".3f")


def main(args):
    here, there, other = [], [], args.other or args.command
    for _ in range(args.turns):
        here.append(measured(ROOT, args.command, "speed_here"))
        there.append(measured(args.tree, other, "speed_other"))
    print(f"{args.command}; the other: {other} in {args.tree}\n")
    print("| seconds of an update | here | the other | the other to here |\n|---|---|---|---|")
    for phase in [phase for phase in here[0] if phase in there[0]]:
        a, b = (np.array([turn[phase] for turn in side]) for side in (here, there))
        print(f"| {phase} | {spread(a)} | {spread(b)} | {spread(b / a)} |")


if __name__ == "__main__":
    main(tyro.cli(Args))
