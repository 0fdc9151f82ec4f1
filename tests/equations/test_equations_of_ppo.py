"""The equations of train_ppo.py against slow loops written from their formulas, and by hand."""

import itertools
import math

import pytest
import torch
from oracles import clipped, close, ragged_case, ragged_mask, slow_policy_loss, uniform

from rlhf_details import evaluate, train_ppo

SEEDS = pytest.mark.parametrize("seed", range(6))


# ---- from scores to advantages ---------------------------------------------------------------------------------------
def test_ppo_5_the_value_mask_has_one_state_more_where_there_is_room():
    got = train_ppo.value_mask(ragged_mask([3, 1, 4, 5, 0], 5))
    assert got.dtype == torch.bool and torch.equal(got, ragged_mask([4, 2, 5, 5, 1], 5))


@SEEDS
def test_ppo_6_the_score_stands_after_the_last_token_where_there_is_room(seed):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    scores, penalty = uniform(generator, len(lengths), low=-3, high=3), uniform(generator, len(lengths), width) * mask
    expected = []
    for score, row, n in zip(scores.tolist(), penalty.tolist(), lengths, strict=True):
        expected.append([-0.3 * p for p in row])
        expected[-1][n if n < width else n - 1] += score
    close(train_ppo.token_rewards(scores, penalty, mask, 0.3), expected)


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (0.0, 0.9)])
@SEEDS
def test_ppo_9_gae_equals_the_double_sum(seed, gamma, lam):
    """A_t is by definition the sum over l of (gamma lam)^l delta_{t+l}."""
    generator, lengths, width = ragged_case(seed)
    rewards, values = (uniform(generator, len(lengths), width, low=-2, high=3) for _ in range(2))
    expected = []
    for r, v in zip(rewards.tolist(), values.tolist(), strict=True):
        deltas = [r[t] + gamma * after - v[t] for t, after in enumerate([*v[1:], 0.0])]
        expected.append([sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, width)) for t in range(width)])
    advantages, returns = train_ppo.compute_gae(rewards, values, gamma, lam)
    close(advantages, expected)
    close(returns, torch.tensor(expected) + values)


# ---- KL --------------------------------------------------------------------------------------------------------------
KL_FORMULAS = {  # of the log-ratio d
    "kl": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("kind", KL_FORMULAS)
def test_ppo_7_kl_penalties_equal_their_formulas(kind):
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = (uniform(generator, 6, 9, low=-4, high=0) for _ in range(2))
    expected = [[KL_FORMULAS[kind](d) for d in row] for row in (logprobs - reference).tolist()]
    close(train_ppo.kl_penalty(logprobs, reference, kind), expected)


def test_ppo_7_k3_is_precise_near_zero():
    """exp(-d) - 1 + d in float32 would be off by a tenth at 1e-3."""
    small = torch.tensor([[1e-2, 1e-3, 1e-4], [-1e-2, -1e-3, -1e-4]])
    exact = [[d * d / 2 - d**3 / 6 + d**4 / 24 for d in row] for row in small.double().tolist()]
    close(train_ppo.kl_penalty(small, torch.zeros_like(small), "k3"), exact, atol=0, rtol=2e-3)


@pytest.mark.parametrize(
    "kl,expected", [(12, 0.151536), (0, 0.148464), (6, 0.15), (7.2, 0.151536), (-3, 0.148464), (6.6, 0.150768)]
)
def test_ppo_15_the_kl_controller_has_the_hand_made_values(kl, expected):
    assert train_ppo.adapt_kl_coef(0.15, kl, 6, 10_000, 512) == pytest.approx(expected, rel=1e-9)


# ---- losses ----------------------------------------------------------------------------------------------------------
@SEEDS
def test_ppo_12_the_policy_loss_equals_the_loop_whatever_stands_in_the_padding(seed):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    old = uniform(generator, *mask.shape, low=-3, high=0)
    new = old + uniform(generator, *mask.shape, low=-0.8, high=0.8)
    advantages = uniform(generator, *mask.shape, low=-2, high=2)
    losses, flags = slow_policy_loss(new.tolist(), old.tolist(), mask.tolist(), advantages.tolist(), 0.2)
    filled = [torch.where(mask, x, g) for x, g in zip((new, old, advantages), (7.0, -5.0, 3.0), strict=True)]
    got, logratio, is_clipped = train_ppo.ppo_policy_loss(*filled[:2], mask, filled[2], 0.2)
    close(got, losses)
    close(logratio, (new - old) * mask, rtol=0)
    assert is_clipped.tolist() == flags


@SEEDS
def test_ppo_13_the_value_loss_equals_the_loop_whatever_stands_in_the_padding(seed):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    values, old, returns = (uniform(generator, *mask.shape, low=-1.5, high=1.5) for _ in range(3))
    losses, errors, flags = [], [], []
    for i, n in enumerate(lengths):
        for t in range(width):
            v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
            near = min(max(v, o - 0.2), o + 0.2)
            losses.append(0.5 * max((v - r) ** 2, (near - r) ** 2) if t < n else 0.0)
            errors.append((v - r) ** 2 if t < n else 0.0)
            flags.append(t < n and (near - r) ** 2 > (v - r) ** 2)
    filled = [torch.where(mask, x, g) for x, g in zip((values, old, returns), (-1e4, 1e4, 1e4), strict=True)]
    got, got_errors, is_clipped = train_ppo.ppo_value_loss(*filled, mask, 0.2)
    close(got.reshape(-1), losses)
    close(got_errors.reshape(-1), errors)
    assert is_clipped.reshape(-1).tolist() == flags


def test_rounding_never_calls_a_value_within_the_range_clipped():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (0.2 * torch.rand(100, 50, generator=generator) ** 3 for _ in range(3))
    assert (old + (values - old) != values).any()  # Written like this, rounding would make some of them clipped.
    assert not train_ppo.ppo_value_loss(values, old, returns, torch.ones(100, 50).bool(), 0.2)[2].any()


# ---- the scored part of a response -----------------------------------------------------------------------------------
@pytest.fixture(params=[train_ppo, evaluate], ids=["ppo", "evaluate"])
def truncate(request):
    return request.param.truncate_response


def test_gen_13_filler_that_equals_the_token_is_not_a_token(truncate):
    responses = torch.tensor([[5, 6, 13, 13, 13], [5, 13, 6, 13, 13], [5, 6, 7, 8, 13]])
    scored, found = truncate(responses, ragged_mask([2, 3, 4], 5), torch.tensor([13]), 0)
    assert torch.equal(scored, ragged_mask([2, 2, 4], 5)) and found.tolist() == [False, True, False]


@pytest.mark.parametrize("ends,after", [([2], 0), ([2], 1), ([2, 3], 4), ([2], 30), ([], 0)])
@SEEDS
def test_gen_12_truncation_equals_the_loop(truncate, seed, ends, after):
    """Without a token to look for the whole response is scored, and counts as ended."""
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    responses = torch.randint(4, mask.shape, generator=generator)
    scored, found = truncate(responses, mask, torch.tensor(ends), after)
    for i, n in enumerate(lengths):
        places = [t for t in range(n) if t >= after and responses[i, t] in ends]
        length = places[0] + 1 if places else n
        assert scored[i].tolist() == [t < length for t in range(width)], (i, responses[i], n)
        assert found[i].item() == (bool(places) or not ends)


# ---- running moments of the scores -----------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [[1], [1, 1], [7, 1, 1], [5, 64, 3, 1, 20]])
@pytest.mark.parametrize("offset,scale", [(1000.0, 1.0), (-3.0, 1e-3)])
def test_ppo_19_running_moments_equal_those_of_all_scores_at_once(sizes, offset, scale):
    generator, moments, seen = torch.Generator().manual_seed(0), (0, 0.0, 0.0), []
    for number, size in enumerate(sizes):  # The batches' means differ.
        batch = offset + scale * (torch.randn(size, generator=generator) + number)
        moments = train_ppo.merge_moments(moments, batch)
        seen += batch.tolist()
        mean = math.fsum(seen) / len(seen)
        squares = math.fsum((s - mean) ** 2 for s in seen)
        assert moments[0] == len(seen) and moments[1] == pytest.approx(mean, rel=1e-12)
        assert moments[2] == pytest.approx(squares, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("scaling,norm", [(True, True), (True, False), (False, True), (False, False)])
def test_scores_are_shaped_by_the_moments_each_switch_alone(scaling, norm):
    scores = torch.tensor([0.0, 0, 0, 40])
    moments = train_ppo.merge_moments((0, 0.0, 0.0), scores)  # mean 10, unbiased std 20
    expected = [((s - 10 if norm else s) / (20 if scaling else 1)) for s in scores.tolist()]
    close(train_ppo.shape_scores(scores, moments, scaling, norm, 0.8), clipped(expected, 0.8))
    for n, size in itertools.product(range(3, 17), (0.1, 10, 100)):  # A spread of 0 divides by 1.
        equal = (size * (0.5 + torch.rand(1, generator=torch.Generator().manual_seed(n)))).expand(n)
        moments = train_ppo.merge_moments(train_ppo.merge_moments((0, 0.0, 0.0), equal), equal[:2])
        assert (train_ppo.shape_scores(equal, moments, scaling, norm, None) == (0 if norm else equal)).all()
