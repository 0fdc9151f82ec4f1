"""The sampler: which tokens it draws, where responses end, and that nothing but the coordinates decides a draw."""

import copy
import itertools

import pytest
import torch
from scipy.stats import chi2
from tiny_models import SAMPLED, draw, fixed_logits, plain_logprobs, tiny_model

from rlhf_details import train_rloo, train_sft, utils
from rlhf_details.plumbing.machine import packing

page_models = pytest.mark.parametrize("wrapper", SAMPLED.values(), ids=SAMPLED)


def small(kind="gpt_neox", temperature=1.0):
    return train_rloo.Policy(tiny_model(kind, vocab_size=23), temperature)


# ---- which tokens are drawn ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows,steps", [(100_000, 1), (1_000, 100)])
def test_gen_1_tokens_follow_the_softmax(rows, steps):
    logits = torch.rand(20, generator=torch.Generator().manual_seed(0)) * 4 - 2
    tokens, mask, logprobs = draw(fixed_logits(logits), [[1]] * rows, steps)
    p = logits.double().softmax(0)
    expected = p * tokens.numel()
    assert mask.all() and tokens.numel() == 100_000
    assert ((tokens.flatten().bincount(minlength=20) - expected) ** 2 / expected).sum() < chi2.isf(1e-5, 19)
    torch.testing.assert_close(logprobs, p.log().float()[tokens], atol=1e-5, rtol=0)


@page_models
@torch.no_grad()
def test_gen_2_the_log_probs_of_the_sampler_are_those_of_plain_forwards(wrapper):
    """Of logits over temperature, from which it draws: test_gen_1_...

    GPT-2 has absolute positions, and without explicit ones a left-padded prompt would be read shifted. [GEN-6]
    """
    model, prompts = tiny_model("gpt2", vocab_size=23), [[3, 4, 5, 6, 7], [8], [9, 10]]
    responses, mask, logprobs = draw(wrapper(model, 0.7), prompts, 8, 1)
    for prompt, response, m, ours in zip(prompts, responses, mask, logprobs, strict=True):
        expected, _ = plain_logprobs(model, prompt, response[m].tolist(), 0.7)
        assert (ours[m] - expected).abs().max() < 1e-5 and (ours[~m] == 0).all()


def with_filler():
    """A model of 97 embeddings and 23 tokens, whose other logits are the highest, and the same one of 23 embeddings."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[23:] *= 5
    cut = copy.deepcopy(model)
    cut.resize_token_embeddings(23)
    model.num_tokens = 23
    return model, cut


@page_models
@torch.no_grad()
def test_logits_that_stand_for_no_token_have_no_share_of_the_softmax(wrapper):
    """Qwen2.5 has 151,936 or 152,064 embeddings for 151,665 tokens."""
    model, cut = with_filler()
    ours, expected = (draw(wrapper(m, 0.7), [[3, 4, 5]] * 50, 6) for m in (model, cut))
    assert torch.equal(ours[0], expected[0]) and (ours[2] - expected[2]).abs().max() < 1e-5


@torch.no_grad()
def test_nor_have_they_one_in_a_loss_or_in_the_rows_that_try_packing():
    model, cut = with_filler()
    tokens = torch.arange(1, 13).reshape(2, 6)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    inputs = tokens, mask, utils.positions_from_mask(mask)
    ours, expected = (train_sft.LanguageModel(m, 1.0)(*inputs, is_target=mask) for m in (model, cut))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    inputs = *inputs, torch.arange(5), tokens[:, 1:]
    ours, expected = (train_rloo.Policy(m, 1.0)(*inputs) for m in (model, cut))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert max(x.max() for x in packing.made_up_batch(model, 16, 8, 4)[:4]) < 23


# ---- coordinates alone decide ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2"])
@torch.no_grad()
def test_packed_sampling_draws_what_plain_sampling_draws(kind):
    """n responses in the row of their prompt, against a row each: the same tokens, some of which end early."""
    policy, prompts = small(kind, 0.7), [[3, 4, 5, 6], [7, 8], [9, 10, 11], [5]]
    free = draw(policy, prompts, 9, n=3)[0]
    stop_id = free.flatten().mode().values.item()
    packed = draw(policy, prompts, 9, stop_id, n=3)
    plain = draw(policy, [p for p in prompts for _ in range(3)], 9, stop_id)
    assert torch.equal(packed[0], plain[0]) and torch.equal(packed[1], plain[1])
    assert (packed[2] - plain[2]).abs().max() < 1e-5
    assert len(set(plain[1].sum(1).tolist())) > 1 and len({tuple(row) for row in plain[0].tolist()}) > 8


# ---- where responses end ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 4])
@torch.no_grad()
def test_gen_5_nothing_is_sampled_after_the_stop_token(n):
    policy, prompts = small(), [[3, 4, 5], [6, 7]] * (40 // n)
    free = draw(policy, prompts, 20, n=n)[0]
    stop_id = free.flatten().mode().values.item()
    responses, mask, logprobs = draw(policy, prompts, 20, stop_id, n=n)
    for full, cut, m, p in zip(free.tolist(), responses.tolist(), mask, logprobs, strict=True):
        length = min(20, len(list(itertools.takewhile(lambda t: t != stop_id, full))) + 1)  # with the stop token itself
        assert m.tolist() == [t < length for t in range(20)]
        assert cut == full[:length] + [0] * (20 - length)
        assert (p[length:] == 0).all() and (p[:length] < 0).all()
    assert len(set(mask.sum(1).tolist())) > 5


@pytest.mark.parametrize("stop_ids", [(0, 1), (1, 0)])
def test_gen_16_any_of_the_stop_tokens_ends_a_response(stop_ids):
    responses, mask, _ = draw(fixed_logits(torch.tensor([-50.0, 50.0, -50.0])), [[1]], 5, *stop_ids)
    assert responses.tolist() == [[1, 0, 0, 0, 0]] and mask.sum().item() == 1
