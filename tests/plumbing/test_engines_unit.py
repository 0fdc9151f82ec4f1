"""What the engines' module does on one process. Several processes and sharded weights are in tests/slow."""

import json
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import ppo_args, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_details import evaluate, train_ppo
from rlhf_details.plumbing import checkpoint, engines


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.model(x)


@pytest.fixture
def trained():
    """(accelerator, module, optimizer): three layers under one process, after two optimiser steps."""
    torch.manual_seed(0)
    accelerator, module = Accelerator(), torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    module[2].weight = module[0].weight  # tied, as many models' embeddings and heads are
    module[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
    module, optimizer = engines.prepare(SimpleNamespace(), accelerator, module, optimizer)
    for _ in range(2):
        accelerator.backward(module(torch.randn(5, 4)).square().sum())
        engines.step(accelerator, module, optimizer, None, None, "")
    return accelerator, module, optimizer


def test_a_run_that_goes_on_has_the_day_on_which_it_began(in_tmp):
    """A chat template may write the day, and the prompts of a resumed run must be those of its start."""
    today = str(date.today())
    for name, config in (("old", {}), ("run", {"args": {"template_date": "2024-02-03"}})):
        Path(f"runs/{name}").mkdir(parents=True)
        Path(f"runs/{name}/config.json").write_text(json.dumps(config))
    for flags, day in ((dict(), today), (dict(run_name="run"), today), (dict(run_name="old", resume=True), today),
                       (dict(run_name="run", resume=True), "2024-02-03")):  # fmt: skip
        assert engines.first_day(train_ppo.Args(**flags)) == day
    Path("runs/run").rename("runs/toy__train_ppo__1__20240203-000000")
    assert engines.first_day(train_ppo.Args(resume=True)) == "2024-02-03"


def add_gradient(module):
    """Leaves a gradient in a module."""
    module(torch.randn(5, 4, generator=torch.Generator().manual_seed(1))).square().sum().backward()


def test_a_checkpoint_holds_what_is_trained_and_brings_it_back(trained, tmp_path):
    accelerator, module, optimizer = trained
    names = {"0.weight", "0.bias", "1.weight", "2.bias"}  # tied weights once, and none that is not trained
    assert engines.full_weights(accelerator, module).keys() == names | {"1.bias"}
    checkpoint.save_policy(accelerator, module, optimizer, tmp_path)
    saved = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert saved["optimizer"]["state"].keys() == names and "1.bias" not in saved["weights"]

    other = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    other[2].weight = other[0].weight
    other[1].bias = torch.nn.Parameter(module[1].bias.clone(), requires_grad=False)
    other_optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.1)
    other, other_optimizer = engines.prepare(SimpleNamespace(), accelerator, other, other_optimizer)
    checkpoint.load_policy(accelerator, other, other_optimizer, tmp_path)
    for m, o in ((module, optimizer), (other, other_optimizer)):
        add_gradient(m)
        engines.step(accelerator, m, o, None, None, "")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("module", [train_ppo, evaluate])
def test_deepspeed_that_is_asked_for_and_missing_is_one_line(module, in_tmp, tiny, monkeypatch, fails):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    args = ppo_args(tiny) if module is train_ppo else evaluate.Args(policy_path=(str(tiny / "policy"),))
    line = fails(module.main, args)
    assert line == (
        "error: ACCELERATE_USE_DEEPSPEED=true: needs the package deepspeed: "
        'pip install -c constraints.txt -e ".[deepspeed]"\n'
    )


def test_several_processes_without_an_accelerator_run_on_the_cpu(monkeypatch, capsys):
    """accelerate would take each of them for a run of its own. Where it still does, one line says so."""
    monkeypatch.setattr(engines.os, "environ", {"WORLD_SIZE": "2"})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    seen = []

    def make(num_processes):
        def accelerator(**options):
            seen.append(engines.os.environ["ACCELERATE_USE_CPU"])
            return SimpleNamespace(num_processes=num_processes, mixed_precision="no")

        monkeypatch.setattr(engines, "Accelerator", accelerator)

    make(2)
    assert engines.join().num_processes == 2 and seen == ["true"]
    make(1)
    with pytest.raises(SystemExit) as end:
        engines.join()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "2 processes, but accelerate sees 1" in said and "ACCELERATE_USE_CPU" in said


def test_fp16_on_a_cpu_is_said_to_be_fp32(monkeypatch, capsys):
    for precision, lines in (("no", 0), ("bf16", 0), ("fp16", 1)):
        accelerator = SimpleNamespace(num_processes=1, mixed_precision=precision, device=torch.device("cpu"))
        monkeypatch.setattr(engines, "Accelerator", lambda result=accelerator: result)
        engines.join()
        said = capsys.readouterr().out
        assert said.count("\n") == lines and ("computed in fp32" in said) == bool(lines)


def test_frozen_models_wait_on_the_cpu_while_the_policy_samples_and_trains(monkeypatch):
    accelerator, places = Accelerator(), []
    policy, frozen = (Holder() for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters())
    monkeypatch.setattr(frozen, "to", lambda place: places.append(str(place)) or frozen, raising=False)
    args = SimpleNamespace(offload_frozen=True)
    policy, optimizer = engines.prepare(args, accelerator, policy, optimizer, frozen, None)
    device, x = str(accelerator.device), torch.randn(2, 4)
    places.clear()
    assert engines.gathered(policy) is policy and places == ["cpu"]
    frozen(x), frozen(x)
    with engines.accumulate(accelerator, policy, is_last=True):
        assert places == ["cpu", device, device, "cpu"]


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_under_bf16_frozen_models_are_half_as_large_and_give_the_same_numbers(tied, monkeypatch):
    config = tiny_config(tie_word_embeddings=tied, num_labels=1, initializer_range=0.2)
    frozen = [
        train_ppo.Policy(AutoModelForCausalLM.from_config(config), 0.7),
        train_ppo.Reward(AutoModelForSequenceClassification.from_config(config)),
    ]
    policy, accelerator = Holder(), Accelerator()
    inputs = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.bool), torch.arange(6).expand(2, 6)
    read = torch.arange(6), torch.tensor([[5], [5]])
    found = []
    for precision in ("fp32", "bf16"):
        monkeypatch.setattr(engines, "precision", lambda accelerator, precision=precision: precision)
        engines.prepare(
            SimpleNamespace(offload_frozen=False), accelerator, policy, torch.optim.AdamW(policy.parameters()), *frozen
        )
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [module(*inputs, index) for module, index in zip(frozen, read, strict=True)]
        found.append((outputs, [sum(p.nbytes for p in module.parameters()) for module in frozen]))
    (before, sizes), (after, smaller) = found
    assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(before, after, strict=True))
    assert all(x < 0.8 * y for x, y in zip(smaller, sizes, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_copy_computes_the_same_logits_in_bf16_weights(tied, monkeypatch):
    """Autocast would round the weights of linear layers in each call, and nothing else."""
    model = AutoModelForCausalLM.from_config(tiny_config(tie_word_embeddings=tied))
    policy = train_ppo.Policy(model, 0.7, torch.nn.Linear(32, 1)).eval()
    accelerator = Accelerator()
    monkeypatch.setattr(engines, "shares_out", lambda accelerator: True)
    policy.template = [engines.template(policy)]
    inputs = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.bool), torch.arange(6).expand(2, 6)
    for precision in ("fp32", "bf16"):
        monkeypatch.setattr(engines, "precision", lambda accelerator, precision=precision: precision)
        copy = engines.gather(accelerator, policy)
        assert copy.critic is None and policy.critic is not None  # It does not sample.
        kinds = {name: p.dtype for name, p in copy.named_parameters()}
        rounded = {name for name, kind in kinds.items() if kind == torch.bfloat16}
        assert bool(rounded) == (precision == "bf16") and not any("norm" in n or "embed_in" in n for n in rounded)
        head = copy.model.get_output_embeddings().weight.dtype
        assert (head == torch.bfloat16) == (precision == "bf16" and not tied)  # An embedding stays as it is.
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            ours, theirs = (module(*inputs, torch.arange(6)) for module in (policy, copy))
        assert torch.equal(ours, theirs)
