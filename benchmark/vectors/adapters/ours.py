"""This repository's own functions. Losses are weighted and summed as the pages do it."""

import math
from types import SimpleNamespace

import torch

from rlhf_details import (
    evaluate,
    train_distill,
    train_dpo,
    train_grpo,
    train_ppo,
    train_reward,
    train_rloo,
    utils,
)
from rlhf_details.plumbing.machine import samplers

PACKAGE, REPLACED = "rlhf_details", []


def known(scores):
    return scores.nan_to_num(), ~scores.isnan()


def rloo_advantages(scores, k):
    scores, scored = known(scores)
    return {"advantages": train_rloo.rloo_advantages(scores, k, scored)}


def grpo_advantages(scores, k, scale, eps):
    scores, scored = known(scores)
    return {"advantages": train_grpo.grpo_advantages(scores, k, scale, scored).squeeze(1)}


def in_equal_group(scores, k):
    scores, scored = known(scores)
    return {"equal": utils.in_equal_group(scores, k, scored)}


def has_sibling(scores, k):
    found = [f(~scores.isnan(), k) for f in (train_rloo.has_baseline, train_grpo.has_group)]
    assert torch.equal(*found)
    return {"counted": found[0]}


def reinforce_returns(scores, kl, mask, k, kl_coef):
    found = train_rloo.token_level_advantages(scores, kl * mask, k, kl_coef, torch.ones_like(scores, dtype=bool))
    return {"returns": found * mask}


def reinforce_advantages(mask, **inputs):
    return {"advantages": utils.masked_whiten(reinforce_returns(mask=mask, **inputs)["returns"], mask)}


def gae(rewards, values, mask, gamma, lam):
    if not torch.equal(mask, mask.cumprod(1).bool()):
        raise NotImplementedError("no page has values between turns")
    names = "advantages", "returns"
    return dict(zip(names, (x * mask for x in train_ppo.compute_gae(rewards * mask, values * mask, gamma, lam))))


def distill_advantages(rewards, gamma):
    return {"advantages": train_distill.distill_advantages(rewards, gamma)}


def kl_estimates(logprobs, ref_logprobs, kind):
    names = {"k1": ["kl"], "k2": ["k2", "mse"]}.get(kind, [kind])
    found = [train_ppo.kl_penalty(logprobs, ref_logprobs, name) for name in names]
    assert torch.equal(found[0], found[-1])
    return {"kl": found[0]}


def full_kl(logits, ref_logits, mask):
    batch = utils.Batch(mask.long(), mask, mask.long(), mask)
    width = mask.any(0).sum()
    found = train_ppo.full_kl(lambda *_: logits[:, :width], batch, lambda *_: ref_logits[:, :width])
    return {"kl": found[0]}


def weights(mask, normalization):
    return train_grpo.loss_weights(mask, torch.tensor(len(mask)), mask.sum(), normalization)


def kl_loss(logprobs, old_logprobs, ref_logprobs, mask, times_ratio):
    losses = train_grpo.kl_estimates(logprobs * mask, ref_logprobs * mask)
    if times_ratio:
        losses = losses * ((logprobs - old_logprobs) * mask).exp()
    return {"loss": (losses * weights(mask, "token")).sum()}


def value_mask(mask):
    return {"mask": train_ppo.value_mask(mask)}


def token_rewards(scores, kl, mask, kl_coef, place):
    if place == "last":
        raise NotImplementedError("the score stands after the last token")
    return {"rewards": train_ppo.token_rewards(scores, kl, mask, kl_coef)}


def rloo_kl_advantages(scores, logprobs, ref_logprobs, mask, k, kl_coef):
    return rloo_advantages(scores - kl_coef * ((logprobs - ref_logprobs) * mask).sum(1), k)


def adapt_kl_coef(**inputs):
    return {"kl_coef": train_ppo.adapt_kl_coef(**inputs)}


def grpo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, cliprange_high, normalization, micro_batches):
    total, num_clipped, num_tokens = 0.0, 0, mask.sum()
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    for m in torch.arange(len(mask)).split(micro_batches):
        losses, _, clipped = train_grpo.grpo_policy_loss(
            logprobs[m], old_logprobs[m], mask[m], advantages[m], cliprange, cliprange_high
        )
        total = (
            total
            + (losses * train_grpo.loss_weights(mask[m], torch.tensor(len(mask)), num_tokens, normalization)).sum()
        )
        num_clipped = num_clipped + clipped.sum()
    return {"loss": total, "clipped": num_clipped / num_tokens}


def ppo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange, micro_batches):
    losses, _, clipped = train_ppo.ppo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange)
    tokens, _, _ = train_rloo.rloo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange)
    assert torch.equal(losses, tokens)  # RLOO where an action is a token
    return {"loss": losses.sum() / mask.sum(), "clipped": clipped.sum() / mask.sum()}


def gspo_policy_loss(logprobs, old_logprobs, mask, advantages, **ranges):
    losses, _, _ = train_grpo.gspo_policy_loss(logprobs, old_logprobs, mask, advantages.unsqueeze(1), **ranges)
    return {"loss": (losses * weights(mask, "response")).sum()}


def cispo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange_high):
    advantages = advantages.unsqueeze(1)
    losses, _, cut = train_grpo.cispo_policy_loss(logprobs, old_logprobs, mask, advantages, 0.2, cliprange_high)
    return {"loss": (losses * weights(mask, "token")).sum(), "clipped": cut.sum() / mask.sum()}


def rloo_policy_loss(**inputs):
    losses, _, cut = train_rloo.rloo_policy_loss(**inputs)
    return {"loss": losses.mean(), "clipped": cut.float().mean()}


def ppo_value_loss(mask, **inputs):
    found = train_ppo.ppo_value_loss(mask=mask, **inputs)
    return dict(zip(("loss", "error", "clipped"), (x.sum() / mask.sum() for x in found)))


def distill_policy_loss(logprobs, advantages):
    return {"loss": train_distill.distill_policy_loss(logprobs, advantages).sum()}


def best_of_k_loss(scores, best):
    return {"loss": train_reward.best_of_k_loss(scores, best).mean()}


def dpo_loss(logprobs, ref_logprobs, best, beta, label_smoothing):
    return {"loss": train_dpo.dpo_loss(beta * (logprobs - ref_logprobs), best, label_smoothing).mean()}


def ipo_loss(logprobs, ref_logprobs, lengths, best, beta):
    return {"loss": train_dpo.ipo_loss(logprobs - ref_logprobs, lengths, best, beta).mean()}


def is_correct(scores, best):
    found = [page.is_correct(scores, best) for page in (train_reward, train_dpo)]
    assert torch.equal(*found)
    return {"correct": found[0]}


def gain_and_bias(scores):
    return dict(zip(("gain", "bias"), train_reward.gain_and_bias(scores)))


def kl_divergence(logits, other_logits):
    return {"kl": train_distill.kl_divergence(logits.log_softmax(-1), other_logits.log_softmax(-1))}


def generalized_jsd(logits, teacher_logits, beta):
    logs = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return {"loss": train_distill.generalized_jsd(*logs, beta).mean()}


def missing_eos_scores(**inputs):
    found = [page.missing_eos_scores(**inputs) for page in (train_rloo, train_grpo, train_ppo)]
    assert all(torch.equal(x, found[0]) for x in found)
    return {"scores": found[0]}


def truncate_response(responses, mask, end_ids, after):
    (read, ended), other = (page.truncate_response(responses, mask, end_ids, after) for page in (train_ppo, evaluate))
    assert torch.equal(read, other[0]) and torch.equal(ended, other[1])
    for page in (train_rloo, train_grpo, train_distill):
        assert after or torch.equal(page.has_stopped(responses, mask, end_ids), ended)
    return {"mask": read, "ended": ended}


def overlong_scores(scores, lengths, max_length, buffer):
    mask = torch.arange(max_length) < lengths.unsqueeze(1)
    return {"scores": train_grpo.overlong_scores(scores, mask, buffer)}


def shape_scores(scores, **options):
    return {"scores": train_rloo.shape_scores(scores, torch.ones_like(scores, dtype=bool), **options)}


def running_scores(batches, scaling, norm, clip):
    moments = (0, 0.0, 0.0)
    for batch in map(torch.as_tensor, batches):
        moments = train_ppo.merge_moments(moments, batch)
    shaped = train_ppo.shape_scores(batch, moments, scaling, norm, clip)
    return {"mean": moments[1], "std": math.sqrt(moments[2] / (moments[0] - 1)), "scores": shaped}


def masked_mean(x, mask):
    return {"mean": utils.masked_mean(x, mask)}


def mean_and_variance(x, mask):
    return dict(zip(("mean", "variance"), train_ppo.mean_and_variance(x, mask)))


def masked_whiten(**inputs):
    return {"whitened": utils.masked_whiten(**inputs)}


def sampler_weights(logratio, mask, correction, cap, action):
    ones = torch.ones(len(mask)) if action == "response" else torch.ones(len(mask), 1)
    found, _ = samplers.correct_for_sampler(ones, logratio, mask, correction, cap)
    return {"weights": found if action == "response" else found * mask}


def learning_rates(num_steps, warmup_steps, **schedule):
    warmup_ratio = warmup_steps / num_steps
    rate = utils.learning_rate_at
    return {"rates": [rate(s, num_steps, warmup_ratio=warmup_ratio, **schedule) for s in range(1, num_steps + 1)]}


def adam_steps(parameter, gradients, learning_rate, eps, weight_decay, tf):
    model = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(parameter)
    optimizer = utils.adamw(model, learning_rate, eps, weight_decay)
    for t, gradient in enumerate(gradients, 1):
        if tf:  # the line of the pages
            optimizer.param_groups[0]["eps"] = eps / math.sqrt(1 - 0.999**t)
        model.weight.grad = gradient.double().reshape(1, 1)
        optimizer.step()
    return {"parameter": model.weight.item()}


def entropies(logits, temperature):
    return {"entropies": utils.token_logprobs(lambda x: x / temperature, logits, torch.zeros(len(logits)).long(), 2)[1]}


def token_logprobs(logits, labels, temperature):
    return {"logprobs": utils.token_logprobs(lambda x: x / temperature, logits, labels, 2)[0]}


def positions_from_mask(mask):
    return {"positions": utils.positions_from_mask(mask)}


def ratio_moments(logratio, mask):
    means = utils.Means(torch.device("cpu"))
    means.add_ratios(logratio, mask)
    found = means.reduce(SimpleNamespace(reduce=lambda x, how: x))
    return {"mean": found["val/ratio"], "variance": found["val/ratio_var"]}


def is_sampled(share, updates):
    return {"sampled": [train_distill.is_sampled(update, share) for update in range(1, updates + 1)]}


def pass_at_k(n, right, k):
    return {"rate": evaluate.pass_at_k(n, right, k)}


def distinct_n(responses, n):
    return {"distinct": evaluate.distinct_n(responses, n)}


def win_rate(scores, opponent_scores):
    verdicts = [evaluate.verdict_by_score(*pair) for pair in zip(scores.tolist(), opponent_scores.tolist())]
    return {"rate": evaluate.win_rate(verdicts)["value"]}
