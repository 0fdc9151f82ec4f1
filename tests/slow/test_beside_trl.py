"""examples/trl: a command of ours, carried out by TRL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def by_trl(script, folder, flags=""):
    """Runs two updates of eight responses; returns (exit code, what it printed)."""
    pytest.importorskip("trl", minversion="1.16")
    words = f"{script} --sft_model_path {folder}/policy --reward_model_path {folder}/reward --batch_size 8"
    words += f" --total_episodes 16 --response_length 8 --run_name trl --output_dir out {flags}"
    command = [sys.executable, str(ROOT / "examples/trl/by_trl.py"), *words.split()]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("flags", ["", "--reward_model_path None --reward_fn mine.py:f"])
@pytest.mark.parametrize("script", ["train_rloo.py", "train_grpo.py"])
def test_trl_trains_by_our_command_and_logs_as_we_do(script, flags, ragged, in_tmp):
    Path("mine.py").write_text("def f(completions, prompts): return [len(text) / 10 for text in completions]\n")
    code, said = by_trl(script, ragged, flags)
    assert code == 0, said
    rows = [json.loads(line) for line in Path("runs/trl/metrics.jsonl").read_text().splitlines()]
    assert [(row["update"], row["episode"]) for row in rows] == [(1, 8), (2, 16)]
    # Before the first step the policy is the reference.
    assert abs(rows[0]["objective/kl"]) < 1e-4 < abs(rows[1]["objective/kl"]) and rows[0]["time/update"] > 0
    before, after = load_file(ragged / "policy/model.safetensors"), load_file("out/model.safetensors")
    assert any((after[name] != before[name]).any() for name in after)


def test_a_setting_that_trl_does_not_have_is_refused(ragged, in_tmp):
    code, said = by_trl("train_rloo.py", ragged, "--num_ppo_epochs 2")
    assert code == 1 and "error: --num_ppo_epochs 2: is not translated for TRL" in said
