"""
Sentences about films with a rating by twenty people each: comparisons, prompts, and judges that never trained.

    pip install -c constraints.txt vaderSentiment
    pip download --no-deps --no-binary :all: -d data vaderSentiment==3.3.1      # 2.4 MB, for the ratings

    reviews.py:comparisons         459 pairs for a reward model; of other sentences:
    reviews.py:comparisons_other   457 pairs for a second one, which only judges
    reviews.py:comparisons_test    193 held-out pairs
    reviews.py:train, :test        320 prompts for the policy, and 96 with words that the others do not have
    reviews.py:lexicon, :obeys     rewards for --reward_fn, or judges with --reward_fn_weights 0 0

The sentences and ratings (-4 .. 4) are those of C. J. Hutto and E. Gilbert, "VADER" (ICWSM 2014), in the package's
source archive, MIT licence. A row asks for one sentence about a film with a certain word. In a comparison both answers
have the word, and people found one of them good and the other one bad. So the reward model learns what praise is, and
has no reason to learn the instruction: what it forgets can be watched.
"""

import functools
import random
import re
import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[2] / "data" / "vaderSentiment-3.3.1.tar.gz"
INNER = "vaderSentiment-3.3.1/additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
WORDS = """acting action actors audience cast characters cinematic comedy dialogue director drama effort energy family
film genre heart hollywood horror humor ideas life love minutes moments movie movies music people performances plot
romance scenes screen screenplay script story style tale thriller""".split()  # 40
HELD_OUT_WORDS = (
    "book camera children direction documentary ending experience laughs narrative original star war".split()
)
KINDS = "a comedy|a crime film|a documentary|a film for children|a horror film|a love story|a new film|a war film"
PROMPT = 'Write one sentence of a review of {}. Use the word "{}".'
AT_LEAST = 1  # points on either side of 0, for a sentence that counts as good or bad
LENGTH = range(8, 25)  # words of a sentence


def words(text):
    return re.findall(r"[a-z]+", text.lower())


# ---- rows ------------------------------------------------------------------------------------------------------------
def row(word, kind):
    return {"prompt": [{"role": "user", "content": PROMPT.format(kind, word)}], "word": word}


def train():
    return [row(word, kind) for word in WORDS for kind in KINDS.split("|")]


def test():
    return [row(word, kind) for word in HELD_OUT_WORDS for kind in KINDS.split("|")]


@functools.cache
def rated():
    """[(rating, sentence)] of the archive, in an order of its own that never changes."""
    if not ARCHIVE.exists():
        raise SystemExit(f"error: {ARCHIVE} is missing; the first lines of {__file__} have the command for it")
    with tarfile.open(ARCHIVE) as package, tarfile.open(fileobj=package.extractfile(INNER)) as archive:
        lines = archive.extractfile(RATINGS).read().decode().splitlines()
    rows = [(float(rating), text.strip()) for _, rating, text in (line.split("\t") for line in lines)]
    random.Random(1).shuffle(rows)
    return rows


def pairs(fifths, at_most):
    """Comparisons of some fifths of the sentences, at most so many for a word: both have the word, one is rated good
    and the other one bad. No sentence is used twice.
    """
    rng, used, found = random.Random(1), set(), []
    for word in WORDS:
        sides = {True: [], False: []}
        for number, (rating, text) in enumerate(rated()):
            is_clear = abs(rating) >= AT_LEAST and len(text.split()) in LENGTH
            if number % 5 in fifths and is_clear and word in words(text) and text not in used:
                sides[rating > 0].append(text)
        for chosen, rejected in list(zip(sides[True], sides[False], strict=False))[:at_most]:
            used |= {chosen, rejected}
            answers = {"chosen": chosen, "rejected": rejected}
            answers = {side: [{"role": "assistant", "content": text}] for side, text in answers.items()}
            found.append(row(word, rng.choice(KINDS.split("|"))) | answers)
    return rng.sample(found, len(found))


def comparisons():
    return pairs((0, 1), at_most=40)


def comparisons_test():
    return pairs((4,), at_most=12)


def comparisons_other():
    return pairs((2, 3), at_most=40)


# ---- judges ----------------------------------------------------------------------------------------------------------
def lexicon(prompts, completions):
    """VADER's compound of each completion, -1 (bad) .. 1 (good), by a lexicon that people rated word by word."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in completions]


def obeys(prompts, completions, word):
    """True where a completion is one sentence that has the word."""
    return [
        wanted in words(text) and len(re.findall(r"[.!?]+[\"')]*(?=\s|$)", text.strip())) == 1
        for text, wanted in zip(completions, word, strict=True)
    ]
