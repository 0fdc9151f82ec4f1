"""TRL 0.11.4: core, PPOTrainer's methods, trainer.utils, DPO, GKD, RewardTrainer. RLOO and PPOv2 are one loop each."""

from types import SimpleNamespace

import torch
import transformers.models.auto.modeling_auto as auto
from adapters.transformers_schedule import learning_rates  # noqa: F401
from check import Replaced

PACKAGE = "trl"
auto.MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES = {}  # transformers 5 has no such name
with Replaced("liger_kernel", "llm_blender", "mergekit") as REPLACED:
    from trl import core
    from trl.trainer import utils
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.gkd_trainer import GKDTrainer
    from trl.trainer.ppo_trainer import PPOTrainer
    from trl.trainer.reward_trainer import RewardTrainer
REPLACED = [*REPLACED, "transformers' MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES", "the trainer's self: attributes alone"]


class Self(SimpleNamespace):
    def _kl_penalty(self, *given):
        return PPOTrainer._kl_penalty(self, *given)


def self_of(**config):
    named = dict(cliprange=0.2, cliprange_value=0.2, vf_coef=1.0, ratio_threshold=1e9, whiten_rewards=False)
    return Self(config=SimpleNamespace(**named | config), kl_ctl=SimpleNamespace(value=config.get("kl_coef")))


def inside(*given, **inputs):
    raise NotImplementedError("inside the loop of RLOOTrainer.train")


rloo_advantages = rloo_kl_advantages = rloo_policy_loss = inside


def missing_eos_scores(mode, **inputs):
    raise NotImplementedError("inside the loop of RLOOTrainer.train" if mode == "subtract" else "")


def gae(rewards, values, mask, gamma, lam):
    values, _, returns = PPOTrainer.compute_advantages(self_of(gamma=gamma, lam=lam), values, rewards, mask.float())
    return {"advantages": (returns - values) * mask, "returns": returns * mask}


def kl_estimates(logprobs, ref_logprobs, kind):
    names = {"k1": "kl", "abs": "abs", "k2": "mse"}
    if kind not in names:
        raise NotImplementedError("kl, abs, mse and full alone")
    return {"kl": PPOTrainer._kl_penalty(self_of(kl_penalty=names[kind]), logprobs, ref_logprobs)}


def full_kl(logits, ref_logits, mask):
    logs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return {"kl": PPOTrainer._kl_penalty(self_of(kl_penalty="full"), *logs) * mask}


def token_rewards(scores, kl, mask, kl_coef, place):
    self = self_of(kl_penalty="kl", kl_coef=kl_coef)
    return {"rewards": PPOTrainer.compute_rewards(self, scores, kl, torch.zeros(kl.shape), mask.long())[0]}


def adapt_kl_coef(kl_coef, kl, target, horizon, num_episodes):
    controller = utils.AdaptiveKLController(kl_coef, target, horizon)
    controller.update(kl, num_episodes)
    return {"kl_coef": controller.value}


def losses(mask, logprobs, old_logprobs=None, advantages=None, values=None, old_values=None, returns=None, **config):
    zeros = torch.zeros(mask.shape)
    old_logprobs, advantages, values, old_values, returns = (
        zeros if x is None else x for x in (old_logprobs, advantages, values, old_values, returns)
    )
    logits = torch.zeros(*mask.shape, 2)
    given = old_logprobs, old_values, logits, values, logprobs, mask.float(), advantages, returns
    return PPOTrainer.loss(self_of(**config), *given)


def ppo_policy_loss(micro_batches, logprobs, cliprange, **inputs):
    parts = torch.arange(len(logprobs)).split(micro_batches)
    found = [losses(logprobs=logprobs[m], cliprange=cliprange, **{x: inputs[x][m] for x in inputs})[0] for m in parts]
    return {"loss": sum(found) / len(found)}  # accumulation divides by their number


def ppo_value_loss(mask, **inputs):
    return {"loss": losses(mask, torch.zeros(mask.shape), **inputs)[1]}


def dpo(logprobs, ref_logprobs, loss_type, beta, label_smoothing=0.0):
    if logprobs.size(1) != 2:
        raise NotImplementedError("pairs alone")
    self = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=beta, label_smoothing=label_smoothing)
    self.loss_type, self.f_divergence_type, self.reference_free = loss_type, "reverse_kl", False
    return {"loss": DPOTrainer.dpo_loss(self, *logprobs.unbind(1), *ref_logprobs.unbind(1))[0].mean()}


def dpo_loss(best, **inputs):
    return dpo(loss_type="sigmoid", **inputs)


def ipo_loss(lengths, best, **inputs):
    return dpo(loss_type="ipo", **inputs)


def best_of_k_loss(scores, best):
    if scores.size(1) != 2:
        raise NotImplementedError("pairs alone")
    self = SimpleNamespace(use_reward_data_collator=True, args=SimpleNamespace(center_rewards_coefficient=None))
    inputs = {f"{name}_{side}": side for name in ("input_ids", "attention_mask") for side in ("chosen", "rejected")}
    logits = dict(zip(("chosen", "rejected"), scores.unbind(1)))
    return {"loss": RewardTrainer.compute_loss(self, lambda input_ids, **given: {"logits": logits[input_ids]}, inputs)}


def generalized_jsd(logits, teacher_logits, beta):
    labels = torch.zeros(1, len(logits)).long()
    return {"loss": GKDTrainer.generalized_jsd_loss(logits[None], teacher_logits[None], labels, float(beta))}


def truncate_response(responses, mask, end_ids, after):
    if after or len(end_ids) != 1:
        raise NotImplementedError("one token, from the first place on")
    read = utils.truncate_response(end_ids[0], -1, responses.where(mask, -1)) != -1
    return {"mask": read}


def running_scores(batches, scaling, norm, clip):
    moments = utils.RunningMoments(SimpleNamespace(use_distributed=False))
    for batch in batches:
        moments.update(torch.as_tensor(batch))
    return {"mean": moments.mean, "std": moments.std}


def masked_whiten(x, mask, shift_mean):
    return {"whitened": core.masked_whiten(x, mask.float(), shift_mean) * mask}


def masked_mean(x, mask):
    return {"mean": core.masked_mean(x, mask.float())}


def mean_and_variance(x, mask):
    found = core.masked_mean(x, mask.float()), core.masked_var(x, mask.float(), unbiased=False)
    return dict(zip(("mean", "variance"), found))


def entropies(logits, temperature):
    return {"entropies": core.entropy_from_logits(logits / temperature)}


def token_logprobs(logits, labels, temperature):
    return {"logprobs": core.logprobs_from_logits((logits / temperature)[None], labels[None])[0]}
