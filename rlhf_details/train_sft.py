"""
SFT: supervised fine-tuning of a causal language model on prompts and completions, or its training from scratch.

1. The loss is the cross-entropy of all tokens, the prompt's included, as in N+ (arXiv 2403.17031). With
   `--completion_only` it is that of the completion's tokens, EOS among them, and in a chat of all answers.
2. The loss is divided by the number of targets in the whole minibatch, over all processes. So neither micro-batches nor
   processes change the gradient.
3. `--base_model scratch` trains a tokenizer on the text (byte-level BPE) and starts from a small GPT-NeoX with random
   weights.
4. Held-out rows give loss and perplexity, and the ROUGE-L of sampled responses against their completions.
5. All randomness but that of new weights is a function of coordinates, never of a generator's state.

Left out on purpose: packing several rows into one, which needs a block mask (train_rloo.py has one).

Shapes    B: rows of a minibatch   M: rows of a micro-batch   L: tokens of a row, left-padded   V: vocabulary
          T: targets, the tokens that are learnt   Q: query tokens   N: columns that are read
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/train_sft.py
N processes:   accelerate launch --num_processes N rlhf_details/train_sft.py
Your data:     python rlhf_details/train_sft.py --dataset rows.jsonl --base_model gpt2
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, data, flags, models, stop_tokens, token_ids
from rlhf_details.plumbing.machine import engines
from rlhf_details.plumbing.outputs.run import Run
from rlhf_details.plumbing.outputs.statistics import rouge_l
from rlhf_details.utils import EVALUATION


@dataclass
class Args(flags.RunArgs):  # inherits the shared flags
    exp_name: str = "train_sft"
    output_dir: str = "models/sft"

    # data
    dataset: str = "toy"
    """rows of `prompt` and `completion`, of `messages`, of `text`, or of N+'s tokens: "toy", "toy-sum", a file, a
    folder or a Hub data set (:PART, a split or file of it), or FILE.py:FUNCTION, which returns rows"""
    eval_dataset: str | None = None
    """held-out rows, evaluated after training; None: no evaluation"""
    completion_template: str | None = None
    """the completion, with the row's columns in their places; None: column `completion`, or the answer in `messages`"""
    max_length: int | None = None
    """drop rows whose prompt and completion have more tokens than this; the number of dropped rows is printed"""

    # models
    base_model: str = "scratch"
    """a causal language model (folder or Hub name), or "scratch": a GPT-NeoX of the sizes below"""
    vocab_size: int = 4096
    """scratch: size of the tokenizer that is trained on the text"""
    hidden_size: int = 128
    """scratch: width"""
    num_layers: int = 4
    """scratch: layers"""
    num_heads: int = 4
    """scratch: attention heads"""
    context_length: int = 512
    """scratch: most tokens a row may have"""

    # algorithm
    completion_only: bool = False
    """train on the completion's tokens alone, and not on the prompt's as well (N+)"""
    train_on: Literal["all", "last"] = "all"
    """which answers of a chat --completion_only trains on: the assistant's turns, or the last one, the completion"""
    num_train_epochs: int = 1
    """passes over the data"""
    batch_size: int = 128
    """rows per optimiser step, over all processes (B)"""

    # optimiser
    learning_rate: float = 2e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """learning-rate schedule over the steps"""
    warmup_ratio: float = 0.0
    """share of the steps over which the learning rate rises linearly"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    weight_decay: float = 0.01
    """AdamW's weight decay"""
    max_grad_norm: float | None = 1.0
    """clip the gradient's global norm; None: only log it"""

    # sampling, for ROUGE-L
    response_length: int = 53
    """most tokens a sampled response may have"""
    temperature: float = 0.7
    """sampling temperature; the loss is always that of temperature 1"""


# Presets replace the defaults above: an embedded task's by name (default: "toy"), else those of the smallest number
# above the model's parameter count. docs/guides/1_your_data.md has their sources.
presets = {
    "toy": dict(
        eval_dataset="toy:test",
        output_dir="models/toy/sft",
        hidden_size=64,
        num_layers=2,
        context_length=128,
        num_train_epochs=3,
        batch_size=32,
        learning_rate=5e-3,
        warmup_ratio=0.05,
        response_length=36,
        temperature=1.0,
        micro_batch_size=128,
    ),
    20e6: dict(num_train_epochs=3, batch_size=8, learning_rate=1e-3, micro_batch_size=32),
    500e6: {},  # the defaults above
    math.inf: dict(learning_rate=3e-6),
    "scratch": {  # with --base_model scratch
        20e6: dict(
            num_train_epochs=5,
            batch_size=8,
            learning_rate=2e-3,
            warmup_ratio=0.05,
            micro_batch_size=32,
        ),
        500e6: dict(learning_rate=6e-4),
        5e9: dict(learning_rate=3e-4),
        math.inf: dict(learning_rate=1.2e-4),
    },
}
presets["toy-sum"] = presets["toy"] | dict(
    eval_dataset="toy-sum:test",
    output_dir="models/toy-sum/sft",
    completion_only=True,
    num_train_epochs=6,
    response_length=3,
)
presets["toy-tools"] = presets["toy"] | dict(
    eval_dataset="toy-tools:test",
    output_dir="models/toy-tools/sft",
    num_layers=3,
    num_train_epochs=5,
    response_length=4,
)


# ---- model: what is trained runs inside `forward`, so that DDP, FSDP and DeepSpeed see all parameters ----------------
class LanguageModel(nn.Module):
    """The cross-entropy of targets, or for the sampler next-token logits of softmax(logits / temperature), in fp32."""

    logits_at_once = 2**24  # with targets at most so many exist at a time: 64 MiB in fp32

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)

    def forward(self, tokens, mask, positions, index=None, is_target=None, cache=None):
        """
        Args: tokens, positions [M, L]; mask, is_target [M, L] bool. For the sampler: index [N], the columns whose
        logits are read; cache, a transformers cache, which is extended.
        Returns: -log p(token | tokens before it) of each target, [T] fp32, or without targets the logits / temperature
        [M, N, V] fp32.
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)  # [M, L, H]
        if is_target is None:
            return self.logits(hidden[:, index]) / self.temperature
        # The column before a token predicts it, EOS among them. [SFT-2]
        is_target = is_target[:, 1:]  # [M, L-1]
        hidden, labels = hidden[:, :-1][is_target], tokens[:, 1:][is_target]  # [T, H], [T]
        logprobs, _ = utils.token_logprobs(self.logits, hidden, labels, self.logits_at_once // self.head.vocab_size)
        return -logprobs

    def logits(self, hidden):
        """Logits [.., V] fp32 of last hidden states [.., H]."""
        return self.head(hidden).float()


def load_model(args, rows, device):
    """Returns (tokenizer, language model), in fp32 and without dropout. A new tokenizer is made from the rows' text."""
    if args.base_model == "scratch":
        tokenizer, model = models.make_small(args, rows)
    else:
        tokenizer = models.load_tokenizer(args.base_model, "--base_model", args)
        model = models.load_policy(args.base_model, "--base_model", args)
    model = utils.disable_dropout(model)
    model = models.add_adapters(model, args.lora_rank)
    return tokenizer, LanguageModel(model, args.temperature).to(device)


# ---- from rows to losses ---------------------------------------------------------------------------------------------
def tokens_and_targets(rows, completion_only, device):
    """The tokens of prompts and completions, and which of them are learnt.

        tokens      .  p  p  c  c  EOS        a row of two prompt tokens, left-padded
        mask        0  1  1  1  1  1
        is_target   0  0  1  1  1  1          nothing predicts the first token
                    0  0  0  1  1  1          with --completion_only
        tokens      q  q  call END  r  r  answer END      a chat, where r r is what a tool returned
        is_target   0  0   1    1   0  0    1     1       with --completion_only, and without --train_on last
    Args: rows, B demonstrations. Returns: tokens, mask, is_target, each [B, L].
    """
    tokens, mask = utils.left_pad([row.ids + row.completion for row in rows], device)
    is_target = utils.positions_from_mask(mask) > 0
    if completion_only:  # By default the prompts are learnt as well, as in N+. [SFT-1]
        is_own, _ = utils.left_pad([row.is_own for row in rows], device)  # [B, L], what the policy is to say
        is_target = is_target & is_own.bool()
    return tokens, mask, is_target


def token_losses(language_model, batch):
    """Cross-entropy of each target of a batch (tokens, mask, is_target), [T] fp32."""
    first = int(batch[1].any(0).int().argmax())  # Columns before this one are padding in every row.
    tokens, mask, is_target = (x[:, first:] for x in batch)
    return language_model(tokens, mask, utils.positions_from_mask(mask), is_target=is_target)


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(language_model, rows, tokenizer, args, accelerator):
    """Loss and perplexity of a held-out target, and ROUGE-L of one sampled response per row against its completion.

    Rows without a prompt have no ROUGE-L. Returns: {"eval/sft/..": mean}; call it on every process.
    """
    if not rows:
        return {}
    language_model.eval()
    device, size, means = accelerator.device, args.micro_batch_size, utils.Means(accelerator.device)
    places, mine = data.my_share(rows, accelerator)  # filled up, so that all processes have equally many
    tokens, mask, is_target = tokens_and_targets(mine, args.completion_only, device)  # [N / world, L]
    batch = [tokens, mask, is_target & (places < len(rows)).unsqueeze(1)]
    prompts = [i for i, row in enumerate(rows) if row.ids and row.columns["prompt"]]  # Rows of `text` have none.
    with accelerator.autocast():
        for m in torch.arange(len(mine), device=device).split(size):
            means.add({"eval/sft/loss": token_losses(language_model, [x[m] for x in batch])})
        if prompts:
            places, numbers = data.my_share(prompts, accelerator)
            mine = [rows[i] for i in numbers]
            queries, query_mask = utils.left_pad([row.ids for row in mine], device)
            responses, response_mask, _ = utils.sample(
                engines.gathered(language_model),
                queries,
                query_mask,
                torch.tensor(numbers, device=device),
                n=1,
                response_length=args.response_length,
                stop_ids=stop_tokens.stop_ids(tokenizer, "eos", "samples for ROUGE-L,", device),
                key=(args.seed, EVALUATION, 0),
                size=size,
            )
            references = [data.as_text(tokenizer, row.columns["completion"]) for row in mine]
            pairs = zip(token_ids.decode(tokenizer, responses, response_mask), references, strict=True)
            means.add({"eval/sft/rougeL": torch.tensor([rouge_l(*pair) for pair in pairs])}, places < len(prompts))
    metrics = means.reduce(accelerator)
    return metrics | {"eval/sft/perplexity": math.exp(metrics["eval/sft/loss"])}


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends the program where arguments contradict each other."""
    cli.check(args)
    if args.batch_size % console.world_size():
        console.fail(f"--batch_size {args.batch_size}: not divisible by the {console.world_size()} processes")
    if args.base_model == "scratch" and args.hidden_size % args.num_heads:
        console.fail(f"--hidden_size {args.hidden_size}: not divisible by --num_heads {args.num_heads}")
    if args.base_model == "scratch" and args.lora_rank:
        console.fail(f"--lora_rank {args.lora_rank}: there is nothing to adapt in --base_model scratch")


def main(args: Args):
    """Trains; returns {"before" and "after": held-out metrics at the end, "metrics": the last row, "run": folder}."""
    check(args)
    accelerator = engines.start(args)  # one process, DDP, FSDP2 or DeepSpeed; it seeds, before any weight is drawn
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    B, size = args.batch_size, args.micro_batch_size

    # ---- rows, model, optimiser
    rows, held_out_rows = (data.read(args, flag, "sft", with_answers=True) for flag in ("dataset", "eval_dataset"))
    tokenizer, language_model = load_model(args, rows, engines.loading_device(accelerator))
    R, context = args.response_length, models.context(language_model)
    train = data.encode(args, "dataset", rows, tokenizer, context, "completion")
    held_out = data.encode(args, "eval_dataset", held_out_rows, tokenizer, context, "completion", num_sampled=R)
    if len(train) < B:
        console.fail(f"--batch_size {B}: more than the {len(train)} rows of --dataset {args.dataset}")
    steps_per_epoch = len(train) // B  # The rest of an epoch's shuffle is left out, other rows in each epoch.
    num_steps = args.num_train_epochs * steps_per_epoch
    optimizer = utils.adamw(language_model, args.learning_rate, args.adam_eps, args.weight_decay)
    run = Run(args, accelerator, tokenizer, num_steps, train, [held_out, language_model])
    language_model, optimizer = engines.prepare(args, accelerator, language_model, optimizer)
    run.resume(language_model, optimizer)

    for step in range(run.first_update, num_steps + 1):
        lr = utils.learning_rate_at(step, num_steps, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Minibatch: every process has all of its rows, and trains on its share --------------------------------
        epoch, place = divmod(step - 1, steps_per_epoch)
        order = utils.permutation(len(train), args.seed, epoch)  # Each epoch has its own order.
        minibatch = [train[i] for i in order[place * B : (place + 1) * B]]
        batch = tokens_and_targets(minibatch, args.completion_only, device)  # each [B, L]
        num_targets = batch[2].sum().clamp(min=1)  # over all processes

        # ---- 2. Optimise ---------------------------------------------------------------------------------------------
        language_model.train()  # Gradient checkpointing needs it.
        means = utils.Means(device)
        micro_batches = torch.arange(B, device=device)[rank::world].split(size)
        for m in engines.accumulate(accelerator, language_model, micro_batches):
            losses = token_losses(language_model, [x[m] for x in batch])  # [T]
            # Divide by the count of the whole minibatch. A mean per row or per micro-batch would give the tokens of
            # short rows more weight. [SFT-3]
            loss = losses.sum() / num_targets
            accelerator.backward(loss * world)  # The engines average over processes. [OPT-6]
            means.add({"train/sft/loss": losses})
        norm = engines.clip_and_step(accelerator, language_model, optimizer, args.max_grad_norm, run)
        run.lap("optimise")

        # ---- 3. Log --------------------------------------------------------------------------------------------------
        metrics = means.reduce(accelerator)
        metrics |= {"epoch": step / steps_per_epoch, "train/sft/lr": lr, "policy/grad_norm": norm}
        if run.is_eval_due(step):
            metrics |= evaluate(language_model, held_out, tokenizer, args, accelerator)
        run.log(step, metrics)
        run.checkpoint_if_due(step, language_model, optimizer)
    return run.finish(language_model)


if __name__ == "__main__":
    cli.main(main, Args)
