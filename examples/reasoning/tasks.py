"""
Short reasoning tasks whose answers the package reasoning-gym makes and checks (Apache-2.0, pip install reasoning-gym).

    --dataset examples/reasoning/tasks.py:train           240 rows: least common multiples, products, greatest common
                                                          divisors and counts of primes, all of small numbers
    --eval_dataset examples/reasoning/tasks.py:test       128 rows: the same kinds, other questions
                   examples/reasoning/tasks.py:new_kinds   64 rows: kinds that training lacks
    --reward_fn examples/reasoning/tasks.py:score         the package's own score of each answer, 0 to 1
                examples/reasoning/tasks.py:right         True where this score is 1
                examples/reasoning/tasks.py:says_it       True where its last number or word is the right one

A row has the columns messages, kind, answer and entry (JSON of the package's own entry). Its messages begin with one
worked example of the kind, so that the small model answers in the form that is asked for.

Where the right answer stands among other words, the package gives len(right one) / len(answer) of a point. So a model
that stops explaining has a higher `score`, and reasons no better. `says_it` tells the two apart.
"""

import json
import re

import reasoning_gym

KINDS = {
    "lcm": dict(min_value=2, max_value=12),
    "products": dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "gcd": dict(min_value=2, max_value=20),
    "count_primes": dict(max_n=20),
}
NEW_KINDS = {
    "letter_counting": dict(min_words=2, max_words=5),
    "basic_arithmetic": dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1),
}


# ---- rows ------------------------------------------------------------------------------------------------------------
def entries(kind, count, seed):
    """`count` of the package's entries, no question twice; the same seed gives the same ones."""
    data = reasoning_gym.create_dataset(kind, size=4 * count, seed=seed, **(KINDS | NEW_KINDS)[kind])
    return list({entry["question"]: entry for entry in data}.values())[:count]


def row(kind, entry, examples):
    """One row: the worked example as an earlier turn, and the question."""
    turns = []
    for example in examples:
        turns.append({"role": "user", "content": example["question"].strip()})
        turns.append({"role": "assistant", "content": example["answer"]})
    messages = [*turns, {"role": "user", "content": entry["question"].strip()}]
    return {"messages": messages, "kind": kind, "answer": entry["answer"], "entry": json.dumps(entry)}


def rows(kinds, count, seed, but=()):
    """`count` rows of each kind, one kind after the other in turn, without the questions in `but`."""
    columns = []
    for kind in kinds:
        examples = entries(kind, 1, seed=1)
        taken = {*but, *(example["question"] for example in examples)}
        found = [entry for entry in entries(kind, count + len(taken), seed) if entry["question"] not in taken]
        columns.append([row(kind, entry, examples) for entry in found[:count]])
    return [row for turn in zip(*columns, strict=True) for row in turn]


def test():
    return rows(KINDS, 32, seed=3)


def new_kinds():
    return rows(NEW_KINDS, 32, seed=3)


def train():
    return rows(KINDS, 60, seed=2, but={json.loads(row["entry"])["question"] for row in test()})


# ---- rewards ---------------------------------------------------------------------------------------------------------
def score(prompts, completions, kind, entry):
    """The package's own score of each completion, 0 to 1."""
    data = {name: reasoning_gym.create_dataset(name, size=1, seed=1) for name in {*kind}}
    answers = map(str.strip, completions)
    return [data[name].score_answer(x, json.loads(e)) for x, name, e in zip(answers, kind, entry, strict=True)]


def right(prompts, completions, kind, entry):
    """True where the package gives a completion the whole point."""
    return [x >= 1 for x in score(prompts, completions, kind, entry)]


def says_it(prompts, completions, kind, entry):
    """True where the last number, or where the answer is a word the last word, of a completion is the right one."""
    results = []
    for text, e in zip(completions, entry, strict=True):
        answer = json.loads(e)["answer"]
        found = re.findall(r"-?\d+" if answer.lstrip("-").isdigit() else r"\w+", text)
        results.append(bool(found) and found[-1] == answer)
    return results
