"""benchmark/movies_data.py: the six files, made from a local folder of the Hub data set's shape."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmark" / "movies_data.py"
KINDS = {
    "sft": {"prompt", "completion"},
    "preference": {"prompt", "chosen", "rejected"},
    "prompts": {"prompt", "label", "reference"},
}
SIZES = {"train": 30, "validation": 10, "test": 12}
SHORT = "too short , said six"  # five words: no prompt is made of it
SHARED = "this very sentence is found in train and in test ."


def snippet(split, number, label):
    """A snippet of eleven words that says where it comes from."""
    return f"{split} snippet {number} is {'good' if label else 'bad'} , a film of “eleven” words"


@pytest.fixture(scope="module")
def movies():
    spec = importlib.util.spec_from_file_location("movies_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder of train.csv, validation.csv and test.csv, and {split: [(text, label)]} as written."""
    folder, written = tmp_path_factory.mktemp("source"), {}
    for split, size in SIZES.items():
        rows = [(snippet(split, i, i % 2), i % 2) for i in range(size)]
        rows += {"train": [(SHARED, 1), (SHORT, 0)], "test": [(SHARED, 1)]}.get(split, [])
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
        written[split] = rows
    return folder, written


@pytest.fixture(scope="module")
def made(movies, source, tmp_path_factory):
    """{(kind, part): rows} of the six files."""
    out = tmp_path_factory.mktemp("made")
    movies.main(movies.Args(dataset=str(source[0]), output_dir=str(out)))
    files = {(kind, part): out / f"{kind}_{part}.jsonl" for kind in KINDS for part in ("train", "test")}
    assert sorted(files.values()) == sorted(out.iterdir())
    return {name: [json.loads(line) for line in open(path, encoding="utf-8")] for name, path in files.items()}


def texts(made, part):
    """Every snippet of a part's three files, as sets: (sft, preference, prompts)."""
    sft = {row["completion"].strip() for row in made["sft", part]}
    pairs = {row[side].strip() for row in made["preference", part] for side in ("chosen", "rejected")}
    prompts = {row["prompt"].removeprefix("review : ") + row["reference"] for row in made["prompts", part]}
    return sft, pairs, prompts


def test_columns_and_leading_spaces(made):
    for (kind, part), rows in made.items():
        assert rows, (kind, part)
        for row in rows:
            assert set(row) == KINDS[kind]
            for column in set(row) & {"completion", "chosen", "rejected", "reference"}:
                assert row[column].startswith(" ") and row[column][1:].strip() == row[column][1:] != ""


def test_every_snippet_is_used_and_none_is_in_train_and_test(made, source):
    _, written = source
    test = {text for text, _ in written["test"]}
    train = {text for split in ("train", "validation") for text, _ in written[split]} - test
    for part, wanted in (("train", train), ("test", test)):
        sft, pairs, prompts = texts(made, part)
        assert sft == wanted and len(made["sft", part]) == len(wanted)
        assert pairs <= wanted
        assert prompts == wanted - {SHORT}


def test_pairs_prefer_the_positive_snippet(made, source):
    labels = {text: label for rows in source[1].values() for text, label in rows}
    for part, size in (("train", 20), ("test", 6)):  # as many as the scarcer label has
        rows = made["preference", part]
        assert len(rows) == size
        assert all(labels[row["chosen"].strip()] == 1 and labels[row["rejected"].strip()] == 0 for row in rows)
        assert len({row["chosen"] for row in rows}) == len({row["rejected"] for row in rows}) == size


def test_prompts_are_the_first_five_words_with_their_label(made, source):
    labels = {text: label for rows in source[1].values() for text, label in rows}
    for part in ("train", "test"):
        for row in made["prompts", part]:
            words = row["prompt"].split(" ")
            assert words[:2] == ["review", ":"] and len(words) == 7
            assert row["label"] == ("positive" if labels[" ".join(words[2:]) + row["reference"]] else "negative")


def test_the_seed_decides_everything(movies, source, tmp_path):
    def run(name, seed):
        movies.main(movies.Args(dataset=str(source[0]), output_dir=str(tmp_path / name), seed=seed))
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first = run("a", 1)
    assert first == run("b", 1)
    other = run("c", 2)
    assert all(first[name] != other[name] and len(first[name]) > 0 for name in first)
