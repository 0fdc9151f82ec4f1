"""
A device that does not exist, so that a machine without a GPU shows what the first hour on one would find.

A tensor on it says that it is on "pretended:0", and its numbers are on the CPU. As on CUDA, an operation that is given
tensors of two devices fails, except for single numbers, copies and indices. What would make the host wait until the
device has done all that was queued is counted by line: reading a number, a shape that depends on numbers, and a copy
from or to the CPU. It shows nothing of a real GPU's kernels, streams, memory or speed.

torch can have one such device in a process, for ever, so a test uses it in a process of its own.
"""

import collections
import contextlib
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # torch's private function
PACKAGE = str(Path(__file__).parents[1] / "rlhf_details")
aten = torch.ops.aten
INDEXING = aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default
COPIES = aten._to_copy.default, aten.copy_.default
# The host must know the shape or the number before it can go on.
READS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
operations, waits = collections.Counter(), collections.Counter()  # by operator, and by (kind, line of the package)


class Backend:
    """What torch asks the module of a device, as it asks torch.cuda."""

    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


class OnDevice(torch.Tensor):
    """A tensor of the device. `numbers` is the tensor on the CPU that stands for its memory."""

    @staticmethod
    def __new__(cls, numbers):
        like = dict(strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype)
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, device=DEVICE, **like)

    def __init__(self, numbers):
        self.numbers = numbers

    def __tensor_flatten__(self):  # By this torch knows that a module must keep its parameters when it is moved.
        return ["numbers"], None

    def __repr__(self):
        return f"OnDevice({self.numbers})"

    def __format__(self, spec):
        return format(self.item(), spec)

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Computes an operation on the CPU. It counts it and its waits, and fails where it mixes devices."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_device = [x for x in tensors if isinstance(x, OnDevice)]
    elsewhere = [x for x in tensors if not isinstance(x, OnDevice) and x.dim()]
    is_on_device = is_pretended(kwargs["device"]) if kwargs.get("device") is not None else bool(on_device)
    is_index = func in INDEXING and isinstance(args[0], OnDevice)
    if func is aten.copy_.default:
        is_on_device = isinstance(args[0], OnDevice)
    operations[func] += bool(on_device) or is_on_device
    if on_device and elsewhere and func not in COPIES and not is_index:
        devices = [str(x.device) for x in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} has {devices}")
    if on_device and func in READS:
        wait(str(func))
    elif func in COPIES and tensors[-1].numel() and is_on_device != all(isinstance(x, OnDevice) for x in tensors):
        wait("copy to the device" if is_on_device else "copy from the device")
    elif is_index:
        indices = [x for x in args[1] if x is not None]
        # A single value is written by the mask itself.
        by_mask = any(x.dtype == torch.bool for x in indices) and (len(args) < 3 or args[2].numel() > 1)
        if by_mask or not all(isinstance(x, OnDevice) for x in indices):
            wait("index by a mask" if by_mask else "copy of an index to the device")
    on_cpu = {"device": torch.device("cpu")} if is_pretended(kwargs.get("device")) else {}
    inputs = tree_map_only(OnDevice, lambda x: x.numbers, (args, kwargs | on_cpu))
    outputs = func(*inputs[0], **inputs[1])
    if not is_on_device or func is aten._local_scalar_dense.default:
        return outputs
    outputs = tree_map_only(torch.Tensor, OnDevice, outputs)
    return return_and_correct_aliasing(func, args, kwargs, outputs) if on_device else outputs


def is_pretended(device):
    return device is not None and torch.device(device).type == DEVICE.type


def wait(kind):
    """Counts a wait for the line of the package that is running, "" where none is."""
    frame = sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    line = f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno}" if frame else ""
    waits[kind, line] += 1


class Operations(TorchDispatchMode):
    """Sees what no tensor of the device takes part in: what is made on it, and what is copied to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Constructors(TorchFunctionMode):
    """torch.tensor writes to memory below any mode, as does a list of indices. Here both are copies from the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_there = args and isinstance(args[0], OnDevice)
        if func in (torch.tensor, torch.as_tensor) and is_pretended(kwargs.get("device")) and not is_there:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is torch.Tensor.__getitem__ and is_there and isinstance(args[1], list):
            args = args[0], torch.tensor(args[1]).to(DEVICE)
        return func(*args, **kwargs)


@contextlib.contextmanager
def counting():
    """Within it the device exists. Gives (operations, waits), two Counters that start at nothing."""
    operations.clear(), waits.clear()
    with Operations(), Constructors():
        yield operations, waits


if IS_POSSIBLE:
    backend_registration._setup_privateuseone_for_python_backend("pretended", backend_module=Backend)
    DEVICE = torch.device("pretended", 0)
