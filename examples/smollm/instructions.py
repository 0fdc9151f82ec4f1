"""
Instructions whose obeying a program can check: the rows, and the reward. Written for this repository, CC0 1.0.

    --dataset examples/smollm/instructions.py:train         288 rows: 48 questions, seven kinds of instruction
    --eval_dataset examples/smollm/instructions.py:test      96 rows: 24 other questions, the same kinds
                   examples/smollm/instructions.py:new_kinds 96 rows: the 24 other questions, kinds that training lacks
    --reward_fn examples/smollm/instructions.py:obeys       True or False for each answer

A row has the columns messages, kind, value and topic. An answer is right if it does what `kind` and `value` ask, says
the topic's word and has four words or more, so that neither silence nor a constant text is paid.
"""

import json
import random
import re

# question | a word that an answer should have | a word that many answers have, which some rows forbid
TRAIN_QUESTIONS = """
Why is the sky blue?|sky|light
What do bees make?|bees|honey
Why do leaves fall in autumn?|leaves|trees
What is a bicycle for?|bicycle|wheels
How does a boat float?|boat|water
What does a doctor do?|doctor|people
Why do we sleep?|sleep|body
What is bread made of?|bread|flour
How do birds fly?|birds|wings
What is the moon?|moon|earth
Why does ice melt?|ice|water
What is a library?|library|books
How do fish breathe?|fish|gills
What is a volcano?|volcano|lava
Why is the sea salty?|sea|salt
What is a friend?|friend|person
How does a clock work?|clock|time
What is rain?|rain|water
Why do dogs bark?|dogs|bark
What does a teacher do?|teacher|students
How is paper made?|paper|wood
What is a desert?|desert|dry
Why do we wear shoes?|shoes|feet
What is music?|music|sound
How does a plant grow?|plant|sunlight
What is a river?|river|water
Why are carrots orange?|carrots|carotene
What is a bridge for?|bridge|people
How do cats see at night?|cats|eyes
What is a map?|map|places
Why do we laugh?|laugh|happy
What is snow?|snow|ice
How does soap clean?|soap|dirt
What is a telescope for?|telescope|stars
Why do stars shine?|stars|light
What is a market?|market|goods
How do magnets work?|magnets|iron
What is a train?|train|tracks
Why do onions make us cry?|onions|eyes
What is gold used for?|gold|jewelry
How does a candle burn?|candle|wax
What is a forest?|forest|trees
Why do ships have anchors?|ships|water
What is a poem?|poem|words
How do spiders catch flies?|spiders|web
What is chess?|chess|game
Why do we need air?|air|oxygen
What is a garden?|garden|plants
"""
TEST_QUESTIONS = """
Why does the wind blow?|wind|air
What do cows eat?|cows|grass
How does a mirror work?|mirror|light
What is a castle?|castle|stone
Why do we brush our teeth?|teeth|clean
What is a lake?|lake|water
How is cheese made?|cheese|milk
What does a pilot do?|pilot|plane
Why is exercise good?|exercise|health
What is a dream?|dream|sleep
How do plants drink?|plants|roots
What is a cloud?|cloud|water
Why do bears sleep in winter?|bears|food
What is a piano?|piano|keys
How does a kite fly?|kite|wind
What is a museum?|museum|art
Why do we cook food?|food|heat
What is an island?|island|water
How do ants find food?|ants|food
What is a lamp for?|lamp|light
Why do trees have bark?|trees|bark
What is a novel?|novel|story
How does a zip close?|zip|teeth
What is winter?|winter|cold
"""
WORDS = "always because often perhaps simply today usually very".split()  # those that an instruction may ask for


# ---- what an instruction asks for ------------------------------------------------------------------------------------
def words(text):
    return re.findall(r"[A-Za-z']+|\d+", text)


def sentences(text):
    """The number of sentences: ends in . ! or ? before a space or the end of the text."""
    return len(re.findall(r"[.!?]+[\"')]*(?=\s|$)", text.strip()))


def says(text, word):
    return word.lower() in [w.lower() for w in words(text)]


def parsed(text):
    """The JSON value that the whole text is, or None."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def is_object(text, key):
    """Whether a text is a JSON object with exactly this key, and text behind it."""
    value = parsed(text)
    return isinstance(value, dict) and list(value) == [key] and isinstance(value[key], str)


COUNT = {1: "one", 2: "two", 3: "three"}
KINDS = {  # kind: (values, the instruction, whether an answer obeys)
    "sentences": ([1, 2, 3], "Answer in exactly {} sentence(s).", lambda text, n: sentences(text) == n),
    "at most": ([10, 15, 20], "Use at most {} words.", lambda text, n: len(words(text)) <= n),
    "lower case": ([None], "Write everything in lower case.", lambda text, _: text == text.lower()),
    "word": (WORDS, 'Use the word "{}".', says),
    "no word": (None, 'Do not use the word "{}".', lambda text, word: not says(text, word)),
    "json": (["answer", "reply", "text"], 'Answer as a JSON object with the one key "{}".', is_object),
    "sum": (None, "Answer in one sentence.", lambda text, n: says(text, str(n)) and sentences(text) == 1),
}
NEW_KINDS = {
    "first word": (WORDS, 'Begin your answer with the word "{}".', lambda text, w: words(text)[0].lower() == w),
    "last words": (
        ["That is all.", "I hope this helps."],
        'End your answer with "{}"',
        lambda text, end: text.endswith(end),
    ),
    "capitals": ([None], "Write everything in capital letters.", lambda text, _: text == text.upper()),
    "question": ([None], "Answer with a question.", lambda text, _: text.endswith("?")),
    "no comma": ([None], "Do not use any comma.", lambda text, _: "," not in text),
    "at least": ([15, 20], "Use at least {} words.", lambda text, n: len(words(text)) >= n),
    "quotes": ([None], "Put your whole answer in double quotation marks.", lambda text, _: text[0] == text[-1] == '"'),
    "difference": (None, "Answer in one sentence.", lambda text, n: says(text, str(n)) and sentences(text) == 1),
}


# ---- rows ------------------------------------------------------------------------------------------------------------
def row(rng, question, kind, kinds):
    """One row: the question with an instruction of this kind, or a sum or difference in its place."""
    question, topic, common = question.split("|")
    values, instruction, _ = kinds[kind]
    value = common if kind == "no word" else rng.choice(values) if values else None
    if kind in ("sum", "difference"):
        a, b = sorted((rng.randint(10, 99), rng.randint(10, 99)), reverse=True)
        sign, value = {"sum": ("+", a + b), "difference": ("-", a - b)}[kind]
        question, topic = f"What is {a} {sign} {b}?", str(value)
    text = instruction.format(COUNT.get(value, value)).replace("sentence(s)", "sentence" if value == 1 else "sentences")
    messages = [{"role": "user", "content": f"{question} {text}"}]
    return {"messages": messages, "kind": kind, "value": json.dumps(value), "topic": topic}


def rows(questions, kinds, count, seed):
    """For each question rows of `count` kinds, drawn without replacement. The same seed gives the same rows."""
    rng = random.Random(seed)
    return [
        row(rng, question, kind, kinds)
        for question in questions.strip().splitlines()
        for kind in rng.sample(sorted(kinds), count)
    ]


def train():
    return rows(TRAIN_QUESTIONS, KINDS, 6, seed=1)


def test():
    return rows(TEST_QUESTIONS, KINDS, 4, seed=2)


def new_kinds():
    return rows(TEST_QUESTIONS, NEW_KINDS, 4, seed=3)


# ---- reward ----------------------------------------------------------------------------------------------------------
def obeys(prompts, completions, kind, value, topic):
    """True where a completion does what its row asks for, says the topic and has four words or more."""
    results = []
    for text, name, number, word in zip(map(str.strip, completions), kind, value, topic, strict=True):
        check = (KINDS | NEW_KINDS)[name][2]
        results.append(len(words(text)) >= 4 and says(text, word) and bool(check(text, json.loads(number))))
    return results
