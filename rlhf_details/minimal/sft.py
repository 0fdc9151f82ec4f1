"""
SFT in one process and without options: a small language model learns from texts that people wrote. Its metrics are
those of train_sft.py up to rounding, which grows with the steps; that file adds options, other data, several processes
and resuming.

Shapes    B: rows of a minibatch   L: tokens of a row, left-padded   V: vocabulary
"""

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from rlhf_details import toy, utils

output_folder = "models/toy/sft"
device = "cuda" if torch.cuda.is_available() else "cpu"
seed = 1
B = 32  # rows of a minibatch
learning_rate, warmup_ratio, max_grad_norm = 5e-3, 0.05, 1.0


def main(epochs=3):
    tokenizer = toy.tokenizer()
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)  # The weights are drawn next.
    policy = GPTNeoXForCausalLM(config).to(device).eval()  # without dropout [MODEL-1]
    optimizer = torch.optim.AdamW(
        policy.parameters(), eps=1e-5, weight_decay=0.01
    )  # Biases and norms decay too. [OPT-4]
    # Prompt and completion are tokenised apart, because a sampler starts anew after the prompt. [DATA-1]
    train = [tokenizer([row["prompt"], row["completion"]]).input_ids for row in toy.rows("sft", "train")]
    train = [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in train]  # It learns to stop. [DATA-2]
    steps_per_epoch = len(train) // B  # The rest of an epoch's shuffle is left out.
    steps = epochs * steps_per_epoch

    for step in range(1, steps + 1):
        lr = utils.learning_rate_at(step, steps, learning_rate, "cosine", warmup_ratio)
        optimizer.param_groups[0]["lr"] = lr

        # ---- 1. Minibatch
        epoch, place = divmod(step - 1, steps_per_epoch)
        order = utils.permutation(len(train), seed, epoch)  # Every epoch has an order of its own.
        minibatch = [train[i] for i in order[place * B : (place + 1) * B]]
        tokens, mask = utils.left_pad([prompt + completion for prompt, completion in minibatch], device)  # [B, L]
        positions = utils.positions_from_mask(mask)

        # ---- 2. Optimise: cross-entropy of the tokens, the prompts' as well [SFT-1]
        #   tokens      .  p  p  c  c  EOS      a row of two prompt tokens
        #   positions   0  0  1  2  3   4
        #   is_target      0  1  1  1   1       Nothing predicts the first token.
        logits = policy(tokens, attention_mask=mask, position_ids=positions).logits  # [B, L, V]
        logprobs = logits[:, :-1].log_softmax(-1)  # The column before a token predicts it. [SFT-2]
        logprobs = logprobs.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)  # [B, L - 1]
        is_target = positions[:, 1:] > 0
        loss = -logprobs[is_target].mean()  # one mean over the tokens of all rows [SFT-3]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimizer.step()

        # ---- 3. Log
        print(f"{step:4d}  loss {loss:.6f}  grad_norm {norm:.6f}")

    policy.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)


if __name__ == "__main__":
    main()
