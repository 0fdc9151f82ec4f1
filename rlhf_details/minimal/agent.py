"""
RLOO over several turns in one process and without options. Its metrics are those of train_agent.py up to rounding,
which grows with the updates; that file adds options, other data, several processes and resuming, and saves memory.

A policy answers each prompt k times. An environment reads each answer and replies, the policy goes on, and so forth: a
trajectory. Trajectories that score better than their siblings become more likely, others less. What the environment
says, the observations, is read but not learnt.

Shapes    B: episodes, the k of a prompt adjacent   N: episodes that go on   Q: query tokens, left-padded
          R: tokens of a trajectory, right-padded   V: vocabulary
"""

import copy

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rlhf_details import noise, toy, utils

sft_folder, output_folder = "models/toy-tools/sft", "models/minimal/agent"
device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 1
k = 4  # trajectories of each prompt
B = 128  # episodes of an update
R = 48  # maximum length of a trajectory, observations included
max_turns = 6  # maximum number of turns of the policy
kl_coef = 0.02  # score lost per nat of KL
missing_eos_penalty = 1.0  # score lost if the episode does not end
learning_rate, max_grad_norm = 1e-3, 1.0


@torch.no_grad()
def sample(policy, tokens, mask, eos, room, keys):
    """Adds a turn to each query, token by token, at most room [N] tokens: tokens and mask [N, Q + T].

    tokens   .    p    p    a    b   EOS   .    .     p p: query   a b EOS: turn
    mask     0    1    1    1    1    1    0    0     EOS counts: it has a log-prob and a KL
    """
    alive, cache = mask.new_ones(len(mask)), DynamicCache(config=policy.config)
    for t in range(room.max()):
        new = slice(cache.get_seq_length(), None)  # not in the cache yet
        positions = utils.positions_from_mask(mask)  # They do not count padding. [GEN-6]
        # The name of the cache argument depends on the version of transformers.
        inputs = dict(attention_mask=mask, position_ids=positions[:, new]) | {utils.name_of_cache(policy): cache}
        logits = policy(tokens[:, new], **inputs).logits[:, -1]  # [N, V]
        # The argmax of logits + Gumbel noise is a draw from the logits' softmax. [GEN-1]
        token = (logits + noise.gumbel_noise(noise.fold(keys, t), logits.size(-1))).argmax(-1) * alive  # [N]
        tokens, mask = torch.cat([tokens, token.unsqueeze(1)], 1), torch.cat([mask, alive.unsqueeze(1)], 1)
        alive = alive & (token != eos) & (t + 1 < room)  # EOS itself stays in the mask. [GEN-5]
    return tokens, mask


def rollout(policy, tokenizer, rows, update):
    """Lets policy and environment speak in turn.

    Returns four lists of B: the token ids after each prompt, which of them the policy wrote, its turns as texts, and
    whether the episode ended.
    """
    ids, is_action, turns, ended = [[] for _ in rows], [[] for _ in rows], [[] for _ in rows], [False for _ in rows]
    active = list(range(len(rows)))  # the numbers of the N episodes that go on
    for turn in range(1, max_turns + 1):
        # A turn is a response to all that came before it, as ids. Ids are never made of text again. [AGT-4]
        queries = utils.left_pad([rows[i]["ids"] + ids[i] for i in active], device)  # tokens and mask [N, Q]
        room = torch.tensor([R - len(ids[i]) for i in active], device=device)  # [N]
        # Noise depends on coordinates alone. From the second turn on, the turn is one of them. [GEN-4]
        key = seed, utils.TRAINING, update, *([turn] if turn > 1 else [])
        keys = noise.keys_of_episodes(key, torch.tensor(active, device=device))
        tokens, mask = sample(policy, *queries, tokenizer.eos_token_id, room, keys)  # [N, Q + T]
        Q = queries[0].size(1)
        for i, response, real in zip(active, tokens[:, Q:], mask[:, Q:], strict=True):
            ids[i] += response[real].tolist()
            is_action[i] += [True] * int(real.sum())  # EOS as well: without it no turn would learn to end. [AGT-3]
            turns[i].append(tokenizer.decode(response[real], skip_special_tokens=True))
        asked = [i for i in active if ids[i][-1] == tokenizer.eos_token_id]  # The other turns had no more room.
        table = [rows[i]["table"] for i in asked]
        answers = toy.look_up([rows[i]["prompt"] for i in asked], [turns[i] for i in asked], table)
        active = []
        for i, answer in zip(asked, answers, strict=True):
            observation = tokenizer(answer or "").input_ids
            ended[i] = answer is None
            # An observation is only read where another turn may follow it.
            if not ended[i] and turn < max_turns and len(ids[i] + observation) < R:
                ids[i] += observation
                is_action[i] += [False] * len(observation)
                active.append(i)
        if not active:
            break
    return ids, is_action, turns, ended


def right_pad(rows):
    """Lists as a tensor [B, R], filled up with 0."""
    return torch.tensor([row + [0] * (R - len(row)) for row in rows], device=device)


def logprobs_of(model, tokens, mask):
    """Log-probs of the response tokens, [B, R], 0 at padding."""
    logits = model(tokens, attention_mask=mask, position_ids=utils.positions_from_mask(mask)).logits  # [B, Q + R, V]
    logprobs = logits[:, -R - 1 : -1].log_softmax(-1)  # The column before a token predicts it. [GEN-7]
    return logprobs.gather(2, tokens[:, -R:].unsqueeze(2)).squeeze(2) * mask[:, -R:]


def main(updates=120):
    toy.require(sft_folder)
    tokenizer = AutoTokenizer.from_pretrained(sft_folder)
    policy = AutoModelForCausalLM.from_pretrained(sft_folder).to(device).eval()  # without dropout [MODEL-1]
    reference = copy.deepcopy(policy)  # [MODEL-4]
    optimizer = torch.optim.AdamW(policy.parameters(), eps=1e-8, weight_decay=0.0)  # [OPT-4]
    prompts = [row | {"ids": tokenizer(row["prompt"]).input_ids} for row in toy.rows("prompts", "train", "toy-tools")]

    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = utils.learning_rate_at(update, updates, learning_rate, "linear")

        # ---- 1. Rollout: k trajectories of each prompt, turn after turn
        rows = [prompts[i] for i in utils.rows_of_update(update, B // k, len(prompts), seed)]
        rows = [row for row in rows for _ in range(k)]  # [RLOO-1]
        ids, is_action, turns, ended = rollout(policy, tokenizer, rows, update)
        #   responses      ask red  ;  red is  3  4  ;  say 3  4  ;  .  .     the clerk asks, is told, and answers
        #   mask            1   1   1   1  1   1  1  1   1  1  1  1  0  0     what is real
        #   action_mask     1   1   1   0  0   0  0  0   1  1  1  1  0  0     what the policy wrote
        queries, query_mask = utils.left_pad([row["ids"] for row in rows], device)  # [B, Q]
        responses, mask = right_pad(ids), right_pad([[True] * len(x) for x in ids]).bool()  # [B, R]
        action_mask, ended = right_pad(is_action).bool(), torch.tensor(ended, device=device)  # [B, R], [B]
        episodes = torch.cat([queries, responses], 1), torch.cat([query_mask, mask], 1)  # [B, Q + R]

        # ---- 2. Scores; log-probs
        last = [said[-1] for said in turns]  # No observation is taken for an answer.
        right = toy.right_code([], last, [row["answer"] for row in rows])
        scores = torch.tensor(right).float() - 0.05 * torch.tensor(toy.questions([], last, turns))
        scores = scores.to(device)  # [B]
        # The policy is trained on what it wrote, and not on what it read. [AGT-1]
        logprobs = logprobs_of(policy, *episodes) * action_mask  # [B, R], with a gradient, 0 elsewhere
        with torch.no_grad():
            ref_logprobs = logprobs_of(reference, *episodes) * action_mask  # [B, R]

        # ---- 3. Rewards: one for each trajectory
        scores = torch.where(ended, scores, scores - missing_eos_penalty)  # [REW-3]
        # Summed over all turns: the trajectory is one action. Observations have no KL. [RLOO-2] [AGT-2]
        kl = (logprobs.detach() - ref_logprobs).sum(1)  # [B]
        rewards = scores - kl_coef * kl  # [B]

        # ---- 4. Advantages: each reward minus the mean of its siblings' rewards
        groups = rewards.reshape(-1, k)  # [B / k, k]
        baselines = (groups.sum(1, keepdim=True) - groups) / (k - 1)  # without the trajectory's own reward [RLOO-3]
        advantages = (groups - baselines).reshape(-1)  # [B]

        # ---- 5. Optimise: REINFORCE, one step for each rollout
        loss = -(advantages * logprobs.sum(1)).mean()  # [RLOO-7]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimizer.step()

        # ---- 6. Log
        length, turns = action_mask.sum(1).float().mean(), sum(map(len, turns)) / B
        print(
            f"{update:3d}  scores {scores.mean():.6f}  right {sum(right) / B:.6f}  turns {turns:.6f}  "
            f"kl {kl.mean():.6f}  length {length:.6f}  grad_norm {norm:.6f}"
        )

    policy.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)


if __name__ == "__main__":
    main()
