"""What must not change a number: memory flags, padding, layout, kernels, evaluations, and running again."""

import importlib

import pytest
import torch
import transformers
from cases import CASES, EVERY_CASE, RLOO_AND_PPO, knobs, page_of, run_case, steps_of
from helpers import assert_same_curves, record, without_times

from rlhf_details import utils

importlib.import_module("transformers.models.gpt_neox.modeling_gpt_neox")
LAYER = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXMLP


@pytest.mark.parametrize(
    "case, micro, rollout",
    [("rloo", 1, 16), ("rloo", 6, 10), ("ppo", 1, 16), *((case, 3, 5) for case in CASES if case != "rloo")],
)
def test_opt_5_micro_batch_and_slice_sizes_change_nothing(ragged, in_tmp, baseline, case, micro, rollout):
    rows = run_case(case, ragged, **(knobs(in_tmp) | dict(micro_batch_size=micro, rollout_micro_batch_size=rollout)))
    assert_same_curves(baseline.rows, rows)


@EVERY_CASE
def test_padding_changes_nothing(ragged, in_tmp, monkeypatch, baseline, case):
    """More columns on the left of the prompts, filled with a real token, and none trimmed: only the masks tell."""
    left_pad, pad = utils.left_pad, torch.nn.functional.pad

    def wide(rows, device=None):
        tokens, mask = left_pad(rows, device)
        return pad(tokens, (7, 0), value=5), pad(mask, (7, 0))

    monkeypatch.setattr(utils, "left_pad", wide)
    monkeypatch.setattr(utils, "trim", lambda batch, extra=0: batch)
    assert_same_curves(baseline.rows, run_case(case, ragged, **knobs(in_tmp)))
    is_fixed = case == "lm-human-preferences"  # Elsewhere there was padding on the right as well.
    assert (baseline.rows[1]["val/sequence_lengths"] == 10) == is_fixed


@pytest.mark.parametrize("case", ["rloo", "rloo-tokens", "grpo"])
def test_rloo_8_packed_and_plain_rows_give_the_same_curves(ragged, in_tmp, capsys, baseline, case):
    assert_same_curves(baseline.rows, run_case(case, ragged, **knobs(in_tmp), share_prompts=False))
    assert "plain rows, one response each: --no_share_prompts" in capsys.readouterr().out
    run_case(case, ragged, total_episodes=16)
    assert "packed rows: a prompt is computed once for 4 of its 4 responses" in capsys.readouterr().out


@EVERY_CASE
def test_gradient_checkpointing_computes_every_layer_again_and_changes_nothing(
    ragged, in_tmp, monkeypatch, baseline, case
):
    with_gradient, forward = [], LAYER.forward  # The baseline's calls are not counted.
    monkeypatch.setattr(
        LAYER, "forward", lambda self, x: with_gradient.append(torch.is_grad_enabled()) or forward(self, x)
    )
    rows = run_case(case, ragged, **knobs(in_tmp), gradient_checkpointing=True)
    assert_same_curves(baseline.rows, rows)
    networks = 2 if case in ("ppo", "ppo-overlap") else 1  # A value model of its own is another network.
    updates, steps, layers = 3, steps_of(case, 4), 2
    assert sum(with_gradient) == updates * steps * layers * networks * 2  # once forward and once backward


@EVERY_CASE
def test_eager_and_sdpa_attention_give_the_same_curves(ragged, in_tmp, monkeypatch, baseline, case):
    """sdpa is what a run uses by default."""
    loaded = record(monkeypatch, page_of(case), "load_models")["load_models"]
    rows = run_case(case, ragged, **knobs(in_tmp), attn_implementation="eager")
    assert_same_curves(baseline.rows, rows)
    models = [module.model for module in loaded[0][1][1:]]
    assert {model.config._attn_implementation for model in models} == {"eager"}


@EVERY_CASE
def test_the_same_run_again_is_bitwise_equal_and_another_seed_is_another_run(ragged, in_tmp, baseline, case):
    """Tables of samples and evaluations in between change nothing either."""
    rows = run_case(case, ragged, **knobs(in_tmp), num_sample_generations=2, eval_every=1)
    for row, wanted in zip(without_times(rows), without_times(baseline.rows), strict=True):
        evaluated = {name: x for name, x in row.items() if name.startswith("eval/") and name not in wanted}
        assert row == wanted | evaluated and bool(evaluated) == (row["update"] in (1, 2))
    ours, theirs = (folder / "model/model.safetensors" for folder in (in_tmp, baseline.folder))
    assert ours.read_bytes() == theirs.read_bytes()
    other = run_case(case, ragged, **knobs(in_tmp), seed=2)
    assert other[1]["policy/entropy_avg"] != rows[1]["policy/entropy_avg"]


@RLOO_AND_PPO
def test_accumulation_steps_of_the_launch_configuration_change_nothing(ragged, in_tmp, monkeypatch, case):
    reference = run_case(case, ragged, micro_batch_size=4, num_ppo_epochs=2)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert without_times(run_case(case, ragged, micro_batch_size=4, num_ppo_epochs=2)) == without_times(reference)


@pytest.mark.parametrize("case", ["rloo", "ppo", "lm-human-preferences"])
def test_a_padding_token_equal_to_eos_is_no_special_case(ragged, in_tmp, case):
    """Faults 5, 6 and 24: the same run with pad = EOS in tokenizer and configuration, bit for bit.

    Gold is of the text, where the former padding is a token like any other.
    """
    reference = run_case(case, ragged, response_length=16)
    kinds = {"policy": transformers.AutoModelForCausalLM, "reward": transformers.AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        model, tokenizer = (x.from_pretrained(ragged / name) for x in (kind, transformers.AutoTokenizer))
        tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        model.save_pretrained(f"same/{name}"), tokenizer.save_pretrained(f"same/{name}")
    same = run_case(case, in_tmp / "same", response_length=16)
    for row in (*same, *reference):
        del row["objective/gold"], row["objective/parses"]
    assert without_times(same) == without_times(reference)
