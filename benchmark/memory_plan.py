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
import gc
import math
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
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
SHARDED = "fsdp2", "zero3"  # engines that cut the trained weights
FROZEN_IN_SHARDS = SHARDED  # and those under which reference and reward model are cut, by FSDP2's code
# DeepSpeed's defaults: reduce_bucket_size, stage3_max_live_parameters, stage3_prefetch_bucket_size; in bytes of fp32
BUCKET, GATHERED, PREFETCH = 4 * 5 * 10**8, 4 * 10**9, 4 * 5 * 10**7
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
    num_ppo_epochs: int = 2
    """passes over the batch"""
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


# ---- bytes that a process holds all the time -------------------------------------------------------------------------
def weights(engine, shapes, W):
    """fp32: the process's share, or under ZeRO-2 all, filled up like the shares."""
    return 4 * (W if engine == "zero2" else 1) * SHARE[engine](shapes, W)


def moments(engine, shapes, W):
    """Adam's two, fp32, of the process's share."""
    return 8 * SHARE[engine](shapes, W)


def buffers(engine, shapes, W):
    """DDP: the buckets in which gradients travel, as large as all. DeepSpeed: a second copy of the share, which Adam
    steps; under ZeRO-3 also its gradients and the bucket in which gradients travel."""
    share = 4 * SHARE[engine](shapes, W)
    return {"one": 0, "ddp": share, "fsdp2": 0, "zero2": share, "zero3": 2 * share + BUCKET}[engine]


def frozen(engine, shapes, W):
    """fp32, whole, but in shares where the trained weights are."""
    return 4 * (rows_of_each if engine in FROZEN_IN_SHARDS else whole)(shapes, W)


def held(args, shapes):
    """Counter {row: bytes} of what stays. shapes: those of the trained and the frozen weights of each module."""
    engine, W, trained = args.engine, args.processes, shapes["policy"][0]
    found = Counter(moments=moments(engine, trained, W), engine=buffers(engine, trained, W))
    found["weights"] = weights(engine, trained, W) + frozen(engine, shapes["policy"][1], W)
    if "value_model" in shapes:
        found["value_model"] = weights(engine, shapes["value_model"][0], W) + frozen(
            engine, shapes["value_model"][1], W
        )
        found["weights"] -= found["value_model"]
    for name in ("reference", "reward_model"):
        found[name] = frozen(engine, shapes[name][1], W) if name in shapes else 0
    return found


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
        self.bucket = 0

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

    def hold(self, kind, nbytes):
        """Counts bytes that no operation makes."""
        self.now[kind] += nbytes
        self.peak = max(self.peak, self.now, key=Counter.total).copy()

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


def shard(module, mesh, is_trained):
    """What accelerate does under FSDP2: a layer is gathered when it is called, what is left with the whole module.

    What is left stays gathered until the backward pass, and where there is none until the end of the forward pass.
    """
    kinds = {kind for m in module.modules() for kind in getattr(m, "_no_split_modules", None) or []}
    for layer in [m for m in module.modules() if type(m).__name__ in kinds]:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=not is_trained)


def follow(module, live, engine):
    """Tells `live` what the tensors of a module's forward and backward are."""

    def note_gradient(p):
        live.label(p.grad, "gradients")
        if engine in ("zero2", "zero3"):  # DeepSpeed moves it into its bucket.
            p.grad = None
            if engine == "zero2" and not live.bucket:
                live.bucket = BUCKET
                live.hold("engine", BUCKET)

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
        if args.engine == "zero3":  # DeepSpeed's own linear layer keeps no weights for the backward pass.
            stack.enter_context(
                patch.object(nn.functional, "linear", import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap)
            )
        parts = build(args, config)
        policy, shapes = parts["policy"], {name: shapes_of(module) for name, module in parts.items()}
        if args.algorithm == "ppo":
            shapes["value_model"] = shapes_of(policy.critic)
        for name, module in parts.items():
            engines = {"policy": ["fsdp2"], "sampling_copy": []}.get(name, FROZEN_IN_SHARDS)
            if args.engine in engines:
                shard(module, mesh, name == "policy")
        live = Live([p for module in parts.values() for p in module.parameters()])
        for module in parts.values():
            follow(module, live, args.engine)
        stack.enter_context(live)
        peaks = {}

        def lap(phase):
            peaks[phase], live.peak = live.peak, live.now.copy()

        everything = 4 * whole([tuple(p.shape) for p in policy.parameters()], 1)

        def gather(sign, *limits):
            """ZeRO-3 keeps up to GATHERED of the weights whole, and gathers up to PREFETCH of them in another buffer."""
            if args.engine == "zero3":
                live.hold("engine", sign * sum(min(limit, everything) for limit in limits))

        with torch.no_grad(), autocast():
            n, size = layout.largest(k, min(args.rollout_micro_batch_size, mine))
            rows, keys = size // n, torch.zeros(size, dtype=torch.int32)
            cache = DynamicCache(config=config)
            sampler = parts.get("sampling_copy", policy)
            gather(sampler is policy, GATHERED, PREFETCH)

            def sample(tokens, mask, positions, index):
                """A step of utils.sample. Returns the counts at its peak."""
                live.peak = live.now.copy()
                logits = sampler(tokens, mask, positions, index, cache=cache)
                (logits.expand(rows, n, -1).flatten(0, 1) + utils.gumbel_noise(keys, config.vocab_size)).argmax(-1)
                cached = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
                return live.peak + Counter(kv_cache=cached) - Counter(activations=cached)

            first = sample(ones(rows, Q).long(), ones(rows, Q), ones(rows, Q).long(), torch.tensor([Q - 1]))
            for number, layer in enumerate(
                cache.layers
            ):  # The steps between the first and the last one fill the cache.
                new = (x.new_zeros(*x.shape[:2], n * (R - 2), x.shape[-1]) for x in (layer.keys, layer.values))
                cache.update(*new, number)
            seen = ones(rows, n, Q + n * (R - 1))
            seen = utils.additive(seen) if n > 1 else seen.squeeze(1)
            last = sample(ones(rows, n).long(), seen, ones(rows, n).long(), torch.arange(n))
            live.peak = max(first, last, key=Counter.total)
            gather(-(sampler is policy), GATHERED, PREFETCH)
            del cache, layer, new, seen
            lap("rollout")
            peaks["rollout"]["sampling_copy"] = (
                sum(p.nbytes for p in sampler.parameters()) if sampler is not policy else 0
            )

            size = layout.largest(k, min(args.micro_batch_size, mine))[1]
            n = layout.largest(k, size)[0]
            batch = [ones(size, Q).long(), ones(size, Q), ones(size, R).long(), ones(size, R)]
            inputs = page.join(*batch) if args.algorithm == "ppo" else page.pack(*batch, n)
            labels = batch[2].reshape(size // n, -1)
            parts.get("reference", policy)(*inputs, labels)
            if args.algorithm == "ppo" or args.num_ppo_epochs * args.num_mini_batches > 1:
                gather(1, GATHERED, PREFETCH)
                for _ in range(2):  # The second micro-batch finds what the first one left.
                    policy(*inputs, labels)
                gather(-1, GATHERED, PREFETCH)
            if args.reward_model:
                parts["reward_model"](*inputs[:3], inputs[3].new_zeros(size // n, n))
            lap("scores")

        policy.train()
        micro_batches = min(2, math.ceil(mine / args.num_mini_batches / size))
        gather(1, GATHERED)
        for i in range(micro_batches):  # The second one finds the gradients of the first.
            if isinstance(policy, FSDPModule):
                policy.set_requires_gradient_sync(i + 1 == micro_batches)  # as engines.accumulate does
            with autocast():
                outputs = policy(*inputs, labels)
            sum(x.sum() for x in outputs if x.requires_grad).backward()
            del outputs
            if args.engine == "zero2":
                live.hold("engine", -live.bucket)
                live.bucket = 0
                live.hold("gradients", 4 * part_of_all(shapes["policy"][0], args.processes) * (i == 0))
        gather(-1, GATHERED)
        del inputs, labels, batch
        gc.collect()
        lap("backward")
        if args.engine in ("zero2", "zero3"):  # DeepSpeed copies its gradients once more for Adam.
            live.hold("gradients", 4 * SHARE[args.engine](shapes["policy"][0], args.processes))
        lap("step")
    return shapes, peaks


def plan(args):
    """{phase: Counter {row: bytes}} of a device."""
    shapes, peaks = update(args, config_of(args.model))
    stays, found = held(args, shapes), {}
    for phase, peak in peaks.items():
        found[phase] = Counter({row: stays[row] + peak[row] for row in ROWS})
        if args.offload_frozen and phase != "scores":
            found[phase]["reference"] = found[phase]["reward_model"] = 0
    return found


def table(found):
    """The lines of a table of {phase: Counter {row: bytes}}, in GiB, and of what fits where."""
    lines = ["| GiB a device | " + " | ".join(found) + " |", "|---" + "|---:" * len(found) + "|"]
    cells = {row.replace("_", " "): [peak[row] for peak in found.values()] for row in ROWS}
    cells["**all**"] = [peak.total() for peak in found.values()]
    for row, numbers in cells.items():
        if any(numbers):
            lines.append(f"| {row} | " + " | ".join(f"{x / GIB:.2f}" for x in numbers) + " |")
    return lines


def verdict(found):
    """One line: the peak, and the cards that it fits."""
    peak = max(found.values(), key=Counter.total).total() / GIB
    fits = [f"{card} GB: {'fits' if peak <= card * (1 - HEADROOM) else 'does not fit'}" for card in CARDS]
    return f"peak {peak:.1f} GiB a device; with {HEADROOM:.0%} of a card left free, {', '.join(fits)}"


def main(args: Args):
    found = plan(args)
    print("\n".join(table(found)) + "\n\n" + verdict(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # FSDP2's on views, which runs print as well
    main(tyro.cli(Args))
