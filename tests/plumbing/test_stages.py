"""The embedded task's stages: models that are missing are trained first, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import PAGES, ROOT

from rlhf_details import train_reward, train_rloo, train_sft
from rlhf_details.plumbing.inputs import cli
from rlhf_details.plumbing.machine import stages

SCRIPTS = {"train_sft": train_sft, "train_reward": train_reward, "train_rloo": train_rloo}


@pytest.fixture
def started(monkeypatch):
    """[(command, environment)] of the processes that stages.ensure starts; each makes its model at once."""
    calls = []

    def run(command, env):
        calls.append((command, env))
        folder = Path(command[command.index("--output_dir") + 1])
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_missing_stages_are_trained_once_in_their_order_and_announced(in_tmp, started, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "2"), monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true"), monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    args = cli.parse(PAGES["train_rloo"].Args, [])
    capsys.readouterr()
    stages.ensure(args)
    scripts = [os.path.relpath(ROOT / f"rlhf_details/{name}.py") for name in ("train_sft", "train_reward")]
    assert [command[:2] for command, _ in started] == [[sys.executable, script] for script in scripts]
    assert started[0][0][2:] == ["--dataset", "toy", "--output_dir", "models/toy/sft"]
    assert started[1][0][-2:] == ["--sft_model_path", "models/toy/sft"]
    for _, environment in started:  # A child is a launch of its own.
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "ACCELERATE_USE_FSDP"} & environment.keys()
        assert environment["ACCELERATE_USE_CPU"] == "true"
    assert capsys.readouterr().out.splitlines() == [
        "models/toy/sft does not exist yet: running train_sft.py first",
        "models/toy/reward does not exist yet: running train_reward.py first",
    ]
    stages.ensure(args)
    assert len(started) == 2


OWN = "--sft_model_path mine/sft --reward_model_path mine/reward"


@pytest.mark.parametrize(
    "page, words, folders",
    [
        *[("train_distill", f"--dataset {x}", [f"models/{x}/sft", f"models/{x}/rloo"]) for x in ("toy", "toy-sum")],
        # A folder that is not the task's own is never made up.
        ("train_rloo", OWN, []),
        ("train_rloo", "--dataset rows.jsonl --sft_model_path models/toy/sft", []),
    ],
)
def test_what_is_missing_of_the_tasks_own_is_trained_as_its_page_does_by_default(in_tmp, started, page, words, folders):
    """A teacher's process trains the reward model that it needs, as it would without a student."""
    stages.ensure(cli.parse(PAGES[page].Args, words.split()))
    for (command, _), folder in zip(started, folders, strict=True):
        script = SCRIPTS[Path(command[1]).stem]
        assert cli.parse(script.Args, command[2:]).output_dir == folder


def test_a_stage_that_fails_ends_the_run_with_its_exit_code(in_tmp, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, env: SimpleNamespace(returncode=7))
    with pytest.raises(SystemExit) as end:
        stages.ensure(cli.parse(PAGES["train_rloo"].Args, []))
    assert end.value.code == 7
