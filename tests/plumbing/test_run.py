"""A run: its folder and name, what it logs and prints, the signals that stop it, and how it ends."""

import dataclasses
import itertools
import json
import math
import os
import re
import signal
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from helpers import PAGES, page_args, read_metrics, rloo_args, run_rloo
from short_runs import (
    after_row,
    assert_same_run,
    checkpoints,
    copy_of_dead,
    error_line,
    start,
    updates,
    whole,
    write_rows,
)

from rlhf_details import toy, train_rloo
from rlhf_details.plumbing import run

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


def test_samples_are_the_first_responses_of_four_prompts_and_total_has_the_kl_taken_off(tiny):
    run = whole(tiny, "ppo-moments") / "runs/run"
    coefficients = {row["update"]: row.get("objective/kl_coef") for row in read_metrics(run)}
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [row["update"] for row in samples] == [1] * 4 + [4] * 4 + [6] * 4
    for row in samples:
        assert row["total"] == pytest.approx(row["score"] - coefficients[row["update"]] * row["kl"], abs=1e-6)
    of_rloo = (whole(tiny, "rloo") / "runs/run/samples.jsonl").read_text().splitlines()[:4]
    assert len({json.loads(line)["query"] for line in of_rloo}) == 4  # and not the k responses to one prompt


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


def test_a_run_of_other_arguments_without_a_checkpoint_is_not_written_over(tiny, in_tmp, capsys):
    run_rloo(tiny, checkpoint_every=0)
    before = Path("runs/run/metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit) as end:
        run_rloo(tiny, checkpoint_every=0, resume=True, overwrite=False, output_dir="other", kl_coef=0.7)
    assert "runs/run is of another run: kl_coef" in error_line(capsys, end)
    assert Path("runs/run/metrics.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_trained(tiny, in_tmp, capsys):
    Path("runs").touch()
    with pytest.raises(SystemExit) as end:
        run_rloo(tiny)
    assert "runs/run cannot be written" in error_line(capsys, end, code=1) and not Path("models").exists()


# ---- what it says ----------------------------------------------------------------------------------------------------
def test_at_the_end_held_out_numbers_stand_beside_those_before(tiny, in_tmp, capsys):
    rows = write_rows("held_out.jsonl", toy.rows("prompts", "test")[:4])
    result = train_rloo.main(rloo_args(tiny, eval_dataset=rows, eval_every=2, total_episodes=64, output_dir="model"))
    logged = read_metrics("runs/run")
    for when, row in (("before", logged[0]), ("after", logged[-1])):
        assert result[when] == {name: value for name, value in row.items() if name.startswith("eval/")} != {}
    assert [row["update"] for row in logged if "eval/objective/kl" in row] == [0, 2, 4]
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.strip().startswith("scores"))
    mean, std = ([result[when][f"eval/objective/scores{x}"] for when in ("before", "after")] for x in ("", "_std"))
    printed = [float(number) for number in re.findall(r"-?\d+\.\d+", line)]
    halves = [1.96 * x / math.sqrt(3) for x in std]  # The deviation is the biased one of 4 rows.
    assert printed == pytest.approx([mean[0], halves[0], mean[1], halves[1]], abs=1e-3)
    assert [line.split()[0] for line in out.splitlines() if "  eps " in line] == ["1/4", "4/4"]
    assert "4 held-out rows, before -> after" in out and "model: model   run: runs/run" in out
    assert "4 updates of 16, one process in fp32, samples at temperature 1 and of at most 8 tokens" in out


@pytest.mark.parametrize("seconds, updates", [(0, [1, 8]), (0.5, [1, 3, 5, 7, 8])])
def test_a_line_comes_every_few_seconds(tiny, in_tmp, capsys, monkeypatch, seconds, updates):
    """The clock goes on by so many seconds when it is read, which is six times an update."""
    ticks = itertools.count()
    monkeypatch.setattr(run, "time", SimpleNamespace(time=lambda: seconds * next(ticks)))
    run_rloo(tiny, total_episodes=128)
    lines = [line for line in capsys.readouterr().out.splitlines() if "  eps " in line]
    assert [int(line.partition("/8  ")[0]) for line in lines] == updates and lines[-1].endswith("eta 0s")


def test_the_first_lines_name_what_a_launch_file_sets(tiny, in_tmp, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState._reset_state()  # The tests before have made an Accelerator in fp32.
    try:
        train_rloo.main(rloo_args(tiny, total_episodes=16))
    finally:
        AcceleratorState._reset_state()
    assert "1 updates of 16, one process in bf16, samples" in capsys.readouterr().out


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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A job in the background starts with it ignored.
    try:
        send = lambda run: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]  # noqa: E731
        with after_row(2, send), pytest.raises(KeyboardInterrupt):
            start(tiny, "rloo", checkpoint_every=0)
    finally:
        signal.signal(signal.SIGINT, before)
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


@pytest.mark.parametrize("page", PAGES)
def test_a_run_may_be_repeated_into_its_own_folder(tiny, in_tmp, page):
    args = page_args(page, tiny, total_episodes=16, output_dir="model")
    PAGES[page].main(args)
    PAGES[page].check(dataclasses.replace(args, run_name="again", overwrite=False))
