"""
Questions that a small model cannot answer alone, a calculator, and how a call of it looks. Written for this repository,
CC0 1.0.

    --dataset examples/tools/calculator.py:calls            200 rows for SFT, with calls and answers that a program wrote
    --dataset examples/tools/calculator.py:train            512 questions: plain sums, and short stories
    --eval_dataset examples/tools/calculator.py:test        128 other questions of these kinds
                   examples/tools/calculator.py:new_kind    128 questions with two steps, which training never has
                   examples/tools/calculator.py:alone       the questions of `test`, where nothing is said of a tool
                   examples/tools/calculator.py:new_alone   those of `new_kind` likewise
    --tools examples/tools/calculator.py:calculator
    --reward_fn examples/tools/calculator.py:right          True where the last number of the answer is the result

A row has the columns messages, result and kind.
"""

import ast
import json
import operator
import random
import re

SYSTEM = """Use the calculator:
<tool_call>
{"name": "calculator", "arguments": {"expression": "2*3"}}
</tool_call>
Then say the result."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


# ---- the tool --------------------------------------------------------------------------------------------------------
def calculator(expression: str) -> int:
    """
    Computes an expression of whole numbers with +, - and *.

    Args:
        expression: the expression, such as 12*(3+4)
    """

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        parts = [value(x) for x in (getattr(node, name, None) for name in ("left", "right", "operand")) if x]
        return OPERATORS[type(node.op)](*parts)

    if len(expression) > 40:
        raise ValueError("the expression is too long")
    try:
        return value(ast.parse(expression, mode="eval").body)
    except (AttributeError, KeyError, SyntaxError):
        raise ValueError("this is no expression of whole numbers with +, - and *") from None


# ---- questions: (a, b, c) -> text and expression ---------------------------------------------------------------------
KINDS = {
    "sum": ("What is {a} + {b}?", "{a}+{b}"),
    "difference": ("What is {a} - {b}?", "{a}-{b}"),
    "product": ("What is {a} * {b}?", "{a}*{b}"),
    "story of a sum": ("A shop has {a} apples and gets {b} more. How many apples has it?", "{a}+{b}"),
    "story of a difference": ("A farm has {a} eggs and sells {b}. How many eggs are left?", "{a}-{b}"),
    "story of a product": ("A hall has {a} rows of {b} seats. How many seats are there?", "{a}*{b}"),
}
NEW_KINDS = {
    "two steps": ("What is {a} + {b} * {c}?", "{a}+{b}*{c}"),
    "story of two steps": ("A bank has {a} coins, gets {b} and pays {c}. How many coins are left?", "{a}+{b}-{c}"),
}


def questions(kinds, count, seed):
    """[(text, expression, kind)]: `count` of them, whose numbers have two to four digits. A seed gives the same ones."""
    chance, found = random.Random(seed), []
    for i in range(count):
        kind = list(kinds)[i % len(kinds)]
        numbers = sorted((chance.randint(10, 10 ** chance.randint(2, 4) - 1) for _ in range(3)), reverse=True)
        text, expression = (x.format(**dict(zip("abc", numbers, strict=True))) for x in kinds[kind])
        found.append((text, expression, kind))
    return found


def rows(kinds, count, seed, system=SYSTEM):
    """Rows of `questions`, with the system text that says how the calculator is called, or with none."""
    told = [{"role": "system", "content": system}] if system else []
    return [
        {"messages": [*told, {"role": "user", "content": text}], "result": calculator(expression), "kind": kind}
        for text, expression, kind in questions(kinds, count, seed)
    ]


def train():
    return rows(KINDS, 512, seed=1)


def test():
    return rows(KINDS, 128, seed=2)


def new_kind():
    return rows(NEW_KINDS, 128, seed=3)


def alone():
    return rows(KINDS, 128, seed=2, system=None)


def new_alone():
    return rows(NEW_KINDS, 128, seed=3, system=None)


def calls():
    """Conversations for SFT: a call, what the calculator returns, and the result in words."""
    found = []
    for row, (_, expression, _) in zip(rows(KINDS, 200, seed=4), questions(KINDS, 200, seed=4), strict=True):
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        turns = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(row["result"])},
            {"role": "assistant", "content": f"The result is {row['result']}."},
        ]
        found.append({"messages": row["messages"] + turns})
    return found


# ---- rewards ---------------------------------------------------------------------------------------------------------
def right(prompts, completions, result):
    """True where the last number that the last turn says is the result."""
    return [numbers(text)[-1:] == [wanted] for text, wanted in zip(completions, result, strict=True)]


def numbers(text):
    """The whole numbers of a text, where 1,234 is one."""
    return [int(x) for x in re.findall(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text))]
