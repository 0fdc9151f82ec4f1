"""
"Is my run healthy?": known bad signs of a PPO or RLOO run, each with a threshold and an advice.

Each sign is a metric `health/<name>`, 1 where it shows in an update, else 0; the first time, one line says so. The README's section
of that name goes through them. Nothing runs at import, and nothing here changes a run.
"""

from rlhf_details import engines


def signs(metrics, first, args, precision):
    """{name: (whether it shows, what is seen, what to do)}.

    Args: metrics of an update; first, those of the first update; precision, "fp32" or what matrices are multiplied in.
    """
    length, entropy = metrics["val/sequence_lengths"], metrics["policy/entropy_avg"]
    kl_bound = max(25.0, 0.25 * length)
    ratio_bound = 0.01 if precision == "fp32" else 0.5
    ratios = 1.0 if args.async_rollouts else metrics["val/first_ratio"]  # there the first ratio is one update old
    off = max(ratios - 1, metrics["val/logprob_gap"])
    ended, same = metrics["val/num_stop_token_ids"] / args.batch_size, metrics["val/equal_scores"]
    has_end = {args.stop_token, getattr(args, "truncate_token", "none")} != {"none"}
    return {
        "kl": (
            metrics["objective/kl"] > kl_bound,
            f"the KL to the reference is {metrics['objective/kl']:.1f} nats a response, above {kl_bound:g}",
            "the reward is being over-optimised: raise --kl_coef, lower --learning_rate, or stop earlier",
        ),
        "clipfrac": (
            metrics["policy/clipfrac_avg"] > 0.3,
            f"{metrics['policy/clipfrac_avg']:.0%} of the ratios are clipped, above 30 %",
            "the steps are too large: lower --learning_rate, --num_ppo_epochs or --num_mini_batches",
        ),
        "first_ratio": (
            off > ratio_bound,
            f"before its first step the policy gives tokens other log-probs than when it sampled them, by {off:.2g} (above "
            f"{ratio_bound:g})",
            "sampling and training compute different things: check the model's code, its dropout and --attn_implementation",
        ),
        "truncated": (
            has_end and ended < 0.05,
            f"{ended:.0%} of the responses end with the stop token, below 5 %",
            "raise --response_length or --missing_eos_penalty, and see that the SFT data end with --stop_token",
        ),
        "reward_variance": (
            same > 0.5,
            f"{same:.0%} of the prompts have responses of equal score, above 50 %",
            "these teach nothing: where the reward is at its best, you are done; else take easier or harder prompts, or a larger "
            "--rloo_k",
        ),
        "entropy": (
            entropy < 0.2 * first["policy/entropy_avg"],
            f"the entropy fell from {first['policy/entropy_avg']:.3f} to {entropy:.3f} nats a token, below a fifth",
            "the policy says the same again and again: raise --kl_coef, or lower --learning_rate",
        ),
        "length": (
            not 0.5 <= length / max(first["val/sequence_lengths"], 1e-9) <= 2,
            f"the responses went from {first['val/sequence_lengths']:.1f} to {length:.1f} tokens, by more than a factor of 2",
            "read the samples: rewards often pay for length; raise --kl_coef, or put a price on length (--reward_fn)",
        ),
    }


class Health:
    """Looks at each update's metrics. What it remembers, `memory`, goes into the checkpoints."""

    def __init__(self, args, accelerator):
        self.args, self.accelerator, self.memory = args, accelerator, {"first": None, "said": []}

    def __call__(self, metrics):
        """(the health/* metrics of an update, the lines to print); of a row that is no update of PPO or RLOO: nothing."""
        if "val/equal_scores" not in metrics:
            return {}, []
        kept = "policy/entropy_avg", "val/sequence_lengths"
        self.memory["first"] = self.memory["first"] or {name: metrics[name] for name in kept}
        found = signs(metrics, self.memory["first"], self.args, engines.precision(self.accelerator))
        fresh = [name for name, (shows, _, _) in found.items() if shows and name not in self.memory["said"]]
        self.memory["said"] += fresh
        lines = [f"warning: health/{name}: {found[name][1]}; {found[name][2]}" for name in fresh]
        return {f"health/{name}": float(shows) for name, (shows, _, _) in found.items()}, lines
