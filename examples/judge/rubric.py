"""
A rubric as a reward: a model on any OpenAI-compatible server says which criteria a response meets.

    export OPENAI_BASE_URL=http://localhost:8000/v1 JUDGE_MODEL=NAME
    python rlhf_details/train_rloo.py --reward_model_path None --reward_fn examples/judge/rubric.py:rubric

An answer that fails, is cut off or cannot be read abstains (NaN). `compared` compares the responses of a group instead.
"""

import asyncio
import functools
import json
import math
import os
import re
from itertools import groupby, permutations

import openai

from rlhf_details.plumbing import console
from rlhf_details.plumbing.machine import judge

CRITERIA = {  # weight of each; a negative one is for what a response should not do
    "It says something kind.": 2,
    "It stays with the subject of the prompt.": 2,
    "It says the same thing twice.": -1,
}
TEMPLATE = """\
Below are a prompt and a response to it. Say of each criterion whether the response meets it.

### Prompt
{prompt}

### Response
{response}

### Criteria
{criteria}

### Your answer
End with a JSON object of the {count} numbers and true or false, such as {example}."""
OPTIONS = {"model": os.environ.get("JUDGE_MODEL", "judge"), "temperature": 0, "max_tokens": 512}


async def ask_all(questions):
    """The answers, without reasoning; "" where there is none."""
    places = asyncio.Semaphore(judge.AT_ONCE)

    async def ask(client, question):
        async with places:
            try:
                return (await judge.ask(client, question, OPTIONS)).rpartition("</think>")[2]
            except Exception as e:  # the client's own errors, and replies that are no chat completions
                console.say(f"the judge failed: {console.in_one_line(e)}")
                return ""

    key = os.environ.get("OPENAI_API_KEY") or "no-key"
    async with openai.AsyncOpenAI(api_key=key, timeout=judge.TIMEOUT) as client:
        return await asyncio.gather(*(ask(client, question) for question in questions))


def points(answer):
    """The weights of the criteria that are met, over the sum of all weights' sizes: in -1 .. 1."""
    try:
        met = json.loads(re.findall(r"\{[^{}]*\}", answer)[-1])  # The last object counts.
        met = [met[str(number)] for number in range(1, len(CRITERIA) + 1)]
    except (IndexError, KeyError, ValueError):
        return math.nan
    if not all(isinstance(x, bool) for x in met):
        return math.nan
    return sum(w * x for w, x in zip(CRITERIA.values(), met, strict=True)) / sum(map(abs, CRITERIA.values()))


async def rubric(prompts, completions):
    """The points of each response."""
    criteria = "\n".join(f"{number}. {text}" for number, text in enumerate(CRITERIA, 1))
    # The example has all numbers, because small judges copy it.
    example = json.dumps({str(number): number % 2 == 1 for number in range(1, len(CRITERIA) + 1)})
    ask = functools.partial(TEMPLATE.format, criteria=criteria, count=len(CRITERIA), example=example)
    pairs = zip(prompts, completions, strict=True)
    answers = await ask_all(ask(prompt=p, response=r) for p, r in pairs)
    unread = [x for x in answers if x and math.isnan(points(x))]
    if unread:
        first = console.in_one_line(unread[0])[-200:]
        console.say(f"judge: cannot read {len(unread)} of {len(answers)} answers; the first ends with {first}")
    return [points(x) for x in answers]


async def compared(prompts, completions):
    """(Won - lost) / comparisons with the siblings, each in both orders; 0 without siblings, NaN without an answer."""
    groups = [[i for i, _ in group] for _, group in groupby(enumerate(prompts), key=lambda pair: pair[1])]
    pairs = [pair for group in groups for pair in permutations(group, 2)]  # (first, second), in both orders
    texts = [judge.JUDGE_TEMPLATE.format(prompt=prompts[i], a=completions[i], b=completions[j]) for i, j in pairs]
    verdicts = [judge.verdict_by_answer(answer, "A") for answer in await ask_all(texts)]
    found = {pair: 1 if x == "won" else -1 for pair, x in zip(pairs, verdicts, strict=True) if x != "unparsable"}
    twice = [found[i, j] == -found[j, i] for i, j in found if i < j and (j, i) in found]
    if twice:
        console.say(
            f"judge: names the same response in both orders in {sum(twice) / len(twice):.2f} of {len(twice)} pairs"
        )
    of_each = [
        [x if i == first else -x for (first, j), x in found.items() if i in (first, j)] for i in range(len(prompts))
    ]
    has_siblings = {i for pair in pairs for i in pair}
    return [sum(x) / len(x) if x else math.nan if i in has_siblings else 0.0 for i, x in enumerate(of_each)]
