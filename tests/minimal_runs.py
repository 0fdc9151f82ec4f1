"""Short runs of the minimal pages and of their pages, with the same models, rows and settings, side by side.

tests/invariants/test_minimal.py compares them, and benchmark/checks/minimal.py breaks each line of a minimal page.
"""

import contextlib
import importlib
import io
import re
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from helpers import PAGES, SCRIPTS, read_metrics, record, save_ragged
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_details import toy, utils

SAMPLING = "rloo", "ppo", "grpo", "distill", "agent"
NAMES = "sft", "reward", "dpo", *SAMPLING
MINIMAL = {name: importlib.import_module(f"rlhf_details.minimal.{name}") for name in NAMES}
PAGE = {name: (SCRIPTS | PAGES)[f"train_{name}"] for name in NAMES}
TASK = dict.fromkeys(NAMES, "toy") | {"agent": "toy-tools"}
METRICS = {  # what a minimal page prints: the names by which a page logs it
    "accuracy": ("train/rm/accuracy", "rewards/accuracies"),
    "clipfrac": ("policy/clipfrac_avg",),
    "divergence": ("objective/divergence",),
    "divergence_per_token": ("objective/divergence_per_token",),
    "grad_norm": ("policy/grad_norm",),
    "kl": ("objective/kl",),
    "kl_loss": ("loss/kl_avg",),
    "length": ("val/sequence_lengths",),
    "loss": ("train/sft/loss", "train/rm/loss", "train/dpo/loss"),
    "policy_loss": ("loss/policy_avg",),
    "right": ("objective/verifiable_correct_rate",),
    "scores": ("objective/scores",),
    "turns": ("val/turns",),
    "value_loss": ("loss/value_avg",),
}
FLAGS = dict(  # the constants of minimal pages that pages call by another name
    B="batch_size", R="response_length", passes="num_ppo_epochs", sft_folder="sft_model_path",
    reward_folder="reward_model_path", teacher_folder="teacher_model_path",
)  # fmt: skip
LENGTHS = {"sft": "num_train_epochs", "reward": "num_comparisons", "dpo": "num_comparisons"}


class Case(NamedTuple):
    """A run of both. length: what main is given, the epochs, comparisons or updates."""

    name: str
    length: int
    constants: dict


# The policy often says EOS, so that responses differ in length, and every clip acts.
RAGGED = dict(sft_folder="ragged/policy", B=16, R=8, learning_rate=5e-3, max_grad_norm=0.1)
REWARDED = RAGGED | dict(reward_folder="ragged/reward", kl_coef=0.5, missing_eos_penalty=1.0)
PAIRS = dict(B=4, max_grad_norm=0.1, learning_rate=5e-3)
CASES = {
    "sft": Case("sft", 2, dict(B=16)),
    # With two comparisons a step, five columns more of padding move DPO's own loss by 1e-5: too noisy to compare.
    "reward": Case("reward", 200, dict(B=4)),
    "dpo": Case("dpo", 200, dict(B=4)),
    "rloo": Case("rloo", 8, dict(B=16)),
    "ppo": Case("ppo", 8, dict(B=16)),
    "grpo": Case("grpo", 8, dict(B=16)),
    "distill": Case("distill", 8, dict(B=16)),
    # Some trajectories run out of turns, and some of tokens. The clip keeps the rounding of gradients that are 0 below
    # Adam's epsilon. At 0.1 it became steps, and with AVX-512 the two were 1e-4 apart after 8 updates.
    "agent": Case("agent", 8, dict(B=16, R=20, max_turns=4, learning_rate=2e-3, kl_coef=0.5, max_grad_norm=1e-3)),
    "reward-ragged": Case("reward", 40, PAIRS | dict(sft_folder="ragged/policy", R=8)),
    "dpo-ragged": Case("dpo", 40, PAIRS | dict(sft_folder="ragged/policy", R=8)),
    "rloo-ragged": Case("rloo", 8, REWARDED),
    "ppo-ragged": Case("ppo", 8, REWARDED | dict(cliprange=0.02, cliprange_value=0.01, lam=0.8, vf_coef=0.5)),
    "grpo-ragged": Case("grpo", 8, REWARDED),
    "distill-ragged": Case("distill", 8, RAGGED | dict(teacher_folder="ragged/teacher")),
}


@contextlib.contextmanager
def constants(module, values):
    """Within it the constants of a minimal page have these values."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(patch.object(module, name, value))  # It fails where there is no such constant.
        yield


@contextlib.contextmanager
def few_rows():
    """Within it the embedded task has 400 texts and 96 prompts, so that a run goes over them several times."""
    rows, counts = toy.rows, {"sft": 400, "prompts": 96}
    with patch.object(toy, "rows", lambda stage, split, task="toy": rows(stage, split, task)[: counts[stage]]):
        yield


def make_models(folder):
    """Writes the models that all cases start from: ragged ones, and an SFT policy and a teacher after a few steps."""
    save_ragged(folder / "ragged")
    for path, epochs in (("models/toy/sft", 1), ("models/toy/rloo", 2)):
        change = constants(MINIMAL["sft"], dict(B=16, output_folder=str(folder / path)))
        with few_rows(), change, contextlib.redirect_stdout(io.StringIO()):
            MINIMAL["sft"].main(epochs)
    (folder / "models/toy/reward").symlink_to(folder / "ragged/reward")
    flags = PAGE["sft"].presets["toy-tools"] | dict(num_layers=1, batch_size=16, num_train_epochs=4, eval_dataset=None)
    flags |= dict(dataset="toy-tools", output_dir=str(folder / "models/toy-tools/sft"), run_name="sft-tools")
    with few_rows(), contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        PAGE["sft"].main(PAGE["sft"].Args(**flags))


def numbers_of(output):
    """[{name: number} of each line] that a minimal page printed for an update."""
    lines = [line for line in output.splitlines() if re.match(r" *\d+  ", line)]
    return [{word: float(x) for word, x in re.findall(r"([a-z_]+) (-?[\d.]+|nan)", line)} for line in lines]


def run_minimal(case, module=None):
    """([{name: number} of each line that a minimal page prints], [(responses, mask) of each call of its sampler])."""
    name, length, values = CASES[case]
    module, out = module or MINIMAL[name], io.StringIO()
    change = constants(module, values | dict(output_folder=f"minimal/{case}"))
    with few_rows(), change, contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patches:
        calls = record(patches, module if name in SAMPLING else utils, "sample")["sample"]
        module.main(length)
        found = [result[:2] for _, result in calls]
        if name in SAMPLING:  # These return the queries as well.
            found = [[after(x, args[1].size(1), module) for x in result[:2]] for args, result in calls]
    return numbers_of(out.getvalue()), found


def after(x, Q, module):
    """What a sampler has added to its query of Q columns. A turn of a trajectory may have fewer columns than R."""
    return torch.nn.functional.pad(x[:, Q:], (0, module.R - x.size(1) + Q))


def run_page(case):
    """(its rows of metrics, [(responses, mask) of each call of utils.sample]) of the page of a case."""
    name, length, values = CASES[case]
    page = PAGE[name]
    flags = page.presets[TASK[name]] | {FLAGS.get(constant, constant): value for constant, value in values.items()}
    flags |= dict(eval_dataset=None, run_name=case, output_dir=f"page/{case}", overwrite=True)
    if name in SAMPLING:
        flags |= dict(total_episodes=length * flags["batch_size"], num_sample_generations=0)
    else:
        flags |= {LENGTHS[name]: length}
    with few_rows(), pytest.MonkeyPatch.context() as patches:
        calls = record(patches, utils, "sample")["sample"]
        rows = read_metrics(page.main(page.Args(**flags))["run"])
    return [row for row in rows if row["update"]], [result[:2] for _, result in calls]


def gaps(name, lines, rows, B=0):
    """The largest difference of each printed line from the page's row: relative, or absolute where that is smaller.

    With B, the episodes or comparisons of an update, a share that is a count may be off by one.
    """
    found = []
    for number, (line, row) in enumerate(zip(lines, rows, strict=True), 1):
        found.append(0.0)
        for word, x in line.items():
            (metric,) = [metric for metric in METRICS[word] if metric in row]
            gap = abs(x - row[metric])
            if (name, number, word) == ("dpo", 1, "accuracy"):
                continue  # All scores are 0 there, up to rounding, which differs.
            if word in ("accuracy", "clipfrac") and gap * B * line.get("length", 1) < 1.01:
                continue
            gap = min(gap / max(abs(row[metric]), 1e-12), 10 * gap)
            found[-1] = max(found[-1], gap if gap == gap else float("inf"))
    return found


def difference(case, lines, rows):
    """The largest difference of a case, where 1e-5 relative is 1, and so is 1e-6 absolute."""
    name, _, values = CASES[case]
    if len(lines) != len(rows):
        return float("inf")
    return 1e5 * max(gaps(name, lines, rows, values.get("B", MINIMAL[name].B)))


def are_equal(sampled, sampled_by_page):
    """Whether two lists of (responses, mask) hold the same tokens."""
    pairs = list(zip(sampled, sampled_by_page, strict=True))
    return all(torch.equal(x, y) for ours, theirs in pairs for x, y in zip(ours, theirs, strict=True))


def assert_saved_alike(case):
    """What a minimal page has saved is an ordinary model folder, with the weights of its page's."""
    auto = AutoModelForSequenceClassification if CASES[case].name == "reward" else AutoModelForCausalLM
    ours, theirs = (auto.from_pretrained(f"{folder}/{case}") for folder in ("minimal", "page"))
    ids = torch.tensor([AutoTokenizer.from_pretrained(f"minimal/{case}")("we went to the").input_ids])
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-3)
    if CASES[case].name == "reward":
        assert ours.config.reward_bias == pytest.approx(theirs.config.reward_bias, rel=1e-5, abs=1e-6)
