"""The figures of studies, by kind: each function takes a study and what a [[figure]] of its file says, and saves it."""

import numpy as np
from plot import band as iqm_band
from plot import blank, frame, save
from tables import MEASURES, interval, number, pairs_of, seeds_of


def points(study, said):
    """A measure over another: a small point for each seed, a large one for their mean; and the line of best-of-n."""
    picture, axis = blank(1, 1, figsize=said["size"])
    for name, label, colour, mark in said["points"]:
        seeds = seeds_of(study, name).values()
        x, y = (np.array([number(columns, said[way]) for columns in seeds]) for way in "xy")
        axis.plot(x, y, mark, color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
        axis.plot(x.mean(), y.mean(), mark, color=colour, markersize=8, label=label)
    name, label = said["line"]
    seeds = seeds_of(study, name).values()
    x, y = (np.mean([columns[said[way].split()[1].removeprefix("eval/")] for columns in seeds], 0) for way in "xy")
    axis.plot(x, y, "-", color="grey", linewidth=1.2, label=label)
    frame(axis, said["title"], said["xlabel"])
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    picture.tight_layout()
    save(picture, f"static/{study.name}.svg", study.name)


def band(study, said):
    """Columns over the episodes: interquartile means over seeds and their bootstrap intervals, a panel each."""
    picture, axes = blank(1, len(said["panel"]), figsize=said["size"], layout=said.get("layout"))
    for axis, panel in zip(axes, said["panel"], strict=True):
        for name, label, colour in panel["runs"]:
            seeds = list(seeds_of(study, name).values())
            heights = np.stack([columns[panel["column"]] for columns in seeds], 1)  # [rows, seeds]
            kept = ~np.isnan(heights).any(1)
            x = seeds[0]["episode"][kept] / said.get("per", 1)
            iqm_band(axis, x, heights[kept], label, color=colour, linewidth=said["linewidth"])
        for name, label, colour in panel.get("ends", []):  # of policies without a course
            end = np.mean(
                [number(columns, f"last eval/{panel['column']}") for columns in seeds_of(study, name).values()]
            )
            axis.axhline(end, color=colour, linestyle="--", linewidth=1.2, label=label)
        frame(axis, panel["title"], said["xlabel"])
    axes[0].legend(frameon=False, **said["legend"])
    if "layout" not in said:
        picture.tight_layout()
    save(picture, f"static/{study.name}.svg", study.name)


def errorbars(study, said):
    """Gold at the end, less the base's: means and intervals over kinds of a run, a panel for each base."""
    picture, axes = blank(1, len(said["panels"]), figsize=said["size"], sharey=True)
    for axis, (title, name) in zip(axes, said["panels"], strict=True):
        for place, (how, label, colour) in enumerate(said["series"]):
            runs = [name.format(value, how) for value in said["values"]]
            pairs = [pairs_of(study, run, study.runs[run]["base"])[0] for run in runs]
            mean, low, high = np.array([interval(x, MEASURES["gold"])[:3] for x in pairs]).T
            x = np.arange(len(runs)) + 0.2 * (place - 1)
            axis.errorbar(x, mean, (mean - low, high - mean), fmt="o", markersize=4, color=colour, label=label)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(said["labels"])), said["labels"])
        frame(axis, title, said["xlabel"])
    axes[0].legend(frameon=False, fontsize=7, loc="lower left")
    picture.tight_layout()
    save(picture, f"static/{study.name}.svg", study.name)


KINDS = {kind.__name__: kind for kind in (points, band, errorbars)}
