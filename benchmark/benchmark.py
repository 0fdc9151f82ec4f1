"""
Runs commands over seeds, on several workers or under SLURM, and keeps their curves.

    python benchmark/benchmark.py --exp rloo --command "python rlhf_details/train_rloo.py" --seeds 1 2 3 4 5 --workers 2

Each run has a folder of its own, runs/benchmark/<commit>/<study>/<exp>_s<seed>/, in which the command is started, with
--seed, --run_name and --overwrite added; `{seed}` and `{root}` in the command are replaced. Its numbers go to
benchmark/results/<study>/runs.csv, where each row names its commit, and env.json beside it says of each commit with
what its runs were made. What is there is skipped, what failed is reported at the end (exit code 1) and tried again by
the same command. The commit is git's `describe`, with -dirty where the tree is, or what --tag says.
"""

import csv
import glob
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro
from intervals import experiments, write_runs

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (  # that the studies keep
    "update episode objective/scores objective/gold objective/kl objective/rlhf_reward policy/entropy_avg "
    "policy/approxkl_avg policy/clipfrac_avg val/sequence_lengths val/num_stop_token_ids loss/policy_avg "
    "loss/value_avg eval/objective/scores eval/objective/gold eval/objective/kl eval/objective/parses "
    "eval/objective/length eval/objective/ended eval/objective/scores_std eval/objective/gold_std train/sft/loss "
    "eval/sft/perplexity train/rm/loss train/rm/accuracy eval/rm/accuracy"
).split()
MODELS = "{root}/models/bench/{seed}"  # of the studies, which share SFT and reward models
SLURM = """#!/bin/bash
#SBATCH --job-name={exp}
#SBATCH --array=0-{last}
#SBATCH --cpus-per-task={cpus}
#SBATCH --output=runs/benchmark/slurm-%A_%a.out
cd "{root}"
{python} benchmark/benchmark.py --only $SLURM_ARRAY_TASK_ID {arguments}
"""


@dataclass(kw_only=True)
class StudyArgs:
    """What `run` of every study takes."""

    tag: str | None = None
    """what the results call their commit; None: git describe"""
    seeds: tuple[int, ...] = tuple(range(1, 11))
    """seeds"""
    workers: int = 2
    """runs at a time"""
    threads: int = 1
    """CPU threads a run (OMP_NUM_THREADS)"""
    columns: tuple[str, ...] = ()
    """metrics to keep, those that the run has; none: all numbers"""
    every: int = 1
    """keep every so manyth row, and the last"""


@dataclass(kw_only=True)
class Args(StudyArgs):
    command: tuple[str, ...]
    """commands to run, each a string"""
    exp: tuple[str, ...]
    """names of the experiments, one a command"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    workers: int = 1
    study: str = "mine"
    """folder of the results, in benchmark/results/"""
    slurm: str | None = None
    """write an array job to this file, a task a run, and run nothing"""
    only: int | None = None
    """the run of this number alone, as a task of an array job does"""


def fail(message):
    """One clear line, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def git_tag(root=ROOT):
    """git describe: the last tag and what came after it, or the commit; with -dirty where files but results differ.

    Otherwise the results of a first run would give the second one another name.
    """
    git = ["git", "-C", str(root)]
    found = subprocess.run([*git, "describe", "--tags", "--always"], capture_output=True, text=True, check=True)
    but_results = [".", ":(exclude)benchmark/results", ":(exclude)static"]
    is_dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *but_results]).returncode
    return found.stdout.strip() + ("-dirty" if is_dirty else "")


def code_hash(root=ROOT):
    """Twelve digits that change with any of the scripts in rlhf_details/."""
    digest = hashlib.sha256()
    folder = root / "rlhf_details"
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def processor():
    """ "AMD EPYC (family 25, model 17)", or what Python knows where /proc/cpuinfo names no model.

    A name is not enough: one "AMD EPYC" multiplies matrices twice as fast as another.
    """
    path = Path("/proc/cpuinfo")
    first = path.read_text().split("\n\n")[0] if path.exists() else ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return "{model name} (family {cpu family}, model {model})".format_map(fields)


def environment():
    """What the figures are made with."""
    names = ("torch", "transformers", "accelerate", "numpy", "tokenizers")
    return {
        "commit": git_tag(),
        "code": code_hash(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "cpu": processor(),
        "cores": os.cpu_count(),
    }


def table(rows, columns, every=1):
    """[header, row, ...] of a run's metrics, in five digits: its columns (none: all numbers), every so manyth row, and
    the last one.
    """
    columns = columns or dict.fromkeys(name for row in rows for name, x in row.items() if isinstance(x, int | float))
    kept = [name for name in columns if any(name in row for row in rows)]
    rows = [row for i, row in enumerate(rows) if i % every == 0 or i + 1 == len(rows)]

    def cell(x):
        return "" if x is None else x if isinstance(x, int | str) else f"{x:.5g}"

    return [kept, *([cell(row.get(name)) for name in kept] for row in rows)]


class Run:
    """One experiment with one seed. code: the folder whose scripts it runs, the repository or a copy of it; columns,
    every: the metrics and rows to keep (None: what the command line asks for); kept: whether its rows go to the
    results, and do not only lie in its folder.
    """

    kept = True

    def __init__(self, exp, command, seed, tag, study="", code=None, columns=None, every=None):
        self.name, self.seed, self.code = f"{exp}_s{seed}", seed, Path(code or ROOT)
        self.command, self.columns, self.every = command.format(seed=seed, root=ROOT), columns, every
        self.recipe = command if code is None else f"{command}   # in a copy, code {code_hash(self.code)}"
        self.folder = ROOT / "runs" / "benchmark" / tag / study / self.name
        self.key, self.results = (exp, tag, seed), ROOT / "benchmark" / "results" / study
        self.result = self.folder / "result.csv"  # until `keep` has put it with the others
        self.makes = None  # a model's folder that others need

    def is_done(self):
        exp, tag, seed = self.key
        known = self.result.exists() or (self.kept and seed in experiments(self.results, tag).get(exp, {}))
        return known and (self.makes is None or (self.makes / "config.json").exists())

    def start(self, args):
        """Runs the command; returns (seconds, None or what went wrong). The result is written whole or not at all."""
        start = time.time()
        self.folder.mkdir(parents=True, exist_ok=True)
        words, variables = shlex.split(self.command), {}
        while "=" in words[0]:  # NAME=VALUE before the command, as in a shell
            name, _, variables[name] = words.pop(0).partition("=")
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        words = [str(self.code / w) if w.endswith(".py") and (self.code / w).exists() else w for w in words]
        words += ["--seed", str(self.seed), "--run_name", "run", "--overwrite"]
        path = os.pathsep.join([str(self.code), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": path} | variables
        with open(self.folder / "output.txt", "w") as output:
            pipes = dict(stdout=output, stderr=subprocess.STDOUT)
            done = subprocess.run(words, cwd=self.folder, env=os.environ | environ, **pipes)
        if done.returncode:
            last = (self.folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
            return time.time() - start, f"exit code {done.returncode}: {' '.join(last)}"
        lines = (self.folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
        partial = self.result.with_suffix(".partial")
        with open(partial, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                table([json.loads(x) for x in lines], self.columns or args.columns, self.every or args.every)
            )
        partial.replace(self.result)
        return time.time() - start, None


def write_slurm(args, number):
    """The array job that runs each run as a task of its own."""
    words = ["--command", *args.command, "--exp", *args.exp, "--seeds", *map(str, args.seeds)]
    words += ["--threads", str(args.threads)]
    (ROOT / "runs" / "benchmark").mkdir(parents=True, exist_ok=True)  # where the output goes
    words += ["--tag", args.tag or git_tag(), "--study", args.study, *keeping(args)]
    values = dict(exp=args.exp[0], last=number - 1, cpus=args.threads, root=ROOT, python=sys.executable)
    Path(args.slurm).write_text(SLURM.format(**values, arguments=shlex.join(words)))


def keeping(args):
    """The flags that say which of its numbers a run leaves; none for all of them."""
    return ["--columns", *args.columns] * bool(args.columns) + ["--every", str(args.every)] * (args.every > 1)


def main(args: Args):
    """Returns the names of the runs that failed."""
    if not len(args.command) == len(args.exp) == len(set(args.exp)):
        fail(f"--exp: {len(args.exp)} names of {len(args.command)} commands; each needs a name of its own")
    tag = args.tag or git_tag()
    pairs = list(zip(args.exp, args.command, strict=True))
    runs = [Run(exp, command, seed, tag, args.study) for seed in args.seeds for exp, command in pairs]
    for run in runs if keeping(args) else ():
        run.recipe += f"   # {shlex.join(keeping(args))}"
    if args.slurm:
        return write_slurm(args, len(runs))
    is_task = args.only is not None
    return run_all(runs[args.only : args.only + 1] if is_task else runs, args, tag, is_task)


def parse(commands, words=None):
    """(function, its arguments) of a command line; commands, {name: (dataclass of the arguments, function)}."""
    kinds = {name: arguments for name, (arguments, _) in commands.items()}
    args = tyro.extras.subcommand_cli_from_dict(kinds, args=words)
    return next(function for arguments, function in commands.values() if isinstance(args, arguments)), args


def run_command(commands):
    """Runs the one of `commands` that the command line names. Returns 1 where that returns something, e.g. failures."""
    function, args = parse(commands)
    return int(bool(function(args)))


def note(runs, todo, tag):
    """Adds to the env.json beside the results with what the runs in `todo` are made, and their commands.

    Ends with exit code 2 where results of the same name are there that other scripts or another command have made.
    Args: runs, those in `todo` and those that are done.
    """
    path = runs[0].results / "env.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    about, made = every.setdefault(tag, {"environments": [], "commands": {}}), environment()
    others = [x["code"] for x in about["environments"] if x["code"] != made["code"]]
    if others:
        scripts = f"other scripts ({others[0]}, these are {made['code']})"
        fail(f"--tag {tag}: its results were made by {scripts}; give another tag")
    commands, known = {run.key[0]: run.recipe for run in runs}, experiments(path.parent, tag)
    for exp, command in commands.items():
        # What array jobs have left is in no runs.csv yet.
        is_there = exp in known or any(runs[0].folder.parent.glob(f"{glob.escape(exp)}_s[0-9]*/result.csv"))
        if is_there and about["commands"].get(exp, command) != command:
            what = f"{path.parent.relative_to(ROOT)} has results of another command at {tag}"
            fail(f"--exp {exp}: {what}; give another --exp, or delete its rows in runs.csv")
    if not todo:
        return
    about["environments"] += [made] * (made not in about["environments"])
    about["commands"] |= commands
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(every, indent=1) + "\n")


def run_study(stages, runs, args, tag):
    """Does the runs of a study, and before them the stages of seeds whose runs are not all done. Returns who failed."""
    seeds = {run.seed for run in runs if not run.is_done()}
    if not seeds:
        print(f"{tag}: {len(runs)} runs, all done")
        keep(runs)  # A program that was killed has kept none.
        return []
    needed = [[stage for stage in batch if stage.seed in seeds] for batch in stages]
    return [name for batch in (*needed, runs) for name in run_all(batch, args, tag)]


def keep(runs):
    """Puts the results that have come since into the runs.csv of their study."""
    for folder in {run.results for run in runs if run.kept}:
        new = {run.key: run.result for run in runs if run.results == folder and run.kept and run.result.exists()}
        if new:
            write_runs(folder, {key: list(csv.reader(path.open(newline=""))) for key, path in new.items()})
        for path in new.values():
            path.unlink()


def run_all(runs, args, tag, is_task=False):
    """Does the runs that are not done, args.workers at a time; returns the names of those that failed."""
    todo = [run for run in runs if not run.is_done()]
    state = f"{len(runs) - len(todo)} done, {len(todo)} to do, {args.workers} at a time"
    print(f"{tag}: {len(runs)} runs, {state}", flush=True)
    if kept := [run for run in runs if run.kept]:
        note(kept, [run for run in kept if run in todo], tag)
    failed, started = [], time.time()
    try:
        with ThreadPoolExecutor(args.workers) as pool:
            futures = {pool.submit(run.start, args): run for run in todo}
            for number, future in enumerate(as_completed(futures), 1):
                try:
                    spent, error = future.result()
                except OSError as e:  # no metrics, say, although the run ended well
                    spent, error = math.nan, str(e)
                failed += [futures[future].name] if error else []
                left = (time.time() - started) / number * (len(todo) - number)
                line = f"{number}/{len(todo)} {futures[future].name} {spent:.0f} s, {math.ceil(left / 60)} min left"
                print(f"{line}  FAILED: {error}" if error else line, flush=True)
    finally:
        if not is_task:  # Tasks of an array job would write to one file at once. The same command without it does so.
            keep(runs)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries them again", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(tyro.cli(Args))))
