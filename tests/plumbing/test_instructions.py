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
        ("lower case", None, "the sky is blue.", "The sky is blue."),
        ("word", "often", "The sky is OFTEN blue.", "The sky is blue oftentimes."),
        ("json", "text", '{"text": "the sky is blue"}', '{"text": "the sky is blue", "n": 1}'),
        ("json", "text", '{"text": "the sky is blue"}', 'JSON: {"text": "the sky is blue"}'),
        ("sum", 12, "5 + 7 in the sky is 12.", "5 + 7 in the sky is 120."),
        ("question", None, "Is the sky not blue?", "Is the sky blue? Yes."),
    ],
)
def test_an_answer_obeys_or_not(kind, value, obeys, fails):
    texts = [f" {obeys}\n", fails, "sky", obeys.lower().replace("sky", "sea")]  # too short; without the topic
    columns = {"kind": [kind] * 4, "value": [json.dumps(value)] * 4, "topic": ["sky"] * 4}
    assert instructions.obeys([""] * 4, texts, **columns) == [True, False, False, False]
