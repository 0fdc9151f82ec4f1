"""
PPO on a language model and a reward: the recipes of "N+" and of openai/lm-human-preferences in one loop.

1. Each prompt gets one response. Each token is an action with the reward -kl_coef * KL. The score is the reward of the
   place after the last token, or of the last token where a response has all R tokens.
2. A value model says what every prefix is worth. GAE turns rewards and values into advantages, which are whitened.
3. A rollout is used for several passes. The probability ratio of a token and the change of a value are clipped.
4. N+ (arXiv 2403.17031), the defaults: a value model of its own that starts as the reward model, a fixed kl_coef.
   What differs: N+ replaces the score of an unfinished response (here the penalty is subtracted), averages each
   micro-batch for itself, whitens within a process, and takes the old log-probs from the sampler.
   lm-human-preferences (arXiv 1909.08593; flags in benchmark/recipes/ppo_sentiment.toml): a value head on the policy's
   trunk that starts at zero, an adaptive kl_coef, whitened rewards, and responses of fixed length that the reward model
   reads up to a full stop.
5. Sampling and shuffling are functions of coordinates, such as (seed, purpose, update, episode, step, token) for a
   token, and never of a generator's state.

Left out on purpose: top-k and top-p (the sampled policy would not be the trained one), and
an entropy bonus (neither recipe has one).

Read `main` first if you know the paper, else from top to bottom. A tag such as [PPO-3] marks an implementation detail:
benchmark/checks/details.md has its source, its test and what it is worth.

Shapes    B: episodes of an update, one per prompt   Q: query tokens, left-padded   R: response tokens, right-padded
          L: columns of a row   V: vocabulary   M: episodes of a micro-batch   W: rows of a forward   S: stop tokens
          C: columns that are read   H: hidden size   F: rewards, the reward model's among them   N: held-out prompts
Masks     True marks a real token. Masks travel with the tokens, and nothing is ever found by looking for a pad token.

One process:   python rlhf_details/train_ppo.py
N processes:   accelerate launch --num_processes N rlhf_details/train_ppo.py
Your data:     python rlhf_details/train_ppo.py --dataset rows.jsonl --sft_model_path gpt2 --reward_fn mine.py:f
"""

import copy
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
class Args(
    flags.PolicyArgs
):  # run, data, models, memory, reward_fn, sampler and overlap stand in plumbing/inputs/flags.py
    exp_name: str = "train_ppo"
    """name of the experiment, part of the run's name"""
    output_dir: str = "models/ppo"
    """folder of the trained policy"""

    # sampling
    response_length: int = 53
    """most tokens a response may have (R)"""
    temperature: float = 0.7
    """sampling temperature; it divides the logits of every log-prob as well"""
    stop_token: str = "eos"
    """sampling ends with this token: "eos" (any that the model names as an end), "none", or a text that is one token"""
    truncate_token: str = "none"
    """the reward model reads a response up to this token: "eos", "none" (all of it), or a text that is one token"""
    truncate_after: int = 0
    """tokens before this place of the response (from 0) do not truncate it"""
    missing_eos_penalty: float | None = 1.0
    """what a response without its end (truncate_token, else stop_token) pays, in points of score; None: nothing"""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """subtract the penalty from the score, or replace the score by -penalty"""

    # reward and KL
    kl_coef: float = 0.05
    """weight of the KL in the reward (beta); under adaptive_kl the first one"""
    kl_penalty: Literal["kl", "abs", "mse", "full", "k2", "k3"] = "kl"
    """what a token pays for, with d = log p - log p_ref: "kl" d, "abs" |d|, "mse" and "k2" d^2/2, "k3" exp(-d) - 1 + d,
    "full" the exact KL, which holds the distributions of a slice in memory; as a reward only "kl" has the gradient of
    the KL, and "full" lacks its direct part: the first token's choice pays nothing; objective/kl, adaptive_kl use d"""
    adaptive_kl: bool = False
    """lm-human-preferences: steer kl_coef so that the KL of a response stays near kl_target"""
    kl_target: float = 6.0
    """adaptive_kl: KL to hold, in nats per response"""
    kl_horizon: float = 10_000
    """adaptive_kl: episodes over which kl_coef changes by a fifth at most"""
    whiten_rewards: bool = False
    """lm-human-preferences: scale the rewards of the batch to variance 1 and keep their mean"""
    score_scaling: bool = False
    """divide the scores by their running standard deviation"""
    score_norm: bool = False
    """subtract the scores' running mean"""
    score_clip: float | None = None
    """clip the scores to [-c, c], after scaling"""

    # algorithm
    total_episodes: int = 1_000_000
    """responses to sample in the whole run; rounded up to whole batches"""
    batch_size: int = 512
    """episodes per update, over all processes (B)"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch"""
    num_ppo_epochs: int = 4
    """passes over the batch"""
    cliprange: float = 0.2
    """clip range of the probability ratio"""
    cliprange_value: float = 0.2
    """clip range of the change of a value"""
    vf_coef: float = 0.1
    """weight of the value loss"""
    gamma: float = 1.0
    """discount of a token's reward"""
    lam: float = 0.95
    """GAE's lambda: 1 trusts the rewards, 0 the values"""
    normalize_advantage: bool = True
    """whiten the advantages over the whole batch"""
    value_model: Literal["separate", "shared"] = "separate"
    """a model of its own that starts as the reward model (N+), or a zero head on the policy's trunk
    (lm-human-preferences)"""
    target_kl: float | None = None
    """end the passes over a batch after one whose mean of 0.5 * (log-ratio)^2 exceeds 1.5 times this; None: never"""
    ratio_threshold: float | None = None
    """skip the step of a minibatch whose mean probability ratio exceeds this; None: never"""

    # optimiser
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """course of the learning rate over the updates"""
    warmup_ratio: float = 0.0
    """share of the updates over which the learning rate rises linearly"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    tf_adam: bool = False
    """place epsilon as TensorFlow does (lm-human-preferences)"""
    weight_decay: float = 0.01
    """AdamW's weight decay"""
    max_grad_norm: float | None = None
    """clip the gradient's global norm to this; None: only log it"""


# cli.main takes these in place of the defaults above, where no flag and no --config says otherwise. A name is that of
# an embedded task; without --dataset it is "toy". A number is for other data, by the model's size: 20e6 for fewer than
# 20 M parameters, 500e6 for 20 M to 500 M, and so on. docs/guides/1_your_data.md says where these values are from.
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


# ---- models: one module call is one forward, so that every engine sees all parameters through it ---------------------
class Policy(nn.Module):
    """Next-token logits / temperature, or the log-probs of given tokens under their softmax, as fp32 numbers.

    With a critic, a Reward of its own or a linear head on this model's trunk, it also says what the states are worth.
    """

    logits_at_once = 2**24  # with labels at most so many exist at a time: 64 MiB in fp32

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)
        self.critic = None  # `load_models` gives the policy one, and the reference has none.

    def forward(self, tokens, mask, positions, index, labels=None, cache=None):
        """
        Args: tokens, positions [W, L]; mask [W, L'] bool, None where nothing is padding; index [C], the columns whose
        logits are read; labels [W, C], the tokens that these predict; cache, a transformers cache, which is extended.
        Returns: (log-probs, entropies) or with a critic (log-probs, entropies, values), all [W, C] fp32, or without
        labels the logits / T [W, C, V] fp32.
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
        # The temperature divides the logits wherever a log-prob is computed, not in the sampler alone. [GEN-2] [GEN-3]
        return self.head(hidden).float() / self.temperature


class Reward(nn.Module):
    """Scores: the head's output at given columns, plus the bias that normalisation left in the configuration.

    Read at the last token it is the reward model, and read at every state it is the value model.
    """

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
    """Returns (tokenizer, policy with its critic, reference, reward model or None), all in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy = Policy(models.add_adapters(model, args.lora_rank), args.temperature)
    # The reference is a copy of the initial policy. If it were the same object, the KL would stay 0. [MODEL-4]
    reference = models.frozen_copy(policy)
    reward_model = None
    if rewards.reads_token_ids(args, tokenizer):  # Any other reward model is a function of text, in rewards.Scorer.
        reward_model = utils.disable_dropout(models.load_reward_model(args.reward_model_path, args))
        reward_model = Reward(reward_model).requires_grad_(False).to(device).eval()
    policy.critic = load_critic(args, model, reward_model)
    return tokenizer, policy.to(device), reference.to(device).eval(), reward_model


def load_critic(args, model, reward_model):
    """What says the values: a linear head on the policy's trunk (--value_model shared), or a Reward of its own."""
    if args.value_model == "shared":
        critic = nn.Linear(model.get_output_embeddings().in_features, 1)  # on the trunk's last hidden state
        nn.init.zeros_(critic.weight)  # Every value starts at 0. [PPO-2]
        nn.init.zeros_(critic.bias)
        return critic
    if reward_model:
        # The value model starts as the reward model, bias included. [PPO-1]
        critic = copy.deepcopy(reward_model).requires_grad_(True)
    else:  # No reward model reads these token ids, so the value model starts as the policy's trunk with a zero head.
        trunk = models.load_scalar_model(args.sft_model_path, "--sft_model_path", args)
        critic = Reward(utils.disable_dropout(trunk))
        nn.init.zeros_(critic.model.score.weight)
    models.add_adapters(critic.model, args.lora_rank)  # It changes the model. The head is trained as a whole.
    return critic


# ---- from tokens to log-probs and scores -----------------------------------------------------------------------------
def join(batch):
    """Rows of a prompt and its response, as the models read them.

        tokens   .  p  p  p  a  b  EOS  .        Q = 4 (left-padded), R = 4 (right-padded)
        index             3  4  5   6            column Q - 1 + t predicts token t and values the state before it; here
                                                 6 is the state after the end, which has a value and predicts nothing
    Returns: tokens, mask, positions [M, L] with L = Q + R, and index [R], the columns Q - 1 .. Q + R - 2.
    """
    tokens = torch.cat([batch.queries, batch.responses], 1)  # [M, L]
    mask = torch.cat([batch.query_mask, batch.response_mask], 1)  # [M, L]
    # The logits in the column before a token predict it. [GEN-7]
    index = torch.arange(batch.responses.size(1), device=mask.device) + batch.queries.size(1) - 1
    return tokens, mask, utils.positions_from_mask(mask), index


def response_logprobs(policy, batch):
    """Log-probs, entropies and, where the policy has a critic, values of a Batch, [M, R] fp32 and 0 where masked."""
    R = batch.responses.size(1)
    batch = utils.trim(batch, extra=1)  # one column more for the state after the end
    logprobs, entropies, *values = policy(*join(batch), labels=batch.responses)  # each [M, width]
    # Padding holds zeros and no sentinel, so that sums over a row need no mask. [REW-6]
    outputs = [logprobs * batch.response_mask, entropies * batch.response_mask]
    outputs += [x * value_mask(batch.response_mask) for x in values]  # none from a reference, which has no critic
    return [nn.functional.pad(x, (0, R - x.size(1))) for x in outputs]


def response_scores(reward_model, batch):
    """Scores [[M]] fp32: the reward model's output at the last real token of each response."""
    batch = utils.trim(batch)
    tokens, mask, positions, _ = join(batch)
    # The mask says which token is the last. Pad may equal EOS, so a search for an id could go wrong. [REW-2]
    last = batch.queries.size(1) + batch.response_mask.sum(1, keepdim=True) - 1  # [M, 1]
    return [reward_model(tokens, mask, positions, last).squeeze(1)]


def full_kl(policy, batch, reference):
    """The exact KL of the next-token distributions, the sum of p (log p - log p_ref) over the vocabulary: [[M, R]].

    That of a state does not depend on the action taken there, so as a reward its gradient lacks the KL's direct part.
    """
    R = batch.responses.size(1)
    batch = utils.trim(batch)
    logp, ref_logp = (model(*join(batch)).log_softmax(-1) for model in (policy, reference))  # [M, width, V]
    kl = (logp.exp() * (logp - ref_logp)).sum(-1) * batch.response_mask
    return [nn.functional.pad(kl, (0, R - kl.size(1)))]


# ---- equations -------------------------------------------------------------------------------------------------------
def truncate_response(responses, mask, end_ids, after):
    """What the reward model reads: a response up to its first end at place `after` or later, or all of it.

    Args: responses [B, R]; mask [B, R] bool, what was sampled; end_ids [S]; without any, all is read and ended.
    Returns: (mask [B, R] of what is read, whether an end was there [B]). Source: lm-human-preferences, lm_tasks.py.
    """
    if not len(end_ids):
        return mask, mask.any(1)
    # Only real tokens are searched, because the filler, token 0, may be the stop token. [GEN-13]
    ends = mask & torch.isin(responses, end_ids)
    ends[:, :after] = False  # A token that stands before this place does not end the response. [GEN-12]
    return mask & (ends.cumsum(1) - ends.long() == 0), ends.any(1)  # True where no end stands strictly before


def missing_eos_scores(scores, ended, penalty, mode):
    """The EOS trick: a response that did not end pays `penalty` ("subtract"), or gets the score -penalty ("replace").

    "replace" can raise a low score, and its effect depends on where the reward model's zero lies.
    Args: scores [B] fp32; ended [B] bool; penalty, float or None. Returns: [B].
    Source: TRL v0.11.4, ppov2_trainer.py (subtract); N+, ppo.py and lm-human-preferences, train_policy.py (replace).
    """
    if penalty is None:
        return scores
    # Without the penalty an unfinished response may score well, and the policy need not learn to stop. [REW-3]
    return torch.where(ended, scores, scores - penalty if mode == "subtract" else torch.full_like(scores, -penalty))


def merge_moments(moments, x):
    """(count, mean, sum of squared distances from the mean) of all numbers so far and of x [B], by Chan's formula."""
    count, mean, squares = moments
    x = x.cpu().double()  # Apple's GPUs have no float64.
    total, delta = count + len(x), x.mean().item() - mean
    # Add the spread within the batch, and the spread between it and what was seen before. [PPO-19]
    squares += ((x - x.mean()) ** 2).sum().item() + delta**2 * count * len(x) / total
    return total, mean + delta * len(x) / total, squares


def shape_scores(scores, moments, scaling, norm, clip):
    """Scores [B] less their running mean (norm), over their running standard deviation (scaling), and clipped.

    Args: moments, of all scores so far, these included; clip, c of [-c, c] or None. Equal scores are not scaled.
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

    "kl" d: its mean is the KL, and as a reward its policy gradient is the KL's. "abs" |d|. "mse" and "k2" d^2/2.
    "k3" exp(-d) - 1 + d is never negative, and its mean is the KL. But the policy gradient of these three as a reward
    is not the KL's.
    Source: TRL v0.11.4, ppo_trainer.py (kl, abs, mse); open-instruct, ppo_vllm_thread_ray_gtrl.py (k2, k3).
    """
    # The KL estimate "k1": its mean is the KL, and REINFORCE with it as a reward follows the KL's gradient. [REW-5]
    d = logprobs - ref_logprobs
    # The penalty "kl" of a single token may be negative. [PPO-7]
    return {"kl": d, "abs": d.abs(), "mse": d**2 / 2, "k2": d**2 / 2, "k3": torch.expm1(-d) + d}[kind]


def value_mask(response_mask):
    """States that have a value, [B, R] bool: before each response token, and after the last one where there is room."""
    # The state after the last token has a value, because the score is still to come. [PPO-5]
    return response_mask | nn.functional.pad(response_mask, (1, 0), value=True)[:, :-1]  # the mask, moved to the right


def token_rewards(scores, kl_penalties, response_mask, kl_coef):
    """-kl_coef * its KL penalty on each token, and the score one place after the last, or on the last without room.

    Args: scores [B]; kl_penalties [B, R], 0 at padding; response_mask [B, R]. Returns: [B, R].
    Source: N+, ppo.py. Responses of a fixed length never have room: lm-human-preferences, train_policy.py.
    """
    # The score is the reward of the place after EOS, if there is one. [PPO-6]
    place = value_mask(response_mask).sum(1, keepdim=True) - 1  # [B, 1]
    return (-kl_coef * kl_penalties).scatter_add(1, place, scores.unsqueeze(1))


def adapt_kl_coef(kl_coef, kl, target, horizon, num_episodes):
    """The next kl_coef of a proportional controller: it rises where the KL is above the target, else it falls.

    Args: kl, mean KL of a response in the batch, nats; horizon, the episodes over which it changes by a fifth at most.
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
    # The larger loss counts. So leaving the range gains nothing, but a ratio that has left it at the other side, below
    # 1 - c where A > 0 or above 1 + c where A < 0, keeps its gradient. [PPO-12]
    losses = torch.max(losses1, losses2)
    return losses * mask, logratio, (losses2 > losses1) & mask


def ppo_value_loss(values, old_values, returns, mask, cliprange_value):
    """Half the squared error of a value or of its clipped version, the worse one: max((V - G)^2, (clip(V) - G)^2) / 2.

    Args: all [M, R]; clip holds V within old_values +- cliprange_value.
    Returns: (losses, plain squared errors, clipped), all [M, R], 0 outside of the mask.
    Source: lm-human-preferences, train_policy.py; N+, ppo.py.
    """
    errors = (values - returns) ** 2
    clipped_errors = (values.clamp(old_values - cliprange_value, old_values + cliprange_value) - returns) ** 2
    # A value that has moved too far gets no gradient to move further. [PPO-13]
    losses = 0.5 * torch.max(errors, clipped_errors)
    return losses * mask, errors * mask, (clipped_errors > errors) & mask


def mean_and_variance(x, mask):
    """Mean and biased variance of x over the True entries of mask."""
    mean = utils.masked_mean(x, mask)
    return mean, utils.masked_mean((x - mean) ** 2, mask)


def shuffled_episodes(num_episodes, num_mini_batches, device, *coordinates):
    """Yields the episodes [B / num_mini_batches] of each minibatch, a shuffle that the coordinates decide."""
    yield from torch.tensor(utils.permutation(num_episodes, *coordinates), device=device).chunk(num_mini_batches)


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(policy, sample, reference, reward_model, score, prompts, end_ids, args, accelerator):
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
        ref_logprobs, _ = in_slices(response_logprobs, reference, batch, args.micro_batch_size)
        read_mask, ended = truncate_response(responses, response_mask, end_ids, args.truncate_after)
        batch = batch._replace(response_mask=read_mask)
        model_scores = in_slices(response_scores, reward_model, batch, args.micro_batch_size) if reward_model else []
        rewards_of_each, scored = score(rows, batch, *model_scores)  # [N / world, F], [N / world]
    # The KL is taken from the log-probs of what sampled. Those of --sampler vllm are a little off, which is good enough
    # for a number that is only logged.
    kl = (logprobs - ref_logprobs).sum(1)  # [N / world]
    gathered = accelerator.gather((responses, read_mask, ended, kl, rewards_of_each, scored))
    responses, read_mask, ended, kl, rewards_of_each, scored = (x[: len(prompts)] for x in gathered)
    scores = (rewards_of_each * score.weights).nansum(1)
    scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)
    return score.held_out(rewards_of_each, scored, prompts, responses, read_mask, ended, scores, kl)


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Exits with an error (exit code 2) if arguments contradict each other."""
    cli.check(args)
    rewards.check(args)
    unit = args.num_mini_batches * console.world_size()
    if args.batch_size % unit:
        console.fail(f"--batch_size {args.batch_size}: not divisible by num_mini_batches * processes = {unit}")
    for name in ("gamma", "lam"):
        if getattr(args, name) > 1:
            console.fail(f"--{name} {getattr(args, name)}: must be at most 1")
    if args.adaptive_kl and (not args.kl_coef or not args.kl_target or args.kl_horizon <= args.batch_size / 5):
        console.fail("--adaptive_kl: kl_coef and kl_target must be above 0, and kl_horizon above a fifth of batch_size")
    if args.ratio_threshold is not None and args.ratio_threshold <= 1:
        console.fail(
            f"--ratio_threshold {args.ratio_threshold}: must be above 1, the ratio of a policy that has not changed"
        )
    if args.truncate_after and (args.truncate_token == "none" or args.truncate_after >= args.response_length):
        console.fail(
            f"--truncate_after {args.truncate_after}: needs a truncate_token, and must be below response_length"
        )


def main(args: Args):
    """Trains; returns {"before": .., "after": held-out metrics, "metrics": the last row, "run": folder}."""
    check(args)
    accelerator = engines.start(args)  # one process, DDP, FSDP2 or DeepSpeed; it trains missing toy stages, then seeds
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    B, R = args.batch_size, args.response_length
    size = args.micro_batch_size
    episodes = torch.arange(B, device=device)  # [B], the number of each episode in its update
    mine = slice(rank * B // world, (rank + 1) * B // world)  # those of this process

    # ---- models, prompts, rewards, optimiser
    tokenizer, policy, reference, reward_model = load_models(args, engines.loading_device(accelerator))
    stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token", device)  # [S]
    end_ids = stop_tokens.stop_ids(tokenizer, args.truncate_token, "--truncate_token", device)
    end_ids = end_ids if len(end_ids) else stop_ids  # [S], the tokens that a complete response may end with
    prompts, held_out = data.load_prompts(args, tokenizer, room=models.context(policy, reward_model) - R)
    # score(rows, batch, model_scores) joins the reward model's scores with those of functions of text, such as
    # f(prompts=["2 + 3 ="], completions=[" 5"], answer=["5"]) -> [1.0]. It gives each response F rewards, NaN where one
    # does not apply or abstains. A reward model with a chat template of its own reads text, in `score`.
    score = rewards.Scorer(args, accelerator, tokenizer, size, end_ids)
    reward_model = score.take_text_model(reward_model, prompts, held_out)
    # The optimiser holds the value model's weights as well. [PPO-4]
    optimizer = utils.adamw(policy, args.learning_rate, args.adam_eps, args.weight_decay)
    # The reference and the reward model are put under the engine in place.
    frozen = reference, reward_model or score.text_model
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer, *frozen)
    num_updates = math.ceil(args.total_episodes / B)  # Round up, so that at least total_episodes are sampled. [OPT-10]
    # What is in the list belongs to what a run is, as its arguments do: --resume compares it.
    run = Run(args, accelerator, tokenizer, num_updates, prompts, [held_out, *frozen])

    def prompts_of(update):
        """The B prompts of an update. --overlap reads them ahead."""
        return prompts.of_update(update, B, args.seed)

    # sample(policy, queries, query_mask, episodes, n, key) is utils.sample with its other arguments filled in, or what
    # --sampler vllm has in its place. Under --overlap a thread samples training batches an update ahead, and evaluation
    # has the newest weights.
    sample = samplers.choose(args, run, [*prompts, *held_out], prompts_of, stop_ids)
    state = run.resume(policy, optimizer, {"kl_coef": args.kl_coef, "adam_step": 0, "moments": (0, 0.0, 0.0)})
    if run.first_update == 1:
        run.log(0, *evaluate(policy, sample, reference, reward_model, score, held_out, end_ids, args, accelerator))

    for update in range(run.first_update, num_updates + 1):
        # The learning rate changes from update to update, and all steps of an update have the same. [OPT-2]
        lr = utils.learning_rate_at(update, num_updates, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Rollout: a response to each prompt; every process samples its share ----------------------------------
        rows = prompts_of(update)  # B rows of the data set
        queries, query_mask = utils.left_pad([row.ids for row in rows], device)  # [B, Q]
        policy.eval()
        with torch.no_grad(), accelerator.autocast():
            key = args.seed, TRAINING, update
            responses, response_mask, sampled_logprobs = sample(
                policy, queries[mine], query_mask[mine], episodes[mine], 1, key
            )  # [B / world, R]
            run.lap("rollout")

            # ---- 2. Scores: the rewards, and the log-probs and values that the advantages start from -----------------
            batch = Batch(queries[mine], query_mask[mine], responses, response_mask)
            ref_logprobs, _ = in_slices(response_logprobs, reference, batch, size)
            # Without --overlap the ratio compares two forwards of the same code, so that it starts at 1 up to rounding.
            # [GEN-9]
            old_logprobs, _, values = in_slices(response_logprobs, policy, batch, size)
            if args.kl_penalty == "full":
                (kl_penalties,) = in_slices(full_kl, policy, batch, size, reference)
            else:
                kl_penalties = kl_penalty(old_logprobs, ref_logprobs, args.kl_penalty)
            # The reward model reads what a human would read. [GEN-14]
            read_mask, _ = truncate_response(responses, response_mask, end_ids, args.truncate_after)
            batch = batch._replace(response_mask=read_mask)
            model_scores = in_slices(response_scores, reward_model, batch, size) if reward_model else []
            rewards_of_each, scored = score(rows[mine], batch, *model_scores)  # [B / world, F], [B / world]
        # Advantages, minibatches and metrics need the whole batch, so gather it once. Until phase 5 takes its
        # shares, every tensor holds the whole batch, on every process. [REW-7]
        responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs = accelerator.gather(
            (responses, response_mask, sampled_logprobs, old_logprobs, ref_logprobs)
        )
        kl_penalties, values, rewards_of_each, scored = accelerator.gather(
            (kl_penalties, values, rewards_of_each, scored)
        )
        batch = Batch(queries, query_mask, responses, response_mask)
        run.lap("scores")

        # ---- 3. Rewards: one for each token --------------------------------------------------------------------------
        #   response        a    b   EOS   .    .      nothing is sampled after the stop token
        #   response_mask   1    1    1    0    0      actions: they have log-probs, KL, advantages and a policy loss
        #   state_mask      1    1    1    1    0      states, each before its token, and one after the end: they have
        #                                              rewards, values and a value loss
        #   rewards        -cK  -cK  -cK score  0      c: kl_coef, K: the token's KL penalty
        #   R tokens        v    w    x    y    z      both masks are 1 everywhere, and the value after z counts as 0
        #   rewards        -cK  -cK  -cK  -cK  -cK + score      where, if unfinished, it paid missing_eos_penalty
        read_mask, ended = truncate_response(responses, response_mask, end_ids, args.truncate_after)  # [B, R], [B]
        # A score is the weighted sum of the rewards. NaN: a reward does not apply to this kind of prompt. [REW-4]
        scores = (rewards_of_each * score.weights).nansum(1)  # [B]
        scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)  # [B]
        if args.score_scaling or args.score_norm:
            state["moments"] = merge_moments(state["moments"], scores[scored])
        shaped_scores = shape_scores(scores, state["moments"], args.score_scaling, args.score_norm, args.score_clip)
        # The ratio is against the policy that sampled, which --overlap makes one update old, and so are the logged KL
        # and entropy. The tokens pay for the KL of the policy as it is now. [GEN-11]
        old_logprobs = sample.behaviour_logprobs(old_logprobs, sampled_logprobs)  # [B, R]
        logged_kl = (old_logprobs - ref_logprobs).sum(1)  # [B], the estimate "k1", whatever --kl_penalty is
        # A response from which a reward abstained counts nowhere, neither in a loss nor in a mean.
        action_mask = response_mask & scored.unsqueeze(1)  # [B, R]
        state_mask = value_mask(response_mask) & scored.unsqueeze(1)  # [B, R]
        rewards_of_tokens = token_rewards(shaped_scores, kl_penalties, response_mask, state["kl_coef"])  # [B, R]
        if args.whiten_rewards:
            # The mean stays. Subtracting it would put a price on length. [PPO-8]
            rewards_of_tokens = utils.masked_whiten(rewards_of_tokens, state_mask, shift_mean=False)

        # ---- 4. Advantages -------------------------------------------------------------------------------------------
        advantages, returns = compute_gae(rewards_of_tokens, values, args.gamma, args.lam)  # [B, R]
        if args.normalize_advantage:
            advantages = utils.masked_whiten(advantages, action_mask)  # over all response tokens [PPO-10]
        # Another engine's policy is not quite this one. Weights make up for it. With --overlap they are all 1, because
        # the ratio is against the policy that sampled. [GEN-15]
        advantages, weight_metrics = sample.weigh(advantages, old_logprobs, sampled_logprobs, action_mask)

        # ---- 5. Optimise: micro-batches add up to exactly one gradient for each minibatch ----------------------------
        policy.train()  # Every dropout is 0. Training mode only lets gradient checkpointing work.
        means = utils.Means(device)  # over all steps of the update, and so over policies that move
        num_skipped = 0
        lengths = query_mask.sum(1) + response_mask.sum(1)  # [B]
        is_watched = args.target_kl is not None or args.ratio_threshold is not None
        for epoch in range(args.num_ppo_epochs):
            # Every pass has an order of its own. [OPT-9]
            minibatches = shuffled_episodes(B, args.num_mini_batches, device, args.seed, update, epoch)
            epoch_kl = 0.0
            for number, minibatch in enumerate(minibatches):
                of_minibatch = utils.Means(device)
                # Both counts are those of the whole minibatch, over all processes.
                num_actions, num_states = action_mask[minibatch].sum(), state_mask[minibatch].sum()
                share = minibatch.chunk(world)[rank]
                # Rows of similar lengths share a micro-batch, since it is as wide as its longest query and response.
                micro_batches = share[lengths[share].argsort(stable=True)].split(size)
                for i, (m, micro_batch) in enumerate(utils.split(batch, micro_batches)):  # m: its episodes
                    with engines.accumulate(accelerator, policy, is_last=i + 1 == len(micro_batches)):
                        logprobs, entropies, new_values = response_logprobs(policy, micro_batch)  # [M, R]
                        losses, logratio, clipped = ppo_policy_loss(
                            logprobs, old_logprobs[m], action_mask[m], advantages[m], args.cliprange
                        )
                        value_losses, errors, value_clipped = ppo_value_loss(
                            new_values, values[m], returns[m], state_mask[m], args.cliprange_value
                        )
                        # The whole minibatch's count makes micro-batches add up to its gradient. [OPT-5]
                        loss = losses.sum() / num_actions.clamp(min=1)
                        # The value loss is an average over states. There is no entropy bonus. [PPO-14]
                        loss = loss + args.vf_coef * value_losses.sum() / num_states.clamp(min=1)
                        accelerator.backward(loss * world)  # The engines average over processes, but we sum. [OPT-6]
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
                    if is_watched:
                        of_minibatch.add({"kl": 0.5 * logratio**2}, action_mask[m])
                        of_minibatch.add_ratios(logratio, action_mask[m])
                    means.add_ratios(logratio, action_mask[m])
                    if epoch == number == 0:  # before the first step: rounding, another engine, or --overlap [LOG-6]
                        means.add_max("val/logprob_gap", (logprobs - sampled_logprobs[m]).abs())
                        means.add_max("val/first_ratio", logratio.abs().clamp(max=20).exp())
                distance = of_minibatch.reduce(accelerator) if is_watched else {}
                epoch_kl += distance.get("kl", 0.0) / args.num_mini_batches  # a mean of minibatch means
                # Far from the sampling policy the clipped objective is unreliable. [PPO-17]
                is_far = args.ratio_threshold is not None and distance["val/ratio"] > args.ratio_threshold
                if is_far or not num_actions:  # Skip the step. Without an action it would be Adam's momentum alone.
                    engines.forget_gradient(accelerator, policy, optimizer)
                    num_skipped += is_far
                    continue
                state["adam_step"] += 1
                if args.tf_adam:
                    # TensorFlow's Adam adds eps before it corrects the second moment's bias, which makes early steps
                    # smaller: at the first one this is 32 times eps. [OPT-3]
                    optimizer.param_groups[0]["eps"] = args.adam_eps / math.sqrt(1 - 0.999 ** state["adam_step"])
                # One norm for both models: a large gradient of the values makes the policy's step smaller too.
                norm = engines.clip_and_step(accelerator, policy, optimizer, args.max_grad_norm, run, number)
                means.add({"policy/grad_norm": norm})
            # Stop: the policy has moved too far from the one that sampled. [PPO-18]
            if args.target_kl is not None and epoch_kl > 1.5 * args.target_kl:
                break
        run.lap("optimise")

        # ---- 6. Log --------------------------------------------------------------------------------------------------
        metrics = means.reduce(accelerator) | score.by_name(rewards_of_each, "objective/")
        mean_kl = utils.masked_mean(logged_kl, scored)
        # It is added, before whitening. [LOG-5]
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
            "val/abstained": 1 - scored.float().mean(),
            "objective/loss": total_loss,
            "loss/total_avg": total_loss,
            "policy/skipped_minibatches": num_skipped,
            "returns/mean": returns_mean,
            "returns/var": returns_var,
            "val/mean": value_mean,
            "val/var": value_var,
            "val/var_explained": 1 - metrics["val/error"] / (returns_var + 1e-8),
            "val/equal_scores": (scores[scored].amax() <= scores[scored].amin()).float(),
            "val/num_eos_tokens": (response_mask & (responses == tokenizer.eos_token_id)).sum(),
            "val/num_stop_token_ids": ended.sum() if len(end_ids) else 0,
            "val/sequence_lengths": response_mask.sum(1).float().mean(),
        }
        shown = rows, responses, read_mask, ended, scores.masked_fill(~scored, math.nan), logged_kl
        if run.is_eval_due(update):
            eval_metrics, eval_shown = evaluate(
                policy, sample, reference, reward_model, score, held_out, end_ids, args, accelerator
            )
            metrics |= eval_metrics
            shown = eval_shown or shown
        run.log(update, metrics, shown)
        if args.adaptive_kl:
            # Change the coefficient last: this batch's rewards and metrics used the old one. [PPO-16]
            state["kl_coef"] = adapt_kl_coef(state["kl_coef"], mean_kl.item(), args.kl_target, args.kl_horizon, B)
        run.checkpoint_if_due(update, policy, optimizer, state)
    return run.finish(policy)  # the model folder with its card, before -> after, and the upload


if __name__ == "__main__":
    cli.main(main, Args)
