"""What of the equations of PPO and of its relatives no whole update shows: rounding, and which tokens are searched."""

import math

import pytest
import torch
from oracles import close, ragged_case, ragged_mask

from rlhf_details import evaluate, train_distill, train_grpo, train_ppo, train_rloo


def test_ppo_7_k3_is_precise_near_zero():
    """exp(-d) - 1 + d in float32 would be off by a tenth at 1e-3."""
    small = torch.tensor([[1e-2, 1e-3, 1e-4], [-1e-2, -1e-3, -1e-4]])
    exact = [[d * d / 2 - d**3 / 6 + d**4 / 24 for d in row] for row in small.double().tolist()]
    close(train_ppo.kl_penalty(small, torch.zeros_like(small), "k3"), exact, atol=0, rtol=2e-3)


def test_rounding_never_calls_a_value_within_the_range_clipped():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (0.2 * torch.rand(100, 50, generator=generator) ** 3 for _ in range(3))
    assert (old + (values - old) != values).any()  # Written like this, rounding would make some of them clipped.
    assert not train_ppo.ppo_value_loss(values, old, returns, torch.ones(100, 50).bool(), 0.2)[2].any()


@pytest.mark.parametrize("ends,after", [([2], 0), ([2], 1), ([2, 3], 4), ([2], 30), ([], 0)])
@pytest.mark.parametrize("seed", range(6))
def test_gen_12_the_end_of_a_response_is_that_of_the_loop(seed, ends, after):
    """Without a token to look for the whole response is scored and has ended. Filler is not searched. [GEN-13]"""
    generator, lengths, width = ragged_case(seed)
    mask = ragged_mask(lengths, width)
    responses = torch.randint(4, mask.shape, generator=generator)
    read, has_ended = [], []
    for row, n in zip(responses.tolist(), lengths, strict=True):
        places = [t for t in range(after, n) if row[t] in ends]
        read.append(places[0] + 1 if places else n)
        has_ended.append(bool(places) or not ends)
    expected = ragged_mask(read, width)
    for page in (train_ppo, evaluate):
        scored, found = page.truncate_response(responses, mask, torch.tensor(ends), after)
        assert torch.equal(scored, expected) and found.tolist() == has_ended
    for page in (train_rloo, train_grpo, train_distill):
        assert after or page.has_stopped(responses, mask, torch.tensor(ends)).tolist() == has_ended


def test_ppo_19_running_moments_equal_those_of_all_scores_at_once():
    """Far from 0, where a sum of squares has lost its digits."""
    generator, moments, seen = torch.Generator().manual_seed(0), (0, 0.0, 0.0), []
    for number, size in enumerate([5, 64, 3, 1, 20]):  # The batches' means differ.
        batch = 1000 + torch.randn(size, generator=generator) + number
        moments = train_ppo.merge_moments(moments, batch)
        seen += batch.tolist()
        mean = math.fsum(seen) / len(seen)
        squares = math.fsum((s - mean) ** 2 for s in seen)
        assert moments == (len(seen), pytest.approx(mean, rel=1e-12), pytest.approx(squares, rel=1e-9))


def test_ppo_19_equal_scores_are_not_scaled():
    for n in range(3, 17):
        scores = (0.5 + torch.rand(1, generator=torch.Generator().manual_seed(n))).expand(n)
        moments = train_ppo.merge_moments(train_ppo.merge_moments((0, 0.0, 0.0), scores), scores[:2])
        for norm in (True, False):
            shaped = train_ppo.shape_scores(scores, moments, scaling=True, norm=norm, clip=None)
            assert torch.equal(shaped, 0 * scores if norm else scores)
