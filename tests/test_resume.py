"""Claims about runs that end before their time: resumed from a checkpoint they become what they would have been, bit for bit."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from conftest import launch, ppo_args, read_metrics, rloo_args
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_rloo import assert_same_curves, without_times

from rlhf_details import runs, toy, train_ppo, train_reward, train_rloo, train_sft, utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CASES = {  # name: options; what comes before the dash is the script
    "rloo": dict(),
    "ppo": dict(),
    "ppo-carries": dict(
        adaptive_kl=True, kl_horizon=50.0, kl_coef=0.2, score_scaling=True, score_norm=True, tf_adam=True,
        num_ppo_epochs=2, num_mini_batches=2, eval_dataset="held_out.jsonl",
    ),
    "ppo-shared": dict(value_model="shared", whiten_rewards=True, num_ppo_epochs=2),
    "ppo-async": dict(async_rollouts=True, num_mini_batches=2),
    "rloo-async": dict(async_rollouts=True),
    "rloo-steps": dict(num_ppo_epochs=2, num_mini_batches=2, eval_dataset="held_out.jsonl", eval_every=2, warmup_ratio=0.5),
    "reward-gain": dict(normalization="gain_bias", tf_adam=True, normalize_samples=16),
    "reward-shift": dict(normalization="mean_shift", lr_schedule="linear"),
    "sft": dict(),
}  # fmt: skip


class Death(BaseException):
    """What nothing catches: it stands for SIGKILL in this process."""


# ---- short runs: 6 updates of 16 episodes or 8 rows, a checkpoint after every second one -----------------------------
@functools.cache
def rows_of(tiny):
    """Folder with prompts.jsonl (20), held_out.jsonl (6), texts.jsonl (27) and comparisons.jsonl (27)."""
    folder, reviews = tiny / "rows", toy.rows("sft", "train")
    folder.mkdir()
    comparisons = [
        {"prompt": reviews[i]["prompt"], "candidates": [r["completion"] for r in reviews[4 * i : 4 * i + 4]], "best": i % 4}
        for i in range(27)
    ]
    prompts = list({row["prompt"]: row for row in toy.rows("prompts", "train")[:60]}.values())
    parts = dict(prompts=prompts[:20], held_out=prompts[20:26], texts=reviews[:27], comparisons=comparisons)
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(tiny, case, **changes):
    """(script, its Args) of a case; the run's folder is runs/run, the model's is model."""
    kind, rows = case.split("-")[0], rows_of(tiny)
    values = dict(checkpoint_every=2, run_name="run", output_dir="model", overwrite=False) | CASES[case] | changes
    if values.get("eval_dataset"):
        values["eval_dataset"] = str(rows / values["eval_dataset"])
    if kind in ("rloo", "ppo"):
        script, make = (train_rloo, rloo_args) if kind == "rloo" else (train_ppo, ppo_args)
        return script, make(
            tiny, **(dict(dataset=str(rows / "prompts.jsonl"), total_episodes=96, num_sample_generations=3) | values)
        )
    few = dict(batch_size=8, micro_batch_size=8, num_train_epochs=2, learning_rate=1e-3, response_length=8)
    if kind == "reward":
        few |= dict(dataset=str(rows / "comparisons.jsonl"), sft_model_path=str(tiny / "policy"))
        return train_reward, train_reward.Args(**(few | values))
    sizes = dict(vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, context_length=256)
    return train_sft, train_sft.Args(**(few | sizes | dict(dataset=str(rows / "texts.jsonl")) | values))


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def start(tiny, case, **changes):
    """Runs a case in the current folder and in this process; however it ends, signals mean what they meant before."""
    script, args = arguments(tiny, case, **changes)
    before, died = handlers(), True
    try:
        result, died = script.main(args), False
    except SystemExit:
        died = False
        raise
    finally:
        after = handlers()
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        assert died or after == before  # where it died the process would be gone
    return result


@contextlib.contextmanager
def after_row(update, act):
    """Within it act(run) happens once the row of an update has been written."""
    real = runs.Run.log

    def log(self, metrics, step):
        real(self, metrics, step)
        if step == update:
            act(self)

    with patch.object(runs.Run, "log", log):
        yield


def die(run):
    """Death, in a process that lives on: what TensorBoard's thread has not written yet would go to the folder of the next test."""
    run.tensorboard.close()
    raise Death


@functools.cache
def whole(tiny, case):
    """Folder in which a case ran to its end."""
    folder = tiny / "whole" / case
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        start(tiny, case)
    return folder


@functools.cache
def dead(tiny, case):
    """Folder in which a case died after the row of update 5; its checkpoints are of updates 2 and 4."""
    folder = tiny / "dead" / case
    folder.mkdir(parents=True)
    with contextlib.chdir(folder), after_row(5, die), pytest.raises(Death):
        start(tiny, case)
    return folder


def copy_of_dead(tiny, case="rloo"):
    """Copies it into the current folder; returns the run's folder."""
    shutil.copytree(dead(tiny, case), ".", dirs_exist_ok=True)
    return Path("runs/run")


def model_of(folder):
    """Bytes of the model's files; only in its arguments, and so in its card, does a resumed run differ."""
    differ = "training_args.json", "README.md"
    return {file.name: file.read_bytes() for file in (Path(folder) / "model").iterdir() if file.name not in differ}


def assert_same_run(folder, other, run="run"):
    """Metrics but for times, sample tables and model are equal, bit for bit."""
    folder, other = Path(folder), Path(other)
    assert without_times(read_metrics(folder / "runs" / run)) == without_times(read_metrics(other / "runs/run"))
    first, second = ((f / "runs" / r / "samples.jsonl").read_text() for f, r in ((folder, run), (other, "run")))
    assert first == second
    first, second = model_of(folder), model_of(other)
    assert first.keys() == second.keys() and "model.safetensors" in first
    assert [name for name in first if first[name] != second[name]] == []


def checkpoints(run="runs/run"):
    """Names in the folder of checkpoints, unfinished ones too."""
    return sorted(path.name for path in Path(run).glob("checkpoints/*"))


def everything(folder="."):
    """{path: bytes} of all files below a folder."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def the_error(capsys, code, error):
    """The one line `error: ...` that a run ended with, and what follows it; checks the exit code."""
    assert error.value.code == code
    text = capsys.readouterr().err
    assert len(re.findall("^error: ", text, re.MULTILINE)) == 1 and "Traceback" not in text, text
    return text[text.index("error: ") :]


# ---- 1. a run that died goes on as if it had not ---------------------------------------------------------------------
SLOW = "ppo-carries", "rloo-steps", "ppo-shared"


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_a_run_that_died_goes_on_as_if_it_had_not(tiny, in_tmp, capsys, case):
    run = copy_of_dead(tiny, case)
    assert [row["update"] for row in read_metrics(run) if row["update"]] == [1, 2, 3, 4, 5] and checkpoints() == [
        "000002",
        "000004",
    ]
    assert not Path("model").exists()
    capsys.readouterr()
    start(tiny, case, resume=True)
    assert f"goes on after update 4 of 6, from {run}/checkpoints/000004" in capsys.readouterr().out
    assert_same_run(".", whole(tiny, case))
    assert checkpoints() == ["000004", "000006"]


def test_what_the_cases_carry_does_move(tiny):
    """Else the test above could not see that it was restored."""
    rows = read_metrics(whole(tiny, "ppo-carries") / "runs/run")
    assert rows[0]["update"] == 0 and len({row["objective/kl_coef"] for row in rows[1:]}) == 6
    state = json.loads((whole(tiny, "ppo-carries") / "runs/run/checkpoints/000006/state.json").read_text())
    assert state["carried"]["moments"]["count"] == 96 and state["carried"]["step"] == state["adam_steps"] == 24
    assert len({row["objective/kl"] for row in read_metrics(whole(tiny, "rloo-async") / "runs/run")}) >= 5
    assert (whole(tiny, "rloo-async") / "runs/run/checkpoints/000004/pending.safetensors").exists()
    assert not (whole(tiny, "rloo-async") / "runs/run/checkpoints/000006/pending.safetensors").exists()
    samples = (whole(tiny, "rloo") / "runs/run/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in samples] == [1] * 4 + [4] * 4 + [6] * 4


def test_two_deaths_and_an_end_that_was_reached_before(tiny, in_tmp):
    """Died after updates 5 and 3 + 1, then resumed once more when all was done: each time nothing changes."""
    run = copy_of_dead(tiny, "rloo-async")
    shutil.rmtree(run / "checkpoints/000004")
    with after_row(4, die), pytest.raises(Death):
        start(tiny, "rloo-async", resume=True)
    assert [row["update"] for row in read_metrics(run)] == [1, 2, 3, 4] and checkpoints() == ["000002"]
    start(tiny, "rloo-async", resume=True)
    assert_same_run(".", whole(tiny, "rloo-async"))
    model = model_of(".")
    shutil.rmtree("model")  # as if it had died while saving
    start(tiny, "rloo-async", resume=True)
    assert_same_run(".", whole(tiny, "rloo-async"))
    assert model_of(".") == model
    assert len(json.loads((run / "config.json").read_text())["resumed"]) == 3


# ---- 2. dying while a checkpoint is written --------------------------------------------------------------------------
def dying_at(stage):
    """A patch under which the checkpoint of update 4 is not finished."""
    real_save, real_digest, real_sync = runs.save_file, runs.digest, utils.sync

    def save_file(content, path, *rest):
        if path.parent.name == "000004.partial" and stage == path.stem:
            path.write_bytes(b"half of it")
            raise Death
        real_save(content, path, *rest)

    def digest(path):
        if path.parent.name == "000004.partial" and stage == "manifest":
            raise Death
        return real_digest(path)

    def sync(path):
        real_sync(path)
        if stage == "rename" and path.name == "000004.partial":
            raise Death
        if stage == "older ones" and path.name == "checkpoints" and (path / "000004").exists():
            raise Death

    return patch.multiple(runs, save_file=save_file, digest=digest), patch.object(utils, "sync", sync)


@pytest.mark.parametrize(
    "stage", ["weights", *(pytest.param(x, marks=pytest.mark.slow) for x in ("exp_avg_sq", "manifest")), "rename", "older ones"]
)
def test_dying_while_a_checkpoint_is_written(tiny, in_tmp, capsys, stage):
    in_runs, in_utils = dying_at(stage)
    with in_runs, in_utils, pytest.raises(Death):
        start(tiny, "rloo", checkpoint_every=1)
    finished = stage == "older ones"
    assert checkpoints() == ["000002", "000003", "000004" if finished else "000004.partial"]
    newest, damaged = runs.newest_checkpoint("runs/run")
    assert newest.name == ("000004" if finished else "000003") and damaged == []
    start(tiny, "rloo", checkpoint_every=1, resume=True)
    assert f"goes on after update {4 if finished else 3} of 6" in capsys.readouterr().out
    assert_same_run(".", whole(tiny, "rloo"))
    assert checkpoints() == ["000005", "000006"]


def test_what_was_left_unfinished_is_gone_after_resuming(tiny, in_tmp):
    """Also where another --checkpoint_every never writes that one again."""
    run = copy_of_dead(tiny)
    shutil.copytree(run / "checkpoints/000004", run / "checkpoints/000005.partial")
    start(tiny, "rloo", resume=True)
    assert checkpoints() == ["000004", "000006"]


# ---- 3. which checkpoints there are ----------------------------------------------------------------------------------
def test_the_last_two_are_kept_and_one_is_written_at_the_end(tiny, in_tmp):
    assert checkpoints(whole(tiny, "rloo") / "runs/run") == ["000004", "000006"]
    start(tiny, "rloo", checkpoint_every=5)
    assert checkpoints() == ["000005", "000006"]
    state = json.loads(Path("runs/run/checkpoints/000005/state.json").read_text())
    assert state["update"] == 5 and state["args"]["checkpoint_every"] == 5


def test_none_are_written_without_and_they_change_nothing(tiny, in_tmp):
    start(tiny, "rloo-async", checkpoint_every=0)
    assert checkpoints() == []
    assert_same_run(".", whole(tiny, "rloo-async"))


def test_a_new_run_leaves_no_checkpoint_of_the_one_it_replaces(tiny, in_tmp):
    copy_of_dead(tiny)
    with after_row(1, die), pytest.raises(Death):
        start(tiny, "rloo", overwrite=True)
    assert checkpoints() == [] and [row["update"] for row in read_metrics("runs/run")] == [1]


# ---- 4. damage -------------------------------------------------------------------------------------------------------
FILES = ["weights.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "pending.safetensors", "state.json"]


def flip(path, place=-5):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", [cut, flip, Path.unlink])
def test_a_damaged_file_is_found_and_named(tiny, in_tmp, file, how):
    newest = copy_of_dead(tiny, "rloo-async") / "checkpoints/000004"
    assert runs.newest_checkpoint("runs/run") == (newest, [])
    how(newest / file)
    folder, (line,) = runs.newest_checkpoint("runs/run")
    assert folder.name == "000002" and line == f"--resume: {newest} is damaged ({file}): passed over"


@pytest.mark.parametrize("content", [None, "", "{", "null", "[]", "{}", "3", '{"state.json": 7}', "\xff"])
def test_a_damaged_manifest_is_found_and_named(tiny, in_tmp, content):
    newest = copy_of_dead(tiny) / "checkpoints/000004"
    (newest / "manifest.json").unlink()
    if content is not None:
        (newest / "manifest.json").write_bytes(content.encode("latin-1"))
    folder, (line,) = runs.newest_checkpoint("runs/run")
    assert folder.name == "000002" and str(newest) in line and "manifest.json" in line


@pytest.mark.parametrize("how", [cut, flip])
def test_past_a_damaged_checkpoint_the_older_one_is_taken(tiny, in_tmp, capsys, how):
    run = copy_of_dead(tiny)
    how(run / "checkpoints/000004/weights.safetensors")
    with after_row(3, die), pytest.raises(Death):
        start(tiny, "rloo", resume=True)
    out = capsys.readouterr().out
    assert out.count("is damaged") == 1 and f"{run}/checkpoints/000004 is damaged (weights.safetensors): passed over" in out
    assert "goes on after update 2 of 6" in out and checkpoints() == ["000002", "000004.damaged"]
    assert [row["update"] for row in read_metrics(run)] == [1, 2, 3]
    start(tiny, "rloo", resume=True)
    assert_same_run(".", whole(tiny, "rloo"))


def test_where_all_are_damaged_it_starts_anew_only_if_told_to(tiny, in_tmp, capsys):
    run = copy_of_dead(tiny, "rloo-steps")
    for name in ("000002", "000004"):
        cut(run / f"checkpoints/{name}/exp_avg.safetensors")
    before = everything()
    with pytest.raises(SystemExit) as error:
        start(tiny, "rloo-steps", resume=True, overwrite=False)
    assert f"no checkpoint in {run} is whole" in the_error(capsys, 2, error) and everything() == before
    next_second()
    start(tiny, "rloo-steps", resume=True, overwrite=True)
    out = capsys.readouterr().out
    assert out.count("is damaged (exp_avg.safetensors): passed over") == 2 and "starts at the beginning" in out
    assert_same_run(".", whole(tiny, "rloo-steps"))
    assert scalar_steps(run, "objective/kl") == [1, 2, 3, 4, 5, 6]


# ---- 5. what may change, and what is refused -------------------------------------------------------------------------
REFUSED = [
    ("rloo", dict(learning_rate=2e-3), ["learning_rate 0.001 there, 0.002 here"]),
    ("rloo", dict(kl_coef=0.5, rloo_k=2), ["kl_coef", "0.5 here", "rloo_k 4 there, 2 here"]),
    ("rloo", dict(seed=2), ["seed 1 there, 2 here"]),
    ("ppo", dict(total_episodes=128), ["total_episodes 96 there, 128 here"]),
    ("rloo-async", dict(async_rollouts=False), ["async_rollouts True there, False here"]),
    ("reward-shift", dict(num_train_epochs=3), ["num_train_epochs 2 there, 3 here"]),
    ("sft", dict(completion_only=True), ["completion_only False there, True here"]),
]


@pytest.mark.parametrize("case, change, parts", REFUSED)
def test_other_arguments_are_refused_and_nothing_is_touched(tiny, in_tmp, capsys, case, change, parts):
    copy_of_dead(tiny, case)
    before = everything()
    with pytest.raises(SystemExit) as error:
        start(tiny, case, resume=True, **change)
    text = the_error(capsys, 2, error)
    assert text.count("\n") == 1 and all(part in text for part in ["runs/run/checkpoints/000004", *parts])
    assert everything() == before


def test_another_precision_is_refused(tiny, in_tmp, capsys):
    folder = copy_of_dead(tiny) / "checkpoints/000004"
    state, manifest = folder / "state.json", folder / "manifest.json"
    now = json.loads(state.read_text())["mixed_precision"]
    state.write_text(state.read_text().replace(f'"mixed_precision": "{now}"', '"mixed_precision": "other"'))
    files = json.loads(manifest.read_text()) | {"state.json": [state.stat().st_size, runs.digest(state)]}
    manifest.write_text(json.dumps(files))
    before = everything()
    with pytest.raises(SystemExit) as error:
        start(tiny, "rloo", resume=True)
    assert f"mixed_precision 'other' there, {now!r} here" in the_error(capsys, 2, error) and everything() == before


@pytest.mark.parametrize("case", ["rloo", "reward-shift"])
def test_other_rows_are_refused(tiny, in_tmp, capsys, case):
    file = Path(arguments(tiny, case)[1].dataset)
    text = file.read_text()
    copy_of_dead(tiny, case)
    before = everything()
    try:
        lines = text.splitlines()
        file.write_text("\n".join([*lines[1:], lines[0]]))
        with pytest.raises(SystemExit) as error:
            start(tiny, case, resume=True)
    finally:
        file.write_text(text)
    assert f"other rows than --dataset {file} holds now" in the_error(capsys, 2, error) and everything() == before


@pytest.mark.parametrize("case, more", [("rloo", dict(share_prompts=False)), ("ppo-carries", {})])
def test_memory_knobs_and_outputs_may_change(tiny, in_tmp, case, more):
    copy_of_dead(tiny, case)
    knobs = dict(micro_batch_size=4, rollout_micro_batch_size=8, gradient_checkpointing=True)
    start(tiny, case, resume=True, checkpoint_every=3, output_dir="elsewhere/model", **knobs, **more)
    ours, expected = (without_times(read_metrics(folder / "runs/run")) for folder in (Path("."), whole(tiny, case)))
    for row, other in zip(ours, expected, strict=True):
        assert row.keys() == other.keys()
        assert {name: row[name] for name in row} == {name: pytest.approx(other[name], rel=1e-5, abs=1e-5) for name in row}
    assert Path("elsewhere/model/model.safetensors").exists() and not Path("model").exists()


# ---- 6. logs ---------------------------------------------------------------------------------------------------------
def scalar_steps(run, name):
    """Steps of a scalar as TensorBoard's own reader gives them."""
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    return [event.step for event in reader.Scalars(name)]


def next_second():
    """TensorBoard reads files in the order of their names, which hold the second."""
    time.sleep(1.01 - time.time() % 1)


def test_logs_are_cut_after_the_checkpoint(tiny, in_tmp):
    run = copy_of_dead(tiny)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"update": 6, "episode": 96, "torn')
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"update": 4, "query": "la')
    next_second()
    start(tiny, "rloo", resume=True)
    assert_same_run(".", whole(tiny, "rloo"))
    assert scalar_steps(run, "objective/kl") == [1, 2, 3, 4, 5, 6]
    config = json.loads((run / "config.json").read_text())
    (earlier,) = config["resumed"]
    assert earlier == {key: config[key] for key in ("commit", "num_processes")} and config["args"]["resume"] is True


def test_a_run_in_the_place_of_another_shows_its_own_numbers_in_tensorboard(tiny, in_tmp):
    run = copy_of_dead(tiny)
    next_second()
    start(tiny, "rloo", overwrite=True, total_episodes=48)
    assert scalar_steps(run, "objective/kl") == [1, 2, 3]
    assert json.loads((run / "config.json").read_text())["resumed"] == []


def test_times_add_up(tiny, in_tmp):
    run = copy_of_dead(tiny)
    before = read_metrics(run)[3]["time/from_scratch"]
    start(tiny, "rloo", resume=True)
    assert [row["time/from_scratch"] for row in read_metrics(run)][3] == before
    assert read_metrics(run)[4]["time/from_scratch"] > before


def test_without_a_name_the_newest_run_of_that_kind_goes_on(tiny, in_tmp, capsys):
    run, kind = copy_of_dead(tiny), "prompts.jsonl__train_rloo"
    others = [f"{kind}__1__20240101-000000", f"{kind}__2__20260101-000000", f"{kind}__11__20260101-000000"]
    others += ["held_out.jsonl__train_rloo__1__20260101-000000", "prompts.jsonl__train_ppo__1__20260101-000000"]
    for name in others:
        (run.parent / name).mkdir()
    run.rename(run.parent / f"{kind}__1__20250101-000000")
    start(tiny, "rloo", resume=True, run_name=None, exp_name="train_rloo")
    assert f"from runs/{kind}__1__20250101-000000/checkpoints/000004" in capsys.readouterr().out
    assert_same_run(".", whole(tiny, "rloo"), f"{kind}__1__20250101-000000")
    assert not any(list((run.parent / name).iterdir()) for name in others) and len(list(run.parent.iterdir())) == 6


@pytest.mark.parametrize("name", ["run", None])
def test_where_nothing_is_to_be_resumed_a_run_starts(tiny, in_tmp, capsys, name):
    start(tiny, "rloo", resume=True, run_name=name, total_episodes=16)
    assert "starts at the beginning" in capsys.readouterr().out
    (run,) = Path("runs").iterdir()
    assert [row["update"] for row in read_metrics(run)] == [1] and checkpoints(run) == ["000001"]
    assert json.loads((run / "config.json").read_text())["resumed"] == []


# ---- 7. signals ------------------------------------------------------------------------------------------------------
in_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main one"
)


@in_main_thread
@pytest.mark.parametrize("number, code, case", [(signal.SIGTERM, 143, "rloo"), (signal.SIGINT, 130, "ppo-async"), (15, 143, "sft")])
def test_a_signal_stops_after_the_update_with_a_checkpoint(tiny, in_tmp, capsys, number, code, case):
    with after_row(3, lambda run: os.kill(os.getpid(), number)), pytest.raises(SystemExit) as error:
        start(tiny, case, checkpoint_every=0)
    out = capsys.readouterr()
    name = signal.Signals(number).name
    assert error.value.code == code and out.err == "" and f"{name}: stopped after update 3" in out.out
    assert f"{name}: will stop after this update, with a checkpoint" in out.out
    assert checkpoints() == ["000003"] and [row["update"] for row in read_metrics("runs/run")] == [1, 2, 3]
    assert not Path("model").exists()
    start(tiny, case, checkpoint_every=0, resume=True)
    assert_same_run(".", whole(tiny, case))


@in_main_thread
def test_a_second_sigterm_changes_nothing(tiny, in_tmp):
    """A scheduler and the launcher may both send one."""
    send = lambda run: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]  # noqa: E731
    with after_row(3, send), pytest.raises(SystemExit) as error:
        start(tiny, "rloo", checkpoint_every=0)
    assert error.value.code == 143 and checkpoints() == ["000003"]


@in_main_thread
def test_a_signal_while_the_processes_agree_is_heard_after_the_next_update(tiny, in_tmp, monkeypatch):
    gather = Accelerator.gather

    def interrupted(self, x):
        result = gather(self, x)
        if x.numel() == 1 and x.dtype == torch.int64 and len(read_metrics("runs/run")) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(Accelerator, "gather", interrupted)
    with pytest.raises(SystemExit) as error:
        start(tiny, "rloo", checkpoint_every=2)
    assert error.value.code == 143 and checkpoints() == ["000002", "000003"]


@in_main_thread
def test_a_second_ctrl_c_acts_at_once(tiny, in_tmp):
    def twice(run):
        os.kill(os.getpid(), signal.SIGINT)
        assert run.signal == signal.SIGINT and signal.getsignal(signal.SIGINT) != run.on_signal
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    try:
        with after_row(2, twice), pytest.raises(KeyboardInterrupt):
            start(tiny, "rloo", checkpoint_every=0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoints() == [] and [row["update"] for row in read_metrics("runs/run")] == [1, 2]


@in_main_thread
@pytest.mark.parametrize("case", ["rloo-steps", "ppo-carries"])
def test_a_signal_in_the_last_update_still_leaves_the_model_to_a_resumed_run(tiny, in_tmp, case):
    with after_row(6, lambda run: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit):
        start(tiny, case)
    assert checkpoints() == ["000004", "000006"] and not Path("model").exists()
    result = start(tiny, case, resume=True)
    assert_same_run(".", whole(tiny, case))
    for when, row in (("before", 0), ("after", -1)):
        row = read_metrics("runs/run")[row]
        assert result[when] == {name: row[name] for name in row if name.startswith("eval/")} != {}


# ---- 8. wandb --------------------------------------------------------------------------------------------------------
def test_wandb_goes_on_with_the_same_run(tiny, in_tmp, offline_wandb):
    with after_row(3, lambda run: run.stop("as if something went wrong")), pytest.raises(SystemExit):
        start(tiny, "rloo", track=True)
    first = json.loads(Path("runs/run/config.json").read_text())["wandb_id"]
    seen = []
    with after_row(6, lambda run: seen.append(run.wandb.id)):
        start(tiny, "rloo", track=True, resume=True)
    assert first and seen == [first] == [json.loads(Path("runs/run/config.json").read_text())["wandb_id"]]
    assert len([path for path in Path("wandb").glob("offline-run-*") if path.name.endswith(first)]) == 2


# ---- 9. and 10. real processes, really killed ------------------------------------------------------------------------
STARTER = """
import json, os, signal, sys
from rlhf_details import runs, train_ppo, train_reward, train_rloo, utils
script, values = json.loads(open(sys.argv[1]).read())
log = runs.Run.log
def deadly(self, metrics, step):
    log(self, metrics, step)
    if self.main and str(step) == os.environ.get("DIES_AFTER"):
        os.kill(os.getpid(), signal.SIGKILL)
runs.Run.log = deadly
script = dict(train_ppo=train_ppo, train_reward=train_reward, train_rloo=train_rloo)[script]
script.main(script.Args(**values))
utils.leave_process_group()
"""


def written(folder, tiny, case, **changes):
    """Writes a starter of a case and its arguments into a folder; returns their paths."""
    folder.mkdir(exist_ok=True)
    script, args = arguments(tiny, case, **changes)
    name = f"args{len(list(folder.glob('args*')))}.json"
    (folder / "start.py").write_text(STARTER)
    (folder / name).write_text(json.dumps([script.__name__.rpartition(".")[2], vars(args)]))
    return str(folder / "start.py"), str(folder / name)


def killed_when(folder, files, condition):
    """Starts, waits for a condition, and kills with SIGKILL; returns whether the process was still running."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with open(folder / "output", "a") as output:
        process = subprocess.Popen([sys.executable, *files], cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            end = time.time() + 120
            while process.poll() is None and not condition():
                assert time.time() < end
        finally:
            process.kill()
        return process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rloo", "ppo-async", "ppo-carries"])
def test_three_kills_change_nothing(tiny, tmp_path, case):
    options = dict(total_episodes=16 * 14, checkpoint_every=1)
    file = written(tmp_path / "whole", tiny, case, **options)
    done = launch(file[0], file[1:], cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "killed"
    first, again = written(folder, tiny, case, **options), written(folder, tiny, case, resume=True, **options)
    metrics, parts = folder / "runs/run/metrics.jsonl", folder / "runs/run/checkpoints"

    def rows(n):
        return lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) >= n

    def unfinished():
        return any(int(path.name[:6]) > 6 for path in parts.glob("*.partial"))

    assert killed_when(folder, first, rows(3))
    assert killed_when(folder, again, unfinished)
    assert killed_when(folder, again, rows(11))
    done = launch(again[0], again[1:], cwd=folder)
    assert done.returncode == 0 and "goes on after update" in done.stdout, done.stderr
    assert_same_run(folder, tmp_path / "whole")
    assert len(json.loads((folder / "runs/run/config.json").read_text())["resumed"]) == 3
    assert scalar_steps(folder / "runs/run", "objective/kl") == list(range(1, 15))
    assert checkpoints(folder / "runs/run") == ["000013", "000014"]


def signalled(folder, command, number, close_output=False):
    """Starts a long run, sends its launcher a signal after some updates; returns (exit code, what it said)."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    metrics, end = folder / "runs/run/metrics.jsonl", time.time() + 120
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 3):
                assert process.poll() is None and time.time() < end, (folder / "errors").read_text()
                time.sleep(0.05)
            if close_output:
                process.stdout.close()
            process.send_signal(number)
            return process.wait(60), "" if close_output else process.stdout.read()
        finally:
            process.kill()


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_though_tee_is_gone(tiny, tmp_path):
    """`train .. | tee log`: the terminal interrupts both, so that nobody reads what the run says."""
    file = written(tmp_path, tiny, "rloo", total_episodes=16 * 1000, checkpoint_every=0)
    code, _ = signalled(tmp_path, [sys.executable, *file], signal.SIGINT, close_output=True)
    assert code == 130, (tmp_path / "errors").read_text()
    (checkpoint,) = checkpoints(tmp_path / "runs/run")
    assert read_metrics(tmp_path / "runs/run")[-1]["update"] == int(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rloo", "ppo-async"])
def test_a_signal_to_the_launcher_of_two_leaves_a_checkpoint(tiny, tmp_path, case):
    file = written(tmp_path, tiny, case, total_episodes=16 * 1000, checkpoint_every=0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    code, said = signalled(tmp_path, [*torchrun, *file], signal.SIGTERM)
    assert code != 0 and "SIGTERM: stopped after update" in said, (tmp_path / "errors").read_text()
    (checkpoint,) = checkpoints(tmp_path / "runs/run")
    assert runs.newest_checkpoint(tmp_path / "runs/run")[0].name == checkpoint
    assert read_metrics(tmp_path / "runs/run")[-1]["update"] == int(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rloo-steps", "ppo-carries", "ppo-async", "reward-gain"])
def test_a_run_goes_on_with_another_number_of_processes(tiny, tmp_path, case):
    """With 1 process and then 2, and the other way round: the curve is that of 1."""
    changes = dict(learning_rate=3e-4)
    file = written(tmp_path / "whole", tiny, case, **changes)
    done = launch(file[0], file[1:], cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    for before, after in ((1, 2), (2, 1)):
        folder = tmp_path / f"{before}-{after}"
        first, again = written(folder, tiny, case, **changes), written(folder, tiny, case, resume=True, **changes)
        done = launch(first[0], first[1:], before, cwd=folder, DIES_AFTER="5")
        assert done.returncode not in (0, 2) and checkpoints(folder / "runs/run") == ["000002", "000004"], done.stderr
        done = launch(again[0], again[1:], after, cwd=folder)
        assert done.returncode == 0 and "goes on after update 4 of 6" in done.stdout, done.stderr
        rows, expected = read_metrics(folder / "runs/run"), read_metrics(tmp_path / "whole/runs/run")
        assert all(row.pop("val/logprob_gap", 0) < 1e-4 for row in rows + expected)  # what is left of rounding
        assert_same_curves(rows, expected)
        config = json.loads((folder / "runs/run/config.json").read_text())
        assert config["num_processes"] == after and [start["num_processes"] for start in config["resumed"]] == [before]
