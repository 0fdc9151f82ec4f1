"""
A command of train_rloo.py or train_grpo.py, carried out by TRL 1.16: the same models, prompts, reward and settings.

    pip install --no-deps trl==1.16.0
    python examples/trl/by_trl.py train_rloo.py --total_episodes 6400 --run_name trl --output_dir models/trl
    python examples/trl/by_trl.py train_grpo.py --config examples/smollm/grpo.toml --output_dir models/smollm_trl

It writes runs/<run_name>/metrics.jsonl, with our names for what TRL logs and the seconds of an update, and the trained
policy. `python benchmark/studies/study.py run trl` compares the curves, and benchmark/speed.py the seconds:

    python benchmark/speed.py "train_rloo.py" "examples/trl/by_trl.py train_rloo.py"

What still differs, and is TRL's own: the order of prompts and the samples come from torch's generator, the forwards get
no position ids (rotary positions do not mind), and the reward function subtracts the penalty for a missing EOS.
"""

import importlib
import json
import math
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rlhf_details.plumbing.inputs import cli, data, models, token_ids
from rlhf_details.plumbing.machine import rewards

# What is not translated, with the one value that is taken.
FIXED = dict(num_ppo_epochs=1, num_mini_batches=1, missing_eos_mode="subtract", warmup_ratio=0.0)
FIXED |= dict(objective="grpo", token_level_kl=False, normalize_advantage=False, reward_clip_range=None)
FIXED |= dict(reward_fn_format="text")
LOSS_TYPES = {None: "dapo", "token": "dapo", "response": "grpo", "constant": "dr_grpo"}  # --loss_normalization


def config_of(args, is_grpo):
    """TRL's configuration with the settings of our page."""
    if wrong := [name for name, value in FIXED.items() if getattr(args, name, value) != value]:
        sys.exit(f"error: --{wrong[0]} {getattr(args, wrong[0])}: is not translated for TRL")
    size = min(args.micro_batch_size, args.batch_size)
    shared = dict(
        output_dir=args.output_dir,
        seed=args.seed,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=args.batch_size // size,
        generation_batch_size=args.batch_size,
        max_steps=math.ceil(args.total_episodes / args.batch_size),
        max_completion_length=args.response_length,
        temperature=args.temperature,
        top_k=0,
        beta=args.kl_coef,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_schedule,
        adam_epsilon=args.adam_eps,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if is_grpo:
        special = dict(loss_type=LOSS_TYPES[args.loss_normalization], scale_rewards=args.scale_advantages)
        # TRL multiplies the KL of a token by its ratio, unless it is told not to. The paper does not.
        return GRPOConfig(**shared, **special, num_generations=args.group_size, use_bias_correction_kl=False)
    return RLOOConfig(**shared, num_generations=args.rloo_k, normalize_advantages=False)


class Score:
    """A reward function of TRL: our reward model's score of the last token and our reward functions, weighted,
    less the penalty for a missing EOS.
    """

    __name__ = "score"

    def __init__(self, args, tokenizer, rows):
        self.model = None
        if args.reward_model_path:
            model = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path, dtype=torch.float32)
            self.model, self.bias = model.eval(), getattr(model.config, "reward_bias", 0.0)
        rewards.check(args)
        self.functions = list(rewards.functions_of(args).values())
        self.weights = args.reward_fn_weights or [1.0] * len(self.functions)
        for function in self.functions:
            function.find_columns(rows)
        self.rows, self.tokenizer, self.penalty = rows, tokenizer, args.missing_eos_penalty or 0.0
        self.mean, self.tokens = 0.0, 0

    @torch.no_grad()
    def __call__(self, prompts, completions, completion_ids, row, **columns):
        """row: the number of each completion's prompt."""
        rows = [self.rows[i] for i in row]
        scores = -self.penalty * torch.tensor([self.tokenizer.eos_token_id not in ids for ids in completion_ids])  # [B]
        if self.model:
            scores += self.of_model([row.ids + ids for row, ids in zip(rows, completion_ids, strict=True)])
        texts = token_ids.decode_all(self.tokenizer, completion_ids)
        for weight, function in zip(self.weights, self.functions, strict=True):
            entries = function(rows, prompts=[row.text for row in rows], completions=texts)
            scores += weight * torch.tensor(entries, dtype=torch.float32)
        self.mean, self.tokens = scores.mean().item(), sum(map(len, completion_ids))
        return scores.tolist()

    def of_model(self, rows):
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)  # [B, L]
        last = torch.tensor([len(row) - 1 for row in rows])  # [B]
        mask = torch.arange(tokens.size(1)) <= last.unsqueeze(1)
        hidden = self.model.base_model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return self.model.score(hidden[torch.arange(len(rows)), last]).squeeze(-1) + self.bias  # [B]


class Log(TrainerCallback):
    """Writes a row of metrics.jsonl for each update."""

    def __init__(self, args, score):
        self.folder, self.size, self.score = Path("runs", args.run_name), args.batch_size, score
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "metrics.jsonl"
        self.path.write_text("")

    def on_step_begin(self, args, state, control, **kwargs):
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = time.perf_counter() - self.begin

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "kl" not in logs:  # the last line, on the whole run
            return
        kl = logs["kl"] * self.score.tokens / self.size  # TRL logs a token's, and we a response's.
        row = {"update": state.global_step, "episode": state.global_step * self.size}
        row |= {"objective/scores": self.score.mean, "objective/kl": kl, "time/update": self.seconds}
        with self.path.open("a") as file:
            print(json.dumps(row), file=file)


def main(script, *words):
    page = importlib.import_module(f"rlhf_details.{Path(script).stem}")
    args, is_grpo = cli.parse(page.Args, list(words)), Path(script).stem == "train_grpo"
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    rows, _ = data.load_prompts(args, tokenizer, room=math.inf)
    texts = [tokenizer.decode(row.ids) for row in rows]
    if any(tokenizer(text).input_ids != row.ids for text, row in zip(texts, rows, strict=True)):
        sys.exit("error: TRL reads text, and would read other tokens than ours")
    score = Score(args, tokenizer, rows)
    trainer = (GRPOTrainer if is_grpo else RLOOTrainer)(
        model=models.load_policy(args.sft_model_path, "--sft_model_path", args),
        reward_funcs=score,
        args=config_of(args, is_grpo),
        train_dataset=Dataset.from_list([{"prompt": text, "row": i} for i, text in enumerate(texts)]),
        processing_class=tokenizer,
        callbacks=[Log(args, score)],
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
