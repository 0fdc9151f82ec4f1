"""speed.py: what it counts as work, that it compares equal work only, and what its command line measures and prints."""

import json
import os
import subprocess
import sys

import pytest
import speed
import speed_work
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

PROGRAM = speed.ROOT / "benchmark" / "speed.py"


def small_config():
    shape = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=50)
    return GPTNeoXConfig(**shape, attn_implementation="eager")


def test_forward_flops_are_those_that_torch_counts():
    """A prompt of 7 and a response of 5 tokens: linear layers and head exactly, and attention less what is masked.

    Eager attention multiplies all L^2 pairs, half of them to be masked. We count the L (L + 1) / 2 that are asked for.
    """
    config, P, R = small_config(), 7, 5
    model, L = GPTNeoXForCausalLM(config), P + R
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(L).unsqueeze(0), logits_to_keep=torch.arange(P - 1, L - 1))
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    # The blocks' layers have biases, and the head has none.
    blocks, eager_attention, head = (counts[f"aten.{op}"] for op in ("addmm", "bmm", "mm"))
    linear, attention = speed_work.forward_flops(config, [P], [R])
    assert linear == blocks
    angles = (0, 2 * L)  # of the rotary embedding, which older transformers make with a matrix product as well
    assert attention in [(eager_attention - a) * (L + 1) / 2 / L for a in angles]
    work = speed_work.work_flops(config, [P], [R])
    assert work["rollout"] == linear + attention + head
    assert work["scores"] == 2 * (linear + attention) + head + 2 * config.hidden_size
    assert work["optimise"] == 3 * work["rollout"]


def test_work_flops_share_prompts_and_count_passes_and_critics():
    config = small_config()
    one, several = (speed_work.work_flops(config, [9], [4] * 4, epochs=n) for n in (1, 3))
    assert several["optimise"] == 3 * one["optimise"]
    assert several["scores"] == one["scores"] + one["rollout"]  # the ratio's old log-probs
    single = speed_work.work_flops(config, [9] * 4, [4] * 4)  # three prompts more in a forward
    assert single["rollout"] - one["rollout"] == sum(speed_work.forward_flops(config, [9] * 3, [0] * 3))
    ppo = speed_work.work_flops(config, [9] * 4, [4] * 4, "ppo")
    critic = sum(speed_work.forward_flops(config, [9] * 4, [4] * 4)) + 2 * config.hidden_size * 16
    assert ppo["scores"] - single["scores"] == critic and ppo["optimise"] - single["optimise"] == 3 * critic


@pytest.mark.parametrize("other", [{"episodes": 7}, {"response_tokens": 50}, {"optimizer_steps": 4}])
def test_other_work_is_refused(other):
    """A record in which one update did something else fails, whatever it is."""
    work = speed.Compare(size="0.9m", batch_size=8, rloo_k=4, response_length=8, updates=1)
    done = {"episodes": 8, "prompts": 2, "completions_a_prompt": [4], "response_tokens": 63, "optimizer_steps": 1}
    speed_work.check_work("ours", {"updates": [done, done]}, work, speed_work.model_config(work))
    for updates in ([done, done | other], [done]):
        with pytest.raises(ValueError):
            speed_work.check_work("ours", {"updates": updates}, work, speed_work.model_config(work))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["rloo", "ppo"])
def test_compare_from_the_command_line(tmp_path, algorithm):
    """Ours at a tiny size, and with a flag: the table and the JSON say the same, and the work was done."""
    work = (
        "--size 0.9m --prompts 4 8 --response_length 4 --batch_size 8 --updates 1 --alternations 1 --threads 1".split()
    )
    work += ["--algorithm", algorithm, "--work_dir", str(tmp_path / "work"), "--output", str(tmp_path / "table")]
    command = [sys.executable, PROGRAM, "compare", *work, "--against", "--variants", "small:--micro_batch_size 4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    data = json.loads((tmp_path / "table.json").read_text())
    assert list(data["runs"]) == ["ours", "ours, small"] and not data["errors"]
    _, counted = data["runs"]["ours"][0]["updates"]
    assert counted["episodes"] == 8 and counted["optimizer_steps"] == (1 if algorithm == "rloo" else 4)
    assert 0 < counted["rollout"] + counted["scores"] + counted["optimise"] <= 1.01 * counted["update"]
    row = next(line for line in result.stdout.splitlines() if line.startswith("| ours |"))
    assert f"| {8 / counted['update']:.2f} " in row and row in (tmp_path / "table.md").read_text()
    assert 1e8 < data["runs"]["ours"][0]["loaded"] <= data["runs"]["ours"][0]["peak"]
