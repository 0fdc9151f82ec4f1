"""
The annotated pages: the whole source of a script, block by block, beside what a teacher would say of it.

The notes stand in notes/<script>.toml, keyed by block (see source.py), and those on tags in their rows in
benchmark/checks/details/. A page takes the note of another page's block of that key where it has none of its own and
both blocks have the same code.
"""

import tomllib
from functools import cache

from prices import DETAILS, card
from source import ROOT, SCRIPTS, Mistake, blocks, code_html, escape, prose


@cache
def notes(name):
    """The notes of a script, or of the tags: {key: text}."""
    path = ROOT / "docs" / "notes" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def note_of(script, block):
    """The note on a block of a script, its own or that of the same code in the script that it comes from; or ""."""
    if block.key in notes(script):
        return notes(script)[block.key]
    _, parent = SCRIPTS[script]
    same = [other for other in blocks(parent) if (other.key, other.code) == (block.key, block.code)] if parent else []
    return note_of(parent, same[0]) if same else ""


def check():
    """Raises a Mistake where a block has no note, or a note speaks of a block or tag that the code does not have."""
    for script in SCRIPTS:
        unknown = set(notes(script)) - {block.key for block in blocks(script)}
        if unknown:
            raise Mistake(f"docs/notes/{script}.toml: {script}.py has no block {', '.join(map(repr, sorted(unknown)))}")
        if missing := [repr(block.key) for block in blocks(script) if not note_of(script, block)]:
            raise Mistake(f"docs/notes/{script}.toml: nothing is said of {', '.join(missing)}")
    noted = {tag for tag, row in DETAILS.items() if "note" in row}
    if unknown := noted - {tag for script in SCRIPTS for block in blocks(script) for tag in block.tags}:
        raise Mistake(f"benchmark/checks/details: a note, but no annotated script has {', '.join(sorted(unknown))}")


def tag_note(tag, names=()):
    """HTML of the note on a tag, or nothing."""
    return prose(DETAILS[tag]["note"], names) if "note" in DETAILS[tag] else ""


def heading(block):
    """Markdown of a block's heading: its title, as code where it is a name in the code."""
    title = block.title if " " in block.key or block.title != block.key else f"`{block.key}`"
    return f"{'#' * block.level} {title[0].upper()}{title[1:]} {{ #{block.slug} }}"


def page(script):
    """Markdown of the annotated page of a script."""
    found = blocks(script)
    names = {block.key for block in found if block.is_code}
    tags = [tag for block in found for tag in block.tags]
    contents = [f'<li class="level-{b.level}"><a href="#{b.slug}">{escape(b.key)}</a></li>' for b in found]
    others = (f"**{what}**" if other == script else f"[{what}]({other}.md)" for other, (what, _) in SCRIPTS.items())
    parts = [
        f"---\ntitle: {script}.py\nhide: [navigation, toc]\n---\n\n# {SCRIPTS[script][0]}: `{script}.py` {{ #top }}\n",
        f"{' · '.join(others)}\n",
        f'<details class="contents"><summary>Contents of this page</summary><ul>{"".join(contents)}</ul></details>\n',
    ]
    for block in found:
        cards = "".join(card(tag, tag_note(tag, names)) for tag in block.tags)
        parts.append(heading(block) + "\n")
        parts.append(
            f'<div class="block{" short" * (len(block.lines) < 40)}" data-key="{block.key}">'
            f'<div class="code highlight">{code_html(block, names, tags)}</div>'
            f'<div class="teacher"><div class="notes">{prose(note_of(script, block), names)}</div>'
            f'<div class="cards">{cards}</div></div></div>\n'
        )
    return "\n".join(parts)
