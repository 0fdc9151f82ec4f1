"""Runs of several processes, which page_worker.py makes, and how they are compared. Several runs share one start."""

import dataclasses
import json
import time
from pathlib import Path

import torch
from helpers import launch
from short_runs import write_rows

from rlhf_details import toy
from rlhf_details.plumbing.inputs import flags

WORKER = Path(__file__).with_name("page_worker.py")
KINDS = {"one": "NO", "ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def rows_for_all(path, count):
    """Writes rows that serve as prompts, demonstrations and comparisons; returns the path as a string."""
    rows = toy.rows("prompts", "test")[:count]
    return write_rows(path, [row | {"chosen": row["completion"], "rejected": "we ."} for row in rows])


def spec_of(args, name, **options):
    """What page_worker.py is told of a run: Args of a script, into runs/<name> and models/<name>."""
    values = dataclasses.asdict(args) | {"run_name": name, "output_dir": f"models/{name}"}
    return {"script": values["exp_name"], "args": values, **options}


def run_under(engine, specs, folder, processes=2):
    """Runs the specs one after the other; [what each process saw, one entry for each process] for each spec."""
    spec, out = folder / f"{engine}.json", folder / f"out_{engine}"
    spec.write_text(json.dumps({"engine": engine, "out": str(out), "runs": specs}))
    # DeepSpeed compiles at its first use. In a folder of its own, a run that was killed leaves no lock to wait for.
    done = launch(WORKER, [spec], processes, cwd=folder, TORCH_EXTENSIONS_DIR=str(folder / "extensions"))
    assert done.returncode == 0, done.stderr[-9000:]
    ranks = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]
    seen = list(zip(*ranks, strict=True))
    for row in (row for records in seen for row in records):
        assert row["world"] == processes and row["kind"] == KINDS[engine]
    return seen


def has_rows(folder, count):
    """Whether the run in a folder has logged so many rows."""
    metrics = folder / "runs/run/metrics.jsonl"
    return metrics.exists() and len(metrics.read_bytes().splitlines()) >= count


def wait_until(condition, process, said):
    """Waits until condition() holds, while a process runs; said() is what it has said."""
    end = time.time() + 120
    while not condition():
        assert process.poll() is None and time.time() < end, said()
        time.sleep(0.05)


def words_of(args):
    """The command line of a script's arguments."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(args).items()}
    del values["config"]  # It has given its values to the others.
    # None is given as well, since a flag's default may be a number.
    return flags.as_words({name: value for name, value in values.items() if value != []})
