"""The noise of the sampler: its hash, its distribution, and that it depends on nothing but its coordinates."""

import math

import pytest
import torch
from tiny_models import draw, fixed_logits

from rlhf_details import noise


# ---- the hash --------------------------------------------------------------------------------------------------------
def slow_hash(x):
    """The "lowbias32" mixer on Python's integers."""
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


# ---- the noise that the sampler adds to the logits -------------------------------------------------------------------
@pytest.fixture
def noise_of(monkeypatch):
    """noise_of(coordinates, rows, steps): the noise [rows, steps, V]."""
    original, seen = noise.gumbel_noise, []

    def spy(keys, size):
        seen.append(original(keys, size))
        return seen[-1]

    def sampled(coordinates, rows, steps, vocab_size=40):
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(noise, "gumbel_noise", spy)
            rows = torch.as_tensor(rows)
            draw(fixed_logits(torch.zeros(vocab_size)), [[1]] * len(rows), steps, key=coordinates, rows=rows)
        return torch.stack(seen, 1)

    return sampled


def test_noise_has_the_moments_and_the_distribution_of_gumbel(noise_of):
    noise = noise_of((1, 0, 1), range(500), 10).double().reshape(-1).sort().values
    n = noise.numel()
    assert n == 200_000 and torch.isfinite(noise).all()
    # 4 standard errors: of the mean pi / sqrt(6 n), of the variance (kurtosis 5.4) pi^2 / 6 sqrt(4.4 / n)
    assert abs(noise.mean().item() - 0.57722) < 4 * math.pi / math.sqrt(6 * n)
    assert abs(noise.var().item() - math.pi**2 / 6) < 4 * math.pi**2 / 6 * math.sqrt(4.4 / n)
    cdf = (-(-noise).exp()).exp()
    steps = torch.arange(n + 1).double() / n
    distance = torch.maximum((cdf - steps[:-1]).abs(), (cdf - steps[1:]).abs()).max().item()
    assert distance < 2.7 / math.sqrt(n)  # Kolmogorov: exceeded once in 10^6


def test_noise_is_bit_for_bit_that_of_the_31_lower_bits_of_the_hash():
    keys = torch.randint(-(2**31), 2**31, (200,), generator=torch.Generator().manual_seed(0)).int()
    keys[:5] = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)])
    tokens = [slow_hash(i ^ 0x3C6EF372) for i in range(40)]
    bits = torch.tensor([[slow_hash(key ^ token) & 0x7FFFFFFF for token in tokens] for key in keys.tolist()])
    u = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    assert torch.equal(noise.gumbel_noise(keys, 40), -(-(-u).log1p()).log())


def test_noise_of_the_extreme_hash_values_is_finite_and_finest_in_the_upper_tail():
    found = noise.gumbel_of_bits(torch.tensor([0, 1, 2**31 - 1], dtype=torch.int32))
    assert torch.isfinite(found).all() and found.min() < -2.5
    assert 20 < found.max() < 23  # log of 2^31 is 21.5; 24-bit numbers next to 1 would end at 17


def test_gen_4_noise_is_a_function_of_its_coordinates(noise_of):
    torch.manual_seed(0)
    one = noise_of((1, 2, 3), range(6), 5)
    torch.manual_seed(1)
    assert torch.equal(one, noise_of((1, 2, 3), range(6), 5))  # no generator has a say
    assert torch.equal(one[[4, 1]], noise_of((1, 2, 3), [4, 1], 5))  # nor has grouping, the length or the vocabulary
    assert torch.equal(one[:, :2], noise_of((1, 2, 3), range(6), 2))
    assert torch.equal(one[..., :7], noise_of((1, 2, 3), range(6), 5, 7))


def test_gen_4_noise_changes_with_each_coordinate_and_with_their_order(noise_of):
    one = noise_of((1, 2, 3), range(6), 5)
    for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2), (3, 2, 1), (0, 2, 3), (3, 1, 2)]:
        assert (one == noise_of(other, range(6), 5)).float().mean() < 0.01, other


def correlation(x, y):
    return torch.corrcoef(torch.stack([x.double().reshape(-1), y.double().reshape(-1)]))[0, 1].item()


def test_noise_of_neighbours_is_uncorrelated(noise_of):
    noise = noise_of((1, 0, 1), range(500), 10)
    pairs = {
        "rows": (noise[1:], noise[:-1]),
        "steps": (noise[:, 1:], noise[:, :-1]),
        "tokens": (noise[..., 1:], noise[..., :-1]),
        "row and step": (noise[1:, :-1], noise[:-1, 1:]),
        "row and token": (noise[1:, :, :-1], noise[:-1, :, 1:]),
    }
    for name, key in {"seeds": (2, 0, 1), "purposes": (1, 1, 1), "updates": (1, 0, 2)}.items():
        pairs[name] = noise, noise_of(key, range(500), 10)
    for name, (x, y) in pairs.items():
        assert abs(correlation(x, y)) < 4 / math.sqrt(x.numel()), name  # 4 standard errors
