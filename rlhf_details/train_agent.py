"""
RLOO over several turns: a policy speaks with an environment, such as a tool, a game or a user (arXiv 2402.14740).
minimal/agent.py is the algorithm alone; this file adds any environment, templates, limits and processes.

1. A trajectory is the prompt, a turn of the policy, an observation, a turn, and so forth. Each prompt gets k of them. A
   whole trajectory is one action, and its reward is score - kl_coef * KL of the policy's own tokens.
2. The baseline of a trajectory is the mean reward of its k - 1 siblings. There is no value model.
3. One optimiser step per rollout is exactly REINFORCE.
4. `action_mask` says which tokens the policy wrote. Loss, KL, entropy, lengths and counts are over these. Observations
   are read: they stand in every forward, and nothing is learnt from them.
5. A turn is one call of the sampler, whose query is all that came before, as the ids that were sampled or written. It
   computes its prefix again: docs/evidence/14_several_turns.md says what that costs. Rows hold one trajectory each.
6. Sampling and shuffling are functions of (seed, update, turn, episode, ..), never of a generator's state. The first
   turn has no coordinate for the turn, so an environment that never says anything gives train_rloo.py's numbers.

Left out on purpose: what train_rloo.py has of REINFORCE++, more steps per rollout, packed rows and --overlap; a reward
for each turn.

A tag such as [RLOO-3] marks an implementation detail: benchmark/checks/details.md has its source, test and effect.

Shapes    P: prompts   k: trajectories per prompt   B = P * k: episodes of an update, the k of a prompt adjacent
          Q: query tokens, left-padded   R: tokens of a trajectory, right-padded   L: columns of a row   V: vocabulary
          M: episodes of a micro-batch   C: columns that are read   H: hidden size   S: stop tokens
          F: rewards, the reward model's among them   N: held-out prompts, and in `rollout` episodes that go on
Masks     True marks a real token. Nothing is found by looking for a pad token.

One process:   python rlhf_details/train_agent.py
N processes:   accelerate launch --num_processes N rlhf_details/train_agent.py
Your data:     python rlhf_details/train_agent.py --dataset rows.jsonl --sft_model_path gpt2 --env_fn mine.py:tool
               --reward_fn mine.py:f
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, data, flags, models, stop_tokens, token_ids
from rlhf_details.plumbing.machine import engines, environments, rewards, samplers
from rlhf_details.plumbing.outputs.run import Run
from rlhf_details.utils import EVALUATION, TRAINING, Batch, in_slices


@dataclass
class Args(flags.PolicyArgs):  # inherits the shared flags
    exp_name: str = "train_agent"
    output_dir: str = "models/agent"
    dataset: str = "toy-tools"
    """prompts, as those of train_rloo.py: "toy-tools", a file, a folder, a Hub data set, or FILE.py:FUNCTION"""

    # environment
    env_fn: str | None = None
    """FILE.py:function, f(prompts, completions, **columns) -> for each list of turns in completions a text, the
    observation, or messages, or None where the episode ends (this or --tools, unless --dataset is toy-tools)"""
    tools: tuple[str, ...] = ()
    """FILE.py:function ...: tools that the policy calls, functions with type hints and a docstring; what they return is
    the observation, and a turn without a call ends the episode"""
    tool_timeout: float = 10.0
    """seconds after which a call of a tool is an error"""
    env_role: Literal["user", "tool"] = "user"
    """whose message an observation is, where the prompts are messages"""
    max_turns: int = 8
    """most turns of the policy in an episode"""
    max_observation_tokens: int | None = None
    """most tokens of an observation, with those that the chat template writes around it; None: no limit of its own"""
    long_observation: Literal["cut", "end"] = "cut"
    """a longer observation loses the end of its text, or ends the episode, which pays missing_eos_penalty"""

    # sampling
    response_length: int = 512
    """most tokens of a trajectory, of all its turns and observations together (R)"""
    temperature: float = 0.7
    """temperature of sampling and of every log-prob"""
    stop_token: str = "eos"
    """a turn ends with this token: "eos" (any end that the model's files name), or a text that is one token"""
    missing_eos_penalty: float | None = 1.0
    """what a trajectory that ran out of turns or tokens pays, in points of score; None: nothing"""

    # reward and KL
    kl_coef: float = 0.03
    """weight of the KL in the reward (beta)"""

    # algorithm
    rloo_k: int = 4
    """trajectories per prompt (k)"""
    total_episodes: int = 10_000
    """trajectories sampled in the whole run, rounded up to whole batches"""
    batch_size: int = 64
    """trajectories per update, over all processes (B)"""

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


# Presets replace the defaults above: an embedded task's by name (default: "toy-tools"), else those of the smallest
# number above the model's parameter count. docs/guides/1_your_data.md has their sources.
presets = {
    "toy-tools": dict(
        eval_dataset="toy-tools:test",
        sft_model_path="models/toy-tools/sft",
        reward_fn=("rlhf_details.toy:right_code", "rlhf_details.toy:questions"),
        reward_fn_weights=(1.0, -0.05),
        output_dir="models/toy-tools/agent",
        env_fn="rlhf_details.toy:look_up",
        max_turns=6,
        response_length=48,
        temperature=1.0,
        kl_coef=0.02,
        total_episodes=15_360,
        batch_size=128,
        learning_rate=1e-3,
        micro_batch_size=128,
        rollout_micro_batch_size=512,
    ),
    20e6: dict(missing_eos_penalty=3.0, kl_coef=0.3, learning_rate=3e-4, micro_batch_size=64),
    500e6: {},  # the defaults above
    5e9: dict(learning_rate=3e-6),
    math.inf: dict(learning_rate=1e-6),
}


# ---- models: what is trained runs inside `forward`, so that DDP, FSDP and DeepSpeed see all parameters ---------------
class Policy(nn.Module):
    """Next-token logits / temperature, or log-probs of given tokens, in fp32."""

    logits_at_once = 2**24  # 64 MiB in fp32

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)

    def forward(self, tokens, mask, positions, index, labels=None, cache=None):
        """
        Args: tokens, positions [M, L]; mask [M, L] bool, None without padding; index [C], the columns to read; labels
        [M, C], the tokens that these predict; cache, transformers', updated in place.
        Returns: (log-probs, entropies), both [M, C]; without labels the logits / T [M, C, V].
        """
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [M, C, H]
        if labels is None:
            return self.logits(hidden)
        return utils.token_logprobs(self.logits, hidden, labels, self.logits_at_once // self.head.vocab_size)

    def logits(self, hidden):
        """Tempered logits [.., V] fp32 of last hidden states [.., H]."""
        # The temperature divides the logits of every log-prob, not the sampler's alone. [GEN-2] [GEN-3]
        return self.head(hidden).float() / self.temperature


def load_models(args, device):
    """Returns (tokenizer, policy, reference), in fp32 and without dropout."""
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy = Policy(models.add_adapters(model, args.lora_rank), args.temperature)
    # With the policy itself as reference the KL would stay 0. [MODEL-4]
    reference = models.frozen_copy(policy)
    return tokenizer, policy.to(device), reference.to(device).eval()


# ---- turn after turn -------------------------------------------------------------------------------------------------
class Trajectories(NamedTuple):
    """What follows the prompts of B episodes: turns of the policy, and observations between them."""

    responses: torch.Tensor  # [B, R] int64, right-padded
    response_mask: torch.Tensor  # [B, R] bool, what is real
    action_mask: torch.Tensor  # [B, R] bool, what the policy wrote, with the token that ended each turn
    logprobs: torch.Tensor  # [B, R] fp32, those of the sampler, 0 where the policy wrote nothing
    ended: torch.Tensor  # [B] bool, whether the policy ended its last turn and the environment the episode


@torch.no_grad()
def rollout(policy, sample, env, rows, episodes, key, stop_ids, args):
    """Lets policy and environment speak in turn.

    Args: sample, of samplers.choose; env, an Environment; rows, the Prompts of this process's B episodes; episodes [B],
    their numbers in the update; key, e.g. (seed, TRAINING, update). Call it on every process.
    Returns: (Trajectories, for each episode the texts of its turns and, between them, of its observations).
    """
    B, R, device = len(rows), args.response_length, episodes.device
    responses = torch.zeros(B, R, dtype=torch.long, device=device)
    response_mask, action_mask, logprobs = responses.bool(), responses.bool(), responses.float()
    ended, said = response_mask.any(1), [[] for _ in rows]  # No episode has ended, and nothing is said.
    active = list(range(B))  # the rows whose episodes go on, N of them
    policy = engines.gathered(policy)  # once, because all turns are sampled with the same weights
    for turn in range(1, args.max_turns + 1):
        # All processes make as many calls. One whose episodes are all over samples for a dummy row.
        some = active or [0]
        # A turn goes on from the ids that were sampled. Made of text again, they could be others. [AGT-4]
        before = [rows[i].ids + responses[i, response_mask[i]].tolist() for i in some]
        room = (R - response_mask[some].sum(1)).clamp(min=1)  # [N]
        # From the second turn on, the turn is one more coordinate of the noise. [GEN-4]
        turn_key = key if turn == 1 else (*key, turn)
        sampled = sample(policy, *utils.left_pad(before, device), episodes[some], 1, turn_key, room)  # three of [N, R]
        stopped, texts = has_stopped(*sampled[:2], stop_ids), token_ids.decode(env.tokenizer, *sampled[:2])
        lengths, asked = response_mask.sum(1).tolist(), []
        for i, ids, mask, values, text, has_ended in zip(active, *sampled, texts, stopped, strict=False):  # no dummy
            new = slice(lengths[i], lengths[i] + int(mask.sum()))
            responses[i, new], logprobs[i, new] = ids[mask], values[mask]
            # The token that ends a turn is the policy's own. Without it no policy learns when to stop. [AGT-3]
            response_mask[i, new] = action_mask[i, new] = True
            said[i].append(text)
            if has_ended:  # Other turns have no more room.
                asked.append(i)
        lengths, active = response_mask.sum(1).tolist(), []
        # Beside what it says, `env` returns the ids that a chat template writes between two turns.
        answers = env([rows[i] for i in asked], [said[i][::2] for i in asked], [R - lengths[i] for i in asked])
        for i, (text, ids) in zip(asked, answers, strict=True):
            ended[i] = text is None
            # An observation stands only where another turn has room behind it.
            if ids is not None and turn < args.max_turns:
                new = slice(lengths[i], lengths[i] + len(ids))
                responses[i, new], response_mask[i, new] = torch.tensor(ids, dtype=torch.long, device=device), True
                said[i].append(text)
                active.append(i)
        if env.is_over(active):
            break
    #   responses      ask red  ;  red is  3  4  ;  say 3  4  ;  .  .     a question, an observation, an answer
    #   response_mask   1   1   1   1  1   1  1  1   1  1  1  1  0  0     all that is real stands in every forward
    #   action_mask     1   1   1   0  0   0  0  0   1  1  1  1  0  0     what the policy wrote is trained
    return Trajectories(responses, response_mask, action_mask, logprobs, ended), said


# ---- from tokens to log-probs ----------------------------------------------------------------------------------------
def join(batch):
    """Rows of a prompt and its trajectory: tokens, mask, positions [M, L], and index [R], for each token of the
    trajectory the column whose logits predict it.
    """
    tokens = torch.cat([batch.queries, batch.responses], 1)  # [M, L]
    mask = torch.cat([batch.query_mask, batch.response_mask], 1)  # [M, L]
    # The column before a token predicts it. [GEN-7]
    index = torch.arange(batch.responses.size(1), device=mask.device) + batch.queries.size(1) - 1
    return tokens, mask, utils.positions_from_mask(mask), index


def response_logprobs(policy, batch):
    """Log-probs and entropies [M, R] fp32, 0 at padding, of a Batch of M episodes."""
    R = batch.responses.size(1)
    batch = utils.trim(batch)
    outputs = policy(*join(batch), labels=batch.responses)  # two of [M, width]
    # Padding holds zeros, so that sums over R need no mask. [REW-6]
    outputs = [x * batch.response_mask for x in outputs]
    return [nn.functional.pad(x, (0, R - x.size(1))) for x in outputs]


# ---- equations -------------------------------------------------------------------------------------------------------
def has_stopped(responses, mask, stop_ids):
    """Whether each response [B, R] holds one of stop_ids [S]. Without stop_ids all have ended."""
    # The filler, token 0, may be the stop token, so only real tokens count. [GEN-13]
    return (mask & torch.isin(responses, stop_ids)).any(1) if len(stop_ids) else mask.any(1)


def missing_eos_scores(scores, ended, penalty):
    """A trajectory that did not end pays `penalty`. Args: scores [B] fp32; ended [B] bool; penalty, float or None."""
    # Without the penalty an unfinished trajectory may score well, and the policy need not learn to stop. [REW-3]
    return scores if penalty is None else torch.where(ended, scores, scores - penalty)


def has_baseline(scored, k):
    """Which responses [B] are scored and, where k > 1, have a scored sibling."""
    count = scored.reshape(-1, k).sum(1).repeat_interleave(k)  # [B]
    return scored & (count >= min(k, 2))


def rloo_advantages(rewards, k, scored):
    """Each reward minus the mean reward of its scored siblings: A_i = R_i - (sum_j R_j - R_i) / (k - 1).

    Args: rewards [B], the k >= 2 of a prompt adjacent; scored [B] bool. Returns: [B], 0 unless `has_baseline`.
    Source: arXiv 2402.14740, the estimator RLOO_k.
    """
    rewards, scored = (rewards * scored).reshape(-1, k), scored.reshape(-1, k)  # [P, k]
    num_siblings = scored.sum(1, keepdim=True) - 1  # [P, 1], k - 1 where all are scored
    # Without the response's own reward the gradient is unbiased. Unlike in GRPO there is no division by the standard
    # deviation. [RLOO-3]
    baseline = (rewards.sum(1, keepdim=True) - rewards) / num_siblings.clamp(min=1)
    return ((rewards - baseline) * (scored & (num_siblings > 0))).reshape(-1)


def rloo_policy_loss(logprobs, mask, advantages):
    """-A * ratio of each trajectory, where the ratio is that of the policy to itself: the gradient is -A * grad log p.

    Args: logprobs, mask [M, R], where the mask is of the policy's tokens; advantages [M]. Returns: [M].
    """
    # With one step per rollout the policy is compared with itself, so the ratio is exactly 1, and nothing is clipped.
    # The action is the whole trajectory: its log-ratio is the sum over the policy's tokens. [RLOO-7]
    return -advantages * ((logprobs - logprobs.detach()) * mask).sum(1).exp()


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(policy, sample, env, reference, score, prompts, stop_ids, args, accelerator):
    """One trajectory of each held-out prompt, sampled as in training, with the same noise each time, and its score.

    Returns: ({"eval/objective/..": value}, episodes to show).
    """
    policy.eval()
    episodes, rows = data.my_share(prompts, accelerator)  # filled up, so that all processes have equally many
    queries, query_mask = utils.left_pad([row.ids for row in rows], accelerator.device)
    key = args.seed, EVALUATION, 0
    with accelerator.autocast():
        found, said = rollout(policy, sample, env, rows, episodes, key, stop_ids, args)
        batch = Batch(queries, query_mask, *found[:2])
        ref_logprobs, _ = in_slices(response_logprobs, reference, batch, args.micro_batch_size)
        rewards_of_each, scored = score(rows, batch, said=said)  # [N / world, F], [N / world]
    kl = (found.logprobs - ref_logprobs * found.action_mask).sum(1)  # [N / world], from the sampler's log-probs
    scores = (rewards_of_each * score.weights).nansum(1)
    scores = missing_eos_scores(scores, found.ended, args.missing_eos_penalty)
    metrics, shown = score.held_out(
        prompts, rewards_of_each, scored, *found[:2], found.ended, scores, kl, found.action_mask
    )
    _, _, response_mask, ended, _, _, action_mask = shown
    return metrics | environments.metrics(response_mask, action_mask, ended, "eval/objective/", "length"), shown


# ---- the loop --------------------------------------------------------------------------------------------------------
def check(args):
    """Ends the program where arguments contradict each other."""
    environments.check(args)
    cli.check(args)
    rewards.check(args)
    cli.check_batch_size(args, "rloo_k")
    if args.rloo_k == 1:
        console.fail("--rloo_k 1: leave-one-out needs at least 2")


def main(args: Args):
    """Trains. Returns {"before", "after": held-out metrics, "metrics": the last row, "run": folder}."""
    check(args)
    accelerator = engines.start(args)  # for one process, DDP, FSDP2 or DeepSpeed
    device, world, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    k, B, R, size = args.rloo_k, args.batch_size, args.response_length, args.micro_batch_size
    episodes = torch.arange(B, device=device)  # [B], the numbers of an update's episodes
    mine = slice(rank * B // world, (rank + 1) * B // world)  # those of this process

    # ---- models, prompts, rewards, optimiser
    tokenizer, policy, reference = load_models(args, engines.loading_device(accelerator))
    stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token", device)  # [S]
    prompts, held_out = data.load_prompts(args, tokenizer, room=models.context(policy) - R)
    # env(rows, turns) asks the function of --env_fn: f(prompts=["the red box ?"], completions=[["ask red"]]) ->
    # ["red is 3 4 ;"]. It returns that text and the ids which stand between two turns, with what a template writes.
    env = environments.Environment(args, accelerator, tokenizer, prompts, held_out)
    # score(rows, batch, said=said) asks functions of turns, f(prompts, completions, turns, **columns) -> [1.0], where a
    # completion is the last turn, and a reward model, which reads the text of the whole trajectory. It gives each
    # trajectory F rewards, NaN where one does not apply or abstains.
    score = rewards.Scorer(args, accelerator, tokenizer, size, stop_ids)
    score.take_text_model(None, prompts, held_out)
    optimizer = utils.adamw(policy, args.learning_rate, args.adam_eps, args.weight_decay)
    frozen = reference, score.text_model
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer, *frozen)
    num_updates = math.ceil(args.total_episodes / B)  # [OPT-10]
    run = Run(args, accelerator, tokenizer, num_updates, prompts, [held_out, *frozen])

    # sample(policy, queries, query_mask, episodes, n, key, room) is utils.sample with its other arguments filled in, or
    # what --sampler vllm has in its place.
    sample = samplers.choose(args, run, [*prompts, *held_out], None, stop_ids)
    run.resume(policy, optimizer)
    # run.log calls this when it is due.
    evaluation = functools.partial(
        evaluate, policy, sample, env, reference, score, held_out, stop_ids, args, accelerator
    )
    if run.first_update == 1:
        run.log(0, evaluation=evaluation)

    for update in range(run.first_update, num_updates + 1):
        # An update is one step. [OPT-2]
        lr = utils.learning_rate_at(update, num_updates, args.learning_rate, args.lr_schedule, args.warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Rollout: k trajectories of each prompt ---------------------------------------------------------------
        # The k copies of a prompt stand side by side, because the baseline takes adjacent rows. [RLOO-1]
        rows = [prompt for prompt in prompts.of_update(update, B // k, args.seed) for _ in range(k)]  # [B]
        queries, query_mask = utils.left_pad([row.ids for row in rows], device)  # [B, Q]
        policy.eval()
        with torch.no_grad(), accelerator.autocast():
            key = args.seed, TRAINING, update
            found, said = rollout(policy, sample, env, rows[mine], episodes[mine], key, stop_ids, args)
            run.lap("rollout")

            # ---- 2. Scores; log-probs --------------------------------------------------------------------------------
            batch = Batch(queries[mine], query_mask[mine], *found[:2])
            ref_logprobs, _ = in_slices(response_logprobs, reference, batch, size)
            old_logprobs = found.logprobs
            if sample.is_another:
                # Where something else has sampled, KL and weights need this policy's log-probs. [GEN-9]
                old_logprobs, _ = in_slices(response_logprobs, policy, batch, size)
            # Functions are given turns, so that no observation is taken for an answer.
            rewards_of_each, scored = score(rows[mine], batch, said=said)  # [B / world, F], [B / world]
        # Every process gathers the whole batch once, and phases 3 and 4 are computed on all of it.
        found, old_logprobs, ref_logprobs, rewards_of_each, scored = accelerator.gather(
            (found, old_logprobs, ref_logprobs, rewards_of_each, scored)
        )
        batch, action_mask = Batch(queries, query_mask, *found[:2]), found.action_mask
        run.lap("scores")

        # ---- 3. Rewards: one for each trajectory ---------------------------------------------------------------------
        # the weighted sum of the rewards that apply [REW-4]
        scores = (rewards_of_each * score.weights).nansum(1)  # [B]
        scores = missing_eos_scores(scores, found.ended, args.missing_eos_penalty)  # [B]
        # Used as a reward, log p - log p_ref gives an unbiased gradient of the KL. [REW-5]
        # The policy answers for its own tokens alone. What an observation's are worth is none of its doing. [AGT-2]
        # The KL is summed, because the whole trajectory is one action. [RLOO-2]
        kl = ((old_logprobs - ref_logprobs) * action_mask).sum(1)  # [B]
        rlhf_rewards = scores - args.kl_coef * kl  # [B]

        # ---- 4. Advantages -------------------------------------------------------------------------------------------
        # What is not scored, or has no scored sibling, gives no gradient.
        is_action = has_baseline(scored, k)  # [B]
        # Siblings share their prompt and nothing else, so a baseline is of whole trajectories, not of turns. [AGT-5]
        advantages = rloo_advantages(rlhf_rewards, k, scored)  # [B]
        # Importance weights correct for a sampler that differs slightly from the policy.
        advantages, weight_metrics = sample.weigh(advantages, old_logprobs, found.logprobs, action_mask)

        # ---- 5. Optimise ---------------------------------------------------------------------------------------------
        policy.train()  # Gradient checkpointing needs it.
        means = utils.Means(device)
        num_actions = is_action.sum()  # of the whole batch, over all processes
        micro_batches = utils.split(batch, episodes[mine].split(size))
        for m, micro_batch in engines.accumulate(accelerator, policy, micro_batches):  # m: its episodes
            logprobs, entropies = response_logprobs(policy, micro_batch)  # [M, R]
            # The policy is trained on what it wrote, and not on what it read. [AGT-1]
            losses = rloo_policy_loss(logprobs, action_mask[m], advantages[m])  # [M]
            # Dividing by the whole batch's count makes micro-batches add up to its gradient. [OPT-5]
            loss = losses.sum() / num_actions.clamp(min=1)
            accelerator.backward(loss * world)  # The engines average over processes. [OPT-6]
            means.add({"loss/policy_avg": losses}, is_action[m])
            means.add({"policy/entropy_avg": entropies}, action_mask[m])  # not of observations
            means.add_max("val/logprob_gap", ((logprobs - found.logprobs[m]) * action_mask[m]).abs())
        if num_actions:
            norm = engines.clip_and_step(accelerator, policy, optimizer, args.max_grad_norm, run)
            means.add({"policy/grad_norm": norm})
        else:  # Without an action there is no gradient, only Adam's momentum.
            engines.forget_gradient(accelerator, policy, optimizer)
        run.lap("optimise")

        # ---- 6. Log --------------------------------------------------------------------------------------------------
        batch = batch._replace(response_mask=action_mask)
        metrics = means.reduce(accelerator) | score.metrics(rewards_of_each, scores, scored, found.ended, batch, k)
        metrics |= weight_metrics | environments.metrics(*found[1:3], found.ended, "val/", "sequence_lengths")
        metrics |= {
            "epoch": update * (B // k) / len(prompts),
            "lr": lr,
            "objective/scores": utils.masked_mean(scores, scored),
            "objective/kl": utils.masked_mean(kl, scored),
            "objective/non_score_reward": -args.kl_coef * utils.masked_mean(kl, scored),  # [LOG-5]
            "objective/rlhf_reward": utils.masked_mean(rlhf_rewards, scored),
            "objective/entropy": -utils.masked_mean((old_logprobs * action_mask).sum(1), scored),  # no padding [LOG-1]
        }
        scores = scores.masked_fill(~scored, math.nan)
        shown = rows, *found[:2], found.ended, scores, kl, action_mask
        run.log(update, metrics, shown, evaluation)
        run.checkpoint_if_due(update, policy, optimizer)
    return run.finish(policy)


if __name__ == "__main__":
    cli.main(main, Args)
