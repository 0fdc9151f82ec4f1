"""Rewards that break a run, for the study `symptoms`."""


def boxed(prompts, completions):
    """A reward that no answer gets: it looks for a form that the prompts did not ask for."""
    return [float("\\boxed" in text) for text in completions]


def words(prompts, completions):
    """A reward that pays for length alone."""
    return [float(len(text.split())) for text in completions]
