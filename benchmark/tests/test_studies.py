"""The studies: their arithmetic on made-up numbers, and their commands and mutations on the pages as they are."""

import importlib
import itertools
import json
import math
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import ablations
import against_trl
import details
import held_out
import movies
import mutations
import numpy as np
import overoptimisation
import pytest
import smollm
import smollm_trl
import study
import symptoms
import torch
import trl_side
import tyro
from intervals import ROOT, write_runs

import benchmark
from rlhf_details import toy, train_grpo, train_rloo
from rlhf_details.plumbing import cli

SCRIPTS = "train_sft train_reward train_dpo train_rloo train_grpo train_ppo evaluate".split()
ARGS = {name: importlib.import_module(f"rlhf_details.{name}").Args for name in SCRIPTS}


def parse(command):
    """(script, Args) of a command of one of the scripts, with or without a launcher; a wrong flag ends the test."""
    words = shlex.split(command) if isinstance(command, str) else command
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    script = Path(words[place]).stem
    try:
        return script, cli.parse(ARGS[script], words[place + 1 :])
    except SystemExit:
        pytest.fail(f"does not parse: {command}")


def write(folder, exp, seed, columns):
    write_runs(folder, {(exp, "v1", seed): [list(columns), *zip(*columns.values(), strict=True)]})


# ---- commands --------------------------------------------------------------------------------------------------------
def test_each_symptom_has_a_run_whose_command_parses_and_whose_changes_fit_the_code(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "guides" / "8_my_run_looks_wrong.md").read_text(encoding="utf-8")
    monkeypatch.setattr(ablations, "ROOT", tmp_path)
    shutil.copytree(ROOT / "rlhf_details", tmp_path / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (broken, healthy, *_) in symptoms.SYMPTOMS.items():
        assert f"static/symptom_{name}.svg" in page and {broken, healthy} <= symptoms.RUNS.keys()
    for name, (command, changes) in symptoms.RUNS.items():
        parse(command.format(root=ROOT, seed=1))
        if changes:
            symptoms.code_of(name, changes, "tag")


def test_every_command_of_the_studies_parses_against_the_flags():
    commands = [command for _, command in ablations.BASES.values()]
    for v in ablations.VARIANTS:
        script, _, flags = ablations.BASES[v.base][1].partition(" ")
        commands.append(f"{script} {flags} {v.flags}")
        for stage, changes in (("sft", v.sft), ("reward", v.reward)):
            commands.append(f"train_{stage}.py {' '.join(x for x in changes if isinstance(x, str))}")
    commands += [command.removeprefix("python ") for _, _, command in overoptimisation.settings().values()]
    commands += [run.command.removeprefix("python ") for batch in benchmark.stage_runs((1,), "t") for run in batch]
    for command in commands:
        assert parse(command)[1].dataset == "toy"


def test_the_commands_of_movies_parse_and_each_stage_starts_from_an_earlier_one():
    found, made = movies.commands(), set()
    assert list(found) == ["sft", "reward", "rloo", "ppo", "dpo", "dpo_measured"]
    measured = tyro.cli(held_out.Args, args=shlex.split(found.pop("dpo_measured"))[2:])
    own, rloo = train_rloo.Args(), parse(found["rloo"])[1]
    told = tyro.cli(train_rloo.Args, args=shlex.split(measured.flags))  # The task is that of RLOO, to the penalty.
    assert (told.eval_dataset, told.missing_eos_penalty) == (rloo.eval_dataset, rloo.missing_eos_penalty)
    assert (measured.temperature, measured.response_length) == (rloo.temperature, rloo.response_length)
    assert own.eval_dataset != rloo.eval_dataset and own.missing_eos_penalty != rloo.missing_eos_penalty
    for command in found.values():
        _, args = parse(command)
        paths = {getattr(args, flag, None) for flag in ("sft_model_path", "reward_model_path")} - {None}
        assert paths <= made and "{seed}" in args.output_dir and args.dataset.startswith("{root}/data/movies/")
        made.add(args.output_dir)
    assert {measured.policy, measured.sft, measured.reward} <= made


def test_what_a_missing_end_lost_is_given_back_and_the_second_half_of_a_run_is_paired():
    seed = {"eval/objective/scores": np.array([-1.0, 2.0]), "eval/objective/ended": np.array([0.5, 0.8])}
    assert movies.given(seed, 5).tolist() == [1.5, 3.0]
    columns = [f"eval/objective/{name}" for name in smollm.VERIFIED_FIGURES]
    values = {1: [0, np.nan, 2, np.nan, 5], 2: [1, np.nan, 3, np.nan, 8]}
    seeds = {n: {name: np.array(y, float) for name in columns} | {"update": np.arange(5)} for n, y in values.items()}
    head, _, row, *_ = smollm.course(seeds)
    assert head == "| held out, at update | 0 | 2 | 4 | from 2 to 4 |"
    assert row == "| right answers | 0.50 | 2.50 | 6.50 | 4.00 (-8.71 .. 16.71) |"  # 12.706 deviations


# ---- ablations -------------------------------------------------------------------------------------------------------
def test_every_variants_mutation_changes_the_files_that_it_names(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "rlhf_details", tmp_path / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(ablations, "ROOT", tmp_path)
    before = mutations.sources()
    for variant in ablations.VARIANTS:
        changes = [*variant.mutations, *(x for x in variant.sft + variant.reward if not isinstance(x, str))]
        if changes:
            after = mutations.sources(ablations.code_of(variant.name, changes, "t"))
            assert {file for file in after if after[file] != before[file]} == {file for file, *_ in changes}, (
                variant.name
            )
        assert variant.flags or variant.sft or changes or variant.runs, variant.name


def test_a_detail_is_priced_or_listed_with_the_reason_why_not():
    priced = {tag for variant in ablations.VARIANTS for tag in variant.tags.split()}
    of_studies = [run for name in study.studies() for run in study.Study(name).runs.values()]
    priced |= {tag for run in of_studies for tag in run.get("tags", "").split()}
    unpriced = [tag for tags in ablations.UNPRICED.values() for tag in tags.split()]
    assert priced | set(unpriced) == set(details.read("details.toml")["tags"]) and not priced & set(unpriced)
    names = [v.name for v in ablations.VARIANTS] + list(ablations.BASES)
    assert len(names) == len(set(names))
    assert set(ablations.LONG + ablations.OPTIONS) <= set(names)
    assert ablations.longer("x --total_episodes 12 --seed 3", 4) == "x --total_episodes 48 --seed 3"
    assert all(v.base in ablations.BASES and (not v.runs or v.runs in ablations.BASES) for v in ablations.VARIANTS)


def test_longer_runs_are_those_of_the_chosen_variants_and_their_bases(monkeypatch):
    asked = []
    monkeypatch.setattr(ablations, "stages", lambda *_: [])
    monkeypatch.setattr(ablations, "code_of", lambda *_: ROOT)
    monkeypatch.setattr(ablations, "run_study", lambda stages, runs, *_: asked.extend(runs) or [])
    assert ablations.run(ablations.RunArgs(tag="t", seeds=(1,), times=4)) == []
    own = [run for run in asked if "held_out.py" not in run.command]
    assert {run.results.name for run in asked} == {"ablations_4"}
    assert all("--total_episodes 12800" in run.command or "--total_episodes 6144" in run.command for run in own)
    runs = {v.runs for v in ablations.VARIANTS if v.runs and v.name in ablations.LONG}
    without_own = {v.name for v in ablations.VARIANTS if v.runs}
    assert {run.key[0] for run in own} >= (set(ablations.LONG) - without_own) | runs | {"rloo", "ppo"}


def test_effects_are_paired_differences_and_verdicts_are_corrected_for_their_number(tmp_path, monkeypatch):
    def outcomes(name, gold, kl, tag="new", seeds=10):
        for seed in range(1, seeds + 1):
            level = np.random.default_rng(seed).normal()  # Seeds lie 1 apart.
            level += gold + 0.05 * np.random.default_rng([seed, *name.encode()]).normal()
            ends = {"eval/objective/gold": ["", level], "eval/objective/kl": ["", kl]}
            ends |= {"eval/objective/ended": ["", 0.5], "objective/gold": [level, level]}
            write(tmp_path / tag / "ablations", name, seed, {"update": [1, 2]} | ends)

    variants = [ablations.Variant("worse", "rloo", "A-1", "w"), ablations.Variant("same", "rloo", "", "s", runs="rloo")]
    variants += [ablations.Variant(f"other{i}", "rloo", "A-1", "o") for i in range(20)]
    monkeypatch.setattr(ablations, "VARIANTS", [*variants, ablations.Variant("not_run", "rloo", "", "n")])
    outcomes("rloo", 0, 4), outcomes("worse", -1, 9)
    for variant in variants[2:]:
        outcomes(variant.name, 0, 4)
    outcomes("rloo", 0, 4, "old"), outcomes("worse", 0, 4, "old"), outcomes("other0", 0.14, 4, "old", seeds=3)
    folders = [tmp_path / tag / "ablations" for tag in ("new", "old")]
    found, bases = ablations.effects(folders)
    assert "not_run" not in found and set(bases) == {("rloo", "new")}
    assert ablations.effects(folders[::-1])[0]["worse"]["base"] == ("rloo", "old")
    assert ablations.effects(folders[::-1])[0]["other0"]["base"] == ("rloo", "new")
    mean, low, high, _ = found["worse"]["gold"]
    assert mean == pytest.approx(-1, abs=0.1) and low < -1 < high and high - low < 0.3
    assert found["worse"]["kl"][:3] == (5, 5, 5) and bases["rloo", "new"]["kl"][0] == 4
    verdict, sure = ablations.verdicts(found)
    assert verdict["worse"] == "matters" and verdict["same"] == "changes nothing"
    assert {("worse", "gold"), ("worse", "kl")} <= sure and not {name for name, _ in sure} - {"worse"}
    assert ablations.count_up(found["worse"]) == "10: 0, 10"
    line = ablations.table_beside(found, verdict, found, "long")[2]  # of runs that are as long
    gold, kl = ablations.signed(found["worse"]["gold"]), ablations.signed(found["worse"]["kl"])
    assert line == f"| A-1 | w | rloo | 10: 0, 10 | {gold} | **{gold}** | {kl} | **{kl}** | matters | matters |  |"
    better = found | {"worse": found["worse"] | {"gold": (1, 0.5, 1.5, 0.001)}}
    assert ablations.table_beside(better, verdict, found, "long")[2].endswith(" | gold |")
    lines, count = ablations.repeated(found, folders[1])
    assert [line.split(" | ")[2] for line in lines[2:]] == ["10, 10", "10, 10", "10, 3"] and count == "5 of 5"
    # other0 lies outside what is predicted for the mean of three more seeds. For a single one it would lie within.
    outside = ["gold, gold over the run, KL |", " |", "gold, gold over the run |"]
    assert [line.split(" | ")[-1] for line in lines[2:]] == outside
    assert len(ablations.repeated(found, folders[0])[0]) == 2  # They are the same runs.
    monkeypatch.setattr(ablations, "OWN_BATCHES", {"worse"})  # its gold over the run says nothing
    assert ("worse", "course") in sure and ("worse", "course") not in ablations.verdicts(found)[1]
    others = [verdict[v.name] for v in variants[2:]]
    assert set(others) <= {"perhaps", "does not show here"} and others.count("perhaps") <= 5
    _, _, matters, perhaps, *_, total = ablations.tally(variants, verdict)
    assert matters == "| matters | 1 | 1 |  |" and total == "| all | 22 | 1 |  |"
    assert perhaps == f"| perhaps | {others.count('perhaps')} | 0 | 4 or fewer, of 80 figures |"


# ---- over-optimisation -----------------------------------------------------------------------------------------------
def test_best_of_n_is_the_mean_over_all_subsets():
    scores, golds = np.sort(np.random.default_rng(1).normal(size=6)), np.random.default_rng(2).normal(size=6)
    for best_of in (1, 2, 3, 6):
        best = [golds[max(subset, key=lambda i: scores[i])] for subset in itertools.combinations(range(6), best_of)]
        assert golds @ overoptimisation.best_of_shares(6, best_of) == pytest.approx(np.mean(best))


def test_best_of_n_scores_rise_with_n(tiny, in_tmp, monkeypatch):
    for name, value in {"ROOT": in_tmp, "RESPONSES": 4, "PROMPTS": 8}.items():
        monkeypatch.setattr(overoptimisation, name, value)
    for name, model in (("sft", "policy"), ("reward", "reward")):
        shutil.copytree(tiny / model, in_tmp / "models" / "bench" / "3" / name)
    overoptimisation.best_of_n(overoptimisation.BestOfNArgs(3))
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 4]
    scores = [row["objective/scores"] for row in rows]
    assert scores == sorted(scores) and scores[0] < scores[-1] and rows[0]["objective/kl"] == 0


def test_a_fall_is_from_the_peak_of_the_other_seeds_mean_and_paired():
    x = np.arange(30.0)
    level = np.random.default_rng(1).normal(size=8)
    gold = (-((x - 10) ** 2) / 100).reshape(-1, 1) + level
    gold[20, 0] += 100  # This is one seed's luck. It is measured at the others' peak, and not at its own.
    peak, lost, gained, losses = overoptimisation.fall(gold, x.reshape(-1, 1) * 0.1 + level)
    assert peak == 20 and losses == pytest.approx([3.61] + 7 * [2.61])
    assert lost[0] == pytest.approx((3.61 + 7 * 2.61) / 8) and gained[0] == pytest.approx((1.9 + 7 * 0.9) / 8)
    noise = np.random.default_rng(2).normal(size=(40, 10))
    assert overoptimisation.fall(noise, noise)[1][1] < 0  # There is no fall where there is only noise.


def test_the_held_out_figures_are_those_of_the_final_policies(tmp_path):
    for seed, gold in ((1, 6.0), (2, 8.0)):
        ends = {"eval/objective/gold": [9.0, "", gold], "eval/objective/kl": [0.0, "", 3.0 * seed]}
        write(tmp_path, "x", seed, {"update": [0, 1, 2]} | ends)
    assert overoptimisation.held_out(tmp_path, "x") == ("7.00 (-5.71 .. 19.71)", 4.5)  # 12.706 deviations


# ---- against TRL -----------------------------------------------------------------------------------------------------
@pytest.fixture
def stages(tiny, in_tmp, monkeypatch):
    """The folder of seed 3's stages, the tiny models, below a root of its own."""
    monkeypatch.setattr(against_trl, "ROOT", in_tmp)
    folder = in_tmp / "models" / "bench" / "3"
    for name, model in (("sft", "policy"), ("reward", "reward")):
        shutil.copytree(tiny / model, folder / name)
    return folder


@pytest.mark.slow
def test_the_evaluator_of_trls_policies_gives_our_scripts_own_figures(stages):
    paths = {"sft_model_path": str(stages / "sft"), "reward_model_path": str(stages / "reward"), "output_dir": "policy"}
    changes = {"batch_size": 16, "total_episodes": 32, "num_sample_generations": 0, "seed": 3}
    changes |= paths | {"run_name": "run", "overwrite": True}
    after = train_rloo.main(train_rloo.Args(**against_trl.settings("rloo") | changes))["after"]
    found = held_out.evaluate("policy", stages / "sft", stages / "reward", 3)
    assert found == {name: after[name] for name in found}
    assert found.keys() == {f"eval/objective/{name}" for name in ("scores", "gold", "kl", "ended", "length")}
    dearer = held_out.evaluate("policy", stages / "sft", stages / "reward", 3, flags="--missing_eos_penalty 9")
    lost = 9 - against_trl.settings("rloo")["missing_eos_penalty"]  # Another task's flags count.
    expected = found["eval/objective/scores"] - lost * (1 - found["eval/objective/ended"])
    assert dearer["eval/objective/scores"] == pytest.approx(expected) and found["eval/objective/ended"] < 1


def test_what_is_recorded_are_the_samples_that_were_trained_on(stages, in_tmp, monkeypatch):
    seen, score = [], train_rloo.response_scores

    def watched(reward_model, batch, n):
        seen.extend([q[m].tolist(), r[w].tolist()] for q, m, r, w in zip(*batch[:4], strict=True))
        return score(reward_model, batch, n)

    monkeypatch.setattr(train_rloo, "response_scores", watched)
    (in_tmp / "out").mkdir()
    changes = {"batch_size": 16, "total_episodes": 32, "share_prompts": False}
    changes |= {"seed": 3, "sft_model_path": str(stages / "sft"), "reward_model_path": str(stages / "reward")}
    against_trl.record("rloo", against_trl.settings("rloo") | changes, in_tmp / "out")
    samples = json.loads((in_tmp / "out" / "samples.json").read_text())
    assert [len(update) for update in samples] == [16, 16] and sorted(itertools.chain(*samples)) == sorted(seen)
    assert all(len({tuple(query) for query, _ in update[i : i + 4]}) == 1 for update in samples for i in (0, 4, 8, 12))
    start, ours = str(stages / "sft"), str(in_tmp / "out" / "ours")
    assert against_trl.distance(ours, ours, start) == 0 and against_trl.distance(ours, start, start) == 1


def test_a_replay_keeps_the_rows_that_it_does_not_renew(tmp_path, monkeypatch):
    monkeypatch.setattr(against_trl, "ROOT", tmp_path)
    monkeypatch.setattr(against_trl, "python_of", lambda *_: sys.executable)
    monkeypatch.setattr(against_trl.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(against_trl, "record", lambda *x: (x[2] / "samples.json").write_text("[1, 2]"))
    found = {}
    for algorithm, seed, apart in (("ppo", 1, 0.5), ("rloo", 1, 0.25), ("grpo", 2, 0.125)):
        monkeypatch.setattr(against_trl, "distance", lambda *_, apart=apart: apart)
        against_trl.replay(against_trl.ReplayArgs("t", seed, algorithms=(algorithm,)))
        lines = (tmp_path / "benchmark" / "results" / "t" / "trl_replay.md").read_text().splitlines()
        found[algorithm] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.endswith(" % |")]
    own = {name: [what for of, _, what in against_trl.REPLAYED if of == name] for name in against_trl.UPDATES}
    assert [row[0] for row in found["ppo"]] == own["ppo"]
    in_order = [what for of, _, what in against_trl.REPLAYED if of != "grpo"]
    assert list(dict.fromkeys(row[0] for row in found["rloo"])) == in_order
    assert {row[0]: (row[1], *row[3:]) for row in found["rloo"]} == {
        what: ("1", "2", f"{share} %") for name, share in (("rloo", 25), ("ppo", 50)) for what in own[name]
    }
    of_seed_2 = len(own["grpo"])
    assert found["grpo"][:-of_seed_2] == found["rloo"]
    assert [row[:2] for row in found["grpo"][-of_seed_2:]] == [[what, "2"] for what in own["grpo"]]


def test_the_tables_against_trl():
    spread, own = np.array([-1.0, -0.5, 0.0, 0.5, 1.0]), np.array([0.1, -0.2, 0.0, 0.2, -0.1])

    def seeds(level, own=0.0):
        found = enumerate(spread + own)
        return {
            i: {f"eval/objective/{n}": np.array([math.nan, level + x]) for n in against_trl.FIGURES} for i, x in found
        }

    found = {"ours_rloo": seeds(1.0), "trl_rloo_1.16.0": seeds(1.05, own), "trl_rloo_0.21.0": seeds(1.5, own)}
    found["ours_rloo_in_4"] = seeds(9.0)
    lines = against_trl.tables(found)
    names = "ours_rloo less trl_rloo_1.16.0", "ours_rloo less trl_rloo_0.21.0", "ours_rloo_in_4 less ours_rloo"
    near, far, off = (next(x for x in lines if x.startswith(f"| {name} |")) for name in names)
    assert near.endswith("less trl_rloo_1.16.0 |" + " -0.05 [-0.25, +0.15] |" * 3 + " yes |")
    assert far.endswith(" **-0.50 [-0.70, -0.30]** | yes |")  # Seeds differ more than the systems do.
    assert off.endswith("| score not, gold not, KL, nats a response not |")
    assert lines[2].startswith("| ours_rloo | 5 | 1.00 [0.02, 1.98], 0.00 .. 2.00 |")


def test_four_micro_batches_are_held_to_the_same_of_ours_and_to_one():
    one, four = {1: {}, 2: {}}, {1: {}}
    found = {"ours_ppo": one, "trl_ppo_0.21.0": one, "ours_ppo_in_4": four, "trl_ppo_0.21.0_in_4": four}
    assert [pair[:2] for pair in against_trl.pairs(found)] == [
        ("ours_ppo", "trl_ppo_0.21.0"),
        ("ours_ppo_in_4", "trl_ppo_0.21.0_in_4"),
        ("ours_ppo_in_4", "ours_ppo"),
        ("trl_ppo_0.21.0_in_4", "trl_ppo_0.21.0"),
    ]
    asked = list(itertools.product(("toy", "lengths"), (None, 100), (64, 128)))
    assert len({against_trl.study_of(*case) for case in asked}) == len(asked)
    assert against_trl.study_of("toy", None, 128) == "trl"


def test_the_stages_of_the_task_with_varying_lengths_parse_and_their_reviews_vary(in_tmp, monkeypatch):
    monkeypatch.setattr(against_trl, "ROOT", in_tmp)
    monkeypatch.setattr(against_trl, "LENGTHS", (64, *against_trl.LENGTHS[1:]))
    first, second = against_trl.lengths_stages((3,))
    ((sft, _),), ((reward, _),) = first.values(), second.values()
    _, sft_args = parse(sft.removeprefix("python ").format(root=in_tmp, seed=3))
    _, reward_args = parse(reward.removeprefix("python ").format(root=ROOT, seed=3))
    assert (Path(sft_args.base_model) / "config.json").exists()
    assert reward_args.dataset == "toy" and reward_args.response_length == against_trl.LENGTHS[2]
    rows = [json.loads(line) for line in (in_tmp / "models" / "bench" / "lengths.jsonl").read_text().splitlines()]
    lengths = [len(row["completion"].split()) for row in rows]
    assert min(lengths) < 20 and 60 < max(lengths) <= against_trl.LENGTHS[2]
    assert all(toy.parses(f"{row['prompt']} {row['completion']}") for row in rows)


def test_trl_gets_the_settings_that_our_side_is_started_with():
    own = {"sft_model_path", "reward_model_path", "output_dir", "num_sample_generations", "checkpoint_every"}
    for algorithm, case in itertools.product(against_trl.UPDATES, [(), ("lengths", 100, 64, 4)]):
        flags = " ".join(f"--{name} {value}" for name, value in against_trl.changes_of(algorithm, *case).items())
        _, args = parse(f"train_{algorithm}.py {against_trl.RUN} {flags} {benchmark.STAGES}")
        args = train_grpo.with_objective(args) if algorithm == "grpo" else args
        ours, theirs = vars(args), against_trl.settings(algorithm, *case)
        assert {name: ours[name] for name in ours.keys() - own} == {name: theirs[name] for name in theirs.keys() - own}


def test_trls_losses_can_be_divided_by_the_minibatchs_tokens(monkeypatch):
    """Micro-batches' means then average to the mean over the whole minibatch, of actions and of states."""
    trainer = SimpleNamespace(ppo_trainer=SimpleNamespace())
    for name, module in (("trl", SimpleNamespace(trainer=trainer)), ("trl.trainer", trainer)):
        monkeypatch.setitem(sys.modules, name, module)
    trl_side.take_whole_means()
    losses, lengths = torch.arange(40.0).view(8, 5).sin(), torch.tensor([1, 2, 5, 4, 3, 1, 2, 2])
    padding_mask = torch.arange(5) >= lengths.unsqueeze(1)
    padding_mask_p1 = torch.arange(5) > lengths.unsqueeze(1)
    mini_batch_inds = np.random.default_rng(0).permutation(8)
    for padding in (padding_mask, padding_mask_p1):
        of_micro_batches = []
        for micro_batch_start in range(0, 8, 2):
            micro_batch_end = micro_batch_start + 2
            inds = mini_batch_inds[micro_batch_start:micro_batch_end]
            of_micro_batches.append(trainer.ppo_trainer.masked_mean(losses[inds], ~padding[inds]))
        torch.testing.assert_close(torch.stack(of_micro_batches).mean(), losses[~padding].mean())
    assert (padding_mask_p1.sum(), micro_batch_end) == (padding_mask.sum() - 7, 8)


# ---- SmolLM2 ---------------------------------------------------------------------------------------------------------
def test_the_commands_of_the_study_of_a_real_model_parse_and_its_tables_are_paired(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "rlhf_details", tmp_path / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(ablations, "ROOT", tmp_path)
    found = smollm.commands("t")
    for name, (command, folder) in found.items():
        _, args = parse(command.format(root=ROOT, seed=3))
        assert args.output_dir.endswith(f"models/bench/3/smollm_{name}") and args.checkpoint_every == 0
        assert (folder is not None) == (name in smollm.DETAILS and not smollm.DETAILS[name][2])
    started = []
    monkeypatch.setattr(smollm, "run_all", lambda runs, *_: started.append([run.key[0] for run in runs]))
    for only in ((), ("grpo_long",)):
        smollm.run(smollm.RunArgs(tag="t", seeds=(1,), only=only))
    assert started == [[name for name in found if name != "grpo_long"], ["grpo_long"]]
    figures = {"rewards/lexicon": 0.5, "rewards/obeys": 0.25, "ended": 0.75, "kl": 3.0}

    def seed(number, shift):
        return {f"eval/objective/{k}": np.array([0.0, np.nan, x + number + shift]) for k, x in figures.items()} | {
            "objective/rewards/lexicon": np.array([np.nan, number, number + 2 * shift])
        }

    runs = {"base": {n: seed(n, 0) for n in (1, 2, 3)}, "unmasked": {n: seed(n, -1) for n in (2, 3, 4)}}
    (effect,) = smollm.of_details(runs).values()  # A single seed has no interval, and no row.
    assert (
        all((effect[name] == [-1, -1]).all() for name in ("rewards/lexicon", "ended", "course")) and "kl" not in effect
    )
    assert smollm.risen(runs["base"], ["kl"]) == ["0.00 -> 5.00, 5.00 (2.52 .. 7.48)"]


def test_trl_gets_the_settings_the_columns_and_the_penalty_of_our_run(tmp_path):
    ours = smollm_trl.settings("rloo", seed=3, updates=2)
    assert (ours["rloo_k"], ours["total_episodes"], ours["seed"], ours["kl_coef"]) == (8, 128, 3, 0.04)
    path = tmp_path / "mine.py"
    path.write_text(
        "def long(prompts, completions, least):\n    return [len(x) >= n for x, n in zip(completions, least)]"
    )
    spec = {"reward_fn": f"{path}:long", "columns": ["least"], "settings": ours}
    reward, last = trl_side.reward_function(spec, SimpleNamespace(eos_token_id=2))
    given = dict(completion_ids=[[5, 6, 2], [5, 2], [5, 6]], least=[2, 2, 2], kind=["a", "b", "c"])
    # The first two ended. The third one is right, and pays the penalty of 1.
    assert reward(["p"] * 3, ["ab", "a", "ab"], **given) == [1.0, 0.0, 0.0]
    assert last == {"scores": pytest.approx(1 / 3), "tokens": 7}
