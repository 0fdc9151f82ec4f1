"""Environments for runs of train_agent.py. They keep nothing: what they say depends on the turns alone."""


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
