"""What the engines' module does on one process. Several processes and sharded weights are in tests/slow."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import ENVIRONMENT, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_details import train_ppo
from rlhf_details.plumbing.machine import engines


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_what_is_held_in_bf16_is_smaller_and_gives_the_same_numbers(tied, monkeypatch):
    """Autocast would round the weights of linear layers in each call, and nothing else: no norm and no embedding."""
    config = tiny_config(tie_word_embeddings=tied, num_labels=1, initializer_range=0.2)
    policy = train_ppo.Policy(AutoModelForCausalLM.from_config(config), 0.7)
    policy.critic, trained = torch.nn.Linear(32, 1), torch.nn.Linear(4, 4)
    reward = train_ppo.Reward(AutoModelForSequenceClassification.from_config(config))
    tokens = torch.arange(12).reshape(2, 6)
    inputs = tokens, tokens >= 0, torch.arange(6).expand(2, 6)
    monkeypatch.setattr(engines, "precision", lambda accelerator: "bf16")

    def numbers():
        """What policy and reward model compute, and the bytes of their weights."""
        with torch.autocast("cpu", torch.bfloat16):
            outputs = policy(*inputs, torch.arange(6)), reward(*inputs, torch.full((2, 1), 5))
        return outputs, [sum({p.data_ptr(): p.nbytes for p in m.model.parameters()}.values()) for m in (policy, reward)]

    before, sizes = numbers()
    args, optimizer = SimpleNamespace(offload_frozen=False), torch.optim.AdamW(trained.parameters())
    engines.prepare(args, Accelerator(), trained, optimizer, policy, reward)
    after, smaller = numbers()
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    assert after[0].dtype == torch.float32 and all(x < 0.8 * y for x, y in zip(smaller, sizes, strict=True))


NO_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.parametrize("kind", ["FSDP", pytest.param("DEEPSPEED", marks=NO_DEEPSPEED)])
def test_an_engine_that_accelerate_did_not_start_is_named(tmp_path, kind):
    """On CPUs it starts neither of them, whatever the launch file says."""
    page = tmp_path / "page.py"
    page.write_text("from rlhf_details.plumbing.machine import engines\nengines.join()\n")
    options = dict(env=os.environ | ENVIRONMENT | {f"ACCELERATE_USE_{kind}": "true"}, capture_output=True, text=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([sys.executable, *launcher, page], **options)
    line = f"the launch file asks for {kind}, which accelerate starts on several GPUs alone; "
    line += "this is 2 processes (DDP) in fp32"
    assert done.stdout.splitlines() == [line], done.stdout + done.stderr
