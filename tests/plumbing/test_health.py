"""Each warning about a run is provoked, by numbers at its threshold and by a run that is ill."""

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import PAGES, page_args, read_metrics, rloo_args
from short_runs import write_rows

from rlhf_details import toy, train_ppo, train_rloo, utils
from rlhf_details.plumbing import health, models

HEALTHY = {
    "objective/kl": 5.0, "policy/clipfrac_avg": 0.1, "val/first_ratio": 1.00001, "val/logprob_gap": 1e-5,
    "val/num_stop_token_ids": 90, "val/equal_scores": 0.1, "policy/entropy_avg": 1.0, "val/sequence_lengths": 20.0,
    "same_ends": [0.2, 0.1],
}  # fmt: skip
FIRST = {"policy/entropy_avg": 2.0, "val/sequence_lengths": 20.0, "same_ends": [0.2, 0.1]}
THRESHOLDS = {  # metric: [(sign, fine, ill)]
    "objective/kl": [("kl", 9.9, 10.1)],
    "policy/clipfrac_avg": [("clipfrac", 0.29, 0.31)],
    "val/first_ratio": [("first_ratio", 1.009, 1.011)],
    "val/logprob_gap": [("first_ratio", 0.009, 0.011)],
    "val/num_stop_token_ids": [("truncated", 5, 4)],  # of 100
    "val/equal_scores": [("reward_variance", 0.5, 0.51)],
    "policy/entropy_avg": [("entropy", 0.41, 0.39)],
    "same_ends": [("narrow", [0.5, 0.5], [0.51, 0.1]), ("narrow", [0.2, 0.5], [0.2, 0.51])],
    "val/sequence_lengths": [("length", 39.9, 40.1), ("length", 10.1, 9.9)],
}
SIGNS = {"kl", "kl_zero", "clipfrac", "first_ratio", "truncated", "reward_variance", "entropy", "narrow", "length"}
PAGE = pytest.mark.parametrize("page", ["train_rloo", "train_ppo"])


def showing(metrics, args, precision="fp32", **first):
    """The signs that show in an update. first: what differs in the run's first one."""
    found = health.signs(HEALTHY | metrics, FIRST | first, args, precision)
    assert found.keys() == SIGNS
    return {name for name, (shows, _, _) in found.items() if shows}


@PAGE
def test_each_sign_has_its_threshold(page):
    args = PAGES[page].Args(batch_size=100)
    assert showing({}, args) == set()
    for metric, cases in THRESHOLDS.items():
        for sign, fine, ill in cases:
            assert showing({metric: fine}, args) == set() and showing({metric: ill}, args) == {sign}, metric


@pytest.mark.parametrize("length, bound", [(6, 8), (16, 8), (28, 14), (60, 25), (100, 25), (200, 50)])
def test_the_limit_of_the_kl_follows_the_length(length, bound):
    args, first = train_rloo.Args(batch_size=16), {"val/sequence_lengths": length}
    assert showing({"val/sequence_lengths": length, "objective/kl": bound - 0.1}, args, **first) == set()
    assert showing({"val/sequence_lengths": length, "objective/kl": bound + 0.1}, args, **first) == {"kl"}


def test_responses_that_are_alike_from_the_first_update_on_show_only_where_the_share_doubles():
    args = train_rloo.Args(batch_size=16)
    assert showing({"same_ends": [0.79, 0.9]}, args, same_ends=[0.4, 0.5]) == set()
    assert showing({"same_ends": [0.81, 0.9]}, args, same_ends=[0.4, 0.5]) == {"narrow"}


def test_a_beginning_has_four_real_tokens_and_an_end_two():
    responses = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 0], [1, 2, 3, 0, 0], [1, 2, 3, 0, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    assert health.same_ends(responses, mask) == [3 / 5, 1 / 5]
    assert health.same_ends(responses[3:], mask[3:]) == [1 / 2, 1 / 2]  # Padding is not token 0.
    assert health.same_ends(responses[:, :2], mask[:, :2]) == [1, 1]
    assert health.same_ends(responses[2:4, 2:], mask[2:4, 2:]) == [1 / 2, 1 / 2]  # 3 4 and 3 alone


def test_bf16_and_runs_without_an_end_have_other_bounds():
    args = train_rloo.Args(batch_size=16)
    assert showing({"val/first_ratio": 2.9}, args, "bf16") == set()
    assert showing({"val/first_ratio": 3.1}, args, "bf16") == {"first_ratio"}
    assert showing({"val/num_stop_token_ids": 0}, train_rloo.Args(batch_size=16, stop_token="none")) == set()
    ends = train_ppo.Args(batch_size=16, stop_token="none", truncate_token=".")
    assert showing({"val/num_stop_token_ids": 0}, ends) == {"truncated"}


def test_equal_scores_are_those_of_a_prompts_responses_or_of_the_whole_batch():
    for args, words in ((train_rloo.Args(), "of the prompts"), (train_ppo.Args(), "of the batch")):
        _, seen, _ = health.signs(HEALTHY | {"val/equal_scores": 1.0}, FIRST, args, "fp32")["reward_variance"]
        assert words in seen


def test_a_kl_that_is_zero_shows_at_the_end_alone():
    args = train_rloo.Args(batch_size=100)
    for metrics, shows in [
        ({"objective/kl": 0.019}, True),
        ({"objective/kl": -0.019}, True),
        ({"objective/kl": 0.021}, False),
        ({"objective/kl": 0.0, "eval/objective/kl": 0.1}, False),  # The held-out KL is that after the last step.
        ({"objective/kl": 1.0, "eval/objective/kl": 0.0}, True),
    ]:
        ends = health.signs(HEALTHY | metrics, FIRST, args, "fp32", is_last=True)["kl_zero"]
        assert ends[0] == shows and "--learning_rate" in ends[2] and showing(metrics, args) == set()


def test_each_sign_names_a_section_of_the_page_that_is_there():
    page = (Path(health.__file__).parents[2] / health.PAGE).read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", page, re.M)
    anchors = {re.sub(r"[^a-z0-9 ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert health.SECTIONS.keys() == SIGNS and {*health.SECTIONS.values()} <= anchors
    assert {*re.findall(r"\]\(#([^)]+)\)", page)} == anchors  # the list at the top


# ---- runs ------------------------------------------------------------------------------------------------------------
EQUAL = "def f(prompts, completions): return [1.0] * len(completions)"
FUNCTION = dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None)


def run(page, tiny, code=None, **changes):
    """{sign: the updates at which it showed} of a run. code: a reward function `f`."""
    if code:
        Path("mine.py").write_text(textwrap.dedent(code))
    PAGES[page].main(page_args(page, tiny, **(FUNCTION if code else {}) | changes))
    rows = [row for row in read_metrics("runs/run") if row["update"]]
    names = {name.removeprefix("health/") for row in rows for name in row if name.startswith("health/")}
    assert names == SIGNS
    return {name: found for name in names if (found := [row["update"] for row in rows if row[f"health/{name}"]])}


def warnings_in(capsys):
    """The signs that the run has warned of, in the order of its lines."""
    return signs_in(capsys.readouterr().out)


def signs_in(printed):
    lines = printed.splitlines()
    return [line.split(":")[1].strip().removeprefix("health/") for line in lines if line.startswith("warning: ")]


@PAGE
def test_too_large_steps_show_in_kl_and_clipping_and_are_said_once(tiny, few_prompts, in_tmp, capsys, page):
    options = dict(learning_rate=0.1, num_ppo_epochs=4, total_episodes=64, kl_coef=0.0, response_length=32)
    found = run(page, tiny, **options)
    assert len(found["kl"]) > 1 and len(found["clipfrac"]) > 1
    printed = capsys.readouterr().out
    assert f"({health.PAGE}#kl-explodes)" in printed
    lines = signs_in(printed)
    assert len(lines) == len(set(lines)) and {"kl", "clipfrac"} <= set(lines)


@PAGE
def test_dropout_shows_in_the_first_ratio(tiny, few_prompts, in_tmp, monkeypatch, capsys, page):
    load = models.load_policy

    def with_dropout(*args):
        model = load(*args)
        for name, module in model.named_modules():
            if name.endswith(("post_attention_dropout", "post_mlp_dropout")):
                module.p = 0.3
        return model

    monkeypatch.setattr(models, "load_policy", with_dropout)
    monkeypatch.setattr(utils, "disable_dropout", lambda model: model)
    found = run(page, tiny, num_ppo_epochs=2, total_episodes=32)
    assert found["first_ratio"] == [1, 2] and "first_ratio" in warnings_in(capsys)


@PAGE
def test_responses_that_never_end_and_equal_rewards_show(tiny, few_prompts, in_tmp, capsys, page):
    found = run(page, tiny, EQUAL, stop_token="wonderful", response_length=2)
    assert found["truncated"] and found["reward_variance"] == [1, 2, 3]
    # Equal rewards teach nothing, so RLOO's KL may stay 0 as well.
    assert sorted({*warnings_in(capsys)} - {"kl_zero"}) == ["reward_variance", "truncated"]


def test_equal_rewards_are_counted_by_prompt(tiny, in_tmp):
    """A quarter of the prompts give their k responses one score, the others different ones."""
    rows = [{"prompt": row["prompt"], "easy": i % 4 == 0} for i, row in enumerate(toy.rows("prompts", "train")[:16])]
    code = "def f(prompts, completions, easy): return [1.0 if e else hash(c) % 997 for e, c in zip(easy, completions)]"
    run("train_rloo", tiny, code, dataset=write_rows("rows.jsonl", rows), batch_size=64, total_episodes=64)
    assert read_metrics("runs/run")[0]["val/equal_scores"] == 0.25


def test_a_rate_that_moves_nothing_is_said_at_the_end(tiny, few_prompts, in_tmp, capsys):
    assert run("train_rloo", tiny, learning_rate=1e-9)["kl_zero"] == [3]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("bad signs: ") and "health/kl_zero in 1 of 3 updates" in line for line in lines)


def test_responses_that_shrink_to_one_word_show_in_length_entropy_and_starts(tiny, few_prompts, in_tmp, capsys):
    code = "def f(prompts, completions): return [-float(len(c.split())) for c in completions]"
    options = dict(kl_coef=0.0, response_length=16, learning_rate=0.03, total_episodes=480, num_ppo_epochs=2)
    found = run("train_rloo", tiny, code, **options)
    signs = {"entropy", "length", "narrow"}
    assert signs <= found.keys() and signs <= set(warnings_in(capsys))


def test_a_resumed_run_does_not_repeat_what_was_said(tiny, few_prompts, in_tmp, capsys):
    options = dict(checkpoint_every=2, total_episodes=64)
    run("train_rloo", tiny, EQUAL, **options)
    assert warnings_in(capsys).count("reward_variance") == 1
    state = json.loads(Path("runs/run/checkpoints/000002/state.json").read_text())
    assert "reward_variance" in state["health"]["said"] and state["health"]["first"].keys() == FIRST.keys()
    shutil.rmtree("runs/run/checkpoints/000004")
    train_rloo.main(rloo_args(tiny, **FUNCTION, **options, resume=True))
    assert "reward_variance" not in warnings_in(capsys)
    assert [row["health/reward_variance"] for row in read_metrics("runs/run")] == [1.0] * 4
