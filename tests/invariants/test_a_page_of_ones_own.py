"""A copy of a page with another algorithm in it needs no change in plumbing."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
from helpers import ROOT, read_metrics, rloo_args

from rlhf_details import train_rloo
from rlhf_details.plumbing.inputs import cli


@pytest.fixture
def page(tmp_path):
    """train_rloo.py as train_mine.py, with the group's mean as baseline and a division by its standard deviation."""
    source = (ROOT / "rlhf_details" / "train_rloo.py").read_text()
    old = "    return ((rewards - baseline) * (scored & (num_siblings > 0))).reshape(-1)\n"
    new = "    return ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1)\n"
    assert source.count(old) == 1
    path = tmp_path / "train_mine.py"
    source = source.replace(old, new).replace('exp_name: str = "train_rloo"', 'exp_name: str = "train_mine"')
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("train_mine", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_mine"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_mine"]


def test_a_copied_page_trains_and_saves(page, tiny, in_tmp):
    given = dataclasses.asdict(rloo_args(tiny)) | {"exp_name": "train_mine"}
    rows = read_metrics(page.main(page.Args(**given))["run"])
    assert [row["update"] for row in rows] == [1, 2, 3]
    card = (Path(given["output_dir"]) / "README.md").read_text()
    assert "train_mine.py" in card and "Citation" not in card


def test_a_copy_keeps_the_table_of_the_page_that_it_was_copied_from(page, tiny, in_tmp, capsys):
    words = ["--dataset", "rows.jsonl", "--sft_model_path", str(tiny / "policy")]
    for argv in (words, []):
        args, expected = (cli.parse(kind, argv) for kind in (page.Args, train_rloo.Args))
        assert dataclasses.asdict(args) == dataclasses.asdict(expected) | {"exp_name": "train_mine"}
        mine, theirs = capsys.readouterr().out.splitlines()
        assert mine == theirs and mine.startswith("starting values for ")
