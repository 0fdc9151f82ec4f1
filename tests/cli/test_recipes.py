"""The published recipes: each parses, names its sources, adds up to its batch, and runs on the published columns.

Those are benchmark/recipes/*.toml, and the stages of the three shell scripts beside them.
"""

import contextlib
import functools
import importlib
import math
import re
import tomllib
from pathlib import Path

import published
import pytest
import recipes
from helpers import ROOT, responses_per_prompt

from rlhf_details.plumbing import cli

CONFIGS = recipes.CONFIGS
# What was published: completions of an update (train_reward: comparisons), optimiser steps of an update, updates (ours
# are rounded up), and learning_rate, kl_coef, response_length, temperature, adam_eps, weight_decay.
PUBLISHED = {
    "grpo_gsm8k": (1024, 1, 468, 1e-6, 0.04, 1024, 1, 1e-8, 0),
    "ppo_descriptiveness": (512, 4, 1954, 1e-5, 0.15, 24, 0.7, 1e-5, 0),
    "ppo_imdb": (128, 4, 194, 1.41e-5, 0.2, 32, 1, 1e-8, 0),
    "ppo_sentiment": (512, 4, 1954, 1e-5, 0.15, 24, 0.7, 1e-5, 0),
    "ppo_tldr_1b": (512, 4, 1954, 3e-6, 0.05, 53, 0.7, 1e-5, 0.01),
    "ppo_tulu3_8b": (192, 4, 10417, 3e-7, 0.05, 2048, 1, 1e-8, 0.01),
    "reward_descriptiveness": (32, 1, 156, 5e-5, None, 24, 0.7, 1e-5, 0),
    "reward_sentiment": (32, 1, 156, 5e-5, None, 24, 0.7, 1e-5, 0),
    "rloo_paraphrase": (2, 4, 8, 1e-6, 0.05, 53, 0.5, 1e-8, 0),
    "rloo_tldr_1b": (4096, 4, 245, 3e-6, 0.03, 53, 0.7, 1e-8, 0),
}
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


# A value's comment names a file of the published system or a paper, or says "ours" and why.
@functools.cache
def recipe(stem):
    """(module of the script, its Args as the launch command in the file's header gives them, number of processes)."""
    path = ROOT / f"benchmark/recipes/{stem}.toml"
    script, words, _ = recipes.header(path)
    place = words.index(f"rlhf_details/{script}.py")
    launcher, flags = words[2:place], words[place + 1 :]
    module = importlib.import_module(f"rlhf_details.{script}")
    assert flags == ["--config", str(path.relative_to(ROOT))]
    with contextlib.chdir(ROOT):  # where the command is to be typed
        args = cli.parse(module.Args, flags)
    return module, args, int(launcher[launcher.index("--num_processes") + 1])


def arithmetic(args, processes):
    """(batch, minibatches, micro-batches of each, steps of an update, updates); an update of train_reward is a step."""
    k, minibatches = responses_per_prompt(args), getattr(args, "num_mini_batches", 1)
    assert args.batch_size % (minibatches * k * processes) == 0
    mine = args.batch_size // (minibatches * processes)  # episodes of a process and minibatch
    if hasattr(args, "total_episodes"):
        updates = math.ceil(args.total_episodes / args.batch_size)
    else:
        rows = int(re.search(r"\[:(\d+)\]$", args.dataset)[1])
        updates = args.num_train_epochs * rows // args.batch_size
        assert rows % args.batch_size == 0
    assert mine % args.micro_batch_size == 0
    steps = getattr(args, "num_ppo_epochs", 1) * minibatches
    return args.batch_size, minibatches, mine // args.micro_batch_size, steps, updates


@each_config
def test_it_parses_to_its_own_values_without_contradiction(path, in_tmp):
    module, args, _ = recipe(path.stem)
    values = tomllib.loads(path.read_text())
    for key, value in values.items():
        parsed = getattr(args, key)
        parsed = parsed[0] if isinstance(parsed, tuple) else parsed  # reward_fn and its weights: one of each
        assert (None if value == "None" else value) == parsed and isinstance(parsed, bool) == isinstance(value, bool)
    if args.dataset.endswith(".jsonl"):  # The README says how to write this file.
        Path(args.dataset).parent.mkdir(parents=True, exist_ok=True)
        Path(args.dataset).touch()
    Path("benchmark").symlink_to(ROOT / "benchmark")  # where recipes take functions from
    module.check(args)


@pytest.mark.parametrize("stem", PUBLISHED)
def test_the_numbers_that_make_a_recipe_are_the_published_ones(stem):
    """A second copy, so that a slip of the pen in a file shows."""
    _, args, processes = recipe(stem)
    batch, _, _, steps, updates = arithmetic(args, processes)
    names = "learning_rate kl_coef response_length temperature adam_eps weight_decay".split()
    assert (batch, steps, updates, *(getattr(args, name, None) for name in names)) == PUBLISHED[stem]


@pytest.mark.parametrize("task", ["sentiment", "descriptiveness"])
def test_a_policy_reads_the_reward_model_that_its_recipe_trains(task):
    (_, ppo, _), (_, reward, _) = (recipe(f"{stage}_{task}") for stage in ("ppo", "reward"))
    assert ppo.reward_model_path == reward.output_dir
    same = "sft_model_path response_length temperature seed adam_eps tf_adam weight_decay lr_schedule max_grad_norm"
    assert all(getattr(ppo, name) == getattr(reward, name) for name in same.split())


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of stand-ins for all data sets and models that the recipes name."""
    return published.write(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("name", recipes.NAMES)
def test_every_stage_runs_on_the_columns_that_were_published(name, hub, monkeypatch):
    monkeypatch.chdir(hub)
    stages = [recipes.run(words) for words in recipes.commands(name)]
    assert " ".join(stages) == {
        "tldr.sh": "train_sft train_reward train_ppo evaluate train_rloo evaluate",
        "lm_human_preferences.sh": "train_reward train_ppo train_reward train_ppo",
        "movies.sh": "train_sft train_reward train_rloo train_ppo train_dpo evaluate evaluate evaluate",
        "ppo_sentiment.toml": "train_reward train_ppo",
        "ppo_descriptiveness.toml": "train_reward train_ppo",
    }.get(name, f"train_{name.partition('_')[0]}")
