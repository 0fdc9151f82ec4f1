"""
Over-optimisation on the embedded task: the learned reward that a policy is trained on, and the true one, over their KL.

    python benchmark/studies/overoptimisation.py run --tag TAG --seeds 1 2 3 4 5 6 7 8 9 10 --workers 2
    python benchmark/studies/overoptimisation.py draw --tag TAG

`run` goes on where it stopped. `draw` writes static/overoptimisation.svg and results/TAG/overoptimisation.md.

RLOO and PPO under several KL coefficients; RLOO without the KL under reward models of fewer labels, and smaller ones (a
reward model starts as the SFT model of its width, and that one's responses are what it compares). Twice the embedded
task's learning rate, which does not fall: the default recipe stops before anything is over-optimised. Best-of-n, the
reference: of n responses of the SFT policy to a held-out prompt the one with the highest learned score; its KL is at
most log n - (n - 1) / n (arXiv 2210.10760).
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT, iqm, last, mean_interval, read_seeds, words
from plot import band, blank, frame, save

from benchmark import MODELS, STAGES, Run, StudyArgs, git_tag, run_command, run_study, stage_runs

RUN = "--num_sample_generations 0 --checkpoint_every 0 --output_dir policy --batch_size 128"
RUN += " --learning_rate 1e-3 --lr_schedule constant"
RLOO = f"python rlhf_details/train_rloo.py {RUN} --total_episodes 10240 --sft_model_path {MODELS}/sft"
PPO = f"python rlhf_details/train_ppo.py {RUN} --total_episodes 3072 {STAGES}"
RLOO_COEFS, PPO_COEFS = (0, 0.03, 0.1), (0, 0.03, 0.1)
LABELS, WIDTHS = (192, 768), (16,)  # and 3072 labels of width 64, the embedded task's own
COLUMNS = ["update", "objective/gold", "objective/scores", "objective/kl"]
COLUMNS += [f"eval/objective/{name}" for name in ("gold", "scores", "kl", "parses")]
RESPONSES, PROMPTS = 64, 256  # of best-of-n


def settings():
    """{name: (panel, label, command)} of the policies, in the order of their curves."""
    result = {
        f"rloo_kl{c}": ("RLOO", f"{c}", f"{RLOO} --reward_model_path {MODELS}/reward --kl_coef {c}") for c in RLOO_COEFS
    }
    result |= {f"ppo_kl{c}": ("PPO", f"{c}", f"{PPO} --kl_coef {c}") for c in PPO_COEFS}
    free = f"{RLOO} --kl_coef 0 --reward_model_path {MODELS}"
    result |= {f"labels{n}": ("labels", f"{n}", f"{free}/reward_labels{n}") for n in LABELS}
    return result | {f"width{w}": ("width", f"{w}", f"{free}/reward_width{w}") for w in WIDTHS}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing: SFT and reward models of each seed, policies, and best-of-n."""

    only: tuple[str, ...] = ()
    """names of policies; none: all, and best-of-n"""
    columns: tuple[str, ...] = tuple(COLUMNS)


@dataclass
class BestOfNArgs:
    """Best-of-n of one seed's SFT and reward model, as a CSV file (what `run` calls)."""

    seed: int
    """seed of the models and of the samples"""
    run_name: str = "run"
    """folder under runs/"""
    overwrite: bool = True
    """replace it"""


def best_of_shares(number, n):
    """In which share of all subsets of n each of so many responses, in ascending order of score, is the best: [number].

    Number i (from 0) is the best of C(i, n - 1) of the C(number, n) subsets.
    """
    return np.array([math.comb(i, n - 1) / math.comb(number, n) for i in range(number)])


def best_of_n(args: BestOfNArgs):
    """Samples RESPONSES to each of PROMPTS held-out prompts; writes mean score and gold of the best of n, n = 1, 2, 4,
    ..: means over all subsets of n responses, exactly.
    """
    import json
    from pathlib import Path

    import torch

    from rlhf_details import toy, train_rloo, utils
    from rlhf_details.plumbing import cli, models

    folder, n, golds = ROOT / "models" / "bench" / str(args.seed), RESPONSES, []
    words = ["--sft_model_path", str(folder / "sft"), "--reward_model_path", str(folder / "reward")]
    settings = cli.parse(train_rloo.Args, words)
    tokenizer, policy, _, reward = train_rloo.load_models(settings, "cpu")
    texts, stop_ids = (
        [row["prompt"] for row in toy.rows("prompts", "test")[:PROMPTS]],
        torch.tensor([tokenizer.eos_token_id]),
    )
    policy.eval()
    queries, query_mask = utils.left_pad([tokenizer(text).input_ids for text in texts for _ in range(n)])

    key, penalty, size = (args.seed, utils.EVALUATION, 0), settings.missing_eos_penalty, 8 * n
    with torch.no_grad():
        rows = torch.arange(len(queries))
        responses, mask, _ = utils.sample(
            policy, queries, query_mask, rows, n, settings.response_length, stop_ids, key, size
        )
        batch = utils.Batch(queries, query_mask, responses, mask)
        (scores,) = utils.in_slices(lambda *given: [train_rloo.response_scores(*given, 1)], reward, batch, size)
    ended = train_rloo.has_stopped(responses, mask, stop_ids)
    scores = train_rloo.missing_eos_scores(scores, ended, penalty, "subtract").reshape(-1, n).numpy()
    grouped = (x.reshape(-1, n, x.size(1)) for x in (responses, mask))
    for text, responses, mask in zip(texts, *grouped, strict=True):
        golds.append([toy.gold(text, answer) for answer in models.decode(tokenizer, responses, mask)])
    order = np.argsort(scores, 1)
    # [RESPONSES], the worst one first
    scores, golds = (np.take_along_axis(np.array(x), order, 1).mean(0) for x in (scores, golds))
    output = Path("runs") / args.run_name
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "metrics.jsonl", "w") as file:
        for exponent in range(int(math.log2(n)) + 1):
            best_of = 2**exponent
            share = best_of_shares(n, best_of)
            row = {"update": best_of, "objective/gold": float(golds @ share), "objective/scores": float(scores @ share)}
            file.write(json.dumps(row | {"objective/kl": math.log(best_of) - (best_of - 1) / best_of}) + "\n")


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag = args.tag or git_tag()
    sft = f"python rlhf_details/train_sft.py --output_dir {MODELS}/sft_width"
    first = {f"sft_width{w}": (f"{sft}{w} --hidden_size {w}", None) for w in WIDTHS}
    reward = f"python rlhf_details/train_reward.py --output_dir {MODELS}/reward_"
    second = {
        f"reward_labels{n}": (f"{reward}labels{n} --sft_model_path {MODELS}/sft --num_comparisons {n}", None)
        for n in LABELS
    }
    second |= {f"reward_width{w}": (f"{reward}width{w} --sft_model_path {MODELS}/sft_width{w}", None) for w in WIDTHS}
    commands = {name: command for name, (_, _, command) in settings().items()}
    commands["best_of_n"] = "python benchmark/studies/overoptimisation.py best-of-n"
    commands = {name: command for name, command in commands.items() if not args.only or name in args.only}
    runs = [
        Run(name, command, seed, tag, "overoptimisation") for seed in args.seeds for name, command in commands.items()
    ]
    return run_study(stage_runs(args.seeds, tag, first, second), runs, args, tag)


@dataclass
class DrawArgs:
    """Draws the figure and writes its table from the CSV files."""

    tag: str
    """folder of the results"""
    output: str = "static/overoptimisation.svg"
    """the figure"""


SMOOTH = 5  # updates of the running mean


def smooth(x):
    """Running mean over the last axis."""
    return np.apply_along_axis(lambda row: np.convolve(row, np.ones(SMOOTH) / SMOOTH, mode="valid"), -1, x)


def curves(folder, name):
    """{"gold", "scores", "kl": [updates, seeds]} of one setting, smoothed, and the number of seeds."""
    seeds = read_seeds(folder, name).values()
    columns = {
        c: np.array([seed[f"objective/{c}"] for seed in seeds]) for c in ("gold", "scores", "kl")
    }  # [seeds, rows]
    of_updates = ~np.isnan(columns["gold"]).any(0)  # and not of the evaluation before them
    return {c: smooth(x[:, of_updates]).T for c, x in columns.items()}, len(seeds)


def held_out(folder, name):
    """Of held-out prompts at the end of a setting's runs: gold as an interval in words, and the mean KL."""
    seeds = read_seeds(folder, name).values()
    gold, kl = ([last(seed[f"eval/objective/{c}"]) for seed in seeds] for c in ("gold", "kl"))
    return words(mean_interval(gold)), np.mean(kl)


def fall(gold, scores):
    """What became of gold after its peak: (row of the peak of the mean over seeds, two intervals (mean, low, high, p)
    over seeds: of the gold lost since, and of the learned score gained since; and the gold lost, [seeds]).

    A seed's peak is that of the mean over the others, so that no seed chooses where its own noise was high.
    """
    seeds = np.arange(gold.shape[1])
    peaks = np.array([gold[:, seeds != seed].mean(1).argmax() for seed in seeds])
    lost, gained = gold[peaks, seeds] - gold[-1], scores[-1] - scores[peaks, seeds]
    return int(gold.mean(1).argmax()), mean_interval(lost), mean_interval(gained), lost


HEAD = """\
# Over-optimisation

Written by `python benchmark/studies/overoptimisation.py draw --tag {tag}`; `run` in place of `draw` makes the runs.
Means over seeds with Student's 95 % interval. A seed changes initialisations, order and samples of every stage; texts,
prompts and the noise of the human's choices stay. Curves are of training prompts, smoothed over {smooth} updates; the
end is their last point. Lost and gained are paired, from a peak that is, for each seed, that of the mean over the
others. Best-of-n is on held-out prompts, its KL an upper bound.
"""


def draw(args: DrawArgs):
    """Writes the figure and results/TAG/overoptimisation.md."""
    folder = ROOT / "benchmark" / "results" / args.tag / "overoptimisation"
    panels = {"RLOO": [], "PPO": [], "reward models": []}
    for name, (panel, label, _) in settings().items():
        title = panel if panel in panels else "reward models"
        forms = {"labels": f"{label} labels", "width": f"width {label}"}
        panels[title].append((forms.get(panel, f"KL coefficient {label}"), name))
    panels["reward models"].insert(0, ("3072 labels, width 64", "rloo_kl0"))
    best = [
        np.array([seed[f"objective/{c}"] for seed in read_seeds(folder, "best_of_n").values()])
        for c in ("kl", "gold", "scores")
    ]
    figure, axes = blank(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained")
    head = (
        "| policy | seeds | gold at its peak | at the end | lost since | least .. most | learned score gained since | "
    )
    lines = [f"{head}KL at the peak, end | held-out gold and KL at the end |", "|---|" + "---:|" * 8]
    for axis, (title, members) in zip(axes, panels.items(), strict=True):
        for colour, (label, name) in enumerate(members):
            columns, seeds = curves(folder, name)
            x = np.sqrt(np.maximum(iqm(columns["kl"]), 0))
            for column, style in (("gold", "-"), ("scores", "--")):
                look = dict(linestyle=style, color=f"C{colour}", linewidth=1.4, alpha=0.15)
                band(axis, x, columns[column], label if column == "gold" else None, **look)
            peak, lost, gained, losses = fall(columns["gold"], columns["scores"])
            kl = columns["kl"].mean(1)
            row = f"{title}, {label}", seeds, f"{columns['gold'][peak].mean():.2f}"
            row += words(mean_interval(columns["gold"][-1])), words(lost), f"{min(losses):.1f} .. {max(losses):.1f}"
            row += words(gained), f"{kl[peak]:.1f}, {kl[-1]:.1f}", "{}, {:.1f}".format(*held_out(folder, name))
            lines.append("| " + " | ".join(map(str, row)) + " |")
        for column, style, label in ((best[1], "-", "best of n"), (best[2], "--", None)):
            axis.plot(np.sqrt(best[0][0]), column.mean(0), style, color="black", linewidth=1, label=label)
        under = " under RLOO, no KL penalty" if title == "reward models" else ""
        frame(axis, title + under, "square root of the KL, nats a response")
        axis.legend(frameon=False, fontsize=7, loc="lower left")
    axes[0].set_ylabel("points:  gold (solid),  learned score (dashed)", fontsize=8)
    axes[0].set_ylim(-8, None)
    save(figure, args.output, "overoptimisation")
    n = [2**i for i in range(best[0].shape[1])]
    lines += ["", "| best of n | KL | gold | learned score |", "|---:|---:|---:|---:|"]
    for i, number in enumerate(n):
        gold, scores = (words(mean_interval(column[:, i])) for column in best[1:])
        lines.append(f"| {number} | {best[0][0, i]:.2f} | {gold} | {scores} |")
    (ROOT / "benchmark" / "results" / args.tag / "overoptimisation.md").write_text(
        "\n".join([HEAD.format(tag=args.tag, smooth=SMOOTH), *lines]) + "\n"
    )
    print("\n".join(lines))


COMMANDS = {"run": (RunArgs, run), "best-of-n": (BestOfNArgs, best_of_n), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
