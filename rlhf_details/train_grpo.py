"""
GRPO: group relative policy optimisation, on a language model and a reward (arXiv 2402.03300).

1. Each prompt gets a group of k responses. Every token is an action, and the tokens of a response share its advantage:
   (score - mean of the group) / standard deviation of the group. There is no value model and no GAE.
2. The KL is a term of the loss, kl_coef * k3 at each token, and not of the reward. With kl_coef = 0 it is only logged.
3. More than one optimiser step per rollout uses the clipped loss of PPO, with one probability ratio per token, which is
   clipped to [1 - cliprange, 1 + cliprange_high]. --objective gspo has one ratio per response; cispo clips the ratio as
   a weight, and no token loses its gradient. The loss is the mean over all tokens of the minibatch, after DAPO; that of
   GRPO's paper, over the tokens of each response first, is --loss_normalization response.
4. Responses to the same prompt share its computation: n of the k are packed in a row, [prompt | r1 | .. | rn], under a
   block mask. Where a model cannot read such a mask, each row holds one response.
5. Sampling and shuffling are functions of coordinates, such as (seed, purpose, update, episode, step, token) for a
   token, and never of a generator's state.

Left out on purpose: top-k and top-p (the sampled policy would not be the trained one), and
new samples in place of groups whose scores are all equal (val/equal_scores is their share).

Read `main` first if you know the paper, else from top to bottom. A tag such as [GRPO-1] marks an implementation detail:
benchmark/checks/details.md has its source, its test and what it is worth.

Shapes    P: prompts   k: responses per prompt   B = P * k: episodes of an update, the k of a prompt adjacent
          Q: query tokens, left-padded   R: response tokens, right-padded   L: columns of a row   V: vocabulary
          n: responses packed in a row, divides k   M: episodes of a micro-batch   W: rows of a forward, M / n
          C: columns that are read   H: hidden size   F: rewards, the reward model's among them   S: stop tokens
          L': columns that a token may see, those of the cache among them   N: held-out prompts
Masks     True marks a real token. Masks travel with the tokens, and nothing is ever found by looking for a pad token.

One process:   python rlhf_details/train_grpo.py
N processes:   accelerate launch --num_processes N rlhf_details/train_grpo.py
Your data:     python rlhf_details/train_grpo.py --dataset rows.jsonl --sft_model_path gpt2 --reward_fn mine.py:f
"""

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
class Args(
    flags.PolicyArgs
):  # run, data, models, memory, reward_fn, sampler and overlap stand in plumbing/inputs/flags.py
    exp_name: str = "train_grpo"
    """name of the experiment, part of the run's name"""
    output_dir: str = "models/grpo"
    """folder of the trained policy"""

    # sampling
    response_length: int = 256
    """most tokens a response may have (R)"""
    temperature: float = 1.0
    """sampling temperature; it divides the logits of every log-prob as well"""
    stop_token: str = "eos"
    """sampling ends with this token: "eos" (any that the model names as an end), "none", or a text that is one token"""
    missing_eos_penalty: float | None = 1.0
    """what a response without the stop token pays, in points of score; None: nothing"""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """subtract the penalty from the score, or replace the score by -penalty"""
    soft_overlong: int | None = None
    """the last tokens of response_length, over which a response pays from 0 up to 1 (DAPO); None: it pays nothing"""

    # reward and KL
    kl_coef: float = 0.04
    """weight of the KL in the loss (beta)"""
    kl_times_ratio: bool = False
    """weigh the KL of a token by its ratio, so that the gradient is that of KL(policy || reference)"""

    # algorithm
    objective: Literal["grpo", "gspo", "cispo"] = "grpo"
    """the policy's loss: of GRPO, GSPO or CISPO, which differ where a rollout has several steps; an objective also
    chooses the defaults of cliprange, cliprange_high and loss_normalization"""
    group_size: int = 8
    """responses per prompt (k)"""
    total_episodes: int = 10_000
    """responses to sample in the whole run; rounded up to whole batches"""
    batch_size: int = 64
    """episodes per update, over all processes (B)"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch"""
    num_ppo_epochs: int = 1
    """passes over the batch"""
    cliprange: float | None = None
    """clip range of the probability ratio; None: the objective's (see `clipping_and_normalization`)"""
    cliprange_high: float | None = None
    """clip range above 1 (DAPO's Clip-Higher); None: cliprange, or the objective's; CISPO has this bound alone"""
    scale_advantages: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of the group's scores, of the batch's, or by nothing (Dr. GRPO)"""
    loss_normalization: Literal["token", "response", "constant"] | None = None
    """average over the minibatch's tokens (after DAPO), within responses first (GRPO), or over response_length tokens
    each (Dr. GRPO); None: the objective's"""
    mask_truncated: bool = False
    """leave responses that did not end out of the loss (DAPO's overlong filtering); their scores stay in the group"""
    mask_equal: bool = False
    """leave groups whose scores are all equal out of the loss: they teach nothing but the KL"""

    # optimiser
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """course of the learning rate over the updates"""
    warmup_ratio: float = 0.0
    """share of the updates over which the learning rate rises linearly"""
    adam_eps: float = 1e-8
    """AdamW's epsilon"""
    weight_decay: float = 0.0
    """AdamW's weight decay"""
    max_grad_norm: float | None = 1.0
    """clip the gradient's global norm to this; None: only log it"""

    # memory and speed: never changes the result, up to rounding
    share_prompts: bool = True
    """compute each prompt once for its k responses, where the model is shown to allow it"""


# cli.main takes these in place of the defaults above, where no flag and no --config says otherwise. A name is that of
# an embedded task; without --dataset it is "toy". A number is for other data, by the model's size: 20e6 for fewer than
# 20 M parameters, 500e6 for 20 M to 500 M, and so on. docs/guides/1_your_data.md says where these values are from.
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


# ---- models: one module call is one forward, so that every engine sees all parameters through it ---------------------
class Policy(nn.Module):
    """Next-token logits / temperature, or the log-probs of given tokens under their softmax, as fp32 numbers."""

    logits_at_once = 2**24  # with labels at most so many exist at a time: 64 MiB in fp32

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)

    def forward(self, tokens, mask, positions, index, labels=None, cache=None):
        """
        Args: tokens, positions [W, L]; mask [W, L'] bool or [W, 1, L, L'] additive, None where nothing is padding;
        index [C], the columns whose logits are read; labels [W, C], the tokens that these predict; cache, one of
        transformers, which is extended.
        Returns: (log-probs, entropies), both [W, C] fp32, or without labels the logits / T [W, C, V] fp32.
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [W, C, H]
        if labels is None:
            return self.logits(hidden)
        return utils.token_logprobs(self.logits, hidden, labels, self.logits_at_once // self.head.vocab_size)

    def logits(self, hidden):
        """Tempered logits [.., V] fp32 of last hidden states [.., H]."""
        # The temperature divides the logits wherever a log-prob is computed, not in the sampler alone. [GEN-2] [GEN-3]
        return self.head(hidden).float() / self.temperature


class Reward(nn.Module):
    """Scores: the head's output at given columns, plus the bias that normalisation left in the configuration."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # `reward_bias` is the shift that train_reward.py leaves. Plain loaders ignore it. [REW-1]
        self.bias = getattr(model.config, "reward_bias", 0.0)

    def forward(self, tokens, mask, positions, index):
        """Args: tokens, mask, positions as Policy's; index [W, C], the columns to read. Returns: scores [W, C] fp32."""
        hidden = models.hidden_states(self.model, tokens, mask, positions)  # [W, L, H]
        hidden = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))  # [W, C, H]
        # The head runs in fp32: bf16 scores between 2 and 4 would lie 1/64 apart. [RM-6]
        with torch.autocast(hidden.device.type, enabled=False):
            return self.model.score(hidden.float()).squeeze(-1) + self.bias


def load_models(args, device):
    """Returns (tokenizer, policy, reference, reward model or None), all in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy = Policy(models.add_adapters(model, args.lora_rank), args.temperature)
    # The reference is a copy of the initial policy. If it were the same object, the KL would stay 0. [MODEL-4]
    reference = models.frozen_copy(policy)
    reward_model = None
    if rewards.reads_token_ids(args, tokenizer):  # Any other reward model is a function of text, in rewards.Scorer.
        reward_model = utils.disable_dropout(models.load_reward_model(args.reward_model_path, args))
        reward_model = Reward(reward_model).requires_grad_(False).to(device).eval()
    return tokenizer, policy.to(device), reference.to(device).eval(), reward_model


# ---- from tokens to log-probs and scores -----------------------------------------------------------------------------
def pack(batch, n):
    """Rows of n responses to one prompt. No response sees another, and each follows the prompt as if alone.

             p  p  p  a1 a2 b1 b2      n = 2, prompt p p p, responses a1 a2 and b1 b2; x: it sees that one
        p    x  .  .  .  .  .  .       the prompt's first token; the prompt is causal as well
        a1   x  x  x  x  .  .  .
        b2   x  x  x  .  .  x  x       b sees the prompt and its own past
    With n = 1 this is an ordinary left-padded row with its ordinary mask [W, L].
    Args: batch, where n adjacent episodes have the same prompt; it may be trimmed, and then R is its width.
    Returns: tokens, mask (bool [W, L] or additive [W, 1, L, L]), positions [W, L] with L = Q + n * R, and index
    [n * R], for each token of the responses the column whose logits predict it.
    """
    (_, Q), (_, R), device = batch.queries.shape, batch.responses.shape, batch.queries.device
    query_mask = batch.query_mask[::n]  # [W, Q]
    tokens = torch.cat([batch.queries[::n], batch.responses.reshape(-1, n * R)], 1)  # [W, L]
    real = torch.cat([query_mask, batch.response_mask.reshape(-1, n * R)], 1)  # [W, L]
    step = torch.arange(R, device=device).repeat(n)  # [n * R], 0 .. R-1 for each response
    # Positions restart with each response, as if it alone followed the prompt. [RLOO-10]
    positions = torch.cat([utils.positions_from_mask(query_mask), query_mask.sum(1, keepdim=True) + step], 1)
    column = torch.arange(Q + n * R, device=device)  # [L]
    # The logits in the column before a token predict it. For the first token of each response this is Q - 1. [GEN-7]
    index = torch.where(step == 0, Q - 1, column[Q:] - 1)  # [n * R]
    if n == 1:
        return tokens, real, positions, index
    owner = torch.cat([torch.zeros_like(column[:Q]), 1 + torch.arange(n, device=device).repeat_interleave(R)])  # [L]
    # A token sees the prompt (owner 0) and the past of its own response. [RLOO-9]
    visible = (column.unsqueeze(1) >= column) & ((owner == 0) | (owner.unsqueeze(1) == owner))  # [L, L]
    # Padding sees itself. In fp16 the mask's lowest number is -inf, and a row that sees nothing would be NaN. [RLOO-11]
    visible = (visible & real.unsqueeze(1)) | torch.eye(len(column), dtype=torch.bool, device=device)  # [W, L, L]
    return tokens, utils.additive(visible), positions, index


def response_logprobs(policy, batch, n):
    """Log-probs and entropies [M, R] fp32, 0 at padding, of a Batch of M episodes, n in a row."""
    M, R = batch.responses.shape
    batch = utils.trim(batch)
    outputs = policy(*pack(batch, n), labels=batch.responses.reshape(M // n, -1))  # two of [W, n * width]
    # Padding holds zeros and no sentinel, so that sums over a row need no mask. [REW-6]
    outputs = [x.reshape(batch.responses.shape) * batch.response_mask for x in outputs]  # [M, width]
    return [nn.functional.pad(x, (0, R - x.size(1))) for x in outputs]


def response_scores(reward_model, batch, n):
    """Scores [[M]] fp32: the reward model's output at the last real token of each response."""
    batch = utils.trim(batch)
    (_, Q), (_, R) = batch.queries.shape, batch.responses.shape
    tokens, mask, positions, _ = pack(batch, n)
    start = Q + R * torch.arange(n, device=tokens.device)  # [n], the first column of each response
    # The mask says which token is the last. Pad may equal EOS, so a search for an id could go wrong. [REW-2]
    last = start + batch.response_mask.sum(1).reshape(-1, n) - 1  # [W, n]
    return [reward_model(tokens, mask, positions, last).reshape(-1)]


# ---- equations -------------------------------------------------------------------------------------------------------
def has_stopped(responses, mask, stop_ids):
    """Whether each response [B, R] holds one of stop_ids [S]. If stop_ids is empty, every response has ended."""
    # Only real tokens are searched, because the filler, token 0, may be the stop token. [GEN-13]
    return (mask & torch.isin(responses, stop_ids)).any(1) if len(stop_ids) else mask.any(1)


def missing_eos_scores(scores, ended, penalty, mode):
    """The EOS trick: a response that did not end pays `penalty` ("subtract"), or gets the score -penalty ("replace").

    To add a constant to all scores changes no advantage under "subtract", if scores are not clipped. Under "replace" it
    does, and the penalty can even raise a low score.
    Args: scores [B] fp32; ended [B] bool; penalty, float or None. Returns: [B].
    Source: TRL v0.11.4, rloo_trainer.py (subtract); lm-human-preferences, train_policy.py (replace).
    """
    if penalty is None:
        return scores
    # Without the penalty an unfinished response may score well, and the policy need not learn to stop. [REW-3]
    return torch.where(ended, scores, scores - penalty if mode == "subtract" else torch.full_like(scores, -penalty))


def overlong_scores(scores, mask, buffer):
    """DAPO's soft overlong punishment: a response pays nothing until `buffer` tokens are left of R, and 1 at R tokens.

    Args: scores [B] fp32; mask [B, R]; buffer, int or None. Returns: [B]. Source: arXiv 2503.14476, equation 13.
    """
    if not buffer:
        return scores
    # A price that rises token by token says earlier than the missing EOS that a response is too long. [GRPO-9]
    too_long = (mask.sum(1) - (mask.size(1) - buffer)).clamp(min=0)  # [B]
    return scores - too_long / buffer


def grpo_advantages(scores, k, scale, scored):
    """(score - mean of the group) / (standard deviation + 1e-4), of the group, of the batch, or without division.

    Args: scores [B], the k of a prompt adjacent; k >= 2; scale, "group", "batch" (the standard deviation of all scores
    as they are, so the differences between prompts count) or "none"; scored [B] bool, where a response that is not
    scored is none of its group, and its advantage is 0. Returns: [B, 1].
    Source: arXiv 2402.03300, section 4.1.2; "none": arXiv 2503.20783, section 3; unbiased std and 1e-4: TRL v1.16.
    """
    groups, is_counted = scores.reshape(-1, k), scored.reshape(-1, k)  # [P, k]
    count = is_counted.sum(1, keepdim=True)  # [P, 1], k where all are scored
    # The shift changes no advantage, but it makes equal scores exactly 0, so that no rounding is divided by 1e-4.
    groups = (groups - groups.gather(1, is_counted.int().argmax(1, keepdim=True))) * is_counted
    # Unlike RLOO's baseline the mean includes the response's own score: before the division, (k - 1) / k of RLOO's.
    advantages = (groups - groups.sum(1, keepdim=True) / count.clamp(min=1)) * is_counted
    if scale != "none":
        variance = (advantages**2).sum(1, keepdim=True) / (count - 1).clamp(min=1)  # [P, 1], unbiased
        # The group's own spread makes a prompt on which the scores hardly differ count as much as any other. [GRPO-1]
        spread = variance.sqrt() if scale == "group" else scores[scored].std()
        advantages = advantages / (spread + 1e-4)
    return advantages.reshape(-1, 1)


def kl_estimates(logprobs, ref_logprobs):
    """The KL of each token [M, R] by the estimator "k3": exp(d) - d - 1 with d = log p_ref - log p; never negative.

    Source: arXiv 2402.03300, equation 4; times the ratio, as with --kl_times_ratio: 2512.02556.
    """
    difference = ref_logprobs - logprobs
    # As a loss "k1" would not do, because its gradient is zero on average. That of k3 is, on average, the gradient of
    # KL(reference || policy), and with the ratio, whose gradient counts as well, that of KL(policy || reference).
    # [GRPO-2]
    return difference.expm1() - difference


def grpo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high):
    """The clipped surrogate, one term for each token: max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c_high)).

    Args: logprobs, old_logprobs, mask [M, R]; advantages [M, 1], or [M, R] with the weights of correct_for_sampler.
    Returns: (losses, log-ratios, clipped), all [M, R], 0 at padding.
    Source: arXiv 2402.03300, equation 3.
    """
    logratio = (logprobs - old_logprobs) * mask
    ratio = logratio.exp()
    losses1 = -advantages * ratio
    # A wider range above 1 lets unlikely tokens grow further: arXiv 2503.14476, section 3.1. [GRPO-3]
    losses2 = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange_high)
    # The larger loss counts. So leaving the range gains nothing, but a ratio that has left it at the other side, below
    # 1 - c where A > 0 or above 1 + c where A < 0, keeps its gradient. [RLOO-6]
    losses = torch.max(losses1, losses2)
    return losses * mask, logratio, (losses2 > losses1) & mask


def gspo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high):
    """The same with one ratio for a response, exp(mean of its tokens' log-ratios).

    Args and returns: as grpo_policy_loss. Source: arXiv 2507.18071, equations 5 to 7.
    """
    # The ratio of a whole response, its length-th root taken, so that long responses are not clipped sooner. [GRPO-5]
    mean = ((logprobs - old_logprobs) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # [M, 1]
    mean = mean.expand(mask.shape)
    return grpo_policy_loss(mean, torch.zeros_like(mean), mask, advantages, cliprange, cliprange_high)


def cispo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high):
    """-A * min(ratio, 1 + c_high) * log p, where the ratio is a weight without a gradient.

    Args and returns: as grpo_policy_loss; cliprange is not used. Source: arXiv 2506.13585, equations 4 and 5.
    """
    logratio = (logprobs - old_logprobs) * mask
    # A clipped ratio still lets its token learn, as the few unlikely tokens must at which reasoning forks. [GRPO-6]
    weight = logratio.exp().clamp(max=1 + cliprange_high).detach()
    return -advantages * weight * logprobs * mask, logratio, (logratio.exp() > 1 + cliprange_high) & mask


def loss_weights(mask, num_responses, num_tokens, normalization):
    """The weight of each token's loss [M, R], so that the sum over the whole minibatch is the loss.

    Args: mask [M, R] of some of its responses; num_responses, num_tokens, tensors of one number, of the whole
    minibatch, where cut responses without a token in the mask count as well; normalization, "token" (arXiv 2503.14476,
    section 3.3), "response" (2402.03300, equation 3), "constant" (2503.20783, section 3).
    """
    if normalization == "token":
        # This is one mean over all prompts of the minibatch. DAPO's formula has one for each prompt's group, and TRL
        # divides by the tokens of the whole rollout.
        return mask / num_tokens.clamp(min=1)
    # Under "response" each token of a long response counts less, so a long wrong one is hardly punished. [GRPO-4]
    if normalization == "response":
        return mask / (mask.sum(1, keepdim=True) * num_responses).clamp(min=1)
    return mask / (mask.size(1) * num_responses).clamp(min=1)


def has_group(scored, k):
    """Which responses [B] are scored and have a scored one beside them in their group of k adjacent ones."""
    return scored & (scored.reshape(-1, k).sum(1).repeat_interleave(k) >= 2)


def in_equal_group(scores, k, scored):
    """Whether each of the scores [B] is in a group of k adjacent ones that are all equal, where only the KL teaches.

    Args: scored [B] bool; the others are not compared.
    """
    highest = scores.masked_fill(~scored, -math.inf).reshape(-1, k).amax(1)
    lowest = scores.masked_fill(~scored, math.inf).reshape(-1, k).amin(1)
    return (highest <= lowest).repeat_interleave(k)


def shuffled_groups(num_prompts, k, num_mini_batches, device, *coordinates):
    """Yields the episodes [B / num_mini_batches] of each minibatch; the coordinates decide the order of the prompts."""
    order = torch.tensor(utils.permutation(num_prompts, *coordinates), device=device)  # [P]
    for prompts in order.chunk(num_mini_batches):
        # Siblings may share a row, so the group of a prompt stays whole. [RLOO-8]
        yield (prompts.unsqueeze(1) * k + torch.arange(k, device=device)).reshape(-1)


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(policy, sample, reference, reward_model, score, prompts, stop_ids, args, accelerator):
    """One response to each held-out prompt, sampled as in training, with the same noise each time, and what it scores.

    Returns: ({"eval/objective/..": mean over the prompts}, episodes to show); call it on every process.
    """
    if not prompts:
        return {}, None
    policy.eval()
    # A share is filled up with rows that come twice, so that all processes have equally many. They are cut off below.
    episodes, rows = data.my_share(prompts, accelerator)
    queries, query_mask = utils.left_pad([row.ids for row in rows], accelerator.device)
    key = args.seed, EVALUATION, 0
    with accelerator.autocast():
        responses, response_mask, logprobs = sample(policy, queries, query_mask, episodes, 1, key)  # [N / world, R]
        batch = Batch(queries, query_mask, responses, response_mask)
        ref_logprobs, _ = in_slices(response_logprobs, reference, batch, args.micro_batch_size, 1)
        model_scores = in_slices(response_scores, reward_model, batch, args.micro_batch_size, 1) if reward_model else []
        rewards_of_each, scored = score(rows, batch, *model_scores)  # [N / world, F], [N / world]
    # The KL is taken from the log-probs of what sampled. Those of --sampler vllm are a little off, which is good enough
    # for a number that is only logged.
    kl = (logprobs - ref_logprobs).sum(1)  # [N / world]
    gathered = accelerator.gather((responses, response_mask, kl, rewards_of_each, scored))
    responses, response_mask, kl, rewards_of_each, scored = (x[: len(prompts)] for x in gathered)
    ended = has_stopped(responses, response_mask, stop_ids)
    scores = (rewards_of_each * score.weights).nansum(1)
    scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)
    scores = overlong_scores(scores, response_mask, args.soft_overlong)
    return score.held_out(rewards_of_each, scored, prompts, responses, response_mask, ended, scores, kl)


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Exits with an error (exit code 2) if arguments contradict each other."""
    cli.check(args)
    rewards.check(args)
    unit = args.num_mini_batches * args.group_size * console.world_size()
    if args.batch_size % unit:
        console.fail(
            f"--batch_size {args.batch_size}: not divisible by num_mini_batches * group_size * processes = {unit}"
        )
    if args.group_size == 1:
        console.fail("--group_size 1: a group needs at least 2 responses")
    if args.soft_overlong and args.soft_overlong > args.response_length:
        console.fail(f"--soft_overlong {args.soft_overlong}: above --response_length {args.response_length}")
    if args.cliprange is not None and args.objective == "cispo":
        console.fail(f"--cliprange {args.cliprange}: --objective cispo has --cliprange_high alone")
    if args.kl_times_ratio and args.objective == "gspo":
        console.fail("--kl_times_ratio: needs a ratio for each token, and --objective gspo has one for each response")


def clipping_and_normalization(args):
    """(cliprange, cliprange_high, loss_normalization): the objective's own values where the user gave none (None).

    Source: arXiv 2402.03300 with DAPO's mean over tokens (2503.14476); GSPO: 2507.18071, section 5.1; CISPO: 2506.13585
    has the mean over tokens and no number for the bound; TRL's documentation recommends a weight of at most 5.
    """
    own = {"grpo": (0.2, 0.2, "token"), "gspo": (3e-4, 4e-4, "response"), "cispo": (None, 4.0, "token")}[args.objective]
    low, high, normalization = own
    if args.cliprange is not None:  # A range that is given is that of both sides.
        low = high = args.cliprange
    if args.cliprange_high is not None:
        high = args.cliprange_high
    return low, high, args.loss_normalization or normalization


def main(args: Args):
    """Trains; returns {"before": .., "after": held-out metrics, "metrics": the last row, "run": folder}."""
    check(args)
    low, high, normalization = clipping_and_normalization(args)
    console.say(
        f"--objective {args.objective}: cliprange {low}, cliprange_high {high}, loss_normalization {normalization}"
    )
    accelerator = engines.start(args)  # one process, DDP, FSDP2 or DeepSpeed; it trains missing toy stages, then seeds
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    k, B, R = args.group_size, args.batch_size, args.response_length
    episodes = torch.arange(B, device=device)  # [B], the number of each episode in its update
    mine = slice(rank * B // world, (rank + 1) * B // world)  # those of this process
    one_step = args.num_ppo_epochs * args.num_mini_batches == 1
    policy_loss = {"grpo": grpo_policy_loss, "gspo": gspo_policy_loss, "cispo": cispo_policy_loss}[args.objective]

    # ---- models, prompts, rewards, optimiser
    tokenizer, policy, reference, reward_model = load_models(args, engines.loading_device(accelerator))
    stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token", device)  # [S]
    prompts, held_out = data.load_prompts(args, tokenizer, room=models.context(policy, reward_model) - R)
    # A forward takes `size` episodes, n packed in each row (n divides size and k), and the sampler packs rollout_n.
    # `packing.choose` packs only where it finds that packed and plain rows have the same log-probs and scores.
    packed = packing.choose(args, k, policy, reward_model, prompts, response_logprobs, response_scores)
    n, size = packed.n, packed.size
    # score(rows, batch, model_scores) joins the reward model's scores with those of functions of text, such as
    # f(prompts=["2 + 3 ="], completions=[" 5"], answer=["5"]) -> [1.0]. It gives each response F rewards, NaN where one
    # does not apply or abstains. A reward model with a chat template of its own reads text, in `score`.
    score = rewards.Scorer(args, accelerator, tokenizer, size, stop_ids)
    reward_model = score.take_text_model(reward_model, prompts, held_out)
    optimizer = utils.adamw(policy, args.learning_rate, args.adam_eps, args.weight_decay)
    # The reference and the reward model are put under the engine in place.
    frozen = reference, reward_model or score.text_model
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer, *frozen)
    num_updates = math.ceil(args.total_episodes / B)  # Round up, so that at least total_episodes are sampled. [OPT-10]
    # What is in the list belongs to what a run is, as its arguments do: --resume compares it.
    run = Run(args, accelerator, tokenizer, num_updates, prompts, [held_out, *frozen])

    def prompts_of(update):
        """The prompts of an update, k copies of each, B in all. --overlap reads them ahead."""
        # The k copies of a prompt stand side by side, because baseline and packing take adjacent rows. [RLOO-1]
        return [prompt for prompt in prompts.of_update(update, B // k, args.seed) for _ in range(k)]

    # sample(policy, queries, query_mask, episodes, n, key) is utils.sample with its other arguments filled in, or what
    # --sampler vllm has in its place. Under --overlap a thread samples training batches an update ahead, and evaluation
    # has the newest weights.
    sample = samplers.choose(args, run, [*prompts, *held_out], prompts_of, stop_ids)
    run.resume(policy, optimizer)
    if run.first_update == 1:
        run.log(0, *evaluate(policy, sample, reference, reward_model, score, held_out, stop_ids, args, accelerator))

    for update in range(run.first_update, num_updates + 1):
        # The learning rate changes from update to update, and all steps of an update have the same. [OPT-2]
        lr = utils.learning_rate_at(update, num_updates, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Rollout: k responses to each prompt; every process samples its share ---------------------------------
        rows = prompts_of(update)  # B rows of the data set
        queries, query_mask = utils.left_pad([row.ids for row in rows], device)  # [B, Q]
        policy.eval()
        with torch.no_grad(), accelerator.autocast():
            key = args.seed, TRAINING, update
            responses, response_mask, sampled_logprobs = sample(
                policy, queries[mine], query_mask[mine], episodes[mine], packed.rollout_n, key
            )  # [B / world, R]
            run.lap("rollout")

            # ---- 2. Scores: the rewards, and the log-probs that the KL and the ratio start from ----------------------
            batch = Batch(queries[mine], query_mask[mine], responses, response_mask)
            ref_logprobs, _ = in_slices(response_logprobs, reference, batch, size, n)
            old_logprobs = sampled_logprobs  # With one step only the logged KL and entropy use them.
            if not one_step or sample.is_another:
                # The ratio compares two forwards of the same code, so that it starts at 1 up to rounding. Where
                # something else has sampled, the weights need this policy's log-probs as well. [GEN-9]
                old_logprobs, _ = in_slices(response_logprobs, policy, batch, size, n)
            model_scores = in_slices(response_scores, reward_model, batch, size, n) if reward_model else []
            rewards_of_each, scored = score(rows[mine], batch, *model_scores)  # [B / world, F], [B / world]
        # Advantages, minibatches and metrics need the whole batch, so gather it once. Until phase 5 takes its
        # shares, every tensor holds the whole batch, on every process. [REW-7]
        responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs = accelerator.gather(
            (responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs)
        )
        rewards_of_each, scored = accelerator.gather((rewards_of_each, scored))
        batch = Batch(queries, query_mask, responses, response_mask)
        run.lap("scores")

        # ---- 3. Rewards: the score of each response ------------------------------------------------------------------
        #   response        a    b   EOS   .    .      nothing is sampled after the stop token
        #   response_mask   1    1    1    0    0      the stop token counts as well: it has a log-prob and a KL
        ended = has_stopped(responses, response_mask, stop_ids)  # [B]
        # A score is the weighted sum of the rewards. NaN: a reward does not apply to this kind of prompt. [REW-4]
        scores = (rewards_of_each * score.weights).nansum(1)  # [B]
        scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)  # [B]
        scores = overlong_scores(scores, response_mask, args.soft_overlong)  # [B]

        # ---- 4. Advantages -------------------------------------------------------------------------------------------
        # A response from which a reward abstained counts nowhere, neither in its group nor in a mean.
        advantages = grpo_advantages(scores, k, args.scale_advantages, scored)  # [B, 1], for all tokens of a response
        learns = has_group(scored, k)  # [B]
        # A response that was cut off may have been on its way to a right answer, so its score says little. [GRPO-7]
        is_kept = learns & ended if args.mask_truncated else learns  # [B]
        # In the mean over tokens, those without an advantage only make the gradient of the others smaller. [GRPO-8]
        is_kept = is_kept & ~in_equal_group(scores, k, scored) if args.mask_equal else is_kept
        is_action = response_mask & is_kept.unsqueeze(1)  # [B, R]
        if args.objective == "gspo":  # Its action is the response, so a response has one weight.
            advantages = advantages.squeeze(1)  # [B]
        # With --sampler vllm or --overlap, what sampled is not quite this policy. Weights make up for it. [GEN-15]
        advantages, weight_metrics = sample.weigh(advantages, old_logprobs, sampled_logprobs, response_mask)
        advantages = advantages.reshape(B, -1)  # [B, 1], or with weights of tokens [B, R]

        # ---- 5. Optimise: micro-batches add up to exactly one gradient for each minibatch ----------------------------
        policy.train()  # Every dropout is 0. Training mode only lets gradient checkpointing work.
        means = utils.Means(device)
        for epoch in range(args.num_ppo_epochs):
            # Every pass has an order of its own. [OPT-9]
            minibatches = shuffled_groups(B // k, k, args.num_mini_batches, device, args.seed, update, epoch)
            for number, minibatch in enumerate(minibatches):
                # Both counts are those of the whole minibatch, over all processes.
                num_actions, num_responses = is_action[minibatch].sum(), learns[minibatch].sum()
                micro_batches = minibatch.chunk(world)[rank].split(size)
                for i, (m, micro_batch) in enumerate(utils.split(batch, micro_batches)):  # m: its episodes
                    with engines.accumulate(accelerator, policy, is_last=i + 1 == len(micro_batches)):
                        logprobs, entropies = response_logprobs(policy, micro_batch, n)  # [M, R]
                        # With one step per rollout the policy is compared with itself, so the ratio is exactly 1 and
                        # rounding cannot trigger the clip. [RLOO-7]
                        old = logprobs.detach() if one_step else old_logprobs[m]
                        losses, logratio, clipped = policy_loss(
                            logprobs, old, response_mask[m], advantages[m], low, high
                        )  # [M, R]
                        kl_losses = kl_estimates(logprobs, ref_logprobs[m])  # [M, R], 0 at padding
                        if args.kl_times_ratio:
                            kl_losses = kl_losses * logratio.exp()
                        # The whole minibatch's count makes micro-batches add up to its gradient. [OPT-5]
                        weights = loss_weights(is_action[m], num_responses, num_actions, normalization)
                        loss = ((losses + args.kl_coef * kl_losses) * weights).sum()
                        accelerator.backward(loss * world)  # The engines average over processes, but we sum. [OPT-6]
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
                        # What a gap shows is rounding, another engine, or --overlap.
                        means.add_max("val/logprob_gap", (logprobs - sampled_logprobs[m]).abs())
                        # This one shows rounding alone, and with one step it is exactly 1.
                        means.add_max("val/first_ratio", logratio.abs().clamp(max=20).exp())
                if not num_actions:  # Without an action there is no gradient, only Adam's momentum.
                    engines.forget_gradient(accelerator, policy, optimizer)
                    continue
                # Where the norm is not finite, the run ends and names the update and this number.
                norm = engines.clip_and_step(accelerator, policy, optimizer, args.max_grad_norm, run, number)
                means.add({"policy/grad_norm": norm})
        run.lap("optimise")

        # ---- 6. Log --------------------------------------------------------------------------------------------------
        # The logged KL and entropy are those of the policy that sampled, which --overlap makes one update old.
        logged = sample.behaviour_logprobs(old_logprobs, sampled_logprobs)  # [B, R]
        logged_kl = (logged - ref_logprobs).sum(1)  # [B]
        metrics = means.reduce(accelerator) | score.by_name(rewards_of_each, "objective/")
        metrics |= weight_metrics | {
            "epoch": update * (B // k) / len(prompts),
            "lr": lr,
            "objective/scores": utils.masked_mean(scores, scored),
            "objective/kl": utils.masked_mean(logged_kl, scored),
            "objective/entropy": -utils.masked_mean((logged * response_mask).sum(1), scored),  # no padding [LOG-1]
            "val/abstained": 1 - scored.float().mean(),
            "val/equal_scores": in_equal_group(scores, k, scored).float().mean(),
            "val/num_eos_tokens": (response_mask & (responses == tokenizer.eos_token_id)).sum(),
            "val/num_stop_token_ids": ended.sum() if len(stop_ids) else 0,
            "val/sequence_lengths": response_mask.sum(1).float().mean(),
        }
        shown = rows, responses, response_mask, ended, scores.masked_fill(~scored, math.nan), logged_kl
        if run.is_eval_due(update):
            eval_metrics, eval_shown = evaluate(
                policy, sample, reference, reward_model, score, held_out, stop_ids, args, accelerator
            )
            metrics |= eval_metrics
            shown = eval_shown or shown
        run.log(update, metrics, shown)
        run.checkpoint_if_due(update, policy, optimizer)
    return run.finish(policy)  # the model folder with its card, before -> after, and the upload


if __name__ == "__main__":
    cli.main(main, Args)
