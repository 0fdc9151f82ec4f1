"""Fixtures of the tests of the command line."""

import pytest
from transformers.utils import logging as transformers_logging


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


@pytest.fixture(autouse=True)
def quiet():
    """The library's warnings and progress bars are off, as `cli.main` does it for every script."""
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()
