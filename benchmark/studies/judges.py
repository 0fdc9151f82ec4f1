"""Judges that fail, as reward functions for abstain.toml. What they would say is the embedded task's true reward."""

import math
import random

from rlhf_details import toy

CHANCE = random.Random(0)  # which answers fail


def sure(prompts, completions):
    """The task's true reward, for each response."""
    return [toy.gold(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def failing(prompts, completions):
    """The same, but one response in five, by chance, gets no answer, and so no score."""
    return [math.nan if CHANCE.random() < 0.2 else score for score in sure(prompts, completions)]


def failing_as_0(prompts, completions):
    """The same, but a response without an answer scores 0."""
    return [0.0 if math.isnan(score) else score for score in failing(prompts, completions)]
