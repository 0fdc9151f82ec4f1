"""
Draws static/toy.svg from the curves that benchmark/studies/toy.py wrote: learned score and gold over KL, every seed a
thin line.

python benchmark/studies/toy_figure.py --curves benchmark/results/toy_curves.csv --output static/toy.svg
(needs the extra "benchmark")
"""

import csv
from collections import defaultdict
from dataclasses import dataclass

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@dataclass
class Args:
    curves: str = "benchmark/results/toy_curves.csv"
    """what benchmark/studies/toy.py wrote"""
    output: str = "static/toy.svg"
    """the figure"""


def read(path):
    """{run: {seed: {column: array over updates}}}"""
    runs = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for column in ("update", "scores", "gold", "kl"):
                runs[row["run"]][row["seed"]][column].append(float(row[column]))
    return {
        run: {seed: {c: np.array(v) for c, v in columns.items()} for seed, columns in seeds.items()}
        for run, seeds in runs.items()
    }


def smooth(values, width=10):
    """Running mean."""
    return np.convolve(values, np.ones(width) / width, mode="valid")


def main(args: Args):
    runs = read(args.curves)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    titles = {"rloo": "with the KL penalty (0.1)", "rloo_nokl": "without"}
    for axis, (run, title) in zip(axes, titles.items(), strict=True):
        for column, colour, name in (
            ("gold", "#b8860b", "gold: what the human wants"),
            ("scores", "#3465a4", "score: what the reward model says"),
        ):
            lines = [smooth(columns[column]) for columns in runs[run].values()]
            for line in lines:
                axis.plot(line, color=colour, linewidth=0.6, alpha=0.5)
            axis.plot(np.mean(lines, 0), color=colour, linewidth=2, label=name)
        kl = np.mean([columns["kl"][-10:].mean() for columns in runs[run].values()])
        axis.set(title=f"{title}: {kl:.0f} nats at the end", xlabel="update")
        axis.grid(alpha=0.2)
    axes[0].set_ylabel("points")
    axes[0].legend(frameon=False, loc="lower right", fontsize=8)
    figure.suptitle(f"RLOO on the embedded task, {len(runs['rloo'])} seeds", fontsize=10)
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "toy"  # the same bytes for the same data
    figure.savefig(args.output, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Args))
