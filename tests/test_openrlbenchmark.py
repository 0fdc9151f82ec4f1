"""Run folders in openrlbenchmark's offline cache, and the commands that draw; slow: the real tool, in an environment of its own."""

import csv
import json
import os
import re
import runpy
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlparse

import pytest
import tyro
from conftest import ROOT, ppo_args, read_metrics, rloo_args
from test_stages import reward_args, write_rows

from rlhf_details import toy, train_ppo, train_reward, train_rloo, utils

README = (ROOT / "README.md").read_text()
DRAW = ROOT / "benchmark/openrlbenchmark.sh"
HUMAN = ROOT / "benchmark/lm_human_preferences.sh"
TASKS = ("sentiment", "descriptiveness")
PROMPTS = "trl-internal-testing/descriptiveness-sentiment-trl-style:{}"  # --dataset of the two tasks' recipes
LABELS = "vwxyzjn/lm-human-preferences:{}/offline_5k.json[:4992]"
ROWS = [
    {"update": 0, "episode": 0, "eval/objective/scores": 0.5},
    {"update": 1, "episode": 16, "objective/scores": 1.0, "time/from_scratch": 2.5},
    {"update": 2, "episode": 32, "objective/scores": float("nan"), "time/from_scratch": 3.5},
]


@pytest.fixture(scope="module")
def offline():
    return runpy.run_path(str(ROOT / "benchmark/openrlbenchmark_offline.py"))


def write(folder, rows, torn="", **changes):
    args = {"exp_name": "train_rloo", "seed": 3, "dataset": "toy", "wandb_tags": ["mine"], "take": None} | changes
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    Path(folder, "config.json").write_text(json.dumps({"args": args, "commit": "0123456789abcdef"}))
    return folder


def convert(offline, *runs, package="package", **changes):
    Path(package).mkdir(exist_ok=True)
    return offline["main"](offline["Args"](runs=runs, package=package, **changes))


def listed(project):
    """Rows of the cache's database: ({run id: row}, [(run id, tag)])."""
    database = sqlite3.connect(project / "offline.sqlite")
    database.row_factory = sqlite3.Row
    runs = {row["id"]: dict(row) for row in database.execute("SELECT * FROM offlinerun")}
    links = "SELECT offlinerun_id, name FROM tag_offlinerun_through JOIN tag ON tag.id = tag_id ORDER BY tag.id"
    found = runs, [tuple(row) for row in database.execute(links)]
    database.close()
    return found


# ---- the converter, without the tool -----------------------------------------------------------------------------------
def test_a_csv_file_of_benchmark_is_read_as_the_run_that_its_command_says(offline, in_tmp):
    commands = {
        "ours": "python rlhf_details/train_ppo.py --batch_size 8",
        "named": "python x/train_rloo.py --dataset a.jsonl --exp_name b",
    }
    about = {"commands": commands, "environments": [{"commit": "0123456789"}]}
    Path("env.json").write_text(json.dumps(about))
    for exp in ("ours", "named", "other"):
        Path(f"{exp}_s7.csv").write_text("update,episode,objective/gold,eval/objective/gold\n0,0,,2.5\n1,8,3.25,\n")
    project = convert(offline, "ours_s7.csv", "named_s7.csv")
    runs, tags = listed(project)
    configs = [json.loads(row["config"]) for row in runs.values()]
    assert [(c["exp_name"], c["dataset.value"], c["seed"]) for c in configs] == [("train_ppo", "toy", 7), ("b", "a.jsonl", 7)]
    assert [tag for _, tag in tags] == ["0123456"] * 2
    rows = list(csv.DictReader(open(project / next(iter(runs)) / "run_df.csv")))
    assert [(r["_step"], r["global_step"], r["objective/gold"]) for r in rows] == [("0", "0", ""), ("1", "8", "3.25")]
    with pytest.raises(SystemExit) as end:
        convert(offline, "other_s7.csv")
    assert end.value.code == 2


def test_the_curves_that_the_readme_has_drawn_are_there(offline, in_tmp):
    pattern = re.search(r"OUT (benchmark/results/\S+)ours_{rloo,ppo}_s\*\.csv", README)[1]
    found = sorted((ROOT / pattern).glob("ours_*_s*.csv"))
    runs, _ = listed(convert(offline, *map(str, found)))
    names = [json.loads(row["config"])["exp_name"] for row in runs.values()]
    assert names.count("train_rloo") == names.count("train_ppo") >= 5


def test_a_run_is_listed_with_its_arguments_tags_and_curves(offline, in_tmp):
    project = convert(offline, write("runs/a", ROWS, torn='{"update": 3, "epi'), entity="e", project="p", tags=("more",))
    assert project == Path("package/dataset/e/p")
    runs, tags = listed(project)
    ((name, row),) = runs.items()
    assert not name.isdecimal() and [tag for _, tag in tags] == ["mine", "more", "0123456"] and {i for i, _ in tags} == {name}
    kept = json.loads((project / name / "run.json").read_text())
    config = json.loads(row["config"])
    assert config == kept["config"] and json.loads(row["path"]) == kept["path"] == ["e", "p", name]
    for key, value in {"exp_name": "train_rloo", "seed": 3, "dataset": "toy", "take": None}.items():
        assert config[key] == value == config[f"{key}.value"]
    assert row["username"] == kept["user"]["username"] and kept["tags"] == ["mine", "more", "0123456"]
    assert all(row[key] == kept[key] for key in ("id", "name", "state", "url", "project", "entity"))
    assert (row["state"], row["project"], row["entity"]) == ("finished", "p", "e")
    table = list(csv.DictReader(open(project / name / "run_df.csv")))
    columns = "_step _runtime global_step update episode eval/objective/scores objective/scores time/from_scratch".split()
    assert list(table[0]) == columns
    assert [[row[c] for c in columns[:3]] for row in table] == [["0", "0.0", "0"], ["1", "2.5", "16"], ["2", "3.5", "32"]]
    assert [row["objective/scores"] for row in table] == ["", "1.0", "nan"]
    assert [row["episode"] for row in table] == [row["global_step"] for row in table]


def test_a_run_given_again_takes_its_own_place_and_replace_leaves_nothing_else(offline, in_tmp):
    a, b = write("runs/a", ROWS[:2]), write("runs/b", ROWS, exp_name="train_ppo")
    project = convert(offline, a, b)
    before = listed(project)
    assert len(before[0]) == 2 and len(before[1]) == 4
    assert convert(offline, str(Path(a).resolve()), b) == project  # another way to say the same folder
    after = listed(project)
    assert before[0].keys() == after[0].keys() and sorted(before[1]) == sorted(after[1])
    write(a, ROWS)
    convert(offline, a)
    names = {row["name"]: name for name, row in listed(project)[0].items()}
    assert len(list(csv.DictReader(open(project / names[a] / "run_df.csv")))) == 3 and len(names) == 2
    convert(offline, b, replace=True)
    assert [row["name"] for row in listed(project)[0].values()] == [b]
    assert sorted(path.name for path in project.iterdir()) == sorted([names[b], "offline.sqlite"])


def test_bad_input_is_one_line_and_nothing_is_written(offline, in_tmp, capsys):
    write("runs/a", ROWS)
    Path("empty").mkdir()
    write("broken", ROWS, torn="{\n{}")
    Path(write("other", ROWS), "config.json").write_text("[]")
    write("none", [])
    runs = [((folder,), {}) for folder in ("empty", "nowhere", "broken", "other", "none")]
    faults = [((), {}), (("runs/a", "empty"), {}), (("runs/a",), dict(package="nowhere")), (("runs/a",), dict(package=None))]
    faults += [(("runs/a",), dict(package=None, python=p)) for p in ("nowhere/python", sys.executable)]
    for folders, changes in runs + faults:
        with pytest.raises(SystemExit) as end:
            offline["main"](offline["Args"](runs=folders, **({"package": "."} | changes)))
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert not Path("dataset").exists()
    command = [sys.executable, ROOT / "benchmark/openrlbenchmark_offline.py", "empty", "--package", "."]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: empty/metrics.jsonl: ") and done.stderr.count("\n") == 1


def test_the_package_is_found_by_asking_a_python(offline, in_tmp, monkeypatch):
    Path("elsewhere/openrlbenchmark").mkdir(parents=True)
    Path("elsewhere/openrlbenchmark/__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setenv("PYTHONPATH", str(in_tmp / "elsewhere"))
    project = offline["main"](offline["Args"](runs=(write("runs/a", ROWS),), python=sys.executable))
    assert project == in_tmp / "elsewhere/openrlbenchmark/dataset/local/rlhf_details" and listed(project)[0]


# ---- the commands ------------------------------------------------------------------------------------------------------
def printed(script, *words, **env):
    """The commands, as lists of words, that a script prints in a dry run."""
    environment = os.environ | {"DRY_RUN": "1"} | env
    done = subprocess.run(["bash", script, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def options(words):
    """{option: [its values, each time that it is given]} of a command of the tool."""
    found = {}
    for word in words[words.index("--filters") :]:
        if word.startswith("--"):
            found.setdefault(word, []).append(values := [])
        else:
            values.append(word)
    return found


def metrics_of(query):
    return parse_qs(urlparse(query).query)["metrics"]


def test_the_ten_seeds_of_lm_human_preferences_parse_and_read_their_reward_model(monkeypatch):
    monkeypatch.chdir(ROOT)
    seeds, found = {}, {}
    for number, words in enumerate(printed(HUMAN, "train", ENTITY="someone")):
        place = words.index("--seed") + 1
        pattern = [word.replace(f"/{words[place]}/", "/SEED/") for word in words]
        pattern[place] = "SEED"
        seeds.setdefault(tuple(pattern), []).append((int(words[place]), number))
    assert len(seeds) == 4 and all([seed for seed, _ in runs] == list(range(1, 11)) for runs in seeds.values())
    for pattern, runs in seeds.items():
        *launcher, script = pattern[:5]
        assert launcher == ["accelerate", "launch", "--num_processes", "8"]
        module = {"rlhf_details/train_reward.py": train_reward, "rlhf_details/train_ppo.py": train_ppo}[script]
        words = [word.replace("SEED", "7") for word in pattern[5:]]
        args = utils.parse_args(module.Args, toy.defaults(Path(script).stem), words)
        module.check(args)
        assert args.track and args.wandb_entity == "someone" and args.wandb_tags == ("lm-human-preferences",)
        (task,) = (task for task in TASKS if f"_{task}.toml" in args.config)
        assert args.seed == 7 and args.dataset == (PROMPTS if module is train_ppo else LABELS).format(task)
        assert "/7/" in args.output_dir
        found[module, task] = args, [number for _, number in runs]
    assert len({args.output_dir for args, _ in found.values()}) == 4 == len(found)
    for task in TASKS:
        (reward, before), (policy, after) = found[train_reward, task], found[train_ppo, task]
        assert policy.reward_model_path == reward.output_dir and all(i < j for i, j in zip(before, after, strict=True))


def test_what_is_trained_already_is_passed_over(in_tmp):
    copy = in_tmp / "benchmark" / HUMAN.name
    copy.parent.mkdir()
    shutil.copy(HUMAN, copy)
    folder = in_tmp / "models/sentiment/2/reward"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    left = [words[words.index("--output_dir") + 1] for words in printed(copy, "train", SEEDS="1 2", TASKS="sentiment")]
    assert left == ["models/sentiment/1/reward", "models/sentiment/1/ppo", "models/sentiment/2/ppo"]


def test_the_overlay_names_our_metrics_and_data_sets_and_as_many_of_each_system():
    policy, reward = (options(words) for words in printed(HUMAN, "draw", "E", "O", ENTITY="someone"))
    oai, details, ours = (metrics_of(filters[0]) for filters in policy["--filters"])
    assert len(oai) == len(details) == len(ours) == 17 and all(f"`{name}`" in README for name in ours)
    assert policy["--env-ids"][-1] == [PROMPTS.format(task) for task in TASKS]
    assert reward["--env-ids"] == [list(TASKS), [LABELS.format(task) for task in TASKS]]
    assert [metrics_of(filters[0]) for filters in reward["--filters"]] == [["train_reward/minibatch/loss"], ["train/rm/loss"]]
    assert {parse_qs(urlparse(f[0]).query)["xaxis"][0] for f in policy["--filters"] + reward["--filters"]} == {"_step"}


def test_tracked_runs_are_drawn_by_the_same_commands_without_the_cache():
    (convert, *local), tracked = printed(DRAW, "E", "O", "runs/a"), printed(DRAW, "E", "O", ENTITY="someone", TAG="v1")
    assert convert[2:] == ["runs/a", "--python", "E/bin/python", "--replace"] and len(local) == len(tracked) == 2
    for one, other in zip(local, tracked, strict=True):
        words = [w.replace("we=someone", "we=local").removesuffix("&tag=v1") for w in other]
        assert [w for w in one if w != "--offline"] == words and "--offline" in one and "we=someone" in " ".join(other)
    assert all(f"`{name}`" in README for name in metrics_of(options(local[1])["--filters"][0][0]))


def test_without_folders_the_seeds_are_trained_and_their_folders_are_drawn(offline):
    train, convert, *_ = printed(DRAW, "E", "O", SEEDS="1 2", TAG="v1")
    args = tyro.cli(runpy.run_path(str(ROOT / "benchmark/benchmark.py"))["Args"], args=train[2:])
    assert (args.tag, args.study, args.exp, args.seeds) == ("v1", "openrlbenchmark", ("rloo", "ppo"), (1, 2))
    assert args.command == tuple(f"python rlhf_details/train_{name}.py" for name in args.exp)
    folders = [ROOT / f"runs/benchmark/v1/openrlbenchmark/{name}_s{seed}/runs/run" for seed in (1, 2) for name in args.exp]
    assert tyro.cli(offline["Args"], args=convert[2:]).runs == tuple(map(str, folders))


def test_wrong_usage_is_told():
    for words in ([DRAW], [HUMAN], [HUMAN, "other"], [HUMAN, "draw", "E"], [HUMAN, "draw", "E", "O"]):
        environment = {name: value for name, value in os.environ.items() if name != "ENTITY"}
        done = subprocess.run(["bash", *words], env=environment, capture_output=True, text=True)
        assert done.returncode and not done.stdout and done.stderr.count("\n") == 1


# ---- the tool itself ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """Environment with openrlbenchmark, and a copy of its package whose cache is empty, which PYTHONPATH puts first."""
    home = tmp_path_factory.mktemp("openrlbenchmark")
    given = os.environ.get("OPENRLBENCHMARK_PYTHON")
    environment = Path(given).parent.parent if given else home / "environment"
    done = subprocess.run(["bash", DRAW, environment], env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    if done.returncode and "from versions: none" in done.stderr:
        pytest.skip(f"pip has no registry: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (package,) = environment.glob("lib/python*/site-packages/openrlbenchmark")
    shutil.copytree(package, home / "copy/openrlbenchmark", ignore=shutil.ignore_patterns("dataset", "__pycache__"))
    return SimpleNamespace(environment=environment, packages=home / "copy")


def draw(tool, script, *words, **env):
    """Runs a script that draws; returns what it printed."""
    wide = {"COLUMNS": "400", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment = os.environ | wide | {"PYTHONPATH": str(tool.packages)} | env
    done = subprocess.run(["bash", script, *map(str, words)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def summary(values, digits):
    """Mean and standard deviation over the seeds, as the tool writes them."""
    mean = sum(values) / len(values)
    std = (sum((x - mean) ** 2 for x in values) / len(values)) ** 0.5
    return f"{mean:.{digits}f} ± {std:.{digits}f}"


def is_picture(path):
    return Path(path).read_bytes()[:4] == b"\x89PNG" and Path(path).stat().st_size > 10_000


@pytest.mark.slow
def test_the_real_tool_draws_rloo_and_ppo_from_local_runs_with_our_numbers(tool, tiny, in_tmp):
    last = {}
    for name, script, args in (("RLOO", train_rloo, rloo_args), ("PPO", train_ppo, ppo_args)):
        for seed in (1, 2):
            script.main(args(tiny, seed=seed, run_name=f"{name}{seed}"))
            last.setdefault(name, []).append(read_metrics(f"runs/{name}{seed}")[-1])
    folders = sorted(Path("runs").iterdir())
    stray = convert(
        runpy.run_path(str(ROOT / "benchmark/openrlbenchmark_offline.py")),
        write("stray", ROWS),
        package=tool.packages / "openrlbenchmark",
    )
    assert listed(stray)
    said = draw(tool, DRAW, tool.environment, "out", *folders, LAST="1")
    assert "RLOO has 2 runs" in said and "PPO has 2 runs" in said and said.splitlines()[-1] == "out/openrlbenchmark.png"
    assert all(is_picture(f"out/{name}.png") for name in ("scores", "all", "openrlbenchmark"))
    assert Path("out/openrlbenchmark.png").stat().st_size < 150_000 and Path("out/all.svg").stat().st_size
    table = {row.pop(""): row for row in csv.DictReader(open("out/all/toy.csv"))}
    assert table.keys() == last.keys() and len(table["PPO"]) == 6 and "objective/gold" in table["PPO"]
    for name, rows in last.items():
        assert table[name] == {metric: summary([row[metric] for row in rows], 4) for metric in table[name]}
        assert all(value in said for value in table[name].values())
        assert summary([row["objective/scores"] for row in rows], 2) in Path("out/scores.csv").read_text()
    assert draw(tool, DRAW, tool.environment, "again", *folders, LAST="1")
    assert Path("again/all/toy.csv").read_text() == Path("out/all/toy.csv").read_text()


@pytest.mark.slow
def test_the_overlay_on_openais_runs_is_drawn_by_the_real_tool(tool, tiny, in_tmp):
    """Their runs are made up, under the names that the published command asks for; ours are real, but for their data sets."""
    offline = runpy.run_path(str(ROOT / "benchmark/openrlbenchmark_offline.py"))
    recipe = dict(kl_coef=0.15, adaptive_kl=True, value_model="shared", wandb_tags=("lm-human-preferences",))
    train_ppo.main(ppo_args(tiny, **recipe))
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "we ."} for r in toy.rows("sft", "train")[:8]]
    write_rows("rows.jsonl", pairs)
    train_reward.main(reward_args(tiny, wandb_tags=("lm-human-preferences",), run_name="reward"))
    policy, reward = (options(words)["--filters"] for words in printed(HUMAN, "draw", "E", "O", ENTITY="someone"))
    theirs = [m for filters in policy[:2] for m in metrics_of(filters[0])] + metrics_of(reward[0][0])
    rows = [{"update": i, "episode": 512 * i} | {m: i + len(m) / 100 for m in theirs} for i in (1, 2, 3)]
    package = str(tool.packages / "openrlbenchmark")
    for task in TASKS:
        for script, name in (("run", PROMPTS), ("reward", LABELS)):
            folder = Path(shutil.copytree(f"runs/{script}", f"{task}/{script}"))
            about = json.loads((folder / "config.json").read_text())
            about["args"]["dataset"] = name.format(task)
            (folder / "config.json").write_text(json.dumps(about | {"commit": None}))
            convert(offline, str(folder), package=package, entity="someone")
        oai = write(f"{task}/oai", rows, **{"task_id": task, "task.value.policy.initial_model": "124M"})
        details = {"rewards.value.label_dataset": f"{task}/offline_5k.json", "exp_name": "train_policy_accelerate"}
        details = write(f"{task}/details", rows, **details)
        convert(offline, oai, package=package, entity="openrlbenchmark", project="lm-human-preferences")
        convert(offline, details, package=package, entity="openrlbenchmark", project="lm_human_preference_details")
    (ours,) = (row for row in read_metrics("runs/run") if row["update"] == 3)
    # offline the tool knows no runs of three tags, so theirs has none there
    copy = in_tmp / "benchmark" / HUMAN.name
    copy.parent.mkdir()
    copy.write_text(re.sub(r"\?(tag=[^&]*&){3}", "?", HUMAN.read_text()))
    shutil.copy(DRAW, copy.parent)
    draw(tool, copy, "draw", tool.environment, "out", "--offline", "--metric-last-n-average-window", "1", ENTITY="someone")
    assert is_picture("out/policy.png") and is_picture("out/reward.png")
    for task in TASKS:
        table = {row.pop(""): row for row in csv.DictReader(open(f"out/policy/{task}.csv"))}
        assert list(table) == ["OpenAI", "lm-human-preference-details", "this repository"]
        assert list(table["this repository"].values()) == [summary([ours[m]], 4) for m in metrics_of(policy[2][0])]
        assert table["OpenAI"] == {m: summary([3 + len(m) / 100], 4) for m in metrics_of(policy[0][0])}
        (loss,) = (row for row in csv.DictReader(open(f"out/reward/{task}.csv")) if row[""] == "this repository")
        assert loss["train_reward/minibatch/loss"] == summary([read_metrics("runs/reward")[-1]["train/rm/loss"]], 4)
