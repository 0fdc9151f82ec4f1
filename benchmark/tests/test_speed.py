"""speed.py: which updates count, and that ratios are those of one turn."""

import speed

FAKE = """
import json, pathlib, sys
name = sys.argv[sys.argv.index("--run_name") + 1]
scale = SCALE * (3 if "--slow" in sys.argv else 1)
folder = pathlib.Path("runs", name)
folder.mkdir(parents=True, exist_ok=True)
rows = [{"update": n, "time/update": scale * s, "time/from_scratch": 9} for n, s in enumerate((50, 40, 1, 2, 6))]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


def test_the_other_tree_and_its_command_are_compared_with_this_one(in_tmp, monkeypatch, capsys):
    for tree, scale in (("new", "1"), ("old", "2")):
        script = in_tmp / tree / "rlhf_details" / "train_fake.py"
        script.parent.mkdir(parents=True)
        script.write_text(FAKE.replace("SCALE", scale))
    monkeypatch.setattr(speed, "ROOT", in_tmp / "new")
    speed.main(speed.Args("train_fake.py", "train_fake.py --slow", tree="old", turns=2))
    *_, row, memory = capsys.readouterr().out.splitlines()
    assert memory.startswith("| memory, GB | 0.") and memory.count(" .. ") == 3
    assert row == "| update | 2.000 (2.000 .. 2.000) | 12.000 (12.000 .. 12.000) | 6.000 (6.000 .. 6.000) |"
