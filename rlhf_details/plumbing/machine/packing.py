"""
How many responses to a prompt share a row of a forward, and how many episodes a forward takes.

Packed rows compute a prompt once for its responses. They need a model that takes any attention mask and any positions.
This is looked up in its configuration, and then tried out on two made-up prompts.
"""

import torch

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import models


def choose(args, k, policy, reward_model, prompts, response_logprobs, response_scores):
    """(n, size, rollout_n): n responses to a prompt share a row, and rollout_n in sampling; a forward takes `size`.

    One line says which rows a run has, and why.
    Args: k, the responses to a prompt; policy, reward_model (or None), modules of the page; prompts, data.Prompts;
    response_logprobs and response_scores, the page's functions of (module, batch, n).
    """
    n, size = largest(k, args.micro_batch_size)
    rollout_n, _ = largest(k, args.rollout_micro_batch_size)
    page = policy, reward_model, response_logprobs, response_scores
    if why := why_plain(args, max(n, rollout_n), prompts, *page):
        console.say(f"plain rows, one response each: {why}")
        return 1, args.micro_batch_size, 1
    when = f"{n} of its {k} responses, and for {rollout_n} in sampling"
    console.say(f"packed rows: a prompt is computed once for {when}; they give the same numbers as plain rows")
    return n, size, rollout_n


def largest(k, size):
    """(n, M): the largest divisor of k that is at most `size`, and the most episodes, a multiple of n, that are."""
    n = max(divisor for divisor in range(1, min(k, size) + 1) if k % divisor == 0)
    return n, size // n * n


@torch.no_grad()
def why_plain(args, n, prompts, policy, reward_model, response_logprobs, response_scores):
    """Why n responses must not share a row, after computing log-probs and scores both ways in fp32; "" if they may."""
    if not args.share_prompts:
        return "--no_share_prompts"
    if n == 1:
        return "a micro-batch holds one response to a prompt"
    for name, module in (("policy", policy), ("reward model", reward_model)):
        config = module.model.config.get_text_config() if module else None
        kinds = {*(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ())}
        if kinds - {"full_attention", "global"} or getattr(config, "sliding_window", None):
            return f"the {name} ({config.model_type}) has sliding-window, local or recurrent layers"
    # The trial is short: rows of full length could be many and wide, and the models may still be on the CPU.
    n = min(n, 4)
    longest = max(len(prompt.ids) for prompt in prompts)
    batch = made_up_batch(policy.model, min(longest, 16), min(args.response_length, 8), n)
    policy.eval()
    try:
        with torch.autocast(policy.model.device.type, enabled=False):
            gaps = [response_logprobs(policy, batch, n)[0] - response_logprobs(policy, batch, 1)[0]]
            if reward_model:
                gaps.append(response_scores(reward_model, batch, n)[0] - response_scores(reward_model, batch, 1)[0])
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # A model that cannot take the mask may fail in any way.
        return f"packed rows cannot be computed ({type(e).__name__}: {console.in_one_line(e)})"
    gap = torch.cat([x.flatten() for x in gaps]).abs().max().item()
    # The trial finds what no configuration tells, such as ALiBi. [RLOO-12]
    return "" if gap < 1e-3 else f"packed and plain rows differ by {gap:.2g}"


def made_up_batch(model, query_length, response_length, n):
    """A Batch of two prompts with n responses each."""

    def ids(rows, columns):
        numbers = torch.arange(rows * columns, device=model.device).view(rows, columns)
        return numbers * 7919 % models.num_tokens(model)

    queries = ids(2, query_length).repeat_interleave(n, 0)
    responses = ids(2 * n, response_length)
    query_mask = torch.ones_like(queries, dtype=torch.bool)
    query_mask[:n, : query_length // 2] = False  # The first prompt is left-padded.
    return utils.Batch(queries, query_mask, responses, torch.ones_like(responses, dtype=torch.bool))
