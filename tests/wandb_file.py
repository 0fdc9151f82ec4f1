"""Reads a run back from the file that wandb writes when it is offline, with wandb's own messages.

`offline-run-<time>-<id>/run-<id>.wandb` is a log of protobuf records: 7 bytes (":W&B", 0xBEE1, a version), then blocks
of 32 KiB (the first is short by these 7 bytes) filled with chunks. A chunk is a CRC-32 of all that follows the length
(4 bytes), the length (2), the kind (1: a whole record; 2, 3, 4: a record's first, inner and last part) and the content.
Fewer than 7 bytes left in a block are padding.
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

    history: [{name: value}], one row a step. A wandb.Histogram is {"values": counts, "bins": edges, ..}, a wandb.Table
    is {"path": ..}, which `table` reads. config, summary: {name: value}. artifacts: {name: {path in it: local file}}.
    exit_code: what `run.finish` was told, None where the run never got there.
    """

    folder: Path
    id: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    project: str = ""
    tags: tuple[str, ...] = ()
    config: dict = dataclasses.field(default_factory=dict)
    summary: dict = dataclasses.field(default_factory=dict)
    history: list[dict] = dataclasses.field(default_factory=list)
    artifacts: dict[str, dict[str, Path]] = dataclasses.field(default_factory=dict)
    artifact_types: dict[str, str] = dataclasses.field(default_factory=dict)
    exit_code: int | None = None

    def column(self, name):
        """All logged values of a name."""
        return [row[name] for row in self.history if name in row]

    def table(self, name):
        """The last wandb.Table that was logged under a name, as [{column: value}]."""
        content = json.loads((self.folder / "files" / self.column(name)[-1]["path"]).read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]

    @property
    def code(self):
        """{path: bytes} of all that `run.log_code` recorded."""
        logged = [self.artifacts[name] for name, kind in self.artifact_types.items() if kind == "code"]
        return {path: local.read_bytes() for entries in logged for path, local in entries.items()}


def read_runs(folder):
    """The runs below a folder with offline-run-* folders, the oldest first."""
    found = sorted(Path(folder).glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [read_run_file(path) for path in found]


def read_run_file(path):
    """The run in one .wandb file, also where its process was killed while it wrote."""
    run = OfflineRun(Path(path).resolve().parent)
    for content in records(Path(path).read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            about = record.run
            run.id, run.name, run.group, run.job_type = (
                about.run_id,
                about.display_name,
                about.run_group,
                about.job_type,
            )
            run.project, run.tags = about.project, tuple(about.tags)
            update(run.config, about.config)
            update(run.summary, about.summary)
        elif kind in ("config", "summary"):
            update(getattr(run, kind), getattr(record, kind))
        elif kind == "history":
            run.history.append({})
            for item in record.history.item:
                put(run.history[-1], item)
        elif kind == "artifact":
            entries = record.artifact.manifest.contents
            run.artifacts[record.artifact.name] = {entry.path: Path(entry.local_path) for entry in entries}
            run.artifact_types[record.artifact.name] = record.artifact.type
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
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
    """The records of a .wandb file. It ends where the file is cut off, and complains where it is damaged."""
    if HEADER.unpack_from(content)[:2] != (b":W&B", 0xBEE1):
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
