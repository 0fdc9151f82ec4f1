"""Every public function of utils: masks and padding, arguments, rows, encoding, model folders, the run folder."""

import copy
import csv
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from rlhf_details import data, runs, toy, utils


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No test may wait for the network, or leave anything in the user's cache."""
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()  # as every main does
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def fails(capsys):
    """fails(f, *args): f must end with exit code 2 and one line on stderr; returns the line."""

    def check(function: Callable, *args, **kwargs):
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            function(*args, **kwargs)
        line = capsys.readouterr().err
        assert e.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1 and line.endswith("\n"), line
        return line

    return check


# ---- masks, padding, shuffles ----------------------------------------------------------------------------------------
def test_masked_mean_is_the_mean_of_what_the_mask_keeps():
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.rand(5, 7, generator=generator), torch.rand(5, 7, generator=generator) < 0.4
    kept = [x[i, j].item() for i in range(5) for j in range(7) if mask[i, j]]
    assert utils.masked_mean(x, mask).item() == pytest.approx(sum(kept) / len(kept), rel=1e-6)
    assert utils.masked_mean(x, torch.zeros_like(mask)).item() == 0


H3 = [1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]
H3_WHITENED = [0.0508, 0.4381, 0.8254, 1.2127, 1.6, 1.9873, 2.3746, 2.7619, 3.1492]


def test_whitening_without_shift_of_the_known_example():
    x = torch.tensor(H3)
    mask = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(utils.masked_whiten(x, mask, False), torch.tensor(H3_WHITENED), atol=1e-4, rtol=0)
    torch.testing.assert_close(utils.masked_whiten(x, mask), torch.tensor(H3_WHITENED) - 1.6, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_ppo_11_whitening_uses_the_biased_variance_of_what_the_mask_keeps(shift_mean):
    generator = torch.Generator().manual_seed(0)
    x, mask = 5 * torch.rand(4, 6, generator=generator), torch.rand(4, 6, generator=generator) < 0.5
    x[~mask] = 1e3  # must not be looked at
    kept = x[mask].tolist()
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((v - mean) ** 2 for v in kept) / len(kept) + 1e-8)
    put_back = 0 if shift_mean else mean
    expected = [[(x[i, j].item() - mean) / std + put_back if mask[i, j] else 0.0 for j in range(6)] for i in range(4)]
    torch.testing.assert_close(utils.masked_whiten(x, mask, shift_mean), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_constants_and_empty_masks_are_whitened_to_zero():
    x = torch.full((2, 3), 7.0)
    assert utils.masked_whiten(x, torch.ones(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2
    assert utils.masked_whiten(x, torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2
    assert utils.masked_whiten(torch.tensor([3.0]), torch.tensor([True])).tolist() == [0.0]  # one token: no division by 0


def test_data_5_left_pad_puts_the_rows_at_the_right():
    tokens, mask = utils.left_pad([[5, 6, 7], [8], [9, 10]])
    assert mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    assert tokens.dtype == torch.int64 and mask.dtype == torch.bool
    assert [t[m].tolist() for t, m in zip(tokens, mask, strict=True)] == [[5, 6, 7], [8], [9, 10]]
    assert tokens[~mask].tolist() == [0, 0, 0]
    assert utils.left_pad([[0, 0], [3]])[1].tolist() == [[True, True], [False, True]]  # a real token may be 0


def test_data_6_positions_count_the_real_tokens_before():
    mask = torch.tensor([[1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    got = utils.positions_from_mask(mask)
    assert got.dtype == torch.int64 and got[0][mask[0]].tolist() == [0, 1, 2, 3]
    for row, real in zip(got.tolist(), mask.tolist(), strict=True):
        assert [p for p, r in zip(row, real, strict=True) if r] == list(range(sum(real)))
    assert got[1, :2].tolist() == [0, 0] and got[3].tolist() == [0] * 6  # left padding gets 0, nothing is negative


def test_permutation_depends_on_its_coordinates_alone():
    one = utils.permutation(50, 1, 2)
    assert sorted(one) == list(range(50)) and one != list(range(50)) and all(type(i) is int for i in one)
    torch.manual_seed(3)
    assert utils.permutation(50, 1, 2) == one
    others = [utils.permutation(50, *c) for c in [(2, 1), (1, 3), (2, 2), (1,), (1, 2, 1), (12,)]]
    assert all(other != one for other in others) and len(set(map(tuple, others))) == len(others)


def test_opt_1_learning_rate_is_full_at_first_and_a_share_at_last():
    trace = [utils.learning_rate_at(u, 10, 3e-6) for u in range(1, 11)]
    assert trace == pytest.approx([3e-6 * (1 - (u - 1) / 10) for u in range(1, 11)])
    assert trace[0] == 3e-6 and trace[-1] == pytest.approx(3e-7)
    assert utils.learning_rate_at(1, 1, 2.0) == 2.0


def test_cosine_and_constant_learning_rates():
    trace = [utils.learning_rate_at(u, 8, 2.0, "cosine") for u in range(1, 9)]
    assert trace == pytest.approx([1 + math.cos(math.pi * (u - 1) / 8) for u in range(1, 9)])
    assert trace[0] == 2.0 and trace[4] == pytest.approx(1.0) and 0 < trace[-1] < 0.2
    assert [utils.learning_rate_at(u, 8, 2.0, "constant") for u in (1, 5, 8)] == [2.0] * 3


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warm_up_is_linear_and_the_first_step_after_it_is_full(schedule):
    trace = [utils.learning_rate_at(u, 20, 1.0, schedule, 0.18) for u in range(1, 21)]  # 0.18 * 20 = 3.6: 4 steps
    assert trace[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    left = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "constant": lambda x: 1.0}
    assert trace[4:] == pytest.approx([left[schedule](i / 16) for i in range(16)])
    assert utils.learning_rate_at(20, 20, 1.0, schedule, 1.0) == 1.0  # nothing but warm-up


SMALL = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
DROPPING = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(
        tiny_config(vocab_size=50, attention_dropout=0.5, hidden_dropout=0.5, eos_token_id=0, pad_token_id=0)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=32, attention_dropout=0.5)),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DROPPING)
def test_model_1_no_dropout_is_left_in_training_mode(name, attention):
    torch.manual_seed(0)
    model = DROPPING[name]().train()
    model.set_attn_implementation(attention)
    tokens = torch.arange(2, 22).reshape(2, 10)
    with torch.no_grad():
        assert not torch.equal(model(tokens).logits, model(tokens).logits)  # there was dropout before
        assert utils.disable_dropout(model) is model and model.training
        assert all(module.training for module in model.modules())
        assert not any(v for k, v in vars(model.config).items() if "dropout" in k or k.endswith("_pdrop"))
        first, second = model(tokens).logits, model(tokens).logits
        assert torch.equal(first, second) and torch.equal(first, model.eval()(tokens).logits)


# ---- arguments and errors --------------------------------------------------------------------------------------------
def test_fail_speaks_on_the_main_process_only(fails, monkeypatch, capsys):
    assert fails(utils.fail, "no luck") == "error: no luck\n"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as e:
        utils.fail("no luck")
    assert e.value.code == 2 and capsys.readouterr() == ("", "")


@dataclass
class Args:
    seed: int = 1
    """seed"""
    learning_rate: float = 0.1
    """rate"""
    temperature: float = 0.7
    """temperature"""
    batch_size: int = 8
    """size"""
    track: bool = False
    """flag"""
    share_prompts: bool = True
    """flag"""
    max_grad_norm: float | None = 1.0
    """optional"""
    run_name: str | None = None
    """optional"""
    wandb_tags: tuple[str, ...] = ()
    """list"""
    warmup_ratio: float = 0.0
    """share"""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """choice"""
    eval_every: int = 0
    """may be 0"""
    num_sample_generations: int = 10
    """may be 0"""
    micro_batch_size: int = 4
    """memory"""
    exp_name: str = "exp"
    """name"""
    dataset: str = "toy"
    """data"""
    config: str | None = None
    """TOML"""
    output_dir: str = "models/x"
    """folder"""
    overwrite: bool = False
    """replace"""
    resume: bool = False
    """go on"""
    push_to_hub: bool = False
    """upload"""
    lora_rank: int | None = None
    """adapters"""
    checkpoint_every: int = 0
    """updates"""
    wandb_project_name: str = "project"
    """wandb"""
    wandb_entity: str | None = None
    """wandb"""


@pytest.fixture
def toml(tmp_path):
    """toml(text): path of a configuration file with this text."""

    def write(text):
        (tmp_path / "config.toml").write_text(text)
        return str(tmp_path / "config.toml")

    return write


def test_later_sources_win(toml):
    toy_defaults = {"toy": {"learning_rate": 0.2, "seed": 2, "batch_size": 2}}
    assert utils.parse_args(Args, argv=[]) == Args()
    assert utils.parse_args(Args, toy_defaults, []) == Args(learning_rate=0.2, seed=2, batch_size=2)
    file = toml("learning_rate = 0.3\nseed = 3\n")
    assert utils.parse_args(Args, toy_defaults, ["--config", file]) == Args(learning_rate=0.3, seed=3, batch_size=2, config=file)
    got = utils.parse_args(Args, toy_defaults, ["--learning_rate", "0.4", "--config", file])
    assert got == Args(learning_rate=0.4, seed=3, batch_size=2, config=file)


def test_the_command_line_is_sys_argv_unless_given(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--seed", "9"])
    assert utils.parse_args(Args) == Args(seed=9)


def test_the_toy_defaults_are_for_the_toy_data_set_alone(toml):
    defaults = {"toy": {"seed": 2, "dataset": "toy"}, "toy-sum": {"seed": 7}}
    assert utils.parse_args(Args, defaults, ["--dataset", "toy-sum:test"]) == Args(dataset="toy-sum:test", seed=7)
    assert utils.parse_args(Args, defaults, ["--dataset", "rows.jsonl"]) == Args(dataset="rows.jsonl")
    assert utils.parse_args(Args, defaults, ["--dataset=rows.jsonl"]) == Args(dataset="rows.jsonl")
    file = toml('dataset = "rows.jsonl"')
    assert utils.parse_args(Args, defaults, ["--config", file]) == Args(dataset="rows.jsonl", config=file)
    assert utils.parse_args(Args, defaults, [f"--config={file}"]) == Args(dataset="rows.jsonl", config=file)
    assert utils.parse_args(Args, defaults, ["--config", file, "--dataset", "toy"]) == Args(seed=2, config=file)
    assert utils.parse_args(Args, defaults, ["--dataset", "a.jsonl", "--dataset", "toy"]) == Args(seed=2)


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch-size", "3"],
        ["--batch_size", "3"],
        ["--batch-size=3"],
        ["--batch_size=3"],
        ["--seed", "1", "--batch-size=3"],
    ],
)
def test_dashes_underscores_and_equals_signs(argv):
    assert utils.parse_args(Args, {"toy": {"batch_size": 2}}, argv) == Args(batch_size=3)


def test_booleans_nones_and_lists(toml):
    assert utils.parse_args(Args, argv=["--track", "--no-share-prompts"]) == Args(track=True, share_prompts=False)
    assert utils.parse_args(Args, argv=["--max_grad_norm", "None"]) == Args(max_grad_norm=None)
    assert utils.parse_args(Args, argv=["--wandb_tags", "a", "b"]) == Args(wandb_tags=("a", "b"))
    file = toml('track = true\nshare_prompts = false\nwandb_tags = ["a", "b c"]\nmax_grad_norm = "None"\nrun_name = "r"')
    expected = Args(track=True, share_prompts=False, wandb_tags=("a", "b c"), max_grad_norm=None, run_name="r", config=file)
    assert utils.parse_args(Args, argv=["--config", file]) == expected
    back = ["--no-track", "--share_prompts", "--wandb_tags", "z", "--max_grad_norm", "2"]
    assert utils.parse_args(Args, argv=["--config", file, *back]) == Args(
        wandb_tags=("z",), max_grad_norm=2.0, run_name="r", config=file
    )
    empty = toml("wandb_tags = []\nseed = 5")
    assert utils.parse_args(Args, argv=["--config", empty]) == Args(seed=5, config=empty)


def test_toml_numbers_keep_their_value(toml):
    file = toml("learning_rate = 3e-6\nseed = -1\nbatch_size = 1_000\ntemperature = 1")
    got = utils.parse_args(Args, argv=["--config", file])
    assert got == Args(learning_rate=3e-6, seed=-1, batch_size=1000, temperature=1.0, config=file)
    assert type(got.temperature) is float


def test_a_toml_file_that_is_missing_broken_or_has_an_unknown_key_is_one_line(toml, fails, tmp_path):
    assert "'learning_rat'" in fails(utils.parse_args, Args, argv=["--config", toml("learning_rat = 1.0")])
    assert "nowhere.toml" in fails(utils.parse_args, Args, argv=["--config", str(tmp_path / "nowhere.toml")])
    fails(utils.parse_args, Args, argv=["--config", toml("seed = ")])
    fails(utils.parse_args, Args, argv=["--config", toml("[train]\nseed = 1")])


@pytest.mark.parametrize(
    "text",
    [
        'seed = "many"',
        "seed = 1.5",
        "seed = [1, 2]",
        "learning_rate = true",
        "track = 1",
        'lr_schedule = "step"',
        "seed = true",
    ],
)
def test_a_toml_value_of_the_wrong_type_is_an_error(toml, fails, text):
    assert text.split()[0] in fails(utils.parse_args, Args, argv=["--config", toml(text)])


def test_an_unknown_flag_is_an_error():
    with pytest.raises(SystemExit) as e:
        utils.parse_args(Args, argv=["--no_such_flag", "1"])
    assert e.value.code == 2


def test_check_numbers(fails):
    utils.check_numbers(Args(seed=0, eval_every=0, num_sample_generations=0, temperature=0.01, learning_rate=0.0))
    utils.check_numbers(Args(max_grad_norm=None, run_name="a name", warmup_ratio=1.0))
    wrong = [("batch_size", 0), ("micro_batch_size", -1), ("seed", -1), ("eval_every", -1), ("warmup_ratio", 1.1)]
    wrong += [("temperature", t) for t in (0.0, -1.0, math.inf, math.nan)]
    wrong += [
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", math.inf),
    ]
    wrong += [("run_name", name) for name in ("a/b", "", ".", "..")]
    for name, value in wrong:
        assert f"--{name} " in fails(utils.check_numbers, Args(**{name: value}))


def output_dir(tmp_path, **changes):
    """Args whose output folder holds a model that Args(**changes) made."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    made_by = Args(**({"output_dir": str(folder)} | changes))
    (folder / "training_args.json").write_text(json.dumps(dataclasses.asdict(made_by)))
    return Args(output_dir=str(folder))


def test_an_output_folder_that_is_new_or_empty_is_accepted(tmp_path):
    utils.check_output_dir(Args(output_dir=str(tmp_path / "new")))
    (tmp_path / "empty").mkdir()
    utils.check_output_dir(Args(output_dir=str(tmp_path / "empty")))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_size": 2},
        {"share_prompts": False},
        {"run_name": "other", "exp_name": "other"},
        {"track": True, "wandb_tags": ("a",), "wandb_entity": "me", "wandb_project_name": "p"},
        {"overwrite": True, "config": "a.toml", "output_dir": "elsewhere"},
    ],
)
def test_repeating_a_run_is_accepted_also_with_other_memory_knobs(tmp_path, changes):
    utils.check_output_dir(output_dir(tmp_path, **changes))


@pytest.mark.parametrize("changes", [{"learning_rate": 0.2}, {"seed": 2}, {"dataset": "d"}, {"max_grad_norm": None}])
def test_an_output_folder_of_another_model_is_refused_unless_overwritten(tmp_path, fails, changes):
    args = output_dir(tmp_path, **changes)
    assert next(iter(changes)) in fails(utils.check_output_dir, args)
    utils.check_output_dir(dataclasses.replace(args, overwrite=True))


def test_a_model_with_tags_and_none_can_be_repeated(tmp_path):
    args = output_dir(tmp_path)
    same = dataclasses.replace(args, wandb_tags=("a", "b"), max_grad_norm=None)
    (tmp_path / "model" / "training_args.json").write_text(json.dumps(dataclasses.asdict(same)))
    utils.check_output_dir(same)


def test_a_foreign_folder_is_refused_and_untouched(tmp_path, fails):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert str(tmp_path) in fails(utils.check_output_dir, Args(output_dir=str(tmp_path)))
    (tmp_path / "training_args.json").write_text("{")
    fails(utils.check_output_dir, Args(output_dir=str(tmp_path)))
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    utils.check_output_dir(Args(output_dir=str(tmp_path), overwrite=True))


def test_an_output_folder_that_is_a_file_or_inside_one_is_refused(tmp_path, fails):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "model"):
        assert f"{tmp_path / 'file'} is a file" in fails(utils.check_output_dir, Args(output_dir=str(folder)))


# ---- data ------------------------------------------------------------------------------------------------------------
ROWS = [{"prompt": "a b", "n": 1}, {"prompt": 'c, "d"\ne', "n": 2}, {"prompt": "é ∞ ", "n": 3}]


def write_rows(path, rows=ROWS):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader(), writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_rows_of_a_file_come_in_order_with_their_types(tmp_path, suffix):
    path = write_rows(tmp_path / f"rows{suffix}")
    assert data.read_rows(str(path), {"prompt": str, "n": int}) == ROWS
    write_rows(path, [{"prompt": "new", "n": 4}])
    assert data.read_rows(str(path), {"prompt": str}) == [{"prompt": "new", "n": 4}]  # not out of a cache


def test_rows_of_a_folder_with_splits(tmp_path, fails):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "train.jsonl", ROWS[:2])
    write_rows(folder / "test.jsonl", ROWS[2:])
    assert data.read_rows(str(folder), {"prompt": str}) == ROWS[:2]
    assert data.read_rows(f"{folder}:test", {"prompt": str}) == ROWS[2:]
    assert data.read_rows(f"{folder}:test.jsonl", {"prompt": str}) == ROWS[2:]
    assert data.read_rows(str(folder), {"prompt": str}, default_split="test") == ROWS[2:]
    assert "nosuch" in fails(data.read_rows, f"{folder}:nosuch", {"prompt": str})


def test_a_missing_file_folder_or_repository_is_one_line(tmp_path, fails):
    line = fails(data.read_rows, str(tmp_path / "no.jsonl"), {}, flag="--eval_dataset")
    assert "--eval_dataset" in line and "no.jsonl" in line and "no such file" in line
    assert "some-user/no-such-data-set" in fails(data.read_rows, "some-user/no-such-data-set", {})


@pytest.mark.parametrize("name,content", [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "prompt\n")])
def test_a_file_without_rows_is_one_line(tmp_path, fails, name, content):
    (tmp_path / name).write_text(content)
    assert name in fails(data.read_rows, str(tmp_path / name), {"prompt": str})


def test_reading_a_file_prints_nothing(tmp_path, capsys):
    datasets.enable_progress_bars()
    data.read_rows(str(write_rows(tmp_path / "a.csv")), {"prompt": str})
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.parquet"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, fails, name):
    (tmp_path / name).write_text('{"prompt": "a", ' if name == "a.json" else "")
    assert name in fails(data.read_rows, str(tmp_path / name), {"prompt": str})


def test_a_broken_json_line_is_named(tmp_path, fails):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"\n{"prompt": "c"}\n')
    assert "line 3 " in fails(data.read_rows, str(tmp_path / "a.jsonl"), {"prompt": str})


def test_a_jsonl_line_ends_at_a_line_feed_only(tmp_path):
    # str.splitlines also splits at U+2028, U+0085 and others, which JSON allows inside strings
    rows = [{"prompt": "one\u2028two\x85three"}, {"prompt": "b"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert data.read_rows(str(path), {"prompt": str}) == rows


def test_a_json_file_may_hold_one_row(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "a"}')
    assert data.read_rows(str(tmp_path / "a.json"), {"prompt": str}) == [{"prompt": "a"}]


def test_blank_lines_of_a_jsonl_file_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}')
    assert data.read_rows(str(tmp_path / "a.jsonl"), {"prompt": str}) == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_missing_column_or_a_wrong_type_is_named_with_its_row(tmp_path, fails):
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}, {"text": "b"}])
    line = fails(data.read_rows, str(path), {"prompt": str}, flag="--eval_dataset")
    assert all(words in line for words in ("--eval_dataset", str(path), "row 2", "'prompt'", "text"))
    write_rows(path, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": 7}])
    line = fails(data.read_rows, str(path), {"prompt": str})
    assert all(words in line for words in ("row 3", "'prompt'", "7", "str"))
    write_rows(path, [{"prompt": None}])
    assert "row 1" in fails(data.read_rows, str(path), {"prompt": str})
    write_rows(path, [["prompt", "a"]])
    assert "row 1" in fails(data.read_rows, str(path), {"prompt": str})


def test_check_columns(fails):
    data.check_columns([{"a": 1, "b": []}, {"a": 2, "b": [1]}], {"a": int, "b": list}, "rows")
    assert "rows: row 2" in fails(data.check_columns, [{"a": 1}, {"b": 1}], {"a": int}, "rows")
    assert "'b'" in fails(data.check_columns, [{"a": 1, "b": 1}], {"a": int, "b": list}, "rows")
    assert "'a'" in fails(data.check_columns, [{"a": True}], {"a": int}, "rows")  # an index is no truth value


# ---- encoding --------------------------------------------------------------------------------------------------------
def word_tokenizer(template=None, **special):
    """A word-level tokenizer of a b c d; `template`, what it puts around a text, e.g. "<s> $A"."""
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        pair = [(w, vocabulary[w]) for w in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=pair)
    names = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>") | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


BOS, EOS, A, B, C = 1, 2, 4, 5, 6


@pytest.mark.parametrize("template,bos", [(None, []), ("<s> $A", [BOS]), ("<s> $A </s>", [BOS]), ("$A </s>", [])])
def test_data_2_encode_adds_bos_by_habit_and_eos_to_completions_alone(template, bos):
    tokenizer = word_tokenizer(template)
    assert data.encode(tokenizer, "a b") == [*bos, A, B]
    assert data.encode(tokenizer, "a b", "c a") == ([*bos, A, B], [C, A, EOS])
    assert data.encode(tokenizer, "a", "") == ([*bos, A], [EOS])
    assert data.encode(tokenizer, "", "c") == (bos, [C, EOS])
    assert data.encode(tokenizer, "") == bos


def test_encode_does_not_say_bos_twice():
    assert data.encode(word_tokenizer("<s> $A"), "<s> a") == [BOS, A]
    assert data.encode(word_tokenizer("<s> $A"), "a <s>") == [BOS, A, BOS]


def test_encode_of_a_tokenizer_without_bos():
    assert data.encode(word_tokenizer(bos_token=None), "a", "b") == ([A], [B, EOS])
    assert data.encode(toy.tokenizer(), "the room", "was lovely")[1][-1] == toy.tokenizer().eos_token_id


def test_encode_prompts_names_the_row_that_is_empty_or_too_long(fails):
    rows = [{"prompt": "a"}, {"prompt": "a b c"}]
    assert data.encode_prompts(word_tokenizer(), rows, 3, "--dataset x") == ([0, 1], [[A], [A, B, C]])
    assert data.encode_prompts(word_tokenizer(), rows, math.inf, "--dataset x") == ([0, 1], [[A], [A, B, C]])
    line = fails(data.encode_prompts, word_tokenizer(), rows, 2, "--dataset x")
    assert all(words in line for words in ("--dataset x", "row 2", "3 tokens", " 2"))
    assert "row 2" in fails(data.encode_prompts, word_tokenizer("<s> $A"), rows, 3, "--dataset x")  # BOS counts
    empty = [*rows, {"prompt": ""}]
    assert "row 3 is empty" in fails(data.encode_prompts, word_tokenizer(), empty, math.inf, "--dataset x")


# ---- models ----------------------------------------------------------------------------------------------------------
def test_load_tokenizer_wants_a_tokenizer_with_eos(tiny, tmp_path, fails):
    assert utils.load_tokenizer(tiny / "policy", "--sft_model_path").get_vocab() == toy.tokenizer().get_vocab()
    word_tokenizer(eos_token=None).save_pretrained(tmp_path / "no_eos")
    assert "EOS" in fails(utils.load_tokenizer, tmp_path / "no_eos", "--sft_model_path")
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        line = fails(utils.load_tokenizer, tmp_path / folder, "--base_model")
        assert "--base_model" in line and folder in line


def test_a_model_folder_without_a_tokenizer_is_one_line(tmp_path, fails):
    # from config.json alone transformers makes up a tokenizer of two special tokens, which encodes every text as nothing
    GPTNeoXForCausalLM(tiny_config()).save_pretrained(tmp_path / "no_tokenizer")
    assert "no_tokenizer" in fails(utils.load_tokenizer, tmp_path / "no_tokenizer", "--base_model")


def test_model_3_load_policy_is_fp32_without_dropout_in_training_mode(tmp_path, fails):
    config = tiny_config(hidden_dropout=0.5, attention_dropout=0.5)
    model = GPTNeoXForCausalLM(config)
    model.bfloat16().save_pretrained(tmp_path / "policy")
    loaded = utils.load_policy(tmp_path / "policy", "--sft_model_path", "eager")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32} and loaded.training
    assert loaded.config._attn_implementation == "eager"
    tokens = torch.arange(2, 12).reshape(1, 10)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model.float().eval()(tokens).logits, atol=1e-6, rtol=0)
    assert "--sft_model_path" in fails(utils.load_policy, tmp_path / "nowhere", "--sft_model_path")


def test_model_5_a_base_language_model_is_no_reward_model_unless_allowed(tiny, tmp_path, fails):
    line = fails(utils.load_reward_model, tiny / "policy", "--reward_model_path")
    assert "score.weight" in line and "--allow_untrained_reward_model" in line
    GPTNeoXForCausalLM(tiny_config(num_labels=1)).save_pretrained(tmp_path / "one_label")
    assert "score.weight" in fails(utils.load_reward_model, tmp_path / "one_label", "--reward_model_path")
    model = utils.load_reward_model(tiny / "policy", "--reward_model_path", allow_untrained=True)
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 32) and model.training


def test_load_reward_model_keeps_the_head(tiny):
    model = utils.load_reward_model(tiny / "reward", "--reward_model_path")
    saved = GPTNeoXForSequenceClassification.from_pretrained(tiny / "reward")
    assert torch.equal(model.score.weight, saved.score.weight) and model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_classifier_of_two_labels_is_refused(tmp_path, fails):
    GPTNeoXForSequenceClassification(tiny_config(num_labels=2)).save_pretrained(tmp_path / "two")
    assert "num_labels is 2" in fails(utils.load_reward_model, tmp_path / "two", "--reward_model_path")
    assert "nowhere" in fails(utils.load_reward_model, tmp_path / "nowhere", "--reward_model_path")


def test_a_classifier_of_two_labels_is_allowed_in_a_dummy_run(tmp_path):
    GPTNeoXForSequenceClassification(tiny_config(num_labels=2)).save_pretrained(tmp_path / "two")
    model = utils.load_reward_model(tmp_path / "two", "--reward_model_path", allow_untrained=True)
    assert model.score.weight.shape == (1, 32)


def vocabulary_folder(folder, tokenizer, size):
    """A folder with a tokenizer and a configuration of `size` embeddings: all that find_own_tokenizer reads."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    tiny_config(vocab_size=size).save_pretrained(folder)
    return folder


def config_of(folder):
    return AutoConfig.from_pretrained(folder)


def test_equal_vocabularies_pass_also_where_the_reward_model_has_a_pad_token_more(tmp_path):
    tokenizer = word_tokenizer()
    policy = vocabulary_folder(tmp_path / "policy", tokenizer, 8)
    assert (
        utils.find_own_tokenizer(policy, config_of(policy), vocabulary_folder(tmp_path / "same", tokenizer, 8), tokenizer) is None
    )
    assert (
        utils.find_own_tokenizer(policy, config_of(policy), vocabulary_folder(tmp_path / "rounded", tokenizer, 64), tokenizer)
        is None
    )
    without, padded = word_tokenizer(pad_token=None), word_tokenizer(pad_token="[PAD]")
    assert len(padded) == len(without) + 1
    policy = vocabulary_folder(tmp_path / "without", without, 8)
    assert utils.find_own_tokenizer(policy, config_of(policy), vocabulary_folder(tmp_path / "padded", padded, 9), without) is None


def test_a_reward_model_without_a_tokenizer_has_nothing_to_compare(tmp_path):
    policy = vocabulary_folder(tmp_path / "policy", word_tokenizer(), 8)
    assert (
        utils.find_own_tokenizer(policy, config_of(policy), vocabulary_folder(tmp_path / "none", None, 8), word_tokenizer()) is None
    )


def test_a_policy_that_pads_with_eos_matches_the_reward_model_trained_from_it(tmp_path):
    policy, reward = word_tokenizer(pad_token="</s>"), word_tokenizer(pad_token="</s>")
    reward.add_special_tokens({"pad_token": "[PAD]"})  # as train_reward does
    folder = vocabulary_folder(tmp_path / "policy", policy, 8)
    assert utils.find_own_tokenizer(folder, config_of(folder), vocabulary_folder(tmp_path / "reward", reward, 9), policy) is None


def test_fewer_embeddings_are_refused_and_other_tokens_or_ids_mean_that_text_is_read(tmp_path, fails):
    tokenizer = word_tokenizer()
    policy = vocabulary_folder(tmp_path / "policy", tokenizer, 8)
    line = fails(
        utils.find_own_tokenizer, policy, config_of(policy), vocabulary_folder(tmp_path / "small", tokenizer, 7), tokenizer
    )
    assert "8 embeddings" in line and "7 embeddings" in line
    assert "vocabulary mismatch" in fails(
        utils.find_own_tokenizer, policy, config_of(policy), vocabulary_folder(tmp_path / "no", None, 7), tokenizer
    )
    more = word_tokenizer()
    more.add_tokens(["e"])
    swapped = Tokenizer(models.WordLevel({w: i for i, w in enumerate("<pad> <s> </s> <unk> b a c d".split())}))
    swapped = PreTrainedTokenizerFast(tokenizer_object=swapped, eos_token="</s>", pad_token="<pad>")
    for name, other in {"toy": toy.tokenizer(), "more": more, "swapped": swapped}.items():
        folder = vocabulary_folder(tmp_path / name, other, 300)
        assert utils.find_own_tokenizer(policy, config_of(policy), folder, tokenizer).get_vocab() == other.get_vocab()


def saved(args, seed=0):
    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(tiny_config(initializer_range=0.2)).eval()
    utils.save_model(args, model, toy.tokenizer())
    return model


def test_a_saved_model_reloads_with_identical_logits_and_replaces_the_old_folder(tmp_path):
    args = Args(output_dir=str(tmp_path / "deep" / "model"), seed=7)
    saved(args)
    (tmp_path / "deep" / "model" / "old.txt").write_text("old")
    (tmp_path / "deep" / "model.partial").mkdir()
    (tmp_path / "deep" / "model.partial" / "rest.txt").write_text("of a run that was killed")
    model = saved(args, seed=1)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["model"]
    assert not {"old.txt", "rest.txt"} & {p.name for p in (tmp_path / "deep" / "model").iterdir()}
    reloaded, tokens = utils.load_policy(args.output_dir, "--sft_model_path").eval(), torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(reloaded(tokens).logits, model(tokens).logits)
    assert utils.load_tokenizer(args.output_dir, "--sft_model_path").get_vocab() == toy.tokenizer().get_vocab()
    assert json.loads((tmp_path / "deep" / "model" / "training_args.json").read_text())["seed"] == 7
    utils.check_output_dir(args)  # the same run again is fine


def test_an_output_folder_with_a_slash_at_its_end_is_saved(tmp_path):
    args = Args(output_dir=f"{tmp_path}/model/")
    saved(args)
    assert (tmp_path / "model" / "config.json").exists()


def test_a_failed_save_leaves_the_old_model(tmp_path):
    args = Args(output_dir=str(tmp_path / "model"))
    saved(args)
    before = sorted(p.name for p in (tmp_path / "model").iterdir())
    with pytest.raises(AttributeError):
        utils.save_model(args, GPTNeoXForCausalLM(tiny_config()), None)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == before


# ---- the run ---------------------------------------------------------------------------------------------------------
def a_run(accelerator=None, num_steps=40, **changes):
    """Logs num_steps updates and a table in a Run."""
    args = Args(**({"run_name": "name"} | changes))
    run = runs.Run(args, accelerator or Accelerator(cpu=True), num_steps, ["eps", "objective/scores"])
    for update in range(1, num_steps + 1):
        run.log({"update": update, "episode": update * 8, "eps": 2.0, "objective/scores": update / 4}, update)
    run.table("samples", [{"query": "a\nb", "score": 0.5}, {"query": "[bold]c", "score": 1.0}], num_steps)
    run.close(["the end"])
    return run


def test_a_run_writes_its_folder_and_some_twenty_lines(in_tmp, capsys):
    run = a_run()
    folder = in_tmp / "runs" / "name"
    assert run.folder.resolve() == folder.resolve()
    about = json.loads((folder / "config.json").read_text())
    assert about["args"] == json.loads(json.dumps(dataclasses.asdict(Args(run_name="name"))))
    assert {"versions", "commit", "device", "num_processes", "mixed_precision"} <= set(about)
    assert about["versions"]["torch"] == torch.__version__ and about["device"] == "cpu"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["update"] for m in metrics] == list(range(1, 41)) and metrics[3]["objective/scores"] == 1.0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert samples[0] == {"update": 40, "query": "a\nb", "score": 0.5} and samples[1]["query"] == "[bold]c"
    out = capsys.readouterr().out
    steps = [line for line in out.splitlines() if "/40" in line]
    assert 18 <= len(steps) <= 24 and "1/40" in steps[0] and "40/40" in steps[-1] and "scores 10" in steps[-1]
    assert "[bold]c" in out and "a⏎b" in out and out.rstrip().endswith("the end\ncurves: python benchmark/plot.py runs/name")


def test_tensorboard_holds_every_number_at_its_update(in_tmp):
    events = EventAccumulator(str(a_run(num_steps=5).folder)).Reload()
    assert set(events.Tags()["scalars"]) == {"update", "episode", "eps", "objective/scores"}
    scalars = events.Scalars("objective/scores")
    assert [(e.step, e.value) for e in scalars] == [(u, u / 4) for u in range(1, 6)]
    assert "learning_rate" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_rows_are_on_disk_at_once(in_tmp):
    run = runs.Run(Args(run_name="name"), Accelerator(cpu=True), 5, [])
    run.log({"update": 1}, 1)
    run.table("samples", [{"query": "a"}], 1)
    assert json.loads((run.folder / "metrics.jsonl").read_text()) == {"update": 1}
    assert json.loads((run.folder / "samples.jsonl").read_text())["query"] == "a"
    run.close([])


def test_a_run_without_a_name_is_called_by_its_data_experiment_and_seed(in_tmp):
    run = runs.Run(Args(dataset="user/data", seed=3), Accelerator(cpu=True), 1, [])
    run.close([])
    assert run.folder.name.startswith("data__exp__3__") and run.folder.parent.name == "runs" and run.folder.exists()


def test_other_processes_write_and_print_nothing(in_tmp, capsys):
    a_run(SimpleNamespace(is_main_process=False, device="cpu", num_processes=2, mixed_precision="no"))
    assert not list(in_tmp.iterdir()) and capsys.readouterr() == ("", "")


def test_tracking_offline_writes_a_wandb_folder(in_tmp, offline_wandb):
    a_run(num_steps=2, track=True, wandb_tags=("tag",))
    assert list(offline_wandb.glob("offline-run-*/*.wandb"))
    assert len((in_tmp / "runs" / "name" / "metrics.jsonl").read_text().splitlines()) == 2


def test_accepts_looks_at_the_parameters():
    assert utils.accepts(lambda a, b=1: 0, "b") and not utils.accepts(lambda a, **rest: 0, "b")
    assert utils.accepts(GPTNeoXForCausalLM.forward, "position_ids")


def test_leaving_the_process_group_without_one_is_nothing():
    utils.leave_process_group()


def test_several_processes_that_accelerate_does_not_see_are_refused(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    utils.check_processes(SimpleNamespace(num_processes=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    utils.check_processes(SimpleNamespace(num_processes=2))
    with pytest.raises(SystemExit) as end:
        utils.check_processes(SimpleNamespace(num_processes=1))
    assert end.value.code == 2 and "ACCELERATE_USE_CPU=true" in capsys.readouterr().err


@pytest.mark.parametrize("unk", ["<unk>", None])
def test_token_id_knows_eos_none_and_single_tokens_with_and_without_an_unknown_token(unk, capsys):
    tokenizer = toy.tokenizer()
    tokenizer.unk_token = unk  # many tokenizers have none
    assert utils.token_id(tokenizer, "eos", "--stop_token") == tokenizer.eos_token_id
    assert utils.token_id(tokenizer, "none", "--stop_token") is None
    assert utils.token_id(tokenizer, "hotel", "--stop_token") == tokenizer.convert_tokens_to_ids("hotel")
    for text in ("small hotel", "", *(["nonsense"] if unk else [])):
        with pytest.raises(SystemExit) as end:
            utils.token_id(tokenizer, text, "--stop_token")
        assert end.value.code == 2 and f"--stop_token {text!r}" in capsys.readouterr().err


# ---- linear layers by oneDNN -----------------------------------------------------------------------------------------
needs_onednn = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN is used with AVX-512 alone")


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (3, 7, 24), (2, 3, 1, 24), (1, 24)])
def test_onednn_layers_equal_the_float64_layer_forward_and_backward(shape, bias):
    torch.manual_seed(0)
    layer = utils.use_onednn(torch.nn.Sequential(torch.nn.Linear(24, 10, bias=bias)))[0]
    assert type(layer) is utils.OneDNNLinear
    slow = torch.nn.Linear(24, 10, bias=bias).double()
    slow.load_state_dict(layer.state_dict())
    x, weights = torch.randn(shape), torch.randn(*shape[:-1], 10)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    ours, theirs = layer(a), slow(b)
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5
    (ours * weights).sum().backward(), (theirs * weights).sum().backward()
    pairs = [(a.grad, b.grad), *((p.grad, q.grad) for p, q in zip(layer.parameters(), slow.parameters(), strict=True))]
    assert len(pairs) == 2 + bias and all((p - q).abs().max() < 1e-5 for p, q in pairs)


@needs_onednn
def test_onednn_is_what_runs_and_only_in_fp32_without_autocast(monkeypatch):
    calls, real = [], utils.OneDNNProduct.apply
    monkeypatch.setattr(utils.OneDNNProduct, "apply", lambda *args: calls.append(1) or real(*args))
    model = utils.use_onednn(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)))
    x = torch.randn(3, 8)
    assert model(x).dtype == torch.float32 and len(calls) == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16 and len(calls) == 2
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16 and len(calls) == 2


@needs_onednn
def test_a_copied_onednn_layer_has_weights_of_its_own_and_frozen_weights_get_no_gradient():
    layer = utils.use_onednn(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin[0].weight.zero_()
    x = torch.randn(3, 8, requires_grad=True)
    assert layer(x).std() > 0.1 and torch.equal(twin(x), twin[0].bias.expand(3, 8))
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None and layer[0].weight.grad is None and layer[0].bias.grad is None


def test_what_is_loaded_uses_onednn_where_it_can(tiny, monkeypatch):
    for capability, kind in (("AVX512", utils.OneDNNLinear), ("AVX2", torch.nn.Linear)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        models = utils.load_policy(tiny / "policy", ""), utils.load_reward_model(tiny / "reward", "")
        layers = [[m for m in model.modules() if isinstance(m, torch.nn.Linear)] for model in models]
        assert [len(found) for found in layers] == [9, 9] and all(type(m) is kind for found in layers for m in found)
