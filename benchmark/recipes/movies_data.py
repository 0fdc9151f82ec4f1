"""
The six files that movies.sh reads, made from labelled movie-review snippets.

    python benchmark/recipes/movies_data.py --output_dir data/movies
    bash benchmark/recipes/movies.sh data/movies

The data set has the splits `train`, `validation` and `test` and the columns `text` and `label` (1 good, 0 bad):
on the Hub, or a local folder of the same shape (train.csv, validation.csv, test.csv). Files named `*_train.jsonl` come
from train and validation, files named `*_test.jsonl` from test. Everything is a function of the seed.

    sft_*          {"prompt": "review :", "completion": " " + snippet}
    preference_*   {"prompt": "review :", "chosen": " " + positive snippet, "rejected": " " + negative snippet}
    prompts_*      {"prompt": "review : " + first five words, "label": "positive"/"negative",
                    "reference": " " + the rest}
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import tyro
from datasets import load_dataset

PROMPT = "review :"
PROMPT_WORDS, LEAST_WORDS = 5, 8  # a shorter snippet would leave too little to continue


@dataclass
class Args:
    dataset: str = "cornell-movie-review-data/rotten_tomatoes"
    """Hub data set, or local folder, of labelled snippets"""
    output_dir: str = "data/movies"
    """folder of the six files"""
    seed: int = 1
    """seed of the order of the rows and of the pairs"""


def make_rows(snippets, rng):
    """{file kind: rows} of (text, label) pairs, in an order drawn from rng."""
    snippets = rng.sample(snippets, len(snippets))
    by_label = {wanted: [text for text, label in snippets if label == wanted] for wanted in (1, 0)}
    prompts = []
    for text, label in snippets:
        words = text.split()
        if len(words) >= LEAST_WORDS:
            start, rest = " ".join(words[:PROMPT_WORDS]), " ".join(words[PROMPT_WORDS:])
            kind = "positive" if label == 1 else "negative"
            prompts.append({"prompt": f"{PROMPT} {start}", "label": kind, "reference": f" {rest}"})
    return {
        "sft": [{"prompt": PROMPT, "completion": f" {text}"} for text, _ in snippets],
        "preference": [
            {"prompt": PROMPT, "chosen": f" {good}", "rejected": f" {bad}"}
            for good, bad in zip(by_label[1], by_label[0], strict=False)  # the shorter list ends it
        ],
        "prompts": prompts,
    }


def main(args: Args):
    """Writes the six files."""
    data = load_dataset(args.dataset)
    folder, seen = Path(args.output_dir), set()
    folder.mkdir(parents=True, exist_ok=True)
    for part, splits in (("test", ["test"]), ("train", ["train", "validation"])):  # test first: it keeps what both have
        pairs = [(" ".join(row["text"].split()), row["label"]) for split in splits for row in data[split]]
        snippets = [pair for pair in dict.fromkeys(pairs) if pair[0] and pair[0] not in seen]
        seen |= {text for text, _ in snippets}
        for kind, rows in make_rows(snippets, random.Random(f"{args.seed} {part}")).items():
            path = folder / f"{kind}_{part}.jsonl"
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
            print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main(tyro.cli(Args))
