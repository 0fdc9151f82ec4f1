"""The equations of train_grpo.py against slow loops written from the papers, and by hand."""

import math
import statistics

import pytest
import torch
from oracles import close, ragged_mask, uniform

from rlhf_details import train_grpo


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_1_advantages_equal_the_loop(scale, k):
    scores = uniform(torch.Generator().manual_seed(k), 5 * k, low=-3, high=8)
    expected, flat = [], scores.tolist()
    for i, score in enumerate(flat):
        group = flat[i // k * k :][:k]
        spread = {"group": statistics.stdev(group), "batch": statistics.stdev(flat)}.get(scale)
        expected.append([(score - statistics.mean(group)) / (1 if spread is None else spread + 1e-4)])
    close(train_grpo.grpo_advantages(scores, k, scale), expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [0.1, 10, 100])
def test_grpo_1_groups_of_equal_scores_have_no_advantages(size, scale):
    """Their mean in fp32 is often not the score itself, and the difference would be divided by 1e-4."""
    for k in range(3, 17):
        groups = size * (0.5 + torch.rand(50, 1, generator=torch.Generator().manual_seed(k)))
        scores = torch.cat([groups.expand(-1, k), torch.arange(float(k)).unsqueeze(0)])  # the last group differs
        advantages = train_grpo.grpo_advantages(scores.flatten(), k, scale).reshape(-1, k)
        assert (advantages[:-1] == 0).all() and (advantages[-1] != 0).any()


def test_grpo_2_the_kl_equals_the_formula_is_never_negative_and_pulls_towards_the_reference():
    generator = torch.Generator().manual_seed(0)
    new, ref = uniform(generator, 4, 6, low=-3, high=0).requires_grad_(), uniform(generator, 4, 6, low=-3, high=0)
    kl = train_grpo.kl_estimates(new, ref)
    pairs = [zip(*rows, strict=True) for rows in zip(new.tolist(), ref.tolist(), strict=True)]
    close(kl, [[math.exp(y - x) - (y - x) - 1 for x, y in row] for row in pairs])
    assert (kl >= 0).all()
    near = 2.0 ** -torch.arange(10, 20)  # In fp32, exp(d) - d - 1 would round to 0, or to twice as much.
    close(train_grpo.kl_estimates(torch.zeros(10), near), (near**2 / 2).tolist(), rtol=1e-2, atol=0)
    kl.sum().backward()
    assert (new.grad.sign() == (new.detach() - ref).sign()).all()  # the log-prob falls where it is above


def test_grpo_2_the_mean_gradient_is_that_of_one_kl_or_with_the_ratio_of_the_other():
    """Over all tokens of a small vocabulary, each as often as the policy says it."""
    logits, ref_logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    policy, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    share, logratio = policy.detach().exp(), policy - policy.detach()
    forward, reverse = (ref.exp() * (ref - policy)).sum(), (policy.exp() * (policy - ref)).sum()
    for wanted, factor in ((forward, 1), (reverse, logratio.exp())):
        mean = (share * train_grpo.kl_estimates(policy, ref) * factor).sum()
        assert torch.allclose(gradient(mean), gradient(wanted))


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.1, 0.5)])
def test_grpo_3_the_policy_loss_equals_the_loop_and_clips_each_side_at_its_own_bound(low, high):
    generator = torch.Generator().manual_seed(3)
    mask = ragged_mask([1, 4, 6, 2, 3, 6, 5, 1], 6)
    old = uniform(generator, 8, 6, low=-3, high=0)
    new = old + uniform(generator, 8, 6, low=-0.8, high=0.8)
    new, old = torch.where(mask, new, torch.tensor(7.0)), torch.where(mask, old, torch.tensor(-5.0))  # garbage
    advantages = uniform(generator, 8, 1, low=-2, high=2)
    expected, flags = [[0.0] * 6 for _ in range(8)], [[False] * 6 for _ in range(8)]
    for i in range(8):
        for t in range(int(mask[i].sum())):
            ratio, advantage = math.exp(new[i, t] - old[i, t]), advantages[i, 0].item()
            held = min(max(ratio, 1 - low), 1 + high)
            expected[i][t] = -min(ratio * advantage, held * advantage)
            flags[i][t] = held * advantage < ratio * advantage
    losses, logratio, is_clipped = train_grpo.grpo_policy_loss(new, old, mask, advantages, low, high)
    close(losses, expected)
    assert is_clipped.tolist() == flags and is_clipped.any() and (logratio[~mask] == 0).all()


def off_policy():
    """(new log-probs, old ones, mask, advantages) of eight responses, with garbage behind their ends."""
    generator = torch.Generator().manual_seed(5)
    mask = ragged_mask([1, 4, 6, 2, 3, 6, 5, 1], 6)
    old = uniform(generator, 8, 6, low=-3, high=0)
    new = old + uniform(generator, 8, 6, low=-0.8, high=0.8)
    new, old = torch.where(mask, new, torch.tensor(7.0)), torch.where(mask, old, torch.tensor(-5.0))
    return new.requires_grad_(), old, mask, uniform(generator, 8, 1, low=-2, high=2)


def test_grpo_5_gspo_has_the_ratio_of_whole_responses_a_token_and_clips_all_of_their_tokens():
    """Averaged by response it is the paper's loss, and its gradient is A * ratio * (mean gradient of the log-probs)."""
    new, old, mask, advantages = off_policy()
    losses, logratio, clipped = train_grpo.gspo_policy_loss(new, old, mask, advantages, 0.1, 0.2)
    expected, lengths = [], mask.sum(1).tolist()
    for i, length in enumerate(lengths):
        ratio = math.exp(sum((new[i, t] - old[i, t]).item() for t in range(length)) / length)
        held, advantage = min(max(ratio, 0.9), 1.2), advantages[i, 0].item()
        expected.append(-min(ratio * advantage, held * advantage))
        assert (logratio[i, :length].exp() - ratio).abs().max() < 1e-5 and len(set(clipped[i, :length].tolist())) == 1
        assert clipped[i, 0].item() == (held * advantage < ratio * advantage)
    assert clipped[mask].any() and not clipped[mask].all()
    weights = train_grpo.loss_weights(mask, 8, mask.sum(), "response")
    loss = (losses * weights).sum()
    assert loss.item() == pytest.approx(statistics.mean(expected), rel=1e-5)
    loss.backward()
    for i, length in enumerate(lengths):
        free = 0 if clipped[i, 0] else -advantages[i, 0].item() * logratio[i, 0].exp().item() / length / 8
        assert new.grad[i].tolist() == pytest.approx([free] * length + [0] * (6 - length), abs=1e-6)


def test_grpo_6_cispo_clips_the_weight_and_every_token_keeps_its_gradient():
    new, old, mask, advantages = off_policy()
    losses, _, clipped = train_grpo.cispo_policy_loss(new, old, mask, advantages, 0.0, 0.3)
    losses.sum().backward()
    for i, t in mask.nonzero().tolist():
        ratio, advantage = math.exp((new[i, t] - old[i, t]).item()), advantages[i, 0].item()
        weight = min(ratio, 1.3)
        assert losses[i, t].item() == pytest.approx(-weight * advantage * new[i, t].item(), rel=1e-4, abs=1e-6)
        assert new.grad[i, t].item() == pytest.approx(-weight * advantage, rel=1e-4)
        assert clipped[i, t].item() == (ratio > 1.3)
    assert clipped.any() and not (losses[~mask].any() or new.grad[~mask].any() or clipped[~mask].any())


@pytest.mark.parametrize("objective", ["gspo", "cispo"])
def test_before_the_first_step_all_objectives_have_the_gradient_of_grpo(objective):
    """[GRPO-5] [GRPO-6]"""
    new, _, mask, advantages = off_policy()
    gradients = []
    for name in ("grpo", objective):
        losses, *_ = getattr(train_grpo, f"{name}_policy_loss")(new, new.detach(), mask, advantages, 0.2, 0.2)
        weights = train_grpo.loss_weights(mask, 8, mask.sum(), "token")
        gradients.append(torch.autograd.grad((losses * weights).sum(), new)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("normalization", ["token", "response", "constant"])
def test_grpo_4_weights_of_micro_batches_make_the_mean_of_the_minibatch(normalization):
    mask, losses = ragged_mask([1, 4, 6, 2], 6), uniform(torch.Generator().manual_seed(1), 4, 6, low=-2, high=2)
    rows = [row[m].tolist() for row, m in zip(losses, mask, strict=True)]
    expected = {
        "token": sum(map(sum, rows)) / 13,
        "response": statistics.mean(map(statistics.mean, rows)),
        "constant": sum(map(sum, rows)) / (4 * 6),
    }
    total = 0.0
    for x, m in zip(losses.split(3), mask.split(3), strict=True):
        total += (x * train_grpo.loss_weights(m, 4, mask.sum(), normalization)).sum().item()
    assert total == pytest.approx(expected[normalization], rel=1e-5)
    nothing = torch.zeros_like(mask)  # What is left out has no weight, even where nothing is left in.
    assert (train_grpo.loss_weights(nothing, 4, torch.tensor(1), normalization) == 0).all()


def test_grpo_8_groups_of_equal_scores_are_found():
    scores = torch.tensor([1.0, 1.0, 2.0, 2.5, -1.0, -1.0])
    assert train_grpo.in_equal_group(scores, 2).tolist() == [True, True, False, False, True, True]
    assert train_grpo.in_equal_group(scores, 3).tolist() == [False] * 6


def test_grpo_9_a_long_response_pays_by_the_formula():
    """Equation 13 of DAPO, with L_max = 10 tokens and L_cache = 4 of them."""
    mask = torch.arange(10) < torch.arange(1, 11).unsqueeze(1)  # lengths 1 to 10
    expected = [0 if length <= 10 - 4 else (10 - 4 - length) / 4 for length in range(1, 11)]
    assert expected[-1] == -1
    close(train_grpo.overlong_scores(torch.zeros(10), mask, 4), expected)
    for nothing in (None, 0):
        assert train_grpo.overlong_scores(torch.ones(10), mask, nothing).tolist() == [1] * 10


@pytest.mark.parametrize(
    "given, taken",
    [
        ({}, (0.2, 0.2, "token")),
        (dict(cliprange=0.1), (0.1, 0.1, "token")),
        (dict(cliprange_high=0.28), (0.2, 0.28, "token")),
        (dict(objective="gspo"), (3e-4, 4e-4, "response")),
        (dict(objective="gspo", cliprange=0.01, loss_normalization="token"), (0.01, 0.01, "token")),
        (dict(objective="cispo"), (None, 4.0, "token")),
        (dict(objective="cispo", cliprange_high=1.0), (None, 1.0, "token")),
    ],
)
def test_an_objective_takes_its_own_values_where_none_are_given(given, taken):
    assert train_grpo.clipping_and_normalization(train_grpo.Args(**given)) == taken
