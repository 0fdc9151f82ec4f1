"""
How fast SmolLM2-135M-Instruct trains: an update of our RLOO, with and without LoRA, in bf16, and of TRL's.

    python benchmark/studies/smollm_speed.py updates         results/smollm_trl/speed.md
    python benchmark/studies/smollm_speed.py products        results/smollm/products.md: matrix products
"""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lora_memory import RUN
from study import Study
from tables import grid
from with_trl import parsed, run_trl, spec_of

from benchmark import ROOT, made_with, run_command

PHASES = "rollout", "scores", "optimise"
SYSTEMS = {  # name: (run of the study smollm_trl, flags, precision); TRL's is a run of it, too
    "rloo": ("rloo", "", "no"),
    "rloo_lora": ("rloo", "--lora_rank 16 --learning_rate 2e-4", "no"),
    "rloo_bf16": ("rloo", "", "bf16"),
    "trl_rloo": ("rloo", "", "no"),
}


@dataclass
class UpdatesArgs:
    """Seconds and peak memory of updates, in turn by each system, each in a process of its own."""

    alternations: int = 2
    """times that every system runs"""
    updates: int = 2
    """updates of a run, of which the first warms up"""
    threads: int = 2
    """CPU threads of a process"""


@dataclass
class ProductsArgs:
    """Matrix products of the model's shapes, on one thread."""

    output: str = "benchmark/results/smollm/products.md"
    """the table"""


def timed(system, updates):
    """(rows with the seconds of each update, peak memory in bytes) of a short run without evaluation."""
    run, more, precision = SYSTEMS[system]
    folder = ROOT / "runs" / "benchmark" / "smollm_speed" / system
    folder.mkdir(parents=True, exist_ok=True)
    command = f"{Study('smollm_trl').command(run)} {more} --eval_dataset None --run_name run --overwrite"
    words = shlex.split(f"{command} --total_episodes {64 * updates}".format(root=ROOT, seed=1))
    if system == "trl_rloo":
        spec = spec_of(*parsed(words[1], words[2:]), folder)
        run_trl("1.16.0", spec, folder)
        result = json.loads(Path(spec["result"]).read_text())
        return result["rows"], result["peak"]
    env = os.environ | {"ACCELERATE_MIXED_PRECISION": precision}
    command = [sys.executable, "-c", RUN, str(ROOT / words[1]), *words[2:]]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    return rows, int(done.stdout.rsplit("PEAK", 1)[1]) * 1024


def updates(args: UpdatesArgs):
    """Writes results/smollm_trl/speed.md."""
    found = {}
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads)}
    for _ in range(args.alternations):
        for system in SYSTEMS:
            rows, peak = timed(system, args.updates)
            own = [np.mean([row[f"time/{phase}"] for row in rows[1:]]) for phase in PHASES]
            found.setdefault(system, []).append([*own, sum(own), peak / 1e9])
            print(system, *(f"{x:.1f}" for x in found[system][-1]), flush=True)
    rows = [[name, *(" ".join(f"{run[i]:.1f}" for run in runs) for i in range(5))] for name, runs in found.items()]
    text = f"""# SmolLM2: an update of 64 answers, and memory

Written by `python benchmark/studies/smollm_speed.py updates`. {made_with()}
Seconds of an update on {args.threads} threads, the mean of {args.updates - 1} behind the first one. The systems ran in
turn, and a cell has a figure for each turn. The peak is that of the process.
"""
    write("benchmark/results/smollm_trl/speed.md", text, ["system", *PHASES, "an update", "peak GB"], rows)


def products(args: ProductsArgs):
    """Writes the table."""
    torch.set_num_threads(1)
    rows, shapes = [], {"MLP of 64 rows": (64, 576, 1536), "MLP of 1,024 rows": (1024, 576, 1536)}
    for what, (m, k, n) in (shapes | {"head of 1,024 rows": (1024, 576, 49152)}).items():
        rows.append([what])
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            torch.nn.functional.linear(x, weight)
            count, start = max(1, int(6e9 / (2 * m * k * n))), time.time()
            for _ in range(count):
                torch.nn.functional.linear(x, weight)
            rows[-1].append(f"{2 * m * k * n * count / (time.time() - start) / 1e9:.0f}")
    text = f"""# Matrix products

Written by `python benchmark/studies/smollm_speed.py products`: GFLOP/s of one thread. {made_with()}
"""
    write(args.output, text, ["product", "fp32", "bf16"], rows)


def write(path, text, head, rows):
    (ROOT / path).write_text("\n".join([text, *grid(head, rows, plain=True)]) + "\n")
    print((ROOT / path).read_text())


COMMANDS = {"updates": (UpdatesArgs, updates), "products": (ProductsArgs, products)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
