"""
Draws the curves of a run, or of several over each other, from metrics.jsonl: PPO, RLOO, SFT or reward model.

python benchmark/plot.py runs/<name> [runs/<other> ...]     (needs the extra "benchmark")
"""

import json
import math
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

PANELS = {  # title: metrics over the same axis; eval/* are drawn as markers
    "score": ("objective/scores", "eval/objective/scores"),
    "gold, the true reward": ("objective/gold", "eval/objective/gold"),
    "reward functions": ("objective/rewards/*", "objective/verifiable_correct_rate"),
    "KL, nats a response": ("objective/kl", "eval/objective/kl"),
    "entropy, nats a token": ("policy/entropy_avg",),
    "length, tokens": ("val/sequence_lengths",),
    "probability ratio": ("val/ratio", "policy/clipfrac_avg"),
    "loss": ("train/*/loss", "eval/*/loss"),
    "accuracy": ("train/*/accuracy", "eval/*/accuracy"),
    "learning rate": ("train/*/lr",),
}
RIGHT = "policy/clipfrac_avg"  # has an axis of its own on the right, since it starts at 0 and the ratio stays near 1
STYLES = ("-", "--", ":", "-.")


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """folders runs/<name>"""
    output: str | None = None
    """the picture; None: curves.png in the first folder"""


def fail(message):
    """One clear line, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def read(folder):
    """Rows of a run's metrics.jsonl; a torn last line, of a run that goes on or was killed, is left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.parent.is_dir():
        fail(f"{folder}: no such folder")
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as e:
        fail(f"{path}: {e.strerror}")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                fail(f"{path}: line {number} is not JSON")
    rows = [row for row in rows if isinstance(row, dict) and "episode" in row]
    return rows or fail(f"{path}: no rows")


def panels(rows):
    """{title: {metric: (episodes, values)}} of what the rows hold, in the order of PANELS."""
    names, result = list(dict.fromkeys(name for row in rows for name in row)), {}
    for title, patterns in PANELS.items():
        for metric in (name for pattern in patterns for name in names if fnmatchcase(name, pattern)):
            points = [(row["episode"], row[metric]) for row in rows if isinstance(row.get(metric), int | float)]
            if points:
                result.setdefault(title, {})[metric] = tuple(zip(*points, strict=True))
    return result


def health(rows):
    """{metric: [(first episode, number of episodes)]}: where each health/* metric is not zero, neighbours joined."""
    starts, found = [0, *(row["episode"] for row in rows)], {}
    for metric in dict.fromkeys(name for row in rows for name in row if name.startswith("health/")):
        for bad, places in groupby(range(len(rows)), key=lambda i: bool(rows[i].get(metric))):
            if bad:
                places = list(places)
                start = starts[places[0]]  # a row is about the episodes since the row before
                found.setdefault(metric, []).append((start, rows[places[-1]]["episode"] - start))
    return found


def figure(runs):
    """The figure of {name: rows}: a colour a metric, or a colour a run where there are several."""
    shown = {name: panels(rows) for name, rows in runs.items()}
    titles = [title for title in PANELS if any(title in drawn for drawn in shown.values())]
    columns = min(3, len(titles))
    picture = Figure(figsize=(4 * columns, 2.6 * math.ceil(len(titles) / columns)), layout="constrained")
    FigureCanvasAgg(picture)
    for place, title in enumerate(titles, 1):
        axis, handles = picture.add_subplot(math.ceil(len(titles) / columns), columns, place), {}
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("episode", fontsize=7)
        right = axis.twinx() if any(RIGHT in drawn.get(title, {}) for drawn in shown.values()) else None
        kinds = list(
            dict.fromkeys(m.removeprefix("eval/").removeprefix("train/") for d in shown.values() for m in d.get(title, {}))
        )
        for i, drawn in enumerate(shown.values()):
            for metric, (x, y) in drawn.get(title, {}).items():
                kind = kinds.index(metric.removeprefix("eval/").removeprefix("train/"))
                look = {"color": f"C{i if len(runs) > 1 else kind}", "linewidth": 1, "label": metric}
                marks = {"linestyle": "", "marker": "o", "markersize": 4, "markeredgecolor": "black", "markeredgewidth": 0.5}
                look |= marks if metric.startswith("eval/") else {"linestyle": STYLES[kind % 4 if len(runs) > 1 else 0]}
                (line,) = (right if metric == RIGHT else axis).plot(x, y, **look)
                handles.setdefault(metric, line)
        if place == 1:  # the scores, where there are any
            found = {(n, m): spans for n, rows in runs.items() for m, spans in health(rows).items()}
            for i, ((name, metric), spans) in enumerate(found.items()):
                label = f"{metric} ({name})" if len(runs) > 1 else metric
                look = {"transform": axis.get_xaxis_transform(), "color": f"C{(i + 3) % 10}", "alpha": 0.25, "linewidth": 0.5}
                handles[label] = axis.broken_barh(spans, (0, 1), label=label, zorder=0, **look)
        for each in (axis, right) if right else (axis,):
            each.tick_params(labelsize=7)
            each.ticklabel_format(axis="y", useOffset=False)
        axis.grid(alpha=0.2)
        (right or axis).legend(handles.values(), handles, fontsize=6, framealpha=0.6)
    if len(runs) > 1:
        lines = [Line2D([], [], color=f"C{i}") for i in range(len(runs))]
        picture.legend(lines, list(runs), loc="outside upper center", ncols=min(3, len(runs)), fontsize=8, frameon=False)
    else:
        picture.suptitle(*runs, fontsize=10)
    return picture


def main(args: Args):
    if not args.runs:
        fail("name a run's folder, runs/<name>")
    names = [Path(folder).resolve().name for folder in args.runs]
    names = names if len(set(names)) == len(names) else args.runs
    runs = {name: read(folder) for name, folder in zip(names, args.runs, strict=True)}
    if not any(map(panels, runs.values())):
        fail(f"{args.runs[0]}: none of its metrics is drawn")
    output = args.output or Path(args.runs[0]) / "curves.png"
    try:
        figure(runs).savefig(output, dpi=90)
    except (OSError, ValueError) as e:
        fail(f"{output}: {e}")
    print(output)


if __name__ == "__main__":
    main(tyro.cli(Args))
