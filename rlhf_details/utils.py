"""
What all scripts share: masks and padding, orders and the learning rate, the sampler, and the means that become metrics.

Shapes    B: episodes   n: adjacent episodes that share a prompt and a row   W = B / n: rows   V: vocabulary
          Q: query tokens   R: response tokens   L: columns   L': columns seen   S: stop tokens   H: hidden size
Masks     True marks a real token. Nothing is found by looking for a pad token.
"""

import functools
import inspect
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from rlhf_details import noise


# ---- masks and padding -----------------------------------------------------------------------------------------------
def masked_mean(x, mask):
    """Mean of x over the True entries of mask (same shape), and 0 where there is none."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(x, mask, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8) over the True entries, 0 elsewhere. `shift_mean=False` adds the mean back.

    Source: openai/lm-human-preferences, lm_human_preferences/utils/core.py.
    """
    # Subtract one entry first: equal entries then give exactly 0, not amplified rounding.
    first = x.take(mask.int().argmax())
    x = x - first
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)  # the biased one, as in tf.nn.moments [PPO-11]
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean + first) * mask


def in_equal_group(scores, k, scored):
    """Whether each response [B] is in a group of k whose scores are equal, ignoring unscored ones."""
    highest = scores.masked_fill(~scored, -math.inf).reshape(-1, k).amax(1)
    lowest = scores.masked_fill(~scored, math.inf).reshape(-1, k).amin(1)
    return (highest <= lowest).repeat_interleave(k)


def left_pad(rows, device=None):
    """Lists of token ids -> (tokens [B, L] int64, mask [B, L] bool), padded on the left with token 0."""
    width = max(map(len, rows))
    # Every prompt ends in the column before its response begins. [DATA-5]
    tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    return tokens, mask


def positions_from_mask(mask):
    """Position of each token among the real ones, [B, L] int64; left padding gets 0, right padding the last position.

    Source: lm-human-preferences, language/model.py.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)  # Padding does not count. [DATA-6]


class Batch(NamedTuple):
    """Queries and the responses to them."""

    queries: torch.Tensor  # [B, Q] int64, left-padded
    query_mask: torch.Tensor  # [B, Q] bool
    responses: torch.Tensor  # [B, R] int64, right-padded
    response_mask: torch.Tensor  # [B, R] bool, True up to and including the token that ended the response
    widths: tuple = ()  # from `split`: the first column with a query's token, and the length of the longest response


def split(batch, parts):
    """[(part, its Batch with the widths)] for parts of a Batch's rows, which are row numbers or slices."""
    first = [batch.query_mask[m].any(0).int().argmax() for m in parts]
    longest = [batch.response_mask[m].sum(1).max() for m in parts]
    # `tolist` waits for the device, so it is called once for all parts.
    widths = torch.stack([torch.stack(first), torch.stack(longest)], 1).tolist()
    return [(m, Batch(*(x[m] for x in batch[:4]), known)) for m, known in zip(parts, widths, strict=True)]


def slices(num_rows, size):
    """Slices of at most `size` rows."""
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def trim(batch, extra=0):
    """The Batch without columns that are all padding; `extra` more are kept after the longest response."""
    first, width = batch.widths or split(batch, [slice(None)])[0][1].widths
    return Batch(
        batch.queries[:, first:],
        batch.query_mask[:, first:],
        batch.responses[:, : width + extra],
        batch.response_mask[:, : width + extra],
    )


def in_slices(function, model, batch, size, *rest):
    """Calls function(model, part, *rest) for parts of `size` rows of a Batch, and joins the lists that it returns."""
    found = [function(model, part, *rest) for _, part in split(batch, slices(len(batch.queries), size))]
    return [torch.cat(results) for results in zip(*found, strict=True)]


def token_logprobs(logits, hidden, labels, size, compare=None, states=None, entropy_gradient=False):
    """The labels' log-probs, and entropies, fp32 and of the labels' shape; for distillation also what `compare` says.

    Args: logits(hidden [K, H]) -> logits / T [K, V] fp32, of K tokens; hidden [.., H], the states before the tokens;
    labels [..]; size, how many tokens' logits may exist at a time; compare(log-softmax [K, V], part of `states`
    [.., H']) -> [K]; entropy_gradient, to differentiate entropies.
    """

    def of_piece(hidden, labels, *states):
        log_softmax = logits(hidden).log_softmax(-1)  # [K, V]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = -(log_softmax.exp() * log_softmax).sum(-1)
        found = log_softmax.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropies
        return (*found, compare(log_softmax, *states)) if compare else found

    flat = hidden.flatten(0, -2), labels.flatten(), *([states.flatten(0, -2)] if compare else [])
    # All logits at once would take V floats per token, and as many for gradients. [GEN-8]
    pieces = [x.split(max(1, size)) for x in flat]
    # If there are several, the backward pass recomputes each.
    run_piece = functools.partial(checkpoint, of_piece, use_reentrant=False) if len(pieces[0]) > 1 else of_piece
    found = zip(*map(run_piece, *pieces), strict=True)
    return tuple(torch.cat(x).reshape(labels.shape) for x in found)


# ---- orders and optimiser --------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=16)
def permutation(n, *coordinates):
    """A shuffle of range(n), as a tuple, fixed by integers such as (seed, epoch)."""
    # numpy pads seeds with zeros: without their length first, (1, 2) and (1, 2, 0) would be the same.
    return tuple(np.random.default_rng((len(coordinates), *coordinates)).permutation(n).tolist())


def rows_of_update(update, count, num_rows, seed):
    """The numbers of the `count` rows of update 1, 2, ..: pass after pass over num_rows rows."""
    stream = range((update - 1) * count, update * count)
    # Each pass has its own order, a function of the seed and the pass. [DATA-7]
    return [permutation(num_rows, seed, i // num_rows)[i % num_rows] for i in stream]


def learning_rate_at(step, num_steps, learning_rate, schedule, warmup_ratio=0.0):
    """Learning rate of step 1 .. num_steps: it rises to `learning_rate` in the warm-up, then falls towards 0 or stays.

    Args: schedule, "linear" (as in lm-human-preferences), "cosine" or "constant"; warmup_ratio, a share of the steps.
    """
    warmup = math.ceil(warmup_ratio * num_steps - 1e-9)  # 0.07 * 100 is a little above 7.
    if step <= warmup:
        return learning_rate * step / warmup
    done = (step - 1 - warmup) / max(1, num_steps - warmup)  # 0 at the first step after the warm-up [OPT-1]
    shape = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "constant": 1.0}
    return learning_rate * shape[schedule]


def adamw(model, learning_rate, eps, weight_decay):
    """torch's AdamW over the trained parameters of a model, biases and norms included."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Explicit, since torch's defaults differ: from RLOO's in weight decay (0.01), from PPO's in eps (1e-8). [OPT-4]
    return torch.optim.AdamW(parameters, lr=learning_rate, eps=eps, weight_decay=weight_decay)


def disable_dropout(model):
    """Sets every dropout of a model to zero. `.eval()` would also switch gradient checkpointing off."""
    for name, value in vars(model.config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(model.config, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # Dropout would put noise into the ratio and the KL. [MODEL-1]
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)  # Attention reads this number. [MODEL-2]
    return model.train()


# ---- the sampler -----------------------------------------------------------------------------------------------------
TRAINING, EVALUATION, REWARD_DATA = 0, 1, 3  # what a sample is drawn for, a coordinate of its noise (2 is retired)


def name_of_cache(model):
    """What a model's forward calls the cache: transformers 5.24 renamed it, and older ones ignore the new name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def sample(policy, queries, query_mask, episodes, n, response_length, stop_ids, key, size, room=None):
    """A response to each query, token by token from softmax(logits / T), without top-k, top-p or a generation_config.

    A token is argmax(logits / T + Gumbel noise), which is a draw from the softmax. The noise depends on (key, number of
    the episode, step, token id) alone, so no grouping of episodes and no number of processes changes it.
    Args: policy(tokens, mask, positions, index, cache=cache) -> logits / T [.., len(index), V], in eval mode; its mask
    may be None (no padding), and it must not call collectives, since processes stop after different steps; queries,
    query_mask [B, Q], where n adjacent episodes have the same prompt; episodes [B], their numbers; stop_ids [S], S may
    be 0; key, e.g. (seed, TRAINING, update); size, how many episodes are sampled at a time, a multiple of n; room [B],
    the most tokens of each response, where some may have fewer than response_length.
    Returns: responses [B, R] int64, mask [B, R] bool (True up to and including the stop token), log-probs [B, R] fp32.
    """
    room = torch.full_like(episodes, response_length) if room is None else room
    found = [
        sample_slice(policy, queries[m], query_mask[m], episodes[m], n, response_length, stop_ids, key, room[m])
        for m in slices(len(episodes), size)
    ]
    return [torch.cat(results) for results in zip(*found, strict=True)]


@torch.no_grad()
def sample_slice(policy, queries, query_mask, episodes, n, response_length, stop_ids, key, room):
    """As `sample`, for all episodes at once."""
    queries, query_mask = queries[::n], query_mask[::n]  # [W, Q]: the prompt of a row is computed once.
    first, num_real = torch.stack([query_mask.any(0).int().argmax(), query_mask.sum()]).tolist()
    queries, query_mask = queries[:, first:], query_mask[:, first:]  # Everything before `first` is padding.
    (W, Q), B, device = queries.shape, len(episodes), queries.device
    is_padded = num_real < W * Q
    keys = noise.keys_of_episodes(key, episodes)
    responses = torch.zeros(B, response_length, dtype=torch.long, device=device)
    mask = torch.zeros(B, response_length, dtype=torch.bool, device=device)
    logprobs = torch.zeros(B, response_length, device=device)
    # A step adds a token of each of the n responses to their row, interleaved (unlike train_rloo.pack):
    #   p p p | a b | a b | ...        n = 2: column Q + t * n + j holds token t of response j
    own = torch.eye(n, dtype=torch.bool, device=device).repeat(1, response_length).expand(W, -1, -1)  # [W, n, n * R]
    visible = torch.cat([query_mask.unsqueeze(1).expand(-1, n, -1), own], 2)  # [W, n, Q + n * R]
    visible = additive(visible) if n > 1 else visible.squeeze(1)
    cache = DynamicCache(config=getattr(policy, "module", policy).model.config)
    last, each = torch.arange(Q - 1, Q, device=device), torch.arange(n, device=device)
    seen = query_mask if is_padded else None
    logits = policy(queries, seen, positions_from_mask(query_mask), last, cache=cache)  # [W, 1, V]
    logits = logits.squeeze(1).repeat_interleave(n, 0)  # [B, V]
    position = query_mask.sum(1, keepdim=True).expand(W, n)  # [W, n], of the first response token
    alive = torch.ones(B, dtype=torch.bool, device=device)
    for t in range(response_length):
        # Gumbel-max sampling; `policy` has divided by the temperature. [GEN-1]
        token = (logits + noise.gumbel_noise(noise.fold(keys, t), logits.size(-1))).argmax(-1)  # [B]
        responses[:, t], mask[:, t] = token * alive, alive
        logprobs[:, t] = (logits.gather(1, token.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1)) * alive
        # There may be several stop tokens: Gemma's turns end with <end_of_turn>, not with EOS. [GEN-16]
        # The stop token itself stays in the mask. [GEN-5]
        alive = alive & ~torch.isin(token, stop_ids) & (t + 1 < room)
        # `any` synchronises with the GPU, so check every 16 steps and waste at most 15.
        is_asked = device.type == "cpu" or (t + 1) % 16 == 0
        if t + 1 == response_length or (is_asked and not alive.any()):
            break
        seen = visible[..., : Q + n * (t + 1)] if n > 1 or is_padded else None
        tokens = (token * alive).reshape(W, n)  # Finished responses run on with token 0.
        # Positions do not count the prompt's padding. [GEN-6]
        positions = position + t * alive.reshape(W, n)  # Finished ones must not reach beyond the model's context.
        logits = policy(tokens, seen, positions, each, cache=cache).flatten(0, 1)  # [W, n, V] -> [B, V]
    return responses, mask, logprobs


def additive(visible):
    """The mask [W, 1, L, L'] fp32 of a bool [W, L, L']: 0 where visible, else the lowest number of bf16."""
    # fp32's lowest number would be -inf in bf16.
    lowest = torch.finfo(torch.bfloat16).min
    return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, lowest).unsqueeze(1)


# ---- metrics ---------------------------------------------------------------------------------------------------------
class Means:
    """Named means over all that is added on all processes."""

    def __init__(self, device):
        self.device = device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64.
        self.sums, self.highest = {}, {}  # {name: [sum, count]}, {name: highest entry}

    def add(self, entries, mask=None):
        """Adds {name: tensor or number}, where mask (same shape, None: everywhere) is True."""
        for name, x in entries.items():
            x = torch.as_tensor(x, device=self.device).detach().to(self.dtype)
            counted = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
            new = torch.stack([x.where(counted, torch.zeros_like(x)).sum(), counted.sum()])
            self.sums[name] = self.sums.get(name, 0) + new

    def add_ratios(self, logratio, mask):
        """Adds exp(logratio), for val/ratio and val/ratio_var."""
        # Sums of ratio - 1 keep the digits that a float near 1 loses.
        ratio_minus_1 = logratio.expm1()
        self.add({"ratio_minus_1": ratio_minus_1, "ratio_minus_1_squared": ratio_minus_1**2}, mask)

    def add_max(self, name, x):
        """Remembers the highest entry of x."""
        self.highest[name] = torch.maximum(self.highest.get(name, x.detach().max()), x.detach().max())

    def reduce(self, accelerator):
        """{name: mean, or highest entry, over all processes}. Call it on every process."""
        sums = torch.stack(list(self.sums.values()))  # [names, 2]
        # Processes hold different numbers of tokens, so sum first and divide once. [LOG-2]
        total = accelerator.reduce(sums, "sum")
        found = dict(zip(self.sums, (total[:, 0] / total[:, 1].clamp(min=1)).tolist(), strict=True))
        if self.highest:
            highest = accelerator.gather(torch.stack(list(self.highest.values())).unsqueeze(0))  # [processes, names]
            found |= dict(zip(self.highest, highest.amax(0).tolist(), strict=True))
        if "ratio_minus_1" in found:
            mean, square = found.pop("ratio_minus_1"), found.pop("ratio_minus_1_squared")
            found |= {"val/ratio": 1 + mean, "val/ratio_var": square - mean**2}  # of actions [LOG-4]
        return found
