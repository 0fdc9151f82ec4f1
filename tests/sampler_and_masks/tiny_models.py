"""Small random models, ragged batches and draws that the tests of the sampler and of masks share."""

from types import SimpleNamespace

import helpers
import torch
import transformers

from rlhf_details import evaluate, train_distill, train_grpo, train_ppo, train_rloo, train_sft, utils
from rlhf_details.plumbing.machine import candidates

PAGES = {"rloo": train_rloo, "grpo": train_grpo, "ppo": train_ppo, "distill": train_distill, "evaluate": evaluate}
REWARDED = {name: page for name, page in PAGES.items() if hasattr(page, "Reward")}
SAMPLED = {name: page.Policy for name, page in PAGES.items()}  # what the sampler calls
SAMPLED |= {"comparisons": candidates.NextToken, "sft": train_sft.LanguageModel}

PACKED = ["gpt2", "gpt_neox", "llama", "qwen2", "opt", "gptj", "phi"]  # architectures whose rows may be packed
CHANGES = {
    "qwen2": dict(num_key_value_heads=2),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "gptj": dict(rotary_dim=8),
    "mistral": dict(sliding_window=8, num_key_value_heads=2),
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8),
    "bloom": dict(n_head=4),
    "cohere": dict(num_key_value_heads=2, logit_scale=0.3),
    "granite": dict(num_key_value_heads=2, logits_scaling=3.0),
    "gemma2": dict(head_dim=8, num_key_value_heads=2, final_logit_softcapping=3.0, query_pre_attn_scalar=8),
}


def tiny_model(kind, **changes):
    """helpers.tiny_model of any architecture that is tested here."""
    return helpers.tiny_model(kind, intermediate_size=64, **(CHANGES.get(kind, {}) | changes))


def tiny_reward(kind):
    """helpers.tiny_reward_model of any architecture that is tested here."""
    return helpers.tiny_reward_model(kind, intermediate_size=64, pad_token_id=0, **CHANGES.get(kind, {}))


def random_batch(**sizes):
    """A Batch of ragged lengths, the k of a prompt adjacent; any id anywhere."""
    return utils.Batch(*helpers.random_batch(**sizes))


def rows_of(batch):
    """[(prompt, response), ...]: the ids of each row of a batch, as lists without padding."""
    queries, query_mask, responses, mask = batch[:4]
    return [(q[m].tolist(), r[n].tolist()) for q, m, r, n in zip(queries, query_mask, responses, mask, strict=True)]


def rest(page, n=1):
    """The last argument of RLOO's and GRPO's functions, which the other pages do not have: n responses a row."""
    return (n,) if page in (train_rloo, train_grpo) else ()


def fixed_logits(logits):
    """Stands in for a policy: the same logits after every context."""

    def policy(tokens, mask, positions, index, cache):
        return logits.expand(len(tokens), len(index), -1)

    policy.model = SimpleNamespace(config=transformers.GPTNeoXConfig(num_hidden_layers=1))
    return policy


def draw(policy, prompts, response_length, *stop_ids, key=(1, 0, 1), rows=None, n=1):
    """n responses to each prompt (a list of ids) by utils.sample: responses, mask, log-probs."""
    queries, query_mask = (x.repeat_interleave(n, 0) for x in utils.left_pad(prompts))
    rows = torch.arange(len(queries)) if rows is None else rows
    stop_ids = torch.tensor(stop_ids, dtype=torch.long)
    return utils.sample(policy, queries, query_mask, rows, n, response_length, stop_ids, key, size=len(rows))


@torch.no_grad()
def plain_logprobs(model, prompt, response, temperature):
    """log p of each response token, in float64, from one plain forward of an unpadded row; and the entropies."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / temperature
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax[torch.arange(len(response)), response]
    return logprobs, torch.distributions.Categorical(logits=logits).entropy()
