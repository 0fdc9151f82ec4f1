"""DPO's equations against plain forwards and closed forms, and a whole run against a plain loop in double precision."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import read_metrics, tiny_model
from oracles import uniform
from torch.nn.functional import logsigmoid
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


def test_dpo_2_of_four_candidates_the_best_has_the_softmax_of_its_score():
    generator = torch.Generator().manual_seed(0)
    scores, best = uniform(generator, 6, 4, low=-3, high=3), torch.randint(4, (6,), generator=generator)
    for smoothing in (0, 0.3):
        expected = []
        for row, b in zip(scores.tolist(), best.tolist(), strict=True):
            shares = [math.exp(x) / sum(map(math.exp, row)) for x in row]
            weights = [1 - smoothing if i == b else smoothing / 3 for i in range(4)]
            expected.append(-sum(w * math.log(p) for w, p in zip(weights, shares, strict=True)))
        assert train_dpo.dpo_loss(scores, best, smoothing).tolist() == pytest.approx(expected, rel=1e-5)


def test_dpo_3_ipo_asks_for_a_margin_a_token_over_each_of_the_others():
    logratios, lengths = torch.tensor([[6.0, 2.0, 9.0]]), torch.tensor([[3, 4, 1]])
    expected = ((6 / 3 - 2 / 4 - 2) ** 2 + (6 / 3 - 9 - 2) ** 2) / 2
    assert train_dpo.ipo_loss(logratios, lengths, torch.tensor([0]), 0.25).item() == pytest.approx(expected)


def test_the_metrics_are_those_of_trl():
    """ "rejected" is the mean of the others, and a tie is wrong."""
    args = train_dpo.Args(beta=0.5)
    logprobs = torch.tensor([[-4.0, -9.0, -7.0], [-5.0, -5.0, -5.0]])
    references = torch.tensor([[-6.0, -8.0, -6.0], [-5.0, -5.0, -5.0]])
    numbers = torch.ones(2, 3), torch.tensor([0, 2]), args
    losses, found = train_dpo.losses_and_metrics(logprobs, references, *numbers)
    assert losses.tolist() == pytest.approx([-math.log(1 / (1 + 2 * math.exp(-1.5))), math.log(3)])
    expected = {"rewards/chosen": [1, 0], "rewards/rejected": [-0.5, 0], "rewards/margins": [1.5, 0]}
    expected |= {"rewards/accuracies": [1, 0], "logps/chosen": [-4, -5], "logps/rejected": [-8, -5]}
    assert {name: x.tolist() for name, x in found.items()} == expected


# ---- whole runs ------------------------------------------------------------------------------------------------------
def run(tiny, **changes):
    """A run of three steps over the same eight pairs of reviews; returns (its rows, the pairs)."""
    reviews = toy.rows("sft", "train")
    pairs = [review | dict(chosen=review["completion"], rejected=reviews[i + 50]["completion"])
             for i, review in enumerate(reviews[:8])]  # fmt: skip
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    values = dict(dataset="pairs.jsonl", eval_dataset="pairs.jsonl", batch_size=8, num_train_epochs=3, beta=0.3)
    values |= dict(learning_rate=1e-3, lr_schedule="constant", micro_batch_size=3, output_dir="model")
    args = train_dpo.Args(sft_model_path=str(tiny / "policy"), **(values | changes))
    return read_metrics(train_dpo.main(args)["run"]), pairs


@pytest.mark.parametrize("changes", [{}, dict(loss="ipo"), dict(label_smoothing=0.2, max_grad_norm=0.5)], ids=str)
def test_dpo_4_a_run_is_that_of_a_plain_loop_with_a_reference_of_its_own(tiny, in_tmp, changes):
    """In double precision, by transformers alone. [OPT-4] [OPT-5] [OPT-6]"""
    found, pairs = run(tiny, **changes)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "policy")
    model, reference = (AutoModelForCausalLM.from_pretrained(tiny / "policy").double().eval() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)

    is_ipo, e = changes.get("loss") == "ipo", changes.get("label_smoothing", 0)

    def logprob(network, prompt, text):
        prompt, text = tokenizer(prompt).input_ids, tokenizer(text).input_ids + [tokenizer.eos_token_id]
        logits = network(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = logits.gather(1, torch.tensor(text).unsqueeze(1))
        return found.mean() if is_ipo else found.sum()

    for row in found[:3]:
        losses, margins = [], []
        for pair in pairs:
            sides = [(pair["prompt"], pair[side]) for side in ("chosen", "rejected")]
            chosen, rejected = (logprob(model, *side) - logprob(reference, *side).detach() for side in sides)
            margins.append(0.3 * (chosen - rejected))
            smoothed = -(1 - e) * logsigmoid(margins[-1]) - e * logsigmoid(-margins[-1])
            losses.append((chosen - rejected - 1 / 0.6) ** 2 if is_ipo else smoothed)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), changes.get("max_grad_norm", math.inf))
        optimizer.step()
        assert row["train/dpo/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert row["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert is_ipo or row["rewards/margins"] == pytest.approx(sum(margins).item() / 8, rel=1e-3, abs=1e-5)
    ours, saved, start = (
        torch.cat([p.flatten() for p in x.parameters()])
        for x in (model, AutoModelForCausalLM.from_pretrained("model"), reference)
    )
    assert (ours - saved).norm() < 1e-2 * (ours - start).norm()


@pytest.mark.parametrize("changes", [{}, dict(lora_rank=4)], ids=str)
def test_dpo_4_without_a_step_the_policy_is_the_reference(tiny, in_tmp, changes):
    found, _ = run(tiny, learning_rate=0.0, micro_batch_size=8, **changes)
    for row in found:
        assert row["train/dpo/loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert row["rewards/margins"] == row["rewards/accuracies"] == 0
