"""Rewards given by functions: how they are found, called, checked, summed and logged, and what a None does."""

import dataclasses
import itertools
import json
import random
import shutil
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, launch, ppo_args, read_metrics, rloo_args, run_ppo, run_rloo
from test_rloo import assert_same_curves, without_times
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf_details import data, evaluate, reward_functions, toy, train_ppo, train_rloo, utils

SCRIPTS = [(train_rloo, rloo_args), (train_ppo, ppo_args)]
MAINS = pytest.mark.parametrize("script, args", SCRIPTS, ids=["rloo", "ppo"])


@pytest.fixture
def functions(in_tmp):
    """functions(code): writes it to mine.py in the test's folder."""

    def write(code, name="mine.py"):
        data._load_module.cache_clear()
        Path(name).write_text(textwrap.dedent(code))

    return write


def refused(capsys, function, *args):
    with pytest.raises(SystemExit) as end:
        function(*args)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1, line
    return line


# ---- finding them ----------------------------------------------------------------------------------------------------
def test_a_function_is_found_in_a_file_and_in_a_package_and_may_import_its_neighbours(functions, in_tmp, monkeypatch):
    (in_tmp / "pack").mkdir()
    functions("WORD = 'kind'", "words.py")
    functions("import words\ndef f(prompts, completions):\n    return [c.count(words.WORD) for c in completions]")
    functions("from words import WORD\ndef g(prompts, completions):\n    return WORD", "pack/inner.py")
    functions("def length():\n    return 'of the user, not of this project'", "toy.py")
    assert data.load_function("mine.py:f", "--reward_fn")([""], ["kind and kind"]) == [2]
    assert data.load_function(f"{in_tmp}/mine.py:f", "--reward_fn")([""], ["kind"]) == [1]
    assert data.load_function("pack.inner:g", "--reward_fn")([], []) == "kind"
    monkeypatch.syspath_prepend(str(ROOT / "rlhf_details"))  # as where a script has been started
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    assert data.load_function("toy:length", "--reward_fn")() == "of the user, not of this project"
    assert data.load_function("rlhf_details.toy:right_sum", "--reward_fn") is toy.right_sum


@pytest.mark.parametrize(
    "spec, code, words",
    [
        ("mine.py", "", "FILE.py:function"),
        ("nowhere.py:f", "", "nowhere.py"),
        ("no.such.package:f", "", "No module named"),
        ("mine.py:f", "def g(): pass", "no function 'f'"),
        ("mine.py:f", "f = 3", "no function 'f'"),
        ("mine.py:f", "def f(:", "SyntaxError"),
        ("mine.py:f", "1 / 0", "ZeroDivisionError"),
        ("mine.py:f", "import sys; sys.exit(0)", "SystemExit"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_line(functions, tiny, capsys, spec, code, words):
    functions(code)
    line = refused(capsys, train_rloo.check, rloo_args(tiny, reward_fn=(spec,)))
    assert f"--reward_fn {spec}" in line and words in line and not Path("runs").exists()


def test_weights_must_be_as_many_as_functions_and_finite_and_one_reward_must_be_named(functions, tiny, capsys):
    functions("def f(prompts, completions):\n    return [0.0]")
    one = {"reward_fn": ("mine.py:f",)}
    assert "2 weights of 1" in refused(capsys, train_rloo.check, rloo_args(tiny, **one, reward_fn_weights=(1.0, 2.0)))
    assert "finite" in refused(capsys, train_ppo.check, ppo_args(tiny, **one, reward_fn_weights=(float("nan"),)))
    assert "named twice" in refused(capsys, train_ppo.check, ppo_args(tiny, reward_fn=("mine.py:f", "mine.py:f")))
    assert "--reward_model_path or --reward_fn" in refused(capsys, train_rloo.check, rloo_args(tiny, reward_model_path=None))


def test_a_column_that_a_function_needs_and_no_row_has_is_named_for_both_data_sets(functions, tiny, capsys):
    functions("def f(prompts, completions, answer):\n    return [1.0] * len(prompts)")
    line = refused(capsys, train_rloo.main, rloo_args(tiny, reward_fn=("mine.py:f",)))
    assert "'answer'" in line and "--dataset toy" in line and "'completion'" in line
    rows = [{"prompt": row["prompt"], "answer": "x"} for row in toy.rows("prompts", "train")[:16]]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dict(dataset="rows.jsonl", eval_dataset="toy:test", reward_fn=("mine.py:f",))
    assert "--eval_dataset toy:test" in refused(capsys, train_ppo.main, ppo_args(tiny, **options))


def test_the_flag_may_be_given_again_and_again(monkeypatch):
    for argv in (
        ["--reward_fn", "a:f", "b:g"],
        ["--reward_fn", "a:f", "--reward-fn=b:g"],
        ["--reward_fn=a:f", "--reward_fn", "b:g"],
    ):
        got = utils.parse_args(train_rloo.Args, toy.defaults("train_rloo"), [*argv, "--reward_fn_weights", "1", "-0.5", "--track"])
        assert got.reward_fn == ("a:f", "b:g") and got.reward_fn_weights == (1.0, -0.5) and got.track


def test_a_file_of_defaults_gives_way_to_the_command_line(in_tmp):
    Path("run.toml").write_text('reward_fn = ["a:f", "b:g"]\nreward_fn_weights = [1, 2]')
    parse = lambda *argv: utils.parse_args(train_ppo.Args, toy.defaults("train_ppo"), ["--config", "run.toml", *argv])  # noqa: E731
    assert parse().reward_fn == ("a:f", "b:g") and parse().reward_fn_weights == (1.0, 2.0)
    assert parse("--reward_fn", "c:h").reward_fn == ("c:h",)


# ---- calling them ----------------------------------------------------------------------------------------------------
def call(functions, code, rows, completions, names=("f",), scores=None):
    functions(code)
    args = SimpleNamespace(reward_fn=tuple(f"mine.py:{name}" for name in names), reward_fn_weights=(), reward_model_path=None)
    found = reward_functions.RewardFunctions(args, "cpu", None)
    found.check_columns(rows, "--dataset x")
    return found, *found(rows, completions, scores)


ROWS = [{"prompt": f"p{i}", "answer": i, "extra": -i} for i in range(3)]


@pytest.mark.parametrize(
    "returned, values, kinds",
    [
        ("[1, 2.5, -3]", [1, 2.5, -3], [1, 1, 1]),
        ("[True, False, True]", [1, 0, 1], [2, 2, 2]),
        ("[None, 0.0, None]", [0, 0, 0], [0, 1, 0]),
        ("(x for x in (1, True, None))", [1, 1, 0], [1, 2, 0]),
        ("__import__('numpy').array([1.5, 2, 3])", [1.5, 2, 3], [1, 1, 1]),
        ("__import__('numpy').array([True, False, True])", [1, 0, 1], [2, 2, 2]),
        ("__import__('torch').tensor([1.5, 2, 3])", [1.5, 2, 3], [1, 1, 1]),
        (
            "[__import__('torch').tensor(1.5), __import__('numpy').float32(2), __import__('numpy').bool_(True)]",
            [1.5, 2, 1],
            [1, 1, 2],
        ),
        ("[float('nan'), 1, 2]", [0, 1, 2], [3, 1, 1]),
        ("[1, float('inf'), 2]", [1, 0, 2], [1, 3, 1]),
        ("[1, 2, 1e39]", [1, 2, 0], [1, 1, 3]),
        ("['1', 2, 3]", [0, 2, 3], [3, 1, 1]),
        ("[1, 2]", [0, 0, 0], [3, 3, 3]),
        ("[1, 2, 3, 4]", [0, 0, 0], [3, 3, 3]),
        ("None", [0, 0, 0], [3, 3, 3]),
        ("{0: 1, 1: 2, 2: 3}", [0, 0, 0], [3, 3, 3]),
        ("'abc'", [0, 0, 0], [3, 3, 3]),
        ("[10**400, 2, 3]", [0, 2, 3], [3, 1, 1]),
        ("7", [0, 0, 0], [3, 3, 3]),
        ("1 / 0", [0, 0, 0], [3, 3, 3]),
    ],
)
def test_what_a_function_may_return(functions, returned, values, kinds):
    found, got, kind = call(functions, f"def f(prompts, completions):\n    return {returned}", ROWS, ["a", "b", "c"])
    assert got.squeeze(1).tolist() == values and kind.squeeze(1).tolist() == kinds
    assert bool(found.error) == (3 in kinds) and (not found.error or "--reward_fn f" in found.error)


def test_a_function_gets_the_columns_that_it_names_or_all(functions):
    code = """
        def f(prompts, completions, answer): return [prompts == ["p0", "p1", "p2"] and answer == [0, 1, 2]] * 3
        def g(completions, prompts, **columns): return [columns == {"answer": [0, 1, 2], "extra": [0, -1, -2]}] * 3
        def h(prompts, completions, *, extra=None, other=None): return [extra == [0, -1, -2] and other is None] * 3
        def i(prompts, completions): return [len(c) for c in completions]
    """
    _, values, kinds = call(functions, code, ROWS, ["", "b", "cc"], "fghi")
    assert values.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 2]] and kinds.tolist() == [[2, 2, 2, 1]] * 3


def test_columns_are_those_of_the_data_set_and_what_a_function_changes_is_its_own(functions):
    code = """
        def f(prompts, completions, **columns):
            seen = sorted(columns) == ["answer", "extra", "rare"] and columns["rare"] == [None, None, None] and prompts[0] == "p0"
            prompts.clear(), completions.clear(), columns["extra"].append(9)
            return [seen] * 3
        def g(prompts, completions, rare): return [rare == [None] * 3 and completions == ["a", "b", "c"]] * 3
    """
    functions(code)
    args = SimpleNamespace(reward_fn=("mine.py:f", "mine.py:g"), reward_fn_weights=(), reward_model_path=None)
    found = reward_functions.RewardFunctions(args, "cpu", None)
    found.check_columns([*ROWS, {"prompt": "p", "rare": 1, "prompts": "x", "completions": "y"}], "--dataset x")
    assert found(ROWS, ["a", "b", "c"], None)[0].tolist() == [[1, 1]] * 3
    messages = [{"prompt": [{"role": "user", "content": "hello"}]}]
    functions("def f(prompts, completions):\n    prompts[0][0]['content'] = completions[0][0]['content'] = ''\n    return [0]")
    args.reward_fn = ("mine.py:f",)
    reward_functions.RewardFunctions(args, "cpu", None)(messages, ["x"], None)
    assert messages == [{"prompt": [{"role": "user", "content": "hello"}]}]


@pytest.mark.parametrize(
    "code",
    [
        "def f(prompts): return []",
        "def f(a, b): return []",
        "def f(prompts, completions, /): return []",
        "async def f(prompts, completions): return []",
        "f = max",
        "class f:\n    def __init__(self, prompts, completions): pass",
    ],
)
def test_what_cannot_be_called_as_a_reward_function_is_refused_at_once(functions, tiny, capsys, code):
    functions(code)
    assert "--reward_fn mine.py:f" in refused(capsys, train_rloo.check, rloo_args(tiny, reward_fn=("mine.py:f",)))


def test_partials_and_instances_are_functions(functions):
    code = """
        import functools
        def g(scale, prompts, completions, **columns): return [scale * len(c) for c in completions]
        f = functools.partial(g, 2)
        class Caller:
            def __call__(self, prompts, completions): return [len(c) for c in completions]
        h = Caller()
    """
    assert call(functions, code, ROWS, ["a", "bb", ""], "fh")[1].tolist() == [[2, 1], [4, 2], [0, 0]]


def test_conversations_come_as_messages(functions):
    rows = [{"prompt": [{"role": "user", "content": "hello"}]}]
    code = """
        def f(prompts, completions):
            assert completions == [[{"role": "assistant", "content": "x"}]]
            return [prompts == [[{"role": "user", "content": "hello"}]]]
    """
    assert call(functions, code, rows, ["x"])[1].tolist() == [[1.0]]


def test_a_reward_models_scores_stand_before_the_functions_and_names_are_told_apart(functions):
    functions("def f(prompts, completions):\n    return [5, 6, 7]", "other.py")
    functions("def f(prompts, completions):\n    return [1, 2, None]")
    specs = ("mine.py:f", "other.py:f")
    args = SimpleNamespace(reward_fn=specs, reward_fn_weights=(2.0, -1.0), reward_model_path="model")
    found = reward_functions.RewardFunctions(args, "cpu", None)
    values, kinds = found(ROWS, ["a", "b", "c"], torch.tensor([0.5, 0.25, 0.125]))
    assert found.names == ["reward_model", *specs] and found.weights == [1.0, 2.0, -1.0]
    assert values.tolist() == [[0.5, 1, 5], [0.25, 2, 6], [0.125, 0, 7]] and kinds.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 1]]
    by_name = {name: x.tolist() for name, x in found.by_name(values, kinds).items()}
    expected = {"rewards/reward_model": [0.5, 0.25, 0.125], "rewards/mine.py:f": [1, 2], "rewards/other.py:f": [5, 6, 7]}
    assert by_name == expected


# ---- summing them ----------------------------------------------------------------------------------------------------
def slow_combine(values, given, weights, k):
    """For each response: a sum and whether it counts, by loops over groups."""
    scores, counted = [], []
    for start in range(0, len(values), k):
        group = range(start, start + k)
        of_prompt = [f for f in range(len(weights)) if any(given[i][f] for i in group)]
        for i in group:
            complete = bool(of_prompt) and all(given[i][f] for f in of_prompt)
            counted.append(complete)
            scores.append(sum(weights[f] * values[i][f] for f in of_prompt) if complete else 0.0)
    return scores, counted


@pytest.mark.parametrize("script", [train_rloo, train_ppo])
def test_rew_4_rewards_are_summed_by_weight_and_nones_leave_out_whom_they_must(script):
    rng = random.Random(0)
    for k, num_rewards in itertools.product((1, 2, 4), (1, 2, 3)):
        values = [[rng.uniform(-2, 2) for _ in range(num_rewards)] for _ in range(24)]
        given = [[rng.random() < 0.7 for _ in range(num_rewards)] for _ in range(24)]
        weights = [rng.uniform(-1, 2) for _ in range(num_rewards)]
        expected, expected_counted = slow_combine(values, given, weights, k)
        scores, counted = script.combine_rewards(torch.tensor(values), torch.tensor(given), torch.tensor(weights), k)
        assert counted.tolist() == expected_counted and scores.tolist() == pytest.approx(expected, abs=1e-6)


def test_one_none_of_k_leaves_its_siblings_as_if_it_had_not_been_sampled():
    rewards, counted = torch.tensor([3.0, 1.0, 100.0, 2.0, 5.0, 1.0]), torch.tensor([True, True, False, True, True, False])
    advantages = train_rloo.rloo_advantages(rewards[:4], 4, counted[:4])
    alone = train_rloo.rloo_advantages(torch.tensor([3.0, 1.0, 2.0]), 3)
    assert advantages.tolist() == [alone[0], alone[1], 0.0, alone[2]]
    assert train_rloo.rloo_advantages(rewards[4:], 2, counted[4:]).tolist() == [0.0, 0.0]  # no sibling is left to compare with
    kl = torch.rand(4, 5)
    got = train_rloo.token_level_advantages(rewards[:4], kl, 4, 0.1, counted[:4])
    of_three = train_rloo.token_level_advantages(torch.tensor([3.0, 1.0, 2.0]), kl[counted[:4]], 3, 0.1)
    assert torch.allclose(got[counted[:4]], of_three)


def test_whitening_and_running_moments_do_not_see_who_does_not_count():
    scores, counted = torch.tensor([1.0, 2.0, 4.0, 0.0]), torch.tensor([True, True, True, False])
    alone = train_rloo.shape_scores(scores[:3], True, None)
    assert torch.allclose(train_rloo.shape_scores(scores, True, None, counted), torch.cat([alone, torch.zeros(1)]))
    moments, other = train_ppo.RunningMoments(), train_ppo.RunningMoments()
    train_ppo.shape_scores(scores, moments, True, True, None, counted)
    train_ppo.shape_scores(scores[:3], other, True, True, None)
    assert vars(moments) == vars(other)
    train_ppo.shape_scores(scores, moments, True, True, None, torch.zeros(4, dtype=torch.bool))  # nobody counts: nothing changes
    assert vars(moments) == vars(other)


# ---- whole runs ------------------------------------------------------------------------------------------------------
LENGTHS = """
    def words(prompts, completions): return [float(len(c.split())) for c in completions]
    def is_long(prompts, completions, completion):
        assert len(prompts) == len(completions) == len(completion)
        return [len(c.split()) > 4 for c in completions]
"""


@MAINS
def test_the_score_is_the_weighted_sum_of_reward_model_and_functions(functions, tiny, script, args):
    functions(LENGTHS)
    options = dict(reward_fn=("mine.py:words", "mine.py:is_long"), reward_fn_weights=(0.5, -2.0), missing_eos_penalty=None)
    script.main(args(tiny, **options, eval_dataset="toy:test", take=20))
    rows = read_metrics("runs/run")
    assert len(rows) == 4
    for row in rows:
        at = "eval/objective/" if row["update"] == 0 else "objective/"
        model, words, is_long = (row[f"{at}rewards/{name}"] for name in ("reward_model", "words", "is_long"))
        assert row[f"{at}scores"] == pytest.approx(model + 0.5 * words - 2 * is_long, abs=1e-4)
        assert row[f"{at}verifiable_correct_rate"] == is_long and 1 < words < 9
        assert words <= row.get("val/sequence_lengths", row.get("eval/objective/length"))


@MAINS
def test_functions_alone_train_without_any_reward_model(functions, tiny, script, args):
    functions("def f(prompts, completions):\n    return [c.count('the') - 0.5 * len(c.split()) for c in completions]")
    options = dict(reward_model_path=None, reward_fn=("mine.py:f",), kl_coef=0.0, learning_rate=3e-3, total_episodes=480)
    script.main(args(tiny, **options, missing_eos_penalty=None))
    rows = read_metrics("runs/run")
    scores = [row["objective/scores"] for row in rows]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.5
    assert [row["objective/rewards/f"] for row in rows] == pytest.approx(scores, abs=1e-5)
    if script is train_ppo:
        assert rows[0]["val/mean"] == 0 and rows[-1]["val/mean"] != 0  # a critic with a zero head, on the policy's trunk


@MAINS
def test_each_function_sees_the_rows_own_columns(functions, tiny, script, args):
    rows = [
        {"prompt": row["prompt"], "number": i, "text": row["prompt"]} for i, row in enumerate(toy.rows("prompts", "train")[:24])
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    functions("""
        import json
        TEXTS = [json.loads(line)["prompt"] for line in open("rows.jsonl")]
        def f(prompts, completions, **columns):
            assert set(columns) == {"number", "text"}
            return [p == t == TEXTS[n] for p, t, n in zip(prompts, columns["text"], columns["number"])]
    """)
    options = dict(dataset="rows.jsonl", reward_fn=("mine.py:f",), max_prompt_length=17)  # some rows are dropped
    script.main(args(tiny, **options))
    assert [row["objective/verifiable_correct_rate"] for row in read_metrics("runs/run")] == [1.0] * 3


@MAINS
def test_nones_are_left_out_of_means_and_of_the_update(functions, tiny, script, args):
    """A None in place of a huge reward changes neither the mean score nor the loss of the others."""
    functions("""
        def f(prompts, completions): return [None if len(c.split()) % 2 else 1.0 + len(c.split()) for c in completions]
        def never(prompts, completions): return [None for _ in completions]
    """)
    script.main(args(tiny, reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None, total_episodes=32))
    first = read_metrics("runs/run")[0]
    assert first["objective/scores"] == pytest.approx(first["objective/rewards/f"]) and first["objective/scores"] > 1
    options = dict(reward_model_path=None, reward_fn=("mine.py:never",), kl_coef=0.0, total_episodes=32, missing_eos_penalty=None)
    script.main(args(tiny, **options, output_dir="same"))
    rows = read_metrics("runs/run")
    assert all(row["policy/grad_norm"] == 0 and row["objective/scores"] == 0 for row in rows)
    assert all(row["val/counted"] == 0 and row["val/equal_scores"] == 1 for row in rows) and 0 < first["val/counted"] < 1
    assert "objective/rewards/never" not in rows[0]


@pytest.mark.parametrize("run, args", [(run_rloo, rloo_args), (run_ppo, ppo_args)], ids=["rloo", "ppo"])
@pytest.mark.slow
def test_two_processes_and_small_micro_batches_give_the_same_curves(functions, tiny, in_tmp, run, args):
    functions(LENGTHS + "    def some(prompts, completions): return [None if 'the' in c else 1.0 for c in completions]\n")
    options = dict(reward_fn=("mine.py:words", "mine.py:is_long", "mine.py:some"), num_mini_batches=2, num_ppo_epochs=2)
    one = run(tiny, **options, micro_batch_size=1000)
    assert_same_curves(one, run(tiny, **options, micro_batch_size=4, rollout_micro_batch_size=4))
    done = start(args(tiny, **options), 2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:2000]
    assert_same_curves(one, read_metrics("runs/run"))


def start(args, processes):
    """A run in processes of its own."""
    script = "train_rloo.py" if isinstance(args, train_rloo.Args) else "train_ppo.py"
    flags = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, bool):
            flags.append(f"--{field.name}" if value else f"--no_{field.name}")
        elif value != () and field.name != "config":
            flags += [f"--{field.name}", *(map(str, value) if isinstance(value, tuple) else [value])]
    return launch(script, flags, processes, cwd=Path.cwd())


@MAINS
@pytest.mark.parametrize(
    "body, words",
    [
        ("raise ValueError('no such\\nkey')", ["raised ValueError: no such key", "mine.py, line 5"]),
        ("import sys; sys.exit(3)", ["raised SystemExit: 3"]),
        ("return [0.0] * (len(completions) - 1)", ["returned", "entries for"]),
        ("return [float('nan')] * len(completions)", ["returned nan for the completion"]),
        ("return [0.0] * (len(completions) - 1) + ['much']", ["returned 'much' for the completion"]),
    ],
)
def test_a_function_that_fails_stops_the_run_with_its_name_the_update_and_the_row(
    functions, tiny, capsys, script, args, body, words
):
    functions(f"""
        calls = []
        def f(prompts, completions):
            calls.append(1)
            if len(calls) > 1: {body}
            return [0.0] * len(completions)
    """)
    with pytest.raises(SystemExit) as end:
        script.main(args(tiny, reward_fn=("mine.py:f",), checkpoint_every=1))
    report = capsys.readouterr().err
    assert end.value.code == 1 and "update 2: --reward_fn f" in report and all(word in report for word in words), report
    assert (
        "row " in report
        and "of --dataset" in report
        and "checkpoints/000001" in report
        and not Path(args(tiny).output_dir).exists()
    )


@pytest.mark.slow
def test_a_function_that_fails_on_one_process_alone_stops_all_of_them(functions, tiny):
    functions("""
        import os
        def f(prompts, completions):
            if os.environ["RANK"] == "1": raise KeyError("only here")
            return [0.0] * len(completions)
    """)
    done = start(rloo_args(tiny, reward_fn=("mine.py:f",)), 2)
    assert done.returncode != 0 and done.stderr.count("error: update 1: --reward_fn f raised KeyError") == 1


def test_a_resumed_run_goes_on_after_the_function_was_mended(functions, tiny, capsys):
    broken = "def f(prompts, completions):\n    f.n = getattr(f, 'n', 0) + 1\n    return [float(len(c)) for c in completions]"
    functions(broken)
    train_rloo.main(rloo_args(tiny, reward_fn=("mine.py:f",), run_name="whole", output_dir="whole"))
    functions(broken + "[: None if f.n < 3 else 0]")
    with pytest.raises(SystemExit):
        train_rloo.main(rloo_args(tiny, reward_fn=("mine.py:f",), checkpoint_every=1))
    functions(broken)
    train_rloo.main(rloo_args(tiny, reward_fn=("mine.py:f",), checkpoint_every=1, resume=True))
    assert without_times(read_metrics("runs/run")) == without_times(read_metrics("runs/whole"))


@pytest.mark.slow
def test_rows_that_differ_between_the_processes_end_the_run(functions, tiny):
    functions("""
        import os
        def rows():
            rows = [{"prompt": f"we went to a small {word}"} for word in ("cafe", "hotel", "inn")]
            return rows[::-1] if os.environ["RANK"] == "1" else rows
    """)
    done = start(rloo_args(tiny, dataset="mine.py:rows"), 2)
    assert done.returncode != 0 and done.stderr.count("error: --dataset: the processes read other rows") == 1
    assert not Path("runs/run").exists()


# ---- a reward model with a tokenizer of its own ------------------------------------------------------------------------
def other_tokenizer(order):
    """The toy tokenizer with its words' ids shuffled: order[old id] is the new one."""
    spec = json.loads(toy.tokenizer().backend_tokenizer.to_str())
    spec["model"]["vocab"] = {word: order[i] for word, i in spec["model"]["vocab"].items()}
    spec["added_tokens"] = [t | {"id": order[t["id"]]} for t in spec["added_tokens"] if t["content"] == "<eos>"]
    Path("tokenizer.json").write_text(json.dumps(spec))
    return PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", eos_token="<eos>")


@pytest.fixture
def shuffled(tiny, in_tmp):
    """(a policy that has no special token but EOS, so that its text says all; the tiny reward model over the same words in another
    order: its scores of a text are the same, those of ids are not)."""
    policy = shutil.copytree(tiny / "policy", "policy")
    for file in policy_files(policy):
        file.unlink()
    plain = json.loads(toy.tokenizer().backend_tokenizer.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] == "<eos>"]
    Path("plain.json").write_text(json.dumps(plain))
    PreTrainedTokenizerFast(tokenizer_file="plain.json", eos_token="<eos>").save_pretrained(policy)
    order = np.random.default_rng(0).permutation(len(toy.tokenizer())).tolist()
    model = AutoModelForSequenceClassification.from_pretrained(tiny / "reward")
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[torch.tensor(order)] = weight.clone()[: len(order)]
    tokenizer = other_tokenizer(order)
    model.save_pretrained("shuffled"), tokenizer.save_pretrained("shuffled")
    return "policy", "shuffled"


def policy_files(folder):
    return [file for file in Path(folder).iterdir() if "token" in file.name]


@MAINS
def test_a_reward_model_with_other_token_ids_is_given_text_and_scores_the_same(tiny, shuffled, capsys, script, args):
    policy, reward_model = shuffled
    options = dict(eval_dataset="toy:test", take=30, sft_model_path=policy)
    options |= {"value_model": "shared"} if script is train_ppo else {}
    script.main(args(tiny, **options))
    same = read_metrics("runs/run")
    script.main(args(tiny, **options, reward_model_path=reward_model))
    assert "tokenizer of its own" in capsys.readouterr().out
    assert_same_curves(same, read_metrics("runs/run"))


def test_only_what_has_ended_is_followed_by_eos_and_long_texts_lose_their_beginning(tiny):
    reward_model = train_rloo.Reward(utils.load_reward_model(tiny / "reward", "--reward_model_path")).eval()
    tokenizer, prompts, answers = toy.tokenizer(), ["last night we went", "on monday"], ["the room was lovely .", "the pool"]
    ended = torch.tensor([True, False])
    got = reward_functions.score_text(reward_model, tokenizer, prompts, answers, ended, 1)
    for i in range(2):
        ids = tokenizer(f"{prompts[i]} {answers[i]}").input_ids + [tokenizer.eos_token_id] * bool(ended[i])
        tokens = torch.tensor([ids])
        mask = torch.ones_like(tokens, dtype=torch.bool)
        alone = reward_model(tokens, mask, utils.positions_from_mask(mask), torch.tensor([[len(ids) - 1]]))
        assert got[i].item() == pytest.approx(alone.item(), abs=1e-5)
    long = ["we " * 500]
    both = [reward_functions.score_text(reward_model, tokenizer, [p], ["the room"], ended[1:], 4) for p in (long[0], long[0] * 2)]
    assert torch.equal(*both)


def test_an_evaluation_reports_each_reward_with_its_interval(functions, tiny, capsys):
    functions("""
        def words(prompts, completions): return [float(len(c.split())) for c in completions]
        def is_long(prompts, completions, completion): return [len(c.split()) > 4 for c in completions]
        def fails(prompts, completions): return [0.0] * 3 + [None, float("nan")] + [0.0] * (len(completions) - 5)
    """)
    values = dict(policy_path=str(tiny / "policy"), opponent_path=str(tiny / "policy"), num_examples=24, response_length=8)
    values |= dict(temperature=1.0, overwrite=True)
    summary = evaluate.main(evaluate.Args(**values, reward_fn=("mine.py:words", "mine.py:is_long")))
    for side in ("policy", "opponent"):
        figures = summary["metrics"][side]
        assert 1 < figures["rewards/words"]["low"] < figures["rewards/words"]["value"] < figures["rewards/words"]["high"]
        assert figures["verifiable_correct_rate"]["value"] == figures["rewards/is_long"]["value"]
    assert "rewards/words" in capsys.readouterr().out
    assert "mine.py:no" in refused(capsys, evaluate.main, evaluate.Args(**values, reward_fn=("mine.py:no",)))
    line = refused(capsys, evaluate.main, evaluate.Args(**values, reward_fn=("mine.py:fails",)))
    assert "--reward_fn fails returned nan" in line and "row 5" in line


# ---- wiring: who is rewarded, and who is left out of what ------------------------------------------------------------------
@pytest.fixture
def echo(monkeypatch):
    """The sampler repeats the end of each prompt, so that a completion says which prompt it belongs to."""

    def install(script):
        def sample(policy, queries, query_mask, rows, *rest):
            n, R = (rest[0], rest[1]) if script is train_rloo else (1, rest[0])
            responses = queries[:, -R:].repeat_interleave(n, 0)
            return responses, torch.ones_like(responses, dtype=torch.bool), torch.zeros(responses.shape)

        monkeypatch.setattr(script, "sample", sample)

    return install


@MAINS
def test_each_completion_is_rewarded_with_its_own_row(functions, tiny, echo, script, args):
    prompts = [f"{row['prompt']} {row['prompt']}" for row in toy.rows("prompts", "train")[:40]]
    for name, part in (("train", prompts[:24]), ("eval", prompts[24:37])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p, "copy": p}) + "\n" for p in part))
    echo(script)
    functions("""
        def f(prompts, completions, copy): return [p == q and p.endswith(c) for p, q, c in zip(prompts, copy, completions)]
    """)
    options = dict(dataset="train.jsonl", eval_dataset="eval.jsonl", stop_token="none", rollout_micro_batch_size=4)
    script.main(args(tiny, **options, reward_fn=("mine.py:f",), num_sample_generations=2))
    for row in read_metrics("runs/run"):
        rates = [row[name] for name in row if name.endswith("verifiable_correct_rate")]
        assert rates and set(rates) == {1.0}


SOME = """
    calls = []
    def half(prompts, completions): return [None if i % 2 else float(i) for i in range(len(completions))]
    def half_equal(prompts, completions): return [None if i % 2 else 1.0 for i in range(len(completions))]
    def later_none(prompts, completions):
        calls.append(1)
        return [None if len(calls) > 2 else float(i % 3) for i in range(len(completions))]
"""


@MAINS
def test_from_when_on_nobody_counts_there_is_no_gradient(functions, tiny, script, args):
    functions(SOME)
    options = dict(
        reward_model_path=None, reward_fn=("mine.py:later_none",), missing_eos_penalty=None, kl_coef=0.5, learning_rate=0.01
    )
    options |= {"token_level_kl": True} if script is train_rloo else {}
    script.main(args(tiny, **options, total_episodes=64))
    norms = [row["policy/grad_norm"] for row in read_metrics("runs/run")]
    assert norms[0] > 0 and norms[1] > 0 and norms[2:] == [0, 0]


def test_the_loss_is_a_mean_over_those_who_count(functions, tiny):
    """Half of each group of 4 is left out; a group of the others alone, all counted, has the same mean gradient."""
    functions(
        SOME + "    def all_of_two(prompts, completions): return [float(i // 2 * 4 + i % 2 * 2) for i in range(len(completions))]\n"
    )
    options = dict(reward_model_path=None, missing_eos_penalty=None, kl_coef=0.0, total_episodes=16)
    run_rloo(tiny, **options, reward_fn=("mine.py:half",))
    seen = {}
    original = train_rloo.rloo_policy_loss

    def spy(*tensors):
        result = original(*tensors)
        seen["mask"] = result[3]
        return result

    train_rloo.rloo_policy_loss = spy
    try:
        rows = run_rloo(tiny, **options, reward_fn=("mine.py:half",))
    finally:
        train_rloo.rloo_policy_loss = original
    assert seen["mask"].sum() == 8 and rows[0]["val/counted"] == 0.5
    # 8 losses of ratio 1 are minus their advantages, whose mean over those 8 is 0
    assert rows[0]["loss/policy_avg"] == pytest.approx(0, abs=1e-5) and rows[0]["policy/grad_norm"] > 0


@MAINS
def test_means_whitening_and_moments_are_over_those_who_count(functions, tiny, monkeypatch, script, args):
    functions(SOME)
    masks = []
    whiten = utils.masked_whiten

    def spy(x, mask, *rest, **options):
        masks.append(mask)
        return whiten(x, mask, *rest, **options)

    monkeypatch.setattr(utils, "masked_whiten", spy)
    options = dict(reward_model_path=None, reward_fn=("mine.py:half",), missing_eos_penalty=None, kl_coef=0.0, total_episodes=16)
    norm = {"normalize_reward": True, "normalize_advantage": True} if script is train_rloo else {"score_norm": True}
    script.main(args(tiny, **options, checkpoint_every=1))
    (plain,) = read_metrics("runs/run")
    assert plain["objective/rlhf_reward"] == pytest.approx(plain["objective/scores"], abs=1e-5) == 7.0
    assert plain.get("objective/score_total", 7.0) == pytest.approx(7.0)
    masks.clear()
    script.main(args(tiny, **options, **norm, checkpoint_every=1))
    (row,) = read_metrics("runs/run")
    assert row["objective/rlhf_reward"] == pytest.approx(0, abs=1e-4)
    if script is train_rloo:
        assert [mask.sum().item() for mask in masks] == [8, 8]
    else:
        assert masks[-1].sum() < masks[-1].numel() and not masks[-1][1::2].any()
        state = json.loads(Path("runs/run/checkpoints/000001/state.json").read_text())
        assert state["carried"]["moments"]["count"] == pytest.approx(8, abs=0.01)


@MAINS
def test_held_out_scores_are_of_those_who_count_and_a_failure_there_stops_the_run(functions, tiny, capsys, script, args):
    functions(SOME + "    def fails(prompts, completions): return [1 / 0]\n")
    options = dict(reward_model_path=None, missing_eos_penalty=None, eval_dataset="toy:test", total_episodes=16)
    script.main(args(tiny, **options, reward_fn=("mine.py:half",)))
    for row in read_metrics("runs/run"):
        assert row["eval/objective/scores"] == pytest.approx(row["eval/objective/rewards/half"], rel=1e-5)
    with pytest.raises(SystemExit) as end:
        script.main(args(tiny, **options, reward_fn=("mine.py:fails",)))
    report = capsys.readouterr().err
    assert end.value.code == 1 and "row 1, " in report
    assert "evaluation, update 0: --reward_fn fails raised ZeroDivisionError" in report


@MAINS
def test_a_reward_model_alone_is_the_score_and_equal_scores_are_rare(tiny, in_tmp, script, args):
    script.main(args(tiny))
    rows = read_metrics("runs/run")
    assert all(row["val/equal_scores"] < 0.5 and row["val/counted"] == 1 for row in rows)
    assert not any("/rewards/" in name for row in rows for name in row)


def test_with_one_response_a_prompt_equal_scores_are_of_the_batch(tiny, in_tmp):
    rows = run_rloo(tiny, rloo_k=1, token_level_kl=True, normalize_advantage=True)
    assert [row["val/equal_scores"] for row in rows] == [0, 0, 0]


def test_a_critic_cannot_start_from_a_reward_model_of_other_token_ids(tiny, shuffled):
    policy, reward_model = shuffled
    (first, *_) = run_ppo(tiny, sft_model_path=policy, reward_model_path=reward_model, value_model="separate")
    assert first["val/mean"] == 0 and first["val/var"] == 0


def test_a_resumed_run_with_other_columns_is_refused(functions, tiny, capsys):
    functions("def f(prompts, completions, x): return [float(v) for v in x]")
    for value in (1, 2):
        rows = [{"prompt": row["prompt"], "x": value} for row in toy.rows("prompts", "train")[:16]]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = dict(dataset="rows.jsonl", reward_fn=("mine.py:f",), checkpoint_every=1)
        if value == 1:
            train_rloo.main(rloo_args(tiny, **options))
    assert "had other rows" in refused(capsys, train_rloo.main, rloo_args(tiny, **options, resume=True))


def test_the_episode_shown_is_the_one_that_failed(functions, tiny, capsys):
    functions("def f(prompts, completions): return [0.0] * (len(completions) - 1) + ['much']")
    with pytest.raises(SystemExit):
        train_rloo.main(rloo_args(tiny, reward_fn=("mine.py:f",)))
    report = capsys.readouterr().err
    said = report.split("for the completion ")[1].splitlines()[0]
    assert "1 episode(s), the first is 15" in report and report.count(said) == 2


def test_text_is_scored_by_its_end_with_a_chat_template_and_without_an_eos(tiny, in_tmp):
    reward_model = train_rloo.Reward(utils.load_reward_model(tiny / "reward", "--reward_model_path")).eval()
    tokenizer, ended = toy.tokenizer(), torch.tensor([True])

    def alone(ids):
        tokens = torch.tensor([ids])
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return reward_model(tokens, mask, utils.positions_from_mask(mask), torch.tensor([[len(ids) - 1]])).item()

    long = " ".join(random.Random(0).choices(sorted(toy.NOUN_TOPIC), k=300))
    ids = tokenizer(f"{long} the room").input_ids + [tokenizer.eos_token_id]
    got = reward_functions.score_text(reward_model, tokenizer, [long], ["the room"], ended, 4)
    assert got.item() == pytest.approx(alone(ids[-128:]), abs=1e-5)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "we went"}]
    query, answer = data.encode(tokenizer, messages, [{"role": "assistant", "content": "the room"}])
    got = reward_functions.score_text(reward_model, tokenizer, [messages], ["the room"], ended, 4)
    assert got.item() == pytest.approx(alone(query + answer), abs=1e-5)
    without = toy.tokenizer()
    without.eos_token = None
    got = reward_functions.score_text(reward_model, without, ["we went"], ["the room"], ended, 4)
    assert got.item() == pytest.approx(alone(tokenizer("we went the room").input_ids), abs=1e-5)


def test_what_a_function_empties_the_next_one_still_sees_and_defaults_are_not_required(functions):
    code = """
        def f(prompts, completions, other=None): prompts.clear(), completions.clear(); return [1, 1, 1]
        def g(prompts, completions): return [float(len(prompts) + len(completions))] * 3
    """
    assert call(functions, code, ROWS, ["a", "b", "c"], "fg")[1].tolist() == [[1, 6]] * 3


def test_what_a_function_imports_when_it_is_called_is_found(functions):
    functions("WORD = 'kind'", "words.py")
    functions("def f(prompts, completions):\n    import words\n    return [c.count(words.WORD) for c in completions]")
    assert data.load_function("mine.py:f", "--reward_fn")([""], ["kind"]) == [1]
