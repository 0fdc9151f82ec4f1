"""
The command line: how flags are read and checked, and how a script ends with one line. `flags.py` holds the flags.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import io
import json
import math
import os
import sys
import textwrap
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, get_origin

import torch
import tyro
from transformers.utils import logging as transformers_logging

from rlhf_details import toy
from rlhf_details.plumbing import stages
from rlhf_details.plumbing.flags import GROUPS, MEMORY_KNOBS, NOT_THE_MODEL, OUTPUTS, PolicyArgs, RunArgs  # noqa: F401

MAY_BE_ZERO = "seed eval_every num_sample_generations truncate_after checkpoint_every".split()


# ---- how a script ends, and what it says -----------------------------------------------------------------------------
def fail(message):
    """Prints one line, "error: ...", on the main process and ends the program with exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def say(line):
    """Prints a line on the main process."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def world_size():
    """The number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


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
    except Exception as e:
        words = str(e).strip() or type(e).__name__
        where = "" if os.path.exists(str(value).partition(":")[0]) else "is no local path and "
        fail(f"{flag} {value}: {where}cannot be read ({words.splitlines()[0]})")


def main(function, args_class):
    """Runs a script: function(arguments from the command line). Afterwards all processes leave their group."""
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()
    function(parse(args_class))
    leave_group()


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


# ---- command line -> arguments ---------------------------------------------------------------------------------------
def parse(args_class, argv=None, defaults=None):
    """Command line -> args_class. Later wins: its defaults, the embedded task's, `--config FILE.toml`, the words.

    A TOML value becomes words of a command line, so its type is checked like theirs. An unknown key is an error.
    "--reward_fn A --reward_fn B" means "--reward_fn A B".
    Args: args_class, a flat dataclass; argv, None for sys.argv[1:]; defaults, {data set: {flag: value}}, None for
    those of the script that is the default of exp_name.
    """
    fields = {f.name: f for f in dataclasses.fields(args_class)}
    defaults = stages.defaults(fields["exp_name"].default) if defaults is None else defaults
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        show_help(args_class)
    argv = join_lists(argv, {name for name, f in fields.items() if get_origin(f.type) is tuple})
    path, config = value_of("config", argv), {}
    if path:
        with reading("--config", path):
            config = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    for key, value in config.items():
        if key not in fields:
            fail(f"--config {path}: unknown key {key!r}")
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                tyro.cli(args_class, args=as_words(key, value))
        except SystemExit:
            fail(f"--config {path}: {key} = {value!r} is not of that flag's type")
    dataset = value_of("dataset", argv) or str(config.get("dataset", "toy"))
    values = defaults.get(dataset.partition(":")[0], {}) | config
    return tyro.cli(args_class, args=[word for item in values.items() for word in as_words(*item)] + argv)


def as_words(key, value):
    """A flag and its value as words of a command line."""
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no_{key}"]
    return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]


def value_of(name, argv):
    """The value that a command line gives a flag, the last one where there are several, or None."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return {flag[2:].replace("-", "_"): value for flag, value in pairwise(words) if flag.startswith("--")}.get(name)


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


def show_help(args_class):
    """Prints the help and ends the program. Flags stand in groups, one for each class that declares some."""
    defaults, texts, groups, seen = {f.name: f.default for f in dataclasses.fields(args_class)}, {}, [], set()
    classes = [c for c in reversed(args_class.__mro__) if dataclasses.is_dataclass(c)]
    for c in classes:
        texts |= help_texts(c)  # A class may give a flag of its base another text.
    for c in classes:
        new = [f for f in dataclasses.fields(c) if f.name not in seen]
        seen |= {f.name for f in new}
        flags = [(f.name, Annotated[f.type, tyro.conf.arg(help=texts[f.name])], defaults[f.name]) for f in new]
        group, title = dataclasses.make_dataclass(c.__name__, flags), GROUPS.get(c.__name__, defaults["exp_name"])
        group.__doc__ = ""  # Otherwise the help would show the dataclass's signature.
        kind = Annotated[group, tyro.conf.arg(name=title)]
        groups.append((c.__name__, kind, dataclasses.field(default_factory=group)))
    whole = dataclasses.make_dataclass("Help", groups)
    whole.__doc__ = ""
    tyro.cli(whole, args=["--help"], config=(tyro.conf.OmitArgPrefixes,))


def help_texts(args_class):
    """{flag: the string that stands below it in the source} of the flags that a class declares."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(args_class))).body
    pairs = [(a, b) for a, b in pairwise(tree.body) if isinstance(b, ast.Expr)]
    return {a.target.id: " ".join(ast.literal_eval(b.value).split()) for a, b in pairs if isinstance(a, ast.AnnAssign)}


# ---- checks that all scripts share -----------------------------------------------------------------------------------
def check(args):
    """Ends with one line (exit code 2) where a flag makes no sense, before anything is written or trained."""
    check_numbers(args)
    for flag in ("exp_name", "run_name"):
        name = getattr(args, flag)
        if name is not None and (name != Path(name).name or name in ("", "..")):
            fail(f"--{flag} {name!r}: must be the name of a folder, without /")
    if args.hub_model_id and not args.push_to_hub:
        fail(f"--hub_model_id {args.hub_model_id}: needs --push_to_hub")
    if getattr(args, "sft_model_path", "") is None:
        hint = "only --dataset toy from the command line has a default"
        fail(f"--sft_model_path: required, a model folder or Hub name ({hint})")
    if args.lora_rank and importlib.util.find_spec("peft") is None:
        fail(f"--lora_rank {args.lora_rank}: needs the package peft: pip install 'rlhf_details[peft]'")
    check_datasets(args)
    check_output_dir(args)
    if args.run_name is not None and not (args.overwrite or args.resume) and (Path("runs") / args.run_name).exists():
        fail(f"--run_name {args.run_name}: runs/{args.run_name} exists; give another name, --resume or --overwrite")


def check_numbers(args):
    """Ends with one line where a count is too small, or a number is negative or not finite."""
    for name, value in vars(args).items():
        lowest = 0 if name in MAY_BE_ZERO else 1
        if type(value) is int and value < lowest:
            fail(f"--{name} {value}: must be at least {lowest}")
        above_zero = name in ("temperature", "kl_temperature", "max_grad_norm")
        if isinstance(value, float) and not (0 < value < math.inf or (value == 0 and not above_zero)):
            fail(f"--{name} {value}: must be finite and {'above 0' if above_zero else 'not negative'}")
    if getattr(args, "warmup_ratio", 0) > 1:
        fail(f"--warmup_ratio {args.warmup_ratio}: must be at most 1")


def check_datasets(args):
    """Ends with one line where a local file of a data set, or a split of an embedded task, does not exist."""
    for flag in ("dataset", "eval_dataset", "reference_dataset"):
        spec = getattr(args, flag, None) or ""
        name, _, part = spec.partition("[")[0].partition(":")
        if Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet", ".py") and not Path(name).exists():
            fail(f"--{flag} {spec}: no such file")
        if name in toy.TASKS and part not in ("", "train", "test"):
            fail(f"--{flag} {spec}: the splits are {name}:train and {name}:test")


def check_output_dir(args):
    """Ends with one line where the output folder holds another model, an input of this run or foreign files.

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
    if any(item.is_dir() and item.name != "adapter" for item in folder.iterdir()):
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
            there = f"{key} {before.get(key)!r} there, {now[key]!r} here"
            fail(f"--output_dir {args.output_dir} holds another model ({there}); give another folder or --overwrite")
