"""
"Is my run healthy, and has it learnt?": bad signs while a policy trains, and what a run says at its end.

A sign is a metric `health/<name>`: 1 in an update where it shows, else 0. The first time it shows, one line says so,
with its bound, an advice, and the section of docs/guides/8_my_run_looks_wrong.md. Nothing here changes a run.
At the end a run says whether it has learnt, which signs showed, and how to evaluate the policy. It reads
what a checkpoint keeps, so a resumed run is judged as a whole.
"""

import math
import os
import shlex
from pathlib import Path

from rlhf_details import toy
from rlhf_details.plumbing import cli, engines, hub, models
from rlhf_details.plumbing.evaluation import average, wilson_interval

ACCURACIES = {"eval/rm/accuracy", "eval/rewards/accuracies"}  # on held-out comparisons
GUIDE = "docs/guides/8_my_run_looks_wrong.md"
SIGNS = {  # sign: (what is seen of the number and its bound, what to do, section of GUIDE)
    "kl": (
        "the KL to the reference is {:.1f} nats per response, above {:g}",
        "the policy over-optimises the reward: raise --kl_coef, lower --learning_rate, or stop earlier",
        "kl-explodes",
    ),
    "kl_zero": (
        "at the run's end the KL to the reference is below 0.02 nats per response",
        "the policy has hardly moved: raise --learning_rate, or train longer",
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
    "length": (
        "the length of the responses has changed by a factor of {:.1f} since the first update, above {:g}",
        "read the samples, since rewards often pay for length: raise --kl_coef, or penalise length by --reward_fn",
        "responses-grow-or-shrink",
    ),
}


def numbers(metrics, first, args, precision, is_last=False):
    """{sign: (a number, its bound)}: a sign shows where the number is above the bound.

    Args: metrics of an update; first, those of the first update; precision, the type that matrices
    are multiplied in; is_last, whether the run ends with this update.
    """
    length, start = metrics["val/sequence_lengths"], max(first["val/sequence_lengths"], 1e-9)
    fall = first["policy/entropy_avg"] / max(metrics["policy/entropy_avg"], 1e-9)
    # Under --overlap the policy that sampled is an update old on purpose.
    gap = 0 if args.overlap else max(metrics.get("val/first_ratio", 1) - 1, metrics["val/logprob_gap"])
    moved = abs(metrics.get("eval/objective/kl", metrics["objective/kl"]))
    unended = (args.batch_size - metrics["val/num_stop_token_ids"]) / args.batch_size
    has_end = {args.stop_token, getattr(args, "truncate_token", "none")} != {"none"}  # a token that ends a response
    return {
        # nats per response: half to a quarter of one per token
        "kl": (metrics["objective/kl"], max(8.0, min(0.5 * length, 25.0), 0.25 * length)),
        # At a KL of 0.02 the chance of no event has changed by more than sqrt(0.02 / 2) = 0.1 (Pinsker's inequality).
        "kl_zero": (-moved, -0.02 if is_last else 0),
        "clipfrac": (metrics["policy/clipfrac_avg"], 0.3),
        # On a chat model of 135 M parameters bf16 alone makes 0.3 to 0.7, and dropout, or seen siblings, above 6.
        "first_ratio": (gap, 0.01 if precision == "fp32" else 2.0),
        "truncated": (unended if has_end else 0, 0.95),
        "reward_variance": (metrics["val/equal_scores"], 0.5),
        "entropy": (fall, 5),
        "length": (max(length / start, start / max(length, 1e-9)), 2),
    }


def look(run, metrics):
    """Returns the health/* metrics of an update of a Run, and says what shows for the first time.

    Metrics of other scripts than RLOO, GRPO and PPO have no signs.
    """
    if "val/equal_scores" not in metrics:
        return {}
    first = run.kept["first"] = run.kept["first"] or metrics
    precision, is_last = engines.precision(run.accelerator), metrics["update"] == run.num_updates
    found = {}
    for name, (value, bound) in numbers(metrics, first, run.args, precision, is_last).items():
        found[f"health/{name}"] = float(value > bound)
        if value > bound and name not in run.kept["said"]:
            run.kept["said"].append(name)
            seen, advice, section = SIGNS[name]
            cli.say(f"warning: health/{name}: {seen.format(value, bound)}; {advice} ({GUIDE}#{section})")
    return found


# ---- the end of a run ------------------------------------------------------------------------------------------------
def last_lines(run, before, after, seconds):
    """All that a Run says at its end.

    Args: before, after, the eval/* of its first and its last evaluation; seconds, how long it took.
    """
    held_out = run.inputs[0]
    signs = ", ".join(f"health/{name}" for name in run.kept["said"]) or "none"
    return [
        *held_out_lines(before, after, len(held_out)),
        *learnt_lines(after, held_out, run.kept["by_prompt"]),
        *([f"bad signs: {signs}"] if run.kept["first"] else []),  # Runs of SFT and of a reward model look for none.
        f"model: {run.args.output_dir}   run: {run.folder}   {seconds:.0f} s",
        *evaluate_lines(run.args),
    ]


# ---- has it learnt? --------------------------------------------------------------------------------------------------
def as_text(name, metrics, count):
    """A held-out mean over `count` rows, with +- half its 95 % interval where its standard deviation is known."""
    p = metrics[name]
    std = math.sqrt(p * (1 - p)) if name in ACCURACIES else metrics.get(f"{name}_std")
    if std is None or count < 2:
        return f"{p:z.3f}"
    return f"{p:z.3f} +- {1.96 * std / math.sqrt(count - 1):.3f}"  # The deviations are the biased ones.


def held_out_lines(before, after, count):
    """Each held-out figure, before and after where there are two evaluations."""
    if not after:
        return ["no --eval_dataset: without held-out rows nothing says here whether the run has learnt"]
    evaluations = [before, after] if before != after else [after]
    lines = [f"{count} held-out rows, before -> after (+-: 95 % interval)"]
    for name in after:
        if not name.endswith("_std"):
            texts = [as_text(name, metrics, count) for metrics in evaluations if name in metrics]
            lines.append(f"  {name.rpartition('/')[2]:20} {' -> '.join(texts)}")
    return lines


def learnt_lines(after, held_out, by_prompt):
    """Whether score and gold have risen by more than chance, or the accuracy on comparisons is above it.

    Args: by_prompt, `of_each_prompt` of the first and the last evaluation. Both have the same prompts, so it looks at
    the difference of each prompt. A single prompt has no interval, and that of a handful is too narrow.
    """
    count = len(held_out)
    for accuracy in ACCURACIES & after.keys():
        chance = 1 / len(held_out[0].candidates)
        said, _ = verdict_of(*(x - chance for x in wilson_interval(after[accuracy] * count, count)))
        words = f"{as_text(accuracy, after, count)}, where guessing has {chance:.3f}"
        return [f"{said}: the accuracy on held-out comparisons is {words}"]
    found = []
    for name in by_prompt[0] if len(by_prompt) == 2 and count > 1 else ():
        change = average([y - x for x, y in zip(*(values[name] for values in by_prompt), strict=True)])
        said, how = verdict_of(change["low"], change["high"])
        words = f"{how}, {change['value']:+z.3f} +- {change['high'] - change['value']:.3f} a prompt"
        if name == "gold":
            hint = "; the policy over-learns the reward: raise --kl_coef, or stop earlier"
            found.append(f"gold, the true reward, {words}{hint if how == 'fell' else ''}")
        else:
            found.append(f"{said}: scores {words}, at a KL of {after['eval/objective/kl']:z.3f} nats per response")
    return found


def verdict_of(low, high):
    """(what is said of the run, what the number did), for a number whose change has the interval low .. high."""
    if low > 0:
        return "learnt", "rose"
    return ("not learnt", "fell") if high < 0 else ("not shown", "did not change beyond chance")


def of_each_prompt(tokenizer, prompts, responses, mask, ended, scores, kl):
    """{"scores": [N], and "gold": [N] on the embedded task} of a held-out evaluation. Args: Run.log's `samples`."""
    pairs = zip(prompts, models.decode(tokenizer, responses, mask), strict=True)
    gold = [toy.gold(prompt.text, text) for prompt, text in pairs if prompt.task == "toy"]
    return {"scores": scores.tolist()} | ({"gold": gold} if gold else {})


# ---- what comes next? ------------------------------------------------------------------------------------------------
def evaluate_lines(args):
    """The command that compares a trained policy with the one that it started from. Other models have none."""
    if hub.script_of(args) in ("train_sft.py", "train_reward.py"):
        return []
    start, dataset = args.sft_model_path, args.eval_dataset or args.dataset
    flags = dict(policy_path=args.output_dir, dataset=dataset, opponent_path=start)
    flags |= {"ref_model_path": getattr(args, "teacher_model_path", start)}  # what training's KL is from
    names = "prompt_template", "reward_model_path", "reward_fn", "reward_fn_weights"
    flags |= {name: getattr(args, name) for name in names if getattr(args, name, None)}
    if flags.get("reward_fn") and args.reward_fn_format != "text":
        flags["reward_fn_format"] = args.reward_fn_format
    script = os.path.relpath(Path(__file__).parents[1] / "evaluate.py")
    return [f"evaluate: {shlex.join(['python', script, *cli.as_words(flags)])}"]
