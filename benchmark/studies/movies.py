"""
The experiment of movies.sh over seeds, every stage anew for each: real text, real human labels.

    python benchmark/studies/movies.py run --tag TAG --seeds 1 2 3 4 5 --workers 2 [--policies rloo ppo dpo]
    python benchmark/studies/movies.py draw --tag TAG --dpo TAG               (static/movies.svg, results/TAG/movies.md)

`run` takes two hours and goes on by itself. The data are expected in data/movies (movies_data.py makes them); the
commands are those that movies.sh prints with DRY_RUN. held_out.py measures the policy of DPO, as RLOO measures its own.
"""

import itertools
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
from rlhf_details import train_rloo

POLICIES = {"rloo": ("RLOO", "#3465a4"), "ppo": ("PPO", "#c4501b")}
LABELS = {name: label for name, (label, _) in POLICIES.items()} | {"dpo_measured": "DPO"}
DPO_COLUMNS = "update episode train/dpo/loss rewards/accuracies rewards/margins eval/rewards/accuracies"
DPO_COLUMNS += " eval/rewards/chosen eval/rewards/rejected"
FIGURES = {
    "scores": "score",
    "given": "score without the penalty",
    "kl": "KL, nats a response",
    "length": "length, tokens",
    "ended": "share ended",
}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing: SFT, reward model and the policies of each seed."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    policies: tuple[str, ...] = ("rloo", "ppo", "dpo")
    """who is trained"""


@dataclass
class DrawArgs:
    """Draws the figure and writes its table from the CSV files."""

    tag: str
    """folder of the results"""
    dpo: str
    """folder of the results of DPO"""
    output: str = "static/movies.svg"
    """the figure"""


def commands():
    """{"sft", "reward", "rloo", "ppo", "dpo": command} of movies.sh, with {root} and {seed} in the paths; and
    "dpo_measured", which measures the policy of DPO."""
    words = ["bash", str(ROOT / "benchmark/recipes/movies.sh"), "{root}/data/movies", "{root}/models/movies/{seed}"]
    printed = subprocess.run(
        words, capture_output=True, text=True, check=True, env=os.environ | {"DRY_RUN": "1"}
    ).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    named = {Path(line[1]).stem.removeprefix("train_"): line for line in lines if Path(line[1]).stem != "evaluate"}
    rloo = dict(itertools.pairwise(named["rloo"]))
    task = shlex.quote(" ".join(f"{x} {rloo[x]}" for x in ("--dataset", "--eval_dataset", "--missing_eos_penalty")))
    words = ["python", "benchmark/studies/held_out.py", "--policy", named["dpo"][-1], "--sft", rloo["--sft_model_path"]]
    words += ["--reward", rloo["--reward_model_path"], "--temperature", str(train_rloo.Args.temperature)]
    named["dpo_measured"] = [*words, "--response_length", rloo["--response_length"], f"--flags={task}"]
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
    for one, measured in zip(batches["dpo"], batches["dpo_measured"], strict=True):
        one.every, one.columns = 10, DPO_COLUMNS.split()
        one.makes = None if measured.is_done() else ROOT / "models" / "movies" / str(one.seed) / "dpo"
    runs = [batches[name][place] for place in range(len(args.seeds)) for name in args.policies]
    failed = run_study([batches["sft"], batches["reward"]], runs, args, tag)
    return failed + run_study([], batches["dpo_measured"] if "dpo" in args.policies else [], args, tag)


def given(seed, lost):
    """What the reward model gave, held out: the score and what a missing end lost. Args: a run's columns; points."""
    return seed["eval/objective/scores"] + lost * (1 - seed["eval/objective/ended"])


def table(folder, dpo):
    """Lines of the table: what each stage reached, mean over seeds with Student's 95 % interval.

    Args: folder, the study's results; dpo, the folder of those of DPO.
    """

    def cell(x, digits=2):
        return words([round(float(number), digits) + 0.0 for number in mean_interval(x)[:3]], f".{digits}f")  # no -0.00

    stages = [
        ("sft", "eval/sft/perplexity", "perplexity a token", 1),
        ("reward", "eval/rm/accuracy", "reward model's accuracy", 3),
    ]
    lines = ["| | " + " | ".join(["SFT", *LABELS.values()]) + " |", "|---" + "|---:" * 4 + "|"]
    for name, metric, label, digits in stages:
        first, own = (
            cell([last(seed[metric]) for seed in read_seeds(x, name).values()], digits) for x in (folder, dpo)
        )
        lines.append(f"| {label} | {first} | | | {own} |")
    labels = {"accuracies": "accuracy", "chosen": "score of the chosen", "rejected": "score of the rejected"}
    for name, label in labels.items():
        own = cell([last(seed[f"eval/rewards/{name}"]) for seed in read_seeds(dpo, "dpo").values()], 3)
        lines.append(f"| DPO's {label} | | | | {own} |")
    found = {name: list(read_seeds(folder if name in POLICIES else dpo, name).values()) for name in LABELS}
    lost = float(dict(itertools.pairwise(shlex.split(commands()["rloo"])))["--missing_eos_penalty"])
    for metric, label in FIGURES.items():
        held_out = [[seed | {"eval/objective/given": given(seed, lost)} for seed in seeds] for seeds in found.values()]
        column = f"eval/objective/{metric}"
        before = cell([seed[column][0] for seed in held_out[0]])
        after = " | ".join(cell([last(seed[column]) for seed in seeds]) for seeds in held_out)
        lines.append(f"| {label} | {before} | {after} |")
    return [*lines, f"| seeds | | {' | '.join(str(len(seeds)) for seeds in found.values())} |"]


def draw(args: DrawArgs):
    """Writes the figure and results/TAG/movies.md."""
    folder, dpo = (ROOT / "benchmark" / "results" / tag / "movies" for tag in (args.tag, args.dpo))
    figure, axes = blank(1, 2, figsize=(8, 2.8), layout="constrained")
    for name, (label, colour) in POLICIES.items():
        seeds = list(read_seeds(folder, name).values())
        for axis, metric in zip(axes, ("scores", "kl"), strict=True):
            heights = np.array([seed[f"objective/{metric}"] for seed in seeds]).T  # [rows, seeds]
            rows = ~np.isnan(heights).any(1)
            x = seeds[0]["episode"][rows]
            band(axis, x, heights[rows], label, color=colour, linewidth=1.4)
            frame(axis, FIGURES[metric], "episode")
    measured = read_seeds(dpo, "dpo_measured").values()
    for axis, metric in zip(axes, ("scores", "kl"), strict=True):  # DPO samples nothing, so it has no course.
        end = np.mean([last(seed[f"eval/objective/{metric}"]) for seed in measured])
        axis.axhline(end, color="#4e9a06", linestyle="--", linewidth=1.2, label="DPO, held out at the end")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, args.output, "movies")
    head = f"""# Movie reviews over seeds

Written by `python benchmark/studies/movies.py draw --tag {args.tag} --dpo {args.dpo}`: held-out
figures, mean over seeds with Student's 95 % interval. DPO had SFT and reward models of its own, made by the same
commands: their perplexity and accuracy stand in its column.

"""
    lines = table(folder, dpo)
    (ROOT / "benchmark" / "results" / args.tag / "movies.md").write_text(head + "\n".join(lines) + "\n")
    print("\n".join(lines))


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
