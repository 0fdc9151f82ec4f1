"""What is saved appears whole or not at all: it is written beside its place, synced to the disk and then renamed."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from rlhf_details.plumbing import lora


def sync(path):
    """Returns when a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not Path(path).is_dir():  # Some file systems sync no folders.
            raise
    finally:
        os.close(handle)


def write_text(path, text):
    """Writes a text file to a neighbour, which takes the file's name once it is on the disk."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)


def save_folder(args, model, tokenizer, weights, card=None):
    """Writes --output_dir, whole or not at all: weights, tokenizer, training_args.json and the model card.

    Args: weights, {name: whole tensor} as the model names its parameters, None for the model's own; card, the text of
    README.md. A model with adapters is merged, and the adapters go to the folder `adapter` in it.
    """
    folder = Path(args.output_dir).resolve()
    partial, before = (folder.with_name(f"{folder.name}.{kind}") for kind in ("partial", "before"))
    if before.exists() and not folder.exists():  # An earlier save was killed between the two renames below.
        before.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if hasattr(model, "peft_config"):
            lora.save_adapter(model, partial / "adapter", getattr(args, "sft_model_path", None) or args.base_model)
            tokenizer.save_pretrained(partial / "adapter")  # So that the adapters can be loaded by themselves.
            model, weights = lora.merge(model), None
        if weights is not None:  # Buffers are no parameters, but belong to the model.
            parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            buffers = {name: x for name, x in model.state_dict().items() if name not in parameters}
            weights = weights | {name: x.detach().cpu() for name, x in buffers.items()}
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
        (partial / "training_args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
        if card is not None:
            (partial / "README.md").write_text(card, encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # On a full disk its room may be needed.
        raise
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    partial.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
