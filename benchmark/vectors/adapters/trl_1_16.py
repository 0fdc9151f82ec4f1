"""TRL 1.16: the trainers' methods, called on an object that has the attributes which they read and no model."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from adapters.transformers_schedule import learning_rates  # noqa: F401
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import utils
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

PACKAGE, REPLACED = "trl", ["the trainer's self: attributes alone, no model and no data"]


class Anything(SimpleNamespace):
    def __getattr__(self, name):
        return None


def trainer(k=2, **fields):
    same = dict.fromkeys(("gather", "gather_for_metrics"), lambda x: x)
    accelerator = Anything(reduce=lambda x, reduction: x, process_index=0, num_processes=1, device="cpu", **same)
    args = Anything(steps_per_generation=1, gradient_accumulation_steps=1, **fields)
    fields = (
        dict(importance_sampling_level="token", multi_objective_aggregation="sum_then_normalize", beta=0.0) | fields
    )
    lists = dict(_metrics=defaultdict(lambda: defaultdict(list)), _logs=defaultdict(list))
    lists["_logs"]["rewards"] = defaultdict(list)
    constants = dict(num_iterations=1, top_entropy_quantile=1.0, _total_train_tokens=0, _tp_size=1)
    constants |= dict(_tokenizer=Anything(pad_token_id=0), reward_func_names=["r"], reward_weights=torch.ones(1))
    constants |= dict(_pending_extra_logs={}, _pending_metrics={}, ref_model="reference", num_generations=k)
    return Anything(accelerator=accelerator, args=args, model=Anything(training=True), **constants, **lists, **fields)


def rollout(kind, scores, mask=None, old=None, ref=None, sampled=None, **fields):
    """What the trainer makes of k responses to each prompt and their scores, and its metrics."""
    mask = torch.ones(len(scores), 1).bool() if mask is None else mask
    zeros, lengths = torch.zeros(mask.shape), [int(row.nonzero().max()) + 1 for row in mask]
    old = zeros if old is None else old
    has_holes = not torch.equal(mask, mask.cumprod(1).bool())
    if has_holes and kind is RLOOTrainer:
        raise NotImplementedError("no mask over the model's tokens")
    ids = [[1] * n for n in lengths]
    tool_mask = [row[:n].int().tolist() for row, n in zip(mask, lengths)] if has_holes else None
    sampled = None if sampled is None else [row[:n].tolist() for row, n in zip(sampled, lengths)]
    texts, prompts = [""] * len(scores), [[1]] * len(scores)
    made = (prompts, ids, texts) if kind is RLOOTrainer else (prompts, ids, tool_mask, texts, sampled, {}, None, None)
    self, width = trainer(**fields), max(lengths)
    self._generate = lambda prompts: made
    self._calculate_rewards = lambda *given: scores.unsqueeze(1)
    logprobs = {"reference": ref}
    self._get_per_token_logps_and_entropies = lambda model, *given, **named: (
        logprobs.get(model if isinstance(model, str) else 0, old)[:, :width],
        None,
        None,
    )
    return kind._generate_and_score_completions(self, [{"prompt": ""}] * len(scores)), self._metrics["train"]


def rloo_advantages(scores, k):
    return {"advantages": rollout(RLOOTrainer, scores, k=k)[0]["advantages"]}


def grpo_advantages(scores, k, scale, eps):
    return {"advantages": rollout(GRPOTrainer, scores, k=k, scale_rewards=scale)[0]["advantages"]}


def rloo_kl_advantages(scores, logprobs, ref_logprobs, mask, k, kl_coef):
    return {
        "advantages": rollout(RLOOTrainer, scores, mask, logprobs, ref_logprobs, k=k, beta=kl_coef)[0]["advantages"]
    }


def sampler_weights(logratio, mask, correction, cap, action):
    names = dict(vllm_importance_sampling_correction=True, vllm_importance_sampling_clip_max=cap)
    names["vllm_importance_sampling_mode"] = {"token": "token", "response": "sequence"}[action] + "_" + correction
    names["vllm_importance_sampling_clip_min"] = 1 / cap if correction == "mask" else None
    scores, sampled = torch.zeros(len(mask)), torch.zeros(mask.shape)
    fields = dict(k=len(mask), scale_rewards="none", use_vllm=True, **names)
    weights = rollout(GRPOTrainer, scores, mask, logratio, sampled=sampled, **fields)[0]["importance_sampling_ratio"]
    if action == "response":
        return {"weights": weights.squeeze(1)}
    return {"weights": torch.nn.functional.pad(weights, (0, mask.size(1) - weights.size(1))) * mask}


def policy_loss(kind, logprobs, mask, micro_batches=None, **inputs):
    """The sum over the micro-batches, as accumulation takes it. Args: inputs, of _compute_loss, and fields of self."""
    micro_batches, total = micro_batches or [len(mask)], 0.0
    keys = "old_per_token_logps", "old_logps", "ref_per_token_logps", "advantages"
    per_row, fields = {x: inputs[x] for x in keys if x in inputs}, {x: inputs[x] for x in inputs if x not in keys}
    if mask.any(1).all() and kind is GRPOTrainer:
        num_items = rollout(kind, torch.zeros(len(mask)), mask, k=1, scale_rewards="none")[0]["num_items_in_batch"]
    else:
        num_items = mask.sum()
    for m in torch.arange(len(mask)).split(micro_batches):
        self = trainer(max_completion_length=mask.size(1), **fields)
        self.current_gradient_accumulation_steps = self.args.steps_per_generation = len(micro_batches)
        found = logprobs[m], torch.zeros(mask[m].shape), None
        self._get_per_token_logps_and_entropies = lambda *given, **named: found
        ids = dict(prompt_ids=m[:, None], prompt_mask=m[:, None], completion_ids=mask[m].long())
        part = ids | {name: x[m] for name, x in per_row.items()}
        part |= dict(completion_mask=mask[m].long(), num_items_in_batch=num_items.float())
        total = total + kind._compute_loss(self, None, part)
    return {"loss": total}, self._metrics["train"]


def grpo_policy_loss(cliprange, cliprange_high, normalization="token", old_logprobs=None, loss_type=None, **inputs):
    names = {"token": "dapo", "response": "grpo", "constant": "dr_grpo"}
    inputs |= dict(epsilon_low=cliprange, epsilon_high=cliprange_high, old_per_token_logps=old_logprobs)
    return policy_loss(GRPOTrainer, loss_type=loss_type or names[normalization], **inputs)[0]


def ppo_policy_loss(cliprange, **inputs):
    return grpo_policy_loss(cliprange, cliprange, **inputs)


def gspo_policy_loss(**inputs):
    return grpo_policy_loss(normalization="response", importance_sampling_level="sequence", **inputs)


def cispo_policy_loss(cliprange_high, **inputs):
    return grpo_policy_loss(0.2, 1 + cliprange_high, loss_type="cispo", **inputs)


def rloo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange):
    names = dict(old_logps=(old_logprobs * mask).sum(1), advantages=advantages)
    return policy_loss(RLOOTrainer, logprobs, mask, epsilon_low=cliprange, epsilon_high=cliprange, **names)[0]


def kl_loss(logprobs, old_logprobs, ref_logprobs, mask, times_ratio):
    given = dict(old_per_token_logps=old_logprobs, ref_per_token_logps=ref_logprobs, advantages=torch.zeros(len(mask)))
    names = dict(beta=1.0, use_bias_correction_kl=times_ratio, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2)
    return policy_loss(GRPOTrainer, logprobs, mask, **given, **names)[0]


def kl_estimates(logprobs, ref_logprobs, kind):
    if kind == "k3":
        one, zero = torch.ones(1, 1).bool(), torch.zeros(1, 1)
        pairs = zip(logprobs.flatten(), ref_logprobs.flatten())
        found = [kl_loss(p.reshape(1, 1), zero, q.reshape(1, 1), one, False)["loss"] for p, q in pairs]
    elif kind == "k1":
        pairs = zip(logprobs.reshape(-1, 1, 1), ref_logprobs.reshape(-1, 1, 1))
        found = [rollout(RLOOTrainer, torch.zeros(1), None, p, q, k=1, beta=1.0)[1]["kl"][0] for p, q in pairs]
    else:
        raise NotImplementedError("k1 (RLOO) and k3 (GRPO) alone")
    return {"kl": torch.tensor(found).reshape(logprobs.shape)}


def preference_loss(loss_type, logprobs, ref_logprobs, lengths, best, **fields):
    if logprobs.size(1) != 2:
        raise NotImplementedError("pairs alone")
    mask = torch.arange(int(lengths.max()) + 1) <= lengths.T.reshape(-1, 1)
    mask[:, 0] = False  # the prompt
    per_token = torch.zeros(mask.shape).index_add(1, torch.tensor([1]), logprobs.T.reshape(-1, 1))[:, 1:]
    names = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
    outputs = SimpleNamespace(log_probs=per_token, **dict.fromkeys(names, torch.zeros(per_token.shape)))
    self = trainer(loss_types=[loss_type], loss_weights=[1.0], f_divergence_type="reverse_kl", **fields)
    self.precompute_ref_logps = True
    given = dict(input_ids=mask.long(), attention_mask=mask.long(), completion_mask=mask.long())
    given |= dict(ref_chosen_logps=ref_logprobs[:, 0], ref_rejected_logps=ref_logprobs[:, 1])

    class Model(Anything):
        def __call__(self, **named):
            return outputs

    return {"loss": DPOTrainer._compute_loss(self, Model(), given, False)}


def dpo_loss(logprobs, label_smoothing, **inputs):
    lengths = torch.ones(logprobs.shape).long()
    return preference_loss("sigmoid", logprobs, lengths=lengths, label_smoothing=label_smoothing, **inputs)


def ipo_loss(**inputs):
    return preference_loss("ipo", **inputs)


def best_of_k_loss(scores, best):
    if scores.size(1) != 2:
        raise NotImplementedError("pairs alone")
    self, inputs = trainer(), {"attention_mask": scores}
    return {"loss": RewardTrainer.compute_loss(self, lambda **given: Anything(logits=scores.T.reshape(-1, 1)), inputs)}


def generalized_jsd(logits, teacher_logits, beta):
    labels = torch.zeros(1, len(logits)).long()
    return {"loss": GKDTrainer.generalized_jsd_loss(logits[None], teacher_logits[None], labels, beta)}


def overlong_scores(scores, lengths, max_length, buffer):
    punish = get_soft_overlong_punishment(max_length, buffer)
    return {"scores": scores + torch.tensor(punish(completion_ids=[[1] * n for n in lengths.tolist()]))}


def entropies(logits, temperature):
    labels = torch.zeros(len(logits)).long()
    return {"entropies": utils.selective_log_softmax_and_entropy(logits, labels, temperature=temperature)[1]}


def token_logprobs(logits, labels, temperature):
    return {"logprobs": utils.selective_log_softmax_and_entropy(logits, labels, temperature=temperature)[0]}
