"""
How many bytes a device needs for a run, before anyone rents it: what it holds, and the peak of each phase.

    python benchmark/checks/memory_plan.py --model 8b --processes 8 --engine fsdp2 --gradient_checkpointing
    python benchmark/checks/memory_plan.py --model 1b --processes 1 --engine one --algorithm ppo --lora_rank 16
    python benchmark/checks/memory_plan.py --guide      (results/memory_plan.md, the guide's table, some minutes)

What stays (weights, moments, buffers of the engine) follows from the shapes of the weights, by one-line functions. What
comes and goes (key-value cache, activations, logits, bf16 copies of weights) is measured: the page's own modules go
through an update on tensors of torch's FakeTensorMode, which have shapes and no memory, and `Live` counts the bytes of
those that are alive. FSDP2's own code takes part, over processes that are not there. So a plan needs no weights, and
holds for any architecture. The tests compare it with real runs of two CPU processes. No GPU has measured it: there,
other kernels need other workspace.
"""

import contextlib
import functools
import gc
import math
import sys
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest.mock import patch

import torch
import tyro
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, DynamicCache, GPTNeoXConfig, LlamaConfig
from transformers import AutoModelForCausalLM as Causal
from transformers import AutoModelForSequenceClassification as Classifier

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from speed import SIZES

from benchmark import made_with
from rlhf_details import train_grpo, train_ppo, train_rloo, utils
from rlhf_details.plumbing import engines, layout, models

ROOT, GIB = Path(__file__).resolve().parents[2], 2**30
CARDS, HEADROOM = (24, 40, 80), 0.1  # GiB, and the share that CUDA, NCCL and holes between tensors may take
LLAMA = {  # Llama 3's: hidden size, layers, heads, heads of keys and values, intermediate size, vocabulary
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
}
PAGES = {"rloo": train_rloo, "grpo": train_grpo, "ppo": train_ppo}
SHARDED = "fsdp2", "zero3"  # engines that leave each process a part of the weights
# DeepSpeed's reduce_bucket_size, stage3_max_live_parameters and stage3_prefetch_bucket_size, in bytes of fp32
BUCKET, LIVE, PREFETCH = 4 * 5 * 10**8, 4 * 10**9, 4 * 5 * 10**7
ROWS = "weights,gradients,moments,engine,reference,reward_model,value_model,sampling_copy,bf16_weights,kv_cache,"
ROWS = (ROWS + "activations,logits").split(",")


@dataclass
class Args:
    model: str = "8b"
    """shape of all models: 0.9m, 27m, 160m, 1b (GPT-NeoX), 8b, 70b (Llama 3), or a folder or file with a config.json"""
    algorithm: Literal["rloo", "grpo", "ppo"] = "rloo"
    """the page; its flags are those below that have its flags' names"""
    engine: Literal["one", "ddp", "fsdp2", "zero2", "zero3"] = "fsdp2"
    """one process, or a launch file in benchmark/recipes/accelerate/"""
    processes: int = 8
    """devices"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 autocast, or none"""
    reward_model: bool = True
    """whether there is a reward model beside or instead of reward functions"""
    prompt_length: int = 512
    """tokens of the longest prompt (Q)"""
    response_length: int = 512
    """tokens of a response (R)"""
    k: int = 4
    """responses per prompt; PPO has one"""
    batch_size: int = 512
    """episodes per update, over all processes (B)"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch"""
    num_ppo_epochs: int = 2
    """passes over the batch"""
    micro_batch_size: int = 4
    """episodes that a device puts through one forward and backward pass"""
    rollout_micro_batch_size: int = 16
    """episodes that a device samples at once"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass"""
    lora_rank: int | None = None
    """train adapters of this rank; None: all weights"""
    sampling_copy: bool = True
    """FSDP2 and ZeRO-3: gather a whole copy for sampling"""
    offload_frozen: bool = False
    """reference and reward model are in the CPU's memory except while they score"""
    guide: bool = False
    """plan the runs of docs/guides/4_memory_and_gpus.md in place of these flags' one"""


# The runs of the guide: RLOO with a reward model of the policy's size. Their other flags are the defaults above.
LARGE = dict(gradient_checkpointing=True)
SHORT = dict(response_length=53, k=2, micro_batch_size=16, batch_size=4096, num_mini_batches=2)  # rloo_tldr_1b.toml
GUIDE = (
    Args(model="1b", engine="one", processes=1, lora_rank=16, **LARGE),
    Args(model="1b", engine="zero2", **SHORT),
    Args(model="8b", engine="one", processes=1, lora_rank=16, **LARGE),
    Args(model="8b", engine="fsdp2", **LARGE),
    Args(model="70b", engine="fsdp2", processes=64, sampling_copy=False, **LARGE | dict(micro_batch_size=2)),
)


# ---- what stays: numbers and bytes of tensors, from their shapes; W processes ----------------------------------------
def whole(shapes, W=1):
    """Every process holds all of them."""
    return sum(map(math.prod, shapes))


def rows_of_each(shapes, W):
    """FSDP2 cuts each tensor along its first dimension; the first process has ceil(rows / W) of its rows."""
    return sum(math.ceil(rows / W) * math.prod(rest) for rows, *rest in shapes)


def part_of_all(shapes, W):
    """ZeRO-2 lays all tensors in one row, fills it up to a multiple of 2 W numbers, and cuts it into W parts."""
    return math.ceil(whole(shapes) / (2 * W)) * 2


def part_of_each(shapes, W):
    """ZeRO-3 fills each tensor up to a multiple of W numbers, and cuts it into W parts."""
    return sum(math.ceil(math.prod(shape) / W) for shape in shapes)


SHARE = {"one": whole, "ddp": whole, "fsdp2": rows_of_each, "zero2": part_of_all, "zero3": part_of_each}


def trained(engine, shapes, W):
    """Trained weights, fp32: the process's share, but under ZeRO-2 all."""
    return 4 * SHARE[engine](shapes, W) * (W if engine == "zero2" else 1)


def frozen(engine, shapes, W):
    """Frozen weights, fp32: under FSDP2 and ZeRO-3 a share as FSDP2 makes it, else all."""
    return 4 * (rows_of_each if engine in SHARDED else whole)(shapes, W)


def moments(engine, shapes, W):
    """Adam's two, fp32, of the process's share."""
    return 8 * SHARE[engine](shapes, W)


def buffers(engine, shapes, W):
    """DDP: buckets as large as all gradients. ZeRO-2: a copy of the share, which Adam steps. ZeRO-3: such a copy, the
    gradients of the share, and the bucket in which gradients travel."""
    share = 4 * SHARE[engine](shapes, W)
    return {"ddp": share, "zero2": share, "zero3": 2 * share + BUCKET}.get(engine, 0)


def held(args, shapes):
    """Counter {row: bytes} of what stays. shapes: {name: (shapes of the trained, of the frozen weights)} of modules."""
    engine, W, own = args.engine, args.processes, shapes["policy"][0]
    found = Counter(moments=moments(engine, own, W), engine=buffers(engine, own, W))
    for name, (own, others) in shapes.items():
        row = {"policy": "weights"}.get(name, name)
        found[row] = (trained(engine, own, W) if own else 0) + frozen(engine, others, W)
    found["weights"] -= found["value_model"]  # which is a part of the policy's module
    return found


# ---- what comes and goes: the bytes of the tensors that are alive ----------------------------------------------------
def tensors_in(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def storage_of(x):
    return (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make under it, by kind, and the counts at their highest sum."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.weights, self.kind, self.sizes = engine, set(), "activations", {}
        self.now, self.peak, self.bucket = Counter(), Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs, kwargs = function(*args, **(kwargs or {})), kwargs or {}
        is_cast = function is torch.ops.aten._to_copy.default and self.is_weight(storage_of(args[0]))
        known = {storage_of(x)._cdata for x in tensors_in((args, kwargs))} | self.weights
        for storage in map(storage_of, tensors_in(outputs)):
            if storage._cdata not in known and storage._cdata not in self.sizes:
                self.change(storage, "bf16_weights" if is_cast else self.kind, storage.nbytes())
                weakref.finalize(storage, self.drop, storage._cdata)
        if function.namespace in ("fsdp", "c10d", "_c10d_functional"):  # what FSDP2 gathers and sends
            for x in tensors_in((outputs, kwargs.get("out"))):
                self.label(x, "engine")
        return outputs

    def is_weight(self, storage):
        return storage._cdata in self.weights or self.sizes.get(storage._cdata, [None])[0] == "engine"

    def change(self, storage, kind, nbytes):
        old_kind, old = self.sizes.get(storage._cdata, (kind, 0))
        self.now[old_kind] -= old
        self.sizes[storage._cdata] = kind, nbytes
        self.hold(kind, nbytes)

    def label(self, x, kind):
        """Says of what kind a tensor is."""
        storage = storage_of(x)
        if storage._cdata in self.sizes:
            self.change(storage, kind, storage.nbytes())

    def hold(self, kind, nbytes):
        """Counts bytes, also of tensors that nobody has made here."""
        self.now[kind] += nbytes
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def drop(self, key):
        kind, nbytes = self.sizes.pop(key)
        self.now[kind] -= nbytes

    def note_gradient(self, p):
        self.label(p.grad, "gradients")
        if self.engine in ("zero2", "zero3"):  # DeepSpeed moves it into a bucket, which ZeRO-2 makes when it needs it.
            p.grad = None
            self.hold("engine", BUCKET - self.bucket if self.engine == "zero2" else 0)
            self.bucket = BUCKET

    def follow(self, module):
        """Leaves a module's weights out, since they stay, and learns what the tensors of its passes are."""
        self.weights |= {storage_of(p)._cdata for p in module.parameters()}

        def enter(ahead, *_):
            self.kind = "activations"
            self.hold("engine", ahead)

        def leave(ahead, trunk, inputs, output):
            self.kind = "logits"
            self.hold("engine", -ahead)
            if output.last_hidden_state.requires_grad:
                output.last_hidden_state.register_hook(functools.partial(enter, 0))

        def watch(layer, *_):  # FSDP2 has other parameters while the weights are gathered.
            for p in layer.parameters():
                if p.requires_grad and not p._post_accumulate_grad_hooks:
                    p.register_post_accumulate_grad_hook(self.note_gradient)

        watch(module)
        for layer in module.modules():
            if isinstance(layer, FSDPModule):
                layer.register_forward_pre_hook(watch)
        trunks = {module.model.base_model: getattr(module, "ahead", 0)}
        trunks |= {module.critic.model.base_model: 0} if getattr(module, "critic", None) else {}
        for trunk, ahead in trunks.items():
            trunk.register_forward_pre_hook(functools.partial(enter, ahead))
            trunk.register_forward_hook(functools.partial(leave, ahead))

    def resize_(self, resize, storage, nbytes):
        """UntypedStorage.resize_, by which FSDP2 takes and gives back the memory of a gathered weight."""
        if storage._cdata in self.sizes:
            self.change(storage, "engine", nbytes)
        return resize(storage, nbytes)


# ---- an update without memory ----------------------------------------------------------------------------------------
def config_of(model):
    """The transformers configuration of a name of SIZES (speed.py) or LLAMA, or of a path."""
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split()
    if model not in SIZES | LLAMA:
        return AutoConfig.from_pretrained(model, num_labels=1)
    if model in LLAMA:
        return LlamaConfig(**dict(zip(names, LLAMA[model], strict=True)), num_labels=1)
    hidden, layers, heads, vocabulary = SIZES[model]
    sizes = dict(zip(names, (hidden, layers, heads, heads, 4 * hidden, vocabulary), strict=True))
    return GPTNeoXConfig(**sizes, num_labels=1)


def build(args, config):
    """{name: module} of the policy, and of the reference and the reward model where they are models of their own."""
    page = PAGES[args.algorithm]

    def load(kind):
        return models.set_up(kind.from_config(config, dtype=torch.float32), args)

    model, critic = load(Causal), [page.Reward(load(Classifier))] if args.algorithm == "ppo" else []
    found = {"policy": page.Policy(model, 1.0, *critic)}
    if args.lora_rank:
        for each in (model, *(reward.model for reward in critic)):
            models.add_adapters(each, args.lora_rank)
    else:
        found["reference"] = page.Policy(load(Causal), 1.0).requires_grad_(False)
    if args.reward_model:
        found["reward_model"] = page.Reward(load(Classifier)).requires_grad_(False)
    return {name: module.eval() for name, module in found.items()}


def share_out(parts, engine, mesh):
    """What engines.prepare does with {name: module}. ZeRO-3's own code does not run on such tensors."""
    if engine == "fsdp2":
        for layer in [*engines.layers(parts["policy"]), parts["policy"]]:
            fully_shard(layer, mesh=mesh)
    if engine == "zero3":
        policy, weights = parts["policy"], 4 * whole([p.shape for p in parts["policy"].parameters()])
        # Bytes of the weights that stay gathered, of those that arrive ahead, and of the gradients that leave together.
        policy.gathered, policy.ahead, policy.leaving = (min(limit, weights) for limit in (LIVE, PREFETCH, BUCKET))
        policy.logits_at_once = 2**62  # as in engines.prepare
    with patch.object(engines, "init_device_mesh", lambda *_: mesh):
        for name in parts.keys() - {"policy"} if engine in SHARDED else ():
            engines.share_out(parts[name], torch.device("cpu"))


@contextlib.contextmanager
def without_memory(engine, live):
    """Tensors have shapes and no memory, and `live` counts them where a caller enters it."""
    resize = torch.UntypedStorage.resize_
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        mode.__deepcopy__ = lambda memo: mode  # Copies of tensors stay in it.
        stack.enter_context(patch.object(nn.Module, "to", lambda module, *_, **__: module))  # Such tensors cannot move.
        # These two would read numbers.
        stack.enter_context(patch.object(models, "head_of", models.Head))
        stack.enter_context(patch.object(models.cpu, "use_onednn", lambda model: model))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", lambda *args: live.resize_(resize, *args)))
        if engine == "zero3":  # DeepSpeed's own linear layer keeps no weights for the backward pass.
            linear = import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap
            stack.enter_context(patch.object(nn.functional, "linear", linear))
        yield


def ones(*shape):
    return torch.ones(shape, dtype=torch.bool)


def sample(args, sampler, live):
    """The counts at the peak of sampling, which is at its first or at its last step."""
    n, size = layout.largest(args.k, min(args.rollout_micro_batch_size, args.batch_size // args.processes))
    rows, Q, R, cache = size // n, args.prompt_length, args.response_length, DynamicCache(config=sampler.model.config)

    def step(tokens, mask, positions, index):
        """A step of utils.sample."""
        live.peak = live.now.copy()
        logits = sampler(tokens, mask, positions, index, cache=cache)  # [rows, 1 or n, V]
        noise = utils.gumbel_noise(torch.zeros(size, dtype=torch.int32), logits.size(-1))
        (logits.expand(rows, n, -1).flatten(0, 1) + noise).argmax(-1)
        cached = Counter({"kv_cache": sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))})
        return live.peak + cached - Counter({"activations": cached.total()})

    first = step(ones(rows, Q).long(), ones(rows, Q), ones(rows, Q).long(), torch.tensor([Q - 1]))
    for number, layer in enumerate(cache.layers):  # The steps in between fill the cache.
        cache.update(*(x[:, :, :1].repeat(1, 1, n * (R - 2), 1) for x in (layer.keys, layer.values)), number)
    seen = ones(rows, n, Q + n * (R - 1))
    seen = utils.additive(seen) if n > 1 else seen.squeeze(1)
    last = step(ones(rows, n).long(), seen, ones(rows, n).long(), torch.arange(n))
    return max(first, last, key=Counter.total)


def phases(args, parts, sampler, live, share):
    """{phase: Counter {row: bytes}} of what comes and goes in an update, at the peak of each phase.

    share: bytes of the gradients that this process keeps under DeepSpeed.
    """
    page, policy, found = PAGES[args.algorithm], parts["policy"], {}
    mine, Q, R = args.batch_size // args.processes, args.prompt_length, args.response_length
    gathered, leaving = getattr(policy, "gathered", 0), getattr(policy, "leaving", 0)
    # engines.prepare keeps autocast from holding gathered weights in bf16.
    options = {"enabled": args.precision == "bf16", "cache_enabled": args.engine not in SHARDED}
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, **options)

    def lap(name):
        found[name], live.peak = live.peak, live.now.copy()

    with torch.no_grad(), autocast():
        if sampler is None:
            live.hold("engine", gathered)
            live.peak = sample(args, policy, live)
            live.hold("engine", -gathered)
        else:
            copied, largest = (f(p.nbytes for p in sampler.parameters()) for f in (sum, max))
            live.hold("sampling_copy", copied)
            live.peak = max(sample(args, sampler, live), live.now + Counter(engine=largest), key=Counter.total)
            live.hold("sampling_copy", -copied)
        lap("rollout")

        n, size = layout.largest(args.k, min(args.micro_batch_size, mine))
        batch = ones(size, Q).long(), ones(size, Q), ones(size, R).long(), ones(size, R)
        inputs = page.join(*batch) if args.algorithm == "ppo" else page.pack(*batch, n)
        labels = batch[2].reshape(size // n, -1)
        parts.get("reference", policy)(*inputs, labels)
        if args.algorithm == "ppo" or args.num_ppo_epochs * args.num_mini_batches > 1:
            live.hold("engine", gathered)
            policy(*inputs, labels), policy(*inputs, labels)  # The second micro-batch finds what the first one left.
            live.hold("engine", -gathered)
        if args.reward_model:
            parts["reward_model"](*inputs[:3], inputs[3].new_zeros(size // n, n))
    lap("scores")

    policy.train()
    live.hold("engine", gathered)
    micro_batches = min(2, math.ceil(mine / args.num_mini_batches / size))
    for i in range(micro_batches):  # The second one finds the gradients of the first.
        with autocast():
            outputs = policy(*inputs, labels)
        sum(x.sum() for x in outputs if x.requires_grad).backward()
        del outputs
        if args.engine == "zero2":  # It frees the bucket and keeps its share of the gradients.
            live.hold("engine", -live.bucket)
            live.hold("gradients", 0 if i else share)
            live.bucket = 0
    live.hold("engine", leaving - gathered)
    live.hold("engine", -leaving)
    lap("backward")
    del batch, inputs, labels
    gc.collect()
    live.peak = live.now.copy()
    live.hold("gradients", share if args.engine in ("zero2", "zero3") else 0)  # DeepSpeed copies them for Adam.
    lap("step")
    return found


def update(args):
    """{name: (shapes of the trained, of the frozen weights)} of the modules, and what `phases` returns."""
    live, mesh, sampler = Live(args.engine), None, None
    if args.engine in SHARDED:
        distributed.init_process_group("fake", rank=0, world_size=args.processes, store=FakeStore())
        mesh = distributed.device_mesh.init_device_mesh("cpu", (args.processes,))
    with without_memory(args.engine, live):
        parts = build(args, config_of(args.model))
        modules = parts | ({"value_model": parts["policy"].critic} if args.algorithm == "ppo" else {})
        shapes = {
            name: [[p.shape for p in module.parameters() if p.requires_grad == kind] for kind in (True, False)]
            for name, module in modules.items()
        }
        if mesh and args.sampling_copy:
            alone = SimpleNamespace(unwrap_model=lambda module: module, device=torch.device("cpu"))
            sampler = engines.gather(alone, parts["policy"], engines.template(parts["policy"]), args.precision)
        share_out(parts, args.engine, mesh)
        for module in filter(None, (*parts.values(), sampler)):
            live.follow(module)
        with live:
            found = phases(args, parts, sampler, live, 4 * SHARE[args.engine](shapes["policy"][0], args.processes))
    if mesh:
        distributed.destroy_process_group()
    return shapes, found


# ---- tables ----------------------------------------------------------------------------------------------------------
def plan(args):
    """{phase: Counter {row: bytes}} of a device."""
    shapes, peaks = update(replace(args, k=1) if args.algorithm == "ppo" else args)
    stays = held(args, shapes)
    found = {phase: Counter({row: stays[row] + peak[row] for row in ROWS}) for phase, peak in peaks.items()}
    for phase in found.keys() - {"scores"} if args.offload_frozen else ():
        found[phase]["reference"] = found[phase]["reward_model"] = 0
    return found


def table(found):
    """The lines of a table of a plan, in GiB."""
    lines = ["| GiB a device | " + " | ".join(found) + " |", "|---" + "|---:" * len(found) + "|"]
    cells = {row.replace("_", " "): [peak[row] for peak in found.values()] for row in ROWS}
    for row, numbers in (cells | {"all": [peak.total() for peak in found.values()]}).items():
        if any(numbers):
            lines.append(f"| {row} | " + " | ".join(f"{x / GIB:.2f}" for x in numbers) + " |")
    return lines


def fits(found):
    """(peak in GiB, the cards that it fits)."""
    peak = max(map(Counter.total, found.values())) / GIB
    return peak, [card for card in CARDS if peak <= card * (1 - HEADROOM)]


def guide():
    """The lines of the guide's table."""
    lines = ["| model | engine | devices | rollout | scores | backward | step | fits |", "|---|---|" + "---:|" * 6]
    for args in GUIDE:
        found = plan(args)
        cells = [args.model, args.engine, args.processes, *(f"{peak.total() / GIB:.1f}" for peak in found.values())]
        cells.append(f"{min(fits(found)[1])} GB")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main(args: Args):
    if args.guide:
        head = "# What the guide's runs need\n\nWritten by `python benchmark/checks/memory_plan.py --guide`: GiB"
        path = ROOT / "benchmark" / "results" / "memory_plan.md"
        path.write_text("\n".join([f"{head} a device. {made_with()}\n", *guide()]) + "\n")
        return print(path.read_text())
    found = plan(args)
    peak, cards = fits(found)
    names = ", ".join(f"{card} GB" for card in cards) or f"none of {', '.join(map(str, CARDS))} GB"
    print("\n".join(table(found)))
    print(f"\npeak {peak:.1f} GiB a device; with {HEADROOM:.0%} of a card left free it fits {names}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # FSDP2's on views, which a run gives as well
    main(tyro.cli(Args))
