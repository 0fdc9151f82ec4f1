"""Padding, positions, and the rows that models read: what stands in which column, and which column sees which."""

import pytest
import torch
from tiny_models import random_batch, tiny_model

from rlhf_details import train_rloo, utils


# ---- padding ---------------------------------------------------------------------------------------------------------
def test_data_5_left_pad_puts_the_rows_at_the_right():
    tokens, mask = utils.left_pad([[5, 6, 7], [0], [9, 10]])  # A real token may be 0.
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 0], [0, 9, 10]]
    assert mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]


def test_data_6_positions_count_the_real_tokens_before():
    mask = torch.tensor([[1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]]).bool()
    got = utils.positions_from_mask(mask)
    assert (got * mask).tolist() == [[0, 0, 0, 1, 2, 3], [0, 0, 0, 1, 0, 2], [0] * 6] and got.min() == 0


@pytest.mark.parametrize("extra", [0, 1])
def test_trim_removes_only_columns_that_are_padding_in_every_row(extra):
    query_mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    response_mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    batch = utils.Batch(torch.arange(15).reshape(3, 5), query_mask, torch.arange(100, 115).reshape(3, 5), response_mask)
    got = utils.trim(batch, extra)[:4]
    expected = [x[:, 2:] for x in batch[:2]] + [x[:, : 3 + extra] for x in batch[2:4]]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- packed rows -----------------------------------------------------------------------------------------------------
def test_rloo_11_every_column_of_a_packed_row_sees_one_so_that_no_softmax_is_empty():
    """Padding sees itself. What real tokens see shows in their log-probs, in test_rloo_9_... beside this file."""
    batch = random_batch(k=3)
    assert not batch[1].all() and not batch[3].all()
    mask = train_rloo.pack(batch, 3)[1]
    assert mask.shape == (3, 1, 9 + 3 * 6, 9 + 3 * 6)
    assert (mask == 0).any(-1).all() and torch.isfinite(mask.bfloat16()).all()


# ---- dropout ---------------------------------------------------------------------------------------------------------
DROPPING = {
    "gpt2": dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "opt": dict(dropout=0.5, attention_dropout=0.5, activation_dropout=0.5),
    "llama": dict(attention_dropout=0.5),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", DROPPING)
@torch.no_grad()
def test_model_1_no_dropout_is_left_in_training_mode(kind, attention):
    """Llama has no layer of it: attention is given the rate in the configuration. [MODEL-2]"""
    config = tiny_model(kind).config  # It has none, so the rates are set and another model is made.
    for name, rate in DROPPING[kind].items():
        setattr(config, name, rate)
    model = type(tiny_model(kind))(config).train()
    model.set_attn_implementation(attention)
    tokens = torch.arange(2, 22).reshape(2, 10)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    assert utils.disable_dropout(model) is model and all(module.training for module in model.modules())
    first = model(tokens).logits
    assert torch.equal(first, model(tokens).logits) and torch.equal(first, model.eval()(tokens).logits)
