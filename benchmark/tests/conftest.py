"""Fixtures of the tests of the benchmark's own tools. They need the extras `test` and share helpers with tests/."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # The suite tests the CPU, also where there is a GPU.
os.environ["HF_HUB_OFFLINE"] = "1"  # A name of the Hub fails at once, and is not asked for again and again.

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = [ROOT / "benchmark" / room for room in (".", "recipes", "studies", "checks")]
sys.path[:0] = map(str, (*ROOMS, ROOT / "tests"))  # The tools import each other by their names.

from helpers import save_pair  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random `policy` and a random `reward`, both with the toy tokenizer."""
    return save_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Runs the test in an empty folder, where runs/ and models/ then appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
