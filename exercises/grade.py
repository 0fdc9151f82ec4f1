"""
Labs that grade themselves: a folder for students, and the points of what stands in it.

    python exercises/grade.py --make FOLDER          pages with gaps, texts and curves; no answer is in it
    python exercises/grade.py --make FOLDER 3_rloo   gaps in the page of this lab alone
    python exercises/grade.py FOLDER 3_rloo          its points, and FOLDER/results.json, which Gradescope reads

labs/*.md has each lab: its text, and below "For the teacher" what grades it. A student's lines are put into the right
page, once for each gap. They must compute the vectors of benchmark/vectors/, and the page must print its own numbers.
"""

import argparse
import contextlib
import csv
import functools
import io
import json
import re
import shutil
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmark" / "vectors"))
import check
import oracle
import torch
from transformers.utils import logging

from rlhf_details import toy, utils

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "rlhf_details" / "minimal"
VECTORS = [vector for family in oracle.load().values() for vector in family]
FEW, ROWS = dict.fromkeys(toy.SPLITS, 200), functools.cache(toy.rows.__wrapped__)
logging.set_verbosity_error()
logging.disable_progress_bar()
GAP = '{0}# >>> {1}\n{0}raise NotImplementedError("your turn")\n{0}# <<<\n'


def labs():
    """{name: lab}, as the labs' files say, with the students' part as `text`."""
    found = {}
    for path in sorted((ROOT / "exercises" / "labs").glob("*.md")):
        text, _, grading = path.read_text(encoding="utf-8").partition("## For the teacher\n")
        found[path.stem] = tomllib.loads(grading.split("```")[1].removeprefix("toml")) | {"text": text}
    return found


def right_lines(page, task):
    """The lines of a page that a task leaves out."""
    source = (PAGES / f"{page}.py").read_text(encoding="utf-8")
    start = source.rindex("\n", 0, source.index(task["first"])) + 1
    return source[start : source.index("\n", source.index(task["last"], start)) + 1]


def make(folder, chosen):
    """Writes a student's folder."""
    shutil.copytree(
        ROOT / "rlhf_details", folder / "rlhf_details", ignore=shutil.ignore_patterns("[!_nut]*", "train*", "__py*")
    )
    # The other algorithms' files would show lines that a gap asks for; sft.py and reward.py make the first models.
    pages = {"sft", "reward", *(lab["page"] for lab in chosen.values())}
    sources = {page: (PAGES / f"{page}.py").read_text(encoding="utf-8") for page in sorted(pages)}
    for name, lab in chosen.items():
        for title, task in lab["write"].items():
            lines = right_lines(lab["page"], task)
            gap = GAP.format(re.match(" *", lines)[0], title)
            sources[lab["page"]] = sources[lab["page"]].replace(lines, gap)
        (folder / f"{name}.md").write_text(lab["text"], encoding="utf-8")
        curves(folder / f"{name}.csv", **lab["curves"])
    for page, source in sources.items():
        (folder / f"{page}.py").write_text(source, encoding="utf-8")
    answers = "\n".join(f'[{name}]\nfound = ""\nmeasured = 0.0\n' for name in chosen)
    (folder / "answers.toml").write_text(answers, encoding="utf-8")


def curves(path, study, healthy, broken):
    """Writes two stored runs of a study, of seed 1, as a table."""
    text = (ROOT / "benchmark" / "results" / study / "runs.csv").read_text()
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["seed"] == "1"]
    commit = next(row["commit"] for row in rows if row["run"] == broken)
    kept = [row for row in rows if row["run"] in (healthy, broken) and row.pop("commit") == commit]
    columns = [name for name in kept[0] if any(row[name] for row in kept)]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(row | {"run": "healthy" if row["run"] == healthy else "broken"} for row in kept)


@functools.cache
def models():
    """A folder with small models, which are trained on few rows."""
    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "models").mkdir()
    with contextlib.chdir(folder.name):
        for page, task in ("sft", "toy"), ("sft", "toy-tools"), ("reward", "toy"):
            values = {"output_folder": f"models/{task}/{page}"} | ({"B": 8} if page == "sft" else {})
            run(page, (PAGES / f"{page}.py").read_text(encoding="utf-8"), 1 if page == "sft" else 16, values, task)
    return folder


def run(page, source, length, values, task="toy"):
    """What a minimal page prints with these constants, on few rows."""
    names, out = {"__name__": page}, io.StringIO()
    exec(compile(source, f"{page}.py", "exec"), names)
    names.update(values)
    rows = lambda stage, split, name=task: ROWS(stage, split, name)  # noqa: E731
    few = patch.multiple(toy, SPLITS=FEW, rows=rows, tokenizer=functools.partial(toy.tokenizer, task))
    with few, contextlib.redirect_stdout(out):
        names["main"](length)
    return out.getvalue()


@functools.cache
def outcomes(page, title, lines, given):
    """What comes of lines in the place of a task: [(how a vector comes out, how far off)], and what the page prints."""
    task = json.loads(given)

    def compute(**inputs):
        names = {"torch": torch, "utils": utils, "SimpleNamespace": SimpleNamespace} | inputs
        exec(task.get("before", ""), names)
        exec(textwrap.dedent(lines), names)
        return {name: eval(text, names) for name, text in task["outputs"].items()}

    adapter = SimpleNamespace(**{task["function"]: compute}) if "function" in task else None
    chosen = [vector for vector in VECTORS if adapter and re.fullmatch(task["vectors"], vector["name"])]
    found = [check.measure(adapter, vector) for vector in chosen]
    if any(outcome != "equal" for outcome, _ in found):
        return found, ""
    source = (PAGES / f"{page}.py").read_text(encoding="utf-8").replace(right_lines(page, task), lines)
    try:
        with contextlib.chdir(models().name):
            return found, run(page, source, task["length"], task["constants"] | {"output_folder": "models/done"})
    except (Exception, SystemExit) as error:
        return found, f"{type(error).__name__}: {error}"


def fault(lab, title, lines):
    """What is wrong with a student's lines, "" where nothing is."""
    task = lab["write"][title]
    right, given = right_lines(lab["page"], task), json.dumps(task | {k: lab[k] for k in ("length", "constants")})
    found, printed = outcomes(lab["page"], title, lines, given)
    wrong = next((x for x in found if x[0] != "equal"), None)
    expected = outcomes(lab["page"], title, right, given)[1]
    pairs = [[*map(float, re.findall(r"-?\d+\.?\d*", text))] for text in (printed, expected)]
    if not wrong and len(pairs[0]) == len(pairs[1]) and torch.allclose(*map(torch.tensor, pairs), 1e-4, 1e-4):
        return ""
    for old, new, says in task["mistakes"]:
        if outcomes(lab["page"], title, right.replace(old, new), given) == (found, printed):
            return says
    return " ".join(wrong) if wrong else f"the page prints {printed or 'nothing'}"


def grade(folder, chosen):
    """[{name, score, max_score, output}] of all tasks."""
    answers, tests = tomllib.loads((folder / "answers.toml").read_text(encoding="utf-8")), []
    for name, lab in chosen.items():
        source, said = (folder / f"{lab['page']}.py").read_text(encoding="utf-8"), answers.get(name, {})
        results = {}
        for title, task in lab["write"].items():
            lines = re.search(rf"# >>> {title}\n(.*?) *# <<<", source, re.S)
            results[title] = (
                task["points"],
                fault(lab, title, lines[1]) if lines else "the gap and its two comments are missing",
            )
        rest = (100 - sum(task["points"] for task in lab["write"].values())) // 2
        results["find"] = rest, "" if said.get("found") == lab["found"] else "another line is broken"
        low, high = lab["measured"]
        results["measure"] = rest, "" if low <= said.get("measured", 0) <= high else "far from what was measured"
        for title, (points, output) in results.items():
            score = 0 if output else points
            tests.append({"name": f"{name}: {title}", "score": score, "max_score": points, "output": output or "right"})
    return tests


def main(words=None):
    """Prints and writes the points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("labs", nargs="*", help="names such as 3_rloo; none: all")
    parser.add_argument("--make", action="store_true", help="make the folder of a student")
    args, found = parser.parse_args(words), labs()
    if unknown := set(args.labs) - found.keys():
        parser.error(f"{', '.join(unknown)}: the labs are {', '.join(found)}")
    chosen = {name: found[name] for name in args.labs or found}
    if args.make:
        return make(args.folder, chosen)
    tests = grade(args.folder, chosen)
    for test in tests:
        print(f"{test['score']:3d} of {test['max_score']:3d}  {test['name']:28}  {test['output'].strip()}")
    print(f"{sum(test['score'] for test in tests)} of {sum(test['max_score'] for test in tests)} points")
    (args.folder / "results.json").write_text(json.dumps({"tests": tests}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
