"""Reads back what wandb wrote to its file when it was offline, with wandb's own messages.

offline-run-<time>-<id>/run-<id>.wandb is a log in the format of LevelDB: after 7 bytes come blocks of 32 KiB (the first
is short by these 7) of chunks: CRC (4 bytes), length (2), kind (1: a whole record; 2, 3, 4: its first, an inner, its
last part), content. Fewer than 7 bytes left in a block are padding.
"""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

from wandb.proto import wandb_internal_pb2


def read_runs(folder):
    """The runs below a folder with offline-run-* folders, the oldest first."""
    found = sorted(Path(folder).glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [read_run_file(path) for path in found]


def read_run_file(path):
    """A run: history, [{name: value}]; config, {name: value}; exit_code; run and artifacts, messages."""
    run = SimpleNamespace(folder=path.parent, history=[], config={}, exit_code=None, run=None, artifacts=[])
    for content in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run = record.run
            put(run.config, record.run.config.update)
        elif kind == "config":
            put(run.config, record.config.update)
        elif kind == "history":
            run.history.append(put({}, record.history.item))
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            run.artifacts.append(record.request.log_artifact.artifact)
        elif kind == "artifact":
            run.artifacts.append(record.artifact)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def column(run, name):
    """All logged values of a name. A wandb.Histogram is {"values": counts, "bins": edges, ..}."""
    return [row[name] for row in run.history if name in row]


def table(run, name):
    """The last wandb.Table that was logged under a name, as [{column: value}]."""
    content = json.loads((run.folder / "files" / column(run, name)[-1]["path"]).read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def put(values, items):
    """values[name] = value of each item, or values[outer][inner] = value; returns values."""
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = values
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return values


def records(content):
    """The records of a .wandb file."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : (at := at + 7 + length)]
        if kind in (1, 4):
            yield parts
            parts = b""
