"""Runs of train_agent.py: without an environment's word they are RLOO's, and no knob, process or kill changes them."""

import functools
import json
import math
import re
from pathlib import Path

import helpers
import pytest
import torch
from helpers import (
    ROOT,
    assert_same_curves,
    launch,
    page_args,
    read_metrics,
    record,
    run_page,
    run_rloo,
    without_times,
)
from short_runs import write_rows

from rlhf_details import toy, train_agent, utils

CHATTY = helpers.CHATTY | dict(learning_rate=3e-3)
NEAR = 1e-5  # of a KL that is 0 but for rounding, summed over the turns
LENGTH = """
def length(prompts, completions):
    return [0.3 * len(text.split()) for text in completions]
def turns(prompts, completions, turns):
    return [len(said) for said in turns]
"""


@pytest.fixture(autouse=True)
def rewards(in_tmp):
    Path("mine.py").write_text(LENGTH)


def words_of(args):
    """Arguments as words of a command line."""
    given = {name: value for name, value in vars(args).items() if value is not None and value != ()}
    return [word for name, value in given.items() for word in as_words(name, value)]


def as_words(name, value):
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple | list) else [str(value)])]


@pytest.fixture(scope="module")
def finished():
    return {}


@pytest.fixture
def chatty(ragged, in_tmp, finished):
    """Rows of metrics of a run in which episodes have one to four turns."""
    if not finished:
        finished["rows"] = run_page("train_agent", ragged, **CHATTY, reward_fn=("mine.py:turns", "mine.py:length"))
    return finished["rows"]


def again(ragged, **changes):
    flags = CHATTY | dict(reward_fn=("mine.py:turns", "mine.py:length"), run_name="again", output_dir="again") | changes
    return run_page("train_agent", ragged, **flags)


def test_an_environment_that_says_nothing_gives_the_numbers_of_rloo(ragged, in_tmp):
    """So the lines that both have do the same. [REW-3] [REW-5] [RLOO-1] [RLOO-2] [RLOO-7] [LOG-1] [LOG-5]"""
    flags = dict(dataset="toy", reward_model_path=None, reward_fn=("mine.py:length",), learning_rate=3e-3)
    found, sampled = [], []
    for run, more in ((functools.partial(run_page, "train_agent"), {}), (run_rloo, dict(share_prompts=False))):
        with pytest.MonkeyPatch.context() as patch:
            calls = record(patch, utils, "sample")["sample"]
            found.append(
                run(ragged, **flags, **more, run_name=run.__class__.__name__, output_dir=run.__class__.__name__)
            )
        sampled.append([result[:2] for _, result in calls])
    (ours, theirs), tokens = found, zip(*sampled, strict=True)
    assert all(torch.equal(x, y) for pair in tokens for x, y in zip(*pair, strict=True))
    assert all(row["val/turns"] == 1 and row["val/observation_tokens"] == 0 for row in ours)
    shared = ours[-1].keys() & theirs[-1].keys()
    assert {"objective/kl", "policy/grad_norm", "loss/policy_avg", "objective/entropy"} <= shared
    ours, theirs = ([{name: row[name] for name in shared} for row in rows] for rows in (ours, theirs))
    first, wanted = (rows[0] | {"policy/grad_norm": 0} for rows in (ours, theirs))
    assert without_times([first]) == without_times([wanted])  # bit for bit
    # RLOO shuffles its minibatch, so the sums of a gradient have another order.
    assert_same_curves(ours, theirs, tolerance=1e-6, near=1e-7)


@pytest.mark.parametrize(
    "knobs",
    [
        dict(micro_batch_size=3, rollout_micro_batch_size=5),
        dict(micro_batch_size=1, rollout_micro_batch_size=16, gradient_checkpointing=True),
        dict(attn_implementation="eager"),
        dict(env_fn=f"{ROOT}/tests/environments.py:late"),
    ],
)
def test_memory_knobs_and_async_environments_change_nothing(ragged, chatty, knobs):
    assert 1.5 < chatty[0]["val/turns"] < 3 and chatty[0]["val/observation_tokens"] > 0.5
    assert 0 < chatty[0]["val/ran_out"] < 1  # Some turns never end.
    assert_same_curves(chatty, again(ragged, **knobs), near=NEAR)


def test_the_same_run_again_is_bitwise_equal(ragged, chatty):
    assert without_times(again(ragged, num_sample_generations=2)) == without_times(chatty)
    samples = map(json.loads, Path("runs/again/samples.jsonl").read_text().splitlines())
    assert any("\u27e8the soup\u27e9" in sample["response"] for sample in samples)


@pytest.mark.parametrize("by", ["the environment", "the reward"])
def test_a_run_that_the_users_code_ended_goes_on_as_if_nothing_had_been(ragged, in_tmp, chatty, capsys, by):
    code = (
        f"import sys\nfrom pathlib import Path\nsys.path.append({str(ROOT / 'tests')!r})\nimport environments\n{LENGTH}"
    )
    code += """
def env(prompts, completions):
    if Path("fail").exists() and max(map(len, completions)) == 2:
        1 / 0
    return environments.chatty(prompts, completions)
def late(prompts, completions):
    if Path("fail too").exists():
        1 / 0
    return length(prompts, completions)
"""
    Path("mine.py").write_text(code)
    flags = dict(env_fn="mine.py:env", reward_fn=("mine.py:turns", "mine.py:late"), checkpoint_every=1)
    args = page_args("train_agent", ragged, **(CHATTY | flags | dict(run_name="killed", output_dir="killed")))
    calls = []

    def stop_later(update):
        calls.append(update)
        if len(calls) == 2:
            Path("fail" if by == "the environment" else "fail too").touch()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        real = utils.learning_rate_at
        patch.setattr(utils, "learning_rate_at", lambda *given: stop_later(given[0]) or real(*given))
        train_agent.main(args)
    said = capsys.readouterr().err
    what = "--env_fn env" if by == "the environment" else "--reward_fn late"
    assert end.value.code == 1 and f"error: {what} raised ZeroDivisionError" in said and "1 / 0" in said
    assert len(read_metrics("runs/killed")) == 1
    for name in ("fail", "fail too"):
        Path(name).unlink(missing_ok=True)
    args.resume, args.overwrite = True, False
    train_agent.main(args)
    rows = [
        {name.replace("/late", "/length"): x for name, x in row.items()}
        for row in without_times(read_metrics("runs/killed"))
    ]
    assert rows == without_times(chatty)


def test_two_processes_whose_episodes_end_at_different_turns_train_as_one(ragged, in_tmp):
    """Each has a prompt of its own: one's environment never speaks, the other's does three times."""
    prompts = [
        {"prompt": "yesterday we went", "said": []},
        {"prompt": "on monday", "said": [" the soup", " was", " ."]},
    ]
    data, env = write_rows("rows.jsonl", prompts), f"{ROOT}/tests/environments.py:by_row"
    flags = CHATTY | dict(dataset=data, env_fn=env, batch_size=8, total_episodes=32, reward_fn=("mine.py:turns",))
    flags |= dict(eval_dataset=data, reward_model_path=None)
    one = run_page("train_agent", ragged, **flags, run_name="one", output_dir="one")
    args = page_args("train_agent", ragged, **flags, run_name="two", output_dir="two")
    done = launch("train_agent.py", words_of(args), processes=2, cwd=in_tmp)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(Path("runs/two/config.json").read_text())["num_processes"] == 2
    assert_same_curves(one, read_metrics("runs/two"), near=NEAR)
    assert max(row["val/turns"] for row in one if row["update"]) > 1


def test_lora_trains_adapters_over_several_turns(ragged, in_tmp):
    pytest.importorskip("peft")
    rows = run_page("train_agent", ragged, **CHATTY | dict(lora_rank=2, learning_rate=1e-2))
    assert abs(rows[0]["objective/kl"]) < 1e-5 and abs(rows[-1]["objective/kl"]) > 1e-3
    assert Path("models/agent/adapter").is_dir()


# ---- the equations, by another way -----------------------------------------------------------------------------------
def test_agt_1_and_2_loss_kl_and_entropy_are_of_the_policys_own_tokens(ragged, in_tmp, monkeypatch):
    """Each is computed anew, row by row, from plain forwards of what was sampled."""
    names = "rollout", "rloo_policy_loss", "load_models"
    calls = record(monkeypatch, train_agent, *names)
    row, *_ = run_page("train_agent", ragged, **CHATTY, reward_fn=("mine.py:turns",), total_episodes=16, kl_coef=0.7)
    (args, (found, said)), *_ = calls["rollout"]
    own, real = found.action_mask, found.response_mask
    assert (real & ~own).any() and all(x[0] == "".join(x[:1]) for x in said)
    (given, _), *_ = calls["rloo_policy_loss"]
    assert torch.equal(given[1], own)  # One micro-batch has all rows.
    _, _, reference = calls["load_models"][0][1]
    kl, entropy, count = [], 0.0, 0
    for prompt, ids, mask, is_own in zip(args[3], found.responses, real, own, strict=True):
        tokens = torch.tensor([prompt.ids + ids[mask].tolist()])
        with torch.no_grad():
            table = reference.model(tokens).logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)
        chosen = table.gather(1, tokens[0, len(prompt.ids) :, None])[:, 0]
        # Before the first step policy and reference are the same.
        kl.append(float((found.logprobs[len(kl)][mask] - chosen)[is_own[mask]].sum()))
        entropy -= float((table.exp() * table).sum(1)[is_own[mask]].sum())
        count += int(is_own.sum())
    assert max(map(abs, kl)) < 1e-4 and row["objective/kl"] == pytest.approx(sum(kl) / 16, abs=1e-5)
    assert row["policy/entropy_avg"] == pytest.approx(entropy / count, rel=1e-4)
    assert row["val/sequence_lengths"] == count / 16
    assert row["objective/entropy"] == pytest.approx(-float(found.logprobs.sum()) / 16, rel=1e-5)
    # A gap of the sampler's log-probs at an observation, where it has none, would show here.
    assert row["val/logprob_gap"] < 1e-4


def test_agt_2_the_kl_leaves_observations_out(ragged, in_tmp, monkeypatch):
    """A reference that finds every token of an observation unlikely: with the policy's own it agrees."""
    real = train_agent.response_logprobs
    found = record(monkeypatch, train_agent, "rollout")["rollout"]

    def shifted(module, batch):
        logprobs, entropies = real(module, batch)
        return (logprobs if module.training else logprobs - 5.0 * batch.response_mask), entropies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_agent, "response_logprobs", shifted)
        row, *_ = run_page("train_agent", ragged, **CHATTY, reward_fn=("mine.py:turns",), total_episodes=16)
    own = found[0][1][0].action_mask.sum()
    assert row["objective/kl"] == pytest.approx(5.0 * float(own) / 16, rel=1e-4)


def test_agt_3_the_end_of_a_turn_has_a_gradient(ragged, in_tmp, monkeypatch):
    calls = record(monkeypatch, train_agent, "rloo_policy_loss", "rollout")
    run_page("train_agent", ragged, **CHATTY, reward_fn=("mine.py:turns",), total_episodes=16)
    mask, found = calls["rloo_policy_loss"][0][0][1], calls["rollout"][0][1][0]
    ends = (found.responses == toy.tokenizer().eos_token_id) & found.response_mask
    assert ends.sum() > 16 and mask[ends].all()


def test_functions_are_given_turns_and_no_observation_as_an_answer(ragged, in_tmp, monkeypatch):
    Path("mine.py").write_text("""
import json
def f(prompts, completions, turns):
    json.dump([completions, turns], open("seen.json", "w"))
    return [0.0] * len(turns)
""")
    calls = record(monkeypatch, train_agent, "rollout")["rollout"]
    run_page("train_agent", ragged, **CHATTY, reward_fn=("mine.py:f",), total_episodes=16)
    said = calls[0][1][1]
    assert json.loads(Path("seen.json").read_text()) == [[x[-1] for x in said], [x[::2] for x in said]]
    assert max(map(len, said)) > 2
    Path("theirs.py").write_text("""
def f(prompts, completions):
    roles = [[m["role"] for m in messages] for messages in completions]
    assert all(r == (["assistant", "tool"] * 4)[: len(r)] and len(r) % 2 for r in roles) and max(map(len, roles)) > 2
    assert {m["content"] for messages in completions for m in messages if m["role"] == "tool"} <= {" the soup", " was"}
    return [0.0] * len(completions)
""")
    flags = dict(reward_fn=("theirs.py:f",), reward_fn_format="messages", env_role="tool", run_name="theirs")
    run_page("train_agent", ragged, **CHATTY, **flags, output_dir="theirs", total_episodes=16)


def test_agt_5_the_baseline_is_that_of_all_trajectories_of_the_prompt(ragged, in_tmp, monkeypatch):
    calls = record(monkeypatch, train_agent, "rloo_advantages")["rloo_advantages"]
    losses = record(monkeypatch, train_agent, "rloo_policy_loss")["rloo_policy_loss"]
    run_page("train_agent", ragged, **CHATTY, reward_fn=("mine.py:length",), total_episodes=16)
    (rewards, k, scored), _ = calls[0]
    groups = rewards.reshape(-1, k)
    expected = groups - (groups.sum(1, keepdim=True) - groups) / (k - 1)
    assert len(calls) == 1 and scored.all()
    torch.testing.assert_close(losses[0][0][2], expected.reshape(-1))


def test_a_reward_model_reads_the_whole_trajectory(ragged, in_tmp, capsys):
    """With a word for word tokenizer the text of plain prompts is that of the ids, but for the ends of turns."""
    row, *_ = run_page("train_agent", ragged, **CHATTY, total_episodes=16)
    assert "the reward model reads whole trajectories" in capsys.readouterr().out
    assert math.isfinite(row["objective/scores"])


# ---- what users get wrong --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(env_fn=None), "--env_fn or --tools: one of them is required, and not both, with --dataset toy"),
        (dict(env_fn="mine.py:nothing"), "--env_fn mine.py:nothing: mine.py has no function 'nothing'"),
        (dict(max_turns=0), "--max_turns 0: must be at least 1"),
        (dict(max_observation_tokens=0), "--max_observation_tokens 0: must be at least 1"),
        (dict(overlap=True), "--overlap"),
        (dict(stop_token="none"), "--stop_token none"),
        (dict(rloo_k=1), "--rloo_k 1"),
        (dict(response_length=128), "--response_length 128: leaves no room for a prompt"),
        (dict(env_fn="mine.py:wants"), "--env_fn wants: missing a required argument: 'table'"),
    ],
)
def test_what_cannot_be_is_one_line(ragged, in_tmp, fails, changes, words):
    Path("mine.py").write_text("def wants(prompts, completions, table): pass\n")
    line = fails(train_agent.main, page_args("train_agent", ragged, **changes))
    assert words in line and not Path("models").exists()


@pytest.mark.parametrize(
    "body, words",
    [
        ("raise KeyError('no such box')", "--env_fn env raised KeyError"),
        ("return [None]", "--env_fn env returned 1 entries for "),
        ("return [3] * len(prompts)", "--env_fn env returned 3, which is neither a text, nor messages"),
        ("return None", "--env_fn env raised TypeError"),
        ("exit(3)", "--env_fn env called exit(3)"),
        ("import os; os.chdir('/'); return [None] * len(prompts)", ""),
    ],
)
def test_an_environment_that_fails_ends_the_run_with_its_own_words(ragged, in_tmp, capsys, body, words):
    Path("mine.py").write_text(f"def env(prompts, completions):\n    {body}\n")
    args = page_args("train_agent", ragged, **CHATTY | dict(env_fn="mine.py:env", total_episodes=16))
    if not words:
        return train_agent.main(args)
    with pytest.raises(SystemExit) as end:
        train_agent.main(args)
    said = capsys.readouterr().err
    assert end.value.code == 1 and said.startswith("error: --env_fn env") and words in said, said
    return None


def test_an_environment_that_hangs_is_named(ragged, in_tmp, capsys, monkeypatch):
    monkeypatch.setattr("rlhf_details.plumbing.inputs.user_code.PATIENCE", 0.2)
    Path("mine.py").write_text(
        "import time\ndef env(prompts, completions):\n    time.sleep(1)\n    return [None] * len(prompts)\n"
    )
    train_agent.main(page_args("train_agent", ragged, **CHATTY | dict(env_fn="mine.py:env", total_episodes=16)))
    assert re.search(r"still waiting for --env_fn env, after 0.2 s", capsys.readouterr().out)


def test_observations_longer_than_the_context_end_their_episodes(ragged, in_tmp):
    Path("mine.py").write_text("def env(prompts, completions):\n    return [' the soup' * 500] * len(prompts)\n")
    row, *_ = run_page("train_agent", ragged, **CHATTY | dict(env_fn="mine.py:env", total_episodes=16))
    assert row["val/ran_out"] == row["health/ran_out"] == 1 and row["val/turns"] == 1
