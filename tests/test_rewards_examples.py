"""benchmark/rewards.py: the example rewards against values worked out by hand, on strings and on conversations."""

import runpy

import pytest
import torch
from conftest import ROOT, tiny_config
from transformers import GPTNeoXForSequenceClassification

from rlhf_details import toy


@pytest.fixture(scope="module")
def rewards():
    return runpy.run_path(str(ROOT / "benchmark/rewards.py"))


def said(text):
    """A completion as a conversation has it."""
    return [{"role": "assistant", "content": text}]


def both(function, prompts, completions, **columns):
    """What a function says of strings, which it must also say of messages."""
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    values = function(prompts, completions, **columns)
    assert function(asked, [said(text) for text in completions], **columns) == values
    return values


def test_length_and_brevity_count_words(rewards):
    texts = ["", "one, two.", " ".join(["w"] * 20), " ".join(["w"] * 25), " ".join(["w"] * 99)]
    assert both(rewards["length"], [""] * 5, texts) == pytest.approx([0, 0.1, 1, 0.75, 0])
    assert both(rewards["brevity"], [""] * 5, texts) == pytest.approx([0, -0.2, -2, -2.5, -9.9])


def test_keyword_counts_each_of_its_words_once(rewards):
    assert both(rewards["keyword"], [""] * 4, ["", "Very very good", "so truly, really very", "sofa"]) == [0, 1, 4, 0]


@pytest.mark.parametrize(
    "completion, answer, right",
    [
        ("so 3 + 4 = 7", "7", True),
        ("it is 7, or 8", "7", False),
        ("#### 1,234", 1234, True),
        ("first 5, then #### 72 apples", "#### 72 apples", True),
        (r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        ("about 7.0.", "7", True),
        ("-3", "3", False),
        ("$18", "18", True),
        ("Paris", "Paris", True),
        ("paris is it", "Paris", False),
        ("", "7", False),
        ("7", None, None),
        ("7", "", None),
    ],
)
def test_exact_match_reads_the_final_answer(rewards, completion, answer, right):
    assert both(rewards["exact_match"], ["q"], [completion], answer=[answer]) == [right]


def test_rouge_is_against_the_rows_own_completion(rewards):
    got = both(rewards["rouge"], ["", "", ""], ["the cat sat", "the cat", "a"], completion=["the cat sat", "the dog", None])
    assert got == [1.0, 0.5, None]


def test_paraphrase_wants_the_content_in_other_words(rewards):
    source = "my sister went to a small cafe by the river"
    copy, other, lost, short = both(
        rewards["paraphrase"],
        [source] * 4,
        [source, "beside the river my sister found a small cafe and went inside", "nothing of that is said here at all today", ""],
    )
    assert copy == pytest.approx(0.4 + 0.1 + 0.1) and other > copy > 0.5 and lost < other and short == 0
    assert 0 <= lost <= 1


def test_sentiment_is_the_pipelines_probability_of_positive(rewards, in_tmp, monkeypatch):
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    torch.manual_seed(0)
    model = GPTNeoXForSequenceClassification(tiny_config(num_labels=2, initializer_range=0.5, **labels)).eval()
    model.save_pretrained("classifier"), toy.tokenizer().save_pretrained("classifier")
    monkeypatch.setenv("SENTIMENT_MODEL", "classifier")
    prompts, completions = ["we went to a cafe .", "the room"], ["the soup was lovely .", "was awful ."]
    got = both(rewards["sentiment"], prompts, completions)
    for value, prompt, completion in zip(got, prompts, completions, strict=True):
        tokens = torch.tensor([toy.tokenizer()(f"{prompt} {completion}").input_ids])
        with torch.no_grad():
            expected = model(tokens).logits.softmax(-1)[0, 1].item()
        assert value == pytest.approx(expected, abs=1e-4) and 0 < value < 1
