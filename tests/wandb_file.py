"""Reads a run back from the file that wandb writes when it is offline, with wandb's own messages.

`offline-run-<time>-<id>/run-<id>.wandb` is a log of protobuf records. It starts with 7 bytes (":W&B", 0xBEE1, a version). Then
come blocks of 32 KiB, whose first is short by these 7 bytes, filled with chunks: CRC-32 of all that follows the length (4
bytes), length (2), kind (1: a whole record, 2, 3 and 4: a record's first, inner and last part), content. Fewer than 7 bytes
left in a block are padding.
"""

import dataclasses
import json
import struct
import zlib
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER, CHUNK = 2**15, struct.Struct("<4sHB"), struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4


@dataclasses.dataclass
class OfflineRun:
    """One run, as `wandb sync` would send it.

    history: [{name: value}], one row a step, in the order of the file. Names logged as dictionaries stay nested. Next to what
        was logged there are `_step`, `_runtime` and `_timestamp`. A wandb.Histogram is {"_type": "histogram", "values": counts,
        "bins": edges}; a wandb.Table is {"_type": "table-file", "path": ..., "nrows": ...}, see `table`.
    config, summary: {name: value}, without wandb's own `_wandb`; the last value of each name.
    files: the paths, relative to `folder`/files, that wandb would upload.
    artifacts: {name: {path in the artifact: local file}}; wandb logs each table as one, and `run.log_code` too, see `code`.
    artifact_types: {name: type}, e.g. "code", "run_table" or "model".
    exit_code: what `run.finish` was told; None if the run never got there.
    """

    folder: Path
    id: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    project: str = ""
    entity: str = ""
    notes: str = ""
    tags: tuple[str, ...] = ()
    config: dict = dataclasses.field(default_factory=dict)
    summary: dict = dataclasses.field(default_factory=dict)
    history: list[dict] = dataclasses.field(default_factory=list)
    files: list[str] = dataclasses.field(default_factory=list)
    artifacts: dict[str, dict[str, Path]] = dataclasses.field(default_factory=dict)
    artifact_types: dict[str, str] = dataclasses.field(default_factory=dict)
    exit_code: int | None = None

    def column(self, name):
        """All logged values of a name."""
        return [row[name] for row in self.history if name in row]

    def table(self, value):
        """[{column: value}] of a logged wandb.Table, given its `value` in a row of history or, by name, the last one."""
        value = self.column(value)[-1] if isinstance(value, str) else value
        content = json.loads((self.folder / "files" / value["path"]).read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]

    @property
    def code(self):
        """{path: bytes} of all that `run.log_code` recorded."""
        logged = [self.artifacts[name] for name, kind in self.artifact_types.items() if kind == "code"]
        return {path: local.read_bytes() for entries in logged for path, local in entries.items()}


def read_offline_run(wandb_dir):
    """The run that was written last under `wandb_dir`, the folder with the offline-run-* folders, as an `OfflineRun`."""
    found = list(Path(wandb_dir).glob("offline-run-*/run-*.wandb"))
    if not found:
        raise FileNotFoundError(f"{wandb_dir} has no offline-run-*/run-*.wandb")
    return read_run_file(max(found, key=lambda path: path.stat().st_mtime_ns))


def read_run_file(path):
    """The run in one .wandb file, also if its process was killed while it wrote."""
    run = OfflineRun(Path(path).resolve().parent)
    for content in records(Path(path).read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            about = record.run
            run.id, run.name, run.group, run.job_type = about.run_id, about.display_name, about.run_group, about.job_type
            run.project, run.entity, run.notes, run.tags = about.project, about.entity, about.notes, tuple(about.tags)
            update(run.config, about.config)
            update(run.summary, about.summary)
        elif kind in ("config", "summary"):
            update(getattr(run, kind), getattr(record, kind))
        elif kind == "history":
            run.history.append({})
            for item in record.history.item:
                put(run.history[-1], item)
        elif kind == "files":
            run.files += [file.path for file in record.files.files if file.path not in run.files]
        elif kind == "artifact":
            entries = record.artifact.manifest.contents
            run.artifacts[record.artifact.name] = {entry.path: Path(entry.local_path) for entry in entries}
            run.artifact_types[record.artifact.name] = record.artifact.type
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    for values in (run.config, run.summary):
        values.pop("_wandb", None)
    return run


def update(values, message):
    """Applies the changes in a ConfigRecord or SummaryRecord."""
    for item in message.update:
        put(values, item)
    for item in message.remove:
        *outer, last = item.nested_key or [item.key]
        inner = values
        for key in outer:
            inner = inner.get(key, {})
        inner.pop(last, None)


def put(values, item):
    """values[name] = value of an item, or values[outer][inner] = value."""
    *outer, last = item.nested_key or [item.key]
    for key in outer:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[last] = json.loads(item.value_json)


def records(content):
    """The records of a .wandb file; ends where the file is cut off, and complains where it is damaged."""
    magic = HEADER.unpack_from(content)
    if magic[:2] != (b":W&B", 0xBEE1):
        raise ValueError(f"not a .wandb file: it starts with {content[: HEADER.size]!r}")
    at, parts = HEADER.size, []
    while at + CHUNK.size <= len(content):
        if BLOCK - at % BLOCK < CHUNK.size:
            at += BLOCK - at % BLOCK
            continue
        checksum, length, kind = CHUNK.unpack_from(content, at)
        end = at + CHUNK.size + length
        if end > len(content) or not kind:
            return
        if zlib.crc32(content[at + CHUNK.size - 1 : end]) != checksum:
            raise ValueError(f"damaged at byte {at}")
        parts = [] if kind in (WHOLE, FIRST) else parts
        parts.append(content[at + CHUNK.size : end])
        if kind in (WHOLE, LAST):
            yield b"".join(parts)
        at = end
