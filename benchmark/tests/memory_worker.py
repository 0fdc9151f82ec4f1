"""
tests/slow/page_worker.py, with a record of memory: [torchrun] memory_worker.py SPEC.json

Each process writes out/memory<r>.pt, for each run the bytes that it held: for weights, for moments and in all between
updates; for the key-value cache; at the peak of each phase of the second update, above what it held before; and for the
last micro-batch what the policy's trunk left (activations) and what came on top (logits). torch's profiler counts what
the CPU's allocator hands out and gets back, so nothing here shares a line with the `Live` of memory_plan.py.
"""

import ctypes
import gc
import itertools
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "slow"))
import page_worker
from transformers import DynamicCache

from rlhf_details import utils
from rlhf_details.plumbing import engines
from rlhf_details.plumbing.run import Run


def nbytes(tensors):
    """Bytes of the storages of some tensors, each counted once; of a DTensor this process's part."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def held(module, optimizer):
    """{what: bytes} of trained and frozen weights of a prepared module, and of moments."""
    weights = [getattr(p, "ds_tensor", p.data) for p in module.parameters()]
    moments = [x for state in optimizer.optimizer.state.values() for x in state.values() if x.dim()]
    return {"weights": nbytes(weights), "moments": nbytes(moments)}


def allocations(profiler):
    """[(time, bytes alive after it)] of a profile, in order."""
    found, left = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.total_allocated))
    return sorted(found)


def count_every_thread():
    """The profiler's count of bytes alive misses what other threads free, as gloo's does, unless this flag is set."""
    allocator = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("*c10.*"))))
    ctypes.c_bool.in_dll(allocator, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def measure(run, spec, engine):
    """Makes a run of page_worker.py; returns (what this saw, the record of its memory)."""
    marks, parts, cached = [], [], []
    prepare, accumulate, step = engines.prepare, engines.accumulate, engines.step
    lap = Run.lap
    page_worker.AcceleratorState._reset_state(), gc.collect()  # What is left of the run before goes.

    def mark(name):
        time.sleep(0.02)  # gloo's thread may let go of a tensor a moment after the main thread goes on.
        marks.append((time.time_ns(), name))

    class Cache(DynamicCache):
        def update(self, *args, **kwargs):
            found = super().update(*args, **kwargs)
            cached.append(
                sum(x.nbytes for layer in self.layers if layer.is_initialized for x in (layer.keys, layer.values))
            )
            return found

    def remembering_prepare(args, accelerator, *rest):
        parts[:] = prepare(args, accelerator, *rest)
        head = accelerator.unwrap_model(parts[0]).model.get_output_embeddings()
        head.register_forward_pre_hook(lambda *_: mark("head") if torch.is_grad_enabled() else None)
        return tuple(parts)

    def marking_accumulate(*args, **kwargs):
        mark("micro-batch")
        return accumulate(*args, **kwargs)

    def marking_lap(self, name):
        lap(self, name)
        gc.collect() if name == "optimise" else None
        mark(name)

    def marking_step(*args):
        mark("backward")
        norm = step(*args)
        mark("step")
        return norm

    with ExitStack() as stack:
        stack.enter_context(patch.object(engines, "prepare", remembering_prepare))
        stack.enter_context(patch.object(engines, "accumulate", marking_accumulate))
        stack.enter_context(patch.object(engines, "step", marking_step))
        stack.enter_context(patch.object(utils, "DynamicCache", Cache))
        stack.enter_context(patch.object(Run, "lap", marking_lap))
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        seen = run(spec, engine)
    points = allocations(profiler)

    def between(start, end):
        return [alive for when, alive in points if start <= when <= end] or [alive_at(end)]

    def alive_at(time):
        return [alive for when, alive in points if when <= time][-1]

    laps = [i for i, (_, name) in enumerate(marks) if name == "optimise"]
    of_update = marks[laps[0] : laps[1] + 1]
    ends = [(time, name) for time, name in of_update if name not in ("micro-batch", "head")]
    before = alive_at(ends[0][0])
    peaks = {name: max(between(start, end)) - before for (start, _), (end, name) in itertools.pairwise(ends)}
    last = {name: time for time, name in of_update}  # the last micro-batch
    activations = alive_at(last["head"]) - alive_at(last["micro-batch"])
    logits = max(between(last["head"], last["backward"])) - alive_at(last["head"])
    found = {"all": before - points[0][1], "kv_cache": max(cached), "activations": activations, "logits": logits}
    return seen, {**held(*parts), **found, "peaks": peaks}


def main():
    records, run = [], page_worker.one_run
    count_every_thread()

    def measured_run(spec, engine):
        seen, record = measure(run, spec, engine)
        records.append(record)
        return seen

    with patch.object(page_worker, "one_run", measured_run):
        page_worker.main()
    out = Path(json.loads(Path(sys.argv[1]).read_text())["out"])
    torch.save(records, out / f"memory{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    main()
