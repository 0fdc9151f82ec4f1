"""The tables that one study alone has, by kind, as in tables.py."""

import numpy as np
from intervals import mean_interval, words
from mutations import DETAILS
from tables import (
    KINDS,
    MEASURES,
    VERDICTS,
    apart,
    count_up,
    effects,
    grid,
    interval,
    named,
    number,
    seeds_of,
    signed,
    spread,
    tested,
    verdicts,
)


# ---- ablations -------------------------------------------------------------------------------------------------------
def tally(study, said):
    """How many runs and details have each verdict, and how many "perhaps" chance alone makes.

    Where nothing has an effect, one in twenty of the 95 % intervals excludes 0. So many rows can have one in the mean,
    or fewer where a row has several. Rows that matter, or in which nothing changes, are none of them.
    """
    found = effects(study)[0]
    verdict, _ = verdicts(study, found)
    best = {}  # the verdict on a detail is that of its run which shows most
    for name in verdict:
        for tag in study.runs[name].get("tags", "").split():
            best[tag] = min(best.get(tag, VERDICTS[-1]), verdict[name], key=VERDICTS.index)
    open_ones = [name for name in verdict if verdict[name] in ("perhaps", "does not show here")]
    figures = sum(len(tested(study, name, found[name])) for name in open_ones)
    counts = [[v, *(list(of.values()).count(v) for of in (verdict, best)), ""] for v in VERDICTS]
    counts[VERDICTS.index("perhaps")][-1] = f"{figures / 20:.0f} or fewer, of {figures} figures"
    counts += [["all", len(verdict), len(best), ""]]
    return grid(["verdict", "variants", "details", "variants, by chance alone"], counts, 3)


def longer(study, said):
    """What runs do in the study `longer`, beside what they do in this one, and where the two intervals do not overlap
    ("apart"). Each side has a correction of its own.
    """
    found, long = effects(study)[0], effects(type(study)(said["longer"]))[0]
    (verdict, _), (of_long, sure) = verdicts(study, found), verdicts(study, long)
    made = []
    for name in (name for name in found if name in long):
        figures = []
        for m in ("gold", "kl"):
            mark = "**" * ((name, m) in sure)
            figures += [signed(found[name][m]), f"{mark}{signed(long[name][m])}{mark}"]
        spec, ends = study.runs[name], (verdict[name], of_long[name], ", ".join(apart(found[name], long[name])))
        head = ", ".join(spec.get("tags", "").split()), named(study, name), spec["base"], count_up(long[name])
        made.append([*head, *figures, *ends])
    head = ["details", "what is changed", "base", "long: gold, KL up", "gold at the end", "long", "KL", "long"]
    lines = grid([*head, "verdict", "long", "apart"], made)
    return [lines[0], "|---|---|---|---:|---:|---:|---:|---:|---|---|---|", *lines[2:]]


def unpriced(study, said):
    """The details that no run measures, and why."""
    tags = {}
    for tag in DETAILS:
        tags.setdefault(DETAILS[tag].get("unpriced"), []).append(tag)
    return grid(["details", "why"], [[", ".join(tags[why]), why] for why in tags if why])


def by_seed(study, said):
    """Every seed's gold and KL at the end: the bases' own, and the runs' differences."""
    found, bases = effects(study)
    bases = {effect["base"]: bases[effect["base"]] for effect in found.values()}  # in the order of the runs
    numbers = sorted({n for effect in found.values() for n in effect["seeds"]})
    each = [(", ".join(base), effect, ".2f") for base, effect in bases.items()]
    each += [(f"{study.runs[x]['what']} [{', '.join(effect['base'])}]", effect, "+.2f") for x, effect in found.items()]
    made = []
    for name, effect, form in each:
        seeds = [effect["seeds"].get(n) for n in numbers]
        made.append([name, *(f"{x['gold']:{form}}, {x['kl']:{form}}" if x else "" for x in seeds)])
    return grid(["", *(f"seed {n}" for n in numbers)], made, len(numbers))


# ---- other tables of their own ---------------------------------------------------------------------------------------
def smooth(x, width):
    """Running mean over the last axis."""
    return np.apply_along_axis(lambda row: np.convolve(row, np.ones(width) / width, mode="valid"), -1, x)


def curves(study, name, width=5):
    """{"gold", "scores", "kl": [updates, seeds]} of a run's training batches, smoothed."""
    seeds = seeds_of(study, name).values()
    columns = {c: np.array([seed[f"objective/{c}"] for seed in seeds]) for c in ("gold", "scores", "kl")}
    of_updates = ~np.isnan(columns["gold"]).any(0)  # and not of the evaluation before them
    return {c: smooth(x[:, of_updates], width).T for c, x in columns.items()}


def fall(gold, scores):
    """What became of gold after its peak: (row of the peak of the mean over seeds, two intervals (mean, low, high, p)
    over seeds: of the gold lost since, and of the learned score gained since; and the gold lost, [seeds]).

    A seed's peak is that of the mean over the others, so that no seed chooses where its own noise was high.
    """
    seeds = np.arange(gold.shape[1])
    peaks = np.array([gold[:, seeds != seed].mean(1).argmax() for seed in seeds])
    lost, gained = gold[peaks, seeds] - gold[-1], scores[-1] - scores[peaks, seeds]
    return int(gold.mean(1).argmax()), mean_interval(lost), mean_interval(gained), lost


def falls(study, said):
    """What gold lost from its peak on, and what the learned score gained meanwhile."""
    made = []
    for label, name in said["rows"]:
        columns, seeds = curves(study, name), [(n, x, None) for n, x in seeds_of(study, name).items()]
        peak, lost, gained, losses = fall(columns["gold"], columns["scores"])
        kl, end = columns["kl"].mean(1), interval(seeds, "last eval/objective/kl")[0]
        row = [label, len(seeds), f"{columns['gold'][peak].mean():.2f}", words(mean_interval(columns["gold"][-1]))]
        row += [words(lost), f"{min(losses):.1f} .. {max(losses):.1f}", words(gained), f"{kl[peak]:.1f}, {kl[-1]:.1f}"]
        made.append([*row, f"{words(interval(seeds, MEASURES['gold']))}, {end:.1f}"])
    head = ["policy", "seeds", "gold at its peak", "at the end", "lost since", "least .. most"]
    head += ["learned score gained since", "KL at the peak, end", "held-out gold and KL at the end"]
    return grid(head, made, 8)


def fit_law(d, gain):
    """(alpha, beta, share of the variance explained) of gain = d (alpha - beta log d) by least squares.

    Source: arXiv 2210.10760, the law of RL; d, the root of the KL, and gain, the gold since the start, are [updates].
    """
    x = np.stack([d, -d * np.log(d)], 1)
    (alpha, beta), *_ = np.linalg.lstsq(x, gain)
    return alpha, beta, 1 - np.var(gain - x @ (alpha, beta)) / np.var(gain)


def law(study, said):
    """How well gold = start + d (alpha - beta log d), d = sqrt(KL), fits the mean curves, whole and first halves; the
    peak that a fit tells is at d = exp(alpha / beta - 1), with a gain of beta d.
    """
    made = []
    for label, name in said["rows"]:
        columns = {c: x.mean(1) for c, x in curves(study, name).items()}
        start = np.mean([number(x, "first eval/objective/gold") for x in seeds_of(study, name).values()])
        d, gain = np.sqrt(np.maximum(columns["kl"], 1e-6)), columns["gold"] - start
        peak, row = gain.argmax(), [label]
        for part in (slice(None), slice(len(d) // 2)):
            alpha, beta, share = fit_law(d[part], gain[part])
            top = np.exp(alpha / beta - 1) if beta > 0 else np.inf
            told = f"{start + beta * top:.2f} at {top:.1f}" if top < 2 * d.max() else "none in reach"
            row += [f"{alpha:.2f}, {beta:.2f}", f"{share:.2f}", told]
        ends = f"{start + d[-1] * (alpha - beta * np.log(d[-1])):.2f}, {start + gain[-1]:.2f}"
        made.append([*row, f"{start + gain[peak]:.2f} at {d[peak]:.1f}", ends])
    head = ["policy", "alpha, beta", "R2", "peak told: gold at d", "first half: alpha, beta", "R2", "peak told"]
    return grid([*head, "peak seen", "end told by the first half, and seen"], made, 8)


def best_of_n(study, said):
    """Gold and learned score of the best of n."""
    seeds = list(seeds_of(study, said["run"]).values())
    made = []
    for i, n in enumerate(seeds[0]["update"]):
        gold, scores = (words(mean_interval([x[f"objective/{c}"][i] for x in seeds])) for c in ("gold", "scores"))
        made.append([int(n), f"{seeds[0]['objective/kl'][i]:.2f}", gold, scores])
    return grid(["best of n", "KL", "gold", "learned score"], made, 4)


def toy(study, said):
    """The embedded task: a column a run, mean (lowest .. highest)."""
    labels = ["gold of the SFT policy", "its standard deviation", "gold at the end", "rise in SFT standard deviations"]
    labels += ["fall from the peak, in SFT standard deviations", "learned score at the end minus at gold's peak"]
    labels += ["KL, nats a response", "share of responses that parse", "the SFT policy's"]
    measures = "first eval/objective/gold", "first eval/objective/gold_std", "last eval/objective/gold"
    measures += "last eval/objective/kl", "last eval/objective/parses", "first eval/objective/parses"

    def figures(columns):
        batches = (columns[f"objective/{name}"] for name in ("gold", "scores"))
        gold, scores = (smooth(x[~np.isnan(x)], 10) for x in batches)
        peak, (before, sd, after, *rest) = gold.argmax(), (number(columns, x) for x in measures)
        rise, fallen = (after - before) / sd, (gold[peak] - gold[-1]) / sd
        return [before, sd, after, rise, fallen, scores[-1] - scores[peak], *rest]

    head, made = [""], []
    for name, label in said["runs"]:
        seeds = seeds_of(study, name).values()
        head.append(f"{label}, {max(x['update'].max() for x in seeds):.0f} updates")
        made.append([spread(x) for x in zip(*map(figures, seeds), strict=True)])
    return grid(head, zip(labels, *made, strict=True), len(made))


KINDS |= {kind.__name__: kind for kind in (tally, longer, unpriced, by_seed, falls, law, best_of_n, toy)}
