"""
A reward model in one process and without options. Its metrics are those of train_reward.py up to rounding, which grows
with the steps; that file adds options, other data, several processes and resuming, and saves memory.

The SFT policy answers each prompt four times, and an imaginary human says which answer is the best. The model learns to
give it the highest score: K = 4 candidates as in arXiv 1909.08593, K = 2 would be the usual pair.

Shapes    B: comparisons of a minibatch   K: candidates of one   L: tokens of a row, left-padded   H: hidden size
"""

import math

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_details import toy, utils

sft_folder, output_folder = "models/toy/sft", "models/toy/reward"
device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 1
B, K = 16, 4  # comparisons of a minibatch, candidates of a comparison
R = 36  # most tokens of a candidate
learning_rate, warmup_ratio, max_grad_norm = 2e-3, 0.05, 1.0


def scores_of(reward_model, gain, tokenizer, minibatch):
    """Scores of the candidates, [B, K]: gain * the head's output at the last token of each row."""
    # Candidates are texts and get an EOS here, also those that were cut off while they were sampled. [DATA-2]
    pairs = [tokenizer([row["prompt"], text]).input_ids for row in minibatch for text in row["candidates"]]
    pairs = [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in pairs]
    tokens, mask = utils.left_pad([prompt + answer for prompt, answer in pairs], device)  # [B * K, L]
    trunk, positions = reward_model.base_model, utils.positions_from_mask(mask)
    hidden = trunk(tokens, attention_mask=mask, position_ids=positions).last_hidden_state  # [B * K, L, H]
    return (gain * reward_model.score(hidden[:, -1]).squeeze(1)).reshape(-1, K)  # All rows end in column -1. [RM-4]


def main(comparisons=3072):
    toy.require(sft_folder)
    tokenizer = AutoTokenizer.from_pretrained(sft_folder)
    policy = AutoModelForCausalLM.from_pretrained(sft_folder).to(device).eval()  # without dropout [MODEL-1]
    key = seed, utils.REWARD_DATA, utils.TRAINING  # of the noise
    train = toy.comparisons("train", comparisons, toy.NextToken(policy), tokenizer, key, R)
    torch.manual_seed(seed)  # The library draws a head, so what the one below gets depends on the library too. [RM-2]
    reward_model = AutoModelForSequenceClassification.from_pretrained(sft_folder, num_labels=1).eval()
    torch.nn.init.normal_(reward_model.score.weight, std=1 / math.sqrt(reward_model.config.hidden_size + 1))  # [RM-1]
    reward_model.to(device)
    gain = torch.nn.Parameter(torch.ones(1, device=device))  # The scale of all scores is trained as well. [RM-5]
    # Biases and norms decay too, but not the gain. [OPT-4]
    optimizer = torch.optim.AdamW(reward_model.parameters(), eps=1e-5, weight_decay=0.01)
    optimizer.add_param_group({"params": [gain], "weight_decay": 0.0})
    order = utils.permutation(len(train), seed, 0)
    steps = len(train) // B

    for step in range(1, steps + 1):
        lr = utils.learning_rate_at(step, steps, learning_rate, "cosine", warmup_ratio)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # ---- 1. Minibatch
        minibatch = [train[i] for i in order[(step - 1) * B : step * B]]
        best = torch.tensor([row["best"] for row in minibatch], device=device)  # [B]

        # ---- 2. Optimise: cross-entropy of the scores against the best candidate
        scores = scores_of(reward_model, gain, tokenizer, minibatch)  # [B, K]
        loss = torch.nn.functional.cross_entropy(scores, best)  # [RM-7]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*reward_model.parameters(), gain], max_grad_norm)
        optimizer.step()

        # ---- 3. Log
        others = scores.scatter(1, best.unsqueeze(1), -math.inf).amax(1)  # [B], the highest score but the best one's
        accuracy = (scores.gather(1, best.unsqueeze(1)).squeeze(1) > others).float().mean()  # A tie is wrong. [RM-8]
        print(f"{step:4d}  loss {loss:.6f}  accuracy {accuracy:.6f}  grad_norm {norm:.6f}")

    # ---- normalise: a candidate scores 0 in the mean
    slices = [train[m] for m in utils.slices(len(train), 128)]
    with torch.no_grad():
        scores = torch.cat([scores_of(reward_model, gain, tokenizer, part) for part in slices])  # [comparisons, K]
        reward_model.score.weight *= gain  # The head takes the gain, which other libraries do not know. [RM-13]
    reward_model.config.reward_bias = -scores.mean().item()  # Whoever scores adds it. [RM-12]
    reward_model.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)


if __name__ == "__main__":
    main()
