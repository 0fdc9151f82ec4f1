"""study.py: what each study's file says runs on the pages as they are, and tables say what made-up numbers say."""

import importlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import best_of_n
import held_out
import mutations
import numpy as np
import pass_rates
import pytest
import study
import tables
import tables_own
import tyro
from intervals import ROOT, write_runs

import benchmark
from rlhf_details import train_rloo
from rlhf_details.plumbing.inputs import cli

SCRIPTS = "train_sft train_reward train_dpo train_rloo train_grpo train_ppo train_distill train_agent evaluate".split()
ARGS = {name: importlib.import_module(f"rlhf_details.{name}").Args for name in SCRIPTS}
NAMES = study.studies()


def parse(command):
    """Args of a command of one of the scripts, with or without a launcher; a wrong flag ends the test."""
    words = shlex.split(command.format(root=ROOT, seed=1))
    place = max(i for i, word in enumerate(words) if word.startswith("rlhf_details/"))
    try:
        return cli.parse(ARGS[Path(words[place]).stem], words[place + 1 :])
    except SystemExit:
        pytest.fail(f"does not parse: {command}")


# ---- what the files say ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_each_command_of_a_study_parses_and_each_edit_changes_its_file(name, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "rlhf_details", tmp_path / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(study, "ROOT", tmp_path)
    one, before = study.Study(name), mutations.sources()
    for each in [*one.runs, *(stage for batch in one.needed(one.runs) for stage in batch)]:
        if "rlhf_details/" in one.command(each):
            parse(one.command(each))
        if edits := one.edits(each):
            after = mutations.sources(study.code_of(each, edits, "t"))
            assert {file for file in after if after[file] != before[file]} == {file for file, *_ in edits}, each
        if (flags := one.inherited(each, "measure")) is not None:
            words = shlex.split(one.located(one.fill(flags)).format(root=ROOT, seed=1))
            told = tyro.cli(held_out.Args, args=["--policy", "p", *words])
            tyro.cli(train_rloo.Args, args=shlex.split(told.flags))
    for each, spec in one.runs.items():
        assert {spec.get("base", each), spec.get("like", each), spec.get("runs", each)} <= one.runs.keys(), each
    assert one.said["question"].endswith("?") and one.said["answer"].endswith(".")
    assert {run.removesuffix("_measured") for run in one.found} <= one.runs.keys() | one.stages.keys()


@pytest.mark.parametrize(
    ("name", "run", "needed"),
    [
        ("grpo", "part_gspo", [["sft"], ["reward"]]),
        ("grpo", "sum_gspo", [["sum_sft"]]),
        ("grpo", "lengths", [["lengths_base"], ["lengths_sft"], ["lengths_reward"]]),
        ("dpo", "dpo", [["sft"], ["reward"]]),  # The reward model measures it.
    ],
)
def test_a_study_trains_the_stages_that_its_runs_need_in_order_and_no_others(name, run, needed):
    assert study.Study(name).needed([run]) == needed


def test_a_detail_is_priced_or_listed_with_the_reason_why_not():
    tags = {tag for name in NAMES for run in study.Study(name).runs.values() for tag in run.get("tags", "").split()}
    unpriced = {tag for tag, row in mutations.DETAILS.items() if "unpriced" in row}
    assert tags | unpriced == mutations.DETAILS.keys() and not tags & unpriced


def test_the_commands_of_movies_are_those_of_the_recipe():
    words = ["bash", str(ROOT / "benchmark/recipes/movies.sh"), "{root}/data/movies", "models/{seed}"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"DRY_RUN": "1"})
    one, paths = study.Study("movies"), ("output_dir", "sft_model_path", "reward_model_path")
    recipe = [parse(line) for line in printed.stdout.splitlines() if "evaluate.py" not in line]
    ours = [parse(one.command(name)) for name in ("movies_sft", "movies_reward", "rloo", "ppo", "dpo")]
    for a, b in zip(recipe, ours, strict=True):
        assert {k: v for k, v in vars(a).items() if k not in paths} == {
            k: v for k, v in vars(b).items() if k not in paths
        }


def test_one_run_of_a_study_is_kept_with_its_commit_and_is_not_made_twice(tiny, in_tmp, monkeypatch, capsys):
    for module in (study, benchmark):
        monkeypatch.setattr(module, "ROOT", in_tmp)
    (in_tmp / "mini.toml").write_text(f"""
question = "?"
seeds = [1]
[run.base]
command = "train_rloo.py --sft_model_path {tiny}/policy --reward_model_path {tiny}/reward --output_dir policy"
flags = "--batch_size 8 --total_episodes 16 --num_sample_generations 0 --checkpoint_every 0 --eval_dataset None"
[run.longer]
base = "base"
flags = "--total_episodes 24"
[run.other]
like = "base"
""")
    shutil.copytree(ROOT / "rlhf_details", in_tmp / "rlhf_details")
    args = study.RunArgs(study="mini.toml", runs=("longer",), workers=1, tag="v1")
    assert study.run(args) == [] and study.run(args) == [] and "2 runs, all done" in capsys.readouterr().out
    found = study.Study("mini.toml").found
    assert {run: [*seeds["v1"][1]["update"]] for run, seeds in found.items()} == {"base": [1, 2], "longer": [1, 2, 3]}
    about = json.loads((in_tmp / "benchmark/results/mini/env.json").read_text())["v1"]
    assert about["commands"].keys() == {"base", "longer"} and len(about["environments"][0]["code"]) == 12


# ---- tables ----------------------------------------------------------------------------------------------------------
class Made(study.Study):
    """A study of made-up runs."""

    def __init__(self, folder, runs):
        self.name, self.said, self.runs, self.folder, self.prices = "made", {}, runs, folder, ""


def write(folder, run, seed, columns):
    write_runs(folder, {(run, "new", seed): [list(columns), *zip(*columns.values(), strict=True)]})


def test_effects_are_paired_differences_and_verdicts_are_corrected_for_their_number(tmp_path):
    def outcomes(name, gold, kl):
        for seed in range(1, 11):
            level = np.random.default_rng(seed).normal()  # Seeds lie 1 apart.
            level += gold + 0.05 * np.random.default_rng([seed, *name.encode()]).normal()
            ends = {"eval/objective/gold": ["", level], "eval/objective/kl": ["", kl]}
            ends |= {"eval/objective/ended": ["", 0.5], "objective/gold": [level, level]}
            write(tmp_path, name, seed, {"update": [1, 2]} | ends)

    runs = {"rloo": {}, "worse": {"base": "rloo"}, "same": {"base": "rloo", "runs": "rloo"}}
    runs |= {f"other{i}": {"base": "rloo"} for i in range(20)}
    outcomes("rloo", 0, 4), outcomes("worse", -1, 9)
    for i in range(20):
        outcomes(f"other{i}", 0, 4)
    one = Made(tmp_path, runs | {"not_run": {"base": "rloo"}})
    found, bases = tables.effects(one)
    assert "not_run" not in found
    mean, low, high, _ = found["worse"]["gold"]
    assert mean == pytest.approx(-1, abs=0.1) and low < -1 < high and high - low < 0.3
    assert found["worse"]["kl"][:3] == (5, 5, 5) and bases["rloo", "new"]["kl"][0] == 4
    verdict, sure = tables.verdicts(one, found)
    assert verdict["worse"] == "matters" and verdict["same"] == "changes nothing"
    assert {("worse", "gold"), ("worse", "kl"), ("worse", "course")} <= sure and not {n for n, _ in sure} - {"worse"}
    others = [verdict[f"other{i}"] for i in range(20)]
    assert set(others) <= {"perhaps", "does not show here"} and others.count("perhaps") <= 5


def test_a_fall_is_from_the_peak_of_the_other_seeds_mean_and_paired():
    x = np.arange(30.0)
    level = np.random.default_rng(1).normal(size=8)
    gold = (-((x - 10) ** 2) / 100).reshape(-1, 1) + level
    gold[20, 0] += 100  # This is one seed's luck. It is measured at the others' peak, and not at its own.
    peak, lost, gained, losses = tables_own.fall(gold, x.reshape(-1, 1) * 0.1 + level)
    assert peak == 20 and losses == pytest.approx([3.61] + 7 * [2.61])
    assert lost[0] == pytest.approx((3.61 + 7 * 2.61) / 8) and gained[0] == pytest.approx((1.9 + 7 * 0.9) / 8)


# ---- what else the runs are made with --------------------------------------------------------------------------------
def test_best_of_n_is_the_mean_over_all_subsets_and_its_scores_rise(tiny, in_tmp):
    scores, golds = np.sort(np.random.default_rng(1).normal(size=6)), np.random.default_rng(2).normal(size=6)
    for n in (1, 2, 3, 6):
        best = [golds[max(subset, key=lambda i: scores[i])] for subset in itertools.combinations(range(6), n)]
        assert golds @ best_of_n.best_of_shares(6, n) == pytest.approx(np.mean(best))
    best_of_n.main(best_of_n.Args(str(tiny / "policy"), str(tiny / "reward"), seed=3, responses=4, prompts=8))
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 4] and rows[0]["objective/kl"] == 0
    scores = [row["objective/scores"] for row in rows]
    assert scores == sorted(scores) and scores[0] < scores[-1]


def test_pass_rates_are_those_of_all_answers_to_a_prompt(tiny, in_tmp):
    Path("mine.py").write_text(
        "def rows(): return [{'prompt': word} for word in ('we', 'my aunt', 'i')]\n"
        "def check(prompts, completions): return [i % 4 == 0 for i in range(len(prompts))]\n"
    )
    args = pass_rates.Args(str(tiny / "policy"), ("mine.py:rows",), "mine.py:check", "--response_length 4", samples=4)
    pass_rates.main(args)
    row = json.loads(Path("runs/run/metrics.jsonl").read_text())
    assert (row["rows/pass@1"], row["rows/pass@2"], row["rows/pass@4"]) == (0.25, 0.5, 1.0)
    assert 1 <= row["rows/length"] <= 4


@pytest.mark.slow
def test_the_evaluator_gives_our_scripts_own_figures(tiny, in_tmp):
    words = ["--sft_model_path", str(tiny / "policy"), "--reward_model_path", str(tiny / "reward"), "--seed", "3"]
    words += ["--batch_size", "16", "--total_episodes", "32", "--output_dir", "policy", "--run_name", "run"]
    args = cli.parse(train_rloo.Args, [*words, "--num_sample_generations", "0"])
    after = train_rloo.main(args)["after"]
    found = held_out.evaluate("policy", tiny / "policy", tiny / "reward", 3)
    assert found == {name: after[name] for name in found}
    assert found.keys() == {f"eval/objective/{name}" for name in ("scores", "gold", "kl", "ended", "length")}
    dearer = held_out.evaluate("policy", tiny / "policy", tiny / "reward", 3, flags="--missing_eos_penalty 9")
    lost = 9 - args.missing_eos_penalty  # Another task's flags count.
    expected = found["eval/objective/scores"] - lost * (1 - found["eval/objective/ended"])
    assert dearer["eval/objective/scores"] == pytest.approx(expected) and found["eval/objective/ended"] < 1
