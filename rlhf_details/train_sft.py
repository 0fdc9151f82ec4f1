"""
SFT: supervised fine-tuning of a causal language model on prompts and completions, or its training from scratch.

1. The loss is cross-entropy on all tokens, the prompt's included, as N+ has it; with `--completion_only` on the completion's,
   EOS among them.
2. The denominator is the token count of the whole global minibatch, so micro-batches and processes do not change the gradient.
3. `--base_model scratch` makes a tokenizer from the text (byte-level BPE) and a small GPT-NeoX from four flags.
4. Held-out rows give loss and perplexity and, against their completions, ROUGE-L of sampled responses.

Left out on purpose: packing of several rows into one (which needs a block mask; train_rloo.py shows one).

Shapes    B: rows of a minibatch   M: rows of a micro-batch   L: tokens of a row, left-padded   V: vocabulary

One process:   python rlhf_details/train_sft.py
N processes:   accelerate launch --num_processes N rlhf_details/train_sft.py
"""

import functools
import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from rlhf_details import data, engines, lora, runs, toy, utils


@dataclass
class Args:
    # run
    exp_name: str = "train_sft"
    """name of the experiment, part of the run's name"""
    seed: int = 1
    """seed of everything random"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline needs no account)"""
    wandb_project_name: str = "rlhf_details"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team or user"""
    wandb_tags: tuple[str, ...] = ()
    """Weights & Biases tags"""
    run_name: str | None = None
    """folder under runs/; None: dataset, exp_name, seed and time"""
    config: str | None = None
    """TOML file of defaults for these arguments; the command line wins"""
    output_dir: str = "models/sft"
    """folder of the trained model"""
    overwrite: bool = False
    """replace an output folder that holds another model"""
    resume: bool = False
    """go on from the newest whole checkpoint of --run_name, or of the newest run of this dataset, exp_name and seed"""
    checkpoint_every: int = 50
    """steps between checkpoints, the last two of which are kept in the run's folder; 0: only on SIGTERM and SIGINT"""
    push_to_hub: bool = False
    """upload output_dir to the Hugging Face Hub at the end"""
    hub_model_id: str | None = None
    """the Hub repository, "name" or "owner/name"; None: output_dir with - for /"""

    # data and model
    dataset: str = "toy"
    """rows of `prompt` and `completion`, else of `messages`, of `text`, or of N+'s tokens: "toy", "toy-sum", a file, a folder or a
    Hub data set (:PART, a split or file of it), or FILE.py:FUNCTION that returns rows"""
    eval_dataset: str | None = None
    """held-out rows; None: no evaluation"""
    take: int | None = None
    """only the first so many rows of --dataset"""
    prompt_template: str | None = None
    """the prompt, with the row's columns in their places: "Question: {question}\\nAnswer:"; None: the column `prompt`"""
    max_prompt_length: int | None = None
    """drop rows whose prompt has more tokens than this; the number dropped is printed"""
    base_model: str = "scratch"
    """a causal language model (folder or Hub name), or "scratch": a GPT-NeoX of the sizes below"""
    trust_remote_code: bool = False
    """run the Python code that comes with a model; for models whose authors you trust"""
    vocab_size: int = 4096
    """scratch: size of the tokenizer trained on the text"""
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
    """train on the completion's tokens only; otherwise on the prompt's as well (N+)"""
    num_train_epochs: int = 1
    """passes over the data"""
    batch_size: int = 128
    """rows an optimiser step, over all processes (B)"""

    # optimiser
    learning_rate: float = 3e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """course of the learning rate over the steps"""
    warmup_ratio: float = 0.0
    """share of the steps over which the learning rate rises linearly"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    weight_decay: float = 0.01
    """AdamW's weight decay"""
    max_grad_norm: float | None = 1.0
    """clip the gradient's global norm to this; None: only log it"""
    lora_rank: int | None = None
    """train adapters of this rank (LoRA, with alpha twice the rank) in place of all weights; None: all weights"""
    lora_merge: bool = False
    """save the model with its adapters merged, and them in output_dir/adapter; else output_dir holds the adapters alone"""

    # evaluation
    response_length: int = 53
    """most tokens of a sampled response, for ROUGE-L"""
    temperature: float = 0.7
    """sampling temperature, for ROUGE-L"""

    # memory and speed: never changes the result
    micro_batch_size: int = 16
    """rows a device puts through one forward and backward"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """attention kernel; None: the library's choice for the model"""


class LanguageModel(nn.Module):
    """One call is one forward: tokens in, the summed cross-entropy of the targets out; the [M, L, V] logits die here.

    Without targets it is what the sampler calls, for the next token's logits.
    """

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.takes_positions = utils.accepts(model.forward, "position_ids")

    def forward(self, tokens, mask, positions=None, index=None, is_target=None, cache=None):
        """
        Args: tokens [M, L]; mask, is_target [M, L] bool. Returns: sum over targets of -log p(token | tokens before), fp32.
        For the sampler: positions [M, L]; cache, which is extended; index is not read. Returns: logits / temperature of the last
        token [M, 1, V] fp32. (The loss is that of temperature 1.)
        """
        if is_target is None:
            inputs = {"position_ids": positions} if self.takes_positions else {}
            logits = self.model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **inputs).logits
            return logits[:, -1:].float() / self.temperature
        inputs = {"position_ids": utils.positions_from_mask(mask)} if self.takes_positions else {}
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False, **inputs).logits
        logits, labels = logits[:, :-1], tokens[:, 1:]  # [M, L-1, V], [M, L-1] [SFT-2] column t predicts column t + 1
        is_target = is_target[:, 1:] & mask[:, :-1]  # [M, L-1]; a row's first token has no past to be predicted from
        return nn.functional.cross_entropy(logits[is_target].float(), labels[is_target], reduction="sum")


def from_scratch(args, texts):
    """A GPT-NeoX with random weights and, unless the task brings its own, a byte-level BPE tokenizer trained on the texts."""
    if (task := args.dataset.partition(":")[0]) in toy.TASKS:
        tokenizer = toy.tokenizer(task)
    else:
        backend = ByteLevelBPETokenizer()
        special = ["<pad>", "<eos>"]
        backend.train_from_iterator(texts, args.vocab_size, min_frequency=2, special_tokens=special, show_progress=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, pad_token="<pad>", eos_token="<eos>")
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.context_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=args.attn_implementation,
    )
    return tokenizer, utils.use_onednn(utils.disable_dropout(GPTNeoXForCausalLM(config)))


def rouge_l(response, reference):
    """ROUGE-L F1 of two strings on lower-case words of ASCII letters and digits, in [0, 1]. Source: Lin 2004, section 3.1."""
    a, b = (re.findall(r"[a-z0-9]+", text.lower()) for text in (response, reference))
    longest = [0] * (len(b) + 1)  # length of the longest common subsequence of the words of a so far and b[:j]
    for word in a:
        above = longest
        longest = [0]
        for j, other in enumerate(b):
            longest.append(above[j] + 1 if word == other else max(above[j + 1], longest[j]))
    common = longest[-1]
    return 2 * common / (len(a) + len(b)) if common else 0.0


def check(args):
    """Ends with one line (exit code 2) where an argument makes no sense; nothing has been written by then."""
    utils.check_numbers(args)
    if args.base_model == "scratch" and args.hidden_size % args.num_heads:
        utils.fail(f"--hidden_size {args.hidden_size}: not divisible by --num_heads {args.num_heads}")
    if args.base_model == "scratch" and args.lora_rank:
        utils.fail(f"--lora_rank {args.lora_rank}: there is nothing to adapt in --base_model scratch")
    lora.check(args)
    utils.check_output_dir(args)


def read_rows(spec, flag, template=None, take=None):
    """Rows with `prompt` and `completion`, of an embedded task or of a data set; of rows of `text` the prompt is empty."""
    name, _, split = spec.partition(":")
    if name in toy.TASKS:
        return data.with_prompts(toy.rows("sft", split or "train", name)[:take], template, f"{flag} {spec}")
    rows = data.read_rows(spec, {}, flag=flag)[:take]
    if "text" in rows[0] and "completion" not in rows[0] and template is None:
        data.check_columns(rows, {"text": str}, f"{flag} {spec}")
        return [{"prompt": "", "completion": row["text"]} for row in rows]
    return data.with_completions(data.with_prompts(rows, template, f"{flag} {spec}"), f"{flag} {spec}", template)


def main(args: Args):
    """Trains; returns the last row of metrics."""
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()
    check(args)
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # while the main process writes a large checkpoint
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False), patience])
    engines.settle(accelerator, args)
    device, world, rank, B = accelerator.device, accelerator.num_processes, accelerator.process_index, args.batch_size
    if B % world:
        utils.fail(f"--batch_size {B}: not divisible by the {world} processes")

    # ---- data and model
    if args.lora_rank and engines.name(accelerator) not in ("one process", "DDP"):
        utils.fail(f"--lora_rank: for one process or DDP, not for {engines.name(accelerator)}")
    rows = read_rows(args.dataset, "--dataset", args.prompt_template, args.take)
    eval_rows = read_rows(args.eval_dataset, "--eval_dataset", args.prompt_template) if args.eval_dataset else []
    torch.manual_seed(args.seed)  # before any weight is drawn
    if args.base_model == "scratch":
        if not all(isinstance(row["prompt"], str) for row in rows):
            utils.fail("--base_model scratch: makes its tokenizer from text, and knows no messages and no token ids")
        tokenizer, model = from_scratch(args, [row["prompt"] + row["completion"] for row in rows])
    else:
        tokenizer = utils.load_tokenizer(args.base_model, "--base_model", args.trust_remote_code)
        model = utils.load_policy(args.base_model, "--base_model", args.attn_implementation, args.trust_remote_code)
        model = lora.add_adapters(model, args.lora_rank) if args.lora_rank else model
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)

    def encode(rows, what, sampled):
        """(numbers of the rows kept, from 1; these rows; the prompt's and the completion's ids of each); sampled: room to leave."""
        pairs = [data.encode(tokenizer, row["prompt"], row["completion"]) for row in rows]
        kept = data.short_enough([prompt for prompt, _ in pairs], args.max_prompt_length or math.inf, what)
        rows, pairs, numbers = [rows[i] for i in kept], [pairs[i] for i in kept], [i + 1 for i in kept]
        for number, row, (prompt, completion) in zip(numbers, rows, pairs, strict=True):
            if len(prompt) + len(completion) > context:
                length = len(prompt) + len(completion)
                utils.fail(f"{what}: row {number} has {length} tokens; the model's context is {context}")
            if prompt and row["prompt"] and len(prompt) + sampled > context:
                utils.fail(f"{what}: row {number}: its prompt and --response_length {sampled} exceed the context of {context}")
        return numbers, rows, pairs

    row_numbers, rows, train_ids = encode(rows, f"--dataset {args.dataset}", 0)
    _, eval_rows, eval_ids = encode(eval_rows, f"--eval_dataset {args.eval_dataset}", args.response_length)

    def tensors(pairs):
        """{"tokens", "mask", "is_target"}, each [M, L]; --completion_only: targets are the completion's tokens, EOS included."""
        tokens, mask = utils.left_pad([p + c for p, c in pairs], device)
        lengths = torch.tensor([len(c) for _, c in pairs], device=device).unsqueeze(1)
        in_completion = torch.arange(tokens.size(1), 0, -1, device=device) <= lengths  # rows end together: count from the right
        is_target = in_completion if args.completion_only else mask  # [SFT-1] N+ learns the prompts as well
        return {"tokens": tokens, "mask": mask, "is_target": is_target}

    def num_targets(pairs):
        """How many targets `tensors` makes of these rows, without each row's first token, which nothing predicts; at least 1."""
        all_but_first = [len(p) + len(c) - 1 for p, c in pairs]
        return max(1, sum(min(len(c), n) if args.completion_only else n for n, (_, c) in zip(all_but_first, pairs, strict=True)))

    if len(train_ids) < B:
        utils.fail(f"--batch_size {B}: more than the {len(train_ids)} rows of --dataset {args.dataset}")
    steps_per_epoch = len(train_ids) // B  # the ragged tail is left out; the shuffle makes it another one in each epoch
    num_steps = args.num_train_epochs * steps_per_epoch
    checksum, language_model = utils.checksum(model), LanguageModel(model, args.temperature)
    # [OPT-4] both given, neither left to the library
    adam = dict(lr=args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay)
    optimizer = torch.optim.AdamW([p for p in language_model.parameters() if p.requires_grad], **adam)
    language_model, optimizer = engines.prepare(accelerator, language_model, optimizer)
    run = runs.Run(args, accelerator, num_steps, ["eps", "train/sft/loss", "train/sft/lr"], [train_ids, eval_ids, checksum])
    prompts, texts = [prompt for prompt, _ in train_ids], [data.as_text(tokenizer, row["prompt"]) for row in rows]
    run.show_data(data.PromptSet(prompts, texts, rows, row_numbers))
    parameters = sum(p.numel() for p in model.parameters())
    run.say(f"{args.base_model}, {parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens in the vocabulary")
    run.say(f"{len(train_ids)} rows, {num_steps} steps, {world} process(es)")
    run.note_combination("train_sft", model.config.model_type, "plain")

    def evaluate():
        """Held-out loss and perplexity a target token, and ROUGE-L of one sampled response a row against its completion."""
        language_model.eval()

        def my_batches(rows):
            """Yields (rows, whether each counts) of this process's share, filled up so that all processes make as many forwards."""
            filled = [(rows[i % len(rows)], i < len(rows)) for i in range(len(rows) + -len(rows) % world)][rank::world]
            for start in range(0, len(filled), args.micro_batch_size):
                yield zip(*filled[start : start + args.micro_batch_size], strict=True)

        total = torch.zeros((), device=device)
        for batch, counts in my_batches(eval_ids):
            inputs = tensors(batch)
            inputs["is_target"] = inputs["is_target"] & torch.tensor(counts, device=device).unsqueeze(1)
            with torch.no_grad(), accelerator.autocast():
                total += language_model(**inputs)
        loss = accelerator.reduce(total, "sum").item() / num_targets(eval_ids)
        metrics = {"eval/sft/loss": loss, "eval/sft/perplexity": math.exp(loss)}
        prompts = [
            (i, p, data.as_text(tokenizer, row["completion"]))
            for i, ((p, _), row) in enumerate(zip(eval_ids, eval_rows, strict=True))
            if p and row["prompt"]  # rows of text have no prompt, but perhaps a BOS
        ]
        if not prompts:
            return metrics
        from rlhf_details.train_rloo import EVALUATION, sample  # the sampler is RLOO's and PPO's

        scores, eos, coordinates = [], tokenizer.eos_token_id, (args.seed, EVALUATION, 0)
        for batch, counts in my_batches(prompts):
            queries, query_mask = utils.left_pad([p for _, p, _ in batch], device)
            numbers = torch.tensor([i for i, _, _ in batch], device=device)
            with accelerator.autocast():
                responses, mask, _ = sample(language_model, queries, query_mask, numbers, 1, args.response_length, eos, coordinates)
            texts = [tokenizer.decode(r[m], skip_special_tokens=True) for r, m in zip(responses, mask, strict=True)]
            scores += [rouge_l(text, row[2]) for text, row, counted in zip(texts, batch, counts, strict=True) if counted]
        rouge = accelerator.reduce(torch.tensor(sum(scores), device=device, dtype=torch.float64), "sum").item() / len(prompts)
        return metrics | {"eval/sft/rougeL": rouge}

    def show(i):
        return f"{rows[row_numbers.index(i)]}"

    # ---- the loop
    done, carried, _ = run.resume(language_model, optimizer)
    start_time, metrics = time.time() - carried.get("seconds", 0), carried.get("metrics")
    for step in range(done + 1, num_steps + 1):
        step_time = time.time()
        epoch, place = divmod(step - 1, steps_per_epoch)
        if place == 0 or step == done + 1:
            order = utils.permutation(len(train_ids), args.seed, epoch)
        optimizer.param_groups[0]["lr"] = utils.learning_rate_at(
            step, num_steps, args.learning_rate, args.lr_schedule, args.warmup_ratio
        )
        numbers = order[place * B : (place + 1) * B]
        minibatch, dataset_rows = [train_ids[i] for i in numbers], [row_numbers[i] for i in numbers]
        denominator = num_targets(minibatch)
        mine = minibatch[rank::world]
        micro_batches = [mine[i : i + args.micro_batch_size] for i in range(0, len(mine), args.micro_batch_size)]
        language_model.train()
        loss_sum = torch.zeros((), device=device)
        for i, micro_batch in enumerate(micro_batches):
            is_last = i + 1 == len(micro_batches)
            with engines.accumulate(accelerator, language_model, is_last):
                loss = language_model(**tensors(micro_batch))
                loss_sum += loss.detach()
                if is_last:  # all losses are known, and no weight is touched
                    loss_sum = accelerator.reduce(loss_sum, "sum")
                    run.check_finite("the loss", step, loss_sum.item(), show, dataset_rows, "row")
                loss_share = loss / denominator  # [SFT-3] of the whole minibatch, or short rows would weigh more
                accelerator.backward(loss_share * world)  # [OPT-6] the engines average over processes, a sum is meant
        check_norm = functools.partial(run.check_finite, "the gradient's norm", step, show=show, rows=dataset_rows, unit="row")
        grad_norm = engines.step(accelerator, language_model, optimizer, args.max_grad_norm, check_norm)
        now = time.time()
        metrics = {
            "update": step,
            "episode": step * B,
            "epoch": step / steps_per_epoch,
            "train/sft/loss": loss_sum.item() / denominator,
            "train/sft/lr": optimizer.param_groups[0]["lr"],
            "policy/grad_norm": grad_norm,
            "eps": B / (now - step_time),
            "time/update": now - step_time,
            "time/from_scratch": now - start_time,
        }
        if eval_ids and step == num_steps:
            metrics |= evaluate()
        run.log(metrics, step)
        if run.is_checkpoint_due(step):
            run.checkpoint(step, language_model, optimizer, {"seconds": time.time() - start_time, "metrics": metrics})

    weights = engines.full_weights(accelerator, language_model)
    run.save_model(accelerator.unwrap_model(language_model).model, weights, tokenizer)
    summary = [f"  {name:22} {value:8.3f}" for name, value in metrics.items() if name.startswith("eval/")]
    run.close([*summary, f"model: {args.output_dir}   run: {run.folder}   {time.time() - start_time:.0f} s"])
    accelerator.wait_for_everyone()
    return metrics


if __name__ == "__main__":
    main(utils.parse_args(Args, toy.defaults("train_sft")))
    utils.leave_process_group()
