"""
Runs the engine tests and writes down which combinations of architecture, precision, layout of rows and engine have passed:
rlhf_details/validated.json, at which a run looks when it starts, and the README's table "Validated on".

    python benchmark/validated.py              # some ten minutes on two cores; needs the extras test and deepspeed
    python benchmark/validated.py --table      # the table of what is in validated.json
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

ROOT = Path(__file__).parent.parent
FOUND = ROOT / "rlhf_details" / "validated.json"
ENGINES = ["one process", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3"]
ARCHITECTURES = ["gpt_neox", "gpt2", "llama", "qwen2"]
SCRIPTS = {"train_rloo": "RLOO", "train_ppo": "PPO", "train_reward": "RM", "train_sft": "SFT"}


@dataclass
class Args:
    table: bool = False
    """only print the table, of what is there"""


def table(found):
    """The README's table, every combination of the test models with what was run and what was not."""
    lines = ["| architecture | precision | rows | " + " | ".join(ENGINES) + " |", "|---" * (3 + len(ENGINES)) + "|"]
    for architecture, precision, layout in itertools.product(ARCHITECTURES, ("fp32", "bf16"), ("packed", "plain")):
        cells = []
        for engine in ENGINES:
            scripts = {row[4] for row in found if row[:4] == [architecture, precision, layout, engine]}
            cells.append(", ".join(SCRIPTS[s] for s in SCRIPTS if s in scripts) or "not run")
        lines.append(f"| {architecture} | {precision} | {layout} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(args):
    if not args.table:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-k", "follows", "tests/test_engines.py"]
            result = subprocess.run(command, cwd=ROOT, env=os.environ | {"VALIDATED_OUT": str(out)})
            found = sorted({tuple(json.loads(line)) for line in out.read_text().splitlines()}) if out.exists() else []
        if result.returncode:
            sys.exit("some engine failed: nothing was written")
        FOUND.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
        readme = ROOT / "README.md"
        parts = re.split(r"(<!-- validated -->\n)", readme.read_text())
        assert len(parts) == 5, "the README has no two lines <!-- validated -->"
        parts[2] = table([list(row) for row in found])
        readme.write_text("".join(parts))
    print(table(json.loads(FOUND.read_text())))


if __name__ == "__main__":
    main(tyro.cli(Args))
