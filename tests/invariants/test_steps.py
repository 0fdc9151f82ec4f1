"""What holds at every update: where ratio and KL start, which steps are taken, how, and on which episodes."""

import contextlib
import math

import pytest
import torch
from accelerate import Accelerator
from cases import (
    EVERY_CASE,
    IN_STEP,
    RLOO_AND_PPO,
    VALUE_MODELS,
    episodes_of,
    optimiser_steps,
    page_of,
    run_case,
    shifted_sampler,
)
from helpers import PAGES, record, run_ppo, run_rloo, without_times
from safetensors.torch import load_file

from rlhf_details import utils

STEPS = dict(num_ppo_epochs=2, num_mini_batches=2)


def pairs(numbers):
    """(0, 1), (2, 3), ... of a list."""
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def norm_of(groups):
    """The global norm of the gradient that an optimiser is about to step."""
    gradients = [p.grad.flatten() for group in groups for p in group["params"] if p.grad is not None]
    return torch.cat(gradients).norm().item()


# ---- ratio and KL ----------------------------------------------------------------------------------------------------
@IN_STEP
def test_the_first_ratio_of_every_update_is_one_and_later_ones_are_not(baseline, case):
    """Faults 10, 13 and 19."""
    for row in baseline(case).rows[1:]:
        assert row["val/first_ratio"] - 1 < 1e-5 and row["val/logprob_gap"] < 1e-5
        assert row["val/ratio_var"] > 1e-9


@EVERY_CASE
def test_model_4_kl_is_zero_at_update_one_and_then_grows(baseline, case):
    """With an actor the second batch is the reference's own as well."""
    kl = [abs(row["objective/kl"]) for row in baseline(case).rows[1:]]
    fresh = 2 if case == "async" else 1
    assert max(kl[:fresh]) < 1e-5 and min(kl[fresh:]) > 1e-4


@IN_STEP
def test_gen_9_old_log_probs_come_from_the_training_forward(ragged, in_tmp, case):
    """A sampler that is off by 0.1 shows in val/logprob_gap alone: neither in the ratio nor in the KL."""
    with shifted_sampler():
        rows = run_case(case, ragged, learning_rate=0.0, **STEPS)
    for row in rows:
        assert abs(row["val/ratio"] - 1) < 1e-5 and abs(row["objective/kl"]) < 1e-4
        assert row["val/logprob_gap"] == pytest.approx(0.1, abs=1e-3)


def test_rloo_7_with_one_step_the_ratio_is_exactly_one_whatever_the_sampler_says(ragged, in_tmp):
    with shifted_sampler():
        for row in run_rloo(ragged, learning_rate=1e-2):
            assert row["val/ratio"] == row["val/first_ratio"] == 1 and row["val/ratio_var"] == 0
            assert row["policy/clipfrac_avg"] == row["policy/approxkl_avg"] == 0


@EVERY_CASE
def test_log_6_the_gap_is_the_samplers_and_the_first_ratio_is_that_of_the_first_step(ragged, in_tmp, case):
    with shifted_sampler():
        rows = run_case(case, ragged, learning_rate=1e-2, **STEPS)
    first, stale = ("val/stale_ratio", "val/first_ratio") if case == "async" else ("val/first_ratio", "val/stale_ratio")
    assert all(first in row and stale not in row for row in rows)
    for row in rows[: 1 if case == "async" else 3]:
        assert row["val/logprob_gap"] == pytest.approx(0.1, abs=1e-3) and row[first] - 1 < 1e-4
        assert abs(row["val/ratio"] - 1) > 1e-4
    assert case != "async" or all(row[first] - 1 > 1e-3 for row in rows[1:])


@EVERY_CASE
def test_with_learning_rate_zero_no_weight_changes_and_every_ratio_stays_one(ragged, in_tmp, case):
    for row in run_case(
        case, ragged, learning_rate=0.0, weight_decay=0.5, temperature=0.7, output_dir="model", **STEPS
    ):
        assert abs(row["val/ratio"] - 1) < 1e-5 and row["policy/clipfrac_avg"] == 0
        assert abs(row["objective/kl"]) < 1e-4 and row["policy/grad_norm"] > 1e-3
    before, after = load_file(ragged / "policy/model.safetensors"), load_file("model/model.safetensors")
    assert all(torch.equal(x, after[name]) for name, x in before.items())


# ---- which episodes --------------------------------------------------------------------------------------------------
@EVERY_CASE
def test_opt_9_minibatches_cover_every_episode_once_a_pass_each_time_in_another_order(
    ragged, in_tmp, monkeypatch, case
):
    """Faults 19 and 20: what the training forward is given is compared with what was sampled."""
    page, seen = page_of(case), []
    real, sampled = page.response_logprobs, record(monkeypatch, utils, "sample")["sample"]

    def recording(policy, batch, *n):
        if torch.is_grad_enabled():
            rows = zip(*batch, strict=True)
            seen.append([(tuple(q[m].tolist()), tuple(r[o].tolist())) for q, m, r, o in rows])
        return real(policy, batch, *n)

    monkeypatch.setattr(page, "response_logprobs", recording)
    options = dict(rloo_k=2) if case.startswith("rloo") else {}
    options |= dict(num_ppo_epochs=3, num_mini_batches=2, micro_batch_size=4, stop_token="none", total_episodes=32)
    run_case(case, ragged, **options)
    sampled = [[(tuple(query), tuple(response)) for query, response in batch] for batch in episodes_of(sampled)]
    assert len(sampled) == 2 and len(seen) == 2 * 3 * 4
    passes = [[row for rows in seen[i : i + 4] for row in rows] for i in range(0, len(seen), 4)]
    for number, rows in enumerate(passes):
        assert sorted(rows) == sorted(sampled[number // 3]) and len(set(rows)) == 16
        if case.startswith("rloo"):  # Siblings stay together.
            assert all(rows[i][0] == rows[i + 1][0] for i in range(0, 16, 2))
    assert len({tuple(rows) for rows in passes}) == 6


@EVERY_CASE
def test_opt_10_updates_are_rounded_up_and_each_takes_the_steps_that_the_flags_say(ragged, in_tmp, monkeypatch, case):
    """Faults 1, 42 and 43: the prompts come round again in the middle of an update."""
    steps = optimiser_steps(monkeypatch, lambda groups: 1)
    options = dict(take=6 if case.startswith("rloo") else 24, total_episodes=33, num_ppo_epochs=3, num_mini_batches=2)
    rows = run_case(case, ragged, response_length=3, **options)
    assert len(steps) == 3 * 3 * 2
    assert [row["episode"] for row in rows] == [16, 32, 48]
    assert [row["epoch"] for row in rows] == pytest.approx([2 / 3, 4 / 3, 2])


@pytest.mark.parametrize("case", ["rloo", "ppo", "async"])
def test_data_7_the_second_pass_has_the_same_prompts_in_another_order(ragged, in_tmp, monkeypatch, case):
    calls = record(monkeypatch, utils, "sample")["sample"]
    run_case(case, ragged, take=12, total_episodes=144 if case == "rloo" else 48, batch_size=16, response_length=2)
    queries = [tuple(query) for batch in episodes_of(calls) for query, _ in batch]
    queries = queries[::4] if case == "rloo" else queries
    passes = [queries[i : i + 12] for i in (0, 12, 24)]
    assert all(sorted(order) == sorted(passes[0]) and len(set(order)) == 12 for order in passes)
    assert len(set(map(tuple, passes))) == 3


@RLOO_AND_PPO
def test_every_update_draws_anew_also_for_the_same_prompts_and_weights(ragged, in_tmp, monkeypatch, case):
    calls = record(monkeypatch, utils, "sample")["sample"]
    run_case(case, ragged, learning_rate=0.0, stop_token="none", take=1)
    responses = [tuple(response) for batch in episodes_of(calls) for _, response in batch]
    assert len(responses) == len(set(responses)) == 48


# ---- the optimiser ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "case, schedule, warmup, shares",
    [
        ("rloo", "linear", 0.0, [1, 0.75, 0.5, 0.25]),
        ("rloo", "constant", 0.5, [0.5, 1, 1, 1]),
        ("ppo", "linear", 0.5, [0.5, 1, 1, 0.5]),
        ("async", "cosine", 0.0, [1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_opt_2_the_optimiser_steps_with_the_learning_rate_that_is_logged(
    ragged, in_tmp, monkeypatch, case, schedule, warmup, shares
):
    seen = optimiser_steps(monkeypatch, lambda groups: [group["lr"] for group in groups])
    options = dict(lr_schedule=schedule, warmup_ratio=warmup, total_episodes=32, batch_size=8, response_length=2)
    rows = run_case(case, ragged, num_ppo_epochs=2, **options)
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * share for share in shares])
    assert [rate for (rate,) in seen] == pytest.approx([1e-3 * share for share in shares for _ in range(2)])


@pytest.mark.parametrize("case", ["rloo", "ppo", "async"])
def test_opt_4_epsilon_and_weight_decay_reach_the_optimiser(ragged, in_tmp, monkeypatch, case):
    seen = optimiser_steps(monkeypatch, lambda groups: [(group["eps"], group["weight_decay"]) for group in groups])
    run_case(case, ragged, adam_eps=3e-4, weight_decay=0.07, total_episodes=16)
    assert seen == [[(3e-4, 0.07)]]


@pytest.mark.parametrize("case", ["rloo", "ppo", "async"])
def test_opt_7_gradients_cross_processes_once_a_step(ragged, in_tmp, monkeypatch, case):
    held, backward, real = [], [], Accelerator.backward

    @contextlib.contextmanager
    def no_sync(self, module):
        held.append(True)
        yield
        held.pop()

    monkeypatch.setattr(Accelerator, "no_sync", no_sync)
    monkeypatch.setattr(Accelerator, "backward", lambda self, x, **k: backward.append(bool(held)) or real(self, x, **k))
    run_case(case, ragged, micro_batch_size=4, num_ppo_epochs=2, total_episodes=32)
    assert backward == [True, True, True, False] * 4  # two updates of two passes of four micro-batches


@pytest.mark.parametrize("case", ["rloo", "ppo", "async"])
def test_opt_8_max_grad_norm_really_clips_and_the_norm_before_is_logged(ragged, in_tmp, monkeypatch, case):
    norms = optimiser_steps(monkeypatch, norm_of)
    rows = run_case(case, ragged, max_grad_norm=1e-3, num_ppo_epochs=2)
    assert max(norms) <= 1.001e-3 and all(row["policy/grad_norm"] > 1e-2 for row in rows)
    norms.clear()
    rows = run_case(case, ragged, max_grad_norm=None, num_ppo_epochs=2)
    means = [(a + b) / 2 for a, b in pairs(norms)]
    assert means == pytest.approx([row["policy/grad_norm"] for row in rows], rel=1e-4)


def test_tf_adam_counts_the_steps_taken_over_the_whole_run(ragged, in_tmp, monkeypatch):
    seen = optimiser_steps(monkeypatch, lambda groups: groups[0]["eps"])
    options = dict(tf_adam=True, adam_eps=1e-6, learning_rate=3e-3, ratio_threshold=1.0 + 1e-4)
    rows = run_ppo(ragged, **options, **STEPS)
    taken = 12 - sum(row["policy/skipped_minibatches"] for row in rows)  # A skipped minibatch is no step.
    assert seen == pytest.approx([1e-6 / math.sqrt(1 - 0.999**t) for t in range(1, taken + 1)]) and 3 < taken < 12


# ---- PPO: steps and passes that are not made -------------------------------------------------------------------------
def minibatch_means(calls, function):
    """The mean of a function of log-ratios over the tokens of each recorded call of ppo_policy_loss."""
    return [function(logratio.double()[args[2]]).mean().item() for args, (_, logratio, _) in calls]


def test_ppo_18_target_kl_ends_the_passes_above_one_and_a_half_times_itself(ragged, in_tmp, monkeypatch):
    calls = record(monkeypatch, PAGES["train_ppo"], "ppo_policy_loss")["ppo_policy_loss"]
    options = dict(total_episodes=16, num_ppo_epochs=4, num_mini_batches=2, learning_rate=3e-3)
    run_ppo(ragged, **options)
    kls = [sum(pair) / 2 for pair in pairs(minibatch_means(calls, lambda x: 0.5 * x**2))]
    assert len(kls) == 4 and kls[0] < max(kls[:3])
    highest = max(range(4), key=kls.__getitem__)
    first_above = next(i for i, kl in enumerate(kls) if kl > kls[0])
    for target, passes in (
        (kls[highest] / 1.5 * 1.001, 4),
        (kls[0] / 1.5 * 0.999, 1),
        (kls[0] / 1.5 * 1.001, first_above + 1),
    ):
        calls.clear()
        run_ppo(ragged, target_kl=target, **options)
        assert len(calls) == 2 * passes
    calls.clear()
    run_ppo(ragged, **(options | dict(target_kl=1e-9, total_episodes=48)))
    assert len(calls) == 3 * 2  # Every update is judged anew.


@VALUE_MODELS
def test_ppo_17_ratio_threshold_skips_the_steps_of_minibatches_whose_mean_ratio_is_above(
    ragged, in_tmp, monkeypatch, value_model
):
    calls = record(monkeypatch, PAGES["train_ppo"], "ppo_policy_loss")["ppo_policy_loss"]
    steps = optimiser_steps(monkeypatch, lambda groups: 1)
    options = dict(num_ppo_epochs=3, num_mini_batches=2, value_model=value_model, learning_rate=3e-3)
    rows = run_ppo(ragged, ratio_threshold=1.0 + 1e-4, **options)
    above = [ratio > 1.0 + 1e-4 for ratio in minibatch_means(calls, torch.exp)]
    assert len(above) == 18
    assert [row["policy/skipped_minibatches"] for row in rows] == [sum(above[i : i + 6]) for i in (0, 6, 12)]
    assert len(steps) == 18 - sum(above) and 0 < sum(above) < 15
    plain = without_times(run_ppo(ragged, **options))
    assert without_times(run_ppo(ragged, ratio_threshold=100.0, **options)) == plain
