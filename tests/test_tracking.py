"""What --track leaves in Weights & Biases, read back from an offline run's file; and TensorBoard beside it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from conftest import ROOT, ppo_args, read_metrics, rloo_args
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_file import read_offline_run, read_run_file

from rlhf_details import toy, train_ppo, train_rloo

OPTIONS = dict(track=True, wandb_tags=("mine",), num_sample_generations=2, eval_dataset="toy:test", take=24, seed=7)


@pytest.mark.parametrize("script, args", [(train_rloo, rloo_args), (train_ppo, ppo_args)], ids=["rloo", "ppo"])
def test_an_offline_run_holds_metrics_configuration_code_tables_and_data(tiny, offline_wandb, script, args):
    name = script.__name__.rpartition(".")[2]
    script.main(args(tiny, **OPTIONS))
    wandb.teardown()  # so that all is on disk
    run, rows = read_offline_run(offline_wandb), read_metrics("runs/run")
    history = {row["update"]: row for row in run.history if "update" in row}
    assert history.keys() == {0, 1, 2, 3} and run.exit_code == 0
    for row in rows:
        assert {metric: history[row["update"]][metric] for metric in row} == row
        assert history[row["update"]]["global_step"] == row["episode"]
    config = json.loads(Path("runs/run/config.json").read_text())
    assert run.config["seed"] == 7 and run.config["args"]["batch_size"] == 16 and run.config["commit"] == config["commit"]
    assert run.name == "run" and run.project == "rlhf_details" and run.job_type == name and run.id == config["wandb_id"]
    assert run.group == f"toy__{name}"
    described = subprocess.run(["git", "describe", "--tags", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    assert set(run.tags) == {"mine"} | ({described.stdout.strip()} if described.returncode == 0 else set())
    samples = [json.loads(line) for line in Path("runs/run/samples.jsonl").read_text().splitlines()]
    assert run.table("samples") == [{k: v for k, v in row.items() if k != "update"} for row in samples[-4:]]
    data = toy.rows("prompts", "train")[:8]
    assert run.table("data/rows") == data
    lengths = run.column("data/prompt_lengths")[0]
    assert sum(lengths["values"]) == 24 and len(lengths["bins"]) == len(lengths["values"]) + 1
    code = {re.sub(r".*/", "", path): text for path, text in run.code.items()}
    assert code[f"{name}.py"] == (ROOT / f"rlhf_details/{name}.py").read_bytes() and "utils.py" in code
    board = EventAccumulator("runs/run").Reload()
    assert "data/prompt_lengths" in board.Tags()["histograms"]
    assert set(board.Tags()["scalars"]) == {metric for row in rows for metric in row}


def test_the_repository_on_the_hub_is_part_of_the_run(tiny, offline_wandb, monkeypatch):
    from hub_server import Hub, point_at

    with Hub() as server:
        point_at(monkeypatch, server)
        train_rloo.main(rloo_args(tiny, track=True, push_to_hub=True, hub_model_id="it"))
        wandb.teardown()
        run = read_offline_run(offline_wandb)
    assert run.config["hub"] == "someone/it" and "someone/it" in run.summary["hub"]


def test_a_resumed_run_is_the_same_one_and_shows_its_data_once(tiny, offline_wandb):
    options = dict(track=True, checkpoint_every=1, total_episodes=32, take=16)
    train_rloo.main(rloo_args(tiny, **options))
    for later in Path("runs/run/checkpoints/000002").iterdir():
        later.unlink()
    train_rloo.main(rloo_args(tiny, **options, resume=True))
    wandb.teardown()
    first, second = (read_run_file(path) for path in sorted(offline_wandb.glob("offline-run-*/run-*.wandb")))
    assert first.id == second.id and first.table("data/rows") and not second.column("data/prompt_lengths")
    assert [row["update"] for row in second.history if "update" in row] == [2]


@pytest.mark.slow
def test_without_a_login_there_is_one_line_and_nothing_is_trained(tiny, in_tmp):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(in_tmp), "NETRC": str(in_tmp / "no")}
    flags = ["--track", "--sft_model_path", tiny / "policy", "--reward_model_path", tiny / "reward", "--run_name", "r"]
    flags += ["--total_episodes", "256", "--response_length", "4", "--eval_dataset", "None", "--output_dir", "out"]
    command = [sys.executable, str(ROOT / "rlhf_details/train_rloo.py"), *map(str, flags)]
    done = subprocess.run(command, env=env, cwd=in_tmp, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 2 and not Path("out").exists(), done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert "--track" in done.stderr and "wandb login" in done.stderr and "WANDB_MODE=offline" in done.stderr
    assert not Path("runs/r/metrics.jsonl").exists()
