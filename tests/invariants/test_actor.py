"""train_ppo_async.py: the order of events, whose weights sample, and whose log-probs the ratio is taken against."""

import threading

import pytest
import torch
from accelerate import Accelerator, DistributedType
from cases import run_case
from helpers import PAGES, page_args, read_metrics, without_times
from transformers import AutoModelForCausalLM

from rlhf_details import utils
from rlhf_details.plumbing import engines

PAGE = PAGES["train_ppo_async"]
UPDATES = 5


def run(models, **changes):
    return run_case("async", models, **(dict(total_episodes=16 * UPDATES) | changes))


def copy_of(model):
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def equal(a, b):
    return all(torch.equal(x, b[name]) for name, x in a.items())


class Trace:
    """A run of UPDATES updates, in which each training waits until the next rollout has begun, so that they overlap.

    events: (thread, what, update) with what one of push, take, sample, train; pushed, sampled: {update: weights}.
    """

    def __init__(self, models, monkeypatch):
        self.events, self.pushed, self.sampled, lock = [], {}, {}, threading.Lock()
        begun = {update: threading.Event() for update in range(1, UPDATES + 2)}
        trained = {update: threading.Event() for update in range(UPDATES + 1)}
        trained[0].set()
        learner, step, sample = threading.get_ident(), torch.optim.AdamW.step, utils.sample
        push, take = PAGE.Actor.push, PAGE.Actor.take

        def note(what):
            with lock:
                update = 1 + sum(event[1] == what for event in self.events)
                self.events.append(("learner" if threading.get_ident() == learner else "actor", what, update))
                return update

        def noted_push(actor, model, update):
            note("push")
            self.pushed[update] = copy_of(model)
            push(actor, model, update)

        def noted_sample(policy, *rest, **kwargs):
            update = note("sample")
            begun[update].set()
            # The actor dawdles until the training that it overlaps has ended; its weights must not have changed.
            assert trained[max(0, update - 1)].wait(60)
            self.sampled[update] = copy_of(policy.model)
            return sample(policy, *rest, **kwargs)

        def noted_step(optimizer, *rest, **kwargs):
            update = note("train")
            assert update == UPDATES or begun[update + 1].wait(60)
            result = step(optimizer, *rest, **kwargs)
            trained[update].set()
            return result

        monkeypatch.setattr(PAGE.Actor, "push", noted_push)
        monkeypatch.setattr(PAGE.Actor, "take", lambda actor: (take(actor), note("take"))[0])
        monkeypatch.setattr(utils, "sample", noted_sample)
        monkeypatch.setattr(torch.optim.AdamW, "step", noted_step)
        self.rows = run(models, learning_rate=1e-2)


def test_gen_10_the_actor_samples_by_the_weights_from_before_the_training_that_it_overlaps(ragged, in_tmp, monkeypatch):
    trace = Trace(ragged, monkeypatch)
    assert [row["update"] for row in trace.rows] == list(range(1, UPDATES + 1))
    expected = [("push", 1)]
    for update in range(1, UPDATES + 1):
        expected += [("take", update), *([("push", update + 1)] if update < UPDATES else []), ("train", update)]
    assert [(what, update) for thread, what, update in trace.events if thread == "learner"] == expected
    actor = [(what, update) for thread, what, update in trace.events if thread == "actor"]
    assert actor == [("sample", update) for update in range(1, UPDATES + 1)]
    # Batches 1 and 2 are by the first weights, batch 3 by those after one update, and so on.
    for update in range(1, UPDATES + 1):
        assert equal(trace.pushed[update], trace.sampled[update])
    assert equal(trace.pushed[1], trace.pushed[2])
    assert all(not equal(trace.pushed[update], trace.pushed[update + 1]) for update in range(2, UPDATES))


def test_gen_11_the_ratio_is_against_the_policy_that_sampled(ragged, in_tmp, monkeypatch):
    """Old log-probs are those of the weights that were pushed, by plain transformers on single rows."""
    pushed, taken, old = [], [], []
    push, take, loss = PAGE.Actor.push, PAGE.Actor.take, PAGE.ppo_policy_loss
    monkeypatch.setattr(
        PAGE.Actor, "push", lambda self, model, u: pushed.append(copy_of(model)) or push(self, model, u)
    )
    monkeypatch.setattr(PAGE.Actor, "take", lambda self: taken.append(take(self)) or taken[-1])
    monkeypatch.setattr(
        PAGE, "ppo_policy_loss", lambda new, before, *x: old.append((before, x[0])) or loss(new, before, *x)
    )
    queries = []
    left_pad = utils.left_pad
    monkeypatch.setattr(utils, "left_pad", lambda rows, *x: queries.append(rows) or left_pad(rows, *x))
    monkeypatch.setattr(utils, "permutation", lambda n, *coordinates: list(range(n)))
    rows = run(ragged, total_episodes=64, learning_rate=1e-2)
    assert rows[0]["val/ratio"] == pytest.approx(1, abs=1e-5) and rows[0]["val/ratio_var"] < 1e-9
    assert all(row["val/ratio_var"] > 1e-6 and row["val/logprob_gap"] < 1e-4 for row in rows[1:])
    assert abs(rows[1]["objective/kl"]) < 1e-4 < 1e-2 < abs(rows[3]["objective/kl"])
    model = AutoModelForCausalLM.from_pretrained(ragged / "policy").eval()
    prompts = [row for update in range(4) for row in distinct(queries)[update]]
    for update, (before, mask) in enumerate(old):
        model.load_state_dict(pushed[update])
        responses = taken[update][0]
        for row in range(0, 16, 5):
            query, response = torch.tensor(prompts[update * 16 + row]), responses[row][mask[row]]
            with torch.no_grad():
                logits = model(torch.cat([query, response]).unsqueeze(0)).logits[0, len(query) - 1 : -1]
            alone = logits.log_softmax(-1)[torch.arange(len(response)), response]
            assert (before[row][: len(response)] - alone).abs().max() < 1e-4


def distinct(batches):
    """The batches without repetitions, in order: actor and learner both pad those of an update."""
    return [batch for i, batch in enumerate(batches) if batch not in batches[:i]]


def test_speed_changes_no_number(ragged, in_tmp, monkeypatch):
    """An actor that is slow now and then, against one that is not."""
    reference, sample, calls = run(ragged), utils.sample, []

    def slow(*args, **kwargs):
        calls.append(1)
        threading.Event().wait(0.2 * (len(calls) % 2))
        return sample(*args, **kwargs)

    monkeypatch.setattr(utils, "sample", slow)
    assert without_times(run(ragged)) == without_times(reference)
    assert len({row["objective/kl"] for row in reference}) >= UPDATES - 1


def test_what_fails_in_the_thread_ends_the_run(ragged, in_tmp, monkeypatch):
    sample = utils.sample

    def broken(*args, **kwargs):
        if kwargs["key"][2] == 3:
            raise ArithmeticError("sampler of update 3")
        return sample(*args, **kwargs)

    monkeypatch.setattr(utils, "sample", broken)
    with pytest.raises(ArithmeticError, match="sampler of update 3"):
        run(ragged)
    assert len(read_metrics("runs/run")) == 2


def test_sharded_weights_are_refused(ragged, in_tmp, monkeypatch, capsys):
    """There is no FSDP plugin here, so `configure` has nothing to look at."""
    monkeypatch.setattr(engines, "configure", lambda accelerator, args: None)
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType.FSDP))
    monkeypatch.setattr(Accelerator, "is_fsdp2", property(lambda self: True))
    with pytest.raises(SystemExit) as error:
        PAGE.main(page_args("train_ppo_async", ragged))
    message = "error: train_ppo_async.py: runs on one process or under DDP, not under FSDP2"
    assert error.value.code == 2 and message in capsys.readouterr().err
    assert not list(in_tmp.iterdir())
