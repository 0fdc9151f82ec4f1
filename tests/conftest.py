"""Fixtures that the tests share. Everything is offline and on the CPU. Functions to import are in helpers.py."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # The suite tests the CPU, also where there is a GPU.
os.environ["HF_HUB_OFFLINE"] = "1"  # A name of the Hub fails at once, and is not asked for again and again.

import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

sys.path.extend(str(Path(__file__).parents[1] / "benchmark" / room) for room in (".", "recipes", "studies", "checks"))
sys.path.insert(0, str(Path(__file__).parent))

from helpers import save_pair, save_ragged

from rlhf_details import toy

# A suite in the background ignores SIGINT, and one under nohup SIGHUP. What it starts would ignore them as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
torch.set_num_threads(1)  # pytest -n starts one worker for each core; more threads would only wait for each other.


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random `policy` and a random `reward`, both with the toy tokenizer."""
    return save_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def ragged(tmp_path_factory):
    """As `tiny`, but the policy often says EOS, so that lengths differ, and the reward model's bias is 0.7."""
    return save_ragged(tmp_path_factory.mktemp("ragged"))


@pytest.fixture(autouse=True)
def quiet():
    """The library's warnings and progress bars are off, as `cli.main` does it for every script."""
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def no_module_of_another_test(monkeypatch, tmp_path):
    """The user's code of one test, in its folder, is not found by the next one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def fails(capsys):
    """fails(function, *args): it must end with exit code 2 and one line "error: ..."; returns the line."""

    def check(function, *args, **kwargs):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            function(*args, **kwargs)
        line = capsys.readouterr().err
        assert end.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1, line
        return line

    return check


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Runs the test in an empty folder, where runs/ and models/ then appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def few_prompts(monkeypatch):
    """The toy tasks with 96 rows each: to tokenise all 4096 would be half of the time of a short run."""
    rows = toy.rows
    for stage, split in toy.SPLITS:
        rows(stage, split, "toy")  # Cached before the name is another function's: one split is made while another is.
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": rows(stage, split, task)[:96])


@pytest.fixture
def offline_wandb(in_tmp, monkeypatch):
    """wandb writes to the test's folder, and forgets it afterwards, because it reads its settings once a process."""
    import wandb

    wandb.teardown()
    for name in ("WANDB_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(in_tmp))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield in_tmp / "wandb"
    wandb.teardown()
