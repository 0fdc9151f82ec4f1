"""
What gpu.sh runs first on a GPU: whether each page has the CPU's numbers there, and what the sampler's noise costs.

    python benchmark/checks/gpu.py pages OUT     two updates of each page, on the CPU, on the GPU and there in bf16
    python benchmark/checks/gpu.py noise         the noise of a token, as it is and through torch.compile

A table comes out. Where there is no GPU, the CPU stands in its place, and the table says so.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parents[2]
PLACES = {  # name: environment variables
    "CPU": {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
    "GPU": {},
    "GPU in bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
}
ALLOWED = 1e-2  # A token that falls otherwise changes what follows. Two updates of a wrong page are off by more.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Pages:
    """Two updates of each page in three places."""

    out: Positional[str]
    """folder of the logs and runs"""
    place: str | None = None
    """run them in this process, for this place alone"""


@dataclass
class Noise:
    """The noise of a token for rows and vocabularies."""

    rows: int = 64
    """rows"""
    vocabularies: tuple[int, ...] = (50304, 151936)
    """sizes of vocabularies; these are Pythia's and Qwen2.5's"""


def run_pages(out):
    """Runs every page in this process. A failure of one leaves its traceback in its folder."""
    sys.path[:0] = [str(ROOT / "tests")]
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


def pages(args):
    """Prints the table; returns how many runs failed or have other numbers than on the CPU."""
    out, made = Path(args.out).resolve(), {}
    if args.place:
        run_pages(out / args.place)
        return 0
    for place, variables in PLACES.items():
        (out / place).mkdir(parents=True)
        command = [sys.executable, __file__, "pages", str(out), "--place", place]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
        with open(out / f"{place}.log", "w") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=log)
        file = out / place / "made.json"
        made[place] = json.loads(file.read_text()) if file.exists() else {}
    print(
        f"Two updates of each page. GPU: {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'none, so the CPU'}\n"
    )
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
    return bad


def largest_difference(rows, others):
    """(relative difference, metric) of the metric that differs most. Numbers below 1e-3 count as if they were 1e-3."""
    found = [(0.0, "-")]
    for row, other in zip(rows, others, strict=True):
        found += [(abs(x - other[name]) / max(abs(x), abs(other[name]), 1e-3), name) for name, x in row.items()]
    return max(found)


def seconds_of(function):
    """The shortest of 20 calls."""
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def noise(args):
    """Prints the table; returns 0, since a machine that cannot compile is no failure."""
    sys.path[:0] = [str(ROOT)]
    from rlhf_details import utils

    compiled = torch.compile(utils.gumbel_noise, dynamic=False)
    print("| rows | vocabulary | ms | ms through torch.compile | same bits |\n|---|---|---|---|---|")
    for size in args.vocabularies:
        keys = utils.keys_of_episodes((1, 0, 1), torch.arange(args.rows, device=DEVICE))
        plain = seconds_of(lambda: utils.gumbel_noise(keys, size))
        try:
            is_same = torch.equal(utils.gumbel_noise(keys, size), compiled(keys, size))
            fast = f"{1e3 * seconds_of(lambda: compiled(keys, size)):.3f} | {'yes' if is_same else 'NO'}"
        except Exception as e:  # A machine may lack a compiler, or torch may know no kernel for it.
            fast = f"cannot be compiled here: {type(e).__name__}: {str(e).splitlines()[0][:80]} | -"
        print(f"| {args.rows} | {size} | {1e3 * plain:.3f} | {fast} |")
    return 0


if __name__ == "__main__":
    args = tyro.cli(Pages | Noise)
    sys.exit({Pages: pages, Noise: noise}[type(args)](args) > 0)
