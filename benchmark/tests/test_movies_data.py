"""movies_data.py: the six files, made from a local folder of the Hub data set's shape."""

import csv
import json
from pathlib import Path

import movies_data

SHORT = "too short , said six"  # It has five words, so no prompt is made of it.
SHARED = "this very sentence is found in train and in test ."


def made(folder, seed=1):
    """{file: rows} of what movies_data.py makes of the folder `source`."""
    movies_data.main(movies_data.Args(dataset="source", output_dir=folder, seed=seed))
    return {path.stem: [*map(json.loads, path.read_text().splitlines())] for path in Path(folder).iterdir()}


def test_every_snippet_is_used_and_none_is_in_train_and_test(in_tmp):
    Path("source").mkdir()
    texts, labels = {}, {SHARED: 1, SHORT: 0}
    for split in ("train", "validation", "test"):
        texts[split] = [f"{split} snippet {i} is good or bad , a film of “eleven” words" for i in range(12)]
        labels |= {text: i % 2 for i, text in enumerate(texts[split])}
        texts[split] += {"train": [SHARED, SHORT], "test": [SHARED]}.get(split, [])
        with open(f"source/{split}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *((text, labels[text]) for text in texts[split])])
    found, test = made("a"), set(texts["test"])
    for part, wanted in (("test", test), ("train", {*texts["train"], *texts["validation"]} - test)):
        # What follows a prompt begins with one space.
        assert sorted(row["completion"] for row in found[f"sft_{part}"]) == sorted(f" {text}" for text in wanted)
        prompts = {row["prompt"].removeprefix("review : ") + row["reference"]: row for row in found[f"prompts_{part}"]}
        assert prompts.keys() == wanted - {SHORT}
        for text, row in prompts.items():
            assert len(row["prompt"].split()) == 7 and row["label"] == ["negative", "positive"][labels[text]]
        pairs = [(row["chosen"][1:], row["rejected"][1:]) for row in found[f"preference_{part}"]]
        assert pairs and all((labels[a], labels[b]) == (1, 0) for a, b in pairs)
        assert len(set(sum(pairs, ()))) == 2 * len(pairs)
    assert made("b") == found and all(rows != found[name] for name, rows in made("c", 2).items())
