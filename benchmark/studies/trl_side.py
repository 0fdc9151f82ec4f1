"""
The side of with_trl.py that runs inside an environment with TRL: one process trains one policy.

    ENVIRONMENT/bin/python benchmark/studies/trl_side.py SPEC.json        (with_trl.py calls it)

SPEC: algorithm (rloo, grpo or ppo), policy, reward (model folders) or reward_fn
(FILE.py:function) with columns (those it takes of a prompt's row), prompts (.jsonl with `prompt`), seed, settings (the
arguments of our scripts, by their names), output_dir (of the trained policy), result (.json: the versions, the peak of
the memory and a curve, one row an update with objective/scores and objective/kl, the KL in nats a response of that
update's samples; under reward_fn also the phases that speed_trl.py watches). With samples (.json: a list an update of
[query, response] token ids, the responses of a prompt adjacent), these are trained on in place of TRL's own. With
whole_means, PPO's loss is divided by the tokens of the whole minibatch. With prepared_data the samples' prompts go
through accelerate's data loader, as prompts do in a run.

A step has as many micro-batches as ours. With one its gradient is that of the whole batch. What still differs from our
scripts:

All versions
    The prompts' order and the samples come from torch's generator. Weight decay leaves biases and norms out
    (transformers, Trainer.get_decay_parameter_names), ours takes all weights: nothing in RLOO, whose decay is 0.
0.21
    Nothing clips the gradient: RLOOTrainer.train and PPOTrainer.train do not read max_grad_norm. A hook does.
    KL and ratio start from the sampler's logits (trainer/utils.py, generate), not from a forward like the training's.
    A response ends before the first pad token sampled in it (PPOTrainer.train, RLOOTrainer.train, by
    first_true_indices), and the pad token is masked wherever it stands (trainer/utils.py, forward).
    policy/entropy_avg averages over padding too; it is a figure of the log only.
0.21, PPO
    The loss is a mean over each micro-batch's tokens, and these means are averaged (PPOTrainer.train, lines 574 and
    583): with several micro-batches a token counts more where the others of its micro-batch are few.
    On the last batch of the prompts each micro-batch is a step: accelerate (Accelerator._do_sync) does not accumulate
    at the end of a data loader, and that of the prompts is at its end during the whole update.
    Whitening divides by the unbiased deviation (core.py, masked_var), ours by the biased one: 1 part in 5000.
1.16
    No position_ids: _get_per_token_logps_and_entropies counts a row's left padding, which rotary positions forgive.
    The KL in its log is a mean over tokens (_generate_and_score_completions): times tokens, over responses here.
    There is no missing_eos_penalty; the reward function subtracts it.
    In GRPO the log's KL is "k3" after the rollout's first step, where ours is "k1" before it: a figure of the log only.
"""

import json
import runpy
import sys
import time
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from speed_trl import Watch

LOSSES = {"token": "dapo", "response": "grpo", "constant": "dr_grpo"}  # what TRL calls our loss_normalization


def responses_per_prompt(ours):
    """k of our settings, 1 in PPO."""
    return ours.get("rloo_k") or ours.get("group_size") or 1


class Shifted(nn.Module):
    """A reward head plus the constant that our reward models keep in config.reward_bias, which is never trained."""

    def __init__(self, head, bias):
        super().__init__()
        self.head, self.bias = head, bias

    def forward(self, hidden):
        return self.head(hidden) + self.bias


def load_reward(spec):
    model = AutoModelForSequenceClassification.from_pretrained(spec["reward"], dtype=torch.float32)
    model.score = Shifted(model.score, model.config.reward_bias)
    return model.eval()


class Curve(TrainerCallback):
    """Collects what a trainer logs after each update, as rows under our names."""

    def __init__(self, row_of):
        self.rows, self.row_of = [], row_of

    def on_log(self, args, state, control, logs=None, **kwargs):  # transformers' callback interface
        if row := self.row_of(logs):
            scores, kl = row
            self.rows.append({"update": len(self.rows) + 1, "objective/scores": scores, "objective/kl": kl})


def training_arguments(spec):
    """TrainingArguments that both generations of trainers get."""
    ours = spec["settings"]
    size = min(ours["micro_batch_size"], ours["batch_size"])
    return dict(
        output_dir=spec["output_dir"],
        seed=spec["seed"],
        per_device_train_batch_size=size,
        gradient_accumulation_steps=ours["batch_size"] // size,
        learning_rate=ours["learning_rate"],
        lr_scheduler_type=ours["lr_schedule"],
        adam_epsilon=ours["adam_eps"],
        weight_decay=ours["weight_decay"],
        max_grad_norm=ours["max_grad_norm"],
        temperature=ours["temperature"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        use_cpu=True,
        bf16=False,
    )


def clip_steps(limit):
    """Clips the gradient of all weights to a global norm of `limit` before every optimiser step of this process."""

    def clip(optimizer, *_):
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], limit)

    register_optimizer_step_pre_hook(clip)


def legacy_trainer(spec, policy, tokenizer, rows):
    """RLOOTrainer or PPOTrainer of TRL 0.21: token ids in, policy, reference, reward (and value) model."""
    from trl import PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer

    ours, ppo = spec["settings"], spec["algorithm"] == "ppo"
    if ppo:
        special = {name: ours[name] for name in ("vf_coef", "cliprange_value", "gamma", "lam")} | {"kl_estimator": "k1"}
    else:
        special = {"rloo_k": ours["rloo_k"], "token_level_kl": False}
    config = (PPOConfig if ppo else RLOOConfig)(
        **training_arguments(spec),
        **special,
        num_mini_batches=ours["num_mini_batches"],
        num_ppo_epochs=ours["num_ppo_epochs"],
        total_episodes=ours["total_episodes"],
        local_rollout_forward_batch_size=ours["batch_size"],
        response_length=ours["response_length"],
        stop_token="eos",
        missing_eos_penalty=ours["missing_eos_penalty"],
        kl_coef=ours["kl_coef"],
        cliprange=ours["cliprange"],
        num_sample_generations=0,
    )
    clip_steps(ours["max_grad_norm"])
    texts = [row["prompt"] for row in rows]
    data = Dataset.from_list([{"input_ids": ids} for ids in tokenizer(texts, return_token_type_ids=False).input_ids])
    reference = AutoModelForCausalLM.from_pretrained(spec["policy"], dtype=torch.float32)
    curve = Curve(lambda logs: (logs["objective/scores"], logs["objective/kl"]) if "objective/kl" in logs else None)
    common = dict(reward_model=load_reward(spec), processing_class=tokenizer, train_dataset=data, eval_dataset=data)
    if ppo:
        models = dict(model=policy, ref_model=reference, value_model=load_reward(spec))
        return PPOTrainer(args=config, **models, **common, callbacks=[curve]), curve
    return RLOOTrainer(config=config, policy=policy, ref_policy=reference, **common, callbacks=[curve]), curve


def take_whole_means():
    """Lets TRL 0.21's PPO divide its losses by the tokens of the whole minibatch, where it takes each micro-batch's."""
    from trl.trainer import ppo_trainer

    def masked_mean(x, mask, axis=None):
        caller = sys._getframe(1).f_locals  # The minibatch's masks stand in PPOTrainer.train alone. True is padding.
        masks = (~caller[name][caller["mini_batch_inds"]] for name in ("padding_mask", "padding_mask_p1"))
        here = slice(caller["micro_batch_start"], caller["micro_batch_end"])
        whole = next(minibatch for minibatch in masks if torch.equal(minibatch[here], mask))
        return (x * mask).sum() / whole.sum() * (len(whole) / len(mask))

    ppo_trainer.masked_mean = masked_mean


def reward_function(spec, tokenizer):
    """(reward function of TRL 1.x, tokens and mean score of its last batch). A model scores a response's last token."""
    last, penalty, eos = {}, spec["settings"]["missing_eos_penalty"], tokenizer.eos_token_id
    if checked := spec.get("reward_fn"):
        path, _, name = checked.rpartition(":")
        function = runpy.run_path(path)[name]
    else:
        model = load_reward(spec)

    def by_function(prompts, completions, columns):
        values = function(prompts, completions, **{name: columns[name] for name in spec["columns"]})
        return torch.tensor(values, dtype=torch.float32)

    def by_model(prompts, completion_ids):
        rows = [p + c for p, c in zip(tokenizer(prompts).input_ids, completion_ids, strict=True)]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        mask = torch.arange(tokens.size(1)) < lengths.unsqueeze(1)
        with torch.no_grad():
            hidden = model.base_model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).last_hidden_state
            return model.score(hidden[torch.arange(len(rows)), lengths - 1]).squeeze(-1)

    def reward(prompts, completions, completion_ids, **columns):  # TRL gives all it has of a batch, by name
        scores = by_function(prompts, completions, columns) if checked else by_model(prompts, completion_ids)
        scores = scores - penalty * torch.tensor([float(eos not in ids) for ids in completion_ids])
        last.update(scores=scores.mean().item(), tokens=sum(map(len, completion_ids)))
        return scores.tolist()

    return reward, last


def new_trainer(spec, policy, tokenizer, rows):
    """RLOOTrainer or GRPOTrainer of TRL 1.x: rows of text in; it makes the reference from the policy's folder."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    ours, special = spec["settings"], {"normalize_advantages": False}
    if is_grpo := spec["algorithm"] == "grpo":
        special = {"scale_rewards": ours["scale_advantages"], "loss_type": LOSSES[ours["loss_normalization"]]}
        special |= {"epsilon_high": ours["cliprange_high"], "use_bias_correction_kl": ours["kl_times_ratio"]}
        special |= {"importance_sampling_level": "sequence"} if ours["objective"] == "gspo" else {}
        if ours["objective"] == "cispo":  # TRL's bound is that of the ratio itself.
            special |= {"loss_type": "cispo", "epsilon_high": 1 + ours["cliprange_high"]}
    config = (GRPOConfig if is_grpo else RLOOConfig)(
        **training_arguments(spec),
        **special,
        generation_batch_size=ours["batch_size"],
        num_generations=responses_per_prompt(ours),
        num_iterations=ours["num_ppo_epochs"],
        max_steps=ours["total_episodes"] // ours["batch_size"] * ours["num_ppo_epochs"],
        max_completion_length=ours["response_length"],
        beta=ours["kl_coef"],
        epsilon=ours["cliprange"],
        top_k=0,
        top_p=1.0,
        mask_truncated_completions=False,
        disable_dropout=True,
    )
    reward, last = reward_function(spec, tokenizer)
    curve = Curve(
        lambda logs: (last["scores"], logs["kl"] * last["tokens"] / ours["batch_size"]) if "kl" in logs else None
    )
    trainer = (GRPOTrainer if is_grpo else RLOOTrainer)(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[curve],
    )
    return trainer, curve


def replay(trainer, policy, samples, spec):
    """Lets the trainer draw the prompts of `samples` in their order, and `generate` give their responses."""
    ours = spec["settings"]
    if hasattr(trainer, "dataloader"):  # 0.21: token ids
        k = responses_per_prompt(ours)
        ids = [{"input_ids": query} for update in samples for query, _ in update[::k]]
        size = ours["batch_size"] // k
        trainer.dataloader = DataLoader(Dataset.from_list(ids), batch_size=size, collate_fn=trainer.data_collator)
        if spec.get("prepared_data"):
            trainer.dataloader = trainer.accelerator.prepare(trainer.dataloader)
    else:
        trainer.shuffle_dataset = False
    left = iter(samples)

    def generate(input_ids, attention_mask, **options):
        responses = {}
        for query, response in next(left):
            responses.setdefault(tuple(query), []).append(response)
        found = [
            responses[tuple(row[mask].tolist())].pop(0)
            for row, mask in zip(input_ids, attention_mask.bool(), strict=True)
        ]
        filled = torch.tensor([ids + [0] * (ours["response_length"] - len(ids)) for ids in found])
        sequences = torch.cat([input_ids, filled], 1)
        if not options.get("return_dict_in_generate"):
            return sequences
        mask = torch.cat([attention_mask.long(), torch.ones_like(filled)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = policy(input_ids=sequences, attention_mask=mask, position_ids=positions).logits[
            :, input_ids.size(1) - 1 : -1
        ]
        return SimpleNamespace(sequences=sequences, scores=tuple(logits.unbind(1)))

    policy.generate = generate


def main(spec):
    start = time.time()
    ours = spec["settings"]
    if ours["num_mini_batches"] != 1 or ours["missing_eos_mode"] != "subtract" or ours["warmup_ratio"]:
        raise ValueError("not translated: minibatches, --missing_eos_mode replace, warm-up")
    set_seed(spec["seed"])
    rows = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    samples = json.loads(Path(spec["samples"]).read_text()) if "samples" in spec else None
    special = spec.get("special_tokens", {"eos_token": "<eos>", "pad_token": "<pad>"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{spec['policy']}/tokenizer.json", **special, padding_side="left"
    )
    if samples:
        every, known = responses_per_prompt(ours), {row["prompt"]: row for row in rows}
        texts = [tokenizer.decode(query) for update in samples for query, _ in update[::every]]
        rows = [known.get(text, {"prompt": text}) for text in texts]
    policy = AutoModelForCausalLM.from_pretrained(spec["policy"], dtype=torch.float32)
    make = legacy_trainer if version("trl").startswith("0.") else new_trainer
    trainer, curve = make(spec, policy, tokenizer, rows)
    watch = Watch(ours["num_ppo_epochs"], tokenizer.eos_token_id)
    if samples:
        replay(trainer, policy, samples, spec)
    elif spec.get("reward_fn"):
        trainer.add_callback(watch)
        watch.watch(policy, [trainer.ref_model])
    if spec.get("whole_means"):
        take_whole_means()
    trainer.train()
    vars(policy).pop("generate", None)
    policy.save_pretrained(spec["output_dir"])
    tokenizer.save_pretrained(spec["output_dir"])
    versions = {
        name: version(name)
        for name in ("trl", "transformers", "torch", "accelerate", "datasets", "tokenizers", "numpy")
    }
    phases = [{f"time/{name}": x[name] for name in ("rollout", "scores", "optimise", "update")} for x in watch.records]
    rows = [row | more for row, more in zip_longest(curve.rows, phases, fillvalue={})]
    Path(spec["result"]).write_text(
        json.dumps({"versions": versions, "seconds": time.time() - start, "peak": watch.peak, "rows": rows})
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
