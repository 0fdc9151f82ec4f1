"""The actor of the asynchronous pages: the order of events, whose weights sample, and what the ratio is against."""

import itertools
import threading

import pytest
import torch
from accelerate import Accelerator, DistributedType
from cases import ASYNC, CASES, page_of, run_case
from helpers import page_args, read_metrics, without_times

from rlhf_details import utils
from rlhf_details.plumbing import engines

UPDATES = 5
EVERY_PAGE = pytest.mark.parametrize("case", ASYNC)


def run(case, models, **changes):
    return run_case(case, models, **(dict(total_episodes=16 * UPDATES) | changes))


def copy_of(model):
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def equal(a, b):
    return all(torch.equal(x, b[name]) for name, x in a.items())


@EVERY_PAGE
def test_gen_10_the_actor_samples_by_the_weights_from_before_the_training_that_it_overlaps(
    ragged, in_tmp, monkeypatch, case
):
    """Each training waits until the next rollout has begun, and that rollout until the training has ended."""
    actor = page_of(case).Actor
    pushed, sampled, push, sample, step = [], [], actor.push, utils.sample, torch.optim.AdamW.step
    begun, trained = ([threading.Event() for _ in range(UPDATES + 1)] for _ in range(2))
    trained[0].set()
    steps = []

    def noted_push(self, model, update):
        pushed.append(copy_of(model))
        push(self, model, update)

    def noted_sample(policy, *rest, **kwargs):
        begun[len(sampled)].set()
        assert trained[len(sampled)].wait(60)
        sampled.append(copy_of(policy.model))
        return sample(policy, *rest, **kwargs)

    def noted_step(optimizer, *rest, **kwargs):
        steps.append(1)
        assert len(steps) == UPDATES or begun[len(steps)].wait(60)
        result = step(optimizer, *rest, **kwargs)
        trained[len(steps)].set()
        return result

    monkeypatch.setattr(actor, "push", noted_push)
    monkeypatch.setattr(utils, "sample", noted_sample)
    monkeypatch.setattr(torch.optim.AdamW, "step", noted_step)
    rows = run(case, ragged, learning_rate=1e-2)
    assert [row["update"] for row in rows] == list(range(1, UPDATES + 1)) and len(sampled) == UPDATES
    # Batches 1 and 2 are by the first weights, batch 3 by those after one update, and so on.
    assert all(equal(a, b) for a, b in zip(pushed, sampled, strict=True))
    assert equal(pushed[0], pushed[1])
    assert all(not equal(a, b) for a, b in itertools.pairwise(pushed[1:]))


@EVERY_PAGE
def test_gen_11_the_ratio_is_against_the_policy_that_sampled(ragged, in_tmp, case):
    """Old log-probs are the sampler's to rounding, while the policy has moved on since."""
    rows = run(case, ragged, total_episodes=64, learning_rate=1e-2)
    assert rows[0]["val/ratio"] == pytest.approx(1, abs=1e-5) and rows[0]["val/ratio_var"] < 1e-9
    assert all(row["val/ratio_var"] > 1e-6 for row in rows[1:]) and all(row["val/logprob_gap"] < 1e-4 for row in rows)
    assert abs(rows[1]["objective/kl"]) < 1e-4 < 1e-2 < abs(rows[3]["objective/kl"])


@EVERY_PAGE
def test_speed_changes_no_number(ragged, in_tmp, monkeypatch, case):
    """An actor that is slow now and then, against one that is not."""
    reference, sample, calls = run(case, ragged), utils.sample, []

    def slow(*args, **kwargs):
        calls.append(1)
        threading.Event().wait(0.2 * (len(calls) % 2))
        return sample(*args, **kwargs)

    monkeypatch.setattr(utils, "sample", slow)
    assert without_times(run(case, ragged)) == without_times(reference)
    assert len({row["objective/kl"] for row in reference}) >= UPDATES - 1


@EVERY_PAGE
def test_what_fails_in_the_thread_ends_the_run(ragged, in_tmp, monkeypatch, case):
    sample = utils.sample

    def broken(*args, **kwargs):
        if kwargs["key"][2] == 3:
            raise ArithmeticError("sampler of update 3")
        return sample(*args, **kwargs)

    monkeypatch.setattr(utils, "sample", broken)
    with pytest.raises(ArithmeticError, match="sampler of update 3"):
        run(case, ragged)
    assert len(read_metrics("runs/run")) == 2


@EVERY_PAGE
def test_sharded_weights_are_refused(ragged, in_tmp, monkeypatch, capsys, case):
    """There is no FSDP plugin here, so `configure` has nothing to look at."""
    monkeypatch.setattr(engines, "configure", lambda accelerator, args: None)
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType.FSDP))
    monkeypatch.setattr(Accelerator, "is_fsdp2", property(lambda self: True))
    with pytest.raises(SystemExit) as error:
        page_of(case).main(page_args(CASES[case][0], ragged))
    message = f"error: {CASES[case][0]}.py: runs on one process or under DDP, not under FSDP2"
    assert error.value.code == 2 and message in capsys.readouterr().err
    assert not list(in_tmp.iterdir())
