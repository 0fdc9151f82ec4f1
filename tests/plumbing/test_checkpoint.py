"""Checkpoints: whole or not there, found again if whole, refused by another run; and a resumed run is the same run."""

import errno
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import assert_same_curves, edit_json, read_metrics
from short_runs import (
    Death,
    after_row,
    arguments,
    assert_same_run,
    checkpoints,
    contents,
    copy_of_dead,
    die,
    error_line,
    model_of,
    start,
    updates,
    whole,
)

from rlhf_details.plumbing.outputs import atomic, checkpoint

FAST = (
    "rloo",
    "ppo-moments",
    "ppo-overlap",
    "distill-jsd",
    "reward-gain",
    "dpo",
    "sft",
)  # the others are in slow/test_kills.py


# ---- a run that died goes on as if it had not ------------------------------------------------------------------------
@pytest.mark.parametrize("case", FAST)
def test_a_run_that_died_goes_on_as_if_it_had_not(tiny, in_tmp, capsys, case):
    run = copy_of_dead(tiny, case)
    assert [update for update in updates() if update] == [1, 2, 3, 4, 5] and checkpoints() == ["000002", "000004"]
    assert not Path("model").exists()
    capsys.readouterr()
    start(tiny, case, resume=True)
    assert f"goes on after update 4 of 6, from {run}/checkpoints/000004" in capsys.readouterr().out
    assert_same_run(".", whole(tiny, case))
    assert checkpoints() == ["000004", "000006"]


def test_two_deaths_and_an_end_that_was_reached_before(tiny, in_tmp):
    """It dies after update 5, and again after update 4. At last it is resumed once more when all is done."""
    run = copy_of_dead(tiny, "ppo-overlap")
    shutil.rmtree(run / "checkpoints/000004")
    with after_row(4, die), pytest.raises(Death):
        start(tiny, "ppo-overlap", resume=True)
    assert updates() == [1, 2, 3, 4] and checkpoints() == ["000002"]
    start(tiny, "ppo-overlap", resume=True)
    model = model_of(".")
    shutil.rmtree("model")  # as if it had died while it saved the model
    start(tiny, "ppo-overlap", resume=True)
    assert_same_run(".", whole(tiny, "ppo-overlap"))
    assert model_of(".") == model


# ---- dying while a checkpoint is written -----------------------------------------------------------------------------
def dying_at(stage):
    """Patches under which the process dies while it writes the checkpoint of update 4."""
    save, rename = torch.save, Path.rename

    def deadly_save(content, file):
        path = Path(file.name)
        if path.parent.name == "000004.partial" and stage == path.stem:
            file.write(b"half of it")
            raise Death
        save(content, file)

    def deadly_rename(path, target):
        is_it = path.name == "000004.partial"
        if is_it and stage == "rename":
            raise Death
        rename(path, target)
        if is_it and stage == "older ones":
            raise Death

    return patch.object(torch, "save", deadly_save), patch.object(Path, "rename", deadly_rename)


@pytest.mark.parametrize("stage", ["policy", "rename", "older ones"])
def test_dying_while_a_checkpoint_is_written(tiny, in_tmp, capsys, stage):
    """Afterwards nothing unfinished is left, also where --checkpoint_every no longer writes that one."""
    of_files, of_disk = dying_at(stage)
    with of_files, of_disk, pytest.raises(Death):
        start(tiny, "rloo", checkpoint_every=1)
    is_whole = stage == "older ones"
    assert checkpoints() == ["000002", "000003", "000004" if is_whole else "000004.partial"]
    start(tiny, "rloo", checkpoint_every=5, resume=True)
    assert f"goes on after update {4 if is_whole else 3} of 6" in capsys.readouterr().out
    assert_same_run(".", whole(tiny, "rloo"))
    assert checkpoints() == ["000005", "000006"]


def test_files_are_on_the_disk_before_their_folder_has_its_name(in_tmp, monkeypatch):
    synced, new = [], Path("new")
    monkeypatch.setattr(atomic, "sync", lambda path: synced.append((path.name, new.exists())))
    with atomic.replacing(new) as folder:
        (folder / "inner").mkdir(), (folder / "a").touch(), (folder / "inner/b").touch()
    assert sorted(synced) == [("a", False), ("b", False)] and Path("new/inner/b").exists()


def test_a_disk_that_is_full_ends_the_run_and_leaves_the_checkpoint_before(tiny, in_tmp, capsys, monkeypatch):
    real = checkpoint.save

    def full(content, path):
        real(content, "/dev/full" if path.parent.name == "000004.partial" else path)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(SystemExit) as end:
        start(tiny, "rloo")
    text = error_line(capsys, end, code=1)
    assert "runs/run/checkpoints cannot be written ([Errno 28] No space left on device)" in text
    assert "last good checkpoint: runs/run/checkpoints/000002; --run_name run --resume goes on from it" in text
    assert checkpoints() == ["000002"]  # the unfinished one has made room


def test_a_new_run_leaves_no_checkpoint_of_the_one_it_replaces(tiny, in_tmp):
    copy_of_dead(tiny)
    with after_row(1, die), pytest.raises(Death):
        start(tiny, "rloo", overwrite=True)
    assert checkpoints() == [] and updates() == [1]


# ---- damage ----------------------------------------------------------------------------------------------------------
def flip(path, where=0.5):
    """Flips a bit of a file, at this share of its length."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 4
    path.write_bytes(content)


DAMAGES = {  # what happens to a file of the newest checkpoint
    "a bit": (flip, "policy.pt"),
    "a bit near its end": (lambda path: flip(path, 0.99), "policy.pt"),
    "a bit of the state": (flip, "state.pt"),
    "it is cut": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "state.pt"),
    "it is empty": (lambda path: path.write_bytes(b""), "policy.pt"),
    "it is gone": (Path.unlink, "state.pt"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_a_checkpoint_is_damaged_the_one_before_is_taken(tiny, in_tmp, capsys, damage):
    """And the damaged one goes when the next one is written, though that has a lower number."""
    (act, file), damaged = DAMAGES[damage], copy_of_dead(tiny, "rloo") / "checkpoints/000004"
    act(damaged / file)
    start(tiny, "rloo", resume=True, checkpoint_every=3)
    out = capsys.readouterr().out
    assert f"{damaged}/{file} is damaged, so an older checkpoint is taken" in out
    assert "goes on after update 2 of 6" in out and "can be read" not in out
    assert_same_run(".", whole(tiny, "rloo"))
    assert checkpoints() == ["000003", "000006"]


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew_by_itself(tiny, in_tmp, fails):
    for path in copy_of_dead(tiny).glob("checkpoints/*/policy.pt"):
        flip(path)
    before = contents()
    assert "no checkpoint in runs/run is whole" in fails(start, tiny, "rloo", resume=True)
    assert contents() == before


LOGS = {  # what happens to metrics.jsonl, and how many rows up to update 4 are left of it
    "a number": (lambda text: text.replace('"episode": 32', '"episode": 33'), 4),
    "no JSON": (lambda text: text.replace('{"update": 2,', '"update": 2,'), 3),
    "no object": (lambda text: text.replace('{"update": 2,', '3, {"update": 2,'), 3),
    "no update": (lambda text: text.replace('"update": 2', '"opdate": 2'), 3),
    "no UTF-8": (lambda text: text.replace('{"update": 2', '\udc80{"update": 2'), 3),
    "cut": (lambda text: text[: text.index('{"update": 2') + 9], 1),
    "gone": (lambda text: "", 0),
}


@pytest.mark.parametrize("damage", LOGS)
def test_a_damaged_log_is_named_with_the_rows_that_are_left(tiny, in_tmp, capsys, damage):
    (change, left), log = LOGS[damage], copy_of_dead(tiny) / "metrics.jsonl"
    log.write_bytes(change(log.read_text()).encode(errors="surrogateescape"))
    start(tiny, "rloo", resume=True)
    assert f"runs/run/metrics.jsonl was damaged: {left} of its 4 rows can be read" in capsys.readouterr().out
    assert len(updates()) == left + 2


def test_a_resumed_run_holds_no_map_of_its_checkpoint(tiny, in_tmp):
    copy_of_dead(tiny)
    maps = []
    with after_row(5, lambda run: maps.append(Path("/proc/self/maps").read_text())):
        start(tiny, "rloo", resume=True)
    assert len(maps) == 1 and "policy.pt" not in maps[0]


# ---- what others put into checkpoints/ -------------------------------------------------------------------------------
THEIRS = {  # what a user makes there during a run: (name, how)
    "a file": ("notes.txt", Path.touch),
    "a copy": ("000002.keep", lambda path: shutil.copytree(path.with_name("000002"), path)),
    "a link": ("best", lambda path: path.symlink_to("000002")),
    "a folder": ("mine", Path.mkdir),
    "a short number": ("2", Path.mkdir),
}


def test_what_others_put_beside_checkpoints_stays(tiny, in_tmp):
    def act(run):
        for name, make in THEIRS.values():
            make(run.folder / "checkpoints" / name)

    theirs = {name for name, _ in THEIRS.values()}
    with after_row(3, act):
        start(tiny, "rloo")
    assert {*checkpoints()} == {"000004", "000006"} | theirs
    start(tiny, "rloo", overwrite=True, checkpoint_every=0)
    assert {*checkpoints()} == theirs


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_run(tiny, in_tmp, capsys, monkeypatch):
    """Such as one of which another program holds a file open on NFS. It is never taken for that of a new run."""
    remove = os.rmdir

    def busy(path, **how):
        if str(path).endswith("000002"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path, **how)

    monkeypatch.setattr(os, "rmdir", busy)
    start(tiny, "rloo")
    assert checkpoints() == ["000002", "000004", "000006"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        start(tiny, "rloo", overwrite=True)
    assert "runs/run/checkpoints/000002 cannot be removed" in error_line(capsys, end, code=1)


# ---- what may change, and what is refused ----------------------------------------------------------------------------
REFUSED = [  # case, other flags, what its config.json says otherwise, parts of the line
    ("rloo", dict(kl_coef=0.5, rloo_k=2), {}, ["kl_coef", "0.5 here", "rloo_k 4 there, 2 here"]),
    ("ppo-overlap", dict(total_episodes=128), {}, ["total_episodes 96 there, 128 here"]),
    ("rloo", {}, dict(mixed_precision="other"), ["mixed_precision 'other' there, 'fp32' here"]),
    ("rloo", {}, {"written by": "ZeRO-2"}, ["written by 'ZeRO-2' there, 'torch' here"]),
    ("rloo", {}, {"version of the layout": 1}, ["version of the layout 1 there", "--overwrite"]),
    ("rloo", dict(dataset="other.jsonl"), {}, ["checksum of rows and models"]),
]


@pytest.mark.parametrize("case,changes,state,parts", REFUSED)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_touched(
    tiny, in_tmp, fails, case, changes, state, parts
):
    edit_json(copy_of_dead(tiny, case) / "config.json", **state)
    rows = Path(arguments(tiny, case)[1].dataset).read_text().splitlines(keepends=True)
    Path("other.jsonl").write_text("".join(rows[::-1]))
    before, line = contents(), fails(start, tiny, case, resume=True, **changes)
    assert all(part in line for part in ["runs/run/checkpoints/000004", *parts]) and contents() == before


def test_memory_flags_and_outputs_may_change(tiny, in_tmp):
    config = copy_of_dead(tiny, "rloo") / "config.json"
    config.write_text(config.read_text().replace('"template_date": "2', '"template_date": "1'))  # on another day
    knobs = dict(micro_batch_size=4, rollout_micro_batch_size=8, gradient_checkpointing=True, share_prompts=False)
    start(tiny, "rloo", resume=True, checkpoint_every=3, output_dir="elsewhere/model", **knobs)
    assert_same_curves(read_metrics("runs/run"), read_metrics(whole(tiny, "rloo") / "runs/run"))
    assert Path("elsewhere/model/model.safetensors").exists() and not Path("model").exists()


# ---- logs ------------------------------------------------------------------------------------------------------------
def test_logs_are_cut_after_the_checkpoint_and_times_add_up(tiny, in_tmp):
    run = copy_of_dead(tiny)
    seconds = read_metrics(run)[3]["time/from_scratch"]
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"update": 6, "episode": 96, "torn')
    start(tiny, "rloo", resume=True)
    assert_same_run(".", whole(tiny, "rloo"))
    assert read_metrics(run)[3]["time/from_scratch"] == seconds < read_metrics(run)[4]["time/from_scratch"]
