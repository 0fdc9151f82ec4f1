"""
PPO (the recipe of "N+", arXiv 2403.17031) in one process and without options. Its metrics are those of train_ppo.py up
to rounding, which grows with the updates; that file adds options, other data, several processes and resuming, and saves
memory.

Each token of a response is an action. A value model predicts the reward still to come. Tokens that turn out better than
predicted become more likely, others less, and the clip removes the incentive to move far in one update.

Shapes    B: episodes, one for each prompt   Q: query tokens, left-padded   R: response tokens, right-padded
          V: vocabulary   H: hidden size
"""

import copy

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DynamicCache

from rlhf_details import noise, toy, utils

sft_folder, reward_folder, output_folder = "models/toy/sft", "models/toy/reward", "models/minimal/ppo"
device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 1
B = 256  # episodes of an update
R = 36  # maximum length of a response
kl_coef = 0.1  # score lost per nat of KL
missing_eos_penalty = 3.0  # score lost without an EOS
passes = 4  # optimiser steps on each rollout
cliprange, cliprange_value = 0.2, 0.2  # of a token's probability ratio, and of the change of a value
vf_coef = 0.1  # weight of the value loss
lam = 0.95  # GAE's lambda: 1 trusts the rewards, 0 the values
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


def values_of(value_model, tokens, mask, state_mask):
    """The value model's output in the column before each response token, [B, R], 0 where there is no state."""
    trunk, positions = value_model.base_model, utils.positions_from_mask(mask)
    hidden = trunk(tokens, attention_mask=mask, position_ids=positions).last_hidden_state  # [B, Q + R, H]
    return (value_model.score(hidden[:, -R - 1 : -1]).squeeze(2) + value_model.config.reward_bias) * state_mask


def main(updates=40):
    toy.require(sft_folder, reward_folder)
    tokenizer = AutoTokenizer.from_pretrained(sft_folder)
    policy = AutoModelForCausalLM.from_pretrained(sft_folder).to(device).eval()  # without dropout [MODEL-1]
    reference = copy.deepcopy(policy)  # [MODEL-4]
    reward_model = AutoModelForSequenceClassification.from_pretrained(reward_folder).to(device).eval()
    value_model = copy.deepcopy(reward_model)  # It starts as the reward model, bias included. [PPO-1]
    parameters = [*policy.parameters(), *value_model.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, eps=1e-5, weight_decay=0.01
    )  # Biases and norms decay too. [OPT-4] [PPO-4]
    prompts = [tokenizer(row["prompt"]).input_ids for row in toy.rows("prompts", "train")]

    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = utils.learning_rate_at(update, updates, learning_rate, "linear")

        # ---- 1. Rollout: a response to each prompt
        rows = [prompts[i] for i in utils.rows_of_update(update, B, len(prompts), seed)]
        queries = utils.left_pad(rows, device)  # tokens and mask [B, Q]
        episodes = sample(policy, *queries, tokenizer.eos_token_id, update)  # tokens and mask [B, Q + R]
        responses, mask = (x[:, -R:] for x in episodes)  # [B, R]

        # ---- 2. Scores: and log-probs, values
        #   responses    a    b   EOS   .    .     w    x    y    z    u
        #   mask         1    1    1    0    0     1    1    1    1    1     actions: the tokens
        #   state_mask   1    1    1    1    0     1    1    1    1    1     states: before each token, and after EOS
        #   rewards     -cK  -cK  -cK score  0    -cK  -cK  -cK  -cK  -cK + score     c: kl_coef, K: log p - log p_ref
        # The score is paid one step after EOS, so this step is a state without an action. After R tokens there is no
        # room for it, and the last token gets the score. [PPO-5]
        state_mask = torch.cat([mask[:, :1], mask[:, :-1]], 1)  # [B, R]
        scores = scores_of(reward_model, *episodes)  # [B]
        with torch.no_grad():
            ref_logprobs = logprobs_of(reference, *episodes)  # [B, R]
            old_logprobs = logprobs_of(policy, *episodes)  # [B, R]
            old_values = values_of(value_model, *episodes, state_mask)  # [B, R]

        # ---- 3. Rewards: one for each token, and the score in the last state
        ended = (mask & (responses == tokenizer.eos_token_id)).any(1)  # [B]
        scores = torch.where(ended, scores, scores - missing_eos_penalty)  # [REW-3]
        kl = old_logprobs - ref_logprobs  # [B, R]
        last = state_mask.sum(1, keepdim=True) - 1  # [B, 1]
        rewards = (-kl_coef * kl).scatter_add(1, last, scores.unsqueeze(1))  # [B, R] [PPO-6] [PPO-7]

        # ---- 4. Advantages: GAE without discount, from the last state backwards
        advantages, advantage, next_value = torch.zeros_like(rewards), 0, 0
        for t in reversed(range(R)):
            advantage = rewards[:, t] + next_value - old_values[:, t] + lam * advantage  # [B] [PPO-9]
            advantages[:, t], next_value = advantage, old_values[:, t]
        returns = advantages + old_values  # the value targets
        advantages = utils.masked_whiten(advantages, mask)  # mean 0 and variance 1 over all tokens [PPO-10] [PPO-11]

        # ---- 5. Optimise: several steps on the same rollout
        metrics = []
        for _ in range(passes):
            logprobs = logprobs_of(policy, *episodes)  # [B, R]
            ratio = (logprobs - old_logprobs).exp()
            clipped = ratio.clamp(1 - cliprange, 1 + cliprange)
            losses = torch.max(-advantages * ratio, -advantages * clipped)  # the larger loss [PPO-12]
            values = values_of(value_model, *episodes, state_mask)  # [B, R]
            clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
            errors = torch.max((values - returns) ** 2, (clipped_values - returns) ** 2)  # the larger loss [PPO-13]
            policy_loss, value_loss = losses[mask].mean(), 0.5 * errors[state_mask].mean()
            loss = policy_loss + vf_coef * value_loss  # without an entropy bonus [PPO-14]
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)  # one norm for both models
            optimizer.step()
            clipfrac = (losses > -advantages * ratio)[mask].float().mean()
            metrics.append(torch.stack([norm, policy_loss, value_loss, clipfrac]).detach())

        # ---- 6. Log: means over the passes
        norm, policy_loss, value_loss, clipfrac = torch.stack(metrics).mean(0)
        kl, length = kl.sum(1), mask.sum(1).float().mean()
        print(
            f"{update:3d}  scores {scores.mean():.6f}  kl {kl.mean():.6f}  length {length:.6f}  grad_norm {norm:.6f}"
            f"  policy_loss {policy_loss:.6f}  value_loss {value_loss:.6f}  clipfrac {clipfrac:.6f}"
        )

    policy.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)


if __name__ == "__main__":
    main()
