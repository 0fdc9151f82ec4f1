"""Two processes under torchrun compute what one does: the same tokens, gradients, advantages and curves. bf16."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import LM_HUMAN_PREFERENCES, ROOT, assert_same_curves, launch, page_args, read_metrics, save_pair
from processes import run_under, spec_of, words_of, write_rows
from safetensors.torch import load_file

from rlhf_details import train_dpo, train_reward, train_sft

pytestmark = pytest.mark.slow
LIMITS = dict(score_scaling=True, score_norm=True, score_clip=1.5, ratio_threshold=1.004, target_kl=3e-4)
CASES = {
    "rloo": ("train_rloo", {}),
    "reinforce++": ("train_rloo", dict(token_level_kl=True, normalize_reward=True, normalize_advantage=True)),
    "grpo": ("train_grpo", dict(cliprange_high=0.3)),
    "ppo": ("train_ppo", LIMITS),
    "lm-human-preferences": ("train_ppo", LM_HUMAN_PREFERENCES | dict(kl_horizon=200.0)),
    "ppo-overlap": ("train_ppo", dict(overlap=True)),
    "grpo-overlap": ("train_grpo", dict(overlap=True)),
    "distill": ("train_distill", dict(gamma=0.5)),
    "distill-jsd": ("train_distill", dict(divergence="jsd", beta=0.3)),
    "functions": ("train_rloo", dict(reward_fn=("mine.py:words", "mine.py:is_even", "mine.py:some"))),
}
SAMPLED = pytest.mark.parametrize("case", [*CASES, "vocabulary-8192"])
STAGES = pytest.mark.parametrize("case", ["sft", "sft-completions", "reward", "dpo"])
FUNCTIONS = """
def words(prompts, completions): return [float(len(c.split())) for c in completions]
def is_even(prompts, completions, completion): return [len(c) % 2 == 0 for c in completions]
def some(prompts, completions): return [None if "the" in p else 1.0 for p in prompts]
"""


def cases(models, large, folder):
    """{name: Args}; 41 held-out rows do not divide by two, nor do the rows of a stage or their targets."""
    (folder / "mine.py").write_text(FUNCTIONS)
    held_out = write_rows(folder / "odd.jsonl", 41)
    steps = dict(
        num_ppo_epochs=2, num_mini_batches=2, micro_batch_size=3, rollout_micro_batch_size=5, learning_rate=1e-3
    )
    flags = steps | dict(total_episodes=160, eval_dataset=held_out, num_sample_generations=2)
    found = {name: page_args(page, models, **flags, **options) for name, (page, options) in CASES.items()}
    options = dict(total_episodes=80, learning_rate=3e-4, token_level_kl=True, normalize_advantage=True)
    found["vocabulary-8192"] = page_args("train_rloo", large, **options)
    stage = dict(dataset=held_out, eval_dataset=held_out, batch_size=8, micro_batch_size=3, learning_rate=1e-3)
    stage |= dict(response_length=8, overwrite=True)
    for name, only in (("sft", False), ("sft-completions", True)):
        found[name] = train_sft.Args(**stage, base_model=str(models / "policy"), completion_only=only)
    stage |= dict(sft_model_path=str(models / "policy"))
    return found | {
        "reward": train_reward.Args(**stage, normalization="gain_bias", normalize_samples=16),
        "dpo": train_dpo.Args(**stage),
    }


@pytest.fixture(scope="session")
def runs(ragged, tmp_path_factory):
    """{case: {processes: (rows of metrics, what each process saw)}}."""
    folder, found = tmp_path_factory.mktemp("processes"), {}
    args = cases(ragged, save_pair(tmp_path_factory.mktemp("large"), vocab_size=8192), folder)
    for engine, processes in (("one", 1), ("ddp", 2)):
        specs = [spec_of(values, f"{engine}-{name}") for name, values in args.items()]
        for name, seen in zip(args, run_under(engine, specs, folder, processes), strict=True):
            found.setdefault(name, {})[processes] = read_metrics(folder / f"runs/{engine}-{name}"), seen
    return found


@SAMPLED
def test_two_processes_sample_the_same_tokens_and_give_the_same_curves(runs, case):
    """`run_under` asserts the number of processes and the kind of distribution. [REW-7] [OPT-6] [LOG-2]"""
    (one, (first,)), (two, seconds) = runs[case][1], runs[case][2]
    tokens = seconds[0]["sampled"] | seconds[1]["sampled"]
    assert first["sampled"] == tokens and len(tokens) == 16 * sum(row["update"] > 0 for row in one)
    assert [len(row["sampled"]) for row in seconds] == [len(tokens) // 2] * 2
    assert len(set(tokens.values())) > len(tokens) // 2
    assert_same_curves(one, two)
    if case == "ppo":  # Some steps were skipped, and others were not.
        assert 0 < sum(row["policy/skipped_minibatches"] > 0 for row in one[1:]) < 10
    if case == "lm-human-preferences":
        assert len({row["objective/kl_coef"] for row in one[1:]}) == 10
    if case == "functions":
        assert 0 < one[-1]["objective/verifiable_correct_rate"] < 1


@STAGES
def test_opt_6_a_stage_is_the_same_on_two_processes(runs, case):
    """Each process has comparisons of its own, and the references are those of all of them. [RM-14] [DPO-4]"""
    assert_same_curves(*(runs[case][processes][0] for processes in (1, 2)))


@pytest.mark.parametrize("case", ["ppo", "ppo-overlap"])
def test_model_3_under_bf16_weights_and_log_probs_are_fp32(ragged, tmp_path, case):
    """Fault 13. accelerate wraps the policy's forward for bf16; the copy of --overlap must call its own weights."""
    page, overlap = CASES[case][0], "overlap" in case
    args = page_args(page, ragged, total_episodes=64, num_ppo_epochs=2, learning_rate=1e-2, overlap=overlap)
    (((seen),),) = run_under("one", [spec_of(args, "bf16", precision="bf16")], tmp_path, processes=1)
    assert (
        seen["precision"] == "bf16" and seen["products"] == {"torch.bfloat16"} and seen["dtypes"] == {"torch.float32"}
    )
    rows = read_metrics(tmp_path / "runs/bf16")
    assert all(abs(value) < 1e9 for row in rows for value in row.values())
    assert overlap or 0 < rows[0]["val/logprob_gap"] < 0.5
    kl = [abs(row["objective/kl"]) for row in rows]
    fresh = 2 if overlap else 1
    assert max(kl[:fresh]) < 0.1 and min(kl[fresh:]) > 2 * max(kl[:fresh])
    assert all(x.dtype == torch.float32 for x in load_file(tmp_path / "models/bf16/model.safetensors").values())


def test_a_reward_function_that_fails_on_one_process_alone_ends_both(tiny, in_tmp):
    Path("mine.py").write_text(
        "import os\ndef f(prompts, completions):\n"
        "    if os.environ['RANK'] == '1': raise KeyError('only here')\n    return [0.0] * len(completions)\n"
    )
    args = page_args("train_rloo", tiny, reward_fn=("mine.py:f",))
    done = launch("train_rloo.py", words_of(args), 2, cwd=in_tmp)
    assert done.returncode == 1 and done.stderr.count("error: --reward_fn f raised KeyError") == 1, done.stderr[-2000:]
    assert "mine.py" in done.stderr and "only here" in done.stderr


BROKEN = """
import os, signal, sys
import torch
from rlhf_details.plumbing import cli
page = __import__("rlhf_details." + sys.argv.pop(1), fromlist=["main"])
how, rank, step, taken = sys.argv.pop(1), sys.argv.pop(1), torch.optim.AdamW.step, []
def broken(self, *rest, **kwargs):
    taken.append(1)
    if len(taken) == 2 and os.environ["RANK"] == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the step of update 2")
    return step(self, *rest, **kwargs)
torch.optim.AdamW.step = broken
cli.main(page.main, page.Args)
"""


@pytest.mark.parametrize("page, how, rank", [("train_rloo", "raise", 1), ("train_ppo", "kill", 0)])
def test_when_one_of_two_processes_ends_the_other_does(ragged, tmp_path, page, how, rank):
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = ["--sft_model_path", ragged / "policy", "--reward_model_path", ragged / "reward", "--take", 64]
    flags += ["--total_episodes", 16_000, "--batch_size", 16, "--num_ppo_epochs", 1, "--num_mini_batches", 1]
    flags += ["--response_length", 8]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "broken.py"]
    command += [page, how, str(rank), *map(str, flags), "--run_name", "run", "--checkpoint_every", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    started = subprocess.Popen(command, cwd=tmp_path, env=environment, **options)
    try:
        _, errors = started.communicate(timeout=120)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 1
    assert ("ArithmeticError: the step of update 2" if how == "raise" else "Signal 9") in errors, errors[-2000:]
    assert read_metrics(tmp_path / "runs/run")[-1]["update"] == 1
