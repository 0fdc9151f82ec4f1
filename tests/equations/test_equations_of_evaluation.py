"""The figures of evaluate.py against slow loops and published numbers, and what its judge's answers mean."""

import math
import re

import pytest
import torch
from oracles import ragged_mask

from rlhf_details import evaluate
from rlhf_details.plumbing.machine import judge
from rlhf_details.plumbing.outputs import statistics


def test_eval_5_a_response_is_right_where_all_rewards_that_apply_are():
    nan = math.nan
    verdicts = [[(1, nan), (1, 0), (nan, nan)], [(1, nan), (1, 1), (nan, nan)], [(0, nan), (0, 1), (nan, nan)]]
    found = evaluate.pass_rates(torch.tensor(verdicts))  # two and one of three are right, and one prompt has no reward
    values = [found[f"pass@{k}"]["value"] for k in (1, 2, 3)]
    assert len(found) == 3 and values == pytest.approx([1 / 2, 5 / 6, 1])
    assert evaluate.pass_rates(torch.full((2, 1, 1), nan)) == {}


@pytest.mark.parametrize(
    "wins,n,low,high",
    [(5, 10, 0.236593, 0.763407), (0, 10, 0, 0.277533), (10, 10, 0.722467, 1), (324, 512, 0.590214, 0.673433)],
)
def test_wilsons_interval_has_the_published_values(wins, n, low, high):
    assert statistics.wilson_interval(wins, n) == pytest.approx((low, high), abs=2e-5)  # they use 1.959964, we 1.96


def test_a_mean_comes_with_1_96_standard_errors():
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, half = x.mean().item(), 1.96 * x.std().item() / math.sqrt(50)
    expected = {"value": mean, "low": mean - half, "high": mean + half}
    assert statistics.average(x.tolist()) == pytest.approx(expected)
    assert statistics.average([2.0]) == {"value": 2.0}  # one number says nothing of its spread


def test_eval_2_a_tie_is_half_a_win_and_an_unparsable_answer_none():
    verdicts = [evaluate.verdict_by_score(*pair) for pair in ((1, 0), (0, 1), (1, 1 + 1e-6))]
    assert verdicts == ["won", "lost", "tied"]
    counts = dict(pairs=4, won=1, tied=1, lost=1, unparsable=1, unscored=1)
    unscored = evaluate.verdict_by_score(math.nan, 1)  # A reward abstained: no pair to compare.
    assert evaluate.win_rate([*verdicts, "unparsable", unscored]) == statistics.rate([1, 0, 0.5, 0]) | counts


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
    # 5 6 | 5 5 5 | 7: the token at the end is left out
    distinct = {f"distinct_{n}": {"value": share} for n, share in ((1, 3 / 6), (2, 2 / 3), (3, 1))}
    assert found == distinct | {
        "length": statistics.average([3, 3, 2]),
        "ended": statistics.rate([1, 0, 1]),
        "rewards/reward_model": statistics.average([1.0, 2.0, 4.5]),
        "rewards/is_right": statistics.rate([1, 0]),
        "parses": statistics.rate([1, 0]),
    }
    assert evaluate.distinct_n([[]], 1) == 0


# ---- a language model as the judge -----------------------------------------------------------------------------------
A = ["A", 'Preferred: "A".', "preferred:(A)", "Comparison: B.\n\n A ", "a", "Response A"]
B = ["B\n", "Comparison: A is dull.\nPreferred: B", "**Preferred:** **B**", "Preferred: A\nPreferred: B", "B\n\n-"]
B += ["Comparison: A is dull. Preferred: b", "Preferred: Response B.", "<think>A?</think>B"]
B += ['```json\n{"preferred": "B"}\n```', '{\n "comparison": "A is dull.",\n "preferred": "B"\n}']
NONE = ["", "\n", "AB", "A or B", "Preferred: A and B", "Preferred:", "Vitamin A", "I prefer A", "C", "Answer: A"]
NONE += ["Preferred: A\nI hope this helps."]


def test_only_a_last_line_that_is_a_letter_is_an_answer():
    for answers, verdicts in ((A, ["won", "lost"]), (B, ["lost", "won"]), (NONE, ["unparsable"] * 2)):
        for answer in answers:
            assert [judge.verdict_by_answer(answer, ours) for ours in "AB"] == verdicts, answer


def test_eval_1_the_order_of_a_pair_is_a_fair_draw_of_seed_and_number_and_the_letter_is_that_of_the_response():
    """So a judge that always says that the first one is better gives one half."""
    one, two, again = ([judge.question("the {p}", "ours {a}", "theirs", s, i) for i in range(2000)] for s in (1, 2, 1))
    letters = [letter for _, letter in one]
    assert one == again and letters != [letter for _, letter in two] and abs(letters.count("A") - 1000) < 80
    for text, letter in one:
        assert re.search(rf"### Response {letter}\nours {{a}}\n", text)
        assert "\nthe {p}\n" in text and "\ntheirs\n" in text
