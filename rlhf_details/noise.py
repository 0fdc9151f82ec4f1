"""
The bits of the sampler's noise: a function of coordinates, such as (seed, purpose, update, episode, step, token), and
never of a generator's state. So no grouping of rows, no number of processes and no resumed run changes the noise.
"""

import functools

import torch


def hash32(x):
    """A 32-bit integer hash, elementwise and in place on an int32 tensor (the "lowbias32" mixer)."""
    # Products wrap around. >> fills up with the sign bit, and the masks clear what it has filled.
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def fold(key, coordinate):
    """Hashes one more coordinate (int or int32 tensor) into a key, so that their order matters."""
    return hash32(key ^ coordinate)


def keys_of_episodes(key, episodes):
    """The key [B] int32 of each episode's noise. Args: key, e.g. (seed, TRAINING, update); episodes [B], numbers."""
    keys = torch.full_like(episodes, 0x1B873593, dtype=torch.int32)  # The start is not 0, because hash32(0) is 0.
    for coordinate in (*key, episodes.int()):
        keys = fold(keys, coordinate)  # Noise is hashed from coordinates, so batching cannot change it. [GEN-4]
    return keys


def gumbel_noise(keys, vocab_size):
    """Standard Gumbel noise [B, V] fp32, a function of the key of episode and step [B] int32 and of the token id."""
    # Each operation here and below is a pass over [B, V] for each token of a response, so they are few and in place.
    x = keys.unsqueeze(1) ^ hashed_tokens(vocab_size, keys.device)  # [B, V]
    return gumbel_of_bits(hash32(x).bitwise_and_(0x7FFFFFFF))


@functools.lru_cache(maxsize=4)
def hashed_tokens(vocab_size, device):
    """A hash of each token id, [V] int32."""
    return fold(torch.arange(vocab_size, dtype=torch.int32, device=device), 0x3C6EF372)


def gumbel_of_bits(bits):
    """Standard Gumbel noise, fp32, of 31 random bits in int32.

    With u = (bits + 1/2) / 2^31, clamped below 1, the noise is -log(-log(1 - u)). Large noise decides an argmax, and it
    comes from small u, where floats are dense: up to 22, while -log(-log(u)) would end at about 17.
    """
    minus_u = torch.add(torch.tensor(-(2.0**-32)), bits, alpha=-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return minus_u.log1p_().neg_().log_().neg_()
