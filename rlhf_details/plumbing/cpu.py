"""
Faster linear layers and fewer threads on CPUs: the same numbers up to rounding. All works without it, only slower.

For fp32 on the CPU, torch takes MKL, which uses AVX-512 on Intel's processors alone. oneDNN uses it on all of them.
"""

import os

import torch
from torch import nn

from rlhf_details.plumbing.exits import say

# Parameters. Below this a second thread gains little, and it costs much where two runs share the cores.
SMALL = 5e6


def use_one_thread(*modules):
    """Takes one CPU thread where all modules are small, and says so. It leaves GPUs and OMP_NUM_THREADS alone.

    Threads spin while they wait for each other, which is most of the time where another run wants the same cores.
    """
    weights = [list(module.parameters()) for module in modules]
    size = max(sum(p.numel() for p in own) for own in weights)
    is_on_cpu = all(p.device.type == "cpu" for own in weights for p in own)
    if is_on_cpu and size < SMALL and torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
        say(f"one CPU thread, since {size / 1e6:.1f} M parameters gain little from more: OMP_NUM_THREADS sets another")


def use_onednn(model):
    """Lets a model's linear layers use oneDNN, where torch has it and the processor has AVX-512. Returns the model."""
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        keep_memory_flat()
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDNNLinear  # The module stays the same object, with its name, hooks and weights.
    return model


class OneDNNLinear(nn.Linear):
    """A linear layer whose fp32 products on the CPU are oneDNN's. On a GPU, in bf16 or under autocast: nn.Linear."""

    def forward(self, x):
        if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu") or not x.numel():
            return super().forward(x)
        return OneDNNProduct.apply(x, self.weight, self.bias)


class OneDNNProduct(torch.autograd.Function):
    """x [.., I], weight [O, I], bias [O] or None -> x weight^T + bias [.., O], with its gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), (needs_x, needs_weight, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows, x = grad.flatten(0, -2), x.flatten(0, -2)  # [N, O], [N, I]
        return (
            product(grad, weight.t()) if needs_x else None,
            product(rows.t(), x.t()) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def product(x, weight, bias=None):
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def keep_memory_flat():
    """Keeps the memory of long CPU runs from growing, because each of their batches has another shape.

    oneDNN would keep the compiled kernels of 1024 shapes. benchmark/checks/memory.py measures it.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
