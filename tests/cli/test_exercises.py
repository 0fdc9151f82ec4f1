"""exercises/break_it.py: each exercise can be made, its solution is right, and its check tells right from wrong."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

sys.path.append(str(ROOT / "benchmark" / "checks"))
import mutations

spec = importlib.util.spec_from_file_location("break_it", ROOT / "exercises/break_it.py")
break_it = importlib.util.module_from_spec(spec)
spec.loader.exec_module(break_it)
EXERCISES = break_it.exercises()
BROKEN = [number for number, exercise in EXERCISES.items() if "tag" in exercise]
RIGHT = {
    13: "def advantages(r, k):\n    return torch.cat([g - (g.sum() - g) / (k - 1) for g in r.split(k)])",
    14: """def gae(r, v, gamma, lam):
    out, a, after = torch.zeros_like(r), 0, 0
    for t in reversed(range(r.size(1))):
        a = r[:, t] + gamma * after - v[:, t] + gamma * lam * a
        out[:, t], after = a, v[:, t]
    return out""",
    15: "def k3(p, q):\n    return (q - p).exp() - (q - p) - 1",
    16: "def draw(logits, u):\n    return (logits - torch.log(-torch.log(u))).argmax(1)",
    17: """def advantages(own, teacher, mask, gamma):
    r, n = ((teacher - own) * mask).detach(), own.size(1)
    return torch.stack([sum(gamma ** (u - t) * r[:, u] for u in range(t, n)) for t in range(n)], 1)""",
}
WRONG = {  # (what is replaced in the right one, by what, and what the check then says)
    13: [("(g.sum() - g) / (k - 1)", "g.mean()", "own reward")],
    14: [("gamma * lam * a", "gamma * a", "lam is missing")],
    15: [("- 1", "", "not close")],
    16: [("torch.log(-torch.log(u))", "torch.log(u)", "log is missing")],
    17: [("teacher - own", "own - teacher", "changed places"), (".detach()", "", "a gradient flows")],
}


@pytest.mark.parametrize("number", BROKEN)
def test_one_statement_of_a_copy_is_broken_beside_its_tag(in_tmp, capsys, number):
    exercise = EXERCISES[number]
    break_it.main([str(number)])
    printed, copy = capsys.readouterr().out, Path(f"runs/exercise_{number}_code")
    assert f"PYTHONPATH={copy} python {copy}/rlhf_details" in printed
    for name in (f"exercise_{number}", f"healthy_{number}"):  # A run refuses a folder that is there.
        assert f"--run_name {name} " in printed and not Path("runs", name).exists()
    copy, before = mutations.sources(copy), mutations.sources()
    assert [file for file in before if copy[file] != before[file]] == [exercise["file"]]
    old, new = before[exercise["file"]], copy[exercise["file"]]
    assert ast.unparse(mutations.statement_of(old, exercise["tag"])) != ast.unparse(
        mutations.statement_of(new, exercise["tag"])
    )
    page, *flags = exercise["run"].split()
    assert page in before and set(flags[::2]) <= {"--total_episodes", "--response_length"}
    break_it.main([str(number), "--solution"])
    text = capsys.readouterr().out
    assert f"[{exercise['tag']}]" in text and "::test_" in text and exercise["new"] in text


@pytest.mark.parametrize("number", sorted(RIGHT))
def test_a_check_tells_right_from_wrong(in_tmp, capsys, number):
    assert break_it.main([str(number)]) == 0
    path = Path(f"runs/exercise_{number}_code") / f"{EXERCISES[number]['name']}.py"
    assert break_it.main([str(number), "--check"]) == 1 and "your turn" in capsys.readouterr().out
    right = RIGHT[number]
    for text, says in ((right, "right"), *((right.replace(old, new), says) for old, new, says in WRONG[number])):
        path.write_text(f"import torch\n\n\n{text}\n")
        assert break_it.main([str(number), "--check"]) == (says != "right")
        assert says in capsys.readouterr().out
    assert torch.is_tensor(break_it.answer(number)[1])
