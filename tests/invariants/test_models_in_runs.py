"""Whose weights a run changes, whose it does not, where the value model starts, and that a run learns."""

import gc
import json
import shutil

import pytest
import torch
import transformers
from accelerate import Accelerator
from cases import EVERY_CASE, RLOO_AND_PPO, VALUE_MODELS, optimiser_steps, page_of, run_case
from helpers import PAGES, record, run_ppo, without_times

from rlhf_details import utils
from rlhf_details.plumbing import engines
from rlhf_details.plumbing.run import Run

PPO = PAGES["train_ppo"]


def weights_of(folder):
    """{name: weight} of a folder's model, as transformers loads it."""
    kind = (
        transformers.AutoModelForSequenceClassification
        if folder.name == "reward"
        else transformers.AutoModelForCausalLM
    )
    return kind.from_pretrained(folder).state_dict()


def assert_equal_weights(module, folder):
    state = module.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in weights_of(folder).items())


@EVERY_CASE
def test_the_reference_and_the_reward_model_stay_as_they_were(ragged, in_tmp, monkeypatch, case):
    loaded = record(monkeypatch, page_of(case), "load_models")["load_models"]
    run_case(case, ragged, learning_rate=1e-2, total_episodes=32, output_dir="model")
    (_, (_, policy, reference, reward_model)) = loaded[0]
    assert_equal_weights(reference.model, ragged / "policy")
    assert_equal_weights(reward_model.model, ragged / "reward")
    assert_equal_weights(policy.model, in_tmp / "model")
    assert not any(p.requires_grad for module in (reference, reward_model) for p in module.parameters())
    before = weights_of(ragged / "policy")
    assert all((x - before[name]).abs().max() > 1e-4 for name, x in weights_of(in_tmp / "model").items())


@EVERY_CASE
def test_model_1_dropout_in_the_configuration_changes_nothing(ragged, in_tmp, case):
    """Fault 10. The models of `ragged` have none; here each kind that GPT-NeoX has is 0.5 in every model."""
    shutil.copytree(ragged, "dropping")
    for name in ("policy", "reward"):
        path = in_tmp / "dropping" / name / "config.json"
        rates = dict.fromkeys(("hidden_dropout", "attention_dropout", "classifier_dropout"), 0.5)
        path.write_text(json.dumps(json.loads(path.read_text()) | rates))
    options = dict(num_ppo_epochs=2, num_mini_batches=2, attn_implementation="eager")
    assert without_times(run_case(case, in_tmp / "dropping", **options)) == without_times(
        run_case(case, ragged, **options)
    )


@EVERY_CASE
def test_the_saved_policy_is_an_ordinary_model_folder(ragged, in_tmp, case):
    run_case(case, ragged, total_episodes=16, output_dir="model")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer, (model, info) = (
        transformers.AutoTokenizer.from_pretrained("model"),
        load("model", output_loading_info=True),
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = tokenizer("last friday my sister", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 7)


# ---- the value model -------------------------------------------------------------------------------------------------
def test_ppo_1_the_value_model_starts_as_a_copy_of_the_reward_model_which_training_leaves_alone(
    ragged, in_tmp, monkeypatch
):
    loaded, starts, prepare = record(monkeypatch, PPO, "load_models")["load_models"], [], engines.prepare

    def recording(accelerator, module, optimizer):
        starts.append({name: x.clone() for name, x in module.critic.model.state_dict().items()})
        return prepare(accelerator, module, optimizer)

    monkeypatch.setattr(engines, "prepare", recording)
    run_ppo(ragged, learning_rate=1e-2)
    (_, (_, policy, _, reward_model)) = loaded[0]
    for name, x in weights_of(ragged / "reward").items():
        assert torch.equal(x, starts[0][name]) and torch.equal(x, reward_model.model.state_dict()[name])
        assert not torch.equal(x, policy.critic.model.state_dict()[name])
    assert policy.critic.bias == reward_model.bias == 0.7


@VALUE_MODELS
def test_ppo_2_the_values_of_the_first_update(ragged, in_tmp, monkeypatch, value_model):
    """Zero where the trunk is shared; else what the reward model, bias included, says of each prefix."""
    values = record(monkeypatch, PPO, "compute_gae")["compute_gae"]
    sampled = record(monkeypatch, utils, "sample")["sample"]
    run_ppo(ragged, total_episodes=16, value_model=value_model, micro_batch_size=3, rollout_micro_batch_size=16)
    values = values[0][0][1]
    if value_model == "shared":
        assert torch.equal(values, torch.zeros(16, 8))
        return
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(ragged / "reward")
    ((_, (queries, query_mask, _), *_), (responses, mask, _)) = sampled[0]
    for row in range(0, 16, 3):
        query, response = queries[row][query_mask[row]], responses[row][mask[row]]
        for j in range(8):
            with torch.no_grad():
                hidden = reward.base_model(torch.cat([query, response[:j]]).unsqueeze(0)).last_hidden_state
                expected = reward.score(hidden)[0, -1, 0].item() + 0.7 if j <= len(response) else 0.0
            assert values[row, j].item() == pytest.approx(expected, abs=1e-5)
    assert len(set(mask.sum(1).tolist())) > 1


@VALUE_MODELS
def test_ppo_3_the_value_loss_reaches_the_policys_trunk_only_where_it_is_shared(
    ragged, in_tmp, monkeypatch, value_model
):
    """The policy loss is switched off. At the first step a shared head is zero, so no gradient passes through it."""
    real = PPO.ppo_policy_loss
    loaded = record(monkeypatch, PPO, "load_models")["load_models"]

    def norm_of(module):
        return sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None) ** 0.5

    monkeypatch.setattr(PPO, "ppo_policy_loss", lambda *args: (real(*args)[0] * 0, *real(*args)[1:]))
    policy = lambda: loaded[0][1][1]  # noqa: E731
    norms = optimiser_steps(monkeypatch, lambda groups: (norm_of(policy().model), norm_of(policy().critic)))
    run_ppo(ragged, value_model=value_model, num_ppo_epochs=2, cliprange_value=10.0)
    assert len(norms) == 6 and all(critic > 1e-2 for _, critic in norms)
    trunk = [norm for norm, _ in norms]
    assert trunk[0] == 0
    assert all(norm > 1e-5 for norm in trunk[1:]) if value_model == "shared" else not any(trunk)


@VALUE_MODELS
def test_ppo_4_one_optimiser_steps_the_policy_and_the_value_model(ragged, in_tmp, monkeypatch, value_model):
    """Fault 21."""
    loaded, moved = record(monkeypatch, PPO, "load_models")["load_models"], {}
    prepare = engines.prepare

    def recording(accelerator, module, optimizer):
        moved.update({name: x.clone() for name, x in module.state_dict().items()})
        return prepare(accelerator, module, optimizer)

    monkeypatch.setattr(engines, "prepare", recording)
    run_ppo(ragged, value_model=value_model, total_episodes=32)
    names = [name for name, _ in loaded[0][1][1].named_parameters()]
    after = loaded[0][1][1].state_dict()
    assert all((after[name] - moved[name]).abs().max() > 1e-4 for name in names)
    assert {name.split(".")[0] for name in names} == {"model", "critic"}


# ---- LoRA ------------------------------------------------------------------------------------------------------------
@RLOO_AND_PPO
def test_loras_reference_is_the_model_without_its_adapters(ragged, in_tmp, case):
    """The KL is 0 at update 1 and grows; memory flags change nothing; what is saved is the merged model."""
    pytest.importorskip("peft")
    options = dict(lora_rank=4, learning_rate=1e-2, num_ppo_epochs=2)
    rows = run_case(case, ragged, **options, output_dir="model")
    assert abs(rows[0]["objective/kl"]) < 1e-5 and abs(rows[-1]["objective/kl"]) > 1e-2
    assert rows[0]["val/first_ratio"] - 1 < 1e-5
    before, after = weights_of(ragged / "policy"), weights_of(in_tmp / "model")
    moved = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert moved and all("dense" in name or "query_key_value" in name for name in moved)
    assert (in_tmp / "model/adapter/adapter_model.safetensors").exists()
    knobs = dict(micro_batch_size=4, rollout_micro_batch_size=4, gradient_checkpointing=True)
    for row, other in zip(rows, run_case(case, ragged, **options, **knobs), strict=True):
        for name in ("objective/scores", "objective/kl", "policy/grad_norm", "loss/policy_avg"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5)


# ---- learning --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["rloo", "ppo", "lm-human-preferences", "async"])
def test_it_learns_a_trivial_reward(tiny, in_tmp, monkeypatch, case):
    """The score is the share of even tokens; that of a random policy is near one half."""

    def even(model, batch, *n):
        return ((batch[2] % 2 == 0) * batch[3]).sum(1) / batch[3].sum(1)

    monkeypatch.setattr(page_of(case), "response_scores", even)
    options = dict(kl_coef=0.0, missing_eos_penalty=None, batch_size=64, response_length=4, micro_batch_size=64)
    options |= dict(total_episodes=35 * 64, learning_rate=3e-3, num_ppo_epochs=2)
    options |= dict(total_episodes=20 * 64, learning_rate=5e-3, num_ppo_epochs=4) if "rloo" not in case else {}
    options |= dict(kl_coef=0.001, adaptive_kl=False) if case == "lm-human-preferences" else {}
    rows = run_case(case, tiny, **options)
    assert rows[0]["objective/scores"] < 0.65 and rows[-1]["objective/scores"] > 0.9


@RLOO_AND_PPO
def test_no_update_leaves_a_graph_behind(ragged, in_tmp, monkeypatch, case):
    """Fault 34: a number kept without `detach` keeps its graph. Tensors with one are counted at each row."""
    alive, log = [], Run.log

    def counting(self, update, *rest):
        gc.collect()
        alive.append(sum(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in gc.get_objects()))
        log(self, update, *rest)

    monkeypatch.setattr(Run, "log", counting)
    run_case(case, ragged, num_ppo_epochs=2, micro_batch_size=4, total_episodes=64)
    assert len(set(alive[-3:])) == 1


# ---- what is not finite ----------------------------------------------------------------------------------------------
@EVERY_CASE
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run_before_a_weight_changes(
    ragged, in_tmp, monkeypatch, capsys, case, value
):
    """In the second minibatch of update 2, by one number; the report names both, and the checkpoint to go on from."""
    real, calls, steps = Accelerator.backward, [], optimiser_steps(monkeypatch, lambda groups: 1)

    def backward(self, loss, **kwargs):
        calls.append(1)
        real(self, loss, **kwargs)
        if len(calls) == 6:
            self._optimizers[0].param_groups[0]["params"][2].grad.view(-1)[1] = value

    monkeypatch.setattr(Accelerator, "backward", backward)
    with pytest.raises(SystemExit) as error:
        run_case(case, ragged, num_ppo_epochs=2, num_mini_batches=2, checkpoint_every=1, output_dir="model")
    assert error.value.code == 1 and len(steps) == 5
    message = capsys.readouterr().err
    assert message.count("error: update 2, minibatch 2: the gradient's norm is ") == message.count("error:") == 1
    assert "last good checkpoint: runs/run/checkpoints/000001; --run_name run --resume goes on from it" in message
    assert not (in_tmp / "model").exists() and len((in_tmp / "runs/run/metrics.jsonl").read_text().splitlines()) == 1


@EVERY_CASE
def test_a_loss_that_is_not_finite_stops_the_run_too(ragged, in_tmp, monkeypatch, capsys, case):
    """Also where ratio_threshold might hide it: a comparison with NaN is false."""
    page, name = page_of(case), "rloo_policy_loss" if "rloo" in case else "ppo_policy_loss"
    real, calls, steps = getattr(page, name), [], optimiser_steps(monkeypatch, lambda groups: 1)

    def broken(*args):
        losses, logratio, clipped = real(*args)
        calls.append(1)
        factor = float("nan") if len(calls) == 3 else 1.0
        return losses * factor, logratio * factor, clipped

    monkeypatch.setattr(page, name, broken)
    options = {} if "rloo" in case else dict(ratio_threshold=100.0)
    with pytest.raises(SystemExit) as error:
        run_case(case, ragged, num_ppo_epochs=2, **options)
    assert error.value.code == 1 and len(steps) == 2
    assert "error: update 2, minibatch 1: the gradient's norm is nan" in capsys.readouterr().err
