"""The equations of SFT and of the reward model, and ROUGE-L, against plain forwards, slow loops and hand-made numbers.

GPT-2 has absolute positions, so that a wrong position is a wrong answer.
"""

import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model, tiny_reward_model

from rlhf_details import train_reward, train_sft, utils
from rlhf_details.plumbing.outputs.statistics import rouge_l

# ---- SFT -------------------------------------------------------------------------------------------------------------
PAIRS = [([5, 6, 7], [8, 9, 1]), ([10, 11], [12, 13, 14, 15, 1]), ([16], [1]), ([17, 18, 19, 20, 21], [22, 1])]
PAIRS += [([], [23, 24, 1])]  # a row of `text` has no prompt


@pytest.mark.parametrize("completion_only", [True, False])
@torch.no_grad()
def test_sft_2_the_loss_is_that_of_every_token_but_the_first_or_of_the_completion(completion_only):
    """Of a plain forward of each row. EOS is learnt like any other token. [SFT-1]"""
    model, expected = tiny_model("gpt2"), []
    whose = [[False] * len(prompt) + [True] * len(completion) for prompt, completion in PAIRS]
    rows = [SimpleNamespace(ids=x, completion=y, is_own=z) for (x, y), z in zip(PAIRS, whose, strict=True)]
    batch = train_sft.tokens_and_targets(rows, completion_only, "cpu")
    for prompt, completion in PAIRS:
        row, first = prompt + completion, len(prompt) if prompt and completion_only else 1
        logprobs = model(torch.tensor([row])).logits[0].double().log_softmax(-1)
        expected += [-logprobs[t - 1, row[t]].item() for t in range(first, len(row))]
    got = train_sft.token_losses(train_sft.LanguageModel(model, 1.0), batch)
    assert got.tolist() == pytest.approx(expected, rel=1e-4)


# ---- ROUGE-L ---------------------------------------------------------------------------------------------------------
def slow_rouge_l(a, b):
    @cache
    def common(i, j):
        if i == len(a) or j == len(b):
            return 0
        return 1 + common(i + 1, j + 1) if a[i] == b[j] else max(common(i + 1, j), common(i, j + 1))

    if not common(0, 0):
        return 0.0
    precision, recall = common(0, 0) / len(a), common(0, 0) / len(b)
    return 2 * precision * recall / (precision + recall)


def test_rouge_l_equals_the_recursive_definition():
    some = random.Random(0)
    for _ in range(200):
        a, b = ([some.choice("abcdef") for _ in range(some.randrange(12))] for _ in range(2))
        assert rouge_l(" ".join(a), " , ".join(b)) == pytest.approx(slow_rouge_l(a, b)), (a, b)
    assert rouge_l("The CAT, sat!", "the cat sat.") == 1
    assert rouge_l("room 12", "room12") == rouge_l(". . .", ". . .") == 0


# ---- reward model ----------------------------------------------------------------------------------------------------
def test_scores_that_are_all_equal_cannot_be_normalised(fails):
    assert "--normalization gain_bias" in fails(train_reward.normalise, torch.full((8,), 0.5))


@torch.no_grad()
def test_rm_4_a_score_is_that_of_the_last_real_token_and_of_the_gain():
    """EOS (1) stands within the prompts as well, and the padding on the right is made of it."""
    model, rows = tiny_reward_model("gpt2"), [[5, 1, 7, 8, 1], [9, 10, 1], [5, 1, 11]]
    reward, (tokens, mask) = train_reward.Reward(model), utils.left_pad(rows)
    reward.gain.data.fill_(2.0)
    wider = torch.nn.functional.pad(tokens, (0, 4), value=1), torch.nn.functional.pad(mask, (0, 4))
    states = [model.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
    expected = [2 * model.score(state).item() for state in states]
    for batch in ((tokens, mask), wider):
        assert reward(*batch).tolist() == pytest.approx(expected, abs=1e-5)
