"""
Responses of the SFT policy: the candidates of the embedded task's comparisons, and the samples on which the scores of
a reward model are normalised.
"""

from torch import nn

from rlhf_details import toy, utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import models

# What responses are sampled for, a coordinate of their noise; utils.TRAINING and EVALUATION are those of comparisons.
BEFORE = 2
AFTER = 3


class NextToken(nn.Module):
    """What `utils.sample` calls: next-token logits of a causal model's softmax(logits / temperature), in fp32."""

    def __init__(self, model, temperature):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.head = models.lm_head(model)

    def forward(self, tokens, mask, positions, index, cache):
        """Args: tokens, mask, positions [N, L]; index [C], columns to read. Returns: logits / temperature [N, C, V]."""
        hidden = models.hidden_states(self.model, tokens, mask, positions, cache)[:, index]  # [N, C, H]
        return self.head(hidden).float() / self.temperature


def load_sampled(args, accelerator, purpose):
    """(The policy at --sft_model_path, to sample from; the key of its noise)."""
    model = utils.disable_dropout(models.load_policy(args.sft_model_path, "--sft_model_path", args))
    policy = NextToken(model, args.temperature).to(accelerator.device).eval()
    return policy, (args.seed, utils.REWARD_DATA, purpose)


def progress(slices):
    """The slices, and where they take long, how far it is."""
    return console.progress("sampling responses, slice by slice", slices)


def of_toy(args, accelerator, tokenizer):
    """A function (split, num, purpose) -> rows of the embedded task: the SFT policy answers, and its human chooses."""

    def rows(split, num, purpose):
        policy, key = load_sampled(args, accelerator, purpose)
        with accelerator.autocast():
            return toy.comparisons(split, num, policy, tokenizer, key, args.response_length, progress)

    return rows


def sample(args, accelerator, prompts, purpose, stop_ids):
    """A response of the policy at --sft_model_path to each prompt; every process samples all of them.

    Args: prompts, lists of token ids; purpose, e.g. BEFORE, so that the noise differs; stop_ids [S].
    Returns: a list of token ids for each.
    """
    policy, key = load_sampled(args, accelerator, purpose)
    with accelerator.autocast():
        return toy.sample_rows(policy, prompts, 1, args.response_length, stop_ids, key, progress)
