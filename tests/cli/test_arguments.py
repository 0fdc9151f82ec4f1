"""The command line: where values come from, TOML files, lists, --help, and the checks that all scripts share."""

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
from helpers import ROOT, SCRIPTS, flags_shown, shown_by_help

from rlhf_details import train_rloo
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, flags


@dataclass
class Args(flags.RunArgs):
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
    base_model: str | None = None
    """input"""
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
TABLE = {"toy": dict(learning_rate=0.2, seed=2, batch_size=2), "toy-sum": dict(seed=7)}
OF_TOY, ROWS = TABLE["toy"], 'dataset = "rows.jsonl"'
BOOLEANS = 'track = true\nshare_prompts = false\nwandb_tags = ["a", "b c"]\nmax_grad_norm = "None"\nseed = 1_000'
READ = dict(track=True, share_prompts=False, wandb_tags=("a", "b c"), max_grad_norm=None, seed=1000, batch_size=2)


@pytest.mark.parametrize(
    "words, text, expected",  # text: of the TOML file
    [
        ("", "", OF_TOY),
        ("", "learning_rate = 0.3\nseed = 3\n", dict(learning_rate=0.3, seed=3, batch_size=2)),
        ("--learning_rate 0.4", "learning_rate = 0.3\nseed = 3\n", dict(learning_rate=0.4, seed=3, batch_size=2)),
        ("--batch_size 8 --seed 1 --learning_rate 0.1", "", {}),  # The class's own defaults, where they are asked for.
        ("--dataset toy-sum:test", "", dict(dataset="toy-sum:test", seed=7)),
        ("--dataset=rows.jsonl", "", dict(dataset="rows.jsonl")),
        ("", ROWS, dict(dataset="rows.jsonl")),
        ("--dataset toy", ROWS, OF_TOY),
        ("--dataset a.jsonl --dataset toy", "", OF_TOY),
        *[(words, "", OF_TOY | dict(batch_size=3)) for words in ("--batch-size 3", "--batch_size=3", "--batch-size=3")],
        ("--track --no-share-prompts", "", OF_TOY | dict(track=True, share_prompts=False)),
        ("--max_grad_norm None --wandb_tags a b", "", OF_TOY | dict(max_grad_norm=None, wandb_tags=("a", "b"))),
        ("", BOOLEANS, dict(learning_rate=0.2) | READ),
        ("--no-track --share_prompts --wandb_tags z --max_grad_norm 2", BOOLEANS,
         dict(learning_rate=0.2, seed=1000, batch_size=2, wandb_tags=("z",), max_grad_norm=2.0)),
        ("", "temperature = 1\nchat_template_kwargs = {a = false}",
         OF_TOY | dict(temperature=1.0, chat_template_kwargs='{"a": false}')),
    ],
)  # fmt: skip
def test_later_sources_win(toml, words, text, expected):
    """The class, the page's table, a TOML file, the command line."""
    given = ["--config", toml(text)] if text else []
    args = parse([*given, *words.split()], TABLE)
    assert args == Args(**expected, config=given[1] if given else None) and type(args.temperature) is float


def test_a_flag_of_several_values_is_given_once(fails):
    for words in ("--reward_fn a:f --reward-fn=b:g", "--reward_fn=a:f --track --reward_fn b:g"):
        assert "--reward_fn: is given twice" in fails(parse, words.split())
    args = cli.parse(train_rloo.Args, ["--reward_fn", "a:f", "--reward_fn_weights", "-0.5"])
    assert args.reward_fn_weights == (-0.5,)


# ---- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, words",
    [
        ("batch_sise = 3", ["--batch_sise", "--batch_size"]),
        ("batch_size = = 3", ["line 1"]),
        ('learning_rate = "fast"', ["--learning_rate", "'fast'"]),
        ('lr_schedule = "square"', ["'square'", "--lr_schedule", "'linear', 'cosine'"]),
    ],
)
def test_a_mistake_in_a_toml_file_is_explained(toml, fails, capsys, text, words):
    with pytest.raises(SystemExit) as end:
        parse(["--config", toml(text)])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert end.value.code == 2 and all(word in said for word in words), said
    Path("run.toml").unlink()
    assert "--config run.toml: cannot be read (" in fails(parse, ["--config", "run.toml"])


def test_fail_speaks_on_the_main_process_alone(fails, monkeypatch, capsys):
    assert fails(console.fail, "two\nlines") == "error: two lines\n"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        console.fail("no luck")
    assert capsys.readouterr() == ("", "")


def test_errors_in_reading_are_one_line_and_our_own_faults_keep_their_traceback(fails):
    def read(error):
        with console.reading("--dataset", "x"):
            raise error

    for error in (OSError("disk\nmore"), ValueError("disk"), KeyError("disk"), ImportError("disk")):
        assert "--dataset x: " in (line := fails(read, error)) and "disk" in line
    for error in (MemoryError(), NameError("typo"), AssertionError()):
        with pytest.raises(type(error)):
            read(error)


# ---- --help ----------------------------------------------------------------------------------------------------------
GROUPS = (
    "run",
    "data",
    "models",
    "environment",
    "sampling",
    "reward and KL",
    "algorithm",
    "judging",
    "optimiser",
    "memory and speed",
)


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_help_has_every_flag_in_its_group_and_an_example_that_gives_what_is_required(script, monkeypatch, fails):
    kind = SCRIPTS[script].Args
    monkeypatch.setenv("COLUMNS", "120")
    shown = shown_by_help(kind, ["--dataset", "rows.jsonl"])
    _, *boxes = re.split(r"^\W{1,3}(\w.*) options\W*$", shown, flags=re.M)
    found = dict(zip(boxes[::2], map(flags_shown, boxes[1::2]), strict=True))
    assert {title.partition(":")[0] for title in found} <= set(GROUPS) and "seed" in found["run"]
    *_, last = found
    assert last == "memory and speed: never changes the result" and found[last].keys() <= set(flags.MEMORY_KNOBS)
    texts = {name: text for group in found.values() for name, text in group.items()}
    assert sorted(texts) == sorted(field.name for field in dataclasses.fields(kind))
    start, *words = shlex.split(shown.partition("Example: python rlhf_details/")[2].splitlines()[0])
    args = cli.parse(kind, words)
    assert start == f"{script}.py"
    for name in {"sft_model_path", "policy_path"} & texts.keys():
        assert getattr(args, name) and "(required unless --dataset is toy" in texts[name]
        env = {"env_fn": f"{ROOT}/tests/environments.py:silent"} if getattr(args, "env_fn", None) else {}
        assert f"--{name}: required" in fails(SCRIPTS[script].main, dataclasses.replace(args, **{name: None} | env))
    of_toy = flags_shown(shown_by_help(kind))
    for name, value in SCRIPTS[script].presets[kind().dataset.partition(":")[0]].items():
        value = " ".join(map(str, value)) if isinstance(value, tuple) else value
        assert f"(default: {value})" in of_toy[name].replace("'", "")


def test_beside_a_wheel_the_example_is_a_module_and_a_missing_package_has_its_own_name(in_tmp, monkeypatch, fails):
    """Where a wheel is installed there is no folder rlhf_details to name, and no constraints.txt."""
    example = shown_by_help(train_rloo.Args, ["--dataset", "rows.jsonl"]).partition("Example: ")[2]
    assert example.startswith("python -m rlhf_details.train_rloo --") and "rlhf_details/" not in example
    line = fails(console.need, "nowhere", "judge", "--judge")
    assert line.endswith('the package nowhere: pip install -c constraints.txt -e ".[judge]"\n')
    monkeypatch.setattr(console, "__file__", str(in_tmp / "site-packages/rlhf_details/plumbing/console.py"))
    assert fails(console.need, "nowhere", "judge", "--judge").endswith("the package nowhere: pip install nowhere\n")


def test_help_imports_no_code_of_models_and_engines(in_tmp):
    """That was half of the time which --help took."""
    heavy = {"torch._dynamo", "transformers.modeling_utils", "torch.distributed.fsdp", "pandas", "datasets", "wandb"}
    code = "import atexit, runpy, sys; sys.argv[1:] = ['--help']\n"
    code += f"atexit.register(lambda: print('imported:', *{heavy} & sys.modules.keys()))\n"
    code += f"runpy.run_path({str(ROOT / 'rlhf_details/train_rloo.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--kl_coef" in done.stdout and done.stdout.endswith("imported:\n"), done.stdout[-500:] + done.stderr


# ---- checks ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def folders(in_tmp):
    """A run `mine`, a model `out` that Args(output_dir="out") made, an input, and folders of the user's own."""
    for folder in ("runs/mine", "out/adapter", "out/additional_chat_templates", "own/policy", "holds/inner", "thesis"):
        Path(folder).mkdir(parents=True)  # additional_chat_templates is that of Command-R's tokenizer.
    Path("out/training_args.json").write_text(json.dumps(dataclasses.asdict(Args(output_dir="out"))))
    Path("thesis/thesis.txt").write_text("years of work")
    Path("file").touch()


NAN, INF = math.nan, math.inf


FINE = [
    dict(seed=0, eval_every=0, checkpoint_every=0, temperature=0.01, learning_rate=0.0),
    dict(max_grad_norm=None, run_name="a name", warmup_ratio=1.0),
    dict(run_name="mine", resume=True),
    dict(run_name="other", resume=True),  # The same command starts a run and goes on with it.
    dict(run_name="mine", overwrite=True),
    dict(output_dir="new"),
    # A run may be repeated into its folder, also with other memory knobs and outputs.
    dict(output_dir="out", micro_batch_size=2, share_prompts=False, run_name="other", exp_name="other", track=True),
    dict(output_dir="out", learning_rate=0.2, overwrite=True),
    dict(output_dir="thesis", overwrite=True),
]
WRONG_NUMBERS = dict(
    batch_size=[0], take=[0], seed=[-1, 2**31], eval_every=[-1], warmup_ratio=[1.1], temperature=[0.0],
    learning_rate=[-1e-3, NAN], max_grad_norm=[0.0, INF],
)  # fmt: skip
WRONG = [({name: x}, f"--{name} {x}: must be") for name, numbers in WRONG_NUMBERS.items() for x in numbers]
WRONG += [
    (dict(run_name="a/b"), "--run_name 'a/b': must be the name of a folder"),
    (dict(exp_name="../escaped"), "--exp_name '../escaped'"),
    (dict(run_name="mine"), "--run_name mine: runs/mine exists"),
    (dict(hub_model_id="me/model"), "--hub_model_id me/model: needs --push_to_hub"),
    (dict(dataset="none.jsonl"), "--dataset none.jsonl: no such file"),
    (dict(eval_dataset="none.py:f"), "--eval_dataset none.py:f: no such file"),
    (dict(dataset="toy:validation"), "--dataset toy:validation: the splits are toy:train and toy:test"),
    (dict(output_dir="out", learning_rate=0.2), "(learning_rate 0.1 there, 0.2 here); give another folder"),
    (dict(output_dir="out", dataset="d"), "holds another model (dataset 'toy' there, 'd' here)"),
    (dict(output_dir="out", max_grad_norm=None), "holds another model (max_grad_norm 1.0 there, None here)"),
    (dict(output_dir="out", seed=2, resume=True), "to resume its run the same arguments"),
    (dict(output_dir="thesis"), "--output_dir thesis holds files that no run has written"),
    (dict(output_dir="out", base_model="out/adapter", overwrite=True), "--output_dir out: would replace "),
]
OTHERS = ".", "own/policy", "own", "holds", "file"  # --overwrite never takes inputs, folders or files with it.
WRONG += [(dict(output_dir=x, base_model="own/policy", overwrite=True), f"--output_dir {x}: ") for x in OTHERS]


@pytest.mark.parametrize("changes, words", [*((changes, None) for changes in FINE), *WRONG])
def test_a_flag_that_makes_no_sense_is_named(folders, fails, changes, words):
    if words:
        assert words in fails(cli.check, Args(**changes))
    else:
        cli.check(Args(**changes))
    assert Path("thesis/thesis.txt").read_text() == "years of work"


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
