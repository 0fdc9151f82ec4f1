"""
The token ids of a data set's first rows, as a training script reads them, and which of them have a loss.

1. It is given a script with its command line. It reads rows and tokenizer as that script does, and trains nothing.
2. SFT and DPO mark with * the tokens that they learn. The reward model marks the token on which it scores a candidate.
   The scripts that sample show the prompt, the tokens that end a response, and what a teacher reads instead.

    python rlhf_details/show_tokens.py train_sft.py --dataset rows.jsonl --base_model gpt2 --completion_only
    python rlhf_details/show_tokens.py train_grpo.py --dataset rows.jsonl --sft_model_path gpt2 --show_rows 5
"""

import importlib
import math
import sys
from pathlib import Path

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, comparisons, data, models, stop_tokens
from rlhf_details.plumbing.machine import tools

SCRIPTS = "sft reward dpo ppo rloo grpo distill agent".split()
COLUMNS = {"sft": "completion", "reward": "candidates", "dpo": "candidates"}


def read(args, column, tokenizer):
    """Prompts of the first rows of --dataset."""
    if column == "candidates":
        if args.dataset.partition(":")[0] == "toy":
            console.fail(f"--dataset {args.dataset}: its comparisons are sampled when a script trains on them")
        rows = data.complete(data.read_rows(args, "dataset", ""), args, "dataset", comparisons.candidates_of)
    else:
        rows = data.read(args, "dataset", "sft" if column else "prompts", with_answers=bool(column))
    return data.encode(args, "dataset", rows, tokenizer, math.inf, column)


def show(tokenizer, title, ids, marks=()):
    """Prints a title, and each id with its text, behind a * where it is marked."""
    print(f"  {title}: {len(ids)} tokens")
    for i, is_marked in zip(ids, marks or [False] * len(ids), strict=True):
        print(f"  {'*' if is_marked else ' '} {i:7d}  {tokenizer.decode([i])!r}")


def main(argv):
    """Prints the rows. argv: a script's name, its flags, and --show_rows N, 2 if it is not given."""
    name = Path(argv[0]).stem.removeprefix("train_") if argv else ""
    if name not in SCRIPTS:
        console.fail(f"{' '.join(argv[:1])}: the first word must be train_{', train_'.join(SCRIPTS)}")
    words, count = argv[1:], "2"
    if "--show_rows" in words:
        place = words.index("--show_rows")
        count, words = "".join(words[place + 1 : place + 2]), words[:place] + words[place + 2 :]
        if not count.isdecimal():
            console.fail(f"--show_rows {count}: must be a number of rows")
    args = cli.parse(importlib.import_module(f"rlhf_details.train_{name}").Args, words)
    args.take = int(count)
    if getattr(args, "tools", ()):
        tools.show(args)
    flag = "base_model" if name == "sft" else "sft_model_path"
    path = getattr(args, flag)
    if path in (None, "scratch"):
        console.fail(f"--{flag} {path}: must be a model, which has a tokenizer")
    tokenizer = models.load_tokenizer(path, f"--{flag}", args)
    for row in read(args, COLUMNS.get(name), tokenizer):
        print(f"{row.source}: row {row.number}")
        if name == "sft":
            marks = row.is_own if args.completion_only else [True] * len(row.ids + row.completion)
            show(tokenizer, "prompt", row.ids, marks[: len(row.ids)])
            show(tokenizer, "completion", row.completion, marks[len(row.ids) :])
            continue
        show(tokenizer, "prompt", row.ids)
        if row.teacher_ids != row.ids:
            show(tokenizer, "what the teacher reads", row.teacher_ids)
        for k, answer in enumerate(row.answers):
            marks = [name == "dpo" or i + 1 == len(answer) for i in range(len(answer))]
            show(tokenizer, f"candidate {k}{' (the best)' * (k == row.best)}", answer, marks)
    if name not in COLUMNS:
        stop_ids = stop_tokens.stop_ids(tokenizer, args.stop_token, "--stop_token").tolist()
        print(f"a response ends with {', '.join(f'{i} {tokenizer.decode([i])!r}' for i in stop_ids) or 'no token'}")


if __name__ == "__main__":
    console.keep_printing()
    main(sys.argv[1:])
