"""
What turns cost in train_agent.py: each one reads all that came before it again, and training reads whole trajectories.

    python benchmark/checks/turns.py models/27m/sft              1, 2, 4 and 8 turns
    python benchmark/checks/turns.py models/smollm --row 4096    one update of long trajectories, mostly observations

It prints the tokens of the policy and of observations in a trajectory, the seconds of an update (the median; the first
of several does not count), and the peak of the process's memory. The learning rate is 0 and the reward is nothing.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

ROOT = Path(__file__).resolve().parents[2]
WORDS = " the next day we went to an old inn by the river . the"


@dataclass
class Args:
    model: tyro.conf.Positional[str]
    """folder of the policy"""
    row: int | None = None
    """tokens of a trajectory, for its memory; None: compare numbers of turns"""
    turns: tuple[int, ...] = (1, 2, 4, 8)
    """numbers of turns to compare"""
    batch: int = 32
    """trajectories of an update"""


def say(prompts, completions):
    """The environment: WORDS after each turn but the last."""
    times, last = int(os.environ["TIMES"]), int(os.environ["TURNS"])
    return [WORDS * times if len(turns) < last else None for turns in completions]


def nothing(prompts, completions):
    """The reward."""
    return [0.0] * len(completions)


def measure(args, turns, length, **flags):
    """Prints the row of the table of one run, in a process of its own."""
    flags = dict(
        dataset="toy", sft_model_path=args.model, reward_model_path="None", reward_fn=f"{__file__}:nothing",
        env_fn=f"{__file__}:say", max_turns=turns, response_length=length, learning_rate=0, batch_size=args.batch,
        total_episodes=3 * args.batch, eval_dataset="None", num_sample_generations=0, checkpoint_every=0,
        run_name="turns", output_dir="models/turns", take=args.batch, rollout_micro_batch_size=args.batch,
    ) | flags  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"TURNS": str(turns), "TIMES": str(1 if args.row is None else args.row)}
    command = [sys.executable, str(ROOT / "rlhf_details/train_agent.py"), *words, "--overwrite"]
    subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    rows = [json.loads(line) for line in Path("runs/turns/metrics.jsonl").read_text().splitlines()]
    rows = rows[1:] or rows
    of = {name: median(row[name] for row in rows) for name in rows[0]}
    own, seen, rollout = of["val/sequence_lengths"], of["val/observation_tokens"], of["time/rollout"]
    per_token = 1000 * rollout / own / args.batch
    figures = f"{own:.0f} | {seen:.0f} | {rollout:.1f} | {per_token:.2f} | {of['time/optimise']:.1f} | {peak:.2f}"
    print(f"| {turns} | {figures} |", flush=True)


def main(args):
    print("| turns | tokens of the policy | of observations | rollout, s | its ms a token | optimise, s | peak GiB |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    if args.row:
        size = dict(max_observation_tokens=args.row - 96, micro_batch_size=1, total_episodes=args.batch)
        measure(args, 2, args.row - 32, **size)
    for turns in () if args.row else args.turns:
        measure(args, turns, 60 * turns)


if __name__ == "__main__":
    main(tyro.cli(Args))
