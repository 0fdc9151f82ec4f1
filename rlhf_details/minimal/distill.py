"""
On-policy distillation in one process and without options. Its metrics are those of train_distill.py up to rounding,
which grows with the updates; that file adds options, other data, several processes and resuming, and saves memory.

A policy, the student, answers prompts. A teacher with the same tokens says of each token how likely it was, and tokens
that the teacher finds more likely than the student become more likely (Lu and Thinking Machines Lab, 2025).

Shapes    B: episodes, one for each prompt   Q: query tokens, left-padded   R: response tokens, right-padded
          V: vocabulary
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rlhf_details import noise, toy, utils

sft_folder, teacher_folder, output_folder = "models/toy/sft", "models/toy/rloo", "models/minimal/distill"
device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 1
B = 256  # episodes of an update
R = 36  # maximum length of a response
learning_rate, max_grad_norm = 1e-3, 1.0


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


def main(updates=50):
    toy.require(sft_folder, teacher_folder)
    tokenizer = AutoTokenizer.from_pretrained(sft_folder)
    policy = AutoModelForCausalLM.from_pretrained(sft_folder).to(device).eval()  # without dropout [MODEL-1]
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder).to(device).eval()  # of the same ids [DISTILL-5]
    optimizer = torch.optim.AdamW(policy.parameters(), eps=1e-8, weight_decay=0.0)  # [OPT-4]
    prompts = [tokenizer(row["prompt"]).input_ids for row in toy.rows("prompts", "train")]

    for update in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = utils.learning_rate_at(update, updates, learning_rate, "linear")

        # ---- 1. Rollout: a response to each prompt
        rows = [prompts[i] for i in utils.rows_of_update(update, B, len(prompts), seed)]
        queries = utils.left_pad(rows, device)  # tokens and mask [B, Q]
        episodes = sample(policy, *queries, tokenizer.eos_token_id, update)  # tokens and mask [B, Q + R]
        mask = episodes[1][:, -R:]  # [B, R]

        # ---- 2. Scores: log-probs of the tokens
        logprobs = logprobs_of(policy, *episodes)  # [B, R], 0 at padding, with a gradient
        with torch.no_grad():
            teacher_logprobs = logprobs_of(teacher, *episodes)  # [B, R]

        # ---- 3. Rewards: one for each token
        # A constant without a gradient. Its mean over what the student samples is -KL(student || teacher). [DISTILL-1]
        rewards = teacher_logprobs - logprobs.detach()  # [B, R], 0 at padding

        # ---- 4. Advantages: a token answers for itself alone, and not for the tokens that follow it
        advantages = rewards  # [DISTILL-2]

        # ---- 5. Optimise: REINFORCE of tokens, one step for each rollout
        loss = (-advantages * logprobs)[mask].mean()  # over the tokens of all responses
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimizer.step()

        # ---- 6. Log: the KL from the teacher, of a response and of a token
        length, divergence, per_token = mask.sum(1).float().mean(), -rewards.sum(1).mean(), -rewards[mask].mean()
        print(
            f"{update:3d}  divergence {divergence:.6f}  divergence_per_token {per_token:.6f}"
            f"  length {length:.6f}  grad_norm {norm:.6f}"
        )

    policy.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)


if __name__ == "__main__":
    main()
