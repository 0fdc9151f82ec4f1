"""
Puts run folders into the cache that openrlbenchmark draws from with --offline --scan-history: no account, no network.

    python benchmark/openrlbenchmark_offline.py runs/a runs/b --python ENV/bin/python
    ENV/bin/python -m openrlbenchmark.rlops --offline --scan-history --env-ids toy --output-filename scores \\
        --filters '?we=local&wpn=rlhf_details&ceik=dataset&cen=exp_name&xaxis=episode&metric=objective/scores' \\
        train_rloo train_ppo

ENV is an environment of its own, with openrlbenchmark 0.3.1; benchmark/openrlbenchmark.sh makes one. The cache lies in
that package's folder, dataset/<entity>/<project>/: `offline.sqlite` lists the runs, <run id>/ holds their `run.json`
and `run_df.csv`.

* Metrics have the names of metrics.jsonl. X-axes: `episode`, which is also `global_step`; `_step`, the update;
  `_runtime`, seconds.
* Every argument of a run can be filtered on, as `seed` and as `seed.value`. `rlops` looks for the first where it is
  told ceik=seed, and `rlops_multi_metrics` for the second. `dataset` (ceik) and `exp_name` (cen) take the place of its
  `env_id` and `exp_name`.
* Tags (?tag=) are the run's --wandb_tags, --tags and the first seven digits of its commit. Offline the tool reads one
  tag and, of the rest of a filter, only ?user= and ?cl=: it draws every run of that data set and experiment. With
  --replace the project holds these runs alone.
* A folder that is given again takes the place of what it was.
* In place of a folder, FOLDER/runs.csv:EXP gives all seeds of an experiment that benchmark.py has kept (with the column
  `episode`). A run's arguments are then the script's name, the data set and the seed.
"""

import csv
import hashlib
import json
import shlex
import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tyro
from intervals import read_tables
from plot import fail, read

# what the tool's peewee models create; a run's id is text in all of them, also where the column says otherwise
SCHEMA = """
CREATE TABLE IF NOT EXISTS offlinerun (id VARCHAR(255) NOT NULL, name VARCHAR(255) NOT NULL,
    state VARCHAR(255) NOT NULL, url VARCHAR(255) NOT NULL, path TEXT NOT NULL, username VARCHAR(255) NOT NULL,
    project VARCHAR(255) NOT NULL, entity VARCHAR(255) NOT NULL, config TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tag (id INTEGER NOT NULL PRIMARY KEY, name VARCHAR(255) NOT NULL);
CREATE TABLE IF NOT EXISTS tag_offlinerun_through (id INTEGER NOT NULL PRIMARY KEY, tag_id INTEGER NOT NULL,
    offlinerun_id INTEGER NOT NULL, FOREIGN KEY (tag_id) REFERENCES tag (id),
    FOREIGN KEY (offlinerun_id) REFERENCES offlinerun (id));
CREATE INDEX IF NOT EXISTS tagofflinerunthrough_tag_id ON tag_offlinerun_through (tag_id);
CREATE INDEX IF NOT EXISTS tagofflinerunthrough_offlinerun_id ON tag_offlinerun_through (offlinerun_id);
CREATE UNIQUE INDEX IF NOT EXISTS tagofflinerunthrough_tag_id_offlinerun_id
    ON tag_offlinerun_through (tag_id, offlinerun_id);
"""
WHERE = "import importlib.util as u; print(u.find_spec('openrlbenchmark').submodule_search_locations[0])"


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """folders runs/<name>, or FOLDER/runs.csv:EXP of benchmark.py"""
    python: str | None = None
    """the Python whose openrlbenchmark will draw"""
    package: str | None = None
    """or the folder of that package itself"""
    entity: str = "local"
    """what its filters call `we`"""
    project: str = "rlhf_details"
    """what its filters call `wpn`"""
    tags: tuple[str, ...] = ()
    """tags for these runs"""
    replace: bool = False
    """remove first what the project holds"""


def package_folder(args):
    """Folder of the openrlbenchmark that will draw."""
    if args.package:
        return Path(args.package) if Path(args.package).is_dir() else fail(f"--package {args.package}: no such folder")
    if not args.python:
        fail("name the Python that openrlbenchmark is installed for, --python ENV/bin/python")
    try:
        done = subprocess.run([args.python, "-c", WHERE], capture_output=True, text=True)
    except OSError as e:
        fail(f"--python {args.python}: {e.strerror}")
    if done.returncode:
        fail(f"--python {args.python}: has no openrlbenchmark")
    return Path(done.stdout.strip())


def read_experiment(name):
    """[(rows, arguments that say which curve it is, commit)] of FOLDER/runs.csv:EXP, one for each seed."""
    path, _, exp = name.rpartition(":")
    try:
        about = json.loads(Path(path).with_name("env.json").read_text())
        words = shlex.split(about["commands"][exp])
        given = {"exp_name": next(Path(word).stem for word in words if word.endswith(".py")), "dataset": "toy"}
        given |= {name: words[words.index(f"--{name}") + 1] for name in ("exp_name", "dataset") if f"--{name}" in words}
        commit = about["environments"][-1]["commit"]
    except (OSError, ValueError, KeyError, IndexError, StopIteration):
        fail(f"{name}: env.json beside it does not say by which command it was made")
    found = []
    for (of, _, seed), (header, *rows) in read_tables(path).items():
        if of == exp:
            rows = [{key: float(cell) for key, cell in zip(header, row, strict=True) if cell} for row in rows]
            rows = [row | {key: int(row.get(key, 0)) for key in ("update", "episode")} for row in rows]
            found.append((rows, given | {"seed": seed}, commit))
    return found or fail(f"{name}: no rows")


def read_folder(folder):
    """[(rows, arguments, commit)] of a run folder."""
    rows = read(folder)
    try:
        about = json.loads((Path(folder) / "config.json").read_text())
        return [(rows, about["args"], about.get("commit") or "")]
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{folder}/config.json: does not hold a run's arguments")


def read_runs(name, args):
    """Each run of a run folder or of FOLDER/runs.csv:EXP, as (what the tool keeps of a W&B run, rows with its axes)."""
    is_experiment = ".csv:" in str(name)
    for found, given, commit in (read_experiment if is_experiment else read_folder)(str(name)):
        rows, seconds = [], 0.0
        for row in found:
            seconds = row.get("time/from_scratch", seconds)
            rows.append({"_step": row["update"], "_runtime": seconds, "global_step": row["episode"]} | row)
        place = f"{Path(name).resolve()}{given['seed'] if is_experiment else ''}"
        # The id begins with a letter, because sqlite would make a number of it.
        key = f"r{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        run = {"id": key, "name": str(name), "state": "finished", "url": Path(name).resolve().as_uri()}
        run |= {"project": args.project, "entity": args.entity, "path": [args.entity, args.project, key]}
        run["config"] = given | {f"{key}.value": value for key, value in given.items()}
        run["tags"] = list(dict.fromkeys([*given.get("wandb_tags", ()), *args.tags, *filter(None, [commit[:7]])]))
        yield run | {"user": {"username": args.entity, "name": args.entity}}, rows


def store(database, run):
    """Lists a run and its tags, in place of what is listed under its id."""
    values = [run[key] for key in ("id", "name", "state", "url", "project", "entity")]
    values += [json.dumps(run["path"]), run["user"]["username"], json.dumps(run["config"])]
    database.execute("DELETE FROM tag_offlinerun_through WHERE offlinerun_id = ?", [run["id"]])
    database.execute("DELETE FROM offlinerun WHERE id = ?", [run["id"]])
    columns = "id, name, state, url, project, entity, path, username, config"
    database.execute(f"INSERT INTO offlinerun ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    for tag in run["tags"]:
        new = "INSERT INTO tag (name) SELECT ? WHERE NOT EXISTS (SELECT 1 FROM tag WHERE name = ?)"
        database.execute(new, [tag, tag])
        link = "INSERT INTO tag_offlinerun_through (tag_id, offlinerun_id) SELECT id, ? FROM tag WHERE name = ? LIMIT 1"
        database.execute(link, [run["id"], tag])


def main(args: Args):
    """Returns the folder of the project in the tool's cache."""
    if not args.runs:
        fail("name a run's folder, runs/<name>")
    found = [run for name in args.runs for run in read_runs(name, args)]  # all of them, before anything is written
    project = package_folder(args) / "dataset" / args.entity / args.project
    if args.replace:
        shutil.rmtree(project, ignore_errors=True)
    for run, rows in found:
        folder = project / run["id"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "run_df.csv", "w", newline="") as file:
            table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        (folder / "run.json").write_text(json.dumps(run))
    with closing(sqlite3.connect(project / "offline.sqlite")) as database:
        database.executescript(SCHEMA)
        for run, _ in found:
            store(database, run)
        database.commit()
    print(f"{len(found)} runs: {project}")
    return project


if __name__ == "__main__":
    main(tyro.cli(Args))
