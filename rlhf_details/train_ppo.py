"""
PPO for language models: the recipes of "N+" (arXiv 2403.17031) and of openai/lm-human-preferences (1909.08593) in one
loop. minimal/ppo.py is N+'s alone; this file adds the other recipe, options of TRL's, and several processes.

1. Each prompt gets one response. Each token is an action with the reward -kl_coef * KL. The score is paid one place
   after the last token, or on it if there are R tokens.
2. A value model says what every prefix is worth. GAE turns rewards and values into advantages, which are whitened.
3. A rollout is used for several passes. The probability ratio of a token and the change of a value are clipped.
4. N+, the defaults: a value model of its own that starts as the reward model, a fixed kl_coef.
   lm-human-preferences (benchmark/recipes/ppo_sentiment.toml): a value head on the policy's trunk that starts at zero,
   an adaptive kl_coef, whitened rewards, and a reward model that reads up to a full stop.
   docs/guides/7_differences.md says where this page differs from both.
5. Sampling and shuffling depend on (seed, update, episode, ..) alone, not on a generator's state.

Left out on purpose: top-k and top-p, which would sample from another policy, and an entropy bonus.

A tag such as [PPO-3] marks an implementation detail: benchmark/checks/details.md has its source, test and effect.

Shapes    B: episodes of an update, one per prompt   Q: query tokens, left-padded   R: response tokens, right-padded
          L: columns of a row (L': the cache included)   V: vocabulary   W or M: episodes of a forward   S: stop tokens
          C: columns that are read   H: hidden size   F: rewards, the reward model's included   N: held-out prompts
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/train_ppo.py
N processes:   accelerate launch --num_processes N rlhf_details/train_ppo.py
Your data:     python rlhf_details/train_ppo.py --dataset rows.jsonl --sft_model_path gpt2 --reward_fn mine.py:f
"""

import copy
import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, data, flags, models, stop_tokens
from rlhf_details.plumbing.machine import engines, rewards, samplers
from rlhf_details.plumbing.outputs.run import Run
from rlhf_details.utils import EVALUATION, TRAINING, Batch, in_slices


@dataclass
class Args(flags.PolicyArgs):  # inherits the shared flags
    exp_name: str = "train_ppo"
    output_dir: str = "models/ppo"

    # sampling
    response_length: int = 53
    """most tokens a response may have (R)"""
    temperature: float = 0.7
    """temperature of sampling and of every log-prob"""
    stop_token: str = "eos"
    """what ends sampling: "eos" (any end that the model's files name), "none", or a text that is one token"""
    truncate_token: str = "none"
    """the reward model reads up to this token: "eos", "none" (all), or a text that is one token"""
    truncate_after: int = 0
    """tokens before this place (from 0) do not truncate a response"""
    missing_eos_penalty: float | None = 1.0
    """what a response without its end (truncate_token, else stop_token) pays, in points of score"""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """subtract it from the score, or replace the score by -penalty"""

    # reward and KL
    kl_coef: float = 0.05
    """weight of the KL in the reward (beta); adaptive_kl starts from it"""
    kl_penalty: Literal["kl", "abs", "mse", "full", "k2", "k3"] = "kl"
    """what a token pays for, with d = log p - log p_ref: "kl" d, "abs" |d|, "mse" and "k2" d^2/2, "k3" exp(-d) - 1 + d,
    "full" the exact KL; as a reward only "kl" has the gradient of the KL, and "full" omits a token's effect on its own
    KL; objective/kl and adaptive_kl use d"""
    adaptive_kl: bool = False
    """lm-human-preferences: steer kl_coef so that the KL of a response stays near kl_target"""
    kl_target: float = 6.0
    """adaptive_kl: KL to hold, in nats per response"""
    kl_horizon: float = 10_000
    """adaptive_kl: episodes over which kl_coef changes by about a fifth at most"""
    whiten_rewards: bool = False
    """lm-human-preferences: scale the batch's rewards to variance 1, keeping their mean"""
    score_scaling: bool = False
    """divide scores by their running standard deviation"""
    score_norm: bool = False
    """subtract the scores' running mean"""
    score_clip: float | None = None
    """clip scores to [-c, c], after scaling"""

    # algorithm
    total_episodes: int = 1_000_000
    """responses sampled in the whole run, rounded up to whole batches"""
    batch_size: int = 512
    """episodes per update, over all processes (B)"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch"""
    num_ppo_epochs: int = 4
    """passes over the batch"""
    cliprange: float = 0.2
    """clip range of the probability ratio"""
    cliprange_value: float = 0.2
    """clip range of a value's change"""
    vf_coef: float = 0.1
    """weight of the value loss"""
    gamma: float = 1.0
    """discount of a token's reward"""
    lam: float = 0.95
    """GAE's lambda: 1 trusts rewards, 0 values"""
    normalize_advantage: bool = True
    """whiten the advantages over the whole batch"""
    value_model: Literal["separate", "shared"] = "separate"
    """a model of its own that starts as the reward model (N+), or a zero head on the policy's trunk
    (lm-human-preferences)"""
    target_kl: float | None = None
    """stop the passes after one whose mean of 0.5 * log-ratio^2 exceeds 1.5 times this"""
    ratio_threshold: float | None = None
    """skip the step of a minibatch whose mean probability ratio exceeds this"""

    # optimiser
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """learning-rate schedule over the updates"""
    warmup_ratio: float = 0.0
    """the warm-up's share of the updates"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    tf_adam: bool = False
    """place epsilon as TensorFlow does (lm-human-preferences)"""
    weight_decay: float = 0.01
    """AdamW's weight decay"""
    max_grad_norm: float | None = None
    """clip the gradient's global norm; None: only log it"""


# Presets replace the defaults above: an embedded task's by name (default: "toy"), else those of the smallest number
# above the model's parameter count. docs/guides/1_your_data.md has their sources.
presets = {
    "toy": dict(
        eval_dataset="toy:test",
        sft_model_path="models/toy/sft",
        reward_model_path="models/toy/reward",
        output_dir="models/toy/ppo",
        response_length=36,
        temperature=1.0,
        missing_eos_penalty=3.0,
        kl_coef=0.1,
        total_episodes=10_240,
        batch_size=256,
        learning_rate=5e-4,
        max_grad_norm=1.0,
        micro_batch_size=256,
        rollout_micro_batch_size=256,
    ),
    20e6: dict(
        missing_eos_penalty=3.0,
        kl_coef=0.3,
        total_episodes=5_000,
        batch_size=128,
        learning_rate=3e-4,
        max_grad_norm=1.0,
        micro_batch_size=128,
    ),
    500e6: {},  # the defaults above
    5e9: dict(learning_rate=3e-6),
    math.inf: dict(learning_rate=3e-7),
}
presets["toy-sum"] = presets["toy"] | dict(
    eval_dataset="toy-sum:test",
    sft_model_path="models/toy-sum/sft",
    reward_model_path=None,
    reward_fn=("rlhf_details.toy:right_sum",),
    output_dir="models/toy-sum/ppo",
    response_length=3,
    missing_eos_penalty=1.0,
    kl_coef=0.01,
    total_episodes=76_800,
    learning_rate=1e-3,
)


# ---- models: what is trained runs inside `forward`, so that DDP, FSDP and DeepSpeed see all parameters ---------------
class Policy(nn.Module):
    """Next-token logits / temperature, or log-probs of given tokens and, with a critic, values of states, in fp32."""

    logits_at_once = 2**24  # 64 MiB in fp32

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)
        self.critic = None  # `load_models` gives the policy one: a Reward, or a linear head on this model's trunk.

    def forward(self, tokens, mask, positions, index, labels=None, cache=None):
        """
        Args: tokens, positions [W, L]; mask [W, L'] bool, None without padding; index [C], the columns to read; labels
        [W, C], the tokens that these predict; cache, transformers', updated in place.
        Returns: (log-probs, entropies, and values with a critic), all [W, C]; without labels the logits / T [W, C, V].
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [W, C, H]
        if labels is None:
            return self.logits(hidden)
        outputs = utils.token_logprobs(self.logits, hidden, labels, self.logits_at_once // self.head.vocab_size)
        if self.critic is None:
            return outputs
        if not isinstance(self.critic, nn.Linear):
            return *outputs, self.critic(tokens, mask, positions, index.expand(len(tokens), -1))
        with torch.autocast(hidden.device.type, enabled=False):
            # The value loss trains the policy's trunk as well. [PPO-3]
            return *outputs, self.critic(hidden.float()).squeeze(-1)

    def logits(self, hidden):
        """Tempered logits [.., V] fp32 of last hidden states [.., H]."""
        # The temperature divides the logits of every log-prob, not the sampler's alone. [GEN-2] [GEN-3]
        return self.head(hidden).float() / self.temperature


class Reward(nn.Module):
    """Scores: the head's output at given columns, plus a bias. Read at every state it is a value model."""

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
    """Returns (tokenizer, policy with its critic, reference, reward model or None), all in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy = Policy(models.add_adapters(model, args.lora_rank), args.temperature)
    # With the policy itself as reference the KL would stay 0. [MODEL-4]
    reference = models.frozen_copy(policy)
    reward_model = None
    if rewards.reads_token_ids(args, tokenizer):  # With another tokenizer, rewards.Scorer gives it text.
        reward_model = utils.disable_dropout(models.load_reward_model(args.reward_model_path, args))
        reward_model = Reward(reward_model).requires_grad_(False).to(device).eval()
    policy.critic = load_critic(args, model, reward_model)
    return tokenizer, policy.to(device), reference.to(device).eval(), reward_model


def load_critic(args, model, reward_model):
    """The value model: a linear head on the policy's trunk (--value_model shared), or a Reward."""
    if args.value_model == "shared":
        critic = nn.Linear(model.get_output_embeddings().in_features, 1)
        nn.init.zeros_(critic.weight)  # Every value starts at 0. [PPO-2]
        nn.init.zeros_(critic.bias)
        return critic
    if reward_model:
        # The value model starts as the reward model, bias included. [PPO-1]
        critic = copy.deepcopy(reward_model).requires_grad_(True)
    else:  # Without a reward model of these token ids it starts as the policy's trunk with a zero head.
        trunk = models.load_scalar_model(args.sft_model_path, "--sft_model_path", args)
        critic = Reward(utils.disable_dropout(trunk))
        nn.init.zeros_(critic.model.score.weight)
    models.add_adapters(critic.model, args.lora_rank)  # The head is trained as a whole.
    return critic


# ---- from tokens to log-probs and scores -----------------------------------------------------------------------------
def join(batch):
    """Rows of a prompt and its response.

        tokens   .  p  p  p  a  b  EOS  .        Q = 4 (left-padded), R = 4 (right-padded)
        index             3  4  5   6            column Q - 1 + t predicts token t and values the state before it;
                                                 6 is the state after the end, which predicts nothing
    Returns: tokens, mask, positions [M, L] with L = Q + R, and index [R], the columns Q - 1 .. Q + R - 2.
    """
    tokens = torch.cat([batch.queries, batch.responses], 1)  # [M, L]
    mask = torch.cat([batch.query_mask, batch.response_mask], 1)  # [M, L]
    # The column before a token predicts it. [GEN-7]
    index = torch.arange(batch.responses.size(1), device=mask.device) + batch.queries.size(1) - 1
    return tokens, mask, utils.positions_from_mask(mask), index


def response_logprobs(policy, batch):
    """Log-probs, entropies and, with a critic, values of a Batch, [M, R] fp32 and 0 where masked."""
    R = batch.responses.size(1)
    batch = utils.trim(batch, extra=1)  # one column more for the state after the end
    logprobs, entropies, *values = policy(*join(batch), labels=batch.responses)  # each [M, width]
    # Padding holds zeros, so that sums over R need no mask. [REW-6]
    outputs = [logprobs * batch.response_mask, entropies * batch.response_mask]
    outputs += [x * value_mask(batch.response_mask) for x in values]
    return [nn.functional.pad(x, (0, R - x.size(1))) for x in outputs]


def response_scores(reward_model, batch):
    """[scores], a list for `in_slices`, [M] fp32: the reward model's output at the last token of each response."""
    batch = utils.trim(batch)
    tokens, mask, positions, _ = join(batch)
    # The mask says which token is the last, since pad may equal EOS. [REW-2]
    last = batch.queries.size(1) + batch.response_mask.sum(1, keepdim=True) - 1  # [M, 1]
    return [reward_model(tokens, mask, positions, last).squeeze(1)]


def full_kl(policy, batch, reference):
    """The exact KL of the next-token distributions, the sum of p (log p - log p_ref) over the vocabulary: [[M, R]]."""
    R = batch.responses.size(1)
    batch = utils.trim(batch)
    logp, ref_logp = (model(*join(batch)).log_softmax(-1) for model in (policy, reference))  # [M, width, V]
    kl = (logp.exp() * (logp - ref_logp)).sum(-1) * batch.response_mask
    return [nn.functional.pad(kl, (0, R - kl.size(1)))]


# ---- equations -------------------------------------------------------------------------------------------------------
def truncate_response(responses, mask, end_ids, after):
    """What the reward model reads: a response up to its first end at place `after` or later, or all of it.

    Args: responses, mask [B, R]; end_ids [S]; without any, all is read and ended.
    Returns: (mask [B, R] of what is read, whether an end was there [B]). Source: lm-human-preferences, lm_tasks.py.
    """
    if not len(end_ids):
        return mask, mask.any(1)
    # The filler, token 0, may be the stop token, so only real tokens count. [GEN-13]
    ends = mask & torch.isin(responses, end_ids)
    ends[:, :after] = False  # A token before this place does not end the response. [GEN-12]
    return mask & (ends.cumsum(1) - ends.long() == 0), ends.any(1)  # True where no end stands before


def missing_eos_scores(scores, ended, penalty, mode):
    """The EOS trick: a response that did not end pays `penalty` ("subtract"), or gets the score -penalty ("replace").

    "replace" depends on where the scores' zero is, and raises a score below -penalty.
    Args: scores [B] fp32; ended [B] bool; penalty, float or None. Returns: [B].
    Source: TRL v0.11.4, ppov2_trainer.py (subtract); N+, ppo.py and lm-human-preferences, train_policy.py (replace).
    """
    if penalty is None:
        return scores
    # Without a penalty a response that was cut off may score well. [REW-3]
    return torch.where(ended, scores, scores - penalty if mode == "subtract" else torch.full_like(scores, -penalty))


def merge_moments(moments, x):
    """(count, mean, sum of squared distances from it) of all numbers so far and of x [B], by Chan's formula."""
    count, mean, squares = moments
    x = x.cpu().double()  # Apple's GPUs have no float64.
    total, delta = count + len(x), x.mean().item() - mean
    # Add the spread within the batch, and that between it and what came before. [PPO-19]
    squares += ((x - x.mean()) ** 2).sum().item() + delta**2 * count * len(x) / total
    return total, mean + delta * len(x) / total, squares


def shape_scores(scores, moments, scaling, norm, clip):
    """Scores [B] less their running mean (norm), over their running standard deviation (scaling), and clipped.

    Args: moments, of all scores so far, these included; clip, c of [-c, c] or None.
    Source: TRL v0.11.4, ppo_trainer.py.
    """
    count, mean, squares = moments
    std = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    if norm:
        scores = scores - mean
    if scaling and std:
        scores = scores / std
    return scores if clip is None else scores.clamp(-clip, clip)


def kl_penalty(logprobs, ref_logprobs, kind):
    """What each sampled token pays, [B, R], from d = log p - log p_ref. ("full" is full_kl.)

    Source: TRL v0.11.4, ppo_trainer.py (kl, abs, mse); open-instruct, ppo_vllm_thread_ray_gtrl.py (k2, k3).
    """
    # Used as a reward, log p - log p_ref gives an unbiased gradient of the KL. [REW-5]
    d = logprobs - ref_logprobs
    # A single token's d may be negative. [PPO-7]
    return {"kl": d, "abs": d.abs(), "mse": d**2 / 2, "k2": d**2 / 2, "k3": torch.expm1(-d) + d}[kind]


def value_mask(response_mask):
    """States [B, R] bool that have a value: before each response token, and after the last one where there is room."""
    # After the last token the score is still to come. [PPO-5]
    return response_mask | nn.functional.pad(response_mask, (1, 0), value=True)[:, :-1]  # moved to the right


def token_rewards(scores, kl_penalties, response_mask, kl_coef):
    """-kl_coef * KL penalty of each token, and the score one place after the last, or on the last without room.

    Args: scores [B]; kl_penalties [B, R], 0 at padding; response_mask [B, R]. Returns: [B, R].
    Source: N+, ppo.py; lm-human-preferences, train_policy.py (responses of fixed length).
    """
    # after EOS, if there is room [PPO-6]
    place = value_mask(response_mask).sum(1, keepdim=True) - 1  # [B, 1]
    return (-kl_coef * kl_penalties).scatter_add(1, place, scores.unsqueeze(1))


def adapt_kl_coef(kl_coef, kl, target, horizon, num_episodes):
    """The next kl_coef of a proportional controller: it rises where the KL is above the target, else it falls.

    Args: kl, mean KL of a response, nats; horizon, episodes over which it changes by about a fifth at most.
    Source: lm-human-preferences, train_policy.py.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)  # One unusual batch must not decide the coefficient. [PPO-15]
    return kl_coef * (1 + error * num_episodes / horizon)


def compute_gae(rewards, values, gamma, lam):
    """Generalised advantage estimation: d_t = r_t + gamma V_{t+1} - V_t, A_t = d_t + gamma lam A_{t+1}; V_R = A_R = 0.

    Args: rewards, values [B, R], both 0 beyond value_mask, so that nothing flows back from there.
    Returns: (advantages, returns = advantages + values), [B, R].
    Source: arXiv 1506.02438; lm-human-preferences, train_policy.py.
    """
    advantages, advantage, next_value = torch.zeros_like(rewards), 0, 0
    for t in reversed(range(rewards.size(1))):
        # A lambda below 1 trusts the values more, which lowers the variance. [PPO-9]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage  # [B]
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages, advantages + values


def ppo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange):
    """The clipped surrogate, one term for each action: max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c)).

    Args: all [M, R]; an action is a token. Returns: (losses, log-ratios, clipped), all [M, R], 0 at padding.
    Source: arXiv 1707.06347, equation 7; lm-human-preferences, train_policy.py.
    """
    logratio = (logprobs - old_logprobs) * mask
    ratio = logratio.exp()
    losses1 = -advantages * ratio
    losses2 = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    # The larger loss counts: leaving the range gains nothing, but a ratio on the wrong side (below 1 - c where A > 0,
    # above 1 + c where A < 0) is still pulled back. [PPO-12]
    losses = torch.max(losses1, losses2)
    return losses * mask, logratio, (losses2 > losses1) & mask


def ppo_value_loss(values, old_values, returns, mask, cliprange_value):
    """max((V - G)^2, (clip(V) - G)^2) / 2, where clip holds V within old_values +- cliprange_value.

    Args: all [M, R]. Returns: (losses, plain squared errors, clipped), all [M, R], 0 outside of the mask.
    Source: lm-human-preferences, train_policy.py; N+, ppo.py.
    """
    errors = (values - returns) ** 2
    clipped_errors = (values.clamp(old_values - cliprange_value, old_values + cliprange_value) - returns) ** 2
    # A value that has moved far gets no gradient to move further. [PPO-13]
    losses = 0.5 * torch.max(errors, clipped_errors)
    return losses * mask, errors * mask, (clipped_errors > errors) & mask


def mean_and_variance(x, mask):
    """Mean and biased variance of x over the True entries of mask."""
    mean = utils.masked_mean(x, mask)
    return mean, utils.masked_mean((x - mean) ** 2, mask)


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(policy, sample, reference, reward_model, score, prompts, end_ids, args, accelerator):
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
        ref_logprobs, _ = in_slices(response_logprobs, reference, batch, args.micro_batch_size)
        read_mask, ended = truncate_response(responses, response_mask, end_ids, args.truncate_after)
        batch = batch._replace(response_mask=read_mask)
        model_scores = in_slices(response_scores, reward_model, batch, args.micro_batch_size) if reward_model else []
        rewards_of_each, scored = score(rows, batch, *model_scores)  # [N / world, F], [N / world]
    kl = (logprobs - ref_logprobs).sum(1)  # [N / world], from the sampler's log-probs
    scores = (rewards_of_each * score.weights).nansum(1)
    scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)
    return score.held_out(prompts, rewards_of_each, scored, responses, read_mask, ended, scores, kl)


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends the program where arguments contradict each other."""
    cli.check(args)
    rewards.check(args)
    cli.check_batch_size(args, "num_mini_batches")
    if args.adaptive_kl and (not args.kl_coef or not args.kl_target or args.kl_horizon <= args.batch_size / 5):
        console.fail("--adaptive_kl: kl_coef and kl_target must be above 0, and kl_horizon above a fifth of batch_size")
    if args.ratio_threshold is not None and args.ratio_threshold <= 1:
        console.fail(f"--ratio_threshold {args.ratio_threshold}: must be above 1")
    if args.truncate_after and (args.truncate_token == "none" or args.truncate_after >= args.response_length):
        console.fail(
            f"--truncate_after {args.truncate_after}: needs a truncate_token, and must be below response_length"
        )


def main(args: Args):
    """Trains. Returns {"before", "after": held-out metrics, "metrics": the last row, "run": folder}."""
    check(args)
    accelerator = engines.start(args)  # for one process, DDP, FSDP2 or DeepSpeed
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    B, R, size = args.batch_size, args.response_length, args.micro_batch_size
    episodes = torch.arange(B, device=device)  # [B], the numbers of an update's episodes
    mine = slice(rank * B // world, (rank + 1) * B // world)  # those of this process

    # ---- models, prompts, rewards, optimiser
    tokenizer, policy, reference, reward_model = load_models(args, engines.loading_device(accelerator))
    stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token", device)  # [S]
    end_ids = stop_tokens.stop_ids(tokenizer, args.truncate_token, "--truncate_token", device)
    end_ids = end_ids if len(end_ids) else stop_ids  # [S], what a complete response ends with
    prompts, held_out = data.load_prompts(args, tokenizer, room=models.context(policy, reward_model) - R)
    # score(rows, batch, model_scores) -> (rewards [.., F], scored [..]) also calls the functions of --reward_fn, e.g.
    # f(prompts=["2 + 3 ="], completions=[" 5"], answer=["5"]) -> [1.0]. None: it does not apply to this row, and the
    # sum omits it. NaN: it abstains, and the response is not `scored`.
    score = rewards.Scorer(args, accelerator, tokenizer, size, end_ids)
    reward_model = score.take_text_model(reward_model, prompts, held_out)
    # The optimiser holds the value model's weights as well. [PPO-4]
    optimizer = utils.adamw(policy, args.learning_rate, args.adam_eps, args.weight_decay)
    frozen = reference, reward_model or score.text_model
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer, *frozen)
    num_updates = math.ceil(args.total_episodes / B)  # [OPT-10]
    run = Run(args, accelerator, tokenizer, num_updates, prompts, [held_out, *frozen])

    def prompts_of(update):
        """The B rows of an update."""
        return prompts.of_update(update, B, args.seed)

    # sample(policy, queries, query_mask, episodes, n, key) wraps utils.sample or vLLM; with --overlap it samples an
    # update ahead. `sample.is_another`: another engine, or older weights.
    sample = samplers.choose(args, run, [*prompts, *held_out], prompts_of, stop_ids)
    state = run.resume(policy, optimizer, {"kl_coef": args.kl_coef, "adam_step": 0, "moments": (0, 0.0, 0.0)})
    # run.log calls this when it is due.
    evaluation = functools.partial(
        evaluate, policy, sample, reference, reward_model, score, held_out, end_ids, args, accelerator
    )
    if run.first_update == 1:
        run.log(0, evaluation=evaluation)

    for update in range(run.first_update, num_updates + 1):
        # All steps of an update have the same learning rate. [OPT-2]
        lr = utils.learning_rate_at(update, num_updates, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Rollout: a response to each prompt -------------------------------------------------------------------
        rows = prompts_of(update)  # [B]
        queries, query_mask = utils.left_pad([row.ids for row in rows], device)  # [B, Q]
        policy.eval()
        with torch.no_grad(), accelerator.autocast():
            key = args.seed, TRAINING, update
            responses, response_mask, sampled_logprobs = sample(
                policy, queries[mine], query_mask[mine], episodes[mine], 1, key
            )  # [B / world, R]
            run.lap("rollout")

            # ---- 2. Scores: rewards, log-probs and values ------------------------------------------------------------
            batch = Batch(queries[mine], query_mask[mine], responses, response_mask)
            ref_logprobs, _ = in_slices(response_logprobs, reference, batch, size)
            # Ratios and importance weights compare two forwards of the same code. [GEN-9]
            old_logprobs, _, values = in_slices(response_logprobs, policy, batch, size)
            if args.kl_penalty == "full":
                (kl_penalties,) = in_slices(full_kl, policy, batch, size, reference)
            else:
                kl_penalties = kl_penalty(old_logprobs, ref_logprobs, args.kl_penalty)
            # The reward model reads the truncated response alone. [GEN-14]
            read_mask, ended = truncate_response(responses, response_mask, end_ids, args.truncate_after)
            batch = batch._replace(response_mask=read_mask)
            model_scores = in_slices(response_scores, reward_model, batch, size) if reward_model else []
            rewards_of_each, scored = score(rows[mine], batch, *model_scores)  # [B / world, F], [B / world]
        # Every process gathers the whole batch once, and phases 3 and 4 are computed on all of it. [REW-7]
        responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs = accelerator.gather(
            (responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs)
        )
        kl_penalties, values, read_mask, ended, rewards_of_each, scored = accelerator.gather(
            (kl_penalties, values, read_mask, ended, rewards_of_each, scored)
        )
        batch = Batch(queries, query_mask, responses, response_mask)
        run.lap("scores")

        # ---- 3. Rewards: one for each token --------------------------------------------------------------------------
        #   response        a    b   EOS   .    .
        #   response_mask   1    1    1    0    0      actions, with log-probs, KL, advantages and a policy loss
        #   state_mask      1    1    1    1    0      states, each before its token, with values and a value loss
        #   rewards        -cK  -cK  -cK score  0      c: kl_coef, K: the token's KL penalty
        #   R tokens        v    w    x    y    z      both masks are 1 everywhere, and the value after z counts as 0
        #   rewards        -cK  -cK  -cK  -cK  -cK + score
        # the weighted sum of the rewards that apply [REW-4]
        scores = (rewards_of_each * score.weights).nansum(1)  # [B]
        scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)  # [B]
        if args.score_scaling or args.score_norm:
            state["moments"] = merge_moments(state["moments"], scores[scored])
        shaped_scores = shape_scores(scores, state["moments"], args.score_scaling, args.score_norm, args.score_clip)
        # Ratio, logged KL and entropy are those of the policy that sampled, which --overlap makes one update old. The
        # tokens pay for the KL of the policy as it is now. [GEN-11]
        old_logprobs = sample.behaviour_logprobs(old_logprobs, sampled_logprobs)  # [B, R]
        logged_kl = (old_logprobs - ref_logprobs).sum(1)  # [B], "k1", whatever --kl_penalty is
        # A response that is not scored gives no gradient. [REW-8]
        action_mask = response_mask & scored.unsqueeze(1)  # [B, R]
        state_mask = value_mask(response_mask) & scored.unsqueeze(1)  # [B, R]
        rewards_of_tokens = token_rewards(shaped_scores, kl_penalties, response_mask, state["kl_coef"])  # [B, R]
        if args.whiten_rewards:
            # Subtracting the mean would put a price on length. [PPO-8]
            rewards_of_tokens = utils.masked_whiten(rewards_of_tokens, state_mask, shift_mean=False)

        # ---- 4. Advantages -------------------------------------------------------------------------------------------
        advantages, returns = compute_gae(rewards_of_tokens, values, args.gamma, args.lam)  # [B, R]
        if args.normalize_advantage:
            advantages = utils.masked_whiten(advantages, action_mask)  # over all response tokens [PPO-10]
        # Importance weights correct for another engine. With --overlap they are 1: the ratio does it. [GEN-15]
        advantages, weight_metrics = sample.weigh(advantages, old_logprobs, sampled_logprobs, action_mask)

        # ---- 5. Optimise ---------------------------------------------------------------------------------------------
        policy.train()  # Gradient checkpointing needs it.
        means = utils.Means(device)
        num_skipped = 0
        lengths = query_mask.sum(1) + response_mask.sum(1)  # [B]
        for epoch in range(args.num_ppo_epochs):
            # Each pass has its own order. [OPT-9]
            order = list(utils.permutation(B, args.seed, update, epoch))
            epoch_kl = 0.0
            for number, minibatch in enumerate(episodes[order].chunk(args.num_mini_batches)):
                of_minibatch = utils.Means(device)
                # over all processes
                num_actions, num_states = action_mask[minibatch].sum(), state_mask[minibatch].sum()
                share = minibatch.chunk(world)[rank]
                # Rows of similar lengths share a micro-batch, which is as wide as its longest.
                micro_batches = utils.split(batch, share[lengths[share].argsort(stable=True)].split(size))
                for m, micro_batch in engines.accumulate(accelerator, policy, micro_batches):  # m: its episodes
                    logprobs, entropies, new_values = response_logprobs(policy, micro_batch)  # [M, R]
                    losses, logratio, clipped = ppo_policy_loss(
                        logprobs, old_logprobs[m], action_mask[m], advantages[m], args.cliprange
                    )
                    value_losses, errors, value_clipped = ppo_value_loss(
                        new_values, values[m], returns[m], state_mask[m], args.cliprange_value
                    )
                    # Dividing by the whole minibatch's count makes micro-batches add up to its gradient. [OPT-5]
                    loss = losses.sum() / num_actions.clamp(min=1)
                    # The value loss is an average over states. [PPO-14]
                    loss = loss + args.vf_coef * value_losses.sum() / num_states.clamp(min=1)
                    accelerator.backward(loss * world)  # The engines average over processes. [OPT-6]
                    of_actions = {
                        "loss/policy_avg": losses,
                        "policy/approxkl_avg": 0.5 * logratio**2,  # of an action [LOG-3]
                        "policy/clipfrac_avg": clipped,
                        "policy/entropy_avg": entropies,
                    }
                    of_states = {
                        "loss/value_avg": value_losses,
                        "val/clipfrac_avg": value_clipped,
                        "val/error": errors,
                        "val/vpred": new_values,
                    }
                    means.add(of_actions, action_mask[m])
                    means.add(of_states, state_mask[m])
                    means.add_ratios(logratio, action_mask[m])
                    of_minibatch.add({"kl": 0.5 * logratio**2}, action_mask[m])
                    of_minibatch.add_ratios(logratio, action_mask[m])
                    if epoch == number == 0:  # before the first step [LOG-6]
                        means.add_max("val/logprob_gap", (logprobs - sampled_logprobs[m]).abs())
                        means.add_max("val/first_ratio", logratio.abs().clamp(max=20).exp())
                distance = of_minibatch.reduce(accelerator)
                epoch_kl += distance["kl"] / args.num_mini_batches  # a mean of minibatch means
                # Far away the clipped objective is unreliable. [PPO-17]
                is_far = args.ratio_threshold is not None and distance["val/ratio"] > args.ratio_threshold
                if is_far or not num_actions:  # Without an action a step would be Adam's momentum alone.
                    engines.forget_gradient(accelerator, policy, optimizer)
                    num_skipped += is_far
                    continue
                state["adam_step"] += 1
                if args.tf_adam:
                    # TensorFlow adds eps before it corrects the second moment's bias, which at first
                    # makes it 32 times as large. [OPT-3]
                    optimizer.param_groups[0]["eps"] = args.adam_eps / math.sqrt(1 - 0.999 ** state["adam_step"])
                norm = engines.clip_and_step(accelerator, policy, optimizer, args.max_grad_norm, run, number)
                means.add({"policy/grad_norm": norm})
            # The policy has moved too far from the sampler. [PPO-18]
            if args.target_kl is not None and epoch_kl > 1.5 * args.target_kl:
                break
        run.lap("optimise")

        # ---- 6. Log --------------------------------------------------------------------------------------------------
        metrics = means.reduce(accelerator) | score.metrics(rewards_of_each, scores, scored, ended, batch, 1)
        mean_kl = utils.masked_mean(logged_kl, scored)
        # as added to rewards, before whitening [LOG-5]
        non_score_reward = -state["kl_coef"] * utils.masked_mean(kl_penalties.sum(1), scored)
        total_loss = metrics["loss/policy_avg"] + args.vf_coef * metrics["loss/value_avg"]
        value_mean, value_var = mean_and_variance(values, state_mask)
        returns_mean, returns_var = mean_and_variance(returns, state_mask)
        metrics |= weight_metrics | {
            "epoch": update * B / len(prompts),
            "lr": lr,
            "objective/scores": utils.masked_mean(scores, scored),
            "objective/kl": mean_kl,
            "objective/kl_coef": state["kl_coef"],
            "objective/non_score_reward": non_score_reward,
            "objective/rlhf_reward": utils.masked_mean(shaped_scores, scored) + non_score_reward,
            "objective/score_total": utils.masked_mean(scores, scored) + non_score_reward,
            # without padding [LOG-1]
            "objective/entropy": -utils.masked_mean((old_logprobs * response_mask).sum(1), scored),
            "objective/loss": total_loss,
            "loss/total_avg": total_loss,
            "policy/skipped_minibatches": num_skipped,
            "returns/mean": returns_mean,
            "returns/var": returns_var,
            "val/mean": value_mean,
            "val/var": value_var,
            "val/var_explained": 1 - metrics["val/error"] / (returns_var + 1e-8),
        }
        shown = rows, responses, read_mask, ended, scores.masked_fill(~scored, math.nan), logged_kl
        run.log(update, metrics, shown, evaluation)
        if args.adaptive_kl:
            # last, since the batch's rewards and metrics used the old coefficient [PPO-16]
            state["kl_coef"] = adapt_kl_coef(state["kl_coef"], mean_kl.item(), args.kl_target, args.kl_horizon, B)
        run.checkpoint_if_due(update, policy, optimizer, state)
    return run.finish(policy)


if __name__ == "__main__":
    cli.main(main, Args)
