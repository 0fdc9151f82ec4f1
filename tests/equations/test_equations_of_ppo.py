"""What of the equations of PPO and of its relatives no whole update shows: rounding, and which tokens are searched."""

import torch
from oracles import close

from rlhf_details import train_ppo


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


def test_ppo_19_equal_scores_are_not_scaled():
    for n in range(3, 17):
        scores = (0.5 + torch.rand(1, generator=torch.Generator().manual_seed(n))).expand(n)
        moments = train_ppo.merge_moments(train_ppo.merge_moments((0, 0.0, 0.0), scores), scores[:2])
        for norm in (True, False):
            shaped = train_ppo.shape_scores(scores, moments, scaling=True, norm=norm, clip=None)
            assert torch.equal(shaped, 0 * scores if norm else scores)
