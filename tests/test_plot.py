"""benchmark/plot.py: what is drawn of which run, and what it says where there is nothing to draw."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from conftest import ROOT, ppo_args, read_metrics

from rlhf_details import train_ppo

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def plot():
    return runpy.run_path(str(ROOT / "benchmark/plot.py"))


ROWS = [
    {"update": 0, "episode": 0, "eval/objective/scores": 0.5, "eval/objective/kl": 0.0},
    {"update": 1, "episode": 16, "objective/scores": 1.0, "objective/kl": 0.1, "policy/entropy_avg": 2.0, "health/kl": 0.0},
    {"update": 2, "episode": 32, "objective/scores": 2.0, "objective/kl": 30.0, "policy/entropy_avg": 1.0, "health/kl": 1.0},
    {"update": 3, "episode": 48, "objective/scores": 3.0, "objective/kl": 40.0, "policy/entropy_avg": 0.5, "health/kl": 1.0},
]


def write(folder, rows, torn=""):
    Path(folder).mkdir(parents=True)
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def run(plot, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["plot.py", *words])
    runpy.run_path(str(ROOT / "benchmark/plot.py"), run_name="__main__")


def test_each_panel_holds_its_metrics_at_their_episodes(plot):
    assert plot["panels"](ROWS) == {
        "score": {"objective/scores": ((16, 32, 48), (1.0, 2.0, 3.0)), "eval/objective/scores": ((0,), (0.5,))},
        "KL, nats a response": {"objective/kl": ((16, 32, 48), (0.1, 30.0, 40.0)), "eval/objective/kl": ((0,), (0.0,))},
        "entropy, nats a token": {"policy/entropy_avg": ((16, 32, 48), (2.0, 1.0, 0.5))},
    }
    assert plot["health"](ROWS) == {"health/kl": [(16, 32)]}  # from the end of update 1 on
    functions = [{"episode": 1, "objective/rewards/a": 1, "objective/rewards/b": 2, "objective/verifiable_correct_rate": 0.5}]
    assert set(plot["panels"](functions)["reward functions"]) == functions[0].keys() - {"episode"}
    reward = [{"episode": 1, "train/rm/loss": 1.0, "train/rm/accuracy": 0.5, "train/rm/lr": 1e-3, "eval/rm/accuracy": 0.6}]
    assert plot["panels"](reward).keys() == {"loss", "accuracy", "learning rate"}


def test_the_figure_draws_these_numbers_and_names_what_is_unhealthy(plot):
    axes = plot["figure"]({"a": ROWS}).axes
    assert [axis.get_title() for axis in axes] == ["score", "KL, nats a response", "entropy, nats a token"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes[0].get_lines()}
    assert lines["objective/scores"] == [[16, 1], [32, 2], [48, 3]] and lines["eval/objective/scores"] == [[0, 0.5]]
    assert "health/kl" in [text.get_text() for text in axes[0].get_legend().get_texts()]
    two = plot["figure"]({"a": ROWS, "b": ROWS[:3]})
    assert len({line.get_color() for line in two.axes[1].get_lines()}) == 2
    assert [text.get_text() for text in two.legends[0].get_texts()] == ["a", "b"]


def test_a_picture_of_a_real_run_of_a_run_that_goes_on_and_of_two(plot, tiny, in_tmp, monkeypatch, capsys):
    train_ppo.main(ppo_args(tiny, eval_dataset="toy:test"))
    run(plot, monkeypatch, "runs/run")
    picture = Path("runs/run/curves.png")
    assert capsys.readouterr().out.splitlines()[-1] == str(picture) and picture.read_bytes()[:4] == b"\x89PNG"
    assert plot["panels"](read_metrics("runs/run")).keys() >= {"score", "gold, the true reward", "probability ratio"}
    write("runs/torn", ROWS, torn='{"update": 4, "epis')
    run(plot, monkeypatch, "runs/torn", "runs/run", "--output", "both.png")
    assert Path("both.png").stat().st_size > 10_000


def test_bad_input_is_one_line(plot, in_tmp, monkeypatch, capsys):
    write("empty", [])
    write("other", [{"episode": 1, "x": 2}])
    write("broken", ROWS, torn="{\n{}")
    for words in (["nowhere"], ["empty"], ["other"], ["broken"], ["."]):
        with pytest.raises(SystemExit) as end:
            run(plot, monkeypatch, *words)
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error


def test_no_training_script_imports_a_plotting_library():
    for path in (ROOT / "rlhf_details").glob("*.py"):
        assert "matplotlib" not in path.read_text()
