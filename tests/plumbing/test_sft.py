"""Whole runs of train_sft.py on tiny models."""

import math

import pytest
import transformers
from helpers import assert_same_curves, read_metrics, record, record_steps
from short_runs import write_rows

from rlhf_details import toy, train_sft, utils
from rlhf_details.plumbing.inputs import data


def run_sft(**changes):
    """Trains on rows.jsonl for two epochs of three steps; returns the rows of metrics."""
    values = dict(
        dataset="rows.jsonl", eval_dataset="rows.jsonl", base_model="scratch", vocab_size=300, hidden_size=32,
        num_layers=2, num_heads=4, context_length=256, batch_size=8, micro_batch_size=8, learning_rate=3e-3,
        response_length=8, num_train_epochs=2, run_name="run", output_dir="sft", overwrite=True,
    )  # fmt: skip
    return read_metrics(train_sft.main(train_sft.Args(**(values | changes)))["run"])


@pytest.fixture
def texts(in_tmp):
    """rows.jsonl with 24 prompts and completions of ragged lengths."""
    write_rows("rows.jsonl", toy.rows("sft", "train")[:24])
    return in_tmp


def test_from_scratch_it_trains_a_tokenizer_and_learns(texts):
    rows = run_sft(num_train_epochs=8, learning_rate=1e-2)
    assert rows[-1]["train/sft/loss"] < 0.8 * rows[0]["train/sft/loss"] and rows[-1]["epoch"] == 8
    assert rows[-1]["eval/sft/perplexity"] == pytest.approx(math.exp(rows[-1]["eval/sft/loss"]))
    assert 0 <= rows[-1]["eval/sft/rougeL"] <= 1
    tokenizer = transformers.AutoTokenizer.from_pretrained("sft")
    text = toy.rows("sft", "test")[0]["completion"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text and tokenizer.pad_token_id != tokenizer.eos_token_id
    model = transformers.AutoModelForCausalLM.from_pretrained("sft")
    assert isinstance(model, transformers.GPTNeoXForCausalLM) and model.config.max_position_embeddings == 256


@pytest.mark.parametrize("completion_only", [False, True])
def test_sft_3_micro_batches_change_nothing(texts, monkeypatch, completion_only):
    """Nor do logits that are computed piece by piece."""
    options = dict(completion_only=completion_only, num_train_epochs=1)
    whole = run_sft(**options)
    assert_same_curves(whole, run_sft(**options, micro_batch_size=3))
    monkeypatch.setattr(train_sft.LanguageModel, "logits_at_once", 5 * 300)  # of five tokens at a time
    assert_same_curves(whole, run_sft(**options))


def test_both_losses_are_those_of_the_completions_where_that_is_asked_for(texts, tiny):
    options = dict(base_model=str(tiny / "policy"), num_train_epochs=1, learning_rate=0.0)
    plain, only = (run_sft(**options, completion_only=x)[-1] for x in (False, True))
    assert all(abs(plain[name] - only[name]) > 1e-3 for name in ("train/sft/loss", "eval/sft/loss"))


def test_every_epoch_has_an_order_of_its_own_and_takes_every_row_once(texts, monkeypatch):
    calls = record(monkeypatch, utils, "left_pad")["left_pad"]
    run_sft(eval_dataset=None)
    seen = [[tuple(row) for row in args[0]] for args, _ in calls]
    first, second = ([row for batch in seen[i : i + 3] for row in batch] for i in (0, 3))
    assert sorted(first) == sorted(second) and first != second and len(first) == 24


def test_opt_4_epsilon_weight_decay_and_schedule_reach_the_optimizer(texts, monkeypatch):
    names = "lr", "eps", "weight_decay"
    seen = record_steps(monkeypatch, lambda optimizer: [[g[name] for name in names] for g in optimizer.param_groups])
    run_sft(lr_schedule="linear", warmup_ratio=0.3, adam_eps=3e-4, weight_decay=0.07)
    rates = [3e-3 * x for x in (0.5, 1.0, 1.0, 0.75, 0.5, 0.25)]  # two steps of warm-up
    (groups,) = zip(*seen, strict=True)
    assert [g[1:] for g in groups] == [[3e-4, 0.07]] * 6 and [g[0] for g in groups] == pytest.approx(rates)
    assert [row["train/sft/lr"] for row in read_metrics("runs/run")] == [g[0] for g in groups]


def test_an_answer_that_the_chat_template_cuts_is_named(in_tmp, capsys):
    """Templates of reasoning models leave out what stands in <think>, so it would not be learnt."""
    tokenizer = toy.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }} {% endfor %}"
    answers = "the bed was warm .", "<think> so . </think> the bed was warm ."
    turns = [[{"role": "user", "content": "we went ."}, {"role": "assistant", "content": answer}] for answer in answers]
    rows = [{"messages": turn} for turn in turns]
    args = train_sft.Args(dataset=write_rows("rows.jsonl", rows))
    read = data.read(args, "dataset", "sft", with_answers=True)
    data.encode(args, "dataset", read, tokenizer, 128, "completion")
    said = "1 rows whose answer the chat template does not wholly write, the first one is row 2"
    assert said in capsys.readouterr().out
