"""
Against TRL: the same models, prompts, rewards and settings through TRL's trainers and through ours, over seeds.

    python benchmark/studies/against_trl.py run --tag TAG --seeds 1 2 3 4 5 --workers 2 --environments FOLDER
    python benchmark/studies/against_trl.py run --tag TAG --task lengths --updates 100 --batch_size 64
    python benchmark/studies/against_trl.py replay --tag TAG --environments FOLDER
    python benchmark/studies/against_trl.py draw --tag TAG

`run` goes on where it stopped. `replay` writes results/TAG/trl_replay.md, where rows that it does not renew stay.
`draw` writes static/trl.svg and results/TAG/trl.md, or those of a study with --updates, e.g. with
--study trl_lengths_100x64 --output static/trl_lengths.svg.

Systems: RLOO and PPO of TRL 0.21.0, its last release with both in the form of the N+ paper; RLOO and GRPO of TRL
1.16.0; train_rloo.py, train_grpo.py and train_ppo.py. The embedded task, 25 updates of RLOO and of GRPO and 12 of PPO,
128 episodes each, all other settings the task's defaults, which trl_side.py translates; it also lists what still
differs. FOLDER/trl-VERSION is an environment, made by speed.py where missing. --systems takes some of them.
--updates and --batch_size make runs of another length. --task lengths is the embedded task after an SFT on reviews of
one to seven sentences, with responses of up to 96 tokens. --micro_batches splits each step, in TRL and in ours.

The curves are of the training samples. The final figures are one evaluator's: our sampler on the 512 held-out prompts,
with the noise of (seed, EVALUATION, 0), which is what our scripts' own last eval/* are, to the digit (with four
micro-batches, to rounding).

`replay` takes the samples away as a cause: TRL is given those that our script drew, update by update, and the weights
that both arrive at are compared.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
from held_out import evaluate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT, last, mean_interval, prediction_interval, read_seeds
from plot import band, blank, save

from benchmark import MODELS, STAGES, Run, StudyArgs, git_tag, run_command, run_study, stage_runs

BATCH, UPDATES = 128, {"rloo": 25, "grpo": 25, "ppo": 12}
LENGTHS = 12_000, range(1, 8), 96  # reviews for SFT, how many sentences they have, the most tokens of a response
RUN = "--num_sample_generations 0 --checkpoint_every 0 --output_dir policy"
SYSTEMS = {  # name: (algorithm, TRL version or None, label, colour)
    "ours_rloo": ("rloo", None, "train_rloo.py", "#c4501b"),
    "trl_rloo_1.16.0": ("rloo", "1.16.0", "TRL 1.16.0", "#3465a4"),
    "trl_rloo_0.21.0": ("rloo", "0.21.0", "TRL 0.21.0", "#4e9a06"),
    "ours_grpo": ("grpo", None, "train_grpo.py", "#c4501b"),
    "trl_grpo_1.16.0": ("grpo", "1.16.0", "TRL 1.16.0", "#3465a4"),
    "ours_ppo": ("ppo", None, "train_ppo.py", "#c4501b"),
    "trl_ppo_0.21.0": ("ppo", "0.21.0", "TRL 0.21.0", "#4e9a06"),
}
PASSES = {"num_ppo_epochs": 4, "cliprange": 0.05, "cliprange_high": 0.1, "total_episodes": 768}
GSPO = PASSES | {"objective": "gspo", "loss_normalization": "response", "cliprange": 0.01, "cliprange_high": 0.02}
GSPO, CISPO = (PASSES | {"lr_schedule": "constant"} | x for x in (GSPO, {"objective": "cispo"}))
THEIRS = "whole_means", "prepared_data"  # what a replay switches on TRL's side alone, see trl_side.py
PPO_IN_4 = {"weight_decay": 0.0, "micro_batch_size": BATCH // 4}
WHOLE = "PPO, weight decay 0, 4 micro-batches, TRL's losses divided by the minibatch's tokens"
ITS_END = f"{WHOLE}, the prompts at their end in the last update"
REPLAYED = (  # (algorithm, what is changed on both sides, or on TRL's where it is one of THEIRS, in words)
    ("rloo", {}, "RLOO"),
    ("grpo", {}, "GRPO"),
    # TRL's learning rate falls with each pass. Later, rounding alone parts two such runs, also two of TRL's.
    ("grpo", PASSES | {"lr_schedule": "constant"}, "GRPO, 4 passes, ratio in 0.95 .. 1.1, constant learning rate"),
    ("grpo", {"loss_normalization": "response", "scale_advantages": "batch"}, "GRPO, by response, batch's deviation"),
    ("grpo", {"loss_normalization": "constant", "scale_advantages": "none"}, "Dr. GRPO"),
    ("grpo", {"kl_times_ratio": True}, "GRPO, the KL times the ratio"),
    ("grpo", GSPO, "GSPO, 4 passes, ratio in 0.99 .. 1.02, constant learning rate"),
    ("grpo", CISPO, "CISPO, 4 passes, weight at most 1.1, constant learning rate"),
    ("ppo", {}, "PPO"),
    ("ppo", {"weight_decay": 0.0}, "PPO, weight decay 0"),
    ("rloo", {"micro_batch_size": BATCH // 4}, "RLOO, 4 micro-batches"),
    ("grpo", {"micro_batch_size": BATCH // 4}, "GRPO, 4 micro-batches"),
    ("ppo", PPO_IN_4, "PPO, weight decay 0, 4 micro-batches"),
    ("ppo", PPO_IN_4 | {"whole_means": True}, WHOLE),
    ("ppo", PPO_IN_4 | {"whole_means": True, "prepared_data": True}, ITS_END),
)
FOUR = "_in_4"  # what a system's name ends with where each step has four micro-batches
FIGURES = {"scores": "score", "gold": "gold", "kl": "KL, nats a response"}
FIGURE_LABELS = "gold of each seed at the end, and the mean with its interval", "KL of each seed at the end"
PACKAGES = "trl transformers torch accelerate datasets tokenizers numpy".split()


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing: SFT and reward models of each seed, then every system's policy from them."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """which systems"""
    task: Literal["toy", "lengths"] = "toy"
    """the embedded task, or its variant with widely varying lengths"""
    updates: int | None = None
    """updates of each run; None: 25 of RLOO and GRPO, 12 of PPO"""
    batch_size: int = BATCH
    """episodes of an update"""
    micro_batches: tuple[Literal[1, 4], ...] = (1,)
    """micro-batches of a step, for runs of each"""
    environments: str = "runs/environments"
    """folder of the environments trl-VERSION"""
    workers: int = 1
    preload: bool = False


@dataclass
class TrlArgs:
    """One policy by TRL, and its evaluation, as a run's metrics.jsonl (what `run` calls, in a run's folder)."""

    system: str
    """a name in SYSTEMS, one of TRL's"""
    seed: int
    """seed of the models, the samples and the evaluation"""
    task: Literal["toy", "lengths"] = "toy"
    """the embedded task, or its variant with widely varying lengths"""
    updates: int | None = None
    """updates; None: 25 of RLOO and GRPO, 12 of PPO"""
    batch_size: int = BATCH
    """episodes of an update"""
    micro_batches: Literal[1, 4] = 1
    """micro-batches of a step"""
    environments: str = os.environ.get("TRL_ENVIRONMENTS", "runs/environments")
    """folder of the environments trl-VERSION; `run` gives its own by a variable, to keep it out of the command"""
    run_name: str = "run"
    """folder under runs/"""
    overwrite: bool = True
    """replace it"""


@dataclass
class ReplayArgs:
    """TRL is trained on our script's samples: how far apart are the two policies? The models are those of `run`."""

    tag: str
    """folder of the results"""
    seed: int = 1
    """seed of the models and of our samples"""
    task: Literal["toy", "lengths"] = "toy"
    """the embedded task, or its variant with widely varying lengths"""
    algorithms: tuple[str, ...] = ("rloo", "grpo", "ppo")
    """which algorithms"""
    environments: str = "runs/environments"
    """folder of the environments trl-VERSION"""


@dataclass
class ReplayDpoArgs:
    """DPO: seed 1's SFT model is trained on the same pairs by us and by TRL 1.16's DPOTrainer."""

    environments: str = "runs/environments"
    """folder of the environment trl-1.16.0, which is made where it is missing"""


@dataclass
class DrawArgs:
    """The figure and the table."""

    tag: str | None = None
    """folder of the results; None: git describe"""
    study: str = "trl"
    """folder within it: trl, or trl_TASK_UPDATESxBATCH ("short" without --updates)"""
    output: str = "static/trl.svg"
    """the figure"""


# ---- run -------------------------------------------------------------------------------------------------------------
def changes_of(algorithm, task="toy", updates=None, batch_size=BATCH, micro_batches=1):
    """{argument: value}: what differs from our script's defaults on the embedded task."""
    changes = {"batch_size": batch_size, "total_episodes": batch_size * (updates or UPDATES[algorithm])}
    changes |= {"micro_batch_size": batch_size // micro_batches} if micro_batches > 1 else {}
    return changes | ({"response_length": LENGTHS[2]} if task == "lengths" else {})


def settings(algorithm, *changes):
    """{argument: value} of our script: its defaults on the embedded task, with changes_of."""
    script = importlib.import_module(f"rlhf_details.train_{algorithm}")
    args = script.Args(**(script.presets["toy"] | changes_of(algorithm, *changes)))
    return dataclasses.asdict(script.with_objective(args) if algorithm == "grpo" else args)


def lengths_stages(seeds):
    """The stages of --task lengths, for stage_runs: SFT on reviews of other lengths, and its reward model."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from rlhf_details import toy, train_sft

    number, sentences, longest = LENGTHS
    rng, lines = np.random.default_rng(2027), []
    for _ in range(number):
        text, opening = toy.write_review(rng, sentences)
        words, cut = text.split(), opening + int(rng.integers(3))
        lines.append(json.dumps({"prompt": " ".join(words[:cut]), "completion": " ".join(words[cut:])}) + "\n")
    folder = ROOT / "models" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lengths.jsonl").write_text("".join(lines))
    own = vars(train_sft.Args(**train_sft.presets["toy"]))
    shape = dict(hidden_size=own["hidden_size"], num_hidden_layers=own["num_layers"])
    shape |= dict(num_attention_heads=own["num_heads"], intermediate_size=4 * own["hidden_size"])
    for seed in seeds:
        tokenizer = toy.tokenizer()
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        torch.manual_seed(seed)
        config = GPTNeoXConfig(vocab_size=len(tokenizer), max_position_embeddings=160, **shape, **ids)
        for x in (GPTNeoXForCausalLM(config), tokenizer):
            x.save_pretrained(folder / str(seed) / "lengths_base")
    names = "learning_rate", "warmup_ratio", "batch_size", "num_train_epochs", "temperature", "micro_batch_size"
    flags = " ".join(f"--{name} {own[name]}" for name in names) + f" --response_length {longest}"
    rows = "{root}/models/bench/lengths.jsonl"
    sft = f"python rlhf_details/train_sft.py --dataset {rows} --base_model {MODELS}/lengths_base {flags}"
    reward = f"python rlhf_details/train_reward.py --sft_model_path {MODELS}/lengths_sft --response_length {longest}"
    first = {"lengths_sft": (f"{sft} --output_dir {MODELS}/lengths_sft", None)}
    return first, {"lengths_reward": (f"{reward} --output_dir {MODELS}/lengths_reward", None)}


def study_of(task, updates, batch_size):
    """The folder of a study's results: "trl" for the short runs on the toy, else trl_TASK_UPDATESxBATCH."""
    is_first = (task, updates, batch_size) == ("toy", None, BATCH)
    return "trl" if is_first else f"trl_{task}_{updates or 'short'}x{batch_size}"


def models_of(seed, task):
    """(SFT model's folder, reward model's folder) of a seed."""
    folder, prefix = ROOT / "models" / "bench" / str(seed), "lengths_" * (task == "lengths")
    return folder / f"{prefix}sft", folder / f"{prefix}reward"


def python_of(version, folder):
    """The Python of the environment with a TRL version, which is made where it is missing."""
    from speed import environment_of

    (python, _), _ = environment_of(version, SimpleNamespace(wheels=None, environments=folder, work_dir="runs"))
    return python


def by_trl(args: TrlArgs):
    """Trains in TRL's environment, evaluates in this one; writes runs/<run_name>/metrics.jsonl."""
    from rlhf_details import toy

    algorithm, version, *_ = SYSTEMS[args.system]
    (sft, reward), here = models_of(args.seed, args.task), Path.cwd()
    paths = {name: str(here / file) for name, file in (("prompts", "prompts.jsonl"), ("result", "result.json"))}
    Path(paths["prompts"]).write_text(
        "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in toy.rows("prompts", "train"))
    )
    Path(paths["result"]).unlink(missing_ok=True)
    changes = args.task, args.updates, args.batch_size, args.micro_batches
    spec = {"algorithm": algorithm, "policy": str(sft), "reward": str(reward), "seed": args.seed}
    spec |= {"settings": settings(algorithm, *changes), "output_dir": str(here / "policy")} | paths
    run_trl(version, args.environments, spec, here)
    rows = json.loads(Path(paths["result"]).read_text())["rows"]
    updates = spec["settings"]["total_episodes"] // spec["settings"]["batch_size"]
    if len(rows) != updates:
        raise RuntimeError(f"{args.system}: {len(rows)} updates, not {updates}")
    length = spec["settings"]["response_length"]
    rows[-1] |= evaluate(spec["output_dir"], sft, reward, args.seed, response_length=length)
    folder = here / "runs" / args.run_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_trl(version, environments, spec, folder):
    """Runs trl_side.py by a TRL version: with none of this process's modules, and no network."""
    (folder / "spec.json").write_text(json.dumps(spec, indent=1))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    worker = Path(__file__).resolve().with_name("trl_side.py")
    command = [python_of(version, environments), str(worker), str(folder / "spec.json")]
    subprocess.run(command, check=True, env=environ)


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, environments = args.tag or git_tag(), Path(args.environments).resolve()
    os.environ["TRL_ENVIRONMENTS"] = str(environments)
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    versions, systems = {}, {name: SYSTEMS[name] for name in args.systems}
    for name in sorted({version for _, version, *_ in systems.values() if version}):
        command = [python_of(name, environments), "-c", script, *PACKAGES]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        versions[f"trl-{name}"] = dict(zip(PACKAGES, found.stdout.split(), strict=True))
    study = study_of(args.task, args.updates, args.batch_size)
    first, second, models = {}, {}, STAGES
    if args.task == "lengths":
        (first, second), models = lengths_stages(args.seeds), STAGES.replace("/sft", "/lengths_sft")
        models = models.replace("/reward", "/lengths_reward")
    runs = []
    for seed, (system, (algorithm, version, *_)), number in product(args.seeds, systems.items(), args.micro_batches):
        changes = changes_of(algorithm, args.task, args.updates, args.batch_size, number)
        flags = " ".join(f"--{name} {value}" for name, value in changes.items())
        command = f"python rlhf_details/train_{algorithm}.py {RUN} {flags} {models}"
        if version:
            command = f"python benchmark/studies/against_trl.py trl --system {system} --task {args.task}"
            command += f" --updates {args.updates or UPDATES[algorithm]} --batch_size {args.batch_size}"
            command += f" --micro_batches {number}"
        runs.append(Run(system + FOUR * (number == 4), command, seed, tag, study))
    failed = run_study(stage_runs(args.seeds, tag, first, second), runs, args, tag)
    about = runs[0].results / "env.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"trl": versions}, indent=1) + "\n")
    return failed


# ---- replay ----------------------------------------------------------------------------------------------------------
def record(algorithm, own, folder):
    """Trains our policy, with the arguments `own`, into folder/ours.

    folder/samples.json gets its samples: of each update [query, response], both token ids.
    """
    from rlhf_details import utils

    script, kept, sample = importlib.import_module(f"rlhf_details.train_{algorithm}"), {}, utils.sample

    def recorded(policy, queries, query_mask, rows, **options):
        responses, mask, logprobs = sample(policy, queries, query_mask, rows, **options)
        _, purpose, update = options["key"]
        for i, row in enumerate(rows.tolist() if purpose == utils.TRAINING else ()):
            query = queries[i][query_mask[i]].tolist()
            kept.setdefault(update, {})[row] = [query, responses[i][mask[i]].tolist()]
        return responses, mask, logprobs

    rest = {"run_name": f"record_{algorithm}", "overwrite": True, "eval_dataset": None}
    rest |= {"num_sample_generations": 0, "checkpoint_every": 0, "output_dir": str(folder / "ours")}
    utils.sample = recorded
    try:
        script.main(script.Args(**(own | rest)))
    finally:
        utils.sample = sample
    samples = [[kept[update][row] for row in sorted(kept[update])] for update in sorted(kept)]
    (folder / "samples.json").write_text(json.dumps(samples))


def distance(a, b, start):
    """|a - b| / |a - start| over all weights of three model folders."""
    from safetensors.torch import load_file

    a, b, start = (load_file(Path(folder) / "model.safetensors") for folder in (a, b, start))
    apart, moved = (sum(((x[name] - y[name]).double() ** 2).sum() for name in start) for x, y in ((a, b), (a, start)))
    return (apart / moved).sqrt().item()


def replay(args: ReplayArgs):
    """Writes the table."""
    path = ROOT / "benchmark" / "results" / args.tag / f"trl_replay{'_lengths' * (args.task == 'lengths')}.md"
    (sft, reward), rows = models_of(args.seed, args.task), replayed(path)
    for number, (algorithm, changes, what) in enumerate(REPLAYED):
        if algorithm not in args.algorithms:
            continue
        folder = ROOT / "runs" / "benchmark" / args.tag / f"trl_replay_{args.task}" / f"{number}_{algorithm}"
        folder.mkdir(parents=True, exist_ok=True)
        theirs_alone = {name: changes[name] for name in THEIRS if name in changes}
        changes = {name: value for name, value in changes.items() if name not in THEIRS}
        own = {"seed": args.seed, "sft_model_path": str(sft), "reward_model_path": str(reward)}
        record(algorithm, settings(algorithm, args.task) | own | changes, folder)
        for system, (of, version, label, _) in SYSTEMS.items():
            if of != algorithm or version is None:
                continue
            theirs = folder / system
            theirs.mkdir(exist_ok=True)
            spec = {"algorithm": algorithm, "policy": str(sft), "reward": str(reward), "seed": args.seed}
            spec |= {"settings": settings(algorithm, args.task) | changes, "output_dir": str(theirs)} | theirs_alone
            spec |= {"samples": str(folder / "samples.json"), "prompts": os.devnull}
            spec["result"] = str(theirs / "result.json")
            run_trl(version, args.environments, spec, theirs)
            apart = distance(folder / "ours", theirs, sft)
            updates = len(json.loads((folder / "samples.json").read_text()))
            key = what, str(args.seed), label
            rows[key] = f"| {what} | {args.seed} | {label} | {updates} | {100 * apart:.2g} % |"
            print(rows[key], flush=True)
    head = f"""# TRL on our samples

Written by `python benchmark/studies/against_trl.py replay --tag {args.tag} --task {args.task}`.
How far TRL's weights end from ours, as a share of how far ours have moved, when both train on the samples that our
script drew.

| algorithm | seed | against | updates | distance |
|---|---:|---|---:|---:|
"""
    order = {what: number for number, (_, _, what) in enumerate(REPLAYED)}
    lines = [rows[key] for key in sorted(rows, key=lambda key: (int(key[1]), order[key[0]]))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + "\n".join(lines) + "\n")


def replayed(path):
    """{(what, seed, TRL's label): line} of a table of replays that is there already."""
    lines = [line for line in path.read_text().splitlines() if line.endswith(" % |")] if path.exists() else []
    return {tuple(cell.strip() for cell in line.split("|")[1:4]): line for line in lines}


def replay_dpo(args: ReplayDpoArgs):
    """Eight steps of 32 pairs of reviews. Writes results/dpo/replay.md."""
    from rlhf_details import toy, train_dpo, utils

    folder, lines = ROOT / "runs" / "benchmark" / "dpo_replay", []
    folder.mkdir(parents=True, exist_ok=True)
    start, texts = ROOT / "models" / "bench" / "1" / "sft", toy.rows("sft", "train")
    pairs = [(row["prompt"], row["completion"], texts[i + 500]["completion"]) for i, row in enumerate(texts[:256])]
    pairs = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    for name, rows in (("pairs", pairs), ("in_order", [pairs[i] for i in utils.permutation(len(pairs), 1, 0)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(batch_size=32, micro_batch_size=32, learning_rate=1e-4, lr_schedule="constant", adam_eps=1e-5)
    settings |= dict(weight_decay=0.0, max_grad_norm=1.0, temperature=1.0, beta=0.1)
    for loss in ("sigmoid", "ipo"):
        ours, theirs, result = folder / f"ours_{loss}", folder / f"trl_{loss}", folder / f"{loss}.json"
        own = dict(dataset=str(folder / "pairs.jsonl"), sft_model_path=str(start), output_dir=str(ours), loss=loss)
        own |= dict(run_name=f"dpo_replay_{loss}", overwrite=True, checkpoint_every=0)
        done = train_dpo.main(train_dpo.Args(**settings, **own))
        spec = {"algorithm": "dpo", "policy": str(start), "output_dir": str(theirs), "result": str(result), "seed": 1}
        spec |= {"pairs": str(folder / "in_order.jsonl"), "settings": settings | {"loss": loss}}
        run_trl("1.16.0", args.environments, spec, folder)
        rows = [json.loads(line) for line in (Path(done["run"]) / "metrics.jsonl").read_text().splitlines()]
        steps = list(zip(rows, json.loads(result.read_text()), strict=True))
        names = ("train/dpo/loss", "loss"), ("policy/grad_norm", "grad_norm"), ("logps/chosen", "logps/chosen")
        apart = [max(abs(a[x] / float(b[y]) - 1) for a, b in steps) for x, y in names]
        cells = [*(f"{x:.1e}" for x in apart), f"{100 * distance(ours, theirs, start):.2g} %"]
        lines.append(f"| {loss} | {len(steps)} | {' | '.join(cells)} |")
    head = [
        "# DPO beside TRL 1.16.0",
        "",
        "Written by `python benchmark/studies/against_trl.py dpo`: the largest relative",
    ]
    head += ["differences over the steps, and the distance of the weights as a share of how far ours have moved.", ""]
    head += [
        "| loss | steps | loss | gradient norm | log-prob of the chosen | weights |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    (ROOT / "benchmark" / "results" / "dpo" / "replay.md").write_text(text)
    print(text)


# ---- draw ------------------------------------------------------------------------------------------------------------
def final(seeds):
    """{figure: [its last value of each seed]}"""
    return {name: np.array([last(columns[f"eval/objective/{name}"]) for columns in seeds.values()]) for name in FIGURES}


def pairs(found):
    """(system, the other, label of their difference): ours and TRL's alike, and four micro-batches against one."""
    for system in found:
        four = FOUR * system.endswith(FOUR)
        ours = f"ours_{SYSTEMS[system.removesuffix(FOUR)][0]}{four}"
        if system != ours and ours in found:
            yield ours, system, f"{ours} less {system}"
    for system in found:
        if system + FOUR in found:
            yield system + FOUR, system, f"{system}{FOUR} less {system}"


def tables(found):
    """The two tables, as lines: what each system reached, and how far two of them are apart."""
    lines = ["| system | seeds | " + " | ".join(FIGURES.values()) + " |", "|---|---:|" + "---:|" * len(FIGURES)]
    for system, seeds in found.items():
        cells = []
        for x in final(seeds).values():
            mean, low, high, _ = mean_interval(x)
            cells.append(f"{mean:.2f} [{low:.2f}, {high:.2f}], {x.min():.2f} .. {x.max():.2f}")
        lines.append(f"| {system} | {len(seeds)} | " + " | ".join(cells) + " |")
    lines += ["", "| difference | " + " | ".join(FIGURES.values()) + " | within a seed of the second |"]
    lines += ["|---|" + "---:|" * len(FIGURES) + "---|"]
    for first, second, label in pairs(found):
        common, cells, outside = sorted(set(found[first]) & set(found[second])), [], []
        ours, theirs = (final({seed: found[name][seed] for seed in common}) for name in (first, second))
        for name, figure in FIGURES.items():
            mean, low, high, _ = mean_interval(ours[name] - theirs[name])
            mark = "" if low <= 0 <= high else "**"
            cells.append(f"{mark}{mean:+.2f} [{low:+.2f}, {high:+.2f}]{mark}")
            least, most = prediction_interval(theirs[name])
            outside += [] if least <= ours[name].mean() <= most else [f"{figure} not"]
        lines.append(f"| {label} | " + " | ".join(cells) + f" | {', '.join(outside) or 'yes'} |")
    return lines


def figure(found, output):
    """Curves of score and KL, and below them each seed's gold and KL at the end. A column for each algorithm."""
    algorithms = [name for name in ("rloo", "grpo", "ppo") if f"ours_{name}" in found]
    picture, axes = blank(4, len(algorithms), figsize=(4.5 * len(algorithms), 8))
    axes = axes.reshape(4, -1)
    for column, algorithm in enumerate(algorithms):
        systems = [name for name in found if SYSTEMS[name.removesuffix(FOUR)][0] == algorithm]
        labels = []
        for place, system in enumerate(systems):
            _, _, label, colour = SYSTEMS[system.removesuffix(FOUR)]
            labels.append(label + ", 4 micro-batches" * system.endswith(FOUR))
            line = dict(color=colour, linestyle="--" if system.endswith(FOUR) else "-")
            for axis, name in zip(axes[:2, column], ("scores", "kl"), strict=True):
                curves = [columns[f"objective/{name}"] for columns in found[system].values()]
                curves = np.stack([curve[~np.isnan(curve)] for curve in curves], 1)  # [updates, seeds]
                updates = np.arange(1, len(curves) + 1)
                band(axis, updates, curves, labels[-1], linewidth=1.5, alpha=0.15, **line)
            for axis, name in zip(axes[2:, column], ("gold", "kl"), strict=True):
                x = final(found[system])[name]
                mean, low, high, _ = mean_interval(x)
                axis.plot(x, [place] * len(x), "o", color=colour, alpha=0.5, markersize=4, markeredgewidth=0)
                axis.plot([low, high], [place + 0.25] * 2, color=colour, linewidth=2)
                axis.plot(mean, place + 0.25, "|", color=colour, markersize=9)
        for axis in axes[2:, column]:
            axis.set_yticks(range(len(systems)), labels, fontsize=7)
            axis.set_ylim(len(systems) - 0.4, -0.6)
        axes[0, column].set_title(algorithm.upper())
        axes[0, column].legend(frameon=False, loc="lower right", fontsize=8)
        for axis, label in zip(axes[:, column], ("update", "update", *FIGURE_LABELS), strict=True):
            axis.set_xlabel(label, fontsize=8)
            axis.grid(alpha=0.2)
    axes[0, 0].set_ylabel("score, points")
    axes[1, 0].set_ylabel("KL, nats a response")
    picture.tight_layout()
    save(picture, output, "trl")


def draw(args: DrawArgs):
    """Writes the figure and results/TAG/STUDY.md."""
    tag = args.tag or git_tag()
    folder, found = ROOT / "benchmark" / "results" / tag, {}
    for system in (name + four for name in SYSTEMS for four in ("", FOUR)):
        try:
            found[system] = read_seeds(folder / args.study, system)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
    figure(found, args.output)
    lines = [
        "# Against TRL",
        "",
        f"Written by `benchmark/studies/against_trl.py draw --tag {tag} --study {args.study}`.",
        "Final policies on 512 held-out prompts, measured by one evaluator: mean over seeds, Student's 95 % interval,",
        "range. With `_in_4` in its name a system accumulates each step's gradient over four micro-batches.",
        "Below, differences paired over seeds (which share SFT model, reward model and the noise of the evaluation),",
        "with Student's 95 % interval, bold where it does not contain 0. Last: whether the means of the first system",
        "lie in the 95 % prediction intervals for one more seed of the second.",
        "",
        *tables(found),
    ]
    (folder / f"{args.study}.md").write_text("\n".join(lines) + "\n")


COMMANDS = {"run": (RunArgs, run), "trl": (TrlArgs, by_trl), "replay": (ReplayArgs, replay), "draw": (DrawArgs, draw)}
COMMANDS["dpo"] = (ReplayDpoArgs, replay_dpo)

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
