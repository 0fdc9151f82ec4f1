"""Padding, positions, and the rows that models read: what stands in which column, and which column sees which."""

import pytest
import torch
from tiny_models import PAGES, tiny_model

from rlhf_details import train_rloo, utils

# ---- padding ---------------------------------------------------------------------------------------------------------
JOINING = [name for name in PAGES if name != "rloo"]


def test_data_5_left_pad_puts_the_rows_at_the_right():
    tokens, mask = utils.left_pad([[5, 6, 7], [8], [9, 10]])
    assert mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    assert tokens.dtype == torch.int64 and mask.dtype == torch.bool
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 10]]
    assert utils.left_pad([[0, 0], [3]])[1].tolist() == [[True, True], [False, True]]  # a real token may be 0


def test_data_6_positions_count_the_real_tokens_before():
    mask = torch.tensor([[1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    got = utils.positions_from_mask(mask)
    assert got.dtype == torch.int64
    for row, real in zip(got.tolist(), mask.tolist(), strict=True):
        assert [p for p, r in zip(row, real, strict=True) if r] == list(range(sum(real)))
    assert got[1, :2].tolist() == [0, 0] and got[3].tolist() == [0] * 6  # left padding gets 0, and nothing is negative


@pytest.mark.parametrize("extra", [0, 1])
def test_trim_removes_only_columns_that_are_padding_in_every_row(extra):
    query_mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    response_mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    queries, responses = torch.arange(15).reshape(3, 5), torch.arange(100, 115).reshape(3, 5)
    width = 3 + extra
    got = utils.trim((queries, query_mask, responses, response_mask), extra)
    expected = queries[:, 2:], query_mask[:, 2:], responses[:, :width], response_mask[:, :width]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    full = queries, torch.ones_like(query_mask), responses, torch.ones_like(response_mask)
    assert all(torch.equal(a, b) for a, b in zip(utils.trim(full, extra), full, strict=True))


@pytest.mark.parametrize("size", [1, 3, 4, 8, 100])
def test_slices_are_joined_in_their_order_and_bound_the_rows_of_a_forward(size):
    seen, model = [], object()

    def function(given, batch, factor):
        assert given is model
        seen.append(len(batch[0]))
        return batch[0] * factor, batch[1].sum(1)

    x, y = torch.arange(8), torch.arange(24).reshape(8, 3)
    got = utils.in_slices(function, model, [x, y], size, 10)
    assert torch.equal(got[0], 10 * x) and torch.equal(got[1], y.sum(1))
    assert max(seen) <= size and sum(seen) == 8 and len(seen) == -(-8 // size)


# ---- rows of a prompt and its response -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", JOINING)
def test_gen_7_join_reads_each_token_in_the_column_before_it(name):
    queries, query_mask = utils.left_pad([[5, 6, 7], [8]])
    responses, response_mask = torch.tensor([[11, 12, 13, 14], [21, 22, 0, 0]]), torch.ones(2, 4, dtype=torch.bool)
    response_mask[1, 2:] = False
    tokens, mask, positions, index = PAGES[name].join(queries, query_mask, responses, response_mask)
    assert tokens.tolist() == [[5, 6, 7, 11, 12, 13, 14], [0, 0, 8, 21, 22, 0, 0]]
    assert mask.tolist() == [[True] * 7, [False, False, True, True, True, False, False]]
    assert positions[0].tolist() == list(range(7)) and positions[1, 2:5].tolist() == [0, 1, 2]
    assert index.tolist() == [2, 3, 4, 5]


def pack_example(n, seed, prompts=2, Q=4, R=3):
    """Two groups of n adjacent rows: left-padded prompts, right-padded responses, distinct token ids."""
    generator = torch.Generator().manual_seed(seed)
    queries, query_mask = utils.left_pad([list(range(1, Q)), list(range(Q, 2 * Q))])
    queries, query_mask = queries.repeat_interleave(n, 0), query_mask.repeat_interleave(n, 0)
    lengths = torch.randint(1, R + 1, (prompts * n, 1), generator=generator)
    response_mask = torch.arange(R) < lengths
    responses = (100 + torch.arange(prompts * n * R).reshape(-1, R)) * response_mask
    return queries, query_mask, responses, response_mask


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_rloo_11_pack_draws_the_rows_of_its_definition(n, seed):
    Q, R, prompts = 4, 3, 2
    batch = queries, query_mask, responses, response_mask = pack_example(n, seed)
    tokens, mask, positions, index = train_rloo.pack(*batch, n)
    L = Q + n * R
    assert tokens.shape == positions.shape == (prompts, L) and index.tolist() == [
        Q - 1 if i == 0 else Q + r * R + i - 1 for r in range(n) for i in range(R)
    ]
    for p in range(prompts):
        # of each column: None or the number of its response, its step, whether it is real, its token
        columns = [(None, t, query_mask[p * n, t].item(), queries[p * n, t].item()) for t in range(Q)]
        for r in range(n):
            e = p * n + r
            columns += [(r, i, response_mask[e, i].item(), responses[e, i].item()) for i in range(R)]
        prompt_length = sum(real for owner, _, real, _ in columns if owner is None)
        for c, (owner, step, real, token) in enumerate(columns):
            if not real:
                continue
            before = sum(columns[t][2] for t in range(step)) if owner is None else prompt_length + step
            assert tokens[p, c] == token and positions[p, c] == before, (p, c)
            if n == 1:
                continue
            for other, (other_owner, other_step, other_real, _) in enumerate(columns):
                if owner is None:
                    sees = other_owner is None and other_real and other_step <= step
                elif other_owner is None:
                    sees = other_real
                else:
                    sees = other_owner == owner and other_real and other_step <= step
                value = mask[p, 0, c, other].item()
                assert value == 0 if sees else value < -1e30, (p, c, other)
        if n == 1:
            assert mask[p].tolist() == [real for _, _, real, _ in columns]
        else:
            assert mask.shape == (prompts, 1, L, L)
            assert (mask[p, 0] == 0).any(1).all()  # padding sees itself, so that no row of the softmax is empty
            assert torch.isfinite(mask.bfloat16()).all()


# ---- dropout ---------------------------------------------------------------------------------------------------------
DROPPING = {
    "gpt2": dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "gpt_neox": dict(attention_dropout=0.5, hidden_dropout=0.5),
    "opt": dict(dropout=0.5, attention_dropout=0.5, activation_dropout=0.5),
    "llama": dict(attention_dropout=0.5),
}


def dropping_model(kind, **changes):
    """A model with dropout: tiny_model switches it off, so its configuration is made into a model once more."""
    config = tiny_model(kind).config
    for name, value in (changes or DROPPING[kind]).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return type(tiny_model(kind))(config).train()


@torch.no_grad()
def assert_dropout_goes(model):
    tokens = torch.arange(2, 22).reshape(2, 10)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)  # there was dropout before
    assert utils.disable_dropout(model) is model and all(module.training for module in model.modules())
    first = model(tokens).logits
    assert torch.equal(first, model(tokens).logits) and torch.equal(first, model.eval()(tokens).logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", DROPPING)
def test_model_1_no_dropout_is_left_in_training_mode(kind, attention):
    model = dropping_model(kind)
    model.set_attn_implementation(attention)
    assert_dropout_goes(model)
    assert not any(v for k, v in vars(model.config).items() if "dropout" in k or k.endswith("_pdrop"))


@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_model_2_dropout_of_attention_that_is_a_number_and_no_layer_is_off_too(kind):
    model = dropping_model(kind, attention_dropout=0.5)
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert_dropout_goes(model)
