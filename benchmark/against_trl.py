"""
Against TRL: the same models, prompts, rewards and settings through TRL's trainers and through ours, over seeds.

    python benchmark/against_trl.py run --tag TAG --seeds 1 2 3 4 5 --workers 2 --environments FOLDER
    python benchmark/against_trl.py replay --tag TAG --environments FOLDER
    python benchmark/against_trl.py draw --tag TAG

`run` goes on where it stopped. `replay` writes results/TAG/trl_replay.md, and `draw` writes static/trl.svg and
results/TAG/trl.md.

Systems: RLOO and PPO of TRL 0.21.0, its last release with both in the form of the N+ paper; RLOO and GRPO of TRL
1.16.0; train_rloo.py, train_grpo.py and train_ppo.py. The embedded task, 25 updates of RLOO and of GRPO and 12 of PPO,
128 episodes each, all other settings the task's defaults, which trl_side.py translates; it also lists what still
differs. FOLDER/trl-VERSION is an environment, made by speed.py where missing. --algorithms takes some of the three.

The curves are of the training samples. The final figures are one evaluator's: our sampler on the 512 held-out prompts,
with the noise of (seed, EVALUATION, 0), which is what our scripts' own last eval/* are, to the digit.

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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from held_out import evaluate
from intervals import ROOT, bootstrap, iqm, last, mean_interval, read_seeds
from scipy import stats

from benchmark import COLUMNS, STAGES, Run, git_tag, run_command, run_study, stage_runs

CHANGES = {"rloo": {"batch_size": 128, "total_episodes": 3200}, "ppo": {"batch_size": 128, "total_episodes": 1536}}
CHANGES["grpo"] = CHANGES["rloo"]
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
REPLAYED = (  # (algorithm, what is changed, in words)
    ("rloo", {}, "RLOO"),
    ("grpo", {}, "GRPO"),
    # TRL's learning rate falls with each pass. Later, rounding alone parts two such runs, also two of TRL's.
    ("grpo", PASSES | {"lr_schedule": "constant"}, "GRPO, 4 passes, ratio in 0.95 .. 1.1, constant learning rate"),
    ("grpo", {"loss_normalization": "response", "scale_advantages": "batch"}, "GRPO, by response, batch's deviation"),
    ("grpo", {"loss_normalization": "constant", "scale_advantages": "none"}, "Dr. GRPO"),
    ("grpo", {"kl_times_ratio": True}, "GRPO, the KL times the ratio"),
    ("ppo", {}, "PPO"),
    ("ppo", {"weight_decay": 0.0}, "PPO, weight decay 0"),
)
FIGURES = {"scores": "score", "gold": "gold", "kl": "KL, nats a response"}
PACKAGES = "trl transformers torch accelerate datasets tokenizers numpy".split()


@dataclass
class RunArgs:
    """Trains what is missing: SFT and reward models of each seed, then every system's policy from them."""

    tag: str | None = None
    """folder of the results; None: git describe"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds"""
    algorithms: tuple[str, ...] = ("rloo", "grpo", "ppo")
    """which algorithms"""
    environments: str = "runs/environments"
    """folder of the environments trl-VERSION"""
    workers: int = 1
    """runs at a time"""
    threads: int = 1
    """CPU threads a run"""
    preload: bool = False
    """start runs as forks of one process that has the libraries loaded"""
    columns: tuple[str, ...] = tuple(COLUMNS)
    """metrics to keep"""
    every: int = 1
    """keep every so manyth row, and the last"""


@dataclass
class TrlArgs:
    """One policy by TRL, and its evaluation, as a run's metrics.jsonl (what `run` calls, in a run's folder)."""

    system: str
    """a name in SYSTEMS, one of TRL's"""
    seed: int
    """seed of the models, the samples and the evaluation"""
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
    algorithms: tuple[str, ...] = ("rloo", "grpo", "ppo")
    """which algorithms"""
    environments: str = "runs/environments"
    """folder of the environments trl-VERSION"""


@dataclass
class DrawArgs:
    """The figure and the table."""

    tag: str | None = None
    """folder of the results; None: git describe"""
    output: str = "static/trl.svg"
    """the figure"""


# ---- run -------------------------------------------------------------------------------------------------------------
def settings(algorithm):
    """{argument: value} of our script: its defaults on the embedded task, with CHANGES."""
    from rlhf_details.plumbing import stages

    script = importlib.import_module(f"rlhf_details.train_{algorithm}")
    defaults = {field.name: field.default for field in dataclasses.fields(script.Args)}
    return defaults | stages.DEFAULTS[f"train_{algorithm}"] | CHANGES[algorithm]


def python_of(version, folder):
    """The Python of the environment with a TRL version, which is made where it is missing."""
    from speed import environment_of

    (python, _), _ = environment_of(version, SimpleNamespace(wheels=None, environments=folder, work_dir="runs"))
    return python


def by_trl(args: TrlArgs):
    """Trains in TRL's environment, evaluates in this one; writes runs/<run_name>/metrics.jsonl."""
    from rlhf_details import toy

    algorithm, version, *_ = SYSTEMS[args.system]
    stages, here = ROOT / "models" / "bench" / str(args.seed), Path.cwd()
    paths = {name: str(here / file) for name, file in (("prompts", "prompts.jsonl"), ("result", "result.json"))}
    Path(paths["prompts"]).write_text(
        "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in toy.rows("prompts", "train"))
    )
    Path(paths["result"]).unlink(missing_ok=True)
    spec = {"algorithm": algorithm, "policy": str(stages / "sft"), "reward": str(stages / "reward"), "seed": args.seed}
    spec |= {"settings": settings(algorithm), "output_dir": str(here / "policy")} | paths
    (here / "spec.json").write_text(json.dumps(spec, indent=1))
    worker = [python_of(version, args.environments), str(Path(__file__).resolve().with_name("trl_side.py"))]
    subprocess.run([*worker, str(here / "spec.json")], check=True, env=trl_environ())
    rows = json.loads(Path(paths["result"]).read_text())["rows"]
    updates = spec["settings"]["total_episodes"] // spec["settings"]["batch_size"]
    if len(rows) != updates:
        raise RuntimeError(f"{args.system}: {len(rows)} updates, not {updates}")
    rows[-1] |= evaluate(spec["output_dir"], stages / "sft", stages / "reward", args.seed)
    folder = here / "runs" / args.run_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trl_environ():
    """Environment variables of a process with TRL: none of this one's modules, no network."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, environments = args.tag or git_tag(), Path(args.environments).resolve()
    os.environ["TRL_ENVIRONMENTS"] = str(environments)
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    versions = {}
    needed = {version for algorithm, version, *_ in SYSTEMS.values() if version and algorithm in args.algorithms}
    for name in sorted(needed):
        found = subprocess.run(
            [python_of(name, environments), "-c", script, *PACKAGES], capture_output=True, text=True, check=True
        )
        versions[f"trl-{name}"] = dict(zip(PACKAGES, found.stdout.split(), strict=True))
    runs, systems = [], {name: x for name, x in SYSTEMS.items() if x[0] in args.algorithms}
    for seed in args.seeds:
        for system, (algorithm, version, *_) in systems.items():
            changes = " ".join(f"--{name} {value}" for name, value in CHANGES[algorithm].items())
            command = f"python rlhf_details/train_{algorithm}.py {RUN} {changes} {STAGES}"
            if version:
                command = f"python benchmark/against_trl.py trl --system {system}"
            runs.append(Run(system, command, seed, tag, "trl"))
    failed = run_study(stage_runs(args.seeds, tag), runs, args, tag)
    about = runs[0].result.with_name("env.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"trl": versions}, indent=1) + "\n")
    return failed


# ---- replay ----------------------------------------------------------------------------------------------------------
def record(algorithm, seed, changes, folder):
    """Trains our policy into folder/ours.

    folder/samples.json gets its samples: of each update [query, response], both token ids.
    """
    from rlhf_details import utils

    script, kept = importlib.import_module(f"rlhf_details.train_{algorithm}"), {}
    sample, stages = utils.sample, ROOT / "models" / "bench" / str(seed)

    def recorded(policy, batch, **options):
        responses, mask, logprobs = sample(policy, batch, **options)
        _, purpose, update = options["key"]
        for i, row in enumerate(batch[2].tolist() if purpose == utils.TRAINING else ()):
            query = batch[0][i][batch[1][i]].tolist()
            kept.setdefault(update, {})[row] = [query, responses[i][mask[i]].tolist()]
        return responses, mask, logprobs

    own = {"seed": seed, "run_name": f"record_{algorithm}", "overwrite": True, "eval_dataset": None}
    own |= {"num_sample_generations": 0, "checkpoint_every": 0, "output_dir": str(folder / "ours")}
    own |= {"sft_model_path": str(stages / "sft"), "reward_model_path": str(stages / "reward")}
    utils.sample = recorded
    try:
        script.main(script.Args(**(settings(algorithm) | own | changes)))
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
    stages, lines = ROOT / "models" / "bench" / str(args.seed), []
    for number, (algorithm, changes, what) in enumerate(REPLAYED):
        if algorithm not in args.algorithms:
            continue
        folder = ROOT / "runs" / "benchmark" / args.tag / "trl_replay" / f"{number}_{algorithm}"
        folder.mkdir(parents=True, exist_ok=True)
        record(algorithm, args.seed, changes, folder)
        for system, (of, version, label, _) in SYSTEMS.items():
            if of != algorithm or version is None:
                continue
            theirs = folder / system
            theirs.mkdir(exist_ok=True)
            paths = {
                "samples": str(folder / "samples.json"),
                "prompts": os.devnull,
                "result": str(theirs / "result.json"),
            }
            spec = {
                "algorithm": algorithm,
                "policy": str(stages / "sft"),
                "reward": str(stages / "reward"),
                "seed": args.seed,
            }
            spec |= {"settings": settings(algorithm) | changes, "output_dir": str(theirs)} | paths
            (theirs / "spec.json").write_text(json.dumps(spec))
            worker = [python_of(version, args.environments), str(Path(__file__).resolve().with_name("trl_side.py"))]
            subprocess.run([*worker, str(theirs / "spec.json")], check=True, env=trl_environ())
            apart = distance(folder / "ours", theirs, stages / "sft")
            updates = len(json.loads((folder / "samples.json").read_text()))
            lines.append(f"| {what} | {label} | {updates} | {100 * apart:.2g} % |")
            print(lines[-1], flush=True)
    head = f"""# TRL on our samples

Written by `python benchmark/against_trl.py replay --tag {args.tag}`, seed {args.seed}: how far TRL's weights end from
ours, as a share of how far ours have moved, when both train on the samples that our script drew.

| algorithm | against | updates | distance |
|---|---|---:|---:|
"""
    results = ROOT / "benchmark" / "results" / args.tag
    results.mkdir(parents=True, exist_ok=True)
    (results / "trl_replay.md").write_text(head + "\n".join(lines) + "\n")


# ---- draw ------------------------------------------------------------------------------------------------------------
def final(seeds):
    """{figure: [its last value of each seed]}"""
    return {name: np.array([last(columns[f"eval/objective/{name}"]) for columns in seeds.values()]) for name in FIGURES}


def prediction_interval(x):
    """95 % interval for one more seed: mean -+ t * s * sqrt(1 + 1 / n), t of n - 1 degrees of freedom."""
    half = stats.t.ppf(0.975, len(x) - 1) * np.std(x, ddof=1) * np.sqrt(1 + 1 / len(x))
    return np.mean(x) - half, np.mean(x) + half


def tables(found):
    """The two tables, as lines: what each system reached, and how far ours is from TRL's."""
    lines = ["| system | seeds | " + " | ".join(FIGURES.values()) + " |", "|---|---:|" + "---:|" * len(FIGURES)]
    for system, seeds in found.items():
        cells = []
        for x in final(seeds).values():
            mean, low, high, _ = mean_interval(x)
            cells.append(f"{mean:.2f} [{low:.2f}, {high:.2f}], {x.min():.2f} .. {x.max():.2f}")
        lines.append(f"| {system} | {len(seeds)} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| ours less TRL's | figure | difference | contains 0 | a TRL seed | our mean within |",
        "|---|---|---:|---|---:|---|",
    ]
    yes = lambda is_true: "yes" if is_true else "**no**"  # noqa: E731
    for system, seeds in found.items():
        ours = f"ours_{SYSTEMS[system][0]}"
        if system == ours or ours not in found:
            continue
        common = sorted(set(seeds) & set(found[ours]))
        theirs, us = (final({seed: columns[seed] for seed in common}) for columns in (seeds, found[ours]))
        for name, label in FIGURES.items():
            difference, low, high, _ = mean_interval(us[name] - theirs[name])
            least, most = prediction_interval(theirs[name])
            cells = f"{difference:+.2f} [{low:+.2f}, {high:+.2f}] | {yes(low <= 0 <= high)} | {least:.2f} .. {most:.2f}"
            lines.append(f"| {system} | {label} | {cells} | {yes(least <= us[name].mean() <= most)} |")
    return lines


def draw(args: DrawArgs):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tag = args.tag or git_tag()
    folder, found = ROOT / "benchmark" / "results" / tag, {}
    for system in SYSTEMS:
        try:
            found[system] = read_seeds(folder / "trl", system)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
    algorithms = [name for name in ("rloo", "grpo", "ppo") if f"ours_{name}" in found]
    size = 4.5 * len(algorithms), 5
    figure, axes = plt.subplots(2, len(algorithms), figsize=size, sharex="col", squeeze=False)
    for system, seeds in found.items():
        algorithm, _, label, colour = SYSTEMS[system]
        for axis, name in zip(axes[:, algorithms.index(algorithm)], ("scores", "kl"), strict=True):
            curves = [columns[f"objective/{name}"] for columns in seeds.values()]
            curves = np.stack([curve[~np.isnan(curve)] for curve in curves], 1)  # [updates, seeds]
            updates = np.arange(1, len(curves) + 1)
            axis.plot(updates, iqm(curves), color=colour, linewidth=1.5, label=label)
            axis.fill_between(updates, *bootstrap(curves), color=colour, alpha=0.2, linewidth=0)
            axis.grid(alpha=0.2)
    for column, name in enumerate(algorithms):
        axes[0, column].set_title(name.upper())
        axes[1, column].set_xlabel("update")
        axes[0, column].legend(frameon=False, loc="lower right", fontsize=8)
    axes[0, 0].set_ylabel("score, points")
    axes[1, 0].set_ylabel("KL, nats a response")
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "trl"  # the same bytes for the same data
    figure.savefig(ROOT / args.output, metadata={"Date": None})
    lines = [
        "# Against TRL",
        "",
        "Written by `benchmark/against_trl.py draw`. Final policies on 512 held-out prompts, measured by one",
        "evaluator: mean over seeds, Student's 95 % interval, range. Below, ours less TRL's, paired over seeds (which",
        "share SFT model, reward model and the noise of the evaluation), with Student's 95 % interval; the 95 %",
        "prediction interval for one more seed of TRL's, and whether our mean lies in it.",
        "",
        *tables(found),
    ]
    (folder / "trl.md").write_text("\n".join(lines) + "\n")


COMMANDS = {"run": (RunArgs, run), "trl": (TrlArgs, by_trl), "replay": (ReplayArgs, replay), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
