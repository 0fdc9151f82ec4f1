"""The folder of a trained model, --output_dir, as other tools load it."""

import dataclasses
import json
from pathlib import Path

import transformers

from rlhf_details.plumbing.inputs import chat, models
from rlhf_details.plumbing.outputs import atomic


def save(args, model, tokenizer, card=""):
    """Writes --output_dir, whole or not at all: weights, tokenizer, training_args.json and the model card.

    Args: card, the text of README.md. A model with adapters is merged, and the adapters go to the folder `adapter`.
    """
    with atomic.replacing(Path(args.output_dir).resolve()) as folder:
        if hasattr(model, "peft_config"):
            models.save_adapter(model, folder / "adapter", getattr(args, "sft_model_path", None) or args.base_model)
            tokenizer.save_pretrained(folder / "adapter")  # So that the adapters can be loaded by themselves.
            model = models.merge_adapters(model)
        if model.can_generate():  # Plain `generate` shall stop where we do, and sample from what was trained.
            stop_token = getattr(args, "stop_token", "eos")
            own = [] if stop_token == "eos" else models.stop_ids(tokenizer, stop_token, "--stop_token").tolist()
            ends = list(dict.fromkeys([*chat.end_ids(tokenizer), *own]))
            # The library's own defaults for what is not given here are a temperature of 1 and the 50 likeliest tokens.
            sampling = dict(do_sample=True, temperature=getattr(args, "temperature", 1.0), top_k=0)
            pad = tokenizer.pad_token_id
            model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=pad, **sampling)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "training_args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
        (folder / "README.md").write_text(card, encoding="utf-8")
