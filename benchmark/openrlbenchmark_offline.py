"""
Lets openrlbenchmark draw local runs: without an account, without a network, and without a run having been tracked.

    bash benchmark/openrlbenchmark.sh ENV OUT NAME ...      makes the environment, calls this file and then the tool
    ENV/bin/python benchmark/openrlbenchmark_offline.py NAME ...

It runs under the Python that has openrlbenchmark (0.3.1), whose own tables it fills: the tool keeps what it has read of
Weights & Biases in its folder, dataset/<entity>/<project>/, and draws from there with --offline --scan-history. NAME is
a run's folder, runs/<name>, or STUDY:EXP, all seeds of an experiment in benchmark/results/STUDY/runs.csv, at the commit
that has most of them (STUDY@COMMIT:EXP: at this one). The entity is `local` and the project `rlhf_details`.

Metrics have the names of metrics.jsonl. The x-axis `global_step` is episodes, `_step` the update, `_runtime` seconds. A
curve is named by the arguments `dataset` (ceik) and `exp_name` (cen), which is EXP for STUDY:EXP. Each argument of a
run can be filtered on, and so can its tags: --wandb_tags and the commit.
"""

import csv
import hashlib
import json
import shlex
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import openrlbenchmark
import peewee
from openrlbenchmark.offline_db import OfflineRun, OfflineRunTag, Tag, database_proxy

RESULTS = Path(__file__).resolve().parent / "results"
PROJECT = Path(openrlbenchmark.__path__[0], "dataset", "local", "rlhf_details")


def fail(message):
    """One clear line, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def read_folder(name):
    """[(place, rows of metrics, arguments, tags)] of a run's folder."""
    try:
        about = json.loads(Path(name, "config.json").read_text())
        lines = Path(name, "metrics.jsonl").read_text().splitlines()
        tags = [*about["args"]["wandb_tags"], about["commit"][:7]]
        return [(Path(name).resolve(), [json.loads(line) for line in lines], about["args"], tags)]
    except (OSError, ValueError, KeyError, TypeError) as e:
        fail(f"{name}: is no folder of a run ({type(e).__name__}: {e})")


def read_experiment(name):
    """The same of STUDY:EXP or STUDY@COMMIT:EXP, one for each seed."""
    (study, _, commit), exp = name.rpartition(":")[0].partition("@"), name.rpartition(":")[2]
    path, found = RESULTS / study / "runs.csv", defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(path.open(newline="")) if path.exists() else ():
        if row.pop("run") == exp and commit in ("", row["commit"]):
            found[row.pop("commit")][row.pop("seed")].append({key: float(x) for key, x in row.items() if x})
    if not found:
        fail(f"{name}: no such experiment in {path}")
    commit = max(found, key=lambda commit: len(found[commit]))  # the first of equals
    if len(found) > 1:
        print(f"{name}: takes {commit} of several commits; {study}@COMMIT:{exp} takes another")
    words = shlex.split(json.loads(path.with_name("env.json").read_text())[commit]["commands"].get(exp, ""))
    dataset = words[words.index("--dataset") + 1] if "--dataset" in words else "toy"
    of_seed = ((seed, {"exp_name": exp, "dataset": dataset, "seed": int(seed)}) for seed in found[commit])
    return [(path / exp / seed, found[commit][seed], about, [commit]) for seed, about in of_seed]


def store(place, rows, args, tags):
    """Puts a run where the tool looks for it, in its database and as run.json and run_df.csv."""
    table, seconds = [], 0.0
    for row in rows:
        if "episode" not in row:
            fail(f"{place}: has no column `episode`, which is the x-axis")
        seconds = row.get("time/from_scratch", seconds)
        table.append({"_step": row["update"], "_runtime": seconds, "global_step": row["episode"]} | row)
    # The id begins with a letter, because sqlite would make a number of it.
    key = f"r{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    about = {
        "id": key,
        "name": str(place),
        "state": "finished",
        "url": str(place),
        "path": ["local", PROJECT.name, key],
    }
    # `rlops` looks for an argument by its name, and `rlops_multi_metrics` by name.value.
    about |= {"project": PROJECT.name, "entity": "local", "config": args | {f"{x}.value": args[x] for x in args}}
    (PROJECT / key).mkdir(parents=True)
    user = {"username": "local", "name": "local"}
    (PROJECT / key / "run.json").write_text(json.dumps(about | {"user": user, "tags": tags}))
    with open(PROJECT / key / "run_df.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in table for name in row)))
        writer.writeheader()
        writer.writerows(table)
    run = OfflineRun.create(**about, username="local")
    run.tags.add([Tag.get_or_create(name=tag)[0] for tag in tags if tag])


def main(names):
    """The runs of these names take the place of all that the project held. Prints the data sets, and the curves."""
    found = [run for name in names for run in (read_folder(name) if Path(name).is_dir() else read_experiment(name))]
    shutil.rmtree(PROJECT, ignore_errors=True)
    PROJECT.mkdir(parents=True)
    database = peewee.SqliteDatabase(PROJECT / "offline.sqlite")
    database_proxy.initialize(database)
    with database:
        database.create_tables([OfflineRun, Tag, OfflineRunTag])
        for run in found:
            store(*run)
    print(*dict.fromkeys(args["dataset"] for _, _, args, _ in found))
    print(*dict.fromkeys(f"{args['exp_name']}?cl={args['exp_name']}" for _, _, args, _ in found))


if __name__ == "__main__":
    main(sys.argv[1:])
