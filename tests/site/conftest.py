"""The site's tests need the extra `docs`; those in a browser also Chromium. Without them they are skipped."""

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.append(str(DOCS))  # Its files import each other.


@pytest.fixture(autouse=True)
def docs_extra():
    """Skips a test where the packages of the extra are missing."""
    for name in ("pygments", "markdown", "latex2mathml"):
        pytest.importorskip(name, reason=f"the site needs {name}: pip install -c constraints.txt -e '.[docs]'")
