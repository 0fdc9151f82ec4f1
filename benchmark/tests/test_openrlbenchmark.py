"""openrlbenchmark, from the registry and in an environment of its own, draws local runs with their numbers."""

import csv
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PAGES, page_args, read_metrics
from intervals import ROOT, experiments

SCRIPT = ROOT / "benchmark" / "openrlbenchmark.sh"


def as_written(values):
    """Mean and standard deviation over the seeds, as the tool writes them."""
    return f"{statistics.mean(values):.4f} ± {statistics.pstdev(values):.4f}"


@pytest.mark.slow
def test_the_tool_draws_folders_of_runs_and_kept_experiments(tiny, in_tmp):
    environment = os.environ.get("OPENRLBENCHMARK", in_tmp / "environment")  # one that is there already
    settings = os.environ | {"COLUMNS": "400", "PYTHON": sys.executable, "METRICS": "objective/scores objective/kl"}

    def draw(*words):
        command = ["bash", SCRIPT, environment, *words]
        return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=1200)

    if (done := draw()).returncode and "from versions: none" in done.stderr:
        pytest.skip("pip has no registry")
    assert done.returncode == 0, done.stderr
    last = {}
    for page in ("train_rloo", "train_ppo"):
        for seed in (1, 2):  # of 12 updates, of whose last ten the tool takes the mean
            name = f"runs/{page}{seed}"
            PAGES[page].main(page_args(page, tiny, seed=seed, run_name=Path(name).name, total_episodes=192))
            last.setdefault(page, []).append([row for row in read_metrics(name) if row["update"]][-10:])
    for columns in experiments(ROOT / "benchmark/results/trl_long")["ours_rloo"].values():
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        last.setdefault("ours_rloo", []).append([row for row in rows if row["update"]][-10:])
    done = draw("out/all", *sorted(map(str, Path("runs").iterdir())), "trl_long:ours_rloo")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert Path("out/all.png").stat().st_size > 10_000
    (path,) = Path("out/all").glob("*toy*.csv")
    table = {row.pop(""): row for row in csv.DictReader(path.open())}
    assert table.keys() == last.keys()
    for name, seeds in last.items():
        for metric, said in table[name].items():
            assert said == as_written([statistics.mean(row[metric] for row in rows) for rows in seeds]), (name, metric)
    for wrong in ("nowhere", "toy:rloo", "toy:none"):  # toy's runs.csv has no column `episode`
        done = draw("out/none", wrong)
        assert done.returncode == 2 and "error: " in done.stderr and done.stderr.count("\n") == 1, done.stderr
