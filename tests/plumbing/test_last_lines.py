"""The end of a run judges it: learnt or not, bad signs, time, and commands that really run."""

import io
import json
import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import LM_HUMAN_PREFERENCES, PAGES, page_args, read_metrics, record, rloo_args
from short_runs import start, write_rows

from rlhf_details import evaluate, toy, train_dpo, train_rloo
from rlhf_details.plumbing import cli, health

BEFORE = torch.tensor([-5.0, 5.0]).repeat(50)  # of 100 prompts, which differ far more than a run changes them


def learnt(*by_prompt, after=None, rows=(None,) * 100):
    after = after or {"eval/objective/kl": 2.0}
    return health.learnt_lines(after, rows, [{name: x.tolist() for name, x in one.items()} for one in by_prompt])


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


def test_scores_that_rise_while_gold_falls_are_no_success():
    score, true = learnt({"scores": BEFORE, "gold": BEFORE}, {"scores": changed_by(1.0), "gold": changed_by(-1.0)})
    assert score.startswith("learnt: ") and "gold, the true reward, fell, -1.000" in true and "over-learns" in true
    _, true = learnt({"scores": BEFORE, "gold": BEFORE}, {"scores": changed_by(1.0), "gold": changed_by(1.0)})
    assert "gold, the true reward, rose" in true and "over-learns" not in true


@pytest.mark.parametrize(
    "accuracy,word", [(1.0, "learnt: "), (0.35, "learnt: "), (0.33, "not shown: "), (0.1, "not learnt: ")]
)
def test_a_reward_model_has_learnt_where_it_is_better_than_guessing(accuracy, word):
    rows = [SimpleNamespace(candidates=[None] * 4)] * 101
    (line,) = learnt(after={"eval/rm/accuracy": accuracy, "eval/rm/loss": 1.0}, rows=rows)
    half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 100)
    assert line.startswith(word) and f"{accuracy:.3f} +- {half:.3f}, where guessing has 0.250" in line


# ---- signs, time -----------------------------------------------------------------------------------------------------
def test_held_out_figures_stand_below_each_other_however_long_a_name_is():
    figures = {"eval/objective/scores": 1.0, "eval/objective/rewards/a_reward_with_a_long_name": 1.0}
    first, second = health.held_out_lines(figures | {"update": 0}, figures, 9)[1:]
    assert first.index("->") == second.index("->") and len(first) == len(second)


def test_the_signs_that_showed_are_counted():
    rows = [{"update": i, "health/kl": float(i > 2), "health/length": 0.0} for i in range(1, 5)]
    assert health.health_lines(rows) == ["bad signs: health/kl in 2 of 4 updates, first in 3"]
    assert health.health_lines(rows[:2]) == ["bad signs: none"] and health.health_lines([{"update": 1}]) == []


def test_the_time_is_shared_out_and_a_slow_reward_is_named():
    times = {"rollout": 1.0, "scores": 5.0, "optimise": 2.0, "update": 8.0, "rewards/slow": 4.1, "rewards/fast": 0.1}
    rows = [{"update": i} | {f"time/{name}": x for name, x in times.items()} for i in (1, 2)]
    shares, slow = health.time_lines(rows, 20.0)
    assert shares == "time: rollout 10%, scores 50%, optimise 20%, evaluations, checkpoints and the rest 20%"
    assert slow.startswith("the reward slow takes 51% of the updates' time")
    for row in rows:
        row["time/rewards/slow"] = 3.9
    assert len(health.time_lines(rows, 20.0)) == 1


# ---- runs ------------------------------------------------------------------------------------------------------------
def said(capsys):
    return capsys.readouterr().out.splitlines()


def test_the_commands_at_the_end_of_a_run_do_run(tiny, in_tmp, capsys, monkeypatch):
    """The policy is compared with the one that it started from, in its own settings, on the held-out rows."""
    rows = write_rows("held out.jsonl", [{"question": row["prompt"]} for row in toy.rows("prompts", "test")[:4]])
    Path("mine.py").write_text("import time\ndef f(prompts, completions): time.sleep(0.1); return [1.0] * len(prompts)")
    data = dict(dataset=rows, eval_dataset=rows, prompt_template="{question}", reward_fn=("mine.py:f",))
    data |= dict(reward_fn_weights=(-0.5,))
    result = train_rloo.main(rloo_args(tiny, **data, temperature=0.7, total_episodes=16, output_dir="model"))
    lines, row = said(capsys), read_metrics(result["run"])[1]
    for begin in (("learnt: ", "not learnt: ", "not shown: "), "bad signs: ", "time: rollout"):
        assert any(line.startswith(begin) for line in lines), begin
    assert 0.1 <= row["time/rewards/f"] < row["time/scores"]
    commands = {line.partition(": ")[0]: shlex.split(line.partition(": ")[2]) for line in lines if ": python " in line}
    assert list(commands) == ["evaluate", "chat", "curves"]
    assert all(words[0] == "python" and Path(words[1]).exists() for words in commands.values())
    assert Path(commands["curves"][2], "metrics.jsonl").exists() and commands["curves"][1].endswith("plot.py")
    args = cli.parse(evaluate.Args, commands["evaluate"][2:])
    policy = evaluate.main(args)["metrics"]["policy"]
    assert policy["kl"]["value"] == pytest.approx(result["after"]["eval/objective/kl"], abs=1e-4)
    assert args.opponent_path == str(tiny / "policy") and {"rewards/f", "rewards/reward_model"} <= policy.keys()
    assert (args.judge, args.reward_fn_weights) == (
        "reward_fn",
        (-0.5,),
    ) and "temperature 0.7" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("the soup\n"))
    evaluate.main(cli.parse(evaluate.Args, commands["chat"][2:]))
    assert [line.partition(": ")[0] for line in said(capsys)[-3:-1]] == ["model", str(tiny / "policy")]


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


@pytest.mark.parametrize(
    "dataset,changes,expected",
    [
        ("toy:test", {}, ""),
        (None, {}, ""),
        ("toy:test", dict(sft_model_path="my sft"), "--opponent_path 'my sft' --ref_model_path 'my sft'"),
        ("toy:test", dict(reward_model_path=None, reward_fn=("a:f",)),
         "--reward_model_path None --reward_fn a:f --judge reward_fn"),
    ],
)  # fmt: skip
def test_on_the_embedded_task_the_command_says_only_what_differs(dataset, changes, expected):
    args = cli.parse(train_rloo.Args, [])
    for name, value in (changes | dict(eval_dataset=dataset)).items():
        setattr(args, name, value)
    words = health.evaluation_words(args)
    assert words[:2] == ["--policy_path", "models/toy/rloo"] and set(words[2:]) == set(shlex.split(expected))
    parsed = cli.parse(evaluate.Args, words)
    assert parsed.judge == ("reward_fn" if args.reward_fn else "gold")
    assert parsed.opponent_path == parsed.ref_model_path == args.sft_model_path
    assert (parsed.reward_model_path, parsed.reward_fn) == (args.reward_model_path, args.reward_fn)


def test_other_tasks_and_data_have_their_flags():
    words = health.evaluation_words(cli.parse(train_rloo.Args, ["--dataset", "toy-sum"]))
    assert words == ["--dataset", "toy-sum:test", "--policy_path", "models/toy-sum/rloo"]
    args = train_rloo.Args(dataset="rows.jsonl", sft_model_path="sft", reward_model_path="reward")
    own = cli.parse(evaluate.Args, health.evaluation_words(args))
    assert (own.judge, own.reward_model_path, own.num_examples) == ("reward_model", "reward", 512)


@pytest.mark.parametrize(
    "case,kinds",
    [("sft", ["chat", "curves"]), ("dpo", ["evaluate", "chat", "curves"]), ("reward-gain", ["curves"])],
)
def test_sft_and_reward_model_say_what_they_can(tiny, in_tmp, capsys, case, kinds):
    start(tiny, case, checkpoint_every=0)
    text = capsys.readouterr().out
    assert re.findall(r"^(\w+): python ", text, re.M) == kinds
    assert "\nno --eval_dataset: " in text and "\ntime: optimise " in text
    assert "temperature" not in text and "bad signs" not in text  # They train on no samples.


def test_the_command_at_the_end_of_a_dpo_run_compares_it_with_the_sft_policy_on_the_same_rows(tiny, in_tmp, capsys):
    rows = [{"q": row["prompt"], "chosen": "we", "rejected": "."} for row in toy.rows("prompts", "test")[:4]]
    data = dict(dataset=write_rows("rows.jsonl", rows), prompt_template="{q}", sft_model_path=str(tiny / "policy"))
    train_dpo.main(train_dpo.Args(**data, batch_size=4, response_length=4, output_dir="model", run_name="run"))
    (line,) = (line for line in said(capsys) if line.startswith("evaluate: "))
    summary = evaluate.main(cli.parse(evaluate.Args, shlex.split(line)[3:]))
    assert summary["num_examples"] == 4 and {"opponent", "policy"} <= summary["metrics"].keys()
    assert summary["args"]["opponent_path"] == summary["args"]["ref_model_path"] == str(tiny / "policy")


@pytest.mark.parametrize(
    "row",
    [{"query": [5, 6], "sample0": [7], "sample1": [8], "best": 1}, {"prompt": "we", "chosen": "a", "rejected": "."}],
)
def test_labels_of_token_ids_have_no_prompts_to_evaluate_on(tiny, in_tmp, capsys, row):
    data = dict(dataset=write_rows("rows.jsonl", [row] * 4), sft_model_path=str(tiny / "policy"), run_name="run")
    train_dpo.main(train_dpo.Args(**data, batch_size=4, response_length=4, output_dir="model"))
    assert ("\nevaluate: " in capsys.readouterr().out) == ("prompt" in row)


def test_sample_tables_say_whether_a_response_ended_where_a_token_ends_it(ragged, in_tmp, capsys, monkeypatch):
    calls = record(monkeypatch, train_rloo, "has_stopped")["has_stopped"]

    def samples(**flags):
        train_rloo.main(rloo_args(ragged, num_sample_generations=1, total_episodes=16, rloo_k=2, **flags))
        return [json.loads(line) for line in Path("runs/run/samples.jsonl").read_text().splitlines()]

    ended = [row["ended"] for row in samples()]
    assert ended == calls[0][1][:8:2].tolist() and {*ended} == {False, True}  # the first responses to four prompts
    assert "ended: yes | end: <eos> | score: " in capsys.readouterr().out
    assert not any("ended" in row for row in samples(stop_token="none"))
