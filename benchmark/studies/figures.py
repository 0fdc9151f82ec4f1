"""The figures of studies, by kind: each function takes a study and what a [[figure]] of its file says, and saves it."""

import numpy as np
from intervals import ROOT, iqm
from plot import band as iqm_band
from plot import blank, figure, frame, read, save
from tables import MEASURES, VERDICTS, effects, interval, number, pairs_of, seeds_of, verdicts
from tables_own import curves

LEXICON = "last eval/objective/rewards/lexicon"


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


def symptom(study, said):
    """A metric of a healthy run and of a broken one, of the first seed."""
    picture, axis = blank(1, 1, figsize=(3.6, 2.1), layout="constrained")
    for name, colour, label in zip(said["runs"], ("#888888", "#c4261b"), ("healthy", "broken"), strict=True):
        columns = min(seeds_of(study, name).items())[1]
        shown = columns["update"] > 0
        axis.plot(columns["update"][shown], columns[said["column"]][shown], color=colour, label=label)
    frame(axis, said["title"], "update")
    axis.legend(frameon=False, fontsize=7)
    save(picture, f"static/symptom_{said['name']}.svg", said["name"], text="none")


def smollm(study, said):
    """Four panels: each batch's score, a longer run, a detail off, and the learned score beside its judge."""
    picture, axes = blank(2, 2, figsize=(8.4, 6.8))
    verified, long, details, learned = np.ravel(axes)
    named = {
        "grpo": ("GRPO", "#c4501b"),
        "rloo": ("RLOO", "#3465a4"),
        "grpo_lora": ("GRPO, LoRA of rank 16", "#4e9a06"),
    }
    for name, (label, colour) in named.items():
        for place, seed in enumerate(seeds_of(study, name).values()):
            look = dict(color=colour, linewidth=1, alpha=0.8, label=None if place else label)
            verified.plot(seed["update"], seed["objective/scores"], **look)
    frame(verified, "verified: score of the batch", "update")
    for kind, colour, label in (("rewards/obeys", "#c4501b", "right answers"), ("ended", "#3465a4", "ended")):
        for place, seed in enumerate(seeds_of(study, "grpo_long").values()):
            y = seed[f"eval/objective/{kind}"]
            look = dict(marker=".", color=colour, label=None if place else label)
            long.plot(seed["update"][~np.isnan(y)], y[~np.isnan(y)], **look)
    frame(long, "GRPO, 40 updates: held-out shares", "update")
    off = [name for name, spec in study.runs.items() if spec.get("base") == "base"]
    for place, name in enumerate(off):
        pairs, _ = pairs_of(study, name, "base")
        x = [number(a, LEXICON) - number(b, LEXICON) for _, a, b in pairs]
        details.plot(x, [place] * len(x), "o", color="#3465a4", markersize=5)
    details.axvline(0, color="grey", linewidth=0.8)
    details.set_yticks(range(len(off)), [name.replace("_", " ") for name in off])
    details.invert_yaxis()
    frame(details, "a detail off: lexicon at the end, less the base", "each seed")
    for name, algorithm, colour in (("rloo_learned", "RLOO", "#3465a4"), ("ppo_learned", "PPO", "#75507b")):
        for place, seed in enumerate(seeds_of(study, name).values()):
            kept = ~np.isnan(seed["eval/objective/kl"])
            for kind, style, label in (("reward_model", "o-", "learned score"), ("lexicon", "x--", "lexicon")):
                y, label = seed[f"eval/objective/rewards/{kind}"][kept], None if place else f"{algorithm}: {label}"
                learned.plot(seed["eval/objective/kl"][kept], y, style, markersize=4, color=colour, label=label)
    frame(learned, "learned: held-out score and its judge", "KL, nats a response")
    for axis in (verified, long, learned):
        axis.legend(frameon=False, fontsize=7, handlelength=4 if axis is learned else None)
    picture.tight_layout()
    save(picture, f"static/{study.name}.svg", study.name)


def over_kl(study, said):
    """Gold (solid) and the learned score (dashed) over the root of the KL, and those of the best of n."""
    best = [
        np.array([x[f"objective/{c}"] for x in seeds_of(study, said["best"]).values()])
        for c in ("kl", "gold", "scores")
    ]
    picture, axes = blank(1, len(said["panel"]), figsize=(10, 3.6), sharey=True, layout="constrained")
    for axis, panel in zip(axes, said["panel"], strict=True):
        for place, (name, label) in enumerate(panel["runs"]):
            columns = curves(study, name)
            x = np.sqrt(np.maximum(iqm(columns["kl"]), 0))
            for column, style in (("gold", "-"), ("scores", "--")):
                look = dict(linestyle=style, color=f"C{place}", linewidth=1.4, alpha=0.15)
                iqm_band(axis, x, columns[column], label if column == "gold" else None, **look)
        for column, style, label in ((best[1], "-", "best of n"), (best[2], "--", None)):
            axis.plot(np.sqrt(best[0][0]), column.mean(0), style, color="black", linewidth=1, label=label)
        frame(axis, panel["title"], "square root of the KL, nats a response")
        axis.legend(frameon=False, fontsize=7, loc="lower left")
    axes[0].set_ylabel("points:  gold (solid),  learned score (dashed)", fontsize=8)
    axes[0].set_ylim(-8, None)
    save(picture, f"static/{study.name}.svg", study.name)


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


KINDS = {kind.__name__: kind for kind in (points, band, errorbars, forest, symptom, smollm, over_kl, toy, run)}
