"""
Has a rewrite changed a number? This tool runs an old commit and the working tree, and compares what they write.

    python benchmark/checks/frozen.py --list                                  which runs there are
    python benchmark/checks/frozen.py --against COMMIT --work /tmp/frozen     all of them; exit code 1 where one differs
    python benchmark/checks/frozen.py --against COMMIT --runs rloo ppo --processes 1

Both sides run on this machine, one thread a process, from the same seeds, each run in a folder of its own. The tool
checks the old commit out into a temporary `git worktree` and removes it at the end. It keeps the old side's results in
the --work folder, so that a second comparison runs the new side alone. The old side also trains the stages (SFT
policies, a reward model) once, and both sides start from them. So each run is compared for itself. The tool knows the
scripts by their command line and their files alone, and imports none of them.

It compares:

1. The samples of the first update. A reward function of weight 0 writes down the prompts and completions that it is
   given, each with the last update that metrics.jsonl holds at that moment. Before update 0 is logged, these are the
   held-out samples: they are equal as a set, since slices may overlap. Between update 0 and update 1 they are the batch
   of the first update: equal as a multiset, in any order. Sample tables may fall into the same time; the tool leaves
   their rows out, since it knows their prompts from the held-out samples.
2. The metrics of the first 20 updates: 1e-3 relative, plus what ABSOLUTE allows for a metric. Counts of tokens (EXACT)
   are equal at update 1. Times are left out. A metric that only the new side has is named; one that only the old side
   has is a difference.
3. The held-out figures of the last row: within the range of three seeds of the old side (rloo and ppo on one process),
   or 2e-2 relative (all runs).
4. The saved models: the norm of the difference of all weights, 1e-3 of the norm of the weights, and the reward model's
   bias, which is in no metric.
5. The run `resume`, which a SIGTERM stops, also with the run `rloo` of its own side, which nobody stopped.

Runs in bf16 are allowed more: see BF16_TOLERANCE. Rounding may, rarely, turn a sampled token, and from that update on a
run is another one. The verdict names the first numbers that differ: a difference that begins late, in one run alone,
may be such a turn. Sample tables are not compared, nor is what the scripts print.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

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
BF16_TOLERANCE, BF16_ABSOLUTE, BF16_TURNED = 5e-2, 1000, 0.02  # relative; times ABSOLUTE; share of samples
RECORDER = """import json, os
from pathlib import Path

def record(prompts, completions):
    rows = Path("runs/run/metrics.jsonl").read_text().splitlines()
    update = json.loads(rows[-1])["update"] if rows else -1
    with open(f"record.{os.environ.get('RANK', 0)}.jsonl", "a") as file:
        for pair in zip(prompts, completions):
            file.write(json.dumps([update, *pair]) + "\\n")
    return [0.0] * len(completions)
"""


@dataclass
class Run:
    """One run of a script; the flags for seed, length, names and the recorder come on top."""

    script: str
    flags: str = ""
    batch_size: int = 64
    rewards: tuple = ()  # reward functions and their weights, beside the recorder; recipes/ is in the side's own tree
    processes: tuple = (1,)
    seeds: tuple = (1,)  # of the old side, for the range of the held-out figures
    bf16: bool = False
    stopped: bool = False  # by SIGTERM, and then resumed


CLASSIC = "--score_scaling --score_norm --score_clip 2 --kl_penalty abs"
LIMITS = "--num_mini_batches 2 --target_kl 0.001 --ratio_threshold 1.0005"  # low, so that both act
LM_HUMAN_PREFERENCES = "--config recipes/ppo_toy_lm_human_preferences.toml"
SUM = (("rlhf_details.toy:right_sum", 1),)
STYLE = (("recipes/rewards.py:keyword", 1), ("recipes/rewards.py:brevity", 0.5))
RUNS = {
    "sft": Run("train_sft", "--num_train_epochs 1", 32),
    "reward": Run("train_reward", "", 16),
    "rloo": Run("train_rloo", "", 256, processes=(1, 2), seeds=(1, 2, 3)),
    "rloo_2x2": Run("train_rloo", "--num_ppo_epochs 2 --num_mini_batches 2"),
    "rloo_token": Run("train_rloo", "--token_level_kl"),
    "rloo_sum": Run("train_rloo", "--dataset toy-sum", rewards=SUM),
    "rloo_style": Run("train_rloo", "--reward_model_path None", rewards=STYLE),
    "rloo_own_tokenizer": Run("train_rloo", "--reward_model_path models/own/reward"),
    "rloo_lora": Run("train_rloo", "--lora_rank 4"),
    "rloo_bf16": Run("train_rloo", "", bf16=True),
    "resume": Run("train_rloo", "--checkpoint_every 5", 256, stopped=True),
    "ppo": Run("train_ppo", "", 256, processes=(1, 2), seeds=(1, 2, 3)),
    "ppo_lmhp": Run("train_ppo", LM_HUMAN_PREFERENCES),
    "ppo_full": Run("train_ppo", "--kl_penalty full --learning_rate 1e-4"),
    "ppo_classic": Run("train_ppo", f"{CLASSIC} {LIMITS}"),
    "ppo_overlap": Run("train_ppo", "--learning_rate 1e-4 --overlap"),
    "grpo": Run("train_grpo", "--learning_rate 1e-4"),
    "rloo_overlap": Run("train_rloo", "--learning_rate 1e-4 --overlap"),
    "ppo_own_tokenizer": Run("train_ppo", "--reward_model_path models/own/reward"),
    "ppo_lora": Run("train_ppo", "--lora_rank 4"),
    "ppo_bf16": Run("train_ppo", "", bf16=True),
}


STAGES = ("train_sft", ""), ("train_reward", ""), ("train_sft", "--dataset toy-sum --num_train_epochs 2")


@dataclass
class Args:
    against: str = "HEAD"
    """the old commit"""
    tree: str = str(ROOT)
    """the working tree, by default the one that this file lies in"""
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
    report: str | None = None
    """markdown file for the table"""
    list: bool = False
    """print the runs and stop"""


@dataclass
class Side:
    """A tree, the folder of its results, and the stages that it starts from."""

    tree: Path
    folder: Path
    stages: Path
    keeps: bool = False  # results of an earlier call count


# ---- running ---------------------------------------------------------------------------------------------------------
def environment(tree, bf16=False):
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | own | {"HF_HUB_OFFLINE": "1", "ACCELERATE_MIXED_PRECISION": "bf16" if bf16 else "no"}


def found(word, tree):
    """A word in which recipes/NAME has become the path of that file in a tree; older commits had it elsewhere."""
    if not word.startswith("recipes/"):
        return word
    name, colon, function = word.removeprefix("recipes/").partition(":")
    return f"{next((tree / 'benchmark').rglob(name))}{colon}{function}"


def command_of(run, side, processes, seed, updates):
    """The words after the interpreter's name."""
    script = side.tree / "rlhf_details" / f"{run.script}.py"
    flags = [found(word, side.tree) for word in run.flags.split()]
    flags += ["--seed", seed, "--run_name", "run", "--output_dir", "model", "--batch_size", run.batch_size]
    if run.script == "train_sft":
        flags += ["--take", updates * run.batch_size]
    elif run.script == "train_reward":
        flags += ["--num_comparisons", updates * run.batch_size]
    else:
        rewards = [(found(name, side.tree), weight) for name, weight in run.rewards] + [("record.py:record", 0)]
        flags += ["--total_episodes", updates * run.batch_size, "--reward_fn", *(name for name, _ in rewards)]
        flags += ["--reward_fn_weights", *(weight for _, weight in rewards)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return [str(word) for word in (*launcher, script, *flags)]


def call(command, folder, env, stop_after=None):
    """Runs a command in a folder and returns its exit code; with stop_after, stops it once so many rows are logged."""
    with open(folder / "log.txt", "a") as log:
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=env, stdout=log, stderr=log)
        metrics = folder / "runs/run/metrics.jsonl"
        while stop_after and process.poll() is None:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= stop_after:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.02)  # another process writes this file, and tells nobody
        return process.wait()


def result_of(name, side, processes, seed, updates):
    """Runs it, unless this side keeps the result; returns {"folder", "command", "seconds", "failed"}."""
    run, folder = RUNS[name], side.folder / f"{name}.{processes}.{seed}"
    command, done = command_of(run, side, processes, seed, updates), folder / "done.json"
    shown = " ".join(command).replace(str(side.tree), "TREE")
    if side.keeps and done.exists():
        result = json.loads(done.read_text())
        if result["command"] == shown and not result["failed"]:
            return result
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "models").symlink_to(side.stages / "models")
    (folder / "record.py").write_text(RECORDER)
    env, start = environment(side.tree, run.bf16), time.time()
    failed = False
    if run.stopped:
        call(command, folder, env, stop_after=max(2, updates // 3))
        failed = max(metrics_of(folder)) >= updates  # it was not stopped in time
        command = [*command, "--resume"]
    failed |= call(command, folder, env) != 0
    shutil.rmtree(folder / "runs/run/checkpoints", ignore_errors=True)
    result = {"folder": str(folder), "command": shown, "seconds": time.time() - start, "failed": failed}
    done.write_text(json.dumps(result))
    return result


def train_stages(tree, folder):
    """SFT policies and a reward model by the old side, and the same reward model over other token ids."""
    folder.mkdir(parents=True, exist_ok=True)
    for script, flags in STAGES:
        done = folder / f"{script}{flags}".replace(" ", "")
        if not done.exists():
            print(f"stage: {script} {flags}", flush=True)
            command = [str(tree / "rlhf_details" / f"{script}.py"), *flags.split(), "--overwrite"]
            if call(command, folder, environment(tree)):
                sys.exit(f"the stage {script} {flags} failed: {folder / 'log.txt'}")
            done.touch()
    own = folder / "models/own/reward"
    if not (own / "tokenizer.json").exists():
        model = AutoModelForSequenceClassification.from_pretrained(folder / "models/toy/reward")
        spec = json.loads((folder / "models/toy/reward/tokenizer.json").read_text())
        order = torch.randperm(len(spec["model"]["vocab"]), generator=torch.Generator().manual_seed(0))
        weight = model.get_input_embeddings().weight
        with torch.no_grad():
            weight[order] = weight.clone()[: len(order)]
        spec["model"]["vocab"] = {word: int(order[i]) for word, i in spec["model"]["vocab"].items()}
        ends = [token for token in spec["added_tokens"] if token["content"] == "<eos>"]
        spec["added_tokens"] = [token | {"id": int(order[token["id"]])} for token in ends]
        (folder / "own.json").write_text(json.dumps(spec))
        model.save_pretrained(own)
        PreTrainedTokenizerFast(tokenizer_file=str(folder / "own.json"), eos_token="<eos>").save_pretrained(own)


# ---- comparing -------------------------------------------------------------------------------------------------------
@dataclass
class Verdict:
    """What one comparison found: the largest relative difference, what is wrong, what to know besides, the times."""

    name: str
    processes: int
    seconds: str
    largest: float = 0.0
    metric: str = "-"
    wrong: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    def row(self):
        more = [f"{len(self.wrong)} in all"] if len(self.wrong) > 4 else []
        words = "DIFFERS: " + "; ".join([*self.wrong[:4], *more]) if self.wrong else "agrees"
        notes = "; ".join(dict.fromkeys(self.notes))
        return [self.name, str(self.processes), words, f"{self.largest:.1e}", self.metric, self.seconds, notes]

    def number(self, metric, a, b, relative, absolute=0.0, where=""):
        """Compares two numbers, and keeps what is found."""
        difference = 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)
        of_larger = difference / max(abs(a), abs(b)) if difference else 0.0
        if absolute == 0 and of_larger > self.largest:
            self.largest, self.metric = of_larger, metric
        if not difference <= relative * max(abs(a), abs(b)) + absolute:
            self.wrong.append(f"{metric}{where} {a:.6g} -> {b:.6g}")


def metrics_of(folder):
    rows = [json.loads(line) for line in Path(folder, "runs/run/metrics.jsonl").read_text().splitlines()]
    return {row["update"]: {k: v for k, v in row.items() if k != "eps" and not k.startswith("time/")} for row in rows}


def samples_of(folder):
    """Pairs of prompt and completion: (the held-out ones before update 1 as a set, those of update 1 as a multiset)."""
    lines = [json.loads(x) for path in Path(folder).glob("record.*.jsonl") for x in path.read_text().splitlines()]
    held_out = {(prompt, completion) for update, prompt, completion in lines if update == -1}
    prompts = {prompt for prompt, _ in held_out}
    return held_out, Counter((p, completion) for update, p, completion in lines if update == 0 and p not in prompts)


def compare_metrics(verdict, old, new, bf16, ranges):
    """Compares the rows of metrics; ranges: {held-out metric: its values over seeds}, where there are such."""
    old, new = metrics_of(old), metrics_of(new)
    if list(old) != list(new):
        verdict.wrong.append(f"rows of updates {list(old)[:1]}..{list(old)[-1:]} -> {list(new)[:1]}..{list(new)[-1:]}")
    last, lacking, fresh = max(old), set(), set()
    relative, factor, updates = (BF16_TOLERANCE, BF16_ABSOLUTE, 1) if bf16 else (TOLERANCE, 1, COMPARED_UPDATES)
    for update in sorted(set(old) & set(new)):
        a, b, where = old[update], new[update], f" at {update}"
        lacking |= set(a) - set(b)
        fresh |= set(b) - set(a)
        for metric in [metric for metric in a if metric in b]:
            if metric in EXACT and update == 1 and not bf16:
                verdict.number(metric, a[metric], b[metric], 0.0, where=where)
            elif metric.startswith("eval/") and update == last:
                seeds = ranges.get(metric, [math.inf])
                allowed = 1e9 if min(seeds) <= b[metric] <= max(seeds) else EVAL_TOLERANCE
                verdict.number(metric, a[metric], b[metric], max(allowed, relative), where=" at the end")
            elif update <= updates:
                verdict.number(metric, a[metric], b[metric], relative, factor * ABSOLUTE.get(metric, 0.0), where)
    verdict.wrong += [f"lacks {metric}" for metric in sorted(lacking)]
    verdict.notes += [f"new: {', '.join(sorted(fresh))}"] if fresh else []


def compare_samples(verdict, old, new, batch_size, turned):
    """Compares the recorded texts; turned: the share of them that may be others."""
    (held_out, first), (other_held_out, other_first) = samples_of(old), samples_of(new)
    if len(held_out ^ other_held_out) > 2 * turned * len(held_out):
        verdict.wrong.append(f"{len(held_out - other_held_out)} of {len(held_out)} held-out samples before update 1")
    differing = ((first - other_first) + (other_first - first)).total()
    if differing > 2 * turned * batch_size or first.total() != batch_size:
        verdict.wrong.append(f"{(first - other_first).total()} of {first.total()} samples of update 1")


def compare_models(verdict, old, new, relative):
    for path in sorted(Path(old, "model").glob("**/*.safetensors")):
        name = path.relative_to(Path(old, "model"))
        if not Path(new, "model", name).exists():
            verdict.notes.append(f"no {name}")
            continue
        a, b = load_file(path), load_file(Path(new, "model", name))
        if {key: x.shape for key, x in a.items()} != {key: x.shape for key, x in b.items()}:
            verdict.wrong.append(f"names or shapes in {name}")
            continue
        size = math.sqrt(sum(a[key].double().square().sum() for key in a))
        difference = math.sqrt(sum((a[key].double() - b[key].double()).square().sum() for key in a))
        verdict.number(f"saved {name}", size, size + difference, relative)
    biases = [json.loads(Path(x, "model/config.json").read_text()).get("reward_bias", 0.0) for x in (old, new)]
    verdict.number("saved reward_bias", *biases, relative)


def compare(name, processes, old, new, unstopped, ranges):
    """The verdict on a run, from the results of both sides; unstopped: those of the run that `resume` must repeat."""
    verdict = Verdict(name, processes, f"{old['seconds']:.0f} / {new['seconds']:.0f}")
    if new["failed"]:
        log = Path(new["folder"], "log.txt").read_text().strip().splitlines()
        verdict.wrong.append(f"does not run: {log[-1] if log else 'no output'}")
        return verdict
    bf16, folders = RUNS[name].bf16, (old["folder"], new["folder"])
    if RUNS[name].script not in ("train_sft", "train_reward"):
        compare_samples(verdict, *folders, RUNS[name].batch_size, BF16_TURNED if bf16 else 0)
    compare_metrics(verdict, *folders, bf16, ranges)
    compare_models(verdict, *folders, BF16_TOLERANCE if bf16 else TOLERANCE)
    if unstopped:
        before = len(verdict.wrong)
        for resumed, whole in zip((old, new), unstopped, strict=True):
            compare_metrics(verdict, whole["folder"], resumed["folder"], bf16, {})
        verdict.wrong[before:] = [f"stopped and resumed: {text}" for text in verdict.wrong[before:]]
    return verdict


def git(*words):
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run_both(args, commit):
    """Runs both sides, prints a line a run and returns the verdicts."""
    work, here = Path(args.work).resolve(), Path(args.tree).resolve()
    tree, stages = work / f"tree-{commit}-{os.getpid()}", work / commit / "stages"
    old, new = Side(tree, work / commit, stages, keeps=True), Side(here, work / f"new-{here.name}", stages)
    chosen = {*args.runs, *(["rloo"] if "resume" in args.runs else [])}
    jobs = [(name, p) for name, run in RUNS.items() if name in chosen for p in run.processes if p in args.processes]
    verdicts = []
    git("worktree", "add", "--detach", str(tree), commit)
    try:
        train_stages(tree, stages)
        with ThreadPoolExecutor(args.workers) as pool:
            keys = [(name, p, seed) for name, p in jobs for seed in RUNS[name].seeds if p == 1 or seed == 1]
            olds = {key: pool.submit(result_of, key[0], old, *key[1:], args.updates) for key in keys}
            news = {key: pool.submit(result_of, key[0], new, *key[1:], args.updates) for key in keys if key[2] == 1}
            for name, p in jobs:
                results = [olds[name, p, seed].result() for seed in RUNS[name].seeds if (name, p, seed) in olds]
                if any(result["failed"] for result in results):
                    sys.exit(f"the old side fails: {results[0]['folder']}/log.txt")
                rows = [list(metrics_of(r["folder"]).values())[-1] for r in results] if len(results) > 1 else [{}]
                ranges = {metric: [row[metric] for row in rows] for metric in rows[0]}
                unstopped = [x["rloo", 1, 1].result() for x in (olds, news)] if RUNS[name].stopped else None
                verdicts.append(compare(name, p, results[0], news[name, p, 1].result(), unstopped, ranges))
                print(" | ".join(verdicts[-1].row()), flush=True)
    finally:
        git("worktree", "remove", "--force", str(tree))
    return verdicts


HEADER = "run", "processes", "verdict", "largest relative difference", "metric", "seconds old / new", "besides"


def report(args, commit, verdicts):
    """The markdown table, and what is allowed."""
    differing = sum(bool(verdict.wrong) for verdict in verdicts)
    text = f"The working tree against {commit}: {len(verdicts)} runs of {args.updates} updates, {differing} differ.\n\n"
    rows = [HEADER, ["---"] * len(HEADER), *(verdict.row() for verdict in verdicts)]
    text += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    allowed = ", ".join(f"`{metric}` {value:g}" for metric, value in ABSOLUTE.items())
    text += f"\nAllowed: {TOLERANCE:g} relative (bf16: {BF16_TOLERANCE:g}), and on top, absolute: {allowed}"
    text += f" (bf16: {BF16_ABSOLUTE} times as much).\n"
    return text


def main(args):
    if args.list:
        print("\n".join(f"{name:20} {run.processes} {run.script} {run.flags}" for name, run in RUNS.items()))
        return 0
    commit = git("rev-parse", "--short", f"{args.against}^{{commit}}")
    verdicts = run_both(args, commit)
    text = report(args, commit, verdicts)
    if args.report:
        Path(args.report).write_text(text)
    print(f"\n{text}")
    return int(any(verdict.wrong for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
