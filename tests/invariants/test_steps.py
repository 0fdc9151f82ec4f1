"""What holds at every update: where ratio and KL start, which steps are taken, and how."""

import contextlib
import math

import pytest
import torch
from accelerate import Accelerator
from cases import (
    CASES,
    EVERY_CASE,
    IN_STEP,
    LOSS,
    optimiser_steps,
    page_of,
    run_case,
    shifted_sampler,
    steps_of,
)
from helpers import record, run_rloo

from rlhf_details import utils
from rlhf_details.plumbing.machine import vllm

STEPS = dict(num_ppo_epochs=2, num_mini_batches=2)


# ---- ratio and KL ----------------------------------------------------------------------------------------------------
@IN_STEP
def test_gen_9_old_log_probs_come_from_the_training_forward(ragged, in_tmp, case):
    """A sampler that is off by 0.1 shows in val/logprob_gap alone, neither in the first ratio nor in the KL. [LOG-6]"""
    with shifted_sampler():
        rows = run_case(case, ragged, learning_rate=1e-2, **STEPS)
    assert abs(rows[0]["objective/kl"]) < 1e-4
    for row in rows:
        assert row["val/logprob_gap"] == pytest.approx(0.1, abs=1e-3) and row["val/first_ratio"] - 1 < 1e-4
        assert abs(row["val/ratio"] - 1) > 1e-4


def test_rloo_7_with_one_step_the_ratio_is_exactly_one_whatever_the_sampler_says(ragged, in_tmp):
    with shifted_sampler():
        for row in run_rloo(ragged, learning_rate=1e-2):
            assert row["val/ratio"] == row["val/first_ratio"] == 1 and row["val/ratio_var"] == 0
            assert row["policy/clipfrac_avg"] == row["policy/approxkl_avg"] == 0


# ---- when another engine samples -------------------------------------------------------------------------------------
@pytest.mark.parametrize("case, options", [*((case, {}) for case in IN_STEP.args[1]), ("grpo", dict(objective="gspo"))])
def test_gen_15_an_action_counts_as_if_this_policy_had_sampled_it(ragged, in_tmp, monkeypatch, case, options):
    """A sampler that finds each token e^0.1 likelier than the policy does: its actions count e^-0.1 a token."""
    page, loss = page_of(case), "gspo_policy_loss" if options else LOSS[CASES[case][0]]
    monkeypatch.setattr(vllm, "sampler", lambda *args: utils.sample)
    seen = []
    for sampler in ("own", "vllm"):
        with pytest.MonkeyPatch.context() as patch, shifted_sampler():
            calls = record(patch, page, loss)[loss]
            rows = run_case(case, ragged, sampler=sampler, learning_rate=0.0, **STEPS, **options)
        seen.append(calls[0][0][2:4])  # mask and advantages of the first minibatch
    (mask, before), (_, after) = seen
    if before.dim() == 1 or options:  # An action is a response.
        weights = (-0.1 * mask.sum(1)).exp().reshape(before.shape)
    else:
        before, after, weights = before * mask, after * mask, math.exp(-0.1)
    assert before.abs().max() > 0.1
    torch.testing.assert_close(after, before * weights, atol=1e-4, rtol=1e-3)
    assert all(row["val/sampler_cut"] == 0 and 0.3 < row["val/sampler_weight"] < 0.91 for row in rows)


def test_jsd_says_that_another_policys_responses_are_not_corrected(ragged, in_tmp, capsys):
    rows = run_case("distill-jsd", ragged, overlap=True)
    assert "--divergence jsd: not corrected" in capsys.readouterr().out
    assert not any("val/sampler_weight" in row for row in rows)
    run_case("distill-overlap", ragged)
    assert "not corrected" not in capsys.readouterr().out


# ---- how many steps --------------------------------------------------------------------------------------------------
@EVERY_CASE
def test_opt_10_updates_are_rounded_up_and_each_takes_the_steps_that_the_flags_say(ragged, in_tmp, monkeypatch, case):
    """Faults 1, 42 and 43: the prompts come round again in the middle of an update."""
    steps = optimiser_steps(monkeypatch, lambda groups: 1)
    k = 4 if case.startswith(("grpo", "rloo")) else CASES[case][1].get("responses_per_prompt", 1)
    options = dict(take=24 // k, total_episodes=33, num_ppo_epochs=3, num_mini_batches=2)
    rows = run_case(case, ragged, response_length=3, **options)
    assert len(steps) == 3 * steps_of(case, 3 * 2)
    assert [row["episode"] for row in rows] == [16, 32, 48]
    assert [row["epoch"] for row in rows] == pytest.approx([2 / 3, 4 / 3, 2])


# ---- the optimiser ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["rloo", "ppo", "grpo-overlap", "distill-jsd"])
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
    assert backward == [True, True, True, False] * 2 * steps_of(case, 2)  # two updates of passes of four micro-batches
