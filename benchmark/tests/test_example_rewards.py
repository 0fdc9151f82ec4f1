"""The example rewards in benchmark/recipes/rewards.py, against values worked out by hand."""

import pytest
import rewards
import torch
from helpers import tiny_config
from transformers import GPTNeoXForSequenceClassification

from rlhf_details import toy


def test_length_brevity_and_keyword():
    texts = ["", "one, two.", " ".join(["w"] * 20), " ".join(["w"] * 25), " ".join(["w"] * 99)]
    assert rewards.length([""] * 5, texts) == pytest.approx([0, 0.1, 1, 0.75, 0])
    assert rewards.brevity([""] * 5, texts) == pytest.approx([0, -0.2, -2, -2.5, -9.9])
    texts = ["", "Very very good", "so truly, really very", "sofa"]
    assert rewards.keyword([""] * 4, texts) == [0, 1, 4, 0]


@pytest.mark.parametrize(
    "completion, answer, right",
    [
        ("so 3 + 4 = 7", "7", True),
        ("it is 7, or 8", "7", False),
        ("#### 1,234", 1234, True),
        ("first 5, then #### 72 apples", "#### 72 apples", True),
        (r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        ("-3", "3", False),
        ("$18", "18", True),
        ("paris is it", "Paris", False),
        ("", "7", False),
        ("7", None, None),
    ],
)
def test_exact_match_reads_the_final_answer(completion, answer, right):
    assert rewards.exact_match(["q"], [completion], answer=[answer]) == [right]


def test_rouge_is_against_the_rows_own_completion():
    references = ["the cat sat", [{"role": "assistant", "content": "the dog"}], None]
    completions = ["the cat sat", "the cat", "a"]
    assert rewards.rouge([""] * 3, completions, completion=references) == [1.0, 0.5, None]


def test_paraphrase_wants_the_content_in_other_words():
    source = "my sister went to a small cafe by the river"
    other = "beside the river my sister found a small cafe and went inside"
    texts = [source, other, "nothing of that is said here at all today", ""]
    copied, good, lost, short = rewards.paraphrase([source] * 4, texts)
    assert copied == pytest.approx(0.4 + 0.1 + 0.1) and good > copied > 0.5 and 0 <= lost < good and short == 0


def test_sentiment_is_the_pipelines_probability_of_positive(in_tmp, monkeypatch):
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    torch.manual_seed(0)
    config = tiny_config(num_labels=2, initializer_range=0.5, **labels)
    model = GPTNeoXForSequenceClassification(config).eval()
    model.save_pretrained("classifier"), toy.tokenizer().save_pretrained("classifier")
    monkeypatch.setenv("SENTIMENT_MODEL", "classifier")
    prompts, completions = ["we went to a cafe .", "the room"], ["the soup was lovely .", "was awful ."]
    got = rewards.sentiment(prompts, completions)
    for value, text in zip(got, map(" ".join, zip(prompts, completions, strict=True)), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([toy.tokenizer()(text).input_ids])).logits.softmax(-1)[0, 1].item()
        assert value == pytest.approx(expected, abs=1e-4) and 0 < value < 1
