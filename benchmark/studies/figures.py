"""
The figures of studies, by kind: each function takes a study and what a [[figure]] of its file says, and saves it.

A figure of the kind "panels" has a panel for each [[figure.panel]], which a function of PANELS draws: that of its kind,
or of the figure's key `panels`. What a panel does not say itself, the figure says for all.
"""

import numpy as np
from intervals import ROOT, iqm
from plot import band as iqm_band
from plot import blank, figure, frame, read, save
from tables import MEASURES, VERDICTS, effects, interval, number, pairs_of, seeds_of, verdicts
from tables_own import curves


# ---- panels ----------------------------------------------------------------------------------------------------------
def lines(study, axis, said):
    """Columns of every seed over another column, where both are numbers: [run, column, label, colour, style]."""
    for name, column, label, colour, style in said["lines"]:
        for place, seed in enumerate(seeds_of(study, name).values()):
            x, y = seed[said["x"]], seed[column]
            kept = ~np.isnan(x) & ~np.isnan(y)
            look = {"color": colour, "label": None if place else label} | said.get("look", {})
            axis.plot(x[kept], y[kept], style, **look)


def dots(study, axis, said):
    """What a measure of each run is, less the base's: a row a run, a dot a seed."""
    for place, name in enumerate(said["runs"]):
        pairs, _ = pairs_of(study, name, study.runs[name]["base"])
        x = [number(a, said["measure"]) - number(b, said["measure"]) for _, a, b in pairs]
        axis.plot(x, [place] * len(x), "o", color="#3465a4", markersize=5)
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(said["runs"])), [name.replace("_", " ") for name in said["runs"]])
    axis.invert_yaxis()


def points(study, axis, said):
    """A measure over another: a small point for each seed, a large one for their mean; and the line of best-of-n."""
    for name, label, colour, mark in said["points"]:
        seeds = seeds_of(study, name).values()
        x, y = (np.array([number(columns, said[way]) for columns in seeds]) for way in "xy")
        axis.plot(x, y, mark, color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
        axis.plot(x.mean(), y.mean(), mark, color=colour, markersize=8, label=label)
    name, label = said["line"]
    seeds = seeds_of(study, name).values()
    x, y = (np.mean([columns[said[way].split()[1].removeprefix("eval/")] for columns in seeds], 0) for way in "xy")
    axis.plot(x, y, "-", color="grey", linewidth=1.2, label=label)


def band(study, axis, said):
    """A column over the episodes: interquartile means over seeds and their bootstrap intervals."""
    for name, label, colour in said["runs"]:
        seeds = list(seeds_of(study, name).values())
        heights = np.stack([columns[said["column"]] for columns in seeds], 1)  # [rows, seeds]
        kept = ~np.isnan(heights).any(1)
        x = seeds[0]["episode"][kept] / said.get("per", 1)
        iqm_band(axis, x, heights[kept], label, color=colour, linewidth=said["linewidth"])
    for name, label, colour in said.get("ends", []):  # of policies without a course
        seeds = seeds_of(study, name).values()
        end = np.mean([number(columns, f"last eval/{said['column']}") for columns in seeds])
        axis.axhline(end, color=colour, linestyle="--", linewidth=1.2, label=label)


def errorbars(study, axis, said):
    """Gold at the end, less the base's: means and intervals over kinds of a run."""
    for place, (how, label, colour) in enumerate(said["series"]):
        runs = [said["run"].format(value, how) for value in said["values"]]
        pairs = [pairs_of(study, run, study.runs[run]["base"])[0] for run in runs]
        mean, low, high = np.array([interval(x, MEASURES["gold"])[:3] for x in pairs]).T
        x = np.arange(len(runs)) + 0.2 * (place - 1)
        axis.errorbar(x, mean, (mean - low, high - mean), fmt="o", markersize=4, color=colour, label=label)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(said["labels"])), said["labels"])


def over_kl(study, axis, said):
    """Gold (solid) and the learned score (dashed) over the root of the KL, and those of the best of n."""
    seeds = seeds_of(study, said["best"]).values()
    best_kl, *best = (np.array([x[f"objective/{c}"] for x in seeds]) for c in ("kl", "gold", "scores"))
    for place, (name, label) in enumerate(said["runs"]):
        columns = curves(study, name)
        x = np.sqrt(np.maximum(iqm(columns["kl"]), 0))
        for column, style in (("gold", "-"), ("scores", "--")):
            look = dict(linestyle=style, color=f"C{place}", linewidth=1.4, alpha=0.15)
            iqm_band(axis, x, columns[column], label if column == "gold" else None, **look)
    for column, style, label in zip(best, ("-", "--"), ("best of n", None), strict=True):
        axis.plot(np.sqrt(best_kl[0]), column.mean(0), style, color="black", linewidth=1, label=label)


PANELS = {kind.__name__: kind for kind in (lines, dots, points, band, errorbars, over_kl)}


# ---- figures ---------------------------------------------------------------------------------------------------------
def panels(study, said, output=None, salt=None, text="path"):
    """A panel for each [[figure.panel]]: `kind`, `title`, `xlabel`, `legend`, and what the kind reads."""
    shape = said.get("grid", [1, len(said["panel"])])
    picture, axes = blank(*shape, sharey="sharey" in said, figsize=said["size"], layout=said.get("layout"))
    axes = np.ravel(axes)
    for axis, own in zip(axes, said["panel"], strict=True):
        panel = said | own
        PANELS[panel["panels"]](study, axis, panel)
        frame(axis, panel["title"], panel["xlabel"])
        if "legend" in own:
            axis.legend(frameon=False, **own["legend"])
    if "ylabel" in said:
        axes[0].set_ylabel(said["ylabel"], fontsize=8)
        axes[0].set_ylim(said["bottom"], None)
    if "layout" not in said:
        picture.tight_layout()
    save(picture, output or f"static/{study.name}.svg", salt or study.name, text)


def symptom(study, said):
    """A metric of a healthy run and of a broken one."""
    colours = {"healthy": "#888888", "broken": "#c4261b"}
    named = zip(said["runs"], colours.items(), strict=True)
    shown = {"lines": [[run, said["column"], label, colour, "-"] for run, (label, colour) in named]}
    shown |= {"title": said["title"], "legend": {"fontsize": 7}}
    look = {"panels": "lines", "x": "update", "xlabel": "update", "size": (3.6, 2.1), "layout": "constrained"}
    panels(study, look | {"panel": [shown]}, f"static/symptom_{said['name']}.svg", said["name"], "none")


def forest(study, said):
    """Effects on gold and KL: a row a run, the worst for gold at the bottom; beyond +-0.5 the scale is logarithmic."""
    found, _ = effects(study)
    verdict, _ = verdicts(study, found)
    names = sorted(found, key=lambda name: found[name]["gold"][0])
    colours = dict(zip(VERDICTS, ("#b22222", "#b8860b", "#808080", "#3465a4"), strict=True))
    picture, axes = blank(1, 2, sharey=True, figsize=(10, 0.17 * len(names) + 1), layout="constrained")
    titles = {"gold": "effect on gold, points", "kl": "effect on the KL, nats a response"}
    for axis, (measure, title) in zip(axes, titles.items(), strict=True):
        for row, name in enumerate(names):
            mean, low, high, _ = found[name][measure]
            axis.plot([low, high], [row, row], color=colours[verdict[name]], linewidth=1.2)
            axis.plot(mean, row, "o", color=colours[verdict[name]], markersize=3)
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set_xscale("symlog", linthresh=0.5)
        ticks = [-10, -3, -1, -0.5, 0, 0.5, 1, 3, 10]
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.minorticks_off()
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=6.5)
        axis.grid(alpha=0.2)
    bases = (study.runs[name]["base"].replace("_", " ") for name in names)
    axes[0].set_yticks(
        range(len(names)), [f"{study.runs[x]['what']} [{base}]" for x, base in zip(names, bases, strict=True)]
    )
    axes[0].set_ylim(-1, len(names))
    for label, colour in colours.items():
        axes[1].plot([], [], color=colour, label=label)
    picture.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=len(colours))
    save(picture, f"static/{study.name}.svg", study.name, text="none")


def toy(study, said):
    """Gold and the learned score over updates, every seed a thin line."""
    picture, axes = blank(1, 2, figsize=(9, 3.2))
    named = (
        ("gold", "#b8860b", "gold: what the human wants"),
        ("scores", "#3465a4", "score: what the reward model says"),
    )
    for axis, (name, title) in zip(axes, said["runs"], strict=True):
        smoothed = curves(study, name, 10)
        for column, colour, label in named:
            for line in smoothed[column].T:
                axis.plot(line, color=colour, linewidth=0.6, alpha=0.5)
            axis.plot(smoothed[column].mean(1), color=colour, linewidth=2, label=label)
        kl = np.mean([np.mean(columns["objective/kl"][-10:]) for columns in seeds_of(study, name).values()])
        axis.set(title=f"{title}: {kl:.0f} nats at the end", xlabel="update")
        axis.grid(alpha=0.2)
    axes[0].set_ylabel("points")
    axes[0].legend(frameon=False, loc="lower right", fontsize=8)
    picture.suptitle(f"RLOO on the embedded task, {len(seeds_of(study, 'rloo'))} seeds", fontsize=10)
    picture.tight_layout()
    save(picture, f"static/{study.name}.svg", study.name)


def run(study, said):
    """The curves of the run in results/toy/rloo_toy, as plot.py draws those of any run."""
    figure({"rloo_toy": read(study.folder / "rloo_toy")}).savefig(ROOT / "static" / "curves.png", dpi=90)


KINDS = {kind.__name__: kind for kind in (panels, symptom, forest, toy, run)}
