"""
The minimal pages beside their pages: what they measure, and whether a test sees each of their lines break.

    python benchmark/checks/minimal.py table     runs all of both on the embedded task, in some 15 minutes; a table
    python benchmark/checks/minimal.py break     breaks each line once; lists those that no test misses

`table` prints for each minimal page its lines, its words (names, numbers and words of code, comments and docstrings),
the minutes in which a person reads them aloud, the seconds of its run, and the largest difference of a printed number
from its page's: relative, or absolute where that is smaller, over the first 8 updates or 50 steps; and how many updates
pass until a number differs by more than 1e-4. From there on rounding has chosen another token.

`break` changes one operator, number or call of a line, or else leaves the line out, and runs what
tests/invariants/test_minimal.py runs. A line survives where all numbers and the saved model are still the page's.
"""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "rlhf_details" / "minimal"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
ORDER = "sft", "reward", "rloo", "ppo", "grpo", "distill", "dpo", "agent"  # each after those whose models it needs


# ---- the table -------------------------------------------------------------------------------------------------------
@dataclass
class Table:
    """Sizes, seconds and differences of all minimal pages."""

    work: Path = Path(tempfile.gettempdir()) / "minimal"
    """folder for models and runs"""


def words(source):
    """Names, numbers and words of code, comments and docstrings."""
    return len(re.findall(r"[A-Za-z_]+|\d+(?:\.\d+)?", source))


def run(script, *flags, cwd):
    """(what a script prints, its seconds)."""
    start = time.time()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "rlhf_details" / script), *flags]
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, time.time() - start


def row_of(name, work):
    """The line of the table of one minimal page."""
    import minimal_runs

    task = "toy-tools" if name == "agent" else "toy"
    if name == "agent":  # No minimal page makes the SFT stage of its task.
        run("train_sft.py", "--dataset", task, "--run_name", "tools_sft", "--overwrite", cwd=work)
    output, seconds = run(f"minimal/{name}.py", cwd=work)
    lines = minimal_runs.numbers_of(output)
    # The stages of all runs are those that the minimal pages made, but for the teacher, which RLOO's page makes.
    folder = "models/toy/rloo" if name == "rloo" else f"page/{name}"
    flags = ["--dataset", task, "--eval_dataset", "None", "--output_dir", folder, "--run_name", name, "--overwrite"]
    _, page_seconds = run(f"train_{name}.py", *flags, cwd=work)
    rows = [json.loads(line) for line in (work / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    gaps = minimal_runs.gaps(name, lines, [row for row in rows if row["update"]])
    compared = 50 if name in minimal_runs.LENGTHS else 8
    same = next((number for number, gap in enumerate(gaps) if gap > 1e-4), len(gaps))
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    count = words(source)
    figures = [source.count("\n"), count, f"{count / 150:.1f}", f"{seconds:.0f}", f"{page_seconds:.0f}"]
    figures += [f"{max(gaps[:compared]):.0e}", f"{same} of {len(gaps)}"]
    return f"| [`minimal/{name}.py`](../../../rlhf_details/minimal/{name}.py) | {' | '.join(map(str, figures))} |"


def write_table(args):
    """Prints the table."""
    args.work.mkdir(parents=True, exist_ok=True)
    print("| file | lines | words | minutes | seconds | its page's seconds | largest difference | updates until 1e-4 |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in ORDER:
        print(row_of(name, args.work), flush=True)


# ---- lines that are broken -------------------------------------------------------------------------------------------
@dataclass
class Break:
    """Which lines may be broken without any test's failing."""

    names: tuple[str, ...] = ORDER
    """the minimal pages"""


OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OTHER |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.USub: ast.UAdd}
OTHER |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.LtE: ast.Lt}


def break_once(statement):
    """Changes the first that it finds of a statement: an operator, a call without arguments, a number."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.BinOp, ast.UnaryOp)) and type(node.op) in OTHER:
            node.op = OTHER[type(node.op)]()
            return True
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
            node.ops[0] = OTHER[type(node.ops[0])]()
            return True
    for node in ast.walk(statement):
        for field, value in ast.iter_fields(node):
            is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
            if is_call and not value.args and not value.keywords and not isinstance(statement, ast.Expr):
                setattr(node, field, value.func.value)
                return True
    for node in ast.walk(statement):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            node.value = not node.value if type(node.value) is bool else node.value + 1
            return True
    return False


def mutants(source):
    """(line number, the broken line, the broken source) of each statement of a minimal page."""
    count = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source)))
    for i in range(count):
        tree = ast.parse(source)
        statement = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)][i]
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text or isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef)):
            continue
        if isinstance(statement, ast.If):  # if __name__ == "__main__"
            continue
        line = statement.lineno
        body = getattr(statement, "body", None)
        if body is not None:
            statement.body = []  # What stands below is broken on its own.
        is_broken = not isinstance(statement, ast.With) and break_once(statement)
        if body is not None:
            statement.body = body
        if not is_broken:  # Leave it out: the line, or what stands around a block.
            for parent in ast.walk(tree):
                for field in ("body", "orelse"):
                    block = getattr(parent, field, None)
                    if isinstance(block, list) and statement in block:
                        at = block.index(statement)
                        block[at : at + 1] = body or [ast.Pass()]
        said = ast.unparse(statement).splitlines()[0] if is_broken else "left out"
        yield line, said, ast.unparse(ast.fix_missing_locations(tree))


def survives(name, source, rows_of_page):
    """Whether a broken minimal page computes the same numbers in all its cases, and saves the same model."""
    import minimal_runs

    module = types.ModuleType(name)
    try:
        exec(compile(source, f"{name}.py", "exec"), vars(module))
        for case in sorted(rows_of_page, key=lambda case: "ragged" not in case):  # the quick ones first
            shutil.rmtree(f"minimal/{case}", ignore_errors=True)
            lines, sampled = minimal_runs.run_minimal(case, module)
            rows, tokens = rows_of_page[case]
            if minimal_runs.difference(case, lines, rows) > 1 or not minimal_runs.are_equal(sampled, tokens):
                return False
            minimal_runs.assert_saved_alike(case)
    except Exception:  # It broke.
        return False
    return True


def break_lines(args):
    """Prints the lines that survive."""
    import minimal_runs
    from transformers.utils import logging

    logging.set_verbosity_error(), logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        minimal_runs.make_models(Path(folder))
        for name in args.names:
            cases = [case for case, of in minimal_runs.CASES.items() if of.name == name]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                rows = {case: minimal_runs.run_page(case) for case in cases}
            source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
            assert survives(name, source, rows), name
            broken = list(mutants(source))
            alive = [(line, said) for line, said, mutant in broken if survives(name, mutant, rows)]
            print(f"minimal/{name}.py: {len(broken)} lines broken, {len(alive)} survive", flush=True)
            for line, said in alive:
                print(f"  {line}  {source.splitlines()[line - 1].strip()}  ->  {said}", flush=True)


if __name__ == "__main__":
    commands = {"table": (Table, write_table), "break": (Break, break_lines)}
    chosen = sys.argv[1] if sys.argv[1:] and sys.argv[1] in commands else None
    if chosen is None:
        sys.exit(__doc__)
    kind, act = commands[chosen]
    act(tyro.cli(kind, args=sys.argv[2:], description=__doc__))
