"""examples/reasoning/tasks.py: rows without those of the test, rewards that tell brevity from a right answer."""

import importlib.util
import json

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow  # CI has the package in its slow part.


@pytest.fixture(scope="module")
def tasks():
    pytest.importorskip("reasoning_gym")
    spec = importlib.util.spec_from_file_location("tasks", ROOT / "examples/reasoning/tasks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_are_the_same_each_time_and_training_shares_no_question_with_the_tests(tasks):
    parts = tasks.train(), tasks.test(), tasks.new_kinds()
    questions = [json.loads(row["entry"])["question"] for rows in parts for row in rows]
    assert len({*questions}) == len(questions) == 240 + 128 + 64 and parts[0] == tasks.train()


def test_an_answer_among_words_has_a_part_of_the_point_and_says_it_all_the_same(tasks):
    rows = tasks.train()
    product, multiple = (next(row for row in rows if row["kind"] == kind) for kind in ("products", "lcm"))
    answers = [json.loads(row["entry"])["answer"] for row in (product, multiple)]
    texts = [answers[0], f"It is {answers[0]}", "no", f"{answers[1]}\n", f"That is {answers[1]}.", "Nobody knows"]
    columns = {key: [product[key]] * 3 + [multiple[key]] * 3 for key in ("kind", "entry")}
    scores = tasks.score([""] * 6, texts, **columns)
    assert scores[0] == scores[3] == 1 and 0 < scores[1] < 1 and scores[2] == 0 and scores[4] < 1 and scores[5] == 0
    assert tasks.right([""] * 6, texts, **columns) == [True, False, False, True, False, False]
    assert tasks.says_it([""] * 6, texts, **columns) == [True, True, False, True, True, False]
