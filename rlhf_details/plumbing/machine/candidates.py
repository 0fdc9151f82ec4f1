"""
Responses of the SFT policy: the candidates of the embedded task's comparisons, and the samples on which the scores of
a reward model are normalised.
"""

import torch
from torch import nn

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat, models

TRAIN, EVAL, BEFORE, AFTER = range(4)  # what responses are sampled for, a coordinate of their noise


def writer(args, accelerator, tokenizer):
    """Who writes the embedded task's candidates: a function (flag, texts of prompts) -> four texts for each prompt."""

    def four_texts(flag, texts):
        prompts, stop_ids = [chat.encode(tokenizer, text) for text in texts], torch.tensor([tokenizer.eos_token_id])
        purpose = {"dataset": TRAIN, "eval_dataset": EVAL}[flag]
        written = chat.decode_all(tokenizer, sample_responses(args, accelerator, prompts, 4, purpose, stop_ids))
        return [written[i : i + 4] for i in range(0, len(written), 4)]

    return four_texts


class NextToken(nn.Module):
    """What `utils.sample` calls: next-token logits of a causal model's softmax(logits / temperature), in fp32."""

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.head = model, temperature, models.lm_head(model)

    def forward(self, tokens, mask, positions, index, cache):
        """Args: tokens, mask, positions [N, L]; index [C], columns to read. Returns: logits / temperature [N, C, V]."""
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [N, C, H]
        return self.head(hidden).float() / self.temperature


def sample_responses(args, accelerator, prompts, n, purpose, stop_ids):
    """n responses of the policy at --sft_model_path to each prompt; every process samples all of them.

    Args: prompts, lists of token ids; purpose, e.g. TRAIN, so that the noise differs; stop_ids [S].
    Returns: a list of token ids for each response, the n of a prompt adjacent.
    """
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy, device = NextToken(model, args.temperature).to(accelerator.device).eval(), accelerator.device
    queries, query_mask = utils.left_pad([ids for ids in prompts for _ in range(n)], device)  # [N, Q]
    rows, stop_ids, found = torch.arange(len(queries), device=device), stop_ids.to(device), []
    key, size = (args.seed, utils.REWARD_DATA, purpose), 128 * n
    for m in console.progress("sampling responses, slice by slice", utils.slices(len(rows), size)):
        with accelerator.autocast():
            responses, mask, _ = utils.sample(
                policy, queries[m], query_mask[m], rows[m], 1, args.response_length, stop_ids, key, size
            )  # [at most size, R]
        found += [ids[real].tolist() for ids, real in zip(responses, mask, strict=True)]
    return found
