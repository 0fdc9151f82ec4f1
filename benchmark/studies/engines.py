"""
What sampling costs under the engines that share weights out: seconds of a rollout on two CPU processes.

    python benchmark/studies/engines.py
    python benchmark/studies/engines.py --systems ddp fsdp2 zero3

A system is an engine and flags of train_rloo.py. All have the same models (random weights, shapes of speed_work.py) and
sample the same tokens. They run in turns, each with one thread a process. accelerate starts FSDP2 and DeepSpeed on GPUs
alone, so the runs go through tests/slow/page_worker.py, which makes it start them on CPUs. The first rollout of a run
is not counted. Needs the extras test and deepspeed.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.extend(str(Path(__file__).resolve().parents[2] / x) for x in ("benchmark", "tests", "tests/slow"))
import speed_work as speed
from helpers import read_metrics
from processes import run_under, spec_of

from rlhf_details import train_rloo

ROOT = speed.ROOT


@dataclass
class Args(speed.Work):
    """Engines in turns."""

    threads: int = 1
    """CPU threads of every process"""
    systems: tuple[str, ...] = ("ddp", "fsdp2", "zero3")
    """engines (ddp, fsdp2, zero2, zero3), each with flags of train_rloo.py; the first is what the others are held to"""


def one_run(args, system, paths, number):
    """Seconds of each counted rollout, and of the rest of each counted update."""
    engine, *flags = system.split()
    words = ["--dataset", paths["prompts"], "--sft_model_path", paths["policy"], "--reward_model_path", paths["reward"]]
    words += ["--rloo_k", args.rloo_k, "--batch_size", args.batch_size, "--response_length", args.response_length]
    words += ["--total_episodes", args.batch_size * (1 + args.updates), "--checkpoint_every", 0, "--overwrite", *flags]
    folder, name = Path(args.work_dir).resolve(), f"{engine}{'_'.join(flags)}_{number}"
    precision = {"fp32": "no", "bf16": "bf16"}[args.precision]
    script_args = tyro.cli(train_rloo.Args, args=list(map(str, words)))
    run_under(engine, [spec_of(script_args, name, precision=precision)], folder)
    metrics = read_metrics(folder / "runs" / name)[-args.updates :]
    rollouts = [row["time/rollout"] for row in metrics]
    return rollouts, [row["time/update"] - row["time/rollout"] for row in metrics]


def main(args: Args):
    paths, _ = speed.build(args)
    seconds = {system: ([], []) for system in args.systems}
    for number in range(args.alternations):
        for system in args.systems:
            for kept, new in zip(seconds[system], one_run(args, system, paths, number), strict=True):
                kept.append(statistics.median(new))
            print(
                f"alternation {number + 1} of {args.alternations}, {system}: {seconds[system][0][-1]:.2f} s", flush=True
            )
    first, lines = seconds[args.systems[0]], [f"RLOO on two CPU processes, {speed.describe(args)}"]
    lines += [
        f"| engine | rollout s | times {args.systems[0]}'s | the rest of an update, s | times {args.systems[0]}'s |"
    ]
    lines += ["|---|---:|---:|---:|---:|"]
    for system, (rollouts, rests) in seconds.items():
        cells = []
        for values, others in ((rollouts, first[0]), (rests, first[1])):
            ratios = [a / b for a, b in zip(values, others, strict=True)]  # within an alternation
            cells += [speed.spread(values), speed.spread(ratios)]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    lines += ["", f"Median (lowest .. highest) of {args.alternations} alternations of {args.updates} counted updates."]
    text = "\n".join(lines)
    speed.publish(args, "engines", text, {"seconds": seconds})
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
