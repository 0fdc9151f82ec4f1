"""
"Is my run healthy?": known bad signs of a policy's training, each with a threshold and an advice.

Each sign is a metric `health/<name>`: 1 in an update where it shows, else 0. The first time it shows, one line says so.
docs/guides/2_reading_a_run.md explains them. Nothing here changes a run.
"""

import json
from pathlib import Path

import torch

from rlhf_details.plumbing import engines, hub


def signs(metrics, first, args, precision, is_last=False):
    """{name: (whether it shows, what is seen, what to do)}.

    Args: metrics of an update, with its same_start; first, those of the first update; precision, the type that matrices
    are multiplied in; is_last, whether the run ends with this update.
    """
    moved = abs(metrics.get("eval/objective/kl", metrics["objective/kl"]))
    kl, clipped = metrics["objective/kl"], metrics["policy/clipfrac_avg"]
    length, entropy = metrics["val/sequence_lengths"], metrics["policy/entropy_avg"]
    kl_bound = max(8.0, min(0.5 * length, 25.0), 0.25 * length)  # nats per response: half to a quarter of one per token
    gap = max(metrics.get("val/first_ratio", 1) - 1, metrics["val/logprob_gap"])
    gap_bound = 0.01 if precision == "fp32" else 0.5
    alike, alike_first = metrics["same_start"], first["same_start"]
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
        # At a KL of 0.01 the chance of no event has changed by more than sqrt(0.01 / 2) = 0.07 (Pinsker's inequality).
        "kl_zero": (
            is_last and moved < 0.01,
            f"at the run's end the KL to the reference is {moved:.4f} nats per response, below 0.01",
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
            alike > max(0.5, 2 * alike_first),
            f"{alike:.0%} of the responses begin with the same 4 tokens, in the first update {alike_first:.0%}",
            "read the samples, since the policy may write one text to all prompts: raise --kl_coef, or stop earlier",
        ),
        "length": (
            not 0.5 <= length / max(first["val/sequence_lengths"], 1e-9) <= 2,
            f"the responses went from {first['val/sequence_lengths']:.1f} to {length:.1f} tokens, over a factor of 2",
            "read the samples, since rewards often pay for length: raise --kl_coef, or price length with a --reward_fn",
        ),
    }


def same_start(responses, mask):
    """The share of the responses [N, R] that begin with the four tokens with which most of them begin."""
    counts = torch.where(mask, responses, -1)[:, :4].unique(dim=0, return_counts=True)[1]
    return counts.max().item() / len(responses)


def has_end(args):
    """Whether there is a token that ends a response."""
    return {args.stop_token, getattr(args, "truncate_token", "none")} != {"none"}


def untested(args, accelerator, policy):
    """A line where no test has run this script and architecture under this engine, precision and device, else ""."""
    kind, tested = accelerator.device.type, json.loads(Path(__file__).with_name("validated.json").read_text())
    architecture, script = accelerator.unwrap_model(policy).model.config.model_type, hub.script_of(args)
    combination = [architecture, engines.precision(accelerator), engines.name(accelerator), script.removesuffix(".py")]
    combination += [] if kind == "cpu" else [f"on {kind}"]  # The tests run on CPUs.
    where = f"{', '.join(combination)} (docs/guides/4_memory_and_gpus.md, Validated on)"
    note = f"note: no test has run {where}: look at val/logprob_gap and val/ratio"
    return "" if combination in tested else note


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
        metrics = metrics | {"same_start": same_start(*samples[1:3])}
        kept = "policy/entropy_avg", "val/sequence_lengths", "same_start"
        self.memory["first"] = self.memory["first"] or {name: metrics[name] for name in kept}
        precision, is_last = engines.precision(self.accelerator), metrics["update"] == self.num_updates
        found = signs(metrics, self.memory["first"], self.args, precision, is_last)
        fresh = [name for name, (shows, _, _) in found.items() if shows and name not in self.memory["said"]]
        self.memory["said"] += fresh
        lines = [f"warning: health/{name}: {found[name][1]}; {found[name][2]}" for name in fresh]
        return {f"health/{name}": float(shows) for name, (shows, _, _) in found.items()}, lines
