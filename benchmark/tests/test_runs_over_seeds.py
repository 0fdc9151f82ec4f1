"""benchmark.py: runs over seeds, what it keeps, what it skips, and how it goes on."""

import json
import math
import shlex
import subprocess

import pytest
from intervals import read_tables, write_runs

import benchmark

SCRIPT = """
import json, os, sys
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seed = int(flags["--seed"])
if Path(flags["--broken"]).exists() and seed == 2:
    print("it broke"), sys.exit(3)
folder = Path("runs") / flags["--run_name"]
folder.mkdir(parents=True, exist_ok=True)
times = int(os.environ.get("TIMES", "1"))
rows = [{"update": u, "episode": 8 * u * times, "objective/scores": seed + u / 3} for u in range(1, 6)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """bench(**changes): main of the script with its results in tmp_path; returns the names of the runs that failed."""
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(**changes):
        command = f"python {tmp_path}/train.py --broken {tmp_path}/broken --name {{seed}}"
        values = dict(command=(command,), exp=("toy",), seeds=(1, 2, 3), tag="v1")
        return benchmark.main(benchmark.Args(**values | {"columns": ("update", "objective/scores", "none")} | changes))

    run.results = tmp_path / "benchmark" / "results" / "mine"
    return run


def kept(bench):
    """{(experiment, seed): [header, row, ...]} of what the runs have left."""
    tables = read_tables(bench.results / "runs.csv")
    return {(run, seed): table for (run, _, seed), table in tables.items()}


def ends(function, *args, **options):
    with pytest.raises(SystemExit) as end:
        function(*args, **options)
    assert end.value.code == 2


def test_each_seed_leaves_the_columns_asked_for_and_the_environment(bench):
    assert bench(workers=2) == []
    assert sorted(p.name for p in bench.results.iterdir()) == ["env.json", "runs.csv"]
    assert kept(bench).keys() == {("toy", 1), ("toy", 2), ("toy", 3)}
    assert kept(bench)["toy", 2][:2] == [["update", "objective/scores"], ["1", "2.3333"]]
    environment = json.loads((bench.results / "env.json").read_text())
    assert environment["v1"]["commands"]["toy"].endswith("--name {seed}   # --columns update objective/scores none")
    (made,) = environment["v1"]["environments"]
    assert made["versions"]["torch"] and made["cores"] > 0 and len(made["code"]) == 12 and made["commit"]


def test_what_is_there_is_skipped_and_what_failed_is_tried_again(bench, tmp_path, capsys):
    (tmp_path / "broken").touch()
    assert bench() == ["toy_s2"] and "FAILED: exit code 3: it broke" in capsys.readouterr().out
    assert kept(bench).keys() == {("toy", 1), ("toy", 3)}
    (tmp_path / "broken").unlink()
    assert bench() == [] and "2 done, 1 to do" in capsys.readouterr().out
    assert bench(exp=("more",), seeds=(1,)) == []
    assert kept(bench).keys() == {("toy", 1), ("toy", 2), ("toy", 3), ("more", 1)}


OTHER = ("python {root}/train.py --broken none",)


@pytest.mark.parametrize("seeds", [(1,), (1, 2)], ids=["all done", "half done"])
@pytest.mark.parametrize("task", [None, 0], ids=["in runs.csv", "of an array job"])
@pytest.mark.parametrize("changes", [{"command": OTHER}, {"columns": ("update",)}, {"columns": ()}, {"every": 2}, {}])
def test_results_of_another_command_or_code_are_neither_taken_for_done_nor_added_to(
    bench, monkeypatch, capsys, changes, task, seeds
):
    assert bench(seeds=(1,), only=task) == []
    before = {path: path.read_text() for path in bench.results.iterdir()}
    if not changes:
        monkeypatch.setattr(benchmark, "code_hash", lambda: "0" * 12)
    ends(bench, seeds=seeds, **changes)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("another command at v1; give" if changes else "made by other scripts") in said
    assert before == {path: path.read_text() for path in bench.results.iterdir()}


def test_another_command_takes_the_name_of_one_that_has_no_rows_and_no_two_have_one(bench, tmp_path, capsys):
    (tmp_path / "broken").touch()
    assert bench(seeds=(2,)) == ["toy_s2"]
    assert bench(seeds=(1, 2), command=OTHER) == [] and kept(bench).keys() == {("toy", 1), ("toy", 2)}
    (bench.results / "runs.csv").unlink()
    assert bench(seeds=(1,)) == [] and kept(bench).keys() == {("toy", 1)}
    for exp, command in ((("a", "b"), OTHER), (("a", "a"), OTHER * 2)):
        ends(bench, exp=exp, command=command)
        assert f"2 names of {len(command)} commands" in capsys.readouterr().err


def test_without_columns_all_numbers_are_kept(tmp_path):
    rows = [{"update": 1, "name": "x", "eval/rewards/accuracies": 0.5}, {"update": 2, "train/dpo/loss": math.nan}]
    found = benchmark.table(rows, ())
    assert found == [["update", "eval/rewards/accuracies", "train/dpo/loss"], [1, "0.5", ""], [2, "", "nan"]]
    write_runs(tmp_path, {("other", "v", 1): [["update", "objective/kl"], [1, 2]]})
    write_runs(tmp_path, {("dpo", "v", 1): found})
    assert {run: header for (run, *_), (header, *_) in read_tables(tmp_path / "runs.csv").items()} == {
        "dpo": ["update", "eval/rewards/accuracies", "train/dpo/loss"],
        "other": ["update", "objective/kl"],
    }


def test_a_task_of_an_array_job_is_one_run_and_all_of_them_are_all_runs(bench, tmp_path, capsys):
    bench(slurm=str(tmp_path / "job.sh"))
    assert not bench.results.exists()
    text = (tmp_path / "job.sh").read_text()
    assert "--array=0-2" in text
    words = shlex.split(next(x for x in text.splitlines() if "benchmark.py" in x).replace("$SLURM_ARRAY_TASK_ID", "1"))
    assert benchmark.main(benchmark.tyro.cli(benchmark.Args, args=words[words.index("--only") :])) == []
    assert not kept(bench)  # Tasks run at the same time, so none of them writes the study's file.
    assert bench() == [] and "1 done, 2 to do" in capsys.readouterr().out and len(kept(bench)) == 3


def test_stages_run_where_a_run_needs_them_and_not_where_all_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    asked = []
    monkeypatch.setattr(
        benchmark, "run_all", lambda runs, *_: asked.append([run.name for run in runs if not run.is_done()]) or []
    )
    stage, run, more = (benchmark.Run(name, "python x.py", 1, "t", "study") for name in ("sft", "rloo", "ppo"))
    stage.makes = tmp_path / "sft"
    for one in (stage, run):
        write_runs(one.results, {one.key: [["update"], ["1"]]})
    benchmark.run_study([[stage]], [run, more], None, "t")
    assert asked == [["sft_s1"], ["ppo_s1"]]  # The curve of sft is there, and its model is not.
    assert benchmark.run_study([[stage]], [run], None, "t") == [] and len(asked) == 2


def test_results_alone_do_not_make_a_tree_dirty(tmp_path):
    """Otherwise what ran before a stop would be trained again under another name."""
    files = [tmp_path / name for name in ("benchmark/results/mine/runs.csv", "rlhf_details/utils.py")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    someone = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    for words in (["init", "-q"], ["add", "."], [*someone, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    tags = [benchmark.git_tag(tmp_path)]
    for file in files:
        file.write_text("new")
        tags.append(benchmark.git_tag(tmp_path))
    assert tags == [tags[0], tags[0], f"{tags[0]}-dirty"]
