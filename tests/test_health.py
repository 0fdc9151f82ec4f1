"""Each warning about a run is provoked, by numbers at its threshold and by a run that is ill; a healthy run has none."""

import json
import textwrap
from pathlib import Path

import pytest
from conftest import launch, ppo_args, read_metrics, rloo_args

from rlhf_details import data, health, toy, train_ppo, train_rloo, utils

HEALTHY = {
    "objective/kl": 5.0, "policy/clipfrac_avg": 0.1, "val/first_ratio": 1.00001, "val/logprob_gap": 1e-5,
    "val/num_stop_token_ids": 15, "val/equal_scores": 0.1, "policy/entropy_avg": 1.0, "val/sequence_lengths": 20.0,
}  # fmt: skip
FIRST = {"policy/entropy_avg": 2.0, "val/sequence_lengths": 20.0}
THRESHOLDS = {  # sign: (metric, fine, ill)
    "kl": ("objective/kl", 24.9, 25.1),
    "clipfrac": ("policy/clipfrac_avg", 0.29, 0.31),
    "first_ratio": ("val/first_ratio", 1.009, 1.011),
    "gap": ("val/logprob_gap", 0.009, 0.011),
    "truncated": ("val/num_stop_token_ids", 1, 0),
    "reward_variance": ("val/equal_scores", 0.5, 0.51),
    "entropy": ("policy/entropy_avg", 0.41, 0.39),
    "length": ("val/sequence_lengths", 39.9, 40.1),
    "shorter": ("val/sequence_lengths", 10.1, 9.9),
}
SIGNS = {"kl", "clipfrac", "first_ratio", "truncated", "reward_variance", "entropy", "length"}


def showing(metrics, args, precision="fp32"):
    return {name for name, (shows, _, _) in health.signs(metrics, FIRST, args, precision).items() if shows}


@pytest.mark.parametrize("sign", THRESHOLDS)
@pytest.mark.parametrize("args", [train_rloo.Args(batch_size=16), train_ppo.Args(batch_size=16)], ids=["rloo", "ppo"])
def test_each_sign_has_its_threshold(sign, args):
    assert showing(HEALTHY, args) == set() and health.signs(HEALTHY, FIRST, args, "fp32").keys() == SIGNS
    metric, fine, ill = THRESHOLDS[sign]
    assert showing(HEALTHY | {metric: fine}, args) == set()
    assert showing(HEALTHY | {metric: ill}, args) == {{"gap": "first_ratio", "shorter": "length"}.get(sign, sign)}


def test_truncation_is_a_share_of_the_batch():
    args = train_rloo.Args(batch_size=100)
    assert showing(HEALTHY | {"val/num_stop_token_ids": 5}, args) == set()
    assert showing(HEALTHY | {"val/num_stop_token_ids": 4}, args) == {"truncated"}


def test_long_responses_bf16_stale_batches_and_runs_without_an_end_have_other_bounds():
    args = train_rloo.Args(batch_size=16)
    long = {"val/sequence_lengths": 1000.0}
    assert showing(HEALTHY | long | {"objective/kl": 249.0}, args) == {"length"}
    assert showing(HEALTHY | long | {"objective/kl": 251.0}, args) == {"length", "kl"}
    assert showing(HEALTHY | {"val/first_ratio": 1.4}, args, "bf16") == set()
    assert showing(HEALTHY | {"val/first_ratio": 1.6}, args, "bf16") == {"first_ratio"}
    assert showing(HEALTHY | {"val/first_ratio": 3.0}, train_rloo.Args(batch_size=16, async_rollouts=True)) == set()
    assert showing(HEALTHY | {"val/num_stop_token_ids": 0}, train_rloo.Args(batch_size=16, stop_token="none")) == set()
    ends = train_ppo.Args(batch_size=16, stop_token="none", truncate_token=".")
    assert showing(HEALTHY | {"val/num_stop_token_ids": 0}, ends) == {"truncated"}


# ---- runs ------------------------------------------------------------------------------------------------------------
def run(script, args, code=None):
    """({sign: updates at which it showed}, printed warnings) of a run; code: reward functions."""
    if code:
        data._load_module.cache_clear()
        Path("mine.py").write_text(textwrap.dedent(code))
    script.main(args)
    rows = [row for row in read_metrics("runs/run") if row["update"]]
    names = {name.removeprefix("health/") for row in rows for name in row if name.startswith("health/")}
    assert names == SIGNS
    return {name: found for name in names if (found := [row["update"] for row in rows if row[f"health/{name}"]])}


def warnings_in(capsys):
    return [line.split(":")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


MAINS = pytest.mark.parametrize("script, args", [(train_rloo, rloo_args), (train_ppo, ppo_args)], ids=["rloo", "ppo"])


@MAINS
def test_too_large_steps_show_in_kl_and_clipping_once_each(tiny, in_tmp, capsys, script, args):
    found = run(script, args(tiny, learning_rate=0.1, num_ppo_epochs=4, total_episodes=96, kl_coef=0.0, response_length=32))
    assert len(found["kl"]) > 1 and len(found["clipfrac"]) > 1
    lines = warnings_in(capsys)
    assert len(lines) == len(set(lines)) and {"health/kl", "health/clipfrac"} <= set(lines)


@MAINS
def test_dropout_shows_in_the_first_ratio(tiny, in_tmp, monkeypatch, capsys, script, args):
    monkeypatch.setattr(utils, "disable_dropout", lambda model: model.train())
    load = utils.load_policy

    def with_dropout(*arguments, **options):
        model = load(*arguments, **options)
        for name, module in model.named_modules():
            if name.endswith(("post_attention_dropout", "post_mlp_dropout")):
                module.p = 0.3
        return model

    monkeypatch.setattr(utils, "load_policy", with_dropout)
    found = run(script, args(tiny, num_ppo_epochs=2, total_episodes=32))
    assert found["first_ratio"] == [1, 2] and "health/first_ratio" in warnings_in(capsys)


@MAINS
def test_responses_that_never_end_show(tiny, in_tmp, capsys, script, args):
    found = run(script, args(tiny, stop_token="wonderful", response_length=2))
    assert found["truncated"] and "health/truncated" in warnings_in(capsys)


@MAINS
def test_equal_rewards_show(tiny, in_tmp, capsys, script, args):
    code = "def f(prompts, completions): return [1.0] * len(completions)"
    options = dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None)
    found = run(script, args(tiny, **options), code)
    assert found["reward_variance"] == [1, 2, 3] and warnings_in(capsys).count("health/reward_variance") == 1


def test_equal_rewards_are_counted_by_group(tiny, in_tmp):
    """Half of the prompts give their k responses one score, the others different ones."""
    rows = [{"prompt": row["prompt"], "easy": i % 4 == 0} for i, row in enumerate(toy.rows("prompts", "train")[:16])]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = """
        def f(prompts, completions, easy): return [1.0 if e else hash(c) % 997 for e, c in zip(easy, completions)]
    """
    options = dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None, dataset="rows.jsonl")
    run(train_rloo, rloo_args(tiny, **options, batch_size=64, total_episodes=64), code)
    assert read_metrics("runs/run")[0]["val/equal_scores"] == 0.25


@pytest.mark.slow
@MAINS
def test_a_policy_that_says_one_word_again_and_again_shows_in_entropy_and_length(tiny, in_tmp, capsys, script, args):
    code = "def f(prompts, completions): return [float(c.count('the')) for c in completions]"
    options = dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None, kl_coef=0.0, stop_token="was")
    found = run(script, args(tiny, **options, learning_rate=0.03, total_episodes=960, num_ppo_epochs=2, response_length=16), code)
    assert {"entropy"} <= found.keys() and "health/entropy" in warnings_in(capsys)


@pytest.mark.slow
@MAINS
def test_shrinking_responses_show(tiny, in_tmp, capsys, script, args):
    code = "def f(prompts, completions): return [-float(len(c.split())) for c in completions]"
    options = dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None, kl_coef=0.0, response_length=24)
    found = run(script, args(tiny, **options, learning_rate=0.01, total_episodes=960, batch_size=32), code)
    assert "length" in found and "health/length" in warnings_in(capsys)


def test_a_resumed_run_does_not_repeat_what_was_said(tiny, in_tmp, capsys):
    code = "def f(prompts, completions): return [1.0] * len(completions)"
    options = dict(reward_model_path=None, reward_fn=("mine.py:f",), missing_eos_penalty=None, checkpoint_every=2)
    run(train_rloo, rloo_args(tiny, **options, total_episodes=64), code)
    assert warnings_in(capsys).count("health/reward_variance") == 1
    state = json.loads(Path("runs/run/checkpoints/000002/state.json").read_text())
    assert "reward_variance" in state["health"]["said"] and state["health"]["first"].keys() == FIRST.keys()
    for later in Path("runs/run/checkpoints/000004").iterdir():
        later.unlink()
    train_rloo.main(rloo_args(tiny, **options, total_episodes=64, resume=True))
    assert warnings_in(capsys) == []
    assert [row["health/reward_variance"] for row in read_metrics("runs/run")] == [1.0] * 4


@pytest.mark.slow
def test_the_default_runs_are_healthy(in_tmp):
    """RLOO and PPO with no arguments, all their stages, to their ends."""
    for script in ("train_rloo", "train_ppo"):
        done = launch(f"{script}.py", ["--run_name", script], cwd=in_tmp)
        assert done.returncode == 0 and "warning: health/" not in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
        rows = [row for row in read_metrics(f"runs/{script}") if row["update"]]
        assert len(rows) == (100 if script == "train_rloo" else 40)
        assert not [(row["update"], name) for row in rows for name in row if name.startswith("health/") and row[name]]
