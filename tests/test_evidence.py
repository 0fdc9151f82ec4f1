"""The studies in benchmark/: their arithmetic on made-up numbers, their commands and mutations on the scripts as they are."""

import csv
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from rlhf_details import evaluate, toy, train_ppo, train_reward, train_rloo, train_sft, utils

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
import ablations
import against_trl
import held_out
import intervals
import movies
import overoptimisation
import plot
import readme

import benchmark

SCRIPTS = {"train_sft": train_sft, "train_reward": train_reward, "train_rloo": train_rloo, "train_ppo": train_ppo}
TAGS = set(tomllib.loads((ROOT / "benchmark" / "details.toml").read_text())["tags"])


# ---- arithmetic ------------------------------------------------------------------------------------------------------
def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert intervals.iqm([9, 1, 2, 3, 4, 5, 6, 100]) == (3 + 4 + 5 + 6) / 4
    assert intervals.iqm(np.arange(24).reshape(2, 12)).tolist() == [5.5, 17.5]


def test_bootstrap_intervals_hold_the_truth_about_as_often_as_they_say():
    rng, hits = np.random.default_rng(1), 0
    low, high = intervals.bootstrap(rng.normal(3, 1, size=(200, 30)))
    hits = ((low < 3) & (high > 3)).mean()
    assert 0.88 < hits < 0.99
    wide, narrow = ((high - low).mean() for low, high in (intervals.bootstrap(rng.normal(size=(50, n))) for n in (10, 40)))
    assert 1.6 < wide / narrow < 2.6  # as the root of the number of seeds


def test_students_interval_is_that_of_the_textbook():
    mean, low, high, p = intervals.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5 / 5)  # t of 4 degrees of freedom
    assert mean == 3 and low == pytest.approx(3 - half, abs=1e-5) and high == pytest.approx(3 + half, abs=1e-5)
    assert p == pytest.approx(0.013, abs=5e-4)
    assert intervals.mean_interval([0.0, 0.0]) == (0, 0, 0, 1) and intervals.mean_interval([2.0, 2.0]) == (2, 2, 2, 0)
    with pytest.raises(ValueError, match="two seeds"):
        intervals.mean_interval([1.0])


def test_welchs_interval_is_b_less_a():
    mean, low, high, p = intervals.welch(np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0, 8.0]))
    assert mean == 4 and low < 4 < high and (p < 0.05) == (low > 0)
    half = 3.219 * math.sqrt(1 / 3 + 4 / 3)  # t of (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 2.94 degrees of freedom
    assert (low, high) == pytest.approx((4 - half, 4 + half), abs=2e-3)
    assert intervals.welch(np.ones(3), np.ones(4))[:3] == (0, 0, 0)


def test_holms_correction():
    assert intervals.holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert intervals.holm([0.9, 0.8]).tolist() == [1, 1]


def write(folder, exp, seed, columns):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{exp}_s{seed}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def test_an_experiment_is_not_another_whose_name_begins_alike(tmp_path):
    for exp, value in (("rloo", 1.0), ("rloo_short", 2.0), ("rloo_s1", 3.0)):
        write(tmp_path, exp, 7, {"update": [1, 2], "gold": [value, ""]})
    assert {e: intervals.read_seeds(tmp_path, e)[7]["gold"][0] for e in ("rloo", "rloo_short", "rloo_s1")} == {
        "rloo": 1, "rloo_short": 2, "rloo_s1": 3,
    }  # fmt: skip
    assert plot.experiments(tmp_path) == ["rloo", "rloo_s1", "rloo_short"]
    assert intervals.last(intervals.read_seeds(tmp_path, "rloo")[7]["gold"]) == 1
    with pytest.raises(FileNotFoundError):
        intervals.read_seeds(tmp_path, "ppo")


# ---- compare and curves ----------------------------------------------------------------------------------------------
def learning(folder, exp, seeds, rise=1.0, noise=0.05):
    for seed in seeds:
        rng, x = np.random.default_rng(seed), np.arange(1, 21)
        gold, kl = rise * x / 20 + noise * rng.normal(size=20) + 0.1 * rng.normal(), 0.1 * x
        write(folder, exp, seed, {"update": x, "objective/gold": gold, "objective/kl": kl, "objective/scores": gold})


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
    assert code == 1
    names = [f"rloo objective/{m} {n}" for m in ("scores", "gold") for n in ("final", "area")]
    assert said.splitlines()[-1] == f"different: {', '.join(names)}"
    assert compared(capsys, tmp_path / "a", tmp_path / "worse", margin=1000.0)[0] == 0


def test_compare_tells_real_runs_from_those_of_broken_code(tmp_path, capsys):
    """The committed curves of RLOO, and those of a copy of the scripts in which what follows EOS counts as response."""
    runs = ROOT / "benchmark" / "results" / "f1166b3" / "ablations"
    for folder, name in (("as_it_is", "rloo"), ("broken", "no_stop")):
        (tmp_path / folder).mkdir()
        for seed in intervals.read_seeds(runs, name):
            shutil.copy(runs / f"{name}_s{seed}.csv", tmp_path / folder / f"rloo_s{seed}.csv")
    code, said = compared(capsys, tmp_path / "as_it_is", tmp_path / "as_it_is")
    assert code == 0 and said.splitlines()[-1] == "no difference"
    code, said = compared(capsys, tmp_path / "as_it_is", tmp_path / "broken")
    assert code == 1 and "rloo objective/gold final" in said.splitlines()[-1]


def test_the_command_line_of_compare_ends_with_its_verdict(tmp_path):
    learning(tmp_path / "a", "rloo", range(1, 6))
    learning(tmp_path / "worse", "rloo", range(1, 6), rise=0.5)
    for b, code in (("a", 0), ("worse", 1), ("none", 2)):
        command = [sys.executable, ROOT / "benchmark/plot.py", "compare", tmp_path / "a", tmp_path / b, "--exp", "rloo"]
        assert subprocess.run(command, capture_output=True).returncode == code


def test_compare_pairs_equal_seeds_and_is_undecided_where_it_cannot(tmp_path, capsys):
    for folder, shift, seeds in (("a", 0.0, range(6)), ("b", 0.03, range(6)), ("c", 0.03, range(10, 16)), ("d", 0.03, range(9))):
        for seed in seeds:
            level = np.random.default_rng(seed).normal()  # seeds differ by far more than a and b do
            write(tmp_path / folder, "x", seed, {"update": [1, 2], "objective/gold": [level, level + shift + 1e-3 * seed]})
    assert compared(capsys, tmp_path / "a", tmp_path / "b", margin=0.0)[0] == 1
    assert compared(capsys, tmp_path / "a", tmp_path / "d", margin=0.0)[0] == 1  # of the seeds that both have
    code, said = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 0 and said.endswith("no difference\n")  # there is one, within the margins
    code, said = compared(capsys, tmp_path / "a", tmp_path / "c", margin=0.0)
    assert code == 0 and "6 and 6 seeds" in said and said.splitlines()[-1].startswith("undecided: x objective/gold final")


def test_compare_does_not_pass_what_is_lost(tmp_path, capsys):
    for exp in ("rloo", "ppo"):
        learning(tmp_path / "a", exp, range(5))
    learning(tmp_path / "b", "rloo", range(4))
    code, said = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 2 and "has no ppo" in said
    code, said = compared(capsys, tmp_path / "a", tmp_path / "b", exp=("rloo",))
    assert code == 0 and "has no seed 4" in said
    for columns, message in (
        ({"update": [1, 2]}, "missing"),
        ({"objective/gold": [1.0, ""], "objective/scores": ["", ""]}, "finite"),
    ):
        for seed in range(5):
            write(tmp_path / "c", "rloo", seed, columns)
        code, said = compared(capsys, tmp_path / "a", tmp_path / "c", exp=("rloo",))
        assert code == 2 and message in said


def test_the_final_figure_is_the_held_out_one_where_there_is_one():
    seed = {"objective/kl": np.arange(20.0), "eval/objective/kl": np.array([math.nan] * 19 + [7.0])}
    assert plot.final(seed, "objective/kl") == 7
    assert plot.final({"objective/kl": np.arange(20.0)}, "objective/kl") == 18.5 and plot.area(seed, "objective/kl") == 9.5


def test_curves_writes_a_figure_and_its_table(tmp_path, capsys):
    learning(tmp_path / "a", "rloo", range(1, 11))
    learning(tmp_path / "a", "ppo", range(1, 11), rise=2.0)
    output = tmp_path / "curves.svg"
    args = plot.CurvesArgs(str(tmp_path / "a"), exp=("rloo", "ppo"), metrics=("objective/gold", "objective/kl"), output=str(output))
    plot.curves(args)
    first = output.read_bytes()
    plot.curves(args)
    assert output.read_bytes() == first and b"<svg" in first  # the same bytes for the same data
    table = (tmp_path / "curves.md").read_text()
    assert "| rloo | 10 | objective/gold |" in table and "| ppo | 10 | objective/kl | 1.950 (1.950 .. 1.950) | 1.050" in table
    capsys.readouterr()


# ---- ablations -------------------------------------------------------------------------------------------------------
@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Mutated copies go to tmp_path, of the scripts as they are."""
    shutil.copytree(ROOT / "rlhf_details", tmp_path / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(ablations, "ROOT", tmp_path)
    return tmp_path


def test_every_variants_mutation_changes_the_scripts_as_they_are(copies):
    for variant in ablations.VARIANTS:
        mutations = [*variant.mutations, *(x for x in variant.reward if not isinstance(x, str))]
        if mutations:
            folder = ablations.code_of(variant.name, mutations, "t") / "rlhf_details"
            changed = {p.name for p in folder.glob("*.py") if p.read_text() != (ROOT / "rlhf_details" / p.name).read_text()}
            assert changed == {file for file, *_ in mutations}, variant.name
        assert variant.flags or variant.mutations or variant.reward or variant.runs, variant.name


def test_every_command_of_the_studies_parses_against_the_flags():
    studies = {name: command for name, (_, command) in ablations.BASES.items()}
    studies |= {v.name: f"{ablations.BASES[v.base][1]} {v.flags}" for v in ablations.VARIANTS if not v.runs}
    studies |= {name: command.partition("rlhf_details/")[2] for name, (_, _, command) in overoptimisation.settings().items()}
    for batch in benchmark.stage_runs((1,), "t"):
        studies |= {run.name: run.command.partition("rlhf_details/")[2] for run in batch}
    for name, command in studies.items():
        script, *flags = shlex.split(command)
        script = script.removesuffix(".py")
        try:
            args = utils.parse_args(SCRIPTS[script].Args, toy.defaults(script), flags)
        except SystemExit:
            pytest.fail(f"{name}: {command}")
        assert args.dataset == "toy"


def test_a_detail_is_priced_or_listed_with_the_reason_why_not_and_25_are_priced():
    priced = {tag for variant in ablations.VARIANTS for tag in variant.tags.split()}
    unpriced = [tag for tags in ablations.UNPRICED.values() for tag in tags.split()]
    assert priced | set(unpriced) == TAGS and not priced & set(unpriced) and len(unpriced) == len(set(unpriced))
    assert len(priced) >= 25
    names = [v.name for v in ablations.VARIANTS] + list(ablations.BASES)
    assert len(names) == len(set(names))
    assert all(v.base in ablations.BASES and (not v.runs or v.runs in ablations.BASES) for v in ablations.VARIANTS)


MEASURE = """
import json, sys, torch
from rlhf_details import train_rloo, utils
policy = train_rloo.Policy(utils.load_policy(sys.argv[1], "policy"), 1.0).eval()
queries, mask = utils.left_pad([[5, 6, 7, 8, 9], [11, 12], [5, 3, 4]])
with torch.no_grad():
    responses, response_mask, logprobs = train_rloo.sample(policy, queries, mask, torch.arange(6), 2, 6, 1, (1, 0, 1))
    batch = queries.repeat_interleave(2, 0), mask.repeat_interleave(2, 0), responses, response_mask
    forward = {n: train_rloo.response_logprobs(policy, batch, n)[0].tolist() for n in (1, 2)}
ids = [row[real].tolist() for row, real in zip(queries, mask)]
print(json.dumps({"ids": ids, "mask": mask.tolist(), "responses": responses.tolist(), "sampled": logprobs.tolist(), **forward}))
"""


def measured(variant, model):
    """What MEASURE prints, run on the mutated copy of a variant (None: on the scripts as they are)."""
    names = {v.name: v for v in ablations.VARIANTS}
    folder = ablations.code_of(variant, names[variant].mutations, "t") if variant else ROOT
    environ = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", MEASURE, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=folder)  # which -c imports from first
    assert done.returncode == 0, done.stderr
    return {name: np.array(x) if name != "ids" else x for name, x in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
def test_positions_that_count_the_padding_shift_whole_rows(copies, tiny):
    """Which rotary positions forgive: the sampler, packed and plain rows all agree with the scripts as they are."""
    right, shifted, sampler = (measured(v, tiny / "policy") for v in (None, "positions_rope", "sampler_positions_gpt2"))
    for name in ("sampled", "1", "2"):
        assert np.abs(shifted[name] - right[name]).max() < 2e-4, name
    assert np.abs(sampler["sampled"] - sampler["1"]).max() > 1e-2  # a sampler that is not the policy that is trained


@pytest.mark.slow
def test_right_padding_keeps_the_prompts_and_moves_their_padding(copies, tiny):
    right, padded = (measured(v, tiny / "policy") for v in (None, "right_padding"))
    assert padded["ids"] == right["ids"]  # no token is lost, none made up
    assert padded["mask"].tolist() == right["mask"][:, ::-1].tolist()
    assert np.abs(padded["1"][:2] - padded["sampled"][:2]).max() < 2e-4  # the longest prompt has no padding


@pytest.mark.slow
def test_siblings_that_see_each_other_differ_in_packed_rows_alone(copies, tiny):
    right, seen = (measured(v, tiny / "policy") for v in (None, "siblings_seen"))
    assert np.abs(seen["1"] - right["1"]).max() < 2e-4
    assert np.abs(seen["2"] - right["2"]).max() > 1e-2


def outcomes(folder, name, gold, kl, seeds=range(1, 11)):
    for seed in seeds:
        level = np.random.default_rng(seed).normal()
        own = 0.05 * np.random.default_rng([seed, *name.encode()]).normal()
        ends = {"eval/objective/gold": ["", level + gold + own], "eval/objective/kl": ["", kl], "eval/objective/ended": ["", 0.5]}
        write(folder, name, seed, {"update": [1, 2], "objective/gold": [level, level + gold + own]} | ends)


def test_effects_are_paired_differences_and_verdicts_are_corrected_for_their_number(tmp_path, monkeypatch):
    variants = [
        ablations.Variant("worse", "rloo", "REW-5", "w"),
        ablations.Variant("same", "rloo", "REW-5", "s", runs="rloo"),
        ablations.Variant("noise", "rloo", "REW-5", "n"),
        *(ablations.Variant(f"other{i}", "rloo", "REW-5", "o") for i in range(20)),
    ]
    monkeypatch.setattr(ablations, "VARIANTS", variants)
    outcomes(tmp_path, "rloo", 0, 4)
    outcomes(tmp_path, "worse", -1, 9)
    for variant in variants[2:]:
        outcomes(tmp_path, variant.name, 0, 4)
    found, bases = ablations.effects(tmp_path)
    mean, low, high, _ = found["worse"]["gold"]
    assert mean == pytest.approx(-1, abs=0.1) and low < -1 < high and high - low < 0.3  # seeds themselves lie 1 apart
    assert found["worse"]["kl"][:3] == (5, 5, 5) and len(found["worse"]["seeds"]) == 10 and bases["rloo"]["kl"][0] == 4
    verdict, sure = ablations.verdicts(found)
    assert verdict["worse"] == "matters" and verdict["same"] == "changes nothing"
    assert {("worse", "gold"), ("worse", "kl")} <= sure and not {name for name, _ in sure} - {"worse"}
    assert ablations.count_up(found["worse"]) == "10: 0, 10" and ablations.count_up(found["same"]) == "10: 0, 0"
    gold, kl = ablations.seed_by_seed(found, bases)[-len(variants)].split("|")[2].split(",")
    assert float(gold) == pytest.approx(found["worse"]["seeds"][1]["gold"], abs=0.01) and float(kl) == 5
    others = [verdict[v.name] for v in variants[2:]]
    assert set(others) <= {"perhaps", "does not show here"} and others.count("perhaps") <= 5


def test_the_committed_table_marks_the_figures_of_the_rows_that_matter_and_the_readme_shows_those_rows():
    rows = readme.tables("ablations")[1][2:]
    assert len(rows) == len(ablations.VARIANTS)
    assert all(("**" in row) == row.endswith("| matters |") for row in rows)
    shown = readme.ablations()[2:]
    assert len(shown) == sum("**" in row for row in rows) and all("**" in row for row in shown)
    golds = [float(row.split("|")[5].strip(" *").split()[0]) for row in shown]
    assert golds == sorted(golds)


def test_stages_run_where_a_run_needs_them_and_not_where_all_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    asked = []
    monkeypatch.setattr(benchmark, "run_all", lambda runs, args, tag: asked.append([r.name for r in runs if not r.is_done()]) or [])
    stages = benchmark.stage_runs(
        (1,), "t", {"small": ("python rlhf_details/train_sft.py --output_dir {root}/m/{seed}/small", None)}
    )
    runs = [benchmark.Run("rloo", "python x.py", 1, "t", "study")]
    made = [run.makes.relative_to(tmp_path) for batch in stages for run in batch]
    assert made == [Path("models/bench/1/sft"), Path("m/1/small"), Path("models/bench/1/reward")]
    benchmark.run_study(stages, runs, None, "t")
    for run in (stages[0][0], stages[0][1], *runs):
        write(run.result.parent, run.name.removesuffix("_s1"), 1, {"update": [1]})
    stages[0][1].makes.mkdir(parents=True)
    (stages[0][1].makes / "config.json").touch()
    runs.append(benchmark.Run("ppo", "python x.py", 1, "t", "study"))
    benchmark.run_study(stages, runs, None, "t")
    assert asked[:3] == [["sft_s1", "small_s1"], ["reward_s1"], ["rloo_s1"]]
    assert asked[3:] == [["sft_s1"], ["reward_s1"], ["ppo_s1"]]  # the curve of sft is there, its model is not
    assert benchmark.run_study(stages, runs[:1], None, "t") == [] and len(asked) == 6
    stages[0].append(benchmark.stage_runs((2,), "t")[0][0])
    runs.append(benchmark.Run("rloo", "python x.py", 2, "t", "study"))
    write(runs[1].result.parent, "ppo", 1, {"update": [1]})
    benchmark.run_study(stages, runs, None, "t")
    assert asked[6:] == [["sft_s2"], [], ["rloo_s2"]]  # nothing for seed 1, whose runs are done and whose models are gone


# ---- over-optimisation -----------------------------------------------------------------------------------------------
def test_best_of_n_is_the_mean_over_all_subsets():
    scores = np.sort(np.random.default_rng(1).normal(size=6))
    golds = np.random.default_rng(2).normal(size=6)
    for best_of in (1, 2, 3, 6):
        share = overoptimisation.best_of_shares(6, best_of)
        subsets = list(itertools.combinations(range(6), best_of))
        assert golds @ share == pytest.approx(np.mean([golds[max(s, key=lambda i: scores[i])] for s in subsets]))


def test_a_fall_is_from_the_peak_of_the_other_seeds_mean_and_paired():
    x = np.arange(30.0)
    level = np.random.default_rng(1).normal(size=8)
    gold = (-((x - 10) ** 2) / 100).reshape(-1, 1) + level
    gold[20, 0] += 100  # one seed's luck: the others' peak, and not its own, is where it is measured
    peak, lost, gained, losses = overoptimisation.fall(gold, x.reshape(-1, 1) * 0.1 + level)
    assert peak == 20
    assert lost[0] == pytest.approx((3.61 + 7 * (3.61 - 1)) / 8) and gained[0] == pytest.approx((1.9 + 7 * 0.9) / 8)
    assert losses == pytest.approx([3.61] + 7 * [2.61])
    noise = np.random.default_rng(2).normal(size=(40, 10))
    assert overoptimisation.fall(noise, noise)[1][1] < 0  # no fall where there is only noise


def test_the_row_before_the_first_update_is_not_in_the_curves(tmp_path):
    for seed in (1, 2):
        write(tmp_path, "x", seed, {f"objective/{c}": ["", *range(1, 11)] for c in ("gold", "scores", "kl")})
    columns, seeds = overoptimisation.curves(tmp_path, "x")
    assert seeds == 2 and np.allclose(columns["gold"], [[x, x] for x in (3, 4, 5, 6, 7, 8)])


def test_smoothing_keeps_the_mean_of_a_line():
    line = np.arange(10.0)
    assert overoptimisation.smooth(np.stack([line, 2 * line]))[:, 0].tolist() == [2, 4]


# ---- against TRL -----------------------------------------------------------------------------------------------------
@pytest.fixture
def stages(tiny, in_tmp, monkeypatch):
    """A repository's root with the tiny models as those of seed 3."""
    monkeypatch.setattr(against_trl, "ROOT", in_tmp)
    folder = in_tmp / "models" / "bench" / "3"
    for name, model in (("sft", "policy"), ("reward", "reward")):
        shutil.copytree(tiny / model, folder / name)
    return folder


def test_the_evaluator_of_trls_policies_gives_our_scripts_own_figures(stages):
    paths = {"sft_model_path": str(stages / "sft"), "reward_model_path": str(stages / "reward"), "output_dir": "policy"}
    changes = {"batch_size": 16, "total_episodes": 32, "eval_dataset": "toy:test", "num_sample_generations": 0, "seed": 3}
    script = train_rloo.Args(**(against_trl.settings("rloo") | paths | changes | {"run_name": "run", "overwrite": True}))
    after = train_rloo.main(script)["after"]
    found = held_out.evaluate("policy", stages / "sft", stages / "reward", 3)
    assert found.keys() == {f"eval/objective/{name}" for name in ("scores", "gold", "kl", "ended", "length")}
    assert found == {name: after[name] for name in found}


def test_what_is_recorded_are_the_samples_that_were_trained_on(stages, in_tmp, monkeypatch):
    seen, score = [], train_rloo.response_scores

    def watched(reward_model, batch, n):
        seen.extend([q[m].tolist(), r[w].tolist()] for q, m, r, w in zip(*batch, strict=True))
        return score(reward_model, batch, n)

    monkeypatch.setattr(train_rloo, "why_not_share", lambda *_: None)  # which scores made-up rows
    monkeypatch.setattr(train_rloo, "response_scores", watched)
    (in_tmp / "out").mkdir()
    against_trl.record("rloo", 3, {"batch_size": 16, "total_episodes": 32}, in_tmp / "out")
    samples = json.loads((in_tmp / "out" / "samples.json").read_text())
    assert [len(update) for update in samples] == [16, 16]
    assert sorted(itertools.chain(*samples)) == sorted(seen)
    assert all(len({tuple(query) for query, _ in update[i : i + 4]}) == 1 for update in samples for i in range(0, 16, 4))
    start, ours = str(stages / "sft"), str(in_tmp / "out" / "ours")
    assert against_trl.distance(ours, ours, start) == 0 and against_trl.distance(ours, start, start) == 1


def test_the_tables_against_trl(tmp_path):
    spread = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    own = np.array([0.1, -0.2, 0.0, 0.2, -0.1])

    def seeds(level, own=0.0):
        found = enumerate(spread + own)
        return {i: {f"eval/objective/{n}": np.array([math.nan, level + x]) for n in against_trl.FIGURES} for i, x in found}

    low, high = against_trl.prediction_interval(spread)
    assert high == -low == pytest.approx(2.776445 * math.sqrt(0.625) * math.sqrt(1.2), abs=1e-5)
    lines = against_trl.tables({"ours_rloo": seeds(1.0), "trl_rloo_1.16.0": seeds(1.05, own), "trl_rloo_0.21.0": seeds(1.5, own)})
    near, far = (next(x for x in lines if x.startswith(f"| trl_rloo_{v} | score")) for v in ("1.16.0", "0.21.0"))
    assert "-0.05 [-0.25, +0.15] | yes" in near and near.endswith("| yes |")
    assert "-0.50 [-0.70, -0.30] | **no**" in far and far.endswith("| yes |")  # seeds differ by more than the systems do
    assert lines[2].startswith("| ours_rloo | 5 | 1.00 [0.02, 1.98], 0.00 .. 2.00 |")


def test_trl_gets_the_settings_that_our_side_is_started_with(monkeypatch, tmp_path):
    """Both sides of `run`: the arguments that our command line gives, and those that are written for trl_side.py."""
    runs = []
    monkeypatch.setattr(against_trl, "python_of", lambda *_: sys.executable)
    monkeypatch.setattr(against_trl, "PACKAGES", ["torch"])
    monkeypatch.setattr(against_trl, "run_study", lambda stages, found, args, tag: runs.extend(found) or [])
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "{}")
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: None)
    monkeypatch.setenv("TRL_ENVIRONMENTS", "")  # which `run` sets
    against_trl.run(against_trl.RunArgs(tag="t", seeds=(1,)))
    monkeypatch.undo()
    assert [run.name for run in runs] == [f"{system}_s1" for system in against_trl.SYSTEMS]
    own = {"sft_model_path", "reward_model_path", "output_dir", "num_sample_generations", "checkpoint_every"}
    for algorithm, module in (("rloo", train_rloo), ("ppo", train_ppo)):
        command = next(run.command for run in runs if run.name == f"ours_{algorithm}_s1")
        flags = shlex.split(command.partition(".py")[2])
        ours = vars(utils.parse_args(module.Args, toy.defaults(f"train_{algorithm}"), flags))
        theirs = against_trl.settings(algorithm)
        assert {name: ours[name] for name in ours.keys() - own} == {name: theirs[name] for name in theirs.keys() - own}


# ---- movies ----------------------------------------------------------------------------------------------------------
def test_the_commands_of_movies_parse_and_each_stage_starts_from_an_earlier_one():
    found, made = movies.commands(), set()
    assert list(found) == ["sft", "reward", "rloo", "ppo"]
    for name, command in found.items():
        args = utils.parse_args(SCRIPTS[f"train_{name}"].Args, {}, shlex.split(command)[2:])
        paths = {getattr(args, flag, None) for flag in ("sft_model_path", "reward_model_path")} - {None}
        assert paths <= made and "{seed}" in args.output_dir and args.dataset.startswith("{root}/data/movies/")
        made.add(args.output_dir)


def test_movies_are_drawn_with_a_table_of_their_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(movies, "ROOT", tmp_path)
    folder = tmp_path / "benchmark" / "results" / "t" / "movies"
    for seed in (1, 2, 3):
        write(folder, "sft", seed, {"update": [1], "eval/sft/perplexity": [100 + seed]})
        write(folder, "reward", seed, {"update": [1], "eval/rm/accuracy": [0.8]})
        for name, rise in (("rloo", 4), ("ppo", 5)):
            curve = {"episode": [0, 64, 128], "objective/scores": ["", 1, 2 + seed], "objective/kl": ["", 1, 2]}
            ends = {f"eval/objective/{m}": [0, "", rise + seed] for m in movies.FIGURES}
            write(folder, name, seed, curve | ends)
    movies.draw(movies.DrawArgs("t", output="movies.svg"))
    said = capsys.readouterr().out
    assert "| perplexity a token | 102.0 (99.5 .. 104.5) |" in said
    assert "| score | 0.00 (0.00 .. 0.00) | 6.00 (3.52 .. 8.48) | 7.00 (4.52 .. 9.48) |" in said
    assert (tmp_path / "movies.svg").stat().st_size and "seeds" in (folder.parent / "movies.md").read_text()


# ---- runs started as forks -------------------------------------------------------------------------------------------
SCRIPT = """
import json, os, sys
from pathlib import Path
import mine
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if int(flags["--seed"]) == 2:
    print("it broke", flush=True)
    raise ValueError("seed 2")
folder = Path("runs") / flags["--run_name"]
folder.mkdir(parents=True, exist_ok=True)
(folder / "metrics.jsonl").write_text(json.dumps({"update": mine.VALUE, "threads": os.environ["OMP_NUM_THREADS"]}))
"""


def test_runs_may_be_forks_of_one_process_and_import_from_their_copy_of_the_code(tmp_path):
    for value in (1, 2):
        folder = tmp_path / f"code{value}"
        folder.mkdir()
        (folder / "mine.py").write_text(f"VALUE = {value}")
        (folder / "train.py").write_text(SCRIPT)
    driver = tmp_path / "driver.py"
    driver.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmark")!r})
import benchmark
from pathlib import Path
if __name__ == "__main__":
    benchmark.ROOT, benchmark.PRELOADED = Path({str(tmp_path)!r}), ["json"]
    pairs = [(v, s) for v in (1, 2) for s in (1, 2)]
    runs = [benchmark.Run(f"v{{v}}", "python train.py --a b", s, "t", "study", f"{tmp_path}/code{{v}}") for v, s in pairs]
    args = benchmark.Args((), (), preload=True, workers=2, columns=("update", "threads"))
    print(benchmark.run_all(runs, args, "t"))
""")
    done = subprocess.run([sys.executable, driver], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] in ("['v1_s2', 'v2_s2']", "['v2_s2', 'v1_s2']"), done.stdout + done.stderr
    results = tmp_path / "benchmark" / "results" / "t" / "study"
    assert [(results / f"v{v}_s1.csv").read_text().splitlines()[1] for v in (1, 2)] == ["1,1", "2,1"]
    assert "ValueError: seed 2" in (tmp_path / "runs/benchmark/t/study/v1_s2/output.txt").read_text()


def test_every_command_of_the_tldr_experiment_parses_against_the_flags():
    environ = {"DRY_RUN": "1", "SEEDS": "7", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", ROOT / "benchmark" / "tldr.sh"], capture_output=True, text=True, env=environ, check=True)
    found = []
    for words in map(shlex.split, done.stdout.splitlines()):
        place = next(i for i, word in enumerate(words) if word.endswith(".py"))
        script = Path(words[place]).stem
        args = utils.parse_args((SCRIPTS | {"evaluate": evaluate})[script].Args, {}, words[place + 1 :])
        found.append((script, args))
    assert [script for script, _ in found] == ["train_sft", "train_reward", "train_ppo", "evaluate", "train_rloo", "evaluate"]
    made = {args.output_dir for script, args in found if script != "evaluate"}
    for _, args in found:  # each stage starts from what an earlier one of the same seed has made
        paths = [getattr(args, name, None) for name in ("sft_model_path", "reward_model_path", "policy_path", "ref_model_path")]
        assert {path for path in paths if path} <= made
        assert args.seed == 7 or isinstance(args, evaluate.Args)
    assert found[2][1].missing_eos_mode == "replace" and found[4][1].rloo_k == 2  # the recipes' own values


def test_the_studies_commands_say_what_they_do():
    for name in ("ablations", "overoptimisation"):
        done = subprocess.run([sys.executable, ROOT / f"benchmark/{name}.py", "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and "run" in done.stdout and "draw" in done.stdout, done.stderr
