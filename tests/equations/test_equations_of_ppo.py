"""The equations of train_ppo.py and train_ppo_async.py against slow loops written from their formulas, and by hand."""

import math
import random

import pytest
import torch
from oracles import CASES, clipped, close, policy_gradients, ragged_case, ragged_mask, slow_policy_loss, uniform
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_details import evaluate, train_ppo, train_ppo_async, utils

SEEDS = range(6)


@pytest.fixture(params=[train_ppo, train_ppo_async], ids=["ppo", "async"])
def ppo(request):
    """Both pages hold these equations, so that each can be read alone."""
    return request.param


# ---- generalised advantage estimation --------------------------------------------------------------------------------
def slow_gae(rewards, values, gamma, lam):
    """One row, from the definition: A_t = sum over l of (gamma lam)^l delta_{t+l}, with no recursion."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def test_ppo_9_gae_of_three_tokens_worked_out_by_hand(ppo):
    rewards, values = torch.tensor([[1.0, 2, 3]]), torch.tensor([[0.5, 0.25, 0.1]])
    advantages, returns = ppo.compute_gae(rewards, values, 1.0, 0.95)
    close(advantages, [[5.12475, 4.605, 2.9]])
    close(returns, [[5.62475, 4.855, 3.0]])


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 1.0), (1.0, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_9_gae_equals_the_double_sum(ppo, seed, gamma, lam):
    generator, lengths, width = ragged_case(seed)
    rewards, values = (uniform(generator, len(lengths), width, low=-2, high=3) for _ in range(2))
    kept = rewards.clone(), values.clone()
    advantages, returns = ppo.compute_gae(rewards, values, gamma, lam)
    expected = [slow_gae(r, v, gamma, lam) for r, v in zip(rewards.tolist(), values.tolist(), strict=True)]
    close(advantages, expected)
    close(returns, torch.tensor(expected) + values)
    assert torch.equal(rewards, kept[0]) and torch.equal(values, kept[1])  # the caller's tensors stay


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_leaks_from_the_zeros_behind_a_row(ppo, seed):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    rewards, values = (uniform(generator, len(lengths), width, low=-2, high=3) * mask for _ in range(2))
    advantages, returns = ppo.compute_gae(rewards, values, 0.9, 0.8)
    for i, n in enumerate(lengths):
        cut_advantages, cut_returns = ppo.compute_gae(rewards[i : i + 1, :n], values[i : i + 1, :n], 0.9, 0.8)
        close(advantages[i : i + 1, :n], cut_advantages, atol=1e-6, rtol=0)
        close(returns[i : i + 1, :n], cut_returns, atol=1e-6, rtol=0)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


# ---- masks and rewards -----------------------------------------------------------------------------------------------
def test_ppo_5_the_value_mask_has_one_state_more_where_there_is_room(ppo):
    mask = ragged_mask([3, 1, 4, 5, 0], 5)
    got = ppo.value_mask(mask)
    assert got.dtype == torch.bool and torch.equal(got, ragged_mask([4, 2, 5, 5, 1], 5))
    assert torch.equal(mask, ragged_mask([3, 1, 4, 5, 0], 5))  # not changed in place


def test_ppo_6_the_score_stands_after_the_last_token_where_there_is_room(ppo):
    mask = ragged_mask([3, 5, 4, 1, 0], 5)
    rewards = ppo.token_rewards(torch.tensor([7.0, 8, 9, 10, 11]), torch.zeros(5, 5), mask, 0.1)
    close(rewards, [[0, 0, 0, 7, 0], [0, 0, 0, 0, 8], [0, 0, 0, 0, 9], [0, 10, 0, 0, 0], [11, 0, 0, 0, 0]], atol=0)


def test_the_score_is_added_to_the_penalty_of_the_last_token_where_there_is_no_room(ppo):
    penalty = torch.tensor([[0.1, -0.2, 0.4], [0.1, -0.2, 0.0]])
    rewards = ppo.token_rewards(torch.tensor([2.0, -3.0]), penalty, ragged_mask([3, 2], 3), 0.5)
    close(rewards, [[-0.05, 0.1, 1.8], [-0.05, 0.1, -3.0]])


@pytest.mark.parametrize("kl_coef", [0.0, 0.05, 1.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_6_token_rewards_equal_the_loop(ppo, seed, kl_coef):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    scores, penalty = uniform(generator, len(lengths), low=-3, high=3), uniform(generator, len(lengths), width) * mask
    got = ppo.token_rewards(scores, penalty, mask, kl_coef)
    expected = []
    for score, row, n in zip(scores.tolist(), penalty.tolist(), lengths, strict=True):
        expected.append([-kl_coef * p for p in row])
        expected[-1][n if n < width else n - 1] += score
    close(got, expected)
    close(got.sum(1), scores - kl_coef * penalty.sum(1))  # what a response earns does not depend on where it stands


@pytest.mark.parametrize("seed", SEEDS)
def test_from_scores_to_returns_equals_the_unpadded_response(ppo, seed):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    scores, penalty = uniform(generator, len(lengths), low=-3, high=3), uniform(generator, len(lengths), width) * mask
    raw_values = uniform(generator, len(lengths), width, low=-2, high=2)
    rewards = ppo.token_rewards(scores, penalty, mask, 0.3)
    advantages, returns = ppo.compute_gae(rewards, raw_values * ppo.value_mask(mask), 0.97, 0.9)
    for i, n in enumerate(lengths):
        steps = [-0.3 * p for p in penalty[i, :n].tolist()]
        if n < width:
            steps.append(0.0)  # the state after the stop token
        steps[-1] += scores[i].item()
        values = raw_values[i, : len(steps)].tolist()
        expected = slow_gae(steps, values, 0.97, 0.9)
        close(advantages[i, : len(steps)], expected)
        close(returns[i, : len(steps)], [a + v for a, v in zip(expected, values, strict=True)])


def test_mean_and_variance_are_those_of_the_real_entries(ppo):
    x, mask = torch.tensor([[1.0, 2.0, 1e6], [6.0, 1e6, 1e6]]), ragged_mask([2, 1], 3)
    mean, variance = ppo.mean_and_variance(x, mask)
    assert mean.item() == pytest.approx(3) and variance.item() == pytest.approx((4 + 1 + 9) / 3)


# ---- KL --------------------------------------------------------------------------------------------------------------
KL_FORMULAS = {  # of the log-ratio d: its formula, and what it is at d = 0.5 and -0.5
    "kl": (lambda d: d, 0.5, -0.5),
    "abs": (abs, 0.5, 0.5),
    "mse": (lambda d: d * d / 2, 0.125, 0.125),
    "k2": (lambda d: d * d / 2, 0.125, 0.125),
    "k3": (lambda d: math.exp(-d) - 1 + d, 0.10653, 0.14872),
}


@pytest.mark.parametrize("kind", KL_FORMULAS)
def test_ppo_7_kl_penalties_equal_their_formulas(ppo, kind):
    formula, up, down = KL_FORMULAS[kind]
    got = ppo.kl_penalty(torch.tensor([[-1.0, -1.5, -2.0]]), torch.tensor([[-1.5, -1.0, -2.0]]), kind)
    close(got, [[up, down, 0.0]], atol=6e-6, rtol=0)
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = (uniform(generator, 6, 9, low=-4, high=0) for _ in range(2))
    close(ppo.kl_penalty(logprobs, reference, kind), [[formula(d) for d in r] for r in (logprobs - reference).tolist()])


def test_k3_is_precise_near_zero_and_never_negative(ppo):
    small = torch.tensor([[3e-2, 1e-2, 1e-3, 1e-4], [-3e-2, -1e-2, -1e-3, -1e-4]])
    got = ppo.kl_penalty(small, torch.zeros_like(small), "k3")
    exact = [[d * d / 2 - d**3 / 6 + d**4 / 24 - d**5 / 120 for d in row] for row in small.tolist()]
    close(got, exact, atol=0, rtol=2e-3)  # exp(-d) - 1 + d in float32 would be off by a tenth at 1e-3
    assert (got > 0).all()


def test_kl_and_k3_are_unbiased_and_k2_is_not(ppo):
    generator = torch.Generator().manual_seed(0)
    p, q = (uniform(generator, 1, 40, low=-2, high=2).log_softmax(1) for _ in range(2))
    exact = sum(math.exp(a) * (a - b) for a, b in zip(p[0].tolist(), q[0].tolist(), strict=True))
    means = {kind: (p.exp() * ppo.kl_penalty(p, q, kind)).sum().item() for kind in KL_FORMULAS}
    assert means["kl"] == pytest.approx(exact, rel=1e-4) and means["k3"] == pytest.approx(exact, rel=1e-4)
    assert exact > 0.1 and abs(means["k2"] - exact) > 0.01 * exact and means["abs"] > 1.1 * exact


QUERIES = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
RESPONSES = [[16], [17, 18, 19, 20], [21, 22, 3], [23, 24, 25, 26]]


@pytest.fixture(scope="module")
def two_models():
    """GPT-2 has absolute positions, so that a wrong position is a wrong answer."""
    sizes = dict(vocab_size=30, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval())
    return models


def kl_batch(width, filler=0):
    """(queries, query_mask, responses, response_mask), the responses padded with `filler` to `width`."""
    padded = torch.tensor([r + [filler] * (width - len(r)) for r in RESPONSES])
    return *utils.left_pad(QUERIES), padded, ragged_mask([len(r) for r in RESPONSES], width)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_full_kl_equals_the_enumeration_of_unpadded_rows(ppo, two_models, temperature):
    expected = []
    for query, response in zip(QUERIES, RESPONSES, strict=True):
        logits = (model(torch.tensor([query + response])).logits[0].double() for model in two_models)
        p, q = ((x / temperature).log_softmax(-1)[len(query) - 1 : -1].tolist() for x in logits)
        rows = [zip(*row, strict=True) for row in zip(p, q, strict=True)]
        expected.append([sum(math.exp(a) * (a - b) for a, b in row) for row in rows])
    policy, reference = (ppo.Policy(model, temperature) for model in two_models)
    for width, filler in [(4, 0), (6, 29)]:  # as long as the longest response, or longer; any filler
        (got,) = ppo.full_kl(policy, kl_batch(width, filler), reference)
        close(got, [row + [0.0] * (width - len(row)) for row in expected], atol=2e-5, rtol=1e-4)
        assert (got[kl_batch(width)[3]] > 0.01).all()
    (same,) = ppo.full_kl(policy, kl_batch(6), policy)
    assert (same == 0).all()


@pytest.mark.parametrize(
    "kl,expected",
    [(12, 0.151536), (0, 0.148464), (6, 0.15), (7.2, 0.151536), (1e6, 0.151536), (-3, 0.148464), (6.6, 0.150768)],
)
def test_ppo_15_the_kl_controller_has_the_hand_made_values(ppo, kl, expected):
    assert ppo.adapt_kl_coef(0.15, kl, 6, 10_000, 512) == pytest.approx(expected, rel=1e-9)


def test_ppo_15_the_kl_controller_equals_its_formula(ppo):
    some = random.Random(0)
    for _ in range(200):
        coef, kl, target = some.uniform(0.01, 1), some.uniform(-2, 20), some.uniform(1, 10)
        horizon, episodes = some.choice([1000, 10_000]), some.choice([8, 64, 512])
        error = kl / target - 1
        error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
        expected = coef + coef * error * episodes / horizon
        assert ppo.adapt_kl_coef(coef, kl, target, horizon, episodes) == pytest.approx(expected, rel=1e-9)


# ---- the policy loss -------------------------------------------------------------------------------------------------
def test_ppo_12_the_policy_loss_has_the_hand_made_values_and_no_gradient_where_it_is_clipped(ppo):
    advantages, ratios, losses, flags = (torch.tensor([column]) for column in zip(*CASES, strict=True))
    old = uniform(torch.Generator().manual_seed(0), 1, len(CASES), low=-3, high=0)
    new = (old + ratios.log()).requires_grad_()
    got, logratio, is_clipped = ppo.ppo_policy_loss(new, old, torch.ones_like(flags), advantages, 0.2)
    close(got, losses, rtol=0)
    close(logratio, ratios.log(), rtol=0)
    assert torch.equal(is_clipped, flags)
    got.sum().backward()
    close(new.grad, torch.where(flags, 0.0, -advantages * ratios), rtol=0)


@pytest.mark.parametrize("clip", [0.1, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_12_the_policy_loss_equals_the_loop_whatever_stands_in_the_padding(ppo, seed, clip):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    old = uniform(generator, *mask.shape, low=-3, high=0)
    new = old + uniform(generator, *mask.shape, low=-0.8, high=0.8)
    advantages = uniform(generator, *mask.shape, low=-2, high=2)
    losses, flags = slow_policy_loss(new.tolist(), old.tolist(), mask.tolist(), advantages.tolist(), clip)
    for garbage in [(7.0, -5.0, 3.0), (150.0, -150.0, -1e6), (0.0, 0.0, 1e6)]:
        a, b, c = (torch.where(mask, x, g) for x, g in zip((new, old, advantages), garbage, strict=True))
        got, logratio, is_clipped = ppo.ppo_policy_loss(a, b, mask, c, clip)
        close(got, losses)
        close(logratio, (new - old) * mask, rtol=0)
        assert is_clipped.tolist() == flags
        assert (got[~mask] == 0).all() and (logratio[~mask] == 0).all()


@pytest.mark.parametrize("garbage", [5.0, 150.0, -150.0])
def test_the_gradient_at_ratio_one_is_that_of_the_policy_gradient(ppo, garbage):
    generator, mask = torch.Generator().manual_seed(5), ragged_mask([7, 1, 4, 6, 2], 7)
    advantages = uniform(generator, 5, 7, low=-2, high=2)

    def loss(logprobs):
        old = torch.where(mask, logprobs.detach(), garbage)
        return ppo.ppo_policy_loss(logprobs, old, mask, advantages, 0.2)[0].sum()

    plain, ours = policy_gradients(loss, advantages, mask, generator)
    close(ours, plain, atol=1e-6, rtol=0)  # no NaN comes from the padding either
    assert plain.abs().max() > 0.5


# ---- the value loss --------------------------------------------------------------------------------------------------
VALUE_CASES = [  # value, old value, return, loss, error, clipped, at cliprange 0.2
    (0.5, 0.0, 1.0, 0.32, 0.25, True),  # the clipped error is (0.2 - 1)^2 = 0.64
    (0.5, 0.0, 0.0, 0.125, 0.25, False),  # (0.2 - 0)^2 is smaller
    (-0.5, 0.0, -1.0, 0.32, 0.25, True),
    (-0.5, 0.0, 0.0, 0.125, 0.25, False),
    (0.1, 0.0, 1.0, 0.405, 0.81, False),  # within the range both are the same
    (2.0, 1.0, 2.0, 0.32, 0.0, True),  # a perfect value that moved too far
    (1.0, 1.0, 1.0, 0.0, 0.0, False),
]


def test_ppo_13_the_value_loss_has_the_hand_made_values_and_no_gradient_where_it_is_clipped(ppo):
    values, old, returns, losses, errors, flags = (torch.tensor([column]) for column in zip(*VALUE_CASES, strict=True))
    values.requires_grad_()
    got, got_errors, is_clipped = ppo.ppo_value_loss(values, old, returns, torch.ones_like(flags), 0.2)
    close(got, losses, atol=1e-6)
    close(got_errors, errors, atol=1e-6)
    assert torch.equal(is_clipped, flags)
    got.sum().backward()
    close(values.grad, torch.where(flags, 0.0, values.detach() - returns), atol=1e-6)


@pytest.mark.parametrize("clip", [0.1, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_13_the_value_loss_equals_the_loop_whatever_stands_in_the_padding(ppo, seed, clip):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    values, old, returns = (uniform(generator, *mask.shape, low=-1.5, high=1.5) for _ in range(3))
    losses, errors, flags = [], [], []
    for i, n in enumerate(lengths):
        for t in range(width):
            v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
            near = o + clip if v > o + clip else o - clip if v < o - clip else v
            losses.append(0.5 * max((v - r) ** 2, (near - r) ** 2) if t < n else 0.0)
            errors.append((v - r) ** 2 if t < n else 0.0)
            flags.append(t < n and (near - r) ** 2 > (v - r) ** 2)
    for garbage in [(7.0, -5.0, 3.0), (-1e4, 1e4, 1e4), (1e4, 0.0, 1e4)]:
        inputs = [torch.where(mask, x, g) for x, g in zip((values, old, returns), garbage, strict=True)]
        got, got_errors, is_clipped = ppo.ppo_value_loss(*inputs, mask, clip)
        close(got.reshape(-1), losses)
        close(got_errors.reshape(-1), errors)
        assert is_clipped.reshape(-1).tolist() == flags
        assert (got[~mask] == 0).all() and (got_errors[~mask] == 0).all()


def test_a_value_within_the_range_is_never_called_clipped(ppo):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (0.2 * torch.rand(100, 50, generator=generator) ** 3 for _ in range(3))
    assert (old + (values - old) != values).any()  # written like this, rounding would make some of them clipped
    losses, errors, is_clipped = ppo.ppo_value_loss(values, old, returns, torch.ones(100, 50).bool(), 0.2)
    assert not is_clipped.any() and torch.equal(losses, 0.5 * errors)


# ---- the scored part of a response -----------------------------------------------------------------------------------
@pytest.fixture(params=[train_ppo, train_ppo_async, evaluate], ids=["ppo", "async", "evaluate"])
def truncate(request):
    return request.param.truncate_response


def test_gen_12_truncation_after_the_first_full_stop_that_counts(truncate):
    responses = torch.full((3, 24), 7)
    responses[0, [5, 17, 20]] = 13
    responses[1, 5] = 13
    responses[2, 16] = 13  # the first place that counts
    scored, found = truncate(responses, torch.ones(3, 24, dtype=torch.bool), 13, 16)
    assert torch.equal(scored, ragged_mask([18, 24, 17], 24)) and found.tolist() == [True, False, True]


def test_gen_13_filler_that_equals_the_token_is_not_a_token(truncate):
    responses = torch.tensor([[5, 6, 13, 13, 13], [5, 13, 6, 13, 13], [5, 6, 7, 8, 13]])
    scored, found = truncate(responses, ragged_mask([2, 3, 4], 5), 13, 0)
    assert torch.equal(scored, ragged_mask([2, 2, 4], 5)) and found.tolist() == [False, True, False]


def test_without_a_token_to_look_for_the_whole_response_is_scored_and_counts_as_ended(truncate):
    mask = ragged_mask([1, 3, 5], 5)
    scored, found = truncate(torch.arange(15).reshape(3, 5), mask, None, 0)
    assert torch.equal(scored, mask) and found.tolist() == [True] * 3


@pytest.mark.parametrize("after", [0, 1, 4, 30])
@pytest.mark.parametrize("seed", SEEDS)
def test_gen_12_truncation_equals_the_loop(truncate, seed, after):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    responses = torch.randint(4, mask.shape, generator=generator)  # the token is 2; the padding holds it too
    kept = mask.clone()
    scored, found = truncate(responses, mask, 2, after)
    for i, n in enumerate(lengths):
        places = [t for t in range(n) if t >= after and responses[i, t] == 2]
        length = places[0] + 1 if places else n
        assert scored[i].tolist() == [t < length for t in range(width)], (i, responses[i], n)
        assert found[i].item() == bool(places)
    assert torch.equal(mask, kept)


# ---- running moments of the scores -----------------------------------------------------------------------------------
NONE_YET = (0, 0.0, 0.0)


@pytest.mark.parametrize("sizes", [[1], [1, 1], [2], [1, 7], [7, 1, 1], [5, 64, 3, 1, 20], [100] * 5])
@pytest.mark.parametrize("offset,scale", [(0.0, 1.0), (1000.0, 1.0), (-3.0, 1e-3)])
def test_ppo_19_running_moments_equal_those_of_all_scores_at_once(ppo, sizes, offset, scale):
    generator, moments, seen = torch.Generator().manual_seed(0), NONE_YET, []
    for number, size in enumerate(sizes):  # drifting, so that the batches' means differ
        batch = offset + scale * (torch.randn(size, generator=generator) + number)
        moments = ppo.merge_moments(moments, batch)
        seen += batch.tolist()
        mean = math.fsum(seen) / len(seen)
        squares = math.fsum((s - mean) ** 2 for s in seen)
        assert moments[0] == len(seen) and moments[1] == pytest.approx(mean, rel=1e-12)
        assert moments[2] == pytest.approx(squares, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("scaling,norm", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("clip", [None, 0.8])
def test_scores_are_shaped_by_the_moments_each_switch_alone(ppo, scaling, norm, clip):
    scores = torch.tensor([0.0, 0, 0, 40])
    moments = ppo.merge_moments(NONE_YET, scores)  # mean 10, unbiased std 20
    expected = [((s - 10 if norm else s) / (20 if scaling else 1)) for s in scores.tolist()]
    close(ppo.shape_scores(scores, moments, scaling, norm, clip), clipped(expected, clip))
    assert scores.tolist() == [0, 0, 0, 40]


@pytest.mark.parametrize("value", [3.7, 0.1, 0.0, -2e3])
def test_equal_scores_are_shaped_to_zero_not_nan(ppo, value):
    scores = torch.full((4,), value)
    moments = ppo.merge_moments(NONE_YET, scores)
    assert ppo.shape_scores(scores, moments, True, True, 10.0).abs().max() <= 1e-3 * abs(value)
    close(ppo.shape_scores(scores, moments, True, False, None), [value] * 4)  # a spread of 0 divides by 1
    first = ppo.merge_moments(NONE_YET, scores[:1])  # a single score has no spread
    close(ppo.shape_scores(scores[:1], first, True, False, None), [value])
