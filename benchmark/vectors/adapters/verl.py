"""verl 0.9.1: core_algos and torch_functional. Rewards stand on the last token, as its reward managers place them."""

import importlib
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import torch
from check import Replaced

PACKAGE = "verl"
OPTIONAL = (  # not in its early versions
    "verl.trainer.ppo.rollout_corr_helper",
    "verl.workers.config",
    "verl.workers.reward_manager.dapo",
)
with Replaced(*"ray pkg_resources tensordict omegaconf codetiming aiohttp orjson hydra torchdata".split()) as REPLACED:
    import verl.trainer.ppo.core_algos as core
    import verl.utils.torch_functional as functional
    from verl import workers
    from verl.trainer import ppo

    for name in OPTIONAL:
        with suppress(ImportError):
            importlib.import_module(name)


class Rows(list):
    """A DataProto of few rows."""


def prompts(scores, k):
    return np.arange(len(scores)) // k


def on_last(scores, mask):
    last = (mask * torch.arange(mask.size(1))).argmax(1, keepdim=True)
    return torch.zeros(mask.shape).scatter(1, last, scores.unsqueeze(1))


def outcome(function, scores, index, **named):
    if scores.isnan().any():
        raise NotImplementedError("no abstentions")
    return {"advantages": function(scores[:, None], torch.ones(len(scores), 1), index=index, **named)[0][:, 0]}


def rloo_advantages(scores, k):
    return outcome(core.compute_rloo_outcome_advantage, scores, prompts(scores, k))


def grpo_advantages(scores, k, scale, eps):
    if scale == "batch":
        raise NotImplementedError("no deviation of the batch")
    named = dict(epsilon=eps, norm_adv_by_std_in_grpo=scale == "group")
    return outcome(core.compute_grpo_outcome_advantage, scores, prompts(scores, k), **named)


def trajectory_advantages(scores, groups, trajectories):
    return outcome(core.compute_rloo_outcome_advantage, scores, groups.numpy())


def reinforce(scores, kl, mask, k, kl_coef):
    if k > 1:
        raise NotImplementedError("no baseline before the returns")
    rewards = on_last(scores, mask) - kl_coef * kl * mask
    return core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask.float(), SimpleNamespace(gamma=1.0))


def reinforce_returns(**inputs):
    return {"returns": reinforce(**inputs)[1]}


def reinforce_advantages(**inputs):
    return {"advantages": reinforce(**inputs)[0]}


def reinforce_baseline(scores, mask, k):
    function = core.compute_reinforce_plus_plus_baseline_outcome_advantage
    return {"advantages": function(on_last(scores, mask), mask.float(), prompts(scores, k))[0]}


def gae(rewards, values, mask, gamma, lam):
    _, returns = core.compute_gae_advantage_return(rewards, values, mask.float(), gamma, lam)
    return {"advantages": (returns - values) * mask, "returns": returns * mask}


def kl_estimates(logprobs, ref_logprobs, kind):
    return {"kl": core.kl_penalty(logprobs, ref_logprobs, kind)}


def kl_loss(logprobs, old_logprobs, ref_logprobs, mask, times_ratio):
    if times_ratio:
        raise NotImplementedError("k3+ has the gradient of k2")
    return {"loss": core.agg_loss(core.kl_penalty(logprobs, ref_logprobs, "low_var_kl"), mask.float(), "token-mean")}


def adapt_kl_coef(kl_coef, kl, target, horizon, num_episodes):
    controller = core.AdaptiveKLController(kl_coef, target, horizon)
    controller.update(kl, num_episodes)
    return {"kl_coef": controller.value}


def loss(name, mode, logprobs, old_logprobs, mask, advantages, low, high, micro_batches=None):
    advantages, total = advantages if advantages.dim() == 2 else advantages[:, None].expand(mask.shape), 0.0
    for m in torch.arange(len(mask)).split(micro_batches or [len(mask)]):
        config = workers.config.ActorConfig(
            strategy="fsdp", rollout_n=1, clip_ratio_low=low, clip_ratio_high=high, use_dynamic_bsz=True
        )
        config.global_batch_info.update(dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=len(mask))
        given = old_logprobs[m], logprobs[m], advantages[m], mask[m].float(), mode, config
        total = total + core.get_policy_loss_fn(name)(*given)[0]
    return {"loss": total}


def grpo_policy_loss(cliprange, cliprange_high, normalization, **inputs):
    modes = dict(token="token-mean", response="seq-mean-token-mean", constant="seq-mean-token-sum-norm")
    return loss("vanilla", modes[normalization], low=cliprange, high=cliprange_high, **inputs)


def ppo_policy_loss(cliprange, **inputs):
    return loss("vanilla", "token-mean", low=cliprange, high=cliprange, **inputs)


def gspo_policy_loss(cliprange, cliprange_high, **inputs):
    return loss("gspo", "seq-mean-token-mean", low=cliprange, high=cliprange_high, **inputs)


def cispo_policy_loss(cliprange_high, **inputs):
    return loss("cispo", "token-mean", low=1.0, high=cliprange_high, **inputs)


def ppo_value_loss(values, old_values, returns, mask, cliprange_value):
    return {"loss": core.compute_value_loss(values, returns, old_values, mask.float(), cliprange_value)[0]}


def truncate_response(responses, mask, end_ids, after):
    if after or not len(end_ids) or not mask.all():
        raise NotImplementedError("of whole rows, from the first token on")
    return {"mask": functional.get_response_mask(responses, end_ids.tolist())}


def overlong_scores(scores, lengths, max_length, buffer):
    config = SimpleNamespace(enable=True, len=buffer, penalty_factor=1.0, log=False)
    tokenizer, found = SimpleNamespace(decode=lambda *ids, **named: "", eos_token="</s>"), []
    for score, n in zip(scores.tolist(), lengths.tolist()):
        manager = workers.reward_manager.dapo.DAPORewardManager(
            tokenizer, 0, lambda s=score, **named: s, "source", max_length, config
        )
        batch = dict(prompts=torch.ones(1).long(), responses=torch.ones(max_length).long())
        batch["attention_mask"] = (torch.arange(max_length + 1) <= n).long()
        texts = {"reward_model": {"ground_truth": ""}, "source": "", "extra_info": {}}
        item = SimpleNamespace(batch=batch, non_tensor_batch=texts)
        manager._extract_reward_from_rm_scores = lambda *given: None

        data = Rows([item])
        data.batch = {"responses": torch.ones(1, max_length)}
        found.append(manager(data).sum())
    return {"scores": torch.stack(found)}


def masked_whiten(x, mask, shift_mean):
    return {"whitened": functional.masked_whiten(x, mask.float(), shift_mean) * mask}


def masked_mean(x, mask):
    return {"mean": functional.masked_mean(x, mask.float())}


def sampler_weights(logratio, mask, correction, cap, action):
    threshold = cap if correction == "truncate" else f"{1 / cap}_{cap}"
    level = "sequence" if action == "response" else action
    weights, _ = ppo.rollout_corr_helper.compute_rollout_correction_weights(logratio, mask.float(), level, threshold)
    return {"weights": weights[:, 0] if action == "response" else weights}


def learning_rates(num_steps, learning_rate, schedule, warmup_steps):
    if schedule == "linear":
        raise NotImplementedError("cosine and constant alone")
    optimizer, rates = torch.optim.SGD([torch.zeros(1)], lr=learning_rate), []
    given = (optimizer, warmup_steps, num_steps)[: 2 + (schedule == "cosine")]
    scheduler = getattr(functional, f"get_{schedule}_schedule_with_warmup")(*given)
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return {"rates": rates}


def entropies(logits, temperature):
    return {"entropies": functional.entropy_from_logits(logits / temperature)}


def token_logprobs(logits, labels, temperature):
    return {"logprobs": functional.logprobs_from_logits(logits / temperature, labels)}
