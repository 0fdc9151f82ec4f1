"""Where rows come from: local files, folders, data sets of the Hub, and functions of the user."""

import csv
import gzip
import json
import os
import re
import reprlib
import sys
from pathlib import Path

import pyarrow.parquet

from rlhf_details import toy
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import user_code

csv.field_size_limit(2**31 - 1)  # characters of a cell
sys.setrecursionlimit(5000)  # Objects within objects are read and copied by recursion.
SPACE = re.compile(r"\s*")
FILE = re.compile(r"\.(jsonl|json|ndjson|csv|tsv|parquet)(\.gz)?$", re.IGNORECASE)  # how names of data files end


# ---- rows ------------------------------------------------------------------------------------------------------------
def read_rows(spec, flag):
    """Rows of a data set as a list of dicts.

    Args: spec, "NAME", "NAME:PART" or "FILE.py:FUNCTION". NAME is a local file, a folder, or NAME or NAME@REVISION of a
    Hub repository, PART a split, CONFIGURATION, CONFIGURATION:SPLIT or a file of it, and FUNCTION returns rows. At the
    end "[A:B]" takes rows A to B. Errors count the rows taken from 1.
    """
    name, part, taken = split(spec)
    path = Path(name, part) if FILE.search(part) and Path(name, part).is_file() else Path(name)
    if path.suffix == ".py":
        function = user_code.load_function(f"{name}:{part}".removesuffix(":"), flag)
        with user_code.fenced(f"{flag} {spec}"):
            rows = list(user_code.result_of(function()))[taken]
    else:
        with console.reading(flag, spec):
            rows = read_file(path, part)[taken] if path.is_file() else load_dataset(name, part, taken)
    if not rows:
        console.fail(f"{flag} {spec}: no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            console.fail(f"{flag} {spec}: row {number} is no object with columns: {reprlib.repr(row)}")
    return rows


def split(spec):
    """(NAME, PART, slice) of NAME:PART[A:B], PART "" where there is none. A local path may have colons of its own."""
    whole, *ends = re.fullmatch(r"(.*?)(?:\[(-?\d+)?:(-?\d+)?\])?", spec).groups()
    names = [whole[: m.start()] for m in re.finditer(":|$", whole)]
    name = next(filter(os.path.exists, reversed(names)), names[0])
    return name, whole[len(name) + 1 :], slice(*(end and int(end) for end in ends))


def read_file(path, key):
    """Rows of a local file. A .json file holds a list, one object a line, or an object with lists of rows by key."""
    kind = FILE.search(path.name.lower())[1]
    if kind == "parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        if kind in ("csv", "tsv"):  # All cells are texts. A short row is filled up with empty ones.
            rows = []
            comma = "," if kind == "csv" else "\t"
            try:
                # Without `strict`, a quotation mark that nobody closes takes all rows up to the next one into its cell.
                rows.extend(csv.DictReader(file, restval="", delimiter=comma, strict=True))
            except csv.Error as e:
                where = f"row {len(rows) + 1}" if rows else "the header or row 1"
                raise ValueError(f"{where}: a cell begins with a quotation mark and does not end with one: {e}") from e
            for number, row in enumerate(rows, 1):
                if None in row:
                    raise ValueError(f"row {number} has more cells than there are columns")
            return rows
        text = file.read()
        found = []
        end = 0
    while (start := SPACE.match(text, end).end()) < len(text):  # JSON values one after the other
        value, end = json.JSONDecoder().raw_decode(text, start)
        found.append(value)
    if kind != "json" or len(found) != 1:
        return found
    if isinstance(found[0], list):
        return found[0]
    lists = {name: rows for name, rows in found[0].items() if isinstance(rows, list)}
    key = key or (next(iter(lists)) if len(lists) == 1 else "train")
    if key not in lists:
        raise ValueError(f"has no list {key!r}; name one of {', '.join(f'{path}:{name}' for name in lists)}")
    return lists[key]


def load_dataset(name, part, taken):
    """Rows of what the library `datasets` reads: a folder, or NAME or NAME@REVISION of a repository on the Hub."""
    import datasets  # It is slow to import, and most runs do without it.

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json")):  # by `save_to_disk`
        found = datasets.load_from_disk(name)
        found = found[part or "train"] if isinstance(found, dict) else found
    else:
        console.announce(name)
        name, revision = console.split(name)
        config, _, split = part.rpartition(":")
        is_file = bool(FILE.search(split))
        if part and not is_file and part in datasets.get_dataset_config_names(name, revision=revision):
            config = part
            split = ""
        options = {"data_files": split, "split": "train"} if is_file else {"split": split or "train"}
        found = datasets.load_dataset(name, config or None, revision=revision, **options)
    return found.select(range(*taken.indices(len(found)))).to_list()


def check_dataset(flag, spec):
    """Exits with an error if the file or the embedded task's split that a data set names does not exist."""
    if re.match(r"\w+://", spec):
        console.fail(f"{flag} {spec}: an address is not read; download the file, or name the data set on the Hub")
    name, part, _ = split(spec)
    if name in toy.TASKS and part not in ("", "train", "test"):
        console.fail(f"{flag} {spec}: the splits are {name}:train and {name}:test")
    path = Path(name)
    is_known = FILE.search(path.name) or path.suffix == ".py"
    if is_known and not path.exists():
        console.fail(f"{flag} {spec}: no such file")
    if path.is_file() and not is_known:
        endings = ".jsonl, .json, .ndjson, .csv, .tsv or .parquet"
        console.fail(f"{flag} {spec}: its name must end in {endings}, or in one of them and .gz")
