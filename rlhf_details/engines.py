"""
What the engines that accelerate launches do differently: one process, DDP, FSDP2, DeepSpeed ZeRO-2 and ZeRO-3.

Under each of them a script computes the same: weights and Adam's moments are fp32, and bf16 is autocast. FSDP2 and ZeRO-3
gather the weights of a layer when it is called, so all processes must call a model equally often.
Nothing runs at import. benchmark/accelerate/ holds a launch configuration for each.
"""

import contextlib
import math
import os

import torch
from accelerate import DistributedType
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf_details import utils

MOMENTS = "exp_avg", "exp_avg_sq"


def uses_deepspeed(accelerator):
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def name(accelerator):
    """One of "one process", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3", or what else accelerate calls it."""
    kind = accelerator.distributed_type
    if uses_deepspeed(accelerator):
        return f"ZeRO-{accelerator.deepspeed_plugin.zero_stage}"
    plain = {DistributedType.NO: "one process", DistributedType.MULTI_CPU: "DDP", DistributedType.MULTI_GPU: "DDP"}
    return "FSDP2" if accelerator.is_fsdp2 else plain.get(kind, kind.value)


def precision(accelerator):
    """What matrices are multiplied in: "fp32", or autocast's "bf16" or "fp16"."""
    device = accelerator.device.type
    with accelerator.autocast():
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[kind]


def settle(accelerator, args):
    """What a launch configuration leaves open, or would have otherwise; to be called before any model is loaded."""
    utils.check_processes(accelerator)
    accelerator.gradient_accumulation_steps = 1  # micro-batches are written out in the scripts
    if accelerator.distributed_type == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            utils.fail("fsdp_version 1: not supported; set fsdp_version: 2 in the launch configuration")
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = MixedPrecisionPolicy()  # accelerate's would round the log-probs to bf16
        # else transformers would leave the models that are not sharded empty on all processes but the first
        plugin.cpu_ram_efficient_loading, os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = False, "false"
    if uses_deepspeed(accelerator):
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # under ZeRO-3 every model would be loaded in parts, also those that no engine runs
        plugin = accelerator.deepspeed_plugin
        plugin.asked_precision = kind = getattr(plugin, "asked_precision", accelerator.mixed_precision)  # train_both.py asks twice
        if kind not in ("no", "bf16"):
            utils.fail(f"mixed_precision {kind}: not with DeepSpeed; take bf16 or no")
        config = plugin.deepspeed_config
        config["bf16"] = config["fp16"] = {"enabled": False}  # weights stay fp32 ...
        bf16 = kind == "bf16"
        accelerator.autocast = lambda: torch.autocast(accelerator.device.type, torch.bfloat16, enabled=bf16)  # ... as elsewhere
        # DeepSpeed clips by itself, where accelerate's "auto" means 1; the batch size is for its counters
        config |= {"gradient_clipping": args.max_grad_norm or 0.0, "gradient_accumulation_steps": 1}
        config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
        config["train_batch_size"] = args.micro_batch_size * accelerator.num_processes
    return accelerator


def prepare(accelerator, module, optimizer):
    """accelerator.prepare, which puts a module and its optimizer under the engine."""
    kinds = {kind for m in module.modules() for kind in getattr(m, "_no_split_modules", None) or []}
    present = {type(m).__name__ for m in module.modules()}
    module._no_split_modules = sorted(kinds & present)  # the layers that FSDP2 gathers one by one
    if uses_deepspeed(accelerator) or accelerator.distributed_type == DistributedType.FSDP:
        forward = module.forward

        def in_autocast(*args, **kwargs):  # of any module's forward; accelerate does the same for DDP
            with accelerator.autocast():
                return forward(*args, **kwargs)

        module.forward = in_autocast
    module, optimizer = accelerator.prepare(module, optimizer)
    if uses_deepspeed(accelerator):  # accelerate (1.15) would step inside `backward`, once a micro-batch; see `step`
        accelerator.deepspeed_engine_wrapped.backward = lambda loss, **_: module.backward(loss)
    return module, optimizer


def accumulate(accelerator, module, is_last):
    """A context for a micro-batch's forward and backward: gradients cross processes after the last micro-batch of a step alone."""
    if uses_deepspeed(accelerator):
        module.set_gradient_accumulation_boundary(is_last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if is_last else accelerator.no_sync(module)  # [OPT-7] one exchange a step


def step(accelerator, module, optimizer, max_grad_norm, check):
    """Clips the gradient's global norm, steps, and forgets the gradient. Returns the norm before clipping, a float.

    check(norm) is asked before a weight is touched; DeepSpeed clips and steps in one call, so there it is asked after.
    """
    if uses_deepspeed(accelerator):
        module.step()
        norm = float(module.get_global_grad_norm())
        check(norm)
        return norm
    norm = float(accelerator.clip_grad_norm_(module.parameters(), max_grad_norm or math.inf))  # [OPT-8] inf: only measured
    if accelerator.scaler is None:  # fp16 skips the step of an infinite gradient, and lowers the scale of the loss
        check(norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def forget_gradient(accelerator, module, optimizer):
    """In place of `step`, where a step is skipped."""
    (module.optimizer if uses_deepspeed(accelerator) else optimizer).zero_grad()


def is_sharded(module):
    """Whether a process holds a part of the weights only."""
    return isinstance(module, FSDPModule) or is_zero3(module)


def is_zero3(module):
    return hasattr(next(module.parameters(), None), "ds_id")


def any_row(module, alive, t):
    """Whether a sampler goes on after token t: some row is alive [B], here or, where weights are sharded, on any process.

    There no process may stop alone, since the others' next forward would wait for its part. They ask at every 8th token.
    """
    if not is_sharded(module):
        return bool(alive.any())
    if t % 8:
        return True
    alive = alive.any().int()
    torch.distributed.all_reduce(alive, torch.distributed.ReduceOp.MAX)
    return bool(alive)


# ---- whole weights and moments, by name, so that a run goes on under any engine ----------------------------------------
def named_parameters(accelerator, module):
    """(name, parameter) of the module as it was before `prepare`; tied weights once."""
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()  # a forward without a backward leaves some weights whole, in tensors that the optimizer does not know
    return list(accelerator.unwrap_model(module).named_parameters())


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def full_weights(accelerator, module):
    """{name: whole fp32 weight}, on the main process's CPU; call it on every process."""
    return full_state(accelerator, module, None)[0]


@torch.no_grad()
def full_state(accelerator, module, optimizer):
    """Whole weights and Adam moments of a prepared module, on the main process's CPU; call it on every process.

    Of the weights only those that are trained, where there is an optimizer; under LoRA these are few. Returns: ({name: weight},
    {"exp_avg": {name: moment}, "exp_avg_sq": {name: moment}}, optimiser steps taken), where the
    moments are empty before the first step, or with optimizer=None.
    """
    weights, moments = {}, {kind: {} for kind in MOMENTS}
    states = innermost(optimizer).state if optimizer else {}
    steps = next((int(whole(state["step"])) for state in states.values() if "step" in state), 0)
    if uses_deepspeed(accelerator):
        from deepspeed.utils import safe_get_full_fp32_param as weight_of
        from deepspeed.utils import safe_get_full_optimizer_state as moment_of

        if steps:
            link_moments(optimizer.optimizer)
    else:
        weight_of = whole

        def moment_of(p, kind):
            return whole(states[p][kind]) if p in states else None

    for key, p in named_parameters(accelerator, module):
        if optimizer and not p.requires_grad:
            continue
        found = [(weights, weight_of(p)), *((moments[kind], moment_of(p, kind)) for kind in MOMENTS if steps)]
        for target, x in found:
            if accelerator.is_main_process and x is not None:  # one process alone needs room for the whole
                target[key] = x.detach().to("cpu", torch.float32).reshape(weights.get(key, x).shape).contiguous()
    return weights, moments, steps


@torch.no_grad()
def load_full_state(accelerator, module, optimizer, tensors, steps):
    """The inverse of full_state: tensors {"weights": .., "exp_avg": .., "exp_avg_sq": ..} of {name: whole tensor}, everywhere."""
    named = named_parameters(accelerator, module)
    if uses_deepspeed(accelerator):
        return load_into_deepspeed(optimizer.optimizer, named, tensors, steps, accelerator.process_index)

    def like(p, x):
        x = x.to(p.device, p.dtype)
        return distribute_tensor(x, p.device_mesh, p.placements) if isinstance(p, DTensor) else x

    for key, p in named:
        if key in tensors["weights"]:
            p.copy_(like(p, tensors["weights"][key]))
        if key in tensors["exp_avg"]:
            optimizer.state[p] = {kind: like(p, tensors[kind][key]) for kind in MOMENTS}
            place = p.device if optimizer.param_groups[0].get("fused") else "cpu"  # as torch's AdamW has it
            optimizer.state[p]["step"] = torch.tensor(float(steps), device=place)


def innermost(optimizer):
    """The torch optimizer inside accelerate's and DeepSpeed's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def link_moments(zero):
    """ZeRO-1 and 2: lets each parameter find its moments; DeepSpeed 0.19.8 does it for the first parameter group alone."""
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def load_into_deepspeed(zero, named, tensors, steps, rank):
    """Puts whole tensors into the flat fp32 partitions that ZeRO steps, and from there into the weights of the forward."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO-3
        zero._partition_all_parameters()  # a forward may have left some whole
        flats = zero.fp32_partitioned_groups_flat
    else:
        flats = zero.single_partition_of_fp32_groups
    if tensors["exp_avg"]:
        for flat in flats:
            moments = {kind: torch.zeros_like(flat) for kind in MOMENTS}
            innermost(zero).state[flat] = {"step": torch.tensor(float(steps), device=flat.device), **moments}
        link_moments(zero)
    for key, p in named:
        for file, kind in (("weights", None), *((kind, kind) for kind in MOMENTS)):
            x = tensors[file].get(key)
            if x is None:
                continue
            if hasattr(p, "ds_tensor"):  # DeepSpeed's own setter fails where the processes do not divide the size
                shard = torch.zeros(p.ds_tensor.ds_numel, device=p.device)
                mine = x.flatten()[rank * len(shard) :][: len(shard)]
                shard[: len(mine)] = mine
                zero.set_local_hp_param(shard, p, kind)
            else:
                p.set_full_hp_param(x.to(p.device), kind)
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        return
    for i in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(i)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
