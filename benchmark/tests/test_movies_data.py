"""movies_data.py: the six files, made from a local folder of the Hub data set's shape."""

import csv
import json

import movies_data
import pytest

KINDS = {
    "sft": {"prompt", "completion"},
    "preference": {"prompt", "chosen", "rejected"},
    "prompts": {"prompt", "label", "reference"},
}
SIZES = {"train": 30, "validation": 10, "test": 12}
SHORT = "too short , said six"  # It has five words, so no prompt is made of it.
SHARED = "this very sentence is found in train and in test ."


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder of train.csv, validation.csv and test.csv, and {split: [(text, label)]} as written."""
    folder, written = tmp_path_factory.mktemp("source"), {}
    for split, size in SIZES.items():
        kinds = ["bad", "good"]
        rows = [(f"{split} snippet {i} is {kinds[i % 2]} , a film of “eleven” words", i % 2) for i in range(size)]
        rows += {"train": [(SHARED, 1), (SHORT, 0)], "test": [(SHARED, 1)]}.get(split, [])
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
        written[split] = rows
    return folder, written


def make(source, out, seed=1):
    """{(kind, part): rows} of the six files."""
    movies_data.main(movies_data.Args(dataset=str(source[0]), output_dir=str(out), seed=seed))
    files = {(kind, part): out / f"{kind}_{part}.jsonl" for kind in KINDS for part in ("train", "test")}
    assert sorted(files.values()) == sorted(out.iterdir())
    return {name: [json.loads(line) for line in open(path, encoding="utf-8")] for name, path in files.items()}


def test_every_snippet_is_used_and_none_is_in_train_and_test(source, tmp_path):
    made, written = make(source, tmp_path), source[1]
    labels = {text: label for rows in written.values() for text, label in rows}
    test = {text for text, _ in written["test"]}
    train = {text for split in ("train", "validation") for text, _ in written[split]} - test
    for (kind, _), rows in made.items():
        assert rows and all(set(row) == KINDS[kind] for row in rows)
        for row in rows:  # What follows a prompt begins with one space.
            parts = [row[column] for column in set(row) & {"completion", "chosen", "rejected", "reference"}]
            assert all(part[0] == " " and part[1:].strip() == part[1:] != "" for part in parts)
    for part, wanted in (("train", train), ("test", test)):
        assert sorted(row["completion"].strip() for row in made["sft", part]) == sorted(wanted)
        prompts = {row["prompt"].removeprefix("review : ") + row["reference"]: row for row in made["prompts", part]}
        assert prompts.keys() == wanted - {SHORT}
        assert all(len(row["prompt"].split()) == 7 for row in prompts.values())
        assert all(row["label"] == ("positive" if labels[text] else "negative") for text, row in prompts.items())
        pairs = [(row["chosen"].strip(), row["rejected"].strip()) for row in made["preference", part]]
        assert len(pairs) == min(sum(labels[text] == label for text in wanted) for label in (0, 1))
        assert all(labels[chosen] == 1 and labels[rejected] == 0 for chosen, rejected in pairs)
        assert len(set(sum(pairs, ()))) == 2 * len(pairs)


def test_the_seed_decides_everything(source, tmp_path):
    first, again, other = (make(source, tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first == again and all(first[name] != other[name] for name in first)
