"""The command line: it is read, with what `presets` and a --config file say, and checked. `flags.py` has the flags."""

import dataclasses
import functools
import inspect
import json
import logging
import math
import re
import shlex
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated, get_origin

import huggingface_hub
import torch
import transformers
import tyro

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import data_files, flags, models

HELP = "-h", "--help"
OPTIONS = dict(use_underscores=True, console_outputs=console.is_main())  # tyro's
MAY_BE_ZERO = "seed eval_every num_sample_generations truncate_after checkpoint_every".split()
AT_MOST_1 = "warmup_ratio gamma lam on_policy_share".split()


def main(function, args_class):
    """Runs a script: function(arguments from the command line). Afterwards all processes leave their group."""
    console.keep_printing()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()  # It would tell of each attempt to reach the Hub.
    # DeepSpeed, where it is installed, says on every CPU that it is one.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    function(parse(args_class))
    console.leave_group()


# ---- command line -> arguments ---------------------------------------------------------------------------------------
def parse(args_class, argv=None, defaults=None, is_help=False):
    """Command line -> args_class. Later wins: its defaults, `presets` of its page, those below, a TOML file, the words.

    The values of the file are read as words before the others, so that tyro checks both. Prints what it has taken from
    `presets`; --help shows them as defaults, and ends the program.
    Args: args_class, a flat dataclass; argv, None for sys.argv[1:]; defaults, {flag: value} that --config wins over;
    is_help, whether the caller will show the help, so that nothing else is printed.
    """
    argv = sys.argv[1:] if argv is None else argv
    given = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    for field in dataclasses.fields(args_class):
        if get_origin(field.type) is tuple and given.count(field.name) > 1:
            console.fail(f"--{field.name}: is given twice; give it once, with all its values behind it")
    read = functools.partial(tyro.cli, args_class, **OPTIONS)
    words = flags.as_words(defaults or {})
    without_help = [word for word in argv if word not in HELP]
    if "config" in given and (file := read(args=without_help).config):
        with console.reading("--config", file):
            words += flags.as_words(tomllib.loads(Path(file).read_text(encoding="utf-8")))
    case, row = preset_of(read(args=words + without_help))
    if without_help != argv:
        show_help(inspect.getmodule(args_class), {"": args_class(**row)})
    args = read(args=words + argv, default=args_class(**row))
    taken = {name: value for name, value in row.items() if getattr(args, name) == value}
    if taken and not is_help:
        console.say(f"starting values for {case}, which your own flags replace: {shlex.join(flags.as_words(taken))}")
    return args


def show_help(script, parts):
    """Prints tyro's --help of a script, a box for each group of flags, and ends the program.

    Args: script, a module; parts, {prefix of the flags: the arguments whose values it shows as defaults}.
    """
    boxes = {}
    kinds = []
    for prefix, args in parts.items():
        texts = flags.described(type(args))
        for field in dataclasses.fields(args):
            group, text = texts[field.name]
            flag = Annotated[field.type, tyro.conf.arg(name=prefix + field.name, help=text)]
            box = boxes.setdefault(prefix.replace(".", ": ") + group, [])
            box.append((field.name, flag, getattr(args, field.name)))
    for title in sorted(boxes, key=lambda title: "memory" in title):  # which comes last
        box = dataclasses.make_dataclass("Box", boxes[title])
        kinds.append((f"box{len(kinds)}", Annotated[box, tyro.conf.arg(name=title)]))
    what, *_ = script.__doc__.split("\n\n")
    example = script.__doc__.rpartition("Your data: ")[2]
    if not Path("rlhf_details").is_dir():  # The package is installed from a wheel, or this is another folder.
        example = re.sub(r"rlhf_details/(\w+)\.py", r"-m rlhf_details.\1", example)
    tyro.cli(
        dataclasses.make_dataclass("Args", kinds),
        args=["--help"],
        description=f"{what}\n\nExample: {example.strip()}",
        config=(tyro.conf.OmitArgPrefixes,),
        **OPTIONS,
    )


def preset_of(args):
    """(the data set or the size of the model in words, {flag: value} that the page's table has for it)."""
    task = args.dataset.partition(":")[0]
    presets = getattr(inspect.getmodule(type(args)), "presets", {})
    if task in presets:
        return f"--dataset {task}", presets[task]
    path = getattr(args, "base_model", None) or getattr(args, "sft_model_path", None)
    if path == "scratch":
        size, presets, kind = size_of_new(args), presets.get(path, {}), "new model of at most"
    else:
        try:
            size = size_of(path, args.trust_remote_code)
            kind = "model of"
        except Exception:  # A model that cannot be read, or none, ends the script where it is loaded or asked for.
            return "", {}
    limits = [limit for limit in presets if isinstance(limit, float) and size < limit]
    return f"a {kind} {size / 1e6:.1f} M parameters", presets[min(limits)] if limits else {}


def size_of(path, trust_remote_code=False):
    """The number of a causal model's parameters, from its configuration alone: no weight is read or drawn."""
    name, revision = console.split(models.find_base(path) or path)
    config = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model.num_parameters()


def size_of_new(args):
    """The number of parameters of the GPT-NeoX that models.make_small makes, if the text fills the whole vocabulary."""
    V = args.vocab_size
    H = args.hidden_size
    return 2 * V * H + args.num_layers * (12 * H * H + 13 * H) + 2 * H


# ---- checks that all scripts share -----------------------------------------------------------------------------------
def check(args):
    """Exits with an error (exit code 2) if a flag makes no sense, before anything is written or trained."""
    check_numbers(args)
    for flag in ("exp_name", "run_name"):
        name = getattr(args, flag)
        if name is not None and (name != Path(name).name or name in ("", "..")):
            console.fail(f"--{flag} {name!r}: must be the name of a folder, without /")
    if args.hub_model_id and not args.push_to_hub:
        console.fail(f"--hub_model_id {args.hub_model_id}: needs --push_to_hub")
    if getattr(args, "sft_model_path", "") is None:
        hint = "a folder that train_sft.py has made, or another causal model's folder or Hub name"
        console.fail(f"--sft_model_path: required with --dataset {args.dataset}: {hint}")
    check_template(args)
    if args.lora_rank:
        console.need("peft", "peft", f"--lora_rank {args.lora_rank}")
    if hasattr(args, "sampler"):
        check_sampler(args)
    for flag in ("dataset", "eval_dataset", "reference_dataset"):
        data_files.check_dataset(f"--{flag}", getattr(args, flag, None) or "")
    check_output_dir(args)
    if args.run_name is not None and Path("runs", args.run_name).exists() and not (args.resume or args.overwrite):
        console.fail(
            f"--run_name {args.run_name}: runs/{args.run_name} exists; give another name, --resume or --overwrite"
        )


def check_numbers(args):
    """Exits with an error if a count is too small, or a number is negative or not finite."""
    for name, value in vars(args).items():
        lowest = 0 if name in MAY_BE_ZERO else 1
        if type(value) is int and value < lowest:
            console.fail(f"--{name} {value}: must be at least {lowest}")
        above_zero = name in ("temperature", "max_grad_norm", "tool_timeout")
        if isinstance(value, float) and not (0 < value < math.inf or (value == 0 and not above_zero)):
            console.fail(f"--{name} {value}: must be finite and {'above 0' if above_zero else 'not negative'}")
    if args.seed >= 2**31:
        console.fail(f"--seed {args.seed}: must be below 2^31 = {2**31}")
    for name in AT_MOST_1:
        if (value := getattr(args, name, 0)) > 1:
            console.fail(f"--{name} {value}: must be at most 1")


def check_batch_size(args, *names):
    """Exits with an error if the batch cannot be divided by the product of these flags and the number of processes."""
    unit = math.prod(getattr(args, name) for name in names) * console.world_size()
    if args.batch_size % unit:
        product = " * ".join([*names, "processes"])
        console.fail(f"--batch_size {args.batch_size}: not divisible by {product} = {unit}")


def check_template(args):
    """Exits with an error if the arguments of a chat template are no JSON object, or its day is no date."""
    with console.reading("--chat_template_kwargs", args.chat_template_kwargs):
        json.loads(args.chat_template_kwargs).keys()
    with console.reading("--template_date", args.template_date):
        date.fromisoformat(args.template_date or "2026-01-01")


def check_sampler(args):
    """Exits with an error if the URL of vLLM's server is none or given for nothing, or if sampler_cap is below 1."""
    console.check_url("--vllm_server", args.vllm_server or "http://", "VLLM_API_KEY")
    if args.vllm_server and args.sampler != "vllm":
        console.fail(f"--vllm_server {args.vllm_server}: needs --sampler vllm")
    if getattr(args, "sampler_cap", 1) < 1:
        console.fail(
            f"--sampler_cap {args.sampler_cap}: must be at least 1, the weight of an action that both find as likely"
        )


def check_output_dir(args):
    """Exits with an error if the output folder holds another model, an input of this run or foreign files.

    Repeating a run into its folder is fine. `--overwrite` allows to replace other models and files, but never an input.
    """
    folder = Path(args.output_dir).resolve()
    what = f"--output_dir {args.output_dir}"
    names = "base_model", "sft_model_path", "reward_model_path", "teacher_model_path"
    for kept in (Path(getattr(args, name, None) or ".").resolve() for name in names):  # ".": the current folder
        if kept == folder or folder in kept.parents:
            console.fail(f"{what}: would replace {kept}")
    with console.reading("--output_dir", args.output_dir):
        found = list(folder.iterdir()) if folder.exists() else []
    ours = "adapter", "additional_chat_templates"  # Command-R's tokenizer writes the latter.
    if any(item.is_dir() and item.name not in ours for item in found):
        console.fail(f"{what}: holds folders, so it is no model folder; give another one")
    if args.overwrite or not found:
        return
    before = console.read_json(folder / "training_args.json", "--output_dir")
    if not before:
        console.fail(f"{what} holds files that no run has written; give another folder or --overwrite")
    if changed := flags.differences(before, dataclasses.asdict(args), flags.NOT_THE_MODEL):
        advice = "give another folder or --overwrite, or to resume its run the same arguments"
        console.fail(f"{what} holds another model ({changed[0]}); {advice}")
