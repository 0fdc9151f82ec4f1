"""
Starting values: what a script takes by the size of the model, for data of the user's own, where no flag says otherwise.

The scripts' own values are those of published recipes for models of 1 B. At such learning rates a small model learns
next to nothing. The table is applied by `cli.parse`, and the line that it prints names every value from it.
"""

import json
import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_details import toy
from rlhf_details.plumbing import errors, progress
from rlhf_details.plumbing.errors import say

NEW = "train_sft, new model"  # --base_model scratch
# {a model has fewer parameters than this: {script: {flag: value}}}
# A script that is missing takes its own values. docs/guides/1_your_data.md says where each value is from.
TABLE = {
    20e6: {
        NEW: dict(learning_rate=2e-3, warmup_ratio=0.05, num_train_epochs=5, batch_size=8, micro_batch_size=32),
        "train_sft": dict(learning_rate=1e-3, num_train_epochs=3, batch_size=8, micro_batch_size=32),
        "train_reward": dict(
            learning_rate=1e-3, num_train_epochs=2, batch_size=16, max_grad_norm=1.0, micro_batch_size=32,
        ),
        "train_dpo": dict(
            learning_rate=3e-4, num_train_epochs=2, batch_size=16, beta=0.3, max_grad_norm=1.0, micro_batch_size=32,
        ),
        "train_rloo": dict(
            learning_rate=3e-4, total_episodes=10_000, batch_size=64, rloo_k=4, num_mini_batches=1, num_ppo_epochs=1,
            kl_coef=0.3, missing_eos_penalty=3.0, micro_batch_size=64,
        ),
        "train_grpo": dict(
            learning_rate=3e-4, total_episodes=10_000, batch_size=64, group_size=4, kl_coef=0.3, temperature=0.7,
            response_length=53, missing_eos_penalty=3.0, micro_batch_size=64,
        ),
        "train_ppo": dict(
            learning_rate=3e-4, total_episodes=5_000, batch_size=128, kl_coef=0.3, missing_eos_penalty=3.0,
            max_grad_norm=1.0, micro_batch_size=128,
        ),
    },
    500e6: {
        NEW: dict(learning_rate=6e-4),
        "train_sft": dict(learning_rate=2e-5),
        "train_reward": dict(learning_rate=5e-5, batch_size=32),
        "train_dpo": dict(learning_rate=1e-5),
        "train_rloo": dict(
            learning_rate=1e-5, total_episodes=10_000, batch_size=64, num_mini_batches=1, num_ppo_epochs=1,
        ),
        "train_grpo": dict(learning_rate=1e-5, total_episodes=10_000, batch_size=64, missing_eos_penalty=1.0),
        "train_ppo": dict(learning_rate=1e-5),
    },
    5e9: {NEW: dict(learning_rate=3e-4)},
    math.inf: {
        NEW: dict(learning_rate=1.2e-4),
        "train_rloo": dict(learning_rate=1e-6),
        "train_ppo": dict(learning_rate=3e-7),
    },
}  # fmt: skip


def page_of(args_class):
    """The page whose values a script takes: the one that its Args name, as each page names itself and a copy keeps."""
    return getattr(args_class, "starting_values", args_class.exp_name)


def of(args):
    """(the model in words, {flag: value}) of the table. An embedded task has values of its own, so it gets {}."""
    script = page_of(type(args))
    path = getattr(args, "base_model", None) or getattr(args, "sft_model_path", None)
    if path is None or args.dataset.partition(":")[0] in toy.TASKS:
        return "", {}
    if script not in names():
        say(
            f"no starting values for {script}: its own defaults hold, which are meant for a model of 1 B parameters; "
            "to take those of another page, name it as starting_values in Args"
        )
        return "", {}
    new = path == "scratch" and script == "train_sft"
    size = of_a_new_model(args) if new else parameters(path, args.trust_remote_code)
    column = next(column for limit, column in TABLE.items() if size < limit)
    words = f"a new model of at most {size / 1e6:.1f} M" if new else f"a model of {size / 1e6:.1f} M"
    return f"{words} parameters", column.get(NEW if new else script, {})


def names():
    """{script: the flags that the table sets anywhere for it}."""
    found = {}
    for column in TABLE.values():
        for script, values in column.items():
            found.setdefault(script.partition(",")[0], set()).update(values)
    return found


def parameters(path, trust_remote_code=False):
    """The number of a causal model's parameters, from its configuration alone: no weight is read or drawn."""
    adapter = Path(path) / "adapter_config.json"
    path = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else path
    errors.announce(path)
    name, revision = errors.split(path)
    with progress.doing(f"counting the parameters of {path}"), torch.device("meta"):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in model.parameters())


def of_a_new_model(args):
    """The number of parameters of the GPT-NeoX that models.make_small makes, if the text fills the whole vocabulary."""
    V, H = args.vocab_size, args.hidden_size
    return 2 * V * H + args.num_layers * (12 * H * H + 13 * H) + 2 * H
