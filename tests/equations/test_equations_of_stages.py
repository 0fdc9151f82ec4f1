"""The equations of SFT and of the reward model, and ROUGE-L, against slow loops and hand-made numbers."""

import math
import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from oracles import uniform
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_details import train_reward, train_sft, utils
from rlhf_details.plumbing.evaluation import rouge_l

# ---- SFT -------------------------------------------------------------------------------------------------------------
PAIRS = [([5, 6, 7], [8, 9, 1]), ([10, 11], [12, 13, 14, 15, 1]), ([16], [1]), ([17, 18, 19, 20, 21], [22, 1])]
PAIRS += [([], [23, 24, 1])]  # a row of `text` has no prompt


@pytest.fixture(scope="module")
def language_model():
    """GPT-2 has absolute positions, so that a wrong position is a wrong answer."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    return train_sft.LanguageModel(model, 1.0)


@torch.no_grad()
def slow_losses(model, pairs, completion_only):
    """-log p(token | tokens before) of each target, one forward of an unpadded prefix a token."""
    losses = []
    for p, c in pairs:
        row = p + c
        for t in range(max(1, len(p) if completion_only else 1), len(row)):  # a row's first token has no past
            logits = model(torch.tensor([row[:t]])).logits[0, -1].double()
            losses.append(-logits.log_softmax(0)[row[t]].item())
    return losses


def rows_of(pairs):
    return [SimpleNamespace(ids=p, completion=c) for p, c in pairs]


@pytest.mark.parametrize("completion_only", [True, False])
def test_sft_1_targets_are_every_token_but_the_first_or_the_completion_alone(completion_only):
    tokens, mask, is_target = train_sft.tokens_and_targets(rows_of(PAIRS), completion_only, "cpu")
    for i, (p, c) in enumerate(PAIRS):
        assert tokens[i][mask[i]].tolist() == p + c
        targets = c if completion_only and p else (p + c)[1:]
        assert tokens[i][is_target[i]].tolist() == targets and not (is_target[i] & ~mask[i]).any()
        assert is_target[i, -1]  # EOS is learnt like any other token


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("completion_only", [True, False])
def test_sft_2_the_loss_equals_the_loop_over_tokens_whatever_the_padding(language_model, completion_only, extra):
    batch = train_sft.tokens_and_targets(rows_of(PAIRS), completion_only, "cpu")
    batch = [torch.nn.functional.pad(x, (extra, 0)) for x in batch]
    with torch.no_grad():
        got = train_sft.token_losses(language_model, batch)
    assert got.tolist() == pytest.approx(slow_losses(language_model.model, PAIRS, completion_only), rel=1e-4)


# ---- ROUGE-L ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "response,reference,expected",
    [
        ("The CAT, sat!", "the cat sat.", 1.0),
        ("room 12", "room12", 0.0),
        ("", "a", 0.0),
        (". . .", ". . .", 0.0),
    ],
)
def test_rouge_l_of_hand_made_cases(response, reference, expected):
    assert rouge_l(response, reference) == pytest.approx(expected)


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


# ---- reward model ----------------------------------------------------------------------------------------------------
def test_rm_7_the_loss_equals_the_loop_and_is_blind_to_a_shift():
    generator = torch.Generator().manual_seed(0)
    scores, best = uniform(generator, 6, 4, low=-3, high=3), torch.randint(4, (6,), generator=generator)
    rows = zip(scores.tolist(), best.tolist(), strict=True)
    expected = [-math.log(math.exp(row[b]) / sum(map(math.exp, row))) for row, b in rows]
    assert train_reward.best_of_k_loss(scores, best).tolist() == pytest.approx(expected, rel=1e-5)
    shifted = scores + uniform(generator, 6, 1, low=-5, high=5)
    assert train_reward.best_of_k_loss(shifted, best).tolist() == pytest.approx(expected, rel=1e-4)


def test_rm_7_best_of_two_is_the_pairwise_logistic_loss():
    chosen, rejected = torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([0.5, 1.0, 0.0, -9.0])
    expected = [math.log1p(math.exp(r - c)) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    got = train_reward.best_of_k_loss(torch.stack([chosen, rejected], 1), torch.zeros(4).long())
    assert got.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_rm_8_a_tie_is_wrong():
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [3.0, -1.0]])
    assert train_reward.is_correct(scores, torch.tensor([0, 0, 0, 0])).tolist() == [True, False, False, True]
    assert train_reward.is_correct(scores, torch.tensor([1, 1, 1, 1])).tolist() == [False, True, False, False]
    assert not train_reward.is_correct(torch.tensor([[1.0, 5.0, 5.0, 0.0]]), torch.tensor([1])).item()


def test_gain_and_bias_give_the_wanted_mean_and_biased_std():
    raw = uniform(torch.Generator().manual_seed(0), 7, low=-4, high=9)
    gain, bias = train_reward.gain_and_bias(raw, 1.5, 0.25)
    values = raw * gain + bias
    assert values.mean().item() == pytest.approx(1.5) and values.std(correction=0).item() == pytest.approx(0.25)
    assert gain > 0  # the order of the responses stays


def test_scores_that_are_all_equal_cannot_be_normalised(capsys):
    with pytest.raises(SystemExit) as end:
        train_reward.normalise(torch.full((8,), 0.5))
    line = capsys.readouterr().err
    assert end.value.code == 2 and "--normalization gain_bias" in line and line.count("\n") == 1


@pytest.fixture(scope="module")
def reward_model():
    """A reward model of a random GPT-2 trunk with a random head."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    return train_reward.Reward(model)


def test_rm_5_the_gain_is_trained(reward_model):
    tokens, mask = utils.left_pad([[3, 4, 5], [6, 7], [8, 9, 10, 11], [12]])
    scores = reward_model(tokens, mask).reshape(2, 2)
    train_reward.best_of_k_loss(scores, torch.tensor([0, 1])).sum().backward()
    assert dict(reward_model.named_parameters())["gain"].grad.abs().item() > 1e-3


@torch.no_grad()
def test_rm_4_scores_do_not_depend_on_padding_or_on_the_rest_of_the_batch(reward_model):
    """EOS (1) stands within the prompts as well, and the padding is made of it."""
    rows = [[5, 1, 7, 8, 1], [9, 10, 1], [5, 1, 11, 1]]
    tokens, mask = utils.left_pad(rows)
    together = reward_model(tokens, mask)
    alone = torch.cat([reward_model(*utils.left_pad([row])) for row in rows])
    wider = torch.nn.functional.pad(tokens, (0, 4), value=1), torch.nn.functional.pad(mask, (0, 4))
    assert (together - alone).abs().max() < 1e-6 and (together - reward_model(*wider)).abs().max() < 1e-6
    for score, row in zip(together.tolist(), rows, strict=True):
        hidden = reward_model.model.base_model(torch.tensor([row])).last_hidden_state[0, -1]
        assert score == pytest.approx(reward_model.model.score(hidden).item(), abs=1e-5)
    reward_model.gain.data.fill_(2.0)
    assert torch.allclose(reward_model(tokens, mask), 2 * together)
    reward_model.gain.data.fill_(1.0)
