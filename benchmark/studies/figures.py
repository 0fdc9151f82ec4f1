"""The figures of studies, by kind: each function takes a study and what a [[figure]] of its file says, and saves it."""

import numpy as np
from plot import blank, frame, save
from tables import number, seeds_of


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


KINDS = {kind.__name__: kind for kind in (points,)}
