"""Numbers and slow plain loops that the tests of the equations share. Nothing here calls the shipped code."""

import random

import torch


def uniform(generator, *shape, low=-1.0, high=1.0):
    return torch.rand(*shape, generator=generator) * (high - low) + low


def ragged_mask(lengths, width):
    """[M, width] bool: the first lengths[i] columns of row i."""
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def ragged_case(seed):
    """(generator, lengths, width): rows of one token, of the whole width, of one less, and of anything between."""
    some = random.Random(seed)
    width = [1, 2, 5, 9, 12, 3][seed]
    lengths = [1, width, max(1, width - 1)] + [some.randint(1, width) for _ in range(6)]
    some.shuffle(lengths)
    return torch.Generator().manual_seed(seed), lengths, width


def close(got, expected, atol=1e-5, rtol=1e-5):
    """Asserts that a float32 tensor is, within the tolerances, what lists or another tensor say."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float32), atol=atol, rtol=rtol)
