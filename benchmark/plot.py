"""
Curves: of runs as they are, of experiments over seeds, and whether two versions of the code learn alike.

    python benchmark/plot.py runs/<name> [runs/<other> ...]   one run's curves, or several over each other,
                                                              in a picture beside their folders
    python benchmark/plot.py curves STUDY --exp rloo ppo      runs in benchmark/results/STUDY: interquartile means
                                                              over seeds with bootstrap intervals, and a table
    python benchmark/plot.py compare A B                      a verdict; exit code 1 where they differ
    python benchmark/plot.py same A B                         in how many updates the same runs agree

A and B are studies, or the runs of one commit in a study: grpo@cc51011.

All need the extra "benchmark".
"""

import json
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

try:
    import matplotlib
    import numpy as np
    import tyro
    from intervals import ROOT, bootstrap, by_commit, experiments, fullest, iqm, last, mean_interval
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ModuleNotFoundError as e:
    print(f'error: {e.name} is missing: pip install -c constraints.txt -e ".[benchmark]"', file=sys.stderr)
    raise SystemExit(2) from None

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
METRICS = "objective/scores", "objective/gold", "objective/kl"  # of several seeds


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """folders runs/<name>"""
    output: str | None = None
    """the picture; None: curves.png in the run's folder, and of several runs beside the first one's folder"""


def fail(message):
    """One clear line, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def read(folder):
    """Rows of a run's metrics.jsonl; a torn last line, of a run that goes on or was killed, is left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        fail(f"{path}: no such file")
    *lines, last_line = path.read_text(encoding="utf-8", errors="replace").splitlines() or fail(f"{path}: no rows")
    rows = list(map(json.loads, lines))
    with suppress(ValueError):
        rows.append(json.loads(last_line))
    return rows


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


def kind_of(metric):
    """What a metric of training and its like of the evaluation have in common: a colour."""
    return metric.removeprefix("eval/").removeprefix("train/")


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
        kinds = list(dict.fromkeys(kind_of(metric) for drawn in shown.values() for metric in drawn.get(title, {})))
        for i, drawn in enumerate(shown.values()):
            for metric, (x, y) in drawn.get(title, {}).items():
                kind = kinds.index(kind_of(metric))
                look = {"color": f"C{i if len(runs) > 1 else kind}", "linewidth": 1, "label": metric}
                marks = {
                    "linestyle": "",
                    "marker": "o",
                    "markersize": 4,
                    "markeredgecolor": "black",
                    "markeredgewidth": 0.5,
                }
                look |= marks if metric.startswith("eval/") else {"linestyle": STYLES[kind % 4 if len(runs) > 1 else 0]}
                (line,) = (right if metric == RIGHT else axis).plot(x, y, **look)
                handles.setdefault(metric, line)
        if place == 1:  # the scores, where there are any
            found = {(n, m): spans for n, rows in runs.items() for m, spans in health(rows).items()}
            for i, ((name, metric), spans) in enumerate(found.items()):
                label = f"{metric} ({name})" if len(runs) > 1 else metric
                look = {
                    "transform": axis.get_xaxis_transform(),
                    "color": f"C{(i + 3) % 10}",
                    "alpha": 0.25,
                    "linewidth": 0.5,
                }
                handles[label] = axis.broken_barh(spans, (0, 1), label=label, zorder=0, **look)
        for each in (axis, right) if right else (axis,):
            each.tick_params(labelsize=7)
            each.ticklabel_format(axis="y", useOffset=False)
        axis.grid(alpha=0.2)
        (right or axis).legend(handles.values(), handles, fontsize=6, framealpha=0.6)
    if len(runs) > 1:
        lines = [Line2D([], [], color=f"C{i}") for i in range(len(runs))]
        picture.legend(
            lines, list(runs), loc="outside upper center", ncols=min(3, len(runs)), fontsize=8, frameon=False
        )
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
    first = Path(args.runs[0])
    output = args.output or (first.parent if len(args.runs) > 1 else first) / "curves.png"
    figure(runs).savefig(output, dpi=90)
    print(output)


# ---- experiments over seeds ------------------------------------------------------------------------------------------
def blank(rows, columns, sharey=False, **look):
    """A figure and its axes. The studies draw theirs with this and the three functions below."""
    picture = Figure(**look)
    FigureCanvasAgg(picture)
    return picture, picture.subplots(rows, columns, sharey=sharey)


def band(axis, x, heights, label=None, alpha=0.2, **look):
    """The interquartile mean of heights [rows, seeds], and its bootstrap interval."""
    axis.plot(x, iqm(heights), label=label, **look)
    axis.fill_between(x, *bootstrap(heights), color=look["color"], alpha=alpha, linewidth=0)


def frame(axis, title, xlabel):
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(xlabel, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.2)


def save(picture, output, salt, text="path"):
    """The same data give the same bytes. text: "none" leaves letters as text, and does not draw them."""
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": text}):
        picture.savefig(ROOT / output, metadata={"Date": None})


@dataclass
class CurvesArgs:
    tag: tyro.conf.Positional[str]
    """folder under benchmark/results/, or a path; with @COMMIT, the runs of that commit"""
    exp: tuple[str, ...] = ()
    """experiments; none: all in the folder"""
    metrics: tuple[str, ...] = METRICS
    """metrics, a panel each"""
    x: str = "update"
    """the column of the horizontal axis"""
    output: str = "static/curves.svg"
    """the figure, an .svg; the table stands beside it, with the ending .md"""


@dataclass
class CompareArgs:
    a: tyro.conf.Positional[str]
    """folder under benchmark/results/, or a path, perhaps with @COMMIT: what is known"""
    b: tyro.conf.Positional[str]
    """folder of what is compared with it"""
    exp: tuple[str, ...] = ()
    """experiments; none: all that both folders have"""
    metrics: tuple[str, ...] = METRICS
    """metrics"""
    margin: float = 0.25
    """different: how far from zero the whole interval must lie, in standard deviations of A's seeds"""
    same: float = 1.0
    """no difference: within what the whole interval must lie, in the same unit"""


@dataclass
class SameArgs:
    a: tyro.conf.Positional[str]
    """folder under benchmark/results/, or a path, perhaps with @COMMIT: what is known"""
    b: tyro.conf.Positional[str]
    """folder of the same runs by other scripts, from the same seeds on the same processor"""
    exp: tuple[str, ...] = ()
    """experiments; none: all that both folders have"""


def found_in(place, exp):
    """{run: {seed: {column: array}}} of STUDY or STUDY@COMMIT, a folder under benchmark/results/ or a path. Of the
    experiments in `exp`, none: of all, it says which commit it takes where there are several.
    """
    study, _, commit = place.partition("@")
    folders = [path for path in (ROOT / "benchmark" / "results" / study, Path(study)) if path.is_dir()]
    if not folders:
        fail(f"{study}: no folder of that name under benchmark/results/")
    taken = {}
    for run, commits in by_commit(folders[0]).items():
        if not commit and len(commits) > 1 and run in (exp or [run]):
            taken.setdefault(fullest(commits), []).append(run)
    for one, runs in taken.items():
        print(f"{study}: takes {one} of several commits for {' '.join(runs)}; {study}@COMMIT takes another")
    return experiments(folders[0], commit or None)


def seeds_of(found, exp, place):
    return found[exp] if exp in found else fail(f"{place} has no run of {exp}")


def final(seed, metric):
    """What a run reached: the last held-out figure if there is one, else the mean of its last tenth of updates."""
    held_out = seed.get(f"eval/{metric}")
    if held_out is not None and not np.isnan(held_out).all():
        return last(held_out)
    column = seed[metric][~np.isnan(seed[metric])]
    return column[-math.ceil(len(column) / 10) :].mean() if len(column) else math.nan


def area(seed, metric):
    """The area under a curve, as its mean height."""
    column = seed[metric][~np.isnan(seed[metric])]
    return column.mean() if len(column) else math.nan


def curves(args: CurvesArgs):
    """Writes the figure and the table."""
    every = found_in(args.tag, args.exp)
    found = {exp: seeds_of(every, exp, args.tag) for exp in args.exp or every}
    picture, axes = blank(1, len(args.metrics), figsize=(3.4 * len(args.metrics), 2.8), layout="constrained")
    lines = ["| experiment | seeds | metric | at the end | area under the curve |", "|---|---:|---|---:|---:|"]
    for axis, metric in zip(np.atleast_1d(axes), args.metrics, strict=True):
        for colour, (exp, seeds) in enumerate(found.items()):
            if not all(metric in seed for seed in seeds.values()):
                continue
            length = min(len(seed[metric]) for seed in seeds.values())
            first = next(iter(seeds.values()))
            heights = np.array([seed[metric][:length] for seed in seeds.values()]).T  # [rows, seeds]
            rows = ~np.isnan(heights).any(1)
            x = first[args.x][:length][rows]
            band(axis, x, heights[rows], exp, color=f"C{colour}", linewidth=1.4)
            cells = []
            for measure in (final, area):
                numbers = np.array([measure(seed, metric) for seed in seeds.values()])
                low, high = bootstrap(numbers)
                cells.append(f"{iqm(numbers):.3f} ({low:.3f} .. {high:.3f})")
            lines.append(f"| {exp} | {len(seeds)} | {metric} | {' | '.join(cells)} |")
        frame(axis, metric, args.x)
        axis.legend(frameon=False, fontsize=7)
    save(picture, Path(args.output).resolve(), "curves")
    head = f"{Path(args.output).name}: `{args.tag}`, interquartile mean over seeds (percentile bootstrap interval)\n\n"
    Path(args.output).with_suffix(".md").write_text(head + "\n".join(lines) + "\n")
    print("\n".join(lines))


def compare(args: CompareArgs):
    """Prints a line for each experiment, metric and measure; returns 1 where one of them differs, else 0.

    Seeds that both have are compared in pairs, since a seed is the same prompts and noise. Intervals hold together with
    95 % (Bonferroni). "different": one lies beyond the margin; "no difference": it lies within `same`; else
    "undecided", which more seeds would settle.
    """
    a, b = found_in(args.a, args.exp), found_in(args.b, args.exp)
    names = args.exp or a or fail(f"{args.a}: no experiments")
    level, verdicts = 1 - 0.05 / (2 * len(args.metrics) * len(names)), {}
    print(
        f"{args.b} less {args.a}; different beyond {args.margin:g}, the same within {args.same:g} "
        "of A's deviation over seeds"
    )
    for exp in names:
        of_a, of_b = seeds_of(a, exp, args.a), seeds_of(b, exp, args.b)
        common = sorted(of_a.keys() & of_b.keys())
        if len(common) < 2:
            fail(f"{exp}: an interval needs two seeds or more that both have")
        if lost := sorted(of_a.keys() - of_b.keys()):
            print(f"{exp}: {args.b} has no seed {', '.join(map(str, lost))}")
        for metric in (metric for metric in args.metrics if all(metric in seed for seed in of_a.values())):
            if not all(metric in of_b[n] for n in common):
                fail(f"{exp}: {args.b} has no {metric}")
            for name, measure in (("final", final), ("area", area)):
                x, y = (np.array([measure(seeds[n], metric) for n in common]) for seeds in (of_a, of_b))
                if not np.isfinite([*x, *y]).all():
                    fail(f"{exp}: {metric} is not finite")
                difference, low, high, _ = mean_interval(y - x, level)
                deviation = x.std(ddof=1)
                is_different = low > args.margin * deviation or high < -args.margin * deviation
                is_same = -args.same * deviation <= low and high <= args.same * deviation
                verdict = "DIFFERENT" if is_different else "no difference" if is_same else "undecided"
                verdicts.setdefault(verdict, []).append(f"{exp} {metric} {name}")
                numbers = f"{x.mean():9.4f}, deviation {deviation:.4f}; {difference:+.4f} ({low:+.4f} .. {high:+.4f})"
                print(f"{exp:16} {metric:17} {name:5}  {numbers}, {len(common)} pairs  {verdict}")
    if not verdicts:
        fail(f"none of {', '.join(args.metrics)} is there")
    worst = next(verdict for verdict in ("DIFFERENT", "undecided", "no difference") if verdict in verdicts)
    print("no difference" if worst == "no difference" else f"{worst.lower()}: {', '.join(verdicts[worst])}")
    return int(worst == "DIFFERENT")


def agreeing(a, b):
    """How many updates two runs agree in before the first that differs in one of METRICS, and how many both have.

    Rounding is no difference: 1e-3 relative, and 5e-5, as much as the KL of a first update may be, which is 0. It may
    turn a sampled token, and from that update on a run is another one.
    """
    length = min(len(a["update"]), len(b["update"]))
    differs = np.zeros(length, dtype=bool)
    for metric in (metric for metric in METRICS if metric in a and metric in b):
        x, y = a[metric][:length], b[metric][:length]
        differs |= ~np.isclose(y, x, rtol=1e-3, atol=5e-5, equal_nan=True)
    differs = differs[a["update"][:length] > 0]
    return int(differs.argmax()) if differs.any() else len(differs), len(differs)


def same(args: SameArgs):
    """Prints a line for each seed of each experiment."""
    a, b = found_in(args.a, args.exp), found_in(args.b, args.exp)
    for exp in args.exp or sorted(a.keys() & b.keys()):
        of_a, of_b = seeds_of(a, exp, args.a), seeds_of(b, exp, args.b)
        for seed in sorted(of_a.keys() & of_b.keys()):
            print(f"{exp}, seed {seed}: {' of '.join(map(str, agreeing(of_a[seed], of_b[seed])))} updates agree")


COMMANDS = {"curves": (CurvesArgs, curves), "compare": (CompareArgs, compare), "same": (SameArgs, same)}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        arguments, function = COMMANDS[sys.argv[1]]
        sys.exit(function(tyro.cli(arguments, args=sys.argv[2:], prog=f"plot.py {sys.argv[1]}")))
    main(tyro.cli(Args, description=__doc__))
