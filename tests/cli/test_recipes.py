"""The published recipes: each parses, names its sources, adds up to its batch, and runs on the published columns.

Those are benchmark/recipes/*.toml, and the stages of the three shell scripts beside them.
"""

import contextlib
import functools
import importlib
import math
import re
from pathlib import Path

import published
import pytest
import recipes
from helpers import ROOT, responses_per_prompt

from rlhf_details.plumbing.inputs import cli

CONFIGS = recipes.CONFIGS
# What was published: completions of an update (train_reward: comparisons), optimiser steps of an update, updates (ours
# are rounded up).
PUBLISHED = {
    "grpo_gsm8k": (1024, 1, 468),
    "ppo_descriptiveness": (512, 4, 1954),
    "ppo_imdb": (128, 4, 194),
    "ppo_sentiment": (512, 4, 1954),
    "ppo_tldr_1b": (512, 4, 1954),
    "ppo_tulu3_8b": (192, 4, 10417),
    "reward_descriptiveness": (32, 1, 156),
    "reward_sentiment": (32, 1, 156),
    "rloo_paraphrase": (2, 4, 8),
    "rloo_tldr_1b": (4096, 4, 245),
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


@each_config
def test_it_parses_without_contradiction(path, in_tmp):
    module, args, _ = recipe(path.stem)
    if args.dataset.endswith(".jsonl"):  # The README says how to write this file.
        Path(args.dataset).parent.mkdir(parents=True, exist_ok=True)
        Path(args.dataset).touch()
    Path("benchmark").symlink_to(ROOT / "benchmark")  # where recipes take functions from
    module.check(args)


@pytest.mark.parametrize("stem", PUBLISHED)
def test_a_recipe_has_the_published_batch_steps_and_updates(stem):
    """A row of comparisons is trained on once in a pass, and an update of train_reward is a step."""
    _, args, processes = recipe(stem)
    minibatches, batch = getattr(args, "num_mini_batches", 1), args.batch_size
    for size in (responses_per_prompt(args), args.micro_batch_size):
        assert batch % (minibatches * processes * size) == 0
    rows = re.search(r"\[:(\d+)\]$", args.dataset)
    total = getattr(args, "total_episodes", None) or args.num_train_epochs * int(rows[1])
    steps = getattr(args, "num_ppo_epochs", 1) * minibatches
    assert (batch, steps, math.ceil(total / batch)) == PUBLISHED[stem]


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
