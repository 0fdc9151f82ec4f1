"""Environments for runs of train_agent.py."""


def silent(prompts, completions):
    """It says nothing, so every episode has one turn."""
    return [None] * len(prompts)


def chatty(prompts, completions):
    """Episodes end after one to four turns, by the length of their prompt. What it says has one to three words."""
    last = [1 + len(prompt) % 4 for prompt in prompts]
    said = [" the food was"[: 4 + 5 * (len(turns) % 2)] for turns in completions]
    return [text if len(turns) < n else None for turns, n, text in zip(completions, last, said, strict=True)]


async def late(prompts, completions):
    """As `chatty`, awaited."""
    return chatty(prompts, completions)
