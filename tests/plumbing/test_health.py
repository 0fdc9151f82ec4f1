"""Each bad sign is provoked, by numbers at its bound and by a run that is ill."""

import re
import shutil
from pathlib import Path

import pytest
from helpers import run_page

from rlhf_details import train_ppo
from rlhf_details.plumbing.outputs import health

FIRST = {
    "objective/kl": 5.0, "policy/clipfrac_avg": 0.1, "val/first_ratio": 1.00001, "val/logprob_gap": 1e-5,
    "val/num_stop_token_ids": 90, "val/equal_scores": 0.1, "policy/entropy_avg": 2.0, "val/sequence_lengths": 20.0,
    "val/turns": 2.0, "val/ran_out": 0.1,
}  # fmt: skip
OF_TURNS = {"ran_out", "one_turn"}  # signs of train_agent.py alone
LENGTH, KL, GAP = "val/sequence_lengths", "objective/kl", "val/logprob_gap"
CASES = [  # sign, metric, a healthy value, an ill one (or None), what else differs: args, precision, is_last, metrics
    ("kl", KL, 9.9, 10.1, {}),
    ("kl", KL, 49.9, 50.1, dict(metrics={LENGTH: 200})),
    ("kl_zero", KL, 0.021, 0.019, dict(is_last=True)),
    ("kl_zero", "eval/objective/kl", 0.1, 0.0, dict(is_last=True)),  # that after the last step
    ("clipfrac", "policy/clipfrac_avg", 0.29, 0.31, {}),
    ("first_ratio", "val/first_ratio", 1.009, 1.011, {}),
    ("first_ratio", "val/first_ratio", 2.9, 3.1, dict(precision="bf16")),
    ("truncated", "val/num_stop_token_ids", 5, 4, {}),  # of 100
    ("reward_variance", "val/equal_scores", 0.5, 0.51, {}),
    ("abstained", "val/abstained", 0.2, 0.21, {}),
    ("entropy", "policy/entropy_avg", 0.41, 0.39, {}),
    ("ran_out", "val/ran_out", 0.49, 0.51, {}),
    ("one_turn", "val/turns", 1.01, 1.0, {}),
    ("length", LENGTH, 39.9, 40.1, {}),
    ("length", LENGTH, 10.1, 9.9, {}),
    # At first the KL is 0. Without a stop token no response ends. Under --overlap an older policy has sampled.
    (None, KL, 0.0, 0.0, {}),
    (None, "val/num_stop_token_ids", 0, 0, dict(args=dict(stop_token="none"))),
    (None, GAP, 9.0, 9.0, dict(args=dict(overlap=True))),
]


@pytest.mark.parametrize("sign, metric, healthy, ill, options", CASES)
def test_each_sign_has_its_bound(sign, metric, healthy, ill, options):
    options = dict(precision="fp32") | options
    args = train_ppo.Args(batch_size=100, **options.pop("args", {}))
    first = FIRST | options.pop("metrics", {})
    for value, expected in ((healthy, []), (ill, [sign] if sign else [])):
        found = health.numbers(first | {metric: value}, first, args, **options)
        assert found.keys() == health.SIGNS.keys()
        assert [name for name, (number, bound) in found.items() if number > bound] == expected


# ---- runs ------------------------------------------------------------------------------------------------------------
LEARNS = dict(kl_coef=0.0, response_length=16, learning_rate=0.03, total_episodes=480, num_ppo_epochs=2)
RUNS = [  # page, what a reward function gives a completion c, flags, signs that show
    (
        "train_ppo",
        "",
        dict(learning_rate=0.1, num_ppo_epochs=4, total_episodes=64, kl_coef=0.0, response_length=32),
        {"kl", "clipfrac"},
    ),
    ("train_ppo", "1.0", dict(stop_token="wonderful", response_length=2), {"truncated", "reward_variance"}),
    ("train_ppo", "", dict(learning_rate=1e-9), {"kl_zero"}),
    ("train_rloo", "-float(len(c.split()))", LEARNS, {"entropy", "length"}),
]


@pytest.mark.parametrize("sign", ["clipfrac", "truncated", "ran_out", "reward_variance", "abstained"])
def test_a_share_little_above_its_bound_is_not_printed_as_the_bound(sign):
    seen, bound = re.findall(r"([\d.]+)%", health.SIGNS[sign][0].format(0.203, 0.2))
    assert (seen, bound) == ("20.3", "20")


@pytest.mark.parametrize("page, score, flags, signs", RUNS)
def test_an_ill_run_says_so_once_and_at_its_end(tiny, few_prompts, in_tmp, capsys, page, score, flags, signs):
    """And where it is resumed it does not repeat what was said."""
    if score:
        Path("mine.py").write_text(f"def f(prompts, completions): return [{score} for c in completions]")
        flags = flags | dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None)

    def run(**changes):
        rows = [row for row in run_page(page, tiny, **flags, **changes) if row["update"]]
        assert all(f"health/{name}" in row for row in rows for name in health.SIGNS.keys() - OF_TURNS)
        printed = capsys.readouterr().out
        (last,) = re.findall("^bad signs: (.*)$", printed, re.M)
        said = re.findall(rf"^warning: (health/\w+): .*\({health.GUIDE}#[a-z0-9-]+\)$", printed, re.M)
        return rows, sorted(last.split(", ")), sorted(said)

    rows, last, said = run(checkpoint_every=1)
    shown = {name for row in rows for name in row if name.startswith("health/") and row[name]}
    assert {f"health/{name}" for name in signs} <= shown and said == last == sorted(shown)
    (*_, end) = sorted(Path("runs/run/checkpoints").iterdir())
    shutil.rmtree(end)
    again, last, said = run(checkpoint_every=1, resume=True)
    assert [row.keys() for row in again] == [row.keys() for row in rows] and last == sorted(shown)
    assert said == [name for name in sorted(shown) if not any(row[name] for row in rows[:-1])]
