"""The page of the details, which one can filter, and the forest plot of everything that the ablations measured."""

from annotate import tag_note
from prices import (
    DETAILS,
    FAMILY_PHASE,
    FIGURES,
    VERDICTS,
    axis,
    card,
    files_of,
    places_of,
    plot,
    study,
    verdict,
)
from source import SCRIPTS, blocks, escape

WIDE = {"gold": (-4.5, 1.0), "kl": (-4.0, 10.0)}  # the axes of the forest plot
PHASES = [  # in the order of the menu
    *("Data", "Models", "Supervised fine-tuning", "Reward model", "DPO", "1. Rollout", "2. Scores", "3. Rewards"),
    *("4. Advantages", "5. Optimise", "6. Log", "Evaluation"),
]
OF_SCRIPTS = {"train_sft": "Supervised fine-tuning", "train_reward": "Reward model", "train_dpo": "DPO"}


def phases_that_use(function, seen=()):
    """The phases of a policy's update in which a function is at work, itself or through other functions."""
    found = set()
    for block in (block for script in SCRIPTS for block in blocks(script) if function in block.names):
        if block.key in PHASES:
            found.add(block.key)
        elif block.is_code and block.key not in ("evaluate", function, *seen):
            found |= phases_that_use(block.key, (*seen, function))
    return found


def phases_of(tag):
    """The phases of the loop that a tag belongs to, by the blocks where it stands; else what its family is about."""
    found = {"Data"} if tag.startswith("DATA-") else set()
    for script, block in places_of(tag):
        if script in OF_SCRIPTS:
            found.add(OF_SCRIPTS[script])
        else:
            found |= {block.key} & {*PHASES} or phases_that_use(block.key)
    return [phase for phase in PHASES if phase in found] or [FAMILY_PHASE.get(tag.partition("-")[0], "Models")]


def options(name, label, values):
    """A menu of the filter."""
    choices = "".join(f"<option>{escape(value)}</option>" for value in values)
    return f'<label>{label} <select name="{name}"><option value="">all</option>{choices}</select></label>'


def details_page():
    """Markdown of the index of details."""
    rows, scripts, phases, verdicts = [], [], [], [verdict(tag) for tag in DETAILS]
    for tag in DETAILS:
        files, of_tag = files_of(tag), phases_of(tag)
        scripts, phases = scripts + files, phases + of_tag
        rows.append(
            f'<div class="detail" data-scripts="{"|".join(files)}" data-phases="{"|".join(of_tag)}" '
            f'data-verdict="{verdict(tag)}">{card(tag, tag_note(tag))}'
            f'<p class="where">{escape(", ".join(of_tag))}</p></div>'
        )
    boxes = "".join(
        f'<label><input type="checkbox" name="verdict" value="{v}" checked> {v} ({verdicts.count(v)})</label>'
        for v in VERDICTS
    )
    form = (
        f'<form class="filter">{options("script", "Script", dict.fromkeys(scripts))}'
        f"{options('phase', 'Phase', [phase for phase in PHASES if phase in phases])}"
        f'<span class="verdicts">{boxes}</span>'
        f'<label>Words <input type="search" name="words" placeholder="padding"></label><output></output></form>'
    )
    return "\n".join(
        [
            "---\ntitle: The details\nhide: [navigation, toc]\n---\n\n# The details { #top }\n",
            DETAILS_TEXT.format(count=len(rows)),
            f"{form}\n",
            f'<div class="details">{"".join(rows)}</div>\n',
        ]
    )


DETAILS_TEXT = """\
{count} details of the implementation. Each has a tag, which stands in a comment at the line where it acts; a test of
its name, which fails when that line is broken. For most it was also measured what happens when the detail is taken away
or swapped. A card then shows the change of the true reward ("gold", in points) and of the KL (in nats per response),
with its 95 % interval over ten seeds. A filled dot passes Holm's correction over all variants, a ring does not; a thin
line crosses 0. The [forest plot](forest.md) shows all of them on one scale.
"""
FOREST_TEXT = """\
Everything that the ablations changed, sorted by what it does to gold at the end of training. Most variants take a
detail away: where gold is negative, the detail helps. "(an option)" marks those that put one in which is off by
default; there it is the other way. Each interval is the mean over ten seeds of the paired difference, variant less
base, with Student's 95 % interval. The runs are short and end while gold still rises, so larger or more steps gain;
what hurts late cannot show. [The details](details.md) have the sources and the tests.
"""


def forest_page():
    """Markdown of the forest plot: all variants, the one that costs most gold first."""
    effects, bases = study()
    rows = []
    for effect in sorted(effects, key=lambda e: e.figures["gold"][0]):
        tags = " ".join(f'<a href="details.html#{tag}">{tag}</a>' for tag in effect.tags)
        plots = "".join(
            f'<div class="wide" title="{FIGURES[name]} {figures[0]:+.2f} ({figures[1]:+.2f} .. {figures[2]:+.2f})">'
            f"{plot(effect.figures, (name,), *WIDE[name], width=240)}</div>"
            for name, figures in ((name, effect.figures[name]) for name in WIDE)
        )
        said = f'{escape(effect.what)} <span class="base" title="{bases[effect.base]}">{effect.base}</span>'
        rows.append(f'<div class="effect"><div class="said">{tags} {said}</div>{plots}</div>')
    titles = {"gold": "gold, points", "kl": "KL, nats"}
    scales = "".join(
        f'<div class="wide">{title}<svg class="price" viewBox="0 0 240 22" width="240" height="22" aria-hidden="true">'
        f"{axis(*WIDE[name], 240, 22)[0]}</svg></div>"
        for name, title in titles.items()
    )
    head = f'<div class="effect head"><div class="said">what is changed</div>{scales}</div>'
    legend = "".join(f"<li><code>{base}</code> {escape(what)}</li>" for base, what in bases.items())
    return "\n".join(
        [
            "---\ntitle: Forest plot\nhide: [navigation, toc]\n---\n\n# The forest plot\n",
            FOREST_TEXT,
            f'<div class="forest">{head}{"".join(rows)}</div>\n',
            f"## The bases\n\n<ul>{legend}</ul>\n",
        ]
    )
