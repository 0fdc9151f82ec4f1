"""
GRPO: group relative policy optimisation, on a language model and a reward (arXiv 2402.03300). minimal/grpo.py is the
algorithm alone; this file adds DAPO, Dr. GRPO, GSPO and CISPO, packed rows and several processes.

1. Each prompt gets a group of k responses. Every token is an action, and the tokens of a response share its advantage:
   (score - mean of the group) / standard deviation of the group. There is no value model.
2. The KL, estimated at each token, is a term of the loss and not of the reward.
3. Several optimiser steps per rollout use PPO's clipped loss with a ratio for each token; --objective gspo has one for
   each response, and cispo clips only the weight of log p. Losses are averaged over all tokens (DAPO), under gspo over
   each response first (the GRPO paper).
4. n of the k responses share a row and the computation of their prompt, where the model allows it.
5. Sampling and shuffling depend on (seed, update, episode, ..) alone, not on a generator's state.

Left out on purpose: top-k and top-p, which would sample from another policy, and DAPO's dynamic
sampling (val/equal_scores is the share of groups that it would replace).

A tag such as [GRPO-1] marks an implementation detail: benchmark/checks/details.md has its source, test and effect.

Shapes    P: prompts   k: responses per prompt   B = P * k: episodes of an update, the k of a prompt adjacent
          Q: query tokens, left-padded   R: response tokens, right-padded   L: columns of a row   V: vocabulary
          n: responses packed in a row, divides k   M: episodes of a micro-batch   W: rows of a forward, M / n
          C: columns that are read   H: hidden size   F: rewards, the reward model's included   S: stop tokens
          L': columns that a token may see, the cache included   N: held-out prompts
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/train_grpo.py
N processes:   accelerate launch --num_processes N rlhf_details/train_grpo.py
Your data:     python rlhf_details/train_grpo.py --dataset rows.jsonl --sft_model_path gpt2 --reward_fn mine.py:f
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, data, flags, models, stop_tokens
from rlhf_details.plumbing.machine import engines, packing, rewards, samplers
from rlhf_details.plumbing.outputs.run import Run
from rlhf_details.utils import EVALUATION, TRAINING, Batch, in_slices


@dataclass
class Args(flags.PolicyArgs):  # inherits the shared flags
    exp_name: str = "train_grpo"
    output_dir: str = "models/grpo"

    # sampling
    response_length: int = 256
    """most tokens a response may have (R)"""
    temperature: float = 1.0
    """temperature of sampling and of every log-prob"""
    stop_token: str = "eos"
    """what ends sampling: "eos" (any end that the model's files name), "none", or a text that is one token"""
    missing_eos_penalty: float | None = 1.0
    """what a response without the stop token pays, in points of score"""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """subtract it from the score, or replace the score by -penalty"""
    soft_overlong: int | None = None
    """DAPO's soft overlong buffer: over this many last tokens of R the penalty rises from 0 to 1"""

    # reward and KL
    kl_coef: float = 0.04
    """weight of the KL in the loss (beta)"""
    kl_times_ratio: bool = False
    """weight a token's KL by its ratio: its gradient is then that of KL(policy || reference)"""

    # algorithm
    objective: Literal["grpo", "gspo", "cispo"] = "grpo"
    """the policy's loss; it also chooses the defaults of cliprange, cliprange_high and loss_normalization"""
    group_size: int = 8
    """responses per prompt (k)"""
    total_episodes: int = 10_000
    """responses sampled in the whole run, rounded up to whole batches"""
    batch_size: int = 64
    """episodes per update, over all processes (B)"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch"""
    num_ppo_epochs: int = 1
    """passes over the batch"""
    cliprange: float | None = None
    """clip range of the probability ratio; None: the objective's"""
    cliprange_high: float | None = None
    """clip range above 1 (DAPO's Clip-Higher); None: cliprange, or the objective's; CISPO has no lower
    bound: weights are at most 1 + cliprange_high (TRL's epsilon_high)"""
    scale_advantages: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of the group's scores, of the batch's, or by nothing (Dr. GRPO)"""
    loss_normalization: Literal["token", "response", "constant"] | None = None
    """average over the minibatch's tokens (after DAPO), within responses first (GRPO), or over response_length tokens
    each (Dr. GRPO); None: the objective's"""
    mask_truncated: bool = False
    """leave responses that did not end out of the loss (DAPO), but not out of their group"""
    mask_equal: bool = False
    """leave groups of equal scores out of the loss: only KL and entropy would act on them"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus; with --entropy_target its maximum"""
    entropy_target: float | None = None
    """give the bonus only while the mean entropy of an action, in nats, is below this (Skywork-OR1)"""

    # optimiser
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """learning-rate schedule over the updates"""
    warmup_ratio: float = 0.0
    """the warm-up's share of the updates"""
    adam_eps: float = 1e-8
    """AdamW's epsilon"""
    weight_decay: float = 0.0
    """AdamW's weight decay"""
    max_grad_norm: float | None = 1.0
    """clip the gradient's global norm; None: only log it"""

    # memory and speed: never changes the result, up to rounding
    share_prompts: bool = True
    """compute each prompt once for its k responses, where the model allows it"""


# Presets replace the defaults above: an embedded task's by name (default: "toy"), else those of the smallest number
# above the model's parameter count. docs/guides/1_your_data.md has their sources.
presets = {
    "toy": dict(
        eval_dataset="toy:test",
        sft_model_path="models/toy/sft",
        reward_model_path="models/toy/reward",
        output_dir="models/toy/grpo",
        response_length=36,
        missing_eos_penalty=3.0,
        kl_coef=0.1,
        group_size=4,
        total_episodes=25_600,
        batch_size=256,
        learning_rate=5e-4,
        micro_batch_size=256,
        rollout_micro_batch_size=256,
    ),
    20e6: dict(
        response_length=53,
        temperature=0.7,
        missing_eos_penalty=3.0,
        kl_coef=0.3,
        group_size=4,
        learning_rate=3e-4,
        micro_batch_size=64,
    ),
    500e6: {},  # the defaults above
    math.inf: dict(learning_rate=1e-6),
}
presets["toy-sum"] = presets["toy"] | dict(
    eval_dataset="toy-sum:test",
    sft_model_path="models/toy-sum/sft",
    reward_model_path=None,
    reward_fn=("rlhf_details.toy:right_sum",),
    output_dir="models/toy-sum/grpo",
    response_length=3,
    missing_eos_penalty=1.0,
    total_episodes=307_200,
    learning_rate=2e-3,
)


# ---- models: what is trained runs inside `forward`, so that DDP, FSDP and DeepSpeed see all parameters ---------------
class Policy(nn.Module):
    """Next-token logits / temperature, or log-probs of given tokens, in fp32."""

    logits_at_once = 2**24  # 64 MiB in fp32

    def __init__(self, model, temperature, entropy_gradient=False):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)
        self.entropy_gradient = entropy_gradient

    def forward(self, tokens, mask, positions, index, labels=None, cache=None):
        """
        Args: tokens, positions [W, L]; mask [W, L'] bool or [W, 1, L, L'] additive, None without padding; index [C],
        the columns to read; labels [W, C], the tokens that these predict; cache, transformers', updated in place.
        Returns: (log-probs, entropies), both [W, C]; without labels the logits / T [W, C, V].
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [W, C, H]
        if labels is None:
            return self.logits(hidden)
        size = self.logits_at_once // self.head.vocab_size
        return utils.token_logprobs(self.logits, hidden, labels, size, entropy_gradient=self.entropy_gradient)

    def logits(self, hidden):
        """Tempered logits [.., V] fp32 of last hidden states [.., H]."""
        # The temperature divides the logits of every log-prob, not the sampler's alone. [GEN-2] [GEN-3]
        return self.head(hidden).float() / self.temperature


class Reward(nn.Module):
    """Scores: the head's output at given columns, plus a bias."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # train_reward.py stores this bias, which transformers does not apply. [REW-1]
        self.bias = getattr(model.config, "reward_bias", 0.0)

    def forward(self, tokens, mask, positions, index):
        """Scores [W, C] fp32 at the columns `index` [W, C]."""
        hidden = models.hidden_states(self.model, tokens, mask, positions)  # [W, L, H]
        hidden = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))  # [W, C, H]
        # In bf16 the scores between 2 and 4 would lie 1/64 apart. [RM-6]
        with torch.autocast(hidden.device.type, enabled=False):
            return self.model.score(hidden.float()).squeeze(-1) + self.bias


def load_models(args, device):
    """Returns (tokenizer, policy, reference, reward model or None), all in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy = Policy(models.add_adapters(model, args.lora_rank), args.temperature, args.entropy_coef > 0)
    # With the policy itself as reference the KL would stay 0. [MODEL-4]
    reference = models.frozen_copy(policy)
    reward_model = None
    if rewards.reads_token_ids(args, tokenizer):  # With another tokenizer, rewards.Scorer gives it text.
        reward_model = utils.disable_dropout(models.load_reward_model(args.reward_model_path, args))
        reward_model = Reward(reward_model).requires_grad_(False).to(device).eval()
    return tokenizer, policy.to(device), reference.to(device).eval(), reward_model


# ---- from tokens to log-probs and scores -----------------------------------------------------------------------------
def pack(batch, n):
    """Rows of n responses to one prompt, each of which follows the prompt as if alone.

             p  p  p  a1 a2 b1 b2      n = 2, prompt p p p, responses a1 a2 and b1 b2; x: it sees that one
        p    x  .  .  .  .  .  .       the prompt's first token
        a1   x  x  x  x  .  .  .       a1 sees the prompt and itself
        b2   x  x  x  .  .  x  x       b sees the prompt and its own past
    With n = 1 this is an ordinary padded row.
    Args: batch, where n adjacent episodes have the same prompt.
    Returns: tokens [W, L], mask (bool [W, L], or additive [W, 1, L, L] where n > 1), positions [W, L] with
    L = Q + n * R, and index [n * R], the columns whose logits predict the responses' tokens.
    """
    (_, Q), (_, R), device = batch.queries.shape, batch.responses.shape, batch.queries.device
    query_mask = batch.query_mask[::n]  # [W, Q]
    tokens = torch.cat([batch.queries[::n], batch.responses.reshape(-1, n * R)], 1)  # [W, L]
    real = torch.cat([query_mask, batch.response_mask.reshape(-1, n * R)], 1)  # [W, L]
    step = torch.arange(R, device=device).repeat(n)  # [n * R], 0 .. R-1 for each response
    # Positions restart with each response. [RLOO-10]
    positions = torch.cat([utils.positions_from_mask(query_mask), query_mask.sum(1, keepdim=True) + step], 1)
    column = torch.arange(Q + n * R, device=device)  # [L]
    # The column before a token predicts it: Q - 1 for the first token of each response. [GEN-7]
    index = torch.where(step == 0, Q - 1, column[Q:] - 1)  # [n * R]
    if n == 1:
        return tokens, real, positions, index
    owner = torch.cat([torch.zeros_like(column[:Q]), 1 + torch.arange(n, device=device).repeat_interleave(R)])  # [L]
    # A token sees the prompt (owner 0) and the past of its own response. [RLOO-9]
    visible = (column.unsqueeze(1) >= column) & ((owner == 0) | (owner.unsqueeze(1) == owner))  # [L, L]
    # Padding sees itself: a softmax over no column can be NaN. [RLOO-11]
    visible = (visible & real.unsqueeze(1)) | torch.eye(len(column), dtype=torch.bool, device=device)  # [W, L, L]
    return tokens, utils.additive(visible), positions, index


def response_logprobs(policy, batch, n):
    """Log-probs and entropies [M, R] fp32, 0 at padding, of a Batch of M episodes, n to a row."""
    M, R = batch.responses.shape
    batch = utils.trim(batch)
    outputs = policy(*pack(batch, n), labels=batch.responses.reshape(M // n, -1))  # two of [W, n * width]
    # Padding holds zeros, so that sums over R need no mask. [REW-6]
    outputs = [x.reshape(batch.responses.shape) * batch.response_mask for x in outputs]  # [M, width]
    return [nn.functional.pad(x, (0, R - x.size(1))) for x in outputs]


def response_scores(reward_model, batch, n):
    """[scores], a list for `in_slices`, [M] fp32: the reward model's output at the last token of each response."""
    batch = utils.trim(batch)
    (_, Q), (_, R) = batch.queries.shape, batch.responses.shape
    tokens, mask, positions, _ = pack(batch, n)
    start = Q + R * torch.arange(n, device=tokens.device)  # [n], the first column of each response
    # The mask says which token is the last, since pad may equal EOS. [REW-2]
    last = start + batch.response_mask.sum(1).reshape(-1, n) - 1  # [W, n]
    return [reward_model(tokens, mask, positions, last).reshape(-1)]


# ---- equations -------------------------------------------------------------------------------------------------------
def has_stopped(responses, mask, stop_ids):
    """Whether each response [B, R] holds one of stop_ids [S]. Without stop_ids all have ended."""
    # The filler, token 0, may be the stop token, so only real tokens count. [GEN-13]
    return (mask & torch.isin(responses, stop_ids)).any(1) if len(stop_ids) else mask.any(1)


def missing_eos_scores(scores, ended, penalty, mode):
    """The EOS trick: a response that did not end pays `penalty` ("subtract"), or gets the score -penalty ("replace").

    "replace" depends on where the scores' zero is, and raises a score below -penalty.
    Args: scores [B] fp32; ended [B] bool; penalty, float or None. Returns: [B].
    Source: TRL v0.11.4, rloo_trainer.py (subtract); lm-human-preferences, train_policy.py (replace).
    """
    if penalty is None:
        return scores
    # Without a penalty a response that was cut off may score well. [REW-3]
    return torch.where(ended, scores, scores - penalty if mode == "subtract" else torch.full_like(scores, -penalty))


def overlong_scores(scores, mask, buffer):
    """DAPO's soft overlong punishment: a response pays nothing until `buffer` tokens are left of R, and 1 at R tokens.

    Args: scores [B] fp32; mask [B, R]; buffer, int or None. Returns: [B]. Source: arXiv 2503.14476, equation 13.
    """
    if not buffer:
        return scores
    # A price that rises token by token warns before the limit. [GRPO-9]
    too_long = (mask.sum(1) - (mask.size(1) - buffer)).clamp(min=0)  # [B]
    return scores - too_long / buffer


def grpo_advantages(scores, k, scale, scored):
    """(score - mean of the group) / (standard deviation of the group or batch + 1e-4), or undivided.

    Args: scores [B], the k >= 2 of a prompt adjacent; scale, "group", "batch" (the std of all scores)
    or "none"; scored [B] bool; unscored ones do not count. Returns: [B, 1], 0 unless `has_group`.
    Source: arXiv 2402.03300, section 4.1.2; "none": arXiv 2503.20783, section 3; unbiased std and 1e-4: TRL v1.16.
    """
    groups, is_counted = scores.reshape(-1, k), scored.reshape(-1, k)  # [P, k]
    count = is_counted.sum(1, keepdim=True)  # [P, 1], k where all are scored
    # This shift makes equal scores exactly 0. Otherwise rounding would be divided by 1e-4.
    groups = (groups - groups.gather(1, is_counted.int().argmax(1, keepdim=True))) * is_counted
    # Unlike RLOO's baseline, the mean includes the response's own score.
    advantages = (groups - groups.sum(1, keepdim=True) / count.clamp(min=1)) * is_counted
    if scale != "none":
        variance = (advantages**2).sum(1, keepdim=True) / (count - 1).clamp(min=1)  # [P, 1], unbiased
        # "group": a prompt whose scores hardly differ counts as much as any other. [GRPO-1]
        spread = variance.sqrt() if scale == "group" else scores[scored].std()
        advantages = advantages / (spread + 1e-4)
    return advantages.reshape(-1, 1)


def kl_estimates(logprobs, ref_logprobs):
    """The KL of each token [M, R] by the estimator "k3": exp(d) - d - 1 with d = log p_ref - log p; never negative.

    Source: arXiv 2402.03300, equation 4; times the ratio, as with --kl_times_ratio: 2512.02556.
    """
    difference = ref_logprobs - logprobs
    # As a loss, -d ("k1") has a gradient of zero on average, k3 that of KL(reference || policy), and k3 times the
    # ratio that of KL(policy || reference). [GRPO-2]
    return difference.expm1() - difference


def steer_entropy(coef, entropy, target, highest):
    """(coef, the bonus's weight) of the next update: below the target coef rises by highest / 50, and is the weight;
    else it falls by as much, and the weight is 0.

    Source: arXiv 2505.22312 (Skywork-OR1), adaptive entropy control.
    """
    is_low = entropy < target
    # No fixed weight fits all of a run. [GRPO-11]
    coef = min(max(coef + (highest if is_low else -highest) / 50, 0.0), highest)
    return coef, coef * is_low


def grpo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high):
    """The clipped surrogate, one term for each token: max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c_high)).

    Args: logprobs, old_logprobs, mask [M, R]; advantages [M, 1] or [M, R].
    Returns: (losses, log-ratios, clipped), all [M, R], 0 at padding.
    Source: arXiv 2402.03300, equation 3.
    """
    logratio = (logprobs - old_logprobs) * mask
    ratio = logratio.exp()
    losses1 = -advantages * ratio
    # More room above 1 lets unlikely tokens grow further: arXiv 2503.14476, section 3.1. [GRPO-3]
    losses2 = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange_high)
    # The larger loss counts: leaving the range gains nothing, but a ratio on the wrong side (below 1 - c where A > 0,
    # above 1 + c where A < 0) is still pulled back. [RLOO-6]
    losses = torch.max(losses1, losses2)
    return losses * mask, logratio, (losses2 > losses1) & mask


def gspo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high):
    """The same with one ratio for a response, exp(mean of its tokens' log-ratios).

    Args and returns: as grpo_policy_loss. Source: arXiv 2507.18071, equations 5 to 7.
    """
    # The length-th root of the response's ratio: long responses are not clipped sooner. [GRPO-5]
    mean = ((logprobs - old_logprobs) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # [M, 1]
    mean = mean.expand(mask.shape)
    return grpo_policy_loss(mean, torch.zeros_like(mean), mask, advantages, cliprange, cliprange_high)


def cispo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high):
    """-A * min(ratio, 1 + c_high) * log p, where the ratio is a weight without a gradient.

    Args and returns: as grpo_policy_loss; cliprange is not used. Source: arXiv 2506.13585, equations 4 and 5.
    """
    logratio = (logprobs - old_logprobs) * mask
    # A clipped ratio still lets its token learn. [GRPO-6]
    weight = logratio.exp().clamp(max=1 + cliprange_high).detach()
    return -advantages * weight * logprobs * mask, logratio, (logratio.exp() > 1 + cliprange_high) & mask


def loss_weights(mask, num_responses, num_tokens, normalization):
    """The weight of each token's loss [M, R]; the loss is the weighted sum over the whole minibatch.

    Args: mask [M, R]; num_responses, num_tokens of the whole minibatch, the latter those that masks keep;
    normalization, "token" (arXiv 2503.14476, section 3.3), "response" (2402.03300, equation 3), "constant" (2503.20783,
    section 3).
    """
    if normalization == "token":
        # DAPO's formula averages within each group, and TRL over the whole rollout.
        return mask / num_tokens.clamp(min=1)
    # Each response counts the same, so a token of a long wrong one is punished less. [GRPO-4]
    if normalization == "response":
        return mask / (mask.sum(1, keepdim=True) * num_responses).clamp(min=1)
    return mask / (mask.size(1) * num_responses).clamp(min=1)


def has_group(scored, k):
    """Which responses [B] are scored and have a scored sibling."""
    return scored & (scored.reshape(-1, k).sum(1).repeat_interleave(k) >= 2)


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(policy, sample, reference, reward_model, score, prompts, stop_ids, args, accelerator):
    """Samples one response to each held-out prompt, as in training and with the same noise each time, and scores it.

    Returns: ({"eval/objective/..": value}, episodes to show).
    """
    policy.eval()
    episodes, rows = data.my_share(prompts, accelerator)  # filled up, so that all processes have equally many
    queries, query_mask = utils.left_pad([row.ids for row in rows], accelerator.device)
    key = args.seed, EVALUATION, 0
    with accelerator.autocast():
        responses, response_mask, logprobs = sample(policy, queries, query_mask, episodes, 1, key)  # [N / world, R]
        batch = Batch(queries, query_mask, responses, response_mask)
        ref_logprobs, _ = in_slices(response_logprobs, reference, batch, args.micro_batch_size, 1)
        model_scores = in_slices(response_scores, reward_model, batch, args.micro_batch_size, 1) if reward_model else []
        rewards_of_each, scored = score(rows, batch, *model_scores)  # [N / world, F], [N / world]
    kl = (logprobs - ref_logprobs).sum(1)  # [N / world], from the sampler's log-probs
    ended = has_stopped(responses, response_mask, stop_ids)
    scores = (rewards_of_each * score.weights).nansum(1)
    scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)
    scores = overlong_scores(scores, response_mask, args.soft_overlong)
    return score.held_out(prompts, rewards_of_each, scored, responses, response_mask, ended, scores, kl)


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends the program where arguments contradict each other."""
    cli.check(args)
    rewards.check(args)
    cli.check_batch_size(args, "num_mini_batches", "group_size")
    if args.group_size == 1:
        console.fail("--group_size 1: a group needs at least 2 responses")
    if args.soft_overlong and args.soft_overlong > args.response_length:
        console.fail(f"--soft_overlong {args.soft_overlong}: above --response_length {args.response_length}")
    if args.cliprange is not None and args.objective == "cispo":
        console.fail(f"--cliprange {args.cliprange}: --objective cispo has --cliprange_high alone")
    if args.entropy_target is not None and not args.entropy_coef:
        console.fail(f"--entropy_target {args.entropy_target}: needs --entropy_coef")
    if args.kl_times_ratio and args.objective == "gspo":
        console.fail("--kl_times_ratio: needs a ratio for each token, and --objective gspo has one for each response")


def clipping_and_normalization(args):
    """(cliprange, cliprange_high, loss_normalization): those of args, or else the objective's.

    Source: GRPO: PPO's 0.2, DAPO's mean over tokens (arXiv 2503.14476); GSPO: 2507.18071, section 5.1; CISPO:
    2506.13585 for the mean, TRL's documentation for the bound.
    """
    published = {"grpo": (0.2, 0.2, "token"), "gspo": (3e-4, 4e-4, "response"), "cispo": (None, 4.0, "token")}
    low, high, normalization = published[args.objective]
    if args.cliprange is not None:  # both bounds
        low = high = args.cliprange
    if args.cliprange_high is not None:
        high = args.cliprange_high
    return low, high, args.loss_normalization or normalization


def main(args: Args):
    """Trains. Returns {"before", "after": held-out metrics, "metrics": the last row, "run": folder}."""
    check(args)
    low, high, normalization = clipping_and_normalization(args)
    console.say(
        f"--objective {args.objective}: cliprange {low}, cliprange_high {high}, loss_normalization {normalization}"
    )
    accelerator = engines.start(args)  # for one process, DDP, FSDP2 or DeepSpeed
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    k, B, R = args.group_size, args.batch_size, args.response_length
    episodes = torch.arange(B, device=device)  # [B], the numbers of an update's episodes
    mine = slice(rank * B // world, (rank + 1) * B // world)  # those of this process
    one_step = args.num_ppo_epochs * args.num_mini_batches == 1
    policy_loss = {"grpo": grpo_policy_loss, "gspo": gspo_policy_loss, "cispo": cispo_policy_loss}[args.objective]

    # ---- models, prompts, rewards, optimiser
    tokenizer, policy, reference, reward_model = load_models(args, engines.loading_device(accelerator))
    stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token", device)  # [S]
    prompts, held_out = data.load_prompts(args, tokenizer, room=models.context(policy, reward_model) - R)
    # A forward takes `size` episodes, packed n to a row, and the sampler packs rollout_n. n and rollout_n are 1 where
    # packing would change log-probs or scores.
    n, size, rollout_n = packing.choose(args, k, policy, reward_model, prompts, response_logprobs, response_scores)
    # score(rows, batch, model_scores) -> (rewards [.., F], scored [..]) also calls the functions of --reward_fn, e.g.
    # f(prompts=["2 + 3 ="], completions=[" 5"], answer=["5"]) -> [1.0]. None: it does not apply to this row, and the
    # sum omits it. NaN: it abstains, and the response is not `scored`.
    score = rewards.Scorer(args, accelerator, tokenizer, size, stop_ids)
    reward_model = score.take_text_model(reward_model, prompts, held_out)
    optimizer = utils.adamw(policy, args.learning_rate, args.adam_eps, args.weight_decay)
    frozen = reference, reward_model or score.text_model
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer, *frozen)
    num_updates = math.ceil(args.total_episodes / B)  # [OPT-10]
    run = Run(args, accelerator, tokenizer, num_updates, prompts, [held_out, *frozen])

    def prompts_of(update):
        """The B rows of an update, each prompt k times."""
        # The k copies stand side by side, because baseline and packing take adjacent rows. [RLOO-1]
        return [prompt for prompt in prompts.of_update(update, B // k, args.seed) for _ in range(k)]

    # sample(policy, queries, query_mask, episodes, n, key) wraps utils.sample or vLLM; with --overlap it samples an
    # update ahead. `sample.is_another`: another engine, or older weights.
    sample = samplers.choose(args, run, [*prompts, *held_out], prompts_of, stop_ids)
    state = {"steered": 0.0, "entropy_coef": args.entropy_coef if args.entropy_target is None else 0.0}
    state = run.resume(policy, optimizer, state)
    # run.log calls this when it is due.
    evaluation = functools.partial(
        evaluate, policy, sample, reference, reward_model, score, held_out, stop_ids, args, accelerator
    )
    if run.first_update == 1:
        run.log(0, evaluation=evaluation)

    for update in range(run.first_update, num_updates + 1):
        # All steps of an update have the same learning rate. [OPT-2]
        lr = utils.learning_rate_at(update, num_updates, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Rollout: k responses to each prompt ------------------------------------------------------------------
        rows = prompts_of(update)  # [B]
        queries, query_mask = utils.left_pad([row.ids for row in rows], device)  # [B, Q]
        policy.eval()
        with torch.no_grad(), accelerator.autocast():
            key = args.seed, TRAINING, update
            responses, response_mask, sampled_logprobs = sample(
                policy, queries[mine], query_mask[mine], episodes[mine], rollout_n, key
            )  # [B / world, R]
            run.lap("rollout")

            # ---- 2. Scores; log-probs --------------------------------------------------------------------------------
            batch = Batch(queries[mine], query_mask[mine], responses, response_mask)
            ref_logprobs, _ = in_slices(response_logprobs, reference, batch, size, n)
            old_logprobs = sampled_logprobs  # enough for the KL; with one step the loss does not read them
            if not one_step or sample.is_another:
                # Ratios and importance weights compare two forwards of the same code. [GEN-9]
                old_logprobs, _ = in_slices(response_logprobs, policy, batch, size, n)
            model_scores = in_slices(response_scores, reward_model, batch, size, n) if reward_model else []
            rewards_of_each, scored = score(rows[mine], batch, *model_scores)  # [B / world, F], [B / world]
        # Every process gathers the whole batch once, and phases 3 and 4 are computed on all of it. [REW-7]
        responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs = accelerator.gather(
            (responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs)
        )
        rewards_of_each, scored = accelerator.gather((rewards_of_each, scored))
        batch = Batch(queries, query_mask, responses, response_mask)
        run.lap("scores")

        # ---- 3. Rewards: the score of each response ------------------------------------------------------------------
        #   response        a    b   EOS   .    .
        #   response_mask   1    1    1    0    0      the stop token counts: it has a log-prob and a KL
        ended = has_stopped(responses, response_mask, stop_ids)  # [B]
        # the weighted sum of the rewards that apply [REW-4]
        scores = (rewards_of_each * score.weights).nansum(1)  # [B]
        scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)  # [B]
        scores = overlong_scores(scores, response_mask, args.soft_overlong)  # [B]

        # ---- 4. Advantages -------------------------------------------------------------------------------------------
        # What is not scored, or has no scored sibling, gives no gradient. [REW-8]
        advantages = grpo_advantages(scores, k, args.scale_advantages, scored)  # [B, 1], for all tokens of a response
        learns = has_group(scored, k)  # [B]
        # The score of a response that was cut off says little. [GRPO-7]
        is_kept = learns & ended if args.mask_truncated else learns  # [B]
        # Tokens without an advantage would dilute a mean over tokens. [GRPO-8]
        is_kept = is_kept & ~utils.in_equal_group(scores, k, scored) if args.mask_equal else is_kept
        is_action = response_mask & is_kept.unsqueeze(1)  # [B, R]
        if args.objective == "gspo":  # one importance weight for each response
            advantages = advantages.squeeze(1)  # [B]
        # Importance weights correct for a sampler that differs slightly from the policy. [GEN-15]
        advantages, weight_metrics = sample.weigh(advantages, old_logprobs, sampled_logprobs, response_mask)
        advantages = advantages.reshape(B, -1)  # [B, 1], or with weights of tokens [B, R]

        # ---- 5. Optimise ---------------------------------------------------------------------------------------------
        policy.train()  # Gradient checkpointing needs it.
        means = utils.Means(device)
        for epoch in range(args.num_ppo_epochs):
            # Each pass has its own order. [OPT-9]
            order = list(utils.permutation(B // k, args.seed, update, epoch))  # [P]
            # Siblings may share a row, so a group stays whole. [RLOO-8]
            shuffled = episodes.reshape(-1, k)[order].flatten()  # [B]
            for number, minibatch in enumerate(shuffled.chunk(args.num_mini_batches)):
                # over all processes
                num_actions, num_responses = is_action[minibatch].sum(), learns[minibatch].sum()
                micro_batches = utils.split(batch, minibatch.chunk(world)[rank].split(size))
                for m, micro_batch in engines.accumulate(accelerator, policy, micro_batches):  # m: its episodes
                    logprobs, entropies = response_logprobs(policy, micro_batch, n)  # [M, R]
                    # With one step the ratio is exactly 1, and rounding cannot trigger the clip. [RLOO-7]
                    old = logprobs.detach() if one_step else old_logprobs[m]
                    losses, logratio, clipped = policy_loss(
                        logprobs, old, response_mask[m], advantages[m], low, high
                    )  # [M, R]
                    kl_losses = kl_estimates(logprobs, ref_logprobs[m])  # [M, R], 0 at padding
                    if args.kl_times_ratio:
                        kl_losses = kl_losses * logratio.exp()
                    # Dividing by the whole minibatch's count makes micro-batches add up to its gradient. [OPT-5]
                    weights = loss_weights(is_action[m], num_responses, num_actions, normalization)
                    # The bonus keeps distributions wide. [GRPO-10]
                    bonus = state["entropy_coef"] * entropies
                    loss = ((losses + args.kl_coef * kl_losses - bonus) * weights).sum()
                    accelerator.backward(loss * world)  # The engines average over processes. [OPT-6]
                    of_actions = {
                        "loss/policy_avg": losses,
                        "loss/kl_avg": kl_losses,
                        "policy/approxkl_avg": 0.5 * logratio**2,  # of an action [LOG-3]
                        "policy/clipfrac_avg": clipped,
                    }
                    means.add(of_actions, is_action[m])
                    means.add({"policy/entropy_avg": entropies}, response_mask[m])
                    means.add_ratios(logratio, is_action[m])
                    if epoch == number == 0:  # before the first step [LOG-6]
                        # 0 and 1 up to rounding, where these weights have sampled
                        means.add_max("val/logprob_gap", (logprobs - sampled_logprobs[m]).abs())
                        means.add_max("val/first_ratio", logratio.abs().clamp(max=20).exp())
                if not num_actions:  # Adam's momentum alone would move the weights.
                    engines.forget_gradient(accelerator, policy, optimizer)
                    continue
                norm = engines.clip_and_step(accelerator, policy, optimizer, args.max_grad_norm, run, number)
                means.add({"policy/grad_norm": norm})
        run.lap("optimise")

        # ---- 6. Log --------------------------------------------------------------------------------------------------
        # `objective/kl` and `objective/entropy` are those of the policy that sampled.
        logged = sample.behaviour_logprobs(old_logprobs, sampled_logprobs)  # [B, R]
        logged_kl = (logged - ref_logprobs).sum(1)  # [B]
        metrics = means.reduce(accelerator) | score.metrics(rewards_of_each, scores, scored, ended, batch, k)
        metrics |= weight_metrics | {
            "epoch": update * (B // k) / len(prompts),
            "lr": lr,
            "objective/scores": utils.masked_mean(scores, scored),
            "objective/kl": utils.masked_mean(logged_kl, scored),
            "objective/entropy": -utils.masked_mean((logged * response_mask).sum(1), scored),  # no padding [LOG-1]
        }
        if args.entropy_coef:
            metrics["objective/entropy_coef"] = state["entropy_coef"]
        if args.entropy_target is not None:
            state["steered"], state["entropy_coef"] = steer_entropy(
                state["steered"], metrics["policy/entropy_avg"], args.entropy_target, args.entropy_coef
            )
        shown = rows, responses, response_mask, ended, scores.masked_fill(~scored, math.nan), logged_kl
        run.log(update, metrics, shown, evaluation)
        run.checkpoint_if_due(update, policy, optimizer, state)
    return run.finish(policy)


if __name__ == "__main__":
    cli.main(main, Args)
