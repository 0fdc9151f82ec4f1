"""The end of a run judges it: learnt or not, bad signs, time, and a command that really runs."""

import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import LM_HUMAN_PREFERENCES, PAGES, page_args, read_metrics, rloo_args
from short_runs import write_rows

from rlhf_details import evaluate, toy, train_distill, train_rloo
from rlhf_details.plumbing.inputs import cli
from rlhf_details.plumbing.outputs import verdict

BEFORE = torch.tensor([-5.0, 5.0]).repeat(50)  # of 100 prompts, which differ far more than a run changes them


def learnt(*by_prompt, after=None, rows=(None,) * 100):
    after = after or {"eval/objective/kl": 2.0, "eval/objective/scores": 1.0}
    return verdict.learnt_lines(after, rows, [{name: x.tolist() for name, x in one.items()} for one in by_prompt])


def changed_by(change, noise=1.0):
    """Half an interval of the difference is 0.197 * noise. That of either mean is 0.985 at least."""
    return BEFORE + change + noise * torch.tensor([-1.0, -1.0, 1.0, 1.0]).repeat(25)


# ---- has it learnt? --------------------------------------------------------------------------------------------------
def test_a_run_has_learnt_where_the_interval_of_its_prompts_differences_is_above_0():
    def line(*args):
        (said,) = learnt({"scores": BEFORE}, {"scores": changed_by(*args)})
        return said

    assert line(0.198) == "learnt: scores rose, +0.198 +- 0.197 a prompt, at a KL of 2.000 nats per response"
    assert line(0.196).startswith("not shown: scores did not change beyond chance, +0.196 +- 0.197 a prompt, at ")
    assert line(-0.198).startswith("not learnt: scores fell, -0.198 +- 0.197 a prompt")
    assert line(0.0, 0.0).startswith("not shown: scores did not change beyond chance, +0.000 +- 0.000 a prompt")
    assert line(1.0, 0.0).startswith("learnt: scores rose, +1.000 +- 0.000 a prompt")  # All rise alike.
    one = {"scores": BEFORE[:1]}
    assert learnt(one, one, rows=[None]) == [] == learnt({"scores": BEFORE}) == learnt()  # nothing can be compared


@pytest.mark.parametrize(
    "accuracy,word", [(1.0, "learnt: "), (0.35, "learnt: "), (0.33, "not shown: "), (0.1, "not learnt: ")]
)
def test_a_reward_model_has_learnt_where_it_is_better_than_guessing(accuracy, word):
    rows = [SimpleNamespace(candidates=[None] * 4)] * 101
    (line,) = learnt(after={"eval/rm/accuracy": accuracy, "eval/rm/loss": 1.0}, rows=rows)
    half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 100)
    assert line.startswith(word) and f"{accuracy:.3f} +- {half:.3f}, where guessing has 0.250" in line


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
    Path("mine.py").write_text("def f(prompts, completions): return [1.0] * len(prompts)")
    data = dict(dataset=rows, eval_dataset=rows, prompt_template="{question}", reward_fn=("mine.py:f",))
    data |= dict(reward_fn_weights=(-0.5,), reward_fn_format="messages")
    result = train_rloo.main(rloo_args(tiny, **data, temperature=0.7, total_episodes=16, output_dir="model"))
    lines, row = said(capsys), read_metrics(result["run"])[1]
    for begin in (("learnt: ", "not learnt: ", "not shown: "), "bad signs: ", "evaluate: "):
        assert any(line.startswith(begin) for line in lines), begin
    assert row["time/scores"] > 0
    args = evaluate_args(lines)
    policy = evaluate.main(args)["metrics"]["policy"]
    assert policy["kl"]["value"] == pytest.approx(result["after"]["eval/objective/kl"], abs=1e-4)
    assert args.opponent_path == str(tiny / "policy") and {"rewards/f", "rewards/reward_model"} <= policy.keys()
    assert args.reward_fn_weights == (-0.5,) and args.reward_fn_format == "messages"
    assert "temperature 0.7" in capsys.readouterr().out


def test_after_distillation_that_command_takes_the_kl_from_the_teacher(tiny, ragged, in_tmp, capsys):
    rows = write_rows("rows.jsonl", toy.rows("prompts", "test")[:4])
    options = dict(dataset=rows, eval_dataset=rows, teacher_model_path=str(ragged / "policy"), total_episodes=16)
    result = train_distill.main(page_args("train_distill", tiny, **options, output_dir="model"))
    lines = said(capsys)
    assert any("the negative of the KL from the teacher" in line for line in lines) and "scores" not in "".join(lines)
    policy = evaluate.main(evaluate_args(lines))["metrics"]["policy"]
    assert policy["kl"]["value"] == pytest.approx(result["after"]["eval/objective/kl"], abs=1e-4)


def test_figures_of_one_name_are_told_apart():
    """DPO's chosen and rejected are log-ratios times beta, and log-probs."""
    after = {f"eval/{group}/{name}": 1.0 for group in ("rewards", "logps") for name in ("chosen", "rejected")}
    lines = verdict.held_out_lines({}, after | {"eval/rewards/margins": 0.5}, 4)[1:]
    assert [line.split()[0] for line in lines] == [*(name.removeprefix("eval/") for name in after), "margins"]


@pytest.mark.parametrize("page,flags", [("train_rloo", {}), ("train_ppo", LM_HUMAN_PREFERENCES)])
def test_a_resumed_run_compares_its_prompts_with_those_before_training(
    ragged, few_prompts, in_tmp, capsys, page, flags
):
    def run(**changes):
        options = dict(eval_dataset="toy:test", eval_every=1, checkpoint_every=1, learning_rate=1e-2) | flags
        result = PAGES[page].main(page_args(page, ragged, **(options | changes)))
        return result, [line for line in said(capsys) if re.search(r"\+- .* a prompt", line)]

    result, lines = run()
    for name, line in zip(("scores", "gold"), lines, strict=True):
        before, after = (result[when][f"eval/objective/{name}"] for when in ("before", "after"))
        assert float(re.search(r", ([+-][0-9.]+) \+- ", line)[1]) == pytest.approx(after - before, abs=1e-3) != 0
    assert run(resume=True)[1] == lines  # at its end
    shutil.rmtree("runs/run/checkpoints/000003")
    assert run(resume=True)[1] == lines
