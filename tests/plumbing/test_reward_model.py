"""Whole runs of train_reward.py on tiny models, and the model folder that it leaves."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from helpers import assert_same_curves, page_args, read_metrics, record, record_steps, without_times
from short_runs import comparisons, write_rows

from rlhf_details import toy, train_reward, utils
from rlhf_details.plumbing.inputs import models, token_ids

FLAGS = train_reward.Args()
LIBRARY = transformers.AutoTokenizer, transformers.AutoModelForCausalLM


def run_reward(tiny, **changes):
    """Trains on rows.jsonl for one epoch of five steps; returns the rows of metrics."""
    values = dict(
        dataset="rows.jsonl", eval_dataset="rows.jsonl", sft_model_path=str(tiny / "policy"), batch_size=8,
        micro_batch_size=8, learning_rate=1e-3, response_length=8, run_name="run", output_dir="reward", overwrite=True,
    )  # fmt: skip
    return read_metrics(train_reward.main(train_reward.Args(**(values | changes)))["run"])


@pytest.fixture
def rows(in_tmp):
    """rows.jsonl with 40 comparisons of 4 whose best one has the highest gold."""
    write_rows("rows.jsonl", table := comparisons(40))
    return table


@torch.no_grad()
def library_scores(folder, rows):
    """Scores of rows of token ids by the saved folder, right-padded in plain transformers, and the bias added."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pad = model.config.pad_token_id
    assert model.config.num_labels == 1 and pad == tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return model(input_ids=ids, attention_mask=mask).logits[:, 0] + model.config.reward_bias


def sampled(calls):
    """Token ids of prompts and responses, joined, of each recorded call of utils.sample: before and after training."""
    return [rows_of(args, *result) for args, result in calls]


def rows_of(args, responses, mask, _):
    return [[*q[m].tolist(), *r[n].tolist()] for q, m, r, n in zip(*args[1:3], responses, mask, strict=True)]


def encoded(tokenizer, pairs):
    """Token ids of (prompt, completion) pairs, joined, EOS included."""
    return [[*prompt, *completion] for prompt, completion in (token_ids.encode(tokenizer, *pair) for pair in pairs)]


def pairs_of(rows):
    """(prompt, candidate) of all candidates of comparisons."""
    return [(row["prompt"], text) for row in rows for text in row["candidates"]]


# ---- training --------------------------------------------------------------------------------------------------------
def test_opt_5_micro_batches_change_nothing(rows, tiny):
    assert_same_curves(run_reward(tiny), run_reward(tiny, micro_batch_size=3))


def test_rm_1_the_head_starts_with_std_one_over_root_of_d_plus_one(in_tmp, tiny):
    sizes = dict(hidden_size=1024, intermediate_size=8, num_hidden_layers=1)
    config = transformers.GPTNeoXConfig.from_pretrained(tiny / "policy", **sizes)
    transformers.GPTNeoXForCausalLM(config).save_pretrained("wide")
    toy.tokenizer().save_pretrained("wide")
    _, reward = train_reward.load_model(train_reward.Args(sft_model_path="wide"), "cpu")
    head = reward.model.score.weight
    assert head.std().item() == pytest.approx(1 / math.sqrt(1025), rel=0.07) and abs(head.mean()) < 3e-3


def test_rm_2_two_runs_are_equal_bit_by_bit(rows, tiny):
    """The seed is set before the head is drawn."""
    first = without_times(run_reward(tiny)), Path("reward/model.safetensors").read_bytes()
    torch.rand(3)  # Whatever happened in this process before must not matter.
    assert (without_times(run_reward(tiny)), Path("reward/model.safetensors").read_bytes()) == first


@pytest.mark.parametrize("tf_adam", [False, True])
def test_rm_5_the_gain_follows_the_schedule_and_is_not_decayed(rows, tiny, monkeypatch, tf_adam):
    """Epsilon is the flag's, or under --tf_adam that of TensorFlow in this step. [OPT-3] [OPT-4]"""
    gains = []

    def look(optimizer):
        gains.append(optimizer.param_groups[1]["params"][0].item())
        return [(g["lr"], g["eps"], g["weight_decay"]) for g in optimizer.param_groups]

    seen = record_steps(monkeypatch, look)
    run_reward(tiny, lr_schedule="linear", weight_decay=0.1, adam_eps=3e-4, tf_adam=tf_adam)
    for i, groups in enumerate(seen):
        rate, eps = 1e-3 * (1 - i / 5), 3e-4 / (math.sqrt(1 - 0.999 ** (i + 1)) if tf_adam else 1)
        assert groups == [pytest.approx((rate, eps, decay)) for decay in (0.1, 0.0)]
    assert len(set(gains)) == 5 and gains[0] == 1


# ---- normalisation ---------------------------------------------------------------------------------------------------
def test_rm_10_gain_and_bias_give_mean_0_and_std_1_on_the_policys_samples(rows, tiny, monkeypatch):
    """Measured again in the saved folder, on the very samples. Those before training had other prompts and noise."""
    samples = record(monkeypatch, utils, "sample")["sample"]
    gains = record(monkeypatch, train_reward, "gain_and_bias")["gain_and_bias"]
    run_reward(tiny, normalization="gain_bias", normalize_samples=64)
    (first, _), (second, _) = (result for _, result in gains)
    assert first != second  # It has been trained in between.
    queries = [args[1].tolist() for args, _ in samples]
    before, after = sampled(samples)
    assert queries[0] != queries[1]
    assert not {tuple(row) for row in before} & {tuple(row) for row in after}
    scores = library_scores("reward", after)
    assert len(scores) == 64
    assert abs(scores.mean()) < 1e-4 and scores.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_rm_11_samples_for_labels_of_token_ids_end_nowhere(in_tmp, tiny, monkeypatch):
    """They are whole responses, also where the policy says EOS. Those for rows of text end with it."""
    label = {"query": [5, 6], "sample0": [7, 8], "sample1": [8, 9], "best": 1}
    write_rows("rows.jsonl", [label] * 8)
    samples = record(monkeypatch, utils, "sample")["sample"]
    run_reward(tiny, normalization="gain_bias", normalize_samples=32, response_length=16)
    assert all(not len(args[6]) and mask.all() for args, (_, mask, _) in samples)
    write_rows("rows.jsonl", [{"prompt": "we went", "chosen": "the", "rejected": "a"}] * 8)
    run_reward(tiny, normalization="gain_bias", normalize_samples=32)
    assert samples[-1][0][6].tolist() == [toy.tokenizer().eos_token_id]


def test_rm_9_training_starts_from_samples_whose_scores_have_std_1(rows, tiny, monkeypatch):
    made = record(monkeypatch, train_reward, "Reward")["Reward"]
    samples = record(monkeypatch, utils, "sample")["sample"]
    begun = record_steps(monkeypatch, lambda _: (made[0][1].gain.item(), made[0][1].model.score.weight.clone()))
    run_reward(tiny, normalization="gain_bias", normalize_samples=64, learning_rate=0.0)
    gain, head = begun[0]
    with torch.no_grad():
        base = made[0][1].model.base_model
        hidden = torch.stack([base(torch.tensor([row])).last_hidden_state[0, -1] for row in sampled(samples)[0]])
        scores = gain * (hidden @ head.T)
    assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-4) and gain != 1


def test_rm_12_mean_shift_uses_the_reference_responses_that_are_given(rows, tiny):
    references = [(row["prompt"], row["completion"]) for row in toy.rows("sft", "test")[:20]]
    run_reward(tiny, reference_dataset=write_rows("references.jsonl", toy.rows("sft", "test")[:20]))
    scores = library_scores("reward", encoded(toy.tokenizer(), references))
    assert abs(scores.mean()) < 1e-5 < 1e-2 < scores.std()


# ---- the saved folder ------------------------------------------------------------------------------------------------
def test_rm_3_a_policy_whose_padding_is_its_eos_gets_a_padding_token_of_its_own(rows, tiny):
    """Otherwise the library would read scores before the EOS. `library_scores` checks the token as well."""
    tokenizer, model = (kind.from_pretrained(tiny / "policy") for kind in LIBRARY)
    tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.save_pretrained("same"), model.save_pretrained("same")
    run_reward(tiny, sft_model_path="same")
    scores = library_scores("reward", encoded(toy.tokenizer(), pairs_of(rows)))
    assert abs(scores.mean()) < 1e-5 < 1e-2 < scores.std()  # as the run has shifted them


@pytest.mark.parametrize("normalization", ["none", "mean_shift", "gain_bias"])
def test_rm_13_plain_transformers_scores_the_saved_folder_as_the_run_did(rows, tiny, monkeypatch, normalization):
    """The saved head holds the gain, and `reward_bias` the shift."""
    trained = record(monkeypatch, train_reward, "load_model")["load_model"]
    run_reward(tiny, normalization=normalization, learning_rate=1e-2)
    (_, (_, reward)), ids = trained[0], encoded(toy.tokenizer(), pairs_of(rows))
    scores, bias = library_scores("reward", ids), json.loads(Path("reward/config.json").read_text())["reward_bias"]
    with torch.no_grad():
        ours = reward.eval()(*utils.left_pad(ids))
    assert scores.std() > 0.01 and abs(reward.gain.item() - 1) > 0.01 and (bias == 0) == (normalization == "none")
    if normalization == "gain_bias":  # The gain is set once more after training, so only its sign is known.
        ours = ours * (scores.std() / ours.std())
    assert (scores - bias - ours).abs().max() < 1e-4
    classify = transformers.pipeline("text-classification", "reward")
    plain = [x["score"] for x in classify([" ".join(pair) for pair in pairs_of(rows)])]
    assert plain == pytest.approx((scores - bias).tolist(), abs=1e-4)  # It reads EOS, and takes no sigmoid.
    assert models.load_reward_model("reward", page_args("train_rloo", tiny)).config.reward_bias == bias
