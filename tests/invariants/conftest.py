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
def baseline(ragged, tmp_path_factory):
    """baseline(case): a run of two passes of two minibatches, evaluated; every forward takes all rows."""
    made = {}

    def make(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("baseline")
            with contextlib.chdir(folder):
                made[case] = Finished(run_case(case, ragged, **knobs(folder)), folder)
        return made[case]

    return make
