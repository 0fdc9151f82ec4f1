"""
The command line, read and checked, and how a script speaks and ends. `flags.py` holds the flags.

Models and data come from a local path, or from NAME or NAME@REVISION on the Hugging Face Hub. A script exits with an
error, one line that says why, if it cannot read them.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import shlex
import sys
import tomllib
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import get_origin

import huggingface_hub
import torch
import tyro
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rlhf_details import toy
from rlhf_details.plumbing.flags import (  # noqa: F401
    MEMORY_KNOBS,
    NOT_THE_MODEL,
    OUTPUTS,
    PolicyArgs,
    RewardArgs,
    RunArgs,
    SamplingArgs,
)

FILE = re.compile(r"\.(jsonl|json|ndjson|csv|tsv|parquet)(\.gz)?$", re.IGNORECASE)  # how names of data files end
ENDINGS = ".jsonl, .json, .ndjson, .csv, .tsv or .parquet"
MAY_BE_ZERO = "seed eval_every num_sample_generations truncate_after checkpoint_every".split()


def main(function, args_class):
    """Runs a script: function(arguments from the command line). Afterwards all processes leave their group."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()  # It would tell of each attempt to reach the Hub.
    function(parse(args_class))
    leave_group()


# ---- command line -> arguments ---------------------------------------------------------------------------------------
def parse(args_class, argv=None, defaults=None):
    """Command line -> args_class. Later wins: its defaults, `presets` of its page, those below, a TOML file, the words.

    The values of the file are read as words before the others, so that tyro checks both. Prints what it has taken from
    `presets`; --help shows them as defaults, and ends the program.
    Args: args_class, a flat dataclass; argv, None for sys.argv[1:]; defaults, {flag: value} that --config wins over.
    """
    argv = sys.argv[1:] if argv is None else argv
    given = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    for field in dataclasses.fields(args_class):
        if get_origin(field.type) is tuple and given.count(field.name) > 1:
            fail(f"--{field.name}: is given twice; give it once, with all its values behind it")
    options = dict(use_underscores=True, console_outputs=is_main(), description=about(inspect.getmodule(args_class)))
    read = functools.partial(tyro.cli, args_class, **options)
    words, without_help = as_words(defaults or {}), [word for word in argv if word not in ("-h", "--help")]
    if file := read(args=without_help).config:
        with reading("--config", file):
            words += as_words(tomllib.loads(Path(file).read_text(encoding="utf-8")))
    case, row = preset_of(read(args=words + without_help))
    args = read(args=words + argv, default=args_class(**row))
    if taken := {name: value for name, value in row.items() if getattr(args, name) == value}:
        say(f"starting values for {case}, which your own flags replace: {shlex.join(as_words(taken))}")
    return args


def about(script):
    """What the docstring of a script says it is, and its example with data of the user's own."""
    (what, *_), example = script.__doc__.split("\n\n"), script.__doc__.rpartition("Your data: ")[2]
    return f"{what}\n\nExample: {example.strip()}"


def as_words(values):
    """{flag: value} as words of a command line."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
            continue
        parts = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *(json.dumps(x) if isinstance(x, dict) else str(x) for x in parts)]
    return words


def preset_of(args):
    """(an embedded task or the size of the model in words, {flag: value} that the page's table has for it)."""
    task, presets = args.dataset.partition(":")[0], getattr(inspect.getmodule(type(args)), "presets", {})
    if task in toy.TASKS:
        return f"--dataset {task}", presets.get(task, {})
    path = getattr(args, "base_model", None) or getattr(args, "sft_model_path", None)
    if path == "scratch":
        size, presets, kind = size_of_new(args), presets.get(path, {}), "new model of at most"
    else:
        try:
            size, kind = size_of(path, args.trust_remote_code), "model of"
        except Exception:  # A model that cannot be read, or none, ends the script where it is loaded or asked for.
            return "", {}
    limits = [limit for limit in presets if isinstance(limit, float) and size < limit]
    return f"a {kind} {size / 1e6:.1f} M parameters", presets[min(limits)] if limits else {}


def size_of(path, trust_remote_code=False):
    """The number of a causal model's parameters, from its configuration alone: no weight is read or drawn."""
    adapter = Path(path) / "adapter_config.json"
    path = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else path
    announce(path)
    name, revision = split(path)
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model.num_parameters()


def size_of_new(args):
    """The number of parameters of the GPT-NeoX that models.make_small makes, if the text fills the whole vocabulary."""
    V, H = args.vocab_size, args.hidden_size
    return 2 * V * H + args.num_layers * (12 * H * H + 13 * H) + 2 * H


# ---- checks that all scripts share -----------------------------------------------------------------------------------
def check(args):
    """Exits with an error (exit code 2) if a flag makes no sense, before anything is written or trained."""
    check_numbers(args)
    for flag in ("exp_name", "run_name"):
        name = getattr(args, flag)
        if name is not None and (name != Path(name).name or name in ("", "..")):
            fail(f"--{flag} {name!r}: must be the name of a folder, without /")
    if args.hub_model_id and not args.push_to_hub:
        fail(f"--hub_model_id {args.hub_model_id}: needs --push_to_hub")
    if getattr(args, "sft_model_path", "") is None:
        hint = "a folder that train_sft.py has made, or another causal model's folder or Hub name"
        fail(f"--sft_model_path: required with --dataset {args.dataset}: {hint}")
    check_template(args)
    if args.lora_rank:
        need("peft", "peft", f"--lora_rank {args.lora_rank}")
    if hasattr(args, "sampler"):
        check_sampler(args)
    for flag in ("dataset", "eval_dataset", "reference_dataset"):
        check_dataset(f"--{flag}", getattr(args, flag, None) or "")
    check_output_dir(args)
    if args.run_name is not None and Path("runs", args.run_name).exists() and not (args.resume or args.overwrite):
        fail(f"--run_name {args.run_name}: runs/{args.run_name} exists; give another name, --resume or --overwrite")


def check_numbers(args):
    """Exits with an error if a count is too small, or a number is negative or not finite."""
    for name, value in vars(args).items():
        lowest = 0 if name in MAY_BE_ZERO else 1
        if type(value) is int and value < lowest:
            fail(f"--{name} {value}: must be at least {lowest}")
        above_zero = name in ("temperature", "max_grad_norm")
        if isinstance(value, float) and not (0 < value < math.inf or (value == 0 and not above_zero)):
            fail(f"--{name} {value}: must be finite and {'above 0' if above_zero else 'not negative'}")
    if args.seed >= 2**31:
        fail(f"--seed {args.seed}: must be below 2^31 = {2**31}")
    if getattr(args, "warmup_ratio", 0) > 1:
        fail(f"--warmup_ratio {args.warmup_ratio}: must be at most 1")


def check_template(args):
    """Exits with an error if the arguments of a chat template are no JSON object, or its day is no date."""
    try:
        json.loads(args.chat_template_kwargs).keys()
    except (ValueError, AttributeError):
        fail(f'--chat_template_kwargs {args.chat_template_kwargs}: must be a JSON object, such as {{"tools": null}}')
    try:
        date.fromisoformat(args.template_date or "2026-01-01")
    except ValueError:
        fail(f"--template_date {args.template_date}: must be a day, such as 2026-01-31")


def check_sampler(args):
    """Exits with an error if the URL of vLLM's server is given for nothing, or if sampler_cap is below 1."""
    if args.vllm_server and args.sampler != "vllm":
        fail(f"--vllm_server {args.vllm_server}: needs --sampler vllm")
    if getattr(args, "sampler_cap", 1) < 1:
        fail(f"--sampler_cap {args.sampler_cap}: must be at least 1, the weight of an action that both find as likely")


def check_dataset(flag, spec):
    """Exits with an error if the file or the embedded task's split that a data set names does not exist."""
    name, _, part = spec.partition("[")[0].partition(":")
    if name in toy.TASKS and part not in ("", "train", "test"):
        fail(f"{flag} {spec}: the splits are {name}:train and {name}:test")
    path = Path(name)
    is_known = FILE.search(path.name) or path.suffix == ".py"
    if is_known and not path.exists():
        fail(f"{flag} {spec}: no such file")
    if path.is_file() and not is_known:
        fail(f"{flag} {spec}: its name must end in {ENDINGS}, or in one of them and .gz")


def check_output_dir(args):
    """Exits with an error if the output folder holds another model, an input of this run or foreign files.

    Repeating a run into its folder is fine. `--overwrite` allows to replace other models and files, but never an input.
    """
    folder, what = Path(args.output_dir).resolve(), f"--output_dir {args.output_dir}"
    names = "base_model", "sft_model_path", "reward_model_path", "teacher_model_path"
    for kept in (Path(getattr(args, name, None) or ".").resolve() for name in names):  # ".": the current folder
        if kept == folder or folder in kept.parents:
            fail(f"{what}: would replace {kept}")
    with reading("--output_dir", args.output_dir):
        found = list(folder.iterdir()) if folder.exists() else []
    ours = "adapter", "additional_chat_templates"  # Command-R's tokenizer writes the latter.
    if any(item.is_dir() and item.name not in ours for item in found):
        fail(f"{what}: holds folders, so it is no model folder; give another one")
    if args.overwrite or not found:
        return
    before = read_json(folder / "training_args.json", "--output_dir")
    if not before:
        fail(f"{what} holds files that no run has written; give another folder or --overwrite")
    if changed := differences(before, dataclasses.asdict(args), NOT_THE_MODEL):
        advice = "give another folder or --overwrite, or to resume its run the same arguments"
        fail(f"{what} holds another model ({changed[0]}); {advice}")


def differences(before, now, may_differ=()):
    """Texts that name where two dictionaries differ in what `now` holds. before: as JSON has returned it."""
    now = json.loads(json.dumps(now))
    changed = [key for key in now if key not in may_differ and before.get(key) != now[key]]
    return [f"{key} {before.get(key)!r} there, {now[key]!r} here" for key in changed]


def experiment(args):
    """What the runs of all seeds share in their names."""
    return f"{args.dataset.split('/')[-1].split('[')[0]}__{args.exp_name}"


# ---- how a script speaks and ends ------------------------------------------------------------------------------------
def is_main():
    """Whether this is the main process, also before it has met the others."""
    return os.environ.get("RANK", "0") == "0"


def fail(message):
    """Prints one line, "error: ...", on the main process and ends the program with exit code 2."""
    if is_main():
        print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def need(package, extra, what):
    """Exits with an error if the package of an extra is not installed. what: the flag that needs it."""
    if find_spec(package) is None:
        fail(f'{what}: needs the package {package}: pip install -c constraints.txt -e ".[{extra}]"')


def say(line):
    """Prints a line on the main process."""
    if is_main():
        try:
            print(line, flush=True)
        except BrokenPipeError:  # The reader is gone, as in `| tee` after Ctrl-C, and the run goes on.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress(what, items=None, total=None):
    """The items, or a bar for `total` of them, which says how far it is where they take longer than eight seconds."""
    # accelerate's tqdm would settle how many processes there are, and rows are read before the engine is chosen.
    return tqdm(items, desc=what, total=total, delay=8, mininterval=8, leave=False, disable=not is_main())


def world_size():
    """The number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def leave_group():
    """Leaves the group of processes. Otherwise a process can abort while the group's threads still run."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(exit_code):
    """Ends this process. Exit code 1 says that something went wrong, and that the others do not know of it."""
    if exit_code == 1 and world_size() > 1:
        sys.stdout.flush()
        # The others may wait in a collective, and leaving their group would be one more. The launcher ends them.
        os._exit(1)
    leave_group()
    raise SystemExit(exit_code)


def split(source):
    """(NAME, REVISION) of NAME@REVISION. REVISION is None where there is none, and for a local path."""
    name, _, revision = str(source).partition("@")
    return (name, revision) if name and revision and not os.path.exists(source) else (str(source), None)


@functools.cache
def announce(source):
    """Says, once for each source, that it is sought on the Hub, because without a network that takes a minute.

    The scripts write into the folder models/, so a path below it is a folder here, and an error where there is none.
    """
    if str(source).startswith("models/") and not os.path.exists(source):
        raise FileNotFoundError("no such folder")
    if not os.path.exists(source):
        say(f"{source}: no such file or folder here, so it is read from the Hugging Face Hub")


@contextlib.contextmanager
def reading(flag, value):
    """Stands around library calls that read `value` from outside. Their errors end the program with one line.

    Libraries raise many kinds of errors on a bad file, so this catches all but those that no file can cause. Run the
    user's own code outside of this block, so that its errors keep their tracebacks.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, NameError, AssertionError):  # no fault of the file
        raise
    except Exception as e:  # Each library has errors of its own, and models from the Hub bring code of their own.
        # Where `datasets` reads a file, only the cause says what is wrong with it.
        told = e.__cause__ if type(e).__name__ == "DatasetGenerationError" and e.__cause__ else e
        fail(f"{flag} {value}: cannot be read ({in_one_line(told)})")


def read_json(path, flag):
    """The object that a JSON file holds, {} where there is none. A damaged file ends the program with one line."""
    with reading(flag, path):
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def in_one_line(error):
    """An exception's own words in one line. A long message loses its middle: its beginning says what, its end why."""
    words = " ".join(str(error).split())
    if not words or isinstance(error, KeyError):  # The words of a KeyError are nothing but the key.
        words = f"{type(error).__name__}: {words}".removesuffix(": ")
    return words if len(words) <= 600 else f"{words[:395]} ... {words[-200:]}"
