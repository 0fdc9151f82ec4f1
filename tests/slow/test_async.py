"""train_ppo_async.py: it learns as train_ppo.py does, and its checkpoints hold the batch that waits."""

import pytest
import torch
from helpers import PAGES, assert_same_curves, page_args, read_metrics, run_page
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


def test_it_learns_as_much_as_the_synchronous_page(tiny, tmp_path, monkeypatch):
    """The score is the share of even tokens. One update of staleness costs little."""
    monkeypatch.chdir(tmp_path)

    def even(model, batch):
        return ((batch[2] % 2 == 0) * batch[3]).sum(1) / batch[3].sum(1)

    options = dict(kl_coef=0.0, missing_eos_penalty=None, total_episodes=40 * 64, batch_size=64, learning_rate=3e-3)
    options |= dict(response_length=4, num_ppo_epochs=4, micro_batch_size=64)
    scores = {}
    for page in ("train_ppo", "train_ppo_async"):
        monkeypatch.setattr(PAGES[page], "response_scores", even)
        rows = run_page(page, tiny, **options)
        scores[page] = torch.tensor([row["objective/scores"] for row in rows])
    assert all(x[0] < 0.65 and x[-5:].mean() > 0.9 for x in scores.values())
    assert (scores["train_ppo"][-5:].mean() - scores["train_ppo_async"][-5:].mean()).abs() < 0.06
