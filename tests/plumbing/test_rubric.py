"""The rubric of examples/judge, as a reward of a run, against the embedded judge on a local HTTP server."""

import asyncio
import importlib
import math
import sys
import threading

import pytest
from helpers import PAGES, ROOT, page_args, read_metrics

from rlhf_details import toy

pytest.importorskip("openai")
PROMPT, RIGHT, WRONG = "my sister went to a small hotel .", "the room was really lovely .", "the soup was awful ."


@pytest.fixture
def serve(monkeypatch):
    """serve(**faults) starts the server; returns the module rubric."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "judge"))
    started, own = [], importlib.import_module("server")

    def start(**faults):
        started.append(own.server(toy.Judge(**faults), 0))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://localhost:{started[-1].server_port}/v1")
        return importlib.import_module("rubric")

    yield start
    for one in started:
        one.shutdown(), one.server_close()
    for name in ("server", "rubric"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "answer, expected",
    [
        ('{"1": true, "2": true, "3": false}', 4 / 5),
        ('{"1": true, "2": true, "3": true}', 3 / 5),
        ('{"1": false, "2": false, "3": true}', -1 / 5),
        ('Such as {"1": true, "2": true, "3": true}. No: {"1": false, "2": true, "3": false}', 2 / 5),
        ('{"1": true, "2": true}', math.nan),
        ('{"1": 1, "2": 1, "3": 0}', math.nan),
        ('{"1": tr', math.nan),
        ("", math.nan),
    ],
)
def test_points_are_those_of_the_last_object_and_half_an_answer_has_none(serve, answer, expected):
    assert serve().points(answer) == pytest.approx(expected, nan_ok=True)


def test_a_rubric_of_four_criteria_gets_points_and_answers_that_cannot_be_read_are_said(serve, monkeypatch, capsys):
    rubric, server = serve(), sys.modules["server"]
    monkeypatch.setattr(rubric, "CRITERIA", dict.fromkeys(["Kind.", "On topic.", "Twice.", "Ends."], 1))
    assert not any(map(math.isnan, asyncio.run(rubric.rubric([PROMPT] * 2, [RIGHT, WRONG]))))
    assert "cannot read" not in capsys.readouterr().out
    monkeypatch.setattr(server, "answer", lambda judge, question: question.rpartition("such as ")[2])  # a small judge
    assert not any(map(math.isnan, asyncio.run(rubric.rubric([PROMPT] * 2, [RIGHT, WRONG]))))
    monkeypatch.setattr(server, "answer", lambda judge, question: '{"1": true}')
    assert all(map(math.isnan, asyncio.run(rubric.rubric([PROMPT] * 2, [RIGHT, WRONG]))))
    assert 'cannot read 2 of 2 answers; the first ends with {"1": true}' in capsys.readouterr().out


def test_comparisons_count_in_both_orders_and_a_judge_that_likes_the_first_contradicts_itself(serve, capsys):
    texts = [RIGHT, WRONG, RIGHT]
    rubric = serve()
    assert asyncio.run(rubric.compared([PROMPT] * 2 + ["another"], texts)) == [1.0, -1.0, 0.0]
    assert "1.00 of 1 pairs" in capsys.readouterr().out
    rubric = serve(first=100)
    assert asyncio.run(rubric.compared([PROMPT] * 2 + ["another"], texts)) == [0.0, 0.0, 0.0]
    assert "0.00 of 1 pairs" in capsys.readouterr().out
    assert all(map(math.isnan, asyncio.run(serve(fails=1).compared([PROMPT] * 2, texts[:2]))))


def test_a_run_learns_from_a_judge_that_fails_one_time_of_five(serve, tiny, in_tmp):
    serve(fails=0.2)
    spec = f"{ROOT / 'examples/judge/rubric.py'}:rubric"
    args = page_args("train_rloo", tiny, reward_model_path=None, reward_fn=(spec,), total_episodes=128, batch_size=64)
    rows = [row for row in read_metrics(PAGES["train_rloo"].main(args)["run"]) if row["update"]]
    assert all(0.05 < row["val/abstained"] < 0.4 for row in rows)
    assert all(-0.2 <= row["objective/rewards/rubric"] <= 0.8 for row in rows)
