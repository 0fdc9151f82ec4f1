"""
What rewards that are functions do on the embedded tasks, over seeds: the README's two tables.

1. Style: the toy policy, no reward model, benchmark/rewards.py's `keyword` and `brevity` under several weights.
2. toy-sum: a verifiable reward.

python benchmark/reward_functions.py [--seeds 1 2 3]      (run it in an empty folder; about 20 minutes on two cores)
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ((1.0, 0.0), (1.0, 0.5), (1.0, 2.0))  # of keyword and brevity


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the policy's training"""


def train(name, seed, *flags):
    """Rows of metrics of an RLOO run, all its stages included; a run that is there already is read."""
    metrics = Path("runs") / name / "metrics.jsonl"
    if not metrics.exists() or not Path(f"models/{name}/config.json").exists():
        script = ROOT / "rlhf_details" / "train_rloo.py"
        words = [sys.executable, str(script), "--seed", str(seed), "--run_name", name, "--output_dir", f"models/{name}"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([*words, "--overwrite", *map(str, flags)], check=True, env=env, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def spread(values, digits=2):
    return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main(args: Args):
    names = {"keywords a response": "rewards/keyword", "length, tokens": "length", "KL, nats": "kl"}
    functions = [f"{ROOT}/benchmark/rewards.py:{name}" for name in ("keyword", "brevity")]
    print("| weights of `keyword`, `brevity` | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names))
    for place, weights in enumerate(WEIGHTS):
        flags = ["--reward_model_path", "None", "--reward_fn", *functions, "--reward_fn_weights", *weights]
        runs = [train(f"style{place}_{seed}", seed, *flags) for seed in args.seeds]
        when = [("SFT policy", 0)] * (place == 0) + [(f"{weights[0]:g}, {weights[1]:g}", -1)]
        for label, row in when:
            print(
                f"| {label} | " + " | ".join(spread([r[row][f"eval/objective/{n}"] for r in runs]) for n in names.values()) + " |"
            )
    runs = [train(f"sum_{seed}", seed, "--dataset", "toy-sum") for seed in args.seeds]
    rates = [[row["eval/objective/verifiable_correct_rate"] for row in (run[0], run[-1])] for run in runs]
    seconds = [run[-1]["time/from_scratch"] for run in runs]
    print("\n| toy-sum, held-out sums | SFT policy | after RLOO | seconds |\n|---|---:|---:|---:|")
    print(f"| right answers | {spread([r[0] for r in rates])} | {spread([r[1] for r in rates])} | {spread(seconds, 0)} |")


if __name__ == "__main__":
    main(tyro.cli(Args))
