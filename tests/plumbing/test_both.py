"""train_both.py: the policy is trained on the reward model just trained, in one launch. Bad flags end it first."""

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers import read_metrics, record
from safetensors.torch import load_file
from short_runs import Death, after_row, contents, die, write_rows

from rlhf_details import toy, train_both, train_reward
from rlhf_details.plumbing.inputs import models


def flags(tiny, **more):
    """A command line: eight comparisons, then two updates of the policy."""
    rows = [row | {"chosen": row["completion"], "rejected": "we ."} for row in toy.rows("sft", "train")[:8]]
    shared = dict(dataset=write_rows("pairs.jsonl", rows), sft_model_path=tiny / "policy")
    reward = shared | dict(batch_size=4, output_dir="reward", learning_rate=1e-2)
    policy = shared | dict(batch_size=8, total_episodes=16, response_length=8, output_dir="policy", seed=3)
    values = {f"reward.{k}": v for k, v in reward.items()} | {f"policy.{k}": v for k, v in policy.items()} | more
    return [str(word) for k, v in values.items() for word in ((f"--{k}",) if v is True else (f"--{k}", v))]


@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "grpo"])
def test_the_policy_is_trained_on_the_reward_model_just_trained(tiny, in_tmp, monkeypatch, algorithm):
    calls = record(monkeypatch, models, "load_reward_model")["load_reward_model"]
    result = train_both.main(flags(tiny, algorithm=algorithm))
    paths = [args[0] for args, _ in calls]
    assert paths[0] == str(tiny / "policy") and paths[1:] == ["reward"]
    saved, read = load_file("reward/model.safetensors"), calls[1][1].state_dict()
    assert all(torch.equal(read[name], x) for name, x in saved.items())
    assert len(read_metrics(result["run"])) == 2 and f"train_{algorithm}" in result["run"]
    assert len(list(Path("runs").iterdir())) == 2
    assert json.loads(Path("policy/training_args.json").read_text())["seed"] == 3


def test_both_can_be_resumed(tiny, in_tmp, monkeypatch):
    """It dies while the policy trains. The reward model is then not trained again, and the end is the same."""
    names = {"reward.run_name": "r", "policy.run_name": "p", "reward.checkpoint_every": 1, "policy.checkpoint_every": 1}
    overwrite = {"reward.overwrite": True, "policy.overwrite": True}
    train_both.main(flags(tiny, **names, **overwrite, **{"policy.output_dir": "untouched"}))
    with after_row(2, lambda run: die(run) if run.folder.name == "p" else None), pytest.raises(Death):
        train_both.main(flags(tiny, **names, **overwrite))
    steps = record(monkeypatch, torch.optim.AdamW, "step")["step"]
    train_both.main(flags(tiny, **names, **{"reward.resume": True, "policy.resume": True}))
    # PPO's four passes over the second batch, nothing of the reward model, and an empty step of torch in each resume
    assert len(steps) == 4 + 2
    ours, theirs = (load_file(f"{folder}/model.safetensors") for folder in ("policy", "untouched"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ---- the command line ------------------------------------------------------------------------------------------------
START = "--reward.sft_model_path base"


@pytest.mark.parametrize(
    "words, name, value",
    [
        # The policy starts from the reward model's start unless another one is named.
        (START, "sft_model_path", "base"),
        (f"{START} --policy.sft_model_path other", "sft_model_path", "other"),
        (f"{START} --policy.config policy.toml", "sft_model_path", "third"),
        (f"{START} --policy.config policy.toml", "kl_coef", 0.7),
        # A value may begin with a dash.
        ("--policy.reward_fn a:f b:g --policy.reward_fn_weights 1 -0.5", "reward_fn_weights", (1.0, -0.5)),
        ("--policy.reward_fn_weights -.5 -1e-3", "reward_fn_weights", (-0.5, -0.001)),
        ("--policy.missing_eos_penalty -10", "missing_eos_penalty", -10.0),  # `check` refuses it, with the reason.
        ("--policy.kl_coef=-1", "kl_coef", -1.0),
        ("'--policy.prompt_template={q} --help'", "prompt_template", "{q} --help"),
    ],
)
def test_flags_reach_the_policy(in_tmp, words, name, value):
    Path("policy.toml").write_text('kl_coef = 0.7\nsft_model_path = "third"\n')
    assert getattr(train_both.parse(shlex.split(words))[2], name) == value


@pytest.mark.parametrize("algorithm, its_flag", [("ppo", "vf_coef"), ("rloo", "rloo_k"), ("grpo", "group_size")])
def test_help_shows_the_flags_of_both(in_tmp, capsys, monkeypatch, algorithm, its_flag):
    monkeypatch.setenv("COLUMNS", "120")
    for words in (["--help", "--algorithm", algorithm], ["--algorithm", algorithm, "--policy.kl_coef", "1", "-h"]):
        with pytest.raises(SystemExit, match=r"^0$"):
            train_both.main(words)
        shown = capsys.readouterr().out
        names = re.findall(r"^\W{2,3}--(\S+?),? ", shown, re.M)
        policy = sys.modules[f"rlhf_details.train_{algorithm}"].Args
        assert {f"reward.{field.name}" for field in dataclasses.fields(train_reward.Args)} < set(names)
        assert {f"policy.{field.name}" for field in dataclasses.fields(policy)} < set(names)
        assert f"policy.{its_flag}" in names and "algorithm" in names and shown.startswith("usage")


@pytest.mark.parametrize(
    "words,message",
    [
        (["--policy.reward_model_path", "x"], "--policy.reward_model_path x"),
        (["--policy.output_dir", "./models/../models/toy/reward"], "--policy.output_dir"),
        (["--reward.output_dir", "mine", "--policy.sft_model_path", "mine/sft"], "--policy.sft_model_path"),
        (["--policy.dataset", "nofile.jsonl"], "nofile.jsonl"),
        (["--policy.num_mini_batches", "3"], "num_mini_batches"),
        (["--reward.run_name", "x", "--policy.run_name", "x"], "--policy.run_name"),
        (["--policy.dataset", "toy-sum"], "run train_ppo.py on it"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_is_trained(in_tmp, fails, words, message):
    assert message in fails(train_both.main, words) and not contents()
