"""
How large the pages and modules are, before (a commit) and after (another one, or the files as they stand), as a table.

    python benchmark/checks/sizes.py b9b2685              that commit, and the working tree
    python benchmark/checks/sizes.py b9b2685 HEAD         two commits

Lines are all lines of a file. Tokens are Python's own (tokenize) without comments, line ends, indentation, docstrings
and the help texts of flags, so that neither words nor layout count. Nesting is the deepest indentation, in levels.
Flags are those that a script accepts, inherited ones included. A file that has moved is found by its name.
"""

import ast
import io
import subprocess
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()}
HEADER = ["file", "lines", "tokens", "longest function", "its lines", "nesting", "flags"]


@dataclass
class Args:
    before: Annotated[str, tyro.conf.Positional]
    """a commit"""
    after: Annotated[str | None, tyro.conf.Positional] = None
    """another commit; None: the files as they stand"""


def sources(commit):
    """{path below rlhf_details: source} at a commit, or of the working tree."""
    if commit is None:
        folder = ROOT / "rlhf_details"
        return {str(path.relative_to(folder)): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", commit, "rlhf_details").split()
    names = [name for name in names if name.endswith(".py")]
    return {name.removeprefix("rlhf_details/"): git("show", f"{commit}:{name}") for name in names}


def measure(source):
    """{column: value} of a file, without its flags."""
    tree = ast.parse(source)
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    texts = {(n.lineno, n.col_offset) for n in texts if isinstance(n.value.value, str)}
    tokens, depth, deepest = 0, 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        tokens += token.type not in LAYOUT and token.start not in texts
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        deepest = max(deepest, depth)
    functions = {n: n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    longest = max(functions, key=functions.get, default=None)
    found = {"lines": len(source.splitlines()), "tokens": tokens, "nesting": deepest}
    return found | ({"longest function": longest.name, "its lines": functions[longest]} if longest else {})


def flags_of(code):
    """{path: names of the flags} of the scripts, which have a class Args. code: {path: source}."""
    classes = {}  # (path, or None for a class that others inherit; name): (names of its bases, its own fields)
    for path, source in code.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                bases = [base.attr if isinstance(base, ast.Attribute) else base.id for base in node.bases]
                own = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}
                classes[path if node.name == "Args" else None, node.name] = bases, own

    def fields(path, name):
        bases, own = classes.get((path, name), ([], set()))
        return own.union(*(fields(None, base) for base in bases))

    return {path: fields(path, name) for path, name in classes if path}


def table(before, after):
    """The lines of the table. before, after: {path: source}."""
    measured = []
    for code in (before, after):
        flags = {path: {"flags": len(names)} for path, names in flags_of(code).items()}
        measured.append({path: measure(source) | flags.get(path, {}) for path, source in code.items()})
    old, new = measured
    pairs = {}  # path after, or before where there is none: (figures before, figures after)
    moved = {Path(path).name: path for path in new}
    for path in old:
        pairs[path if path in new else moved.get(Path(path).name, path)] = old[path], {}
    for path in new:
        pairs[path] = pairs.get(path, ({}, {}))[0], new[path]
    lines = ["| " + " | ".join(HEADER) + " |", "|---" + "|---:" * (len(HEADER) - 1) + "|"]
    rows = sorted(pairs.items(), key=lambda item: ("/" in item[0], item[0]))
    total = [{column: sum(x[column] for x in side.values()) for column in ("lines", "tokens")} for side in measured]
    for name, (a, b) in [*rows, ("all", total)]:
        cells = [f"{a.get(column, '')} → {b.get(column, '')}" for column in HEADER[1:]]
        lines.append(f"| {name} | " + " | ".join("" if cell == " → " else cell for cell in cells) + " |")
    return lines


def main(args: Args):
    print("\n".join(table(sources(args.before), sources(args.after))))


if __name__ == "__main__":
    main(tyro.cli(Args))
