"""
The side of speed.py that runs inside an environment with TRL: one process, one trainer, a few timed updates.

    ENVIRONMENT/bin/python benchmark/speed_trl.py SPEC.json        (speed.py calls it; SPEC is described there)

Imports only torch, transformers, datasets and trl. What TRL does is left as it is and watched from outside: `generate`
of the policy is wrapped to count what was sampled, forward hooks on the models say where a phase ends, a callback where
an update ends. With SPEC's frozen_dtype, the models that are not trained are loaded in it (bf16 runs), which is TRL's
faster way.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)


def memory():
    """(resident bytes now, their peak): of the process on a CPU, of the allocator on a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # VmHWM, not ru_maxrss: the latter starts at what the parent process had when it started this one
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


def now():
    """Seconds, after all work given to the GPU so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Watch(TrainerCallback):
    """Cuts an update into the phases of our scripts, and counts what was really done in it.

    Rollout: from the end of the last update to the first forward without gradients outside of `generate`; scores: from
    there to the first forward with gradients; optimise: the rest. `records` gets one dict an update.
    """

    def __init__(self, steps_per_update, eos_id):
        self.steps_per_update, self.eos_id = steps_per_update, eos_id
        self.records, self.loaded, self.peak = [], None, None
        register_optimizer_step_post_hook(self.count_step)
        self.begin()

    def begin(self):
        self.start, self.scores_start, self.optimise_start = now(), None, None
        self.generating, self.ends = False, 0
        self.prompts, self.tokens, self.steps = Counter(), 0, 0

    def count_step(self, *_):
        self.steps += 1

    def before_forward(self, *_):
        if self.generating:
            return
        if torch.is_grad_enabled():
            self.optimise_start = self.optimise_start or now()
        else:
            self.scores_start = self.scores_start or now()

    def watch(self, policy, others):
        """Hooks the models; their trunks, since the reward and value models are called without their heads."""
        for model in (policy, *others):
            model.base_model.register_forward_pre_hook(self.before_forward)
        generate = policy.generate

        def counted(*args, **kwargs):  # whatever the TRL version at hand gives `generate`
            self.generating = True
            output = generate(*args, **kwargs)
            self.generating = False
            ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
            responses = getattr(output, "sequences", output)[:, ids.size(1) :]
            is_eos = (responses == self.eos_id).long()
            self.tokens += int((is_eos.cumsum(1) - is_eos == 0).sum())  # up to and including the first EOS
            self.prompts.update(map(tuple, (ids * mask).tolist()))
            return output

        policy.generate = counted

    # transformers' TrainerCallback gives its methods arguments that differ from version to version; none is needed here
    def on_train_begin(self, *args, **kwargs):  # transformers' callback interface
        self.loaded = memory()[0]
        self.begin()

    def on_step_end(self, *args, **kwargs):  # likewise
        self.ends += 1
        if self.ends < self.steps_per_update:
            return
        end = now()
        seconds = {"update": end - self.start, "rollout": self.scores_start - self.start}
        seconds |= {"scores": self.optimise_start - self.scores_start, "optimise": end - self.optimise_start}
        work = {"episodes": sum(self.prompts.values()), "prompts": len(self.prompts), "response_tokens": self.tokens}
        work |= {"completions_a_prompt": sorted(set(self.prompts.values())), "optimizer_steps": self.steps}
        self.records.append(seconds | work)
        self.peak = memory()[1]
        self.begin()


def shared_arguments(spec, accumulation):
    """TrainingArguments that both generations of trainers get."""
    return dict(
        output_dir=spec["output_dir"],
        per_device_train_batch_size=spec["trl_micro_batch_size"],
        gradient_accumulation_steps=accumulation,
        learning_rate=3e-6,
        temperature=0.7,
        save_strategy="no",
        report_to="none",
        logging_steps=1_000_000,
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=spec["precision"] == "bf16",
    )


def load(spec, kind, dtype):
    """The policy or the reward model of the benchmark, in dtype."""
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    return auto.from_pretrained(spec[kind], dtype=dtype)


def legacy_trainer(spec, tokenizer, texts):
    """RLOOTrainer or PPOTrainer of TRL 0.21, which takes token ids. Each of its steps ends an update."""
    from datasets import Dataset
    from trl import PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer

    ppo = spec["algorithm"] == "ppo"
    # RLOOConfig's batch is accumulation * num_mini_batches micro-batches, PPOConfig's is accumulation of them. Its
    # minibatches make no optimiser steps of their own, so more than one fails speed.py's check of the work.
    accumulation = spec["batch_size"] // spec["trl_micro_batch_size"] // (1 if ppo else spec["mini_batches"])
    config = (PPOConfig if ppo else RLOOConfig)(
        **shared_arguments(spec, accumulation),
        **({} if ppo else {"rloo_k": spec["k"]}),
        num_mini_batches=spec["mini_batches"],
        num_ppo_epochs=spec["epochs"],
        total_episodes=spec["batch_size"] * spec["updates"],
        local_rollout_forward_batch_size=spec["batch_size"],
        response_length=spec["response_length"],
        stop_token="eos",
        missing_eos_penalty=1.0,
        kl_coef=0.05,
        num_sample_generations=0,
    )
    ids = tokenizer(texts, return_token_type_ids=False).input_ids
    data = Dataset.from_list([{"input_ids": row} for row in ids])
    frozen = getattr(torch, spec["frozen_dtype"])
    policy, reference, reward = (
        load(spec, "policy", torch.float32),
        load(spec, "policy", frozen),
        load(spec, "reward", frozen),
    )
    watch = Watch(1, tokenizer.eos_token_id)
    common = dict(
        processing_class=tokenizer, reward_model=reward, train_dataset=data, eval_dataset=data, callbacks=[watch]
    )
    if ppo:
        value = load(spec, "reward", torch.float32)
        trainer = PPOTrainer(args=config, model=policy, ref_model=reference, value_model=value, **common)
    else:
        value = None
        trainer = RLOOTrainer(config=config, policy=policy, ref_policy=reference, **common)
    # The batches of an update: all prompts, in their order. The trainer's own loader would end with its only batch, and
    # accelerate takes a step after every micro-batch of a loader's last batch, whatever is left to accumulate. This one
    # is never at its end.
    rows = Dataset.from_list([{"input_ids": row} for row in ids * (spec["updates"] + 1)])
    loader = DataLoader(rows, batch_size=len(ids), collate_fn=trainer.data_collator, drop_last=True)
    trainer.dataloader = trainer.accelerator.prepare(loader)
    watch.watch(policy, [m for m in (reference, reward, value) if m is not None])
    return trainer, watch


def new_trainer(spec, tokenizer, texts):
    """RLOOTrainer of TRL 1.x: texts in; it makes the reference itself. One step end an optimiser step."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    minibatch = spec["batch_size"] // spec["mini_batches"]
    steps_per_update = spec["epochs"] * spec["mini_batches"]
    config = RLOOConfig(
        **shared_arguments(spec, minibatch // spec["trl_micro_batch_size"]),
        generation_batch_size=spec["batch_size"],
        num_generations=spec["k"],
        num_iterations=spec["epochs"],
        max_steps=spec["updates"] * steps_per_update,
        max_completion_length=spec["response_length"],
        beta=0.05,
        disable_dropout=True,
        model_init_kwargs={
            "dtype": spec["frozen_dtype"]
        },  # of the reference alone: the policy is handed over as a model
    )
    policy, reward = load(spec, "policy", torch.float32), load(spec, "reward", getattr(torch, spec["frozen_dtype"]))
    watch = Watch(steps_per_update, tokenizer.eos_token_id)
    trainer = RLOOTrainer(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
        callbacks=[watch],
    )
    watch.watch(policy, [trainer.ref_model, reward])
    return trainer, watch


def main(spec):
    import trl

    texts = [json.loads(line)["prompt"] for line in Path(spec["prompts"]).read_text().splitlines()]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{spec['policy']}/tokenizer.json", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    trainer, watch = (legacy_trainer if trl.__version__.startswith("0.") else new_trainer)(spec, tokenizer, texts)
    trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    result = {"versions": versions, "loaded": watch.loaded, "peak": watch.peak, "updates": watch.records}
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
