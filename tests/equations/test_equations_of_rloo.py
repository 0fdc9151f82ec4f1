"""RLOO's advantages on the example of TRL's documentation of RLOO: three prompts of four responses."""

import torch

from rlhf_details import train_rloo


def test_rloo_3_the_example_of_trls_documentation():
    """Its rewards stand response by response, (1, 2, 3) the first ones of the three prompts. Ours stand by prompt."""
    rewards = torch.tensor([[1.0, 2, 3], [2, 3, 4], [5, 6, 7], [8, 9, 10]])
    found = train_rloo.rloo_advantages(rewards.T.reshape(-1), 4, torch.ones(12, dtype=torch.bool)).reshape(3, 4).T
    assert abs(found[0, 0] - (1 - (2 + 5 + 8) / 3)) < 1e-6 and abs(found[2, 1] - (6 - (3 + 2 + 9) / 3)) < 1e-6
    for i in range(4):  # response by response, as the documentation's loop
        others = torch.stack([rewards[j] for j in range(4) if j != i])
        torch.testing.assert_close(found[i], rewards[i] - others.mean(0))
