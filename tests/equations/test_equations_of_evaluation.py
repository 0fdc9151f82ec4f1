"""The figures of evaluate.py against slow loops and published numbers, and what its judge's answers mean."""

import itertools
import math
import random
import re

import numpy as np
import pytest
import torch
from oracles import ragged_mask

from rlhf_details import evaluate
from rlhf_details.plumbing import evaluation, judge


@pytest.mark.parametrize("n", [1, 2, 3])
def test_distinct_n_counts_ngrams_within_responses(n):
    some = random.Random(0)
    responses = [[some.randrange(5) for _ in range(some.randrange(8))] for _ in range(30)]
    seen, total = [], 0
    for response in responses:
        for start in range(len(response)):
            if start + n <= len(response):
                total += 1
                if response[start : start + n] not in seen:
                    seen.append(response[start : start + n])
    assert evaluate.distinct_n(responses, n) == len(seen) / total
    assert evaluate.distinct_n([[7, 7, 7, 7]], n) == 1 / (5 - n) and evaluate.distinct_n([[]], n) == 0


@pytest.mark.parametrize("n, right", [(1, 0), (1, 1), (6, 0), (6, 2), (6, 5), (6, 6)])
def test_eval_5_pass_at_k_is_the_share_of_subsets_with_a_right_response(n, right):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert evaluate.pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_eval_5_a_response_is_right_where_all_rewards_that_apply_are():
    nan = math.nan
    verdicts = [[(1, nan), (1, 0), (nan, nan)], [(0, nan), (1, 1), (nan, nan)], [(0, nan), (0, 1), (nan, nan)]]
    found = evaluate.pass_rates(torch.tensor(verdicts))  # one of three is right, of each prompt that counts
    assert {name: x["value"] for name, x in found.items()} == pytest.approx(
        {"pass@1": 1 / 3, "pass@2": 2 / 3, "pass@3": 1}
    )
    assert evaluate.pass_rates(torch.full((2, 1, 1), nan)) == {}


@pytest.mark.parametrize(
    "wins,n,low,high",
    [(5, 10, 0.236593, 0.763407), (0, 10, 0, 0.277533), (10, 10, 0.722467, 1), (324, 512, 0.590214, 0.673433)],
)
def test_wilsons_interval_has_the_published_values(wins, n, low, high):
    assert evaluation.wilson_interval(wins, n) == pytest.approx((low, high), abs=2e-5)  # they use 1.959964, we 1.96


def test_a_rate_comes_with_wilsons_interval_and_a_mean_with_1_96_standard_errors():
    assert evaluation.rate([1, 0, 0.5, 0.5, 1]) == {"value": 0.6} | dict(
        zip(("low", "high"), evaluation.wilson_interval(3, 5), strict=True)
    )
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    half = 1.96 * x.std().item() / math.sqrt(50)
    figure = evaluation.average(x.tolist())
    assert figure["value"] == pytest.approx(x.mean().item())
    assert (figure["low"], figure["high"]) == pytest.approx((x.mean().item() - half, x.mean().item() + half))
    assert evaluation.average([2.0]) == {"value": 2.0}  # one number says nothing of its spread


def test_eval_2_a_tie_is_half_a_win_and_an_unparsable_answer_none():
    w = evaluate.win_rate(["won"] * 3 + ["tied"] * 2 + ["lost"] * 4 + ["unparsable"])
    assert (w["value"], w["pairs"], w["won"], w["tied"], w["lost"], w["unparsable"]) == (0.4, 10, 3, 2, 4, 1)
    assert (w["low"], w["high"]) == evaluation.wilson_interval(4, 10)


def test_the_verdict_by_score():
    pairs = ((1, 0), (0, 1), (1, 1), (1, 1 + 1e-6))
    assert [evaluate.verdict_by_score(*pair) for pair in pairs] == ["won", "lost", "tied", "tied"]


class Score:
    """What evaluate.measure reads of a Scorer: a reward model, a function that says True or False, the toy's parses."""

    names, boolean, watched = ["reward_model", "is_right", "parses"], {"is_right"}, {"parses"}


def test_what_is_measured_of_one_sides_responses():
    nan = math.nan
    values = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, nan], [4.5, nan, 0.0]])
    responses, mask = torch.tensor([[5, 6, 1], [5, 5, 5], [7, 1, 0]]), ragged_mask([3, 3, 2], 3)
    ended = torch.tensor([True, False, True])
    columns, found = evaluate.measure(["a", "b", "c"], responses, mask, ended, values, Score, {1})
    assert columns == {
        "response": ["a", "b", "c"],
        "length": [3, 3, 2],
        "ended": [1, 0, 1],
        "rewards/reward_model": [1.0, 2.0, 4.5],
        "rewards/is_right": [1.0, 0.0, None],
        "parses": [1.0, None, 0.0],
    }
    value = {name: figure["value"] for name, figure in found.items()}
    assert value["length"] == pytest.approx(8 / 3) and value["ended"] == pytest.approx(2 / 3)
    assert value["rewards/reward_model"] == 2.5 and value["parses"] == 0.5
    assert value["distinct_1"] == 3 / 6  # 5 6 | 5 5 5 | 7: the token at the end is left out
    assert value["distinct_2"] == 2 / 3 and value["distinct_3"] == 1
    assert found["ended"] == evaluation.rate([1, 0, 1]) and found["rewards/is_right"] == evaluation.rate([1, 0])
    assert found["rewards/reward_model"] == evaluation.average([1.0, 2.0, 4.5])


@pytest.mark.parametrize("prompts", [20, 200])
@pytest.mark.parametrize("a, b", [(0.5, 0.5), (5, 5), (20, 1), (50, 0.5)])  # of the prompts' own chances
def test_the_interval_of_shares_holds_the_truth(a, b, prompts):
    noise, held = np.random.default_rng(1), 0
    for shares in noise.binomial(8, noise.beta(a, b, (1000, prompts))) / 8:
        found = evaluation.rate(shares.tolist())
        held += found["low"] <= a / (a + b) <= found["high"]
    assert held / 1000 > 0.93  # average() holds it in 0.78 of the cases for 20 prompts with chances near 1.


# ---- a language model as the judge -----------------------------------------------------------------------------------
ANSWERS = {
    "A": ["A", 'Preferred: "A".', "preferred:(A)", "Comparison: B.\n\n A ", "a", "Response A"],
    "B": ["B\n", "Comparison: A is dull.\nPreferred: B", "**Preferred:** **B**", "Preferred: A\nPreferred: B"],
    None: ["", "\n", "AB", "A or B", "Preferred: A and B", "Preferred:", "Vitamin A", "I prefer A", "C"],
}
ANSWERS["B"] += ["Comparison: A is dull. Preferred: b", "Preferred: Response B."]
ANSWERS["B"] += [
    '```json\n{"preferred": "B"}\n```',
    '{\n "comparison": "A is dull.",\n "preferred": "B"\n}',
    "B\n\n-",
    "<think>A?</think>B",
]
ANSWERS[None] += ["Preferred: A\nI hope this helps.", "Answer: A"]


@pytest.mark.parametrize("letter", ANSWERS)
def test_only_a_last_line_that_is_a_letter_is_an_answer(letter):
    for answer, ours in itertools.product(ANSWERS[letter], "AB"):
        expected = "unparsable" if letter is None else "won" if letter == ours else "lost"
        assert judge.verdict_by_answer(answer, ours) == expected, answer


def test_eval_1_a_judge_that_always_says_the_first_is_better_gives_one_half():
    letters = [judge.question("p", "ours", "theirs", 1, number)[1] for number in range(2000)]
    rate = evaluate.win_rate([judge.verdict_by_answer("A", letter) for letter in letters])
    assert abs(rate["value"] - 0.5) < 0.04


def test_the_order_of_a_pair_is_a_function_of_seed_and_number_and_the_letter_is_that_of_the_response():
    one, two = ([judge.question("the {prompt}", "ours {a}", "theirs", s, i) for i in range(64)] for s in (1, 2))
    assert one == [judge.question("the {prompt}", "ours {a}", "theirs", 1, i) for i in range(64)]
    assert [letter for _, letter in one] != [letter for _, letter in two]
    for text, letter in one:
        assert re.search(rf"### Response {letter}\nours {{a}}\n", text)
        assert "\nthe {prompt}\n" in text and "\ntheirs\n" in text
