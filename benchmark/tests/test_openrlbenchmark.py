"""Run folders in openrlbenchmark's offline cache, and the commands that draw. Slow: the tool in its own environment."""

import csv
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import openrlbenchmark_offline as offline
import pytest
import tyro
from helpers import PAGES, page_args, read_metrics
from intervals import ROOT, write_runs

import benchmark
from rlhf_details import train_ppo, train_reward
from rlhf_details.plumbing import cli

DRAW, HUMAN = ROOT / "benchmark/openrlbenchmark.sh", ROOT / "benchmark/recipes/lm_human_preferences.sh"
TASKS = ("sentiment", "descriptiveness")
ROWS = [
    {"update": 0, "episode": 0, "eval/objective/scores": 0.5},
    {"update": 1, "episode": 16, "objective/scores": 1.0, "time/from_scratch": 2.5},
    {"update": 2, "episode": 32, "objective/scores": float("nan"), "time/from_scratch": 3.5},
]


def write(folder, rows, torn="", **changes):
    args = {"exp_name": "train_rloo", "seed": 3, "dataset": "toy", "wandb_tags": ["mine"], "take": None} | changes
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    Path(folder, "config.json").write_text(json.dumps({"args": args, "commit": "0123456789abcdef"}))
    return folder


def convert(*runs, package="package", **changes):
    Path(package).mkdir(exist_ok=True)
    return offline.main(offline.Args(runs=runs, package=package, **changes))


def listed(project):
    """Rows of the cache's database: ({run id: row}, [tag, ...])."""
    database = sqlite3.connect(project / "offline.sqlite")
    database.row_factory = sqlite3.Row
    runs = {row["id"]: dict(row) for row in database.execute("SELECT * FROM offlinerun")}
    links = "SELECT name FROM tag_offlinerun_through JOIN tag ON tag.id = tag_id ORDER BY tag.id"
    tags = [row["name"] for row in database.execute(links)]
    database.close()
    return runs, tags


# ---- the converter, without the tool ---------------------------------------------------------------------------------
def test_a_run_is_listed_with_its_arguments_tags_and_curves(in_tmp):
    run = write("runs/a", ROWS, torn='{"update": 3, "epi')
    project = convert(run, entity="e", project="p", tags=("more",))
    assert project == Path("package/dataset/e/p")
    runs, tags = listed(project)
    ((name, row),) = runs.items()
    assert tags == ["mine", "more", "0123456"]
    assert (row["state"], row["project"], row["entity"]) == ("finished", "p", "e")
    config = json.loads(row["config"])
    for key, value in {"exp_name": "train_rloo", "seed": 3, "dataset": "toy", "take": None}.items():
        assert config[key] == value == config[f"{key}.value"]
    table = list(csv.DictReader(open(project / name / "run_df.csv")))
    columns = ["_step", "_runtime", "global_step"]
    assert [[row[c] for c in columns] for row in table] == [["0", "0.0", "0"], ["1", "2.5", "16"], ["2", "3.5", "32"]]
    assert [row["objective/scores"] for row in table] == ["", "1.0", "nan"]


def test_an_experiment_of_benchmark_is_read_as_the_runs_that_its_command_says(in_tmp):
    command = "python x/train_rloo.py --dataset a.jsonl --exp_name b"
    about = {"commands": {"named": command, "other": "python c.py"}, "environments": [{"commit": "0123456789"}]}
    Path("env.json").write_text(json.dumps(about))
    named = {("named", 7): [["update", "episode", "objective/gold"], ["0", "0", ""], ["1", "8", "3.25"]]}
    write_runs(".", named | {("named", "v1", 8): [["update", "episode"], ["1", "8"]], ("other", "v1", 1): [["update"], ["1"]]})
    project = convert("runs.csv:named")
    runs = {json.loads(row["config"])["seed"]: row for row in listed(project)[0].values()}
    config = json.loads(runs[7]["config"])
    assert runs.keys() == {7, 8} and (config["exp_name"], config["dataset.value"]) == ("b", "a.jsonl")
    rows = list(csv.DictReader(open(project / runs[7]["id"] / "run_df.csv")))
    assert [(r["_step"], r["global_step"], r["objective/gold"]) for r in rows] == [("0", "0", ""), ("1", "8", "3.25")]


def test_a_run_given_again_takes_its_own_place_and_replace_leaves_nothing_else(in_tmp):
    a, b = write("runs/a", ROWS[:2]), write("runs/b", ROWS, exp_name="train_ppo")
    project = convert(a, b)
    before = listed(project)
    assert convert(str(Path(a).resolve()), b) == project  # another way to say the same folder
    assert before[0].keys() == listed(project)[0].keys() and len(before[0]) == 2
    convert(b, replace=True)
    assert [row["name"] for row in listed(project)[0].values()] == [b]


def test_bad_input_is_one_line_and_nothing_is_written(in_tmp, capsys):
    write("runs/a", ROWS), write("broken", ROWS, torn="{\n{}"), Path("empty").mkdir()
    for runs in (("empty",), ("nowhere",), ("broken",), (), ("runs/a", "empty"), ("runs.csv:rloo",)):
        with pytest.raises(SystemExit) as end:
            convert(*runs)
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert not Path("package/dataset").exists()


# ---- the commands ----------------------------------------------------------------------------------------------------
def printed(script, *words, **env):
    """The commands, as lists of words, that a script prints in a dry run."""
    environment = os.environ | {"DRY_RUN": "1"} | env
    done = subprocess.run(["bash", script, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_the_seeds_of_lm_human_preferences_parse_and_read_their_reward_model(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {}
    for words in printed(HUMAN, "train", ENTITY="someone", SEEDS="7 8"):
        assert words[:4] == ["accelerate", "launch", "--num_processes", "8"]
        module = {"rlhf_details/train_reward.py": train_reward, "rlhf_details/train_ppo.py": train_ppo}[words[4]]
        args = cli.parse(module.Args, words[5:])
        module.check(args)
        assert args.track and args.wandb_entity == "someone" and f"/{args.seed}/" in args.output_dir
        (task,) = (task for task in TASKS if f"_{task}.toml" in args.config)
        found[module, task, args.seed] = args
    assert len(found) == 8
    for task, seed in ((task, seed) for task in TASKS for seed in (7, 8)):
        reward, policy = found[train_reward, task, seed], found[train_ppo, task, seed]
        assert policy.reward_model_path == reward.output_dir


def test_without_folders_the_seeds_are_trained_and_their_folders_are_drawn():
    train, convert, *_ = printed(DRAW, "E", "O", SEEDS="1 2", TAG="v1")
    args = tyro.cli(benchmark.Args, args=train[2:])
    assert (args.tag, args.study, args.exp, args.seeds) == ("v1", "openrlbenchmark", ("rloo", "ppo"), (1, 2))
    folder = ROOT / "runs/benchmark/v1/openrlbenchmark"
    folders = tuple(f"{folder}/{name}_s{seed}/runs/run" for seed in (1, 2) for name in args.exp)
    assert tyro.cli(offline.Args, args=convert[2:]).runs == folders


# ---- the tool itself -------------------------------------------------------------------------------------------------
def summary(values):
    """Mean and standard deviation over the seeds, as the tool writes them."""
    mean = sum(values) / len(values)
    std = (sum((x - mean) ** 2 for x in values) / len(values)) ** 0.5
    return f"{mean:.4f} ± {std:.4f}"


@pytest.mark.slow
def test_the_real_tool_draws_rloo_and_ppo_from_local_runs_with_our_numbers(tiny, in_tmp):
    given = os.environ.get("OPENRLBENCHMARK_PYTHON")
    environment = Path(given).parent.parent if given else in_tmp / "environment"
    settings = os.environ | {"COLUMNS": "400", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "LAST": "1"}
    done = subprocess.run(["bash", DRAW, environment], env=settings, capture_output=True, text=True)
    if done.returncode and "from versions: none" in done.stderr:
        pytest.skip(f"pip has no registry: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (package,) = environment.glob("lib/python*/site-packages/openrlbenchmark")
    copy = in_tmp / "copy" / "openrlbenchmark"  # with an empty cache; PYTHONPATH puts it first
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("dataset", "__pycache__"))
    last = {}
    for name, page in (("RLOO", "train_rloo"), ("PPO", "train_ppo")):
        for seed in (1, 2):
            PAGES[page].main(page_args(page, tiny, seed=seed, run_name=f"{name}{seed}"))
            last.setdefault(name, []).append(read_metrics(f"runs/{name}{seed}")[-1])
    command = ["bash", DRAW, environment, "out", *sorted(Path("runs").iterdir())]
    settings |= {"PYTHONPATH": f"{copy.parent}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search("RLOO has 2 runs", done.stdout) and done.stdout.splitlines()[-1] == "out/openrlbenchmark.png"
    assert all(Path(f"out/{name}.png").stat().st_size > 10_000 for name in ("scores", "all", "openrlbenchmark"))
    table = {row.pop(""): row for row in csv.DictReader(open("out/all/toy.csv"))}
    assert table.keys() == last.keys() and "objective/gold" in table["PPO"]
    for name, rows in last.items():
        assert table[name] == {metric: summary([row[metric] for row in rows]) for metric in table[name]}
