"""Means and rates with their intervals, and ROUGE-L."""

import math
import re
import statistics


def rouge_l(response, reference):
    """ROUGE-L F1 of two strings, in [0, 1], on their lower-case words of ASCII letters and digits.

    Source: Lin 2004, section 3.1.
    """
    a, b = (re.findall(r"[a-z0-9]+", text.lower()) for text in (response, reference))
    longest = [0] * (len(b) + 1)  # entry j: length of the longest common subsequence of b[:j] and the words of a so far
    for word in a:
        above, longest = longest, [0]
        for j, other in enumerate(b):
            longest.append(above[j] + 1 if word == other else max(above[j + 1], longest[j]))
    common = longest[-1]
    return 2 * common / (len(a) + len(b)) if common else 0.0


def wilson_interval(wins, n, z=1.96):
    """Wilson's score interval (low, high) of a rate of `wins` (ties may count half) out of n; z = 1.96: 95%.

    Unlike p +- z sqrt(p (1 - p) / n) it stays within [0, 1] and has a width at p = 0 and p = 1.
    Source: E. B. Wilson, 1927.
    """
    p = wins / n
    center = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (center - half) / (1 + z * z / n)), min(1.0, (center + half) / (1 + z * z / n))


def rate(hits):
    """{"value", "low", "high"}: the mean of numbers in [0, 1], with its Wilson interval."""
    low, high = wilson_interval(sum(hits), len(hits))
    return {"value": sum(hits) / len(hits), "low": low, "high": high}


def average(values):
    """{"value", "low", "high"}: the mean of numbers +- 1.96 standard errors. A single number has no interval."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return {"value": mean}
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return {"value": mean, "low": mean - half, "high": mean + half}
