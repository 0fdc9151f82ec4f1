"""
Models with random weights and the data that the stages of some studies start from (study.py calls it):

    python benchmark/studies/start.py gpt2 --output_dir FOLDER --seed 1       a GPT-2 of the embedded task's size
    python benchmark/studies/start.py lengths --output_dir FOLDER --seed 1    a GPT-NeoX with room for 160 tokens, and
                                                                              lengths.jsonl: reviews of 1 to 7 sentences
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from called import Called


@dataclass
class Args(Called):
    kind: tyro.conf.Positional[Literal["gpt2", "lengths"]]
    """which model"""
    output_dir: str
    """where it goes"""
    reviews: int = 12_000
    """lines of lengths.jsonl, which are the same for every seed"""


def main(args: Args):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    from rlhf_details import toy, train_sft

    folder, tokenizer = Path(args.output_dir), toy.tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(args.seed)
    if args.kind == "gpt2":  # Its dropout is the library's 0.1.
        ids["bos_token_id"] = tokenizer.eos_token_id
        config = GPT2Config(vocab_size=len(tokenizer), n_positions=128, n_embd=64, n_layer=2, n_head=4, **ids)
        model = GPT2LMHeadModel(config)
    else:
        own = train_sft.Args(**train_sft.presets["toy"])
        shape = dict(hidden_size=own.hidden_size, num_hidden_layers=own.num_layers, num_attention_heads=own.num_heads)
        shape |= dict(intermediate_size=4 * own.hidden_size, max_position_embeddings=160)
        model, rng = (
            GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=len(tokenizer), **shape, **ids)),
            np.random.default_rng(2027),
        )
        with open(folder / "lengths.jsonl", "w") as file:
            for _ in range(args.reviews):
                text, opening = toy.write_review(rng, range(1, 8))
                words, cut = text.split(), opening + int(rng.integers(3))
                row = {"prompt": " ".join(words[:cut]), "completion": " ".join(words[cut:])}
                file.write(json.dumps(row) + "\n")
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    args.log({"update": 0})


if __name__ == "__main__":
    main(tyro.cli(Args))
