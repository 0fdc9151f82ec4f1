"""
Against TRL 1.16 on SmolLM2-135M-Instruct: RLOO and GRPO of smollm.py's verified task by TRL's trainers, and the speed.

    python benchmark/studies/smollm_trl.py run --tag TAG           (trains what is missing)
    python benchmark/studies/smollm_trl.py replay --tag TAG        (TRL trained on our samples)
    python benchmark/studies/smollm_trl.py speed --tag TAG         (an update of ours, with and without LoRA, and TRL's)
    python benchmark/studies/smollm_trl.py draw --tag TAG          (results/TAG/smollm_trl.md)

Our runs are the first ten updates of smollm.py's. trl_side.py translates their arguments, and lists what still differs.
One evaluator (held_out.py) measures TRL's policies before and after training as our scripts do theirs. The variable
TRL_ENVIRONMENTS names the folder of the environments trl-VERSION, which speed.py makes where missing.
"""

import importlib
import itertools
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from against_trl import distance, record, run_trl
from held_out import evaluate
from lora_memory import RUN
from smollm import AUTOCAST, COLUMNS, OURS, PATHS, ends, risen, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT, experiments, mean_interval, words

from benchmark import Run, StudyArgs, git_tag, made_with, run_all, run_command

SYSTEMS, VERSION = {"trl_rloo": "rloo", "trl_grpo": "grpo"}, "1.16.0"
BATCH, UPDATES = 64, 10
OF_LORA, LORA = "_lora", " --lora_rank 16 --learning_rate 2e-4"  # and what is added to its command
BF16 = "_bf16"  # what the name of a system ends with that runs under autocast
LABELS = {"rloo": "train_rloo.py", "trl_rloo": f"RLOO of TRL {VERSION}", "rloo_bf16": "train_rloo.py in bf16"}
LABELS |= {"grpo": "train_grpo.py", "trl_grpo": f"GRPO of TRL {VERSION}"}
PHASES = "rollout", "scores", "optimise"
FIGURES = {"rewards/obeys": "right answers", "scores": "score", "kl": "KL, nats", "length": "tokens", "ended": "ended"}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    seeds: tuple[int, ...] = (1, 2, 3)
    systems: tuple[str, ...] = (*OURS, "rloo_bf16", *SYSTEMS)
    """which of our scripts and of TRL's trainers"""
    columns: tuple[str, ...] = tuple(COLUMNS.split())
    preload: bool = False


@dataclass
class DrawArgs:
    """The table."""

    tag: str
    """folder of the results"""


@dataclass
class TrlArgs:
    """One policy by TRL, and its evaluation, as a run's metrics.jsonl (what `run` calls, in a run's folder)."""

    system: str
    """a name in SYSTEMS"""
    seed: int
    """seed of the samples and of the evaluation"""
    run_name: str = "run"
    """folder under runs/"""
    overwrite: bool = True
    """replace it"""


@dataclass
class ReplayArgs:
    """TRL is trained on the samples that our script drew: how far apart are the two policies?"""

    tag: str
    """folder of the results"""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """which of TRL's trainers"""
    updates: int = 3
    """updates"""
    seed: int = 1
    """seed of our samples"""


@dataclass
class SpeedArgs:
    """Seconds and peak memory of updates, in turn by ours, ours with LoRA and TRL, each in a process of its own."""

    tag: str
    """folder of the results"""
    alternations: int = 2
    """times that every system runs"""
    updates: int = 2
    """updates of a run, of which the first warms up"""
    threads: int = 2
    """CPU threads of a process"""


def write(tag, name, lines):
    """Writes results/TAG/NAME.md, and prints it."""
    path = ROOT / "benchmark" / "results" / tag / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


# ---- TRL's side ------------------------------------------------------------------------------------------------------
def settings(algorithm, seed, updates=UPDATES):
    """{argument: value} of our own run of the verified task."""
    from rlhf_details.plumbing import cli

    words = shlex.split(f"{OURS[algorithm]} {PATHS} --total_episodes {updates * BATCH}".format(root=ROOT, seed=seed))
    return vars(cli.parse(importlib.import_module(f"rlhf_details.train_{algorithm}").Args, words[1:])) | {"seed": seed}


def spec_of(system, ours, folder):
    """What trl_side.py is told, with the training prompts in the folder."""
    from rlhf_details.plumbing import data, models

    args = SimpleNamespace(**ours | {"eval_dataset": None})
    tokenizer = models.load_tokenizer(ours["sft_model_path"], "--sft_model_path", args)
    prompts, _ = data.load_prompts(args, tokenizer, room=np.inf)
    columns, rows = ("kind", "value", "topic"), []
    for prompt in prompts:
        rows.append({"prompt": tokenizer.decode(prompt.ids)} | {name: prompt.columns[name] for name in columns})
        if tokenizer(rows[-1]["prompt"]).input_ids != prompt.ids:
            raise ValueError(f"TRL would read other tokens than ours of {rows[-1]['prompt']!r}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"algorithm": SYSTEMS[system], "policy": ours["sft_model_path"], "seed": ours["seed"], "settings": ours}
    spec |= {"reward_fn": ours["reward_fn"][0], "columns": columns, "output_dir": str(folder / "policy")}
    spec["special_tokens"] = {"eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    return spec | {name: str(folder / file) for name, file in (("prompts", "prompts.jsonl"), ("result", "result.json"))}


def environments():
    """The folder of the environments trl-VERSION, which a variable names, to keep it out of a run's command."""
    return os.environ.get("TRL_ENVIRONMENTS", str(ROOT / "runs" / "environments"))


def by_trl(args: TrlArgs):
    """Trains in TRL's environment, evaluates in this one; writes runs/<run_name>/metrics.jsonl."""
    ours, here = settings(SYSTEMS[args.system], args.seed), Path.cwd()
    spec = spec_of(args.system, ours, here)
    names = "dataset", "eval_dataset", "reward_fn", "temperature", "response_length", "missing_eos_penalty"
    changes = {name: ours[name] for name in names} | {"reward_fn": ours["reward_fn"][0]}
    judge = ours["sft_model_path"], None, args.seed
    first = {"update": 0, "episode": 0} | evaluate(ours["sft_model_path"], *judge, **changes)
    run_trl(VERSION, environments(), spec, here)
    rows = json.loads(Path(spec["result"]).read_text())["rows"]
    rows[-1] |= evaluate(spec["output_dir"], *judge, **changes)
    folder = here / "runs" / args.run_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [first, *rows]))


def replay(args: ReplayArgs):
    """Writes results/TAG/smollm_trl_replay.md."""
    rows = []
    for system in args.systems:
        folder = ROOT / "runs" / "benchmark" / args.tag / "smollm_replay" / system
        ours = settings(SYSTEMS[system], args.seed, args.updates)
        spec = spec_of(system, ours, folder) | {"samples": str(folder / "samples.json")}
        record(SYSTEMS[system], ours, folder)
        run_trl(VERSION, environments(), spec, folder)
        apart = distance(folder / "ours", spec["output_dir"], ours["sft_model_path"])
        rows.append(
            [SYSTEMS[system].upper(), str(args.seed), f"TRL {VERSION}", str(args.updates), f"{100 * apart:.2g} %"]
        )
    lines = ["# TRL on our samples of SmolLM2", ""]
    lines += [f"Written by `python benchmark/studies/smollm_trl.py replay --tag {args.tag}`. {made_with()}", ""]
    lines += ["How far TRL's weights end from ours, as a share of how far ours have moved.", ""]
    lines += table(["algorithm", "seed", "against", "updates", "distance"], rows)
    write(args.tag, "smollm_trl_replay", lines)


def timed(system, args):
    """(rows with the seconds of each update, peak memory in bytes) of a short run without evaluation."""
    folder = ROOT / "runs" / "benchmark" / args.tag / "smollm_speed" / system
    folder.mkdir(parents=True, exist_ok=True)
    if system in SYSTEMS:
        spec = spec_of(system, settings(SYSTEMS[system], 1, args.updates), folder)
        run_trl(VERSION, environments(), spec, folder)
        result = json.loads(Path(spec["result"]).read_text())
        return result["rows"], result["peak"]
    own = f"{OURS[system.removesuffix(BF16).removesuffix(OF_LORA)]}{LORA * system.endswith(OF_LORA)} {PATHS}"
    own += f" --eval_dataset None --total_episodes {BATCH * args.updates} --run_name run --overwrite"
    script, *flags = shlex.split(own.format(root=ROOT, seed=1))
    command = [sys.executable, "-c", RUN, str(ROOT / "rlhf_details" / script), *flags]
    env = os.environ | (dict([AUTOCAST.strip().split("=")]) if system.endswith(BF16) else {})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    return rows, int(done.stdout.rsplit("PEAK", 1)[1]) * 1024


def speed(args: SpeedArgs):
    """Writes results/TAG/smollm_trl_speed.md."""
    found = {}
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads)}
    for _ in range(args.alternations):
        for system in ("rloo", "rloo_lora", "rloo_bf16", "trl_rloo"):
            rows, peak = timed(system, args)
            own = [np.mean([row[f"time/{phase}"] for row in rows[1:]]) for phase in PHASES]
            found.setdefault(system, []).append([*own, sum(own), peak / 1e9])
            print(system, *(f"{x:.1f}" for x in found[system][-1]), flush=True)
    lines = ["# SmolLM2: an update of 64 answers, and memory", ""]
    lines += [f"Written by `python benchmark/studies/smollm_trl.py speed --tag {args.tag}`. {made_with()}", ""]
    lines += [
        f"Seconds of an update on {args.threads} threads, the mean of {args.updates - 1} behind the first one. The"
    ]
    lines += ["systems ran in turn, and a cell has a figure for each turn. The peak is that of the process.", ""]
    rows = [[name, *(" ".join(f"{run[i]:.1f}" for run in runs) for i in range(5))] for name, runs in found.items()]
    lines += table(["system", *PHASES, "an update", "peak GB"], rows)
    write(args.tag, "smollm_trl_speed", lines)


# ---- run and draw ----------------------------------------------------------------------------------------------------
def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, runs = args.tag or git_tag(), []
    for seed, system in itertools.product(args.seeds, args.systems):
        command = f"python benchmark/studies/smollm_trl.py trl --system {system}"
        if system not in SYSTEMS:
            command = f"python rlhf_details/{OURS[system.removesuffix(BF16)]} {PATHS}"
            command = f"{AUTOCAST * system.endswith(BF16)}{command} --total_episodes {UPDATES * BATCH}"
        runs.append(Run(system, command.replace("NAME", system), seed, tag, "smollm_trl"))
    return run_all(runs, args, tag)


def seconds_of(columns):
    """The mean seconds [4] of a run's phases and of its updates, without the first update, which warms up."""
    phases = [np.nanmean(columns[f"time/{phase}"][2:]) for phase in PHASES]
    return np.array([*phases, sum(phases)])


def draw(args: DrawArgs):
    """Writes results/TAG/smollm_trl.md."""
    found, rows, apart = experiments(ROOT / "benchmark" / "results" / args.tag / "smollm_trl"), [], []
    for name, label in LABELS.items():
        if name in found:
            rows.append([label, str(len(found[name])), *risen(found[name], FIGURES)])
    for a, b in (("rloo", "trl_rloo"), ("grpo", "trl_grpo"), ("rloo_bf16", "rloo")):
        pairs = [(found[a][seed], found[b][seed]) for seed in sorted(found.get(a, {}).keys() & found.get(b, {}).keys())]
        if len(pairs) > 1:
            cells = [words(mean_interval([ends(x, y)[1] - ends(z, y)[1] for x, z in pairs])) for y in FIGURES]
            course = [np.nanmean(x["objective/scores"]) - np.nanmean(z["objective/scores"]) for x, z in pairs]
            label = f"{LABELS[a]}, less {LABELS[b]}"
            apart.append([label, str(len(pairs)), *cells, words(mean_interval(course))])
    times = []
    for name, label in LABELS.items():
        if name in found and not name.endswith("grpo"):  # These had more than one neighbour.
            every = [seconds_of(seed) for seed in found[name].values()]
            times.append([label, str(len(every)), *(f"{x:.1f}" for x in np.median(every, 0))])
    for a, b in (("trl_rloo", "rloo"), ("rloo", "rloo_bf16")):
        if a in found and b in found:
            ratios = [
                seconds_of(found[a][seed]) / seconds_of(found[b][seed]) for seed in found[a].keys() & found[b].keys()
            ]
            cells = [f"{np.median(x):.2f} ({min(x):.2f} .. {max(x):.2f})" for x in np.transpose(ratios)]
            times.append([f"{LABELS[a]}, times those of {LABELS[b]}", str(len(ratios)), *cells])
    lines = ["# Against TRL on SmolLM2-135M-Instruct", ""]
    lines += [f"Written by `python benchmark/studies/smollm_trl.py draw --tag {args.tag}`."]
    lines += [
        "Held-out figures are means over 96 prompts, before -> after ten updates, then over seeds. Behind the comma"
    ]
    lines += [
        "is the mean rise with Student's 95 % interval over seeds. Below: differences at the end, paired by seed.",
        "",
    ]
    lines += table(["ten updates", "seeds", *FIGURES.values()], rows)
    lines += ["", *table(["difference", "seeds", *FIGURES.values(), "score over the run"], apart)]
    lines += [
        "",
        "Seconds of an update on one thread while the other core ran something else: means over the nine updates",
    ]
    lines += ["behind the first, medians over seeds, and of two systems the median ratio and its range.", ""]
    lines += table(["seconds", "seeds", *PHASES, "an update"], times)
    write(args.tag, "smollm_trl", lines)


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw), "trl": (TrlArgs, by_trl)}
COMMANDS |= {"replay": (ReplayArgs, replay), "speed": (SpeedArgs, speed)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
