"""
What the figures of this folder say of several seeds: interquartile means with bootstrap intervals, differences with
Student's.

Source of the choice: "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv 2108.13264). The
arithmetic is scipy's.
"""

import csv
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent


def read(path):
    """{column: array [rows], NaN where a cell is empty} of a CSV file that benchmark.py wrote."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}


def read_seeds(folder, exp):
    """{seed: {column: array}} of the files <exp>_s<seed>.csv in a folder; FileNotFoundError where there is none."""
    found = {path.stem.removeprefix(f"{exp}_s"): path for path in Path(folder).glob(f"{exp}_s*.csv")}
    # Another experiment's name may begin alike, and then what follows is no number.
    found = {int(seed): path for seed, path in found.items() if seed.isdigit()}
    if not found:
        raise FileNotFoundError(f"{folder}: no {exp}_s<seed>.csv")
    return {seed: read(found[seed]) for seed in sorted(found)}


def last(column):
    """The last number of a column that is not NaN."""
    return column[~np.isnan(column)][-1]


def iqm(x, axis=-1):
    """Interquartile mean: the mean of what is left when the lowest and the highest quarter are cut off."""
    return stats.trim_mean(x, 0.25, axis=axis)


def bootstrap(x, statistic=iqm):
    """95 % percentile bootstrap interval (low, high) of a statistic over the last axis, which is that of the seeds."""
    x = np.asarray(x, dtype=float)
    index = np.random.default_rng(0).integers(x.shape[-1], size=(2000, x.shape[-1]))
    return tuple(np.percentile(np.stack([statistic(x[..., i]) for i in index]), (2.5, 97.5), axis=0))


def mean_interval(x, level=0.95):
    """(mean, low, high, p): Student's interval of the mean, and the p value of its being 0.

    Numbers that are all equal have an interval of no width.
    """
    x = np.asarray(x, dtype=float)
    if len(x) < 2:
        raise ValueError(f"an interval needs two seeds or more, not {len(x)}")
    if np.ptp(x) == 0:
        return x[0], x[0], x[0], float(x[0] == 0)
    test = stats.ttest_1samp(x, 0)
    return x.mean(), *test.confidence_interval(level), test.pvalue


def welch(a, b, level=0.95):
    """(mean of b less that of a, low, high, p), unpaired and of unequal variances."""
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        difference = b[0] - a[0]
        return difference, difference, difference, float(difference == 0)
    test = stats.ttest_ind(b, a, equal_var=False)
    return np.mean(b) - np.mean(a), *test.confidence_interval(level), test.pvalue


def holm(p_values):
    """Holm's adjusted p values: how surprising each is when so many were looked at."""
    p_values = np.asarray(p_values, dtype=float)
    order = np.argsort(p_values)
    adjusted = np.maximum.accumulate((len(p_values) - np.arange(len(p_values))) * p_values[order])
    result = np.empty_like(adjusted)
    result[order] = np.minimum(adjusted, 1)
    return result
