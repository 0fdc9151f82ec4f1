"""--async_rollouts of both training scripts: the order of events, whose weights and whose log-probs, determinism, processes."""

import json
import threading

import pytest
import torch
import worker
from conftest import ppo_args, read_metrics, rloo_args
from test_rloo import assert_same_curves, run_worker, sampled_tokens
from transformers import AutoModelForCausalLM

from rlhf_details import engines, train_ppo, train_rloo, utils

SCRIPTS = pytest.mark.parametrize("script, arguments", [(train_rloo, rloo_args), (train_ppo, ppo_args)], ids=["rloo", "ppo"])
UPDATES = 7


def run(script, arguments, tiny, **changes):
    args = arguments(tiny, **(dict(total_episodes=16 * UPDATES, learning_rate=1e-3) | changes))
    return read_metrics(script.main(args)["run"])


def fingerprint(module):
    """A number that tells weights apart."""
    return sum(p.detach().double().abs().sum().item() * (i + 1) for i, p in enumerate(module.parameters()))


@pytest.fixture
def trace(monkeypatch):
    """trace(script, **options): the events of a run, and the fingerprints of the weights W0, W1, ... after each update.

    Events: (thread, what, update, weights), what: push, take, sample, train.
    """

    def record(script, arguments, tiny, **options):
        events, weights, seen, lock = [], [], {}, threading.Lock()
        learner = threading.get_ident()

        def note(what, update, module=None):
            with lock:
                thread = "learner" if threading.get_ident() == learner else "actor"
                events.append((thread, what, update, fingerprint(module) if module else None))

        real_sample, real_actor, real_step = script.sample, script.Actor, torch.optim.AdamW.step

        def sample(policy, *rest):
            coordinates = next(x for x in rest if isinstance(x, tuple))
            if coordinates[1] == script.TRAINING:
                note("sample", coordinates[2], policy.model)
                if "started" in seen:
                    seen["started"][coordinates[2]].set()
            return real_sample(policy, *rest)

        class Actor(real_actor):
            def push(self, model, update):
                seen["started"] = seen.get("started") or {u: threading.Event() for u in range(1, UPDATES + 1)}
                note("push", update, model)
                super().push(model, update)

            def take(self):
                result = super().take()
                note("take", len([e for e in events if e[1] == "take"]) + 1)
                return result

        def step(optimizer, *rest, **kwargs):
            update = len(weights)
            if not weights:
                weights.append(None)
                update = 1
            if "started" in seen and update < UPDATES:  # training waits for the next rollout to have begun: they do overlap
                assert seen["started"][update + 1].wait(60)
            result = real_step(optimizer, *rest, **kwargs)
            note("train", update)
            weights.append(sum(p.detach().double().abs().sum().item() for g in optimizer.param_groups for p in g["params"]))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(script, "sample", sample), patch.setattr(script, "Actor", Actor)
            patch.setattr(torch.optim.AdamW, "step", step)
            rows = run(script, arguments, tiny, num_ppo_epochs=1, num_mini_batches=1, **options)
        return events, rows

    return record


@SCRIPTS
def test_gen_10_the_order_of_events_is_one_step_off_policy(tiny, in_tmp, trace, script, arguments):
    """Weights and prompts of u + 1 are handed over before training on u; batch 1 is fresh, the others stale by one update."""
    events, rows = trace(script, arguments, tiny, async_rollouts=True)
    assert [row["update"] for row in rows] == list(range(1, UPDATES + 1))
    learner = [(what, update) for thread, what, update, _ in events if thread == "learner"]
    expected = [("push", 1)]
    for u in range(1, UPDATES + 1):
        expected += [("take", u), *([("push", u + 1)] if u < UPDATES else []), ("train", u)]
    assert learner == expected
    actor = [(what, update) for thread, what, update, _ in events if thread == "actor"]
    assert actor == [("sample", u) for u in range(1, UPDATES + 1)]
    pushed = {update: print_ for _, what, update, print_ in events if what == "push"}
    sampled = {update: print_ for _, what, update, print_ in events if what == "sample"}
    assert pushed == sampled  # the snapshot that was handed over, though the learner has gone on meanwhile
    assert pushed[1] == pushed[2] and len(set(pushed.values())) == UPDATES - 1  # W0, W0, W1, ..., W5
    order = [(what, update) for _, what, update, _ in events]
    for u in range(2, UPDATES):
        assert order.index(("train", u - 1)) < order.index(("push", u + 1)) < order.index(("train", u))
        assert order.index(("sample", u)) < order.index(("train", u - 1))  # begun before the training it runs beside was done


@SCRIPTS
def test_without_it_everything_is_fresh_and_in_one_thread(tiny, in_tmp, trace, script, arguments):
    events, _ = trace(script, arguments, tiny)
    assert [(t, w, u) for t, w, u, _ in events] == [
        ("learner", what, u) for u in range(1, UPDATES + 1) for what in ("sample", "train")
    ]
    assert len({print_ for _, what, _, print_ in events if what == "sample"}) == UPDATES


@SCRIPTS
def test_gen_11_the_ratio_is_against_the_policy_that_sampled(tiny, in_tmp, monkeypatch, script, arguments):
    """Old log-probs are those of the weights two updates ago, by a model that is asked row by row; the ratios are not 1."""
    loss, old, models, state = f"{script.__name__.rpartition('_')[2]}_policy_loss", [], [], {}
    real_loss, real_push, real_take = getattr(script, loss), script.Actor.push, script.Actor.take

    def push(self, model, update):
        models.append({name: x.clone() for name, x in model.state_dict().items()})
        real_push(self, model, update)

    def take(self):
        state["batch"] = real_take(self)
        return state["batch"]

    def record(logprobs, old_logprobs, *rest):
        old.append((state["batch"], old_logprobs))
        return real_loss(logprobs, old_logprobs, *rest)

    monkeypatch.setattr(script, loss, record), monkeypatch.setattr(script, "by_length", lambda m, n=1: torch.arange(len(m[0])))
    monkeypatch.setattr(script.Actor, "push", push), monkeypatch.setattr(script.Actor, "take", take)
    monkeypatch.setattr(utils, "permutation", lambda n, *c: list(range(n)))
    options = dict(total_episodes=64, num_ppo_epochs=1, num_mini_batches=1, micro_batch_size=16)
    rows = run(script, arguments, tiny, async_rollouts=True, **options)
    assert rows[0]["val/ratio"] == pytest.approx(1, abs=1e-5) and rows[0]["val/ratio_var"] < 1e-9
    assert all(row["val/ratio_var"] > 1e-6 for row in rows[1:])
    assert all(row["val/logprob_gap"] < 1e-4 for row in rows)  # sampler and training forward of the actor's weights
    assert rows[1]["objective/kl"] == pytest.approx(0, abs=1e-4) and abs(rows[3]["objective/kl"]) > 1e-3
    model = AutoModelForCausalLM.from_pretrained(tiny / "policy").eval()
    assert len(old) == 4
    for u, (batch, old_logprobs) in enumerate(old, 1):
        model.load_state_dict(models[u - 1])  # what was pushed for update u
        _, queries, query_mask, responses, mask, *_ = batch
        for row in range(16):
            query, response = queries[row][query_mask[row]], responses[row][mask[row]]
            with torch.no_grad():
                logits = model(torch.cat([query, response]).unsqueeze(0)).logits[0, len(query) - 1 : -1]
            temperature = 1.0
            alone = (logits / temperature).log_softmax(-1)[torch.arange(len(response)), response]
            assert (old_logprobs[row][: len(response)] - alone).abs().max() < 1e-4


@SCRIPTS
def test_two_runs_are_bitwise_equal(tiny, in_tmp, script, arguments):
    def numbers():
        rows = run(script, arguments, tiny, async_rollouts=True, num_ppo_epochs=2, num_mini_batches=2)
        return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "eps"} for row in rows]

    first = numbers()
    assert first == numbers() and len({row["objective/kl"] for row in first}) > 4


@pytest.mark.slow
@SCRIPTS
def test_two_processes_give_the_curves_of_one(tiny, tmp_path, monkeypatch, script, arguments):
    args = arguments(
        tiny, total_episodes=80, async_rollouts=True, num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=4, learning_rate=3e-4
    )
    two, second = run_worker(tmp_path / "2", args, 2)  # asserts the world size and the kind of distribution
    monkeypatch.chdir(tmp_path)
    with worker.recording(script.__name__.rpartition(".")[2]) as first:
        one = read_metrics(script.main(args)["run"])
    assert sampled_tokens([first]) == sampled_tokens(second) and len(sampled_tokens([first])) == 80
    for rows in (one, two):
        assert all(row.pop("val/logprob_gap") < 1e-4 for row in rows)
    assert_same_curves(one, two)


@pytest.mark.slow
@SCRIPTS
def test_under_bf16_the_actor_computes_in_bf16_with_weights_of_its_own(tiny, tmp_path, script, arguments):
    """accelerate wraps the policy's forward for bf16; a copy of the wrapper would go on calling the learner's weights."""
    args = arguments(tiny, total_episodes=64, async_rollouts=True, num_ppo_epochs=4, learning_rate=1e-2)
    rows, (record,) = run_worker(tmp_path / "run", args, 1, ACCELERATE_MIXED_PRECISION="bf16")
    assert record["matmul_dtypes"] == {"torch.bfloat16"} and record["weight_dtypes"] == {"torch.float32"}
    assert abs(rows[1]["objective/kl"]) < 0.01  # batch 2 is W0's, as the reference is
    assert abs(rows[2]["objective/kl"]) > 0.1 and abs(rows[3]["objective/kl"]) > 0.1


@SCRIPTS
def test_what_fails_in_the_thread_ends_the_run(tiny, in_tmp, monkeypatch, script, arguments):
    real = script.sample

    def broken(policy, *rest):
        if (script.TRAINING, 3) in [x[1:] for x in rest if isinstance(x, tuple)]:
            raise ArithmeticError("sampler of update 3")
        return real(policy, *rest)

    monkeypatch.setattr(script, "sample", broken)
    with pytest.raises(ArithmeticError, match="sampler of update 3"):
        run(script, arguments, tiny, async_rollouts=True)
    assert len(read_metrics("runs/run")) == 2


@SCRIPTS
def test_sharded_weights_are_refused(tiny, in_tmp, monkeypatch, capsys, script, arguments):
    from accelerate import Accelerator, DistributedType

    monkeypatch.setattr(engines, "settle", lambda accelerator, args: None)  # there is no plugin to look at
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType.FSDP))
    monkeypatch.setattr(Accelerator, "is_fsdp2", property(lambda self: True))
    with pytest.raises(SystemExit) as error:
        run(script, arguments, tiny, async_rollouts=True)
    assert error.value.code == 2 and "--async_rollouts: for one process or DDP, not for FSDP2" in capsys.readouterr().err
    assert not list(in_tmp.iterdir())


def test_the_flag_reaches_the_run(tiny, in_tmp):
    run(train_rloo, rloo_args, tiny, async_rollouts=True, total_episodes=16)
    assert json.loads(open("runs/run/config.json").read())["args"]["async_rollouts"] is True
