"""
The embedded task over seeds: every stage anew for each seed, RLOO and PPO, and what came of it.

    python benchmark/studies/toy.py run --seeds 1 2 3 4 5 --runs rloo rloo_nokl ppo ppo_lmhp
    python benchmark/studies/toy.py draw       (static/toy.svg: learned score and gold, every seed a thin line)

`run` makes the table in some two hours of one core. It trains SFT, reward model, RLOO (the defaults), RLOO with
--kl_coef 0 for three times as many updates, PPO (the defaults, which are the N+ recipe), PPO in the recipe of lm-human-
preferences, and PPO with --overlap, each in a process of its own, and skips what is already there. It writes OUTPUT.csv
(one row a seed and run), OUTPUT_curves.csv (learned score, gold and KL of every update) and OUTPUT.md, the table.
"""

import csv
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from plot import blank, save

from benchmark import ROOT, made_with, run_command
from rlhf_details import train_rloo

SCRIPTS = Path(train_rloo.__file__).parent
RUNS = {  # name of the run: script, its arguments
    "rloo": ("train_rloo", ()),
    "rloo_nokl": (
        "train_rloo",
        ("--kl_coef", 0, "--total_episodes", 3 * train_rloo.presets["toy"]["total_episodes"]),
    ),
    "ppo": ("train_ppo", ()),
    "ppo_async": ("train_ppo", ("--overlap",)),
    "ppo_lmhp": ("train_ppo", ("--config", ROOT / "benchmark/recipes/ppo_toy_lm_human_preferences.toml")),
}
LABELS = {
    "rloo": "RLOO",
    "rloo_nokl": "RLOO without the KL penalty",
    "ppo": "PPO (N+)",
    "ppo_async": "PPO (N+), asynchronous",
    "ppo_lmhp": "PPO (lm-human-preferences)",
}
FIGURES = {  # row of the table: column of the CSV
    "gold of the SFT policy": "gold_before",
    "its standard deviation": "gold_sd",
    "gold at the end": "gold_after",
    "rise in SFT standard deviations": "rise_in_sd",
    "fall from the peak, in SFT standard deviations": "fall_from_peak_in_sd",
    "learned score at the end minus at gold's peak": "score_since_peak",
    "KL, nats a response": "kl_after",
    "share of responses that parse": "parses_after",
    "the SFT policy's": "parses_before",
}


@dataclass
class RunArgs:
    """Trains what is missing, and writes the table."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds; each has its own SFT model, comparisons, reward model and policies"""
    output: str = "benchmark/results/toy"
    """where the files go, without their endings"""
    models: str = "models/toy_seeds"
    """folder of the trained models"""
    runs: tuple[str, ...] = tuple(RUNS)
    """which policies to train"""


def train(script, run_name, *flags):
    """Runs a script unless this very run is complete; returns (rows of metrics, seconds of the process)."""
    done, flags = Path("runs") / run_name / "done.json", [script, *map(str, flags)]
    if not done.exists() or json.loads(done.read_text())["flags"] != flags:
        start = time.time()
        command = [sys.executable, str(SCRIPTS / script), "--run_name", run_name, "--overwrite", *flags[1:]]
        print(" ".join(command[1:]), flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        done.write_text(json.dumps({"flags": flags, "seconds": time.time() - start}))
    rows = [json.loads(line) for line in (done.parent / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads(done.read_text())["seconds"]


def one_seed(seed, models, names):
    """All stages of one seed: rows for the two tables."""
    paths = {stage: f"{models}/{seed}/{stage}" for stage in ("sft", "reward", *RUNS)}
    sft, sft_seconds = train("train_sft.py", f"toy_sft_{seed}", "--seed", seed, "--output_dir", paths["sft"])
    shared = "--seed", seed, "--sft_model_path", paths["sft"]
    reward, reward_seconds = train("train_reward.py", f"toy_reward_{seed}", *shared, "--output_dir", paths["reward"])
    shared += "--reward_model_path", paths["reward"]
    table, curves = [], []
    for name in names:
        script, flags = RUNS[name]
        rows, seconds = train(f"{script}.py", f"toy_{name}_{seed}", *flags, *shared, "--output_dir", paths[name])
        before, after = rows[0], rows[-1]
        window, scores = (  # smoothed
            [statistics.mean(r[f"objective/{name}"] for r in rows[i : i + 10]) for i in range(1, len(rows) - 9)]
            for name in ("gold", "scores")
        )
        peak, sd = max(range(len(window)), key=window.__getitem__), before["eval/objective/gold_std"]
        row = {"run": name, "seed": seed}
        row |= {"sft_perplexity": sft[-1]["eval/sft/perplexity"], "reward_accuracy": reward[-1]["eval/rm/accuracy"]}
        for metric in ("gold", "scores", "kl", "parses", "length"):
            row[f"{metric}_before"] = before[f"eval/objective/{metric}"]
            row[f"{metric}_after"] = after[f"eval/objective/{metric}"]
        row |= {"gold_sd": sd, "rise_in_sd": (row["gold_after"] - row["gold_before"]) / sd}
        row |= {"peak_update": peak + 10, "fall_from_peak_in_sd": (window[peak] - window[-1]) / sd}
        row |= {"score_since_peak": scores[-1] - scores[peak]}
        row |= {"sft_seconds": sft_seconds, "reward_seconds": reward_seconds, "seconds": seconds}
        table.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        for r in rows[1:]:
            point = {k: round(r[f"objective/{k}"], 4) for k in ("scores", "gold", "kl")}
            curves.append({"run": name, "seed": seed, "update": r["update"]} | point)
    return table, curves


def write(path, rows):
    """Writes dicts of equal keys as CSV."""
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def markdown(table, curves, names):
    """Lines of the table: mean (lowest .. highest) over seeds."""

    def cell(name, key):
        values = [row[key] for row in table if row["run"] == name]
        digits = 0 if max(map(abs, values)) >= 100 else 2
        return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"

    updates = {name: max(point["update"] for point in curves if point["run"] == name) for name in names}
    lines = ["| | " + " | ".join(f"{LABELS[name]}, {updates[name]} updates" for name in names) + " |"]
    lines.append("|---|" + "---:|" * len(names))
    for label, key in FIGURES.items():
        lines.append(f"| {label} | " + " | ".join(cell(name, key) for name in names) + " |")
    return lines


def run(args: RunArgs):
    table, curves = [], []
    for seed in args.seeds:
        rows, points = one_seed(seed, args.models, args.runs)
        table, curves = table + rows, curves + points
        write(f"{args.output}.csv", table)
        write(f"{args.output}_curves.csv", curves)
    head = f"""# The embedded task over seeds

Written by `python benchmark/studies/toy.py run --seeds {" ".join(map(str, args.seeds))} --runs {" ".join(args.runs)}`:
mean (lowest .. highest), every stage anew for each seed. 512 held-out prompts. Falls, and scores since the peak, are of
training batches, over ten updates.
{made_with()}
"""
    path = Path(f"{args.output}.md")
    path.write_text("\n".join([head, *markdown(table, curves, args.runs)]) + "\n")
    print(path.read_text())


@dataclass
class DrawArgs:
    """Draws the figure from the curves."""

    curves: str = "benchmark/results/toy_curves.csv"
    """what `run` wrote"""
    output: str = "static/toy.svg"
    """the figure"""


def draw(args: DrawArgs):
    found = {}  # {(run, column): {seed: values}}
    with open(args.curves, newline="") as file:
        for row in csv.DictReader(file):
            for column in ("scores", "gold", "kl"):
                found.setdefault((row["run"], column), {}).setdefault(row["seed"], []).append(float(row[column]))
    figure, axes = blank(1, 2, figsize=(9, 3.2))
    titles = {"rloo": "with the KL penalty (0.1)", "rloo_nokl": "without"}
    names = (
        ("gold", "#b8860b", "gold: what the human wants"),
        ("scores", "#3465a4", "score: what the reward model says"),
    )
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for column, colour, label in names:
            lines = [np.convolve(line, np.ones(10) / 10, mode="valid") for line in found[name, column].values()]
            for line in lines:
                axis.plot(line, color=colour, linewidth=0.6, alpha=0.5)
            axis.plot(np.mean(lines, 0), color=colour, linewidth=2, label=label)
        kl = np.mean([np.mean(line[-10:]) for line in found[name, "kl"].values()])
        axis.set(title=f"{title}: {kl:.0f} nats at the end", xlabel="update")
        axis.grid(alpha=0.2)
    axes[0].set_ylabel("points")
    axes[0].legend(frameon=False, loc="lower right", fontsize=8)
    figure.suptitle(f"RLOO on the embedded task, {len(found['rloo', 'gold'])} seeds", fontsize=10)
    figure.tight_layout()
    save(figure, args.output, "toy")


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
