"""Our own functions against the vectors that other libraries are held against, in float32, in which they run."""

import inspect
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark/vectors"))
import check
import oracle
from adapters import ours

VECTORS = {vector["name"]: vector for vectors in oracle.load().values() for vector in vectors}
# For others alone: values between turns, trajectories of several rows, a score on the last token, REINFORCE++-baseline.
OF_OTHERS = (
    "gae_across",
    "gae_values_at_obs",
    "gae_score_on_a",
    "trajectories",
    "rewards_score_last",
    "reinforce_baseline",
)


@pytest.mark.parametrize("name", VECTORS)
def test_our_outputs_are_those_of_the_vector(name):
    """[RLOO-3] [RLOO-4] [RLOO-5] [RLOO-6] [RLOO-13] [GRPO-1] [GRPO-2] [GRPO-3] [GRPO-4] [GRPO-5] [GRPO-6] [GRPO-9]
    [PPO-5] [PPO-6] [PPO-7] [PPO-9] [PPO-11] [PPO-12] [PPO-13] [PPO-15] [PPO-19] [DPO-2] [DPO-3] [DISTILL-2] [DISTILL-3]
    [DISTILL-4] [DISTILL-7] [RM-7] [RM-8] [REW-3] [GEN-12] [GEN-13] [GEN-15] [DATA-6] [OPT-1] [OPT-4] [LOG-4] [EVAL-2]
    [EVAL-5]
    """
    outcome, off = check.measure(ours, VECTORS[name])
    assert outcome == ("none" if name.startswith(OF_OTHERS) else "equal"), off


def test_the_outputs_are_the_oracles():
    for name, vector in VECTORS.items():
        found = oracle.computed(vector)
        assert found.keys() == vector["outputs"].keys(), name
        assert all(check.worst(found[x], vector["outputs"][x]) < 1e-10 for x in found), name


def test_each_function_of_ours_has_two_vectors_at_least():
    assert min(Counter(vector["function"] for vector in VECTORS.values()).values()) >= 2
    functions = {name for name, x in vars(ours).items() if inspect.isfunction(x) and x.__module__ == ours.__name__}
    assert functions - {"known", "weights"} <= {vector["function"] for vector in VECTORS.values()}
