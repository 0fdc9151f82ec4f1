"""examples/smollm/reviews.py: comparisons and prompts out of an archive of the same form, and its judges."""

import sys

from helpers import ROOT

sys.path.append(str(ROOT / "examples/smollm"))
import reviews


def test_held_out_prompts_have_words_that_training_does_not_have():
    train, test = reviews.train(), reviews.test()
    assert train and test and not {row["word"] for row in train} & {row["word"] for row in test}


def test_what_obeys_is_one_sentence_with_the_word():
    texts = ["A fine plot.", "A fine plot. Twice.", "A fine story.", "Plot!", "No end to this plot"]
    assert reviews.obeys([""] * 5, texts, ["plot"] * 5) == [True, False, False, True, False]
