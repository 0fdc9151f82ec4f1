"""From responses to rewards, advantages and metrics in whole runs: truncation, the EOS trick, KL, whitening."""

import contextlib
import itertools
import json
import math
import shutil
import statistics

import pytest
import torch
import transformers
from accelerate import Accelerator
from cases import CASES, EVERY_CASE, LOSS, RLOO_AND_PPO, episodes_of, page_of, run_case, write_prompts
from helpers import PAGES, page_args, record, rloo_args, run_ppo, run_rloo
from slow_oracle import Oracle, mean

from rlhf_details import toy, utils
from rlhf_details.utils import EVALUATION

RLOO, PPO = PAGES["train_rloo"], PAGES["train_ppo"]


# ---- a response's score ----------------------------------------------------------------------------------------------
def truncated(response, token, after):
    """(what is read of a list of tokens, whether the token was there)."""
    places = [t for t, x in enumerate(response) if x == token and t >= after]
    return (response[: places[0] + 1], True) if places else (response, False)


@pytest.mark.parametrize(
    "stop_token, truncate_token, after", [("none", "eos", 3), ("none", "eos", 0), ("eos", "none", 0)]
)
def test_gen_14_the_reward_model_reads_exactly_the_truncated_text(
    ragged, in_tmp, monkeypatch, stop_token, truncate_token, after
):
    """The policy loss takes every sampled token, read or not."""
    calls = record(monkeypatch, PPO, "response_scores", "ppo_policy_loss")
    sampled = record(monkeypatch, utils, "sample")["sample"]
    options = dict(
        stop_token=stop_token, truncate_token=truncate_token, truncate_after=after, rollout_micro_batch_size=16
    )
    rows = run_ppo(ragged, response_length=12, **options)
    eos = toy.tokenizer().eos_token_id
    episodes = episodes_of(sampled)
    read = [[truncated(response, eos, after) for _, response in batch] for batch in episodes]
    seen = [
        [(q[m].tolist(), r[n].tolist()) for q, m, r, n in zip(*batch, strict=True)]
        for (_, batch), _ in calls["response_scores"]
    ]
    assert seen == [
        [(query, text) for (query, _), (text, _) in zip(*pair, strict=True)]
        for pair in zip(episodes, read, strict=True)
    ]
    for row, batch, texts, (args, _) in zip(rows, episodes, read, calls["ppo_policy_loss"], strict=True):
        assert row["val/num_stop_token_ids"] == sum(ended for _, ended in texts)
        assert row["val/num_eos_tokens"] == sum(response.count(eos) for _, response in batch)
        assert args[2].sum() == sum(len(response) for _, response in batch)
    if stop_token == "none":
        assert all(len(response) == 12 for batch in episodes for _, response in batch)
        assert {ended for texts in read for _, ended in texts} == {True, False}
        assert any(eos in response[:after] for batch in episodes for _, response in batch) == (after > 0)


@RLOO_AND_PPO
@pytest.mark.parametrize("mode, expected", [("subtract", -2.25), ("replace", -2.5)])
def test_the_penalty_asks_for_a_token_of_the_response_and_not_of_the_prompt(
    ragged, in_tmp, monkeypatch, case, mode, expected
):
    """Faults 8 and 9: prompts that hold the stop token, which is not EOS."""
    prompts = [{"prompt": f"hotel {row['prompt']}"} for row in toy.rows("prompts", "train")[:48]]
    monkeypatch.setattr(toy, "rows", lambda stage, split, task="toy": prompts)
    monkeypatch.setattr(page_of(case), "response_scores", lambda model, batch, *n: torch.full((len(batch[0]),), 0.25))
    sampled = record(monkeypatch, utils, "sample")["sample"]
    model = transformers.AutoModelForCausalLM.from_pretrained(ragged / "policy")
    hotel = toy.tokenizer().convert_tokens_to_ids("hotel")
    with torch.no_grad():
        model.get_output_embeddings().weight[hotel] *= 4
    shutil.copytree(ragged, "own")
    model.save_pretrained("own/policy")
    rows = run_case(case, in_tmp / "own", stop_token="hotel", missing_eos_penalty=2.5, missing_eos_mode=mode)
    for row, batch in zip(rows, episodes_of(sampled), strict=True):
        ended = [hotel in response for _, response in batch]
        assert row["val/num_stop_token_ids"] == sum(ended)
        assert row["objective/scores"] == pytest.approx(mean(0.25 if x else expected for x in ended))
        assert [response.count(hotel) for _, response in batch] == ended  # It ends the response.
    assert 0 < sum(row["val/num_stop_token_ids"] for row in rows) < 48


@RLOO_AND_PPO
def test_rew_1_the_reward_models_bias_is_part_of_the_score(tiny, ragged, in_tmp, case):
    """`ragged` and `tiny` have the same reward model, but for a bias of 0.7."""
    shutil.copytree(ragged / "policy", "both/policy"), shutil.copytree(tiny / "reward", "both/reward")
    plain = run_case(case, in_tmp / "both", total_episodes=16)
    biased = run_case(case, ragged, total_episodes=16)
    assert biased[0]["objective/scores"] == pytest.approx(plain[0]["objective/scores"] + 0.7, abs=1e-5)
    if case == "rloo":  # Leave-one-out does not see a constant.
        assert biased[0]["policy/grad_norm"] == pytest.approx(plain[0]["policy/grad_norm"], rel=1e-3)


# ---- KL --------------------------------------------------------------------------------------------------------------
@RLOO_AND_PPO
def test_rew_5_the_kl_is_the_difference_of_log_probs_which_may_be_negative(ragged, in_tmp, monkeypatch, case):
    """Both log-probs are those of forwards; the reference is the module without a weight to train."""
    page, seen = page_of(case), {True: [], False: []}
    real = page.response_logprobs

    def recording(policy, batch, *n):
        result = real(policy, batch, *n)
        if not torch.is_grad_enabled() and len(batch[2]) == 16:
            seen[any(p.requires_grad for p in policy.parameters())].append((result[0].double(), batch[3]))
        return result

    monkeypatch.setattr(page, "response_logprobs", recording)
    sizes = dict(micro_batch_size=16, rollout_micro_batch_size=16)
    rows = run_case(case, ragged, learning_rate=1e-2, num_ppo_epochs=2, **sizes)
    kl = [(a - b) * mask for (a, mask), (b, _) in zip(seen[True], seen[False], strict=True)]
    assert [row["objective/kl"] for row in rows] == pytest.approx([x.sum().item() / 16 for x in kl], abs=1e-4)
    assert abs(rows[2]["objective/kl"]) > 1e-2 and (kl[1] < 0).any()


@EVERY_CASE
def test_log_5_what_the_kl_adds_to_the_score_is_negative(ragged, in_tmp, case):
    options = dict(kl_coef=0.5, learning_rate=1e-2)
    options |= dict(kl_penalty="kl") if case in ("ppo", "async") else {}
    for row in run_case(case, ragged, **options):
        coefficient = row.get("objective/kl_coef", 0.5)
        assert row["objective/non_score_reward"] == pytest.approx(-coefficient * row["objective/kl"], abs=1e-5)
    assert abs(row["objective/kl"]) > 1e-2


@pytest.mark.parametrize("adaptive", [True, False])
def test_ppo_16_kl_coef_changes_after_the_update_by_its_controller(ragged, in_tmp, adaptive):
    options = dict(kl_target=0.05, kl_horizon=100.0, kl_coef=0.2, learning_rate=3e-3, total_episodes=6 * 16)
    rows = run_ppo(ragged, adaptive_kl=adaptive, **options)
    assert rows[0]["objective/kl_coef"] == 0.2
    for now, after in itertools.pairwise(rows):
        error = min(max(now["objective/kl"] / 0.05 - 1, -0.2), 0.2) if adaptive else 0.0
        assert after["objective/kl_coef"] == pytest.approx(now["objective/kl_coef"] * (1 + error * 16 / 100), rel=1e-12)
    assert len({row["objective/kl_coef"] for row in rows}) == (6 if adaptive else 1)


# ---- rewards and advantages ------------------------------------------------------------------------------------------
def test_rloo_1_a_reward_of_the_prompt_alone_gives_advantages_of_exactly_zero(ragged, in_tmp, monkeypatch):
    """Fault 16: only where the k responses to a prompt are compared with each other."""
    monkeypatch.setattr(RLOO, "response_scores", lambda model, batch, n: (batch[0] * batch[1]).sum(1).float())
    calls = record(monkeypatch, RLOO, "rloo_policy_loss")["rloo_policy_loss"]
    rows = run_rloo(ragged, kl_coef=0.0, missing_eos_penalty=None)
    assert len(calls) == 3 and all((args[3] == 0).all() for args, _ in calls)
    assert rows[0]["objective/scores"] > 100 and rows[0]["val/equal_scores"] == 1


def test_rloo_2_a_response_pays_for_the_sum_of_its_kl(ragged, in_tmp):
    row = run_rloo(ragged, kl_coef=0.5, learning_rate=1e-2)[-1]
    assert row["objective/rlhf_reward"] == pytest.approx(row["objective/scores"] - 0.5 * row["objective/kl"], abs=1e-5)
    assert abs(row["objective/kl"]) > 0.05 and row["val/sequence_lengths"] > 2


@pytest.mark.parametrize("options", [dict(token_level_kl=True), {}], ids=["tokens", "responses"])
def test_rloo_14_advantages_are_whitened_over_the_actions_of_the_whole_batch(ragged, in_tmp, monkeypatch, options):
    calls = record(monkeypatch, RLOO, "rloo_policy_loss")["rloo_policy_loss"]
    run_rloo(ragged, total_episodes=16, normalize_advantage=True, micro_batch_size=4, **options)
    mask, advantages = (torch.cat([args[i] for args, _ in calls]) for i in (2, 3))
    actions = advantages[mask] if options else advantages
    assert actions.mean().item() == pytest.approx(0, abs=1e-5)
    assert actions.var(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert not options or ((advantages[~mask] == 0).all() and not mask.all())


def test_ppo_8_whitened_rewards_keep_their_mean(ragged, in_tmp, monkeypatch):
    calls = record(monkeypatch, PPO, "token_rewards", "compute_gae")
    run_ppo(ragged, whiten_rewards=True, total_episodes=16)
    ((_, _, response_mask, _), rewards), ((whitened, *_), _) = calls["token_rewards"][0], calls["compute_gae"][0]
    states = torch.arange(8) < (response_mask.sum(1, keepdim=True) + 1)
    assert whitened[states].mean().item() == pytest.approx(rewards[states].mean().item(), abs=1e-5)
    assert whitened[states].var(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert abs(rewards[states].mean()) > 0.01 and (~states).any() and (whitened[~states] == 0).all()


def test_ppo_10_advantages_are_whitened_over_response_tokens(ragged, in_tmp, monkeypatch):
    calls = record(monkeypatch, PPO, "ppo_policy_loss")["ppo_policy_loss"]
    run_ppo(ragged, total_episodes=16, micro_batch_size=4)
    mask, advantages = (torch.cat([args[i] for args, _ in calls]) for i in (2, 3))
    assert advantages[mask].mean().item() == pytest.approx(0, abs=1e-5) and (advantages[~mask] == 0).all()
    assert advantages[mask].var(correction=0).item() == pytest.approx(1, abs=1e-4) and not mask.all()


@pytest.mark.parametrize("case", ["ppo", "lm-human-preferences", "async"])
def test_ppo_14_the_loss_is_the_policys_and_vf_coef_times_the_values(ragged, in_tmp, monkeypatch, case):
    losses, real = [], Accelerator.backward
    monkeypatch.setattr(
        Accelerator, "backward", lambda self, loss, **k: losses.append(loss.item()) or real(self, loss, **k)
    )
    (row,) = run_case(case, ragged, total_episodes=16, micro_batch_size=4, vf_coef=0.3)
    assert len(losses) == 4 and row["loss/value_avg"] > 0.05
    assert sum(losses) == pytest.approx(row["loss/policy_avg"] + 0.3 * row["loss/value_avg"], abs=1e-5)
    assert row["loss/total_avg"] == row["objective/loss"] == pytest.approx(sum(losses), abs=1e-5)


# ---- metrics ---------------------------------------------------------------------------------------------------------
class Seen:
    """A run of one update in micro-batches of different numbers of tokens, and what its losses were given and gave."""

    def __init__(self, case, models, monkeypatch):
        page, name = page_of(case), LOSS[CASES[case][0]]
        calls = record(monkeypatch, page, name, "response_logprobs")
        options = dict(learning_rate=1e-2, num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=4, total_episodes=16)
        options |= dict(stop_token="eos", truncate_token="none", truncate_after=0) if "lm-" in case else {}
        (self.row,) = run_case(case, models, rollout_micro_batch_size=16, **options)
        actions = []  # (loss, log-ratio, clipped) of each
        for args, (losses, logratio, clipped) in calls[name]:
            mask = args[2] if args[3].dim() == 2 else torch.ones_like(args[3], dtype=torch.bool)
            actions += zip(*(x[mask].tolist() for x in (losses, logratio, clipped)), strict=True)
        self.losses, self.logratios, self.clipped = zip(*actions, strict=True)
        self.ratios = [math.exp(x) for x in self.logratios]
        forwards = [(result, args[1][3]) for args, result in calls["response_logprobs"]]
        training = [(result, mask) for result, mask in forwards if result[0].requires_grad]
        self.entropies = [x for result, mask in training for x in result[1][mask].tolist()]


@pytest.fixture(scope="module", params=CASES)
def seen(request, ragged, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(tmp_path_factory.mktemp("seen")):
        return Seen(request.param, ragged, patch)


def test_log_2_means_are_over_all_real_tokens_and_all_actions(seen):
    """Fault 3. Micro-batches hold different numbers of tokens, so a mean of means would be another number."""
    assert len(seen.entropies) < 2 * 16 * 8, "no response ends early, so the test shows nothing"
    assert seen.row["policy/entropy_avg"] == pytest.approx(mean(seen.entropies), rel=1e-4)
    assert seen.row["policy/clipfrac_avg"] == pytest.approx(mean(seen.clipped), rel=1e-4)
    assert seen.row["loss/policy_avg"] == pytest.approx(mean(seen.losses), rel=1e-4, abs=1e-6)
    assert seen.row["val/ratio"] == pytest.approx(mean(seen.ratios), rel=1e-4)


def test_log_3_approxkl_is_half_the_mean_squared_log_ratio_of_an_action(seen):
    expected = mean(x * x / 2 for x in seen.logratios)
    assert seen.row["policy/approxkl_avg"] == pytest.approx(expected, rel=1e-4) and expected > 1e-4


def test_log_4_ratio_var_is_the_variance_over_actions(seen):
    assert seen.row["val/ratio_var"] == pytest.approx(statistics.pvariance(seen.ratios), rel=1e-3)


@RLOO_AND_PPO
def test_log_1_entropy_is_a_sum_over_real_tokens_alone(ragged, in_tmp, monkeypatch, case):
    """By plain transformers, at update 1, where the policy is the model in the folder."""
    sampled = record(monkeypatch, utils, "sample")["sample"]
    (row,) = run_case(case, ragged, total_episodes=16, temperature=0.7)
    oracle = Oracle(ragged, page_args(CASES[case][0], ragged, temperature=0.7), 1)
    episodes = [episode for batch in episodes_of(sampled) for episode in batch]
    sums = [-sum(oracle.logprobs(oracle.policy, *episode)) for episode in episodes]
    assert row["objective/entropy"] == pytest.approx(mean(sums), abs=1e-3)
    assert len({len(response) for _, response in episodes}) > 3


# ---- held-out evaluation ---------------------------------------------------------------------------------------------
@EVERY_CASE
def test_held_out_evaluation_is_the_same_draw_before_and_after(ragged, in_tmp, few_prompts, case):
    page, options = CASES[case]
    flags = dict(learning_rate=0.0, eval_dataset="toy:test", eval_every=2, total_episodes=64, response_length=4)
    result = PAGES[page].main(page_args(page, ragged, **(options | flags)))
    names = "scores scores_std kl length ended gold gold_std parses".split()
    assert result["before"].keys() == {f"eval/objective/{name}" for name in names}
    assert result["before"] == pytest.approx(result["after"], abs=1e-5)


@pytest.mark.parametrize("case", ["rloo", "lm-human-preferences"])
def test_held_out_responses_are_scored_and_measured_like_the_training_ones(ragged, in_tmp, monkeypatch, case):
    """11 prompts in slices of 2, against the slow oracle's score and KL; the reference is the model in the folder."""
    sampled = record(monkeypatch, utils, "sample")["sample"]
    flags = dict(missing_eos_penalty=3.0, eval_dataset=write_prompts("eleven.jsonl", 11), rollout_micro_batch_size=2)
    flags |= dict(learning_rate=1e-2, total_episodes=16, response_length=12)
    flags |= dict(truncate_after=6) if case != "rloo" else {}
    row = run_case(case, ragged, **flags)[-1]
    page, options = CASES[case]
    oracle = Oracle(ragged, page_args(page, ragged, **(options | flags)), 1)
    found = {"scores": [], "kl": [], "length": [], "ended": []}
    last = [call for call in sampled if call[0][5][1] == EVALUATION][-6:]
    logprobs = [x[m].sum().item() for _, (_, mask, rows) in last for x, m in zip(rows, mask, strict=True)]
    episodes = [episode for batch in episodes_of(last, EVALUATION) for episode in batch]
    for episode, own in zip(episodes, logprobs, strict=True):
        score, read, ended = oracle.score(*episode)
        found["scores"].append(score), found["length"].append(len(read)), found["ended"].append(float(ended))
        found["kl"].append(own - sum(oracle.logprobs(oracle.reference, *episode)))
    assert len(episodes) == 11 and abs(mean(found["kl"])) > 1e-3 and 0 < mean(found["ended"]) < 1
    for name, numbers in found.items():
        assert row[f"eval/objective/{name}"] == pytest.approx(mean(numbers), abs=1e-4), name
    assert row["eval/objective/scores_std"] == pytest.approx(statistics.pstdev(found["scores"]), abs=1e-4)


def test_sample_tables_are_as_many_as_asked_for_and_their_total_is_what_was_rewarded(ragged, in_tmp):
    options = dict(num_sample_generations=3, total_episodes=80, eval_dataset=write_prompts("eleven.jsonl", 11))
    RLOO.main(rloo_args(ragged, **options))
    rows = [json.loads(line) for line in (in_tmp / "runs/run/samples.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1] * 4 + [3] * 4 + [5] * 4
    for row in rows:
        assert row.keys() == {"update", "query", "response", "ended", "score", "kl", "total"}
        assert row["total"] == pytest.approx(row["score"] - 0.03 * row["kl"], abs=1e-5)
