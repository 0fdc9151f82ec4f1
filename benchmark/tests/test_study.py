"""study.py: what each study's file says runs on the pages as they are, and tables say what made-up numbers say."""

import importlib
import shlex
import shutil
from pathlib import Path

import mutations
import pytest
import study
from intervals import ROOT

from rlhf_details.plumbing import cli

SCRIPTS = "train_sft train_reward train_dpo train_rloo train_grpo train_ppo evaluate".split()
ARGS = {name: importlib.import_module(f"rlhf_details.{name}").Args for name in SCRIPTS}
NAMES = study.studies()


def parse(command):
    """(script, Args) of a command of one of the scripts, with or without a launcher; a wrong flag ends the test."""
    words = shlex.split(command.format(root=ROOT, seed=1))
    place = max(i for i, word in enumerate(words) if word.endswith(".py"))
    script = Path(words[place]).stem
    try:
        return script, cli.parse(ARGS[script], words[place + 1 :])
    except SystemExit:
        pytest.fail(f"does not parse: {command}")


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A root of its own with the scripts, where copies with edits go."""
    shutil.copytree(ROOT / "rlhf_details", tmp_path / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(study, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_each_command_of_a_study_parses_and_each_edit_changes_its_file(name, code):
    one, before = study.Study(name), mutations.sources()
    for each in [*one.runs, *(stage for batch in one.needed(one.runs) for stage in batch)]:
        if "/" not in next(iter(one.flags(each).values())):  # a script of rlhf_details
            parse(one.command(each))
        if edits := one.edits(each):
            after = mutations.sources(study.code_of(each, edits, "t"))
            changed = {file for file in after if after[file] != before[file]}
            assert changed == {file for file, *_ in edits}, each
    for each, spec in one.runs.items():
        assert {spec.get("base", each), spec.get("like", each), spec.get("runs", each)} <= one.runs.keys(), each


@pytest.mark.parametrize("name", NAMES)
def test_a_study_has_a_question_an_answer_and_results_of_the_runs_that_it_says(name):
    one = study.Study(name)
    assert one.said["question"].endswith("?") and one.said["answer"].endswith(".")
    assert {run.removesuffix("_measured") for run in one.found} <= one.runs.keys() | one.stages.keys()


@pytest.mark.parametrize(
    ("name", "run", "needed"),
    [
        ("grpo", "part_gspo", [["sft"], ["reward"]]),
        ("grpo", "sum_gspo", [["sum_sft"]]),
        ("grpo", "lengths", [["lengths_base"], ["lengths_sft"], ["lengths_reward"]]),
        ("dpo", "dpo", [["sft"], ["reward"]]),
    ],
)
def test_a_study_trains_the_stages_that_its_runs_need_in_order_and_no_others(name, run, needed):
    assert study.Study(name).needed([run]) == needed
