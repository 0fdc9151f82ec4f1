"""The command line: where values come from, TOML files, lists, --help, and the checks that all scripts share."""

import dataclasses
import io
import json
import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
from helpers import PAGES, ROOT, flags_shown

from rlhf_details import evaluate, train_both, train_dpo, train_reward, train_rloo, train_sft
from rlhf_details.plumbing import cli, rewards

SCRIPTS = PAGES | {"train_sft": train_sft, "train_reward": train_reward, "train_dpo": train_dpo, "evaluate": evaluate}
each_script = pytest.mark.parametrize("script", list(SCRIPTS))


@dataclass
class Args(cli.RunArgs):
    learning_rate: float = 0.1
    """rate"""
    temperature: float = 0.7
    """temperature"""
    batch_size: int = 8
    """size"""
    share_prompts: bool = True
    """flag"""
    max_grad_norm: float | None = 1.0
    """optional"""
    warmup_ratio: float = 0.0
    """share"""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """choice"""
    eval_every: int = 0
    """may be 0"""
    reward_fn: tuple[str, ...] = ()
    """list"""


def parse(argv, table=None):
    """What cli.parse makes of the words where this table is the page's."""
    with mock.patch.dict(globals(), presets=table or {}):
        return cli.parse(Args, argv)


@pytest.fixture
def toml(in_tmp):
    """toml(text): the path of a TOML file with this text."""

    def write(text):
        Path("run.toml").write_text(text)
        return "run.toml"

    return write


# ---- where values come from ------------------------------------------------------------------------------------------
def test_later_sources_win(toml, monkeypatch):
    of_toy = {"toy": {"learning_rate": 0.2, "seed": 2, "batch_size": 2}}
    assert parse([]) == Args()
    assert parse([], of_toy) == Args(learning_rate=0.2, seed=2, batch_size=2)
    file = toml("learning_rate = 0.3\nseed = 3\n")
    assert parse(["--config", file], of_toy) == Args(learning_rate=0.3, seed=3, batch_size=2, config=file)
    words = ["--learning_rate", "0.4", "--config", file]
    assert parse(words, of_toy) == Args(learning_rate=0.4, seed=3, batch_size=2, config=file)
    monkeypatch.setattr("sys.argv", ["script.py", "--seed", "9"])
    assert parse(None) == Args(seed=9)


def test_the_embedded_tasks_defaults_are_for_their_data_sets_alone(toml):
    defaults = {"toy": {"seed": 2, "dataset": "toy"}, "toy-sum": {"seed": 7}}
    assert parse(["--dataset", "toy-sum:test"], defaults) == Args(dataset="toy-sum:test", seed=7)
    for words in (["--dataset", "rows.jsonl"], ["--dataset=rows.jsonl"]):
        assert parse(words, defaults) == Args(dataset="rows.jsonl")
    file = toml('dataset = "rows.jsonl"')
    assert parse([f"--config={file}"], defaults) == Args(dataset="rows.jsonl", config=file)
    assert parse(["--config", file, "--dataset", "toy"], defaults) == Args(seed=2, config=file)
    assert parse(["--dataset", "a.jsonl", "--dataset", "toy"], defaults) == Args(seed=2)


def test_dashes_underscores_and_equals_signs():
    for words in (["--batch-size", "3"], ["--batch_size", "3"], ["--batch-size=3"], ["--batch_size=3"]):
        assert parse(words, {"toy": {"batch_size": 2}}) == Args(batch_size=3)


def test_booleans_nones_lists_and_tables(toml):
    assert parse(["--track", "--no-share-prompts"]) == Args(track=True, share_prompts=False)
    assert parse(["--max_grad_norm", "None"]) == Args(max_grad_norm=None)
    file = toml('track = true\nshare_prompts = false\nwandb_tags = ["a", "b c"]\nmax_grad_norm = "None"\nseed = 1_000')
    values = dict(wandb_tags=("a", "b c"), max_grad_norm=None, seed=1000, config=file)
    assert parse(["--config", file]) == Args(track=True, share_prompts=False, **values)
    words = ["--config", file, "--no-track", "--share_prompts", "--wandb_tags", "z", "--max_grad_norm", "2"]
    assert parse(words) == Args(**(values | dict(wandb_tags=("z",), max_grad_norm=2.0)))
    args = parse(["--config", toml("temperature = 1\nchat_template_kwargs = {enable_thinking = false}")])
    assert type(args.temperature) is float and args.temperature == 1
    assert json.loads(args.chat_template_kwargs) == {"enable_thinking": False}


def test_a_flag_of_several_values_is_given_once(toml, fails):
    assert parse(["--reward_fn", "a:f", "b:g", "--seed", "3"]).reward_fn == ("a:f", "b:g")
    for words in ("--reward_fn a:f --reward-fn=b:g", "--reward_fn=a:f --track --reward_fn b:g"):
        assert "--reward_fn: is given twice" in fails(parse, words.split())
    file = toml('reward_fn = ["a:f", "b:g"]')
    assert parse(["--config", file]).reward_fn == ("a:f", "b:g")
    assert parse(["--config", file, "--reward_fn", "c:h"]).reward_fn == ("c:h",)
    args = cli.parse(train_rloo.Args, ["--reward_fn", "a:f", "--reward_fn_weights", "-0.5"])
    assert args.reward_fn_weights == (-0.5,)


# ---- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, words",
    [
        ("batch_sise = 3", ["--batch_sise", "Perhaps you meant: --batch_size"]),
        ("no_no_track = true", ["no_no_track"]),
        ("no_track = true", ["must be names of flags"]),
        ("batch_size = = 3", ["line 1"]),
        ('learning_rate = "fast"', ["--learning_rate", "'fast'"]),
        ('lr_schedule = "square"', ["'square'", "--lr_schedule", "'linear', 'cosine'"]),
    ],
)
def test_a_mistake_in_a_toml_file_is_one_line(toml, fails, text, words):
    line = fails(parse, ["--config", toml(text)])
    assert line.startswith("error: --config run.toml: ") and all(word in line for word in words), line
    Path("run.toml").unlink()
    assert "--config run.toml: no such file or folder" in fails(parse, ["--config", "run.toml"])


@pytest.mark.parametrize(
    "words",
    [["--no_such_flag", "1"], ["--batch_size", "many"], ["--learning_rate"], ["--lr_schedule", "square"], ["stray"]],
)
def test_a_mistake_on_the_command_line_is_explained(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse(train_sft.Args, words)
    text = capsys.readouterr().err
    assert end.value.code == 2 and words[0].lstrip("-") in text.replace("-", "_") and "Traceback" not in text


def test_fail_speaks_on_the_main_process_alone(fails, monkeypatch, capsys):
    assert fails(cli.fail, "two\nlines") == "error: two lines\n"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        cli.fail("no luck")
    assert end.value.code == 2 and capsys.readouterr() == ("", "")


def test_errors_in_reading_are_one_line_and_our_own_faults_keep_their_traceback(fails):
    def read(error):
        with cli.reading("--dataset", "x"):
            raise error

    for error in (OSError("disk\nmore"), ValueError("disk"), KeyError("disk"), ImportError("disk")):
        assert "--dataset x: " in (line := fails(read, error)) and "disk" in line
    for error in (MemoryError(), NameError("typo"), AssertionError()):
        with pytest.raises(type(error)):
            read(error)


# ---- --help ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def help_of(capsys, monkeypatch):
    """help_of(function, *args): what it prints before it ends the program with exit code 0."""
    monkeypatch.setenv("COLUMNS", "120")

    def shown(function, *args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            function(*args)
        assert end.value.code == 0
        return capsys.readouterr().out

    return shown


@each_script
def test_help_has_every_flag_its_text_and_an_example_that_gives_what_is_required(script, help_of, fails):
    kind = SCRIPTS[script].Args
    shown = help_of(cli.parse, kind, ["-h", "--dataset", "rows.jsonl"])
    flags = flags_shown(shown)
    assert list(flags) == [field.name for field in dataclasses.fields(kind)]
    assert all(len(text) > len(name) + 30 for name, text in flags.items())
    marked = [name for name, text in flags.items() if "(required unless --dataset is toy" in text]
    start, *words = shlex.split(shown.partition("Example: python rlhf_details/")[2].splitlines()[0])
    assert start == f"{script}.py"
    args = cli.parse(kind, words)
    for name in set(marked) - {"reward_model_path"}:
        line = fails(SCRIPTS[script].main, dataclasses.replace(args, **{name: None}))
        assert getattr(args, name) and f"--{name}: required" in line
    if script in PAGES:
        assert "--reward_model_path or" in fails(rewards.check, dataclasses.replace(args, reward_fn=()))
    of_reward = ["reward_model_path"] * (script in PAGES)
    expected = {"train_sft": [], "evaluate": ["policy_path"]}.get(script, ["sft_model_path", *of_reward])
    assert marked == expected


@pytest.mark.parametrize("words", [["--help"], ["--algorithm", "rloo", "-h"]])
def test_help_of_both_shows_the_flags_of_both(words, help_of):
    shown = help_of(train_both.parse, words)
    assert "--reward.num_comparisons" in shown
    assert ("--policy.rloo_k" in shown) == ("rloo" in words) != ("--policy.gamma" in shown)
    example = shown.partition("Example: python rlhf_details/train_both.py ")[2].partition("\n\n")[0]
    reward, _, policy = train_both.parse(example.split())
    assert reward.sft_model_path == policy.sft_model_path == "gpt2"


def test_help_is_printed_once_by_several_processes(help_of, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert not help_of(cli.parse, train_rloo.Args, ["--help"])


# ---- checks ----------------------------------------------------------------------------------------------------------
def test_numbers_that_make_sense_pass(in_tmp):
    cli.check(Args(seed=0, eval_every=0, checkpoint_every=0, temperature=0.01, learning_rate=0.0))
    cli.check(Args(max_grad_norm=None, run_name="a name", warmup_ratio=1.0))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "name, value",
    [("batch_size", 0), ("take", 0), ("seed", -1), ("seed", 2**31), ("eval_every", -1), ("warmup_ratio", 1.1)]
    + [("temperature", 0.0), ("learning_rate", -1e-3), ("learning_rate", NAN), ("max_grad_norm", 0.0)]
    + [("max_grad_norm", INF)],
)
def test_numbers_out_of_range_are_named(in_tmp, fails, name, value):
    assert f"--{name} {value}: must be" in fails(cli.check, Args(**{name: value}))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(run_name="a/b"), "--run_name 'a/b': must be the name of a folder"),
        (dict(exp_name="../escaped"), "--exp_name '../escaped'"),
        (dict(run_name="mine"), "--run_name mine: runs/mine exists"),
        (dict(run_name="other", resume=True), "--run_name other: there is no runs/other that --resume could continue"),
        (dict(hub_model_id="me/model"), "--hub_model_id me/model: needs --push_to_hub"),
        (dict(dataset="none.jsonl"), "--dataset none.jsonl: no such file"),
        (dict(eval_dataset="none.py:f"), "--eval_dataset none.py:f: no such file"),
        (dict(dataset="toy:validation"), "--dataset toy:validation: the splits are toy:train and toy:test"),
    ],
)
def test_names_and_files_are_checked(in_tmp, fails, changes, words):
    Path("runs/mine").mkdir(parents=True)
    assert words in fails(cli.check, Args(**changes))
    cli.check(Args(run_name="mine", resume=True)), cli.check(Args(run_name="mine", overwrite=True))


# ---- the output folder -----------------------------------------------------------------------------------------------
def made_by(**changes):
    """Args whose output folder holds a model that Args(**changes) made."""
    Path("out").mkdir()
    Path("out/config.json").write_text("{}")
    before = Args(**({"output_dir": "out"} | changes))
    Path("out/training_args.json").write_text(json.dumps(dataclasses.asdict(before)))
    return Args(output_dir="out")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_size": 2, "share_prompts": False, "gradient_checkpointing": True},
        {"run_name": "other", "exp_name": "other", "track": True, "config": "a.toml", "eval_dataset": "toy:test"},
    ],
)
def test_a_run_may_be_repeated_into_its_folder_also_with_other_memory_knobs(in_tmp, changes):
    args = made_by(**changes)
    for folder in ("adapter", "additional_chat_templates"):  # The latter is that of Command-R's tokenizer.
        Path("out", folder).mkdir()
    cli.check(args)
    cli.check(Args(output_dir="new"))


@pytest.mark.parametrize("changes", [{"learning_rate": 0.2}, {"dataset": "d"}, {"max_grad_norm": None}])
def test_an_output_folder_of_another_model_is_refused_unless_overwritten(in_tmp, fails, changes):
    args, (name, value) = made_by(**changes), next(iter(changes.items()))
    line = fails(cli.check, args)
    assert f"--output_dir out holds another model ({name} {value!r} there, {getattr(args, name)!r} here)" in line
    assert line.endswith("; give another folder or --overwrite\n")
    resumed = fails(cli.check, dataclasses.replace(args, resume=True))
    assert "to resume its run, give the same arguments" in resumed and "overwrite" not in resumed
    cli.check(dataclasses.replace(args, overwrite=True))


def test_a_folder_of_the_users_own_is_refused_and_untouched(in_tmp, fails):
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("years of work")
    assert "--output_dir out holds files that no run has written" in fails(cli.check, Args(output_dir="out"))
    assert Path("out/thesis.txt").read_text() == "years of work"
    cli.check(Args(output_dir="out", overwrite=True))


@pytest.mark.parametrize("folder", [".", "own/policy", "own", "holds_folders", "file/out"])
def test_overwrite_never_takes_inputs_folders_or_files_with_it(in_tmp, fails, folder):
    Path("own/policy").mkdir(parents=True), Path("holds_folders/inner").mkdir(parents=True)
    Path("file").write_text("precious")
    args = train_rloo.Args(output_dir=folder, sft_model_path="own/policy", reward_model_path="x", overwrite=True)
    assert f"--output_dir {folder}: " in fails(train_rloo.check, args)


# ---- flags mean the same everywhere ----------------------------------------------------------------------------------
def test_flags_mean_the_same_in_every_script():
    types = {}
    for module in SCRIPTS.values():
        for field in dataclasses.fields(module.Args):
            # None stands for a value that is found elsewhere: evaluate.py's is the training's, GRPO's the objective's.
            expected = types.setdefault(field.name, field.type)
            assert expected | None == field.type | None, field.name


def test_every_flag_is_read():
    sources = {path.stem: path.read_text() for path in (ROOT / "rlhf_details").rglob("*.py")}
    pages = set(SCRIPTS) | {"train_both", "toy"}
    shared = "".join(source for name, source in sources.items() if name not in pages)
    for script, module in SCRIPTS.items():
        for field in dataclasses.fields(module.Args):
            name, text = field.name, sources[script] + shared
            read = (f"args.{name}", f"own.{name}", f'args, "{name}"', f'given.get("{name}")')
            assert any(words in text for words in read) or name in ("config", "reference_dataset"), (script, name)


# ---- what is printed -------------------------------------------------------------------------------------------------
def test_a_terminal_that_cannot_show_a_character_ends_no_run(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="cp1252", write_through=True))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli.main(lambda args: cli.say("caf\u00e9 \u23ce"), evaluate.Args)
    assert sys.stdout.buffer.getvalue().endswith(b"caf\xe9 \\u23ce" + os.linesep.encode())
