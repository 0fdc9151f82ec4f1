"""What a run leaves in TensorBoard and, with --track, in Weights & Biases, read back from an offline run's file."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import wandb
from accelerate.tracking import TensorBoardTracker, WandBTracker
from helpers import read_metrics, run_page
from short_runs import after_row, error_line, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_file import read_runs, table

from rlhf_details import toy
from rlhf_details.plumbing import console
from rlhf_details.plumbing.outputs import trackers

OPTIONS = dict(track=True, wandb_tags=("mine",), num_sample_generations=2, eval_dataset="toy:test", take=24, seed=7)


def test_an_offline_run_holds_metrics_configuration_and_tables(tiny, few_prompts, offline_wandb):
    rows = run_page("train_rloo", tiny, **OPTIONS)
    wandb.teardown()  # Now everything is on the disk.
    (run,), config = read_runs(offline_wandb), json.loads(Path("runs/run/config.json").read_text())
    history = [row for row in run.history if "update" in row]
    assert [row["update"] for row in history] == [0, 1, 2, 3] and run.exit_code == 0
    for row, logged in zip(rows, history, strict=True):
        assert row.items() <= logged.items()
        assert logged["global_step"] == logged["_step"] == row["episode"]  # The axis is episodes.
    assert run.config["seed"] == 7 and run.config["args"]["batch_size"] == 16
    about, described = run.run, trackers.git("describe", "--tags", "--always", "--dirty")
    assert (run.config["commit"], about.run_id) == (config["commit"], config["wandb_id"])
    assert (about.display_name, about.project, about.run_group) == ("run", "rlhf_details", "toy__train_rloo")
    assert [*about.tags] == [*filter(None, ["mine", described[:64]])]
    assert "code" in {artifact.type for artifact in run.artifacts}  # all Python files of the package
    assert [row["prompt"] for row in table(run, "data/rows")] == [
        row["prompt"] for row in toy.rows("prompts", "train")[:8]
    ]
    samples = [json.loads(line) for line in Path("runs/run/samples.jsonl").read_text().splitlines()]
    assert len({row["query"] for row in samples[:4]}) == 4  # and not the k responses to one prompt
    assert table(run, "samples") == [{k: v for k, v in row.items() if k != "update"} for row in samples[-4:]]
    board = EventAccumulator("runs/run").Reload()
    assert set(board.Tags()["scalars"]) == {metric for row in rows for metric in row} | {"global_step"}


def test_lines_are_readable_and_a_resumed_run_keeps_them(in_tmp):
    texts = ["\u27e8Zürich 北京\u27e9", "\ud83d", "a\u2028b\n"]  # half a pair, and a separator of lines
    path = Path("samples.jsonl")
    for update, text in enumerate(texts, 1):
        trackers.append_rows(path, [{"update": update, "response": text}])
    written = path.read_text(encoding="utf-8")
    assert "\u27e8Zürich 北京\u27e9" in written and "\\ud83d" in written
    trackers.cut_rows(path, 3)
    assert path.read_text(encoding="utf-8") == written
    assert [json.loads(line)["response"] for line in open(path, encoding="utf-8")] == texts


BOARD, WANDB = TensorBoardTracker, WandBTracker


@pytest.mark.parametrize(
    "name, owner, method",
    [
        ("tensorboard", BOARD, "log"),
        ("tensorboard", BOARD, "finish"),
        ("wandb", WANDB, "log"),
        ("wandb", WANDB, "log_table"),
        ("wandb", WANDB, "finish"),
        ("wandb", wandb.Run, "log_code"),
    ],
)
@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), wandb.Error("gone")])
def test_a_tracker_that_fails_costs_a_line_and_no_run(
    tiny, few_prompts, offline_wandb, monkeypatch, capsys, name, owner, method, error
):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(owner, method, fail)
    rows = run_page("train_rloo", tiny, **OPTIONS)
    assert [row["update"] for row in rows] == [0, 1, 2, 3]
    assert len(Path("runs/run/samples.jsonl").read_text().splitlines()) == 8
    said = capsys.readouterr()
    assert [x for x in said.out.splitlines() if "has failed" in x] == [
        f"warning: {name} has failed ({console.in_one_line(error)}); metrics.jsonl has what it lacks"
    ]
    assert "error:" not in said.err
    if name == "wandb":  # The other one goes on.
        board = EventAccumulator("runs/run").Reload()
        assert [x.step for x in board.Scalars("update")] == [row["episode"] for row in rows]


@pytest.mark.parametrize("full", ["metrics.jsonl", "samples.jsonl"])
def test_a_full_disk_ends_the_run_with_its_line(tiny, few_prompts, offline_wandb, monkeypatch, capsys, full):
    real = trackers.append_rows
    monkeypatch.setattr(trackers, "append_rows", lambda path, x: real("/dev/full" if path.name == full else path, x))
    with pytest.raises(SystemExit) as end:
        run_page("train_rloo", tiny, **OPTIONS)
    assert "runs/run cannot be written ([Errno 28] No space left on device)" in error_line(capsys, end, code=1)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), wandb.Error("gone")])
def test_wandb_that_does_not_start_is_named(tiny, few_prompts, offline_wandb, monkeypatch, fails, error):
    monkeypatch.setattr(wandb, "init", Mock(side_effect=error))
    assert "--track: Weights & Biases cannot be started (" in fails(run_page, "train_rloo", tiny, track=True)


def test_without_a_login_a_line_says_so(tiny, in_tmp, monkeypatch, fails):
    wandb.teardown()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(in_tmp)), monkeypatch.setenv("NETRC", str(in_tmp / "none"))
    line = fails(run_page, "train_rloo", tiny, track=True)
    assert "--track: Weights & Biases cannot be started (" in line and "run `wandb login`" in line
    wandb.teardown()


def test_a_resumed_run_is_the_same_one(tiny, offline_wandb):
    with after_row(5, lambda run: run.stop("as if something went wrong")), pytest.raises(SystemExit):
        start(tiny, "rloo", track=True)
    wandb.teardown()
    start(tiny, "rloo", track=True, resume=True)
    wandb.teardown()
    first, second = read_runs(offline_wandb)
    assert first.run.run_id == second.run.run_id == json.loads(Path("runs/run/config.json").read_text())["wandb_id"]
    assert [row["update"] for row in second.history if "update" in row] == [5, 6]
    steps = [event.step for event in EventAccumulator("runs/run").Reload().Scalars("objective/kl")]
    assert steps == [row["episode"] for row in read_metrics("runs/run")]  # Nothing is shown twice.
