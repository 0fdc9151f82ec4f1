"""README, guides, details and imports agree with the code: commands parse, flags and metrics are documented."""

import ast
import contextlib
import functools
import importlib
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from helpers import PAGES, ROOT, SCRIPTS, page_args, read_metrics
from short_runs import write_rows

from rlhf_details import toy, train_both, train_dpo, train_reward, train_sft, utils
from rlhf_details.plumbing.inputs import cli
from rlhf_details.plumbing.machine import vllm

pytest.importorskip("matplotlib")
import mutations
import readme
import study

import benchmark

README = "\n".join(path.read_text() for path in readme.DOCUMENTS)  # and the guides and the evidence
PACKAGE = sorted((ROOT / "rlhf_details").rglob("*.py"))


# ---- the README ------------------------------------------------------------------------------------------------------
def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)[1]


def commands():
    """(script, words) of every command of the README that starts one of the scripts."""
    for line in README.replace("\\\n", " ").splitlines():
        pattern = r"(?:^|`)(?:\w+=\w+ )?((?:accelerate launch|python|torchrun)[^`|]*rlhf_details/(\w+)\.py[^`|]*)"
        match = re.search(pattern, line)
        if match and "benchmark/benchmark.py" not in match[1]:  # That one is given commands as words.
            yield match[2], shlex.split(match[1])
        if match := re.search(r"sbatch .*benchmark/slurm\.sh (\w+) (.*)", line):
            yield match[1], [f"rlhf_details/{match[1]}.py", *shlex.split(f"--run_name {match[2]}")]


def test_the_readme_begins_with_the_loop_of_the_minimal_page():
    loop = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert loop.startswith("for update in range(") and "optimizer.step()" in loop
    assert textwrap.indent(loop, "    ") in (ROOT / "rlhf_details/minimal/rloo.py").read_text()


def test_every_command_of_the_readme_parses():
    found = list(commands())
    assert {"train_rloo", "train_ppo", "train_sft", "train_reward", "evaluate"} <= {script for script, _ in found}
    with contextlib.chdir(ROOT):  # where the commands are to be typed
        for script, words in found:
            flags = [
                word for word in words[words.index(f"rlhf_details/{script}.py") + 1 :] if word not in ("..", "...")
            ]
            if script == "show_tokens":  # It is given another script's command.
                script, *flags = flags
                script = script.removesuffix(".py")
            train_both.parse(flags) if script == "train_both" else cli.parse(SCRIPTS[script].Args, flags)


def test_every_command_of_the_readme_that_runs_or_draws_a_study_parses():
    found = set()
    text = re.sub(r" *\\\n *", " ", README)  # a command in one line
    for name, rest in re.findall(r"python benchmark/(?:\w+/)?(benchmark|plot|study)\.py([^`|\n]*)", text):
        module, words = importlib.import_module(name), shlex.split(rest.partition("     ")[0])
        if name in ("benchmark", "plot"):
            kind = getattr(module, "COMMANDS", {}).get(words[0])
            module.tyro.cli(kind[0] if kind else module.Args, args=words[1:] if kind else words)
        else:
            _, args = benchmark.parse(module.COMMANDS, words)
            assert name != "study" or args.study in ("all", *study.studies()), rest
            if getattr(args, "runs", ()):
                assert set(args.runs) - {"NAME"} <= study.Study(args.study).runs.keys(), rest
        found.add(name)
    assert {"benchmark", "plot", "study"} <= found


def test_the_metric_tables_list_exactly_what_is_logged(tiny, in_tmp, few_prompts, monkeypatch):
    documented = set(re.findall(r"`([a-z_]+(?:/[a-zA-Z_]+)*)`", section("Metrics").split("Where they differ")[0]))
    documented -= {"metrics.jsonl"}
    Path("mine.py").write_text("def f(prompts, completions): return [True for _ in completions]")
    texts = [{**row, "chosen": row["completion"], "rejected": "we ."} for row in toy.rows("sft", "train")[:8]]
    write_rows("rows.jsonl", texts)
    logged = set()
    monkeypatch.setattr(vllm, "sampler", lambda *args: utils.sample)  # vLLM's numbers do not matter here.
    for page in PAGES:
        changes = dict(total_episodes=32, eval_dataset="toy:test", reward_fn=("mine.py:f",), sampler="vllm")
        changes |= {"entropy_coef": 0.1} if page == "train_grpo" else {}
        run = PAGES[page].main(page_args(page, tiny, **changes, output_dir=page))["run"]
        logged |= {name for row in read_metrics(run) for name in row}
    values = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", batch_size=8, response_length=8, overwrite=True)
    logged |= set(train_sft.main(train_sft.Args(base_model=str(tiny / "policy"), **values))["metrics"])
    for page in (train_reward, train_dpo):
        logged |= set(page.main(page.Args(sft_model_path=str(tiny / "policy"), **values))["metrics"])
    logged = {name for name in logged if "objective/rewards/" not in name}
    assert (documented - logged, logged - documented) == (set(), set())
    assert "`objective/rewards/<name>`" in README


def test_the_readmes_tables_are_those_that_the_studies_have_written():
    assert readme.written(README) == README


def test_every_link_and_figure_leads_to_a_file():
    """Anchors are tested in tests/site."""
    found = [(path, link) for path in readme.DOCUMENTS for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text())]
    for path, link in found:
        target = path.parent / link.partition("#")[0]
        assert link.startswith("http") or target.exists() or path.name in ("index.md", "cheat_sheet.md"), (path, link)


# ---- the index of details --------------------------------------------------------------------------------------------
NAMED = r"(?<![\w/])((?:tests|benchmark|docs|rlhf_details)/[\w/]+\.(?:py|sh))(?:::(\w+))?"
CHECKS = ROOT / "benchmark/checks"
DETAILS, FAULTS = mutations.DETAILS, tomllib.loads((CHECKS / "details/faults.toml").read_text())


def test_each_tag_of_the_code_has_a_row_and_a_test_named_after_it():
    in_code = {tag for path in PACKAGE for tag in mutations.tags_in(path.read_text())}
    assert (in_code - DETAILS.keys(), DETAILS.keys() - in_code) == (set(), set())
    assert not {tag for tag in in_code if not mutations.tests_of(tag)}
    assert all(row["what"] and row["source"] for row in DETAILS.values())


def test_each_tagged_line_has_a_mutant_that_changes_it():
    code, without_comments = mutations.sources(), functools.cache(lambda text: ast.unparse(ast.parse(text)))
    for tag, file, old, new in mutations.MUTATIONS:
        mutant = mutations.mutate(code[file], tag, old, new)
        assert without_comments(mutant) != without_comments(code[file]), (tag, file)
    assert not mutations.without_mutant()


def test_every_fault_has_tests_that_exist_or_a_reason():
    caught = {fault for detail in DETAILS.values() for fault in detail.get("faults", "").split()}
    exist = {test.removeprefix("tests/") for test in mutations.all_tests(ROOT)}
    for number, fault in FAULTS.items():
        assert not {re.sub(r"\[.*", "", test) for test in fault["tests"]} - exist, number
        assert fault["tests"] or number in caught or fault["note"], number


def test_every_script_and_test_that_a_text_names_exists():
    texts = [*readme.DOCUMENTS, *(ROOT / "docs/notes").glob("*.toml"), *(ROOT / "examples").rglob("*.md"), *PACKAGE]
    texts += [ROOT / "benchmark/README.md", *(ROOT / "benchmark").rglob("*.toml")]
    named = {(file, test) for path in texts for file, test in re.findall(NAMED, path.read_text())}
    assert len(named) > 30
    exist = mutations.all_tests(ROOT)
    made_up = {"rlhf_details/train_mine.py", "rlhf_details/minimal/mine.py"}  # by docs/contributing.md
    assert {file for file, _ in named if not (ROOT / file).is_file()} <= made_up
    assert not {f"{file}::{test}" for file, test in named if test} - exist.keys()


def test_the_index_in_the_readme_is_that_of_the_code():
    command = [sys.executable, CHECKS / "details.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- imports ---------------------------------------------------------------------------------------------------------
def imported(path):
    """The modules of this package that a file imports anywhere, e.g. {"utils", "plumbing.inputs"}."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{name.name}" for name in node.names}
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    own = [name.split(".")[1:] for name in found if name.startswith("rlhf_details.")]
    return {".".join(parts[: 2 if parts[0] == "plumbing" else 1]) for parts in own}


def test_imports_run_one_way():
    """Pages import plumbing, plumbing imports utils and the embedded task; no page imports another one.

    A room of plumbing imports itself and the rooms above it.
    """
    pages, rooms = {*SCRIPTS, "train_both"}, ["console", "inputs", "machine", "outputs"]
    for path in PACKAGE:
        names = imported(path)
        if path.parent.parent.name == "plumbing" or path.stem == "console":
            room = path.stem if path.stem in rooms else path.parent.name
            above = {f"plumbing.{other}" for other in rooms[: rooms.index(room) + 1]}
            assert names <= {"utils", "noise", "toy", *above}, (path.name, names)
        elif path.stem in pages - {"train_both"}:  # That one is made of three pages.
            # An evaluation lets policy and environment speak as in training.
            assert names & pages <= ({"train_agent"} if path.stem == "evaluate" else set()), path.name
        elif path.stem in ("utils", "noise"):
            assert names <= {"noise"} - {path.stem}
