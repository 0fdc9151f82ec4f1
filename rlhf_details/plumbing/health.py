"""
"Is my run healthy, and has it learnt?": bad signs while a policy trains, and what a run says at its end.

A sign is a metric `health/<name>`: 1 in an update where it shows, else 0. The first time it shows, one line says so,
with its threshold, an advice, and the section of docs/guides/8_my_run_looks_wrong.md. Nothing here changes a run.
At the end a run says whether it has learnt, which signs showed, where its time went, and what to type next. It reads
its metrics.jsonl and what a checkpoint keeps, so a resumed run is judged as a whole.
"""

import json
import math
import shlex
from pathlib import Path

import torch

from rlhf_details import toy
from rlhf_details.plumbing import cli, comparisons, engines, hub, models
from rlhf_details.plumbing.evaluation import average, wilson_interval

ROOT = Path(__file__).resolve().parents[2]
ACCURACIES = {"eval/rm/accuracy", "eval/rewards/accuracies"}  # on held-out comparisons
# What evaluate.py does where a flag is not given and the data are not the embedded task's.
PLAIN = dict(opponent_path=None, ref_model_path=None, reward_model_path=None, reward_fn=(), judge="none")
PLAIN |= dict(prompt_template=None, max_prompt_length=None, trust_remote_code=False)
PLAIN |= dict(reward_fn_format="text", reward_fn_weights=())
PAGE = "docs/guides/8_my_run_looks_wrong.md"
SECTIONS = {  # sign: the section of PAGE about it
    "kl": "kl-explodes",
    "kl_zero": "reward-never-moves",
    "clipfrac": "kl-explodes",
    "first_ratio": "ratio-not-1-at-the-first-step",
    "truncated": "no-response-ends",
    "reward_variance": "loss-is-0-and-stays-0",
    "entropy": "all-answers-alike",
    "narrow": "all-answers-alike",
    "length": "responses-grow-or-shrink",
}


def signs(metrics, first, args, precision, is_last=False):
    """{name: (whether it shows, what is seen, what to do)}.

    Args: metrics of an update, with its same_ends; first, those of the first update; precision, the type that matrices
    are multiplied in; is_last, whether the run ends with this update.
    """
    moved = abs(metrics.get("eval/objective/kl", metrics["objective/kl"]))
    kl, clipped = metrics["objective/kl"], metrics["policy/clipfrac_avg"]
    length, entropy = metrics["val/sequence_lengths"], metrics["policy/entropy_avg"]
    kl_bound = max(8.0, min(0.5 * length, 25.0), 0.25 * length)  # nats per response: half to a quarter of one per token
    # Under --overlap the policy that sampled is an update old on purpose.
    gap = 0 if args.overlap else max(metrics.get("val/first_ratio", 1) - 1, metrics["val/logprob_gap"])
    # On a chat model of 135 M parameters bf16 alone makes 0.3 to 0.7, and dropout, or siblings that are seen, above 6.
    gap_bound = 0.01 if precision == "fp32" else 2.0
    alike = list(zip(metrics["same_ends"], first["same_ends"], strict=True))  # (now, at first): start, end
    ended, same = metrics["val/num_stop_token_ids"] / args.batch_size, metrics["val/equal_scores"]
    groups = f"{same:.0%} of the prompts have responses of equal score, above 50 %", "more responses to each"
    if getattr(args, "rloo_k", getattr(args, "group_size", 1)) == 1:  # PPO has one response to a prompt.
        groups = "all responses of the batch have the same score", "a finer reward"
    return {
        "kl": (
            kl > kl_bound,
            f"the KL to the reference is {kl:.1f} nats per response, above {kl_bound:g}",
            "the policy over-optimises the reward: raise --kl_coef, lower --learning_rate, or stop earlier",
        ),
        # At a KL of 0.02 the chance of no event has changed by more than sqrt(0.02 / 2) = 0.1 (Pinsker's inequality).
        "kl_zero": (
            is_last and moved < 0.02,
            f"at the run's end the KL to the reference is {moved:.4f} nats per response, below 0.02",
            "the policy has hardly moved: raise --learning_rate (the pages' own suit a model of 1 B), or train longer",
        ),
        "clipfrac": (
            clipped > 0.3,
            f"{clipped:.0%} of the ratios are clipped, above 30 %",
            "the steps are too large: lower --learning_rate, --num_ppo_epochs or --num_mini_batches",
        ),
        "first_ratio": (
            gap > gap_bound,
            f"before its first step the policy's log-probs differ from the sampler's by {gap:.2g}, above {gap_bound:g}",
            "sampling and training disagree: check the model's code, its dropout and --attn_implementation",
        ),
        "truncated": (
            has_end(args) and ended < 0.05,
            f"{ended:.0%} of the responses end with the stop token, below 5 %",
            "raise --response_length or --missing_eos_penalty, and check that the SFT data end with --stop_token",
        ),
        "reward_variance": (
            same > 0.5,
            groups[0],
            f"they teach nothing: stop if the reward is at its best, else take other prompts or {groups[1]}",
        ),
        "entropy": (
            entropy < 0.2 * first["policy/entropy_avg"],
            f"the entropy fell from {first['policy/entropy_avg']:.3f} to {entropy:.3f} nats per token, below a fifth",
            "the policy repeats itself: raise --kl_coef, or lower --learning_rate",
        ),
        "narrow": (
            any(now > max(0.5, 2 * then) for now, then in alike),
            "{:.0%} of the responses begin with the same 4 tokens, in the first update {:.0%}; ".format(*alike[0])
            + "{:.0%} end with the same 2, in the first update {:.0%}".format(*alike[1]),
            "read the samples, since the policy may write one text to all prompts: raise --kl_coef, or stop earlier",
        ),
        "length": (
            not 0.5 <= length / max(first["val/sequence_lengths"], 1e-9) <= 2,
            f"the responses went from {first['val/sequence_lengths']:.1f} to {length:.1f} tokens, over a factor of 2",
            "read the samples, since rewards often pay for length: raise --kl_coef, or penalise length by --reward_fn",
        ),
    }


def same_ends(responses, mask):
    """The largest shares of the responses [N, R] that begin with the same 4 tokens, and that end with the same 2."""
    tokens = torch.where(mask, responses, -1)
    last = (mask.sum(1, keepdim=True) + torch.arange(-2, 0, device=mask.device)).clamp(min=0)  # [N, 2]
    groups = tokens[:, :4], tokens.gather(1, last)
    return [x.cpu().unique(dim=0, return_counts=True)[1].max().item() / len(x) for x in groups]


def has_end(args):
    """Whether there is a token that ends a response."""
    return {args.stop_token, getattr(args, "truncate_token", "none")} != {"none"}


class Health:
    """Looks at each update's metrics. Its `memory` goes into the checkpoints."""

    def __init__(self, args, accelerator, num_updates):
        self.args, self.accelerator, self.num_updates = args, accelerator, num_updates
        self.memory = {"first": None, "said": []}

    def __call__(self, metrics, samples):
        """(the health/* metrics of an update, the lines to print). Rows of other scripts have none.

        Args: metrics, samples, as Run.log's.
        """
        if "val/equal_scores" not in metrics:
            return {}, []
        metrics = metrics | {"same_ends": same_ends(*samples[1:3])}
        kept = "policy/entropy_avg", "val/sequence_lengths", "same_ends"
        self.memory["first"] = self.memory["first"] or {name: metrics[name] for name in kept}
        precision, is_last = engines.precision(self.accelerator), metrics["update"] == self.num_updates
        found = signs(metrics, self.memory["first"], self.args, precision, is_last)
        fresh = [name for name, (shows, _, _) in found.items() if shows and name not in self.memory["said"]]
        self.memory["said"] += fresh
        lines = [f"warning: health/{x}: {found[x][1]}; {found[x][2]} ({PAGE}#{SECTIONS[x]})" for x in fresh]
        return {f"health/{name}": float(shows) for name, (shows, _, _) in found.items()}, lines


# ---- the end of a run ------------------------------------------------------------------------------------------------
def last_lines(run, after, seconds):
    """All that a Run says at its end. Args: after, the eval/* of its last evaluation; seconds, how long it took."""
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["update"]]  # The others are of evaluations before training.
    held_out = run.inputs[0]
    return [
        *held_out_lines(run.before, after, len(held_out)),
        *learnt_lines(after, held_out, run.by_prompt),
        *health_lines(rows),
        *time_lines(rows, seconds),
        f"model: {run.args.output_dir}   run: {run.folder}   {seconds:.0f} s",
        *next_lines(run.args, run.folder, run.prompts),
    ]


# ---- has it learnt? --------------------------------------------------------------------------------------------------
def half_width(name, metrics, count):
    """Half the 95% interval of a mean over `count` rows, or None where its standard deviation is not known."""
    p = metrics[name]
    std = math.sqrt(p * (1 - p)) if name in ACCURACIES else metrics.get(f"{name}_std")
    # The deviations are the biased ones.
    return None if std is None or count < 2 else 1.96 * std / math.sqrt(count - 1)


def as_text(name, metrics, count, width=0):
    """A held-out mean, with +- half its interval where that is known."""
    half = half_width(name, metrics, count)
    return f"{metrics[name]:z{width}.3f}" + (f" +- {half:.3f}" if half is not None else "")


def held_out_lines(before, after, count):
    """Each held-out figure, before and after where there are two evaluations."""
    if not after:
        return ["no --eval_dataset: without held-out rows nothing says here whether the run has learnt"]
    has_two = bool(before) and before != after
    found = [f"{count} held-out rows, {'before -> after' if has_two else 'at the end'} (+-: 95 % interval)"]
    shorts = {name: name.removeprefix("eval/").removeprefix("objective/") for name in after}
    width = max(20, *map(len, shorts.values()))
    for name, short in shorts.items():
        earlier = f"{as_text(name, before, count, 8):18} -> " if has_two and name in before else ""
        found.append(f"  {short:{width}} {earlier}{as_text(name, after, count, 8)}")
    return found


def learnt_lines(after, held_out, by_prompt):
    """Whether score and gold have risen by more than chance, or the accuracy on comparisons is above it.

    Args: by_prompt, `of_each_prompt` of the first and the last evaluation. Both have the same prompts, so it looks at
    the difference of each prompt. A single prompt has no interval, and that of a handful is too narrow.
    """
    count = len(held_out)
    for accuracy in ACCURACIES & after.keys():
        chance = 1 / len(held_out[0].candidates)
        said, _ = outcome(*(x - chance for x in wilson_interval(after[accuracy] * count, count)))
        words = f"{as_text(accuracy, after, count)}, where guessing has {chance:.3f}"
        return [f"{said}: the accuracy on held-out comparisons is {words}"]
    found = []
    for name in by_prompt[0] if len(by_prompt) == 2 and count > 1 else ():
        change = average([y - x for x, y in zip(*(values[name] for values in by_prompt), strict=True)])
        said, how = outcome(change["low"], change["high"])
        words = f"{how}, {change['value']:+z.3f} +- {change['high'] - change['value']:.3f} a prompt"
        if name == "gold":
            hint = "; the policy over-learns the reward: raise --kl_coef, or stop earlier"
            found.append(f"gold, the true reward, {words}{hint if how == 'fell' else ''}")
        else:
            found.append(f"{said}: scores {words}, at a KL of {after['eval/objective/kl']:z.3f} nats per response")
    return found


def outcome(low, high):
    """(what is said of the run, what the number did), for a number whose change has the interval low .. high."""
    if low > 0:
        return "learnt", "rose"
    return ("not learnt", "fell") if high < 0 else ("not shown", "did not change beyond chance")


def of_each_prompt(tokenizer, prompts, responses, mask, ended, scores, kl):
    """{"scores": [N], and "gold": [N] on the embedded task} of a held-out evaluation. Args: Run.log's `samples`."""
    pairs = zip(prompts, models.decode(tokenizer, responses, mask), strict=True)
    gold = [toy.gold(prompt.text, text) for prompt, text in pairs if prompt.task == "toy"]
    return {"scores": scores.tolist()} | ({"gold": gold} if gold else {})


# ---- was it healthy? -------------------------------------------------------------------------------------------------
def health_lines(rows):
    """The health/* signs that showed, and in how many updates. Runs of SFT and of a reward model have none."""
    names = [name for name in rows[-1] if name.startswith("health/")] if rows else []
    shown = {name: [row["update"] for row in rows if row.get(name)] for name in names}
    words = [f"{name} in {len(at)} of {len(rows)} updates, first in {at[0]}" for name, at in shown.items() if at]
    return [f"bad signs: {'; '.join(words) or 'none'}"] if names else []


# ---- where did the time go? ------------------------------------------------------------------------------------------
def time_lines(rows, seconds):
    """The share of each phase in the run's time, and the rewards that take more than half of the updates."""
    totals = {}
    for row in rows:
        for name, value in row.items():
            totals[name] = totals.get(name, 0) + value if name.startswith("time/") else 0
    updates = totals.get("time/update", 0)
    shares = [(name, totals[f"time/{name}"]) for name in ("rollout", "scores", "optimise") if f"time/{name}" in totals]
    shares.append(("evaluations, checkpoints and the rest", max(0, seconds - updates)))
    words = ", ".join(f"{name} {value / max(seconds, 1e-9):.0%}" for name, value in shares)
    found = [f"time: {words}"]
    for name, value in totals.items():
        if name.startswith("time/rewards/") and value > 0.5 * updates:
            reward = name.removeprefix("time/rewards/")
            found.append(f"the reward {reward} takes {value / updates:.0%} of the updates' time: make it faster first")
    return found


# ---- what comes next? ------------------------------------------------------------------------------------------------
def command(script, *words):
    """A command line that starts a script of this repository from the current folder."""
    path = ROOT / script
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.join(["python", str(path), *words])


def next_lines(args, run_folder, prompts):
    """Commands that look at what a run has made. prompts: the data.Prompts that it was trained on."""
    found, script, has_rewards = [], hub.script_of(args), hasattr(args, "reward_fn")
    evaluate, trust = "rlhf_details/evaluate.py", ["--trust_remote_code"] * args.trust_remote_code
    # It does not read the labels of lm-human-preferences.
    if has_rewards or (script == "train_dpo.py" and not comparisons.are_token_ids(prompts)):
        found.append(f"evaluate: {command(evaluate, *evaluation_words(args))}")
    if has_rewards or script in ("train_sft.py", "train_dpo.py"):
        policies = [args.output_dir, *([] if script == "train_sft.py" else [args.sft_model_path])]
        found.append(f"chat: {command(evaluate, '--policy_path', *policies, *trust, '--interactive')}")
    if (ROOT / "benchmark/plot.py").exists():  # It is not in an installed package, nor in an exercise's copy.
        found.append(f"curves: {command('benchmark/plot.py', str(run_folder))}")
    return found


def evaluation_words(args):
    """The flags with which evaluate.py compares a run's policy with the one that it started from."""
    dataset = args.eval_dataset or args.dataset
    task = dataset.partition(":")[0]
    defaults, own = dict(PLAIN), cli.presets_of(args).get(task, {})
    if own:  # evaluate.py takes an embedded task's models and rewards by itself.
        defaults |= {name: own[name] for name in PLAIN if name in own}
        defaults |= dict(opponent_path=own["sft_model_path"], ref_model_path=own["sft_model_path"])
        defaults["judge"] = "reward_fn" if defaults["reward_fn"] else "gold"
    values = {name: getattr(args, name) for name in PLAIN if hasattr(args, name)}
    values |= {"opponent_path": args.sft_model_path, "ref_model_path": args.sft_model_path}
    judge = "reward_fn" if values.get("reward_fn") else "reward_model" if values.get("reward_model_path") else "none"
    values["judge"] = defaults["judge"] if task in toy.TASKS and judge != "reward_fn" else judge
    words = [] if dataset in ("toy", "toy:test") else ["--dataset", dataset]
    words += [] if args.eval_dataset or task in toy.TASKS else ["--num_examples", "512"]  # of many training prompts
    words += ["--policy_path", args.output_dir]
    for name, value in values.items():
        if value != defaults[name]:
            words += cli.as_words(name, value)
    return words
