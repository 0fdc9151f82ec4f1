"""intervals.py: the statistics of several seeds, on numbers with known answers."""

import math

import intervals
import pytest


def test_students_interval_is_that_of_the_textbook():
    mean, low, high, p = intervals.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5 / 5)  # t of 4 degrees of freedom
    assert mean == 3 and (low, high) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert p == pytest.approx(0.013, abs=5e-4)
    assert intervals.mean_interval([0.0, 0.0]) == (0, 0, 0, 1) and intervals.mean_interval([2.0, 2.0]) == (2, 2, 2, 0)
    with pytest.raises(ValueError, match="two seeds"):
        intervals.mean_interval([1.0])


def test_holms_correction():
    assert intervals.holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert intervals.holm([0.9, 0.8]).tolist() == [1, 1]


def test_runs_are_added_to_a_study_and_come_back_by_commit_without_the_columns_that_they_do_not_have(tmp_path):
    intervals.write_runs(tmp_path, {("a", "old", 2): [["update", "gold"], ["1", "0.5"], ["2", ""]]})
    more = {("a_long", "old", 2): [["update", "kl"], ["1", "7"]], ("a", "old", 10): [["gold"], ["3"]]}
    intervals.write_runs(tmp_path, more | {("a", "new", 2): [["gold"], ["4"]]})
    assert list(intervals.experiments(tmp_path)) == ["a", "a_long"]
    found = intervals.experiments(tmp_path)["a"]  # "old" has two seeds of it.
    assert list(found) == [2, 10] and found[2].keys() == {"update", "gold"} and found[10].keys() == {"gold"}
    assert math.isnan(found[2]["gold"][1]) and intervals.last(found[2]["gold"]) == 0.5
    intervals.write_runs(tmp_path, {("a", "old", 2): [["gold"], ["1"]]})  # A run that is made again replaces itself.
    found = intervals.by_commit(tmp_path)["a"]
    assert found["old"][2]["gold"].tolist() == [1] and found["new"][2]["gold"].tolist() == [4]
