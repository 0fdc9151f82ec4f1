"""What the engines' module does on one process. Several processes and sharded weights are in tests/slow."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_details import train_ppo
from rlhf_details.plumbing import checkpoint, engines


def prepared():
    """(accelerator, module, optimizer): three layers under one process."""
    torch.manual_seed(0)
    accelerator, module = Accelerator(), torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    module[2].weight = module[0].weight  # tied, as many models' embeddings and heads are
    module[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
    return accelerator, *engines.prepare(SimpleNamespace(), accelerator, module, optimizer)


def train(accelerator, module, optimizer, steps):
    for step in range(steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        accelerator.backward(module(x).square().sum())
        engines.clip_and_step(accelerator, module, optimizer, None, None)


def test_a_checkpoint_holds_what_is_trained_and_brings_it_back(tmp_path):
    one, other = prepared(), prepared()
    train(*one, steps=2)
    names = {"0.weight", "0.bias", "1.weight", "2.bias"}  # tied weights once, and none that is not trained
    checkpoint.save_policy(*one, tmp_path)
    saved = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert saved["optim_state_dict"]["state"].keys() == names and "1.bias" not in saved["model_state_dict"]
    checkpoint.load_policy(*other, tmp_path)
    train(*one, steps=1), train(*other, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(one[1].parameters(), other[1].parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_what_is_held_in_bf16_is_smaller_and_gives_the_same_numbers(tied, monkeypatch):
    """Autocast would round the weights of linear layers in each call, and nothing else: no norm and no embedding."""
    config, accelerator = tiny_config(tie_word_embeddings=tied, num_labels=1, initializer_range=0.2), Accelerator()
    policy = train_ppo.Policy(AutoModelForCausalLM.from_config(config), 0.7)
    policy.critic = torch.nn.Linear(32, 1)
    reward = train_ppo.Reward(AutoModelForSequenceClassification.from_config(config))
    inputs = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.bool), torch.arange(6).expand(2, 6)
    monkeypatch.setattr(engines, "precision", lambda accelerator: "bf16")

    def numbers(policy):
        """What policy and reward model compute, and the bytes of their weights."""
        with torch.autocast("cpu", torch.bfloat16):
            outputs = policy(*inputs, torch.arange(6)), reward(*inputs, torch.tensor([[5], [5]]))
        return outputs, [sum({p.data_ptr(): p.nbytes for p in m.model.parameters()}.values()) for m in (policy, reward)]

    before, sizes = numbers(policy)
    with monkeypatch.context() as patch:  # a copy to sample from, of an engine that shares weights out
        patch.setattr(engines, "shards_weights", lambda accelerator: True)
        policy.template = [engines.empty_copy(policy)]
        assert all(p.is_meta for p in policy.template[0].parameters())  # It takes no memory.
        copy = engines.whole_copy(accelerator, policy)
    args, module = SimpleNamespace(offload_frozen=False), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    policy.stays_whole = True  # as a teacher's under jsd, which is held in bf16 all the same
    engines.prepare(args, accelerator, module, optimizer, policy, reward)
    assert copy.critic is None and policy.critic is not None  # A critic does not sample.
    for held in (copy, policy):
        after, smaller = numbers(held)
        assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(before, after, strict=True))
        assert all(x < 0.8 * y for x, y in zip(smaller, sizes, strict=True))
