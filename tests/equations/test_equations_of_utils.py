"""Whitening, learning rates, shuffles, TensorFlow's Adam, and the means that become metrics."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracles import ragged_case, ragged_mask, slow_whiten, uniform

from rlhf_details import utils
from rlhf_details.plumbing import data


# ---- whitening -------------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("size", [0.1, 10, 100])
def test_constants_single_numbers_and_empty_masks_are_whitened_to_zero(size):
    for n in range(3, 17):
        x = (size * (0.5 + torch.rand(1, generator=torch.Generator().manual_seed(n)))).expand(2, n)
        everything = torch.ones(2, n, dtype=torch.bool)
        assert (utils.masked_whiten(x, everything) == 0).all() and (utils.masked_whiten(x, ~everything) == 0).all()
        assert (utils.masked_whiten(x, everything, shift_mean=False) == x).all()
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


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_opt_1_the_first_rate_after_a_linear_warm_up_is_full_and_the_last_is_a_share(schedule, warmup):
    args = SimpleNamespace(learning_rate=2.0, lr_schedule=schedule, warmup_ratio=0.9 * warmup / 20)  # rounded up
    left = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "constant": lambda x: 1.0}
    shares = [(i + 1) / warmup for i in range(warmup)]
    shares += [left[schedule](i / (20 - warmup)) for i in range(20 - warmup)]
    rates = [utils.learning_rate_at(step, 20, args) for step in range(1, 21)]
    assert rates == pytest.approx([2.0 * share for share in shares])


# ---- TensorFlow's Adam -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("b1,b2", [(0.9, 0.999), (0.8, 0.97)])
def test_opt_3_300_steps_are_those_of_tensorflows_adam(b1, b2):
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.arange(-7, 1).double()  # gradients from far below epsilon to far above
    gradients = scales * torch.randn(300, 8, generator=generator, dtype=torch.float64)
    weight = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=(b1, b2), weight_decay=0.0)
    theta, m, v = ([0.0] * 8 for _ in range(3))
    for t in range(1, 301):
        optimizer.param_groups[0] |= {"lr": (rate := 2e-5 * (t % 7) / 7), "eps": utils.tf_adam_eps(1e-5, t, b2)}
        weight.grad = gradients[t - 1].clone()
        optimizer.step()
        step = rate * math.sqrt(1 - b2**t) / (1 - b1**t)
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
    means.add({"x": torch.tensor([[1.0, 2.0, 50.0], [6.0, 50.0, 50.0]])}, ragged_mask([2, 1], 3))
    means.add({"x": torch.tensor([[7.0]])}, torch.tensor([[True]]))  # one more entry, and not a mean of two means
    means.add({"flags": torch.tensor([True, False, True, True])})
    means.add({"number": 3})
    means.add({"number": 4.0})
    means.add({"nothing": torch.ones(3)}, torch.zeros(3, dtype=torch.bool))
    means.add({"masked nan": torch.tensor([2.0, math.nan])}, torch.tensor([True, False]))
    for x in (2.0**25, 1.0, 1.0, 1.0):  # A sum in float32 would lose the ones.
        means.add({"large": torch.tensor([x])})
    expected = {"x": 4.0, "flags": 0.75, "number": 3.5, "nothing": 0.0, "masked nan": 2.0, "large": 2**23 + 0.75}
    assert means.reduce(ALONE) == expected


def test_log_2_means_of_processes_with_different_numbers_of_tokens():
    """The accelerator of process 0 is given what process 1 puts into its reduce and gather."""
    first, second = utils.Means(CPU), utils.Means(CPU)
    first.add({"x": torch.tensor([1.0, 2.0, 3.0])})
    second.add({"x": torch.tensor([10.0])})
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


def test_log_4_the_ratios_mean_and_variance_are_those_of_all_actions():
    """Close to 1 as well, where floats of the ratios have lost their digits."""
    for logratio in (
        torch.tensor([[-0.5, 0.7, 9.0], [0.2, 9.0, 9.0]]),
        torch.tensor([[1e-6, -3e-6, 9.0], [2e-6, 0, 0]]),
    ):
        means, mask = utils.Means(CPU), ragged_mask([2, 1], 3)
        means.add_ratios(logratio, mask)
        ratios = logratio.double()[mask].exp()
        found = means.reduce(ALONE)
        assert found == {
            "val/ratio": pytest.approx(ratios.mean().item(), rel=1e-7),
            "val/ratio_var": pytest.approx(ratios.var(correction=0).item(), rel=1e-5),
        }


def test_add_max_remembers_the_highest_entry_also_of_negative_numbers():
    means = utils.Means(CPU)
    means.add({"x": 1.0})
    for entries in ([-5.0, -2.0], [-7.0], [-3.0]):
        means.add_max("highest", torch.tensor(entries))
    assert means.reduce(ALONE) == {"x": 1.0, "highest": -2.0}


# ---- when another engine samples -------------------------------------------------------------------------------------
@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("action", ["response", "token"])
def test_gen_15_the_ratio_to_the_sampler_is_bounded_by_the_cap(action, correction):
    generator, lengths, width = ragged_case(1)
    mask, cap = ragged_mask(lengths, width), 1.5
    logratio = uniform(generator, len(lengths), width, low=-1, high=1)
    advantages = uniform(generator, len(lengths), low=-2, high=2)
    advantages = advantages if action == "response" else advantages.unsqueeze(1)
    args = SimpleNamespace(sampler="vllm", sampler_correction=correction, sampler_cap=cap)
    got, metrics = utils.correct_for_sampler(advantages, logratio, mask, args)
    weights, cut = [], []
    for i, n in enumerate(lengths):
        steps = logratio[i, :n].tolist()
        for x in [sum(steps)] if action == "response" else steps:
            ratio = math.exp(x)
            if correction == "mask":
                cut.append(not 1 / cap <= ratio <= cap)
                ratio = 0.0 if cut[-1] else ratio
            else:
                cut.append(ratio > cap)
                ratio = min(ratio, cap)
            weights.append(ratio)
            place = i if action == "response" else (i, len(weights) - 1 - sum(lengths[:i]))
            assert got[place].item() == pytest.approx(advantages[i].item() * ratio, abs=1e-5)
    assert metrics["val/sampler_weight"].item() == pytest.approx(sum(weights) / len(weights), abs=1e-5)
    assert metrics["val/sampler_cut"].item() == pytest.approx(sum(cut) / len(cut), abs=1e-6)
    assert 0 < sum(cut) < len(cut)


def test_an_action_that_is_cut_counts_as_0_even_where_its_ratio_has_no_float():
    args = SimpleNamespace(sampler="vllm", sampler_correction="mask", sampler_cap=2.0)
    logratio, mask = torch.tensor([[200.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    found, _ = utils.correct_for_sampler(torch.ones(1, 1), logratio, mask, args)
    assert found.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    "sampler, overlap, correction, is_corrected",
    [
        ("own", False, "truncate", False),
        ("own", True, "truncate", True),
        ("own", True, "none", False),
        ("vllm", False, "none", False),
    ],
)
def test_actions_that_another_policy_sampled_are_corrected_where_asked_for(sampler, overlap, correction, is_corrected):
    advantages = torch.tensor([1.0, -2.0])
    args = SimpleNamespace(sampler=sampler, overlap=overlap, sampler_correction=correction, sampler_cap=2.0)
    found, metrics = utils.correct_for_sampler(advantages, torch.ones(2, 3), torch.ones(2, 3).bool(), args)
    assert torch.equal(found, (2 if is_corrected else 1) * advantages) and len(metrics) == 2 * is_corrected
