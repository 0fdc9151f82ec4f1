"""examples/smollm/instructions.py: what counts as obeying, and rows that do not tell training what is asked later."""

import importlib.util
import json

import pytest
from helpers import ROOT

SPEC = importlib.util.spec_from_file_location("instructions", ROOT / "examples/smollm/instructions.py")
instructions = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(instructions)


@pytest.mark.parametrize(
    "kind, value, obeys, fails",
    [
        ("sentences", 2, "The sky is blue. It is wide.", "The sky is 3.5 miles high, and blue."),
        ("at most", 5, "The sky is very blue.", "The sky is very very blue."),
        ("lower case", None, "the sky is blue.", "The sky is blue."),
        ("word", "often", "The sky is OFTEN blue.", "The sky is blue oftentimes."),
        ("no word", "light", "The sky is rather lighter.", "The sky scatters Light."),
        ("json", "text", '{"text": "the sky is blue"}', '{"text": "the sky is blue", "n": 1}'),
        ("json", "text", '{"text": "the sky is blue"}', 'JSON: {"text": "the sky is blue"}'),
        ("sum", 12, "5 + 7 in the sky is 12.", "5 + 7 in the sky is 120."),
        ("first word", "today", "Today the sky is blue.", "The sky is blue today."),
        ("last words", "That is all.", "The sky is blue. That is all.", "The sky. That is all. Really."),
        ("capitals", None, "THE SKY IS BLUE.", "The SKY IS BLUE."),
        ("question", None, "Is the sky not blue?", "Is the sky blue? Yes."),
        ("no comma", None, "The sky is blue.", "The sky is blue, really."),
        ("at least", 5, "The sky is very blue.", "The sky is blue."),
        ("quotes", None, '"The sky is blue."', 'The "sky" is "blue"'),
        ("difference", 3, "The sky is 3 high.", "The sky is 3 high. Yes."),
    ],
)
def test_an_answer_obeys_or_not(kind, value, obeys, fails):
    texts = [f" {obeys}\n", fails, "sky", obeys.lower().replace("sky", "sea")]  # too short; without the topic
    columns = {"kind": [kind] * 4, "value": [json.dumps(value)] * 4, "topic": ["sky"] * 4}
    assert instructions.obeys([""] * 4, texts, **columns) == [True, False, False, False]


def test_held_out_rows_have_other_questions_and_new_kinds_are_new():
    parts = [instructions.train(), instructions.test(), instructions.new_kinds()]
    assert parts == [instructions.train(), instructions.test(), instructions.new_kinds()]
    assert list(map(len, parts)) == [288, 96, 96]
    train, test, new = ({row["kind"] for row in rows} for rows in parts)
    assert train == test == set(instructions.KINDS) and new == set(instructions.NEW_KINDS)
    questions = [
        {line.partition("|")[0] for line in text.strip().splitlines()}
        for text in (instructions.TRAIN_QUESTIONS, instructions.TEST_QUESTIONS)
    ]
    assert list(map(len, questions)) == [48, 24] and not questions[0] & questions[1]
    texts = [{row["messages"][0]["content"] for row in rows} for rows in parts]
    assert not texts[0] & (texts[1] | texts[2])
