"""DPO's equations against plain forwards, and whole runs against a plain loop in double precision."""

import collections
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import read_metrics, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_details import toy, train_dpo

# tokens of prompt and completion, and how many are the completion's. The last one has no prompt.
ROWS = [([5, 6, 7, 8, 9, 1], 3), ([10, 11, 12, 13, 14, 15, 1], 5), ([16, 1], 1), ([23, 24, 25, 26, 27, 28, 1], 7)]


@pytest.mark.parametrize("at_once", [2**24, 2 * 97])
@torch.no_grad()
def test_dpo_1_a_completions_log_prob_is_the_sum_over_its_tokens(at_once):
    """Of a plain forward of each row. No more logits exist than asked for. [SFT-2] [GEN-8]"""
    policy, sizes, expected = train_dpo.Policy(tiny_model("gpt2")), [], []
    for ids, count in ROWS:
        logprobs = policy.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        first = max(1, len(ids) - count)  # Nothing predicts a first token.
        expected.append(sum(logprobs[t - 1, ids[t]].item() for t in range(first, len(ids))))
    policy.model.get_output_embeddings().register_forward_hook(lambda *call: sizes.append(call[2].numel()))
    policy.logits_at_once = at_once
    got, lengths = train_dpo.completion_logprobs(policy, ROWS, "cpu")
    assert got.tolist() == pytest.approx(expected, rel=1e-4) and lengths.tolist() == [3, 5, 1, 7]
    assert max(sizes) <= at_once


# ---- whole runs ------------------------------------------------------------------------------------------------------
def run(tiny, **changes):
    """A run of three steps over the same eight comparisons of three reviews; returns (its rows, the comparisons)."""
    reviews = toy.rows("sft", "train")
    rows = [
        dict(prompt=reviews[i]["prompt"], candidates=[reviews[i + j]["completion"] for j in (0, 50, 90)], best=i % 3)
        for i in range(8)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", batch_size=8, num_train_epochs=3, beta=0.3)
    values |= dict(learning_rate=1e-3, lr_schedule="constant", micro_batch_size=3, output_dir="model")
    args = train_dpo.Args(sft_model_path=str(tiny / "policy"), **(values | changes))
    return read_metrics(train_dpo.main(args)["run"]), rows


@pytest.mark.parametrize("changes", [{}, dict(loss="ipo"), dict(label_smoothing=0.2, max_grad_norm=0.5)], ids=str)
def test_dpo_4_a_run_is_that_of_a_plain_loop_with_a_reference_of_its_own(tiny, in_tmp, changes):
    """In double precision, by transformers alone. [DPO-1] [DPO-2] [DPO-3] [OPT-4] [OPT-5] [OPT-6]"""
    found, comparisons = run(tiny, **changes)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "policy")
    model, reference = (AutoModelForCausalLM.from_pretrained(tiny / "policy").double().eval() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)
    is_ipo, e = changes.get("loss") == "ipo", changes.get("label_smoothing", 0)

    def logprobs(network, prompt, text):
        prompt, text = tokenizer(prompt).input_ids, tokenizer(text).input_ids + [tokenizer.eos_token_id]
        logits = network(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return logits.gather(1, torch.tensor(text).unsqueeze(1))

    for number, row in enumerate(found[:3]):
        losses, expected = [], collections.defaultdict(list)
        for comparison in comparisons:
            pairs = [(comparison["prompt"], text) for text in comparison["candidates"]]
            ours, theirs = ([logprobs(network, *pair) for pair in pairs] for network in (model, reference))
            logratios = [a - b.detach() for a, b in zip(ours, theirs, strict=True)]
            scores = [0.3 * x.sum() for x in logratios]
            best = comparison["best"]
            others = [i for i in range(3) if i != best]
            if is_ipo:
                margins = [logratios[best].mean() - logratios[i].mean() for i in others]
                losses.append(sum((x - 1 / 0.6) ** 2 for x in margins) / 2)
            else:
                total = sum(x.exp() for x in scores).log()
                losses.append(sum((1 - e if i == best else e / 2) * (total - scores[i]) for i in range(3)))
            for name, x in (("rewards", scores), ("logps", [x.sum() for x in ours])):
                expected[f"{name}/chosen"].append(x[best])
                expected[f"{name}/rejected"].append(sum(x[i] for i in others) / 2)
            expected["rewards/margins"].append(expected["rewards/chosen"][-1] - expected["rewards/rejected"][-1])
            if number:  # Before the first step all scores are 0 up to rounding.
                expected["rewards/accuracies"].append((scores[best] > max(scores[i] for i in others)).double())
        loss = sum(losses) / 8
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), changes.get("max_grad_norm", math.inf))
        optimizer.step()
        assert row["train/dpo/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert row["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        for name, values in expected.items():
            assert row[name] == pytest.approx(sum(values).item() / 8, rel=1e-3, abs=1e-5), name
    ours, saved, start = (
        torch.cat([p.flatten() for p in x.parameters()])
        for x in (model, AutoModelForCausalLM.from_pretrained("model"), reference)
    )
    assert (ours - saved).norm() < 1e-2 * (ours - start).norm()


@pytest.mark.parametrize("changes", [{}, dict(lora_rank=4)], ids=str)
def test_dpo_4_without_a_step_the_policy_is_the_reference(tiny, in_tmp, changes):
    found, _ = run(tiny, learning_rate=0.0, micro_batch_size=8, **changes)
    for row in found:
        assert row["train/dpo/loss"] == pytest.approx(math.log(3), rel=1e-6)
        assert row["rewards/margins"] == row["rewards/accuracies"] == 0
