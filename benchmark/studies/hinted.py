"""Sums with the answer in the prompt or without it, of self_teacher.toml, and answers that are wrong."""

from random import Random

from rlhf_details import toy


def rows():
    """toy-sum's rows for SFT. Every second one begins with its answer, "17 3 + 8 + 5 + 1 =", and is answered by it."""
    found = toy.rows("sft", "train", "toy-sum")
    hinted = [{"prompt": f"{row['answer']} {row['prompt']}", "completion": row["answer"]} for row in found[::2]]
    return [row for pair in zip(hinted, found[1::2], strict=True) for row in pair]


def answers():
    """toy-sum's prompts with their answers as completions."""
    return [row | {"completion": row["answer"]} for row in toy.rows("prompts", "train", "toy-sum")]


def mistaken():
    """toy-sum's prompts, where three answers in ten are too high by one."""
    draw = Random(0)
    found = toy.rows("prompts", "train", "toy-sum")
    return [row | {"answer": str(int(row["answer"]) + (draw.random() < 0.3))} for row in found]
