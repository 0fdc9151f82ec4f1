"""Starting values by the model's size: who gets them, who wins over them, and what is said about them."""

import dataclasses
import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from helpers import PAGES, ROOT, tiny_model

from rlhf_details import evaluate, toy, train_both, train_dpo, train_reward, train_sft
from rlhf_details.plumbing import cli, hub, models, starting_values

SCRIPTS = PAGES | {"train_sft": train_sft, "train_reward": train_reward, "train_dpo": train_dpo}
SMALL, MEDIUM, PUBLISHED, LARGE = starting_values.TABLE.values()
LINE = "starting values for a model of 0.0 M parameters, which your own flags replace: "


def start(script, *words):
    """The arguments that a script has when a user starts it with these words."""
    return cli.parse(SCRIPTS[script].Args, list(words), by_size=True)


# ---- how large a model is --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama"])
def test_parameters_are_counted_from_the_configuration_alone(kind, tmp_path):
    model = tiny_model(kind)
    model.config.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    assert starting_values.parameters(tmp_path) == sum(p.numel() for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_of_adapters_the_base_model_counts(tiny, tmp_path):
    pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny / "policy")
    size = sum(p.numel() for p in model.parameters())
    models.save_adapter(models.add_adapters(model, 2), tmp_path, tiny / "policy")
    assert starting_values.parameters(tmp_path) == size


@pytest.mark.parametrize("changes", [{}, dict(hidden_size=32, num_layers=1, num_heads=2)])
def test_a_new_model_has_as_many_parameters_as_its_flags_say(changes):
    args = train_sft.Args(dataset="toy", vocab_size=len(toy.tokenizer()), **changes)
    _, model = models.make_small(args, [{"prompt": "a", "completion": "b"}])
    assert starting_values.of_a_new_model(args) == sum(p.numel() for p in model.parameters())


# ---- who gets them ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", [*SCRIPTS, starting_values.NEW])
@pytest.mark.parametrize("size, column", [(1e6, SMALL), (124e6, MEDIUM), (1e9, PUBLISHED), (8e9, LARGE)])
def test_every_script_gets_the_values_for_the_size_of_its_model(script, size, column, monkeypatch, in_tmp):
    name = "of_a_new_model" if script == starting_values.NEW else "parameters"
    monkeypatch.setattr(starting_values, name, lambda *model: size)
    words = ["--dataset", "rows.jsonl"]
    if script != starting_values.NEW:
        words += ["--base_model" if script == "train_sft" else "--sft_model_path", "here"]
    page = script.split(",")[0]
    published, args = cli.parse(SCRIPTS[page].Args, words), start(page, *words)
    assert args == dataclasses.replace(published, **column.get(script, {}))


@pytest.mark.parametrize("script", [*SCRIPTS, "evaluate"])
@pytest.mark.parametrize("task", ["toy", "toy-sum", "toy:train"])
def test_an_embedded_task_keeps_its_own_values(script, task, in_tmp, capsys):
    kind = (SCRIPTS | {"evaluate": evaluate})[script].Args
    words = ["--dataset", task]
    assert cli.parse(kind, words, by_size=True) == cli.parse(kind, words)
    assert not capsys.readouterr().out


def test_without_a_readable_model_the_values_stay_in_silence_because_loading_it_fails_next(in_tmp, capsys):
    words = ["--dataset", "rows.jsonl", "--sft_model_path", "not/a/model"]
    assert start("train_rloo", *words) == cli.parse(SCRIPTS["train_rloo"].Args, words)
    (sought,) = capsys.readouterr().out.splitlines()
    assert sought.startswith("not/a/model: no such file or folder here")


def test_the_policy_of_both_gets_them_for_the_model_that_the_reward_model_starts_from(tiny, in_tmp):
    words = ["--reward.dataset", "a.jsonl", "--reward.sft_model_path", str(tiny / "policy")]
    reward, _, policy = train_both.parse([*words, "--policy.dataset", "b.jsonl"], by_size=True)
    for args, script in ((reward, "train_reward"), (policy, "train_ppo")):
        assert {name: getattr(args, name) for name in SMALL[script]} == SMALL[script]


def test_all_scripts_sample_alike_from_one_small_model(monkeypatch, in_tmp):
    """Otherwise one SFT model has another score before training in each of them."""
    monkeypatch.setattr(starting_values, "parameters", lambda *path: 1e6)
    words = ["--dataset", "rows.jsonl", "--sft_model_path", "here"]
    found = [start(script, *words[:2], *(words[2:] if script != "train_sft" else [])) for script in SCRIPTS]
    assert len({(args.temperature, args.response_length) for args in found}) == 1
    policies = [args for args in found if hasattr(args, "kl_coef")]
    assert len({args.missing_eos_penalty for args in policies}) == 1 and len(policies) >= 3


@pytest.mark.parametrize("script", ["train_rloo", "train_grpo"])
def test_a_model_of_some_hundred_million_parameters_takes_one_step_for_each_of_many_small_batches(
    script, monkeypatch, in_tmp
):
    """As in the runs of docs/evidence/9_real_model.md, and few episodes, which a processor can sample in hours."""
    monkeypatch.setattr(starting_values, "parameters", lambda *path: 135e6)
    args = start(script, "--dataset", "rows.jsonl", "--sft_model_path", "here")
    assert (args.num_mini_batches, args.num_ppo_epochs, args.batch_size) == (1, 1, 64)
    assert (args.total_episodes, args.missing_eos_penalty) == (10_000, 1.0)


# ---- who wins --------------------------------------------------------------------------------------------------------
def test_a_file_and_the_command_line_win_and_the_line_names_the_rest(tiny, in_tmp, capsys):
    Path("run.toml").write_text('learning_rate = 0.5\nkl_coef = 0.7\ndataset = "rows.jsonl"\n')
    words = ["--config", "run.toml", "--sft_model_path", str(tiny / "policy"), "--kl-coef=0.9", "--batch_size", "12"]
    args = start("train_rloo", *words)
    values = SMALL["train_rloo"] | dict(learning_rate=0.5, kl_coef=0.9, batch_size=12)
    assert {name: getattr(args, name) for name in values} == values
    given = "learning_rate", "kl_coef", "batch_size"
    rest = {name: x for name, x in SMALL["train_rloo"].items() if name not in given}
    (line,) = capsys.readouterr().out.splitlines()
    knob = " (at most so many rows at once, in evaluations as well; it changes no result)"
    assert line == LINE + " ".join(f"--{name} {value:g}" for name, value in rest.items()) + knob


def test_the_lines_flags_give_the_same_run(tiny, in_tmp, capsys):
    words = ["--dataset", "rows.jsonl", "--sft_model_path", str(tiny / "policy")]
    args = start("train_ppo", *words)
    flags = capsys.readouterr().out.partition(LINE)[2].partition(" (")[0].split()
    assert cli.parse(SCRIPTS["train_ppo"].Args, words + flags) == args == start("train_ppo", *words, *flags)
    assert not capsys.readouterr().out  # Nothing is left for the table.


@pytest.mark.parametrize("changes", [{}, dict(learning_rate=3e-6), dict(kl_coef=0.3, total_episodes=1_000_000)])
def test_the_cards_command_repeats_the_run(changes, tiny, in_tmp):
    words = ["--dataset", "rows.jsonl", "--sft_model_path", str(tiny / "policy")]
    args = dataclasses.replace(start("train_rloo", *words), **changes)
    repeated = shlex.split(hub.command_of(args, 1))[2:]
    assert start("train_rloo", *repeated) == args


# ---- what stays as it was --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", sorted((ROOT / "benchmark/recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_sets_every_flag_of_the_table(path):
    script = re.match(r"# rlhf_details/(train_\w+)\.py", path.read_text())[1]
    assert starting_values.names()[script] <= tomllib.loads(path.read_text()).keys()


# ---- the guide -------------------------------------------------------------------------------------------------------
GUIDE = (ROOT / "docs/guides/1_your_data.md").read_text()


def test_the_guides_learning_rates_are_those_of_the_table():
    rows = re.findall(r"^\| (below 20 M|20 M to 500 M|500 M to 5 B|5 B and more) \|(.*)\|$", GUIDE, re.M)
    shown = [[float(re.match(r"[\de.-]+", cell.strip())[0]) for cell in cells.split("|")] for _, cells in rows]
    scripts = [starting_values.NEW, "train_sft", "train_reward", "train_dpo", "train_rloo", "train_grpo", "train_ppo"]
    assert shown == [
        [column.get(name, {}).get("learning_rate", SCRIPTS[name.split(",")[0]].Args.learning_rate) for name in scripts]
        for column in (SMALL, MEDIUM, PUBLISHED, LARGE)
    ]


@pytest.mark.parametrize("column, script", [(2, "train_dpo"), (3, "train_rloo"), (4, "train_grpo"), (5, "train_ppo")])
def test_the_guides_other_values_of_a_policy_are_those_of_the_table(column, script):
    """A cell holds a small model's value and, where it differs, the script's own."""
    shown = {}
    for names, cells in re.findall(r"^\| (`--(?!learning_rate).*?`) \|(.*)\|$", GUIDE, re.M):
        numbers = re.sub(r"\[.*?\]|(?<=\d),(?=\d)", "", cells.split("|")[column]).replace("none", "nan").split(";")
        flags = [name for name in re.findall(r"--(\w+)", names) if hasattr(SCRIPTS[script].Args, name)]
        values = [[float(x) for x in part.split(", ")] for part in (numbers[0], numbers[-1]) if part.strip()]
        shown |= {name: pair for name, *pair in zip(flags, *values, strict=True)} if values else {}
    own = {name: getattr(SCRIPTS[script].Args, name) for name in shown}
    assert {"temperature", "response_length"} <= shown.keys() and {"kl_coef", "beta"} & shown.keys()
    assert shown.keys() | {"learning_rate", "micro_batch_size", "max_grad_norm"} >= SMALL[script].keys()
    for name, pair in shown.items():
        expected = [SMALL[script].get(name, own[name]), math.nan if own[name] is None else own[name]]
        assert pair == pytest.approx(expected, nan_ok=True), name
