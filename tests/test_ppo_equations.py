"""The equations of train_ppo.py against slow loops written from their formulas, and against numbers worked out by hand."""

import math
import random

import pytest
import torch
from conftest import tiny_config
from test_equations import CASES, ragged_mask, slow_policy_loss, slow_whiten, uniform
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXForCausalLM

from rlhf_details import train_ppo, utils

SEEDS = range(6)


def close(got, expected, atol=1e-5, rtol=1e-5):
    """Asserts that a float32 tensor is, within the tolerances, what lists or another tensor say."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float32), atol=atol, rtol=rtol)


def ragged_case(seed):
    """(generator, lengths, width): rows of one token, of the whole width, of one less, and of anything between, in any order."""
    some = random.Random(seed)
    width = [1, 2, 5, 9, 12, 3][seed]
    lengths = [1, width, max(1, width - 1)] + [some.randint(1, width) for _ in range(6)]
    some.shuffle(lengths)
    return torch.Generator().manual_seed(seed), lengths, width


# ---- generalised advantage estimation --------------------------------------------------------------------------------
def slow_gae(rewards, values, gamma, lam):
    """One row, from the definition: A_t = sum over l of (gamma lam)^l delta_{t+l}, with no recursion."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def test_ppo_9_gae_of_three_tokens_worked_out_by_hand():  # H1
    rewards, values = torch.tensor([[1.0, 2, 3]]), torch.tensor([[0.5, 0.25, 0.1]])
    advantages, returns = train_ppo.compute_gae(rewards, values, 1.0, 0.95)
    close(advantages, [[5.12475, 4.605, 2.9]])
    close(returns, [[5.62475, 4.855, 3.0]])


def test_gae_of_one_token_is_the_reward_minus_the_value():  # nothing is bootstrapped after the last column
    advantages, returns = train_ppo.compute_gae(torch.tensor([[2.0], [-1.0]]), torch.tensor([[0.5], [3.0]]), 0.9, 0.8)
    close(advantages, [[1.5], [-4.0]])
    close(returns, [[2.0], [-1.0]])


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 1.0), (1.0, 0.0), (0.5, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_equals_the_double_sum(seed, gamma, lam):
    generator, lengths, width = ragged_case(seed)
    rewards, values = (uniform(generator, len(lengths), width, low=-2, high=3) for _ in range(2))
    kept = rewards.clone(), values.clone()
    advantages, returns = train_ppo.compute_gae(rewards, values, gamma, lam)
    expected = [slow_gae(r, v, gamma, lam) for r, v in zip(rewards.tolist(), values.tolist(), strict=True)]
    close(advantages, expected)
    close(returns, [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(expected, values.tolist(), strict=True)])
    assert torch.equal(rewards, kept[0]) and torch.equal(values, kept[1])  # the caller's tensors stay


def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value_and_with_zero_the_one_step_error():
    generator = torch.Generator().manual_seed(1)
    rewards, values = uniform(generator, 3, 7), uniform(generator, 3, 7)
    advantages, returns = train_ppo.compute_gae(rewards, values, 0.8, 1.0)
    to_go = [[sum(0.8 ** (u - t) * row[u] for u in range(t, 7)) for t in range(7)] for row in rewards.tolist()]
    close(returns, to_go)
    close(advantages, torch.tensor(to_go) - values)
    one_step, _ = train_ppo.compute_gae(rewards, values, 0.8, 0.0)
    close(one_step, rewards + 0.8 * torch.cat([values[:, 1:], torch.zeros(3, 1)], 1) - values)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_leaks_from_the_zeros_behind_a_row(seed):  # H2
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    rewards, values = (uniform(generator, len(lengths), width, low=-2, high=3) * mask for _ in range(2))
    advantages, returns = train_ppo.compute_gae(rewards, values, 0.9, 0.8)
    for i, n in enumerate(lengths):
        cut_advantages, cut_returns = train_ppo.compute_gae(rewards[i : i + 1, :n], values[i : i + 1, :n], 0.9, 0.8)
        close(advantages[i : i + 1, :n], cut_advantages, atol=1e-6, rtol=0)
        close(returns[i : i + 1, :n], cut_returns, atol=1e-6, rtol=0)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


# ---- masks and rewards -----------------------------------------------------------------------------------------------
def test_ppo_5_value_mask_of_a_response_that_stops_early():  # B10: [a, b, EOS, P, P]
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    expected = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    got = train_ppo.value_mask(mask)
    assert got.dtype == torch.bool and torch.equal(got, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_value_mask_has_one_position_more_where_there_is_one(seed):
    _, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    got = train_ppo.value_mask(mask)
    assert got.tolist() == [[t <= n for t in range(width)] for n in lengths]
    assert torch.equal(mask, ragged_mask(lengths, width))  # not changed in place


def test_ppo_6_the_score_stands_after_the_last_token_where_there_is_room():  # G4
    mask = ragged_mask([3, 5, 4, 1, 5], 5)  # EOS at 2, at 4, at 3, at 0, nowhere
    rewards = train_ppo.token_rewards(torch.tensor([7.0, 8, 9, 10, 11]), torch.zeros(5, 5), mask, 0.1)
    close(rewards, [[0, 0, 0, 7, 0], [0, 0, 0, 0, 8], [0, 0, 0, 0, 9], [0, 10, 0, 0, 0], [0, 0, 0, 0, 11]], atol=0)


def test_a_row_without_a_token_has_one_state_and_its_score_there():  # the first position after nothing is the first
    mask = ragged_mask([0, 1], 3)
    assert train_ppo.value_mask(mask).tolist() == [[True, False, False], [True, True, False]]
    close(train_ppo.token_rewards(torch.tensor([2.0, 3.0]), torch.zeros(2, 3), mask, 0.1), [[2, 0, 0], [0, 3, 0]], atol=0)


def test_the_score_is_added_to_the_last_token_s_penalty_where_there_is_no_room():
    penalty = torch.tensor([[0.1, -0.2, 0.4], [0.1, -0.2, 0.0]])
    rewards = train_ppo.token_rewards(torch.tensor([2.0, -3.0]), penalty, ragged_mask([3, 2], 3), 0.5)
    close(rewards, [[-0.05, 0.1, 1.8], [-0.05, 0.1, -3.0]])


@pytest.mark.parametrize("kl_coef", [0.0, 0.05, 1.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_token_rewards_equal_the_loop(seed, kl_coef):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    scores, penalty = uniform(generator, len(lengths), low=-3, high=3), uniform(generator, len(lengths), width) * mask
    kept = scores.clone(), penalty.clone(), mask.clone()
    got = train_ppo.token_rewards(scores, penalty, mask, kl_coef)
    expected = []
    for score, row, n in zip(scores.tolist(), penalty.tolist(), lengths, strict=True):
        expected.append([-kl_coef * p for p in row])
        expected[-1][n if n < width else n - 1] += score
    close(got, expected)
    close(got.sum(1), scores - kl_coef * penalty.sum(1))  # what the response earns does not depend on where it stands
    assert all(torch.equal(a, b) for a, b in zip((scores, penalty, mask), kept, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_from_scores_to_returns_equals_the_unpadded_response(seed):  # B10, G4, H1 and H2 together
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    scores, penalty = uniform(generator, len(lengths), low=-3, high=3), uniform(generator, len(lengths), width) * mask
    raw_values = uniform(generator, len(lengths), width, low=-2, high=2)
    states = train_ppo.value_mask(mask)
    rewards = train_ppo.token_rewards(scores, penalty, mask, 0.3)
    advantages, returns = train_ppo.compute_gae(rewards, raw_values * states, 0.97, 0.9)
    for i, n in enumerate(lengths):
        steps = [-0.3 * p for p in penalty[i, :n].tolist()]
        if n < width:
            steps.append(0.0)  # the state after the stop token
        steps[-1] += scores[i].item()
        values = raw_values[i, : len(steps)].tolist()
        expected = slow_gae(steps, values, 0.97, 0.9)
        close(advantages[i, : len(steps)], expected)
        close(returns[i, : len(steps)], [a + v for a, v in zip(expected, values, strict=True)])


# ---- whitening, as PPO uses it ---------------------------------------------------------------------------------------
def test_whitening_without_shift_of_nine_numbers():  # H3
    x = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])
    expected = [[0.0508, 0.4381, 0.8254], [1.2127, 1.6, 1.9873], [2.3746, 2.7619, 3.1492]]
    close(utils.masked_whiten(x, torch.ones_like(x, dtype=torch.bool), shift_mean=False), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(1, 6))
def test_advantages_get_mean_0_and_rewards_keep_theirs_over_the_real_positions(seed):  # H4, H5, H6
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    x = uniform(generator, len(lengths), width, low=-2, high=5)
    real = x[mask].tolist()
    mean = sum(real) / len(real)
    white = slow_whiten(real)
    advantages, rewards = utils.masked_whiten(x, mask), utils.masked_whiten(x, mask, shift_mean=False)
    close(advantages[mask], white)
    close(rewards[mask], [w + mean for w in white])
    assert sum(advantages[mask].tolist()) == pytest.approx(0, abs=1e-4)
    biased = sum(a * a for a in advantages[mask].tolist()) / len(real)
    assert biased == pytest.approx(1, abs=1e-5)  # n, not n - 1, in the denominator
    assert (advantages[~mask] == 0).all() and (rewards[~mask] == 0).all()


# ---- KL --------------------------------------------------------------------------------------------------------------
KL_FORMULAS = {
    "kl": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.expm1(-d) + d,
}


@pytest.mark.parametrize("kind,up,down", [("kl", 0.5, -0.5), ("abs", 0.5, 0.5), ("mse", 0.125, 0.125), ("k2", 0.125, 0.125),
                                          ("k3", 0.10653, 0.14872)])  # fmt: skip
def test_ppo_7_kl_penalties_of_half_a_nat(kind, up, down):  # G2
    got = train_ppo.kl_penalty(torch.tensor([[-1.0, -1.5, -2.0]]), torch.tensor([[-1.5, -1.0, -2.0]]), kind)
    close(got, [[up, down, 0.0]], atol=6e-6, rtol=0)


@pytest.mark.parametrize("kind", KL_FORMULAS)
def test_kl_penalties_equal_their_formulas(kind):
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = (uniform(generator, 6, 9, low=-4, high=0) for _ in range(2))
    differences = (logprobs - reference).tolist()
    close(train_ppo.kl_penalty(logprobs, reference, kind), [[KL_FORMULAS[kind](d) for d in row] for row in differences])
    assert (train_ppo.kl_penalty(logprobs, logprobs, kind) == 0).all()


def test_k3_is_precise_near_zero_and_never_negative():
    small = torch.tensor([[3e-2, 1e-2, 1e-3, 1e-4], [-3e-2, -1e-2, -1e-3, -1e-4]])
    got = train_ppo.kl_penalty(small, torch.zeros_like(small), "k3")
    exact = [[d * d / 2 - d**3 / 6 + d**4 / 24 - d**5 / 120 for d in row] for row in small.tolist()]
    close(got, exact, atol=0, rtol=2e-3)  # exp(-d) - 1 + d in float32 is off by a tenth at 1e-3, and by all of it at 1e-4
    assert (got > 0).all()


def test_kl_and_k3_are_unbiased_and_k2_is_not():
    generator = torch.Generator().manual_seed(0)
    p, q = (uniform(generator, 1, 40, low=-2, high=2).log_softmax(1) for _ in range(2))
    exact = sum(math.exp(a) * (a - b) for a, b in zip(p[0].tolist(), q[0].tolist(), strict=True))
    means = {kind: (p.exp() * train_ppo.kl_penalty(p, q, kind)).sum().item() for kind in KL_FORMULAS}
    assert means["kl"] == pytest.approx(exact, rel=1e-4) and means["k3"] == pytest.approx(exact, rel=1e-4)
    assert exact > 0.1 and abs(means["k2"] - exact) > 0.01 * exact and means["abs"] > 1.1 * exact


def neox(seed, scale):
    torch.manual_seed(seed)
    return GPTNeoXForCausalLM(tiny_config(initializer_range=scale)).eval()


def gpt2(seed, scale):
    """Absolute positions: a wrong position is a wrong answer."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=30, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=scale)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()


@pytest.fixture(scope="module", params=[neox, gpt2], ids=["neox", "gpt2"])
def two_models(request):
    return request.param(0, 0.2), request.param(1, 0.2)


QUERIES = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
RESPONSES = [[16], [17, 18, 19, 20], [21, 22, 3], [23, 24, 25, 26]]


def kl_batch(width, filler=0, queries=QUERIES, responses=RESPONSES):
    """(queries, query_mask, responses, response_mask), the responses padded with `filler` to `width`."""
    padded = torch.tensor([r + [filler] * (width - len(r)) for r in responses])
    return *utils.left_pad(queries), padded, ragged_mask([len(r) for r in responses], width)


def exact_full_kl(policy, reference, temperature, query, response):
    """The KL at each token of one unpadded row, in float64, from plain calls of the models."""
    rows = torch.tensor([query + response])
    p, q = ((model(rows).logits[0].double() / temperature).log_softmax(-1) for model in (policy, reference))
    result = []
    for t in range(len(response)):
        at = len(query) - 1 + t  # where response token t is predicted
        result.append(sum(math.exp(a) * (a - b) for a, b in zip(p[at].tolist(), q[at].tolist(), strict=True)))
    return result


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_full_kl_equals_the_enumeration_of_unpadded_rows(two_models, temperature):
    policy, reference = two_models
    expected = [exact_full_kl(*two_models, temperature, q, r) for q, r in zip(QUERIES, RESPONSES, strict=True)]
    wrapped = train_ppo.Policy(policy, temperature), train_ppo.Policy(reference, temperature)
    for width, filler in [(4, 0), (6, 0), (6, 29)]:  # as long as the longest response, or longer; any filler
        got = train_ppo.full_kl(*wrapped, kl_batch(width, filler))
        close(got, [row + [0.0] * (width - len(row)) for row in expected], atol=2e-5, rtol=1e-4)
        mask = kl_batch(width)[3]
        assert (got[~mask] == 0).all() and (got[mask] > 0.01).all()


@torch.no_grad()
def test_full_kl_of_one_row_of_one_token(two_models):
    wrapped = [train_ppo.Policy(model, 0.7) for model in two_models]
    got = train_ppo.full_kl(*wrapped, kl_batch(1, queries=[[4, 5]], responses=[[6]]))
    close(got, [exact_full_kl(*two_models, 0.7, [4, 5], [6])], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_full_kl_is_zero_between_equal_models_and_has_a_direction(two_models):
    batch = kl_batch(6)
    policy, reference = (train_ppo.Policy(model, 0.7) for model in two_models)
    assert (train_ppo.full_kl(policy, policy, batch) == 0).all()
    there, back = train_ppo.full_kl(policy, reference, batch), train_ppo.full_kl(reference, policy, batch)
    assert (there >= 0).all() and (back >= 0).all() and (there - back).abs().max() > 0.05
    warm = train_ppo.full_kl(*(train_ppo.Policy(model, 2.0) for model in two_models), batch)
    assert ((there - warm)[batch[3]].abs() > 0.01).all()  # and it is that of the tempered distributions


@torch.no_grad()
def test_full_kl_is_what_the_sampled_kl_estimates(two_models):
    """The expectation over a token v of log p(v) - log q(v), with each v put at the end of the response in turn."""
    policy, reference = (train_ppo.Policy(model, 1.0) for model in two_models)
    vocabulary = range(policy.model.config.vocab_size)
    batch = kl_batch(2, queries=[[4, 5, 6]] * len(vocabulary), responses=[[7, v] for v in vocabulary])
    rows = torch.cat([batch[0], batch[2]], 1)
    p, q = (model(rows).logits[:, -2].double().log_softmax(-1).diagonal() for model in two_models)
    close(train_ppo.full_kl(policy, reference, batch)[0, 1], (p.exp() * (p - q)).sum().item(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kl,expected", [(12, 0.151536), (0, 0.148464), (6, 0.15), (7.2, 0.151536), (1e6, 0.151536),
                                         (-3, 0.148464), (6.6, 0.150768), (5.4, 0.149232)])  # fmt: skip
def test_ppo_15_the_kl_controller_has_the_hand_made_values(kl, expected):  # G6
    got = train_ppo.adapt_kl_coef(0.15, kl, 6, 10_000, 512)
    assert type(got) is float and got == pytest.approx(expected, rel=1e-9)


def test_the_kl_controller_equals_its_formula():
    some = random.Random(0)
    for _ in range(200):
        coef, kl, target = some.uniform(0.01, 1), some.uniform(-2, 20), some.uniform(1, 10)
        horizon, episodes = some.choice([1000, 10_000]), some.choice([8, 64, 512])
        error = kl / target - 1
        error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
        expected = coef + coef * error * episodes / horizon
        assert train_ppo.adapt_kl_coef(coef, kl, target, horizon, episodes) == pytest.approx(expected, rel=1e-9)


# ---- TensorFlow's Adam -----------------------------------------------------------------------------------------------
FIRST_STEPS = [(1e-3, 7.597e-6, 9.901e-6), (1e-5, 3.065e-7, 5.0e-6)]  # gradient, TensorFlow's step, torch's


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("gradient,tensorflow,plain", FIRST_STEPS)
def test_the_first_step_of_adam_is_tensorflows(optimizer_class, gradient, tensorflow, plain):  # J1
    for eps, expected in [(train_ppo.tf_adam_eps(1e-5, 1), tensorflow), (1e-5, plain)]:
        weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer_class([weight], lr=1e-5, eps=eps, weight_decay=0.0).step()
        assert -weight.item() == pytest.approx(expected, rel=2e-4)


def test_tf_adam_eps_starts_large_and_becomes_eps():
    assert train_ppo.tf_adam_eps(1e-5, 1) == pytest.approx(3.16228e-4, rel=1e-5)
    assert train_ppo.tf_adam_eps(1e-5, 2) == pytest.approx(1e-5 / math.sqrt(0.001999), rel=1e-9)
    assert train_ppo.tf_adam_eps(1e-5, 100_000) == pytest.approx(1e-5, rel=1e-9)
    assert train_ppo.tf_adam_eps(1e-8, 3, beta2=0.5) == pytest.approx(1e-8 / math.sqrt(0.875), rel=1e-9)
    assert train_ppo.tf_adam_eps(0.0, 1) == 0 and type(train_ppo.tf_adam_eps(1e-5, 7)) is float


@pytest.mark.parametrize("schedule", [lambda t: 1e-5, lambda t: 1e-5 * (1 - (t - 1) / 500), lambda t: 2e-5 * (t % 7) / 7])
@pytest.mark.parametrize("optimizer_class,betas", [(torch.optim.Adam, (0.9, 0.999)), (torch.optim.AdamW, (0.8, 0.97))])
def test_opt_3_500_steps_are_those_of_tensorflows_adam(optimizer_class, betas, schedule):
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.arange(-7, 1).double()  # gradients from far below eps to far above
    gradients = scales * torch.randn(500, 8, generator=generator, dtype=torch.float64)
    weight = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    optimizer = optimizer_class([weight], lr=1.0, betas=betas, weight_decay=0.0)
    theta, m, v = ([0.0] * 8 for _ in range(3))
    b1, b2 = betas
    worst = 0.0
    for t in range(1, 501):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"] = schedule(t), train_ppo.tf_adam_eps(1e-5, t, b2)
        weight.grad = gradients[t - 1].clone()
        optimizer.step()
        rate = schedule(t) * math.sqrt(1 - b2**t) / (1 - b1**t)
        for i, g in enumerate(gradients[t - 1].tolist()):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            theta[i] -= rate * m[i] / (math.sqrt(v[i]) + 1e-5)
            worst = max(worst, abs(theta[i] - weight[i].item()))
    assert worst < 1e-15 and max(map(abs, theta)) > 1e-5


# ---- the policy loss -------------------------------------------------------------------------------------------------
def test_ppo_12_policy_loss_has_the_hand_made_values():  # I1
    advantages, ratios, losses, flags = (torch.tensor([column]) for column in zip(*CASES, strict=True))
    old = uniform(torch.Generator().manual_seed(0), 1, len(CASES), low=-3, high=0)
    got, logratio, clipped = train_ppo.ppo_policy_loss(old + ratios.log(), old, torch.ones_like(flags), advantages, 0.2)
    close(got, losses, rtol=0)
    close(logratio, ratios.log(), rtol=0)
    assert torch.equal(clipped, flags)


@pytest.mark.parametrize("clip", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss_equals_the_loop_whatever_stands_in_the_padding(seed, clip):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    old = uniform(generator, *mask.shape, low=-3, high=0)
    new = old + uniform(generator, *mask.shape, low=-0.8, high=0.8)
    advantages = uniform(generator, *mask.shape, low=-2, high=2)
    losses, flags = slow_policy_loss(new.tolist(), old.tolist(), mask.tolist(), advantages.tolist(), clip)
    logratios = ((new - old) * mask).tolist()
    for garbage in [(7.0, -5.0, 3.0), (-5.0, 7.0, -3.0), (150.0, -150.0, -1e6), (0.0, 0.0, 1e6)]:
        a, b, c = (torch.where(mask, x, g) for x, g in zip((new, old, advantages), garbage, strict=True))
        got, logratio, clipped = train_ppo.ppo_policy_loss(a, b, mask, c, clip)
        close(got, losses)
        close(logratio, logratios, rtol=0)
        assert clipped.dtype == torch.bool and clipped.tolist() == flags
        assert (got[~mask] == 0).all() and (logratio[~mask] == 0).all()


@pytest.mark.parametrize("garbage", [5.0, 150.0, -150.0])
def test_gradient_of_the_policy_loss_at_ratio_one_is_that_of_the_policy_gradient(garbage):
    generator = torch.Generator().manual_seed(5)
    weights, tokens = uniform(generator, 5, 7, 11), torch.randint(11, (5, 7), generator=generator)
    mask, advantages = ragged_mask([7, 1, 4, 6, 2], 7), uniform(generator, 5, 7, low=-2, high=2)

    def gradient(loss_of):
        w = weights.clone().requires_grad_()
        loss_of(w.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)).backward()
        return w.grad

    def clipped_loss(logprobs):
        old = torch.where(mask, logprobs.detach(), garbage)
        return train_ppo.ppo_policy_loss(logprobs, old, mask, advantages, 0.2)[0].sum()

    plain = gradient(lambda logprobs: -(advantages * logprobs * mask).sum())
    close(gradient(clipped_loss), plain, atol=1e-6, rtol=0)  # no NaN from the padding either
    assert plain.abs().max() > 0.5


def test_gradient_of_the_policy_loss_is_minus_a_times_ratio_and_zero_where_clipped():
    advantages, ratios, _, flags = (torch.tensor([column]) for column in zip(*CASES, strict=True))
    old = torch.full(flags.shape, -2.0)
    new = (old + ratios.log()).requires_grad_()
    losses, _, _ = train_ppo.ppo_policy_loss(new, old, torch.ones_like(flags), advantages, 0.2)
    losses.sum().backward()
    close(new.grad, torch.where(flags, 0.0, -advantages * ratios), rtol=0)


# ---- the value loss --------------------------------------------------------------------------------------------------
VALUE_CASES = [  # value, old value, return, loss, error, clipped, at cliprange 0.2
    (0.5, 0.0, 1.0, 0.32, 0.25, True),  # I3 and I8: the clipped one is (0.2 - 1)^2 = 0.64
    (0.5, 0.0, 0.0, 0.125, 0.25, False),  # (0.2 - 0)^2 is smaller
    (-0.5, 0.0, -1.0, 0.32, 0.25, True),
    (-0.5, 0.0, 0.0, 0.125, 0.25, False),
    (0.1, 0.0, 1.0, 0.405, 0.81, False),  # within the range both are the same
    (2.0, 1.0, 2.0, 0.32, 0.0, True),  # a perfect value that moved too far
    (1.0, 1.0, 1.0, 0.0, 0.0, False),
]


def value_cases():
    *numbers, flags = (torch.tensor([column]) for column in zip(*VALUE_CASES, strict=True))
    return *numbers, flags


def test_ppo_13_value_loss_has_the_hand_made_values():  # I3, I8
    values, old, returns, losses, errors, flags = value_cases()
    got, got_errors, clipped = train_ppo.ppo_value_loss(values, old, returns, torch.ones_like(flags), 0.2)
    close(got, losses, atol=1e-6)
    close(got_errors, errors, atol=1e-6)
    assert torch.equal(clipped, flags)


@pytest.mark.parametrize("clip", [0.1, 0.2, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_equals_the_loop_whatever_stands_in_the_padding(seed, clip):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    values, old, returns = (uniform(generator, *mask.shape, low=-1.5, high=1.5) for _ in range(3))
    losses, errors, flags = [], [], []
    for i, n in enumerate(lengths):
        for t in range(width):
            v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
            near = o + clip if v > o + clip else o - clip if v < o - clip else v
            real = t < n
            losses.append(0.5 * max((v - r) ** 2, (near - r) ** 2) if real else 0.0)
            errors.append((v - r) ** 2 if real else 0.0)
            flags.append(real and (near - r) ** 2 > (v - r) ** 2)
    for garbage in [(7.0, -5.0, 3.0), (-1e4, 1e4, 1e4), (0.0, 0.0, -1e4), (1e4, 0.0, 1e4)]:
        inputs = [torch.where(mask, x, g) for x, g in zip((values, old, returns), garbage, strict=True)]
        got, got_errors, clipped = train_ppo.ppo_value_loss(*inputs, mask, clip)
        close(got.reshape(-1), losses)
        close(got_errors.reshape(-1), errors)
        assert clipped.dtype == torch.bool and clipped.reshape(-1).tolist() == flags
        assert (got[~mask] == 0).all() and (got_errors[~mask] == 0).all()


def test_a_value_within_the_range_is_never_called_clipped():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (0.2 * torch.rand(100, 50, generator=generator) ** 3 for _ in range(3))
    assert (old + (values - old) != values).any()  # float32: this way of writing the clipped value would count some
    losses, errors, clipped = train_ppo.ppo_value_loss(values, old, returns, torch.ones(100, 50, dtype=torch.bool), 0.2)
    assert not clipped.any() and torch.equal(losses, 0.5 * errors)


def test_gradient_of_the_value_loss_is_the_error_and_zero_where_clipped():
    values, old, returns, _, _, flags = value_cases()
    values.requires_grad_()
    train_ppo.ppo_value_loss(values, old, returns, torch.ones_like(flags), 0.2)[0].sum().backward()
    close(values.grad, torch.where(flags, 0.0, values.detach() - returns), atol=1e-6)


def test_the_value_loss_sends_no_gradient_into_the_padding():
    generator, mask = torch.Generator().manual_seed(0), ragged_mask([1, 3, 4], 4)
    values, old, returns = (uniform(generator, 3, 4) for _ in range(3))
    values.requires_grad_()
    train_ppo.ppo_value_loss(values, old, returns, mask, 1e6)[0].sum().backward()
    close(values.grad, (values.detach() - returns) * mask, atol=1e-6)


# ---- the scored part of a response -----------------------------------------------------------------------------------
def test_gen_12_truncation_after_the_first_full_stop_that_counts():  # F6
    responses = torch.full((3, 24), 7)
    responses[0, [5, 17, 20]] = 13
    responses[1, 5] = 13
    responses[2, 16] = 13  # the first place that counts
    scored, found = train_ppo.truncate_response(responses, torch.ones(3, 24, dtype=torch.bool), 13, 16)
    assert torch.equal(scored, ragged_mask([18, 24, 17], 24)) and found.tolist() == [True, False, True]


def test_gen_13_filler_that_equals_the_token_is_not_a_token():
    responses = torch.tensor([[5, 6, 13, 13, 13], [5, 13, 6, 13, 13], [5, 6, 7, 8, 13]])
    mask = ragged_mask([2, 3, 4], 5)
    scored, found = train_ppo.truncate_response(responses, mask, 13, 0)
    assert torch.equal(scored, ragged_mask([2, 2, 4], 5)) and found.tolist() == [False, True, False]


def test_without_a_token_to_look_for_the_whole_response_is_scored_and_counts_as_ended():  # N15
    mask = ragged_mask([1, 3, 5], 5)
    scored, found = train_ppo.truncate_response(torch.arange(15).reshape(3, 5), mask, None, 0)
    assert torch.equal(scored, mask) and found.dtype == torch.bool and found.tolist() == [True] * 3


@pytest.mark.parametrize("after", [0, 1, 4, 11, 30])
@pytest.mark.parametrize("seed", SEEDS)
def test_truncation_equals_the_loop(seed, after):
    generator, lengths, width = ragged_case(seed)
    lengths = lengths * 4
    mask = ragged_mask(lengths, width)
    responses = torch.randint(4, mask.shape, generator=generator)  # the token is 2; the padding holds it too
    kept = responses.clone(), mask.clone()
    scored, found = train_ppo.truncate_response(responses, mask, 2, after)
    assert scored.dtype == found.dtype == torch.bool and found.shape == (len(lengths),)
    for i, n in enumerate(lengths):
        places = [t for t in range(n) if t >= after and responses[i, t] == 2]
        length = places[0] + 1 if places else n
        assert scored[i].tolist() == [t < length for t in range(width)], (i, responses[i], n)
        assert found[i].item() == bool(places)
    assert torch.equal(responses, kept[0]) and torch.equal(mask, kept[1])


# ---- scores ----------------------------------------------------------------------------------------------------------
def test_rew_3_missing_eos_subtracts_or_replaces():  # F8
    scores, ended = torch.tensor([2.0, 3.0, -4.0]), torch.tensor([True, False, False])
    assert train_ppo.missing_eos_scores(scores, ended, 1.0, "replace").tolist() == [2, -1, -1]
    assert train_ppo.missing_eos_scores(scores, ended, 1.0, "subtract").tolist() == [2, 2, -5]
    assert train_ppo.missing_eos_scores(scores, ended, 10.0, "replace").tolist() == [2, -10, -10]
    assert train_ppo.missing_eos_scores(scores, ended, 0.0, "replace").tolist() == [2, 0, 0]  # 0 is not None
    for mode in ("replace", "subtract"):
        assert train_ppo.missing_eos_scores(scores, ended, None, mode).tolist() == [2, 3, -4]
    assert scores.tolist() == [2, 3, -4]


def slow_moments(seen):
    """(mean, unbiased standard deviation, 0 for fewer than two) of a list."""
    mean = math.fsum(seen) / len(seen)
    return mean, math.sqrt(math.fsum((s - mean) ** 2 for s in seen) / (len(seen) - 1)) if len(seen) > 1 else 0.0


@pytest.mark.parametrize("sizes", [[1], [1, 1], [2], [1, 7], [7, 1, 1], [5, 64, 3, 1, 20], [100] * 5])
@pytest.mark.parametrize("offset,scale", [(0.0, 1.0), (1000.0, 1.0), (-3.0, 1e-3), (2.0, 50.0)])
def test_ppo_19_running_moments_equal_those_of_all_scores_at_once(sizes, offset, scale):
    generator = torch.Generator().manual_seed(0)
    moments, seen = train_ppo.RunningMoments(), []
    assert moments.count == 0 and moments.std == 0
    for number, size in enumerate(sizes):  # drifting, so that the batches' means differ
        batch = offset + scale * (torch.randn(size, generator=generator) + number)
        moments.update(batch)
        seen += batch.tolist()
        mean, std = slow_moments(seen)
        assert moments.count == len(seen)
        assert moments.mean == pytest.approx(mean, rel=1e-12) and moments.std == pytest.approx(std, rel=1e-9)
        assert isinstance(moments.mean, float) and isinstance(moments.std, float)


def test_running_moments_of_equal_scores_have_no_spread():
    moments = train_ppo.RunningMoments()
    for size in (1, 3, 7):
        moments.update(torch.full((size,), 0.1))
        assert moments.std == 0 and moments.mean == pytest.approx(0.1, rel=1e-7)


@pytest.mark.parametrize("scaling,norm,expected", [
    (False, False, [0.0, 0, 0, 40]),
    (False, True, [-10.0, -10, -10, 30]),
    (True, False, [0.0, 0, 0, 2]),
    (True, True, [-0.5, -0.5, -0.5, 1.5]),
])  # fmt: skip
@pytest.mark.parametrize("clip", [None, 0.3, 1.0, 15.0])
def test_shaping_of_one_high_score_each_switch_alone(scaling, norm, expected, clip):  # G8: mean 10, unbiased std 20
    scores, moments = torch.tensor([0.0, 0, 0, 40]), train_ppo.RunningMoments()
    got = train_ppo.shape_scores(scores, moments, scaling, norm, clip)
    close(got, expected if clip is None else [min(clip, max(-clip, s)) for s in expected])
    assert moments.count == (4 if scaling or norm else 0)
    assert scores.tolist() == [0, 0, 0, 40]


@pytest.mark.parametrize("scaling,norm", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("clip", [None, 0.8])
def test_shaping_uses_every_score_seen_so_far_and_the_batch_itself(scaling, norm, clip):
    generator, moments, seen = torch.Generator().manual_seed(0), train_ppo.RunningMoments(), []
    for number, size in enumerate([1, 4, 9, 1, 30]):
        scores = 3 + (number + 1) * torch.randn(size, generator=generator)
        seen += scores.tolist()
        mean, std = slow_moments(seen)
        expected = [(s - mean if norm else s) / ((std or 1.0) if scaling else 1.0) for s in scores.tolist()]
        expected = expected if clip is None else [min(clip, max(-clip, s)) for s in expected]
        close(train_ppo.shape_scores(scores, moments, scaling, norm, clip), expected)
        assert moments.count == (len(seen) if scaling or norm else 0)


@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("value", [3.7, 0.1, 0.0, -2e3])
def test_equal_scores_are_shaped_to_zero_not_nan(scaling, value):  # G8, N7
    moments = train_ppo.RunningMoments()
    for size in (1, 4, 3):
        got = train_ppo.shape_scores(torch.full((size,), value), moments, scaling, True, 10.0)
        assert got.abs().max() < 1e-3 * abs(value) or (got == 0).all()
    kept = train_ppo.shape_scores(torch.full((3,), value), train_ppo.RunningMoments(), True, False, None)
    close(kept, [value] * 3)  # a spread of 0 divides by 1
