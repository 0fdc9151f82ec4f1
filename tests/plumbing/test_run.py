"""A run: its folder and name, what it logs and prints, the signals that stop it, and how it ends."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import read_metrics
from short_runs import (
    after_row,
    assert_same_run,
    checkpoints,
    contents,
    copy_of_dead,
    error_line,
    start,
    updates,
    whole,
)

in_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread"
)


# ---- folder and name -------------------------------------------------------------------------------------------------
def test_the_folder_of_a_run_holds_what_the_readme_says(tiny):
    run = whole(tiny, "rloo") / "runs/run"
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names == {"config", "metrics", "samples", "events", "checkpoints", "lock"}
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


def test_runs_have_names_of_their_own_and_resume_takes_the_newest_of_its_kind(tiny, in_tmp, capsys, monkeypatch):
    """A name says data set, experiment, seed and time. Where nothing is to be resumed a run starts at the beginning."""
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    options = dict(run_name=None, exp_name="mine", total_episodes=16, checkpoint_every=1)
    runs = [start(tiny, "rloo", output_dir=f"model{i}", resume=i == 0, **options)["run"] for i in range(3)]
    assert "starts at the beginning" in capsys.readouterr().out
    assert runs == [f"runs/prompts.jsonl__mine__1__20260101-000000{end}" for end in ("", "-2", "-3")]
    for other in (
        "prompts.jsonl__mine__2",
        "prompts.jsonl__mine__11",
        "held_out.jsonl__mine__1",
        "prompts.jsonl__me__1",
    ):
        Path("runs", f"{other}__20270101-000000").mkdir()
    assert start(tiny, "rloo", output_dir="model2", resume=True, **options)["run"] == runs[2]
    assert f"goes on after update 1 of 1, from {runs[2]}/checkpoints/000001" in capsys.readouterr().out


# ---- two runs at once ------------------------------------------------------------------------------------------------
HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("flags", [dict(resume=True), dict(overwrite=True)])
def test_a_run_that_goes_on_keeps_its_folder_to_itself(tiny, in_tmp, fails, flags):
    copy_of_dead(tiny)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, "runs/run/lock"], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        before = contents()
        assert "--run_name run: a run that has not ended writes into runs/run" in fails(start, tiny, "rloo", **flags)
        assert contents() == before
    start(tiny, "rloo", **flags)  # The other process has ended, and its lock file is still there.
    assert_same_run(".", whole(tiny, "rloo"))


def test_a_file_system_without_locks_is_named_and_the_run_goes_on(tiny, in_tmp, capsys, monkeypatch):
    monkeypatch.setattr("fcntl.lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    start(tiny, "rloo")
    assert "runs/run/lock: [Errno 37] No locks available; a second run in runs/run would" in capsys.readouterr().out
    assert_same_run(".", whole(tiny, "rloo"))


# ---- the output folder -----------------------------------------------------------------------------------------------
def into_model(name, text="mine"):
    """Writes a file into the folder `model`, which may be there or not."""
    Path("model").mkdir(exist_ok=True)
    Path("model", name).write_text(text)


MEANWHILE = [  # what happens to the output folder before the run, which is then under --overwrite, and during it
    (None, lambda: shutil.copytree("old", "model")),  # another run's model
    (None, lambda: shutil.copytree("old", "model/inner")),
    (None, lambda: into_model("mine.txt")),
    (lambda: into_model("a.txt"), lambda: into_model("b.txt")),
    (lambda: into_model("a.txt"), lambda: into_model("a.txt", "changed")),
]


@pytest.mark.parametrize("before, during", MEANWHILE)
def test_what_has_appeared_in_the_output_folder_stays_and_the_model_is_beside_it(tiny, in_tmp, capsys, before, during):
    shutil.copytree(tiny / "policy", "old")
    found = {}
    if before:
        before()
    with after_row(3, lambda run: (during(), found.update(contents("model")))):
        start(tiny, "rloo", overwrite=bool(before))
    assert contents("model") == found
    said = capsys.readouterr().out
    assert "--output_dir model has changed since the run began; the model is in model.run\n" in said
    assert "model: model.run " in said and "--policy_path model.run " in said
    Path("model").rename("theirs"), Path("model.run").rename("model")
    assert_same_run(".", whole(tiny, "rloo"))


def test_what_was_there_at_the_start_is_replaced(tiny, in_tmp):
    """Files and old models under --overwrite, and by a link its folder; of a repeated run its own model, whatever else
    lies beside it."""
    into_model("a.txt"), Path("model").rename("real"), Path("model").symlink_to("real")
    Path("model.run").mkdir(), Path("model.run.before").mkdir(), Path("model.before").mkdir()
    for _ in range(2):
        start(tiny, "rloo", overwrite=True)
        assert Path("model").is_symlink() and {*contents("real")} == {f"real/{name}" for name in os.listdir("model")}
        assert_same_run(".", whole(tiny, "rloo"))
    assert {"real", "model.run", "model.before"} < {*os.listdir()}


# ---- what the last save needs is tried before anything is trained ----------------------------------------------------
SAVE, read_text = "save_pretrained", Path.read_text


def with_a_mount(path, **how):
    """Path.read_text, where --output_dir is a mount."""
    return f"25 1 0:23 / {Path('model').resolve()} rw -" if path.name == "mountinfo" else read_text(path, **how)


UNWRITABLE = {  # what is wrong: (what fails, how, words of the line)
    "a mount": ("pathlib.Path.read_text", with_a_mount, "it is a mount"),
    "a tokenizer": (f"transformers.PreTrainedTokenizerFast.{SAVE}", Mock(side_effect=ValueError("a name")), "(a name)"),
    "a configuration": (f"transformers.GPTNeoXConfig.{SAVE}", Mock(side_effect=ValueError("top_k")), "(top_k)"),
    "a card": ("rlhf_details.plumbing.outputs.hub.model_card", Mock(side_effect=KeyError("license")), "license"),
    "a disk": ("tempfile.TemporaryDirectory", Mock(side_effect=OSError(30, "Read-only file system")), "Read-only"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNWRITABLE)
def test_a_save_that_must_fail_ends_the_run_before_it_trains(tiny, in_tmp, capsys, monkeypatch, case):
    what, how, words = UNWRITABLE[case]
    monkeypatch.setattr(what, how)
    with pytest.raises(SystemExit) as end:
        start(tiny, "rloo")
    line = error_line(capsys, end, code=1)
    assert "--output_dir model" in line and words in line and updates() == []
    assert [name for name in os.listdir() if name.startswith("model")] == []


def test_where_anything_but_the_weights_fails_at_the_end_they_stay(tiny, in_tmp, capsys, monkeypatch):
    def act(run):
        monkeypatch.setattr(type(run.tokenizer), "save_pretrained", Mock(side_effect=ValueError("a name")))

    with after_row(6, act), pytest.raises(SystemExit) as end:
        start(tiny, "rloo")
    line = error_line(capsys, end, code=1)
    assert "the weights are in " in line and "model.run, but" in line and "(a name)" in line
    weights = Path("model.run/model.safetensors").read_bytes()
    assert weights == (whole(tiny, "rloo") / "model/model.safetensors").read_bytes()
    assert not Path("model").exists()


def test_others_may_read_what_they_may_read_elsewhere(tiny, in_tmp):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            start(tiny, "rloo", total_episodes=16, output_dir=f"{mode}", overwrite=True, lora_rank=None)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in Path(f"{mode}").iterdir()} == {mode}


def test_a_clock_that_jumps_changes_no_time(tiny, in_tmp, monkeypatch):
    real = time.time
    with after_row(2, lambda run: monkeypatch.setattr(time, "time", lambda: real() - 86400)):
        start(tiny, "rloo")
    assert all(0 <= row[name] < 3600 for row in read_metrics("runs/run") for name in row if name.startswith("time/"))


# ---- signals ---------------------------------------------------------------------------------------------------------
@in_main_thread
@pytest.mark.parametrize(
    "number, code, case, update",
    [
        ("SIGTERM", 143, "rloo", 3),
        ("SIGINT", 130, "ppo-overlap", 3),
        ("SIGTERM", 143, "sft", 3),
        ("SIGHUP", 129, "rloo", 3),
        ("SIGUSR1", 138, "rloo", 3),
        ("SIGTERM", 143, "ppo-moments", 6),  # the last one
    ],
)
def test_a_signal_stops_after_the_update_with_a_checkpoint(tiny, in_tmp, capsys, number, code, case, update):
    times = range(2 if number == "SIGTERM" else 1)  # A scheduler and the launcher may both send a SIGTERM.
    send = lambda run: [os.kill(os.getpid(), signal.Signals[number]) for _ in times]  # noqa: E731
    with after_row(update, send), pytest.raises(SystemExit) as end:
        start(tiny, case, checkpoint_every=0)
    out = capsys.readouterr()
    assert end.value.code == code and "error" not in out.err
    assert f"{number}: will stop after this update, with a checkpoint" in out.out
    assert f"{number}: stopped after update {update}; --run_name run --resume goes on" in out.out
    assert checkpoints() == [f"{update:06d}"] and updates()[-1] == update and not Path("model").exists()
    result = start(tiny, case, checkpoint_every=0, resume=True)
    assert_same_run(".", whole(tiny, case))
    for when, row in (("before", read_metrics("runs/run")[0]), ("after", read_metrics("runs/run")[-1])):
        assert result[when] == {name: x for name, x in row.items() if name.startswith("eval/")}


@in_main_thread
@pytest.mark.parametrize("number,handler", [("SIGHUP", signal.SIG_IGN), ("SIGUSR1", lambda *_: None)])
def test_a_signal_that_nohup_or_the_users_code_has_taken_stays_theirs(tiny, in_tmp, number, handler):
    before = signal.signal(signal.Signals[number], handler)
    try:
        with after_row(3, lambda run: os.kill(os.getpid(), signal.Signals[number])):
            start(tiny, "rloo")
    finally:
        signal.signal(signal.Signals[number], before)
    assert_same_run(".", whole(tiny, "rloo"))


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
