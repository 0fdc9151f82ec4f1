"""exercises/grade.py: full points for the right lines, none for empty ones, and a mistake costs its own task alone."""

import importlib.util
import json

import pytest
from helpers import ROOT

spec = importlib.util.spec_from_file_location("grade", ROOT / "exercises/grade.py")
grade = importlib.util.module_from_spec(spec)
spec.loader.exec_module(grade)
LABS = grade.labs()


def answer(folder, name, edit=lambda title, lines: lines):
    """Fills a student's folder with the right answers, whose lines are edited."""
    lab = LABS[name]
    path = folder / f"{lab['page']}.py"
    source = path.read_text()
    for title, task in lab["write"].items():
        lines = grade.right_lines(lab["page"], task)
        gap = grade.GAP.format(" " * (len(lines) - len(lines.lstrip())), title)
        assert source.count(gap) == 1 and lines not in source
        start, _, end = gap.splitlines(keepends=True)
        source = source.replace(gap, start + edit(title, lines) + end)
    path.write_text(source)
    found, number = lab["found"], sum(lab["measured"]) / 2
    (folder / "answers.toml").write_text(f'[{name}]\nfound = "{found}"\nmeasured = {number}\n')


def points(folder, name, capsys):
    grade.main([str(folder), name])
    tests = json.loads((folder / "results.json").read_text())["tests"]
    total, most = sum(test["score"] for test in tests), sum(test["max_score"] for test in tests)
    assert f"{total} of {most} points" in capsys.readouterr().out and most == 100
    return {test["name"].partition(": ")[2]: (test["score"], test["output"]) for test in tests}


@pytest.mark.parametrize("name", LABS)
def test_a_lab_gives_points_for_what_is_right_alone(tmp_path, capsys, name):
    folder, lab = tmp_path / "student", LABS[name]
    grade.main(["--make", str(folder), name])
    made = {path: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert not any(score for score, _ in points(folder, name, capsys).values())
    assert "For the teacher" not in made[folder / f"{name}.md"]
    # Another algorithm's file would show lines that a gap asks for.
    assert {path.name for path in made if path.suffix == ".py"} == {"sft.py", "reward.py", f"{lab['page']}.py"}
    answer(folder, name)
    assert all(score and output == "right" for score, output in points(folder, name, capsys).values())
    mistakes = [(title, *mistake) for title, task in lab["write"].items() for mistake in task["mistakes"]]
    assert len(mistakes) == 3 or not lab["write"]
    for title, old, new, says in mistakes:
        for path, text in made.items():
            path.write_text(text)
        answer(folder, name, lambda t, lines: lines.replace(old, new) if t == title else lines)
        found = points(folder, name, capsys)
        assert found.pop(title) == (0, says) and all(score for score, _ in found.values())
