"""
PPO on a language model and a learned reward: the two published recipes, "N+" and openai/lm-human-preferences, in one loop.

1. Each prompt gets one response. Each response token is an action with the reward -kl_coef * KL. The score is the reward of the
   place after the last token (mostly EOS); a response of all R tokens has no such place, and it is added to the last token's.
2. A value model says what every prefix is worth. GAE turns rewards and values into advantages, which are whitened.
3. The rollout is used for several epochs; the probability ratio of a token and the change of a value are clipped.
4. N+ (arXiv 2403.17031): a separate value model that starts as the reward model, a fixed kl_coef, nothing after EOS counts.
   lm-human-preferences (arXiv 1909.08593): a value head on the policy's own trunk that starts at zero, an adaptive
   kl_coef, whitened rewards, responses of fixed length, read by the reward model up to a full stop.
5. All randomness is a function of coordinates (seed, purpose, update, row, step, token), never of a generator's state.

Left out on purpose: a separate inference engine, top-k and top-p (they would make the sampler another policy), an entropy
bonus (neither recipe has one).

Shapes    B: episodes, one per prompt   Q: query tokens, left-padded   R: response tokens, right-padded   V: vocabulary
          M: rows of a call, say of a micro-batch   L = Q + R: columns of a row   N: columns read   H: hidden size   F: rewards
          In `sample` and in evaluations B and N count what that call is given.
Masks     True = real token. They travel with the tokens; nothing is ever found by looking for a pad token.

One process:   python rlhf_details/train_ppo.py
N processes:   accelerate launch --num_processes N rlhf_details/train_ppo.py
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
    exp_name: str = "train_ppo"
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
    output_dir: str = "models/ppo"
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
    """sampling ends with this token: "eos", "none", or a text that is one token"""
    truncate_token: str = "none"
    """the reward model reads a response up to this token: "eos", "none" (all of it), or a text that is one token"""
    truncate_after: int = 0
    """tokens before this place of the response (from 0) do not truncate it"""
    missing_eos_penalty: float | None = 1.0
    """what a response without its end (--truncate_token, else --stop_token) pays, in points of score; None: nothing"""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """subtract the penalty from the score, or replace the score by -penalty"""

    # reward and KL
    kl_coef: float = 0.05
    """weight of the KL in the reward (beta); under --adaptive_kl the first one"""
    kl_penalty: Literal["kl", "abs", "mse", "full", "k2", "k3"] = "kl"
    """what a token pays for, with d = log p - log p_ref: "kl" d, "abs" |d|, "mse" and "k2" d^2/2, "k3" exp(-d) - 1 + d, "full"
    the exact KL; objective/kl and adaptive_kl go by d in any case"""
    adaptive_kl: bool = False
    """lm-human-preferences: steer kl_coef so that the KL of a response stays near --kl_target"""
    kl_target: float = 6.0
    """adaptive_kl: KL to hold, nats a response"""
    kl_horizon: float = 10_000
    """adaptive_kl: episodes over which kl_coef changes by a fifth at most"""
    whiten_rewards: bool = False
    """lm-human-preferences: scale the rewards of the batch to variance 1; their mean stays"""
    score_scaling: bool = False
    """divide the scores by their running standard deviation"""
    score_norm: bool = False
    """subtract the scores' running mean"""
    score_clip: float | None = None
    """clip the scores to [-c, c], after scaling"""

    # algorithm
    total_episodes: int = 1_000_000
    """responses to sample in the whole run; rounded up to whole batches"""
    batch_size: int = 512
    """episodes an update, over all processes (B)"""
    num_mini_batches: int = 1
    """optimiser steps a pass over the batch"""
    num_ppo_epochs: int = 4
    """passes over the batch"""
    async_rollouts: bool = False
    """sample the next batch while this one trains, one update off-policy; for one process or DDP"""
    cliprange: float = 0.2
    """clip range of the probability ratio"""
    cliprange_value: float = 0.2
    """clip range of the change of a value"""
    vf_coef: float = 0.1
    """weight of the value loss"""
    gamma: float = 1.0
    """discount of a token's reward"""
    lam: float = 0.95
    """GAE's lambda: 1 believes the rewards, 0 the values"""
    normalize_advantage: bool = True
    """whiten the advantages over the whole batch"""
    value_model: Literal["separate", "shared"] = "separate"
    """a model of its own that starts as the reward model (N+), or a zero head on the policy's trunk (lm-human-preferences)"""
    target_kl: float | None = None
    """no further pass over a batch after one whose mean of 0.5 * (log-ratio)^2 exceeds 1.5 times this; None: never"""
    ratio_threshold: float | None = None
    """skip the step of a minibatch whose mean probability ratio exceeds this; None: never"""

    # optimiser
    learning_rate: float = 3e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """course of the learning rate over the updates"""
    warmup_ratio: float = 0.0
    """share of the updates over which the learning rate rises linearly"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    tf_adam: bool = False
    """place epsilon as TensorFlow does (lm-human-preferences)"""
    weight_decay: float = 0.01
    """AdamW's weight decay"""
    max_grad_norm: float | None = None
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
    compile: bool = False
    """compile the sampler's steps, over a cache of fixed size; for GPUs, takes a minute at the start"""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """attention kernel; None: the library's choice for the model"""


# ---- models: one module call is one forward, so that every engine sees all parameters through it ---------------------
LOGITS_AT_ONCE = 2**24  # 64 MiB in fp32


class Policy(nn.Module):
    """Next-token logits, or the log-probs of given tokens; always of softmax(logits / temperature), always in fp32.

    With a critic, a Reward of its own or a linear head on this model's trunk, it also says what the states are worth.
    """

    def __init__(self, model, temperature, critic=None):
        super().__init__()
        self.model, self.temperature, self.critic = model, temperature, critic
        self.shares_trunk = isinstance(critic, nn.Linear)
        self.plain_head = utils.has_plain_head(model)
        self.takes_positions = utils.accepts(model.forward, "position_ids")

    def forward(self, tokens, mask, positions, index=slice(-1, None), labels=None, cache=None):
        """
        Args: tokens, positions [M, L]; mask [M, L] bool; cache, a transformers cache that is extended.
        index [N] or a slice: where to read logits (the last position), labels [M, N]: the tokens they predict.
        Returns: (log-probs, entropies) or with a critic (log-probs, entropies, values), all [M, N] fp32; without labels
        the logits [M, N, V] fp32.
        """
        inputs = {"input_ids": tokens, "attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None}
        inputs |= {"position_ids": positions} if self.takes_positions else {}
        head, vocab_size = self.model.get_output_embeddings(), self.model.config.get_text_config().vocab_size
        if self.plain_head:
            hidden = trunk = self.model.base_model(**inputs).last_hidden_state[:, index]  # [M, N, H]: where a token is predicted
        else:
            outputs = self.model(**inputs, output_hidden_states=self.shares_trunk)
            head, hidden = nn.Identity(), outputs.logits[:, index]  # [M, N, V], as there is no plain head to apply
            trunk = outputs.hidden_states[-1][:, index] if self.shares_trunk else None
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
        if self.critic is None:
            return logprobs, entropies
        if not self.shares_trunk:
            return logprobs, entropies, self.critic(tokens, mask, positions, index.expand(len(tokens), -1))
        with torch.autocast(trunk.device.type, enabled=False):
            values = self.critic(trunk.float()).squeeze(-1)  # [M, N] [PPO-3] its loss trains the policy's trunk as well
        return logprobs, entropies, values


class Reward(nn.Module):
    """Scores: the head's output at given tokens, plus the bias that normalisation left in the configuration.

    Read at the last token it is the reward model, read at every state the value model (the critic).
    """

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
def sample(policy, queries, query_mask, rows, response_length, stop_id, coordinates, longest=None):
    """A response to each query, each token from softmax(logits / T): no top-k, no top-p, no generation_config.

    A token is argmax(logits / T + Gumbel noise), which is a draw from the softmax; the noise is a function of
    (coordinates, row, step, token id), so rows may be grouped, sliced and spread over processes at will.
    Args: policy, a Policy in eval mode; queries, query_mask [B, Q]; rows [B], the global number of each response;
    stop_id, a token id or None; coordinates, e.g. (seed, purpose, update); longest, for --compile: pad prompts to so many columns.
    Returns: responses [B, R] int64, mask [B, R] bool (True up to and including the stop token), log-probs fp32.
    """
    unused = int(query_mask.any(0).int().argmax())  # columns that are padding in every row
    queries, query_mask = (nn.functional.pad(x, (longest - x.size(1) if longest else -unused, 0)) for x in (queries, query_mask))
    (B, Q), device = queries.shape, queries.device
    keys = torch.full((B,), 0x1B873593, dtype=torch.int32, device=device)  # not zero, since hash32(0) = 0
    for coordinate in (*coordinates, rows.int()):
        keys = fold(keys, coordinate)  # [GEN-4] no stream: batch-mates and processes have no say
    responses = torch.zeros(B, response_length, dtype=torch.long, device=device)
    mask = torch.zeros(B, response_length, dtype=torch.bool, device=device)
    logprobs = torch.zeros(B, response_length, device=device)
    visible = torch.cat([query_mask, torch.ones_like(mask)], 1)  # [B, Q + R]
    column = torch.arange(visible.size(1), device=device)
    cache, next_logits = DynamicCache(config=policy_config(policy)), policy
    if longest:
        cache, next_logits = compiled(policy, B, len(column))
        cache.reset()
    logits = policy(queries, query_mask, utils.positions_from_mask(query_mask), cache=cache).squeeze(1)  # [B, V]
    position = query_mask.sum(1, keepdim=True)  # [B, 1], of a response's first token
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
        past = Q + t + 1
        seen = additive((visible & (column < past)).unsqueeze(1)) if longest else visible[:, :past]
        tokens = (token * alive).unsqueeze(1)  # finished rows run on with token 0, unread
        # [GEN-6] positions go on behind the prompt's real tokens, not behind its padding
        logits = next_logits(tokens, seen, position + t, cache=cache).squeeze(1)  # [B, V]
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
def join(queries, query_mask, responses, response_mask):
    """Rows of a prompt and its response, as the models read them.

        tokens   .  p  p  p  a  b  EOS  .        Q = 4 (left-padded), R = 4 (right-padded)
        index             3  4  5   6            column Q-1+t predicts response token t and values the state before it; here 6
                                                 is the state after the end, which has a value and predicts nothing
    Args: queries, query_mask [M, Q]; responses, response_mask [M, R].
    Returns: tokens, mask, positions [M, L] with L = Q + R, and index [R], the columns Q-1 .. Q-1 + R-1.
    """
    mask = torch.cat([query_mask, response_mask], 1)  # [M, L]
    # [GEN-7] the state before a token predicts it
    index = torch.arange(responses.size(1), device=mask.device) + queries.size(1) - 1
    return torch.cat([queries, responses], 1), mask, utils.positions_from_mask(mask), index


def trim(batch):
    """The batch (queries, query_mask, responses, response_mask) without the columns that no row needs."""
    queries, query_mask, responses, response_mask = batch
    first, width = int(query_mask.any(0).int().argmax()), int(response_mask.sum(1).max()) + 1  # one more: the state after the end
    return queries[:, first:], query_mask[:, first:], responses[:, :width], response_mask[:, :width]


def response_logprobs(policy, batch):
    """Log-probs, entropies and, where the policy has a critic, values, [M, R] fp32, 0 where masked (values: by value_mask)."""
    R = batch[2].size(1)
    batch = batch if engines.is_zero3(policy) else trim(batch)  # ZeRO-3 gathers the head for each piece: as many everywhere
    outputs = policy(*join(*batch), labels=batch[2])  # each [M, W], W: the longest response, and one more
    masks = batch[3], batch[3], value_mask(batch[3])
    # [REW-6] zeros, not a sentinel: sums over a row need no mask
    return tuple(nn.functional.pad(x * m, (0, R - x.size(1))) for x, m in zip(outputs, masks, strict=False))


def response_scores(reward_model, batch):
    """Scores [M] fp32: the head's output at each response's last real token, found from the mask."""
    batch = trim(batch)
    tokens, mask, positions, _ = join(*batch)
    last = batch[0].size(1) + batch[3].sum(1, keepdim=True) - 1  # [M, 1] [REW-2] by the mask: pad may be EOS
    return reward_model(tokens, mask, positions, last).squeeze(1)


def by_length(masks):
    """Row numbers [M], the fewest real tokens first, so that a slice of them holds little padding; masks: list of [M, ..] bool."""
    return sum(mask.sum(1) for mask in masks).argsort(stable=True)


def in_slices(function, tensors, size):
    """Applies a function of row slices, of `size` rows each, to a list of tensors; the tuples it returns are concatenated.

    A slice takes rows of similar length, by the masks (bool) among the tensors; what is returned is in the tensors' order.
    """
    order = by_length([x for x in tensors if x.dtype == torch.bool])
    parts = [function(*(x[rows] for x in tensors)) for rows in order.split(size)]
    back = order.argsort()
    return [torch.cat(part)[back] for part in zip(*parts, strict=True)]


@torch.no_grad()
def one_response_each(policy, reference, score_slice, ids, args, stop_id, end_id, coordinates, accelerator):
    """Samples and scores one response to each prompt, at the training temperature; each process does its share.

    Args: ids, N lists of token ids; score_slice(numbers of the prompts [M], batch, ended [M]) -> values [M, F] and kinds [M, F] of
    the rewards; a number of N or more is filler, for prompt number modulo N.
    Returns: responses, mask of what is scored [N, R], ended, summed KL [N], values, kinds [N, F], gathered to every process.
    """
    policy.eval()
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    mine = torch.arange(len(ids) + -len(ids) % world, device=device).chunk(world)[rank]  # filled up to whole shares ...
    queries, query_mask = utils.left_pad([ids[i % len(ids)] for i in mine.tolist()], device)

    def one_slice(queries, query_mask, rows):
        responses, mask, logprobs = sample(policy, queries, query_mask, rows, args.response_length, stop_id, coordinates)
        kl = logprobs - response_logprobs(reference, (queries, query_mask, responses, mask))[0]
        mask, ended = truncate_response(responses, mask, end_id, args.truncate_after)
        return responses, mask, ended, kl.sum(1), *score_slice(rows, (queries, query_mask, responses, mask), ended)

    with accelerator.autocast():
        outputs = in_slices(one_slice, [queries, query_mask, mine], args.rollout_micro_batch_size)
    return [accelerator.gather(x)[: len(ids)] for x in outputs]  # ... and cut again


# ---- equations -------------------------------------------------------------------------------------------------------
def truncate_response(responses, mask, token_id, after):
    """What the reward model reads: a response up to its first `token_id` at place `after` or later, or all of it.

    Args: responses [B, R]; mask [B, R] bool, what was sampled; token_id, None: everything is read and counts as ended.
    Returns: (mask [B, R] of what is read, whether the token was there [B]). Source: lm-human-preferences, lm_tasks.py.
    """
    if token_id is None:
        return mask, mask.any(1)
    ends = mask & (responses == token_id)  # [GEN-13] & mask: the filler, token 0, may be it
    ends[:, :after] = False  # [GEN-12] what stands this early does not count
    return mask & (ends.cumsum(1) - ends.long() == 0), ends.any(1)  # no end strictly before


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

    Replacement can raise a low score, and gives the reward model's zero a meaning.
    Args: scores [B] fp32; ended [B] bool; penalty, float or None. Returns: [B].
    Source: TRL v0.11.4, ppov2_trainer.py (subtract); lm-human-preferences, train_policy.py (replace).
    """
    if penalty is None:
        return scores
    # [REW-3] else nothing teaches the policy to stop
    return torch.where(ended, scores, scores - penalty if mode == "subtract" else torch.full_like(scores, -penalty))


class RunningMoments:
    """Mean and unbiased standard deviation of all numbers seen so far (floats); batches are merged by Chan's formula."""

    def __init__(self, count=0, mean=0.0, squares=0.0):
        self.count, self.mean, self.squares = count, mean, squares  # squares: sum of squared distances from the mean

    def update(self, x):
        x, n = x.double(), self.count
        self.count += len(x)
        delta = x.mean().item() - self.mean
        # [PPO-19] spread within the batch, and between it and what was seen before
        self.squares += ((x - x.mean()) ** 2).sum().item() + delta**2 * n * len(x) / self.count
        self.mean += delta * len(x) / self.count

    @property
    def std(self):
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def shape_scores(scores, moments, scaling, norm, clip, counted=slice(None)):
    """Scores [B] less their running mean (norm), over their running standard deviation (scaling), clipped to [-clip, clip].

    Args: moments, a RunningMoments, which sees these scores (those of `counted` [B] bool) first; clip, float or None. Equal scores
    are not scaled. Source: TRL v0.11.4, ppo_trainer.py.
    """
    if (scaling or norm) and len(scores[counted]):
        moments.update(scores[counted])
    scores = (scores - moments.mean if norm else scores) / ((scaling and moments.std) or 1.0)
    return scores if clip is None else scores.clamp(-clip, clip)


def kl_penalty(logprobs, ref_logprobs, kind):
    """What each sampled token pays, [B, R], from d = log p - log p_ref; "full" is full_kl.

    "kl" d: its mean is the KL, and as a reward its policy gradient the KL's. "abs" |d|. "mse", "k2" d^2/2.
    "k3" exp(-d) - 1 + d: never negative, its mean is the KL, but not its policy gradient.
    Source: TRL v0.11.4, ppo_trainer.py (kl, abs, mse); open-instruct, ppo_vllm_thread_ray_gtrl.py (k2, k3).
    """
    d = logprobs - ref_logprobs
    # [PPO-7] one token's d may be negative
    return {"kl": d, "abs": d.abs(), "mse": d**2 / 2, "k2": d**2 / 2, "k3": torch.expm1(-d) + d}[kind]


def full_kl(policy, reference, batch):
    """The exact KL of the next-token distributions, sum over the vocabulary of p (log p - log p_ref), [M, R], 0 at padding."""
    R = batch[2].size(1)
    batch = trim(batch)
    logp, logp_ref = (m(*join(*batch)).log_softmax(-1) for m in (policy, reference))  # [M, W, V]
    kl = (logp.exp() * (logp - logp_ref)).sum(-1) * batch[3]
    return nn.functional.pad(kl, (0, R - kl.size(1)))


def value_mask(response_mask):
    """States that have a value, [B, R] bool: before each response token, and the one after the last where there is room."""
    after_last = nn.functional.pad(response_mask, (1, 0), value=True)[:, :-1]  # the mask, one place to the right
    return response_mask | after_last  # [PPO-5] after the last token the score is still to come


def token_rewards(scores, kl_penalties, response_mask, kl_coef):
    """-kl_coef * its KL penalty on each token, and the score one place after the last, or on the last where there is no room.

    Args: scores [B]; kl_penalties [B, R], 0 at padding; response_mask [B, R]. Returns: [B, R].
    Source: N+, ppo.py. Where responses have a fixed length there is never room: lm-human-preferences, train_policy.py.
    """
    place = value_mask(response_mask).sum(1, keepdim=True) - 1  # [B, 1] [PPO-6] the place after EOS, if there is one
    return (-kl_coef * kl_penalties).scatter_add(1, place, scores.unsqueeze(1))


def adapt_kl_coef(kl_coef, kl, target, horizon, num_episodes):
    """kl_coef, moved by its proportional controller: up where the KL is above target, by at most a fifth per `horizon` episodes.

    Args: kl, mean over the batch of a response's KL, nats. Source: lm-human-preferences, train_policy.py.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)  # [PPO-15] one wild batch must not set the price
    return kl_coef * (1 + error * num_episodes / horizon)


def compute_gae(rewards, values, gamma, lam):
    """Generalised advantage estimation: d_t = r_t + gamma V_{t+1} - V_t, A_t = d_t + gamma lam A_{t+1}; V_R = A_R = 0.

    Args: rewards, values [B, R], both 0 beyond value_mask, so that nothing flows back from there.
    Returns: (advantages, returns = advantages + values), [B, R]. Source: arXiv 1506.02438; lm-human-preferences, train_policy.py.
    """
    advantages, advantage, next_value = torch.zeros_like(rewards), 0, 0
    for t in reversed(range(rewards.size(1))):
        # [PPO-9] lam < 1 trusts the values for less variance
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage  # [B]
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages, advantages + values


def ppo_policy_loss(logprobs, old_logprobs, mask, advantages, cliprange):
    """The clipped surrogate, one term a token: max(-A ratio, -A clip(ratio, 1 - c, 1 + c)).

    Args: all [M, R]. Returns: (losses, log-ratios, clipped), all [M, R], 0 at padding.
    """
    logratio = (logprobs - old_logprobs) * mask
    ratio = logratio.exp()
    losses1 = -advantages * ratio
    losses2 = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    losses = torch.max(losses1, losses2)  # [PPO-12] no gain from leaving the range, but the way back stays open
    return losses * mask, logratio, (losses2 > losses1) & mask


def ppo_value_loss(values, old_values, returns, mask, cliprange_value):
    """Half the squared error of a value or of its clipped version, whichever is worse: max((V - G)^2, (clip(V) - G)^2) / 2.

    Args: all [M, R]; clip holds V within old_values +- cliprange_value. Returns: (losses, errors, clipped), 0 at padding;
    errors are the plain squared ones.
    """
    errors = (values - returns) ** 2
    clipped_errors = (values.clamp(old_values - cliprange_value, old_values + cliprange_value) - returns) ** 2
    losses = 0.5 * torch.max(errors, clipped_errors)  # [PPO-13] a value that moved too far gets no gradient to go on
    return losses * mask, errors * mask, (clipped_errors > errors) & mask


def mean_and_variance(x, mask):
    """Mean and biased variance, two floats, of x over the True entries of mask."""
    mean = utils.masked_mean(x, mask)
    return mean.item(), utils.masked_mean((x - mean) ** 2, mask).item()


def tf_adam_eps(eps, step, beta2=0.999):
    """The epsilon that makes torch's Adam equal TensorFlow's at step number `step` (from 1). TensorFlow adds its own to the root
    of the second moment before the bias of that moment is corrected, so its early steps are smaller.

    Source: tf.train.AdamOptimizer, used by lm-human-preferences, utils/core.py.
    """
    return eps / math.sqrt(1 - beta2**step)  # [OPT-3] 32 times eps at the first step


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends with one line (exit code 2) where arguments contradict each other; nothing has been written by then."""
    utils.check_numbers(args)
    for name in ("gamma", "lam"):
        if getattr(args, name) > 1:
            utils.fail(f"--{name} {getattr(args, name)}: must be at most 1")
    for name in ("kl_target", "kl_horizon", *(["kl_coef"] if args.adaptive_kl else [])):
        if getattr(args, name) == 0:
            utils.fail(f"--{name} {getattr(args, name)}: must be above 0{' with --adaptive_kl' * (name == 'kl_coef')}")
    if args.adaptive_kl and args.batch_size >= 5 * args.kl_horizon:
        utils.fail(
            f"--kl_horizon {args.kl_horizon}: must be above a fifth of --batch_size, or a low KL would make kl_coef negative"
        )
    if args.kl_penalty == "full" and args.async_rollouts:
        utils.fail("--kl_penalty full: not with --async_rollouts, whose sampling policy is not at hand any more")
    if args.ratio_threshold is not None and args.ratio_threshold <= 1:
        utils.fail(f"--ratio_threshold {args.ratio_threshold}: must be above 1, which is the first ratio of every rollout")
    if args.batch_size % args.num_mini_batches:
        utils.fail(f"--batch_size {args.batch_size}: not divisible by --num_mini_batches {args.num_mini_batches}")
    if args.truncate_after and args.truncate_token == "none":
        utils.fail(f"--truncate_after {args.truncate_after}: needs a --truncate_token")
    if args.truncate_after >= args.response_length:
        utils.fail(f"--truncate_after {args.truncate_after}: not below --response_length {args.response_length}")
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
    if args.ratio_threshold is not None and accelerator.mixed_precision == "fp16":
        utils.fail(f"--ratio_threshold {args.ratio_threshold}: not with fp16, whose loss scaling needs every step; take bf16")
    B, R = args.batch_size, args.response_length
    if B % (args.num_mini_batches * world):
        utils.fail(f"--batch_size {B}: not divisible by num_mini_batches * processes = {args.num_mini_batches} * {world}")
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

    # ---- models: the reference is a frozen copy of the initial policy, a separate value model a copy of the reward model;
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
    if args.value_model == "separate" and reward_model and not own_tokenizer:
        critic = copy.deepcopy(reward_model)  # [PPO-1] with its reward_bias, and before the reward model is frozen below
    elif args.value_model == "separate":  # no reward model that reads these token ids: the initial policy's trunk and a zero head
        critic = Reward(utils.load_reward_model(args.sft_model_path, "--sft_model_path", True, **loading))
        nn.init.zeros_(critic.model.score.weight)
    if args.value_model == "separate" and args.lora_rank:
        lora.add_adapters(critic.model, args.lora_rank)  # its head is trained as a whole
    if args.value_model == "shared":
        critic = nn.Linear(model.get_output_embeddings().in_features, 1)  # on the trunk's last hidden state
        nn.init.zeros_(critic.weight), nn.init.zeros_(critic.bias)  # [PPO-2] so that every value starts at 0
    reference.to(device).eval()
    if reward_model:
        reward_model.to(device).eval().requires_grad_(False)
    if args.compile and (reason := utils.why_no_block_mask(model) or (args.async_rollouts and "not with --async_rollouts")):
        utils.fail(f"--compile: {reason}")
    stop_id = utils.token_id(tokenizer, args.stop_token, "--stop_token")
    end_id = utils.token_id(tokenizer, args.truncate_token, "--truncate_token")
    end_id = stop_id if end_id is None else end_id  # the token that a complete response ends with
    if args.gradient_checkpointing:
        for network in (model, *([critic.model] if args.value_model == "separate" else [])):
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

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

    # ---- optimizer: one for policy and value model
    policy = Policy(model, args.temperature, critic).to(device)
    # [OPT-4] both given, neither left to the library
    adam = dict(lr=args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay)
    trained = [p for p in policy.parameters() if p.requires_grad]  # [PPO-4] the value model's as well
    optimizer = torch.optim.AdamW(trained, **adam, fused=True)  # one kernel for all weights
    policy, optimizer = engines.prepare(accelerator, policy, optimizer)
    num_updates = math.ceil(args.total_episodes / B)  # [OPT-10] up: whole batches, at least total_episodes
    table_updates = set(torch.linspace(1, num_updates, args.num_sample_generations).round().int().tolist())
    watch = ["eps", "objective/scores", "objective/kl", "objective/gold"]
    learnt_from = [prompts, eval_set.ids, utils.checksum(reference)]
    learnt_from += [utils.checksum(reward_model), reward_model.bias] if reward_model else []
    learnt_from += [repr(train_set.rows), repr(eval_set.rows)] if args.reward_fn else []  # whose columns the functions read
    run = runs.Run(args, accelerator, num_updates, watch, learnt_from)
    run.show_data(train_set)
    run.say(f"policy {args.sft_model_path}, reward model {args.reward_model_path}, value model {args.value_model}")
    run.say(f"rewards: {', '.join(f'{w:g} * {name}' for w, name in zip(functions.weights, functions.names, strict=True))}")
    if own_tokenizer:
        known = f"{len(own_tokenizer)} tokens, the policy's {len(tokenizer)}"
        run.say(f"the reward model has a tokenizer of its own ({known}): it is given text, decoded and encoded again")
    run.say(f"{len(prompts)} prompts, {num_updates} updates of {B} episodes, {world} process(es)")
    run.note_combination("train_ppo", model.config.model_type, "plain")

    def decode(responses, mask):
        return [tokenizer.decode(r[m], skip_special_tokens=True) for r, m in zip(responses.cpu(), mask.cpu(), strict=True)]

    def rewards_of(rows, batch, ended):
        """What each reward says of this process's responses to rows of the data: values, kinds (NOTHING, NUMBER, ..) [M, F]."""
        scores, answers = None, decode(*batch[2:]) if args.reward_fn or own_tokenizer else []
        if own_tokenizer:
            prompts = [row["prompt"] if data.is_messages(row["prompt"]) else data.as_text(tokenizer, row["prompt"]) for row in rows]
            ended = ended & (end_id is not None)  # where no token ends a response, none is put behind its text
            scores = reward_functions.score_text(reward_model, own_tokenizer, prompts, answers, ended, args.micro_batch_size)
        elif reward_model:
            (scores,) = in_slices(lambda *b: (response_scores(reward_model, b),), batch, args.micro_batch_size)
        return functions(rows, answers, scores)

    def evaluate(prompt_set, coordinates):
        """One response to each prompt: (responses as texts, scores [N], {metric: values, at most N}), on every process."""
        ids, texts, rows, _ = prompt_set

        def score_slice(numbers, *batch_and_ended):
            return rewards_of([rows[i % len(rows)] for i in numbers.tolist()], *batch_and_ended)

        responses, mask, ended, kl, values, kinds = one_response_each(
            policy, reference, score_slice, ids, args, stop_id, end_id, coordinates, accelerator
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
        stream = range((update - 1) * B, update * B)  # epoch after epoch, each in an order of its own
        numbers = [order_of_epoch(i // len(prompts))[i % len(prompts)] for i in stream]
        return numbers, *utils.left_pad([prompts[i] for i in numbers], device)

    def rollout(policy, update):
        """Phase 1: a response to each prompt of an update, of which this process samples its share; for any thread.

        Returns: numbers of the prompts; queries, query_mask [B, Q] of the whole batch; responses, mask and the sampler's log-probs;
        and, of use under --async_rollouts alone, this policy's log-probs by the training forward; all [B / world, R].
        """
        policy.eval()  # dropout is 0 either way (utils.load_policy); in training mode gradient checkpointing forbids the cache
        numbers, queries, query_mask = prompts_of(update)
        mine = torch.arange(B, device=device).chunk(world)[rank]  # [B / world], global numbers of my episodes
        with torch.no_grad(), accelerator.autocast():
            my_prompts, coordinates = [queries[mine], query_mask[mine]], (args.seed, TRAINING, update)
            responses, mask, sampled_logprobs = in_slices(
                lambda *b: sample(policy, *b, R, stop_id, coordinates, longest), [*my_prompts, mine], args.rollout_micro_batch_size
            )
            logprobs = sampled_logprobs
            if args.async_rollouts:  # both sides of a ratio come from the training forward
                my_batch = [*my_prompts, responses, mask]
                # [GEN-11] of the policy that samples, whose weights are soon written over
                logprobs, *_ = in_slices(lambda *b: response_logprobs(policy, b), my_batch, args.micro_batch_size)
        return numbers, queries, query_mask, responses, mask, sampled_logprobs, logprobs

    # ---- what the loop takes from update to update, besides weights and Adam's moments: fresh, or from a checkpoint
    done, carried, pending = run.resume(policy, optimizer)
    kl_coef, step = carried.get("kl_coef", args.kl_coef), carried.get("step", 0)
    moments = RunningMoments(**carried.get("moments", {}))
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

        # ---- 1. Rollout: a response to each prompt -------------------------------------------------------------------
        if actor:
            batch = actor.take()
            if update < num_updates:  # before this batch is trained on
                actor.push(accelerator.unwrap_model(policy).model, update + 1)
        else:
            batch = rollout(policy, update)
        numbers, queries, query_mask, responses, response_mask, sampled_logprobs, behaviour_logprobs = batch
        scored_mask, ended = truncate_response(responses, response_mask, end_id, args.truncate_after)  # what will be scored
        rollout_time = time.time()

        # ---- 2. Scores: rewards, log-probs and values for KL, ratio and advantages; [B / world, ..] until gathered ------
        my_batch = [*(x.chunk(world)[rank] for x in (queries, query_mask)), responses, response_mask]
        slice_size = args.micro_batch_size  # whole sequences fill a device with fewer rows than single tokens do
        with torch.no_grad(), accelerator.autocast():
            ref_logprobs, _ = in_slices(lambda *b: response_logprobs(reference, b), my_batch, slice_size)
            my_rows = [train_set.rows[numbers[i]] for i in torch.arange(B).chunk(world)[rank].tolist()]
            reward_values, kinds = rewards_of(my_rows, [*my_batch[:3], scored_mask], ended)  # [GEN-14] what a human would read
            # [GEN-9] the forward that phase 5 repeats: the first ratio is 1
            logprobs, _, values = in_slices(lambda *b: response_logprobs(policy, b), my_batch, slice_size)
            logprobs = behaviour_logprobs if actor else logprobs  # an actor's weights were those of the last update
            if args.kl_penalty == "full":
                (kl_penalties,) = in_slices(lambda *b: (full_kl(policy, reference, b),), my_batch, slice_size)
            else:
                kl_penalties = kl_penalty(logprobs, ref_logprobs, args.kl_penalty)
        # [REW-7] gather once: from here on all is the whole batch, everywhere
        responses, response_mask, scored_mask, ended, sampled_logprobs, logprobs, ref_logprobs, kl_penalties, values = map(
            accelerator.gather,
            (responses, response_mask, scored_mask, ended, sampled_logprobs, logprobs, ref_logprobs, kl_penalties, values),
        )
        reward_values, kinds = accelerator.gather(reward_values), accelerator.gather(kinds)  # [B, F]
        batch = [queries, query_mask, responses, response_mask]  # [B, Q], [B, Q], [B, R], [B, R]
        scores_time = time.time()

        def show(i):
            (answer,), row = decode(responses[i : i + 1], response_mask[i : i + 1]), numbers[i]
            return f"row {train_set.numbers[row]} of --dataset, {train_set.texts[row]!r}, with the response {answer!r}"

        functions.stop_if_failed(run, f"update {update}", kinds, show)
        run.check_finite("the score", update, reward_values.sum(1), show)

        # ---- 3. Rewards ------------------------------------------------------------------------------------------------
        #   response        a    b   EOS   .    .      (nothing is sampled after the stop token; a state: before its token)
        #   response_mask   1    1    1    0    0      actions: they have log-probs, KL, advantages and a policy loss
        #   state_mask      1    1    1    1    0      states: one more, after the end; they have rewards, values and a value loss
        #   rewards        -cK  -cK  -cK score  0      c: kl_coef, K: its KL penalty
        #   without EOS     a    b    c    d    e      both masks are 1 everywhere, and the value after e counts as 0
        #   rewards        -cK  -cK  -cK  -cK  -cK + score      where the score has paid missing_eos_penalty
        given = kinds != reward_functions.NOTHING  # [B, F]; a function may have nothing to say of a response
        scores, counted = combine_rewards(reward_values, given, weights, 1)  # [B], [B]
        scores = missing_eos_scores(scores, ended, args.missing_eos_penalty, args.missing_eos_mode)  # [B]
        shaped_scores = shape_scores(scores, moments, args.score_scaling, args.score_norm, args.score_clip, counted)  # [B]
        kl = (logprobs - ref_logprobs) * response_mask  # [B, R] [REW-5] k1: objective/kl, under any --kl_penalty
        loss_mask = response_mask & counted.unsqueeze(1)  # [B, R]
        state_mask = value_mask(response_mask) & counted.unsqueeze(1)  # [B, R]
        rewards = token_rewards(shaped_scores, kl_penalties, response_mask, kl_coef)  # [B, R]
        if args.whiten_rewards:
            # [PPO-8] mean kept: to subtract it would price length
            rewards = utils.masked_whiten(rewards, state_mask, shift_mean=False)

        # ---- 4. Advantages ---------------------------------------------------------------------------------------------
        advantages, returns = compute_gae(rewards, values, args.gamma, args.lam)  # [B, R]
        if args.normalize_advantage:
            advantages = utils.masked_whiten(advantages, loss_mask)  # [PPO-10] over all response tokens that count

        # ---- 5. Optimise: episodes are shuffled; micro-batches add up to the minibatch's gradient ----------------------
        policy.train()  # for gradient checkpointing; every dropout is 0
        stats, grad_norms = torch.zeros(12, device=device), []
        gap, first_logratio = torch.zeros((), device=device), torch.zeros((), device=device)
        num_skipped = 0
        for epoch in range(args.num_ppo_epochs):
            order = torch.tensor(utils.permutation(B, args.seed, update, epoch), device=device)  # [B] [OPT-9] anew each pass
            epoch_kl = 0
            for episodes in order.chunk(args.num_mini_batches):
                # of the whole minibatch
                num_actions, num_states = (mask[episodes].sum().clamp(min=1) for mask in (loss_mask, state_mask))
                share = episodes.reshape(world, -1)[rank]  # of this process
                share = share[by_length([query_mask[share], response_mask[share]])]
                micro_batches = share.split(args.micro_batch_size)
                sums, row_losses = torch.zeros_like(stats), torch.zeros(B, device=device)
                for i, rows in enumerate(micro_batches):
                    is_last = i + 1 == len(micro_batches)  # gradients are averaged over the processes once a step
                    with engines.accumulate(accelerator, policy, is_last):
                        new_logprobs, entropies, new_values = response_logprobs(policy, [x[rows] for x in batch])  # [M, R]
                        losses, logratio, clipped = ppo_policy_loss(
                            new_logprobs, logprobs[rows], loss_mask[rows], advantages[rows], args.cliprange
                        )
                        value_losses, errors, value_clipped = ppo_value_loss(
                            new_values, values[rows], returns[rows], state_mask[rows], args.cliprange_value
                        )
                        loss = losses.sum() / num_actions  # [OPT-5] so micro-batches add up to the minibatch's gradient
                        loss = loss + args.vf_coef * value_losses.sum() / num_states  # [PPO-14] and no entropy bonus
                        row_losses[rows] = losses.detach().sum(1) + args.vf_coef * value_losses.detach().sum(1)
                        if is_last:  # all losses are known, and no weight is touched
                            run.check_finite("the loss", update, accelerator.reduce(row_losses, "sum"), show)
                        accelerator.backward(loss * world)  # [OPT-6] DDP averages over processes, a sum is meant
                    with torch.no_grad():
                        excess = logratio.expm1() * loss_mask[rows]  # ratio - 1, exact near 1
                        approxkl = 0.5 * logratio**2  # [LOG-3] of an action
                        # phase 6 unpacks the sums in this order
                        sums += torch.stack([x.sum().float() for x in (
                            excess, approxkl, losses, loss_mask[rows], clipped, excess**2, entropies * loss_mask[rows],
                            value_losses, state_mask[rows], value_clipped, errors, new_values * state_mask[rows],
                        )])  # fmt: skip
                        if not grad_norms:  # [LOG-6] before any step: rounding alone, or an actor's lag
                            gap = torch.maximum(gap, (logprobs[rows] - sampled_logprobs[rows]).abs().max())
                            first_logratio = torch.maximum(first_logratio, logratio.abs().max())
                sums = accelerator.reduce(sums, "sum")  # [LOG-2] over all processes, which therefore decide alike
                stats += sums
                mean_excess, approxkl = (sums[:2] / num_actions).tolist()
                epoch_kl += approxkl / args.num_mini_batches
                # [PPO-17] so far from its samples the surrogate says little
                if args.ratio_threshold is not None and not 1 + mean_excess <= args.ratio_threshold:
                    num_skipped += 1
                    engines.forget_gradient(accelerator, policy, optimizer)
                    continue
                step += 1
                if args.tf_adam:
                    optimizer.param_groups[0]["eps"] = tf_adam_eps(args.adam_eps, step)
                check_norm = functools.partial(run.check_finite, "the gradient's norm", update, show=show, rows=episodes)
                grad_norms.append(engines.step(accelerator, policy, optimizer, args.max_grad_norm, check_norm))
            # [PPO-18] the policy has left its samples behind
            if args.target_kl is not None and not epoch_kl <= 1.5 * args.target_kl:
                break

        # ---- 6. Log: sums of numerators and of denominators over all processes, then one division ----------------------
        excess, approxkl, loss, actions, clipped, excess_squared, entropy = stats[:7].tolist()
        value_loss, states, value_clipped, error, vpred = stats[7:].tolist()
        actions, states = max(actions, 1), max(states, 1)
        non_score_reward = -kl_coef * kl_penalties.sum(1).mean().item()  # [LOG-5] what is added
        value_mean, value_var = mean_and_variance(values, state_mask)
        returns_mean, returns_var = mean_and_variance(returns, state_mask)
        episode, now = update * B, time.time()
        metrics = {
            "update": update,
            "episode": episode,
            "epoch": episode / len(prompts),
            "lr": optimizer.param_groups[0]["lr"],
            "eps": B / (now - update_time),
            "objective/kl": kl.sum(1).mean().item(),
            "objective/entropy": -(logprobs * response_mask).sum(1).mean().item(),  # [LOG-1] padding has no part in it
            "objective/kl_coef": kl_coef,
            "objective/non_score_reward": non_score_reward,
            "objective/rlhf_reward": utils.masked_mean(shaped_scores, counted).item() + non_score_reward,
            "objective/scores": utils.masked_mean(scores, counted).item(),
            "objective/score_total": utils.masked_mean(scores, counted).item() + non_score_reward,
            "objective/loss": loss / actions + args.vf_coef * value_loss / states,
            "policy/approxkl_avg": approxkl / actions,
            "policy/clipfrac_avg": clipped / actions,
            "policy/entropy_avg": entropy / actions,
            "policy/grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
            "policy/skipped_minibatches": num_skipped,
            "loss/policy_avg": loss / actions,
            "loss/value_avg": value_loss / states,
            "loss/total_avg": loss / actions + args.vf_coef * value_loss / states,
            "returns/mean": returns_mean,
            "returns/var": returns_var,
            "val/mean": value_mean,
            "val/var": value_var,
            "val/vpred": vpred / states,
            "val/error": error / states,
            "val/clipfrac_avg": value_clipped / states,
            "val/var_explained": 1 - error / states / (returns_var + 1e-8),
            "val/ratio": 1 + excess / actions,
            "val/ratio_var": excess_squared / actions - (excess / actions) ** 2,  # [LOG-4] of actions
            "val/logprob_gap": accelerator.gather(gap.reshape(1)).max().item(),
            "val/first_ratio": accelerator.gather(first_logratio.reshape(1)).max().clamp(max=20).exp().item(),
            "val/num_eos_tokens": (response_mask & (responses == tokenizer.eos_token_id)).sum().item(),
            "val/num_stop_token_ids": ended.sum().item() if end_id is not None else 0,
            "val/equal_scores": float(scores[counted].unique().numel() < 2),
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
            answers = decode(responses, scored_mask)
            metrics["objective/gold"] = sum(gold(train_set.texts[numbers[i]], answer) for i, answer in enumerate(answers)) / B
        if eval_rows and (update == num_updates or (args.eval_every and update % args.eval_every == 0)):
            metrics |= held_out()
        run.log(metrics, update)
        if update in table_updates:
            answers, scores, result = evaluate(table_set, (args.seed, SAMPLE_TABLE, update))
            shown = [
                {"query": q, "response": a, "score": s, "kl": d, "total": s - kl_coef * d}
                for q, a, s, d in zip(table_set.texts, answers, scores.tolist(), result["kl"].tolist(), strict=True)
            ]
            run.table(f"samples of update {update}", shown, update)
        if args.adaptive_kl:
            # [PPO-16] only now: this batch was priced, and logged, at the old one
            kl_coef = adapt_kl_coef(kl_coef, metrics["objective/kl"], args.kl_target, args.kl_horizon, B)

        if run.is_checkpoint_due(update):
            pending = {}
            if actor and update < num_updates:  # the batch to be trained on next; its prompts are known
                pending = {name: accelerator.gather(x) for name, x in zip(PENDING, actor.batch.result()[3:], strict=True)}
            carried = {"seconds": time.time() - start_time, "before": before, "metrics": metrics}
            carried |= {"kl_coef": kl_coef, "step": step, "moments": vars(moments)}
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
    main(utils.parse_args(Args, toy.defaults("train_ppo")))
    utils.leave_process_group()
