"""
Questions that a small model cannot answer alone, a calculator, and how a call of it looks. Written for this repository,
CC0 1.0.

    --dataset examples/tools/calculator.py:written       200 rows for SFT: sums, with calls and answers by a program
    --dataset examples/tools/calculator.py:train         504 questions, each a story of one step
    --eval_dataset examples/tools/calculator.py:test     126 others, the same stories with other numbers
                   examples/tools/calculator.py:two_steps        126 questions of two steps, which training never has
                   examples/tools/calculator.py:test_alone       as test, where nothing is said of a tool
                   examples/tools/calculator.py:two_steps_alone  as two_steps likewise
    --tools examples/tools/calculator.py:calculator
    --reward_fn examples/tools/calculator.py:right       True where the last number of the answer is the result

A row has the columns messages, result and kind.
"""

import ast
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
PLAIN = {
    "sum": ("What is {a} + {b}?", "{a}+{b}"),
    "difference": ("What is {a} - {b}?", "{a}-{b}"),
    "product": ("What is {a} * {b}?", "{a}*{b}"),
}
STORIES = {
    "apples": ("A shop has {a} apples and gets {b} more. How many apples has it?", "{a}+{b}"),
    "eggs": ("A farm has {a} eggs and sells {b}. How many eggs are left?", "{a}-{b}"),
    "seats": ("A hall has {a} rows of {b} seats. How many seats are there?", "{a}*{b}"),
    "pages": ("One book has {a} pages, another has {b}. How many pages have both?", "{a}+{b}"),
    "people": ("A town has {a} people. Then {b} move away. How many stay?", "{a}-{b}"),
    "pens": ("A box holds {b} pens. How many pens are in {a} boxes?", "{a}*{b}"),
    "metres": ("Ann ran {a} metres and then {b} metres. How far did she run?", "{a}+{b}"),
    "litres": ("A tank holds {a} litres, and {b} run out. How many litres remain?", "{a}-{b}"),
    "tickets": ("One ticket costs {b} euros. What do {a} tickets cost?", "{a}*{b}"),
}
TWO_STEPS = {
    "two signs": ("What is {a} + {b} * {c}?", "{a}+{b}*{c}"),
    "coins": ("A bank has {a} coins, gets {b} and pays {c}. How many coins are left?", "{a}+{b}-{c}"),
}


def questions(kinds, count, seed):
    """[(text, expression, kind)]: `count` of them with numbers of two to four digits, the same ones for a seed."""
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
    return rows(STORIES, 504, seed=1)


def test():
    return rows(STORIES, 126, seed=2)


def two_steps():
    return rows(TWO_STEPS, 126, seed=3)


def test_alone():
    return rows(STORIES, 126, seed=2, system=None)


def two_steps_alone():
    return rows(TWO_STEPS, 126, seed=3, system=None)


def written():
    """Conversations for SFT: a call, what the calculator returns, and the result in words."""
    found = []
    for row, (_, expression, _) in zip(rows(PLAIN, 200, seed=4), questions(PLAIN, 200, seed=4), strict=True):
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        turns = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(row["result"])},
            {"role": "assistant", "content": f"The result is {row['result']}."},
        ]
        found.append({"messages": row["messages"] + turns})
    return found


# ---- rewards, which read messages: --reward_fn_format messages -------------------------------------------------------
def right(prompts, completions, result):
    """True where the last number that is said is the result."""
    return [numbers(said[-1])[-1:] == [wanted] for said, wanted in zip(completions, result, strict=True)]


def calls(prompts, completions):
    """How often the calculator was asked."""
    return [len(results(said)) for said in completions]


def errors(prompts, completions):
    """True where it returned an error."""
    return [any(text.startswith("error") for text in results(said)) for said in completions]


def ignored(prompts, completions):
    """True where it returned a number, and the last number that is said is another one."""
    returned = [re.findall(r"^-?\d+$", text)[:1] for said in completions for text in results(said)[-1:] or [""]]
    pairs = zip(completions, returned, strict=True)
    return [bool(last) and [str(x) for x in numbers(said[-1])[-1:]] != last for said, last in pairs]


def results(said):
    """What the calculator returned."""
    return [message["content"] for message in said if message["role"] == "tool"]


def numbers(message):
    """The whole numbers of a message, where 1,234 is one."""
    return [int(x) for x in re.findall(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", message["content"]))]
