"""
Writes a notebook from a Python file whose cells begin with "# %%", or with "# %% [markdown]" where they are text:

    python examples/notebook.py examples/rloo_by_hand.py        (examples/rloo_by_hand.ipynb)
"""

import json
import re
import sys
from pathlib import Path


def notebook(source):
    """The text of a notebook without outputs. Lines that begin with "# %pip" stay comments of a code cell."""
    cells = []
    for i, (kind, body) in enumerate(re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", source, re.M | re.S)):
        body = body.strip()
        body = re.sub(r"^# ?", "", body, flags=re.M) if kind else body
        cell = {"cell_type": "markdown" if kind else "code", "id": f"cell-{i}", "metadata": {}}
        cell["source"] = body.splitlines(keepends=True)
        cells.append(cell if kind else cell | {"execution_count": None, "outputs": []})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.with_suffix(".ipynb").write_text(notebook(path.read_text(encoding="utf-8")), encoding="utf-8")
