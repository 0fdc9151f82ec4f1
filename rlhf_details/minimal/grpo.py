"""
GRPO (arXiv 2402.03300) in one process and without options. Its metrics are those of train_grpo.py up to rounding, which
grows with the updates; that file adds options, other data, several processes and resuming, and saves memory.

A policy answers each prompt k times. Answers that score above their group's mean become more likely, others less. The
differences are divided by the group's standard deviation, and the KL to the initial policy is part of the loss.

Shapes    B: episodes, the k of a prompt adjacent   Q: query tokens, left-padded   R: response tokens, right-padded
          V: vocabulary   H: hidden size
"""

import copy

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DynamicCache

from rlhf_details import noise, toy, utils

sft_folder, reward_folder, output_folder = "models/toy/sft", "models/toy/reward", "models/minimal/grpo"
device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 1
k = 4  # responses to each prompt
B = 256  # episodes of an update
R = 36  # maximum length of a response
kl_coef = 0.1  # weight of the KL in the loss
missing_eos_penalty = 3.0  # score lost without an EOS
learning_rate, max_grad_norm = 5e-4, 1.0


@torch.no_grad()
def sample(policy, tokens, mask, eos, update):
    """Adds a response to each query, token by token: tokens and mask, [B, Q] -> [B, Q + R].

    tokens   .    p    p    a    b   EOS   .    .     p p: query   a b EOS: response
    mask     0    1    1    1    1    1    0    0     EOS counts: it has a log-prob and a KL
    """
    alive, cache = mask.new_ones(B), DynamicCache(config=policy.config)
    # Noise depends on (seed, purpose, update, episode, step, token id) alone, so runs with the same seed match. [GEN-4]
    keys = noise.keys_of_episodes((seed, utils.TRAINING, update), torch.arange(B, device=device))
    for t in range(R):
        new = slice(cache.get_seq_length(), None)  # not in the cache yet
        positions = utils.positions_from_mask(mask)  # They do not count padding. [GEN-6]
        # The name of the cache argument depends on the version of transformers.
        inputs = dict(attention_mask=mask, position_ids=positions[:, new]) | {utils.name_of_cache(policy): cache}
        logits = policy(tokens[:, new], **inputs).logits[:, -1]  # [B, V]
        # The argmax of logits + Gumbel noise is a draw from the logits' softmax. [GEN-1]
        token = (logits + noise.gumbel_noise(noise.fold(keys, t), logits.size(-1))).argmax(-1) * alive  # [B]
        tokens, mask = torch.cat([tokens, token.unsqueeze(1)], 1), torch.cat([mask, alive.unsqueeze(1)], 1)
        alive = alive & (token != eos)  # EOS itself stays in the mask. [GEN-5]
    return tokens, mask


def logprobs_of(model, tokens, mask):
    """Log-probs of the response tokens, [B, R], 0 at padding."""
    logits = model(tokens, attention_mask=mask, position_ids=utils.positions_from_mask(mask)).logits  # [B, Q + R, V]
    logprobs = logits[:, -R - 1 : -1].log_softmax(-1)  # The column before a token predicts it. [GEN-7]
    return logprobs.gather(2, tokens[:, -R:].unsqueeze(2)).squeeze(2) * mask[:, -R:]


@torch.no_grad()
def scores_of(reward_model, tokens, mask):
    """The reward model's score of each response, read at its last token, [B]."""
    trunk, positions = reward_model.base_model, utils.positions_from_mask(mask)
    hidden = trunk(tokens, attention_mask=mask, position_ids=positions).last_hidden_state  # [B, Q + R, H]
    last = positions.argmax(1)  # [B]: right padding repeats the last position; argmax finds the first. [REW-2]
    # train_reward.py stores this bias, which transformers does not apply. [REW-1]
    return reward_model.score(hidden[torch.arange(B), last]).squeeze(1) + reward_model.config.reward_bias


def main(updates=100):
    toy.require(sft_folder, reward_folder)
    tokenizer = AutoTokenizer.from_pretrained(sft_folder)
    policy = AutoModelForCausalLM.from_pretrained(sft_folder).to(device).eval()  # without dropout [MODEL-1]
    reference = copy.deepcopy(policy)  # [MODEL-4]
    reward_model = AutoModelForSequenceClassification.from_pretrained(reward_folder).to(device).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), eps=1e-8, weight_decay=0.0)  # [OPT-4]
    prompts = [tokenizer(row["prompt"]).input_ids for row in toy.rows("prompts", "train")]

    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = utils.learning_rate_at(update, updates, learning_rate, "linear")

        # ---- 1. Rollout: k responses to each prompt
        rows = [prompts[i] for i in utils.rows_of_update(update, B // k, len(prompts), seed)]
        queries = utils.left_pad([row for row in rows for _ in range(k)], device)  # tokens and mask [B, Q] [RLOO-1]
        episodes = sample(policy, *queries, tokenizer.eos_token_id, update)  # tokens and mask [B, Q + R]
        responses, mask = (x[:, -R:] for x in episodes)  # [B, R]

        # ---- 2. Scores; log-probs
        scores = scores_of(reward_model, *episodes)  # [B]
        logprobs = logprobs_of(policy, *episodes)  # [B, R], 0 at padding, with a gradient
        with torch.no_grad():
            ref_logprobs = logprobs_of(reference, *episodes)  # [B, R]

        # ---- 3. Rewards: one for each response, without the KL
        ended = (mask & (responses == tokenizer.eos_token_id)).any(1)  # [B]
        scores = torch.where(ended, scores, scores - missing_eos_penalty)  # [REW-3]

        # ---- 4. Advantages: each score minus the mean of its group, divided by the group's standard deviation
        groups = scores.reshape(-1, k)  # [B / k, k]
        groups = groups - groups[:, :1]  # Otherwise the rounding of equal scores is divided by 1e-4.
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)  # [GRPO-1]
        advantages = advantages.reshape(-1, 1)  # [B, 1], the same for all tokens of a response

        # ---- 5. Optimise: REINFORCE for each token plus the KL, one step for each rollout
        difference = ref_logprobs - logprobs  # [B, R]
        kl_losses = difference.expm1() - difference  # "k3", which is never negative [GRPO-2]
        loss = (-advantages * logprobs + kl_coef * kl_losses)[mask].mean()  # over the tokens of all responses
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimizer.step()

        # ---- 6. Log
        kl, length, kl_loss = -difference.sum(1), mask.sum(1).float().mean(), kl_losses[mask].mean()
        print(
            f"{update:3d}  scores {scores.mean():.6f}  kl {kl.mean():.6f}  length {length:.6f}  grad_norm {norm:.6f}"
            f"  kl_loss {kl_loss:.6f}"
        )

    policy.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)


if __name__ == "__main__":
    main()
