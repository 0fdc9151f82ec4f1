"""
Has a rewrite changed a number? This tool runs an old commit and the working tree, and compares what they write.

    python benchmark/checks/frozen.py --against COMMIT --work /tmp/frozen     all of them; exit code 1 where one differs
    python benchmark/checks/frozen.py --against COMMIT --runs rloo ppo --processes 1

Both sides run on this machine, one thread a process, from the same seeds, each run in a folder of its own. RUNS has
their names. The tool checks the old commit out into a temporary `git worktree` and removes it at the end. It keeps the
old side's results in the --work folder, so that a second comparison runs the new side alone. The old side also trains
the stages (SFT policies, a reward model) once, and both sides start from them. So each run is compared for itself. The
tool knows the scripts by their command line and their files alone, and imports none of them.

It compares:

1. The metrics of the first 20 updates: 1e-3 relative, plus what ABSOLUTE allows for a metric. Counts of tokens (EXACT)
   are equal at update 1: another sample would be another length or score. Times are left out. A metric that only the
   old side has is a difference.
2. The held-out figures of the last row: 2e-2 relative.
3. The saved models: the norm of the difference of all weights, 1e-3 of the norm of the weights, and the reward model's
   bias, which is in no metric.

Runs in bf16 are allowed more: see BF16_TOLERANCE. Rounding may, rarely, turn a sampled token, and from that update on a
run is another one. The verdict names the first numbers that differ: a difference that begins late, in one run alone,
may be such a turn. Samples are not compared, nor is what the scripts print.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("val/num_eos_tokens", "val/num_stop_token_ids", "val/sequence_lengths")  # at the first update
TOLERANCE, EVAL_TOLERANCE, COMPARED_UPDATES = 1e-3, 2e-2, 20
# What other micro-batch sizes, which change rounding alone, moved by more than 1e-3 relative at b9b2685, in runs where
# no sampled token turned, and what is allowed:
ABSOLUTE = {
    "objective/kl": 2e-6,  # 3e-7, at update 1, where it is rounding alone
    "eval/objective/kl": 2e-6,  # 5e-8, at update 0
    "objective/non_score_reward": 2e-6,  # 3e-8, at update 1
    "val/logprob_gap": 3e-5,  # 5e-6, rounding alone at all updates
    "policy/approxkl_avg": 2e-6,  # 6e-7
    "val/ratio_var": 2e-6,  # 4e-7
    "loss/policy_avg": 1e-6,  # zero by construction in RLOO with one step, and none seen; bf16: 3e-8
    "policy/clipfrac_avg": 2e-4,  # an action more or less of some 6,000: 1e-4
    "val/clipfrac_avg": 2e-4,  # likewise
}
# Under bf16 rounding turns sampled tokens from update 2 on: so update 1 and the end are compared, with more allowed.
BF16_TOLERANCE, BF16_ABSOLUTE = 5e-2, 1000  # relative; times ABSOLUTE


@dataclass
class Run:
    """One run of a script; the flags for seed, length and names come on top. {recipes} is the side's own folder."""

    script: str
    flags: str = ""
    batch_size: int = 64
    processes: tuple = (1,)
    bf16: bool = False


CLASSIC = "--score_scaling --score_norm --score_clip 2 --kl_penalty abs"
LIMITS = "--num_mini_batches 2 --target_kl 0.001 --ratio_threshold 1.0005"  # low, so that both act
SUM = "--dataset toy-sum --reward_fn rlhf_details.toy:right_sum"
STYLE = "--reward_fn {recipes}/rewards.py:keyword {recipes}/rewards.py:brevity --reward_fn_weights 1 0.5"
RUNS = {
    "sft": Run("train_sft", "--num_train_epochs 1", 32),
    "reward": Run("train_reward", "", 16),
    "rloo": Run("train_rloo", "", 256, processes=(1, 2)),
    "rloo_2x2": Run("train_rloo", "--num_ppo_epochs 2 --num_mini_batches 2"),
    "rloo_token": Run("train_rloo", "--token_level_kl"),
    "rloo_sum": Run("train_rloo", SUM),
    "rloo_style": Run("train_rloo", f"--reward_model_path None {STYLE}"),
    "rloo_lora": Run("train_rloo", "--lora_rank 4"),
    "rloo_bf16": Run("train_rloo", "", bf16=True),
    "rloo_overlap": Run("train_rloo", "--learning_rate 1e-4 --overlap"),
    "grpo": Run("train_grpo", "--learning_rate 1e-4"),
    "ppo": Run("train_ppo", "", 256, processes=(1, 2)),
    "ppo_lmhp": Run("train_ppo", "--config {recipes}/ppo_toy_lm_human_preferences.toml"),
    "ppo_full": Run("train_ppo", "--kl_penalty full --learning_rate 1e-4"),
    "ppo_classic": Run("train_ppo", f"{CLASSIC} {LIMITS}"),
    "ppo_lora": Run("train_ppo", "--lora_rank 4"),
    "ppo_bf16": Run("train_ppo", "", bf16=True),
    "ppo_overlap": Run("train_ppo", "--learning_rate 1e-4 --overlap"),
}
STAGES = ("train_sft", ""), ("train_reward", ""), ("train_sft", "--dataset toy-sum --num_train_epochs 2")


@dataclass
class Args:
    against: str = "HEAD"
    """the old commit"""
    runs: tuple[str, ...] = tuple(RUNS)
    """names of runs"""
    processes: tuple[int, ...] = (1, 2)
    """compare the runs on so many processes; most runs have one only"""
    updates: int = 20
    """updates of a run; the metrics of the first 20 are compared"""
    workers: int = 2
    """runs at a time"""
    work: str = "runs/frozen"
    """folder of all results; the old side's stay there for the next time"""


# ---- running ---------------------------------------------------------------------------------------------------------
def environment(tree, bf16=False):
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own | {"HF_HUB_OFFLINE": "1", "ACCELERATE_MIXED_PRECISION": "bf16" if bf16 else "no"}


def command_of(run, tree, processes, updates):
    """The words after the interpreter's name."""
    length = {"train_sft": "--take", "train_reward": "--num_comparisons"}.get(run.script, "--total_episodes")
    flags = run.flags.replace("{recipes}", str(tree / "benchmark" / "recipes")).split()
    flags += ["--seed", 1, "--run_name", "run", "--output_dir", "model", "--batch_size", run.batch_size]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    words = *launcher, tree / "rlhf_details" / f"{run.script}.py", *flags, length, updates * run.batch_size
    return [str(word) for word in words]


def call(command, folder, env):
    """Runs a command in a folder and returns its exit code."""
    with open(folder / "log.txt", "a") as log:
        return subprocess.run([sys.executable, *command], cwd=folder, env=env, stdout=log, stderr=log).returncode


def result_of(name, tree, place, stages, processes, updates):
    """Runs it, unless the result is in `place`; returns {"folder", "command", "seconds", "failed"}."""
    run, folder = RUNS[name], place / f"{name}.{processes}"
    command, done = command_of(run, tree, processes, updates), folder / "done.json"
    shown = " ".join(command).replace(str(tree), "TREE")
    if done.exists():
        result = json.loads(done.read_text())
        if result["command"] == shown and not result["failed"]:
            return result
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "models").symlink_to(stages / "models")
    start = time.time()
    failed = call(command, folder, environment(tree, run.bf16)) != 0
    result = {"folder": str(folder), "command": shown, "seconds": time.time() - start, "failed": failed}
    done.write_text(json.dumps(result))
    return result


def train_stages(tree, folder):
    """SFT policies and a reward model by the old side."""
    folder.mkdir(parents=True, exist_ok=True)
    for script, flags in STAGES:
        done = folder / f"{script}{flags}".replace(" ", "")
        if not done.exists():
            print(f"stage: {script} {flags}", flush=True)
            command = [str(tree / "rlhf_details" / f"{script}.py"), *flags.split(), "--overwrite"]
            if call(command, folder, environment(tree)):
                sys.exit(f"the stage {script} {flags} failed: {folder / 'log.txt'}")
            done.touch()


# ---- comparing -------------------------------------------------------------------------------------------------------
def metrics_of(folder):
    rows = [json.loads(line) for line in Path(folder, "runs/run/metrics.jsonl").read_text().splitlines()]
    return {row["update"]: {k: v for k, v in row.items() if k != "eps" and not k.startswith("time/")} for row in rows}


def compare_metrics(old, new, bf16):
    """(what is wrong, (largest relative difference, its metric))."""
    old, new = metrics_of(old), metrics_of(new)
    wrong, largest = [], (0.0, "-")
    if list(old) != list(new):
        wrong.append(f"rows of updates {list(old)[:1]}..{list(old)[-1:]} -> {list(new)[:1]}..{list(new)[-1:]}")
    relative, factor, updates = (BF16_TOLERANCE, BF16_ABSOLUTE, 1) if bf16 else (TOLERANCE, 1, COMPARED_UPDATES)
    for update in sorted(old.keys() & new.keys()):
        for metric, x in old[update].items():
            if metric not in new[update]:
                wrong.append(f"lacks {metric} at {update}")
                continue
            y, absolute = new[update][metric], factor * ABSOLUTE.get(metric, 0.0)
            is_end = metric.startswith("eval/") and update == max(old)
            is_exact = metric in EXACT and update == 1 and not bf16
            allowed = 0.0 if is_exact else max(EVAL_TOLERANCE, relative) if is_end else relative
            if x == y or (math.isnan(x) and math.isnan(y)) or (update > updates and not is_end):
                continue
            gap = abs(x - y) / max(abs(x), abs(y))
            largest = max(largest, (gap, metric)) if not absolute else largest
            if not abs(x - y) <= allowed * max(abs(x), abs(y)) + absolute:
                wrong.append(f"{metric} at {update} {x:.6g} -> {y:.6g}")
    return wrong, largest


def compare_models(old, new, relative):
    """What is wrong with the saved models."""
    wrong, (old, new) = [], (Path(folder, "model") for folder in (old, new))
    for path in sorted(old.glob("**/*.safetensors")):
        name = path.relative_to(old)
        if not (new / name).exists():
            wrong.append(f"lacks {name}")
            continue
        a, b = load_file(path), load_file(new / name)
        if {key: x.shape for key, x in a.items()} != {key: x.shape for key, x in b.items()}:
            wrong.append(f"names or shapes in {name}")
            continue
        size = math.sqrt(sum(a[key].double().square().sum() for key in a))
        apart = math.sqrt(sum((a[key].double() - b[key].double()).square().sum() for key in a))
        wrong += [f"weights in {name}, {apart / size:.1e}"] if not apart <= relative * size else []
    a, b = (json.loads((folder / "config.json").read_text()).get("reward_bias", 0.0) for folder in (old, new))
    return wrong + [f"reward_bias {a:.6g} -> {b:.6g}"] * (not math.isclose(a, b, rel_tol=relative))


def compare(name, processes, old, new):
    """(whether they agree, a line) of the results of both sides."""
    times = f"{old['seconds']:.0f} / {new['seconds']:.0f} s"
    if new["failed"]:
        log = Path(new["folder"], "log.txt").read_text().strip().splitlines()
        return False, f"{name} | {processes} | DOES NOT RUN: {log[-1] if log else 'no output'} | {times}"
    bf16 = RUNS[name].bf16
    wrong, (gap, metric) = compare_metrics(old["folder"], new["folder"], bf16)
    wrong += compare_models(old["folder"], new["folder"], BF16_TOLERANCE if bf16 else TOLERANCE)
    more = [f"{len(wrong)} in all"] if len(wrong) > 4 else []
    said = "DIFFERS: " + "; ".join([*wrong[:4], *more]) if wrong else "agrees"
    return not wrong, f"{name} | {processes} | {said} | {gap:.1e} {metric} | {times}"


def git(*words):
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(args):
    """Runs both sides, and prints a line a run; returns 1 where one differs."""
    commit, work = git("rev-parse", "--short", f"{args.against}^{{commit}}"), Path(args.work).resolve()
    tree, stages = work / f"tree-{commit}-{os.getpid()}", work / commit / "stages"
    sides = (tree, work / commit), (ROOT, work / "new")  # the trees, and the folders of their results
    shutil.rmtree(work / "new", ignore_errors=True)
    jobs = [(name, p) for name in args.runs for p in RUNS[name].processes if p in args.processes]
    agree = []
    print("run | processes | verdict | largest relative difference | seconds old / new")
    git("worktree", "add", "--detach", str(tree), commit)
    try:
        train_stages(tree, stages)
        with ThreadPoolExecutor(args.workers) as pool:
            made = {
                (name, p): [pool.submit(result_of, name, *side, stages, p, args.updates) for side in sides]
                for name, p in jobs
            }
            for job, futures in made.items():
                old, new = (future.result() for future in futures)
                if old["failed"]:
                    sys.exit(f"the old side fails: {old['folder']}/log.txt")
                agrees, line = compare(*job, old, new)
                agree.append(agrees)
                print(line, flush=True)
    finally:
        git("worktree", "remove", "--force", str(tree))
    print(f"\n{ROOT} against {commit}: {len(agree)} runs of {args.updates} updates, {agree.count(False)} differ")
    return int(not all(agree))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
