"""
Proof that each detail's test tests it: every detail is broken in a copy of the code, and its test must then fail.

    python benchmark/checks/mutations.py               all mutants, on two workers; writes results/mutations.md
    python benchmark/checks/mutations.py --only RM-4   those of one tag, or of several

A mutant is (tag, file, old, new), from the tag's row in details/: in the statement that its comment speaks of, `old`
becomes `new`. Both are written as `ast.unparse` writes the statement, so reformatting the code changes nothing
here. A tag that stands in several files has a mutant in each, unless its statement is a copy of one that has a mutant.
The copies are compared by benchmark/tests/test_mutations.py. The tests of a tag are those whose names begin with it, of
[RM-4] `test_rm_4_...`, and those whose docstring has it in its brackets.
"""

import ast
import functools
import io
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # after which a mutant's tests count as failed: it hangs. A loaded machine needs 480 for two processes.
FILES = sorted((ROOT / "benchmark" / "checks" / "details").glob("[0-9]*.toml"))
FAMILIES = [tomllib.loads(path.read_text(encoding="utf-8")) for path in FILES]
DETAILS = {tag: said for family in FAMILIES for tag, said in family["tags"].items()}
MUTATIONS = [(tag, *mutant) for tag, said in DETAILS.items() for mutant in said.get("mutants", [])]


@functools.cache
def tags_in(source):
    """{tag: the line (from 1) of the statement that it speaks of} of the tags in the comments of a Python source.

    A comment beside code speaks of that line, and a comment of its own speaks of the next line of code.
    """
    found, code = {}, set()
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokens:
        if token.type not in blank:
            code |= set(range(token.start[0], token.end[0] + 1))
    for token in tokens:
        if token.type == tokenize.COMMENT:
            for tag in re.findall(r"\[([A-Z]+-\d+)\]", token.string):
                if tag in found:
                    raise ValueError(f"[{tag}] stands twice")
                found[tag] = next(n for n in sorted(code) if n >= token.start[0])
    return found


@functools.cache
def statements(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]


def statement_of(source, tag):
    """The smallest statement that a tag speaks of, a node of the syntax tree."""
    line = tags_in(source)[tag]
    holders = [node for node in statements(source) if node.lineno <= line <= node.end_lineno]
    return min(holders, key=lambda n: n.end_lineno - n.lineno)


def mutate(source, tag, old, new):
    """The source with `old` turned into `new` in the statement of a tag; ValueError unless it is there once."""
    statement = statement_of(source, tag)
    text = ast.unparse(statement)
    if text.count(old) != 1:
        raise ValueError(f"[{tag}]: {old!r} is there {text.count(old)} times in\n{text}")
    lines = source.splitlines()
    indent = " " * statement.col_offset
    changed = [indent + x for x in text.replace(old, new).splitlines()]
    mutant = "\n".join([*lines[: statement.lineno - 1], *changed, *lines[statement.end_lineno :]]) + "\n"
    ast.parse(mutant)
    return mutant


def sources(root=ROOT):
    """{file below rlhf_details: its source}, the pages and modules whose tags have mutants.

    The minimal pages have the tags of their pages. minimal.py breaks each of their lines, and needs no mutants.
    """
    folder = root / "rlhf_details"
    files = [path for path in sorted(folder.rglob("*.py")) if path.parent.name != "minimal"]
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}


def without_mutant(root=ROOT):
    """[(tag, file), ...] of the tags that have no mutant there, and whose statement is no copy of one that has."""
    code, having = sources(root), {(tag, file) for tag, file, _, _ in MUTATIONS}
    texts = {(tag, file): ast.unparse(statement_of(s, tag)) for file, s in code.items() for tag in tags_in(s)}
    return [
        (tag, file)
        for (tag, file), text in texts.items()
        if (tag, file) not in having and not any(other[0] == tag and texts.get(other) == text for other in having)
    ]


@functools.cache
def all_tests(root):
    """{"tests/FOLDER/test_x.py::test_name": the tags in its docstring} of the tests in a copy of the repository."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                tags = re.findall(r"\[([A-Z]+-\d+)\]", ast.get_docstring(node) or "")
                found[f"{path.relative_to(root)}::{node.name}"] = tags
    return found


def tests_of(tag, root=ROOT):
    """The tests named after a tag, and those whose docstring has it."""
    prefix = f"test_{tag.lower().replace('-', '_')}_"
    return [test for test, tags in all_tests(root).items() if tag in tags or test.split("::")[1].startswith(prefix)]


def copy_of(root, folder):
    """Copies what git tracks, or would, into a folder; returns the folder."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    return folder


def judge(folder, tests):
    """(pytest's exit code, or None after SECONDS; the line that failed; seconds) of tests on the copy in `folder`."""
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", *options, "--basetemp", f"{folder}.tmp", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    start, output = time.time(), Path(f"{folder}.out")
    with open(output, "w") as file:
        pipes = dict(stdout=file, stderr=file, cwd=folder, env=environment, timeout=SECONDS)
        try:
            code = subprocess.run(command, **pipes).returncode
        except subprocess.TimeoutExpired:
            return None, f"no end after {SECONDS} s", time.time() - start
    text = output.read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?", text, re.M)
    return code, " ".join(failed[0]).strip() if failed else text[-300:], time.time() - start


def verdict_on(mutant, copies):
    """A row of the report: breaks one of the copies with the mutant, and runs its tag's tests there."""
    (tag, file, old, new), folder = mutant, copies.get()
    path = folder / "rlhf_details" / file
    source, tests = path.read_text(), tests_of(tag)
    try:
        path.write_text(mutate(source, tag, old, new))
        return mutant, *(judge(folder, tests) if tests else (0, "no test has its name", 0.0))
    finally:
        path.write_text(source)
        copies.put(folder)


def is_killed(code):
    """Whether pytest's exit code says that a test failed (1) or hung (None). With others no test has run."""
    return code in (1, None)


def table(rows):
    """The report: one line a mutant."""
    killed = sum(is_killed(code) for _, code, _, _ in rows)
    seconds = sum(row[3] for row in rows)
    lines = [f"{killed} of {len(rows)} mutants killed by the tests of their own tag; {seconds:.0f} s of tests.", ""]
    lines += ["| tag | file | `old` -> `new` | killed by | s |", "|---|---|---|---|---:|"]
    for (tag, file, old, new), code, said, spent in rows:
        change = f"`{old}` -> {f'`{new}`' if new else 'nothing'}".replace("|", "\\|")
        verdict = (
            f"`{said.split('::')[-1].split(' ')[0]}`"
            if is_killed(code)
            else f"**survived** (pytest's exit code {code})"
        )
        lines.append(f"| {tag} | `{file}` | {change} | {said if code is None else verdict} | {spent:.0f} |")
    return "\n".join(lines) + "\n"


@dataclass
class Args:
    only: tuple[str, ...] = ()
    """tags; none: all"""
    workers: int = 2
    """mutants at a time"""


def main(args):
    chosen = [mutant for mutant in MUTATIONS if not args.only or mutant[0] in args.only]
    start, copies = time.time(), queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch, ThreadPoolExecutor(args.workers) as pool:
        for number in range(args.workers):
            copies.put(copy_of(ROOT, Path(scratch) / str(number)))
        futures = [pool.submit(verdict_on, mutant, copies) for mutant in chosen]
        for number, future in enumerate(as_completed(futures), 1):
            (tag, file, *_), code, said, seconds = future.result()
            verdict = "killed" if is_killed(code) else "SURVIVED"
            print(f"{number:3} {tag:8} {file:16} {verdict} {seconds:5.1f} s  {said[:150]!r}", flush=True)
    rows = [future.result() for future in futures]
    report = table(rows)
    print(report.splitlines()[0], f"{time.time() - start:.0f} s on {args.workers} workers.")
    if not args.only:
        (ROOT / "benchmark" / "results" / "mutations.md").write_text(report)
    return int(not all(is_killed(code) for _, code, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
