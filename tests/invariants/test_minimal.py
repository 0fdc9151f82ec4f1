"""The minimal pages compute the numbers of the pages: each runs beside its page, and every number that both print is
compared. They are written apart, on plain transformers and padded rows, so each is the oracle of the other's updates.

The comparison ends after eight updates, or 50 steps. Over many more, rounding may choose another token, and from then
on the runs are two: on the embedded task with PPO after some 17 updates, with SFT after some 400 steps.
"""

import ast
import inspect

import pytest
from minimal_runs import (
    CASES,
    FLAGS,
    MINIMAL,
    NAMES,
    PAGE,
    SAMPLING,
    TASK,
    are_equal,
    assert_saved_alike,
    difference,
    make_models,
    run_minimal,
    run_page,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with the models that all cases start from."""
    make_models(folder := tmp_path_factory.mktemp("minimal"))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_minimal_page_computes_the_numbers_of_its_page(models, monkeypatch, case):
    monkeypatch.chdir(models)
    name, length, constants = CASES[case]
    lines, sampled = run_minimal(case)
    rows, sampled_by_page = run_page(case)
    assert len(rows) == (50 if name == "sft" else length if name in SAMPLING else length // constants["B"])
    assert difference(case, lines, rows) <= 1
    # The sampled tokens are the same ones. Some rows are padded, and some responses do not end.
    assert are_equal(sampled, sampled_by_page)
    if name == "agent":
        assert {row["val/ran_out"] > 0 for row in rows} >= {True} and max(row["val/turns"] for row in rows) > 2
    elif name != "sft":
        assert not all(mask.all() for _, mask in sampled) and any(mask[:, -1].any() for _, mask in sampled)
    # Every line acts: the norm is clipped, and PPO's ratios are.
    if "ragged" in case:
        assert max(line["grad_norm"] for line in lines) > constants["max_grad_norm"]
        assert name != "ppo" or any(line["clipfrac"] > 0.01 for line in lines)
    assert_saved_alike(case)


@pytest.mark.parametrize("name", NAMES)
def test_a_minimal_page_needs_nothing_but_the_task_and_what_is_numbers_alone(name):
    tree = ast.parse(inspect.getsource(MINIMAL[name]))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"rlhf_details", "transformers"}
    ours = {a.name for node in ast.walk(tree) if getattr(node, "module", "") == "rlhf_details" for a in node.names}
    assert {"toy", "utils"} <= ours <= {"noise", "toy", "utils"}


@pytest.mark.parametrize("name", NAMES)
def test_the_constants_are_those_of_the_page_on_the_embedded_task(name):
    """The cases above have settings of their own."""
    flags = PAGE[name].Args(**PAGE[name].presets[TASK[name]])
    constants = {FLAGS.get(c, c): x for c, x in vars(MINIMAL[name]).items() if isinstance(x, (int, float))}
    constants = {flag: x for flag, x in constants.items() if hasattr(flags, flag)}
    assert {"batch_size", "seed", "learning_rate", "max_grad_norm"} <= constants.keys()
    assert constants == {flag: getattr(flags, flag) for flag in constants}


def test_what_two_minimal_pages_share_has_the_same_lines():
    """So the diff of two of them is what differs in the algorithm."""
    assert len({inspect.getsource(MINIMAL[name].logprobs_of) for name in SAMPLING}) == 1
    assert len({inspect.getsource(MINIMAL[name].sample) for name in SAMPLING if name != "agent"}) == 1
    assert len({inspect.getsource(MINIMAL[name].scores_of) for name in ("rloo", "ppo", "grpo")}) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sft"])
def test_a_model_that_is_missing_is_one_line(in_tmp, name):
    with pytest.raises(SystemExit, match=rf"^error: models/{TASK[name]}/sft is missing: .*$"):
        MINIMAL[name].main()
    assert not list(in_tmp.iterdir())
