"""
DPO (arXiv 2305.18290) in one process and without options. Its metrics are those of train_dpo.py up to rounding, which
grows with the steps; that file adds options, other data, several processes and resuming, and saves memory.

The SFT policy answers each prompt four times, and an imaginary human says which answer is the best. The policy learns
from this alone. What it made more likely since it began is its score, in the reward model's loss.

Shapes    B: comparisons of a minibatch   K: candidates of one   L: tokens of a row, left-padded   V: vocabulary
"""

import copy
import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_details import toy, utils

sft_folder, output_folder = "models/toy/sft", "models/minimal/dpo"
device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 1
B, K = 16, 4  # comparisons of a minibatch, candidates of a comparison
R = 36  # most tokens of a candidate
beta = 0.5  # price of the KL
learning_rate, warmup_ratio, max_grad_norm = 1e-3, 0.05, 1.0


def logprobs_of(model, tokenizer, minibatch):
    """Log-probs of the candidates, [B, K]: a sum over their tokens, EOS among them, without the prompts'. [DPO-1]

    tokens     .   p   p   a   b  EOS      p p: prompt   a b EOS: candidate
    is_answer      0   0   1   1   1       of the tokens that have a column before them
    """
    # Candidates are texts and get an EOS here, also those that were cut off while they were sampled. [DATA-2]
    pairs = [tokenizer([row["prompt"], text]).input_ids for row in minibatch for text in row["candidates"]]
    pairs = [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in pairs]
    tokens, mask = utils.left_pad([prompt + answer for prompt, answer in pairs], device)  # [B * K, L]
    logits = model(tokens, attention_mask=mask, position_ids=utils.positions_from_mask(mask)).logits  # [B * K, L, V]
    logprobs = logits[:, :-1].log_softmax(-1)  # The column before a token predicts it. [SFT-2]
    logprobs = logprobs.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)  # [B * K, L - 1]
    lengths = torch.tensor([len(answer) for _, answer in pairs], device=device).unsqueeze(1)  # [B * K, 1]
    is_answer = torch.arange(tokens.size(1) - 1, 0, -1, device=device) <= lengths  # counted from the right
    return (logprobs * is_answer).sum(1).reshape(-1, K)


def main(comparisons=3072):
    toy.require(sft_folder)
    tokenizer = AutoTokenizer.from_pretrained(sft_folder)
    policy = AutoModelForCausalLM.from_pretrained(sft_folder).to(device).eval()  # without dropout [MODEL-1]
    key = seed, utils.REWARD_DATA, utils.TRAINING  # of the noise
    train = toy.comparisons("train", comparisons, toy.NextToken(policy), tokenizer, key, R)
    reference = copy.deepcopy(policy)  # [MODEL-4]
    optimizer = torch.optim.AdamW(
        policy.parameters(), eps=1e-5, weight_decay=0.01
    )  # Biases and norms decay too. [OPT-4]
    order = utils.permutation(len(train), seed, 0)
    steps = len(train) // B

    for step in range(1, steps + 1):
        lr = utils.learning_rate_at(step, steps, learning_rate, "cosine", warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Minibatch
        minibatch = [train[i] for i in order[(step - 1) * B : step * B]]
        best = torch.tensor([row["best"] for row in minibatch], device=device)  # [B]

        # ---- 2. Optimise: cross-entropy of the scores against the best candidate
        logprobs = logprobs_of(policy, tokenizer, minibatch)  # [B, K]
        with torch.no_grad():
            ref_logprobs = logprobs_of(reference, tokenizer, minibatch)  # [B, K]
        scores = beta * (logprobs - ref_logprobs)  # the rewards of which this policy is the best one
        loss = torch.nn.functional.cross_entropy(scores, best)  # [DPO-2]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimizer.step()

        # ---- 3. Log: at step 1 all scores are 0, up to rounding, and the accuracy says nothing
        others = scores.scatter(1, best.unsqueeze(1), -math.inf).amax(1)  # [B], the highest score but the best one's
        accuracy = (scores.gather(1, best.unsqueeze(1)).squeeze(1) > others).float().mean()  # A tie is wrong. [RM-8]
        print(f"{step:4d}  loss {loss:.6f}  accuracy {accuracy:.6f}  grad_norm {norm:.6f}")

    policy.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)


if __name__ == "__main__":
    main()
