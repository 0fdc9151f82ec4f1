"""
Data sets: rows of a local file, a folder or a Hub repository, checked, and their token ids. Nothing runs at import.
"""

import functools
import glob
import json
import os
import re
import reprlib
from pathlib import Path

from rlhf_details.utils import fail


def read_rows(spec, columns, default_split="train", flag="--dataset"):
    """Rows of a data set as a list of dicts.

    Args: spec, "NAME[:PART]". NAME is a local .jsonl/.json/.csv/.parquet file, a folder or a Hub repository; PART a split of it,
    or a file in it. At the end [A:B] may take rows A to B, as `datasets` slices splits: "labels.json[:4992]" and "[4992:]".
    columns: {name: type} that each row must have. Errors name the file, the column and the row (from 1, of those taken).
    """
    place = r"(?:-?\d{1,18})?"
    whole, taken = re.fullmatch(rf"(.*?)(\[{place}:{place}\])?", spec, re.DOTALL).groups(default="")
    name, _, part = whole.partition(":")
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet") and not os.path.isdir(path):
        if not os.path.exists(path):  # False also for a name that no file can have, at which path.exists() raises
            fail(f"{flag} {spec}: no such file")
        if part:
            fail(f"{flag} {spec}: a file has no parts")
        start, stop = (int(place) if place else None for place in (taken[1:-1] or ":").split(":"))
        rows = _read_file(path, flag)[start:stop]
    else:
        options = dict(data_files=part, split=f"train{taken}") if "." in part else dict(split=f"{part or default_split}{taken}")
        rows = _load_dataset(f"{flag} {spec}", name, **options)
    if not rows:
        fail(f"{flag} {spec}: no rows")
    check_columns(rows, columns, f"{flag} {spec}")
    return rows


def check_columns(rows, columns, what):
    """Ends with the row's number where a row lacks one of `columns` ({name: type}) or holds another type in it."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            fail(f"{what}: row {number} is no object with columns: {reprlib.repr(row)}")
        for column, kind in columns.items():
            if column not in row:
                fail(f"{what}: row {number} has no column {column!r} (it has {sorted(row)})")
            value = row[column]
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                fail(f"{what}: row {number}, column {column!r}: {reprlib.repr(value)} is not of type {kind.__name__}")
            for text in value if kind is list else [value]:
                if isinstance(text, str) and re.search("[\ud800-\udfff]", text):  # "\ud83d" alone, which JSON can write
                    fail(f"{what}: row {number}, column {column!r}: {reprlib.repr(text)} holds half of a surrogate pair")


def _read_file(path, flag):
    if path.suffix in (".csv", ".parquet"):
        return _load_dataset(f"{flag} {path}", path.suffix[1:], data_files=glob.escape(str(path)), split="train")
    number = None
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            try:
                rows = json.loads(text)
                return rows if isinstance(rows, list) else [rows]
            except json.JSONDecodeError as e:
                if e.msg != "Extra data" or text.lstrip()[0] != "{":
                    raise  # else an object a line, which Hub repositories also call .json
        rows = []
        for number, line in enumerate(text.split("\n"), 1):  # noqa: B007 (read where the error is reported)
            rows += [json.loads(line)] if line.strip() else []
        return rows
    except json.JSONDecodeError as e:
        fail(f"{flag} {path}: line {number or e.lineno} is not JSON ({e.msg}, column {e.colno})")
    except (OSError, UnicodeDecodeError) as e:
        fail(f"{flag} {path}: cannot be read as UTF-8 text ({e})")
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, brackets nested thousands deep
        fail(f"{flag} {path}: {f'line {number}' if number else 'its text'} cannot be read as JSON ({e})")


def _load_dataset(what, name, **options):
    import datasets  # here, since it is slow to import and most runs do without

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return [dict(row) for row in datasets.load_dataset(name, **options)]
    except Exception as e:  # each reader raises a class of its own; the user needs the innermost cause, in one line
        cause = (str(e.__cause__ or e).strip() or repr(e)).splitlines()[0]
        fail(f"{what}: cannot be loaded as a local file or data set ({cause})")


def encode(tokenizer, prompt, completion=None):
    """Token ids of a prompt, or of a prompt and its completion: BOS where the tokenizer has that habit, EOS after the completion.

    Prompt and completion are tokenised apart, always, so that training and scoring see the same ids at the seam.
    Lists of token ids in place of strings are kept as they are: no BOS, no EOS.
    """
    if isinstance(prompt, list):
        return prompt if completion is None else (prompt, completion)
    ids, bos = tokenizer(prompt, add_special_tokens=False).input_ids, tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos] and puts_bos(tokenizer):
        ids = [bos, *ids]
    if completion is None:
        return ids
    return ids, [*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


@functools.cache
def puts_bos(tokenizer):
    """Whether the tokenizer puts its BOS before a text; asked once, since it is a habit and not a matter of the text."""
    return tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def encode_prompts(tokenizer, prompts, max_length, what):
    """Token ids of each prompt; one that is empty or longer than max_length (None: no limit) is an error naming its row."""
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    for number, row in enumerate(ids, 1):
        if not row:
            fail(f"{what}: the prompt of row {number} is empty")
        if max_length is not None and len(row) > max_length:
            fail(f"{what}: the prompt of row {number} has {len(row)} tokens; the model's context leaves room for {max_length}")
    return ids
