"""--overlap: whose weights sample, beside which training, and that the thread's speed and errors reach the run."""

import threading

import pytest
import torch
from cases import OVERLAP, page_of, run_case, write_prompts
from helpers import read_metrics, record

from rlhf_details import utils
from rlhf_details.plumbing.machine import vllm

UPDATES = 5
EVERY_CASE = pytest.mark.parametrize("case", OVERLAP)


def run(case, models, **changes):
    return run_case(case, models, **(dict(total_episodes=16 * UPDATES) | changes))


def weights_of(policy):
    return {name: x.detach().clone() for name, x in getattr(policy, "module", policy).model.state_dict().items()}


@EVERY_CASE
def test_gen_10_responses_are_those_of_the_weights_before_the_update_before(ragged, in_tmp, monkeypatch, case):
    """Exactly. Each training waits until the next rollout has begun, and that rollout until the training has ended."""
    sample, step, page = utils.sample, torch.optim.AdamW.step, page_of(case)
    calls, steps, weights = [], [], []  # weights: the first ones, and those after each update
    begun, trained = ([threading.Event() for _ in range(UPDATES + 1)] for _ in range(2))
    made = record(monkeypatch, page, "load_models")["load_models"]

    def noted_sample(policy, *batch, **how):
        update = how["key"][2]
        begun[update - 1].set()
        assert update == 1 or trained[update - 1].wait(60)
        found = sample(policy, *batch, **how)
        calls.append((batch, how, found, threading.current_thread() is threading.main_thread()))
        return found

    def noted_step(optimizer, *rest, **kwargs):
        policy = made[0][1][1]
        weights.append(weights_of(policy)) if not steps else None
        steps.append(1)
        assert len(steps) == UPDATES or begun[len(steps)].wait(60)
        result = step(optimizer, *rest, **kwargs)
        weights.append(weights_of(policy))
        trained[len(steps)].set()
        return result

    monkeypatch.setattr(utils, "sample", noted_sample)
    monkeypatch.setattr(torch.optim.AdamW, "step", noted_step)
    rows = run(case, ragged, learning_rate=1e-2)
    assert [row["update"] for row in rows] == [how["key"][2] for _, how, *_ in calls] == list(range(1, UPDATES + 1))
    assert [is_main for *_, is_main in calls] == [True] + [False] * (UPDATES - 1)
    assert not any(row.get("health/first_ratio") for row in rows)  # That the policy has moved on is no fault.
    policy = made[0][1][1].eval()
    for i, (batch, how, found, _) in enumerate(calls):
        policy.model.load_state_dict(weights[max(0, i - 1)])
        assert all(torch.equal(x, y) for x, y in zip(sample(policy, *batch, **how), found, strict=True))
        if i > 1:
            policy.model.load_state_dict(weights[i])
            assert not torch.equal(sample(policy, *batch, **how)[2], found[2])


def test_the_held_out_evaluation_samples_by_the_newest_weights_when_the_thread_has_ended(ragged, in_tmp, monkeypatch):
    sample, busy = utils.sample, []

    def noted(*args, **how):
        assert not busy
        busy.append(1)
        threading.Event().wait(0.05)
        found = sample(*args, **how)
        busy.pop()
        return found

    monkeypatch.setattr(utils, "sample", noted)
    rows = run(
        "rloo-overlap", ragged, learning_rate=1e-2, eval_every=1, eval_dataset=write_prompts("held_out.jsonl", 8)
    )
    kl = [row["eval/objective/kl"] for row in rows]
    assert abs(kl[0]) < 1e-5 < 1e-3 < abs(kl[1]) and len(set(kl)) == UPDATES + 1


@pytest.mark.parametrize("how", ["raises", "stops"])
def test_what_fails_in_the_thread_ends_the_run(ragged, in_tmp, monkeypatch, capsys, how):
    """An error keeps its type, and what ends the run with a line, as vLLM's check of its weights, does so."""

    def sampler(args, accelerator, rows, stop):
        def broken(*rest, **how_):
            if how_["key"][2] == 3:
                stop("update 3") if how == "stops" else None
                raise ArithmeticError("update 3")
            return utils.sample(*rest, **how_)

        return broken

    monkeypatch.setattr(vllm, "sampler", sampler)
    with pytest.raises(ArithmeticError if how == "raises" else SystemExit):
        run("rloo-overlap", ragged)
    assert len(read_metrics("runs/run")) == 2 and (how == "raises" or "error: update 3" in capsys.readouterr().err)


@pytest.mark.parametrize(
    "case, flags", [("rloo-overlap", dict(lora_rank=4)), ("ppo-overlap", dict(value_model="shared"))]
)
def test_the_copy_is_that_of_the_policy_with_its_adapters_or_without_its_critic(ragged, in_tmp, case, flags):
    rows = run(case, ragged, learning_rate=1e-2, **flags)
    assert abs(rows[1]["objective/kl"]) < 1e-4 < 1e-3 < abs(rows[3]["objective/kl"])
