"""examples/smollm/reviews.py: comparisons and prompts out of an archive of the same form, and its judges."""

import io
import sys
import tarfile

import pytest
from helpers import ROOT

sys.path.append(str(ROOT / "examples/smollm"))
import reviews


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An archive within an archive, as in the package: 600 sentences, rated from -3 to 3, with one or two words."""
    lines = []
    for i in range(600):
        word, other = reviews.WORDS[i % 40], reviews.WORDS[(i * 7) % 40]
        lines.append(f"{i}\t{i % 7 - 3 + 0.4}\tSentence {i} says that the {word} and the {other} are what they are.")
    lines.append("600\t3.0\tToo short a plot.")
    inner = io.BytesIO()
    for buffer, name, content in ((inner, reviews.RATINGS, "\n".join(lines).encode()), (None, reviews.INNER, None)):
        target = (
            tarfile.open(tmp_path / "a.tar.gz", "w:gz") if buffer is None else tarfile.open(fileobj=buffer, mode="w:gz")
        )
        with target as file:
            data = inner.getvalue() if content is None else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    monkeypatch.setattr(reviews, "ARCHIVE", tmp_path / "a.tar.gz")
    reviews.rated.cache_clear()
    yield
    reviews.rated.cache_clear()


def test_comparisons_hold_a_good_and_a_bad_sentence_with_the_word_and_no_sentence_twice(archive):
    rating = {text: rated for rated, text in reviews.rated()}
    seen = []
    for rows in (reviews.comparisons(), reviews.comparisons_other(), reviews.comparisons_test()):
        assert rows
        for row in rows:
            ((chosen,), (rejected,)) = ([message["content"] for message in row[s]] for s in ("chosen", "rejected"))
            assert rating[chosen] >= 1 and rating[rejected] <= -1
            assert all(row["word"] in reviews.words(text) for text in (chosen, rejected))
            assert f'"{row["word"]}"' in row["prompt"][0]["content"]
            seen += [chosen, rejected]
    assert len(seen) == len(set(seen)) and "Too short a plot." not in seen
    assert reviews.comparisons() == reviews.comparisons()


def test_held_out_prompts_have_words_that_training_does_not_have():
    train, test = reviews.train(), reviews.test()
    assert (len(train), len(test)) == (320, 96)
    assert not {row["word"] for row in train} & {row["word"] for row in test}


def test_what_obeys_is_one_sentence_with_the_word():
    texts = ["A fine plot.", "A fine plot. Twice.", "A fine story.", "Plot!", "No end to this plot"]
    assert reviews.obeys([""] * 5, texts, ["plot"] * 5) == [True, False, False, True, False]


@pytest.mark.slow  # CI has the package in its slow part.
def test_the_lexicon_knows_praise():
    pytest.importorskip("vaderSentiment")
    good, bad = reviews.lexicon(["", ""], ["A wonderful, moving film.", "A dull and stupid film."])
    assert good > 0.5 and bad < -0.5
