"""What of train_grpo.py's equations no whole update shows: rounding, mean gradients, the values of an objective."""

import pytest
import torch
from oracles import close

from rlhf_details import train_grpo


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [0.1, 10, 100])
def test_grpo_1_groups_of_equal_scores_have_no_advantages(size, scale):
    """Their mean in fp32 is often not the score itself, and the difference would be divided by 1e-4."""
    for k in range(3, 17):
        groups = size * (0.5 + torch.rand(50, 1, generator=torch.Generator().manual_seed(k)))
        scores = torch.cat([groups.expand(-1, k), torch.arange(float(k)).unsqueeze(0)])  # the last group differs
        advantages = train_grpo.grpo_advantages(
            scores.flatten(), k, scale, torch.ones(scores.numel(), dtype=torch.bool)
        ).reshape(-1, k)
        assert (advantages[:-1] == 0).all() and (advantages[-1] != 0).any()


def test_grpo_2_the_kl_is_precise_where_the_policies_hardly_differ():
    near = 2.0 ** -torch.arange(10, 20)  # In fp32, exp(d) - d - 1 would round to 0, or to twice as much.
    close(train_grpo.kl_estimates(torch.zeros(10), near), (near**2 / 2).tolist(), rtol=1e-2, atol=0)


def test_grpo_2_the_mean_gradient_is_that_of_one_kl_or_with_the_ratio_of_the_other():
    """Over all tokens of a small vocabulary, each as often as the policy says it."""
    logits, ref_logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    policy, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    share, logratio = policy.detach().exp(), policy - policy.detach()
    forward, reverse = (ref.exp() * (ref - policy)).sum(), (policy.exp() * (policy - ref)).sum()
    for wanted, factor in ((forward, 1), (reverse, logratio.exp())):
        mean = (share * train_grpo.kl_estimates(policy, ref) * factor).sum()
        assert torch.allclose(gradient(mean), gradient(wanted))


@pytest.mark.parametrize(
    "given, taken",
    [
        (dict(cliprange=0.1), (0.1, 0.1, "token")),
        (dict(cliprange_high=0.28), (0.2, 0.28, "token")),
        (dict(objective="gspo"), (3e-4, 4e-4, "response")),
        (dict(objective="cispo"), (None, 4.0, "token")),
    ],
)
def test_an_objective_takes_its_own_values_where_none_are_given(given, taken):
    assert train_grpo.clipping_and_normalization(train_grpo.Args(**given)) == taken
