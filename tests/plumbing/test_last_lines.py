"""The end of a run: its held-out figures with their intervals, bad signs, and a command that really runs."""

import math
import shlex
from pathlib import Path

import pytest
from helpers import read_metrics, rloo_args
from short_runs import write_rows

from rlhf_details import evaluate, toy, train_rloo
from rlhf_details.plumbing import cli, health


def test_held_out_figures_stand_with_the_interval_of_their_mean():
    before, after = ({"eval/x": x, "eval/x_std": 2.0, "eval/rm/accuracy": 0.75, "eval/y": 3.0} for x in (1.0, -0.0))
    title, *lines = health.held_out_lines(before, after, 101)
    half = 1.96 * math.sqrt(0.75 * 0.25 / 100)
    accuracy = f"0.750 +- {half:.3f}"
    said = ["x 1.000 +- 0.392 -> 0.000 +- 0.392", f"accuracy {accuracy} -> {accuracy}", "y 3.000 -> 3.000"]
    assert title.startswith("101 held-out rows, before -> after") and [" ".join(x.split()) for x in lines] == said
    (_, line, *_) = health.held_out_lines(after, after, 1)  # One evaluation of one row has neither.
    assert line.split() == ["x", "0.000"] and "no --eval_dataset" in health.held_out_lines({}, {}, 0)[0]


# ---- runs ------------------------------------------------------------------------------------------------------------
def said(capsys):
    return capsys.readouterr().out.splitlines()


def evaluate_args(lines):
    """The arguments of the command that the last line has."""
    start, python, script, *words = shlex.split(lines[-1])
    assert (start, python) == ("evaluate:", "python") and Path(script).samefile(evaluate.__file__)
    return cli.parse(evaluate.Args, words)


def test_the_command_at_the_end_of_a_run_does_run(tiny, in_tmp, capsys):
    """The policy is compared with the one that it started from, in its own settings, on the held-out rows."""
    rows = write_rows("held out.jsonl", [{"question": row["prompt"]} for row in toy.rows("prompts", "test")[:4]])
    Path("mine.py").write_text("import time\ndef f(prompts, completions): time.sleep(0.1); return [1.0] * len(prompts)")
    data = dict(dataset=rows, eval_dataset=rows, prompt_template="{question}", reward_fn=("mine.py:f",))
    data |= dict(reward_fn_weights=(-0.5,))
    result = train_rloo.main(rloo_args(tiny, **data, temperature=0.7, total_episodes=16, output_dir="model"))
    lines, row = said(capsys), read_metrics(result["run"])[1]
    for begin in ("4 held-out rows", "bad signs: ", "evaluate: "):
        assert any(line.startswith(begin) for line in lines), begin
    assert row["time/scores"] >= 0.1
    args = evaluate_args(lines)
    policy = evaluate.main(args)["metrics"]["policy"]
    assert policy["kl"]["value"] == pytest.approx(result["after"]["eval/objective/kl"], abs=1e-4)
    assert args.opponent_path == str(tiny / "policy") and {"rewards/f", "rewards/reward_model"} <= policy.keys()
    assert args.reward_fn_weights == (-0.5,)
    assert "temperature 0.7" in capsys.readouterr().out
