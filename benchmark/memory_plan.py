"""
How many bytes a device needs for a run, before anyone rents it: what it holds, and the peak of each phase.

    python benchmark/memory_plan.py --model 8b --processes 8 --engine fsdp2
    python benchmark/memory_plan.py --model 1b --engine one --algorithm ppo --lora_rank 16

What a device holds all the time (weights, moments, buffers) follows from the shapes of the weights, by one-line
functions. What comes and goes (key-value cache, activations, logits, copies of weights in bf16) is measured: the page's
own Policy and Reward go through an update on tensors of torch's FakeTensorMode, which have shapes and no memory, and
`Live` counts the bytes of all that are alive. FSDP2's own code takes part, over a group of processes that is not there.
So the plan holds for any architecture, needs no weights, and takes seconds. Tests compare it with real runs of two CPU
processes (benchmark/tests/test_memory_plan.py). No GPU has measured it yet: kernels of a GPU may need other workspace.
"""

import contextlib
import functools
import math
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

import torch
import tyro
from speed import SIZES
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    GPTNeoXConfig,
    LlamaConfig,
)
from transformers.pytorch_utils import Conv1D

from rlhf_details import train_grpo, train_ppo, train_rloo, utils
from rlhf_details.plumbing import layout, lora, models

GIB = 2**30
CARDS = (24, 40, 80)  # GiB
HEADROOM = 0.1  # of a card: the CUDA context, the communication library, and what the allocator cannot use
LLAMA = {  # Llama 3's: hidden size, layers, heads, heads of keys and values, intermediate size, vocabulary
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
}
PAGES = {"rloo": train_rloo, "grpo": train_grpo, "ppo": train_ppo}
SHARDED = "fsdp2", "zero3"
PHASES = "rollout", "scores", "backward", "step"
ROWS = (
    "weights gradients moments engine reference reward_model value_model sampling_copy bf16_weights kv_cache activations "
    "logits"
).split()


@dataclass
class Args:
    model: str = "8b"
    """shape of all models: 0.9m, 27m, 160m, 1b (GPT-NeoX), 8b, 70b (Llama 3), or a model folder or its config.json"""
    algorithm: Literal["rloo", "grpo", "ppo"] = "rloo"
    """the page"""
    engine: Literal["one", "ddp", "fsdp2", "zero2", "zero3"] = "fsdp2"
    """one process, or the name of a launch file in benchmark/accelerate/"""
    processes: int = 8
    """number of devices"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 autocast, or none"""
    reward_model: bool = True
    """whether there is a reward model, of the policy's shape; without one rewards come from functions"""
    prompt_length: int = 512
    """tokens of the longest prompt (Q)"""
    response_length: int = 512
    """tokens of a response (R)"""
    k: int = 4
    """responses per prompt; PPO has 1"""
    batch_size: int = 512
    """episodes per update, over all processes"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch"""
    micro_batch_size: int = 4
    """the page's flag of this name, as are those below"""
    rollout_micro_batch_size: int = 16
    gradient_checkpointing: bool = False
    lora_rank: int | None = None
    sampling_copy: bool = True
    offload_frozen: bool = False


# ---- what a process holds: numbers of a list of tensors' shapes, W processes -----------------------------------------
def whole(shapes, W):
    """Every process holds all of them."""
    return sum(map(math.prod, shapes))


def rows_of_each(shapes, W):
    """FSDP2 cuts each tensor along its first dimension, and the first process has ceil(rows / W) of the rows."""
    return sum(math.ceil(shape[0] / W) * math.prod(shape[1:]) for shape in shapes)


def part_of_all(shapes, W):
    """ZeRO-2 lays all tensors in a row and fills it up to a multiple of 2 W numbers."""
    return math.ceil(whole(shapes, W) / (2 * W)) * 2


def part_of_each(shapes, W):
    """ZeRO-3 fills each tensor up to a multiple of W numbers."""
    return sum(math.ceil(math.prod(shape) / W) for shape in shapes)


SHARE = {"one": whole, "ddp": whole, "fsdp2": rows_of_each, "zero2": part_of_all, "zero3": part_of_each}


def weights(engine, shapes, W):
    """fp32: the process's share, or under ZeRO-2 all of it."""
    return 4 * (part_of_all(shapes, W) * W if engine == "zero2" else SHARE[engine](shapes, W))


def moments(engine, shapes, W):
    """Adam's two, fp32, of the process's share."""
    return 8 * SHARE[engine](shapes, W)


# ---- what comes and goes: an update on tensors without memory --------------------------------------------------------
def tensors_in(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make under it, by kind, and keeps the counts of their peak."""

    def __init__(self, weights):
        super().__init__()
        local = [x.to_local() if isinstance(x, DTensor) else x for x in weights]
        self.weights = {x.untyped_storage()._cdata for x in local}
        self.kind, self.sizes, self.now, self.peak = "activations", {}, Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs, kwargs = function(*args, **(kwargs or {})), kwargs or {}
        known = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
        is_cast = function is torch.ops.aten._to_copy.default and self.is_weight(args[0])
        for x in tensors_in(outputs):
            if x.untyped_storage()._cdata not in known:
                self.add(x.untyped_storage(), "bf16_weights" if is_cast else self.kind)
        if function.namespace in ("fsdp", "c10d", "_c10d_functional"):
            for x in tensors_in((outputs, kwargs.get("out"))):
                self.label(x, "engine")
        return outputs

    def is_weight(self, x):
        key = x.untyped_storage()._cdata
        return key in self.weights or self.sizes.get(key, [""])[0] == "engine"

    def add(self, storage, kind):
        key = storage._cdata
        if key not in self.sizes and key not in self.weights:
            self.sizes[key] = kind, 0
            self.resize(storage, storage.nbytes())
            weakref.finalize(storage, self.drop, key)

    def resize(self, storage, nbytes, kind=None):
        old_kind, old = self.sizes[storage._cdata]
        self.now[old_kind] -= old
        self.sizes[storage._cdata] = kind or old_kind, nbytes
        self.now[kind or old_kind] += nbytes
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def drop(self, key):
        kind, nbytes = self.sizes.pop(key)
        self.now[kind] -= nbytes

    def label(self, x, kind):
        """Moves a tensor that was counted to another kind."""
        x = x.to_local() if isinstance(x, DTensor) else x
        if x.untyped_storage()._cdata in self.sizes:
            self.resize(x.untyped_storage(), x.untyped_storage().nbytes(), kind)


# ---- an update without memory ----------------------------------------------------------------------------------------
def config_of(model):
    """The transformers configuration of a name of SIZES or LLAMA, of a folder or of a config.json."""
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split()
    if model in SIZES:  # speed.py's shapes
        hidden, layers, heads, vocabulary = SIZES[model]
        sizes = hidden, layers, heads, heads, 4 * hidden, vocabulary
    elif model in LLAMA:
        sizes = LLAMA[model]
    else:
        return AutoConfig.from_pretrained(model, num_labels=1)
    kind = GPTNeoXConfig if model in SIZES else LlamaConfig
    return kind(**dict(zip(names, sizes, strict=True)), max_position_embeddings=8192, num_labels=1)


def build(args, config):
    """{name: module} of policy, reference, reward_model and sampling_copy, where a run has them, as a page makes them."""
    page = PAGES[args.algorithm]

    def load(kind):
        return models.set_up(kind.from_config(config, dtype=torch.float32), args)

    model = load(AutoModelForCausalLM)
    critic = [page.Reward(load(AutoModelForSequenceClassification))] if args.algorithm == "ppo" else []
    found = {"policy": page.Policy(model, 1.0, *critic)}
    if args.lora_rank:  # The reference is the policy without its adapters.
        with patch.object(nn.Module, "to", lambda module, *_, **__: module):  # torch cannot move such tensors.
            for each in (model, *(reward.model for reward in critic)):
                lora.add_adapters(each, args.lora_rank)
    else:
        found["reference"] = page.Policy(load(AutoModelForCausalLM), 1.0).requires_grad_(False)
    if args.reward_model:
        found["reward_model"] = page.Reward(load(AutoModelForSequenceClassification)).requires_grad_(False)
    if args.engine in SHARDED and args.sampling_copy:
        found["sampling_copy"] = page.Policy(load(AutoModelForCausalLM), 1.0).requires_grad_(False)
        for layer in found["sampling_copy"].modules():
            if isinstance(layer, nn.Linear | Conv1D) and args.precision == "bf16":
                layer.weight = nn.Parameter(layer.weight.bfloat16(), requires_grad=False)
    return {name: module.eval() for name, module in found.items()}


def shard(module, mesh):
    """What accelerate does under FSDP2: a layer is gathered when it is called, what is left with the whole module."""
    kinds = {kind for m in module.modules() for kind in getattr(m, "_no_split_modules", None) or []}
    for layer in [m for m in module.modules() if type(m).__name__ in kinds]:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def follow(module, live, keep_gradients):
    """Tells `live` what the tensors of a module's forward and backward are."""

    def note_gradient(p):
        live.label(p.grad, "gradients")
        if not keep_gradients:
            p.grad = None

    def watch(layer, inputs):  # under FSDP2 called where the layer's weights are gathered
        for p in layer.parameters():
            if p.requires_grad and not p._post_accumulate_grad_hooks:
                p.register_post_accumulate_grad_hook(note_gradient)

    def before(trunk, inputs):
        live.kind = "activations"

    def after(trunk, inputs, output):
        live.kind = "logits"
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(lambda grad: before(trunk, None))

    watch(module, None)
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.register_forward_pre_hook(watch)
    for owner in (module, getattr(module, "critic", None)):
        if owner is not None:
            owner.model.base_model.register_forward_pre_hook(before)
            owner.model.base_model.register_forward_hook(after)


def make_mesh(processes):
    """A group of processes that are not there: its collectives do nothing."""
    if not distributed.is_initialized():
        distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    return distributed.device_mesh.init_device_mesh("cpu", (processes,))


def shapes_of(module):
    """(shapes of the trained, shapes of the frozen weights) of a module."""
    return [[tuple(p.shape) for p in module.parameters() if p.requires_grad == trained] for trained in (True, False)]


def update(args, config):
    """({name: shapes of trained, shapes of frozen weights}, {phase: Counter {kind: bytes} of what comes and goes})."""
    page, k = PAGES[args.algorithm], 1 if args.algorithm == "ppo" else args.k
    Q, R, mine = args.prompt_length, args.response_length, args.batch_size // args.processes
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=args.precision == "bf16")
    ones = functools.partial(torch.ones, dtype=torch.bool)
    mesh, live = make_mesh(args.processes) if args.engine in SHARDED else None, Live([])
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        # Both would read numbers of tensors, and there are none.
        stack.enter_context(patch.object(models, "head_of", models.Head))
        stack.enter_context(patch.object(models.cpu, "use_onednn", lambda model: model))
        resize = torch.UntypedStorage.resize_

        def resize_(storage, nbytes):  # FSDP2 gives and takes the memory of a gathered weight by this.
            if storage._cdata in live.sizes:
                live.resize(storage, nbytes, "engine")
            return resize(storage, nbytes)

        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        parts = build(args, config)
        policy, shapes = parts["policy"], {name: shapes_of(module) for name, module in parts.items()}
        for name, module in parts.items():
            if mesh and name != "sampling_copy" and (name != "policy" or args.engine == "fsdp2"):
                shard(module, mesh)
        live = Live([p for module in parts.values() for p in module.parameters()])
        for module in parts.values():
            follow(module, live, keep_gradients=args.engine not in ("zero2", "zero3"))
        stack.enter_context(live)
        peaks = {}

        def lap(phase):
            peaks[phase], live.peak = live.peak, live.now.copy()

        with torch.no_grad(), autocast():
            n, size = layout.largest(k, min(args.rollout_micro_batch_size, mine))
            rows, keys = size // n, torch.zeros(size, dtype=torch.int32)
            cache = DynamicCache(config=config)

            def sample(tokens, mask, positions, index):
                """A step of utils.sample."""
                logits = parts.get("sampling_copy", policy)(tokens, mask, positions, index, cache=cache)
                (logits.expand(rows, n, -1).flatten(0, 1) + utils.gumbel_noise(keys, config.vocab_size)).argmax(-1)

            sample(ones(rows, Q).long(), ones(rows, Q), ones(rows, Q).long(), torch.tensor([Q - 1]))
            first = live.peak
            for number, layer in enumerate(cache.layers):  # The steps between the first and the last one fill the cache.
                new = (x.new_zeros(*x.shape[:2], n * (R - 2), x.shape[-1]) for x in (layer.keys, layer.values))
                cache.update(*new, number)
            live.peak = live.now.copy()
            seen = ones(rows, n, Q + n * (R - 1))
            seen = utils.additive(seen) if n > 1 else seen.squeeze(1)
            sample(ones(rows, n).long(), seen, ones(rows, n).long(), torch.arange(n))
            live.peak = max(first, live.peak, key=Counter.total)
            lap("rollout")
            peaks["rollout"]["kv_cache"] = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
            peaks["rollout"]["activations"] -= peaks["rollout"]["kv_cache"]
            del cache, layer, new, seen

            size = layout.largest(k, min(args.micro_batch_size, mine))[1]
            n = layout.largest(k, size)[0]
            batch = [ones(size, Q).long(), ones(size, Q), ones(size, R).long(), ones(size, R)]
            inputs = page.join(*batch) if args.algorithm == "ppo" else page.pack(*batch, n)
            labels = batch[2].reshape(size // n, -1)
            for module in (parts.get("reference", policy), policy, policy):  # The second time finds what the first left.
                module(*inputs, labels)
            if args.reward_model:
                parts["reward_model"](*inputs[:3], inputs[3].new_zeros(size // n, n))
            lap("scores")

        policy.train()
        micro_batches = math.ceil(mine / args.num_mini_batches / size)
        for i in range(min(2, micro_batches)):  # The second one finds the gradients of the first.
            if isinstance(policy, FSDPModule):
                policy.set_requires_gradient_sync(i + 1 == min(2, micro_batches))  # as engines.accumulate does
            with autocast():
                outputs = policy(*inputs, labels)
            sum(x.sum() for x in outputs if x.requires_grad).backward()
            del outputs
        del inputs, labels, batch
        lap("backward")
        lap("step")
    return shapes, peaks


def main(args: Args):
    import time
    t=time.time()
    shapes, peaks = update(args, config_of(args.model))
    for phase, peak in peaks.items(): print(phase, sum(peak.values()), dict(peak))
    print(time.time()-t)


if __name__ == "__main__":
    main(tyro.cli(Args))
