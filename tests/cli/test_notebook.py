"""examples/rloo_by_hand: the notebook is what its Python file says, and it runs from top to bottom."""

import json
import runpy
import shutil

import pytest
import torch
from helpers import ROOT

from rlhf_details.plumbing.machine import stages

PATH = ROOT / "examples/rloo_by_hand.py"


def test_the_notebook_is_that_of_its_python_file():
    """Its texts and code are. What the cells print and draw is stored with them, for those who read it on the web."""
    written = runpy.run_path(str(ROOT / "examples/notebook.py"))["notebook"](PATH.read_text())
    stored = json.loads(PATH.with_suffix(".ipynb").read_text())
    for cell in (cell for cell in stored["cells"] if cell["cell_type"] == "code"):
        assert bool(cell["outputs"]) == any(word in "".join(cell["source"]) for word in ("print(", "plt.show()"))
        cell |= {"execution_count": None, "outputs": []}
    assert stored == written


@pytest.mark.parametrize("folder", [".", "examples"])
def test_it_runs_and_teaches_what_it_says(ragged, in_tmp, monkeypatch, capsys, folder):
    """On the tiny models of the tests, in the places of the toy's, and in the folder where Jupyter starts as well."""
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: None)
    for name, stage in (("policy", "sft"), ("reward", "reward")):
        shutil.copytree(ragged / name, f"models/toy/{stage}")
    shutil.copytree(PATH.parent, "examples")
    monkeypatch.setattr(stages, "subprocess", None)  # No model is trained again.
    monkeypatch.chdir(folder)
    found = runpy.run_path(str(PATH))
    assert found["response_mask"].shape == (8, found["R"]) and found["kl"].abs().max() < 1e-4
    assert len({tuple(x) for x in found["responses"].tolist()}) > 4
    torch.testing.assert_close(found["advantages"].reshape(2, 4).sum(1), torch.zeros(2), atol=1e-5, rtol=0)
    assert torch.corrcoef(torch.stack([found["advantages"], found["change"]]))[0, 1] > 0.3
    assert "correlation:" in capsys.readouterr().out
