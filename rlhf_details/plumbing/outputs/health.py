"""
"Is my run healthy?": bad signs while a policy trains.

A sign is a metric `health/<name>`: 1 in an update where it shows, else 0. The first time it shows, one line says so,
with its bound, an advice, and the section of docs/guides/8_my_run_looks_wrong.md. Nothing here changes a run.
"""

from pathlib import Path

from rlhf_details.plumbing import console
from rlhf_details.plumbing.machine import engines

GUIDE = "docs/guides/8_my_run_looks_wrong.md"
SIGNS = {  # sign: (what is seen of the number and its bound, what to do, section of GUIDE)
    "kl": (
        "the KL to the reference is {:.1f} nats per response, above {:g}",
        "the policy may over-optimise the reward: raise --kl_coef, lower --learning_rate, or stop earlier",
        "kl-explodes",
    ),
    "kl_zero": (
        "at the run's end the KL to the reference is below 0.02 nats per response",
        "the policy has hardly moved: raise --learning_rate, or train longer",
        "reward-never-moves",
    ),
    "clipfrac": (
        "{:.1%} of the ratios are clipped, above {:.0%}",
        "the steps are too large: lower --learning_rate, --num_ppo_epochs or --num_mini_batches",
        "kl-explodes",
    ),
    "first_ratio": (
        "before its first step the policy's log-probs differ from the sampler's by {:.2g}, above {:g}",
        "sampling and training disagree: check the model's code, its dropout and --attn_implementation",
        "ratio-not-1-at-the-first-step",
    ),
    "truncated": (
        "{:.1%} of the responses do not end with the stop token, above {:.0%}",
        "raise --response_length or --missing_eos_penalty, and check that the SFT data end with --stop_token",
        "no-response-ends",
    ),
    "ran_out": (
        "{:.1%} of the episodes run out of turns or tokens, above {:.0%}",
        "raise --max_turns or --response_length, shorten observations, or raise --missing_eos_penalty",
        "no-response-ends",
    ),
    "one_turn": (
        "no episode has a second turn",
        "the environment always says None: print what it is given, and compare it with what the SFT data say",
        "no-episode-has-a-second-turn",
    ),
    "reward_variance": (
        "the scores of a prompt's responses, or in PPO of the batch, are equal in {:.1%} of the cases, above {:.0%}",
        "they teach nothing: stop if the reward is at its best, or take other prompts, more responses, a finer reward",
        "loss-is-0-and-stays-0",
    ),
    "abstained": (
        "a reward abstains from {:.1%} of the responses, above {:.0%}",
        "these responses teach nothing: see why the function of --reward_fn, or the judge behind it, returns NaN",
        "a-reward-abstains",
    ),
    "entropy": (
        "the entropy of a token has fallen by a factor of {:.1f} since the first update, above {:g}",
        "unless the reward is at its best, the policy repeats itself: raise --kl_coef, or lower --learning_rate",
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
    length = metrics["val/sequence_lengths"]
    start = max(first["val/sequence_lengths"], 1e-9)
    fall = first["policy/entropy_avg"] / max(metrics["policy/entropy_avg"], 1e-9)
    # Under --overlap the policy that sampled is an update old on purpose.
    gap = 0 if args.overlap else max(metrics.get("val/first_ratio", 1) - 1, metrics["val/logprob_gap"])
    moved = abs(metrics.get("eval/objective/kl", metrics["objective/kl"]))
    unended = (args.batch_size - metrics["val/num_stop_token_ids"]) / args.batch_size
    has_end = {args.stop_token, getattr(args, "truncate_token", "none")} != {"none"}  # a token that ends a response
    of_turns = {}
    if "val/turns" in metrics:
        of_turns = {"ran_out": (metrics["val/ran_out"], 0.5), "one_turn": (float(metrics["val/turns"] == 1), 0)}
    return of_turns | {
        # nats per response: half to a quarter of one per token
        "kl": (metrics["objective/kl"], max(8.0, min(0.5 * length, 25.0), 0.25 * length)),
        # At a KL of 0.02 the chance of no event has changed by more than sqrt(0.02 / 2) = 0.1 (Pinsker's inequality).
        "kl_zero": (-moved, -0.02 if is_last else 0),
        "clipfrac": (metrics.get("policy/clipfrac_avg", 0), 0.3),
        "abstained": (metrics.get("val/abstained", 0), 0.2),
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
    precision = engines.precision(run.accelerator)
    is_last = metrics["update"] == run.num_updates
    found = {}
    for name, (value, bound) in numbers(metrics, first, run.args, precision, is_last).items():
        found[f"health/{name}"] = float(value > bound)
        if value > bound and name not in run.kept["said"]:
            run.kept["said"].append(name)
            seen, advice, section = SIGNS[name]
            guide = f" ({GUIDE}#{section})" * (Path(__file__).parents[3] / GUIDE).exists()  # not in a wheel
            console.say(f"warning: health/{name}: {seen.format(value, bound)}; {advice}{guide}")
    return found
