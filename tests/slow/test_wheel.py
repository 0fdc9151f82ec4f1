"""The package works without the clone: a wheel, installed into a folder, is run from another one."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """run(words) in a folder where nothing of the clone is: (exit code, what it printed)."""
    source, installed, folder = (tmp_path_factory.mktemp(name) for name in ("source", "installed", "elsewhere"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "rlhf_details", source / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", installed, source], check=True)
    (wheel,) = installed.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    (folder / "mine.py").write_text("def brief(prompts, completions): return [-len(text) / 10 for text in completions]")

    def run(words):
        command = [sys.executable, *shlex.split(words)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert str(installed) in run("-c 'import rlhf_details; print(rlhf_details.__path__)'")[1]
    return run


def test_a_wheel_trains_and_evaluates_elsewhere(elsewhere):
    code, said = elsewhere("-m rlhf_details.minimal.rloo")
    assert code == 1 and "error: models/toy/sft is missing: python -m rlhf_details.train_sft makes it" in said
    code, said = elsewhere("-m rlhf_details.train_sft --take 64 --num_layers 1 --eval_dataset None")
    assert code == 0, said
    rewarded = "--reward_model_path None --reward_fn mine.py:brief"
    # At this learning rate the policy changes so much that a sign of health shows: no guide is named that is not here.
    flags = f"{rewarded} --total_episodes 512 --learning_rate 0.05"
    code, said = elsewhere(f"-m rlhf_details.train_rloo {flags}")
    assert code == 0 and "warning: health/" in said and "docs/guides" not in said, said
    (command,) = [line for line in said.splitlines() if line.startswith("evaluate: python ")]
    code, said = elsewhere(command.removeprefix("evaluate: python ") + " --num_examples 8")
    assert code == 0 and "brief" in said, said
