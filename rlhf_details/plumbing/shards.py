"""
Weights of which each process holds a part.

Whole weights and Adam's moments are gathered by name for checkpoints and for the saved model, and loaded again under
any engine. Whole copies of a policy are gathered for sampling. Frozen models are shared out.
FSDP2 (torch's fully_shard) keeps a part of each weight in a DTensor, DeepSpeed's ZeRO-3 in an attribute `ds_tensor`.
"""

import copy

import torch
from accelerate import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.pytorch_utils import Conv1D

MOMENTS = "exp_avg", "exp_avg_sq"


def uses_deepspeed(accelerator):
    return accelerator.distributed_type == DistributedType.DEEPSPEED


# ---- parts and wholes ------------------------------------------------------------------------------------------------
def is_sharded(module):
    """Whether a process holds only a part of the weights."""
    return isinstance(module, FSDPModule) or hasattr(next(module.parameters(), None), "ds_id")  # FSDP2 or ZeRO-3


def layers(module):
    """The modules whose weights are gathered together: transformers lists their classes in `_no_split_modules`."""
    kinds = {kind for m in module.modules() for kind in getattr(m, "_no_split_modules", None) or []}
    return [m for m in module.modules() if type(m).__name__ in kinds]


def share_out(module, device):
    """Leaves each process its part of a frozen module's weights, on the device. A call gathers them layer by layer."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for m in [*reversed(layers(module)), module]:  # A layer within a layer comes first.
        fully_shard(m, mesh=mesh, reshard_after_forward=True)


def named_parameters(accelerator, module):
    """(name, parameter) of the module as it was before `engines.prepare`; tied weights once."""
    for m in module.modules():
        if isinstance(m, FSDPModule):
            # A forward without a backward leaves some weights whole, in tensors that the optimizer does not know.
            m.reshard()
    return list(accelerator.unwrap_model(module).named_parameters())


def whole(x):
    """The whole of a tensor; call it on every process."""
    if isinstance(x, DTensor):
        return x.full_tensor()
    if not hasattr(x, "ds_id"):
        return x
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([x]):
        return x.detach().clone()


# ---- weights and moments by name -------------------------------------------------------------------------------------
@torch.no_grad()
def full_state(accelerator, module, optimizer=None):
    """Whole weights and Adam moments of a prepared module, on the main process's CPU; call it on every process.

    Where there is an optimizer, only the trained weights, which are few under LoRA. Without one, all of them.
    Returns: ({name: weight}, {"exp_avg": {name: moment}, "exp_avg_sq": {name: moment}}, optimiser steps taken). The
    moments are empty before the first step, and without an optimizer.
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
        weight = weight_of(p) if p.requires_grad else whole(p)
        found = [(weights, weight), *((moments[kind], moment_of(p, kind)) for kind in MOMENTS if steps)]
        for target, x in found:
            if accelerator.is_main_process and x is not None:  # Only one process needs room for the whole.
                target[key] = x.detach().to("cpu", torch.float32).reshape(weights.get(key, x).shape).contiguous()
    return weights, moments, steps


@torch.no_grad()
def load_full_state(accelerator, module, optimizer, tensors, steps):
    """The inverse of full_state. tensors: {"weights": .., "exp_avg": .., "exp_avg_sq": ..} of {name: whole tensor}."""
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
            place = p.device if optimizer.param_groups[0].get("fused") else "cpu"  # where torch's AdamW keeps it
            optimizer.state[p]["step"] = torch.tensor(float(steps), device=place)


def innermost(optimizer):
    """The torch optimizer inside accelerate's and DeepSpeed's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def link_moments(zero):
    """ZeRO-1 and 2: lets each parameter find its moments. DeepSpeed 0.19.8 does so for the first group only."""
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def load_into_deepspeed(zero, named, tensors, steps, rank):
    """Puts whole tensors into the flat fp32 partitions that ZeRO steps, and then into the weights of the forward."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO-3
        zero._partition_all_parameters()  # A forward may have left some weights whole.
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
            if hasattr(p, "ds_tensor"):  # DeepSpeed's own setter fails where the size is no multiple of the processes.
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


# ---- a whole copy of a policy, to sample from or to save -------------------------------------------------------------
def template(module):
    """A copy of a policy without its weights, for `fill`, and without its critic, which does not sample."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in module.parameters()}
    made = copy.deepcopy(module, empty)  # It takes what `empty` holds in place of a copy.
    made.critic = None
    return made.eval()


def fill(template, weights):
    """A copy of a template with the weights of {name: tensor}."""
    filled = {id(p): nn.Parameter(weights[name], requires_grad=False) for name, p in template.named_parameters()}
    return copy.deepcopy(template, filled)


@torch.no_grad()
def gather(accelerator, module, template, precision):
    """The template of a prepared policy with the weights that this has now; call it on every process.

    One weight after the other is gathered, so the peak is a copy and one weight. Under bf16 autocast the weights of
    linear layers are bf16, to which autocast would round them in each call.
    """
    rounded = {id(m.weight) for m in template.modules() if precision == "bf16" and isinstance(m, nn.Linear | Conv1D)}
    rounded -= {id(m.weight) for m in template.modules() if isinstance(m, nn.Embedding)}  # A head may be tied to one.
    empty, weights = dict(template.named_parameters()), {}
    for name, p in named_parameters(accelerator, module):
        if name in empty:
            weights[name] = whole(p).detach().to(torch.bfloat16 if id(empty[name]) in rounded else p.dtype)
    # The weights are on the device already, and only buffers move. On CPUs "cpu:1" would be another device than "cpu".
    return fill(template, weights).to(accelerator.device.type)
