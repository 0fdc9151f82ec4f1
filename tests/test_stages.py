"""Claims about whole runs of train_sft and train_reward."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from conftest import launch, read_metrics
from test_rloo import assert_same_curves, without_times

from rlhf_details import data, toy, train_reward, train_rloo, train_sft, utils


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft_args(**changes):
    values = dict(
        dataset="rows.jsonl", eval_dataset="rows.jsonl", base_model="scratch", vocab_size=300, hidden_size=32, num_layers=2,
        num_heads=4, context_length=256, batch_size=8, micro_batch_size=8, learning_rate=3e-3, response_length=8,
        num_train_epochs=2, run_name="run", output_dir="sft", overwrite=True,
    )  # fmt: skip
    return train_sft.Args(**(values | changes))


def reward_args(tiny, **changes):
    values = dict(
        dataset="rows.jsonl", eval_dataset="rows.jsonl", sft_model_path=str(tiny / "policy"), batch_size=8, micro_batch_size=8,
        learning_rate=1e-3, response_length=8, run_name="run", output_dir="reward", overwrite=True,
    )  # fmt: skip
    return train_reward.Args(**(values | changes))


def run_sft(**changes):
    train_sft.main(sft_args(**changes))
    return read_metrics("runs/run")


def run_reward(tiny, **changes):
    train_reward.main(reward_args(tiny, **changes))
    return read_metrics("runs/run")


@pytest.fixture
def texts(in_tmp):
    """rows.jsonl with 40 prompts and completions of ragged lengths."""
    write_rows("rows.jsonl", toy.rows("sft", "train")[:40])
    return in_tmp


@pytest.fixture
def comparisons(in_tmp):
    """rows.jsonl with 40 comparisons of 4 whose best one has the highest gold."""
    reviews = toy.rows("sft", "train")
    rows = []
    for i in range(40):
        candidates = [r["completion"] for r in reviews[4 * i : 4 * i + 4]]
        scores = [toy.gold(reviews[i]["prompt"], c) for c in candidates]
        rows.append({"prompt": reviews[i]["prompt"], "candidates": candidates, "best": scores.index(max(scores))})
    write_rows("rows.jsonl", rows)
    return in_tmp


# ---- SFT -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_from_scratch_trains_a_tokenizer_and_learns(texts):
    metrics = run_sft(num_train_epochs=20)
    assert metrics[-1]["train/sft/loss"] < 0.7 * metrics[0]["train/sft/loss"]
    assert metrics[-1]["eval/sft/perplexity"] == pytest.approx(math.exp(metrics[-1]["eval/sft/loss"]))
    assert 0 <= metrics[-1]["eval/sft/rougeL"] <= 1
    tokenizer = transformers.AutoTokenizer.from_pretrained("sft")
    text = toy.rows("sft", "test")[0]["completion"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text and tokenizer.pad_token_id != tokenizer.eos_token_id
    model = transformers.AutoModelForCausalLM.from_pretrained("sft")
    assert isinstance(model, transformers.GPTNeoXForCausalLM) and model.config.max_position_embeddings == 256


@pytest.mark.parametrize("completion_only", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sft_3_sft_micro_batches_change_nothing(texts, completion_only):
    runs = [run_sft(completion_only=completion_only, micro_batch_size=m) for m in (8, 3, 1)]
    assert_same_curves(runs[0], runs[1])
    assert_same_curves(runs[0], runs[2])


@pytest.mark.slow
def test_sft_two_processes_change_nothing(texts):
    write_rows("rows.jsonl", toy.rows("sft", "train")[:41])  # held-out rows that do not divide by two
    flags = [
        "--dataset",
        "rows.jsonl",
        "--eval_dataset",
        "rows.jsonl",
        "--hidden_size",
        32,
        "--num_layers",
        2,
        "--batch_size",
        8,
    ]
    flags += ["--learning_rate", 3e-3, "--response_length", 8, "--vocab_size", 300, "--overwrite"]
    runs = []
    for processes in (1, 2):
        done = launch("train_sft.py", [*flags, "--run_name", processes], processes, cwd=texts)
        assert done.returncode == 0 and f"{processes} process(es)" in done.stdout, done.stderr
        runs.append(read_metrics(texts / f"runs/{processes}"))
    assert_same_curves(*runs)


@pytest.mark.parametrize("completion_only", [False, True])
def test_sft_1_sft_loss_is_the_mean_over_targets_one_row_at_a_time(texts, tiny, completion_only):
    """EOS is a target, the filler is not, and nothing is predicted from it."""
    rows = toy.rows("sft", "train")[:8]
    write_rows("rows.jsonl", rows)
    options = dict(base_model=str(tiny / "policy"), num_train_epochs=1, learning_rate=0.0, completion_only=completion_only)
    ours = run_sft(**options)[0]
    model, tokenizer = utils.load_policy(tiny / "policy", ""), utils.load_tokenizer(tiny / "policy", "")
    total, count = 0.0, 0
    for row in rows:
        prompt, completion = (
            tokenizer(row["prompt"]).input_ids,
            [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id],
        )
        logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        for position in range(len(prompt) if completion_only else 1, len(prompt + completion)):
            total -= logprobs[position - 1, (prompt + completion)[position]].item()
            count += 1
    assert ours["train/sft/loss"] == pytest.approx(total / count, rel=1e-5)
    assert ours["eval/sft/loss"] == pytest.approx(total / count, rel=1e-5)


def test_text_rows_need_no_prompt(texts):
    write_rows("rows.jsonl", [{"text": f"{r['prompt']} {r['completion']}"} for r in toy.rows("sft", "train")[:16]])
    metrics = run_sft()
    assert "eval/sft/loss" in metrics[-1] and "eval/sft/rougeL" not in metrics[-1]


def test_sft_is_reproducible_and_goes_on_from_a_folder(texts):
    first, weights = run_sft(), Path("sft/model.safetensors").read_bytes()
    assert without_times(run_sft()) == without_times(first) and Path("sft/model.safetensors").read_bytes() == weights
    more = run_sft(base_model="sft", output_dir="more")
    assert more[0]["train/sft/loss"] < first[0]["train/sft/loss"]


# ---- reward model ----------------------------------------------------------------------------------------------------
def test_reward_learns_to_prefer_the_best(comparisons, tiny):
    metrics = run_reward(tiny, num_train_epochs=30, learning_rate=3e-3)
    assert abs(metrics[0]["train/rm/loss"] - math.log(4)) < 0.7
    assert metrics[-1]["eval/rm/accuracy"] > 0.8 and metrics[-1]["eval/rm/loss"] < 0.7


def test_opt_5_reward_micro_batches_change_nothing(comparisons, tiny):
    runs = [run_reward(tiny, micro_batch_size=m) for m in (8, 3, 1)]
    assert_same_curves(runs[0], runs[1])
    assert_same_curves(runs[0], runs[2])


@pytest.mark.slow
def test_rm_14_reward_two_processes_change_nothing(comparisons, tiny):
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    write_rows(
        "rows.jsonl", [row | {"candidates": row["candidates"][:3], "best": row["best"] % 3} for row in rows[:37]]
    )  # 111 scores
    flags = [
        "--dataset",
        "rows.jsonl",
        "--eval_dataset",
        "rows.jsonl",
        "--sft_model_path",
        tiny / "policy",
        "--batch_size",
        8,
    ]
    flags += ["--learning_rate", 1e-3, "--normalization", "gain_bias", "--response_length", 8, "--overwrite"]
    runs, bias = [], []
    for processes in (1, 2):
        done = launch("train_reward.py", [*flags, "--run_name", processes], processes, cwd=comparisons)
        assert done.returncode == 0 and f"{processes} process(es)" in done.stdout, done.stderr
        runs.append(read_metrics(comparisons / f"runs/{processes}"))
        bias.append(json.loads((comparisons / "models/reward/config.json").read_text())["reward_bias"])
    assert_same_curves(*runs)
    assert bias[0] == pytest.approx(bias[1], rel=1e-4, abs=1e-5)


def test_rm_2_two_reward_runs_are_bitwise_equal(comparisons, tiny):
    """Pitfall 28: the head used to be drawn before the seed was set."""
    weights = []
    for _ in range(2):
        torch.rand(3)  # whatever happened in this process before must not matter
        first = without_times(run_reward(tiny))
        weights.append((first, Path("reward/model.safetensors").read_bytes()))
    assert weights[0] == weights[1]


def test_rm_1_the_head_starts_with_std_one_over_root_of_d_plus_one(comparisons, tiny, monkeypatch):
    config = transformers.GPTNeoXConfig.from_pretrained(tiny / "policy", hidden_size=1024, intermediate_size=8, num_hidden_layers=1)
    transformers.GPTNeoXForCausalLM(config).save_pretrained("wide")
    toy.tokenizer().save_pretrained("wide")
    heads, real = [], train_reward.Reward
    monkeypatch.setattr(train_reward, "Reward", lambda model: heads.append(model.score.weight.detach().clone()) or real(model))
    write_rows("rows.jsonl", [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()[:8]])
    run_reward(Path("."), sft_model_path="wide")
    assert heads[0].std().item() == pytest.approx(1 / math.sqrt(1025), rel=0.07) and abs(heads[0].mean()) < 3e-3


def scores_of(folder, rows):
    """Scores of (prompt, completion) rows by the saved folder: plain transformers, right padding, and our bias; then by Reward."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.config.pad_token_id not in (None, tokenizer.eos_token_id)
    ids = [[*q, *r] for q, r in (data.encode(tokenizer, p, c) for p, c in rows)]
    width = max(map(len, ids))
    padded = torch.tensor([row + [model.config.pad_token_id] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    with torch.no_grad():
        library = model(input_ids=padded, attention_mask=mask).logits[:, 0] + model.config.reward_bias
        tokens, left_mask = utils.left_pad(ids)
        reward = train_rloo.Reward(utils.load_reward_model(folder, "").eval())
        last = torch.full((len(ids), 1), width - 1)
        ours = reward(tokens, left_mask, utils.positions_from_mask(left_mask), last)[:, 0]
    return library, ours


@pytest.mark.parametrize("normalization", ["none", "mean_shift", "gain_bias"])
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_rm_3_the_saved_folder_scores_the_same_in_plain_transformers(comparisons, tiny, normalization, pad_is_eos):
    """Also where the policy's pad was its EOS: a pad token of its own is saved, since the library pools at the last non-pad id."""
    source = tiny / "policy"
    if pad_is_eos:
        tokenizer, model = (
            transformers.AutoTokenizer.from_pretrained(source),
            transformers.AutoModelForCausalLM.from_pretrained(source),
        )
        tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        tokenizer.save_pretrained("same"), model.save_pretrained("same")
        source = "same"
    run_reward(tiny, sft_model_path=str(source), normalization=normalization)
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    rows = [(row["prompt"], c) for row in rows for c in row["candidates"]]
    library, ours = scores_of("reward", rows)
    assert (library - ours).abs().max() < 1e-5 and ours.std() > 0.01
    if normalization == "mean_shift":
        assert abs(ours.mean()) < 1e-5


def test_rm_10_gain_and_bias_give_mean_0_and_std_1_on_the_policys_samples(comparisons, tiny, monkeypatch):
    """Feature B2: measured again from the saved folder, on the very samples; and the gain is trained in between."""
    sampled, real = [], train_rloo.sample
    monkeypatch.setattr(train_rloo, "sample", lambda *a: sampled.append((a[1], a[2], *real(*a)[:2])) or real(*a))
    gains, gain_and_bias = [], train_reward.gain_and_bias
    monkeypatch.setattr(train_reward, "gain_and_bias", lambda *a: gains.append(gain_and_bias(*a)) or gains[-1])
    run_reward(tiny, normalization="gain_bias", normalize_samples=64)
    assert len(gains) == 2 and gains[0] != gains[1]
    reward = train_rloo.Reward(utils.load_reward_model("reward", "").eval())
    with torch.no_grad():
        scores = torch.cat([train_rloo.response_scores(reward, batch, 1) for batch in sampled])
    assert len(scores) == 64
    assert abs(scores.mean()) < 1e-4 and scores.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_rm_12_mean_shift_uses_the_reference_responses_that_are_given(comparisons, tiny):
    references = toy.rows("sft", "test")[:20]
    run_reward(tiny, reference_dataset=write_rows("references.jsonl", references))
    _, ours = scores_of("reward", [(row["prompt"], row["completion"]) for row in references])
    assert abs(ours.mean()) < 1e-5 < 1e-2 < ours.std()


def test_chosen_and_rejected_are_two_candidates(comparisons, tiny):
    rows = toy.rows("sft", "train")
    pairs = [{"prompt": "we went", "chosen": rows[i]["completion"], "rejected": rows[i + 1]["completion"]} for i in range(16)]
    write_rows("rows.jsonl", pairs)
    assert run_reward(tiny, learning_rate=0.0, batch_size=16)[0]["train/rm/loss"] == pytest.approx(math.log(2), abs=0.2)


def test_rm_4_scores_do_not_depend_on_padding_or_batch_mates(comparisons, tiny):
    """Pitfall 25, with EOS inside the prompt as well (pitfall 24)."""
    reward = train_reward.Reward(utils.load_reward_model(tiny / "reward", "").eval())
    rows = [[5, 1, 7, 8, 1], [9, 10, 1], [5, 1, 11, 1]]
    with torch.no_grad():
        together = reward(*utils.left_pad(rows))
        alone = torch.cat([reward(*utils.left_pad([row])) for row in rows])
        tokens, mask = utils.left_pad(rows)
        shifted = reward(torch.nn.functional.pad(tokens, (0, 4), value=1), torch.nn.functional.pad(mask, (0, 4)))
    assert (together - alone).abs().max() < 1e-6 and (together - shifted).abs().max() < 1e-6
    assert together.unique().numel() == 3


# ---- the embedded task end to end ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_missing_toy_stages_are_trained_once_by_the_main_process(tmp_path):
    flags = ["--total_episodes", 512, "--eval_dataset", "toy:test"]
    first = launch("train_rloo.py", flags, 2, cwd=tmp_path)
    assert first.returncode == 0, first.stderr[-3000:]
    assert first.stdout.count("does not exist yet") == 2 and "2 process(es)" in first.stdout
    second = launch("train_rloo.py", flags, 1, cwd=tmp_path)
    assert second.returncode == 0 and "does not exist yet" not in second.stdout
    assert "gold" in second.stdout and "parses" in second.stdout


def test_every_epoch_of_sft_has_an_order_of_its_own(texts, monkeypatch):
    seen, left_pad = [], utils.left_pad
    monkeypatch.setattr(
        utils, "left_pad", lambda rows, device=None: seen.append([tuple(r) for r in rows]) or left_pad(rows, device)
    )
    run_sft(eval_dataset=None)
    first, second = (sum(seen[i : i + 5], []) for i in (0, 5))  # noqa: RUF017 (five short lists)
    assert sorted(first) == sorted(second) and first != second and len(first) == 40


def test_rm_5_the_reward_gain_follows_the_schedule_and_is_not_decayed(comparisons, tiny, monkeypatch):
    seen, step = [], torch.optim.AdamW.step
    record = lambda self, *a, **k: seen.append([dict(g, params=None) for g in self.param_groups]) or step(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    run_reward(tiny, lr_schedule="linear", weight_decay=0.1)
    assert [[g["lr"] for g in groups] for groups in seen] == [pytest.approx([1e-3 * (1 - i / 5)] * 2) for i in range(5)]
    assert all([g["weight_decay"] for g in groups] == [0.1, 0.0] for groups in seen)
