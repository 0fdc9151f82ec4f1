"""The pages and their layouts that the invariants hold for, and what a test may record of a run."""

import contextlib

import pytest
import torch
from helpers import LM_HUMAN_PREFERENCES, PAGES, page_args, read_metrics
from short_runs import write_rows

from rlhf_details import toy, utils

CASES = {  # name: (page, flags)
    "rloo": ("train_rloo", {}),
    "rloo-tokens": ("train_rloo", dict(token_level_kl=True, normalize_reward=True, normalize_advantage=True)),
    "grpo": ("train_grpo", dict(loss_normalization="response", cliprange_high=0.3)),
    "ppo": ("train_ppo", dict(kl_penalty="full")),
    "lm-human-preferences": ("train_ppo", LM_HUMAN_PREFERENCES),
    "ppo-overlap": ("train_ppo", dict(kl_penalty="k3", overlap=True)),
    "grpo-entropy": ("train_grpo", dict(entropy_coef=0.2, entropy_target=9.0)),
    "grpo-overlap": ("train_grpo", dict(overlap=True)),
    "rloo-overlap": ("train_rloo", dict(overlap=True)),
    "distill": ("train_distill", dict(gamma=0.5, responses_per_prompt=2, teacher_prompt_template="the {prompt} .")),
    "distill-jsd": ("train_distill", dict(divergence="jsd", beta=0.3, teacher_prompt_template="the {prompt} .")),
    "distill-overlap": ("train_distill", dict(overlap=True)),
}
OVERLAP = [name for name in CASES if "overlap" in name]  # A thread samples, by weights that are one update old.
TAUGHT = [name for name in CASES if "distill" in name]  # They have a teacher, one step for each rollout, no reward.
EVERY_CASE = pytest.mark.parametrize("case", CASES)
# The policy that trains samples, and takes several steps.
IN_STEP = pytest.mark.parametrize("case", [name for name in CASES if name not in [*OVERLAP, *TAUGHT]])
RLOO_AND_PPO = pytest.mark.parametrize("case", ["rloo", "ppo"])
LOSS = {page: f"{page.split('_')[1]}_policy_loss" for page in PAGES}


def steps_of(case, steps):
    """How many steps a case takes for a rollout, where it is asked for so many."""
    return 1 if case in TAUGHT else steps


def page_of(case):
    """The module of a case's page."""
    return PAGES[CASES[case][0]]


def run_case(case, models, **changes):
    """Runs main of a case's page in this process; returns its rows of metrics."""
    page, options = CASES[case]
    return read_metrics(PAGES[page].main(page_args(page, models, **(options | changes)))["run"])


def write_prompts(path, count):
    """Writes a data set of the embedded task's first held-out prompts, and returns its path as a string."""
    return write_rows(path, toy.rows("prompts", "test")[:count])


def episodes_of(calls, purpose=utils.TRAINING):
    """[[(query, response), ...] of each call of utils.sample for a purpose], as lists of token ids."""
    return [
        [(q[m].tolist(), r[n].tolist()) for q, m, r, n in zip(*args[1:3], responses, response_mask, strict=True)]
        for args, (responses, response_mask, _) in calls
        if args[7][1] == purpose
    ]


def optimiser_steps(monkeypatch, look):
    """[look(parameter groups) at every later step of AdamW]."""
    seen, step = [], torch.optim.AdamW.step

    def recording(self, *args, **kwargs):
        seen.append(look(self.param_groups))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    return seen


@contextlib.contextmanager
def shifted_sampler(shift=0.1):
    """The sampler reports log-probs that are `shift` too high on every token, as one in another precision would."""
    with pytest.MonkeyPatch.context() as patch:
        real = utils.sample

        def shifted(*args, **kwargs):
            responses, mask, logprobs = real(*args, **kwargs)
            return responses, mask, (logprobs + shift) * mask

        patch.setattr(utils, "sample", shifted)
        yield


def knobs(folder):
    """The flags of the fixture `baseline`; held-out prompts are written into `folder`."""
    sizes = dict(micro_batch_size=1000, rollout_micro_batch_size=1000, response_length=10, output_dir="model")
    steps = dict(num_ppo_epochs=2, num_mini_batches=2, learning_rate=3e-4)
    return sizes | steps | dict(eval_dataset=write_prompts(folder / "held_out.jsonl", 11))
