"""
When what samples is not quite what trains: how far may the two part, and what does a correction save? Over seeds.

    python benchmark/studies/mismatch.py run --tag TAG --workers 2     (about an hour and a half of one core)
    python benchmark/studies/mismatch.py draw --tag TAG --vllm TAG

RLOO and GRPO on the embedded task, 25 updates of 32 prompts x 4. Rollouts are sampled by a copy of the policy whose
matrices are rounded to bf16, or to 8, 4 or 3 bits with a scale for each output. Training, KL and held-out figures are
those of the policy as it is. What the copy's log-probs miss is corrected as with --sampler vllm
(`--sampler_correction`). A row is compared with the run that samples by the policy itself. `draw` writes
results/TAG/mismatch.md, results/worth_mismatch.toml and static/mismatch.svg.

`python benchmark/studies/mismatch.py page BITS SCRIPT [flags]` is one such run, with BITS 16 for bf16.
"""

import copy
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in (".", "studies"))
from ablations import NAMES, RUN, changes, levels, outcome, verdicts, worth
from intervals import ROOT, experiments, last, mean_interval, read_seeds, words
from plot import blank, frame, save

from benchmark import COLUMNS, STAGES, Run, StudyArgs, git_tag, run_command, run_study, stage_runs

BITS = {"bf16": 16, "8 bits": 8, "4 bits": 4, "3 bits": 3}
CORRECTIONS = {"none": "not corrected", "truncate": "ratio at most 2", "mask": "ratio in 0.5 .. 2, else 0"}
COLOURS = {"none": "#c4501b", "truncate": "#3465a4", "mask": "#4e9a06"}
SHORT = f"{RUN} --total_episodes 3200 {STAGES}"
MORE = "val/logprob_gap val/sampler_weight val/sampler_cut"


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    columns: tuple[str, ...] = (*COLUMNS, *MORE.split())
    every: int = 5


@dataclass
class DrawArgs:
    """The figure and the tables."""

    tag: str
    """folder of the results"""
    vllm: tuple[str, ...]
    """folder of the results of vLLM itself, made by benchmark.py"""
    output: str = "static/mismatch.svg"
    """the figure"""


# ---- one run ---------------------------------------------------------------------------------------------------------
@torch.no_grad()
def rounded(policy, bits):
    """A copy of a policy with rounded matrices: bf16 for 16 bits, else whole multiples of a scale for each output."""
    found = copy.deepcopy(policy)
    for p in found.parameters():
        if p.dim() > 1 and bits == 16:
            p.copy_(p.bfloat16())
        elif p.dim() > 1:
            scale = (p.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=1e-12)
            p.copy_((p / scale).round() * scale)
    return found


def page(bits, script, *flags):
    """Runs a script as with --sampler vllm, with the rounded policy in the place of vLLM."""
    from rlhf_details import utils
    from rlhf_details.plumbing import cli, vllm

    def sample(policy, *rows, **how):
        policy = rounded(policy, bits) if how["key"][1] == utils.TRAINING else policy
        return utils.sample(policy, *rows, **how)

    vllm.sampler, cli.find_spec = (lambda *_: sample), (lambda name: True)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


# ---- run and draw ----------------------------------------------------------------------------------------------------
def variants():
    """{name: (algorithm, kind of rounding, correction)}; a base has no kind."""
    found = {}
    for algorithm in ("rloo", "grpo"):
        found[algorithm] = algorithm, "", ""
        for kind, bits in BITS.items():
            found |= {f"{algorithm}_{bits}_{how}": (algorithm, kind, how) for how in CORRECTIONS}
    return found


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, runs = args.tag or git_tag(), []
    for seed in args.seeds:
        for name, (algorithm, kind, how) in variants().items():
            script = f"{{root}}/rlhf_details/train_{algorithm}.py"
            command = f"python {script} {SHORT}"
            if kind:
                command = f"python benchmark/studies/mismatch.py page {BITS[kind]} {script} {SHORT}"
                command += f" --sampler vllm --sampler_correction {how}"
            runs.append(Run(name, command, seed, tag, "mismatch"))
    return run_study(stage_runs(args.seeds, tag), runs, args, tag)


def draw(args: DrawArgs):
    """Writes the tables and the figure."""
    results, effects, bases, seen = ROOT / "benchmark" / "results" / args.tag, {}, {}, {}
    for name, (algorithm, kind, _) in variants().items():
        mine = {n: outcome(seed) for n, seed in read_seeds(results / "mismatch", name).items()}
        if kind:
            other = {n: outcome(seed) for n, seed in read_seeds(results / "mismatch", algorithm).items()}
            mine = {n: {m: mine[n][m] - other[n][m] for m in NAMES} for n in sorted(mine.keys() & other.keys())}
            columns = list(read_seeds(results / "mismatch", name).values())
            seen[name] = [np.nanmean([seed[x] for seed in columns]) for x in MORE.split()]
        result = {m: mean_interval([x[m] for x in mine.values()]) for m in NAMES} | {"seeds": mine}
        (effects if kind else bases)[name] = result
    verdict, sure = verdicts(effects)
    rows = []
    for name, effect in effects.items():
        algorithm, kind, how = variants()[name]
        tag = "GEN-15" if how == "none" else ""  # what the correction is worth
        rows.append((name, tag, f"sampled by a copy in {kind}, {CORRECTIONS[how]}", algorithm, effect))
    lines = ["# When what samples is not quite what trains", ""]
    lines += [
        f"Written by `python benchmark/studies/mismatch.py draw --tag {args.tag}`, in the form of the ablations: a"
    ]
    lines += ["row is the run with the rounded sampler less that without it, paired by seed, and bold where p is below"]
    lines += ["0.05 after Holm's correction over this table.", ""]
    what = {"rloo": "RLOO, an action is a response", "grpo": "GRPO, an action is a token"}
    lines += levels([(name, what[name], effect) for name, effect in bases.items()])
    lines += [
        "",
        *short(effects, seen),
        "",
        *changes(rows, verdict, sure),
        "",
        "What the runs logged, means over updates and seeds.",
        "",
    ]
    lines += ["| sampler | correction | base | a batch's largest gap of a log-prob, mean | mean weight | share cut |"]
    lines += ["|---|---|---|---:|---:|---:|"]
    for name, numbers in seen.items():
        algorithm, kind, how = variants()[name]
        cells = [f"{x:.4f}" for x in numbers]
        lines.append(f"| {kind} | {CORRECTIONS[how]} | {algorithm} | {' | '.join(cells)} |")
    lines += ["", *of_vllm([results.parent / tag / "vllm" for tag in args.vllm])]
    (results / "mismatch.md").write_text("\n".join(lines) + "\n")
    text = "# Written by benchmark/studies/mismatch.py draw.\n" + worth([r for r in rows if r[1]], verdict, sure)
    (results.parent / "worth_mismatch.toml").write_text(text)
    figure(effects, args.output)
    print("\n".join(lines))


def short(effects, seen):
    """The table of the site: gold and KL at the end, each less the base's, of the uncorrected and the bounded run."""
    head = "| base | what samples | a batch's largest gap of a log-prob, mean | gold, not corrected"
    head += " | gold, ratio at most 2 | KL, not corrected | KL, ratio at most 2 |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|"]
    for algorithm in ("rloo", "grpo"):
        for kind, bits in BITS.items():
            runs = [effects[f"{algorithm}_{bits}_{how}"] for how in ("none", "truncate")]
            cells = [words(run[figure], "+.2f") for figure in ("gold", "kl") for run in runs]
            gap = seen[f"{algorithm}_{bits}_none"][0]
            lines.append(f"| {algorithm.upper()} | {kind} | {gap:.2f} | {' | '.join(cells)} |")
    return lines


def of_vllm(folders):
    """The table of vLLM itself beside utils.sample: held-out figures at the end, and the largest gap of all updates."""
    lines = ["| run | seeds | gold | learned score | KL | largest gap of a log-prob in any update |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for folder in folders:
        found = experiments(folder)
        for own in (name for name in found if name.endswith("own")):
            ends, algorithm = {}, own.rpartition("_")[0].upper() or "RLOO"
            for sampler in ("own", "vllm"):
                seeds = found[own.removesuffix("own") + sampler]
                ends[sampler] = [
                    np.array([last(seeds[n][f"eval/objective/{x}"]) for n in sorted(seeds)])
                    for x in ("gold", "scores", "kl")
                ]
                gap = max(np.nanmax(seed["val/logprob_gap"]) for seed in seeds.values())
                cells = [words(mean_interval(x)) for x in ends[sampler]]
                lines.append(f"| {algorithm}, `--sampler {sampler}` | {len(seeds)} | {' | '.join(cells)} | {gap:.6f} |")
            cells = [words(mean_interval(x - y), "+.2f") for x, y in zip(ends["vllm"], ends["own"], strict=True)]
            lines.append(f"| {algorithm}, vllm less own, by seed | | {' | '.join(cells)} | |")
    return lines


def figure(effects, output):
    """Gold at the end less the base's, a panel for each algorithm: means and intervals over the kinds of rounding."""
    picture, axes = blank(1, 2, figsize=(8, 3.2), sharey=True)
    for axis, (algorithm, title) in zip(axes, (("rloo", "RLOO"), ("grpo", "GRPO")), strict=True):
        for offset, (how, label) in enumerate(CORRECTIONS.items()):
            found = [effects[f"{algorithm}_{bits}_{how}"]["gold"] for bits in BITS.values()]
            x = np.arange(len(BITS)) + 0.2 * (offset - 1)
            mean, low, high = np.array([interval[:3] for interval in found]).T
            axis.errorbar(x, mean, (mean - low, high - mean), fmt="o", markersize=4, color=COLOURS[how], label=label)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(BITS)), BITS)
        frame(axis, f"{title}: gold at the end, less the base's", "what samples")
    axes[0].legend(frameon=False, fontsize=7, loc="lower left")
    picture.tight_layout()
    save(picture, output, "mismatch")


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["page"]:
        page(int(sys.argv[2]), *sys.argv[3:])
    else:
        sys.exit(run_command(COMMANDS))
