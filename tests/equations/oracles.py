"""Numbers and slow plain loops that the tests of the equations share. Nothing here calls the shipped code."""

import math
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


def slow_whiten(values):
    """(value - mean) / sqrt(biased variance + 1e-8) of a list."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def clipped(values, bound):
    """The list, held within [-bound, bound]; None: as it is."""
    return values if bound is None else [min(bound, max(-bound, v)) for v in values]


def slow_policy_loss(new, old, mask, advantages, clip):
    """(losses, flags) as lists. `advantages` holds numbers (a response is an action) or lists (a token is)."""
    losses, flags = [], []
    for i, advantage in enumerate(advantages):
        logratios = [(new[i][t] - old[i][t]) if mask[i][t] else 0.0 for t in range(len(mask[i]))]
        actions = [(advantage, sum(logratios), True)]
        if isinstance(advantage, list):
            actions = list(zip(advantage, logratios, mask[i], strict=True))
        row, row_flags = [], []
        for a, logratio, real in actions:
            ratio = math.exp(logratio)
            unclipped, held = -a * ratio, -a * min(max(ratio, 1 - clip), 1 + clip)
            row.append(max(unclipped, held) if real else 0.0)
            row_flags.append(bool(real and held > unclipped))
        losses.append(row if isinstance(advantage, list) else row[0])
        flags.append(row_flags if isinstance(advantage, list) else row_flags[0])
    return losses, flags
