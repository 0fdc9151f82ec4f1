"""
RLOO: REINFORCE with a leave-one-out baseline, on a language model and a learned reward (arXiv 2402.14740).

1. Each prompt gets k responses. A response is one action: its reward is score - kl_coef * (sum of its tokens' KL).
2. The baseline of a response is the mean reward of its k - 1 siblings. No value model, no GAE, and by default no whitening.
3. One optimiser step on a fresh rollout is exactly REINFORCE. With more steps, or --async_rollouts, the loss is PPO's clipped
   one, with a probability ratio a response (under --token_level_kl: a token).
4. Up to k responses share one computation of their prompt: packed in a row, [prompt | r1 | .. | rn], under a block mask for
   log-probs and scores, and interleaved by step in the sampler's cache. Where a model does not allow it: plain rows.
5. All randomness is a function of coordinates (seed, purpose, update, row, step, token), never of a generator's state.

Left out on purpose: a separate inference engine, top-k and top-p (they would make the sampler another policy), a KL loss
(the KL is in the reward).

Shapes    P: prompts   k: responses a prompt   B = P * k: episodes, the k of a prompt adjacent   Q: query tokens, left-padded
          R: response tokens, right-padded   V: vocabulary   n: responses packed in a row   L: columns of a row   F: rewards
          M: episodes of a micro-batch (in a model's forward: its rows)   N: columns read   H: hidden size
          In `sample` and in evaluations P, B and N count what that call is given.
Masks     True = real token. They travel with the tokens; nothing is ever found by looking for a pad token.

One process:   python rlhf_details/train_rloo.py
N processes:   accelerate launch --num_processes N rlhf_details/train_rloo.py
"""

import copy
import functools
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache
from transformers.utils import logging as transformers_logging

from rlhf_details import data, engines, lora, reward_functions, runs, toy, utils


@dataclass
class Args:
    # run
    exp_name: str = "train_rloo"
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
    output_dir: str = "models/rloo"
    """folder of the trained policy"""
    overwrite: bool = False
    """replace an output folder that holds another model"""
    resume: bool = False
    """go on from the newest whole checkpoint of --run_name, or of the newest run of this dataset, exp_name and seed"""
    checkpoint_every: int = 50
    """updates between checkpoints, the last two of which are kept in the run's folder; 0: only on SIGTERM and SIGINT"""
    push_to_hub: bool = False
    """upload output_dir to the Hugging Face Hub at the end"""
    hub_model_id: str | None = None
    """the Hub repository, "name" or "owner/name"; None: output_dir with - for /"""

    # data and models
    dataset: str = "toy"
    """prompts: "toy", "toy-sum", a .jsonl/.json/.csv/.parquet file, a folder or a Hub data set, with :PART for a split or file of
    it, or FILE.py:FUNCTION that returns rows"""
    eval_dataset: str | None = None
    """held-out prompts, scored before and after training; None: no held-out evaluation"""
    take: int | None = None
    """only the first so many rows of --dataset"""
    prompt_template: str | None = None
    """the prompt, with the row's columns in their places: "Question: {question}\\nAnswer:"; None: the column `prompt`"""
    max_prompt_length: int | None = None
    """drop rows whose prompt has more tokens than this; the number dropped is printed"""
    filter_length: bool = False
    """drop rows whose prompt has more than 0.9 * response_length tokens"""
    sft_model_path: str | None = None
    """the policy to start from, and the reference of the KL; a folder or a Hub model"""
    reward_model_path: str | None = None
    """reward model, a sequence-classification folder with one label; one with a tokenizer of its own is given text"""
    allow_untrained_reward_model: bool = False
    """accept a reward model whose head would be newly initialised (dummy runs)"""
    reward_fn: tuple[str, ...] = ()
    """functions f(prompts, completions, **columns) -> rewards, FILE.py:function or package.module:function, instead of a reward
    model or added to its score"""
    reward_fn_weights: tuple[float, ...] = ()
    """what each of them is multiplied by, in their order; none: 1"""
    trust_remote_code: bool = False
    """run the Python code that comes with a model; for models whose authors you trust"""

    # sampling
    response_length: int = 53
    """most tokens a response may have (R)"""
    temperature: float = 0.7
    """sampling temperature; it divides the logits of every log-prob as well"""
    stop_token: str = "eos"
    """a response ends with this token: "eos", "none", or a text that is one token"""
    missing_eos_penalty: float | None = 1.0
    """what a response without the stop token pays, in points of score; None: nothing"""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """subtract the penalty from the score, or replace the score by -penalty"""

    # reward and KL
    kl_coef: float = 0.03
    """weight of the KL in the reward (beta)"""
    normalize_reward: bool = False
    """REINFORCE++: whiten the scores over the whole batch"""
    reward_clip_range: float | None = None
    """REINFORCE++: clip the scores to [-c, c], after whitening where that is on"""
    token_level_kl: bool = False
    """REINFORCE++: each token pays for the KL from itself on, with a probability ratio a token"""

    # algorithm
    rloo_k: int = 2
    """responses a prompt (k)"""
    total_episodes: int = 1_000_000
    """responses to sample in the whole run; rounded up to whole batches"""
    batch_size: int = 512
    """episodes an update, over all processes (B)"""
    num_mini_batches: int = 2
    """optimiser steps a pass over the batch"""
    num_ppo_epochs: int = 2
    """passes over the batch"""
    async_rollouts: bool = False
    """sample the next batch while this one trains, one update off-policy; for one process or DDP"""
    cliprange: float = 0.2
    """clip range of the probability ratio"""
    normalize_advantage: bool = False
    """REINFORCE++: whiten the advantages over the whole batch"""

    # optimiser
    learning_rate: float = 3e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """course of the learning rate over the updates"""
    warmup_ratio: float = 0.0
    """share of the updates over which the learning rate rises linearly"""
    adam_eps: float = 1e-8
    """AdamW's epsilon"""
    weight_decay: float = 0.0
    """AdamW's weight decay"""
    max_grad_norm: float | None = 1.0
    """clip the gradient's global norm to this; None: only log it"""
    lora_rank: int | None = None
    """train adapters of this rank (LoRA, with alpha twice the rank) in place of all weights; None: all weights"""
    lora_merge: bool = False
    """save the model with its adapters merged, and them in output_dir/adapter; else output_dir holds the adapters alone"""

    # logging
    num_sample_generations: int = 10
    """tables of sample responses to show, spread evenly over the run"""
    eval_every: int = 0
    """updates between held-out evaluations; 0: only before and after"""

    # memory and speed: never changes the result
    micro_batch_size: int = 16
    """episodes a device puts through one forward, and backward"""
    rollout_micro_batch_size: int = 64
    """episodes a device samples at once"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    share_prompts: bool = True
    """compute each prompt once for its k responses, where the model can be shown to allow it"""
    compile: bool = False
    """compile the sampler's steps, over a cache of fixed size; for GPUs, takes a minute at the start"""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """attention kernel; None: the library's choice for the model"""


# ---- models: one module call is one forward, so that every engine sees all parameters through it ---------------------
LOGITS_AT_ONCE = 2**24  # 64 MiB in fp32


class Policy(nn.Module):
    """Next-token logits, or the log-probs of given tokens; always of softmax(logits / temperature), always in fp32."""

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.plain_head = utils.has_plain_head(model)
        self.takes_positions = utils.accepts(model.forward, "position_ids")

    def forward(self, tokens, mask, positions, index=slice(-1, None), labels=None, cache=None):
        """
        Args: tokens, positions [M, L]; mask [M, L] bool or [M, 1, L, L] additive; cache, a transformers cache that is extended.
        index [N] or a slice: where to read logits (the last position), labels [M, N]: the tokens they predict.
        Returns: (log-probs, entropies), both [M, N] fp32, or without labels the logits [M, N, V] fp32.
        """
        inputs = {"input_ids": tokens, "attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None}
        inputs |= {"position_ids": positions} if self.takes_positions else {}
        head, vocab_size = self.model.get_output_embeddings(), self.model.config.get_text_config().vocab_size
        if self.plain_head:
            hidden = self.model.base_model(**inputs).last_hidden_state[:, index]  # [M, N, H]: where a response token is predicted
        else:
            head, hidden = nn.Identity(), self.model(**inputs).logits[:, index]  # [M, N, V], as there is no plain head to apply
        if labels is None:
            return head(hidden).float() / self.temperature  # [GEN-2] T = 0.7 samples another policy than T = 1

        def of_tokens(hidden, labels):
            """Log-probs and entropies [C] of C labels, at their hidden states [C, H] (without a plain head: logits)."""
            # [GEN-3] of the policy that is sampled: the same T
            log_softmax = (head(hidden).float() / self.temperature).log_softmax(-1)  # [C, V]
            with torch.no_grad():
                entropies = -(log_softmax.exp() * log_softmax).sum(-1)
            return log_softmax.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropies

        # [GEN-8] all logits at once: M * N * V numbers, and their gradients
        pieces = [x.flatten(0, 1).split(max(1, LOGITS_AT_ONCE // vocab_size)) for x in (hidden, labels)]
        function = of_tokens if len(pieces[0]) == 1 else functools.partial(checkpoint, of_tokens, use_reentrant=False)
        logprobs, entropies = (torch.cat(x).reshape(labels.shape) for x in zip(*map(function, *pieces), strict=True))
        return logprobs, entropies


class Reward(nn.Module):
    """Scores: the head's output at given tokens, plus the bias that normalisation left in the configuration."""

    def __init__(self, model):
        super().__init__()
        # [REW-1] normalisation's shift, which plain loaders ignore
        self.model, self.bias = model, getattr(model.config, "reward_bias", 0.0)
        self.takes_positions = utils.accepts(model.base_model.forward, "position_ids")

    def forward(self, tokens, mask, positions, last):
        """Args: as Policy's; last [M, n]: the columns to read. Returns: scores [M, n] fp32."""
        inputs = {"position_ids": positions} if self.takes_positions else {}
        hidden = self.model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False, **inputs).last_hidden_state
        hidden = hidden.gather(1, last.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))  # [M, n, H]
        with torch.autocast(hidden.device.type, enabled=False):  # [RM-6] bf16 scores between 2 and 4 would lie 1/64 apart
            return self.model.score(hidden.float()).squeeze(-1) + self.bias


# ---- sampling --------------------------------------------------------------------------------------------------------
TRAINING, EVALUATION, SAMPLE_TABLE, REWARD_DATA = 0, 1, 2, 3  # purposes: what the noise of a sample is drawn for


def hash32(x):
    """A 32-bit integer hash, elementwise on int32 tensors (the "lowbias32" mixer); products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def fold(key, coordinate):
    """Hashes one more coordinate (int or int32 tensor) into a key; hashing, not adding, keeps (1, 2) apart from (2, 1)."""
    return hash32(key ^ coordinate)


def gumbel_noise(keys, vocab_size):
    """Standard Gumbel noise [B, V] fp32, a function of (key of the row, token id); keys: [B] int32.

    31 hashed bits make u in (0, 1). Large noise decides an argmax; as -log(-log(1 - u)) it comes from small u, where floats are
    dense, and reaches 22. As -log(-log(u)) it would come from u near 1, where fp32 ends at about 17.
    """
    tokens = fold(torch.arange(vocab_size, dtype=torch.int32, device=keys.device), 0x3C6EF372)  # [V]
    bits = hash32(keys.unsqueeze(1) ^ tokens) & 0x7FFFFFFF  # [B, V]
    u = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


@torch.no_grad()
def sample(policy, queries, query_mask, rows, n, response_length, stop_id, coordinates, longest=None):
    """n responses to each query, each token from softmax(logits / T): no top-k, no top-p, no generation_config.

    A token is argmax(logits / T + Gumbel noise), which is a draw from the softmax; the noise is a function of
    (coordinates, row, step, token id), so rows may be grouped, sliced and spread over processes at will.
    Args: policy, a Policy in eval mode; queries, query_mask [P, Q]; rows [P * n], the global number of each response;
    stop_id, a token id or None; coordinates, e.g. (seed, purpose, update); longest, for --compile: pad prompts to so many columns.
    Returns: responses [P * n, R] int64, mask [P * n, R] bool (True up to and including the stop token), log-probs fp32.
    """
    unused = int(query_mask.any(0).int().argmax())  # columns that are padding in every row
    queries, query_mask = (nn.functional.pad(x, (longest - x.size(1) if longest else -unused, 0)) for x in (queries, query_mask))
    (P, Q), B, device = queries.shape, len(rows), queries.device
    keys = torch.full((B,), 0x1B873593, dtype=torch.int32, device=device)  # not zero, since hash32(0) = 0
    for coordinate in (*coordinates, rows.int()):
        keys = fold(keys, coordinate)  # [GEN-4] no stream: batch-mates and processes have no say
    responses = torch.zeros(B, response_length, dtype=torch.long, device=device)
    mask = torch.zeros(B, response_length, dtype=torch.bool, device=device)
    logprobs = torch.zeros(B, response_length, device=device)
    # prefill: a prompt is computed once; a step then adds one token of each of its n responses to the prompt's row
    #   p p p | a b | a b | ...        n = 2, prompt p p p: column Q + t * n + j is token t of response j, which sees its own
    own = torch.eye(n, dtype=torch.bool, device=device).repeat(1, response_length).expand(P, -1, -1)  # [P, n, n * R]
    visible = torch.cat([query_mask.unsqueeze(1).expand(-1, n, -1), own], 2)  # [P, n, Q + n * R]
    column = torch.arange(visible.size(2), device=device)
    cache, next_logits = DynamicCache(config=policy_config(policy)), policy
    if longest:
        cache, next_logits = compiled(policy, P, len(column))
        cache.reset()
    logits = policy(queries, query_mask, utils.positions_from_mask(query_mask), cache=cache)  # [P, 1, V]
    logits = logits.squeeze(1).repeat_interleave(n, 0)  # [B, V]
    position = query_mask.sum(1, keepdim=True).expand(P, n)  # [P, n], of a response's first token
    alive = torch.ones(B, dtype=torch.bool, device=device)
    for t in range(response_length):
        # [GEN-1] Gumbel-max; the logits are tempered already
        token = (logits + gumbel_noise(fold(keys, t), logits.size(-1))).argmax(-1)  # [B]
        responses[:, t], mask[:, t] = token * alive, alive
        logprobs[:, t] = (logits.gather(1, token.unsqueeze(1)).squeeze(1) - logits.logsumexp(-1)) * alive
        if stop_id is not None:
            alive = alive & (token != stop_id)  # [GEN-5] the stop token itself is still in the mask
        if t + 1 == response_length or not engines.any_row(policy, alive, t):
            break
        past = Q + n * (t + 1)
        seen = visible & (column < past) if longest else visible[..., :past]  # [P, n, Q + n * R] or [P, n, past]
        seen = additive(seen) if n > 1 or longest else seen.squeeze(1)
        tokens = (token * alive).reshape(P, n)  # finished rows run on with token 0, unread
        # [GEN-6] positions go on behind the prompt's real tokens, not behind its padding
        logits = next_logits(tokens, seen, position + t, slice(None), cache=cache).flatten(0, 1)  # [P, n, V] -> [B, V]
    return responses, mask, logprobs


def additive(visible):
    """Attention mask [M, 1, L, L'] fp32 of a bool [M, L, L']: 0 where visible, else a number finite in fp32 and in bf16."""
    lowest = torch.finfo(torch.bfloat16).min  # once cast to fp16 it is -inf
    return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, lowest).unsqueeze(1)


@functools.cache
def compiled(policy, num_rows, columns):  # a cache for each number of rows
    """(static cache, compiled policy) for --compile: steps of one shape, which a GPU replays as one graph, not launch by launch."""
    policy = getattr(policy, "module", policy)
    step = torch.compile(policy, mode="reduce-overhead", dynamic=False)
    return StaticCache(config=policy.model.config, max_cache_len=columns), step


def policy_config(policy):
    """Configuration of the language model inside a (possibly wrapped) Policy."""
    return getattr(policy, "module", policy).model.config


class Actor:
    """A thread with weights of its own that samples the next batch while the learner trains on this one.

        learner   push W0, 1 |                | take 1, push W0, 2 | train 1 -> W1   | take 2, push W1, 3 | train 2 -> W2    | ..
        actor                | sample 1 by W0 |                    | sample 2 by W0 .. |                  | sample 3 by W1 ... | ..
    So batch 1 is fresh and every later one is stale by exactly one update, whatever the speed of either side: a push follows a
    take, so neither can run ahead. There is no collective in this thread, which would meet the learner's.
    Source: open-instruct, ppo_vllm_thread_ray_gtrl.py, with its two queues of size one.
    """

    def __init__(self, policy, rollout):
        self.policy, self.rollout = copy.deepcopy(policy).eval().requires_grad_(False), rollout
        self.thread, self.batch = ThreadPoolExecutor(1), None
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def push(self, model, update):
        """Hands over a model's weights and the number of the update to sample for; the last batch has been taken by now."""
        self.policy.model.load_state_dict(model.state_dict())  # [GEN-10] a copy, which training leaves alone
        if self.stream:
            torch.cuda.synchronize()  # the weights are there, and the learner has read what the actor will write over
        self.batch = self.thread.submit(self.sample, update)

    def sample(self, update):
        """Runs in the thread: stream, device, autocast and no_grad hold for one thread, so they are set here and in `rollout`."""
        if not self.stream:
            return self.rollout(self.policy, update)
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            batch = self.rollout(self.policy, update)
            self.stream.synchronize()
            return batch

    def put(self, batch):
        """The batch to take next, where a checkpoint holds it."""
        self.batch = Future()
        self.batch.set_result(batch)

    def take(self):
        """Waits for the batch; what failed in the thread is raised here."""
        batch = self.batch.result()
        for x in batch if self.stream else ():
            if isinstance(x, torch.Tensor):
                x.record_stream(torch.cuda.current_stream())
        return batch


PENDING = ("responses", "response_mask", "sampled_logprobs", "logprobs")  # what a checkpoint holds of a batch that waits


# ---- from tokens to log-probs and scores -----------------------------------------------------------------------------
def pack(queries, query_mask, responses, response_mask, n):
    """Rows of n responses to one prompt, each blind to the others and placed as if it alone followed the prompt.

             p  p  p  a1 a2 b1 b2      n = 2, prompt p p p, responses a1 a2 and b1 b2
        p    x  .  .  .  .  .  .       (its first token; the prompt is causal as well)
        a1   x  x  x  x  .  .  .
        b2   x  x  x  .  .  x  x       b sees the prompt and its own past; its positions restart after the prompt
    With n = 1 this is an ordinary left-padded row, and the mask stays the ordinary [M, L].
    Args: queries, query_mask [M, Q] (of adjacent rows of one prompt the first is read); responses, response_mask [M, R].
    Returns: tokens, mask (bool [M/n, L] or additive [M/n, 1, L, L]), positions [M/n, L] with L = Q + nR, and
    index [n * R]: position Q-1 predicts the first token of every response, each response token the next one.
    """
    Q, R = queries.size(1), responses.size(1)
    queries, query_mask, device = queries[::n], query_mask[::n], queries.device
    tokens = torch.cat([queries, responses.reshape(-1, n * R)], 1)  # [M/n, L]
    real = torch.cat([query_mask, response_mask.reshape(-1, n * R)], 1)  # [M/n, L]
    step = torch.arange(R, device=device).repeat(n)  # [n * R], 0 .. R-1 for each response
    # [RLOO-10] each response is placed as if it alone followed the prompt
    positions = torch.cat([utils.positions_from_mask(query_mask), query_mask.sum(1, keepdim=True) + step], 1)  # [M/n, L]
    # [GEN-7] the state before a token predicts it
    index = torch.where(step == 0, Q - 1, Q - 1 + torch.arange(n * R, device=device))  # [n * R]
    if n == 1:
        return tokens, real, positions, index
    owner = torch.cat([torch.zeros(Q, device=device), 1 + torch.arange(n, device=device).repeat_interleave(R)])  # [L], 0: prompt
    column = torch.arange(Q + n * R, device=device)  # [L]
    # [RLOO-9] prompt and own past
    visible = (column.unsqueeze(1) >= column) & ((owner == 0) | (owner.unsqueeze(1) == owner))  # [L, L]
    itself = column.unsqueeze(1) == column
    visible = (visible & real.unsqueeze(1)) | itself  # [M/n, L, L] [RLOO-11] an empty row is NaN where fp16 makes the mask -inf
    return tokens, additive(visible), positions, index


def trim(batch):
    """The batch (queries, query_mask, responses, response_mask) without the columns that are padding in every row."""
    queries, query_mask, responses, response_mask = batch
    first, width = int(query_mask.any(0).int().argmax()), int(response_mask.sum(1).max())
    return queries[:, first:], query_mask[:, first:], responses[:, :width], response_mask[:, :width]


def response_logprobs(policy, batch, n):
    """Log-probs and entropies [M, R] fp32, 0 at padding, of a batch (queries, query_mask, responses, response_mask)."""
    M, R = batch[2].shape
    batch = batch if engines.is_zero3(policy) else trim(batch)  # ZeRO-3 gathers the head for each piece: as many everywhere
    queries, query_mask, responses, response_mask = batch
    tokens, mask, positions, index = pack(queries, query_mask, responses, response_mask, n)
    outputs = policy(tokens, mask, positions, index, responses.reshape(M // n, -1))  # log-probs, entropies: [M/n, n * width]
    # [REW-6] zeros, not a sentinel: sums over a row need no mask
    return tuple(nn.functional.pad(x.reshape(responses.shape) * response_mask, (0, R - responses.size(1))) for x in outputs)


def response_scores(reward_model, batch, n):
    """Scores [M] fp32: the head's output at each response's last real token, found from the mask."""
    queries, query_mask, responses, response_mask = trim(batch)
    tokens, mask, positions, _ = pack(queries, query_mask, responses, response_mask, n)
    start = queries.size(1) + responses.size(1) * torch.arange(n, device=queries.device)  # [n], first column of each response
    last = start + response_mask.sum(1).reshape(-1, n) - 1  # [M/n, n] [REW-2] by the mask: pad may be EOS
    return reward_model(tokens, mask, positions, last).reshape(-1)


def by_length(masks, n=1):
    """Row numbers [M], the fewest real tokens first, so that a slice of them holds little padding; n adjacent ones stay so."""
    lengths = sum(mask.sum(1) for mask in masks).reshape(-1, n).amax(1)  # [M/n]
    groups = lengths.argsort(stable=True)
    return (groups.unsqueeze(1) * n + torch.arange(n, device=groups.device)).reshape(-1)


def in_slices(function, tensors, size, n=1):
    """Applies a function of row slices, of `size` rows each, to a list of tensors; the tuples it returns are concatenated.

    A slice takes rows of similar length, by the masks (bool) among the tensors; what is returned is in the tensors' order.
    """
    order = by_length([x for x in tensors if x.dtype == torch.bool], n)
    parts = [function(*(x[rows] for x in tensors)) for rows in order.split(size)]
    back = order.argsort()
    return [torch.cat(part)[back] for part in zip(*parts, strict=True)]


@torch.no_grad()
def one_response_each(policy, reference, score_slice, ids, args, stop_id, coordinates, accelerator):
    """Samples and scores one response to each prompt, at the training temperature; each process does its share.

    Args: ids, N lists of token ids; score_slice(numbers of the prompts [M], batch, ended [M]) -> values [M, F] and kinds [M, F] of
    the rewards; a number of N or more is filler, for prompt number modulo N.
    Returns: responses, mask [N, R], ended, summed KL [N], values, kinds [N, F], gathered to every process.
    """
    policy.eval()
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    mine = torch.arange(len(ids) + -len(ids) % world, device=device).chunk(world)[rank]  # filled up to whole shares ...
    queries, query_mask = utils.left_pad([ids[i % len(ids)] for i in mine.tolist()], device)

    def one_slice(queries, query_mask, rows):
        responses, mask, logprobs = sample(policy, queries, query_mask, rows, 1, args.response_length, stop_id, coordinates)
        batch = queries, query_mask, responses, mask
        kl = logprobs - response_logprobs(reference, batch, 1)[0]
        ended = has_stopped(responses, mask, stop_id)
        return responses, mask, ended, kl.sum(1), *score_slice(rows, batch, ended)

    with accelerator.autocast():
        outputs = in_slices(one_slice, [queries, query_mask, mine], args.rollout_micro_batch_size)
    return [accelerator.gather(x)[: len(ids)] for x in outputs]  # ... and cut again


def rows_per_forward(k, size):
    """(n, M): responses packed in a row, the most that divide k and fit `size` episodes, and the episodes of a forward."""
    n = max(d for d in range(1, k + 1) if k % d == 0 and d <= size)
    return n, size // n * n


def why_not_share(policy, reward_model, query_length, response_length, n):
    """None where packed rows give this policy's log-probs and this reward model's scores (None: no such model); else the reason.

    Two made-up prompts, as long as this run's longest, with n responses each are computed packed and one by one, in fp32.
    """
    for name, module in (("policy", policy), ("reward model", reward_model)):
        if module and (reason := utils.why_no_block_mask(module.model)):
            return f"the {name} {reason}"
    device, vocab_size = policy.model.device, policy.model.config.get_text_config().vocab_size
    ids = torch.arange(2 * (query_length + n * response_length), device=device).mul(7919).remainder(vocab_size)
    queries = ids[: 2 * query_length].reshape(2, -1).repeat_interleave(n, 0)  # [2 * n, Q]
    responses = ids[2 * query_length :].reshape(2 * n, -1)  # [2 * n, R]
    query_mask = torch.ones_like(queries, dtype=torch.bool)
    query_mask[:n, : query_length // 2] = False  # the first prompt is left-padded
    batch = queries, query_mask, responses, torch.ones_like(responses, dtype=torch.bool)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            gap = (response_logprobs(policy, batch, n)[0] - response_logprobs(policy, batch, 1)[0]).abs().max().item()
            if reward_model:
                scores = response_scores(reward_model, batch, n) - response_scores(reward_model, batch, 1)
                gap = max(gap, scores.abs().max().item())
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, LookupError, AssertionError, AttributeError) as e:  # of a mask that it cannot read
        return f"packed rows cannot be computed ({type(e).__name__}: {e})"
    # [RLOO-12] finds what no configuration tells, such as ALiBi
    return None if gap < 1e-3 else f"packed and plain rows differ by {gap:.2g}"


# ---- equations -------------------------------------------------------------------------------------------------------
def has_stopped(responses, mask, stop_id):
    """Whether each response [B, R] holds the stop token, looked for in its real tokens only; stop_id None: always True."""
    # [GEN-13] & mask: the filler, token 0, may be it
    return (mask & (responses == stop_id)).any(1) if stop_id is not None else mask.any(1)


def combine_rewards(values, given, weights, k):
    """The weighted sum of the rewards that each response was given, and whether it takes part in the update.

        rewards of three responses:   f f f   g . g     the second is left out: its sum cannot be compared with its siblings'
                                      f f f   . . .     g does not apply to this prompt: all three count
    One response alone (k = 1) has no siblings that could tell: what says nothing does not apply. A response that no reward
    applies to is left out.
    Args: values [B, F]; given [B, F] bool; weights [F]; the k of a prompt adjacent. Returns: scores [B], counted [B] bool.
    """
    applies = given.reshape(-1, k, given.size(1)).any(1).repeat_interleave(k, 0)  # [B, F]
    counted = (given | ~applies).all(1) & applies.any(1)  # [REW-4] None is not 0
    return (values * given * weights).sum(1) * counted, counted


def missing_eos_scores(scores, ended, penalty, mode):
    """The EOS trick: a response that did not end pays `penalty` ("subtract"), or its score becomes -penalty ("replace").

    Subtraction leaves RLOO blind to a constant offset of the reward model; replacement can raise a low score.
    Args: scores [B] fp32; ended [B] bool; penalty, float or None. Returns: [B].
    Source: TRL v0.11.4, rloo_trainer.py (subtract); lm-human-preferences, train_policy.py (replace).
    """
    if penalty is None:
        return scores
    # [REW-3] else nothing teaches the policy to stop
    return torch.where(ended, scores, scores - penalty if mode == "subtract" else torch.full_like(scores, -penalty))


def shape_scores(scores, normalize, clip_range, counted=None):
    """Scores [B] whitened over the batch (`normalize`) and then clipped to [-clip_range, clip_range] (None: not).

    Args: counted [B] bool, whose mean and variance are taken (None: all); of the others' scores nothing is read.
    """
    if normalize:
        scores = utils.masked_whiten(scores, torch.ones_like(scores, dtype=torch.bool) if counted is None else counted)
    return scores if clip_range is None else scores.clamp(-clip_range, clip_range)  # [RLOO-13] one outlier must not dominate


def rloo_advantages(rewards, k, counted=None):
    """Each reward minus the mean of its k - 1 siblings': A_i = R_i - (sum_j R_j - R_i) / (k - 1).

    Args: rewards [B], the k of a prompt adjacent; k >= 2; counted [B] bool, None: all. One that does not count is no one's sibling,
    and has advantage 0, as one without siblings has. Returns: [B]; each group sums to 0. Source: arXiv 2402.14740, eq. 8.
    """
    counted = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted
    rewards, counted = rewards.reshape(-1, k), counted.reshape(-1, k)  # [P, k]
    siblings = counted.sum(1, keepdim=True) - 1  # [P, 1], k - 1 where all count
    # [RLOO-3] own reward left out: independent of the action; no std
    baseline = ((rewards * counted).sum(1, keepdim=True) - rewards) / siblings.clamp(min=1)
    return ((rewards - baseline) * (counted & (siblings > 0))).reshape(-1)


def token_level_advantages(scores, kl, k, kl_coef, counted=None):
    """A_t = (score minus its leave-one-out baseline) - kl_coef * sum of kl_u for u >= t; k = 1 has no baseline.

    Args: scores [B]; kl [B, R], 0 at padding; counted as above. Returns: [B, R]. Source: REINFORCE++, arXiv 2501.03262, for the KL
    to go; the leave-one-out baseline with it is ours.
    """
    kl_to_go = kl.flip(1).cumsum(1).flip(1)  # [B, R] [RLOO-4] a token does not pay for what was before it
    return (rloo_advantages(scores, k, counted) if k > 1 else scores).unsqueeze(1) - kl_coef * kl_to_go


def rloo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange):
    """The clipped surrogate, one term an action: max(-A ratio, -A clip(ratio, 1 - c, 1 + c)).

    Args: logprobs, old_logprobs, mask [M, R]. advantages [M]: an action is a response, ratio = exp(sum of log-ratios), or
    advantages [M, R]: an action is a token. Returns: (losses, log-ratios, clipped, action mask), all of the advantages' shape.
    """
    logratio = (logprobs - old_logprobs) * mask
    if advantages.dim() == 1:
        logratio, mask = logratio.sum(1), mask.any(1)  # [M] [RLOO-5] the action is the whole response
    ratio = logratio.exp()
    losses1 = -advantages * ratio
    losses2 = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    losses = torch.max(losses1, losses2)  # [RLOO-6] no gain from leaving the range, but the way back stays open
    return losses * mask, logratio, (losses2 > losses1) & mask, mask


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends with one line (exit code 2) where arguments contradict each other; nothing has been written by then."""
    utils.check_numbers(args)
    if args.batch_size % args.rloo_k:
        utils.fail(f"--batch_size {args.batch_size}: not divisible by --rloo_k {args.rloo_k}")
    if args.batch_size % (args.num_mini_batches * args.rloo_k):
        factors = f"{args.num_mini_batches} * {args.rloo_k}"
        utils.fail(f"--batch_size {args.batch_size}: not divisible by num_mini_batches * rloo_k = {factors}")
    if args.rloo_k == 1 and not (args.token_level_kl and args.normalize_advantage):
        utils.fail("--rloo_k 1: leave-one-out needs at least 2; 1 is for --token_level_kl with --normalize_advantage alone")
    if args.sft_model_path is None:
        utils.fail(
            "--sft_model_path: required, a model folder or Hub name (only --dataset toy from the command line has a default)"
        )
    reward_functions.check(args)
    lora.check(args)
    utils.check_output_dir(args)


def read_prompts(spec, flag, template=None, take=None):
    """Rows with a `prompt`, of an embedded task or of a data set."""
    name, _, split = spec.partition(":")
    rows = toy.rows("prompts", split or "train", name) if name in toy.TASKS else data.read_rows(spec, {}, flag=flag)
    return data.with_prompts(rows[:take], template, f"{flag} {spec}")


def main(args: Args):
    """Trains; returns {"before": metrics, "after": metrics, "run": folder} of the held-out evaluations."""
    start_time = time.time()
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()
    check(args)
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # while the main process writes a large checkpoint
    # DDP would broadcast buffers in each forward, and hang where processes sample for different numbers of steps
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False), patience])
    engines.settle(accelerator, args)
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    k, B, R = args.rloo_k, args.batch_size, args.response_length
    P = B // k
    if B % (args.num_mini_batches * k * world):
        factors = f"{args.num_mini_batches} * {k} * {world}"
        utils.fail(f"--batch_size {B}: not divisible by num_mini_batches * rloo_k * processes = {factors}")
    for flag in ("async_rollouts", "compile", "lora_rank"):
        if getattr(args, flag) and engines.name(accelerator) not in ("one process", "DDP"):
            utils.fail(f"--{flag}: for one process or DDP, not for {engines.name(accelerator)}")
    train_rows = read_prompts(args.dataset, "--dataset", args.prompt_template, args.take)
    eval_rows = read_prompts(args.eval_dataset, "--eval_dataset", args.prompt_template) if args.eval_dataset else []
    task = args.dataset.partition(":")[0]
    if task in toy.TASKS and accelerator.is_main_process:
        toy.ensure_stages(args, print)
    accelerator.wait_for_everyone()
    torch.manual_seed(args.seed)

    # ---- models: the reference is a frozen copy of the initial policy;
    # utils.load_policy and load_reward_model give fp32 weights and turn every dropout off
    trust = args.trust_remote_code
    loading = {"attn_implementation": args.attn_implementation, "trust_remote_code": trust}
    tokenizer = utils.load_tokenizer(args.sft_model_path, "--sft_model_path", trust)
    model = utils.load_policy(args.sft_model_path, "--sft_model_path", **loading)
    if args.lora_rank:  # the reference is the same model, with its adapters off
        lora.add_adapters(model, args.lora_rank)
        reference = lora.without_adapters(Policy(model, args.temperature))
    else:
        # [MODEL-4] a model of its own, or the KL would always be 0
        reference = Policy(utils.load_policy(args.sft_model_path, "--sft_model_path", **loading), args.temperature)
        reference.requires_grad_(False)
    reward_model = own_tokenizer = None
    if args.reward_model_path:
        untrained = args.allow_untrained_reward_model
        reward_model = Reward(utils.load_reward_model(args.reward_model_path, "--reward_model_path", untrained, **loading))
        own_tokenizer = utils.find_own_tokenizer(args.sft_model_path, model.config, args.reward_model_path, tokenizer, trust)
    reference.to(device).eval()
    if reward_model:
        reward_model.to(device).eval().requires_grad_(False)
    if args.compile and (reason := utils.why_no_block_mask(model) or (args.async_rollouts and "not with --async_rollouts")):
        utils.fail(f"--compile: {reason}")
    stop_id = utils.token_id(tokenizer, args.stop_token, "--stop_token")
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    # ---- data: prompts as token ids; their order is a function of (seed, epoch), over and over
    readers = [model] if reward_model is None or own_tokenizer else [model, reward_model.model]  # of these token ids
    context = min(getattr(m.config.get_text_config(), "max_position_embeddings", None) or math.inf for m in readers)
    if context <= R:
        utils.fail(f"--response_length {R}: leaves no room for a prompt in the models' context of {context}")
    limit = min(args.max_prompt_length or math.inf, 0.9 * R if args.filter_length else math.inf)
    train_set = data.prompt_set(tokenizer, train_rows, context - R, f"--dataset {args.dataset}", limit)
    eval_set = data.prompt_set(tokenizer, eval_rows, context - R, f"--eval_dataset {args.eval_dataset}", limit)
    table_set, prompts = (eval_set if eval_rows else train_set).first(4), train_set.ids
    functions = reward_functions.RewardFunctions(args, device, tokenizer)
    functions.check_columns(train_rows, f"--dataset {args.dataset}")
    functions.check_columns(eval_rows, f"--eval_dataset {args.eval_dataset}")
    if own_tokenizer:
        reward_functions.check_prompts(own_tokenizer, train_set, eval_set)
    weights = torch.tensor(functions.weights, device=device)  # [F], of all rewards
    longest = max(map(len, prompts)) if args.compile else None
    # [DATA-7] a new order each epoch
    order_of_epoch = functools.cache(lambda epoch: utils.permutation(len(prompts), args.seed, epoch))
    gold = toy.gold if task == "toy" else None  # the embedded task's true reward is known, and only watched
    gold_of_eval = toy.gold if (args.eval_dataset or args.dataset).partition(":")[0] == "toy" else None

    # ---- memory: how many responses share a row, how many episodes a forward
    policy = Policy(model, args.temperature).to(device)
    packed = max(rows_per_forward(k, size)[0] for size in (args.micro_batch_size, args.rollout_micro_batch_size))
    reason = "--no_share_prompts"
    if args.share_prompts:
        reads_ids = None if own_tokenizer else reward_model
        reason = why_not_share(policy.eval(), reads_ids, max(map(len, prompts)), R, packed)
    n, episodes_per_forward = rows_per_forward(1 if reason else k, args.micro_batch_size)  # n responses share a training row
    n_rollout, rollout_slice = rows_per_forward(1 if reason else k, args.rollout_micro_batch_size)

    # ---- optimizer
    # [OPT-4] both given, neither left to the library
    adam = dict(lr=args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **adam, fused=True)  # one kernel for all weights
    policy, optimizer = engines.prepare(accelerator, policy, optimizer)
    num_updates = math.ceil(args.total_episodes / B)  # [OPT-10] up: whole batches, at least total_episodes
    steps_per_update = args.num_ppo_epochs * args.num_mini_batches
    table_updates = set(torch.linspace(1, num_updates, args.num_sample_generations).round().int().tolist())
    watch = ["eps", "objective/scores", "objective/kl", "objective/gold"]
    learnt_from = [prompts, eval_set.ids, utils.checksum(reference)]
    learnt_from += [utils.checksum(reward_model), reward_model.bias] if reward_model else []
    learnt_from += [repr(train_set.rows), repr(eval_set.rows)] if args.reward_fn else []  # whose columns the functions read
    run = runs.Run(args, accelerator, num_updates, watch, learnt_from)
    run.show_data(train_set)
    run.say(f"policy {args.sft_model_path}, reward model {args.reward_model_path}")
    run.say(f"rewards: {', '.join(f'{w:g} * {name}' for w, name in zip(functions.weights, functions.names, strict=True))}")
    if own_tokenizer:
        known = f"{len(own_tokenizer)} tokens, the policy's {len(tokenizer)}"
        run.say(f"the reward model has a tokenizer of its own ({known}): it is given text, decoded and encoded again")
    run.say(f"{len(prompts)} prompts, {num_updates} updates of {B} episodes, {world} process(es)")
    shared = f"a prompt is computed once for {n} of its {k} responses, for {n_rollout} when sampling"
    run.say(f"plain rows, one response each: {reason}" if reason else shared)
    run.note_combination("train_rloo", model.config.model_type, "plain" if reason else "packed")

    def decode(responses, mask):
        return [tokenizer.decode(r[m], skip_special_tokens=True) for r, m in zip(responses.cpu(), mask.cpu(), strict=True)]

    def rewards_of(rows, batch, ended, n):
        """What each reward says of this process's responses to rows of the data: values, kinds (NOTHING, NUMBER, ..) [M, F]."""
        scores, answers = None, decode(*batch[2:]) if args.reward_fn or own_tokenizer else []
        if own_tokenizer:
            prompts = [row["prompt"] if data.is_messages(row["prompt"]) else data.as_text(tokenizer, row["prompt"]) for row in rows]
            ended = ended & (stop_id is not None)  # where no token ends a response, none is put behind its text
            scores = reward_functions.score_text(reward_model, own_tokenizer, prompts, answers, ended, args.micro_batch_size)
        elif reward_model:
            (scores,) = in_slices(lambda *b: (response_scores(reward_model, b, n),), batch, episodes_per_forward, n)
        return functions(rows, answers, scores)

    def evaluate(prompt_set, coordinates):
        """One response to each prompt: (responses as texts, scores [N], {metric: values, at most N}), on every process."""
        ids, texts, rows, _ = prompt_set

        def score_slice(numbers, *batch_and_ended):
            return rewards_of([rows[i % len(rows)] for i in numbers.tolist()], *batch_and_ended, 1)

        responses, mask, ended, kl, values, kinds = one_response_each(
            policy, reference, score_slice, ids, args, stop_id, coordinates, accelerator
        )
        answers = decode(responses, mask)
        show = lambda i: f"row {prompt_set.numbers[i]}, {texts[i]!r}, with the response {answers[i]!r}"  # noqa: E731
        functions.stop_if_failed(run, f"evaluation, update {coordinates[-1]}", kinds, show)
        scores, counted = combine_rewards(values, kinds != reward_functions.NOTHING, weights, 1)
        scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)
        result = {"scores": scores[counted], "kl": kl, "length": mask.sum(1).float(), "ended": ended.float()}
        result |= functions.by_name(values, kinds)
        if gold_of_eval:
            result["gold"] = torch.tensor([gold_of_eval(q, a) for q, a in zip(texts, answers, strict=True)])
            result["parses"] = torch.tensor([float(toy.parses(f"{q} {a}")) for q, a in zip(texts, answers, strict=True)])
        return answers, scores, result

    def held_out():
        """Means over the held-out prompts, and the spread of scores and gold, as eval/* metrics."""
        _, _, result = evaluate(eval_set, (args.seed, EVALUATION, 0))
        result = {name: value for name, value in result.items() if len(value)}  # no score where functions said nothing at all
        metrics = {f"eval/objective/{name}": value.mean().item() for name, value in result.items()}
        return metrics | {
            f"eval/objective/{name}_std": result[name].std(correction=0).item() for name in ("scores", "gold") if name in result
        }

    def prompts_of(update):
        """The prompts of an update: their numbers, and the queries and query_mask [B, Q] of the whole batch."""
        stream = range((update - 1) * P, update * P)  # epoch after epoch, each in an order of its own
        numbers = [order_of_epoch(i // len(prompts))[i % len(prompts)] for i in stream]
        return numbers, *utils.left_pad([prompts[i] for i in numbers for _ in range(k)], device)  # [RLOO-1] k copies side by side

    def rollout(policy, update):
        """Phase 1: k responses to each prompt of an update, of which this process samples its share; for any thread.

        Returns: numbers of the prompts; queries, query_mask [B, Q] of the whole batch; responses, mask and the sampler's log-probs;
        and the log-probs that a ratio starts from: under --async_rollouts this policy's own, else not final; all [B / world, R].
        """
        policy.eval()  # dropout is 0 either way (utils.load_policy); in training mode gradient checkpointing forbids the cache
        numbers, queries, query_mask = prompts_of(update)
        mine = torch.arange(B, device=device).chunk(world)[rank]  # [B / world], global numbers of my episodes

        def sample_slice(queries, query_mask, rows):
            one = slice(None, None, n_rollout)  # one copy of each prompt: its n_rollout responses share the prefill
            coordinates = (args.seed, TRAINING, update)
            return sample(policy, queries[one], query_mask[one], rows, n_rollout, R, stop_id, coordinates, longest)

        with torch.no_grad(), accelerator.autocast():
            my_prompts = [queries[mine], query_mask[mine]]
            responses, mask, sampled_logprobs = in_slices(sample_slice, [*my_prompts, mine], rollout_slice, n_rollout)
            logprobs = sampled_logprobs
            if args.async_rollouts:  # both sides of a ratio come from the training forward
                my_batch = [*my_prompts, responses, mask]
                # [GEN-11] of the policy that samples, whose weights are soon written over
                logprobs, _ = in_slices(lambda *b: response_logprobs(policy, b, n), my_batch, episodes_per_forward, n)
        return numbers, queries, query_mask, responses, mask, sampled_logprobs, logprobs

    # ---- what the loop takes from update to update, besides weights and Adam's moments: fresh, or from a checkpoint
    done, carried, pending = run.resume(policy, optimizer)
    start_time -= carried.get("seconds", 0)
    before, metrics = carried.get("before"), carried.get("metrics")
    if before is None:
        before = held_out() if eval_rows else {}
        if before:
            run.log({"update": 0, "episode": 0, **before}, 0)
    actor = Actor(Policy(accelerator.unwrap_model(policy).model, args.temperature), rollout) if args.async_rollouts else None
    if pending:
        actor.put((*prompts_of(done + 1), *(pending[name].chunk(world)[rank] for name in PENDING)))
    elif actor and done < num_updates:
        actor.push(accelerator.unwrap_model(policy).model, done + 1)
    for update in range(done + 1, num_updates + 1):
        update_time = time.time()
        lr = utils.learning_rate_at(update, num_updates, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr  # [OPT-2] the same for all steps of an update

        # ---- 1. Rollout: k responses to each prompt ------------------------------------------------------------------
        if actor:
            batch = actor.take()
            if update < num_updates:  # before this batch is trained on
                actor.push(accelerator.unwrap_model(policy).model, update + 1)
        else:
            batch = rollout(policy, update)
        numbers, queries, query_mask, responses, response_mask, sampled_logprobs, logprobs = batch
        rollout_time = time.time()

        # ---- 2. Scores: rewards, and the log-probs that KL and ratio need; [B / world, ..] until they are gathered ------
        my_batch = [*(x.chunk(world)[rank] for x in (queries, query_mask)), responses, response_mask]
        with torch.no_grad(), accelerator.autocast():
            ref_logprobs, _ = in_slices(lambda *b: response_logprobs(reference, b, n), my_batch, episodes_per_forward, n)
            my_rows = [train_set.rows[numbers[i // k]] for i in torch.arange(B).chunk(world)[rank].tolist()]
            reward_values, kinds = rewards_of(my_rows, my_batch, has_stopped(responses, response_mask, stop_id), n)
            if steps_per_update > 1 and not actor:  # with one step there is no ratio, and for the KL the sampler's are enough
                # [GEN-9] the forward that phase 5 repeats: the first ratio is 1
                logprobs, _ = in_slices(lambda *b: response_logprobs(policy, b, n), my_batch, episodes_per_forward, n)
        # [REW-7] gather once: from here on all is the whole batch, everywhere
        responses, response_mask, sampled_logprobs, logprobs, ref_logprobs, reward_values, kinds = map(
            accelerator.gather, (responses, response_mask, sampled_logprobs, logprobs, ref_logprobs, reward_values, kinds)
        )
        batch = [queries, query_mask, responses, response_mask]  # [B, Q], [B, Q], [B, R], [B, R]
        scores_time = time.time()

        def show(i):
            (answer,), row = decode(responses[i : i + 1], response_mask[i : i + 1]), numbers[i // k]
            return f"row {train_set.numbers[row]} of --dataset, {train_set.texts[row]!r}, with the response {answer!r}"

        functions.stop_if_failed(run, f"update {update}", kinds, show)
        run.check_finite("the score", update, reward_values.sum(1), show)

        # ---- 3. Rewards ------------------------------------------------------------------------------------------------
        #   response        a    b   EOS   .    .      (nothing is sampled after the stop token)
        #   response_mask   1    1    1    0    0      the stop token is an action as well: it has a log-prob and a KL
        ended = has_stopped(responses, response_mask, stop_id)  # [B]
        given = kinds != reward_functions.NOTHING  # [B, F]; a function may have nothing to say of a response
        scores, counted = combine_rewards(reward_values, given, weights, k)  # [B], [B]
        scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)  # [B]
        shaped_scores = shape_scores(scores, args.normalize_reward, args.reward_clip_range, counted)  # [B]
        kl = (logprobs - ref_logprobs) * response_mask  # [B, R] [REW-5] k1: its mean is the KL, and its policy gradient the KL's
        rlhf_rewards = shaped_scores - args.kl_coef * kl.sum(1)  # [B] [RLOO-2] a whole response is one action

        # ---- 4. Advantages ---------------------------------------------------------------------------------------------
        loss_mask = response_mask & counted.unsqueeze(1)  # [B, R]
        if args.token_level_kl:
            advantages = token_level_advantages(shaped_scores, kl, k, args.kl_coef, counted) * loss_mask  # [B, R]
        else:
            advantages = rloo_advantages(rlhf_rewards, k, counted)  # [B]
        action_mask = loss_mask if args.token_level_kl else counted  # an action: a token, or a response
        if args.normalize_advantage:
            advantages = utils.masked_whiten(advantages, action_mask)  # [RLOO-14] over the whole batch

        # ---- 5. Optimise: whole prompt groups are shuffled; micro-batches add up to the minibatch's gradient -----------
        policy.train()  # for gradient checkpointing; every dropout is 0
        stats, grad_norms = torch.zeros(8, device=device), []
        gap, first_logratio = torch.zeros((), device=device), torch.zeros((), device=device)
        for epoch in range(args.num_ppo_epochs):
            order = torch.tensor(utils.permutation(P, args.seed, update, epoch), device=device)  # [P] [OPT-9] anew each pass
            for minibatch in order.chunk(args.num_mini_batches):
                # [RLOO-8] siblings share a packed row: groups stay whole
                episodes = (minibatch.unsqueeze(1) * k + torch.arange(k, device=device)).reshape(-1)
                num_actions = action_mask[episodes].sum().clamp(min=1)  # of the whole minibatch, on every process
                share = episodes.reshape(world, -1)[rank]  # of this process
                share = share[by_length([query_mask[share], response_mask[share]], n)]
                micro_batches = share.split(episodes_per_forward)
                row_losses = torch.zeros(B, device=device)
                for i, rows in enumerate(micro_batches):
                    is_last = i + 1 == len(micro_batches)  # gradients are averaged over the processes once a step
                    with engines.accumulate(accelerator, policy, is_last):
                        new_logprobs, entropies = response_logprobs(policy, [x[rows] for x in batch], n)  # [M, R]
                        has_ratio = steps_per_update > 1 or actor  # an actor's batch is one update old
                        # [RLOO-7] itself: exactly 1, bf16 noise clips nothing
                        old_logprobs = logprobs[rows] if has_ratio else new_logprobs.detach()
                        losses, logratio, clipped, actions = rloo_policy_loss(
                            new_logprobs, old_logprobs, loss_mask[rows], advantages[rows], args.cliprange
                        )
                        row_losses[rows] = losses.detach().reshape(len(rows), -1).sum(1)
                        if is_last:  # all losses are known, and no weight is touched
                            run.check_finite("the loss", update, accelerator.reduce(row_losses, "sum"), show)
                        loss = losses.sum() / num_actions  # [OPT-5] so micro-batches add up to the minibatch's gradient
                        accelerator.backward(loss * world)  # [OPT-6] DDP averages over processes, a sum is meant
                    with torch.no_grad():
                        excess = logratio.expm1() * actions  # ratio - 1, exact near 1
                        approxkl = 0.5 * logratio**2  # [LOG-3] of an action
                        # phase 6 unpacks the sums in this order
                        sums = excess, approxkl, losses, actions, clipped, excess**2, entropies, response_mask[rows]
                        stats += torch.stack([x.sum().float() for x in sums])
                        if not grad_norms:  # [LOG-6] before any step: rounding alone, or an actor's lag
                            gap = torch.maximum(gap, (old_logprobs - sampled_logprobs[rows]).abs().max())
                            first_logratio = torch.maximum(first_logratio, logratio.abs().max())
                check_norm = functools.partial(run.check_finite, "the gradient's norm", update, show=show, rows=episodes)
                grad_norms.append(engines.step(accelerator, policy, optimizer, args.max_grad_norm, check_norm))

        # ---- 6. Log: sums of numerators and of denominators over all processes, then one division ----------------------
        # [LOG-2] a mean of means would weigh processes, not actions
        excess, approxkl, loss, actions, clipped, excess_squared, entropy, tokens = accelerator.reduce(stats, "sum").tolist()
        actions = max(actions, 1)
        group_size = k if k > 1 else B
        # [P] each, of the scores that count; in a group where none does the highest is -inf, the lowest inf
        highest, lowest = (scores.masked_fill(~counted, x).reshape(-1, group_size) for x in (-math.inf, math.inf))
        highest, lowest = highest.amax(1), lowest.amin(1)
        episode, now = update * B, time.time()
        metrics = {
            "update": update,
            "episode": episode,
            "epoch": episode / k / len(prompts),
            "lr": optimizer.param_groups[0]["lr"],
            "eps": B / (now - update_time),
            "objective/kl": kl.sum(1).mean().item(),
            "objective/entropy": -(logprobs * response_mask).sum(1).mean().item(),  # [LOG-1] padding has no part in it
            "objective/non_score_reward": -args.kl_coef * kl.sum(1).mean().item(),  # [LOG-5] what is added
            "objective/rlhf_reward": utils.masked_mean(rlhf_rewards, counted).item(),
            "objective/scores": utils.masked_mean(scores, counted).item(),
            "policy/approxkl_avg": approxkl / actions,
            "policy/clipfrac_avg": clipped / actions,
            "policy/entropy_avg": entropy / tokens,
            "policy/grad_norm": sum(grad_norms) / len(grad_norms),
            "loss/policy_avg": loss / actions,
            "val/ratio": 1 + excess / actions,
            "val/ratio_var": excess_squared / actions - (excess / actions) ** 2,  # [LOG-4] of actions
            "val/logprob_gap": accelerator.gather(gap.reshape(1)).max().item(),
            "val/first_ratio": accelerator.gather(first_logratio.reshape(1)).max().clamp(max=20).exp().item(),
            "val/num_eos_tokens": (response_mask & (responses == tokenizer.eos_token_id)).sum().item(),
            "val/num_stop_token_ids": ended.sum().item() if stop_id is not None else 0,
            "val/equal_scores": (highest <= lowest).float().mean().item(),
            "val/counted": counted.float().mean().item(),
            "val/sequence_lengths": response_mask.sum(1).float().mean().item(),
            "val/optimizer_steps": len(grad_norms),
            "time/rollout": rollout_time - update_time,
            "time/scores": scores_time - rollout_time,
            "time/optimise": now - scores_time,
            "time/training": now - rollout_time,
            "time/update": now - update_time,
            "time/from_scratch": now - start_time,
        }
        metrics |= {f"objective/{name}": x.mean().item() for name, x in functions.by_name(reward_values, kinds).items()}
        if gold:
            answers = decode(responses, response_mask)
            metrics["objective/gold"] = sum(gold(train_set.texts[numbers[i // k]], answer) for i, answer in enumerate(answers)) / B
        if eval_rows and (update == num_updates or (args.eval_every and update % args.eval_every == 0)):
            metrics |= held_out()
        run.log(metrics, update)
        if update in table_updates:
            answers, scores, result = evaluate(table_set, (args.seed, SAMPLE_TABLE, update))
            shown = [
                {"query": q, "response": a, "score": s, "kl": d, "total": s - args.kl_coef * d}
                for q, a, s, d in zip(table_set.texts, answers, scores.tolist(), result["kl"].tolist(), strict=True)
            ]
            run.table(f"samples of update {update}", shown, update)

        if run.is_checkpoint_due(update):
            pending = {}
            if actor and update < num_updates:  # the batch to be trained on next; its prompts are known
                pending = {name: accelerator.gather(x) for name, x in zip(PENDING, actor.batch.result()[3:], strict=True)}
            carried = {"seconds": time.time() - start_time, "before": before, "metrics": metrics}
            run.checkpoint(update, policy, optimizer, carried, pending)

    # ---- the end: an ordinary model folder, and what changed on held-out prompts
    weights = engines.full_weights(accelerator, policy)
    run.save_model(accelerator.unwrap_model(policy).model, weights, tokenizer)
    after = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    summary = [f"held-out prompts ({len(eval_set.ids)}), before -> after"] if after else []
    for name in [name for name in after if name in before]:
        summary.append(f"  {name.removeprefix('eval/objective/'):12} {before[name]:8.3f} -> {after[name]:8.3f}")
    run.close([*summary, f"model: {args.output_dir}   run: {run.folder}   {time.time() - start_time:.0f} s"])
    accelerator.wait_for_everyone()
    return {"before": before, "after": after, "run": str(run.folder)}


if __name__ == "__main__":
    main(utils.parse_args(Args, toy.defaults("train_rloo")))
    utils.leave_process_group()
