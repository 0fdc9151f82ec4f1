"""A run: its folder and name, what it logs and prints, the signals that stop it, and how it ends."""

import json
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import read_metrics, rloo_args, run_rloo
from short_runs import (
    after_row,
    assert_same_run,
    checkpoints,
    copy_of_dead,
    start,
    updates,
    whole,
)

from rlhf_details import train_rloo

in_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread"
)


# ---- folder and name -------------------------------------------------------------------------------------------------
def test_the_folder_of_a_run_holds_what_the_readme_says(tiny):
    run = whole(tiny, "rloo") / "runs/run"
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names == {"config", "metrics", "samples", "events", "checkpoints"}
    config = json.loads((run / "config.json").read_text())
    assert config["args"]["total_episodes"] == 96
    assert config["versions"].keys() == {"torch", "transformers"} and "commit" in config
    assert (config["device"], config["num_processes"], config["engine"]) == ("cpu", 1, "one process")
    rows = read_metrics(run)
    assert [(row["update"], row["episode"]) for row in rows] == [(i, 16 * i) for i in range(1, 7)]
    for row in rows:
        parts = row["time/rollout"] + row["time/training"]
        assert row["time/update"] == pytest.approx(parts) and row["eps"] == pytest.approx(16 / row["time/update"])
    assert all(a["time/from_scratch"] < b["time/from_scratch"] for a, b in pairwise(rows))


def test_total_of_a_sample_has_the_kl_taken_off_by_the_coefficient_of_its_update(tiny):
    run = whole(tiny, "ppo-moments") / "runs/run"
    coefficients = {row["update"]: row.get("objective/kl_coef") for row in read_metrics(run)}
    for row in map(json.loads, (run / "samples.jsonl").read_text().splitlines()):
        assert row["total"] == pytest.approx(row["score"] - coefficients[row["update"]] * row["kl"], abs=1e-6)


def test_a_run_without_a_name_is_called_by_data_set_experiment_seed_and_time(tiny, in_tmp, capsys):
    """It starts at the beginning where nothing is to be resumed."""
    first = train_rloo.main(rloo_args(tiny, run_name=None, total_episodes=16, resume=True, overwrite=False))["run"]
    assert first.startswith("runs/toy__train_rloo__1__20") and [str(path) for path in Path("runs").iterdir()] == [first]
    assert "starts at the beginning" in capsys.readouterr().out


def test_without_a_name_the_newest_run_of_that_kind_goes_on(tiny, in_tmp, capsys):
    run, kind = copy_of_dead(tiny), "prompts.jsonl__train_rloo"
    others = [f"{kind}__1__20240101-000000", f"{kind}__2__20260101-000000", f"{kind}__11__20260101-000000"]
    others += ["held_out.jsonl__train_rloo__1__20260101-000000", "prompts.jsonl__train_ppo__1__20260101-000000"]
    for name in others:
        (run.parent / name).mkdir()
        (run.parent / name / "config.json").touch()
    run.rename(run.parent / f"{kind}__1__20250101-000000")
    start(tiny, "rloo", resume=True, run_name=None, exp_name="train_rloo")
    assert f"from runs/{kind}__1__20250101-000000/checkpoints/000004" in capsys.readouterr().out
    assert len(list(run.parent.iterdir())) == 6


def test_a_run_of_other_arguments_without_a_checkpoint_is_not_written_over(tiny, in_tmp, fails):
    run_rloo(tiny, checkpoint_every=0)
    before = Path("runs/run/metrics.jsonl").read_bytes()
    other = dict(resume=True, overwrite=False, output_dir="other", kl_coef=0.7)
    assert "runs/run is of another run: kl_coef" in fails(run_rloo, tiny, checkpoint_every=0, **other)
    assert Path("runs/run/metrics.jsonl").read_bytes() == before


# ---- signals ---------------------------------------------------------------------------------------------------------
@in_main_thread
@pytest.mark.parametrize(
    "number,code,case", [("SIGTERM", 143, "rloo"), ("SIGINT", 130, "ppo-overlap"), ("SIGTERM", 143, "sft")]
)
def test_a_signal_stops_after_the_update_with_a_checkpoint(tiny, in_tmp, capsys, number, code, case):
    times = range(2 if number == "SIGTERM" else 1)  # A scheduler and the launcher may both send a SIGTERM.
    send = lambda run: [os.kill(os.getpid(), signal.Signals[number]) for _ in times]  # noqa: E731
    with after_row(3, send), pytest.raises(SystemExit) as end:
        start(tiny, case, checkpoint_every=0)
    out = capsys.readouterr()
    assert end.value.code == code and "error" not in out.err
    assert f"{number}: will stop after this update, with a checkpoint" in out.out
    assert f"{number}: stopped after update 3; --run_name run --resume goes on" in out.out
    assert checkpoints() == ["000003"] and updates() == [1, 2, 3] and not Path("model").exists()
    start(tiny, case, checkpoint_every=0, resume=True)
    assert_same_run(".", whole(tiny, case))


@in_main_thread
def test_a_second_ctrl_c_acts_at_once(tiny, in_tmp):
    def send_twice(run):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # Two signals at once may count as one, where another thread than the main one gets the first.
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, lambda *_: None)  # as a run that has failed in this process leaves it
    with after_row(2, send_twice), pytest.raises(KeyboardInterrupt):
        start(tiny, "rloo", checkpoint_every=0)
    assert checkpoints() == [] and updates() == [1, 2]


@in_main_thread
def test_a_signal_in_the_last_update_still_leaves_the_model_to_a_resumed_run(tiny, in_tmp):
    with after_row(6, lambda run: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit):
        start(tiny, "ppo-moments")
    assert checkpoints() == ["000004", "000006"] and not Path("model").exists()
    result, rows = start(tiny, "ppo-moments", resume=True), read_metrics("runs/run")
    assert_same_run(".", whole(tiny, "ppo-moments"))
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        assert result[when] == {name: row[name] for name in row if name.startswith("eval/")} != {}
