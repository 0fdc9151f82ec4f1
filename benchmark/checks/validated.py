"""
Runs the engine tests and writes down which combinations of architecture, precision and engine have passed.

They go to rlhf_details/plumbing/validated.json, at which a run looks when it starts, and into the
table "Validated on" of docs/guides/4_memory_and_gpus.md.

    python benchmark/checks/validated.py           # some ten minutes on two cores; needs the extras test and deepspeed
    python benchmark/checks/validated.py --table   # the table of what is in validated.json
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "rlhf_details" / "plumbing" / "validated.json"
VARIABLE = "VALIDATED_OUT"  # names the file to which the engine tests append [architecture, precision, engine, script]
ENGINES = ["one process", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3"]
ARCHITECTURES = ["gpt_neox", "gpt2", "llama", "qwen2"]
SCRIPTS = {"train_rloo": "RLOO", "train_grpo": "GRPO", "train_ppo": "PPO", "train_reward": "RM", "train_sft": "SFT"}


@dataclass
class Args:
    table: bool = False
    """only print the table, of what is there"""


def table(found):
    """The guide's table, every combination of the test models with what was run and what was not."""
    lines = ["| architecture | precision | " + " | ".join(ENGINES) + " |", "|---" * (2 + len(ENGINES)) + "|"]
    for architecture, precision in itertools.product(ARCHITECTURES, ("fp32", "bf16")):
        cells = []
        for engine in ENGINES:
            scripts = {row[3] for row in found if row[:3] == [architecture, precision, engine]}
            cells.append(", ".join(SCRIPTS[s] for s in SCRIPTS if s in scripts) or "not run")
        lines.append(f"| {architecture} | {precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(args):
    if not args.table:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows"
            files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if VARIABLE in path.read_text()]
            command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-k", "follows", *files]
            result = subprocess.run(command, cwd=ROOT, env=os.environ | {VARIABLE: str(out)})
            found = sorted({tuple(json.loads(line)) for line in out.read_text().splitlines()}) if out.exists() else []
        if result.returncode:
            sys.exit("some engine failed: nothing was written")
        FOUND.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
        guide = ROOT / "docs/guides/4_memory_and_gpus.md"
        parts = re.split(r"(<!-- validated -->\n)", guide.read_text())
        assert len(parts) == 5, "the guide has no two lines <!-- validated -->"
        parts[2] = table([list(row) for row in found])
        guide.write_text("".join(parts))
    print(table(json.loads(FOUND.read_text())))


if __name__ == "__main__":
    main(tyro.cli(Args))
