"""Each bad sign is provoked, by numbers at its bound and by a run that is ill."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import PAGES, page_args, read_metrics, rloo_args

from rlhf_details import train_ppo, train_rloo
from rlhf_details.plumbing.outputs import health

HEALTHY = {
    "objective/kl": 5.0, "policy/clipfrac_avg": 0.1, "val/first_ratio": 1.00001, "val/logprob_gap": 1e-5,
    "val/num_stop_token_ids": 90, "val/equal_scores": 0.1, "policy/entropy_avg": 1.0, "val/sequence_lengths": 20.0,
    "val/turns": 2.0, "val/ran_out": 0.1,
}  # fmt: skip
OF_TURNS = {"ran_out", "one_turn"}  # signs of train_agent.py alone
FIRST = {"policy/entropy_avg": 2.0, "val/sequence_lengths": 20.0}
LENGTH, KL, GAP = "val/sequence_lengths", "objective/kl", "val/logprob_gap"
CASES = [  # sign, metric, a healthy value, an ill one, what else differs: args, first, precision, is_last, more
    ("kl", KL, 9.9, 10.1, {}),
    ("kl", KL, 49.9, 50.1, dict(more={LENGTH: 200}, first={LENGTH: 200})),
    ("kl_zero", KL, 0.021, 0.019, dict(is_last=True)),
    ("kl_zero", "eval/objective/kl", 0.1, 0.0, dict(is_last=True)),  # that after the last step
    ("clipfrac", "policy/clipfrac_avg", 0.29, 0.31, {}),
    ("first_ratio", "val/first_ratio", 1.009, 1.011, {}),
    ("first_ratio", "val/first_ratio", 2.9, 3.1, dict(precision="bf16")),
    ("truncated", "val/num_stop_token_ids", 5, 4, {}),  # of 100
    ("reward_variance", "val/equal_scores", 0.5, 0.51, {}),
    ("entropy", "policy/entropy_avg", 0.41, 0.39, {}),
    ("ran_out", "val/ran_out", 0.49, 0.51, {}),
    ("one_turn", "val/turns", 1.01, 1.0, {}),
    ("length", LENGTH, 39.9, 40.1, {}),
    ("length", LENGTH, 10.1, 9.9, {}),
]


def showing(metrics, args=None, first=None, precision="fp32", is_last=False, more=None):
    """The signs that show in an update."""
    args = train_ppo.Args(batch_size=100, **(args or {}))
    found = health.numbers(HEALTHY | (more or {}) | metrics, FIRST | (first or {}), args, precision, is_last)
    assert found.keys() == health.SIGNS.keys()
    return {name for name, (value, bound) in found.items() if value > bound}


@pytest.mark.parametrize("sign, metric, healthy, ill, options", CASES)
def test_each_sign_has_its_bound(sign, metric, healthy, ill, options):
    assert showing({metric: healthy}, **options) == set() and showing({metric: ill}, **options) == {sign}


@pytest.mark.parametrize(
    "metrics, args",
    [({KL: 0.0}, {}), ({"val/num_stop_token_ids": 0}, dict(stop_token="none")), ({GAP: 9.0}, dict(overlap=True))],
)
def test_what_is_no_sign_where_it_is_meant(metrics, args):
    """At first the KL is 0. Without a stop token no response ends. Under --overlap an older policy has sampled."""
    assert showing(metrics, args) == set()


# ---- runs ------------------------------------------------------------------------------------------------------------
FUNCTION = dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None)
LEARNS = dict(kl_coef=0.0, response_length=16, learning_rate=0.03, total_episodes=480, num_ppo_epochs=2)
RUNS = [  # a reward function, flags, signs that show, and signs that do not
    (
        None,
        dict(learning_rate=0.1, num_ppo_epochs=4, total_episodes=64, kl_coef=0.0, response_length=32),
        {"kl", "clipfrac"},
    ),
    ("1.0", dict(stop_token="wonderful", response_length=2), {"truncated", "reward_variance"}),
    (None, dict(learning_rate=1e-9), {"kl_zero"}),
    ("-float(len(c.split()))", LEARNS, {"entropy", "length"}),
]


def run(page, tiny, score=None, **changes):
    """{sign: the updates at which it showed} of a run. score: what a reward function gives a completion c."""
    if score:
        Path("mine.py").write_text(f"def f(prompts, completions): return [{score} for c in completions]")
    PAGES[page].main(page_args(page, tiny, **(FUNCTION if score else {}) | changes))
    rows = [row for row in read_metrics("runs/run") if row["update"]]
    names = health.SIGNS.keys() - (OF_TURNS if page != "train_agent" else set())
    assert all({name.removeprefix("health/") for name in row if name.startswith("health/")} == names for row in rows)
    return {name: found for name in names if (found := [row["update"] for row in rows if row[f"health/{name}"]])}


@pytest.mark.parametrize("score, flags, signs", RUNS)
def test_an_ill_run_says_so_once_and_at_its_end(tiny, few_prompts, in_tmp, capsys, score, flags, signs):
    page = "train_rloo" if score and flags is LEARNS else "train_ppo"
    found, printed = run(page, tiny, score, **flags), capsys.readouterr().out
    said = re.findall(rf"^warning: health/(\w+): .*\({health.GUIDE}#[a-z0-9-]+\)$", printed, re.M)
    assert signs <= found.keys() and sorted(said) == sorted(found)
    (last,) = (line for line in printed.splitlines() if line.startswith("bad signs: "))
    assert sorted(last.removeprefix("bad signs: ").split(", ")) == sorted(f"health/{name}" for name in found)


def test_a_resumed_run_does_not_repeat_what_was_said(tiny, few_prompts, in_tmp, capsys):
    options = dict(checkpoint_every=2, total_episodes=64)
    run("train_rloo", tiny, "1.0", **options)
    assert capsys.readouterr().out.count("warning: health/reward_variance") == 1
    state = torch.load("runs/run/checkpoints/000002/state.pt", weights_only=True)
    assert "reward_variance" in state["said"] and state["first"]["update"] == 1
    shutil.rmtree("runs/run/checkpoints/000004")
    train_rloo.main(rloo_args(tiny, **FUNCTION, **options, resume=True))
    assert "warning: health/reward_variance" not in capsys.readouterr().out
    assert [row["health/reward_variance"] for row in read_metrics("runs/run")] == [1.0] * 4
