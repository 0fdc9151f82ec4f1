"""
The tables of studies, by kind: each function takes a study and what a [[table]] of its file says, and returns lines.

Of several commits that have a run, that with most seeds counts, the first of equals; what a run is compared with is of
the same commit. A measure is a text, "last COLUMN": the last number of a column that is there, or the first, the mean,
the max, or the mean of the later ones, without the first; "last COLUMN / 60" divides it, "later COLUMN + COLUMN" adds,
and so do "last COLUMN + 5", and "last COLUMN + -5 * COLUMN".
"""

import json
from fnmatch import fnmatchcase
from functools import cache

import numpy as np
from intervals import by_commit, holm, mean_interval, words

MEASURES = {
    "gold": "last eval/objective/gold",
    "course": "mean objective/gold",
    "kl": "last eval/objective/kl",
    "ended": "last eval/objective/ended",
}
NAMES = {"gold": "gold", "course": "gold over the run", "kl": "KL", "ended": "share ended"}
VERDICTS = ("matters", "perhaps", "does not show here", "changes nothing")
NUMBER = {"first": lambda x: x[0], "last": lambda x: x[-1], "mean": np.mean, "max": np.max}
NUMBER["later"] = lambda x: x[1:].mean()


def grid(head, rows, numbers=0):
    """Lines of a table. Args: head, rows, cells; numbers, how many columns at the right are numbers."""
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    first, *lines = (f"| {' | '.join(map(str, row))} |" for row in [head, *rows])
    return [first, f"|{'|'.join(rule)}|", *lines]


def cells(text):
    return [cell.strip() for cell in text.split("|")]


def number(columns, measure):
    """What a measure says of a run's columns."""
    how, _, terms = measure.partition(" ")
    terms, _, over = terms.partition(" / ")
    total = 0.0
    for term in terms.split(" + "):
        factor, _, name = term.rpartition(" * ")
        x = columns[name] if name in columns else np.array([float(name)])
        total += float(factor or 1) * NUMBER[how](x[~np.isnan(x)])
    return total / float(over or 1)


# ---- runs ------------------------------------------------------------------------------------------------------------
def seeds_of(study, name, commit=None):
    """{seed: columns} of a run, with what was measured afterwards; name: RUN, RUN@COMMIT, or of a study STUDY:RUN."""
    other, _, name = name.rpartition(":")
    name, _, at = name.partition("@")
    commit, found = commit or at, by_commit(study.folder.with_name(other)) if other else study.found

    def at_best(name):
        commits = found.get(name, {})
        return commits.get(commit, {}) if commit else max(commits.values(), key=len, default={})

    measured = at_best(f"{name}_measured")
    seeds = at_best(name)
    return {n: seeds[n] | measured[n] for n in seeds if n in measured} if measured else seeds


def commits_of(study, name):
    return list(study.found.get(name, {}))


def pairs_of(study, name, base, commit=None):
    """([(columns, the other's columns)] of the seeds that both have, the commit): of the commit with most of them."""
    best, of = [], commit
    for one in [commit] if commit or ":" in name + base or "@" in name + base else commits_of(study, name):
        mine, others = seeds_of(study, name, one), seeds_of(study, base, one)
        found = [(seed, mine[seed], others[seed]) for seed in sorted(mine.keys() & others.keys())]
        best, of = (found, one) if len(found) > len(best) else (best, of)
    return best, of


# ---- rows that the file names ----------------------------------------------------------------------------------------
def rows(study, said):
    """A row is [label, run], a level, or [label, run, base], the difference paired by seed; "first RUN" is the run at
    its start. Labels may hold several cells.

    columns: {head: measure, or {measure, seeds, not_of, cells, form}}; form, form_of_differences; count: "all", "none"
    or "levels" have their seeds counted; cells: "interval", "mean", "largest" (of the seeds), "spread", "risen" (before
    -> after, and the mean rise), "ratio" (of two runs the median ratio and its range), or "pooled" (the median of all
    rows); tested: heads, whose differences are bold where they pass Holm's correction over the table;
    prices: whether they price the details of the runs.
    """
    columns, count, form = said["columns"], said.get("count", "all"), said.get("form", ".2f")
    made, tested = [], [head for head in said.get("tested", []) if head in columns]
    for label, run, *base in said["rows"]:
        start, run = run.startswith("first "), run.removeprefix("first ")
        seeds = {
            n: {c: x[:1] for c, x in found.items()} if start else found for n, found in seeds_of(study, run).items()
        }
        alone = [(seed, found, None) for seed, found in seeds.items()]
        made.append((label, run, pairs_of(study, run, base[0])[0] if base else alone))
    keys = [(i, head) for i, (_, _, pairs) in enumerate(made) for head in tested if not is_level(pairs)]
    adjusted = holm([interval(made[i][2], columns[head])[3] for i, head in keys]) if keys else []
    sure = {key for key, p in zip(keys, adjusted, strict=True) if p < 0.05}
    if said.get("prices"):
        found, _ = effects(study)
        price(study, said, found, *verdicts(study, found))
    lines = []
    for i, (label, run, pairs) in enumerate(made):
        of = form if is_level(pairs) else said.get("form_of_differences", "+.2f")
        found = [] if count == "none" else [len(pairs) if is_level(pairs) or count == "all" else ""]
        for head, measure in columns.items():
            if isinstance(measure, dict) and run in measure.get("not_of", []):
                found.append("not comparable")
                continue
            mark = "**" * ((i, head) in sure)
            found.append(f"{mark}{cell(pairs, measure, of, said.get('cells', 'interval'))}{mark}")
        lines.append([label, *found])
    counts = [] if count == "none" else ["seeds"]
    head = [*cells(said["head"]), *counts, *columns]
    return grid(head, lines, len(columns) + len(counts))


def listed(study, said):
    """A row is [label, form, cell, ...]; a cell is "RUN: MEASURE", the mean and interval over the seeds, or "RUN", how
    many seeds there are, or empty.
    """

    def text(form, cell):
        run, _, measure = cell.partition(": ")
        seeds = seeds_of(study, run)
        return words(mean_interval([number(x, measure) for x in seeds.values()]), form) if measure else len(seeds) or ""

    made = [[label, *(text(form, cell) for cell in found)] for label, form, *found in said["rows"]]
    return grid(said["head"], made, len(said["head"]) - 1)


def is_level(pairs):
    """Whether there is no base."""
    return pairs[0][2] is None


def interval(pairs, measure):
    """(mean, low, high, p) of a measure, of the differences where there is a base; (x, x, x, 1) of a single seed."""
    x = [number(a, measure) - (number(b, measure) if b else 0) for _, a, b in pairs]
    return mean_interval(x) if len(x) > 1 else (*x * 3, 1.0)


def cell(pairs, measure, form, kind):
    """The text of a cell of `rows`."""
    if isinstance(measure, dict):
        pairs = [pair for pair in pairs if pair[0] in measure.get("seeds", [pair[0]])]
        kind, form, measure = measure.get("cells", kind), measure.get("form", form), measure["measure"]
    if kind == "pooled":
        return f"{np.nanmedian(np.concatenate([columns[measure] for _, columns, _ in pairs])):{form}}"
    x, level = np.array([number(columns, measure) for _, columns, _ in pairs]), is_level(pairs)
    if kind == "largest":
        return f"{x.max():{form}}" if level else ""
    if kind == "spread":
        return spread(x)
    if kind == "ratio" and not level:
        ratios = x / [number(other, measure) for _, _, other in pairs]
        return f"times {np.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
    if kind == "risen" and level:
        before = np.array([number(columns, f"first{measure[4:]}") for _, columns, _ in pairs])
        rise = words(mean_interval(x - before)) if len(pairs) > 1 else "one seed"
        return f"{before.mean():.2f} -> {x.mean():.2f}, {rise}"
    found = interval(pairs, measure)
    return f"{found[0]:{form}}" if kind == "mean" else words(found, form)


def course(study, said):
    """A run's held-out means over seeds at each evaluation, and the mean rise over the second half."""
    seeds, made = seeds_of(study, said["run"]), []
    kept = next(iter(seeds.values()))
    for head, measure in said["columns"].items():
        name = measure.split()[1]
        updates = kept["update"][~np.isnan(kept[name])].astype(int)
        y = np.array([columns[name][~np.isnan(columns[name])] for columns in seeds.values()])  # [seeds, evaluations]
        half = len(updates) // 2
        made.append([head, *(f"{x:.2f}" for x in y.mean(0)), words(mean_interval(y[:, -1] - y[:, half]))])
    head = ["held out, at update", *updates, f"from {updates[half]} to {updates[-1]}"]
    return grid(head, made, len(head) - 1)


# ---- what is changed, in the form of the ablations -------------------------------------------------------------------
def outcomes(study, name, commit):
    """{seed: {measure: number}}, of the measures whose column the run has"""
    seeds = seeds_of(study, name, commit)
    return {n: {m: number(x, how) for m, how in MEASURES.items() if how.split()[1] in x} for n, x in seeds.items()}


def differences(study, name, commit):
    """({seed: {measure: variant less base}}, {seed: {measure: base}}) of the runs of one commit."""
    spec = study.runs[name]
    changed, base = (outcomes(study, x, commit) for x in (spec.get("runs", name), spec["base"]))
    common = sorted(changed.keys() & base.keys())
    return {n: {m: changed[n][m] - base[n][m] for m in changed[n]} for n in common}, base


@cache
def effects(study, pattern="*"):
    """What each run with a base changes, and what its base reaches.

    Returns: {name: {"base": (base, commit), "seeds": {seed: {measure: value}}, measure: (mean, low, high, p)}}, of the
    paired differences; and the bases' own in the same form, {(base, commit): ..}.
    """
    found, bases = {}, {}
    for name, spec in study.runs.items():
        if "base" in spec and any(fnmatchcase(name, x) for x in pattern.split()):
            commits = commits_of(study, spec.get("runs", name))
            each = {commit: differences(study, name, commit) for commit in commits}
            each = {commit: pair for commit, pair in each.items() if pair[0]}
            if each:
                commit = max(each, key=lambda commit: len(each[commit][0]))
                base = spec["base"], commit
                for result, key, seeds in ((found, name, each[commit][0]), (bases, base, each[commit][1])):
                    result[key] = {m: mean_interval([x[m] for x in seeds.values()]) for m in next(iter(seeds.values()))}
                    result[key] |= {"base": base, "seeds": seeds}
    order, commits = list(study.runs), list(dict.fromkeys(commit for runs in study.found.values() for commit in runs))
    return found, dict(sorted(bases.items(), key=lambda x: (order.index(x[0][0]), commits.index(x[0][1]))))


def tested(study, name, effect):
    """The figures of a run that count as evidence: not gold over the run where its batches differ by construction."""
    own = "measure" in study.runs[name] or study.runs[name].get("own_batches")
    return [m for m in MEASURES if m in effect and not (m == "course" and own)]


def verdicts(study, found):
    """{run: verdict}: "matters" where one of its p values is below 0.05 after Holm's correction over all of them,
    "perhaps" where one of its intervals excludes 0, "changes nothing" where all differences are exactly 0; and the set
    of (run, measure) with such a p value.
    """
    keys = [(name, m) for name in found for m in tested(study, name, found[name])]
    adjusted = dict(zip(keys, holm([found[name][m][3] for name, m in keys]), strict=True))
    sure, result = {key for key in keys if adjusted[key] < 0.05}, {}
    for name, effect in found.items():
        shows = any(effect[m][1] > 0 or effect[m][2] < 0 for m in tested(study, name, effect))
        if all(effect[m][:3] == (0, 0, 0) for m in MEASURES if m in effect):
            result[name] = "changes nothing"
        else:
            matters = any((name, m) in sure for m in MEASURES)
            result[name] = "matters" if matters else "perhaps" if shows else "does not show here"
    return result, sure


def named(study, name):
    """What a run changes, as the tables say it."""
    spec = study.runs[name]
    return spec["what"] + " (an option)" * spec.get("option", False) + (f" ({spec['note']})" if "note" in spec else "")


def label(study, base, said):
    """A base's name in a table, with its commit where the table asks for that."""
    name, commit = base
    return study.runs[name].get("label", name) + (f", {commit}" if said.get("commits") else "")


def signed(x):
    """An interval (mean, low, high, ..) in words."""
    return words(x, f"+.{2 if max(map(abs, x[1:3])) < 20 else 1}f")


def count_up(effect):
    """ "10: 4, 9": ten seeds, in 4 of which gold rises, in 9 the KL."""
    seeds = effect["seeds"].values()
    return f"{len(seeds)}: {sum(x['gold'] > 0 for x in seeds)}, {sum(x['kl'] > 0 for x in seeds)}"


def levels(study, said):
    """What the bases reach, those of another `study` where it names one."""
    study = type(study)(said["study"]) if "study" in said else study
    made = {}  # Without its commit in the table, a base has one row.
    for base, effect in effects(study, said.get("runs", "*"))[1].items():
        name = label(study, base, said)
        cells_of = [name, study.runs[base[0]].get("what", ""), *(words(effect[m]) for m in MEASURES)]
        made.setdefault(name, cells_of)
    head = ["base", "what", "gold at the end", "gold over the run", "KL, nats a response", "share ended"]
    return grid(head, made.values(), len(MEASURES))


def paired(study, said):
    """What each change does to its base, with verdicts, and what that says of the details, for worth.toml."""
    found, _ = effects(study, said.get("runs", "*"))
    (verdict, sure), made = verdicts(study, found), []
    for name, effect in found.items():
        marks = {m: "**" * ((name, m) in sure) for m in MEASURES}
        tags = ", ".join(study.runs[name].get("tags", "").split())
        head = [tags, named(study, name), label(study, effect["base"], said), count_up(effect)]
        made.append([*head, *(f"{marks[m]}{signed(effect[m])}{marks[m]}" for m in MEASURES), verdict[name]])
    price(study, said, found, verdict, sure)
    head = ["details", "what is changed", "base", "seeds: gold, KL up", "gold at the end", "gold over the run", "KL"]
    lines = grid([*head, "share ended", "verdict"], made, 6)
    return [lines[0], lines[1][: lines[1].rindex("---:|")] + "---|", *lines[2:]]


def price(study, said, found, verdict, sure):
    """Adds to the study's prices: of each tag the effect that shows most."""
    priced = {}  # {tag: [(verdict, gold's size, what it says)]}
    for name, effect in found.items():
        more, shows = also(study, said, name, found)
        shown = "perhaps" if shows and verdict[name].startswith("does not") else verdict[name]
        kept = [m for m in MEASURES if m in effect and (m in ("gold", "kl") or effect[m][1] > 0 or effect[m][2] < 0)]
        numbers = ", ".join(f"{NAMES[m]} {effect[m][0]:+.2f}{'*' * ((name, m) in sure)}" for m in kept)
        says = f"{named(study, name)}, {label(study, effect['base'], {})}: {numbers}{more}; {shown}"
        for tag in study.runs[name].get("tags", "").split():
            priced.setdefault(tag, []).append((VERDICTS.index(shown), -abs(effect["gold"][0]), says))
    for tag in sorted(priced):
        study.prices += f"\n[{tag}]\nsays = {json.dumps(min(priced[tag], key=lambda x: x[:2])[2])}\n"


def also(study, said, name, found):
    """(what the price of a run says of other runs, whether it shows there): of longer runs of `longer`, where the
    intervals lie apart; or of the run that `elsewhere` names by a part of this one's name, and its base.
    """
    if "longer" in said:
        long, _ = effects(type(study)(said["longer"]))
        if name in long and apart(found[name], long[name]):
            gold, kl = (long[name][m][0] for m in ("gold", "kl"))
            return f" (longer runs: gold {gold:+.2f}, KL {kl:+.2f})", False
    other = said.get("elsewhere", "").format(name.partition("_")[2])
    if other in study.runs:
        base = study.runs[other]["base"]
        pairs, _ = pairs_of(study, other, base)
        columns = {"gold": "gold", "ended": "ended", "tokens": "length"}
        means = {head: interval(pairs, f"last eval/objective/{column}") for head, column in columns.items()}
        numbers = ", ".join(f"{head} {x[0]:+.2f}" for head, x in means.items())
        return f"; {study.runs[base]['what']}: {numbers}", any(x[1] > 0 or x[2] < 0 for x in means.values())
    return "", False


def sentence(study, said):
    """One run against its base, in a line, and as the price of its tag: without a correction, at most "perhaps"."""
    spec = study.runs[said["run"]]
    pairs, _ = pairs_of(study, said["run"], spec["base"])
    means = {head: interval(pairs, measure) for head, measure in said["columns"].items()}
    shows = "perhaps" if any(low > 0 or high < 0 for _, low, high, _ in means.values()) else "does not show here"
    numbers = ", ".join(
        f"{head} {mean:+.3f} ({low:+.3f} .. {high:+.3f})" for head, (mean, low, high, _) in means.items()
    )
    text = f"{spec['what']}, {len(pairs)} seeds: {numbers}; {shows}"
    study.prices += f"\n[{spec['tags']}]\nsays = {json.dumps(text)}\n"
    return [f"[{spec['tags']}] {text}."]


def apart(effect, other):
    """The names of gold and KL, if the intervals of two effects of a run do not overlap."""
    return [NAMES[m] for m in ("gold", "kl") if effect[m][2] < other[m][1] or other[m][2] < effect[m][1]]


def corrected(study, said):
    """Of each sampler gold and KL, less the base's, without and with a correction. rows: [[label, label, run without,
    run with, base], ...].
    """
    made = []
    for label, sampler, *both, base in said["rows"]:
        pairs = [pairs_of(study, run, base)[0] for run in both]
        gap = np.mean([number(columns, "mean val/logprob_gap") for _, columns, _ in pairs[0]])
        figures = [words(interval(x, MEASURES[m]), "+.2f") for m in ("gold", "kl") for x in pairs]
        made.append([label, sampler, f"{gap:.2f}", *figures])
    head = ["base", "what samples", "a batch's largest gap of a log-prob, mean", "gold, not corrected"]
    return grid([*head, "gold, ratio at most 2", "KL, not corrected", "KL, ratio at most 2"], made, 5)


# ---- helpers of other kinds ------------------------------------------------------------------------------------------
def spread(x):
    """Mean (lowest .. highest)."""
    return words((np.mean(x), min(x), max(x)), f".{0 if max(map(abs, x)) >= 100 else 2}f")


KINDS = {kind.__name__: kind for kind in (rows, listed, course, levels, paired, sentence, corrected)}
