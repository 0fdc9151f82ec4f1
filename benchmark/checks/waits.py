"""
How often the host waits for a device, and how much it asks of it, for each token and each micro-batch.

    python benchmark/checks/waits.py                      a table, in some minutes
    python benchmark/checks/waits.py --measure cuda       the same of a GPU

It runs on the device of tests/pretended_device.py, which does not exist, with a Llama of 16 narrow layers. So it counts
and measures no time. On a GPU it counts the waits that torch warns of. What a token costs is the
difference between long and short responses, over the difference of their lengths, and what a micro-batch costs is the
difference between runs with small and with large ones. An operation is a call of torch's that computes something:
views and empty tensors do not count, and on the pretended device attention counts as the dozen that its formula has.
"""

import collections
import contextlib
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # of pretended_device.py
BATCH, LAYERS = 16, 16
LAYOUTS = {  # name: (responses in a row, prompts of one length)
    "a response in a row, prompts of one length": (1, True),
    "a response in a row, padded prompts": (1, False),
    "4 responses in a row, padded prompts": (4, False),
}
PAGES = {  # name: (page, flags)
    "RLOO, a response in a row": ("train_rloo", dict(share_prompts=False)),
    "RLOO, 2 responses in a row": ("train_rloo", {}),
    "GRPO, 2 responses in a row": ("train_grpo", {}),
    "PPO": ("train_ppo", {}),
}
PASSES = "noise of a token: operations over [rows, vocabulary]"


@dataclass
class Args:
    measure: Literal["pretended", "cuda", "cpu"] = "pretended"
    """the device"""


@contextlib.contextmanager
def counting(device):
    """Gives (operations by operator, waits by text), two Counters that grow meanwhile. A CPU waits for nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    if device.type == "pretended":
        import pretended_device

        with pretended_device.counting() as counters:
            yield counters
        return
    operations, waits = collections.Counter(), collections.Counter()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations[func] += 1
            return func(*args, **kwargs or {})

    with warnings.catch_warnings(), Operations():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: waits.update([str(message)] * ("synchronizing" in str(message)))
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        yield operations, waits
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def of_token(device, n, is_even):
    """(waits, operations) of a step of the sampler, 16 rows of which n share a prompt."""
    import torch

    from rlhf_details import train_rloo, utils

    policy = train_rloo.Policy(llama(vocab_size=512).eval(), 1.0)
    prompts = [list(range(3, 9 if is_even or i % 2 else 6)) for i in range(BATCH // n)]
    found = []
    for length in (32, 96):
        with counting(device) as (operations, waits):
            batch = [
                *utils.left_pad([ids for ids in prompts for _ in range(n)], device),
                torch.arange(BATCH).to(device),
            ]
            inputs = policy.to(device), *batch, n, length, torch.tensor([1]).to(device), (1, 0, 1)
            operations.clear(), waits.clear()
            utils.sample(*inputs, size=BATCH)
            found.append((waits.total(), count(operations)))
    return [(many - few) / 64 for few, many in zip(*found, strict=True)]


def of_micro_batch(device, page, flags):
    """(waits, operations) of one more micro-batch of a training run, in all its forwards."""
    import helpers
    from accelerate import Accelerator

    from rlhf_details.plumbing import engines

    engines.Accelerator = type("OnDevice", (Accelerator,), {"device": device})
    found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        save(Path(folder))
        for size in (8, 2):
            args = helpers.page_args(page, Path(folder), micro_batch_size=size, total_episodes=BATCH, **flags)
            with counting(device) as (operations, waits), contextlib.redirect_stdout(None):
                helpers.PAGES[page].main(args)
                found.append((waits.total(), count(operations)))
    return [(many - few) / (BATCH // 2 - BATCH // 8) for few, many in zip(*found, strict=True)]


def of_noise():
    """How many operations read or write a tensor of [rows, vocabulary] to make the noise of a token."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from rlhf_details import utils

    passes = []

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **kwargs or {})
            passes.append(outputs.numel() == BATCH * 512)
            return outputs

    with Passes():
        utils.gumbel_noise(torch.arange(BATCH, dtype=torch.int32), 512)
    return sum(passes)


def count(operations):
    """How many operations compute something. Args: operations, {operator: number}."""
    is_view = lambda func: any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)  # noqa: E731
    return sum(n for func, n in operations.items() if not is_view(func) and "empty" not in str(func))


def llama(kind="LlamaForCausalLM", **changes):
    """A random Llama of 16 layers, which is otherwise as small as it can be."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, max_position_embeddings=256, **sizes, **changes)
    from rlhf_details.plumbing import models

    return models.prepare(getattr(transformers, kind)(config), None)


def save(folder):
    """Writes `folder`/policy and `folder`/reward."""
    from rlhf_details import toy

    tokenizer = toy.tokenizer()
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    for name, kind in {"policy": "LlamaForCausalLM", "reward": "LlamaForSequenceClassification"}.items():
        llama(kind, vocab_size=len(tokenizer), num_labels=1, **ids).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def measure(device):
    """{row of the table: [waits, operations]} of the package that Python finds, on a device of this name."""
    import torch

    if device != "cuda":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if device == "pretended":
        import pretended_device  # noqa: F401, which gives torch this device
    device = torch.device(device, 0)
    found = {f"a token: {name}": of_token(device, *layout) for name, layout in LAYOUTS.items()}
    found |= {f"a micro-batch: {name}": of_micro_batch(device, *run) for name, run in PAGES.items()}
    return found | {PASSES: [0, of_noise()]}


def main(args):
    found = measure(args.measure)
    print(f"| for, on {args.measure} | waits | operations |\n| --- | --- | --- |")
    print("\n".join(f"| {name} | {waits:.3g} | {operations:.0f} |" for name, (waits, operations) in found.items()))


if __name__ == "__main__":
    main(tyro.cli(Args))
