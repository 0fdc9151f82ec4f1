"""
LoRA (arXiv 2106.09685) by the library peft: only low-rank adapters beside the frozen linear layers are trained.

A model keeps its class, and peft's layers take the place of its linear layers.
"""

import json
from pathlib import Path

from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_details.plumbing import cli, errors


def add_adapters(model, rank):
    """Freezes a model and adds adapters to train: W x becomes W x + 2 B A x, with A [rank, in], B [out, rank].

    A is random and B is 0, so the model starts as it was. A new head (`score`) is trained as a whole. Returns it.
    """
    from peft import LoraConfig, inject_adapter_in_model

    kind = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    transposed = any(isinstance(m, Conv1D) for m in model.modules())  # GPT-2 stores its weights as [in, out].
    sizes = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "fan_in_fan_out": transposed}
    config = LoraConfig(target_modules="all-linear", task_type=kind, **sizes)
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    return model


def layers(module):
    """A list of (name, layer) of the layers that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)]


def without_adapters(module):
    """Makes a module, which shares a model with adapters, compute as if there were none. Returns the module."""
    found = [layer for _, layer in layers(module)]

    def switch(on):
        for layer in found:  # enable_adapters would also set requires_grad, which FSDP2 reads but once.
            layer._disable_adapters = not on

    module.register_forward_pre_hook(lambda *_: switch(False))
    module.register_forward_hook(lambda *_: switch(True), always_call=True)
    return module


def read_through(module, prepared):
    """Lets a module without_adapters call the policy that an engine has prepared, since only this gathers weights."""

    def forward(*args, **kwargs):
        outputs = prepared(*args, **kwargs)
        return outputs[:2] if isinstance(outputs, tuple) else outputs  # without the values of a critic

    module.forward = forward


def merge(model):
    """Adds the adapters to the weights and removes them, in place. Returns the model, an ordinary one again."""
    for name, layer in layers(model):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    return model


def save_adapter(model, folder, base_model):
    """Writes a folder that PeftModel.from_pretrained loads over base_model, the path that the model was loaded from."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    name, config.revision = errors.split(base_model)
    config.base_model_name_or_path = str(Path(name).resolve()) if Path(name).exists() else name  # found from any folder
    config.inference_mode = True
    config.save_pretrained(folder)
    weights = {f"base_model.model.{name}": x for name, x in get_peft_model_state_dict(model).items()}
    weights = {name: x.detach().cpu().contiguous() for name, x in weights.items()}
    save_file(weights, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})


def base_of(path):
    """The model that adapters (a folder or Hub name) belong to, or None where the path holds no adapters."""
    name, revision = errors.split(path)
    if not (file := find_adapter_config_file(name, revision=revision)):
        return None
    config = json.loads(Path(file).read_text())
    return "@".join(filter(None, (config["base_model_name_or_path"], config.get("revision"))))


def load_merged(model, path, flag):
    """A base model with the adapters of a path merged into its weights, all of them trained."""
    cli.need("peft", "peft", f"{flag} {path}, which holds adapters")
    from peft import PeftModel

    name, revision = errors.split(path)
    with cli.reading(flag, path):
        # The older adapter_model.bin is a pickle.
        file = cached_file(name, "adapter_model.safetensors", revision=revision)
        return PeftModel.from_pretrained(model, Path(file).parent).merge_and_unload().requires_grad_(True)
