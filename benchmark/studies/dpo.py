"""
DPO on the embedded task over seeds: its gold over the KL beside RLOO, PPO, GRPO and best-of-n, and what its parts do.

    python benchmark/studies/dpo.py run --tag TAG --workers 2       (about an hour of one core for ten seeds)
    python benchmark/studies/dpo.py draw --tag TAG --others cc51011
    python benchmark/studies/dpo.py replay --tag TAG               (results/TAG/dpo_replay.md)

`run` goes on where it stopped. A seed has its own SFT model. DPO learns from the 3,072 comparisons that the seed's
reward model learns from, with the same candidates. held_out.py measures each policy on the 512 held-out prompts; its
learned score is that reward model's. `draw` writes results/TAG/dpo.md, results/worth_dpo.toml and static/dpo.svg. The
other algorithms' figures are those of the studies grpo and overoptimisation in the folder --others: the same task and
seeds, with SFT and reward models of their own. `replay` trains seed 1's SFT model on pairs in the same order by us and
by TRL 1.16's DPOTrainer, and compares losses, gradient norms and weights.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ablations import code_of
from against_trl import distance, run_trl

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in (".", "checks"))
from intervals import ROOT, holm, last, mean_interval, read_seeds, words
from mutations import DPO
from plot import blank, frame, save

from benchmark import MODELS, Run, StudyArgs, git_tag, run_command, run_study, stage_runs

RUN = f"python rlhf_details/train_dpo.py --checkpoint_every 0 --output_dir policy --sft_model_path {MODELS}/sft"
SUM, REFERENCES = "(logprobs * is_target).sum(1)", "candidate_logprobs(policy, train, size, accelerator)"
VARIANTS = {  # name: (tag, what is changed, flags, mutations)
    "dpo": ("", "DPO, beta 0.5", "", ()),
    "beta_0.1": ("", "beta 0.1", "--beta 0.1", ()),
    "beta_2": ("", "beta 2", "--beta 2", ()),
    "smoothing": ("DPO-2", "a tenth of the labels taken for wrong (cDPO; an option)", "--label_smoothing 0.1", ()),
    "mean": (
        "DPO-1",
        "a response's log-prob: the mean over its tokens",
        "",
        ((DPO, "DPO-1", SUM, f"{SUM} / is_target.sum(1).clamp(min=1)"),),
    ),
    "ipo": ("DPO-3", "the loss of IPO (an option)", "--loss ipo", ()),
    "no_reference": ("DPO-4", "no reference: the score is beta times the log-prob", "", (
        (DPO, "DPO-4", REFERENCES, f"0 * {REFERENCES}"),)),
}  # fmt: skip
MEASURES = {"gold": "gold", "scores": "learned score", "kl": "KL, nats", "ended": "share ended", "length": "tokens"}
TESTED = "gold", "kl", "ended"
OTHERS = {"rloo": "#3465a4", "ppo": "#4e9a06", "grpo": "#8f5902"}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    every: int = 1000  # The last row is enough.


@dataclass(kw_only=True)
class DrawArgs:
    """The figure and the tables."""

    tag: str
    """folder of the results"""
    others: str
    """folder of the results of the other algorithms"""
    output: str = "static/dpo.svg"
    """the figure"""


@dataclass
class ReplayArgs:
    """The same pairs by us and by TRL 1.16."""

    tag: str
    """folder of the results; its models are those of `run`"""
    environments: str = "runs/environments"
    """folder of the environment trl-1.16.0, which is made where it is missing"""


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, failed = args.tag or git_tag(), []
    for seed in args.seeds:
        runs, measured = [], []
        for name, (_, _, flags, mutations) in VARIANTS.items():
            code = code_of(f"dpo_{name}", mutations, tag) if mutations else None
            runs.append(Run(name, f"{RUN} {flags}".strip(), seed, tag, "dpo", code))
            policy = "{root}/runs/benchmark/" + f"{tag}/dpo/{name}_s" + "{seed}/policy"
            command = (
                f"python benchmark/studies/held_out.py --policy {policy} --sft {MODELS}/sft --reward {MODELS}/reward"
            )
            measured.append(Run(f"{name}_measured", command, seed, tag, "dpo"))
            runs[-1].makes = None if measured[-1].is_done() else runs[-1].folder / "policy"
        failed += run_study(stage_runs((seed,), tag), runs, args, tag)
        failed += run_study([], measured, args, tag)
    return failed


def ends(seeds):
    """{seed: {measure: its last held-out value}}"""
    return {n: {m: last(x[f"eval/objective/{m}"]) for m in MEASURES} for n, x in seeds.items()}


def figure(found, others, best_of_n, output):
    """Gold over the KL: a small point for each seed, a large one for their mean."""
    picture, axis = blank(1, 1, figsize=(6.5, 4))
    betas = ["beta_0.1", "dpo", "beta_2"]
    groups = [
        (found[name], VARIANTS[name][1].replace("DPO, ", ""), "#c4501b", m)
        for name, m in zip(betas, "^os", strict=True)
    ]
    groups = [(seeds, f"DPO, {label}", colour, mark) for seeds, label, colour, mark in groups]
    groups += [(others[name], name.upper(), colour, "D") for name, colour in OTHERS.items()]
    for seeds, label, colour, mark in groups:
        x, y = (np.array([seed[m] for seed in seeds.values()]) for m in ("kl", "gold"))
        axis.plot(x, y, mark, color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
        axis.plot(x.mean(), y.mean(), mark, color=colour, markersize=8, label=label)
    kl, gold = (np.mean([seed[f"objective/{m}"] for seed in best_of_n.values()], 0) for m in ("kl", "gold"))
    axis.plot(kl, gold, "-", color="grey", linewidth=1.2, label="best of 1 .. 64, by the reward model")
    frame(axis, "gold, held out", "KL, nats a response")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    picture.tight_layout()
    save(picture, output, "dpo")


def draw(args: DrawArgs):
    """Writes the tables and the figure."""
    results = ROOT / "benchmark" / "results"
    found = {name: ends(read_seeds(results / args.tag / "dpo", f"{name}_measured")) for name in VARIANTS}
    others = {name: ends(read_seeds(results / args.others / "grpo", name)) for name in OTHERS}
    effects = {}
    for name in [name for name in VARIANTS if name != "dpo"]:
        common = sorted(found[name].keys() & found["dpo"].keys())
        effects[name] = {m: mean_interval([found[name][n][m] - found["dpo"][n][m] for n in common]) for m in MEASURES}
    keys = [(name, m) for name in effects for m in TESTED]
    sure = {key for key, p in zip(keys, holm([effects[n][m][3] for n, m in keys]), strict=True) if p < 0.05}

    def row(label, seeds):
        cells = (words(mean_interval([seed[m] for seed in seeds.values()])) for m in MEASURES)
        return f"| {label} | {len(seeds)} | {' | '.join(cells)} |"

    head = [f"| {{}} | seeds | {' | '.join(MEASURES.values())} |", "|---|---:|" + "---:|" * len(MEASURES)]
    lines = ["# DPO", "", f"Written by `python benchmark/studies/dpo.py draw --tag {args.tag} --others {args.others}`."]
    lines += ["Figures are of 512 held-out prompts at the end: means over seeds with Student's 95 % interval.", ""]
    lines += [head[0].format("policy"), head[1]]
    lines += [row(VARIANTS[name][1], found[name]) for name in ("beta_0.1", "dpo", "beta_2")]
    lines += [row(f"{name.upper()} ({args.others})", seeds) for name, seeds in others.items()]
    lines += [
        "",
        "Differences to DPO with beta 0.5, paired by seed; bold where p is below 0.05 after Holm's correction",
        "",
    ]
    lines += [head[0].format("what is changed"), head[1]]
    text = "# Written by benchmark/studies/dpo.py draw.\n"
    for name, effect in effects.items():
        tag, what, *_ = VARIANTS[name]
        marks = {m: "**" * ((name, m) in sure) for m in MEASURES}
        cells = (f"{marks[m]}{words(effect[m], '+.2f')}{marks[m]}" for m in MEASURES)
        lines.append(f"| {what}{f' [{tag}]' * bool(tag)} | {len(found[name])} | {' | '.join(cells)} |")
        if tag:
            shows = any(effect[m][1] > 0 or effect[m][2] < 0 for m in TESTED)
            verdict = (
                "matters" if any((name, m) in sure for m in TESTED) else "perhaps" if shows else "does not show here"
            )
            shown = [m for m in TESTED if m != "ended" or effect[m][1] > 0 or effect[m][2] < 0]
            numbers = ", ".join(
                f"{MEASURES[m].split(',')[0]} {effect[m][0]:+.2f}{'*' * ((name, m) in sure)}" for m in shown
            )
            text += f"\n[{tag}]\nsays = {json.dumps(f'{what}, dpo: {numbers}; {verdict}')}\n"
    (results / "worth_dpo.toml").write_text(text)
    (results / args.tag / "dpo.md").write_text("\n".join(lines) + "\n")
    figure(found, others, read_seeds(results / args.others / "overoptimisation", "best_of_n"), args.output)
    print("\n".join(lines))


def replay(args: ReplayArgs):
    """Eight steps of 32 pairs of reviews. Writes the table."""
    from rlhf_details import toy, train_dpo, utils

    folder, lines = ROOT / "runs" / "benchmark" / args.tag / "dpo_replay", []
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
        f"Written by `python benchmark/studies/dpo.py replay --tag {args.tag}`: the largest relative",
    ]
    head += ["differences over the steps, and the distance of the weights as a share of how far ours have moved.", ""]
    head += [
        "| loss | steps | loss | gradient norm | log-prob of the chosen | weights |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    (ROOT / "benchmark" / "results" / args.tag / "dpo_replay.md").write_text(text)
    print(text)


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw), "replay": (ReplayArgs, replay)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
