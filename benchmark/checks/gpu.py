"""
Does each page run on a GPU, in fp32 and in bf16, and has it the CPU's numbers there? Five minutes at most.

    python benchmark/checks/gpu.py OUT     two updates of each page, on the CPU, on the GPU and there in bf16

A table comes out, and logs and runs in the folder OUT. The exit code is 1 where a page fails or has other numbers.
Where there is no GPU, the CPU stands in its place, and the table says so.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PLACES = {  # name: environment variables
    "CPU": {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
    "GPU": {},
    "GPU in bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
}
ALLOWED = 1e-2  # A token that falls otherwise changes what follows. Two updates of a wrong page are off by more.


def run_pages(out):
    """Runs every page in this process. A failure of one leaves its traceback in its folder."""
    import helpers
    import short_runs

    tiny, made = helpers.save_ragged(out / "models"), {}
    for name in [*short_runs.PLACES, "evaluate"]:
        (out / name).mkdir()
        begin = time.time()
        with contextlib.chdir(out / name):
            try:
                if name == "evaluate":
                    rows = [short_runs.short_evaluation(tiny)]
                else:
                    short_runs.short_run(tiny, name)
                    rows = helpers.without_times(helpers.read_metrics("runs/run"))
                made[name] = {"seconds": time.time() - begin, "rows": rows}
            except (Exception, SystemExit) as e:  # The other pages are still to run.
                traceback.print_exc()
                made[name] = {"error": f"{type(e).__name__}: {e}".splitlines()[0]}
        (out / "made.json").write_text(json.dumps(made))


def largest_difference(rows, others):
    """(relative difference, metric) of the metric that differs most. Numbers below 1e-3 count as if they were 1e-3."""
    found = [(0.0, "-")]
    for row, other in zip(rows, others, strict=True):
        found += [(abs(x - other[name]) / max(abs(x), abs(other[name]), 1e-3), name) for name, x in row.items()]
    return max(found)


def main(out):
    """Prints the table; returns how many pages failed or have other numbers than on the CPU."""
    made = {}
    for place, variables in PLACES.items():
        (out / place).mkdir(parents=True)
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        with open(out / f"{place}.log", "w") as log:
            command = [sys.executable, __file__, str(out / place), "in this process"]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path} | variables, stdout=log, stderr=log)
        file = out / place / "made.json"
        made[place] = json.loads(file.read_text()) if file.exists() else {}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, so the CPU"
    print(f"Two updates of each page. GPU: {gpu}\n")
    print("| page | seconds on the CPU | on the GPU | there in bf16 | largest difference | verdict |")
    print("|---|---|---|---|---|---|")
    bad = 0
    for name in made["CPU"]:
        runs = [made[place].get(name, {"error": f"see {place}.log"}) for place in PLACES]
        seconds = [f"{run['seconds']:.1f}" if "seconds" in run else "-" for run in runs]
        errors = [f"{place}: {run['error']}" for place, run in zip(PLACES, runs, strict=True) if "error" in run]
        gap, metric = (0.0, "-") if errors else largest_difference(runs[0]["rows"], runs[1]["rows"])
        verdict = "; ".join(errors) or ("agrees" if gap < ALLOWED else "DIFFERS")
        bad += verdict != "agrees"
        print(f"| {name} | {' | '.join(seconds)} | {gap:.1e} {metric} | {verdict} |")
    return bad + (not made["CPU"])


if __name__ == "__main__":
    out = Path(sys.argv[1]).resolve()
    if sys.argv[2:]:  # a process that this program has started
        run_pages(out)
    else:
        sys.exit(main(out) > 0)
