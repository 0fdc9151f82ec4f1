"""
DDP, FSDP2, DeepSpeed ZeRO-2 and ZeRO-3, on two processes: the same curves as one process, really sharded, and one run may go on
under another engine. With VALIDATED_OUT=FILE what passed is appended to FILE, for benchmark/validated.py.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import ROOT, ppo_args, read_metrics, rloo_args, tiny_config
from engine_worker import CONFIGS, launch_environment
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)
from transformers.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_details import toy, train_reward, train_sft

NAMES = {"one": "one process", "ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
NO_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
ENGINES = ["ddp", "fsdp2", pytest.param("zero2", marks=NO_DEEPSPEED), pytest.param("zero3", marks=NO_DEEPSPEED)]
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)


def save_models(folder):
    """Random pairs of a policy and a reward model of several architectures, in folder/<architecture>/."""
    tokenizer = toy.tokenizer()
    ids = dict(
        vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    configs = {
        "gpt_neox": tiny_config(initializer_range=0.2),
        "gpt2": GPT2Config(n_embd=32, n_inner=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2, **ids),
        "llama": LlamaConfig(max_position_embeddings=128, **SIZES, **ids),
        "qwen2": Qwen2Config(max_position_embeddings=128, tie_word_embeddings=True, num_key_value_heads=2, **SIZES, **ids),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        for kind, model in (("policy", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
            config.num_labels = 1
            model.from_config(config).save_pretrained(folder / name / kind)
            tokenizer.save_pretrained(folder / name / kind)
    return folder


def cases(models):
    """The runs that each engine makes: {name: (script, Args, what engine_worker.py is told besides, layout)}."""
    neox = models / "gpt_neox"
    short = dict(total_episodes=80, num_mini_batches=2, num_ppo_epochs=2, micro_batch_size=3, learning_rate=1e-3)
    pieces = {"patches": {"pieces": 3000}}  # logits of ten tokens at a time
    rows = models / "comparisons.jsonl"
    words = "film cast plot story music acting scene pace".split()
    texts = [
        (f"the {a} was", f" {b} good .", f" {c} bad {a} .")
        for a, b, c in zip(words * 5, words[1:] * 6, words[3:] * 8, strict=False)
    ]
    rows.write_text("".join(json.dumps({"prompt": p, "chosen": c, "rejected": r}) + "\n" for p, c, r in texts))
    reward = dict(dataset=str(rows), eval_dataset=str(rows), sft_model_path=str(neox / "policy"), batch_size=8, micro_batch_size=3)
    reward |= dict(learning_rate=1e-3, response_length=8, normalize_samples=16, overwrite=True)
    sft = dict(dataset=str(models / "sft.jsonl"), eval_dataset=str(models / "sft.jsonl"), base_model=str(neox / "policy"))
    Path(sft["dataset"]).write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c, _ in texts[:31]))
    sft |= dict(batch_size=6, micro_batch_size=2, learning_rate=1e-3, response_length=8, overwrite=True)
    found = {
        "rloo": ("train_rloo", rloo_args(neox, max_grad_norm=0.5, **short), pieces, "packed"),
        "rloo_plain": ("train_rloo", rloo_args(neox, share_prompts=False, **short), {}, "plain"),
        "ppo": ("train_ppo", ppo_args(neox, tf_adam=True, eval_dataset="toy:test", **short), pieces, "plain"),
        "ppo_shared": (
            "train_ppo",
            ppo_args(neox, value_model="shared", ratio_threshold=1.0005, gradient_checkpointing=True, **short),
            pieces,
            "plain",
        ),
        "reward": ("train_reward", train_reward.Args(**reward, normalization="gain_bias", max_grad_norm=0.5), {}, "plain"),
        "sft": ("train_sft", train_sft.Args(**sft), {}, "plain"),
    }
    for name in ("gpt2", "llama", "qwen2"):
        found[f"rloo_{name}"] = ("train_rloo", rloo_args(models / name, **short), pieces, "packed")
    found["ppo_gpt2"] = ("train_ppo", ppo_args(models / "gpt2", **short), {}, "plain")
    bf16 = {"precision": "bf16"}
    found["rloo_bf16"] = ("train_rloo", rloo_args(neox, **short), bf16, "packed")
    found["ppo_bf16"] = ("train_ppo", ppo_args(neox, **short), bf16, "plain")
    found["reward_bf16"] = ("train_reward", train_reward.Args(**reward), bf16, "plain")
    return found


def run_under(engine, specs, folder, processes=2):
    """Runs specs [{"script", "args", ..}] under an engine; [what the processes saw, a list of two] for each."""
    spec, out = folder / f"{engine}.json", folder / f"out_{engine}"
    spec.write_text(json.dumps({"engine": engine, "out": str(out), "runs": specs}))
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launcher, str(ROOT / "tests" / "engine_worker.py"), str(spec)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-4000:]
    return list(zip(*(json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)), strict=True))


def spec_of(case, name, **changes):
    script, args, options, _ = case
    values = dataclasses.asdict(args) | {"run_name": name, "output_dir": f"models/{name}"} | changes
    return {"script": script, "args": values, **options}


def assert_same_curve(a, b, folder, tolerance=1e-4):
    """Equal metrics but for times, relative to 1 or to their size, whichever is larger."""
    a, b = (read_metrics(folder / "runs" / name) for name in (a, b))
    assert len(a) == len(b)
    for row, other in zip(a, b, strict=True):
        assert row.keys() == other.keys()
        for key in row:
            if key != "eps" and not key.startswith("time/"):
                assert other[key] == pytest.approx(row[key], rel=tolerance, abs=tolerance), (key, row["update"])


def assert_same_weights(a, b, folder, tolerance=1e-4):
    a, b = (load_file(folder / "models" / name / "model.safetensors") for name in (a, b))
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == torch.float32
        if key.endswith(("query_key_value.bias", "c_attn.bias", "k_proj.bias")):
            a[key], b[key] = without_keys(key, a[key]), without_keys(key, b[key])
        torch.testing.assert_close(a[key], b[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")


def without_keys(name, bias):
    """The bias of queries and values. That of keys adds the same to all logits of a softmax, so its gradient is rounding alone,
    which Adam scales up where epsilon is as small as RLOO's."""
    if name.endswith("k_proj.bias"):
        return bias[:0]
    by_head = bias.reshape(SIZES["num_attention_heads"] if "query_key_value" in name else 1, 3, -1)  # q, k, v
    return by_head[:, [0, 2]]


def validated(engine, case, architecture):
    """Notes for the README's table that a case has passed."""
    if "VALIDATED_OUT" in os.environ:
        row = [architecture, case[2].get("precision", "fp32"), case[3], NAMES[engine], case[0]]
        with open(os.environ["VALIDATED_OUT"], "a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(folder, cases), all of which have been run in one process."""
    folder = tmp_path_factory.mktemp("engines")
    found = cases(save_models(folder))
    seen = run_under("one", [spec_of(case, f"one_{name}") for name, case in found.items()], folder, processes=1)
    for (name, case), (row,) in zip(found.items(), seen, strict=True):
        assert row["engine"] == "one process" and row["world"] == 1 and row["held"] == row["total"] == row["stepped"]
        assert row["precision"] == case[2].get("precision", "fp32")
        check_first_steps(folder, f"one_{name}", row["precision"])
        validated("one", case, row["architecture"])
    return folder, found


def check_first_steps(folder, name, precision):
    """All numbers are finite; the sampler and the training forward agree."""
    for row in read_metrics(folder / "runs" / name):
        assert all(abs(value) < 1e9 for value in row.values())
        if "val/logprob_gap" in row:
            assert row["val/logprob_gap"] < {"fp32": 1e-4, "bf16": 0.5}[precision]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_follows_one_process_and_holds_its_share(one, engine):
    folder, found = one
    seen = run_under(engine, [spec_of(case, f"{engine}_{name}") for name, case in found.items()], folder)
    for (name, case), ranks in zip(found.items(), seen, strict=True):
        precision = case[2].get("precision", "fp32")
        for row in ranks:
            assert row["engine"] == NAMES[engine] and row["world"] == 2 and row["precision"] == precision
            assert row["dtypes"] == ["torch.float32"]  # the weights, also under bf16, where products are made in it:
            assert row["products"] == [{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]]
            assert row["sharded"] == (engine in ("fsdp2", "zero3"))
            layers = 2 * (1 + (name in ("ppo", "ppo_gpt2", "ppo_bf16")))  # the value model is another transformer
            assert row["groups"] == (1 + layers if engine == "fsdp2" else 0)  # what FSDP2 gathers at a time: each layer, the rest
        held, stepped, total = (sum(row[key] for row in ranks) for key in ("held", "stepped", "total"))
        uneven = 0.01 * total  # a tensor of odd size leaves one process a filler, or the other nothing
        assert held == total if engine in ("ddp", "zero2") else abs(held - total / 2) < uneven
        assert stepped == total if engine == "ddp" else abs(stepped - total / 2) < uneven
        if precision == "fp32":
            assert_same_curve(f"one_{name}", f"{engine}_{name}", folder)
            assert_same_weights(f"one_{name}", f"{engine}_{name}", folder)
        else:  # the batches differ in shape, and bf16 rounds by it
            check_first_steps(folder, f"{engine}_{name}", precision)
        validated(engine, case, ranks[0]["architecture"])


DEEPSPEED_PAIRS = [("fsdp2", "zero3"), ("zero3", "ddp"), ("zero2", "ddp"), ("ddp", "zero2"), ("ddp", "zero3"), ("zero2", "zero2")]
PAIRS = [("fsdp2", "ddp"), ("ddp", "fsdp2"), ("fsdp2", "fsdp2"), *(pytest.param(*p, marks=NO_DEEPSPEED) for p in DEEPSPEED_PAIRS)]


@pytest.mark.slow
@pytest.mark.parametrize("before, after", PAIRS)
def test_a_run_saved_under_one_engine_goes_on_under_another(one, before, after):
    folder, found = one
    names = "ppo", "reward"
    first, second = [], []
    for name in names:
        run_name = f"{before}_{after}_{name}"
        spec = spec_of(found[name], run_name, checkpoint_every=2)
        first.append(spec | {"patches": spec.get("patches", {}) | {"die_after": 3}})
        second.append(spec | {"args": spec["args"] | {"resume": True}})
    assert all(row["died"] for ranks in run_under(before, first, folder) for row in ranks)
    for ranks in run_under(after, second, folder):
        assert all(row["engine"] == NAMES[after] for row in ranks)
    for name in names:
        config = json.loads((folder / "runs" / f"{before}_{after}_{name}" / "config.json").read_text())
        assert config["engine"] == NAMES[after] and config["num_processes"] == 2 and len(config["resumed"]) == 1
        assert_same_curve(f"one_{name}", f"{before}_{after}_{name}", folder)
        assert_same_weights(f"one_{name}", f"{before}_{after}_{name}", folder)


@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_launch_configurations_are_read_by_accelerate(config, monkeypatch):
    environment = launch_environment(config)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    values = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if config == "fsdp2":
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward and not plugin.cpu_ram_efficient_loading
        assert "transformer" in str(plugin.auto_wrap_policy)
    elif config.startswith("zero"):
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == config[-1]
        assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"
        assert values["deepspeed_config"]["gradient_accumulation_steps"] == 1
    else:
        assert "ACCELERATE_USE_FSDP" not in environment and "ACCELERATE_USE_DEEPSPEED" not in environment
    assert (values["num_machines"] > 1) == (config == "multi_node") and (values["num_processes"] > 1) == (config != "one_gpu")
