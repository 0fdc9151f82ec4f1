"""Fixtures shared by the tests: tiny random models on disk, and short runs of the scripts. Everything is offline and on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
)

from rlhf_details import toy, train_ppo, train_rloo

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the suite tests the CPU path, also where there is a GPU
torch.set_num_threads(1)  # pytest -n starts one worker a core; more threads on these small models only wait for each other
ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmark"))  # whose files import each other


def tiny_config(**changes):
    """A GPT-NeoX configuration over the toy vocabulary, small enough for a run of ten updates in a second or two."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
    tokenizer = toy.tokenizer()
    ids = dict(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPTNeoXConfig(**(sizes | ids | changes))


def save_pair(folder, **changes):
    """Writes `folder`/policy and `folder`/reward, random weights large enough that responses and scores differ."""
    torch.manual_seed(0)
    config = tiny_config(initializer_range=0.2, **changes)
    GPTNeoXForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    GPTNeoXForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        toy.tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder with a random `policy` and a random `reward`, both with the toy tokenizer."""
    return save_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Runs the test in an empty folder, where runs/ and models/ then appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def offline_wandb(in_tmp, monkeypatch):
    """wandb writes to the test's folder, and forgets it afterwards: it reads its settings once a process."""
    import wandb

    wandb.teardown()
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(in_tmp),
        "WANDB_DATA_DIR": str(in_tmp),
    }.items():
        monkeypatch.setenv(name, value)
    yield in_tmp / "wandb"
    wandb.teardown()


def rloo_args(tiny, **changes):
    """Args of a short RLOO run on the tiny models: 3 updates of 16 episodes, k = 4, responses of 8 tokens, 256 prompts."""
    values = dict(
        sft_model_path=str(tiny / "policy"), reward_model_path=str(tiny / "reward"), total_episodes=48, batch_size=16, rloo_k=4,
        response_length=8, temperature=1.0, num_ppo_epochs=1, num_mini_batches=1, learning_rate=1e-3, num_sample_generations=0,
        run_name="run", overwrite=True, take=256,
    )  # fmt: skip
    return train_rloo.Args(**(values | changes))


def read_metrics(run_folder):
    """Rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_folder) / "metrics.jsonl").read_text().splitlines()]


def run_rloo(tiny, **changes):
    """Runs train_rloo.main in this process; returns its rows of metrics."""
    return read_metrics(train_rloo.main(rloo_args(tiny, **changes))["run"])


def ppo_args(tiny, **changes):
    """Args of a short PPO run on the tiny models: 3 updates of 16 episodes, responses of 8 tokens, one pass, 256 prompts."""
    values = dict(
        sft_model_path=str(tiny / "policy"), reward_model_path=str(tiny / "reward"), total_episodes=48, batch_size=16,
        response_length=8, temperature=1.0, num_ppo_epochs=1, num_mini_batches=1, learning_rate=1e-3, num_sample_generations=0,
        run_name="run", overwrite=True, take=256,
    )  # fmt: skip
    return train_ppo.Args(**(values | changes))


def run_ppo(tiny, **changes):
    """Runs train_ppo.main in this process; returns its rows of metrics."""
    return read_metrics(train_ppo.main(ppo_args(tiny, **changes))["run"])


def launch(script, flags, processes=1, cwd=None, **env):
    """Starts a script with torchrun on `processes` CPU processes (1: plain python); returns the CompletedProcess."""
    command = [sys.executable, str(ROOT / "rlhf_details" / script), *map(str, flags)]
    if processes > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = torchrun + command[1:]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
