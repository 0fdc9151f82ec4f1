"""Judges as reward functions, of abstain.toml and judge.toml. They judge by the embedded task's true reward, gold."""

import math
import random
from itertools import groupby

from rlhf_details import toy

CHANCE = random.Random(0)  # which answers fail, in abstain.toml


# ---- for abstain.toml ------------------------------------------------------------------------------------------------
def sure(prompts, completions):
    """The task's true reward, for each response."""
    return [toy.gold(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def failing(prompts, completions):
    """The same, but one response in five, by chance, gets no answer, and so no score."""
    return [math.nan if CHANCE.random() < 0.2 else score for score in sure(prompts, completions)]


def failing_as_0(prompts, completions):
    """The same, but a response without an answer scores 0."""
    return [0.0 if math.isnan(score) else score for score in failing(prompts, completions)]


# ---- for judge.toml --------------------------------------------------------------------------------------------------
noise_1, noise_2, noise_4 = (toy.Judge(noise=points) for points in (1, 2, 4))
length_half, length_2 = toy.Judge(length=0.5), toy.Judge(length=2)
word_half, word_2 = toy.Judge(word=0.5), toy.Judge(word=2)
fails, fails_as_0 = toy.Judge(fails=0.2), toy.Judge(fails=0.2, failed=0)
fails_on_bad, fails_on_bad_as_0 = toy.Judge(fails_below=1), toy.Judge(fails_below=1, failed=0)


def tournament(judge, prompts, completions, both_orders):
    """(Comparisons won - lost) / comparisons, of each response with its adjacent siblings; 0 without siblings."""
    found = []
    for prompt, group in groupby(zip(prompts, completions, strict=True), key=lambda pair: pair[0]):
        texts = [text for _, text in group]
        points = [0.0] * len(texts)
        for i, j in ((i, j) for i in range(len(texts)) for j in range(len(texts)) if i < j or (both_orders and i > j)):
            outcome = judge.compare(prompt, texts[i], texts[j])
            points[i], points[j] = points[i] + outcome, points[j] - outcome
        found += [x / max(1, (len(texts) - 1) * (1 + both_orders)) for x in points]
    return found


def compared(prompts, completions):
    """Comparisons by gold."""
    return tournament(toy.Judge(), prompts, completions, both_orders=True)


def first_both_orders(prompts, completions):
    """Comparisons by a judge with 4 points for the response that it reads first, in both orders."""
    return tournament(toy.Judge(first=4), prompts, completions, both_orders=True)


def first_one_order(prompts, completions):
    """The same, in the order in which the responses were sampled."""
    return tournament(toy.Judge(first=4), prompts, completions, both_orders=False)
