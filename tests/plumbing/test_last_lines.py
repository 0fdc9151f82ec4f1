"""The end of a run judges it: learnt or not, bad signs, time, and a command that really runs."""

import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import LM_HUMAN_PREFERENCES, page_args, rloo_args, run_page
from short_runs import start, write_rows

from rlhf_details import evaluate, toy, train_rloo
from rlhf_details.plumbing.inputs import cli
from rlhf_details.plumbing.outputs import verdict

BEFORE = torch.tensor([-5.0, 5.0]).repeat(50)  # of 100 prompts, which differ far more than a run changes them
NOISE = torch.tensor([-1.0, -1.0, 1.0, 1.0]).repeat(25)
SAID = [  # what is added to each score, noise, the line; half an interval of the difference is 0.197 * noise
    (0.198, 1, "learnt: scores rose, +0.198 +- 0.197 a prompt, at a KL of 2.000 nats per response"),
    (0.196, 1, "not shown: scores did not change beyond chance, +0.196 +- 0.197 a prompt, at a KL of 2.000 nats per "),
    (-0.198, 1, "not learnt: scores fell, -0.198 +- 0.197 a prompt, at a KL of"),
    (0.0, 0, "not shown: scores did not change beyond chance, +0.000 +- 0.000 a prompt, at a KL of"),
    (1.0, 0, "learnt: scores rose, +1.000 +- 0.000 a prompt, at a KL of"),  # All rise alike.
]


def learnt(*by_prompt, rows=(None,) * 100, **after):
    """What is said of evaluations, the scores of each."""
    after = after or {"objective/kl": 2.0, "objective/scores": 1.0}
    after = {f"eval/{name}": x for name, x in after.items()}
    return verdict.learnt_lines(after, rows, [{"scores": x.tolist()} for x in by_prompt])


# ---- has it learnt? --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change, noise, words", SAID)
def test_a_run_has_learnt_where_the_interval_of_its_prompts_differences_is_above_0(change, noise, words):
    (line,) = learnt(BEFORE, BEFORE + change + noise * NOISE)
    assert line.startswith(words)
    one = BEFORE[:1]
    assert learnt(one, one, rows=[None]) == [] == learnt(BEFORE) == learnt()  # nothing can be compared


@pytest.mark.parametrize(
    "accuracy, words",
    [
        (1.0, "learnt: the accuracy on held-out comparisons is 1.000 +- 0.000, where guessing has 0.250"),
        (0.35, "learnt: the accuracy on held-out comparisons is 0.350 +- 0.093, where"),
        (0.33, "not shown: the accuracy on held-out comparisons is 0.330 +- 0.092, where"),
        (0.1, "not learnt: the accuracy on held-out comparisons is 0.100 +- 0.059, where"),
    ],
)
def test_a_reward_model_has_learnt_where_it_is_better_than_guessing(accuracy, words):
    rows = [SimpleNamespace(candidates=[None] * 4)] * 101
    (line,) = learnt(rows=rows, **{"rm/accuracy": accuracy, "rm/loss": 1.0})
    assert line.startswith(words)


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
    lines = said(capsys)
    assert re.search("^((not )?learnt|not shown): .*^bad signs: ", "\n".join(lines), re.M | re.S)
    args = evaluate_args(lines)
    policy = evaluate.main(args)["metrics"]["policy"]
    assert policy["kl"]["value"] == pytest.approx(result["after"]["eval/objective/kl"], abs=1e-4)
    assert args.opponent_path == str(tiny / "policy") and {"rewards/f", "rewards/reward_model"} <= policy.keys()
    assert args.reward_fn_weights == (-0.5,) and args.reward_fn_format == "messages"
    assert "temperature 0.7" in capsys.readouterr().out


@pytest.mark.parametrize("dataset", ["rows.jsonl", "toy:test"])
def test_after_distillation_from_a_teacher_that_reads_more_that_command_measures_no_kl(tiny, in_tmp, dataset):
    """evaluate.py would give the teacher the student's prompt. Neither does the embedded task's reference come in."""
    rows = write_rows("rows.jsonl", toy.rows("prompts", "test")[:4])
    options = dict(dataset=rows, eval_dataset=dataset, teacher_model_path=str(tiny / "teacher"), output_dir="model")
    for template, expected in ((None, str(tiny / "teacher")), ("the {prompt} .", None)):
        args = page_args("train_distill", tiny, **options, teacher_prompt_template=template)
        assert evaluate_args(verdict.evaluate_lines(args)).ref_model_path == expected


def test_after_distillation_that_command_takes_the_kl_from_the_teacher(tiny, ragged, in_tmp, capsys):
    rows = write_rows("rows.jsonl", toy.rows("prompts", "test")[:4])
    options = dict(dataset=rows, eval_dataset=rows, teacher_model_path=str(ragged / "policy"), total_episodes=16)
    after = run_page("train_distill", tiny, **options, output_dir="model")[-1]
    lines = said(capsys)
    assert any("the negative of the KL from the teacher" in line for line in lines) and "scores" not in "".join(lines)
    policy = evaluate.main(evaluate_args(lines))["metrics"]["policy"]
    assert policy["kl"]["value"] == pytest.approx(after["eval/objective/kl"], abs=1e-4)


def test_figures_of_one_name_are_told_apart(tiny, in_tmp, capsys):
    """DPO's chosen and rejected are log-ratios times beta, and log-probs."""
    start(tiny, "dpo", eval_dataset="comparisons.jsonl")
    names = {line.split()[0] for line in said(capsys) if line.startswith("  ")}
    assert {"rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "margins"} <= names


@pytest.mark.parametrize("page, flags", [("train_rloo", {}), ("train_ppo", LM_HUMAN_PREFERENCES)])
def test_a_resumed_run_compares_its_prompts_with_those_before_training(
    ragged, few_prompts, in_tmp, capsys, page, flags
):
    options = dict(eval_dataset="toy:test", eval_every=1, checkpoint_every=1, learning_rate=1e-2) | flags
    rows = run_page(page, ragged, **options)
    lines = [line for line in said(capsys) if re.search(r"\+- .* a prompt", line)]
    for name, line in zip(("scores", "gold"), lines, strict=True):
        before, after = (row[f"eval/objective/{name}"] for row in (rows[0], rows[-1]))
        assert float(re.search(r", ([+-][0-9.]+) \+- ", line)[1]) == pytest.approx(after - before, abs=1e-3) != 0
    shutil.rmtree("runs/run/checkpoints/000003")
    for _ in range(2):  # the second time at its end
        run_page(page, ragged, **options, resume=True)
        assert [line for line in said(capsys) if re.search(r"\+- .* a prompt", line)] == lines
