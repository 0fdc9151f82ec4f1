"""
LoRA (arXiv 2106.09685) by the library peft: the weights stay, and low-rank adapters beside the linear layers are trained.

A model keeps its class; only its linear layers are replaced by peft's. Nothing runs at import.
"""

import importlib.util
import json
from pathlib import Path

from safetensors import SafetensorError
from transformers.pytorch_utils import Conv1D

from rlhf_details import utils


def check(args):
    """Ends with one line where LoRA is asked for and peft is not installed."""
    if args.lora_rank and importlib.util.find_spec("peft") is None:
        utils.fail("--lora_rank: needs the package peft: pip install 'rlhf_details[peft]'")
    if getattr(args, "lora_merge", False) and not args.lora_rank:
        utils.fail("--lora_merge: needs a --lora_rank")
    start = getattr(args, "sft_model_path", None) or getattr(args, "base_model", None)
    if args.lora_rank and hasattr(args, "lora_merge") and not args.lora_merge and base_of(start):
        utils.fail(
            f"--lora_rank {args.lora_rank}: {start} holds adapters, and nothing loads adapters on adapters; give --lora_merge"
        )


def add_adapters(model, rank):
    """Freezes a model and puts trained adapters beside its linear layers: W x + 2 B A x, A [rank, in] random, B [out, rank] zero.

    So it starts as the model it was. A new head (`score`) is trained as a whole. Returns the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    kind = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    turned = any(isinstance(m, Conv1D) for m in model.modules())  # GPT-2 holds the transposes of its weights
    sizes = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "fan_in_fan_out": turned}
    config = LoraConfig(target_modules="all-linear", task_type=kind, **sizes)
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    return model


def layers(module):
    """(name, layer) of the layers that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)]


def without_adapters(module):
    """Lets a module that shares a model with adapters compute as if it had none; returns the module."""
    found = [layer for _, layer in layers(module)]

    def switch(on):
        for layer in found:
            layer.enable_adapters(on)

    module.register_forward_pre_hook(lambda *_: switch(False))
    module.register_forward_hook(lambda *_: switch(True), always_call=True)
    return module


def save_adapter(model, folder, base_model):
    """Writes a folder that PeftModel.from_pretrained loads over base_model, the folder or Hub name the model came from."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    base_model = str(Path(base_model).resolve()) if Path(base_model).exists() else base_model  # found from any folder
    config.base_model_name_or_path, config.inference_mode = base_model, True
    config.save_pretrained(folder)
    weights = {f"base_model.model.{name}": x.detach().cpu().contiguous() for name, x in get_peft_model_state_dict(model).items()}
    save_file(weights, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})


def save(model, folder, base_model, merged):
    """Writes the adapters to a folder, or (merged) the whole model to it and the adapters to `folder`/adapter."""
    save_adapter(model, folder / "adapter" if merged else folder, base_model)
    if merged:
        merge(model).save_pretrained(folder)


def merge(model):
    """Adds the adapters to the weights and takes them out, in place: an ordinary model again. Returns the model."""
    for name, layer in layers(model):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    delattr(model, "peft_config")
    model._hf_peft_config_loaded = False  # transformers' own mark, where it has loaded the adapters
    return model


def base_of(folder):
    """The model that a folder of adapters belongs to, or None for any other folder or name."""
    try:
        return json.loads((Path(folder) / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_merged(model, folder, flag):
    """A base model with a folder's adapters merged into its weights, all of them trained."""
    if importlib.util.find_spec("peft") is None:
        utils.fail(f"{flag} {folder}: holds adapters and needs the package peft: pip install 'rlhf_details[peft]'")
    from peft import PeftModel

    if not (Path(folder) / "adapter_model.safetensors").is_file():  # the library would unpickle an adapter_model.bin
        utils.fail(f"{flag} {folder}: has no adapter_model.safetensors")
    try:
        return PeftModel.from_pretrained(model, folder).merge_and_unload().requires_grad_(True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
        utils.fail(f"{flag} {folder}: its adapters do not fit their base model ({str(e).strip().splitlines()[0]})")
