"""Environments for runs of train_agent.py. They keep nothing: what they say depends on the turns alone."""

import asyncio
import sys
import time


def silent(prompts, completions):
    """It says nothing, so every episode has one turn."""
    return [None] * len(prompts)


def chatty(prompts, completions):
    """An episode ends after one to four turns, by the length of its prompt."""
    last = [1 + len(prompt) % 4 for prompt in prompts]
    said = [(" the soup", " was")[len(turns) % 2] for turns in completions]
    return [text if len(turns) < n else None for turns, n, text in zip(completions, last, said, strict=True)]


async def late(prompts, completions):
    """As `chatty`, awaited."""
    return chatty(prompts, completions)


def by_row(prompts, completions, said):
    """What the row's column says, a list of texts, one after each turn."""
    pairs = zip(completions, said, strict=True)
    return [texts[len(turns) - 1] if len(turns) <= len(texts) else None for turns, texts in pairs]


# ---- tools -----------------------------------------------------------------------------------------------------------
def add(x: int, y: int) -> int:
    """
    Adds two numbers.

    Args:
        x: the first one
        y: the second one
    """
    return x + y


async def double(x: int) -> dict:
    """
    Doubles a number, and takes its time.

    Args:
        x: the number
    """
    await asyncio.sleep(0.2)
    return {"twice": 2 * x}


def fragile(how: str) -> str:
    """
    Fails.

    Args:
        how: in which way
    """
    if how == "exit":
        sys.exit(3)
    if how == "hang":
        time.sleep(30)
    raise KeyError(how)


def undescribed(x: int) -> int:
    return x
