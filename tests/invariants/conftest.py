"""Runs that several tests look at are made once."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import knobs, run_case


class Finished(NamedTuple):
    """A run that has ended: its rows of metrics, and the folder in which it wrote runs/run and model."""

    rows: list
    folder: Path


@pytest.fixture(scope="session")
def finished():
    """{case: the run that `baseline` made for it}."""
    return {}


@pytest.fixture
def baseline(case, finished, ragged, tmp_path_factory):
    """The finished run of a test's case: two passes of two minibatches, evaluated; every forward takes all rows.

    It is made before the body of a test can replace a function, so that all tests of a case see the same run.
    """
    if case not in finished:
        folder = tmp_path_factory.mktemp("baseline")
        with contextlib.chdir(folder):
            finished[case] = Finished(run_case(case, ragged, **knobs(folder)), folder)
    return finished[case]
