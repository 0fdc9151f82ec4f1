"""Masked means and whitening, learning rates, shuffles, TensorFlow's Adam, and the means that become metrics."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracles import ragged_case, ragged_mask, slow_whiten, uniform

from rlhf_details import utils
from rlhf_details.plumbing import data


# ---- masked means and whitening --------------------------------------------------------------------------------------
def test_a_masked_mean_is_the_mean_of_what_the_mask_keeps():
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.rand(5, 7, generator=generator), torch.rand(5, 7, generator=generator) < 0.4
    kept = [x[i, j].item() for i in range(5) for j in range(7) if mask[i, j]]
    assert utils.masked_mean(x, mask).item() == pytest.approx(sum(kept) / len(kept), rel=1e-6)
    assert utils.masked_mean(x, torch.zeros_like(mask)).item() == 0


def test_whitening_nine_numbers_with_and_without_their_mean():
    x = torch.tensor([1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0])
    kept = torch.tensor([0.0508, 0.4381, 0.8254, 1.2127, 1.6, 1.9873, 2.3746, 2.7619, 3.1492])
    mask = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(utils.masked_whiten(x, mask, shift_mean=False), kept, atol=1e-4, rtol=0)
    torch.testing.assert_close(utils.masked_whiten(x, mask), kept - 1.6, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("seed", range(1, 6))
def test_ppo_11_whitening_uses_the_biased_variance_of_what_the_mask_keeps(seed, shift_mean):
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    x = uniform(generator, len(lengths), width, low=-2, high=5)
    x[~mask] = 1e3  # must not be looked at
    real = x[mask].tolist()
    put_back = 0 if shift_mean else sum(real) / len(real)
    got = utils.masked_whiten(x, mask, shift_mean)
    torch.testing.assert_close(got[mask], torch.tensor(slow_whiten(real)) + put_back, atol=1e-5, rtol=1e-5)
    assert (got[~mask] == 0).all()


def test_constants_single_numbers_and_empty_masks_are_whitened_to_zero():
    x, everything = torch.full((2, 3), 7.0), torch.ones(2, 3, dtype=torch.bool)
    assert utils.masked_whiten(x, everything).tolist() == [[0.0] * 3] * 2
    assert utils.masked_whiten(x, ~everything).tolist() == [[0.0] * 3] * 2
    assert utils.masked_whiten(torch.tensor([3.0]), torch.tensor([True])).tolist() == [0.0]


# ---- orders and learning rates ---------------------------------------------------------------------------------------
def test_a_permutation_depends_on_its_coordinates_alone():
    one = utils.permutation(50, 1, 2)
    assert sorted(one) == list(range(50)) and one != tuple(range(50))
    torch.manual_seed(3)
    assert utils.permutation(50, 1, 2) == one
    others = [utils.permutation(50, *c) for c in [(2, 1), (1, 3), (2, 2), (1,), (1, 2, 0), (1, 2, 1), (12,)]]
    assert all(other != one for other in others) and len(set(others)) == len(others)


def test_data_7_prompts_come_round_again_in_another_order():
    prompts = data.Prompts(range(6))
    stream = [p for update in range(1, 10) for p in prompts.of_update(update, 4, seed=1)]  # six passes over 6 prompts
    passes = [stream[i : i + 6] for i in range(0, 36, 6)]
    assert all(sorted(order) == list(range(6)) for order in passes)  # an update may reach from one pass into the next
    assert len(set(map(tuple, passes))) > 4
    assert prompts.of_update(3, 4, seed=1) == stream[8:12]  # a function of its arguments alone
    assert [p for update in range(1, 10) for p in prompts.of_update(update, 4, seed=2)] != stream
    assert sorted(prompts.of_update(1, 12, seed=1)) == sorted([*range(6)] * 2)  # an update larger than a pass


def rates(steps, schedule="linear", warmup=0.0, peak=2.0):
    args = SimpleNamespace(learning_rate=peak, lr_schedule=schedule, warmup_ratio=warmup)
    return [utils.learning_rate_at(step, steps, args) for step in range(1, steps + 1)]


def test_opt_1_the_learning_rate_is_full_at_first_and_a_share_at_last():
    trace = rates(10, peak=3e-6)
    assert trace == pytest.approx([3e-6 * (1 - (u - 1) / 10) for u in range(1, 11)])
    assert trace[0] == 3e-6 and trace[-1] == pytest.approx(3e-7)
    assert rates(1) == [2.0]


def test_cosine_and_constant_learning_rates():
    assert rates(8, "cosine") == pytest.approx([1 + math.cos(math.pi * (u - 1) / 8) for u in range(1, 9)])
    assert rates(8, "constant") == [2.0] * 8


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_opt_1_the_warm_up_is_linear_and_the_first_step_after_it_is_full(schedule):
    trace = rates(20, schedule, 0.18, peak=1.0)  # 0.18 * 20 = 3.6, which is 4 steps
    assert trace[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    left = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "constant": lambda x: 1.0}
    assert trace[4:] == pytest.approx([left[schedule](i / 16) for i in range(16)])
    assert rates(20, schedule, 1.0)[-1] == 2.0  # nothing but warm-up


# ---- TensorFlow's Adam -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("gradient,tensorflow,plain", [(1e-3, 7.597e-6, 9.901e-6), (1e-5, 3.065e-7, 5.0e-6)])
def test_opt_3_the_first_step_is_that_of_tensorflows_adam(optimizer_class, gradient, tensorflow, plain):
    for eps, expected in [(utils.tf_adam_eps(1e-5, 1), tensorflow), (1e-5, plain)]:
        weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer_class([weight], lr=1e-5, eps=eps, weight_decay=0.0).step()
        assert -weight.item() == pytest.approx(expected, rel=2e-4)


def test_tensorflows_epsilon_starts_large_and_becomes_epsilon():
    assert utils.tf_adam_eps(1e-5, 1) == pytest.approx(3.16228e-4, rel=1e-5)
    assert utils.tf_adam_eps(1e-5, 100_000) == pytest.approx(1e-5, rel=1e-9)
    assert utils.tf_adam_eps(1e-8, 3, beta2=0.5) == pytest.approx(1e-8 / math.sqrt(0.875), rel=1e-9)


@pytest.mark.parametrize("rate", [lambda t: 1e-5, lambda t: 2e-5 * (t % 7) / 7])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.97)])
def test_opt_3_300_steps_are_those_of_tensorflows_adam(betas, rate):
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.arange(-7, 1).double()  # gradients from far below epsilon to far above
    gradients = scales * torch.randn(300, 8, generator=generator, dtype=torch.float64)
    weight = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, weight_decay=0.0)
    theta, m, v = ([0.0] * 8 for _ in range(3))
    b1, b2 = betas
    for t in range(1, 301):
        optimizer.param_groups[0] |= {"lr": rate(t), "eps": utils.tf_adam_eps(1e-5, t, b2)}
        weight.grad = gradients[t - 1].clone()
        optimizer.step()
        step = rate(t) * math.sqrt(1 - b2**t) / (1 - b1**t)
        for i, g in enumerate(gradients[t - 1].tolist()):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            theta[i] -= step * m[i] / (math.sqrt(v[i]) + 1e-5)
    assert weight.tolist() == pytest.approx(theta, rel=1e-9, abs=1e-15) and max(map(abs, theta)) > 1e-5


# ---- metrics ---------------------------------------------------------------------------------------------------------
CPU = torch.device("cpu")
ALONE = SimpleNamespace(reduce=lambda x, how: x, gather=lambda x: x)  # an accelerator of one process


def test_means_are_over_all_that_was_added_where_the_mask_is_true():
    means = utils.Means(CPU)
    means.add("x", torch.tensor([[1.0, 2.0, 50.0], [6.0, 50.0, 50.0]]), ragged_mask([2, 1], 3))
    means.add("x", torch.tensor([[7.0]]), torch.tensor([[True]]))  # one more entry, and not a mean of two means
    means.add("flags", torch.tensor([True, False, True, True]))
    means.add("number", 3)
    means.add("number", 4.0)
    means.add("nothing", torch.ones(3), torch.zeros(3, dtype=torch.bool))
    assert means.reduce(ALONE) == {"x": 4.0, "flags": 0.75, "number": 3.5, "nothing": 0.0}


def test_log_2_means_of_processes_with_different_numbers_of_tokens():
    """The accelerator of process 0 is given what process 1 puts into its reduce and gather."""
    first, second = utils.Means(CPU), utils.Means(CPU)
    first.add("x", torch.tensor([1.0, 2.0, 3.0]))
    second.add("x", torch.tensor([10.0]))
    for means, highest in ((first, -3.0), (second, -2.0)):
        means.add_max("m", torch.tensor([-9.0, highest]))
    sent = {}
    record = SimpleNamespace(
        reduce=lambda x, how: sent.setdefault("reduce", x), gather=lambda x: sent.setdefault("gather", x)
    )
    second.reduce(record)
    both = SimpleNamespace(
        reduce=lambda x, how: x + sent["reduce"] if how == "sum" else None,
        gather=lambda x: torch.cat([x, sent["gather"]]),
    )
    assert first.reduce(both) == {"x": 4.0, "m": -2.0}  # a mean of the two means would be 6


def test_a_nan_under_the_mask_is_not_counted_and_a_real_one_is_not_hidden():
    means, mask = utils.Means(CPU), torch.tensor([True, False])
    means.add("x", torch.tensor([2.0, math.nan]), mask)
    means.add("y", torch.tensor([math.nan, 2.0]), mask)
    result = means.reduce(ALONE)
    assert result["x"] == 2.0 and math.isnan(result["y"])


def test_means_are_added_up_in_float64():
    means = utils.Means(CPU)
    means.add("x", torch.tensor([2.0**25]))
    for _ in range(3):
        means.add("x", torch.tensor([1.0]))  # float32 would lose these
    assert means.reduce(ALONE)["x"] == (2**25 + 3) / 4


def test_since_last_is_of_what_was_added_since_and_the_end_is_of_everything():
    means = utils.Means(CPU)
    means.add("x", torch.tensor([1.0, 3.0]))
    assert means.since_last(ALONE) == {"x": 2.0}
    means.add("x", torch.tensor([8.0]))
    means.add("new", 5)
    assert means.since_last(ALONE) == {"x": 8.0, "new": 5.0}
    assert means.since_last(ALONE) == {"x": 0.0, "new": 0.0}
    assert means.reduce(ALONE) == {"x": 4.0, "new": 5.0}


def test_add_max_remembers_the_highest_entry_also_of_negative_numbers():
    means = utils.Means(CPU)
    means.add("x", 1.0)
    for entries in ([-5.0, -2.0], [-7.0], [-3.0]):
        means.add_max("highest", torch.tensor(entries))
    assert means.reduce(ALONE) == {"x": 1.0, "highest": -2.0}


def test_means_hold_no_graph():
    weight = torch.ones(3, requires_grad=True)
    means = utils.Means(CPU)
    means.add("x", weight * 2), means.add_max("m", weight * 2)
    assert not means.sums["x"].requires_grad and not means.highest["m"].requires_grad
