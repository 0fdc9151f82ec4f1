"""
What rewards that are functions do on the embedded tasks, over seeds: the README's two tables, in
results/reward_functions.md.

1. Style: the toy policy, no reward model, benchmark/recipes/rewards.py's `keyword` and `brevity` under several weights.
2. toy-sum: a verifiable reward, by RLOO and by PPO.

    python benchmark/studies/reward_functions.py --seeds 1 2 3    (some 40 minutes on one core; what is done is read)
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT

from benchmark import made_with

FOLDER = ROOT / "runs" / "reward_functions"  # of runs and models
WEIGHTS = ((1.0, 0.0), (1.0, 0.5), (1.0, 2.0))  # of keyword and brevity


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the policy's training"""
    output: str = "benchmark/results/reward_functions.md"
    """the tables"""


def train(script, name, seed, *flags):
    """Rows of metrics of a run, all its stages included; a run that is there already is read."""
    metrics = FOLDER / "runs" / name / "metrics.jsonl"
    if not metrics.exists() or not (FOLDER / "models" / name / "config.json").exists():
        words = [sys.executable, ROOT / "rlhf_details" / f"{script}.py", "--seed", seed, "--run_name", name]
        words += ["--output_dir", f"models/{name}", "--overwrite", *flags]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run([*map(str, words)], check=True, env=env, cwd=FOLDER, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def spread(values, digits=2):
    """Mean (lowest .. highest)."""
    return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def style(seeds):
    """Lines of the first table."""
    names = {"keywords a response": "rewards/keyword", "length, tokens": "length", "KL, nats": "kl"}
    functions = [f"{ROOT}/benchmark/recipes/rewards.py:{name}" for name in ("keyword", "brevity")]
    lines = ["| weights of `keyword`, `brevity` | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for place, weights in enumerate(WEIGHTS):
        flags = ["--reward_model_path", "None", "--reward_fn", *functions, "--reward_fn_weights", *weights]
        runs = [train("train_rloo", f"style{place}_{seed}", seed, *flags) for seed in seeds]
        when = [("SFT policy", 0)] * (place == 0) + [(f"{weights[0]:g}, {weights[1]:g}", -1)]
        for label, row in when:
            cells = [spread([run[row][f"eval/objective/{name}"] for run in runs]) for name in names.values()]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def sums(seeds):
    """Lines of the second table."""
    lines = [
        "| toy-sum, held-out sums | SFT policy | after | KL, nats | updates | seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for script, label in (("train_rloo", "RLOO"), ("train_ppo", "PPO")):
        runs = [train(script, f"sum_{label.lower()}_{seed}", seed, "--dataset", "toy-sum") for seed in seeds]
        rates = [spread([run[row]["eval/objective/verifiable_correct_rate"] for run in runs]) for row in (0, -1)]
        last = [run[-1] for run in runs]
        cells = [*rates, spread([x["eval/objective/kl"] for x in last]), str(last[0]["update"])]
        lines.append(f"| {label} | {' | '.join([*cells, spread([x['time/from_scratch'] for x in last], 0)])} |")
    return lines


def main(args: Args):
    seeds = " ".join(map(str, args.seeds))
    head = f"""# Rewards that are functions

Written by `python benchmark/studies/reward_functions.py --seeds {seeds}`. One SFT policy a task; mean (lowest ..
highest) over the seeds of the policy's training, held-out prompts, one thread a run.
{made_with()}
"""
    lines = [head, *style(args.seeds), "", *sums(args.seeds)]
    path = ROOT / args.output
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main(tyro.cli(Args))
