"""plot.py: what is drawn of a run, the curves of several seeds, and the comparison of two folders of them."""

import json
from pathlib import Path

import intervals
import numpy as np
import plot


# ---- one run ---------------------------------------------------------------------------------------------------------
def test_a_picture_of_a_run_and_of_one_that_goes_on(in_tmp):
    rows = [{"episode": 16 * u, "objective/kl": 0.1 * u, "eval/objective/kl": 0.0, "health/kl": u} for u in range(3)]
    for name, torn in (("run", ""), ("torn", '{"update": 4, "epis')):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    plot.main(plot.Args(("runs/run",)))
    plot.main(plot.Args(("runs/torn", "runs/run")))
    for picture in ("runs/run/curves.png", "runs/curves.png"):
        assert Path(picture).read_bytes()[:4] == b"\x89PNG"


# ---- curves of several seeds, and their comparison -------------------------------------------------------------------
def write(folder, exp, seed, columns, commit="v1"):
    intervals.write_runs(folder, {(exp, commit, seed): [list(columns), *zip(*columns.values(), strict=True)]})


def learning(folder, exp, seeds, rise=1.0):
    for seed in seeds:
        rng, x = np.random.default_rng(seed), np.arange(1, 21)
        gold = rise * x / 20 + 0.05 * rng.normal(size=20) + 0.1 * rng.normal()
        columns = {"update": x, "objective/gold": gold, "objective/kl": 0.1 * x, "objective/scores": gold}
        write(folder, exp, seed, columns)


def compared(capsys, a, b, **changes):
    """(exit code, what was printed) of plot.compare; code 2 where it ends with an error."""
    try:
        code = plot.compare(plot.CompareArgs(str(a), str(b), **changes))
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    return code, output.out + output.err


def test_compare_finds_no_difference_between_a_tag_and_itself_and_one_in_worse_code(tmp_path, capsys):
    learning(tmp_path / "a", "rloo", range(1, 6))
    learning(tmp_path / "worse", "rloo", range(1, 6), rise=0.5)
    code, said = compared(capsys, tmp_path / "a", tmp_path / "a")
    assert code == 0 and said.splitlines()[-1] == "no difference" and "DIFFERENT" not in said
    code, said = compared(capsys, tmp_path / "a", tmp_path / "worse")
    names = [f"rloo objective/{m} {n}" for m in ("scores", "gold") for n in ("final", "area")]
    assert code == 1 and said.splitlines()[-1] == f"different: {', '.join(names)}"
    assert compared(capsys, tmp_path / "a", tmp_path / "worse", margin=1000.0)[0] == 0


def test_compare_pairs_equal_seeds_and_refuses_where_there_are_none(tmp_path, capsys):
    for folder, shift, seeds in (("a", 0.0, range(6)), ("b", 0.03, range(6)), ("c", 0.03, range(10, 16))):
        for seed in seeds:
            level = np.random.default_rng(seed).normal()  # Seeds differ by far more than a and b do.
            gold = [level, level + shift + 1e-3 * seed]
            write(tmp_path / folder, "x", seed, {"update": [1, 2], "objective/gold": gold})
    assert compared(capsys, tmp_path / "a", tmp_path / "b", margin=0.0)[0] == 1
    assert compared(capsys, tmp_path / "a", tmp_path / "b")[0] == 0  # There is one, within the margins.
    code, said = compared(capsys, tmp_path / "a", tmp_path / "c")
    assert code == 2 and "two seeds or more that both have" in said


def test_of_several_commits_it_says_which_one_it_takes(tmp_path, capsys):
    for commit, exps in (("v1", "ab"), ("v2", "b")):
        for exp in exps:
            write(tmp_path, exp, 1, {"update": range(3)}, commit)
    for exp, place, line in (
        ((), "", "takes v1 of several commits for b;"),
        (("b",), "", "takes v1 of several commits for b;"),
        (("a",), "", ""),
        ((), "@v2", ""),
    ):
        plot.same(plot.SameArgs(f"{tmp_path}{place}", f"{tmp_path}@v1", exp))
        said = capsys.readouterr().out
        assert line in said and said.count("several commits") == bool(line)


def test_same_counts_the_updates_before_the_first_that_is_another(tmp_path, capsys):
    kl, nan = np.array([float("nan"), 0.0, 1.0, 2.0, 3.0]), float("nan")
    rounded, other, missing = [1, 1, 1.0005, 1, 1], [1, 1, 1.0005, 1, 1.002], [1, 1, 1, nan, 1]
    write(tmp_path / "a", "x", 3, {"update": range(5), "objective/kl": kl})
    for number, (factors, count) in enumerate([(rounded, 4), (other, 3), (missing, 2)]):
        write(tmp_path / str(number), "x", 3, {"update": range(5), "objective/kl": kl * factors + 2e-5})
        plot.same(plot.SameArgs(str(tmp_path / "a"), str(tmp_path / str(number))))
        assert capsys.readouterr().out == f"x, seed 3: {count} of 4 updates agree\n"
