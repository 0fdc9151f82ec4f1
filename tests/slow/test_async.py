"""train_ppo_async.py: its checkpoints hold the batch that waits."""

import pytest
from helpers import assert_same_curves, page_args, read_metrics
from processes import run_under, spec_of
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def test_a_run_of_two_processes_that_dies_goes_on_with_the_batch_that_waited(ragged, tmp_path):
    """It was sampled by weights that no process has any more. One process finishes what two have begun."""
    args = page_args(
        "train_ppo_async", ragged, total_episodes=96, num_ppo_epochs=2, checkpoint_every=2, learning_rate=1e-3
    )
    (((whole),),) = run_under("one", [spec_of(args, "whole")], tmp_path, processes=1)
    spec = spec_of(args, "broken")
    assert all(row["died"] for row in run_under("ddp", [spec | {"die_after": 3}], tmp_path)[0])
    spec["args"]["resume"] = True
    (((rest),),) = run_under("one", [spec], tmp_path, processes=1)
    rows, again = (read_metrics(tmp_path / "runs" / name) for name in ("whole", "broken"))
    assert_same_curves(rows, again)
    weights = [load_file(tmp_path / "models" / name / "model.safetensors") for name in ("whole", "broken")]
    assert max((x - weights[1][name]).abs().max() for name, x in weights[0].items()) < 1e-3
    assert {update for update, _ in rest["sampled"]} == {4, 5, 6}  # Batch 3 was in the checkpoint after update 2.
    assert rest["sampled"].items() <= whole["sampled"].items()
