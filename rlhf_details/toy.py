"""
The embedded task: short reviews written by a seeded grammar, and an imaginary human whose taste is a plain function.

1. Texts. A review opens with who went where ("last friday my sister went to a small hotel by the river .") and goes on
   with two or three sentences from the patterns below. A prompt is the opening and up to two words more. The response
   continues it. `parses` says whether the grammar can write a text.
2. The true ("gold") reward, `gold(prompt, response)`, wants four things at once: kind words, the subject of the
   opening, no repetition, a proper ending. No single trick satisfies it, because a repeated word costs, a noun from
   another subject costs, and a response without a noun of its own subject costs most.
3. The human, `choose`, prefers among K responses with probability proportional to exp(gold / HUMAN_TEMPERATURE). The
   choices are noisy, but right on average.
4. A `Judge` is a reward function that knows gold and has the faults that its fields name.

Everything is a function of a seed, so no file has to be shipped: `rows("prompts", "train")` gives the same anywhere.
"""

import math
import re
import zlib
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from rlhf_details import utils

TOPICS = {  # topic: places, nouns that take "was", nouns that take "were"
    "restaurant": (
        "restaurant cafe bistro diner",
        "soup bread dessert menu wine steak sauce waiter",
        "noodles portions",
    ),
    "hotel": ("hotel inn hostel lodge", "room bed lobby pool shower balcony pillow porter", "towels curtains"),
    "cinema": (
        "film movie thriller comedy",
        "plot acting script ending soundtrack hero director dialogue",
        "jokes scenes",
    ),
    "concert": ("concert gig recital festival", "band singer sound stage drummer encore choir melody", "songs lights"),
    "museum": (
        "museum gallery castle exhibition",
        "collection guide tour garden tower statue audioguide map",
        "paintings vases",
    ),
    "train": (
        "train ferry tram bus",
        "seat carriage ticket timetable conductor journey heating driver",
        "windows announcements",
    ),
    "market": ("market bazaar shop store", "fruit cheese fish honey basket vendor stall bargain", "prices vegetables"),
    "gym": ("gym club spa sauna", "coach locker treadmill class massage steam mirror equipment", "weights machines"),
}
POSITIVE = (
    "wonderful charming delightful excellent lovely superb friendly brilliant perfect graceful cosy elegant fresh "
    "gorgeous impressive pleasant splendid warm enchanting marvellous"
).split()
NEGATIVE = (
    "awful dull dreadful shabby rude terrible gloomy broken filthy boring clumsy noisy stale ugly "
    "mediocre unpleasant horrible cold disappointing miserable"
).split()
LIKED, DISLIKED = "loved enjoyed adored praised".split(), "hated disliked regretted cursed".split()
FILL = {
    "time": [
        "last friday",
        "on monday",
        "yesterday",
        "this summer",
        "two weeks ago",
        "one rainy evening",
        "in april",
        "last night",
    ],
    "who": ["my sister", "my brother", "we", "my neighbour", "our family", "an old friend", "i", "my aunt"],
    "size": ["a small", "a famous", "a new", "an old", "a big", "a hidden"],
    "where": [
        "by the river",
        "near the station",
        "in the old town",
        "on the hill",
        "behind the church",
        "at the seaside",
    ],
    "adv": ["very", "really", "rather", "quite", "so", "truly"],
    "them": ["we all", "my parents", "the children", "most people", "both of us"],
    "time_word": ["evening", "day", "experience", "surprise", "afternoon"],
}
OPENING = "{time} {who} went to {size} {place} {where} ."
SENTENCES = [  # {subject}: a noun with its verb; {good}: a word of the sentence's sentiment; {bad}: one of the other
    "the {subject} {adv} {good} .",
    "the {subject} {good} and the {subject} {good} .",
    "the {subject} {good} but the {subject} {bad} .",
    "{them} {felt} the {noun} because it seemed {adv} {good} .",
    "the {noun} looked {good} , and the {subject} {adv} {good} too .",
    "{them} {felt} the {good} {noun} .",
    "the {good} {noun} made up for the {bad} {noun} .",
]
CLOSERS = {
    +1: ["we will come back soon .", "i would gladly recommend it to anyone .", "overall the {time_word} was {good} ."],
    -1: ["we will never return .", "i would not recommend it to anyone .", "overall the {time_word} was {good} ."],
}
PLACE_TOPIC = {place: topic for topic, (places, _, _) in TOPICS.items() for place in places.split()}
NOUN_TOPIC = {noun: topic for topic, (_, one, many) in TOPICS.items() for noun in f"{one} {many}".split()}
SENTIMENT = dict.fromkeys(POSITIVE + LIKED, 1) | dict.fromkeys(NEGATIVE + DISLIKED, -1)
HUMAN_TEMPERATURE = 1.0
COLOURS = "red blue green black white pink grey brown".split()  # of the boxes of "toy-tools"


# ---- the grammar -----------------------------------------------------------------------------------------------------
def write_review(rng, sentences=(1, 2, 2)):
    """One review.

    Args: rng, a `numpy.random.Generator`; sentences, of which one is drawn, how many stand between opening and closer.
    Returns: (text, n): the words joined by single spaces, and how many of them the opening has.
    """
    pick = lambda options: options[rng.integers(len(options))]  # noqa: E731
    topic = pick(list(TOPICS))
    places, one, many = (words.split() for words in TOPICS[topic])
    subjects = [f"{n} was" for n in one] + [f"{n} were" for n in many]
    mood = pick([+1, +1, -1, -1, 0])  # With 0 each sentence has a mood of its own.
    said = set()

    def fill(pattern, sign):
        def word(slot):
            options = {
                "place": places, "noun": one, "subject": subjects, "felt": LIKED if sign > 0 else DISLIKED,
                "good": POSITIVE if sign > 0 else NEGATIVE, "bad": NEGATIVE if sign > 0 else POSITIVE,
            }.get(slot[1]) or FILL[slot[1]]  # fmt: skip
            fresh = [o for o in options if o.split()[0] not in said]
            chosen = pick(fresh if fresh and rng.random() < 0.9 else options)
            if chosen.split()[0] in NOUN_TOPIC or chosen in SENTIMENT:
                said.add(chosen.split()[0])  # A person rarely repeats a word, but now and then does.
            return chosen

        return re.sub(r"{(\w+)}", word, pattern)

    opening = fill(OPENING, +1)
    sentences = [fill(pick(SENTENCES), mood or pick([+1, -1])) for _ in range(pick(sentences))]
    if rng.random() < 0.8:
        sign = mood or pick([+1, -1])
        sentences.append(fill(pick(CLOSERS[sign]), sign))
    return " ".join([opening, *sentences]), len(opening.split())


def _regex(patterns):
    one = [noun for _, nouns, _ in TOPICS.values() for noun in nouns.split()]
    many = [noun for _, _, nouns in TOPICS.values() for noun in nouns.split()]
    signed = {
        "place": list(PLACE_TOPIC),
        "noun": one,
        "subject": [f"{noun} was" for noun in one] + [f"{noun} were" for noun in many],
        "felt": LIKED + DISLIKED,
        "good": POSITIVE + NEGATIVE,
        "bad": POSITIVE + NEGATIVE,
    }
    alternatives = {slot: "|".join(map(re.escape, words)) for slot, words in (FILL | signed).items()}
    return "|".join(re.sub(r"\\{(\w+)\\}", lambda m: f"(?:{alternatives[m[1]]})", re.escape(p)) for p in patterns)


@cache
def _grammar():
    body, closers = _regex(SENTENCES), _regex(CLOSERS[+1] + CLOSERS[-1])
    return re.compile(f"(?:{_regex([OPENING])})(?: (?:{body}))+(?: (?:{closers}))?".replace("\\ ", " "))


def parses(text):
    """Whether `text` is an opening, one or more sentences and at most one closing sentence of the grammar."""
    return _grammar().fullmatch(text) is not None


# ---- the imaginary human ---------------------------------------------------------------------------------------------
def gold(prompt, response):
    """The true reward of a response, in points. Nothing is trained on it, except by the choices of `choose`.

    + kind words: distinct positive words minus all negative ones, within [-5, 5]
    + subject:    distinct nouns of the prompt's subject, at most 4, or -4 where there is none; -2 for each other noun
    - repetition: 1 for each noun, adjective or feeling said again, and 1 for each word that follows itself
    + ending:     +1 where the response ends with a full stop, else -1 (a missing EOS is missing_eos_penalty's matter)
    Args: prompt, response: strings, words separated by spaces. Returns: float.
    """
    topic = next((PLACE_TOPIC[w] for w in prompt.split() if w in PLACE_TOPIC), None)
    words = response.split()
    content = [w for w in words if w in NOUN_TOPIC or w in SENTIMENT]
    kind = len({w for w in words if SENTIMENT.get(w) == 1}) - sum(SENTIMENT.get(w) == -1 for w in words)
    on_topic = len({w for w in words if w in NOUN_TOPIC and NOUN_TOPIC[w] == topic})
    off_topic = sum(NOUN_TOPIC.get(w, topic) != topic for w in words)
    repeated = len(content) - len(set(content)) + sum(a == b for a, b in pairwise(words))
    ending = 1.0 if words and words[-1] == "." else -1.0
    return max(-5, min(5, kind)) + (min(on_topic, 4) if on_topic else -4) - 2.0 * off_topic - repeated + ending


def choose(scores, rng):
    """Index of the response that a noisy human prefers: P(i) proportional to exp(scores[i] / HUMAN_TEMPERATURE)."""
    return int(np.argmax(np.asarray(scores) / HUMAN_TEMPERATURE + rng.gumbel(size=len(scores))))


@dataclass(frozen=True)
class Judge:
    """A reward function f(prompts, completions) of the task "toy": gold, with faults in points.

    Its chance is a function of `seed`, prompt and response, so it says the same again, in any process.
    """

    noise: float = 0.0  # standard deviation
    length: float = 0.0  # for every ten words
    word: float = 0.0  # for each "really"
    first: float = 0.0  # for the response that a comparison shows first
    fails: float = 0.0  # share of the responses that it fails on, at random
    fails_below: float = -math.inf  # It fails on all whose gold is below.
    failed: float = math.nan  # what it then says; NaN abstains
    seed: int = 0

    def __call__(self, prompts, completions):
        return [self.score(*pair) for pair in zip(prompts, completions, strict=True)]

    def score(self, prompt, response):
        words, points = response.split(), gold(prompt, response)
        rng = np.random.default_rng(zlib.crc32(f"{self.seed} {prompt} {' '.join(words)}".encode()))
        if rng.random() < self.fails or points < self.fails_below:
            return self.failed
        return points + self.noise * rng.normal() + self.length * len(words) / 10 + self.word * words.count("really")

    def compare(self, prompt, first, second):
        """1 if it prefers the first response, -1 if the second, 0 if neither; NaN if it fails on one of them."""
        return float(np.sign(self.score(prompt, first) + self.first - self.score(prompt, second)))


# ---- rows and tokenizer ----------------------------------------------------------------------------------------------
TASKS = ("toy", "toy-sum", "toy-tools")
SPLITS = {("sft", "train"): 12_000, ("sft", "test"): 512, ("prompts", "train"): 4_096, ("prompts", "test"): 512}


@cache
def rows(stage, split, task="toy"):
    """Rows of an embedded data set, the same on every machine.

    Args: stage "sft" (`prompt`, `completion`) or "prompts" (`prompt`, `completion` as reference); split "train" or
    "test"; task, one of TASKS. Returns: list of dicts. No opening (toy-sum: sum, toy-tools: table) of a test split is
    in a training split. Errors: ValueError where there is no such split.
    """
    if (stage, split) not in SPLITS:
        raise ValueError(f"the splits are {task}:train and {task}:test")
    if task == "toy-sum":
        return sums(stage, split)
    if task == "toy-tools":
        return boxes(stage, split)
    rng = np.random.default_rng([2024, sorted(SPLITS).index((stage, split))])
    training = rows("sft", "train") + rows("prompts", "train") if split == "test" else []
    taken = {row["prompt"].partition(" .")[0] for row in training}  # openings, the first sentences
    result = []
    while len(result) < SPLITS[stage, split]:
        text, opening = write_review(rng)
        words, cut = text.split(), opening + int(rng.integers(3))
        if text.partition(" .")[0] not in taken:
            result.append({"prompt": " ".join(words[:cut]), "completion": " ".join(words[cut:])})
    return result


def sums(stage, split):
    """Rows of the task "toy-sum": `prompt` "3 + 8 + 5 + 1 =", `completion` and `answer` "17".

    In the stage "sft" a careless human writes the completion, which is off by one about every second time. One sum in
    ten is held out, so no test split shares one with a training split.
    """
    rng = np.random.default_rng([2026, sorted(SPLITS).index((stage, split))])
    is_test = np.random.default_rng(2026).random(10_000) < 0.1  # of each sum, by its digits
    result = []
    while len(result) < SPLITS[stage, split]:
        digits = rng.integers(10, size=4)
        if is_test[int("".join(map(str, digits)))] == (split == "test"):
            off = rng.choice([-1, 1]) if stage == "sft" and rng.random() < 0.45 else 0
            prompt, answer = " + ".join(map(str, digits)) + " =", str(digits.sum())
            result.append({"prompt": prompt, "completion": str(max(0, digits.sum() + off)), "answer": answer})
    return result


def right_sum(prompts, completions, answer):
    """The reward of "toy-sum": whether each completion is the row's `answer`. It is verifiable: a list of bools."""
    return [text.strip() == right for text, right in zip(completions, answer, strict=True)]


# ---- the task "toy-tools": a question that only a tool can answer ----------------------------------------------------
def boxes(stage, split):
    """Rows of the task "toy-tools": `prompt` "the red box ?", the hidden `table` {colour: "3 4" or "same as blue"} and
    the `answer`, the code that a colour leads to after at most two such hints.

    In the stage "sft" a row is one turn of a careless clerk, and all that was said before it is the prompt.
    """
    rng = np.random.default_rng([2027, sorted(SPLITS).index((stage, split))])
    result = []
    while len(result) < SPLITS[stage, split]:
        order = rng.permutation(COLOURS).tolist()
        table = {colour: f"{rng.integers(10)} {rng.integers(10)}" for colour in order}
        for i in range(4):  # A hint leads to one of the next two colours of the order, so there is no circle.
            table[order[i]] = f"same as {order[i + 1 + rng.integers(2)]}"
        for i in range(2):  # Three hints in a row would be one too many.
            if len(path_of(order[i], table)) > 3:
                table[order[i]] = f"{rng.integers(10)} {rng.integers(10)}"
        colour = order[rng.integers(len(order))]
        row = {"prompt": f"the {colour} box ?", "table": table, "answer": table[path_of(colour, table)[-1]]}
        result += demonstration(row, colour, rng) if stage == "sft" else [row]
    return result[: SPLITS[stage, split]]


def path_of(colour, table):
    """The colours that lead from one to its code, which are the questions that a clerk must ask."""
    *_, last = table[colour].split()
    return [colour, *path_of(last, table)] if last in table else [colour]


def demonstration(row, colour, rng):
    """Rows of a turn each, by a clerk who asks for a wrong colour, overlooks what is said, or says any code."""
    said, rows, code = row["prompt"], [], None
    while len(rows) < 4 and rng.random() < 0.75 and code is None:
        asked = colour if rng.random() < 0.7 else str(rng.choice(COLOURS))
        found = row["table"][asked]
        rows.append(row | {"prompt": said, "completion": f"ask {asked}"})
        said += f" ask {asked} ; {asked} is {found} ;"
        if rng.random() < 0.7:
            *_, last = found.split()
            code, colour = (None, last) if last in row["table"] else (found, colour)
    code = code or f"{rng.integers(10)} {rng.integers(10)}"
    return [*rows, row | {"prompt": said, "completion": f"say {code}"}]


def look_up(prompts, completions, table):
    """The environment of "toy-tools": "ask red" is answered from the row's table, and all else ends the episode.

    Args: completions, a list of turns for each episode. Returns: for each a text, or None.
    """
    answers = []
    for turns, known in zip(completions, table, strict=True):
        verb, *rest = turns[-1].split() or [""]
        found = f"{rest[0]} is {known[rest[0]]} ;" if len(rest) == 1 and rest[0] in known else "error ;"
        answers.append(found if verb == "ask" else None)
    return answers


def right_code(prompts, completions, answer):
    """A reward of "toy-tools": whether the last turn says the row's `answer`. It is verifiable: a list of bools."""
    return [text.split() == ["say", *right.split()] for text, right in zip(completions, answer, strict=True)]


def questions(prompts, completions, turns):
    """A reward of "toy-tools", with the weight -0.05: how many turns an episode had before its last one."""
    return [len(said) - 1 for said in turns]


# ---- what scripts need of the task -----------------------------------------------------------------------------------
def require(*folders):
    """Ends the program with one line where the folder of a trained model is missing."""
    for folder in map(Path, folders):
        if not Path(folder, "config.json").exists():
            task = f" --dataset {folder.parent.name}" * (folder.parent.name != "toy")
            raise SystemExit(f"error: {folder} is missing: python -m rlhf_details.train_{folder.name}{task} makes it")


class NextToken(nn.Module):
    """A causal language model as `utils.sample` calls it, at temperature 1."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, mask, positions, index, cache):
        """Args: tokens, mask, positions [N, L]; index [C], the columns to read. Returns: logits [N, C, V]."""
        inputs = dict(attention_mask=mask, position_ids=positions) | {utils.name_of_cache(self.model): cache}
        return self.model(tokens, **inputs).logits[:, index].float()


def sample_rows(policy, prompts, n, response_length, stop_ids, key, progress=iter):
    """n responses to each prompt, as lists of token ids, the n of a prompt adjacent.

    Args: policy, stop_ids and key as for `utils.sample`; prompts, lists of token ids; progress(slices) -> slices.
    """
    device = next(policy.parameters()).device
    queries, query_mask = utils.left_pad([ids for ids in prompts for _ in range(n)], device)  # [B, Q]
    episodes, size, found = torch.arange(len(queries), device=device), 128 * n, []
    for m in progress(utils.slices(len(queries), size)):
        responses, mask, _ = utils.sample(
            policy, queries[m], query_mask[m], episodes[m], 1, response_length, stop_ids, key, size
        )  # [at most size, R]
        found += [ids[real].tolist() for ids, real in zip(responses, mask, strict=True)]
    return found


def comparisons(split, num, policy, tokenizer, key, response_length, progress=iter):
    """Comparisons for the reward model: 4 responses of the SFT policy to each prompt, and which of them `choose` takes.

    Args: split "train" or "test"; num, how many; policy, key and progress as for `sample_rows`.
    Returns: list of {"prompt", "candidates": 4 responses, "best": index of the best}.
    """
    rng = np.random.default_rng([2025, split == "test", num])
    prompts = [r["prompt"] for r in rows("prompts", split)]
    prompts = [prompts[i % len(prompts)] for i in range(num)]
    ids, stop_ids = tokenizer(prompts).input_ids, torch.tensor([tokenizer.eos_token_id])
    stop_ids = stop_ids.to(next(policy.parameters()).device)
    responses = sample_rows(policy, ids, 4, response_length, stop_ids, key, progress)
    # The human reads texts, and whoever trains on them tokenises them anew: a response that was cut gets an EOS.
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    groups = [texts[i : i + 4] for i in range(0, len(texts), 4)]
    pairs = zip(prompts, groups, strict=True)
    return [{"prompt": p, "candidates": c, "best": choose([gold(p, r) for r in c], rng)} for p, c in pairs]


def tokenizer(task="toy"):
    """A word-level tokenizer of a task's vocabulary: every word or number is one token."""
    patterns = [OPENING, *SENTENCES, *CLOSERS[+1], *CLOSERS[-1]]
    words = {w for p in patterns for w in p.split() if "{" not in w} | {"was", "were"}
    words |= {w for phrases in FILL.values() for p in phrases for w in p.split()}
    words |= set(PLACE_TOPIC) | set(NOUN_TOPIC) | set(SENTIMENT)
    words = {
        "toy": sorted(words),
        "toy-sum": ["+", "=", *map(str, range(38))],
        "toy-tools": [*"the box ? ask say is same as error".split(), *COLOURS, *map(str, range(10))],
    }[task]
    end = ";" if task == "toy-tools" else "<eos>"
    vocabulary = ["<pad>", end, "<unk>", *words]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Replace(Regex("^"), " ")  # As in GPT-2, a word brings its space along.
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=end, unk_token="<unk>")
