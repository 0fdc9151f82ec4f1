"""What is in the models of a run, what it saves, and what it leaves behind."""

import gc
import json
import shutil

import pytest
import torch
import transformers
from accelerate import Accelerator
from cases import EVERY_CASE, RLOO_AND_PPO, TAUGHT, optimiser_steps, run_case
from helpers import save_pair, without_times
from safetensors.torch import load_file

from rlhf_details.plumbing.outputs.run import Run


@EVERY_CASE
def test_model_1_dropout_in_the_configuration_changes_nothing(ragged, in_tmp, case):
    """Fault 10. The models of `ragged` have none; here each kind that GPT-NeoX has is 0.5 in every model."""
    shutil.copytree(ragged, "dropping")
    for name in ("policy", "reward", "teacher"):
        path = in_tmp / "dropping" / name / "config.json"
        rates = dict.fromkeys(("hidden_dropout", "attention_dropout", "classifier_dropout"), 0.5)
        path.write_text(json.dumps(json.loads(path.read_text()) | rates))
    options = dict(num_ppo_epochs=2, num_mini_batches=2, attn_implementation="eager")
    ours, theirs = (without_times(run_case(case, models, **options)) for models in (in_tmp / "dropping", ragged))
    assert ours == theirs


@EVERY_CASE
def test_the_saved_policy_is_an_ordinary_model_folder(ragged, in_tmp, case):
    run_case(case, ragged, total_episodes=16, output_dir="model")
    model, info = transformers.AutoModelForCausalLM.from_pretrained("model", output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = tokenizer("last friday my sister", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 7)


def test_a_tied_head_is_saved_once(in_tmp):
    pair = save_pair(in_tmp, tie_word_embeddings=True)
    run_case("rloo", pair, total_episodes=16, output_dir="model")
    names = (load_file(folder / "model.safetensors").keys() for folder in (pair / "policy", in_tmp / "model"))
    assert len({frozenset(x) for x in names}) == 1


# ---- learning --------------------------------------------------------------------------------------------------------
@RLOO_AND_PPO
def test_no_update_leaves_a_graph_behind(ragged, in_tmp, monkeypatch, case):
    """Fault 34: a number kept without `detach` keeps its graph. Tensors with one are counted at each row."""
    alive, log = [], Run.log

    def counting(self, update, *rest, **more):
        gc.collect()
        alive.append(sum(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in gc.get_objects()))
        log(self, update, *rest, **more)

    monkeypatch.setattr(Run, "log", counting)
    gc.freeze()  # Objects from before are not looked at.
    run_case(case, ragged, num_ppo_epochs=2, micro_batch_size=4, total_episodes=64)
    gc.unfreeze()
    assert len(set(alive[-3:])) == 1


# ---- what is not finite ----------------------------------------------------------------------------------------------
@EVERY_CASE
def test_a_gradient_that_is_not_finite_stops_the_run_before_a_weight_changes(ragged, in_tmp, monkeypatch, capsys, case):
    """In the second minibatch of update 2, by one number; the report names both, and the checkpoint to go on from."""
    real, calls, steps = Accelerator.backward, [], optimiser_steps(monkeypatch, lambda groups: 1)
    last = 2 if case in TAUGHT else 4 + 2  # the number of the step

    def backward(self, loss, **kwargs):
        calls.append(1)
        real(self, loss, **kwargs)
        if len(calls) == last:
            self._optimizers[0].param_groups[0]["params"][2].grad.view(-1)[1] = float("nan")

    monkeypatch.setattr(Accelerator, "backward", backward)
    with pytest.raises(SystemExit) as error:
        run_case(case, ragged, num_ppo_epochs=2, num_mini_batches=2, checkpoint_every=1, output_dir="model")
    assert error.value.code == 1 and len(steps) == last - 1
    message, where = capsys.readouterr().err, "" if case in TAUGHT else ", minibatch 2"
    assert message.count(f"error: update 2{where}: the gradient's norm is ") == message.count("error:") == 1
    assert "last good checkpoint: runs/run/checkpoints/000001; --run_name run --resume goes on from it" in message
    assert not (in_tmp / "model").exists() and len((in_tmp / "runs/run/metrics.jsonl").read_text().splitlines()) == 1
