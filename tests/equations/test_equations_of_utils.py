"""Whitening, learning rates, shuffles, the means that become metrics, and the weights for another sampler."""

import math
from types import SimpleNamespace

import pytest
import torch
from oracles import ragged_case, ragged_mask, uniform

from rlhf_details import utils
from rlhf_details.plumbing.inputs import data
from rlhf_details.plumbing.machine import samplers


# ---- whitening -------------------------------------------------------------------------------------------------------
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
    shuffled = [utils.permutation(50, *c) for c in [(1, 2), (2, 1), (1, 3), (2, 2), (1,), (1, 2, 0), (1, 2, 1), (12,)]]
    assert all(sorted(order) == list(range(50)) for order in shuffled) and len(set(shuffled)) == len(shuffled)
    torch.manual_seed(3)
    utils.permutation.cache_clear()
    assert utils.permutation(50, 1, 2) == shuffled[0]


def test_data_7_prompts_come_round_again_in_another_order():
    prompts = data.Prompts(range(6))
    stream = [p for update in range(1, 10) for p in prompts.of_update(update, 4, seed=1)]
    passes = [stream[i : i + 6] for i in range(0, 36, 6)]
    assert all(sorted(order) == list(range(6)) for order in passes)  # an update may reach from one pass into the next
    assert len(set(map(tuple, passes))) > 4
    assert [p for update in range(1, 10) for p in prompts.of_update(update, 4, seed=2)] != stream
    assert prompts.of_update(2, 12, seed=1) == stream[12:24]  # an update larger than a pass


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_opt_1_the_first_rate_after_a_linear_warm_up_is_full_and_the_last_is_a_share(schedule, warmup):
    ratio = 0.9 * warmup / 20  # The number of steps is rounded up.
    left = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "constant": lambda x: 1.0}
    shares = [(i + 1) / warmup for i in range(warmup)]
    shares += [left[schedule](i / (20 - warmup)) for i in range(20 - warmup)]
    rates = [utils.learning_rate_at(step, 20, 2.0, schedule, ratio) for step in range(1, 21)]
    assert rates == pytest.approx([2.0 * share for share in shares])
    assert utils.learning_rate_at(7, 100, 2.0, schedule, 0.07) == 2.0  # In floats 0.07 * 100 is above 7.


# ---- metrics ---------------------------------------------------------------------------------------------------------
CPU = torch.device("cpu")
ALONE = SimpleNamespace(reduce=lambda x, how: x, gather=lambda x: x)  # an accelerator of one process


def test_means_take_nothing_of_what_is_masked_and_keep_the_digits_of_large_sums():
    means = utils.Means(CPU)
    means.add({"x": torch.tensor([[1.0, 2.0, math.nan], [6.0, 50.0, 50.0]])}, ragged_mask([2, 1], 3))
    means.add({"x": torch.tensor([[7.0]])}, torch.tensor([[True]]))  # one more entry, and not a mean of two means
    means.add({"nothing": torch.ones(3)}, torch.zeros(3, dtype=torch.bool))
    for x in (2.0**25, 1.0, 1.0, 1.0):  # A sum in float32 would lose the ones.
        means.add({"large": x})
    assert means.reduce(ALONE) == {"x": 4.0, "nothing": 0.0, "large": 2**23 + 0.75}


def test_log_2_means_of_processes_with_different_numbers_of_tokens():
    """The accelerator of process 0 is given what process 1 puts into its reduce and gather."""
    first, second, sent = utils.Means(CPU), utils.Means(CPU), {}
    first.add({"x": torch.tensor([1.0, 2.0, 3.0])})
    second.add({"x": torch.tensor([10.0])})
    for means, entries in ((first, [-9.0, -3.0]), (second, [-2.0, -9.0]), (second, [-5.0])):
        means.add_max("highest", torch.tensor(entries))
    keep = SimpleNamespace(reduce=lambda x, how: sent.setdefault(how, x), gather=lambda x: sent.setdefault("gather", x))
    second.reduce(keep)
    both = SimpleNamespace(reduce=lambda x, how: x + sent[how], gather=lambda x: torch.cat([x, sent["gather"]]))
    assert first.reduce(both) == {"x": 4.0, "highest": -2.0}  # a mean of the two means would be 6


def test_log_4_the_mean_and_the_variance_of_ratios_close_to_1_keep_their_digits():
    logratio, mask, means = torch.tensor([[1e-6, -3e-6, 9.0], [2e-6, 0, 0]]), ragged_mask([2, 1], 3), utils.Means(CPU)
    means.add_ratios(logratio, mask)
    found, ratios = means.reduce(ALONE), logratio.double()[mask].exp()
    assert found["val/ratio"] == pytest.approx(ratios.mean().item(), rel=1e-7)
    assert found["val/ratio_var"] == pytest.approx(ratios.var(correction=0).item(), rel=1e-5, abs=0)


# ---- when another engine samples -------------------------------------------------------------------------------------
@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("action", ["response", "token"])
def test_gen_15_the_ratio_to_the_sampler_is_bounded_by_the_cap(action, correction):
    generator, lengths, width = ragged_case(1)
    mask, cap = ragged_mask(lengths, width), 1.5
    logratio = uniform(generator, len(lengths), width, low=-1, high=1)
    logratio[0, 0] = 200  # The ratio has no float.
    steps = [row[m] for row, m in zip(logratio, mask, strict=True)]
    steps = [row.sum().reshape(1) if action == "response" else row for row in steps]
    ratios = torch.cat(steps).double().exp()
    cut = (ratios > cap) | (ratios < 1 / cap) if correction == "mask" else ratios > cap
    weights = ratios.where(~cut, 0.0) if correction == "mask" else ratios.clamp(max=cap)
    advantages = torch.ones(len(lengths)) if action == "response" else torch.ones(len(lengths), 1)
    got, metrics = samplers.correct_for_sampler(-2 * advantages, logratio, mask, correction, cap)
    got = got if action == "response" else got[mask]
    torch.testing.assert_close(got, -2 * weights.float(), atol=1e-5, rtol=1e-5)
    assert metrics["val/sampler_weight"].item() == pytest.approx(weights.mean().item(), abs=1e-5)
    assert metrics["val/sampler_cut"].item() == pytest.approx(cut.double().mean().item(), abs=1e-6)
    assert cut.any() and not cut.all()


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
    sampler = samplers.Sampler(args, None, None)
    found, metrics = sampler.weigh(advantages, torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2, 3).bool())
    assert torch.equal(found, (2 if is_corrected else 1) * advantages) and len(metrics) == 2 * is_corrected
