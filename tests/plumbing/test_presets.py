"""The table `presets` of each page: who takes what from it, who wins over it, and what is said about it."""

import dataclasses
import math
import shlex

import pytest
import transformers
import tyro
from helpers import SCRIPTS

from rlhf_details import toy, train_sft
from rlhf_details.plumbing.inputs import cli, models

SIZES = "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
MODELS = {  # models of which there is only a configuration: {parameters: (key in the tables, sizes)}
    "0.9 M": (20e6, (4096, 96, 1, 4, 384)),
    "134.0 M": (500e6, (50_304, 768, 8, 12, 3072)),
    "1011.8 M": (5e9, (50_304, 2048, 16, 8, 8192)),
    "6857.3 M": (math.inf, (50_432, 4096, 32, 32, 16_384)),
}
NEW = {"1.8 M": (20e6, 128, 4, 4096), "76.4 M": (500e6, 512, 8, 50_000), "1212.0 M": (5e9, 2048, 20, 50_000)}
LINE = "starting values for {}, which your own flags replace: "


@pytest.fixture
def sizes(in_tmp):
    """Saves MODELS into the current folder, each in a folder of its name."""
    for name, (_, sizes) in MODELS.items():
        transformers.GPTNeoXConfig(**dict(zip(SIZES, sizes, strict=True))).save_pretrained(name)


# ---- what stands in the table is what runs ---------------------------------------------------------------------------
def cases():
    """(page, command line, which row it takes in words, that row)"""
    for page in SCRIPTS.values():
        for task in toy.TASKS:
            yield page, ["--dataset", task], f"--dataset {task}", page.presets.get(task, {})
    for script, page in SCRIPTS.items():
        if script == "evaluate":
            continue
        flag = "--base_model" if script == "train_sft" else "--sft_model_path"
        for size, (limit, _) in MODELS.items():
            row = next((row for x, row in page.presets.items() if isinstance(x, float) and x >= limit), {})
            yield page, ["--dataset", "rows.jsonl", flag, size], f"a model of {size} parameters", row
    for size, (limit, *flags) in NEW.items():
        words = [f"--{name}={x}" for name, x in zip(("hidden_size", "num_layers", "vocab_size"), flags, strict=True)]
        row = train_sft.presets["scratch"][limit]
        yield train_sft, ["--dataset=rows.jsonl", *words], f"a new model of at most {size} parameters", row


@pytest.mark.parametrize("page, words, case, row", list(cases()))
def test_the_table_and_the_first_line_say_what_runs(page, words, case, row, sizes, capsys):
    args, first_line = cli.parse(page.Args, words), capsys.readouterr().out
    assert args == dataclasses.replace(tyro.cli(page.Args, args=words), **row)
    begin, end, flags = first_line.partition(": --")
    said = shlex.split(f"--{flags}") if end else []
    assert begin + end == (LINE.format(case) + "--" if row else "")
    assert {word[2:] for word in said if word.startswith("--")} == row.keys()
    assert tyro.cli(page.Args, args=words + said) == args


# ---- how large a model is --------------------------------------------------------------------------------------------
def test_parameters_are_counted_from_the_configuration_alone(tiny, tmp_path):
    """Of adapters the base model counts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny / "policy")
    model.config.save_pretrained(tmp_path / "configuration")
    size = sum(p.numel() for p in model.parameters())
    assert cli.size_of(tmp_path / "configuration") == size
    pytest.importorskip("peft")
    models.save_adapter(models.add_adapters(model, 2), tmp_path / "adapter", tiny / "policy")
    assert cli.size_of(tmp_path / "adapter") == size


@pytest.mark.parametrize("changes", [{}, dict(hidden_size=32, num_layers=1, num_heads=2)])
def test_a_new_model_has_as_many_parameters_as_its_flags_say(changes):
    args = train_sft.Args(dataset="toy", vocab_size=len(toy.tokenizer()), **changes)
    _, model = models.make_small(args, [{"prompt": "a", "completion": "b"}])
    assert cli.size_of_new(args) == sum(p.numel() for p in model.parameters())
