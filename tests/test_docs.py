"""README, flags and metrics agree with the code; a newcomer's commands parse; nothing is declared that nothing reads."""

import ast
import dataclasses
import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, ppo_args, rloo_args
from test_stages import reward_args, sft_args, write_rows

pytest.importorskip("matplotlib")
import against_trl
import mutations
import plot
import readme
import toy as toy_over_seeds

import benchmark
from rlhf_details import evaluate, toy, train_both, train_ppo, train_reward, train_rloo, train_sft, utils

README = (ROOT / "README.md").read_text()
SCRIPTS = {
    "train_sft": train_sft,
    "train_reward": train_reward,
    "train_ppo": train_ppo,
    "train_rloo": train_rloo,
    "evaluate": evaluate,
}


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)[1]


def test_quick_start_has_exactly_two_bash_blocks_and_no_other_section_has_one():
    blocks = re.findall(r"```bash\n(.*?)```", section("Quick start"), re.S)
    assert len(blocks) == 2 == README.count("```bash")
    assert "accelerate launch rlhf_details/train_rloo.py\n" in blocks[0] and "pytest" in blocks[1]
    assert all("-c constraints.txt" in block and "venv" in block for block in blocks)


def test_the_metric_tables_list_exactly_what_is_logged(tiny, in_tmp):
    documented = set(re.findall(r"`([a-z_]+(?:/[a-zA-Z_]+)*)`", section("Metrics").split("Where they differ")[0]))
    documented -= {"metrics.jsonl"}
    logged = set()
    Path("mine.py").write_text("def f(prompts, completions): return [True for _ in completions]")
    for script, args in ((train_rloo, rloo_args), (train_ppo, ppo_args)):
        script.main(args(tiny, total_episodes=16, eval_dataset="toy:test", reward_fn=("mine.py:f",)))
        logged |= {name for line in Path("runs/run/metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    write_rows("rows.jsonl", toy.rows("sft", "train")[:8])
    logged |= set(train_sft.main(sft_args(num_train_epochs=1)))
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "we ."} for r in toy.rows("sft", "train")[:8]]
    write_rows("rows.jsonl", pairs)
    logged |= set(train_reward.main(reward_args(tiny)))
    assert documented == {name for name in logged if "/rewards/" not in name}
    assert "`objective/rewards/<name>`" in README and "eval/objective/rewards/f" in logged


def commands():
    """Every command of the README that starts one of the scripts, with its backslash-free line."""
    for line in README.splitlines():
        match = re.search(r"(?:^|`)(?:\w+=\w+ )?((?:accelerate launch|python|torchrun)[^`|]*rlhf_details/(\w+)\.py[^`|]*)", line)
        if match and "benchmark/benchmark.py" not in match[1]:  # which is given commands as words
            yield match[2], match[1]


def test_every_command_of_the_readme_parses_against_the_flags():
    found = list(commands())
    assert len(found) >= 6
    for script, command in found:
        words = [w for w in shlex.split(command) if w != "..."]
        flags = words[words.index(f"rlhf_details/{script}.py") + 1 :]
        if script == "train_both":
            train_both.parse(flags)
        else:
            utils.parse_args(SCRIPTS[script].Args, toy.defaults(script), flags)


def test_every_command_of_the_readme_that_runs_or_draws_a_study_parses():
    benchmarks = {"benchmark": None} | dict.fromkeys(("ablations", "overoptimisation", "against_trl", "plot"))
    found = set()
    for name, rest in re.findall(rf"python benchmark/({'|'.join(benchmarks)})\.py([^`|\n]*)", README):
        module, words = importlib.import_module(name), shlex.split(rest.partition("     ")[0])
        if name == "benchmark":
            module.tyro.cli(module.Args, args=words)
        elif name == "plot":
            kind = words[0] if words[0] in module.COMMANDS else None
            module.tyro.cli(module.COMMANDS[kind][0] if kind else module.Args, args=words[1:] if kind else words)
            words[0] = kind
        else:
            benchmark.parse(module.COMMANDS, words)
        found.add((name, words[0]))
    studies = {(name, kind) for name in ("ablations", "overoptimisation", "against_trl") for kind in ("run", "draw")}
    assert studies | {("plot", "compare"), ("plot", "curves"), ("plot", None)} <= found


def test_the_readmes_tables_are_those_that_the_studies_have_written():
    assert readme.written(README) == README and README.count("<!-- table ") == 2 * len(readme.TABLES)


def test_every_figure_of_the_readme_is_there_and_they_are_small_together():
    figures = [ROOT / path for path in re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)]
    assert len(figures) >= 4 and set(figures) == set((ROOT / "static").glob("*.svg")) | set((ROOT / "static").glob("*.png"))
    assert sum(path.stat().st_size for path in figures) < 2e6


def test_every_flag_that_the_readme_names_exists():
    fields = {f.name for module in SCRIPTS.values() for f in dataclasses.fields(module.Args)}
    fields |= {"algorithm", "reward", "policy"}  # of train_both.py
    fields |= {f"no_{name}" for name in fields}
    studies = benchmark.Args, plot.CurvesArgs, plot.CompareArgs, toy_over_seeds.Args
    studies += tuple(arguments for arguments, _ in against_trl.COMMANDS.values())
    fields |= {field.name for arguments in studies for field in dataclasses.fields(arguments)}
    elsewhere = {"num_processes", "mixed_precision", "config_file", "nproc_per_node", "help"}
    elsewhere |= {
        "no",
        "filters",
        "env",
        "output",
    }  # git diff --no-index; openrlbenchmark's --filters, --env-ids, --output-filename
    for flag in re.findall(r"--([a-z_]+)", README):
        assert flag in fields | elsewhere, flag


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read_and_documented(script):
    source = (ROOT / f"rlhf_details/{script}.py").read_text()
    tree = ast.parse(source)
    shared = "".join(
        (ROOT / f"rlhf_details/{name}.py").read_text() for name in ("utils", "runs", "engines", "hub", "lora", "reward_functions")
    )
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "args"}
    read |= set(re.findall(r"\bargs\.(\w+)", shared)) | set(re.findall(r'given\.get\("(\w+)"\)', shared))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args").body
    for field, doc in zip(body[::2], body[1::2], strict=True):
        assert field.target.id in read, f"{field.target.id} is read by nothing"
        assert len(doc.value.value) > 8, f"{field.target.id} is not documented"


def test_the_table_of_validated_combinations_is_that_of_the_last_run_of_the_engine_tests():
    benchmark = runpy.run_path(str(ROOT / "benchmark" / "validated.py"))
    found = json.loads((ROOT / "rlhf_details" / "validated.json").read_text())
    assert benchmark["table"](found) in README and len(found) > 30


def test_flags_mean_the_same_in_every_script():
    types = {}
    for script, module in SCRIPTS.items():
        for field in dataclasses.fields(module.Args):
            as_trained = script == "evaluate" and field.name in evaluate.FALLBACKS and field.name in types  # or None, there
            expected = types[field.name] | None if as_trained else types.setdefault(field.name, field.type)
            assert expected == field.type, field.name


def test_the_toys_defaults_are_flags_of_their_scripts():
    for script, values in toy.DEFAULTS.items():
        assert values.keys() <= {f.name for f in dataclasses.fields(SCRIPTS[script].Args)}


# ---- the index of details ------------------------------------------------------------------------------------------------

DETAILS, CATALOGUE, FAULTS = (
    tomllib.loads((ROOT / "benchmark" / f"{name}.toml").read_text()) for name in "details catalogue faults".split()
)
SOURCES = {path.name: path.read_text() for path in sorted((ROOT / "rlhf_details").glob("*.py"))}
UNPARSED = {file: ast.unparse(ast.parse(source)) for file, source in SOURCES.items()}
STANDS = [
    (tag, file) for file, source in SOURCES.items() for tag in mutations.tags_in(source)
]  # fails where a file has a tag twice


def all_tests():
    return {test.removeprefix("tests/") for test in mutations.all_tests(ROOT)}


def test_the_index_and_the_verdicts_are_those_of_the_code():
    done = subprocess.run([sys.executable, ROOT / "benchmark" / "details.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_code_table_tests_and_mutants_have_the_same_tags():
    tags = set(DETAILS["tags"])
    assert {tag for tag, _ in STANDS} == tags and len(tags) > 50
    named = {m[1].upper().replace("_", "-") for m in (re.match(r"test_([a-z]+_\d+)_", t.split("::")[1]) for t in all_tests()) if m}
    assert named == tags
    assert {(tag, file) for tag, file, _, _ in mutations.MUTATIONS} == set(STANDS)


@pytest.mark.parametrize("tag", DETAILS["tags"])
def test_a_tag_has_a_cause_of_a_dozen_words_a_source_and_the_next_number(tag):
    family, number = tag.split("-")
    assert number == "1" or f"{family}-{int(number) - 1}" in DETAILS["tags"]
    assert DETAILS["tags"][tag]["what"] and DETAILS["tags"][tag]["source"]
    for file in (file for t, file in STANDS if t == tag):
        (comment,) = re.findall(rf"#.*\[{tag}\](.*)", SOURCES[file])
        assert 2 <= len(re.findall(r"[\w']+", comment)) <= 12, comment


def test_details_of_both_scripts_have_the_same_words():
    comments = {file: dict(re.findall(r"\[([A-Z]+-\d+)\] (.*)", SOURCES[file])) for file in ("train_ppo.py", "train_rloo.py")}
    ppo, rloo = comments.values()
    differ = {tag for tag in ppo.keys() & rloo.keys() if ppo[tag] != rloo[tag]}
    assert len(ppo.keys() & rloo.keys()) > 25 and differ <= {"REW-5", "LOG-2"}, (
        differ
    )  # PPO has other penalties, and reduces a step


@pytest.mark.parametrize(
    "tag, file, old, new", mutations.MUTATIONS, ids=lambda x: x if re.fullmatch(r"[A-Z]+-\d+|\w+\.py", x) else ""
)
def test_a_mutant_can_be_made_and_changes_its_statement_alone(tag, file, old, new):
    mutant = mutations.mutate(SOURCES[file], tag, old, new)
    ast.parse(mutant)
    assert ast.unparse(ast.parse(mutant)) != UNPARSED[file]


@pytest.mark.slow
def test_mutants_survive_reformatting():
    changed = 0
    for file in sorted({file for _, file, _, _ in mutations.MUTATIONS}):
        command = [sys.executable, "-m", "ruff", "format", "--line-length", "100", "--stdin-filename", file, "-"]
        source = subprocess.run(command, input=SOURCES[file], capture_output=True, text=True, check=True).stdout
        changed += source != SOURCES[file]
        for tag, _, old, new in (m for m in mutations.MUTATIONS if m[1] == file):
            mutations.mutate(source, tag, old, new)
    assert changed > 4


def test_every_entry_of_the_catalogue_has_one_verdict_and_tagged_ones_a_tag():
    sizes = dict(A=17, B=11, C=11, D=5, E=17, F=15, G=11, H=10, I=8, J=14, K=12, L=9, M=5, N=15)
    assert list(CATALOGUE) == [f"{letter}{i}" for letter, size in sizes.items() for i in range(1, size + 1)]
    tagged = {entry for detail in DETAILS["tags"].values() for entry in detail["entries"].split()}
    for entry, row in CATALOGUE.items():
        assert row["verdict"] in ("tagged", "different", "not ours") and (row["verdict"] == "tagged") == (entry in tagged), entry
        assert row["what"] and (row["why"] or row["verdict"] == "tagged") and "|" not in row["what"] + row["why"], entry


def test_every_fault_has_tests_that_exist_or_a_reason():
    assert list(FAULTS) == [str(i) for i in range(1, 48)]
    caught = {fault for detail in DETAILS["tags"].values() for fault in detail["faults"].split()}
    assert caught <= FAULTS.keys()
    exist = all_tests()
    for number, fault in FAULTS.items():
        assert {re.sub(r"\[.*", "", test) for test in fault["tests"]} <= exist, number
        assert (fault["tests"] or number in caught or fault["note"]) and not fault["note"].startswith("MISSING"), number


def test_a_row_of_the_report_says_killed_only_where_a_test_failed():
    mutant, rows = mutations.MUTATIONS[0], []
    for code, said in (
        (1, "tests/test_a.py::test_b - assert 1 == 2"),
        (None, "no end after 240 s"),
        (0, ""),
        (2, "broken"),
        (4, ""),
        (5, ""),
    ):
        rows.append((mutant, code, said, 1.0))
    report = mutations.table(rows)
    assert report.startswith("2 of 6 mutants killed") and report.count("**survived**") == 4 and "`test_b`" in report


# ---- what no file may hold -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", sorted((ROOT / "rlhf_details").glob("*.py")), ids=lambda p: p.name)
def test_no_memory_rituals_and_no_leftovers(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not re.search(r"^\s*del |empty_cache|gc\.collect|time\.sleep|TODO|FIXME|except:|INVALID_LOGPROB", line), number
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert not any(isinstance(node, ast.Delete | ast.Global) for node in nodes)
    for node in nodes:  # a number that stands for "no value" among log-probs or rewards
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("masked_fill", "masked_fill_", "where"):
            sentinels = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, int | float)]
            assert not set(sentinels) - {0}, ast.unparse(node)


def test_no_code_is_commented_out():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "ERA", ROOT / "rlhf_details"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_importing_opens_no_connection_and_writes_nothing(tmp_path):
    code = """
import socket, sys
def refuse(*a, **k): raise AssertionError("a connection at import")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from rlhf_details import (data, engines, evaluate, health, hub, lora, reward_functions, runs, toy, train_both, train_ppo,
                          train_reward, train_rloo, train_sft, utils)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout and not list(tmp_path.iterdir()), done.stderr


def phases_of(source):
    return re.findall(r"# ---- (\d\. \w+)", source)


def test_both_loops_have_the_same_six_phases():
    wanted = ["1. Rollout", "2. Scores", "3. Rewards", "4. Advantages", "5. Optimise", "6. Log"]
    assert phases_of(SOURCES["train_ppo.py"]) == wanted == phases_of(SOURCES["train_rloo.py"])


@pytest.mark.parametrize("script, args", [(train_rloo, rloo_args), (train_ppo, ppo_args)], ids=["rloo", "ppo"])
def test_gold_is_reported_of_the_embedded_tasks_prompts_only(script, args, tiny, in_tmp):
    write_rows("rows.jsonl", toy.rows("sft", "train")[:16])
    for dataset, eval_dataset, training, held_out in (("toy", "rows.jsonl", True, False), ("rows.jsonl", "toy:test", False, True)):
        script.main(args(tiny, total_episodes=16, dataset=dataset, eval_dataset=eval_dataset, output_dir=dataset[:3]))
        row = json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[-1])
        assert ("objective/gold" in row, "eval/objective/gold" in row) == (training, held_out)
