"""The functions of examples/: rows that do not tell training what is asked later, and what counts as obeying."""

import json
import sys

import pytest
from helpers import ROOT

sys.path += [str(ROOT / "examples" / name) for name in ("smollm", "reasoning", "tools")]
import calculator
import instructions
import reviews


@pytest.mark.parametrize(
    "kind, value, obeys, fails",
    [
        ("sentences", 2, "The sky is blue. It is wide.", "The sky is 3.5 miles high, and blue."),
        ("lower case", None, "the sky is blue.", "The sky is blue."),
        ("word", "often", "The sky is OFTEN blue.", "The sky is blue oftentimes."),
        ("json", "text", '{"text": "the sky is blue"}', '{"text": "the sky is blue", "n": 1}'),
        ("json", "text", '{"text": "the sky is blue"}', 'JSON: {"text": "the sky is blue"}'),
        ("sum", 12, "5 + 7 in the sky is 12.", "5 + 7 in the sky is 120."),
        ("question", None, "Is the sky not blue?", "Is the sky blue? Yes."),
    ],
)
def test_an_answer_obeys_its_instruction_or_not(kind, value, obeys, fails):
    texts = [f" {obeys}\n", fails, "sky", obeys.lower().replace("sky", "sea")]  # too short; without the topic
    columns = {"kind": [kind] * 4, "value": [json.dumps(value)] * 4, "topic": ["sky"] * 4}
    assert instructions.obeys([""] * 4, texts, **columns) == [True, False, False, False]


def test_a_review_is_one_sentence_with_the_word_and_no_held_out_word_is_trained_on():
    texts = ["A fine plot.", "A fine plot. Twice.", "A fine story.", "Plot!", "No end to this plot"]
    assert reviews.obeys([""] * 5, texts, ["plot"] * 5) == [True, False, False, True, False]
    train, test = reviews.train(), reviews.test()
    assert train and test and not {row["word"] for row in train} & {row["word"] for row in test}


@pytest.mark.slow  # CI has the package in its slow part.
def test_reasoning_tasks_share_no_question_and_tell_brevity_from_a_right_answer():
    """An answer among words has a part of the point, and says it all the same."""
    pytest.importorskip("reasoning_gym")
    import tasks

    parts = tasks.train(), tasks.test(), tasks.new_kinds()
    questions = [json.loads(row["entry"])["question"] for rows in parts for row in rows]
    assert len({*questions}) == len(questions) == 240 + 128 + 64 and parts[0] == tasks.train()
    product, multiple = (next(row for row in parts[0] if row["kind"] == kind) for kind in ("products", "lcm"))
    answers = [json.loads(row["entry"])["answer"] for row in (product, multiple)]
    texts = [answers[0], f"It is {answers[0]}", "no", f"{answers[1]}\n", f"That is {answers[1]}.", "Nobody knows"]
    columns = {key: [product[key]] * 3 + [multiple[key]] * 3 for key in ("kind", "entry")}
    scores = tasks.score([""] * 6, texts, **columns)
    assert scores[0] == scores[3] == 1 and 0 < scores[1] < 1 and scores[2] == 0 and scores[4] < 1 and scores[5] == 0
    assert tasks.right([""] * 6, texts, **columns) == [True, False, False, True, False, False]
    assert tasks.says_it([""] * 6, texts, **columns) == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    "expression, result",
    [
        ("2*3", 6),
        ("95+56", 151),
        ("12 - (30+4)*-2", 80),
        ("2**99", None),
        ("7/2", None),
        ("1.5+1", None),
        ("__import__('os')", None),
        ("3 apples", None),
        ("1" * 41, None),
    ],
)
def test_the_calculator_computes_what_it_says_and_nothing_else(expression, result):
    if result is not None:
        assert calculator.calculator(expression) == result
        return
    with pytest.raises(ValueError, match="expression"):
        calculator.calculator(expression)


@pytest.mark.parametrize(
    "said, right, calls, error, ignored",
    [
        (["call", "12", "The result is 12."], True, 1, False, False),
        (["call", "1234", "It is 1,234"], False, 1, False, False),
        (["call", "12", "It is 13."], False, 1, False, True),
        (["call", "error: no such thing 3", "12"], True, 1, True, False),
        (["call", "5", "call", "12", "12 apples"], True, 2, False, False),
        (["It is 12"], True, 0, False, False),
        (["I do not know"], False, 0, False, False),
    ],
)
def test_what_the_calculators_rewards_count(said, right, calls, error, ignored):
    said = [{"role": ("assistant", "tool")[i % 2], "content": text} for i, text in enumerate(said)]
    assert calculator.right([], [said], [12]) == [right] and calculator.calls([], [said]) == [calls]
    assert calculator.errors([], [said]) == [error] and calculator.ignored([], [said]) == [ignored]


def test_questions_of_the_calculator_are_held_out_and_written_calls_are_right():
    parts = calculator.train(), calculator.test(), calculator.two_steps(), calculator.written()
    questions = [{row["messages"][1]["content"] for row in rows} for rows in parts]
    assert len(set().union(*questions)) == sum(map(len, questions)) > 900
    for row in parts[3]:
        _, _, asked, given, answer = row["messages"]
        expression = asked["tool_calls"][0]["function"]["arguments"]["expression"]
        assert str(calculator.calculator(expression)) == given["content"] and given["content"] in answer["content"]
