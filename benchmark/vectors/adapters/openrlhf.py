"""OpenRLHF 0.11.2: models.loss and models.utils, the experience maker's advantages, KL controller, length penalties."""

import os
from types import SimpleNamespace

import torch
from adapters.transformers_schedule import learning_rates  # noqa: F401
from check import Replaced

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compute_entropy is compiled
PACKAGE = "openrlhf"
with Replaced(
    *"ray vllm deepspeed flash_attn bitsandbytes aiohttp pylatexenc torchdata peft optree".split()
) as REPLACED:
    from openrlhf.models import loss as losses
    from openrlhf.models import utils
    from openrlhf.trainer.ppo_utils import experience_maker, kl_controller, length_penalty

experience_maker.logger = length_penalty.logger = SimpleNamespace(info=print, warning=print)


def experience(scores, mask, kl=None, k=1, kl_coef=0.0, estimator="reinforce", **advantage):
    if scores.isnan().any():
        raise NotImplementedError("no abstentions")
    named = dict(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False) | advantage
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(**named)),
        rollout=SimpleNamespace(n_samples_per_prompt=k),
        reward=SimpleNamespace(clip_range=None),
    )
    row = SimpleNamespace(rewards=scores, action_mask=mask, index=list(range(len(scores))), info={}, values=None)
    row.kl = torch.zeros(mask.shape) if kl is None else kl * mask
    self = object.__new__(experience_maker.RemoteExperienceMaker)
    self.strategy, self.args, self.advantage_estimator = SimpleNamespace(args=args), args, estimator
    self.kl_ctl = SimpleNamespace(value=kl_coef)
    return self.compute_advantages_and_returns([row])[0]


def of_responses(scores, k, estimator):
    return {
        "advantages": experience(scores, torch.ones(len(scores), 1).long(), k=k, estimator=estimator).advantages[:, 0]
    }


def rloo_advantages(scores, k):
    return of_responses(scores, k, "rloo")


def grpo_advantages(scores, k, scale, eps):
    if scale == "batch":
        raise NotImplementedError("no deviation of the batch")
    return of_responses(scores, k, {"group": "group_norm", "none": "dr_grpo"}[scale])


def reinforce_returns(mask, k, **inputs):
    estimator = "rloo" if k > 1 else "reinforce"
    return {"returns": experience(mask=mask.long(), k=k, estimator=estimator, **inputs).returns * mask}


def reinforce_advantages(mask, k, **inputs):
    if k > 1:
        raise NotImplementedError("with a leave-one-out baseline nothing is whitened")
    return {"advantages": experience(mask=mask.long(), **inputs).advantages * mask}


def reinforce_baseline(scores, mask, k):
    return {"advantages": experience(scores, mask.long(), k=k, estimator="reinforce_baseline").advantages * mask}


def gae(rewards, values, mask, gamma, lam):
    function = experience_maker.RemoteExperienceMaker.get_advantages_and_returns
    advantages, returns = function(None, values, rewards, mask.float(), gamma, lam)
    return {"advantages": advantages * mask, "returns": returns * mask}


def kl_estimates(logprobs, ref_logprobs, kind):
    if kind == "abs":
        raise NotImplementedError("k1, k2 and k3 alone")
    return {"kl": utils.compute_approx_kl(logprobs, ref_logprobs, kl_estimator=kind)}


def kl_loss(logprobs, old_logprobs, ref_logprobs, mask, times_ratio):
    if times_ratio:
        raise NotImplementedError("the ratio weighs the gradient of k2")
    kl = utils.compute_approx_kl(logprobs, ref_logprobs, kl_estimator="k3")
    return {"loss": losses.aggregate_loss(kl, mask, batch_num_tokens=mask.sum())}


def token_rewards(scores, kl, mask, kl_coef, place):
    return {"rewards": utils.compute_reward(scores, kl_coef, kl, mask)}


def adapt_kl_coef(kl_coef, kl, target, horizon, num_episodes):
    controller = kl_controller.AdaptiveKLController(kl_coef, target, horizon)
    controller.update(kl, num_episodes)
    return {"kl_coef": controller.value}


def policy_loss(logprobs, old_logprobs, mask, advantages, micro_batches=None, **options):
    advantages, total = advantages if advantages.dim() == 2 else advantages[:, None].expand(mask.shape), 0.0
    for m in torch.arange(len(mask)).split(micro_batches or [len(mask)]):
        counts = dict(batch_num_tokens=mask.sum(), global_batch_size=len(mask))
        given = logprobs[m], old_logprobs[m], advantages[m], mask[m]
        total = total + losses.PolicyLoss(**options)(*given, **counts)[0]
    return {"loss": total}


def grpo_policy_loss(cliprange, cliprange_high, normalization, **inputs):
    if normalization == "constant":
        raise NotImplementedError("means over tokens, or of responses")
    options = dict(clip_eps_low=cliprange, clip_eps_high=cliprange_high, token_level_loss=normalization == "token")
    return policy_loss(**options, **inputs)


def ppo_policy_loss(cliprange, **inputs):
    return policy_loss(clip_eps_low=cliprange, clip_eps_high=cliprange, **inputs)


def gspo_policy_loss(cliprange, cliprange_high, **inputs):
    return policy_loss(clip_eps_low=cliprange, clip_eps_high=cliprange_high, policy_loss_type="gspo", **inputs)


def ppo_value_loss(values, old_values, returns, mask, cliprange_value):
    return {"loss": losses.ValueLoss(cliprange_value)(values, old_values, returns, mask)}


def best_of_k_loss(scores, best):
    if scores.size(1) != 2:
        raise NotImplementedError("pairs alone")
    return {"loss": losses.PairWiseLoss()(*scores.unbind(1))}


def dpo_loss(logprobs, ref_logprobs, best, beta, label_smoothing=0.0, ipo=False):
    if logprobs.size(1) != 2:
        raise NotImplementedError("pairs alone")
    return {"loss": losses.DPOLoss(beta, label_smoothing, ipo)(*logprobs.unbind(1), *ref_logprobs.unbind(1))[0]}


def ipo_loss(lengths, **inputs):
    return dpo_loss(ipo=True, **inputs)


def missing_eos_scores(scores, ended, penalty, mode):
    if mode == "subtract":
        raise NotImplementedError("the score is replaced, or multiplied")
    row = SimpleNamespace(rewards=scores, truncated=~ended)
    length_penalty.apply_stop_properly_penalty([row], -penalty)
    return {"scores": row.rewards}


def overlong_scores(scores, lengths, max_length, buffer):
    row = SimpleNamespace(rewards=scores, response_length=lengths)
    length_penalty.apply_overlong_penalty([row], max_length, buffer)
    return {"scores": row.rewards}


def shape_scores(scores, normalize, clip_range):
    if normalize:
        raise NotImplementedError("scores are clipped alone")
    ones = torch.ones(len(scores), 1).long()
    clip_range = -clip_range, clip_range
    return {"scores": utils.compute_reward(scores, 0.0, torch.zeros(len(scores), 1), ones, clip_range)[:, 0]}


def masked_whiten(x, mask, shift_mean):
    if not shift_mean:
        raise NotImplementedError("the mean is always taken off")
    return {"whitened": utils.masked_normalize(x.reshape(1, -1), mask.reshape(1, -1)).reshape(x.shape)}


def masked_mean(x, mask):
    return {"mean": utils.masked_mean(x, mask)}


def sampler_weights(logratio, mask, correction, cap, action):
    """The weight of each token: the loss is the weight where the ratio is 1 and the advantage is -1."""
    if action == "response":
        raise NotImplementedError("of a response the gate is the geometric mean")
    mode = {"truncate": "clip", "mask": "mask"}[correction]
    options = dict(is_correction_level="token", is_correction_mode=mode)
    options["is_correction_threshold"] = (0.0 if correction == "truncate" else 1 / cap, cap)
    zeros, weights = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        only = torch.zeros(mask.shape)
        only[i, t] = 1
        weights[i, t] = losses.PolicyLoss(**options)(logratio, logratio, zeros - 1, only, zeros)[0]
    return {"weights": weights}


def entropies(logits, temperature):
    return {"entropies": utils.compute_entropy(logits / temperature)}


def token_logprobs(logits, labels, temperature):
    return {"logprobs": utils.log_probs_from_logits(logits, labels, temperature)}
