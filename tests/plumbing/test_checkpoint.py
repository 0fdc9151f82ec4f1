"""Checkpoints: whole or not there, found again if whole, refused by another run; and a resumed run is the same run."""

import errno
import os
import shutil
from pathlib import Path

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
    """Logs are cut after the checkpoint, and times add up."""
    run = copy_of_dead(tiny, case)
    assert [update for update in updates() if update] == [1, 2, 3, 4, 5] and checkpoints() == ["000002", "000004"]
    assert not Path("model").exists()
    seconds = read_metrics(run)[-2]["time/from_scratch"]
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"update": 6, "episode": 96, "torn')
    capsys.readouterr()
    start(tiny, case, resume=True)
    assert f"goes on after update 4 of 6, from {run}/checkpoints/000004" in capsys.readouterr().out
    assert_same_run(".", whole(tiny, case))
    assert checkpoints() == ["000004", "000006"]
    before, after, _ = (row["time/from_scratch"] for row in read_metrics(run)[-3:])
    assert before == seconds < after


def test_two_deaths_and_an_end_that_was_reached_before(tiny, in_tmp):
    """It dies after update 5, and again after update 4. At last it is resumed once more when all is done."""

    def die_again(run):
        assert "policy.pt" not in Path("/proc/self/maps").read_text()  # A resumed run holds no map of its checkpoint.
        die(run)

    run = copy_of_dead(tiny, "ppo-overlap")
    shutil.rmtree(run / "checkpoints/000004")
    with after_row(4, die_again), pytest.raises(Death):
        start(tiny, "ppo-overlap", resume=True)
    assert updates() == [1, 2, 3, 4] and checkpoints() == ["000002"]
    start(tiny, "ppo-overlap", resume=True)
    model = model_of(".")
    shutil.rmtree("model")  # as if it had died while it saved the model
    start(tiny, "ppo-overlap", resume=True)
    assert_same_run(".", whole(tiny, "ppo-overlap"))
    assert model_of(".") == model


# ---- dying while a checkpoint is written -----------------------------------------------------------------------------
@pytest.mark.parametrize("stage", ["policy", "rename", "older ones"])
def test_dying_while_a_checkpoint_is_written(tiny, in_tmp, capsys, monkeypatch, stage):
    """Afterwards nothing unfinished is left, also where --checkpoint_every no longer writes that one."""
    save, rename = torch.save, Path.rename

    def deadly_save(content, file):
        if file.name.endswith(f"000004.partial/{stage}.pt"):
            file.write(b"half of it")
            raise Death
        save(content, file)

    def deadly_rename(path, target):
        if stage != "rename" or path.name != "000004.partial":
            rename(path, target)
        if stage != "policy" and path.name == "000004.partial":
            raise Death

    with monkeypatch.context() as patched, pytest.raises(Death):
        patched.setattr(torch, "save", deadly_save), patched.setattr(Path, "rename", deadly_rename)
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
    places = {"000004.partial": "/dev/full"}
    monkeypatch.setattr(checkpoint, "save", lambda x, path: real(x, places.get(path.parent.name, path)))
    with pytest.raises(SystemExit) as end:
        start(tiny, "rloo")
    text = error_line(capsys, end, code=1)
    assert "runs/run/checkpoints cannot be written ([Errno 28] No space left on device)" in text
    assert "last good checkpoint: runs/run/checkpoints/000002; --run_name run --resume goes on from it" in text
    assert checkpoints() == ["000002"]  # the unfinished one has made room


# ---- damage ----------------------------------------------------------------------------------------------------------
def flip(content, where=0.5):
    """Flips a bit, at this share of the length."""
    i = int(where * len(content))
    return content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :]


POLICY, STATE, LOG = "checkpoints/000004/policy.pt", "checkpoints/000004/state.pt", "metrics.jsonl"
DAMAGES = [  # a file, what happens to it, and how many of the four rows of a log are left
    (POLICY, flip, None),
    (POLICY, lambda x: flip(x, 0.99), None),  # near its end
    (POLICY, lambda x: b"", None),
    (STATE, flip, None),
    (STATE, lambda x: x[:-100], None),
    (STATE, None, None),  # It is gone.
    (LOG, lambda x: x.replace(b": 32,", b": 33,"), 4),  # a number
    (LOG, lambda x: x.replace(b'{"update": 2,', b'"update": 2,'), 3),  # no JSON
    (LOG, lambda x: x.replace(b'{"update": 2,', b'3, {"update": 2,'), 3),  # no object
    (LOG, lambda x: x.replace(b'"update": 2', b'"opdate": 2'), 3),
    (LOG, lambda x: x.replace(b'{"update": 2', b'\x80{"update": 2'), 3),  # no UTF-8
    (LOG, lambda x: x[: x.index(b'{"update": 2') + 9], 1),
    (LOG, None, 0),
]


@pytest.mark.parametrize("name, change, left", DAMAGES)
def test_damage_is_named_and_for_a_checkpoint_the_one_before_is_taken(tiny, in_tmp, capsys, name, change, left):
    """And the damaged one goes when the next one is written, though that has a lower number."""
    damaged = copy_of_dead(tiny) / name
    damaged.write_bytes(change(damaged.read_bytes())) if change else damaged.unlink()
    start(tiny, "rloo", resume=True, checkpoint_every=3)
    line, update, rows = "is damaged, so an older checkpoint is taken", 2, 6
    if name == LOG:
        line, update, rows = f"was damaged: {left} of its 4 rows can be read", 4, left + 2
    out = capsys.readouterr().out
    assert f"{damaged} {line}" in out and f"goes on after update {update} of 6" in out and out.count("damaged") == 1
    assert len(updates()) == rows and model_of(".") == model_of(whole(tiny, "rloo"))
    assert checkpoints() == [f"{update // 2 + 2:06d}", "000006"]


# ---- what others put into checkpoints/ -------------------------------------------------------------------------------
def test_what_others_put_beside_checkpoints_stays(tiny, in_tmp):
    """A file, a folder, a short number, a link, and a copy that the user keeps."""

    def act(run):
        folder = run.folder / "checkpoints"
        (folder / "notes.txt").touch(), (folder / "mine").mkdir(), (folder / "2").mkdir()
        (folder / "best").symlink_to("000002"), shutil.copytree(folder / "000002", folder / "000002.keep")

    theirs = {"notes.txt", "mine", "2", "best", "000002.keep"}
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
REFUSED = [  # other flags, what its config.json says otherwise, words of the line
    (dict(kl_coef=0.5, rloo_k=2), {}, "kl_coef 0.03 there, 0.5 here; rloo_k 4 there, 2 here; start anew"),
    (dict(total_episodes=128), {}, "total_episodes 96 there, 128 here; start anew, with --overwrite"),
    ({}, dict(mixed_precision="other"), "mixed_precision 'other' there, 'fp32' here"),
    ({}, {"written by": "ZeRO-2"}, "written by 'ZeRO-2' there, 'torch' here"),
    ({}, {"version of the layout": 1}, "version of the layout 1 there, 6 here"),
    (dict(dataset="other.jsonl"), {}, "checksum of rows and models"),
]


@pytest.mark.parametrize("changes, state, words", REFUSED)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_touched(tiny, in_tmp, fails, changes, state, words):
    """Neither is a run of other arguments written over that has no checkpoint."""
    run = copy_of_dead(tiny)
    edit_json(run / "config.json", **state)
    rows = Path(arguments(tiny, "rloo")[1].dataset).read_text().splitlines(keepends=True)
    Path("other.jsonl").write_text("".join(rows[::-1]))
    for what in ("runs/run/checkpoints/000004", "runs/run"):
        before, line = contents(), fails(start, tiny, "rloo", resume=True, **changes)
        assert f"{what} is of another run: " in line and words in line and contents() == before
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew_by_itself(tiny, in_tmp, fails):
    for path in copy_of_dead(tiny).glob("checkpoints/*/policy.pt"):
        path.write_bytes(flip(path.read_bytes()))
    before = contents()
    assert "no checkpoint in runs/run is whole" in fails(start, tiny, "rloo", resume=True)
    assert contents() == before


def test_memory_flags_and_outputs_may_change(tiny, in_tmp):
    config = copy_of_dead(tiny, "rloo") / "config.json"
    config.write_text(config.read_text().replace('"template_date": "2', '"template_date": "1'))  # on another day
    knobs = dict(micro_batch_size=4, rollout_micro_batch_size=8, gradient_checkpointing=True, share_prompts=False)
    start(tiny, "rloo", resume=True, checkpoint_every=3, output_dir="elsewhere/model", **knobs)
    assert_same_curves(read_metrics("runs/run"), read_metrics(whole(tiny, "rloo") / "runs/run"))
    assert Path("elsewhere/model/model.safetensors").exists() and not Path("model").exists()
