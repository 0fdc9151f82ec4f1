"""benchmark/benchmark.py: runs over seeds, what it keeps, what it skips, how it goes on."""

import csv
import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = """
import json, os, sys
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seed = int(flags["--seed"])
Path("started").write_text(str(int(Path("started").read_text()) + 1) if Path("started").exists() else "1")
if Path(flags["--broken"]).exists() and seed == 2:
    print("it broke"), sys.exit(3)
folder = Path("runs") / flags["--run_name"]
folder.mkdir(parents=True, exist_ok=True)
rows = [{"update": u, "episode": 8 * u, "objective/scores": seed + u / 3, "time/update": 1.0} for u in range(1, 6)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """bench(**changes): main of the script with its results in tmp_path; returns the names of the runs that failed."""
    module = runpy.run_path(str(ROOT / "benchmark" / "benchmark.py"))
    monkeypatch.setitem(module["main"].__globals__, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("--overwrite", ""))

    def run(**changes):
        command = f"python {tmp_path}/train.py --broken {tmp_path}/broken --name {{seed}}"
        values = dict(command=(command,), exp=("toy",), seeds=(1, 2, 3), tag="v1", columns=("update", "objective/scores", "none"))
        return module["main"](module["Args"](**(values | changes)))

    run.module, run.results = module, tmp_path / "benchmark" / "results" / "v1"
    return run


def read(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_each_seed_leaves_the_columns_asked_for_and_the_environment(bench, capsys):
    assert bench(workers=2) == []
    assert sorted(p.name for p in bench.results.iterdir()) == ["env.json", "toy_s1.csv", "toy_s2.csv", "toy_s3.csv"]
    assert read(bench.results / "toy_s2.csv")[:3] == [["update", "objective/scores"], ["1", "2.3333"], ["2", "2.6667"]]
    environment = json.loads((bench.results / "env.json").read_text())
    assert environment["tag"] == "v1" and environment["commands"]["toy"].endswith("--name {seed}")
    (made,) = environment["environments"]
    assert made["versions"]["torch"] and made["cores"] > 0 and len(made["code"]) == 12 and made["commit"]
    assert "3/3" in capsys.readouterr().out


def test_what_is_there_is_skipped_and_what_failed_is_tried_again(bench, tmp_path, capsys):
    (tmp_path / "broken").touch()
    assert bench() == ["toy_s2"] and "FAILED: exit code 3: it broke" in capsys.readouterr().out
    assert not (bench.results / "toy_s2.csv").exists() and (bench.results / "toy_s3.csv").exists()
    (tmp_path / "broken").unlink()
    assert bench() == [] and "2 done, 1 to do" in capsys.readouterr().out
    started = {p.parent.name: p.read_text() for p in (tmp_path / "runs/benchmark/v1").glob("*/started")}
    assert started == {"toy_s1": "1", "toy_s2": "2", "toy_s3": "1"}


def test_results_of_other_scripts_or_of_another_command_are_not_added_to(bench, tmp_path, capsys):
    assert bench(seeds=(1,)) == []
    with pytest.raises(SystemExit) as end:
        bench(command=(f"python {tmp_path}/train.py --broken none --name {{seed}}",))
    assert end.value.code == 2 and "results of another command" in capsys.readouterr().err
    assert bench(exp=("other",), command=(f"python {tmp_path}/train.py --broken none --name {{seed}}",)) == []
    path = bench.results / "env.json"
    about = json.loads(path.read_text())
    assert set(about["commands"]) == {"toy", "other"} and len(about["environments"]) == 1
    about["environments"][0]["code"] = "0" * 12
    path.write_text(json.dumps(about))
    with pytest.raises(SystemExit) as end:
        bench()
    assert end.value.code == 2 and "made by other scripts" in capsys.readouterr().err


def test_every_so_manyth_row_and_the_last_are_kept(bench):
    bench(every=2, seeds=(1,))
    assert [row[0] for row in read(bench.results / "toy_s1.csv")] == ["update", "1", "3", "5"]
    bench(every=3, seeds=(2,))
    assert [row[0] for row in read(bench.results / "toy_s2.csv")] == ["update", "1", "4", "5"]


def test_a_task_of_an_array_job_is_one_run_and_all_of_them_are_all_runs(bench, tmp_path):
    bench(slurm=str(tmp_path / "job.sh"))
    assert not bench.results.exists()
    text = (tmp_path / "job.sh").read_text()
    assert "--array=0-2" in text
    line = next(x for x in text.splitlines() if "benchmark.py" in x)
    words = shlex.split(line.replace("$SLURM_ARRAY_TASK_ID", "1"))
    args = bench.module["tyro"].cli(bench.module["Args"], args=words[words.index("--only") :])
    assert bench.module["main"](args) == []
    assert [p.name for p in sorted(bench.results.glob("*.csv"))] == ["toy_s2.csv"]


def test_the_tag_is_gits_and_says_when_files_differ(bench, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "one"], ["tag", "-a", "v0.1", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    assert bench.module["git_tag"](tmp_path) == "v0.1"
    (tmp_path / "train.py").write_text("")
    assert bench.module["git_tag"](tmp_path) == "v0.1-dirty"


def test_as_many_names_as_commands(bench, capsys):
    with pytest.raises(SystemExit) as end:
        bench(exp=("a", "b"))
    assert end.value.code == 2 and re.search("2 names of 1 commands", capsys.readouterr().err)


def test_the_command_line(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "benchmark" / "benchmark.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--seeds" in done.stdout and "--slurm" in done.stdout
