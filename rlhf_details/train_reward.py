"""
Reward model: one scalar a response, trained on comparisons of K candidates of which a human preferred one.

1. One loss for both papers: cross-entropy of the K scores against the best. K = 4 is lm-human-preferences; K = 2 is exactly
   the pairwise logistic loss -log sigmoid(chosen - rejected) of InstructGPT and N+.
2. The score is the head's output at the last real token, found from the mask: with EOS appended, that is the EOS.
3. The head is drawn after seeding with std 1/sqrt(d + 1), so that scores start near unit size; dropout is off.
4. Scores are only defined up to a constant. Afterwards they are shifted to mean 0 over reference responses (N+), or
   scaled and shifted to mean 0 and std 1 over samples of the reference policy, before and after training
   (lm-human-preferences). The scale is folded into the saved head, the shift is `reward_bias` in the saved config.
5. The saved folder is an ordinary sequence-classification model whose padding token is never EOS.
6. lm-human-preferences' own labels are read as they are: rows of GPT-2 token ids `query`, `sample0` .. `sample3` and `best`.
   Their padding is dropped, nothing is tokenised again and no EOS is appended.

Left out on purpose: other label types (ratings), ensembles, a margin.

Shapes    B: comparisons of a minibatch   K: candidates of one   M: comparisons of a micro-batch   L: tokens, left-padded

One process:   python rlhf_details/train_reward.py
N processes:   accelerate launch --num_processes N rlhf_details/train_reward.py
"""

import functools
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from transformers.utils import logging as transformers_logging

from rlhf_details import data, engines, lora, runs, toy, utils

TRAIN, EVAL, NORMALISATION = 0, 1, 2  # what responses are sampled for: a coordinate of their noise
LABEL_PAD = 50259  # what fills the token ids of lm-human-preferences' labels: no id of GPT-2, whose vocabulary has 50257


@dataclass
class Args:
    # run
    exp_name: str = "train_reward"
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
    output_dir: str = "models/reward"
    """folder of the trained reward model"""
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
    """comparisons: "toy", a file, a folder, a Hub data set or FILE.py:FUNCTION, with rows of `prompt`, `chosen`, `rejected` (where
    these begin with the prompt it may be left out), or `prompt`, `candidates`, `best`, or token ids: `query`, `sample0` .. and
    `best` (lm-human-preferences), `query_token`, `response0_token` .. and `choice` (N+). A name may end in [:4992]: its start"""
    eval_dataset: str | None = None
    """held-out comparisons; None: no evaluation"""
    take: int | None = None
    """only the first so many rows of --dataset"""
    prompt_template: str | None = None
    """the prompt, with the row's columns in their places: "Question: {question}\\nAnswer:"; None: the column `prompt`"""
    max_prompt_length: int | None = None
    """drop rows whose prompt has more tokens than this; the number dropped is printed"""
    sft_model_path: str | None = None
    """the causal language model whose weights it starts from; also the policy that normalisation samples"""
    trust_remote_code: bool = False
    """run the Python code that comes with a model; for models whose authors you trust"""
    num_comparisons: int = 3072
    """toy: how many comparisons the imaginary human labels"""

    # algorithm
    num_train_epochs: int = 1
    """passes over the comparisons; the papers make one"""
    batch_size: int = 64
    """comparisons an optimiser step, over all processes (B)"""
    normalization: Literal["none", "mean_shift", "gain_bias"] = "mean_shift"
    """none; mean 0 on reference responses (N+); mean 0 and std 1 on samples, before and after (lm-human-preferences)"""
    reference_dataset: str | None = None
    """mean_shift: rows of `prompt` and `completion`; None: the candidates of the training comparisons"""
    normalize_samples: int = 256
    """gain_bias: responses sampled from the policy at sft_model_path"""
    response_length: int = 53
    """most tokens of a sampled response (toy comparisons, gain_bias)"""
    temperature: float = 0.7
    """sampling temperature (toy comparisons, gain_bias)"""

    # optimiser
    learning_rate: float = 3e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """course of the learning rate over the steps"""
    warmup_ratio: float = 0.0
    """share of the steps over which the learning rate rises linearly"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    tf_adam: bool = False
    """TensorFlow's placing of epsilon: eps_torch = adam_eps / sqrt(1 - beta2^t) at optimiser step t (lm-human-preferences)"""
    weight_decay: float = 0.01
    """AdamW's weight decay"""
    max_grad_norm: float | None = None
    """clip the gradient's global norm to this; None: only log it"""
    lora_rank: int | None = None
    """train adapters of this rank (LoRA, with alpha twice the rank) and the head in place of all weights; saved merged"""

    # memory and speed: never changes the result
    micro_batch_size: int = 8
    """comparisons a device puts through one forward and backward"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """attention kernel; None: the library's choice for the model"""


class Reward(nn.Module):
    """One call is one forward: scores gain * head(h) + bias, h the state of a row's last real token. The gain is trained, the bias
    cannot be: the loss does not see a constant."""

    def __init__(self, model):
        super().__init__()
        self.model, self.bias = model, 0.0
        self.gain = nn.Parameter(torch.ones(1))  # [RM-5] one trained scale; a bias would cancel in the loss
        self.takes_positions = utils.accepts(model.base_model.forward, "position_ids")

    def forward(self, tokens, mask):
        """Args: tokens [M, L]; mask [M, L] bool. Returns: scores [M] fp32, each at the row's last real token."""
        inputs = {"position_ids": utils.positions_from_mask(mask)} if self.takes_positions else {}
        hidden = self.model.base_model(
            input_ids=tokens, attention_mask=mask, use_cache=False, **inputs
        ).last_hidden_state  # [M, L, H]
        last = (mask * torch.arange(mask.size(1), device=mask.device)).argmax(1)  # [M] [RM-4] from the mask: no id is searched for
        hidden = hidden.gather(1, last.reshape(-1, 1, 1).expand(-1, 1, hidden.size(-1))).squeeze(1)  # [M, H]
        with torch.autocast(hidden.device.type, enabled=False):  # [RM-6] bf16 scores between 2 and 4 would lie 1/64 apart
            return self.gain * self.model.score(hidden.float()).squeeze(-1) + self.bias


def best_of_k_loss(scores, best):
    """Cross-entropy of K candidates' scores against the best one, summed over M; for K = 2: -log sigmoid(chosen - rejected).

    Args: scores [M, K]; best [M] int64. Returns: a scalar. Source: lm-human-preferences, label_types.py (PickBest).
    """
    return nn.functional.cross_entropy(scores, best, reduction="sum")  # [RM-7] log K a comparison where scores are equal


def num_correct(scores, best):
    """How many comparisons (scores [M, K], best [M]) have their best candidate strictly highest; a tie is wrong."""
    others = scores.scatter(1, best.unsqueeze(1), -math.inf)
    return (scores.gather(1, best.unsqueeze(1)).squeeze(1) > others.amax(1)).sum()  # [RM-8] >, so that a constant model gets 0


def gain_and_bias(scores, mean=0.0, std=1.0):
    """(gain, bias), scalar tensors, that give these raw scores [N] the wanted mean and (biased) std; equal scores: gain inf.

    Source: lm-human-preferences, rewards.py.
    """
    gain = std / scores.std(correction=0)
    return gain, mean - gain * scores.mean()


def check(args):
    """Ends with one line (exit code 2) where an argument makes no sense; nothing has been written by then."""
    utils.check_numbers(args)
    if args.sft_model_path is None:
        utils.fail(
            "--sft_model_path: required, a model folder or Hub name (only --dataset toy from the command line has a default)"
        )
    lora.check(args)
    utils.check_output_dir(args)


def read_comparisons(spec, flag, template=None, take=None):
    """Rows of any shape -> list of (prompt, candidates, best); None for the embedded task, whose rows are sampled later."""
    name, _, split = spec.partition(":")
    if name in toy.TASKS:
        if name != "toy":
            utils.fail(f"{flag} {spec}: has no comparisons; its reward is a function")
        toy.rows("prompts", split or "train")  # ends here if there is no such split
        return None
    rows, what = data.read_rows(spec, {}, flag=flag)[:take], f"{flag} {spec}"
    if "sample0" in rows[0]:
        if template is not None:
            utils.fail(f"--prompt_template {template!r}: {what} holds token ids")
        return label_rows(rows, what)
    if "response0_token" in rows[0]:  # N+
        rows = data.with_prompts(rows, template, what)
        data.check_columns(rows, {"response0_token": list, "response1_token": list, "choice": int}, what)
        both, names = (
            [[data.Padded(row[f"response{i}_token"]) for i in (0, 1)] for row in rows],
            ["response0_token", "response1_token"],
        )
        triples = [(row["prompt"], candidates, row["choice"]) for row, candidates in zip(rows, both, strict=True)]
    elif "candidates" in rows[0]:
        rows = data.with_prompts(rows, template, what)
        data.check_columns(rows, {"candidates": list, "best": int}, what)
        triples = [(row["prompt"], row["candidates"], row["best"]) for row in rows]
        names = ["candidates"] * max(2, len(rows[0]["candidates"]))
    else:
        names = ["chosen", "rejected"]
        triples = [(*chosen_and_rejected(row, template, f"{what}: row {i}"), 0) for i, row in enumerate(rows, 1)]
    for number, (prompt, candidates, best) in enumerate(triples, 1):
        if len(candidates) != len(names):
            utils.fail(f"{what}: row {number}, column 'candidates': must hold {len(names)} strings, in every row alike")
        for name, candidate in zip(names, candidates, strict=True):
            data.check_text(candidate, f"{what}: row {number}, column {name!r}", prompt)
        if not 0 <= best < len(candidates):
            utils.fail(f"{what}: row {number}, column 'best': {best} is no index of its candidates")
    return triples


def chosen_and_rejected(row, template, what):
    """(prompt, [chosen, rejected]) of a row; the prompt may be what both begin with, or be repeated by them as messages."""
    for column in ("chosen", "rejected"):
        if column not in row:
            utils.fail(f"{what} has no column {column!r} (it has {sorted(row)})")
    chosen, rejected = row["chosen"], row["rejected"]
    repeats = data.is_messages(chosen) and len(chosen) > 1
    if template is None and ("prompt" not in row or repeats):
        return data.split_common(chosen, rejected, what)
    (row,) = data.with_prompts([row], template, what)
    return row["prompt"], [chosen, rejected]


def label_rows(rows, what):
    """Rows of token ids `query`, `sample0`, `sample1`, .. and `best` -> list of ([ids], [[ids]] * K, best), without padding.

    Padding is dropped wherever it stands, since here a mask says what is real. A query may be empty, a sample may not.
    Source: lm-human-preferences, label_types.py (PickBest) and language/encodings.py (the padding token).
    """
    K = len({column for row in rows for column in row if column.startswith("sample") and column[6:].isdigit()})
    samples = [f"sample{k}" for k in range(max(2, K))]
    data.check_columns(rows, {"query": list, **dict.fromkeys(samples, list), "best": int}, what)
    for number, row in enumerate(rows, 1):
        for column in ("query", *samples):
            if not all(type(i) is int for i in row[column]):
                utils.fail(f"{what}: row {number}, column {column!r}: must hold token ids, whole numbers")
            if column != "query" and all(i == LABEL_PAD for i in row[column]):
                utils.fail(f"{what}: row {number}, column {column!r}: no token that is not padding")
        if not 0 <= row["best"] < K:
            utils.fail(f"{what}: row {number}, column 'best': {row['best']} is no index of its {K} samples")

    def real(ids):
        return [i for i in ids if i != LABEL_PAD]  # [DATA-4] it is no token of the model

    return [(real(row["query"]), [real(row[column]) for column in samples], row["best"]) for row in rows]


def main(args: Args):
    """Trains; returns the last row of metrics."""
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()
    check(args)
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # while the main process writes a large checkpoint
    # buffers never change, so they are not broadcast
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False), patience])
    engines.settle(accelerator, args)
    device, world, rank, B = accelerator.device, accelerator.num_processes, accelerator.process_index, args.batch_size
    if B % world:
        utils.fail(f"--batch_size {B}: not divisible by the {world} processes")
    for flag in ("take", "prompt_template", "max_prompt_length"):
        if getattr(args, flag) is not None and args.dataset.partition(":")[0] == "toy":
            utils.fail(
                f"--{flag} {getattr(args, flag)}: not for the embedded task, whose comparisons are sampled; --num_comparisons"
            )
    if args.lora_rank and engines.name(accelerator) not in ("one process", "DDP"):
        utils.fail(f"--lora_rank: for one process or DDP, not for {engines.name(accelerator)}")
    train_rows = read_comparisons(args.dataset, "--dataset", args.prompt_template, args.take)
    eval_rows = read_comparisons(args.eval_dataset, "--eval_dataset", args.prompt_template) if args.eval_dataset else []
    candidates_in = lambda rows: 4 if rows is None else len(rows[0][1]) if rows else 0  # noqa: E731 (None: toy, which has 4)
    K, eval_K = candidates_in(train_rows), candidates_in(eval_rows)
    if eval_K not in (0, K):
        utils.fail(f"--eval_dataset {args.eval_dataset}: {eval_K} candidates a row, but {K} in --dataset {args.dataset}")
    references, what = [], f"--reference_dataset {args.reference_dataset}"
    if args.reference_dataset:
        references = data.with_prompts(
            data.read_rows(args.reference_dataset, {}, flag="--reference_dataset"), args.prompt_template, what
        )
        references = data.with_completions(references, what, args.prompt_template)
    if train_rows is None and accelerator.is_main_process:
        toy.ensure_stages(args, print)
    accelerator.wait_for_everyone()

    # ---- model: a padding token of its own is saved, since the library reads scores at the last id that is not padding
    loading = {"attn_implementation": args.attn_implementation, "trust_remote_code": args.trust_remote_code}
    tokenizer = utils.load_tokenizer(args.sft_model_path, "--sft_model_path", args.trust_remote_code)
    torch.manual_seed(args.seed)  # [RM-2] before the head is drawn
    model = utils.load_reward_model(args.sft_model_path, "--sft_model_path", True, **loading)
    # [RM-1] normalised states, d entries of variance 1, then score with variance 1
    nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    vocabulary = model.get_input_embeddings().num_embeddings  # of the policy, without the padding token that may be added
    # [RM-3] transformers scores the last id != pad, and would skip EOS
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(tokenizer.pad_token_id + 1)
    model.config.pad_token_id = tokenizer.pad_token_id
    model = lora.add_adapters(model, args.lora_rank) if args.lora_rank else model
    checksum = utils.checksum(model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    # ---- data: token ids of prompt and candidate, joined as the policy will see them
    def joined(prompt, completion):
        query, response = data.encode(tokenizer, prompt, completion)
        return query + response

    @torch.no_grad()
    def sample_responses(prompts, n, use):
        """n responses of the model at --sft_model_path to each of N prompts; every process samples all of them.

        use: TRAIN, EVAL or NORMALISATION, so that the noise differs. Returns: token ids of the prompts, and of n responses to each.
        """
        from rlhf_details.train_rloo import REWARD_DATA, Policy, sample  # the sampler is RLOO's and PPO's

        policy = utils.load_policy(args.sft_model_path, "--sft_model_path", **loading)
        policy = Policy(policy, args.temperature).to(device).eval()
        ids, answers = [data.encode(tokenizer, p) for p in prompts], []
        for start in range(0, len(ids), 128):
            queries, query_mask = utils.left_pad([i for i in ids[start : start + 128] for _ in range(n)], device)
            numbers = torch.arange(start * n, start * n + len(queries), device=device)
            coordinates, R = (args.seed, REWARD_DATA, use), args.response_length
            # [RM-11] lm-human-preferences' rows: whole responses, no EOS
            stop_id = None if type(prompts[0]) is list and not data.is_messages(prompts[0]) else tokenizer.eos_token_id
            with accelerator.autocast():
                responses, mask, _ = sample(policy, queries, query_mask, numbers, 1, R, stop_id, coordinates)
            answers += [r[m].tolist() for r, m in zip(responses, mask, strict=True)]
        return ids, [answers[i * n : (i + 1) * n] for i in range(len(ids))]

    def toy_comparisons(spec, num, use):
        def four_texts_each(prompts):
            _, answers = sample_responses(prompts, 4, use)
            return [[tokenizer.decode(ids, skip_special_tokens=True) for ids in four] for four in answers]

        return toy.comparisons(spec.partition(":")[2] or "train", num, four_texts_each)

    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)

    def keep_short(rows, what):
        """(numbers, from 1, of the rows whose prompt is not above --max_prompt_length; these rows)."""
        if args.max_prompt_length is None or not rows:
            return range(1, len(rows) + 1), rows
        kept = data.short_enough([data.encode(tokenizer, prompt) for prompt, _, _ in rows], args.max_prompt_length, what)
        return [i + 1 for i in kept], [rows[i] for i in kept]

    def encode(rows, what, row_numbers=None):
        """Token ids of each candidate of (prompt, candidates, best) rows: list of ([ids] * K, best)."""
        row_numbers = row_numbers or range(1, len(rows) + 1)
        are_ids = rows and isinstance(rows[0][0], list) and not data.is_messages(rows[0][0])
        for number, (query, samples, _) in zip(row_numbers, rows if are_ids else [], strict=False):
            if isinstance(query, data.Padded):
                query, samples = data.encode(tokenizer, query), [data.encode(tokenizer, ids) for ids in samples]
            for column, ids in [("query", query), *((f"sample{k}", ids) for k, ids in enumerate(samples))]:
                for i in ids:
                    if not 0 <= i < vocabulary or i == tokenizer.pad_token_id:  # the library reads no score at its padding
                        known = f"the labels' padding {LABEL_PAD} nor a token of the model ({vocabulary}, less its own padding)"
                        utils.fail(f"{what}: row {number}, column {column!r}: id {i} is neither {known}")
        encoded = [([joined(prompt, c) for c in candidates], best) for prompt, candidates, best in rows]
        for number, (candidates, _) in zip(row_numbers, encoded, strict=True):
            if max(map(len, candidates)) > context:
                utils.fail(f"{what}: row {number} has {max(map(len, candidates))} tokens; the model's context is {context}")
        return encoded

    if train_rows is None:
        train_rows = toy_comparisons(args.dataset, args.num_comparisons, TRAIN)
    if eval_rows is None:
        eval_rows = toy_comparisons(args.eval_dataset, 512, EVAL)
    row_numbers, train_rows = keep_short(train_rows, f"--dataset {args.dataset}")
    eval_numbers, eval_rows = keep_short(eval_rows, f"--eval_dataset {args.eval_dataset}")
    train_ids = encode(train_rows, f"--dataset {args.dataset}", row_numbers)
    eval_ids = encode(eval_rows, f"--eval_dataset {args.eval_dataset}", eval_numbers)
    references = encode([(r["prompt"], [r["completion"]], 0) for r in references], f"--reference_dataset {args.reference_dataset}")
    # lists of token ids; none given: all candidates of the comparisons
    references = [row for candidates, _ in references or train_ids for row in candidates]
    prompts = [train_rows[i % len(train_rows)][0] for i in range(args.normalize_samples)]  # to sample from, for gain_bias
    if args.normalization == "gain_bias":
        rows = [{"prompt": prompt} for prompt in prompts]
        data.encode_prompts(tokenizer, rows, context - args.response_length, f"--dataset {args.dataset}")
    if len(train_ids) < B:
        utils.fail(f"--batch_size {B}: more than the {len(train_ids)} rows of --dataset {args.dataset}")
    steps_per_epoch = len(train_ids) // B  # the ragged tail is left out, another one in each epoch
    num_steps = args.num_train_epochs * steps_per_epoch

    reward = Reward(model).to(device)
    inner = reward  # whose gain and bias are within reach after engines.prepare has wrapped it
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": [reward.gain], "weight_decay": 0.0}],
        lr=args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay,  # [OPT-4] both given, neither left to the library
    )  # fmt: skip

    @torch.no_grad()
    def score(rows):
        """Scores [N] of rows of token ids, each process a share."""
        reward.eval()
        width = args.micro_batch_size * K
        share = [rows[i % len(rows)] for i in range(len(rows) + -len(rows) % world)][rank::world]
        with accelerator.autocast():
            scores = torch.cat([reward(*utils.left_pad(share[i : i + width], device)) for i in range(0, len(share), width)])
        return accelerator.gather(scores).reshape(world, -1).T.reshape(-1)[: len(rows)]  # back in the rows' order

    def normalization(rows):
        """(gain, bias) by which today's scores get mean 0 and std 1 on these rows, and a line that says so."""
        scores = score(rows)
        gain, bias = (x.item() for x in gain_and_bias(scores))
        if not math.isfinite(gain):
            utils.fail(f"--normalization gain_bias: the {len(rows)} sampled responses all score {scores[0].item():.4g}")
        line = f"mean {scores.mean():.3f} and std {scores.std(correction=0):.3f} of {len(rows)} sampled responses -> 0 and 1"
        return gain, bias, line

    samples, said = [], []
    if args.normalization == "gain_bias":
        queries, answers = sample_responses(prompts, 1, NORMALISATION)
        samples = [q + a[0] for q, a in zip(queries, answers, strict=True)]
        gain, inner.bias, line = normalization(samples)
        inner.gain.data.fill_(gain)  # [RM-9] the loss starts from scores that are neither huge nor tiny
        said.append(line)
    reward, optimizer = engines.prepare(accelerator, reward, optimizer)
    run = runs.Run(
        args,
        accelerator,
        num_steps,
        ["eps", "train/rm/loss", "train/rm/accuracy", "train/rm/lr"],
        [train_ids, eval_ids, references, checksum],
    )
    shown = [{"prompt": p, "candidates": c, "best": best} for p, c, best in train_rows]
    ids, texts = ([f(tokenizer, prompt) for prompt, _, _ in train_rows] for f in (data.encode, data.as_text))
    run.show_data(data.PromptSet(ids, texts, shown, row_numbers))
    run.say(f"{args.sft_model_path}, {len(train_ids)} comparisons of {K}, {num_steps} steps, {world} process(es)")
    run.note_combination("train_reward", model.config.model_type, "plain")
    for line in said:
        run.say(line)

    def show(i):
        return f"{[tokenizer.decode(ids) for ids in train_ids[row_numbers.index(i)][0]]}"

    # ---- the loop
    done, carried, _ = run.resume(reward, optimizer)
    inner.bias = carried.get("bias", inner.bias)
    start_time, metrics = time.time() - carried.get("seconds", 0), carried.get("metrics")
    for step in range(done + 1, num_steps + 1):
        step_time = time.time()
        epoch, place = divmod(step - 1, steps_per_epoch)
        if place == 0 or step == done + 1:
            order = utils.permutation(len(train_ids), args.seed, epoch)
        for group in optimizer.param_groups:
            group["lr"] = utils.learning_rate_at(step, num_steps, args.learning_rate, args.lr_schedule, args.warmup_ratio)
            if args.tf_adam:  # TensorFlow adds epsilon to the root of v before the bias correction, torch after it
                group["eps"] = args.adam_eps / math.sqrt(1 - group["betas"][1] ** step)  # [OPT-3] so early steps are smaller
        numbers = order[place * B : (place + 1) * B]
        mine = [train_ids[i] for i in numbers[rank::world]]  # [RM-14] one order, disjoint shares
        micro_batches = [mine[i : i + args.micro_batch_size] for i in range(0, len(mine), args.micro_batch_size)]
        reward.train()
        stats, row_scores = torch.zeros(2, device=device), []
        for i, micro_batch in enumerate(micro_batches):
            best = torch.tensor([best for _, best in micro_batch], device=device)  # [M]
            is_last = i + 1 == len(micro_batches)
            with engines.accumulate(accelerator, reward, is_last):
                tokens, mask = utils.left_pad([row for candidates, _ in micro_batch for row in candidates], device)  # [M * K, L]
                scores = reward(tokens, mask).reshape(-1, K)  # [M, K]
                loss = best_of_k_loss(scores, best)
                row_scores.append(scores.detach().sum(1))
                if is_last:  # all scores are known, and no weight is touched
                    gathered = [row_numbers[i] for r in range(world) for i in numbers[r::world]]  # of the rows, from 1
                    run.check_finite("the score", step, accelerator.gather(torch.cat(row_scores)), show, gathered, "row")
                loss_share = loss / B  # [OPT-5] B, not this micro-batch's count
                accelerator.backward(loss_share * world)  # [OPT-6] the engines average over processes, a sum is meant
            stats += torch.stack([loss.detach(), num_correct(scores.detach(), best).float()])
        check_norm = functools.partial(run.check_finite, "the gradient's norm", step, show=show, rows=gathered, unit="row")
        grad_norm = engines.step(accelerator, reward, optimizer, args.max_grad_norm, check_norm)
        loss_sum, correct = accelerator.reduce(stats, "sum").tolist()
        now = time.time()
        metrics = {
            "update": step,
            "episode": step * B,
            "epoch": step / steps_per_epoch,
            "train/rm/loss": loss_sum / B,
            "train/rm/accuracy": correct / B,
            "train/rm/lr": optimizer.param_groups[0]["lr"],
            "policy/grad_norm": grad_norm,
            "eps": B / (now - step_time),  # comparisons a second
            "time/update": now - step_time,
            "time/from_scratch": now - start_time,
        }
        if step == num_steps and eval_ids:
            best = torch.tensor([best for _, best in eval_ids], device=device)
            scores = score([row for candidates, _ in eval_ids for row in candidates]).reshape(-1, K)
            metrics["eval/rm/accuracy"] = num_correct(scores, best).item() / len(best)
            metrics["eval/rm/loss"] = best_of_k_loss(scores, best).item() / len(best)
        run.log(metrics, step)
        if run.is_checkpoint_due(step):
            run.checkpoint(step, reward, optimizer, {"seconds": time.time() - start_time, "metrics": metrics, "bias": inner.bias})

    # ---- normalise, fold, save
    gain, bias = 1.0, 0.0
    if args.normalization == "gain_bias":
        gain, bias, line = normalization(samples)  # [RM-10] training has moved them; kl_coef is a price in these points
        run.say(line)
    if args.normalization == "mean_shift":
        bias = -score(references).mean().item()  # [RM-12] a reference scores 0 in the mean
        run.say(f"mean score {-bias:.3f} on {len(references)} reference responses -> 0")
    if args.lora_rank:  # the head, its scale and its bias belong to the whole model, so it is saved as one
        lora.merge(model)
    weights = engines.full_weights(accelerator, reward)
    if accelerator.is_main_process:
        weights["model.score.weight"] = weights["model.score.weight"] * weights["gain"] * gain  # [RM-13] libraries know no gain
        model.config.reward_bias = inner.bias * gain + bias  # gain * (g h + b) + bias = (gain * g) h + (gain * b + bias)
    run.save_model(model, weights, tokenizer)
    summary = [f"  {name:22} {value:8.3f}" for name, value in metrics.items() if name.startswith("eval/")]
    run.close([*summary, f"model: {args.output_dir}   run: {run.folder}   {time.time() - start_time:.0f} s"])
    accelerator.wait_for_everyone()
    return metrics


if __name__ == "__main__":
    main(utils.parse_args(Args, toy.defaults("train_reward")))
    utils.leave_process_group()
