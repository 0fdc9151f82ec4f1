"""
Every recipe of benchmark/recipes and every stage of tldr.sh, lm_human_preferences.sh and movies.sh, for two updates.
tests/cli/test_recipes.py runs them.

A recipe's command is the one of its header, and the commands of the scripts are what they print with DRY_RUN. They run
in a folder that holds stand-ins for all data sets and models that they name (published.py), in this process, on the
CPU. Sizes are replaced as `smaller` says, and nothing else. A language model as judge always prefers A: no server is
asked.
"""

import dataclasses
import importlib
import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import datasets

from rlhf_details.plumbing.inputs import cli
from rlhf_details.plumbing.machine import judge

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "benchmark/recipes").glob("*.toml"))
# The words after a script's name and the variables that it reads. One seed stands for all.
SCRIPTS = {
    "tldr.sh": ([], {"SEEDS": "44413"}),
    "lm_human_preferences.sh": (["train"], {"SEEDS": "1"}),
    "movies.sh": (["data/movies", "models/movies"], {}),
}
# A reward model's recipe runs before that of the policy which reads it.
NAMES = [*(path.name for path in CONFIGS if not path.name.startswith("reward_")), *SCRIPTS]
NAMING = "dataset eval_dataset reference_dataset base_model sft_model_path reward_model_path policy_path opponent_path"


# ---- which commands there are ----------------------------------------------------------------------------------------
def header(path):
    """(script, words of the launch command, the comment above the first value as one line of text) of a recipe."""
    lines = path.read_text().split("\n")
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    comment = [line[1:].strip() for line in lines[:end]]
    (command,) = (line for line in comment if line.startswith("accelerate launch "))
    script = re.match(r"rlhf_details/(train_\w+)\.py: ", comment[0])[1]
    return script, shlex.split(command), " ".join(comment)


def commands(name):
    """The commands of a recipe or a script, each a list of words. The current folder is one of published.write."""
    if name not in SCRIPTS:
        _, command, comment = header(ROOT / "benchmark/recipes" / name)
        first = re.findall(r"First its reward model: (\S+\.toml)", comment)
        return [*(header(ROOT / path)[1] for path in first), command]
    words, variables = SCRIPTS[name]
    env = os.environ | variables | {"DRY_RUN": "1"}
    command = ["bash", f"benchmark/recipes/{name}", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def smaller(script, args):
    """{flag: value} of what is replaced: sizes, and the address of the judge's server, which nobody calls."""
    if script == "evaluate":
        return {"num_examples": 4} | ({"judge_base_url": "http://judge"} if args.judge == "llm" else {})
    batch_size = min(args.batch_size, getattr(args, "group_size", 8))
    values = {"batch_size": batch_size, "take": 2 * batch_size}
    if script in ("train_sft", "train_reward", "train_dpo"):
        values |= {"num_train_epochs": 1}
    else:
        # Random weights do not end a response, and Tulu's may have 2048 tokens.
        values |= {"total_episodes": 2 * batch_size, "response_length": min(args.response_length, 53)}
    return {flag: value for flag, value in values.items() if value != getattr(args, flag)}


# ---- running one -----------------------------------------------------------------------------------------------------
def run(words):
    """Runs a command of two updates, or an evaluation of four prompts; returns its script. All figures are finite."""
    place = next(i for i, word in enumerate(words) if word.startswith("rlhf_details/"))
    script = Path(words[place]).stem
    module = importlib.import_module(f"rlhf_details.{script}")
    with mock.patch.object(cli, "size_of", lambda *_: 1e9):  # A published model is no smaller than its stand-in.
        args = cli.parse(module.Args, words[place + 1 :])
    for flag, name in named(args):
        assert Path(name).exists(), f"--{flag} {name}: nothing stands in for it"
    cache = mock.patch.object(datasets.config, "HF_DATASETS_CACHE", str(Path("cache").resolve()))
    answer = mock.patch.object(judge, "ask", mock.AsyncMock(return_value="Comparison: they differ.\nPreferred: A"))
    with cache, answer, mock.patch.dict(os.environ, {"WANDB_MODE": "disabled"}):
        done = module.main(dataclasses.replace(args, **smaller(script, args)))
    if script == "evaluate":
        figures = [figure["value"] for figure in numbers(done["metrics"])]
    else:
        rows = [json.loads(line) for line in Path(done["run"], "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["update"] == 2, rows[-1]["update"]
        figures = [value for row in rows for value in row.values()]
    assert figures and all(map(math.isfinite, figures)), figures
    return script


def numbers(metrics):
    """All {"value": ..} in the nested metrics of an evaluation."""
    if "value" in metrics:
        return [metrics]
    return [figure for inner in metrics.values() for figure in numbers(inner)]


def named(args):
    """[(flag, name), ..] of the data sets and models that the arguments name, the embedded task aside."""
    given = [(flag, getattr(args, flag, None) or "") for flag in NAMING.split()]
    given = [(flag, name) for flag, names in given for name in (names if isinstance(names, tuple) else [names])]
    found = [(flag, re.split(r"[:\[]", name)[0]) for flag, name in given]
    return [(flag, name) for flag, name in found if name not in ("", "toy", "scratch")]
