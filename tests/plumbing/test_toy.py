"""The embedded tasks: their grammar and the gold reward."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_details import toy
from rlhf_details.plumbing.machine import rewards


# ---- the gold reward -------------------------------------------------------------------------------------------------
def test_gold_of_hand_made_responses():
    prompt = "last friday my sister went to a small hotel by the river ."
    for text, gold in (
        ("the room was lovely .", 1 + 1 + 1),
        ("the room was lovely", 1 + 1 - 1),
        ("the room was awful .", -1 + 1 + 1),
        ("the soup was lovely .", 1 - 4 - 2 + 1),
        ("the room was lovely lovely .", 1 + 1 - 1 - 1 + 1),  # said again, and follows itself
        ("the room was lovely and the bed was lovely .", 1 + 2 - 1 + 1),
        ("", 0 - 4 - 1),
        ("room bed lobby pool shower .", 0 + 4 + 1),
        (" ".join(toy.POSITIVE[:7]), 5 - 4 - 1),
        (" ".join(toy.NEGATIVE[:7]), -5 - 4 - 1),
    ):
        assert toy.gold(prompt, text) == gold, text


# ---- a judge with faults ---------------------------------------------------------------------------------------------
PROMPT, RIGHT, WRONG = "my sister went to a small hotel .", "the room was really lovely .", "the soup was awful ."


@pytest.mark.parametrize(
    "dials, expected",
    [
        ({}, [3, -6]),
        (dict(length=2), [3 + 1.2, -6 + 1.0]),  # six and five words
        (dict(word=0.5), [3.5, -6]),
        (dict(fails_below=0), [3, np.nan]),
        (dict(fails_below=0, failed=0), [3, 0]),
        (dict(fails=1), [np.nan, np.nan]),
        (dict(noise=1, fails=1, failed=0), [0, 0]),
    ],
)
def test_each_fault_of_a_judge_adds_what_it_says(dials, expected):
    found = toy.Judge(**dials)([PROMPT, PROMPT], [RIGHT, WRONG])
    np.testing.assert_allclose(found, expected)


def test_the_chance_of_a_judge_has_the_size_that_is_asked_for_and_is_a_function_of_seed_and_texts():
    rows = toy.rows("prompts", "train")[:2000]
    prompts, texts = [r["prompt"] for r in rows], [r["completion"] for r in rows]
    gold = np.array([toy.gold(*pair) for pair in zip(prompts, texts, strict=True)])
    noisy = np.array(toy.Judge(noise=2)(prompts, texts)) - gold
    assert abs(noisy.std() - 2) < 0.1 and abs(noisy.mean()) < 0.15
    assert abs(np.corrcoef(noisy, gold)[0, 1]) < 0.07
    assert abs(np.isnan(toy.Judge(fails=0.2)(prompts, texts)).mean() - 0.2) < 0.03
    backwards = toy.Judge(noise=2)(prompts[::-1], texts[::-1])
    np.testing.assert_array_equal(np.array(backwards)[::-1] - gold, noisy)
    assert not np.isclose(np.array(toy.Judge(noise=2, seed=1)(prompts, texts)) - gold, noisy).any()


@pytest.mark.parametrize(
    "dials, one, other",
    [({}, 1, -1), (dict(first=4), 1, -1), (dict(first=20), 1, 1), (dict(fails_below=0), np.nan, np.nan)],
)
def test_a_comparison_says_which_of_two_is_better_unless_the_first_place_pays_more(dials, one, other):
    judge = toy.Judge(**dials)
    np.testing.assert_equal([judge.compare(PROMPT, RIGHT, WRONG), judge.compare(PROMPT, WRONG, RIGHT)], [one, other])


# ---- the rows --------------------------------------------------------------------------------------------------------
def test_no_test_prompt_opens_a_training_review():
    """Nor any cut of one: a training text begins with its opening and up to two more words."""
    opened = set()
    for stage in ("sft", "prompts"):
        for row in toy.rows(stage, "train"):
            words = f"{row['prompt']} {row['completion']}".split()
            opening = words.index(".") + 1
            opened |= {" ".join(words[:cut]) for cut in range(opening, opening + 3)}
    assert not [r["prompt"] for s in ("sft", "prompts") for r in toy.rows(s, "test") if r["prompt"] in opened]


# ---- the tokenizer ---------------------------------------------------------------------------------------------------
def test_every_word_is_one_token_and_comes_back():
    tokenizer, rng = toy.tokenizer(), np.random.default_rng(2)
    for text in (toy.write_review(rng)[0] for _ in range(500)):
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text.split()) and tokenizer.unk_token_id not in ids
        # Other programs put the decoded response right behind the prompt.
        assert " ".join(text.split()[:9]) + tokenizer.decode([*ids[9:], tokenizer.eos_token_id]) == f"{text} <eos>"
        row = SimpleNamespace(text=" ".join(text.split()[:9]), task="toy")
        assert rewards.WATCHED["toy"]["parses"](row, [tokenizer.decode(ids[9:])])
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer))) and len(tokenizer) < 500


# ---- the imaginary human ---------------------------------------------------------------------------------------------
def test_gold_of_tools_charges_once_for_each_question():
    """What a trajectory says holds the observations between its turns."""
    row = SimpleNamespace(columns={"answer": "3 4"})
    said = ["ask red", " same as blue ;", "ask blue", " 3 4 ;", "say 3 4"]
    gold = rewards.WATCHED["toy-tools"]["gold"]
    assert gold(row, said) == pytest.approx(0.9) and gold(row, said[-1:]) == 1 and gold(row, ["say 4 3"]) == 0


def test_the_human_chooses_in_proportion_to_exp_of_gold():
    scores, n, rng = [1.0, 0.0, 2.5, -1.0], 20_000, np.random.default_rng(0)
    counts = Counter(toy.choose(scores, rng) for _ in range(n))
    shares = torch.tensor(scores).div(toy.HUMAN_TEMPERATURE).softmax(0).tolist()
    assert [counts[i] / n for i in range(4)] == pytest.approx(shares, abs=0.015)


# ---- toy-sum ---------------------------------------------------------------------------------------------------------
def test_sums_are_right_and_held_out_and_every_number_is_one_token():
    seen, tokenizer = {"train": set(), "test": set()}, toy.tokenizer("toy-sum")
    for stage, split in toy.SPLITS:
        rows = toy.rows(stage, split, "toy-sum")
        prompts, completions, answers = ([row[name] for row in rows] for name in ("prompt", "completion", "answer"))
        seen[split] |= {*prompts}
        assert [str(eval(prompt.removesuffix(" ="))) for prompt in prompts] == answers
        assert {len(ids) for ids in tokenizer(prompts).input_ids} == {8}
        assert all(toy.right_sum(prompts, completions, answers)) == (stage == "prompts")
    assert toy.rows("prompts", "train", "toy-sum")[0]["prompt"] == "6 + 4 + 3 + 9 ="  # the same everywhere
    assert not seen["train"] & seen["test"]
    assert toy.right_sum(["", "", ""], ["17", " 17 ", "18"], answer=["17"] * 3) == [True, True, False]
    assert tokenizer.decode(tokenizer("36").input_ids) == " 36"
