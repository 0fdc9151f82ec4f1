"""Every metric and every weight of three updates, against slow_oracle.py."""

from pathlib import Path

import pytest
from cases import episodes_of
from helpers import (
    LM_HUMAN_PREFERENCES,
    PAGES,
    page_args,
    read_metrics,
    record,
    responses_per_prompt,
    without_times,
)
from slow_oracle import ABSTAINS, DistillOracle, GrpoOracle, PpoOracle, RlooOracle
from transformers import AutoModelForCausalLM

from rlhf_details import toy, utils

# A large epsilon makes Adam's step nearly proportional to the gradient, so that a wrong factor shows in the weights.
STEEP = dict(total_episodes=24, batch_size=8, num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=3, take=96)
STEEP |= dict(learning_rate=0.02, adam_eps=0.2, cliprange=0.05, weight_decay=0.05, temperature=0.7)
ONE_STEP = dict(num_ppo_epochs=1, num_mini_batches=1)
VALUES = dict(cliprange_value=0.02)
MIXED = dict(
    stop_token="hotel", truncate_token="eos", truncate_after=1, missing_eos_penalty=2.0, kl_penalty="full", kl_coef=0.3,
    score_scaling=True, score_norm=True, score_clip=1.0, gamma=0.9, lam=0.8, vf_coef=0.5, max_grad_norm=0.3,
    normalize_advantage=False, value_model="shared",
)  # fmt: skip
LIMITS = dict(
    kl_penalty="k3",
    num_ppo_epochs=4,
    ratio_threshold=1.0005,
    target_kl=1e-3,
    stop_token="none",
    adaptive_kl=True,
    tf_adam=True,
    learning_rate=0.2,
)
WHITE = dict(kl_penalty="abs", whiten_rewards=True, missing_eos_penalty=None, kl_coef=1.0, score_scaling=True)
TOKENS = dict(token_level_kl=True, normalize_advantage=True, kl_coef=0.3)
WHITE_SCORES = dict(normalize_reward=True, reward_clip_range=0.8, missing_eos_mode="replace", missing_eos_penalty=0.0)
READ = "the {prompt} ."  # what a teacher reads
ORACLES = {  # name: (page, flags)
    "rloo": ("train_rloo", dict(kl_coef=0.3, rloo_k=2, learning_rate=0.05)),
    "reinforce++": ("train_rloo", TOKENS | WHITE_SCORES),
    "one-response": ("train_rloo", TOKENS | ONE_STEP | dict(rloo_k=1, reward_clip_range=0.5, stop_token="none")),
    "grpo": ("train_grpo", dict(kl_coef=0.3, group_size=4, cliprange_high=0.08, missing_eos_penalty=1.0)),
    "gspo": (
        "train_grpo",
        dict(objective="gspo", group_size=4, cliprange=0.01, cliprange_high=0.02, loss_normalization="response")
        | dict(mask_truncated=True),
    ),
    "cispo": (
        "train_grpo",
        dict(objective="cispo", group_size=4, cliprange=None, cliprange_high=0.1, mask_truncated=True),
    ),
    "dapo": (
        "train_grpo",
        dict(group_size=2, mask_equal=True, soft_overlong=2, missing_eos_mode="replace", missing_eos_penalty=1.0)
        | dict(response_length=4),
    ),
    "grpo-batch": ("train_grpo", dict(group_size=2, scale_advantages="batch", loss_normalization="response")),
    "dr-grpo": ("train_grpo", dict(group_size=4, kl_coef=0.0, scale_advantages="none", loss_normalization="constant")),
    "grpo-one-step": ("train_grpo", ONE_STEP | dict(kl_coef=0.5, kl_times_ratio=True, max_grad_norm=None)),
    "grpo-entropy": ("train_grpo", dict(kl_coef=0.3, group_size=4, entropy_coef=0.5)),
    "gspo-entropy": (
        "train_grpo",
        dict(objective="gspo", group_size=4, entropy_coef=20.0, entropy_target=9.0, loss_normalization="response"),
    ),
    "n+": ("train_ppo", VALUES | dict(kl_coef=0.3)),
    "lm-human-preferences": (
        "train_ppo", VALUES | LM_HUMAN_PREFERENCES | dict(kl_horizon=40.0, learning_rate=0.2, kl_target=0.06)
    ),
    "mixed": ("train_ppo", VALUES | MIXED),
    "limits": ("train_ppo", VALUES | LIMITS),
    "whitened": ("train_ppo", VALUES | WHITE),
    "threshold": ("train_ppo", VALUES | dict(kl_coef=0.3, kl_penalty="mse", score_norm=True, ratio_threshold=1.02)),
    "rloo-overlap": ("train_rloo", dict(kl_coef=0.3, rloo_k=2, learning_rate=0.05, overlap=True, sampler_cap=1.1)),
    "tokens-overlap": ("train_rloo", TOKENS | dict(learning_rate=0.05, overlap=True)),
    "grpo-overlap": ("train_grpo", ONE_STEP | dict(kl_coef=0.5, group_size=4, overlap=True)),
    "ppo-overlap": (
        "train_ppo",
        VALUES | dict(kl_coef=0.3, kl_penalty="k2", adaptive_kl=True, kl_horizon=40.0, overlap=True),
    ),
    "rloo-some": ("train_rloo", dict(kl_coef=0.3, rloo_k=4, learning_rate=0.05, reward_fn="some")),
    "rloo-all_but_two": ("train_rloo", dict(kl_coef=0.3, rloo_k=2, learning_rate=0.05, reward_fn="all_but_two")),
    "reinforce++-some": ("train_rloo", TOKENS | WHITE_SCORES | dict(reward_fn="some")),
    "one-response-a_group": ("train_rloo", TOKENS | ONE_STEP | dict(rloo_k=1, reward_fn="a_group")),
    "grpo-some": ("train_grpo", dict(kl_coef=0.3, group_size=4, reward_fn="some", loss_normalization="response")),
    "grpo-a_group": ("train_grpo", dict(group_size=4, scale_advantages="batch", reward_fn="a_group")),
    "dr-grpo-all_but_two": (
        "train_grpo",
        dict(group_size=2, mask_equal=True, loss_normalization="constant", reward_fn="all_but_two"),
    ),
    "n+-some": ("train_ppo", VALUES | dict(kl_coef=0.3, whiten_rewards=True, reward_fn="some")),
    "mixed-some": ("train_ppo", VALUES | MIXED | dict(reward_fn="some")),
    "adaptive-all_but_one": (
        "train_ppo",
        VALUES | dict(kl_penalty="k3", adaptive_kl=True, kl_horizon=40.0, kl_target=0.06, reward_fn="all_but_one"),
    ),
    "distill": ("train_distill", dict(gamma=0.6, responses_per_prompt=2)),
    "distill-jsd": ("train_distill", dict(divergence="jsd", beta=0.3, max_grad_norm=None)),
    "distill-gkd": ("train_distill", dict(divergence="jsd", beta=0.9, on_policy_share=0.5, response_length=16)),
    "distill-read": ("train_distill", dict(gamma=0.6, teacher_prompt_template=READ)),
    "distill-read-jsd": ("train_distill", dict(divergence="jsd", beta=0.3, teacher_prompt_template=READ)),
    "distill-overlap": ("train_distill", dict(overlap=True, sampler_cap=1.1, learning_rate=0.05)),
}  # fmt: skip
SLOW = dict(train_rloo=RlooOracle, train_grpo=GrpoOracle, train_ppo=PpoOracle, train_distill=DistillOracle)


@pytest.mark.parametrize("name", ORACLES)
def test_three_updates_equal_the_slow_oracles(ragged, in_tmp, monkeypatch, name):
    """The equations of all four pages, and how they are put together:

    [GEN-14] [REW-1] [REW-3] [REW-5] [REW-8]
    [PPO-1] [PPO-2] [PPO-3] [PPO-4] [PPO-5] [PPO-6] [PPO-7] [PPO-8] [PPO-9] [PPO-10]
    [PPO-11] [PPO-12] [PPO-13] [PPO-14] [PPO-15] [PPO-16] [PPO-17] [PPO-18] [PPO-19]
    [RLOO-1] [RLOO-2] [RLOO-3] [RLOO-4] [RLOO-5] [RLOO-6] [RLOO-13] [RLOO-14]
    [GRPO-1] [GRPO-2] [GRPO-3] [GRPO-4] [GRPO-5] [GRPO-6] [GRPO-7] [GRPO-8] [GRPO-9] [GRPO-10] [GRPO-11]
    [DISTILL-1] [DISTILL-2] [DISTILL-3] [DISTILL-6] [DISTILL-7] [DISTILL-8]
    [GEN-9] [GEN-11] [GEN-15] [MODEL-4]
    [OPT-2] [OPT-3] [OPT-4] [OPT-8] [OPT-9] [LOG-1] [LOG-2] [LOG-3] [LOG-4] [LOG-5]
    """
    page, options = ORACLES[name]
    if "reward_fn" in options:
        numbers = f"[float('nan') if i in {ABSTAINS[options['reward_fn']]} else 0.0 for i in range(len(prompts))]"
        Path("f.py").write_text(f"def {options['reward_fn']}(prompts, completions):\n    return {numbers}\n")
        options = options | dict(reward_fn=(f"f.py:{options['reward_fn']}",))
    args = page_args(page, ragged, **(STEEP | options))
    calls = record(monkeypatch, utils, "sample")["sample"]
    loaded = record(monkeypatch, PAGES[page], "load_models")["load_models"]
    got = without_times(read_metrics(PAGES[page].main(args)["run"]))
    oracle = SLOW[page](ragged, args, 96)
    before, k, expected = [p.detach().clone() for p in oracle.parameters], responses_per_prompt(args), []
    sampled = {call[0][7][2]: joined(call) for call in calls if call[0][7][1] == utils.TRAINING}
    if name == "distill-gkd":
        assert list(sampled) == [2]
        sampled |= {number: (oracle.completions(number, toy.rows("sft", "train")[:96]), None) for number in (1, 3)}
    for number in (1, 2, 3):
        passes = range(getattr(args, "num_ppo_epochs", 1))
        orders = [utils.permutation(8 // k, args.seed, number, epoch) for epoch in passes]
        orders = [[i * k + j for i in order for j in range(k)] for order in orders]
        episodes, logprobs = sampled[number]
        expected.append(oracle.update(number, 3, episodes, orders, logprobs))
    for row, wanted in zip(got, expected, strict=True):
        gap = row.pop("val/logprob_gap", 0)
        assert args.overlap or gap < 1e-4
        assert {metric for metric in row if not metric.startswith(("health/", "objective/rewards/"))} == wanted.keys()
        for metric, value in wanted.items():
            assert row[metric] == pytest.approx(value, rel=2e-4, abs=2e-5), (row["update"], metric)
    saved = AutoModelForCausalLM.from_pretrained(args.output_dir)
    ours = [*saved.parameters(), *(loaded[0][1][1].critic.parameters() if page == "train_ppo" else ())]
    for x, y in zip(ours, oracle.parameters, strict=True):
        assert (x - y).abs().max() < 2e-5
    # The case is no trivial one: responses differ in length, ratios and values are clipped, every model moves.
    moved = [(x - y).abs().max().item() for x, y in zip(before, oracle.parameters, strict=True)]
    policy_size = len(list(oracle.policy.parameters()))
    assert max(moved[:policy_size]) > 1e-3 and max(moved[policy_size:], default=1) > 1e-3
    lengths = {len(response) for episodes, _ in sampled.values() for _, response in episodes}
    assert (len(lengths) > 3) == (args.stop_token == "eos")
    if page == "train_distill":
        assert all(row["objective/divergence"] > 0.05 for row in got)
        return
    assert abs(got[-1]["objective/kl"]) > 1e-3
    assert any(row["policy/clipfrac_avg"] for row in got) == (args.num_ppo_epochs > 1)
    assert page != "train_ppo" or any(row["val/clipfrac_avg"] for row in got)
    if name == "dapo":
        assert any(0 < row["val/equal_scores"] < 1 for row in got)
    if name == "limits":
        skipped = [row["policy/skipped_minibatches"] for row in got]
        assert any(skipped) and oracle.steps < 3 * 8 - sum(skipped)  # Some steps are skipped, some passes not made.


def joined(call):
    """(episodes, log-probs of each) of a call of utils.sample."""
    _, (_, mask, logprobs) = call
    return episodes_of([call])[0], [row[m].tolist() for row, m in zip(logprobs, mask, strict=True)]
