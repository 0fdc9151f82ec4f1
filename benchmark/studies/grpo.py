"""
GRPO beside RLOO and PPO on the embedded tasks, and what its parts are worth, over seeds.

    python benchmark/studies/grpo.py run --tag TAG --workers 2         (about two hours of one core for ten seeds)
    python benchmark/studies/grpo.py draw --tag TAG

`run` goes on where it stopped. `draw` writes results/TAG/grpo.md and static/grpo.svg. A seed has its own SFT and reward
model, which all of its runs share. "toy" and "toy-sum" are whole runs with the scripts' own settings; the parts of GRPO
are switched by flags in runs of 25 updates of 32 prompts x 4, as in ablations.py, and compared with the same run as it
is by default. Parts that act on the ratio are switched in runs of four passes over each batch.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ablations import NAMES, changes, levels, outcome, verdicts, worth
from against_trl import lengths_stages

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT, experiments, last, mean_interval, read_seeds, words
from plot import band, blank, frame, save

from benchmark import COLUMNS, MODELS, STAGES, Run, StudyArgs, git_tag, run_command, run_study, stage_runs

RUN = "--num_sample_generations 0 --checkpoint_every 0 --output_dir policy"
SUM = f"--dataset toy-sum --sft_model_path {MODELS}/sum_sft {RUN}"
SHORT = f"python rlhf_details/train_grpo.py {RUN} {STAGES} --batch_size 128 --total_episodes 3200"
ALGORITHMS = {"grpo": "#c4501b", "rloo": "#3465a4", "ppo": "#4e9a06"}  # and their colours
CURVES = {  # name: command
    **{name: f"python rlhf_details/train_{name}.py {RUN} {STAGES}" for name in ALGORITHMS},
    **{f"sum_{name}": f"python rlhf_details/train_{name}.py {SUM}" for name in ALGORITHMS},
}
UNDIVIDED = f"{CURVES['grpo']} --scale_advantages none"
CURVES |= {
    "undivided": UNDIVIDED,
    "undivided_ratio": f"{UNDIVIDED} --kl_times_ratio",
    "undivided_response": f"{UNDIVIDED} --loss_normalization response",
}
CURVES["sum_mask_equal"] = f"python rlhf_details/train_grpo.py {SUM} --mask_equal"
LABELS = {"grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "undivided": "GRPO, not divided"}
LABELS |= {"undivided_ratio": "the same, KL times the ratio", "undivided_response": "the same, by response"}
BASES = {
    "short": ("grpo", "GRPO, 25 updates of 32 prompts x 4"),
    "steps": ("grpo4", "grpo with 4 passes over each batch"),
}
PARTS = {  # name: (details that it measures, what is changed, the run it is compared with, flags)
    "short": ("", "", "", ""),
    "no_kl": ("", "no KL in the loss", "short", "--kl_coef 0"),
    "kl_times_ratio": ("GRPO-2", "KL times the ratio (DeepSeek-V3.2, TRL; an option)", "short", "--kl_times_ratio"),
    "scale_batch": ("GRPO-1", "advantages over the batch's deviation", "short", "--scale_advantages batch"),
    "scale_none": ("GRPO-1", "advantages not divided", "short", "--scale_advantages none"),
    "response": ("GRPO-4", "loss averaged within responses first", "short", "--loss_normalization response"),
    "constant": ("GRPO-4", "loss over a constant", "short", "--loss_normalization constant"),
    "dr_grpo": ("", "both of Dr. GRPO", "short", "--scale_advantages none --loss_normalization constant"),
    "mask_truncated": ("GRPO-7", "no loss where a response did not end (DAPO; an option)", "short", "--mask_truncated"),
    "soft_overlong": ("GRPO-9", "a price on the last 8 tokens (DAPO; an option)", "short", "--soft_overlong 8"),
    "steps": ("", "", "", "--num_ppo_epochs 4"),
    "clip_higher": (
        "GRPO-3",
        "a ratio clipped above 1.28 (DAPO; an option)",
        "steps",
        "--num_ppo_epochs 4 --cliprange_high 0.28",
    ),
    "gspo": (
        "GRPO-5",
        "GSPO: a ratio a response, in 0.95 .. 1.07, by response (an option)",
        "steps",
        "--num_ppo_epochs 4 --objective gspo --loss_normalization response --cliprange 0.05 --cliprange_high 0.07",
    ),
    "cispo": (
        "GRPO-6",
        "CISPO: the ratio a weight of at most 5 (an option)",
        "steps",
        "--num_ppo_epochs 4 --objective cispo --cliprange_high 4",
    ),
}
SUMS_STEPS = f"python rlhf_details/train_grpo.py {SUM} --total_episodes 76800 --num_ppo_epochs 4"
LENGTHS = f"python rlhf_details/train_grpo.py {RUN} --response_length 48 --batch_size 64 --total_episodes 3200"
LENGTHS += f" --sft_model_path {MODELS}/lengths_sft --reward_model_path {MODELS}/lengths_reward"
GSPO, CISPO = (PARTS[name][3].removeprefix("--num_ppo_epochs 4 ") for name in ("gspo", "cispo"))
ELSEWHERE = {  # name: (details that it measures, what is changed, the run it is compared with or "", command)
    "sum_steps": ("", "toy-sum, 4 passes over each batch", "", SUMS_STEPS),
    "sum_gspo": ("GRPO-5", "GSPO", "sum_steps", f"{SUMS_STEPS} {GSPO}"),
    "sum_cispo": ("GRPO-6", "CISPO", "sum_steps", f"{SUMS_STEPS} {CISPO}"),
    "lengths": ("", "lengths, cut after 48 tokens", "", LENGTHS),
    "lengths_mask_truncated": ("GRPO-7", PARTS["mask_truncated"][1], "lengths", f"{LENGTHS} --mask_truncated"),
    "lengths_soft_overlong": ("GRPO-9", "a price on the last 12 tokens", "lengths", f"{LENGTHS} --soft_overlong 12"),
    "lengths_no_penalty": (
        "REW-3",
        "nothing paid for a missing EOS",
        "lengths",
        f"{LENGTHS} --missing_eos_penalty None",
    ),
}
MEASURES = {"gold": "gold", "scores": "learned score", "kl": "KL, nats", "ended": "share ended", "length": "tokens"}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    columns: tuple[str, ...] = (*COLUMNS, "time/from_scratch")
    every: int = 5
    only: tuple[str, ...] = ()
    """names of runs, such as part_gspo; none: all"""


@dataclass
class DrawArgs:
    """The figure and the tables."""

    tag: str
    """folder of the results"""
    more: tuple[str, ...] = ()
    """folders with parts that the first one does not have"""
    timed: tuple[int, ...] | None = None
    """seeds whose runs had the machine to themselves: the minutes are theirs; None: all"""
    output: str = "static/grpo.svg"
    """the figure"""


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag = args.tag or git_tag()
    sums = f"python rlhf_details/train_sft.py --dataset toy-sum --output_dir {MODELS}/sum_sft"
    commands = CURVES | {f"part_{name}": f"{SHORT} {flags}".strip() for name, (_, _, _, flags) in PARTS.items()}
    commands |= {name: command for name, (_, _, _, command) in ELSEWHERE.items()}
    commands = {name: command for name, command in commands.items() if not args.only or name in args.only}
    runs = [Run(name, command, seed, tag, "grpo") for seed in args.seeds for name, command in commands.items()]
    first, second = {"sum_sft": (sums, None)} if any(name.startswith("sum_") for name in commands) else {}, {}
    if any(name.startswith("lengths") for name in commands):
        more, second = lengths_stages(args.seeds)
        first |= more
    words = " ".join(commands.values()).split()
    stages = [
        [run for run in batch if any(word.endswith(f"/{run.makes.name}") for word in words)]
        for batch in stage_runs(args.seeds, tag, first, second)
    ]
    return run_study(stages, runs, args, tag)


def ends(seeds, measure):
    """{seed: the last held-out figure}"""
    return {seed: last(columns[f"eval/objective/{measure}"]) for seed, columns in seeds.items()}


def cell(numbers):
    """A mean with its interval."""
    return words(mean_interval(numbers))


def paired(a, b):
    """The numbers of a less those of b, of the seeds that both have."""
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def curves_table(found, task, measures, timed=None):
    """Lines of a table of whole runs, and of some differences, paired by seed. timed: the seeds whose minutes count."""
    prefix, head = "sum_" * (task == "toy-sum"), [*measures.values(), "minutes"]
    more = [] if prefix else ["undivided", "undivided_ratio", "undivided_response"]
    pairs = [("grpo", "rloo"), ("grpo", "ppo"), *((name, "rloo") for name in more)]
    pairs += [("undivided", "grpo"), ("undivided_ratio", "undivided")] if more else []
    lines = [f"| {task} | seeds | {' | '.join(head)} |", "|---|---:|" + "---:|" * len(head)]

    def minutes(name):
        seeds = {seed: last(x["time/from_scratch"]) / 60 for seed, x in found[name].items()}
        return {seed: x for seed, x in seeds.items() if timed is None or seed in timed}

    for name in (*ALGORITHMS, *more):
        cells = [cell(list(ends(found[prefix + name], m).values())) for m in measures]
        cells.append(cell(list(minutes(prefix + name).values())))
        lines.append(f"| {LABELS[name]} | {len(found[prefix + name])} | {' | '.join(cells)} |")
    for name, other in pairs:
        cells = [cell(paired(ends(found[prefix + name], m), ends(found[prefix + other], m))) for m in measures]
        mine, others = minutes(prefix + name), minutes(prefix + other)
        ratios = [mine[seed] / others[seed] for seed in sorted(mine.keys() & others.keys())]
        cells.append(f"times {np.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
        lines.append(f"| {LABELS[name]}, less {LABELS[other]} | | {' | '.join(cells)} |")
    return lines


def parts(folders):
    """({part: its effect}, {base: its outcome}), both as ablations.effects has them. A part and the run that it is
    compared with are of one folder, the first one that has the part.
    """
    effects, bases = {}, {}
    for name, (_, _, base, _) in PARTS.items():
        folder = next(folder for folder in folders if f"part_{name}" in experiments(folder))
        mine = {n: outcome(seed) for n, seed in read_seeds(folder, f"part_{name}").items()}
        if base:
            other = {n: outcome(seed) for n, seed in read_seeds(folder, f"part_{base}").items()}
            mine = {n: {m: mine[n][m] - other[n][m] for m in NAMES} for n in sorted(mine.keys() & other.keys())}
        result = {m: mean_interval([x[m] for x in mine.values()]) for m in NAMES} | {"seeds": mine}
        (effects if base else bases)[name] = result
    return effects, bases


def sums_without_equal_groups(folders):
    """What --mask_equal changes on toy-sum, paired by seed, in words. Without a correction it is at most "perhaps"."""
    folder = next(folder for folder in folders if "sum_mask_equal" in experiments(folder))
    masked, plain = (read_seeds(folder, name) for name in ("sum_mask_equal", "sum_grpo"))
    means = {m: mean_interval(paired(ends(masked, m), ends(plain, m))) for m in ("scores", "kl")}
    shows = "perhaps" if any(low > 0 or high < 0 for _, low, high, _ in means.values()) else "does not show here"
    correct, kl = (f"{mean:+.3f} ({low:+.3f} .. {high:+.3f})" for mean, low, high, _ in means.values())
    what = "groups of equal scores left out of the loss (an option), toy-sum"
    return f"{what}, {len(masked)} seeds: share correct {correct}, KL {kl}; {shows}"


def elsewhere(folders, task, measures):
    """Lines of a table: the runs of ELSEWHERE on a task. A base has its figures, all others their difference to it."""
    lines = [f"| {task} | details | seeds | {' | '.join(measures.values())} |"]
    lines.append("|---|---|---:|" + "---:|" * len(measures))
    for name, (tags, what, base, _) in ELSEWHERE.items():
        if name.startswith({"toy-sum": "sum_", "lengths": "lengths"}[task]):
            folder = next(folder for folder in folders if name in experiments(folder))
            mine, cells = read_seeds(folder, name), []
            for measure in measures:
                figures = ends(mine, measure)
                other = ends(read_seeds(folder, base), measure) if base else dict.fromkeys(figures, 0.0)
                cells.append(cell(paired(figures, other)))
            label = f'{what}, less "{ELSEWHERE[base][1]}"' if base else what
            lines.append(f"| {label} | {tags} | {len(mine)} | {' | '.join(cells)} |")
    return lines


def on_lengths(folders, part):
    """(what a part changes where reviews are cut after 48 tokens, in words; whether an interval there is apart from 0),
    ("", False) of a part that was not run there.
    """
    if f"lengths_{part}" not in ELSEWHERE:
        return "", False
    folder = next(folder for folder in folders if f"lengths_{part}" in experiments(folder))
    mine, base = read_seeds(folder, f"lengths_{part}"), read_seeds(folder, "lengths")
    means = {m: mean_interval(paired(ends(mine, m), ends(base, m))) for m in ("gold", "ended", "length")}
    numbers = ", ".join(f"{MEASURES[m].removeprefix('share ')} {mean:+.2f}" for m, (mean, *_) in means.items())
    return f"; {ELSEWHERE['lengths'][1]}: {numbers}", any(low > 0 or high < 0 for _, low, high, _ in means.values())


def figure(found, output):
    picture, axes = blank(1, 3, figsize=(11, 3.2))
    panels = ("gold", "", "toy: gold"), ("kl", "", "toy: KL, nats a response"), ("scores", "sum_", "toy-sum: correct")
    for axis, (metric, prefix, title) in zip(axes, panels, strict=True):
        for name, colour in ALGORITHMS.items():
            seeds = found[prefix + name].values()
            curves = [columns[f"objective/{metric}"] for columns in seeds]
            episodes = next(columns["episode"] for columns in seeds)
            kept = ~np.isnan(curves[0])
            curves = np.stack([curve[kept] for curve in curves], 1)  # [updates, seeds]
            band(axis, episodes[kept] / 1000, curves, name.upper(), color=colour, linewidth=1.3)
        frame(axis, title, "thousand episodes")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    picture.tight_layout()
    save(picture, output, "grpo")


def draw(args: DrawArgs):
    """Writes the tables and the figure."""
    results = ROOT / "benchmark" / "results" / args.tag
    found = {name: read_seeds(results / "grpo", name) for name in CURVES if name != "sum_mask_equal"}
    folders = [results.parent / tag / "grpo" for tag in (args.tag, *args.more)]
    effects, bases = parts(folders)
    verdict, sure = verdicts(effects)
    rows = [(name, *PARTS[name][:2], BASES[PARTS[name][2]][0], effect) for name, effect in effects.items()]
    seeds = " ".join(map(str, args.timed or ()))
    more = f" --more {' '.join(args.more)}" if args.more else ""
    flags, of = (f" --timed {seeds}", f", of the seeds {seeds} alone") if seeds else ("", "")
    lines = [
        "# GRPO beside RLOO and PPO, and what its parts are worth",
        "",
        f"Written by `python benchmark/studies/grpo.py draw --tag {args.tag}{more}{flags}`.",
        "Figures are of 512 held-out prompts at the end of training: means over seeds with Student's 95 % interval;",
        f"differences are paired by seed. Minutes are of a run on one thread{of}; of two",
        "systems, the median ratio and its range over seeds.",
        "",
        *curves_table(found, "toy", MEASURES, args.timed),
        "",
        *curves_table(found, "toy-sum", {"scores": "share correct", "kl": "KL, nats"}, args.timed),
        "",
        "The parts, on toy, in the form of the ablations: a row is the run with the change less that without it. It is",
        "bold where p is below 0.05 after Holm's correction over this table. '10: 9, 8' is ten seeds, in nine of which",
        "gold ended higher, and in eight the KL. Gold over the run is that of every fifth update.",
        "",
        *levels([(*BASES[name], effect) for name, effect in bases.items()]),
        "",
        *changes(rows, verdict, sure),
    ]
    equal = sums_without_equal_groups(folders)
    lines += ["", 'A line with "less" is a difference, paired by seed.']
    lines += ["", *elsewhere(folders, "toy-sum", {"scores": "share correct", "kl": "KL, nats"})]
    lines += ["", *elsewhere(folders, "lengths", MEASURES)]
    lines += ["", f"[GRPO-8] {equal}."]
    there = {name: on_lengths(folders, name) for name in effects}
    shown = {name: "perhaps" if x.startswith("does not") and there[name][1] else x for name, x in verdict.items()}
    text = worth(rows, shown, sure, lambda name: there[name][0])
    text = f"# Written by benchmark/studies/grpo.py draw.\n{text}"
    text += f'\n[GRPO-8]\nsays = "{equal}"\n'
    (results.parent / "worth_grpo.toml").write_text(text)
    (results / "grpo.md").write_text("\n".join(lines) + "\n")
    figure(found, args.output)
    print("\n".join(lines))


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
