"""
Weights of which each process holds a part.

They are gathered for checkpoints and for the saved model. Whole copies of a policy are gathered for sampling. Frozen
models are shared out.
FSDP2 (torch's fully_shard) keeps a part of each weight in a DTensor, DeepSpeed's ZeRO-3 in an attribute `ds_tensor`.
"""

import copy

import torch
from accelerate import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D


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


@torch.no_grad()
def full_weights(accelerator, module):
    """{name: whole fp32 weight} of a prepared module, on the main process's CPU; call it on every process."""
    weights = {}
    for name, p in named_parameters(accelerator, module):
        x = whole(p)
        if accelerator.is_main_process:  # Only one process needs room for the whole.
            weights[name] = x.detach().to("cpu", torch.float32).contiguous()
    return weights


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
