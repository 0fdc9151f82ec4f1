"""
The experiment of movies.sh over seeds, every stage anew for each: real text, real human labels.

    python benchmark/studies/movies.py run --tag TAG --seeds 1 2 3 4 5 --workers 2   (two hours; it goes on by itself)
    python benchmark/studies/movies.py draw --tag TAG                         (static/movies.svg, results/TAG/movies.md)

The data are expected in data/movies (movies_data.py makes them); the commands are those that movies.sh prints with
DRY_RUN.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT, last, mean_interval, read_seeds, words
from plot import band, blank, frame, save

from benchmark import Run, StudyArgs, git_tag, run_command, run_study

POLICIES = {"rloo": ("RLOO", "#3465a4"), "ppo": ("PPO", "#c4501b")}
FIGURES = {"scores": "score", "kl": "KL, nats a response", "length": "length, tokens", "ended": "share ended"}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing: SFT, reward model, RLOO and PPO of each seed."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


@dataclass
class DrawArgs:
    """Draws the figure and writes its table from the CSV files."""

    tag: str
    """folder of the results"""
    output: str = "static/movies.svg"
    """the figure"""


def commands():
    """{"sft", "reward", "rloo", "ppo": command} of movies.sh, with {root} and {seed} in the paths."""
    words = ["bash", str(ROOT / "benchmark/recipes/movies.sh"), "{root}/data/movies", "{root}/models/movies/{seed}"]
    printed = subprocess.run(
        words, capture_output=True, text=True, check=True, env=os.environ | {"DRY_RUN": "1"}
    ).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    named = {Path(line[1]).stem.removeprefix("train_"): line for line in lines if Path(line[1]).stem != "evaluate"}
    return {name: " ".join(line) for name, line in named.items()}


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag = args.tag or git_tag()
    if not (ROOT / "data" / "movies").is_dir():
        how = "python benchmark/recipes/movies_data.py --output_dir data/movies"
        print(f"error: data/movies: no such folder; {how} makes it", file=sys.stderr)
        raise SystemExit(2)
    batches = {
        name: [Run(name, command, seed, tag, "movies") for seed in args.seeds] for name, command in commands().items()
    }
    for name in ("sft", "reward"):
        for one in batches[name]:
            one.makes, one.every = ROOT / "models" / "movies" / str(one.seed) / name, 10
    runs = [one for pair in zip(batches["rloo"], batches["ppo"], strict=True) for one in pair]
    return run_study([batches["sft"], batches["reward"]], runs, args, tag)


def table(folder):
    """Lines of the table: what each stage reached, mean over seeds with Student's 95 % interval."""

    def cell(x, digits=2):
        return words([round(float(number), digits) + 0.0 for number in mean_interval(x)[:3]], f".{digits}f")  # no -0.00

    stages = [
        ("sft", "eval/sft/perplexity", "perplexity a token", 1),
        ("reward", "eval/rm/accuracy", "reward model's accuracy", 3),
    ]
    lines = ["| | " + " | ".join(["SFT", *(label for label, _ in POLICIES.values())]) + " |", "|---|---:|---:|---:|"]
    for name, metric, label, digits in stages:
        lines.append(
            f"| {label} | {cell([last(seed[metric]) for seed in read_seeds(folder, name).values()], digits)} | | |"
        )
    found = {name: list(read_seeds(folder, name).values()) for name in POLICIES}
    for metric, label in FIGURES.items():
        column = f"eval/objective/{metric}"
        before = cell([seed[column][0] for seed in found["rloo"]])
        after = " | ".join(cell([last(seed[column]) for seed in seeds]) for seeds in found.values())
        lines.append(f"| {label} | {before} | {after} |")
    return [*lines, f"| seeds | | {' | '.join(str(len(seeds)) for seeds in found.values())} |"]


def draw(args: DrawArgs):
    """Writes the figure and results/TAG/movies.md."""
    folder = ROOT / "benchmark" / "results" / args.tag / "movies"
    figure, axes = blank(1, 2, figsize=(8, 2.8), layout="constrained")
    for name, (label, colour) in POLICIES.items():
        seeds = list(read_seeds(folder, name).values())
        for axis, metric in zip(axes, ("scores", "kl"), strict=True):
            heights = np.array([seed[f"objective/{metric}"] for seed in seeds]).T  # [rows, seeds]
            rows = ~np.isnan(heights).any(1)
            x = seeds[0]["episode"][rows]
            band(axis, x, heights[rows], label, color=colour, linewidth=1.4)
            frame(axis, FIGURES[metric], "episode")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, args.output, "movies")
    head = f"""# Movie reviews over seeds

Written by `python benchmark/studies/movies.py draw --tag {args.tag}`: held-out figures, mean over seeds with
Student's 95 % interval.

"""
    lines = table(folder)
    (ROOT / "benchmark" / "results" / args.tag / "movies.md").write_text(head + "\n".join(lines) + "\n")
    print("\n".join(lines))


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
