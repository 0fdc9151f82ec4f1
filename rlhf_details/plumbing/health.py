"""
"Is my run healthy, and has it learnt?": bad signs while a policy trains, and what a run says at its end.

A sign is a metric `health/<name>`: 1 in an update where it shows, else 0. The first time it shows, one line says so,
with its bound, an advice, and the section of docs/guides/8_my_run_looks_wrong.md. Nothing here changes a run.
At the end a run says whether it has learnt, which signs showed, where its time went, and how to evaluate the policy. It
reads its metrics.jsonl and what a checkpoint keeps, so a resumed run is judged as a whole.
"""

import json
import math
import os
import shlex
from pathlib import Path

import torch

from rlhf_details import toy
from rlhf_details.plumbing import cli, comparisons, engines, hub, models
from rlhf_details.plumbing.evaluation import average, wilson_interval

ACCURACIES = {"eval/rm/accuracy", "eval/rewards/accuracies"}  # on held-out comparisons
PAGE = "docs/guides/8_my_run_looks_wrong.md"
SIGNS = {  # sign: (what is seen of the number and its bound, what to do, section of PAGE)
    "kl": (
        "the KL to the reference is {:.1f} nats per response, above {:g}",
        "the policy over-optimises the reward: raise --kl_coef, lower --learning_rate, or stop earlier",
        "kl-explodes",
    ),
    "kl_zero": (
        "at the run's end the KL to the reference is below 0.02 nats per response",
        "the policy has hardly moved: raise --learning_rate (the pages' own suit a model of 1 B), or train longer",
        "reward-never-moves",
    ),
    "clipfrac": (
        "{:.0%} of the ratios are clipped, above {:.0%}",
        "the steps are too large: lower --learning_rate, --num_ppo_epochs or --num_mini_batches",
        "kl-explodes",
    ),
    "first_ratio": (
        "before its first step the policy's log-probs differ from the sampler's by {:.2g}, above {:g}",
        "sampling and training disagree: check the model's code, its dropout and --attn_implementation",
        "ratio-not-1-at-the-first-step",
    ),
    "truncated": (
        "{:.0%} of the responses do not end with the stop token, above {:.0%}",
        "raise --response_length or --missing_eos_penalty, and check that the SFT data end with --stop_token",
        "no-response-ends",
    ),
    "reward_variance": (
        "the scores of a prompt's responses, or in PPO of the batch, are equal in {:.0%} of the cases, above {:.0%}",
        "they teach nothing: stop if the reward is at its best, or take other prompts, more responses, a finer reward",
        "loss-is-0-and-stays-0",
    ),
    "entropy": (
        "the entropy of a token has fallen by a factor of {:.1f} since the first update, above {:g}",
        "the policy repeats itself: raise --kl_coef, or lower --learning_rate",
        "all-answers-alike",
    ),
    "narrow": (
        "{:.0%} of the responses begin with the same 4 tokens, or end with the same 2, above {:.0%}",
        "read the samples, since the policy may write one text to all prompts: raise --kl_coef, or stop earlier",
        "all-answers-alike",
    ),
    "length": (
        "the length of the responses has changed by a factor of {:.1f} since the first update, above {:g}",
        "read the samples, since rewards often pay for length: raise --kl_coef, or penalise length by --reward_fn",
        "responses-grow-or-shrink",
    ),
}


def numbers(metrics, first, args, precision, is_last=False):
    """{sign: (a number, its bound)}: a sign shows where the number is above the bound.

    Args: metrics of an update, with its same_ends; first, those of the first update; precision, the type that matrices
    are multiplied in; is_last, whether the run ends with this update.
    """
    length, start = metrics["val/sequence_lengths"], max(first["val/sequence_lengths"], 1e-9)
    fall = first["policy/entropy_avg"] / max(metrics["policy/entropy_avg"], 1e-9)
    # Under --overlap the policy that sampled is an update old on purpose.
    gap = 0 if args.overlap else max(metrics.get("val/first_ratio", 1) - 1, metrics["val/logprob_gap"])
    moved = abs(metrics.get("eval/objective/kl", metrics["objective/kl"]))
    unended = (args.batch_size - metrics["val/num_stop_token_ids"]) / args.batch_size
    alike = zip(metrics["same_ends"], first["same_ends"], strict=True)  # (now, at first): start, end
    return {
        # nats per response: half to a quarter of one per token
        "kl": (metrics["objective/kl"], max(8.0, min(0.5 * length, 25.0), 0.25 * length)),
        # At a KL of 0.02 the chance of no event has changed by more than sqrt(0.02 / 2) = 0.1 (Pinsker's inequality).
        "kl_zero": (-moved, -0.02 if is_last else 0),
        "clipfrac": (metrics["policy/clipfrac_avg"], 0.3),
        # On a chat model of 135 M parameters bf16 alone makes 0.3 to 0.7, and dropout, or seen siblings, above 6.
        "first_ratio": (gap, 0.01 if precision == "fp32" else 2.0),
        "truncated": (unended if has_end(args) else 0, 0.95),
        "reward_variance": (metrics["val/equal_scores"], 0.5),
        "entropy": (fall, 5),
        "narrow": max(((now, max(0.5, 2 * then)) for now, then in alike), key=lambda pair: pair[0] - pair[1]),
        "length": (max(length / start, start / max(length, 1e-9)), 2),
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


def look(run, metrics, samples):
    """Returns the health/* metrics of an update of a Run, and says what shows for the first time.

    Args: metrics, samples, as Run.log's. Metrics of other scripts than RLOO, GRPO and PPO have no signs.
    """
    if "val/equal_scores" not in metrics:
        return {}
    metrics, memory = metrics | {"same_ends": same_ends(*samples[1:3])}, run.kept["health"]
    kept = "policy/entropy_avg", "val/sequence_lengths", "same_ends"
    memory["first"] = memory["first"] or {name: metrics[name] for name in kept}
    precision, is_last = engines.precision(run.accelerator), metrics["update"] == run.num_updates
    found = numbers(metrics, memory["first"], run.args, precision, is_last)
    for name, (value, bound) in found.items():
        if value > bound and name not in memory["said"]:
            memory["said"].append(name)
            seen, advice, section = SIGNS[name]
            cli.say(f"warning: health/{name}: {seen.format(value, bound)}; {advice} ({PAGE}#{section})")
    return {f"health/{name}": float(value > bound) for name, (value, bound) in found.items()}


# ---- the end of a run ------------------------------------------------------------------------------------------------
def last_lines(run, before, after, seconds):
    """All that a Run says at its end.

    Args: before, after, the eval/* of its first and its last evaluation; seconds, how long it took.
    """
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["update"]]  # The others are of evaluations before training.
    held_out = run.inputs[0]
    return [
        *held_out_lines(before, after, len(held_out)),
        *learnt_lines(after, held_out, run.kept["by_prompt"]),
        *health_lines(rows),
        time_line(rows, seconds),
        f"model: {run.args.output_dir}   run: {run.folder}   {seconds:.0f} s",
        *evaluate_lines(run.args, run.prompts),
    ]


# ---- has it learnt? --------------------------------------------------------------------------------------------------
def as_text(name, metrics, count, width=0):
    """A held-out mean over `count` rows, with +- half its 95 % interval where its standard deviation is known."""
    p = metrics[name]
    std = math.sqrt(p * (1 - p)) if name in ACCURACIES else metrics.get(f"{name}_std")
    if std is None or count < 2:
        return f"{p:z{width}.3f}"
    return f"{p:z{width}.3f} +- {1.96 * std / math.sqrt(count - 1):.3f}"  # The deviations are the biased ones.


def held_out_lines(before, after, count):
    """Each held-out figure, before and after where there are two evaluations."""
    if not after:
        return ["no --eval_dataset: without held-out rows nothing says here whether the run has learnt"]
    has_two = bool(before) and before != after
    found = [f"{count} held-out rows, {'before -> after' if has_two else 'at the end'} (+-: 95 % interval)"]
    names = [name for name in after if not name.endswith("_std")]
    shorts = {name: name.removeprefix("eval/").removeprefix("objective/") for name in names}
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


# ---- was it healthy, where did the time go, what comes next? --------------------------------------------------------
def health_lines(rows):
    """The health/* signs that showed, and in how many updates. Runs of SFT and of a reward model have none."""
    names = [name for name in rows[-1] if name.startswith("health/")] if rows else []
    shown = {name: [row["update"] for row in rows if row.get(name)] for name in names}
    words = [f"{name} in {len(at)} of {len(rows)} updates, first in {at[0]}" for name, at in shown.items() if at]
    return [f"bad signs: {'; '.join(words) or 'none'}"] if names else []


def time_line(rows, seconds):
    """The share of each phase in the run's time."""
    found = {name: sum(row.get(f"time/{name}", 0) for row in rows) for name in ("rollout", "scores", "optimise")}
    found["evaluations, checkpoints and the rest"] = max(0, seconds - sum(row["time/update"] for row in rows))
    words = ", ".join(f"{name} {value / max(seconds, 1e-9):.0%}" for name, value in found.items() if value)
    return f"time: {words}"


def evaluate_lines(args, prompts):
    """The command that compares a trained policy with the one that it started from, on the run's own terms."""
    is_dpo = hub.script_of(args) == "train_dpo.py" and not comparisons.are_token_ids(prompts)
    if not (is_dpo or hasattr(args, "reward_fn")):  # evaluate.py does not read lm-human-preferences' labels.
        return []
    dataset, start = args.eval_dataset or args.dataset, args.sft_model_path
    task = dataset.partition(":")[0]
    known = vars(cli.PolicyArgs()) | cli.presets_of(args).get(task, {})  # what evaluate.py takes by itself
    flags = {"policy_path": args.output_dir}
    flags |= {} if dataset in ("toy", "toy:test") else {"dataset": dataset}
    flags |= {} if args.eval_dataset or task in toy.TASKS else {"num_examples": 512}  # of many training prompts
    flags |= {} if start == known["sft_model_path"] else {"opponent_path": start, "ref_model_path": start}
    names = "reward_model_path reward_fn reward_fn_weights reward_fn_format prompt_template max_prompt_length"
    for name in (*names.split(), "trust_remote_code"):
        if hasattr(args, name) and getattr(args, name) != known[name]:
            flags[name] = getattr(args, name)
    if flags.get("reward_fn") or (flags.get("reward_model_path") and task not in toy.TASKS):
        flags["judge"] = "reward_fn" if flags.get("reward_fn") else "reward_model"
    script = os.path.relpath(Path(__file__).parents[1] / "evaluate.py")
    return [f"evaluate: {shlex.join(['python', script, *cli.as_words(flags)])}"]
