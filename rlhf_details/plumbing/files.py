"""
Where rows come from: local files, folders, data sets of the Hub, and functions of the user, whose code is loaded here.
"""

import csv
import functools
import gzip
import importlib
import importlib.util
import io
import json
import os
import re
import reprlib
import sys
from pathlib import Path

import pyarrow.parquet

from rlhf_details.plumbing import cli, errors

csv.field_size_limit(2**31 - 1)  # characters of a cell


# ---- rows ------------------------------------------------------------------------------------------------------------
def read_rows(spec, flag):
    """Rows of a data set as a list of dicts.

    Args: spec, "NAME", "NAME:PART" or "FILE.py:FUNCTION". NAME is a local file, a folder, or NAME or NAME@REVISION of a
    Hub repository, PART a split, CONFIGURATION, CONFIGURATION:SPLIT or a file of it, and FUNCTION returns rows. At the
    end "[A:B]" takes rows A to B, as `datasets` does. Errors count the rows taken from 1.
    """
    whole, taken, *ends = re.fullmatch(r"(.*?)(\[(-?\d+)?:(-?\d+)?\])?", spec).groups()
    in_range = slice(*(int(end) if end else None for end in ends))
    name, _, part = whole.partition(":")
    path = Path(name)
    cli.check_dataset(flag, spec)
    if path.is_dir() and cli.FILE.search(part) and (path / part).is_file():
        path, part = path / part, ""
    if path.suffix == ".py":
        rows = load_function(whole, flag)()
        if not hasattr(rows, "__iter__"):
            cli.fail(f"{flag} {spec}: returned {reprlib.repr(rows)}, which is no list of rows")
        rows = list(rows)[in_range]
    elif path.is_file():
        rows = read_file(path, part, flag)[in_range]
    else:
        rows = load_dataset(flag, spec, name, part, taken or "")
    if not rows:
        cli.fail(f"{flag} {spec}: no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            cli.fail(f"{flag} {spec}: row {number} is no object with columns: {reprlib.repr(row)}")
        for column, value in row.items():
            try:
                json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
            except UnicodeEncodeError as e:
                words = f"{e.object[e.start]!a} is half of a character (a surrogate)"
                cli.fail(f"{flag} {spec}: row {number}, column {column!r}: {words}")
    return rows


def read_file(path, part, flag):
    """Rows of a local file. A .json file holds a list, an object with lists of rows, or one object a line."""
    what, (kind, is_packed) = f"{flag} {path}", cli.FILE.search(path.name.lower()).groups()
    with cli.reading(flag, path):
        content = gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes()
        if kind == "parquet":
            return pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
        try:
            text = content.decode(json.detect_encoding(content)).lstrip("\ufeff")
        except UnicodeDecodeError as e:
            cli.fail(f"{what}: line {content[: e.start].count(10) + 1} is not UTF-8 ({e.reason})")
    if kind in ("csv", "tsv"):
        header = text.lstrip().partition("\n")[0]
        sep = "\t" if kind == "tsv" else next((sep for sep in ",;\t|" if sep in header), ",")
        reader = csv.DictReader(io.StringIO(text, newline=""), restval="", delimiter=sep)
        rows = list(reader)
        if wrong := [number for number, row in enumerate(rows, 1) if None in row]:
            cli.fail(f"{what}: row {wrong[0]} has more cells than there are columns, {reader.fieldnames}")
        return rows
    is_one = re.match(r"\s*\[", text) or (kind == "json" and not re.match(r"\s*{.*}\s*\n\s*{", text))
    rows = []
    # str.splitlines would also split at the line separators that JSON allows within a string.
    for number, line in enumerate([text] if is_one else text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as e:
            cli.fail(f"{what}: line {number + e.lineno - 1} is not JSON ({e.msg}, column {e.colno})")
    parts = {"train": rows}
    if is_one and rows and (isinstance(rows[0], list) or not {"prompt", "messages", "chosen"} & rows[0].keys()):
        lists = rows[0] if isinstance(rows[0], dict) else {"train": rows[0]}
        parts = {k: x for k, x in lists.items() if isinstance(x, list) and all(isinstance(r, dict) for r in x)} or parts
    part = part or (next(iter(parts)) if len(parts) == 1 else "train")
    if part not in parts:
        cli.fail(f"{what}:{part}: no such part; name one of {', '.join(f'{path}:{name}' for name in parts)}")
    return parts[part]


def load_dataset(flag, spec, name, part, taken):
    """Rows of what the library `datasets` reads: a folder, or NAME or NAME@REVISION of a repository on the Hub.

    Args: part and taken, as in `read_rows`. All cells of a CSV file are strings; an empty one is the empty string.
    """
    import datasets  # It is slow to import, and most runs do without it.
    import pandas
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    name, revision = errors.split(name)
    options = {"revision": revision} if revision else {}
    config, split = re.fullmatch(r"(?:([^\[]*):)?(.*)", part).groups()
    with cli.reading(flag, spec):
        if any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json")):  # by `save_to_disk`
            saved = datasets.load_from_disk(name).with_format(None)
            splits = saved if isinstance(saved, dict) else dict.fromkeys(("train", str(saved.split)), saved)
            return rows_of(splits, f"{part or 'train'}{taken}")
        if not os.path.exists(name):
            errors.announce(name)
        names = [] if config or cli.FILE.search(part) else datasets.get_dataset_config_names(name, revision=revision)
        if part in names:
            config, split = part, ""
        elif "." in part and not config:
            options["data_files"], split = part, ""
        elif len(names) > 1 and not datasets.get_dataset_default_config_name(name, revision=revision):
            cli.fail(f"{flag} {spec}: name one of its configurations, {', '.join(f'{name}:{n}' for n in names)}")
        split = f"{split or 'train'}{taken}"
        builder = datasets.load_dataset_builder(name, config or None, **options)
        is_csv, found = isinstance(builder.config, CsvConfig), getattr(builder.config, "data_files", None) or {}
        is_ours = all(cli.FILE.search(file) for files in found.values() for file in files)
        if os.path.isdir(name) and is_ours and (is_csv or isinstance(builder.config, JsonConfig)):
            field = getattr(builder.config, "field", None) or ""  # `datasets` would make dates of texts.
            read = {k: [row for f in files for row in read_file(Path(f), field, flag)] for k, files in found.items()}
            return rows_of(read, split)
        if is_csv:
            columns = pandas.read_csv(next(iter(found.values()))[0], sep=builder.config.sep, nrows=0).columns
            options["features"] = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
            builder = datasets.load_dataset_builder(name, config or None, keep_default_na=False, **options)
        builder.download_and_prepare()
        return [dict(row) for row in builder.as_dataset(split=split)]


def rows_of(splits, part):
    """The rows that `part`, such as "train[:10%]+test", takes of {name of a split: its rows}."""
    import datasets

    asked = datasets.ReadInstruction.from_spec(part).to_absolute({name: len(splits[name]) for name in splits})
    return [splits[x.splitname][i] for x in asked for i in range(x.from_, x.to)]


# ---- the user's functions --------------------------------------------------------------------------------------------
FOLDERS = []  # of the user's functions


def load_function(spec, flag):
    """The function that "FILE.py:function" or "package.module:function" names.

    What it imports is searched in its file's folder first, or in the current one. An error in the user's code keeps its
    traceback.
    """
    name, _, function = spec.rpartition(":")
    if not name:
        cli.fail(f"{flag} {spec}: must be FILE.py:function or package.module:function")
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        cli.fail(f"{flag} {spec}: no such file")
    folder = Path(name if is_file else "here").resolve().parent
    for module, other in list(sys.modules.items()):
        path = Path(getattr(other, "__file__", None) or "")
        if path.parent in FOLDERS and path.parent != folder and (folder / f"{module}.py").exists():
            cli.fail(
                f"{flag} {spec}: Python has one module of a name, and {path} has been imported; rename one of them"
            )
    FOLDERS.append(folder)
    others = [x for x in sys.path if x != str(folder)]
    # Where the user's file stands among ours, a library's `evaluate` still comes before our file.
    is_ours = folder == Path(__file__).resolve().parents[1]
    sys.path[:] = [*others, str(folder)] if is_ours else [str(folder), *others]
    try:
        found = getattr(load_module(str(Path(name).resolve()) if is_file else name), function, None)
    except ImportError as e:
        cli.fail(f"{flag} {spec}: cannot be imported ({e})")
    if not callable(found):
        cli.fail(f"{flag} {spec}: {name} has no function {function!r}")
    return found


@functools.cache
def load_module(name):
    """A module of the user's, given as the whole path of a file or by its name."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", name), name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
