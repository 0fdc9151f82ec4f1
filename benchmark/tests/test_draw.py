"""Figures and tables come from committed data, all of them by `study.py draw all` and two checks."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from intervals import ROOT

# by hand, by another tool, by an earlier commit
NOT_DRAWN = "layout.svg", "site.png", "openrlbenchmark.png", "trl_long.svg", "trl_lengths.svg", "trl_grpo.svg"


@pytest.mark.slow
def test_every_figure_is_drawn_and_every_table_written_as_they_are_committed(tmp_path):
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "runs", "models", "data", "_build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=left_out)
    figures = sorted(path.name for path in (ROOT / "static").iterdir() if path.name not in NOT_DRAWN)
    tables = [path.relative_to(ROOT) for end in ("md", "toml") for path in (ROOT / "benchmark").rglob(f"*.{end}")]
    tables += [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    for name in figures:
        (copy / "static" / name).unlink()
    environment = os.environ | {"PYTHONPATH": str(copy)}
    for command in (["studies/study.py", "draw", "all"], ["checks/details.py"], ["checks/readme.py"]):
        words = [sys.executable, str(copy / "benchmark" / command[0]), *command[1:]]
        subprocess.run(words, check=True, env=environment, cwd=copy)
    for path in [*tables, "README.md"]:
        assert (copy / path).read_text(encoding="utf-8") == (ROOT / path).read_text(encoding="utf-8"), path
    for name in figures:
        drawn, known = ((tree / "static" / name).read_bytes() for tree in (copy, ROOT))
        if name.endswith(".svg"):  # Another processor may round the last digit of a point.
            points = [np.array(re.findall(rb"-?\d+\.\d+", text), dtype=float) for text in (drawn, known)]
            assert len(points[0]) == len(points[1]) and np.allclose(*points, atol=0.01), name
        else:
            assert drawn[:4] == known[:4] == b"\x89PNG"
