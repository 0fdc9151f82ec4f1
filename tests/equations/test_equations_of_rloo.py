"""The equations of train_rloo.py against slow loops written from their formulas, and against hand-made numbers."""

import math

import pytest
import torch
from oracles import CASES, clipped, policy_gradients, ragged_mask, slow_policy_loss, slow_whiten, uniform

from rlhf_details import train_ppo, train_ppo_async, train_rloo


# ---- leave-one-out ---------------------------------------------------------------------------------------------------
def slow_rloo(rewards, k):
    result = []
    for first in range(0, len(rewards), k):
        group = rewards[first : first + k]
        for i, reward in enumerate(group):
            siblings = [r for j, r in enumerate(group) if j != i]
            result.append(reward - sum(siblings) / len(siblings))
    return result


def test_rloo_3_advantages_worked_out_by_hand():
    rewards = torch.tensor([[1.0, 2, 5, 8], [2, 3, 6, 9], [3, 4, 7, 10]])  # three prompts, k = 4
    advantages = train_rloo.rloo_advantages(rewards.reshape(-1), 4).reshape(3, 4)
    assert advantages[0, 0].item() == pytest.approx(1 - (2 + 5 + 8) / 3)
    assert advantages[1, 2].item() == pytest.approx(6 - (2 + 3 + 9) / 3)


@pytest.mark.parametrize("k", [2, 3, 4, 7])
def test_rloo_3_advantages_equal_the_loop_and_sum_to_zero_in_each_group(k):
    rewards = uniform(torch.Generator().manual_seed(k), 5 * k, low=-3, high=8)
    advantages = train_rloo.rloo_advantages(rewards, k)
    torch.testing.assert_close(advantages, torch.tensor(slow_rloo(rewards.tolist(), k)), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(advantages.reshape(5, k).sum(1), torch.zeros(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [2, 4])
def test_a_reward_that_is_the_prompt_number_gives_exactly_zero_advantage(k):
    assert train_rloo.rloo_advantages(torch.arange(6.0).repeat_interleave(k), k).tolist() == [0.0] * 6 * k


def test_equal_siblings_but_one_give_moderate_advantages():
    # The siblings' own std is 0, and nothing divides by it.
    got = train_rloo.rloo_advantages(torch.tensor([1.0, 0, 0, 0]), 4)
    torch.testing.assert_close(got, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_rloo_4_token_level_advantages_equal_the_loop(k):
    generator = torch.Generator().manual_seed(k)
    scores, mask = uniform(generator, 8, low=-2, high=5), ragged_mask([1, 5, 3, 2, 4, 5, 1, 3], 5)
    kl = uniform(generator, 8, 5) * mask
    base = slow_rloo(scores.tolist(), k) if k > 1 else scores.tolist()
    expected = [[base[i] - 0.3 * sum(kl[i, u].item() for u in range(t, 5)) for t in range(5)] for i in range(8)]
    got = train_rloo.token_level_advantages(scores, kl, k, 0.3)
    torch.testing.assert_close(got, torch.tensor(expected), atol=5e-6, rtol=1e-5)


def test_token_level_kl_is_not_the_sequence_level_one():
    generator = torch.Generator().manual_seed(0)
    scores, kl = uniform(generator, 4), uniform(generator, 4, 3)
    tokens = train_rloo.token_level_advantages(scores, kl, 2, 0.5)
    sequences = train_rloo.rloo_advantages(scores - 0.5 * kl.sum(1), 2).unsqueeze(1)
    assert (tokens - sequences).abs().max() > 0.05
    assert (tokens[:, :1] - tokens).abs().max() > 0.05  # and it differs from token to token


# ---- scores ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", [train_rloo, train_ppo, train_ppo_async], ids=["rloo", "ppo", "async"])
def test_rew_3_a_missing_eos_subtracts_or_replaces(page):
    scores, ended = torch.tensor([2.0, 3.0, -4.0]), torch.tensor([True, False, False])
    assert page.missing_eos_scores(scores, ended, 1.0, "replace").tolist() == [2, -1, -1]  # -4 rises to -1
    assert page.missing_eos_scores(scores, ended, 1.0, "subtract").tolist() == [2, 2, -5]  # -4 falls
    assert page.missing_eos_scores(scores, ended, 0.0, "replace").tolist() == [2, 0, 0]  # 0 is not None
    for mode in ("replace", "subtract"):
        assert page.missing_eos_scores(scores, ended, None, mode).tolist() == [2, 3, -4]


@pytest.mark.parametrize(
    "normalize,clip", [(False, None), (True, None), (False, 10.0), (True, 1.0), (True, 0.5), (True, 10.0)]
)
def test_rloo_13_scores_are_whitened_and_then_clipped_each_switch_alone_as_well(normalize, clip):
    scores = [0.0, 0.0, 0.0, 40.0]
    expected = clipped(slow_whiten(scores) if normalize else scores, clip)
    got = train_rloo.shape_scores(torch.tensor(scores), normalize, clip)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=0)


def test_equal_scores_are_shaped_to_zero_not_nan_and_clipping_cuts_both_ends():
    assert train_rloo.shape_scores(torch.full((4,), 3.7), True, None).tolist() == [0.0] * 4
    assert train_rloo.shape_scores(torch.tensor([-7.0, -1.0, 2.0, 9.0]), False, 2.0).tolist() == [-2, -1, 2, 2]


def test_gen_13_the_stop_token_is_not_found_in_the_filler():
    """The filler is token 0, and a vocabulary whose stop token is 0 must not count padding as an ending."""
    responses = torch.tensor([[5, 0, 0], [5, 6, 7], [5, 0, 0]])
    mask = ragged_mask([1, 3, 2], 3)
    assert train_rloo.has_stopped(responses, mask, 0).tolist() == [False, False, True]
    assert train_rloo.has_stopped(responses, mask, 7).tolist() == [False, True, False]
    assert train_rloo.has_stopped(responses, mask, None).tolist() == [True] * 3


def test_the_share_of_groups_whose_scores_are_all_equal():
    scores = torch.tensor([1.0, 1, 1, 0, 2, 2, 0, 0])
    assert train_rloo.share_of_equal_groups(scores, 2).item() == 0.75
    assert train_rloo.share_of_equal_groups(scores, 4).item() == 0
    assert train_rloo.share_of_equal_groups(torch.full((4,), 3.0), 4).item() == 1


# ---- the policy loss -------------------------------------------------------------------------------------------------
def test_rloo_6_the_policy_loss_of_a_response_has_the_hand_made_values():
    advantages, ratios, losses, flags = map(torch.tensor, zip(*CASES, strict=True))
    old = uniform(torch.Generator().manual_seed(0), len(CASES), 3, low=-3, high=0)
    new = old + (ratios.log() / 3).unsqueeze(1)  # a third of the log-ratio for each token
    got, logratio, is_clipped = train_rloo.rloo_policy_loss(new, old, torch.ones(7, 3).bool(), advantages, 0.2)
    torch.testing.assert_close(got, losses, atol=1e-5, rtol=0)
    torch.testing.assert_close(logratio, ratios.log(), atol=1e-5, rtol=0)
    assert is_clipped.tolist() == flags.tolist()


@pytest.mark.parametrize("clip", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("token_level", [False, True])
def test_rloo_6_the_policy_loss_equals_the_loop_and_padding_counts_for_nothing(token_level, clip):
    generator = torch.Generator().manual_seed(3)
    mask = ragged_mask([1, 4, 6, 2, 3, 6, 5, 1], 6)
    old = uniform(generator, 8, 6, low=-3, high=0)
    new = old + uniform(generator, 8, 6, low=-0.8, high=0.8)
    new, old = torch.where(mask, new, torch.tensor(7.0)), torch.where(mask, old, torch.tensor(-5.0))  # garbage there
    advantages = uniform(generator, *((8, 6) if token_level else (8,)), low=-2, high=2)
    losses, flags = slow_policy_loss(new.tolist(), old.tolist(), mask.tolist(), advantages.tolist(), clip)
    got, logratio, is_clipped = train_rloo.rloo_policy_loss(new, old, mask, advantages, clip)
    torch.testing.assert_close(got, torch.tensor(losses), atol=1e-5, rtol=1e-5)
    assert is_clipped.tolist() == flags and is_clipped.any() and not is_clipped.all()
    assert logratio.shape == advantages.shape
    assert not token_level or (logratio[~mask] == 0).all()


def test_rloo_5_a_tenth_more_for_each_token_is_a_ratio_of_exp_of_a_tenth_of_the_length():
    old, mask = torch.full((3, 8), -2.0), ragged_mask([1, 2, 8], 8)
    losses, logratio, _ = train_rloo.rloo_policy_loss(old + 0.1, old, mask, torch.full((3,), -1.0), 0.2)
    torch.testing.assert_close(losses, torch.tensor([0.1, 0.2, 0.8]).exp())
    torch.testing.assert_close(logratio, torch.tensor([0.1, 0.2, 0.8]))
    losses, _, is_clipped = train_rloo.rloo_policy_loss(old + 0.1, old, mask, torch.ones(3), 0.2)
    torch.testing.assert_close(losses, torch.tensor([-math.exp(0.1), -1.2, -1.2]))
    assert is_clipped.tolist() == [False, True, True]


@pytest.mark.parametrize("token_level", [False, True])
def test_the_gradient_at_ratio_one_is_the_gradient_of_reinforce(token_level):
    generator, mask = torch.Generator().manual_seed(5), ragged_mask([7, 1, 4, 6, 2], 7)
    advantages = uniform(generator, *((5, 7) if token_level else (5,)), low=-2, high=2)

    def loss(logprobs):
        return train_rloo.rloo_policy_loss(logprobs, logprobs.detach(), mask, advantages, 0.2)[0].sum()

    of_tokens = advantages if token_level else advantages.unsqueeze(1)
    reinforce, ours = policy_gradients(loss, of_tokens, mask, generator)
    torch.testing.assert_close(ours, reinforce, atol=1e-6, rtol=0)
    assert reinforce.abs().max() > 0.1


# ---- minibatches -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("k,minibatches", [(1, 3), (2, 1), (4, 2), (3, 6)])
def test_rloo_8_a_minibatch_holds_whole_groups_of_siblings_side_by_side(k, minibatches):
    parts = list(train_rloo.shuffled_groups(6, k, minibatches, "cpu", 1, 2, 3))
    assert len(parts) == minibatches and {len(part) for part in parts} == {6 * k // minibatches}
    groups = torch.cat(parts).reshape(-1, k)
    assert (groups % k == torch.arange(k)).all()  # the k siblings, in their order
    assert (groups // k == groups[:, :1] // k).all()  # all of one prompt
    assert sorted((groups[:, 0] // k).tolist()) == list(range(6))  # and every prompt once


def test_another_pass_or_update_or_seed_has_another_order():
    orders = [
        torch.cat(list(train_rloo.shuffled_groups(20, 2, 2, "cpu", *c))) for c in [(1, 2, 0), (1, 2, 1), (1, 3, 0)]
    ]
    orders.append(torch.cat(list(train_rloo.shuffled_groups(20, 2, 2, "cpu", 2, 2, 0))))
    assert len({tuple(order.tolist()) for order in orders}) == 4
    for page in (train_ppo, train_ppo_async):
        orders = [torch.cat(list(page.shuffled_episodes(20, 4, "cpu", 1, 2, epoch))).tolist() for epoch in (0, 1, 0)]
        assert orders[0] == orders[2] != orders[1] and sorted(orders[1]) == list(range(20))
