"""
What each detail is: its row in benchmark/checks/details/, its source, its tests, and what the ablations measured.

The effects and their intervals come from the table that the study `ablations` has written.
"""

import math
import re
import sys
from dataclasses import dataclass
from functools import cache

from markdown import markdown
from source import ROOT, SCRIPTS, blocks, escape

sys.path.insert(0, str(ROOT / "benchmark" / "checks"))
import details

sources, worth, DETAILS = cache(details.sources), cache(details.worth), details.DETAILS
measured = cache(details.measured)
FIGURES = {"gold": "gold at the end", "gold_run": "gold over the run", "kl": "KL, nats", "ended": "share ended"}
VERDICTS = "matters", "perhaps", "does not show", "not measured"
FAMILY_PHASE = {  # of a tag that stands on none of the pages that are annotated
    "DATA": "Data", "MODEL": "Models", "SFT": "Supervised fine-tuning", "RM": "Reward model", "GEN": "1. Rollout",
    "REW": "2. Scores", "OPT": "5. Optimise", "LOG": "6. Log", "EVAL": "Evaluation",
}  # fmt: skip
OWN_STUDY = {"DPO": "8_dpo", "GRPO": "7_grpo", "GEN": "10_another_sampler"}  # of tags without a row in `study`
OWN_STUDY |= {"DISTILL": "11_distillation", "REW": "../guides/8_my_run_looks_wrong", "AGT": "14_several_turns"}


@dataclass
class Effect:
    """One row of the table of ablations."""

    tags: list
    what: str  # what was changed
    base: str
    seeds: str
    figures: dict  # {name: (mean, low, high, whether it passes the correction)}
    verdict: str
    long: tuple = ()  # of runs four times as long: gold and KL, each (mean, low, high) in words


def table(text, start):
    """Rows of cells of the Markdown table whose head begins with `start`."""
    rows = text[text.index(start) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@cache
def study():
    """(effects, {base: what it is}), of the ablations and the study of GRPO."""
    effects, bases = [], {}
    for name in ("grpo", "ablations"):
        text = (ROOT / f"benchmark/results/{name}/table.md").read_text(encoding="utf-8")
        for tags, what, base, seeds, *cells, verdict in table(text, "| details | what is changed"):
            figures = {}
            for figure, cell in zip(FIGURES, cells, strict=True):
                mean, low, high = (float(x) for x in re.findall(r"[+-][\d.]+\d", cell))
                figures[figure] = mean, low, high, cell.startswith("**")
            effects.append(Effect(re.findall(r"[A-Z]+-\d+", tags), what, base, seeds, figures, verdict))
        bases |= {row[0]: row[1] for row in table(text, "| base | what")}
    of_long = {(row[1], row[2]): (row[5], row[7]) for row in table(text, "| details | what is changed | base | long:")}
    for effect in effects:
        effect.long = of_long.get((effect.what, effect.base.split(",")[0]), ())
    return effects, bases


def verdict(tag):
    """One of VERDICTS, for a tag: that of its variant which shows most."""
    said = worth().get(tag, {}).get("says", "; not measured").rpartition("; ")[2]
    return next((v for v in VERDICTS if said.startswith(v)), "does not show")


def axis(low, high, width, height):
    """(SVG of the lines and numbers of an axis, a function from a value to its x)."""
    scale, parts = (width - 10) / (high - low), []

    def x(value):
        return round(5 + (max(low, min(high, value)) - low) * scale, 1)

    for value in range(math.ceil(low), math.floor(high) + 1):
        kind, said = "grid" if value else "zero", f"{value:+d}" if value else "0"
        parts.append(f'<line class="{kind}" x1="{x(value)}" x2="{x(value)}" y1="0" y2="{height - 12}"/>')
        if high - low < 8 or value % 2 == 0:
            parts.append(f'<text x="{x(value)}" y="{height - 2}" text-anchor="middle">{said}</text>')
    return "".join(parts), x


def plot(figures, names, low=-2.0, high=2.0, width=150):
    """Intervals as SVG, a row each, on an axis from low to high. A mean beyond an end is an arrow at the edge."""
    height = 14 * len(names) + 14
    lines, x = axis(low, high, width, height)
    parts = [f'<svg class="price" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true">']
    parts.append(lines)
    for row, name in enumerate(names):
        y, (mean, start, end, is_sure) = 14 * row + 7, figures[name]
        kind = "sure" if is_sure else "clear" if start > 0 or end < 0 else "open"
        parts.append(f'<g class="{kind}"><line x1="{x(start)}" x2="{x(end)}" y1="{y}" y2="{y}"/>')
        if low <= mean <= high:
            parts.append(f'<circle cx="{x(mean)}" cy="{y}" r="2.5"/></g>')
        else:
            parts.append(f'<path d="M{x(mean)} {y} l{6 if mean < low else -6} -4 v8 z"/></g>')
    return "".join(parts) + "</svg>"


def figures_text(figures, names):
    """The same intervals in words, a line each."""
    lines = []
    for name in names:
        mean, low, high, sure = figures[name]
        bold = ("<b>", "</b>") if sure else ("", "")
        lines.append(f"<span>{FIGURES[name]} {bold[0]}{mean:+.2f}{bold[1]} ({low:+.2f} .. {high:+.2f})</span>")
    return f'<span class="figures">{"".join(lines)}</span>'


def badge(tag):
    """The verdict on a tag, as a coloured word."""
    return f'<span class="verdict {verdict(tag).replace(" ", "-")}">{verdict(tag)}</span>'


def sources_of(tag):
    """HTML: who does it like this, with links to the lines at a pinned commit."""
    systems = details.read("systems.toml")
    links = ("ours" if s == "own" else details.source_link(s, systems) for s in DETAILS[tag]["source"])
    return markdown("; ".join(links))[3:-4]  # without <p> and </p>


def tests_html(tag):
    """HTML: the names of a tag's tests, the file as a hint."""
    found = (test.split("::")[:2] for test in sorted(details.tests_of(tag)))
    names = (f'<code title="{file}">{name.replace("_", "_<wbr>")}</code>' for file, name in found)
    return ", ".join(names)


def prices_html(tag):
    """HTML: a plot for each variant that prices a tag; else what another study says of it, or why it has no price."""
    effects, bases = study()
    found = [effect for effect in effects if tag in effect.tags]
    if not found and tag in worth():
        link = f'<a href="evidence/{OWN_STUDY[tag.partition("-")[0]]}.html">a study of its own</a>'
        return f'<p class="why">Measured in {link}: {escape(worth()[tag]["says"])} (*: passes its correction).</p>'
    if not found:
        return f'<p class="why">Not measured: {escape(DETAILS[tag].get("unpriced", "no study has it"))}.</p>'
    rows = []
    for effect in found:
        base = f'<span class="base" title="{effect.base}: {bases[effect.base]}">{effect.base}</span>'
        said = f"<b>{escape(effect.what)}</b> ({base}; {effect.verdict})"
        names = [name for name in FIGURES if name in ("gold", "kl") or effect.figures[name][3]]
        long = "<div>In runs four times as long: gold {}, KL {}.</div>".format(*effect.long) if effect.long else ""
        text = figures_text(effect.figures, names)
        rows.append(f"<li>{said}<div>{plot(effect.figures, names)}{text}</div>{long.replace('**', '')}</li>")
    return f'<ul class="prices">{"".join(rows)}</ul>'


def places_html(tag):
    """HTML: the files where a tag stands, those that are annotated with a link to its line."""
    links = {
        f"{script}.py": f'<a href="{script}.html#at-{tag}">{script}.py, line {block.tags[tag]}</a>'
        for script, block in places_of(tag)
    }
    return "; ".join(links.get(file, f"<code>{file}</code>") for file in files_of(tag))


def card(tag, note=""):
    """The card of a tag, with the anchor that the tag in the code points to. note: HTML, what a teacher adds."""
    what = DETAILS[tag]["what"]
    rows = {"Code": places_html(tag), "Source": sources_of(tag), "Test": tests_html(tag)}
    if elsewhere := measured().get(tag):
        said = "; ".join(f"{library}: {found}" for library, found in elsewhere.items())
        rows['<a href="evidence/15_who_does_what.html">Measured elsewhere</a>'] = said
    facts = "".join(f"<dt>{name}</dt><dd>{said}</dd>" for name, said in rows.items())
    return (
        f'<article class="card" id="{tag}"><h4>'
        f'<a href="#{tag}">{tag}</a> {badge(tag)}</h4>'
        f'<p class="what">{escape(what)}.</p>{note}{prices_html(tag)}<dl>{facts}</dl></article>'
    )


def files_of(tag):
    """The files below rlhf_details that have the tag, the pages first."""
    return details.files_with(tag, sources())


def places_of(tag):
    """[(script, block), ...] of the annotated pages where a tag stands."""
    return [(script, block) for script in SCRIPTS for block in blocks(script) if tag in block.tags]
