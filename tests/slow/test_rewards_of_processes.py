"""Rewards on two processes: the same numbers as on one, and a function that fails on one process ends all of them."""

import textwrap
from pathlib import Path

import pytest
from helpers import assert_same_curves, launch, page_args, read_metrics, run_page
from processes import words_of

pytestmark = pytest.mark.slow


def start(page, args):
    """Runs a page with these arguments on two processes."""
    return launch(f"{page}.py", words_of(args), 2, cwd=Path.cwd())


@pytest.mark.parametrize("page", ["train_rloo", "train_ppo"])
def test_two_processes_and_small_micro_batches_give_the_same_curves(tiny, in_tmp, page):
    Path("mine.py").write_text(
        textwrap.dedent("""
            def words(prompts, completions): return [float(len(c.split())) for c in completions]
            def is_even(prompts, completions, completion): return [len(c) % 2 == 0 for c in completions]
            def some(prompts, completions): return [None if "the" in p else 1.0 for p in prompts]
        """)
    )
    options = dict(reward_fn=("mine.py:words", "mine.py:is_even", "mine.py:some"), eval_dataset="toy:test")
    one = run_page(page, tiny, **options, micro_batch_size=1000)
    assert 0 < one[-1]["objective/verifiable_correct_rate"] < 1
    assert_same_curves(one, run_page(page, tiny, **options, micro_batch_size=4, rollout_micro_batch_size=4))
    done = start(page, page_args(page, tiny, **options))
    assert done.returncode == 0 and "2 processes (DDP) in fp32" in done.stdout, done.stderr[-2000:]
    assert_same_curves(one, read_metrics("runs/run"))


def test_a_function_that_fails_on_one_process_alone_ends_all_of_them(tiny, in_tmp):
    Path("mine.py").write_text(
        textwrap.dedent("""
            import os
            def f(prompts, completions):
                if os.environ["RANK"] == "1": raise KeyError("only here")
                return [0.0] * len(completions)
        """)
    )
    done = start("train_rloo", page_args("train_rloo", tiny, reward_fn=("mine.py:f",)))
    assert done.returncode == 1 and done.stderr.count("error: --reward_fn f raised KeyError") == 1, done.stderr[-2000:]
    assert "mine.py" in done.stderr and "only here" in done.stderr
