"""The published recipes (benchmark/configs/*.toml): each parses, says where its values are from, and adds up to its batch."""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, read_metrics, tiny_config
from test_forms import save_splits, sft_trl_style
from transformers import GPTNeoXForSequenceClassification

from rlhf_details import toy, utils

CONFIGS = sorted((ROOT / "benchmark/configs").glob("*.toml"))
# what was published: completions an update (train_reward: comparisons), optimiser steps an update, updates (ours round up)
PUBLISHED = {
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
SOURCE = r"(ours: .{5,}|.*[\w-]\.(py|sh|sbatch|md|toml|ipynb)\b.*)"  # a file of the published system, or a word on our own choice


def header(path):
    """(script, words of the launch command, the comment above the first value as one line of text)."""
    lines = path.read_text().split("\n")
    comment = [line[1:].strip() for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]]
    (command,) = (line for line in comment if line.startswith("accelerate launch "))
    script = re.match(r"rlhf_details/(train_\w+)\.py: ", comment[0])[1]
    return script, shlex.split(command), " ".join(comment)


@functools.cache
def recipe(path):
    """(module of the script, its Args as the launch command of the file's header gives them, the number of processes)."""
    script, words, _ = header(path)
    place = words.index(f"rlhf_details/{script}.py")
    launcher, flags = words[2:place], words[place + 1 :]
    module = importlib.import_module(f"rlhf_details.{script}")
    assert flags == ["--config", str(path.relative_to(ROOT))]
    with contextlib.chdir(ROOT):  # where the command is to be typed
        args = utils.parse_args(module.Args, toy.defaults(script), flags)
    return module, args, int(launcher[launcher.index("--num_processes") + 1])


def arithmetic(args, processes):
    """(batch, minibatches, micro-batches of each, steps an update, updates); an update of train_reward is a step."""
    k, minibatches = getattr(args, "rloo_k", 1), getattr(args, "num_mini_batches", 1)
    assert args.batch_size % (minibatches * k * processes) == 0
    mine = args.batch_size // (minibatches * processes)  # episodes of a process and minibatch
    if hasattr(args, "total_episodes"):
        updates = math.ceil(args.total_episodes / args.batch_size)
    else:
        rows = int(re.search(r"\[:(\d+)\]$", args.dataset)[1])
        updates = args.num_train_epochs * rows // args.batch_size
        assert rows % args.batch_size == 0
    assert mine % args.micro_batch_size == 0
    return args.batch_size, minibatches, mine // args.micro_batch_size, getattr(args, "num_ppo_epochs", 1) * minibatches, updates


def at_home(args):
    """Arguments whose reward functions are found from any folder."""
    functions = tuple(str(ROOT / spec) for spec in getattr(args, "reward_fn", ()))
    return dataclasses.replace(args, reward_fn=functions) if functions else args


def classifier():
    """A tiny text classifier in the current folder, in place of the Hub's."""
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    GPTNeoXForSequenceClassification(tiny_config(num_labels=2, **labels)).save_pretrained("classifier")
    toy.tokenizer().save_pretrained("classifier")
    return "classifier"


def chatty(tiny):
    """The tiny policy with a chat template."""
    folder, tokenizer = shutil.copytree(tiny / "policy", "chatty"), toy.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def several(n, word):
    return f"{n} {word}" if n == 1 else f"{n} {word}{'es' if word[-1] in 'sh' else 's'}"


def test_every_published_recipe_has_its_file():
    assert PUBLISHED.keys() <= {path.stem for path in CONFIGS}


@each_config
def test_it_parses_to_its_own_values(path):
    _, args, _ = recipe(path)
    values = tomllib.loads(path.read_text())
    assert values
    for key, value in values.items():
        parsed = getattr(args, key)
        parsed = parsed[0] if isinstance(parsed, tuple) else parsed  # reward_fn and its weights: one of each
        assert (None if value == "None" else value) == parsed and isinstance(parsed, bool) == isinstance(value, bool), key


@each_config
def test_the_script_finds_no_contradiction_in_it(path, in_tmp):
    module, args, _ = recipe(path)
    module.check(at_home(args))


@pytest.mark.parametrize("path", [p for p in CONFIGS if not p.stem.startswith("reward_")], ids=lambda path: path.stem)
def test_it_runs_when_its_models_and_sizes_are_tiny(path, tiny, in_tmp, monkeypatch):
    module, args, _ = recipe(path)
    batch = 4 * getattr(args, "rloo_k", 1) * args.num_mini_batches
    models = dict(dataset="toy", eval_dataset=None, sft_model_path=str(tiny / "policy"))
    models |= dict(reward_model_path=str(tiny / "reward")) if args.reward_model_path else {}
    sizes = dict(response_length=20, batch_size=batch, total_episodes=2 * batch, micro_batch_size=4, rollout_micro_batch_size=8)
    monkeypatch.setenv("SENTIMENT_MODEL", str(classifier()))
    args = dataclasses.replace(at_home(args), **models, **sizes, num_sample_generations=1)
    if args.reward_fn and "exact_match" in args.reward_fn[0]:
        rows = [{"messages": [{"role": "user", "content": "the room"}], "answer": str(i)} for i in range(8)]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = dataclasses.replace(args, dataset="rows.jsonl", sft_model_path=str(chatty(tiny)))
    run = module.main(args)["run"]
    rows = read_metrics(run)
    assert len(rows) == 2 and all(math.isfinite(row["objective/rlhf_reward"]) for row in rows)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-3) and rows[1]["policy/grad_norm"] > 0
    assert not args.reward_fn or f"objective/rewards/{args.reward_fn[0].rpartition(':')[2]}" in rows[0]


def test_rloo_starts_on_the_columns_of_the_data_set_that_its_recipe_names(tiny, in_tmp):
    """Exactly the published columns, and a tokenizer without a chat template, as Pythia's: the prompts are read as they stand."""
    assert toy.tokenizer().chat_template is None
    module, args, _ = recipe(ROOT / "benchmark/configs/rloo_tldr_1b.toml")
    rows = sft_trl_style(24)
    assert list(rows[0]) == "prompt messages id subreddit title post summary".split()
    name = "trl-internal-testing/tldr-preference-sft-trl-style"
    folder = save_splits(in_tmp / "tldr", train=rows[:16], validation=rows[16:])
    data_sets = {flag: getattr(args, flag).replace(name, folder) for flag in ("dataset", "eval_dataset")}
    assert data_sets == {"dataset": f"{folder}:train", "eval_dataset": f"{folder}:validation"}
    models = dict(sft_model_path=str(tiny / "policy"), reward_model_path=str(tiny / "reward"))
    sizes = dict(response_length=8, batch_size=16, total_episodes=32, micro_batch_size=4, rollout_micro_batch_size=8)
    run = module.main(dataclasses.replace(args, **data_sets, **models, **sizes))["run"]
    rewards = [row["objective/rlhf_reward"] for row in read_metrics(run) if "objective/rlhf_reward" in row]
    assert len(rewards) == 2 and all(map(math.isfinite, rewards))
    samples = [json.loads(line) for line in Path(run, "samples.jsonl").read_text().splitlines()]
    assert samples and {row["query"] for row in samples} <= {row["prompt"] for row in rows[16:]}


@each_config
def test_every_value_says_where_it_is_from(path):
    keys = []
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            key, comment = re.fullmatch(r"(\w+) = (?:\"[^\"]*\"|[^\"#]+?) *# (.+)", line).groups()
            keys.append(key)
            assert re.fullmatch(SOURCE, comment), line
    assert keys == list(tomllib.loads(path.read_text()))


@each_config
def test_the_batch_of_its_header_adds_up(path):
    script, _, text = header(path)
    _, args, processes = recipe(path)
    batch, minibatches, micro, steps, updates = arithmetic(args, processes)
    split = f"{several(micro, 'micro-batch')} of {args.micro_batch_size}"
    if script == "train_reward":
        line = f"{batch} comparisons a step = {several(processes, 'process')} * {split}; {updates} steps."
    else:
        line = f"{batch} episodes an update = {several(processes, 'process')} * {several(minibatches, 'minibatch')} * {split}; "
        line += f"{several(steps, 'optimiser step')} an update, {updates} updates."
    assert f"Batch: {line}" in text
    if path.stem in PUBLISHED:
        assert (batch, steps, updates) == PUBLISHED[path.stem]


@pytest.mark.parametrize("script", ["train_ppo", "train_rloo"])
def test_the_embedded_tasks_file_is_what_the_script_takes_by_itself(script):
    values = tomllib.loads((ROOT / f"benchmark/configs/{script.removeprefix('train_')}_toy.toml").read_text())
    assert {key: None if value == "None" else value for key, value in values.items()} == toy.DEFAULTS[script]


def test_the_numbers_that_make_a_recipe_are_the_published_ones():
    """A second copy, from the published commands, so that a slip of the pen in a file shows."""
    names = "learning_rate kl_coef response_length temperature adam_eps weight_decay".split()
    numbers = {
        "ppo_descriptiveness": (1e-5, 0.15, 24, 0.7, 1e-5, 0),
        "ppo_imdb": (1.41e-5, 0.2, 32, 1, 1e-8, 0),
        "ppo_sentiment": (1e-5, 0.15, 24, 0.7, 1e-5, 0),
        "ppo_tldr_1b": (3e-6, 0.05, 53, 0.7, 1e-5, 0.01),
        "ppo_tulu3_8b": (3e-7, 0.05, 2048, 1, 1e-8, 0.01),
        "rloo_paraphrase": (1e-6, 0.05, 53, 0.5, 1e-8, 0),
        "rloo_tldr_1b": (3e-6, 0.03, 53, 0.7, 1e-8, 0),
    }
    for stem, expected in numbers.items():
        _, args, _ = recipe(ROOT / f"benchmark/configs/{stem}.toml")
        assert tuple(getattr(args, name) for name in names) == expected


def test_a_policy_reads_the_reward_model_that_its_recipe_trains():
    for task in ("sentiment", "descriptiveness"):
        (_, ppo, _), (_, reward, _) = (recipe(ROOT / f"benchmark/configs/{stage}_{task}.toml") for stage in ("ppo", "reward"))
        assert ppo.reward_model_path == reward.output_dir and ppo.sft_model_path == reward.sft_model_path
        assert (ppo.response_length, ppo.temperature) == (reward.response_length, reward.temperature)
        same = {"seed", "adam_eps", "tf_adam", "weight_decay", "lr_schedule", "max_grad_norm"}
        assert all(getattr(ppo, name) == getattr(reward, name) for name in same)


@pytest.mark.parametrize("stage", ["ppo", "reward"])
def test_the_two_tasks_of_lm_human_preferences_differ_in_their_names_alone(stage):
    texts = ((ROOT / f"benchmark/configs/{stage}_{task}.toml").read_text() for task in ("sentiment", "descriptiveness"))
    one, other = (tomllib.loads(text) for text in texts)
    for values, task in ((one, "sentiment"), (other, "descriptiveness")):
        repository = "trl-internal-testing/descriptiveness-sentiment-trl-style:"  # names both
        for key, value in values.items():
            values[key] = value.replace(repository, "").replace(task, "TASK") if isinstance(value, str) else value
    assert one == other and "TASK" in one["dataset"]


def test_open_instructs_learners_divide_the_batch_as_well_as_our_processes():
    _, args, processes = recipe(ROOT / "benchmark/configs/ppo_tulu3_8b.toml")
    assert processes == 2 * 8 and args.batch_size == 16 * (4 + 8)  # 4 of the 16 GPUs only generate there


def test_the_readmes_table_has_every_recipe_with_its_arithmetic():
    table = re.findall(r"^\| `(\w+)\.toml` \| (\d+) \| .*? \| (\d+) \| (\d+) \|$", (ROOT / "README.md").read_text(), re.M)
    assert sorted(name for name, *_ in table) == [path.stem for path in CONFIGS]
    for name, *numbers in table:
        _, args, processes = recipe(ROOT / f"benchmark/configs/{name}.toml")
        batch, _, _, steps, updates = arithmetic(args, processes)
        assert tuple(map(int, numbers)) == (batch, steps, updates), name
