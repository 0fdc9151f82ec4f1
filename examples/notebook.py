"""
Writes a notebook from a Python file whose cells begin with "# %%", or with "# %% [markdown]" where they are text. It
runs the cells, from the repository root, and stores what they print and draw:

    python examples/notebook.py examples/rloo_by_hand.py        (examples/rloo_by_hand.ipynb)
"""

import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path


def notebook(source):
    """The cells of a notebook without outputs. Lines that begin with "# %pip" stay comments of a code cell."""
    cells = []
    for i, (kind, body) in enumerate(re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", source, re.M | re.S)):
        body = body.strip()
        body = re.sub(r"^# ?", "", body, flags=re.M) if kind else body
        cell = {"cell_type": "markdown" if kind else "code", "id": f"cell-{i}", "metadata": {}}
        cell["source"] = body.splitlines(keepends=True)
        cells.append(cell if kind else cell | {"execution_count": None, "outputs": []})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def run(cells):
    """Runs the code cells one after the other and puts their text and their figures into them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {"__name__": "__main__"}
    plt.show = lambda: None  # The figures are taken when a cell is done.
    for number, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), 1):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec("".join(cell["source"]), names)
        lines = text.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
        for figure in map(plt.figure, plt.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=72, bbox_inches="tight", metadata={"Software": None})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            cell["outputs"].insert(0, {"output_type": "display_data", "data": data, "metadata": {}})
        plt.close("all")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        found = notebook(path.read_text(encoding="utf-8"))
        run(found["cells"])
        path.with_suffix(".ipynb").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
