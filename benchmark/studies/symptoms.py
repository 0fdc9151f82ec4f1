"""
Runs that were broken on purpose, one for each symptom of docs/guides/8_my_run_looks_wrong.md, beside a healthy one.

    python benchmark/studies/symptoms.py run --tag TAG --seeds 1     (about five minutes on two cores)
    python benchmark/studies/symptoms.py draw --tag TAG

The embedded task, one seed, 20 updates of RLOO or 12 of PPO. A run is broken by a wrong flag, or by a change in a copy
of the package, as in the ablations. `draw` writes a figure for each symptom, static/symptom_NAME.svg: the metric that
gives the fault away, grey in the healthy run and red in the broken one. One seed shows what a fault looks like. What a
detail is worth, over seeds, is measured in the ablations.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in (".", "checks", "studies"))
import matplotlib
from ablations import ALONE, RUN, code_of
from intervals import ROOT, read_seeds
from mutations import ENGINES, OWN_SHARE, PPO, RLOO, UTILS
from plot import blank, frame, save

from benchmark import COLUMNS, MODELS, STAGES, Run, StudyArgs, git_tag, run_command, run_study, stage_runs

SFT = f"--sft_model_path {MODELS}/sft --reward_model_path None"
SHORT_RLOO = f"rlhf_details/train_rloo.py {RUN} --total_episodes 2560"
SHORT_PPO = f"rlhf_details/train_ppo.py {RUN} --total_episodes 1536"
FUNCTION = "--missing_eos_penalty None --reward_fn {root}/benchmark/studies/symptoms.py:"
DEVIATION = f"rewards - (rewards - {ALONE}) / rewards.std(1, keepdim=True)"
DROPOUT = (
    (UTILS, "MODEL-1", "module.p = 0.0", "module.p = 0.1"),
    (UTILS, "MODEL-2", "setattr(module, name, 0.0)", "setattr(module, name, 0.1)"),
)
UNCHECKED = (ENGINES, "", "not math.isfinite(norm)", "False")
RUNS = {  # name: (command, changes in a copy of the package)
    "rloo": (f"python {SHORT_RLOO} {STAGES}", ()),
    "rloo2": (f"python {SHORT_RLOO} {STAGES} --num_ppo_epochs 2", ()),
    "ppo": (f"python {SHORT_PPO} {STAGES}", ()),
    "nan": (f"python {SHORT_RLOO} {SFT} --kl_coef 0 {FUNCTION}boxed", ((RLOO, "RLOO-3", ALONE, DEVIATION), UNCHECKED)),
    "kl_negative": (
        f"python {SHORT_RLOO} {STAGES}",
        ((RLOO, "REW-5", "old_logprobs - ref_logprobs", "ref_logprobs - old_logprobs"),),
    ),
    "no_kl": (f"python {SHORT_RLOO} {STAGES} --kl_coef 0 --learning_rate 3e-3", ()),
    "no_gradient": (f"python {SHORT_RLOO} {SFT} {FUNCTION}boxed", ()),
    "no_end": (f"python {SHORT_RLOO} {STAGES.replace('/sft ', '/sft_no_eos ')}", ()),
    "long": (f"python {SHORT_RLOO} {SFT} {FUNCTION}words", ()),
    "greedy": (
        f"python {SHORT_RLOO} {STAGES}",
        ((UTILS, "GEN-1", "logits + gumbel_noise(fold(keys, t), logits.size(-1))", "logits"),),
    ),
    "too_slow": (f"python {SHORT_RLOO} {STAGES} --learning_rate 3e-6", ()),
    "ratio": (f"python {SHORT_RLOO} {STAGES} --num_ppo_epochs 2", DROPOUT),
    "values": (
        f"python {SHORT_PPO} {STAGES}",
        ((PPO, "PPO-4", "policy.parameters()", "policy.model.parameters()"),),
    ),
    "two_processes": (
        f"torchrun --nproc_per_node 2 {SHORT_RLOO} {STAGES}",
        ((RLOO, "REW-7", "accelerator.gather(", OWN_SHARE),),
    ),
}
SYMPTOMS = {  # name: (broken run, healthy run, metric, what the figure says)
    "nan": ("nan", "rloo", "val/num_stop_token_ids", "answers of 128 that end"),
    "kl_negative": ("kl_negative", "rloo", "objective/kl", "KL, nats an answer"),
    "kl_explodes": ("no_kl", "rloo", "objective/kl", "KL, nats an answer"),
    "loss": ("no_gradient", "rloo", "policy/grad_norm", "norm of the gradient"),
    "no_end": ("no_end", "rloo", "val/num_stop_token_ids", "answers of 128 that end"),
    "alike": ("greedy", "rloo", "policy/grad_norm", "norm of the gradient"),
    "nonsense": ("no_kl", "rloo", "objective/parses", "share of grammatical answers"),
    "length": ("long", "rloo", "val/sequence_lengths", "tokens of an answer"),
    "reward": ("too_slow", "rloo", "objective/scores", "score"),
    "ratio": ("ratio", "rloo2", "val/first_ratio", "the ratio farthest from 1, first step"),
    "values": ("values", "ppo", "val/var_explained", "variance that the values explain"),
    "gpus": ("two_processes", "rloo", "objective/scores", "score"),
}
MORE = "policy/grad_norm val/first_ratio val/var_explained objective/parses val/equal_scores".split()


def boxed(prompts, completions):
    """A reward that no answer gets: it looks for a form that the prompts did not ask for."""
    return [float("\\boxed" in text) for text in completions]


def words(prompts, completions):
    """A reward that pays for length alone."""
    return [float(len(text.split())) for text in completions]


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    seeds: tuple[int, ...] = (1,)
    columns: tuple[str, ...] = (*COLUMNS, *MORE)


@dataclass
class DrawArgs:
    """The figures."""

    tag: str
    """folder of the results"""


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, runs = args.tag or git_tag(), []
    for seed in args.seeds:
        for name, (command, changes) in RUNS.items():
            code = code_of(name, changes, tag) if changes else None
            runs.append(Run(name, command, seed, tag, "symptoms", code))
    no_eos = code_of("sft_no_eos", ((UTILS, "DATA-2", "[*answer, tokenizer.eos_token_id]", "answer"),), tag)
    first = {"sft_no_eos": (f"python rlhf_details/train_sft.py --output_dir {MODELS}/sft_no_eos", no_eos)}
    return run_study(stage_runs(args.seeds, tag, first), runs, args, tag)


def draw(args: DrawArgs):
    """Writes a figure for each symptom, and prints where its metric begins and ends in both runs."""
    folder = ROOT / "benchmark" / "results" / args.tag / "symptoms"
    for name, (broken, healthy, metric, title) in SYMPTOMS.items():
        picture, axis = blank(1, 1, figsize=(3.6, 2.1), layout="constrained")
        for exp, colour, label in ((healthy, "#888888", "healthy"), (broken, "#c4261b", "broken")):
            columns = min(read_seeds(folder, exp).items())[1]
            shown = columns["update"] > 0
            axis.plot(columns["update"][shown], columns[metric][shown], color=colour, label=label)
            print(f"{name:12} {label:8} {metric:24} {columns[metric][shown][0]:9.3g} {columns[metric][shown][-1]:9.3g}")
        frame(axis, title, "update")
        axis.legend(frameon=False, fontsize=7)
        matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
        save(picture, f"static/symptom_{name}.svg", name)


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
