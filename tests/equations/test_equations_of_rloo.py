"""The equations of train_rloo.py against slow loops written from their formulas, and by hand."""

import pytest
import torch
from oracles import clipped, close, ragged_mask, slow_policy_loss, slow_whiten, uniform

from rlhf_details import train_grpo, train_ppo, train_rloo


# ---- leave-one-out ---------------------------------------------------------------------------------------------------
def slow_rloo(rewards, k):
    result = []
    for first in range(0, len(rewards), k):
        group = rewards[first : first + k]
        for i, reward in enumerate(group):
            siblings = [r for j, r in enumerate(group) if j != i]
            result.append(reward - sum(siblings) / len(siblings))
    return result


@pytest.mark.parametrize("k", [2, 3, 4, 7])
def test_rloo_3_advantages_equal_the_loop_and_sum_to_zero_in_each_group(k):
    rewards = uniform(torch.Generator().manual_seed(k), 5 * k, low=-3, high=8)
    advantages = train_rloo.rloo_advantages(rewards, k)
    close(advantages, slow_rloo(rewards.tolist(), k))
    torch.testing.assert_close(advantages.reshape(5, k).sum(1), torch.zeros(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_rloo_4_token_level_advantages_equal_the_loop(k):
    generator = torch.Generator().manual_seed(k)
    scores, mask = uniform(generator, 8, low=-2, high=5), ragged_mask([1, 5, 3, 2, 4, 5, 1, 3], 5)
    kl = uniform(generator, 8, 5) * mask
    base = slow_rloo(scores.tolist(), k) if k > 1 else scores.tolist()
    expected = [[base[i] - 0.3 * sum(kl[i, u].item() for u in range(t, 5)) for t in range(5)] for i in range(8)]
    close(train_rloo.token_level_advantages(scores, kl, k, 0.3), expected)


# ---- scores ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", [train_rloo, train_grpo, train_ppo])
def test_rew_3_a_missing_eos_subtracts_or_replaces(page):
    scores, ended = torch.tensor([2.0, 3.0, -4.0]), torch.tensor([True, False, False])
    assert page.missing_eos_scores(scores, ended, 1.0, "replace").tolist() == [2, -1, -1]  # -4 rises to -1
    assert page.missing_eos_scores(scores, ended, 1.0, "subtract").tolist() == [2, 2, -5]  # -4 falls
    assert page.missing_eos_scores(scores, ended, 0.0, "replace").tolist() == [2, 0, 0]  # 0 is not None
    for mode in ("replace", "subtract"):
        assert page.missing_eos_scores(scores, ended, None, mode).tolist() == [2, 3, -4]


@pytest.mark.parametrize("normalize,clip", [(False, None), (True, None), (False, 10.0), (True, 1.0)])
def test_rloo_13_scores_are_whitened_and_then_clipped_each_switch_alone_as_well(normalize, clip):
    scores = [0.0, 0.0, -12.0, 40.0]
    expected = clipped(slow_whiten(scores) if normalize else scores, clip)
    close(train_rloo.shape_scores(torch.tensor(scores), normalize, clip), expected)
    equal = train_rloo.shape_scores(torch.full((4,), 3.7), normalize, clip)
    assert equal.tolist() == pytest.approx([0.0 if normalize else 3.7] * 4)


def test_gen_13_the_stop_token_is_not_found_in_the_filler():
    """The filler is token 0, and a vocabulary whose stop token is 0 must not count padding as an ending."""
    responses = torch.tensor([[5, 0, 0], [5, 6, 7], [5, 0, 0]])
    mask = ragged_mask([1, 3, 2], 3)
    assert train_rloo.has_stopped(responses, mask, torch.tensor([0])).tolist() == [False, False, True]
    assert train_rloo.has_stopped(responses, mask, torch.tensor([7, 9])).tolist() == [False, True, False]
    assert train_rloo.has_stopped(responses, mask, torch.tensor([])).tolist() == [True] * 3


# ---- the policy loss -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [0.1, 0.5])
@pytest.mark.parametrize("token_level", [False, True])
def test_rloo_6_the_policy_loss_equals_the_loop_and_padding_counts_for_nothing(token_level, clip):
    """The ratio of a response is that of all its tokens. [RLOO-5]"""
    generator = torch.Generator().manual_seed(3)
    mask = ragged_mask([1, 4, 6, 2, 3, 6, 5, 1], 6)
    old = uniform(generator, 8, 6, low=-3, high=0)
    new = old + uniform(generator, 8, 6, low=-0.8, high=0.8)
    new, old = torch.where(mask, new, torch.tensor(7.0)), torch.where(mask, old, torch.tensor(-5.0))  # garbage
    advantages = uniform(generator, *((8, 6) if token_level else (8,)), low=-2, high=2)
    losses, flags = slow_policy_loss(new.tolist(), old.tolist(), mask.tolist(), advantages.tolist(), clip)
    got, logratio, is_clipped = train_rloo.rloo_policy_loss(new, old, mask, advantages, clip)
    close(got, losses)
    assert is_clipped.tolist() == flags and is_clipped.any() and not is_clipped.all()
    assert logratio.shape == advantages.shape
    assert not token_level or (logratio[~mask] == 0).all()


# ---- minibatches -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("k,minibatches", [(1, 3), (2, 1), (4, 2), (3, 6)])
def test_rloo_8_a_minibatch_holds_whole_groups_of_siblings_side_by_side(k, minibatches):
    parts = list(train_rloo.shuffled_groups(6, k, minibatches, "cpu", 1, 2, 3))
    assert len(parts) == minibatches and {len(part) for part in parts} == {6 * k // minibatches}
    groups = torch.cat(parts).reshape(-1, k)
    assert (groups % k == torch.arange(k)).all()  # the k siblings, in their order
    assert (groups // k == groups[:, :1] // k).all()  # all of one prompt
    assert sorted((groups[:, 0] // k).tolist()) == list(range(6))  # and every prompt once
