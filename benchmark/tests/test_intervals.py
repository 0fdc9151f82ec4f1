"""intervals.py: the statistics of several seeds, on numbers with known answers."""

import csv
import math

import intervals
import numpy as np
import pytest


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert intervals.iqm([9, 1, 2, 3, 4, 5, 6, 100]) == (3 + 4 + 5 + 6) / 4
    assert intervals.iqm(np.arange(24).reshape(2, 12)).tolist() == [5.5, 17.5]


def test_bootstrap_intervals_hold_the_truth_about_as_often_as_they_say():
    low, high = intervals.bootstrap(np.random.default_rng(1).normal(3, 1, size=(200, 30)))
    assert 0.88 < ((low < 3) & (high > 3)).mean() < 0.99


def test_students_interval_is_that_of_the_textbook():
    mean, low, high, p = intervals.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5 / 5)  # t of 4 degrees of freedom
    assert mean == 3 and (low, high) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert p == pytest.approx(0.013, abs=5e-4)
    assert intervals.mean_interval([0.0, 0.0]) == (0, 0, 0, 1) and intervals.mean_interval([2.0, 2.0]) == (2, 2, 2, 0)
    with pytest.raises(ValueError, match="two seeds"):
        intervals.mean_interval([1.0])


def test_welchs_interval_is_b_less_a():
    mean, low, high, _ = intervals.welch(np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0, 8.0]))
    half = 3.219 * math.sqrt(1 / 3 + 4 / 3)  # t of (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 2.94 degrees of freedom
    assert mean == 4 and (low, high) == pytest.approx((4 - half, 4 + half), abs=2e-3)
    assert intervals.welch(np.ones(3), np.ones(4))[:3] == (0, 0, 0)


def test_holms_correction():
    assert intervals.holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert intervals.holm([0.9, 0.8]).tolist() == [1, 1]


def test_an_experiment_is_not_another_whose_name_begins_alike(tmp_path):
    for exp, value in (("rloo", 1.0), ("rloo_short", 2.0), ("rloo_s1", 3.0)):
        with open(tmp_path / f"{exp}_s7.csv", "w", newline="") as file:
            csv.writer(file).writerows([("update", "gold"), (1, value), (2, "")])
    for exp, value in (("rloo", 1.0), ("rloo_short", 2.0), ("rloo_s1", 3.0)):
        assert intervals.last(intervals.read_seeds(tmp_path, exp)[7]["gold"]) == value
    with pytest.raises(FileNotFoundError):
        intervals.read_seeds(tmp_path, "ppo")
