"""The held-out evaluation and the tables of samples in whole runs."""

import json
import statistics
from statistics import fmean as mean

import pytest
from cases import CASES, EVERY_CASE, TAUGHT, episodes_of, run_case, write_prompts
from helpers import PAGES, page_args, record, rloo_args
from slow_oracle import Oracle

from rlhf_details import utils
from rlhf_details.utils import EVALUATION

RLOO = PAGES["train_rloo"]


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@EVERY_CASE
def test_held_out_evaluation_is_the_same_draw_before_and_after(ragged, in_tmp, few_prompts, case):
    page, options = CASES[case]
    flags = dict(learning_rate=0.0, eval_dataset="toy:test", eval_every=2, total_episodes=64, response_length=4)
    result = PAGES[page].main(page_args(page, ragged, **(options | flags)))
    names = "kl length ended gold gold_std parses".split() + ["scores", "scores_std"] * (case not in TAUGHT)
    assert result["before"].keys() == {f"eval/objective/{name}" for name in names}
    assert result["before"] == pytest.approx(result["after"], abs=1e-5)


@pytest.mark.parametrize("case", ["rloo", "grpo", "lm-human-preferences", "distill-jsd"])
def test_held_out_responses_are_scored_and_measured_like_the_training_ones(ragged, in_tmp, monkeypatch, case):
    """11 prompts in slices of 2, against the slow oracle's score and KL; the reference is the model in the folder."""
    sampled = record(monkeypatch, utils, "sample")["sample"]
    flags = dict(eval_dataset=write_prompts("eleven.jsonl", 11), rollout_micro_batch_size=2)
    flags |= dict(learning_rate=1e-2, total_episodes=16, response_length=12)
    # The teacher never says EOS, so a student that follows it would hardly end.
    flags |= dict(learning_rate=1e-4) if case in TAUGHT else dict(missing_eos_penalty=3.0)
    flags |= {"grpo": dict(soft_overlong=9), "lm-human-preferences": dict(truncate_after=6)}.get(case, {})
    row = run_case(case, ragged, **flags)[-1]
    page, options = CASES[case]
    args = page_args(page, ragged, **(options | flags))
    oracle = Oracle(ragged, args, 1)
    found = {"scores": [], "kl": [], "length": [], "ended": []}
    last = [call for call in sampled if call[0][7][1] == EVALUATION][-1:]
    logprobs = [x[m].sum().item() for _, (_, mask, rows) in last for x, m in zip(rows, mask, strict=True)]
    episodes = [episode for batch in episodes_of(last, EVALUATION) for episode in batch]
    for episode, own in zip(episodes, logprobs, strict=True):
        score, read, ended = oracle.score(*episode)
        found["scores"].append(score), found["length"].append(len(read)), found["ended"].append(float(ended))
        query, response = episode
        found["kl"].append(own - sum(oracle.logprobs(oracle.reference, oracle.read_by_teacher(query), response)))
    assert len(episodes) == 11 and abs(mean(found["kl"])) > 1e-3 and 0 < mean(found["ended"]) < 1
    scores = found.pop("scores") if case in TAUGHT else found["scores"]  # A page with a teacher has none.
    for name, numbers in found.items():
        assert row[f"eval/objective/{name}"] == pytest.approx(mean(numbers), abs=1e-4), name
    assert case in TAUGHT or row["eval/objective/scores_std"] == pytest.approx(statistics.pstdev(scores), abs=1e-4)


def test_sample_tables_are_as_many_as_asked_for_and_their_total_is_what_was_rewarded(ragged, in_tmp):
    options = dict(num_sample_generations=3, total_episodes=80, eval_dataset=write_prompts("eleven.jsonl", 11))
    RLOO.main(rloo_args(ragged, **options))
    rows = [json.loads(line) for line in (in_tmp / "runs/run/samples.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1] * 4 + [3] * 4 + [5] * 4
    for row in rows:
        assert row.keys() == {"update", "query", "response", "ended", "end", "score", "kl", "total"}
        assert row["total"] == pytest.approx(row["score"] - 0.03 * row["kl"], abs=1e-5)


def test_samples_of_training_end_where_the_reward_model_has_read_to(ragged, in_tmp):
    run_case("lm-human-preferences", ragged, num_sample_generations=3, response_length=12, total_episodes=48)
    rows = [json.loads(line) for line in (in_tmp / "runs/run/samples.jsonl").read_text().splitlines()]
    ends = {row["end"] for row in rows if row["ended"]}
    assert ends == {"<eos>"} and any(not row["ended"] for row in rows)


def test_training_args_hold_what_the_user_gave_and_not_what_an_objective_took(ragged, in_tmp):
    run_case("grpo-overlap", ragged, total_episodes=16)
    args = json.loads((in_tmp / "models/grpo/training_args.json").read_text())
    assert args["overlap"] and [args[x] for x in ("cliprange", "cliprange_high", "loss_normalization")] == [None] * 3
