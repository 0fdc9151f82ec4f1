"""
tests/slow/page_worker.py with a record of memory: [torchrun] memory_worker.py SPEC.json

Each process writes out/memory<r>.pt, for each run: the bytes that it held for weights and moments, and for each phase of
the second update the peak over what was alive when the update began. torch's profiler counts what the allocator of the
CPU hands out, so nothing here shares a line with `Live` of memory_plan.py. The first update makes Adam's moments.
"""

import gc
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "slow"))
import page_worker

from rlhf_details.plumbing import engines
from rlhf_details.plumbing.run import Run

RUNS, WAIT = [], torch.distributed.Work.wait


def nbytes(tensors):
    """Bytes of the storages behind some tensors, each counted once; of a DTensor this process's part."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def held(module, optimizer):
    """{what: bytes} of weights and moments in this process."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper, and under it DeepSpeed's
    inner = getattr(inner, "optimizer", inner)
    weights = [getattr(p, "ds_tensor", p.data) for p in module.parameters()]
    moments = [x for state in inner.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()]
    steps = [p for group in inner.param_groups for p in group["params"]]
    return {
        "weights": nbytes(weights),
        "stepped": nbytes(steps),
        "both": nbytes(weights + steps),
        "moments": nbytes(moments),
    }


def allocations(profiler):
    """[(time, bytes alive after it)] of a profile, in order."""
    found, left = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.total_allocated))
    return sorted(found)


def wait_for_gloo(work, *args):
    """Work.wait, and then time for gloo's thread to let go of the tensors. The profiler does not see what it frees."""
    done = WAIT(work, *args)
    time.sleep(0.002)
    return done


def main():
    marks, parts = [], {}
    prepare, lap, step, one_run = engines.prepare, Run.lap, engines.step, page_worker.one_run

    def mark(name):
        marks.append((time.time_ns(), name))

    def remembering_prepare(*args):
        parts["held"] = prepare(*args)
        return parts["held"]

    def marking_lap(self, name):
        lap(self, name)
        if name == "optimise":
            gc.collect()
            if os.environ.get("DEBUG_LIVE"):
                seen = {}
                for x in gc.get_objects():
                    try:
                        if isinstance(x, torch.Tensor):
                            y = x.to_local() if isinstance(x, DTensor) else x
                            seen.setdefault(y.untyped_storage().data_ptr(), []).append(
                                (y.untyped_storage().nbytes(), type(x).__name__, tuple(x.shape))
                            )
                    except Exception:
                        pass
                total = {}
                for v in seen.values():
                    key = v[0][0]
                    total.setdefault(key, []).append(v)
                for k in sorted(total, reverse=True)[:14]:
                    print("LIVE", k, len(total[k]), [x[:2] for x in total[k][:2]])
                print("SUM", sum(v[0][0] for v in seen.values()))
        mark(name)

    def marking_step(*args):
        mark("backward")
        norm = step(*args)
        mark("step")
        return norm

    def measured_run(spec, engine):
        marks.clear()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            seen = one_run(spec, engine)
        points = allocations(profiler)
        laps = [i for i, (_, name) in enumerate(marks) if name == "optimise"]
        of_update = marks[laps[0] : laps[1] + 1]
        before = [alive for when, alive in points if when <= of_update[0][0]][-1]
        peaks = {}
        for (start, _), (end, name) in zip(of_update, of_update[1:]):
            inside = [alive for when, alive in points if start <= when <= end]
            peaks[name] = max([peaks.get(name, 0), *(alive - before for alive in inside)])
        RUNS.append({"before": before, "peaks": peaks, **held(*parts["held"]), "points": len(points)})
        return seen

    with (
        patch.object(torch.distributed.Work, "wait", wait_for_gloo),
        patch.object(engines, "prepare", remembering_prepare),
        patch.object(engines, "step", marking_step),
        patch.object(Run, "lap", marking_lap),
        patch.object(page_worker, "one_run", measured_run),
    ):
        page_worker.main()
    torch.save(RUNS, Path(sys.argv[1]).with_suffix("") / f"memory{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    main()
