"""The stages as a user starts them, from the command line: on two processes, from nothing, tracked, to their ends."""

import csv
import json
import os
from pathlib import Path

import pytest
from helpers import assert_same_curves, launch, read_metrics
from short_runs import write_rows
from wandb_file import column, read_runs

from rlhf_details import toy

pytestmark = pytest.mark.slow


def as_words(**flags):
    """A command line of flags; True stands for a switch."""
    return [word for name, x in flags.items() for word in ((f"--{name}",) if x is True else (f"--{name}", x))]


def test_an_evaluation_is_the_same_on_two_processes(tiny, in_tmp):
    """13 prompts make unequal shares."""
    rows = write_rows("rows.jsonl", toy.rows("sft", "train")[:13])
    flags = dict(dataset=rows, policy_path=tiny / "policy", reward_model_path=tiny / "reward", judge="reward_model")
    flags |= dict(ref_model_path=tiny / "policy", response_length=6)
    summaries, tables = [], []
    for processes in (1, 2):
        done = launch("evaluate.py", as_words(**flags, output_dir=processes), processes, cwd=in_tmp)
        assert done.returncode == 0 and done.stdout.count("Model win rate:") == 1, done.stderr[-3000:]
        summaries.append(json.loads(Path(str(processes), "summary.json").read_text()))
        tables.append(list(csv.DictReader(open(f"{processes}/samples.csv", newline="", encoding="utf-8"))))
    assert [summary["num_processes"] for summary in summaries] == [1, 2]
    said = [[(row["response"], row["opponent_response"], row["verdict"]) for row in table] for table in tables]
    assert said[0] == said[1]
    one, two = (summary["metrics"] for summary in summaries)
    assert one["win_rate"] == two["win_rate"]
    for side in ("policy", "opponent"):
        for name, figure in one[side].items():
            assert two[side][name] == pytest.approx(figure, rel=1e-4, abs=1e-4), name


def test_both_are_launched_once_tracked_and_the_same_on_two_processes(tiny, tmp_path):
    pairs = [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": "we ."} for r in toy.rows("sft", "train")[:8]
    ]
    shared = dict(dataset=write_rows(tmp_path / "pairs.jsonl", pairs), sft_model_path=tiny / "policy", track=True)
    flags = {f"reward.{name}": x for name, x in (shared | dict(batch_size=4, learning_rate=1e-2)).items()}
    policy = shared | dict(batch_size=8, total_episodes=16, response_length=8)
    flags |= {f"policy.{name}": x for name, x in policy.items()}
    runs = []
    for processes, words in ((1, "one process in fp32"), (2, "2 processes (DDP) in fp32")):
        folder = tmp_path / str(processes)
        folder.mkdir()
        wandb = dict(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(folder), WANDB_DATA_DIR=str(folder))
        done = launch("train_both.py", as_words(**flags), processes, cwd=folder, **wandb)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count(words) == 2 and len(list((folder / "runs").iterdir())) == 2
        found = {run.run.job_type: run for run in read_runs(folder / "wandb")}
        assert found.keys() == {"train_reward", "train_ppo"} and column(found["train_reward"], "train/rm/loss")
        (run,) = (folder / "runs").glob("*train_ppo*")
        runs.append(read_metrics(run))
    assert_same_curves(*runs)


# ---- the embedded tasks ----------------------------------------------------------------------------------------------
def test_missing_stages_are_trained_once_by_the_main_process_and_the_default_runs_are_healthy(tmp_path):
    """From nothing on two processes, then RLOO and PPO with no arguments to their ends, and their evaluation."""
    first = launch("train_rloo.py", as_words(total_episodes=512), 2, cwd=tmp_path)
    assert first.returncode == 0, first.stderr[-3000:]
    assert first.stdout.count("does not exist yet") == 2 and "2 processes (DDP) in fp32" in first.stdout
    assert "FutureWarning" not in first.stderr, first.stderr[-3000:]
    for script, num_updates in (("train_rloo", 100), ("train_ppo", 40)):
        done = launch(f"{script}.py", as_words(run_name=script, overwrite=True), cwd=tmp_path)
        assert done.returncode == 0 and "does not exist yet" not in done.stdout, done.stderr[-3000:]
        assert "warning: health/" not in done.stdout, done.stdout[-3000:]
        rows = read_metrics(tmp_path / "runs" / script)
        assert [row["update"] for row in rows] == list(range(num_updates + 1))
        assert not [name for row in rows for name in row if name.startswith("health/") and row[name]]
        assert rows[-1]["eval/objective/gold"] > rows[0]["eval/objective/gold"] + 0.5
    done = launch("evaluate.py", [], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "runs/evaluate__models_toy_rloo/summary.json").read_text())
    assert summary["metrics"]["win_rate"]["low"] > 0.5


def test_a_verifiable_reward_teaches_the_sums(tmp_path):
    """From nothing to above nine right answers in ten, on sums never trained on, without a reward model."""
    done = launch("train_rloo.py", as_words(dataset="toy-sum", run_name="sums"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_metrics(tmp_path / "runs/sums")
    before, after = (row["eval/objective/verifiable_correct_rate"] for row in (rows[0], rows[-1]))
    assert before < 0.7 and after > 0.9 and not (tmp_path / "models/toy-sum/reward").exists()


# ---- Weights & Biases ------------------------------------------------------------------------------------------------
def tracked(tiny):
    """The flags of a short tracked run."""
    flags = dict(sft_model_path=tiny / "policy", reward_model_path=tiny / "reward", track=True, run_name="run")
    return as_words(**flags, total_episodes=16, batch_size=16, response_length=8, output_dir="model")


def test_without_a_login_there_is_one_line_and_nothing_is_trained(tiny, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    home = dict(HOME=str(tmp_path), NETRC=str(tmp_path / "no"))
    done = launch("train_rloo.py", tracked(tiny), cwd=tmp_path, **home)
    assert done.returncode == 2 and not (tmp_path / "model").exists(), done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in ("--track", "wandb login", "WANDB_MODE=offline"))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


def test_no_key_of_the_environment_is_written_down(tiny, tmp_path):
    secrets = dict(WANDB_API_KEY="0123456789abcdef" * 2 + "deadbeef", HF_TOKEN="hf_SECRET", OPENAI_API_KEY="sk-SECRET")
    done = launch("train_rloo.py", tracked(tiny), cwd=tmp_path, WANDB_MODE="offline", **secrets)
    assert done.returncode == 0, done.stderr[-2000:]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written) and len(written) > 10
    for text in [done.stdout.encode(), done.stderr.encode(), *(path.read_bytes() for path in written)]:
        assert not any(secret.encode() in text for secret in secrets.values())
