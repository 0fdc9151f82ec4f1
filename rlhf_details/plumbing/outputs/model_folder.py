"""The folder of a trained model, --output_dir, as other tools load it."""

import copy
import dataclasses
import json
import os
import tempfile
from pathlib import Path

import transformers

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import models, stop_tokens
from rlhf_details.plumbing.outputs import atomic


def listing(args):
    """{path: when it was last changed} of all in --output_dir."""
    return {path: path.lstat().st_mtime_ns for path in Path(args.output_dir).resolve().rglob("*")}


def try_out(args, config, tokenizer, card):
    """Writes all but the weights into a folder beside --output_dir, and removes it. What fails fails before training.

    Args: config, the model's; card, the text of README.md.
    """
    target = Path(args.output_dir).resolve()
    mounts = Path("/proc/self/mountinfo")  # of Linux
    target.parent.mkdir(parents=True, exist_ok=True)
    if mounts.exists() and f" {target} " in mounts.read_text():  # Path.is_mount would miss bind mounts.
        raise OSError("it is a mount, in whose place no folder can be put; give a folder in it")
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
        config.save_pretrained(folder)
        save_words(args, tokenizer, card, Path(folder))


def save_weights(args, model, tokenizer, name):
    """Writes the weights, whole or not at all, to a new folder beside --output_dir. Returns the folder.

    Args: name, of the run and of the folder. A model with adapters is merged, and they go to the folder `adapter`.
    """
    folder = atomic.beside(Path(args.output_dir).resolve(), name)
    while folder.exists():
        folder = atomic.beside(folder, name)
    model.config = copy.deepcopy(model.config)
    for name, rate in getattr(model, "rates", {}).items():  # Who trains the model further may want its dropout.
        setattr(model.config, name, rate)
    with atomic.replacing(folder) as partial:
        if hasattr(model, "peft_config"):
            models.save_adapter(model, partial / "adapter", getattr(args, "sft_model_path", None) or args.base_model)
            model = models.merge_adapters(model)
        if model.can_generate():  # Plain `generate` shall stop where we do, and sample from what was trained.
            stop_token = getattr(args, "stop_token", "eos")
            own = [] if stop_token == "eos" else stop_tokens.stop_ids(tokenizer, stop_token, "--stop_token").tolist()
            ends = list(dict.fromkeys([*stop_tokens.end_ids(tokenizer), *own]))
            # The library's own defaults for what is not given here are a temperature of 1 and the 50 likeliest tokens.
            # The losses of SFT and DPO, which have no stop token, are at 1 whatever their --temperature.
            model.generation_config = transformers.GenerationConfig(
                eos_token_id=ends,
                pad_token_id=tokenizer.pad_token_id,
                do_sample=True,
                temperature=args.temperature if hasattr(args, "stop_token") else 1.0,
                top_k=0,
            )
        model.save_pretrained(partial)
    return folder


def save_words(args, tokenizer, card, folder):
    """Writes what belongs to the weights: the tokenizer, training_args.json, and the model card, of which this is the
    text. The adapters have the first two as well, so that they can be loaded and evaluated by themselves."""
    for place in filter(Path.exists, (folder, folder / "adapter")):
        tokenizer.save_pretrained(place)
        (place / "training_args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
    (folder / "README.md").write_text(card, encoding="utf-8")


def put(args, folder, seen):
    """Puts a folder in the place of --output_dir, of which `listing` was `seen` at the start, or leaves it beside it.

    Nothing is replaced that is not as the run has found it, such as the model of another run. Returns where it is.
    """
    if listing(args) in ({}, seen):
        atomic.place(folder, Path(args.output_dir).resolve())
        return args.output_dir
    where = os.path.relpath(folder)
    console.say(f"warning: --output_dir {args.output_dir} has changed since the run began; the model is in {where}")
    return where
