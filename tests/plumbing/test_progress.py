"""No step is silent for long: what is under way has a name, and a clock says it."""

import subprocess
import sys

import pytest
import torch
from helpers import PAGES, ROOT, launch, page_args

from rlhf_details import evaluate, train_dpo, train_reward, utils
from rlhf_details.plumbing import progress


# ---- one step --------------------------------------------------------------------------------------------------------
@pytest.fixture
def at(monkeypatch):
    """at(seconds): sets the clock, which begins at 0."""

    def set_clock(seconds):
        monkeypatch.setattr(progress.time, "monotonic", lambda: seconds)

    set_clock(0)
    return set_clock


@pytest.mark.parametrize(
    "seconds, silence, options, is_due",
    [
        (8, 8, {}, True),
        (8, 7, {}, False),
        (0.5, 8, {}, True),  # So long ago was the last line, of another step.
        (51, 10, {}, False),  # Lines become rarer: after the one at 41 s the next one is due at 51.25 s ..
        (52, 11, {}, True),
        (60, 8, dict(total=9), True),  # .. but where it is known how far the step is, at every eighth second.
        (600, 29, dict(total=9), True),
        (600, 28, dict(total=9), False),
        (11, 9, dict(patience=12), False),  # An update that takes as long as the one before says nothing.
        (13, 9, dict(patience=12), True),
    ],
)
def test_when_a_line_is_due(at, seconds, silence, options, is_due):
    step = progress.Step("sampling", **options)
    at(seconds)
    assert step.is_due(silence) == is_due and not progress.Step(None, **options).is_due(silence)


def test_the_innermost_step_is_told_with_what_is_done_of_it_and_what_is_left(at):
    with progress.doing("reading"):
        seen = []
        for number in progress.each([5, 6, 7, 8], "tokenising"):
            at(20 * (number - 4))
            seen.append(progress.STEPS[-1].line())
        assert progress.STEPS[-1].line() == "reading: 80 s so far"
    assert seen == ["tokenising: 20 s so far"] + [
        f"tokenising: {done} of 4, eta {left}s" for done, left in ((1, 120), (2, 60), (3, 27))
    ]
    with pytest.raises(ZeroDivisionError), progress.doing("dividing"):
        1 / 0
    assert len(progress.STEPS) == 1


# ---- the clock -------------------------------------------------------------------------------------------------------
CODE = """if True:
    import time
    from rlhf_details.plumbing import progress
    progress.SILENCE = 0.8
    progress.watch()
    with progress.doing("sleeping"):
        time.sleep(2)
    with progress.doing(None):
        time.sleep(1)
    progress.heard()
    with progress.doing("printing"):
        for _ in range(15):
            time.sleep(0.1), progress.heard()
"""


@pytest.mark.parametrize("rank, count", [("0", 1), ("1", 0)])
def test_the_clock_speaks_on_the_main_process_while_something_takes_long(monkeypatch, rank, count):
    monkeypatch.setenv("RANK", rank), monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    # On a busy machine there may be more lines, of either step.
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[:1]] == ["sleeping"] * count


def test_a_script_speaks_while_the_libraries_load(in_tmp):
    """A library that takes long to import and then ends the script stands for all of them."""
    (in_tmp / "torch.py").write_text(
        "import time\nfrom rlhf_details.plumbing import progress\n"
        "progress.SILENCE = 0\ntime.sleep(2.5)\nraise SystemExit(7)\n"
    )
    for name in ("tyro", "transformers", "huggingface_hub"):
        (in_tmp / f"{name}.py").write_text("import torch\n")
    done = launch("train_rloo.py", [], PYTHONPATH=f"{in_tmp}:{ROOT}")
    assert done.returncode == 7 and done.stdout.startswith("loading the libraries"), (done.stdout, done.stderr)


# ---- what the scripts name -------------------------------------------------------------------------------------------
@pytest.fixture
def named(monkeypatch):
    """The names of the innermost steps in which the sampler was called."""
    found, sample = [], utils.sample

    def sampling(*args, **kwargs):
        found.append(progress.STEPS[-1].what)
        return sample(*args, **kwargs)

    monkeypatch.setattr(utils, "sample", sampling)
    yield found
    assert len(progress.STEPS) == 1


@pytest.mark.parametrize("page", ["train_rloo", "train_grpo", "train_ppo"])
def test_a_run_names_its_updates_and_the_evaluation_before_them(page, tiny, few_prompts, in_tmp, named):
    PAGES[page].main(page_args(page, tiny, eval_dataset="toy:test", eval_every=1, total_episodes=32))
    update = "update {} of 2", "update {} of 2 (rollout 0 s, scores 0 s, optimise 0 s)"
    updates = [words.format(number) for number in (1, 2) for words in update]
    assert list(dict.fromkeys(named)) == ["the held-out rows before training", *updates]


@pytest.mark.parametrize("module", [train_reward, train_dpo])
def test_the_embedded_tasks_comparisons_are_sampled_with_one_thread_and_a_line_says_so(
    module, tiny, few_prompts, in_tmp, named, monkeypatch, capsys
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads, sample = [], utils.sample
    monkeypatch.setattr(utils, "sample", lambda *x, **y: threads.append(torch.get_num_threads()) or sample(*x, **y))
    torch.set_num_threads(2)
    try:
        values = dict(sft_model_path=str(tiny / "policy"), eval_dataset="toy:test", num_comparisons=96, batch_size=96)
        module.main(module.Args(**values, response_length=4, run_name="run", output_dir="model"))
    finally:
        torch.set_num_threads(1)
    lines = capsys.readouterr().out.splitlines()
    said = [line.partition(":")[0] for line in lines[:2]]
    assert set(threads) == {1} and lines[0].startswith("one CPU thread") and said[1] == "--dataset toy", lines[:3]
    assert "answers 96 prompts four times" in lines[1] and set(named[:2]) == {"sampling responses"}


def test_an_evaluation_names_what_it_samples(tiny, few_prompts, in_tmp, named):
    path = str(tiny / "policy")
    rewards = dict(dataset="toy-sum", reward_fn=("rlhf_details.toy:right_sum",), samples_per_prompt=3)
    evaluate.main(evaluate.Args(policy_path=(path,), ref_model_path=path, response_length=4, **rewards))
    assert list(dict.fromkeys(named)) == [
        f"responses and scores of {path}",
        f"more responses of {path} to each prompt",
        f"the KL of {path} to {path}",
    ]
