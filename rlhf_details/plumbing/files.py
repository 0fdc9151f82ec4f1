"""
Where rows come from: local files, folders, data sets of the Hub, and functions of the user, whose code is loaded here.
"""

import contextlib
import functools
import gzip
import importlib
import importlib.util
import json
import os
import re
import reprlib
import sys
from pathlib import Path

import pyarrow.parquet

from rlhf_details.plumbing import cli, errors


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
        function = load_function(whole, flag)
        with imports_of(whole):
            rows = function()
            if not hasattr(rows, "__iter__"):
                cli.fail(f"{flag} {spec}: returned {reprlib.repr(rows)}, which is no list of rows")
            rows = list(rows)[in_range]
    elif path.is_file():
        rows = read_file(path, part, flag)[in_range]
    elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        rows = load_saved(flag, spec, name, f"{part or 'train'}{taken or ''}")
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
            text = content.decode(encoding := json.detect_encoding(content))
        except UnicodeDecodeError as e:
            cli.fail(f"{what}: line {content[: e.start].count(10) + 1} is not UTF-8 ({e.reason})")
    if kind in ("csv", "tsv") and text.strip():
        header = text.partition("\n")[0]
        sep = "\t" if kind == "tsv" else next((sep for sep in ",;\t|" if sep in header), ",")
        return load_dataset(flag, path, "csv", part, data_files=str(path), sep=sep, encoding=encoding)
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


def load_saved(flag, spec, name, part):
    """Rows of a folder that `save_to_disk` of a Dataset or a DatasetDict has written."""
    import datasets

    with cli.reading(flag, spec):
        saved = datasets.load_from_disk(name).with_format(None)
        splits = saved if isinstance(saved, dict) else dict.fromkeys(("train", str(saved.split or "train")), saved)
        return rows_of(splits, part)


def rows_of(splits, part):
    """The rows that `part`, such as "train[:10%]+test", takes of {name of a split: its rows}."""
    import datasets

    asked = datasets.ReadInstruction.from_spec(part).to_absolute({name: len(splits[name]) for name in splits})
    return [splits[x.splitname][i] for x in asked for i in range(x.from_, x.to)]


def load_dataset(flag, spec, name, part="", taken="", **options):
    """Rows of what the library `datasets` reads: NAME, or NAME@REVISION of a repository on the Hub.

    Args: part and taken, as in `read_rows`. All cells of a CSV file are strings; an empty one is the empty string.
    """
    import datasets  # It is slow to import, and most runs do without it.
    import pandas
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    name, revision = errors.split(name)
    options |= {"revision": revision} if revision else {}
    config, split = re.fullmatch(r"(?:([^\[]*):)?(.*)", part).groups()
    with cli.reading(flag, spec):
        if not os.path.exists(spec):
            errors.announce(name)
        is_known = config or options.keys() & {"data_files"} or cli.FILE.search(part)
        names = [] if is_known else datasets.get_dataset_config_names(name, revision=revision)
        if part in names:
            config, split = part, ""
        elif "." in part and not config:
            options["data_files"], split = part, ""
        elif len(names) > 1 and not datasets.get_dataset_default_config_name(name, revision=revision):
            cli.fail(f"{flag} {spec}: name one of its configurations, {', '.join(f'{name}:{n}' for n in names)}")
        builder = datasets.load_dataset_builder(name, config or None, **options)
        if isinstance(builder.config, CsvConfig):
            file = next(iter(builder.config.data_files.values()))[0]
            head = pandas.read_csv(file, **builder.config.pd_read_csv_kwargs | {"nrows": 1, "chunksize": None})
            if not isinstance(head.index, pandas.RangeIndex):
                cli.fail(f"{flag} {spec}: row 1 has more cells than there are columns, {list(head.columns)}")
            options |= {"features": datasets.Features(dict.fromkeys(head.columns, datasets.Value("string")))}
            builder = datasets.load_dataset_builder(name, config or None, keep_default_na=False, **options)
        if isinstance(builder.config, JsonConfig) and os.path.isdir(name):  # `datasets` would make dates of texts.
            found, field = builder.config.data_files, builder.config.field or ""
            if all(cli.FILE.search(file) for x in found.values() for file in x):
                splits = {k: [row for f in x for row in read_file(Path(f), field, flag)] for k, x in found.items()}
                return rows_of(splits, f"{split or 'train'}{taken}")
        builder.download_and_prepare()
        return [dict(row) for row in builder.as_dataset(split=f"{split or 'train'}{taken}")]


def check_columns(rows, columns, what):
    """Ends with the row's number where a row lacks one of `columns` ({name: type}) or holds another type in it."""
    for number, row in enumerate(rows, 1):
        for column, kind in columns.items():
            if column not in row:
                cli.fail(f"{what}: row {number} has no column {column!r} (it has {sorted(row)})")
            if kind is int and isinstance(row[column], str) and re.fullmatch(r"-?\d+", row[column]):
                row[column] = int(row[column])  # The cells of a CSV file are texts.
            if not isinstance(row[column], kind):
                value = reprlib.repr(row[column])
                cli.fail(f"{what}: row {number}, column {column!r}: {value} is not of type {kind.__name__}")


# ---- the user's functions --------------------------------------------------------------------------------------------
def load_function(spec, flag):
    """The function that "FILE.py:function" or "package.module:function" names.

    What it imports is searched as `imports_of` says. An error in the user's code keeps its traceback.
    """
    name, _, function = spec.rpartition(":")
    if not name:
        cli.fail(f"{flag} {spec}: must be FILE.py:function or package.module:function")
    if name.endswith(".py") and not Path(name).is_file():
        cli.fail(f"{flag} {spec}: no such file")
    try:
        with imports_of(spec):
            found = getattr(load_module(str(Path(name).resolve()) if name.endswith(".py") else name), function, None)
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


LIBRARIES = {name.partition(".")[0] for name in sys.modules}  # No file of the user's takes the place of these.
IMPORTED = {}  # {a folder of the user's: {name: module} of its modules whose names others have as well}


@contextlib.contextmanager
def imports_of(spec):
    """Stands around the user's code. What it imports is searched in its file's folder first, or in the current one.

    So each folder has its own `helpers`. Python has one module of a name at a time, and the others wait meanwhile.
    """
    path = spec.rpartition(":")[0]
    folder = str(Path(path).resolve().parent) if path.endswith(".py") else os.getcwd()

    def is_another(name):
        files = f"{folder}/{name}.py", f"{folder}/{name}/__init__.py"
        return any(map(os.path.exists, files)) and getattr(sys.modules.get(name), "__file__", None) not in files

    names = {name.partition(".")[0] for name in sys.modules} - LIBRARIES
    names = set(filter(is_another, names))

    def taken_out():
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}

    others = taken_out()
    sys.modules.update(IMPORTED.get(folder, {}))
    # Where the user's file stands among ours, a library's `evaluate` still comes before our file.
    sys.path.insert(len(sys.path) if Path(folder) == Path(__file__).resolve().parents[1] else 0, folder)
    try:
        yield
    finally:
        IMPORTED[folder] = taken_out()
        sys.modules.update(others)
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # for the user's threads that go on
