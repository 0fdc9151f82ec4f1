"""
A side-by-side diff of two scripts, block by block, with a sentence or two at each block that differs.

The sentences stand in notes/<left>__<right>.toml, keyed by block; "join -> pack" pairs two blocks of different names,
and "intro" stands above them all. A block whose code differs and that has no sentence is a mistake, and so is a
sentence on a block that does not differ. Minimal pages share the sentences of notes/minimal.toml: what their pages add.
"""

import difflib

import annotate
from source import DIFFS, MINIMAL, Mistake, blocks, code_html, escape, prose

INTRO = """Left is `{left}.py`, the algorithm alone, and right `{right}.py`, which computes the same numbers. Read the
left side from top to bottom. At each block a sentence says what the page adds there, and why.
"""
CONTEXT = 2  # equal lines that are shown around a difference; more are folded


def pairs(left, right, renamed):
    """[(block of left or None, block of right or None), ...], in order. renamed: {key in left: key in right}."""
    lefts, rights = blocks(left), blocks(right)
    keys = [renamed.get(b.key, b.key) for b in lefts], [b.key for b in rights]
    found = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if kind == "equal":
            found += zip(lefts[i1:i2], rights[j1:j2], strict=True)
        else:
            found += [(block, None) for block in lefts[i1:i2]] + [(None, block) for block in rights[j1:j2]]
    return found


def lines_of(block):
    """A block's lines without the empty ones at its end, and the same lines highlighted."""
    source = "\n".join(block.lines).rstrip().splitlines() if block else []
    html = code_html(block).split("<code>")[1].removesuffix("</code></pre>").splitlines() if block else []
    return source, html


def side(html, kind):
    """One side of a stretch of the diff."""
    code = "".join(html)  # Each line is a block of its own.
    return f'<div class="side {kind}"><pre tabindex="0"><code>{code}</code></pre></div>' if html else "<div></div>"


def row(left, right, kind):
    """A stretch of lines of both sides: "same", or "changed", where what is left stands left."""
    kinds = ("same", "same twin") if kind == "same" else ("removed", "added")
    return f'<div class="stretch {kind}">{side(left, kinds[0])}{side(right, kinds[1])}</div>'


def body(left, right):
    """HTML of the diff of two blocks, one of which may be None."""
    (a, a_html), (b, b_html) = lines_of(left), lines_of(right)
    parts = []
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    for number, (kind, i1, i2, j1, j2) in enumerate(opcodes):
        if kind != "equal":
            parts.append(row(a_html[i1:i2], b_html[j1:j2], "changed"))
            continue
        before = CONTEXT if number else 0  # lines after the last difference
        after = CONTEXT if number + 1 < len(opcodes) else 0  # lines before the next
        if i2 - i1 <= before + after + 2:
            parts.append(row(a_html[i1:i2], b_html[j1:j2], "same"))
            continue
        folded = row(a_html[i1 + before : i2 - after], b_html[j1 + before : j2 - after], "same")
        count = i2 - i1 - before - after
        parts += [
            row(a_html[i1 : i1 + before], b_html[j1 : j1 + before], "same") if before else "",
            f"<details><summary>{count} equal lines</summary>{folded}</details>",
            row(a_html[i2 - after : i2], b_html[j2 - after : j2], "same") if after else "",
        ]
    return "".join(parts)


def title_of_block(block):
    """Markdown of a short title."""
    return f"`{block.key}`" if block.is_code else block.title if block.key == "module" else block.key


def file_of(title):
    """The file of a comparison."""
    return title.lower().replace(" ", "_") + ".md"


def page(left, right):
    """Markdown of the page that compares two scripts."""
    family = MINIMAL if (left, right) in MINIMAL else DIFFS
    name, title = "minimal" if family is MINIMAL else f"{left}__{right}", family[left, right]
    path, notes = f"docs/notes/{name}.toml", dict(annotate.notes(name))
    intro, parts, equal, differing = notes.pop("intro", ""), [], [], set()
    others = " · ".join(f"**{t}**" if t == title else f"[{t}]({file_of(t)})" for t in family.values())
    if family is MINIMAL:
        intro = INTRO.format(left=left, right=right)
    renamed, keys = [key.split(" -> ") for key in notes if " -> " in key], {block.key for block in blocks(right)}
    for a, b in pairs(left, right, {old: new for old, new in renamed if new in keys}):
        key = " -> ".join(dict.fromkeys(block.key for block in (a, b) if block))
        if a and b and (lines_of(a)[0] == lines_of(b)[0] or (a.code == b.code and key not in notes)):
            equal.append(f"<code>{escape(key)}</code>")
            continue
        differing.add(key)
        only = "" if a and b else f", only in {right if b else left}.py"
        title_of = " → ".join(dict.fromkeys(title_of_block(block) for block in (a, b) if block))
        parts.append(f"## {title_of}{only} {{ #{(b or a).slug} }}\n")
        diff = f'<div class="diff highlight">{body(a, b)}</div>'
        parts.append(f'<div class="difference">{prose(notes.get(key, ""))}{diff}</div>\n')
    if missing := differing - set(notes):
        raise Mistake(f"{path}: nothing is said of {', '.join(map(repr, sorted(missing)))}, which differs")
    if family is DIFFS and (unknown := set(notes) - differing):
        raise Mistake(f"{path}: no difference in {', '.join(map(repr, sorted(unknown)))}")
    head = f"---\ntitle: {title}\nhide: [navigation, toc]\n---\n\n# {title}\n\n{others}\n\n{intro}"
    return "\n".join([head, *parts, f"## Equal in both {{ #equal }}\n\n<p>{', '.join(equal)}</p>\n"])
