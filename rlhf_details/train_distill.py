"""
On-policy distillation: a student learns a teacher's next-token distribution at the states of its own responses.
minimal/distill.py is the algorithm alone; this file adds GKD's divergences, --gamma and several processes.

1. The student samples responses, and a frozen model with the same tokenizer, the teacher, scores every token.
2. `--divergence sampled`: each token is an action with the advantage log p_teacher - log p_student. In expectation a
   step descends the reverse KL, KL(student || teacher), at the states that were sampled. How a token changes later
   states is left out, unless --gamma adds it: with 1 a step follows the gradient of the whole response's KL.
3. `--divergence jsd` compares whole distributions at these states (GKD, arXiv 2306.13649): --beta 0 is the forward KL,
   KL(teacher || student), and 1 the reverse KL, of which `sampled` is an estimate.
4. With jsd, --on_policy_share mixes in updates on the data set's completions. --teacher_prompt_template shows the
   teacher more than the student, such as the answer.
5. Sampling and shuffling depend on (seed, update, episode, ..) alone, not on a generator's state.

Left out on purpose: top-k and top-p, which would sample from another policy; teachers with another tokenizer or
temperature, or behind a server; responses that the teacher writes (make them a data set); and a reward beside the
teacher: --reward_fn is only logged.

A tag such as [DISTILL-1] marks an implementation detail: benchmark/checks/details.md has its source, test and effect.

Shapes    P: prompts   k: responses per prompt   B = P * k: episodes of an update, the k of a prompt adjacent
          Q: query tokens, left-padded   R: response tokens, right-padded   L = Q + R: columns
          L': columns that a token may see, the cache included   V: vocabulary   M: episodes of a micro-batch
          S: stop tokens   C: columns that are read   K: tokens compared at a time   F: logged rewards
          H: hidden size (the teacher's may differ)   N: held-out prompts
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/train_distill.py
N processes:   accelerate launch --num_processes N rlhf_details/train_distill.py
Your data:     python rlhf_details/train_distill.py --dataset rows.jsonl --sft_model_path gpt2
               --teacher_model_path gpt2-xl
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, data, flags, models, stop_tokens
from rlhf_details.plumbing.machine import engines, rewards, samplers
from rlhf_details.plumbing.outputs.run import Run
from rlhf_details.utils import EVALUATION, TRAINING, Batch, in_slices


@dataclass
class Args(flags.SamplingArgs):  # inherits the shared flags
    exp_name: str = "train_distill"
    output_dir: str = "models/distill"

    # models
    teacher_model_path: str | None = None
    """the teacher, with the tokenizer of --sft_model_path, the student; required except for toy and toy-sum"""
    teacher_prompt_template: str | None = None
    """what the teacher reads, with columns in braces: "{prompt} The answer is {answer}."; in a chat it replaces the
    last message, whose text is {prompt}; None: the student's prompt"""

    # sampling
    response_length: int = 256
    """most tokens a response may have (R)"""
    temperature: float = 1.0
    """temperature of sampling and of every log-prob, the teacher's too"""
    stop_token: str = "eos"
    """what ends sampling: "eos" (any end that the model's files name), "none", or a text that is one token"""
    reward_fn: tuple[str, ...] = ()
    """functions f(prompts, completions, **columns) -> rewards, FILE.py:function or package.module:function, to log"""

    # algorithm
    divergence: Literal["sampled", "jsd"] = "sampled"
    """learn from the teacher's log-prob of each sampled token, or from whole distributions"""
    gamma: float = 0.0
    """sampled: discount of later tokens in a token's advantage"""
    beta: float = 0.5
    """jsd: the teacher's share of the mixture; 0: forward KL, 1: reverse KL"""
    on_policy_share: float = 1.0
    """jsd: share of the updates that the student samples (GKD's lambda); the others take the data set's completions"""
    responses_per_prompt: int = 1
    """responses per prompt (k), without a baseline"""
    total_episodes: int = 10_000
    """episodes of the whole run, rounded up to whole batches"""
    batch_size: int = 64
    """episodes per update and optimiser step, over all processes (B)"""

    # optimiser
    learning_rate: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """learning-rate schedule over the updates"""
    warmup_ratio: float = 0.0
    """the warm-up's share of the updates"""
    adam_eps: float = 1e-8
    """AdamW's epsilon"""
    weight_decay: float = 0.0
    """AdamW's weight decay"""
    max_grad_norm: float | None = 1.0
    """clip the gradient's global norm; None: only log it"""


# Presets replace the defaults above: an embedded task's by name (default: "toy"), else those of the smallest number
# above the model's parameter count. docs/guides/1_your_data.md has their sources.
presets = {
    "toy": dict(
        eval_dataset="toy:test",
        sft_model_path="models/toy/sft",
        teacher_model_path="models/toy/rloo",
        output_dir="models/toy/distill",
        response_length=36,
        total_episodes=12_800,
        batch_size=256,
        learning_rate=1e-3,
        micro_batch_size=256,
        rollout_micro_batch_size=256,
    ),
    20e6: dict(
        response_length=53,
        temperature=0.7,
        learning_rate=3e-4,
        micro_batch_size=64,
    ),
    500e6: {},  # the defaults above
    5e9: dict(learning_rate=3e-6),
    math.inf: dict(learning_rate=1e-6),
}
presets["toy-sum"] = presets["toy"] | dict(
    eval_dataset="toy-sum:test",
    sft_model_path="models/toy-sum/sft",
    teacher_model_path="models/toy-sum/rloo",
    reward_fn=("rlhf_details.toy:right_sum",),
    output_dir="models/toy-sum/distill",
    response_length=3,
)


# ---- models: what is trained runs inside `forward`, so that DDP, FSDP and DeepSpeed see all parameters ---------------
class Policy(nn.Module):
    """Next-token logits / temperature, or log-probs of given tokens, in fp32."""

    logits_at_once = 2**24  # 64 MiB in fp32, and as much for the teacher

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)

    def forward(self, tokens, mask, positions, index, labels=None, cache=None, compare=None, states=None):
        """
        Args: tokens, positions [M, L]; mask [M, L'] bool, None without padding; index [C], the columns to read; labels
        [M, C], the tokens that these predict; cache, transformers', updated in place; states [M, C, H], a Teacher's;
        compare(log-softmax [K, V], states [K, H]) -> [K], called piece by piece.
        Returns: (log-probs, entropies, and what `compare` says), each [M, C]; without labels the logits / T [M, C, V].
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [M, C, H]
        if labels is None:
            return self.logits(hidden)
        size = self.logits_at_once // self.head.vocab_size
        return utils.token_logprobs(self.logits, hidden, labels, size, compare, states)

    def logits(self, hidden):
        """Tempered logits [.., V] fp32 of last hidden states [.., H]."""
        # The temperature divides the logits of every log-prob, not the sampler's alone. [GEN-2] [GEN-3]
        return self.head(hidden).float() / self.temperature


class Teacher(Policy):
    """A frozen Policy, which without labels returns the last hidden states [M, C, H]."""

    def forward(self, tokens, mask, positions, index, labels=None):
        """As Policy.forward."""
        if labels is not None:
            return super().forward(tokens, mask, positions, index, labels)
        return models.hidden_states(self.model, tokens, mask, positions)[:, index]


def load_models(args, device):
    """Returns (tokenizer, policy, teacher), all in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy = Policy(models.add_adapters(model, args.lora_rank), args.temperature)
    # The teacher reads the student's ids. [DISTILL-5]
    teacher = models.load_teacher(args, tokenizer, policy.head)
    # Distributions that are equal at one temperature are equal at any. [DISTILL-6]
    teacher = Teacher(utils.disable_dropout(teacher), args.temperature).requires_grad_(False)
    return tokenizer, policy.to(device), teacher.to(device).eval()


# ---- from tokens to log-probs ----------------------------------------------------------------------------------------
def join(batch):
    """Rows of a prompt and its response.

        tokens   .  p  p  p  a  b  EOS  .        Q = 4 (left-padded), R = 4 (right-padded)
        index             3  4  5   6            column Q - 1 + t predicts token t
    Returns: tokens, mask, positions [M, L] with L = Q + R, and index [R], the columns Q - 1 .. Q + R - 2.
    """
    tokens = torch.cat([batch.queries, batch.responses], 1)  # [M, L]
    mask = torch.cat([batch.query_mask, batch.response_mask], 1)  # [M, L]
    # The column before a token predicts it. [GEN-7]
    index = torch.arange(batch.responses.size(1), device=mask.device) + batch.queries.size(1) - 1
    return tokens, mask, utils.positions_from_mask(mask), index


def response_logprobs(policy, batch, **comparison):
    """Log-probs, entropies and, given `compare` and `states`, divergences of a Batch, [M, R] fp32, 0 at padding."""
    R = batch.responses.size(1)
    batch = utils.trim(batch)
    outputs = policy(*join(batch), labels=batch.responses, **comparison)  # each [M, width]
    # Padding holds zeros, so that sums over R need no mask. [REW-6]
    outputs = [x * batch.response_mask for x in outputs]
    return [nn.functional.pad(x, (0, R - x.size(1))) for x in outputs]


def for_teacher(rows, batch):
    """The Batch of M rows with what the teacher reads as queries [M, Q'], and the same responses [M, R]."""
    # What it reads may be longer, so it is padded by itself. [DISTILL-8]
    return Batch(*utils.left_pad([row.teacher_ids for row in rows], batch.queries.device), *batch[2:4])


# ---- equations -------------------------------------------------------------------------------------------------------
def has_stopped(responses, mask, stop_ids):
    """Whether each response [B, R] holds one of stop_ids [S]. Without stop_ids all have ended."""
    # The filler, token 0, may be the stop token, so only real tokens count. [GEN-13]
    return (mask & torch.isin(responses, stop_ids)).any(1) if len(stop_ids) else mask.any(1)


def kl_divergence(log_p, log_q):
    """KL(p || q) of distributions in logs [.., V]. Returns: [..]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def generalized_jsd(logp, teacher_logp, beta):
    """beta KL(teacher || m) + (1 - beta) KL(student || m), where m = beta teacher + (1 - beta) student.

    Args: logp, the student's, and teacher_logp, log-softmaxes [.., V]; beta in [0, 1]. Returns: [..].
    Source: arXiv 2306.13649, equation 1; TRL v1.16.0, gkd_trainer.py (also for the ends 0 and 1).
    """
    # At its ends the formula is 0. Divided by beta, or 1 - beta, it tends to these two. [DISTILL-4]
    if beta == 0:
        return kl_divergence(teacher_logp, logp)
    if beta == 1:
        return kl_divergence(logp, teacher_logp)
    # Beta weighs the teacher, in the mixture and before its own KL. [DISTILL-3]
    mixture = torch.logaddexp(math.log(beta) + teacher_logp, math.log1p(-beta) + logp)
    return beta * kl_divergence(teacher_logp, mixture) + (1 - beta) * kl_divergence(logp, mixture)


def distill_advantages(rewards, gamma):
    """A_t = sum of gamma^(u - t) * r_u for u >= t, with r = log p_teacher - log p_student of each sampled token.

    Args: rewards [B, R], 0 at padding. Returns: [B, R].
    Source: Lu and Thinking Machines Lab, "On-Policy Distillation" (2025), where gamma is 0.
    """
    advantages, later = [], torch.zeros_like(rewards[:, 0])
    for reward in reversed(rewards.unbind(1)):
        # With gamma 0 a token answers for itself alone, and not for the states that it leads to. [DISTILL-2]
        later = reward + gamma * later
        advantages.append(later)
    return torch.stack(advantages[::-1], 1)


def distill_policy_loss(logprobs, advantages):
    """-A * p / p.detach() of each token, whose gradient is -A * grad log p.

    Args: logprobs, advantages [M, R], 0 at padding. Returns: [M, R].
    """
    return -advantages * (logprobs - logprobs.detach()).exp()


def is_sampled(update, share):
    """Whether the student samples in this update (from 1): in floor(n * share) of the first n.

    Source: arXiv 2306.13649, algorithm 1, which draws a number for each update.
    """
    # Counting keeps the share in short runs, too; 1e-9 is for rounding: 0.29 * 100 < 29. [DISTILL-7]
    return math.floor(update * share + 1e-9) > math.floor((update - 1) * share + 1e-9)


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(policy, sample, teacher, score, prompts, stop_ids, args, accelerator):
    """Samples one response to each held-out prompt, as in training and with the same noise each time. Its score is -KL.

    Returns: ({"eval/objective/..": value}, episodes to show).
    """
    policy.eval()
    episodes, rows = data.my_share(prompts, accelerator)  # filled up, so that all processes have equally many
    queries, query_mask = utils.left_pad([row.ids for row in rows], accelerator.device)
    key = args.seed, EVALUATION, 0
    with accelerator.autocast():
        responses, response_mask, logprobs = sample(policy, queries, query_mask, episodes, 1, key)  # [N / world, R]
        batch = Batch(queries, query_mask, responses, response_mask)
        teacher_logprobs, _ = in_slices(response_logprobs, teacher, for_teacher(rows, batch), args.micro_batch_size)
        rewards_of_each, scored = score(rows, batch)  # [N / world, F], [N / world]
    kl = (logprobs - teacher_logprobs).sum(1)  # [N / world], from the sampler's log-probs
    ended = has_stopped(responses, response_mask, stop_ids)
    return score.held_out(prompts, rewards_of_each, scored, responses, response_mask, ended, -kl, kl)


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends the program where arguments contradict each other."""
    cli.check(args)
    rewards.check_functions(args)
    if args.teacher_model_path is None:
        console.fail(f"--teacher_model_path: required with --dataset {args.dataset}: a model with the student's tokens")
    cli.check_batch_size(args, "responses_per_prompt")
    if args.beta > 1:
        console.fail(f"--beta {args.beta}: must be at most 1")
    if args.on_policy_share < 1 and (args.divergence == "sampled" or args.overlap or args.responses_per_prompt > 1):
        rule = "needs --divergence jsd, one response per prompt, and no --overlap"
        console.fail(f"--on_policy_share {args.on_policy_share}: {rule}")
    if args.gamma and args.divergence == "jsd":
        console.fail(f"--gamma {args.gamma}: needs --divergence sampled, where tokens have advantages")
    if args.beta != Args.beta and args.divergence == "sampled":
        console.fail(f"--beta {args.beta}: needs --divergence jsd, which has a mixture")


def main(args: Args):
    """Trains. Returns {"before", "after": held-out metrics, "metrics": the last row, "run": folder}."""
    check(args)
    accelerator = engines.start(args)  # for one process, DDP, FSDP2 or DeepSpeed
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    k, B, R, size = args.responses_per_prompt, args.batch_size, args.response_length, args.micro_batch_size
    episodes = torch.arange(B, device=device)  # [B], the numbers of an update's episodes
    mine = slice(rank * B // world, (rank + 1) * B // world)  # those of this process
    is_jsd = args.divergence == "jsd"

    # ---- models, prompts, rewards, optimiser
    tokenizer, policy, teacher = load_models(args, engines.loading_device(accelerator))
    stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token", device)  # [S]
    prompts, held_out = data.load_prompts(args, tokenizer, room=models.context(policy, teacher) - R)
    # score(rows, batch) gives rewards of functions of text, which are only logged.
    score = rewards.Scorer(args, accelerator, tokenizer, size, stop_ids)
    score.take_text_model(None, prompts, held_out)
    optimizer = utils.adamw(policy, args.learning_rate, args.adam_eps, args.weight_decay)
    # The student's forward calls the teacher's head, so each process keeps a whole teacher.
    teacher.stays_whole = is_jsd
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer, teacher)
    num_updates = math.ceil(args.total_episodes / B)  # [OPT-10]
    run = Run(args, accelerator, tokenizer, num_updates, prompts, [held_out, teacher])

    def prompts_of(update):
        """The B rows of an update, each prompt k times."""
        return [prompt for prompt in prompts.of_update(update, B // k, args.seed) for _ in range(k)]

    def compare(logp, states):
        """The divergence [K] of log-softmaxes [K, V] and the teacher's at its states [K, H]."""
        return generalized_jsd(logp, teacher.logits(states).log_softmax(-1), args.beta)

    # sample(policy, queries, query_mask, episodes, n, key) wraps utils.sample or vLLM; with --overlap it samples an
    # update ahead. `sample.is_another`: another engine, or older weights.
    sample = samplers.choose(args, run, [*prompts, *held_out], prompts_of, stop_ids)
    if is_jsd and sample.is_another:
        console.say("--divergence jsd: not corrected; another policy samples the states, and each is compared exactly")
    run.resume(policy, optimizer)
    # run.log calls this when it is due.
    evaluation = functools.partial(evaluate, policy, sample, teacher, score, held_out, stop_ids, args, accelerator)
    if run.first_update == 1:
        run.log(0, evaluation=evaluation)

    for update in range(run.first_update, num_updates + 1):
        # All steps of an update have the same learning rate. [OPT-2]
        lr = utils.learning_rate_at(update, num_updates, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Rollout: k responses to each prompt ------------------------------------------------------------------
        rows = prompts_of(update)  # [B]
        queries, query_mask = utils.left_pad([row.ids for row in rows], device)  # [B, Q]
        is_on_policy = is_sampled(update, args.on_policy_share)
        policy.eval()
        with torch.no_grad(), accelerator.autocast():
            key = args.seed, TRAINING, update
            if is_on_policy:
                responses, response_mask, sampled_logprobs = sample(
                    policy, queries[mine], query_mask[mine], episodes[mine], 1, key
                )  # [B / world, R]
            else:
                responses, response_mask = data.completions(rows[mine], R, device)
            run.lap("rollout")

            # ---- 2. Scores: log-probs, the teacher's and the student's -----------------------------------------------
            batch = Batch(queries[mine], query_mask[mine], responses, response_mask)
            rewards_of_each, _ = score(rows[mine], batch)  # [B / world, F]
            found = [responses, response_mask, rewards_of_each]
            if not is_jsd:  # jsd reads the teacher's whole distributions, in phase 5.
                teacher_logprobs, _ = in_slices(response_logprobs, teacher, for_teacher(rows[mine], batch), size)
                old_logprobs = sampled_logprobs
                if sample.is_another:
                    # Rewards and weights need this policy's log-probs. [GEN-9]
                    old_logprobs, _ = in_slices(response_logprobs, policy, batch, size)
                found += [sampled_logprobs, old_logprobs, teacher_logprobs]
        # Every process gathers the whole batch once, and phases 3 and 4 are computed on all of it. [REW-7]
        responses, response_mask, rewards_of_each, *logprobs_of_each = accelerator.gather(found)
        batch = Batch(queries, query_mask, responses, response_mask)
        run.lap("scores")

        # ---- 3. Rewards: one for each token --------------------------------------------------------------------------
        #   response        a    b   EOS   .    .
        #   response_mask   1    1    1    0    0      the stop token counts: the teacher says when to end
        ended = has_stopped(responses, response_mask, stop_ids)  # [B]
        if not is_jsd:
            sampled_logprobs, old_logprobs, teacher_logprobs = logprobs_of_each
            # It has no gradient; a response's sum has the mean -KL(student || teacher). [DISTILL-1]
            token_rewards = teacher_logprobs - old_logprobs  # [B, R], 0 at padding

        # ---- 4. Advantages -------------------------------------------------------------------------------------------
        weight_metrics = {}
        if not is_jsd:
            advantages = distill_advantages(token_rewards, args.gamma)  # [B, R]
            # Importance weights correct a token's own choice, and not those that gamma adds. [GEN-15]
            advantages, weight_metrics = sample.weigh(advantages, old_logprobs, sampled_logprobs, response_mask)

        # ---- 5. Optimise ---------------------------------------------------------------------------------------------
        policy.train()  # Gradient checkpointing needs it.
        means, divergences = utils.Means(device), []
        num_actions = response_mask.sum()  # over all processes
        parts = episodes[mine].split(size)
        micro_batches = utils.split(batch, parts)
        teacher_batches = utils.split(for_teacher(rows, batch), parts) if is_jsd else ()
        for i, (m, micro_batch) in enumerate(engines.accumulate(accelerator, policy, micro_batches)):  # m: its episodes
            if is_jsd:
                with torch.no_grad(), accelerator.autocast():
                    states = teacher(*join(utils.trim(teacher_batches[i][1])))  # [M, width, H]
                logprobs, entropies, losses = response_logprobs(policy, micro_batch, compare=compare, states=states)
            else:
                logprobs, entropies = response_logprobs(policy, micro_batch)  # [M, R]
                losses = distill_policy_loss(logprobs, advantages[m])
                means.add_max("val/logprob_gap", (logprobs - sampled_logprobs[m]).abs())
            # Dividing by the whole batch's count makes micro-batches add up to its gradient. [OPT-5]
            loss = losses.sum() / num_actions
            accelerator.backward(loss * world)  # The engines average over processes. [OPT-6]
            divergences.append(losses.detach().sum(1))  # [M], for jsd
            means.add({"loss/policy_avg": losses, "policy/entropy_avg": entropies}, response_mask[m])
        norm = engines.clip_and_step(accelerator, policy, optimizer, args.max_grad_norm, run)
        run.lap("optimise")

        # ---- 6. Log --------------------------------------------------------------------------------------------------
        metrics = means.reduce(accelerator) | score.by_name(rewards_of_each, "objective/")
        if is_jsd:
            divergence = accelerator.gather(torch.cat(divergences))  # [B]
        else:
            # Divergence and entropy are those of the policy that sampled.
            logged = sample.behaviour_logprobs(old_logprobs, sampled_logprobs)  # [B, R]
            divergence = (logged - teacher_logprobs).sum(1)  # [B]
            metrics["objective/entropy"] = -logged.sum(1).mean()
        metrics |= weight_metrics | {
            "epoch": update * (B // k) / len(prompts),
            "lr": lr,
            "objective/divergence": divergence.mean(),
            "objective/divergence_per_token": divergence.sum() / num_actions,
            "policy/grad_norm": norm,
            "val/on_policy": float(is_on_policy),  # 0: all figures are of the data set's completions
            "val/num_stop_token_ids": ended.sum() if len(stop_ids) else 0,
            "val/sequence_lengths": response_mask.sum(1).float().mean(),
        }
        shown = rows, responses, response_mask, ended, -divergence, divergence
        run.log(update, metrics, shown, evaluation)
        run.checkpoint_if_due(update, policy, optimizer)
    return run.finish(policy)


if __name__ == "__main__":
    cli.main(main, Args)
