r"""
Examples of reward functions, ready to use or to copy: plain Python, from texts to one number each.

A reward function is called `f(prompts, completions, **columns)` and returns a list with one entry a completion: a float
in points, True or False where the answer can be verified (counted as 1 or 0), None: this row is left out, or NaN: this
response has no score. Prompts and completions are strings, also of conversations. The rows' other columns come by name,
each a list as long as completions; a function gets those that it names, or all with **columns.

    length, brevity, keyword    need nothing but the text
    exact_match, rouge          need a column: `answer`, `completion`
    paraphrase                  compares the completion with its prompt
    sentiment                   asks a classifier of the Hub or of a folder
"""

import functools
import os
import re
from decimal import Decimal
from itertools import pairwise

import torch
from transformers import AutoModelForSequenceClassification, pipeline

from rlhf_details.plumbing.outputs.statistics import rouge_l

TARGET_WORDS = 20
KEYWORDS = {"very", "really", "truly", "so"}  # the toy grammar allows them, its gold reward does not ask for them
STOP_WORDS = set(
    (
        "a an and are as at be been but by can did do does for from had has have he her his i in is it its me my no "
        "not of on or our she so than that the their them then there they this to us was we were what which who will "
        "with would you your"
    ).split()
)
NUMBER = re.compile(r"(?:(?<![\w.])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")  # in "10-5" the 5 is no negative number
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")  # with one pair of braces inside


# ---- what the functions share ----------------------------------------------------------------------------------------
def words(text):
    """Lower-case words of letters, digits and apostrophes, without punctuation."""
    return re.findall(r"[\w']+", text.lower())


def marked_answer(solution):
    r"""What stands behind the last "####" (GSM8K), or else in the last \boxed{} (MATH), or else ""."""
    return (re.findall(r"####[^\S\n]*(\S.*)", solution) or BOXED.findall(solution) or [""])[-1]


def plain_answer(answer):
    """A final answer for comparison: a Decimal where it is a number ("1,000.00" == "1000"), else a string."""
    answer = answer.strip().strip("$\\").replace(",", "").rstrip(".").strip()
    return Decimal(answer) if NUMBER.fullmatch(answer) else answer


@functools.cache
def classifier():
    """The pipeline of the model SENTIMENT_MODEL, built once. Long texts lose their beginning, not the completion."""
    name = os.environ.get("SENTIMENT_MODEL", "lvwerra/distilbert-imdb")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    # In a run of several processes the pipeline does not move the model.
    model = AutoModelForSequenceClassification.from_pretrained(name).to(device)
    result = pipeline("text-classification", model=model, tokenizer=name, device=device, top_k=None, truncation=True)
    result.tokenizer.truncation_side = "left"
    return result


# ---- reward functions ------------------------------------------------------------------------------------------------
def length(prompts, completions):
    """1 for TARGET_WORDS words, falling by 1 / TARGET_WORDS for each word more or less, in [0, 1]. Source: ours."""
    return [max(0.0, 1 - abs(len(words(completion)) - TARGET_WORDS) / TARGET_WORDS) for completion in completions]


def brevity(prompts, completions):
    """Minus a tenth of a point a word, 0 for no word, without a lower limit. Source: ours."""
    return [-len(words(completion)) / 10 for completion in completions]


def keyword(prompts, completions):
    """A point for each of KEYWORDS that is said, once or more: 0 to 4. Source: ours."""
    return [float(len(KEYWORDS & set(words(completion)))) for completion in completions]


def exact_match(prompts, completions, answer):
    r"""Verifiable: whether the final answer is the row's `answer`; None where the row has none.

    The final answer stands behind "####" or in \boxed{}, else it is the last number, else the whole text; of `answer`
    it stands behind the same marks, else it is the whole. Commas, dollar signs and trailing periods do not count;
    numbers are compared by value. Source: GSM8K (arXiv 2110.14168), whose solutions end in "#### 72"; MATH (arXiv
    2103.03874), \boxed{}.
    """
    results = []
    for solution, reference in zip(completions, answer, strict=True):
        reference = "" if reference is None else str(reference)
        found = marked_answer(solution) or (NUMBER.findall(solution) or [solution])[-1]
        wanted = plain_answer(marked_answer(reference) or reference)
        results.append(plain_answer(found) == wanted if reference.strip() else None)
    return results


def rouge(prompts, completions, completion):
    """ROUGE-L F1 against the row's `completion`, in [0, 1], or None without one. Source: Lin 2004, section 3.1."""
    # The column is as the data set has it: a string, or a list with one message.
    references = [x[0]["content"] if isinstance(x, list) and x else x for x in completion]
    pairs = zip(completions, references, strict=True)
    return [rouge_l(mine, reference) if reference else None for mine, reference in pairs]


def paraphrase(prompts, completions):
    """The prompt's content in other words, in [0, 1]: 0.4 kept + 0.4 new + 0.1 size + 0.1 fresh, or 0 for no word.

    kept: the share of the prompt's distinct words, STOP_WORDS aside, that are said. new: the share of bigrams that are
    not the prompt's. size: the words of the shorter text over those of the longer. fresh: distinct words over words.
    A copy gets about 0.6, and so does fluent nonsense. Source: ours, after training-wizard's
    examples/rloo/reward_spec.py.
    """
    results = []
    for source, mine in zip(map(words, prompts), map(words, completions), strict=True):
        content, bigrams = set(source) - STOP_WORDS, set(pairwise(mine))
        kept = len(content & set(mine)) / max(1, len(content))
        new = 1 - len(bigrams & set(pairwise(source))) / max(1, len(bigrams))
        size = min(len(source), len(mine)) / max(1, len(source), len(mine))
        fresh = len(set(mine)) / max(1, len(mine))
        results.append(0.4 * kept + 0.4 * new + 0.1 * size + 0.1 * fresh if mine else 0.0)
    return results


def sentiment(prompts, completions):
    """Probability of the label POSITIVE for prompt and completion as one text, in [0, 1], by the model that
    SENTIMENT_MODEL names.

    Source: TRL, examples/notebooks/gpt2-sentiment.ipynb, which takes lvwerra/distilbert-imdb's logit instead.
    """
    texts = [f"{prompt} {completion}" for prompt, completion in zip(prompts, completions, strict=True)]
    labels = classifier()(texts, batch_size=32)
    return [{label["label"]: label["score"] for label in row}["POSITIVE"] for row in labels]
