"""
Reading rows, as dicts, of a file, a folder, a Hub repository or the user's code, and finding the user's functions.
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import reprlib
import sys
from pathlib import Path

from rlhf_details.plumbing import cli, sources


def read_rows(spec, flag):
    """Rows of a data set as a list of dicts.

    Args: spec, "NAME", "NAME:PART" or "FILE.py:FUNCTION". NAME is a local .jsonl/.json/.csv/.parquet file, a folder, or
    NAME or NAME@REVISION of a Hub repository, PART a split or a file of it, and FUNCTION returns rows. At the end
    "[A:B]" takes rows A to B, as `datasets` does. Errors count the rows taken from 1.
    """
    whole, taken, *ends = re.fullmatch(r"(.*?)(\[(-?\d+)?:(-?\d+)?\])?", spec).groups()
    taken, in_range = taken or "", slice(*(int(end) if end else None for end in ends))
    name, _, part = whole.partition(":")
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet") and not path.is_dir():
        if part or not path.exists():
            cli.fail(f"{flag} {spec}: {'a file has no parts' if part else 'no such file'}")
        rows = read_file(path, flag)[in_range]
    elif path.suffix == ".py":
        rows = load_function(whole, flag)()
        if not hasattr(rows, "__iter__"):
            cli.fail(f"{flag} {spec}: returned {reprlib.repr(rows)}, which is no list of rows")
        rows = list(rows)[in_range]
    elif "." in part:
        rows = load_dataset(flag, spec, name, data_files=part, split=f"train{taken}")
    else:
        rows = load_dataset(flag, spec, name, split=f"{part or 'train'}{taken}")
    if not rows:
        cli.fail(f"{flag} {spec}: no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            cli.fail(f"{flag} {spec}: row {number} is no object with columns: {reprlib.repr(row)}")
    return rows


def read_file(path, flag):
    """Rows of a local file. A .json file holds one list, or like a .jsonl file one object a line."""
    if path.suffix in (".csv", ".parquet"):
        return load_dataset(flag, path, path.suffix[1:], data_files=str(path), split="train")
    with cli.reading(flag, path):
        text = path.read_text(encoding="utf-8-sig")
    is_list = path.suffix == ".json" and text.lstrip().startswith("[")
    rows = []
    # str.splitlines would also split at the line separators that JSON allows within a string.
    for number, line in enumerate([text] if is_list else text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as e:
            cli.fail(f"{flag} {path}: line {e.lineno if is_list else number} is not JSON ({e.msg}, column {e.colno})")
    return rows[0] if is_list else rows


def load_dataset(flag, spec, name, **options):
    """Rows of what the library `datasets` reads: NAME, or NAME@REVISION of a repository on the Hub."""
    import datasets  # It is slow to import, and most runs do without it.

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    name, revision = sources.split(name)
    options |= {"revision": revision} if revision else {}
    if not os.path.exists(spec):
        sources.announce(name)
    with cli.reading(flag, spec):
        return [dict(row) for row in datasets.load_dataset(name, **options)]


def check_columns(rows, columns, what):
    """Ends with the row's number where a row lacks one of `columns` ({name: type}) or holds another type in it."""
    for number, row in enumerate(rows, 1):
        for column, kind in columns.items():
            if column not in row:
                cli.fail(f"{what}: row {number} has no column {column!r} (it has {sorted(row)})")
            if not isinstance(row[column], kind):
                value = reprlib.repr(row[column])
                cli.fail(f"{what}: row {number}, column {column!r}: {value} is not of type {kind.__name__}")


def load_function(spec, flag):
    """The function that "FILE.py:function" or "package.module:function" names.

    What it imports is searched in the file's folder, or in the current one. An error in the user's code keeps its
    traceback.
    """
    name, _, function = spec.rpartition(":")
    if not name:
        cli.fail(f"{flag} {spec}: must be FILE.py:function or package.module:function")
    if name.endswith(".py") and not Path(name).is_file():
        cli.fail(f"{flag} {spec}: no such file")
    try:
        found = getattr(load_module(str(Path(name).resolve()) if name.endswith(".py") else name), function, None)
    except ImportError as e:
        cli.fail(f"{flag} {spec}: cannot be imported ({e})")
    if not callable(found):
        cli.fail(f"{flag} {spec}: {name} has no function {function!r}")
    return found


@functools.cache
def load_module(name):
    """A module of the user's, given as the whole path of a file or by its name."""
    folder = str(Path(name).parent) if name.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)  # Python has put the folder of the training script first, which has a toy.py as well.
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"{Path(name).stem}_of_the_user", name)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)  # The module may import more when it is called.
