"""DPO's equations against slow loops and closed forms, and a whole run against a plain loop in double precision."""

import json
import math

import pytest
import torch
from helpers import read_metrics
from oracles import uniform
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_details import toy, train_dpo

ROWS = [
    ([5, 6, 7, 8, 9, 1], 3),
    ([10, 11, 12, 13, 14, 15, 1], 5),
    ([16, 1], 1),
    ([23, 24, 1], 3),
]  # the last: no prompt


@pytest.fixture(scope="module")
def policy():
    """GPT-2 has absolute positions, so that a wrong position is a wrong answer."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    return train_dpo.Policy(model)


@torch.no_grad()
def slow_logprob(model, ids, count):
    """The sum of the last `count` tokens' log-probs, one forward of an unpadded prefix a token."""
    logits = (model(torch.tensor([ids[:t]])).logits[0, -1].double() for t in range(max(1, len(ids) - count), len(ids)))
    return sum(x.log_softmax(0)[ids[-count:][-n]].item() for x, n in zip(logits, range(count, 0, -1), strict=False))


def test_dpo_1_a_completions_log_prob_is_the_sum_over_its_tokens(policy):
    """The prompt's tokens are left out. [SFT-2]"""
    got, lengths = train_dpo.completion_logprobs(policy, ROWS, "cpu")
    expected = [slow_logprob(policy.model, ids, min(count, len(ids) - 1)) for ids, count in ROWS]
    assert got.tolist() == pytest.approx(expected, rel=1e-4) and lengths.tolist() == [3, 5, 1, 3]


def test_gen_8_pieces_give_the_same_log_probs_and_gradients(policy, monkeypatch):
    results, sizes = [], []
    hook = policy.model.get_output_embeddings().register_forward_hook(lambda _, x, out: sizes.append(out.numel()))
    for at_once in (2**24, 60):
        monkeypatch.setattr(policy, "logits_at_once", at_once)
        sizes.clear()
        got, _ = train_dpo.completion_logprobs(policy, ROWS, "cpu")
        policy.zero_grad()
        (got * torch.arange(1, 5)).sum().backward()
        results.append((got, torch.cat([p.grad.flatten() for p in policy.parameters()])))
    hook.remove()
    assert max(sizes) == 60  # two tokens of the vocabulary of 30
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_dpo_2_two_candidates_have_the_papers_loss_and_gradient():
    d = torch.tensor([1.5, -2.0, 0.0, 30.0])
    scores = torch.stack([d + 3, torch.full_like(d, 3)], 1).requires_grad_()  # a constant of the prompt cancels
    losses = train_dpo.dpo_loss(scores, torch.zeros(4).long())
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-x)) for x in d.tolist()], rel=1e-5, abs=1e-6)
    losses.sum().backward()
    assert scores.grad[:, 0].tolist() == pytest.approx([-1 / (1 + math.exp(x)) for x in d.tolist()], abs=1e-6)
    smooth = train_dpo.dpo_loss(scores, torch.zeros(4).long(), 0.1)
    expected = [0.9 * math.log1p(math.exp(-x)) + 0.1 * (max(x, 0) + math.log1p(math.exp(-abs(x)))) for x in d.tolist()]
    assert smooth.tolist() == pytest.approx(expected, rel=1e-5)


def test_dpo_2_of_four_candidates_the_best_has_the_softmax_of_its_score():
    generator = torch.Generator().manual_seed(0)
    scores, best = uniform(generator, 6, 4, low=-3, high=3), torch.randint(4, (6,), generator=generator)
    rows = list(zip(scores.tolist(), best.tolist(), strict=True))
    shares = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row, _ in rows]
    expected = [-math.log(share[b]) for share, (_, b) in zip(shares, rows, strict=True)]
    assert train_dpo.dpo_loss(scores, best).tolist() == pytest.approx(expected, rel=1e-5)
    weights = [[0.7 if i == b else 0.1 for i in range(4)] for _, b in rows]
    pairs = zip(weights, shares, strict=True)
    expected = [-sum(w * math.log(p) for w, p in zip(*pair, strict=True)) for pair in pairs]
    assert train_dpo.dpo_loss(scores, best, 0.3).tolist() == pytest.approx(expected, rel=1e-5)


def test_dpo_3_ipo_asks_for_a_margin_a_token_and_not_for_more():
    logratios, lengths = torch.tensor([[6.0, 2.0], [-1.0, 3.0]]), torch.tensor([[3, 4], [2, 2]])
    best, beta = torch.tensor([0, 1]), 0.25
    expected = [(6 / 3 - 2 / 4 - 2) ** 2, (3 / 2 + 1 / 2 - 2) ** 2]
    assert train_dpo.ipo_loss(logratios, lengths, best, beta).tolist() == pytest.approx(expected)
    three = torch.tensor([[6.0, 2.0, 9.0]])
    expected = ((6 - 2 - 2) ** 2 + (6 - 9 - 2) ** 2) / 2  # the mean over both others
    assert train_dpo.ipo_loss(three, torch.ones(1, 3), best[:1], beta).item() == pytest.approx(expected)


def test_the_metrics_are_those_of_trl():
    """ "rejected" is the mean of the others, and a tie is wrong. [RM-8]"""
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
def write_pairs(path, count):
    """Pairs of reviews; returns (path, the pairs)."""
    reviews = toy.rows("sft", "train")
    rows = [
        {"prompt": reviews[i]["prompt"], "chosen": reviews[i]["completion"], "rejected": reviews[i + 50]["completion"]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path), rows


def run(tiny, tmp_path, **changes):
    """A run of three steps over the same eight pairs; returns (its rows, the pairs)."""
    path, rows = write_pairs(tmp_path / "pairs.jsonl", 8)
    values = dict(
        sft_model_path=str(tiny / "policy"), dataset=path, eval_dataset=path, batch_size=8, num_train_epochs=3
    )
    values |= dict(learning_rate=1e-3, lr_schedule="constant", beta=0.3, micro_batch_size=8, response_length=4)
    done = train_dpo.main(train_dpo.Args(**(values | dict(output_dir="model") | changes)))
    return read_metrics(done["run"]), rows


@pytest.mark.parametrize("changes", [{}, dict(loss="ipo"), dict(label_smoothing=0.2, max_grad_norm=0.5)], ids=str)
def test_dpo_4_a_run_is_that_of_a_plain_loop_with_a_reference_of_its_own(tiny, in_tmp, tmp_path, changes):
    """In double precision, by transformers alone. [OPT-4] [OPT-5] [OPT-6]"""
    found, pairs = run(tiny, tmp_path, micro_batch_size=3, **changes)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "policy")
    model, reference = (AutoModelForCausalLM.from_pretrained(tiny / "policy").double().eval() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)

    def logprob(network, prompt, text):
        prompt, text = tokenizer(prompt).input_ids, tokenizer(text).input_ids + [tokenizer.eos_token_id]
        logits = network(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return logits.gather(1, torch.tensor(text).unsqueeze(1)).sum(), len(text)

    for row in found[:3]:
        losses, margins = [], []
        for pair in pairs:
            d = {}
            for side in ("chosen", "rejected"):
                (ours, length), (theirs, _) = (logprob(x, pair["prompt"], pair[side]) for x in (model, reference))
                d[side] = (ours - theirs.detach()) / (length if changes.get("loss") == "ipo" else 1)
            margin, e = d["chosen"] - d["rejected"], changes.get("label_smoothing", 0)
            losses.append((margin - 1 / 0.6) ** 2 if changes.get("loss") == "ipo" else
                          -(1 - e) * torch.nn.functional.logsigmoid(0.3 * margin)
                          - e * torch.nn.functional.logsigmoid(-0.3 * margin))  # fmt: skip
            margins.append(0.3 * margin.item())
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), changes.get("max_grad_norm", math.inf))
        optimizer.step()
        assert row["train/dpo/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert row["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        if changes.get("loss") != "ipo":
            assert row["rewards/margins"] == pytest.approx(sum(margins) / 8, rel=1e-3, abs=1e-5)
    saved = AutoModelForCausalLM.from_pretrained("model").state_dict()
    start = reference.state_dict()
    way = sum(((x - start[name]) ** 2).sum() for name, x in model.state_dict().items()).sqrt()
    apart = sum(((x - saved[name]) ** 2).sum() for name, x in model.state_dict().items()).sqrt()
    assert apart < 1e-2 * way, (apart, way)


@pytest.mark.parametrize("changes", [{}, dict(lora_rank=4)], ids=str)
def test_dpo_4_without_a_step_the_policy_is_the_reference(tiny, in_tmp, tmp_path, changes):
    found, _ = run(tiny, tmp_path, learning_rate=0.0, **changes)
    for row in found:
        assert row["train/dpo/loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert row["rewards/margins"] == row["rewards/accuracies"] == 0


def test_it_learns_its_pairs_by_heart(tiny, in_tmp, tmp_path):
    found, _ = run(tiny, tmp_path, num_train_epochs=20)
    assert found[-1]["eval/rewards/accuracies"] == 1 and found[-1]["eval/dpo/loss"] < 0.3
