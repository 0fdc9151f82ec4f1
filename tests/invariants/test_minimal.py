"""The minimal pages compute the numbers of the pages: each runs beside its page, and every number that both print is
compared. They are written apart, on plain transformers and padded rows, so each is the oracle of the other's updates.

The comparison ends after eight updates, or 50 steps. Over many more, rounding may choose another token, and from then
on the runs are two: on the embedded task with PPO after some 17 updates, with SFT after some 400 steps.
"""

import ast
import inspect

import pytest
import torch
from minimal_runs import CASES, MINIMAL, NAMES, SAMPLING, difference, make_models, run_minimal, run_page
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with the models that all cases start from."""
    make_models(folder := tmp_path_factory.mktemp("minimal"))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_minimal_page_computes_the_numbers_of_its_page(models, monkeypatch, case):
    """[RLOO-2] [RLOO-3] [RLOO-7] [GRPO-1] [GRPO-2] [PPO-1] [PPO-4] [PPO-5] [PPO-6] [PPO-7] [PPO-9] [PPO-10] [PPO-11]
    [PPO-12] [PPO-13] [PPO-14] [DISTILL-1] [DISTILL-2] [DPO-1] [DPO-2] [RM-5] [RM-7] [RM-8] [SFT-1] [SFT-2] [SFT-3]
    [GEN-5] [GEN-6] [GEN-7] [REW-1] [REW-2] [REW-3] [OPT-2] [OPT-4] [DATA-7]
    """
    monkeypatch.chdir(models)
    name, length, constants = CASES[case]
    lines, sampled = run_minimal(case)
    rows, sampled_by_page = run_page(case)
    assert len(rows) == (50 if name == "sft" else length if name in SAMPLING else length // constants["B"])
    assert difference(case, lines, rows) <= 1
    # The sampled tokens are the same ones. Some rows are padded, and some responses do not end.
    for (tokens, mask), (responses, response_mask) in zip(sampled, sampled_by_page, strict=True):
        assert torch.equal(tokens, responses) and torch.equal(mask, response_mask)
    if name != "sft":
        assert not all(mask.all() for _, mask in sampled) and any(mask[:, -1].any() for _, mask in sampled)
    # Every line acts: the norm is clipped, and PPO's ratios are.
    if "ragged" in case:
        assert max(line["grad_norm"] for line in lines) > constants["max_grad_norm"]
        assert name != "ppo" or any(line["clipfrac"] > 0.01 for line in lines)
    # What is saved is an ordinary folder, with the page's weights.
    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    ours, theirs = (auto.from_pretrained(f"{folder}/{case}") for folder in ("minimal", "page"))
    ids = torch.tensor([AutoTokenizer.from_pretrained(f"minimal/{case}")("we went to the").input_ids])
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-3)
    if name == "reward":
        assert ours.config.reward_bias == pytest.approx(theirs.config.reward_bias, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_minimal_page_needs_nothing_but_the_task_and_what_is_numbers_alone(name):
    tree = ast.parse(inspect.getsource(MINIMAL[name]))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"rlhf_details", "transformers"}
    ours = {a.name for node in ast.walk(tree) if getattr(node, "module", "") == "rlhf_details" for a in node.names}
    assert ours == {"toy", "utils"}


def test_what_two_minimal_pages_share_has_the_same_lines():
    """So the diff of two of them is what differs in the algorithm."""
    for function in ("sample", "logprobs_of"):
        assert len({inspect.getsource(getattr(MINIMAL[name], function)) for name in SAMPLING}) == 1
    assert len({inspect.getsource(MINIMAL[name].scores_of) for name in ("rloo", "ppo", "grpo")}) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sft"])
def test_a_model_that_is_missing_is_one_line(in_tmp, name):
    with pytest.raises(SystemExit, match=r"^error: models/toy/sft is missing: .*$"):
        MINIMAL[name].main()
    assert not list(in_tmp.iterdir())
