"""
Builds the site: python docs/build.py, then open docs/_build/site/index.html; or python docs/build.py --serve, which
serves it at http://localhost:8000 and opens it in a browser.

All is made in docs/_build, which git ignores, or in the folder named with --out: the pages that are written by hand
(docs/*.md, docs/guides/, docs/evidence/), those that are generated from the code, its notes and the results, and the
site that zensical makes of them. No network is needed. What it needs comes with
`pip install -c constraints.txt -e ".[docs]"`.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

try:
    import annotate
    import compare
    import index_pages
    import watch
    from prices import DETAILS
    from source import DIFFS, MINIMAL, ROOT, SCRIPTS, Mistake
except ModuleNotFoundError as e:
    sys.exit(f'error: the site needs {e.name}: pip install -c constraints.txt -e ".[docs]"')

DOCS = Path(__file__).resolve().parent
FOLDERS = "guides", "evidence"  # of pages that are written by hand
# a tag, as the first group, or what is left as it is: a block of code, a heading, a link, code
TAGS = re.compile(r"(`[A-Z]+-\d+`|\b[A-Z]+-\d+\b)|^```.*?^```|^#.*?$|\[[^\]]*\]\([^)]*\)|`[^`]*`", re.M | re.S)


def generated():
    """{file name: Markdown} of the pages that are made from the code and the results."""
    annotate.check()
    pages = {f"{script}.md": annotate.page(script) for script in SCRIPTS}
    both = MINIMAL | DIFFS
    pages |= {compare.file_of(title): compare.page(left, right) for (left, right), title in both.items()}
    pages["details.md"] = index_pages.details_page()
    pages["forest.md"] = index_pages.forest_page()
    pages["watch.md"] = watch.page()
    return pages


def number(path):
    """The number that a guide's file name begins with."""
    return int(path.name.partition("_")[0])


def navigation():
    """The site's navigation, with every guide and every page of evidence."""
    guides, evidence = (sorted((DOCS / name).glob("*.md"), key=number) for name in FOLDERS)
    guides, evidence = ([f"{p.parent.name}/{p.name}" for p in pages] for pages in (guides, evidence))
    return [
        {"Start": "index.md"},
        {"Minimal pages": [compare.file_of(title) for title in MINIMAL.values()]},
        {"The scripts": [f"{script}.md" for script in SCRIPTS]},
        {"Side by side": ["cheat_sheet.md", *(compare.file_of(title) for title in DIFFS.values())]},
        {"Watch it learn": "watch.md"},
        {"The details": ["details.md", "forest.md"]},
        {"Guides": guides},
        {"Evidence": evidence},
        {"Contributing": "contributing.md"},
    ]


def minutes(page):
    """Minutes to read a page with care, in steps of five: at 150 words a minute, of a script with its notes."""
    files = DOCS / f"{page}.md", ROOT / "rlhf_details" / f"{page}.py", DOCS / "notes" / f"{page}.toml"
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in files if path.exists())
    return max(5, 5 * round(words / 150 / 5))


def for_site(text, up=""):
    """A page written by hand, with figures and minutes in place, and links to the repository as plain text.

    Each figure is a link to its file, which a phone shows larger, and each tag a link to its card.
    Args: up, the way from the page's folder to the site's, "" or "../".
    """

    def link(match):
        is_tag = match[1] and match[1].strip("`") in DETAILS
        return f"[{match[1]}]({up}details.md#{match[1].strip('`')})" if is_tag else match[0]

    text = re.sub(r"\{minutes\s+(\S+)\}", lambda match: str(minutes(match[1])), text)
    text = re.sub(r"(!\[[^\]]*\])\((?:\.\./)+(static/[^)]+)\)", rf"[\1({up}\2)]({up}\2)", text)
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!static/|guides/|evidence/)[^)]+\)", r"\1", text)
    return TAGS.sub(link, text)


def toml(value):
    """A value of lists, strings and one-entry tables as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(x)}" for key, x in value.items()) + " }"
    return json.dumps(value)


def prepare(out):
    """Writes the folder `out`: the pages as Markdown, and zensical's configuration."""
    pages = out / "pages"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(DOCS / "assets", pages / "assets")
    shutil.copytree(ROOT / "static", pages / "static")
    for path in [*DOCS.glob("*.md"), *(path for name in FOLDERS for path in (DOCS / name).glob("*.md"))]:
        page = pages / path.relative_to(DOCS)
        page.parent.mkdir(exist_ok=True)
        up = "../" * (page.parent != pages)
        page.write_text(for_site(path.read_text(encoding="utf-8"), up), encoding="utf-8")
    for name, text in generated().items():
        (pages / name).write_text(text, encoding="utf-8")
    config = (DOCS / "zensical.toml").read_text(encoding="utf-8")
    config = config.replace("nav = []  # build.py", f"nav = {toml(navigation())}")
    (out / "zensical.toml").write_text(config, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Builds the site in docs/_build.")
    parser.add_argument("--out", type=Path, default=DOCS / "_build", help="where everything is made; it is emptied")
    parser.add_argument("--serve", action="store_true", help="serve the site on this machine, and open a browser")
    args = parser.parse_args()
    try:
        prepare(args.out.resolve())
    except Mistake as mistake:
        sys.exit(str(mistake))
    command = ["serve", "--open"] if args.serve else ["build", "--strict"]
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the way to end --serve.
        return subprocess.call([sys.executable, "-m", "zensical", *command, "-f", "zensical.toml"], cwd=args.out)
    return 130


if __name__ == "__main__":
    sys.exit(main())
