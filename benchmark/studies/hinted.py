"""Sums and questions with their answers, in the prompt or after it, and sums with wrong answers."""

import sys
from pathlib import Path
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


def reasoning():
    """The training questions of examples/reasoning/tasks.py, followed by their answers."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "reasoning"))
    import tasks

    answered = []
    for row in tasks.train():
        answer = {"role": "assistant", "content": row["answer"]}
        answered.append(row | {"messages": [*row["messages"], answer]})
    return answered
