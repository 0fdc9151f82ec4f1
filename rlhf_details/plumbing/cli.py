"""The command line, read and checked. `flags.py` holds the flags, `errors.py` how a script ends."""

import contextlib
import dataclasses
import difflib
import glob
import inspect
import io
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
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rlhf_details import toy
from rlhf_details.plumbing import errors, progress
from rlhf_details.plumbing.errors import fail, leave, leave_group, need, reading, say, world_size  # noqa: F401
from rlhf_details.plumbing.flags import MEMORY_KNOBS, NOT_THE_MODEL, OUTPUTS, PolicyArgs, RunArgs  # noqa: F401

FILE = re.compile(r"\.(jsonl|json|ndjson|csv|tsv|parquet)(\.gz)?$", re.IGNORECASE)  # how names of data files end
ENDINGS = ".jsonl, .json, .ndjson, .csv, .tsv or .parquet"
MAY_BE_ZERO = "seed eval_every num_sample_generations truncate_after checkpoint_every".split()


def main(function, args_class):
    """Runs a script: function(arguments from the command line). Afterwards all processes leave their group."""
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()  # It would tell of each attempt to reach the Hub.
    for stream in filter(lambda x: hasattr(x, "reconfigure"), (sys.stdout, sys.stderr)):  # not those of notebooks
        stream.reconfigure(errors="backslashreplace")  # Some terminals, as those of Windows, cannot show all samples.
    progress.watch()
    function(parse(args_class))
    leave_group()


# ---- command line -> arguments ---------------------------------------------------------------------------------------
def parse(args_class, argv=None, defaults=None):
    """Command line -> args_class. Later wins: its defaults, `presets` of its page, those below, a TOML file, the words.

    A TOML value becomes words of a command line, so its type is checked like theirs. An unknown key is an error.
    "--reward_fn A --reward_fn B" means "--reward_fn A B".
    Args: args_class, a flat dataclass; argv, None for sys.argv[1:]; defaults, {flag: value} that --config wins over.
    """
    fields = {f.name: f for f in dataclasses.fields(args_class)}
    argv, wants_help = without_help(sys.argv[1:] if argv is None else argv)
    argv = join_lists(argv, {name for name, f in fields.items() if get_origin(f.type) is tuple})
    path, config = tyro.cli(args_class, args=argv).config, {}
    if path:
        with reading("--config", path):
            config = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    if unknown := [key for key in config if key not in fields]:
        close = {name: key for key in unknown for name in difflib.get_close_matches(key, fields, 1)}
        hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
        fail(f"--config {path}: unknown key{'s' * (len(unknown) > 1)} {', '.join(map(repr, unknown))}{hint}")
    for key, value in config.items():
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                tyro.cli(args_class, args=as_words(key, value))
        except SystemExit:
            fail(f"--config {path}: {key} = {value!r} is not of that flag's type")
    values = (defaults or {}) | config
    args = tyro.cli(args_class, args=[word for item in values.items() for word in as_words(*item)] + argv)
    args = with_presets(args, given=values.keys() | names_in(argv))
    if wants_help:
        show_help(args, inspect.getmodule(args_class).__doc__)
    return args


def with_presets(args, given):
    """The arguments with what the page's table has for their data set or model, and prints what it has taken.

    Args: given, the flags that the user has set.
    """
    case, values = preset_of(args, given)
    values = {name: value for name, value in values.items() if name not in given}
    if values:
        words = shlex.join(word for item in values.items() for word in as_words(*item))
        # It may be larger than the batch.
        knob = " (--micro_batch_size: at most so many rows at once, in evaluations as well; it changes no result)"
        knob *= "micro_batch_size" in values
        say(f"starting values for {case}, which your own flags replace: {words}{knob}")
    return dataclasses.replace(args, **values)


def presets_of(args):
    """`presets` of the page whose Args these are, {} of a page without such a table."""
    return getattr(inspect.getmodule(type(args)), "presets", {})


def preset_of(args, given):
    """(an embedded task or the size of the model in words, {flag: value} that the page's table has for it).

    The model is not read where all flags that follow its size are given, as in a recipe.
    """
    task, presets = args.dataset.partition(":")[0], presets_of(args)
    if task in toy.TASKS:
        return f"--dataset {task}", presets.get(task, {})
    path = getattr(args, "base_model", None) or getattr(args, "sft_model_path", None)
    is_new = path == "scratch" and path in presets
    rows = {limit: row for limit, row in (presets[path] if is_new else presets).items() if isinstance(limit, float)}
    if path is None or set().union(*rows.values()) <= given:
        return "", {}
    if is_new:
        size = size_of_new(args)
        case = f"a new model of at most {size / 1e6:.1f} M parameters"
    else:
        try:
            size = size_of(path, args.trust_remote_code)
        except Exception:  # A model that cannot be read ends the script when it is loaded, with a line about it.
            return "", {}
        case = f"a model of {size / 1e6:.1f} M parameters"
    return case, rows.get(min((limit for limit in rows if size < limit), default=None), {})


def size_of(path, trust_remote_code=False):
    """The number of a causal model's parameters, from its configuration alone: no weight is read or drawn."""
    adapter = Path(path) / "adapter_config.json"
    path = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else path
    errors.announce(path)
    name, revision = errors.split(path)
    with progress.doing(f"counting the parameters of {path}"), torch.device("meta"):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in model.parameters())


def size_of_new(args):
    """The number of parameters of the GPT-NeoX that models.make_small makes, if the text fills the whole vocabulary."""
    V, H = args.vocab_size, args.hidden_size
    return 2 * V * H + args.num_layers * (12 * H * H + 13 * H) + 2 * H


def without_help(argv):
    """(the words but for -h and --help, whether they had one)."""
    words = [word for word in argv if word not in ("-h", "--help")]
    return words, len(words) < len(argv)


def show_help(args, about):
    """Prints all flags with the values that args have on the main process, and ends the program.

    about: the docstring of the script.
    """
    (what, *_), example = about.split("\n\n"), about.rpartition("Your data: ")[2].strip()
    text = f"{what}\n\nExample: {example}"
    is_main = os.environ.get("RANK", "0") == "0"
    words = dict(args=["--help"], use_underscores=True, description=text, console_outputs=is_main)
    tyro.cli(type(args), default=args, **words)


def as_words(key, value):
    """A flag and its value as words of a command line."""
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no_{key}"]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{key}", *(json.dumps(x) if isinstance(x, dict) else str(x) for x in values)]


def names_in(argv):
    """The names of the flags on a command line, without the `no_` that switches one off."""
    names = (word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--"))
    return {name.removeprefix("no_") for name in names}


def join_lists(argv, names):
    """The same command line, where each flag of several values (names) stands once, with all its values."""
    found, words, target = {}, [], None
    for word in argv:
        if not word.startswith("--"):
            (words if target is None else target).append(word)
            continue
        flag, has_value, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if name in names:
            target = found.setdefault(name, [])
            target += [value] if has_value else []
        else:
            target = words
            words.append(word)
    return words + [word for name, values in found.items() for word in (f"--{name}", *values)]


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
    check_datasets(args)
    check_output_dir(args)
    if args.run_name is not None and not args.overwrite:
        exists = (Path("runs") / args.run_name).exists()
        if exists and not args.resume:
            fail(f"--run_name {args.run_name}: runs/{args.run_name} exists; give another name, --resume or --overwrite")
        if args.resume and not exists:
            hint = "leave --resume out, or --overwrite starts it"
            fail(f"--run_name {args.run_name}: there is no runs/{args.run_name} that --resume could continue; {hint}")


def check_numbers(args):
    """Exits with an error if a count is too small, or a number is negative or not finite."""
    for name, value in vars(args).items():
        lowest = 0 if name in MAY_BE_ZERO else 1
        if type(value) is int and value < lowest:
            fail(f"--{name} {value}: must be at least {lowest}")
        above_zero = name in ("temperature", "kl_temperature", "max_grad_norm")
        if isinstance(value, float) and not (0 < value < math.inf or (value == 0 and not above_zero)):
            fail(f"--{name} {value}: must be finite and {'above 0' if above_zero else 'not negative'}")
    if args.seed >= 2**31:
        fail(f"--seed {args.seed}: must be below 2^31 = {2**31}")
    if getattr(args, "warmup_ratio", 0) > 1:
        fail(f"--warmup_ratio {args.warmup_ratio}: must be at most 1")


def check_template(args):
    """Exits with an error if the arguments of a chat template are no JSON object, or its day is no date."""
    try:
        is_object = isinstance(json.loads(args.chat_template_kwargs), dict)
    except ValueError:
        is_object = False
    if not is_object:
        fail(
            f"--chat_template_kwargs {args.chat_template_kwargs}: must be a JSON object, such as '{{\"tools\": null}}'"
        )
    try:
        date.fromisoformat(args.template_date or "2026-01-01")
    except ValueError:
        fail(f"--template_date {args.template_date}: must be a day, such as 2026-01-31")


def check_sampler(args):
    """Exits with an error if vLLM is asked for and not installed, or its server's URL is given for nothing."""
    if args.vllm_server and args.sampler != "vllm":
        fail(f"--vllm_server {args.vllm_server}: needs --sampler vllm")
    if args.sampler == "vllm" and not args.vllm_server and find_spec("vllm") is None:
        fail("--sampler vllm: needs the package vllm; docs/guides/4_memory_and_gpus.md says how to install it")
    if args.sampler == "vllm" and hasattr(args, "batch_size"):
        args.rollout_micro_batch_size = args.batch_size  # vLLM decides by itself how many rows it computes at once.


def check_datasets(args):
    """Exits with an error if a local file of a data set, or a split of an embedded task, does not exist."""
    for flag in ("dataset", "eval_dataset", "reference_dataset"):
        spec = getattr(args, flag, None) or ""
        name, _, part = spec.partition("[")[0].partition(":")
        if name not in toy.TASKS:
            check_file(f"--{flag}", spec)
        elif part not in ("", "train", "test"):
            fail(f"--{flag} {spec}: the splits are {name}:train and {name}:test")


def check_file(flag, spec):
    """Exits with an error if a data set is named like a file and there is none, or is a file of an unknown kind."""
    path = Path(spec.partition("[")[0].partition(":")[0])
    is_known = FILE.search(path.name) or path.suffix == ".py"
    if is_known and not path.exists():
        fail(f"{flag} {spec}: no such file")
    if path.is_file() and not is_known:
        fail(f"{flag} {spec}: its name must end in {ENDINGS}, or in one of them and .gz")


def check_output_dir(args):
    """Exits with an error if the output folder holds another model, an input of this run or foreign files.

    Repeating a run into its folder is fine. `--overwrite` allows to replace other models and files, but never an input.
    """
    folder = Path(args.output_dir).resolve()
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            fail(f"--output_dir {args.output_dir}: {part} is a file")
    inputs = [getattr(args, name, None) for name in ("base_model", "sft_model_path", "reward_model_path")]
    for kept in (Path.cwd(), *(Path(path).resolve() for path in inputs if path and Path(path).exists())):
        if kept == folder or folder in kept.parents:
            fail(f"--output_dir {args.output_dir}: would replace {kept}")
    if not folder.exists() or not any(folder.iterdir()):
        return
    ours = "adapter", "additional_chat_templates"  # Command-R's tokenizer writes the latter.
    if any(item.is_dir() and item.name not in ours for item in folder.iterdir()):
        fail(f"--output_dir {args.output_dir}: holds folders, so it is no model folder; give another one")
    if args.overwrite:
        return
    try:
        before = dict(json.loads((folder / "training_args.json").read_text()))
    except (OSError, ValueError, TypeError):
        fail(f"--output_dir {args.output_dir} holds files that no run has written; give another folder or --overwrite")
    now = json.loads(json.dumps(dataclasses.asdict(args)))
    for key in now:
        if key not in NOT_THE_MODEL and before.get(key) != now[key]:
            advice = "give another folder or --overwrite"
            if args.resume:
                advice = "to resume its run, give the same arguments; else give another --output_dir and --run_name"
            there = f"{key} {before.get(key)!r} there, {now[key]!r} here"
            fail(f"--output_dir {args.output_dir} holds another model ({there}); {advice}")


# ---- names of runs ---------------------------------------------------------------------------------------------------
def experiment(args):
    """What the runs of all seeds share in their names."""
    return f"{args.dataset.split('/')[-1].split('[')[0]}__{args.exp_name}"


def folder_to_resume(args):
    """With --resume the folder of --run_name, or of the newest run of this data set, experiment and seed; else None."""
    if not args.resume or args.run_name is not None:
        return Path("runs") / args.run_name if args.resume else None
    prefix = glob.escape(f"{experiment(args)}__{args.seed}__")
    started = [folder for folder in Path("runs").glob(f"{prefix}[0-9]*") if any(folder.iterdir())]
    return max(started, default=None)
