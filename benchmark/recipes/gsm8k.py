"""
Rows of GSM8K (arXiv 2110.14168) as conversations, for benchmark/recipes/grpo_gsm8k.toml.

    --dataset benchmark/recipes/gsm8k.py:train --eval_dataset benchmark/recipes/gsm8k.py:test

`prompt` is one message of the user, and `answer` the solution of the data set, whose last line "#### 72" is what
benchmark/recipes/rewards.py's exact_match compares with.
"""

from datasets import load_dataset

# The instruction in the README of deepseek-ai/DeepSeek-Math.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def rows(split):
    problems = load_dataset("openai/gsm8k", "main", split=split)
    messages = [[{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}] for row in problems]
    return [{"prompt": prompt, "answer": row["answer"]} for prompt, row in zip(messages, problems, strict=True)]


def train():
    """The 7,473 problems to train on."""
    return rows("train")


def test():
    """The 1,319 problems of the test."""
    return rows("test")
