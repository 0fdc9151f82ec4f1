"""ROUGE-L, the overlap of two texts by the longest common subsequence of their words."""

import re


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
