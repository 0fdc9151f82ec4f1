"""The model card, and what --push_to_hub sends to a stand-in for the Hub. What fails there loses nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ENVIRONMENT, fake_hub, put_into_cache, read_metrics, run_rloo, without_times
from huggingface_hub import constants
from short_runs import CASES, arguments, start

from rlhf_details import train_rloo
from rlhf_details.plumbing.inputs import models


@pytest.fixture
def server(monkeypatch):
    return fake_hub(monkeypatch)


@pytest.fixture
def offline_hub(monkeypatch):
    """Repositories are read from a cache in the test's folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "cache")


# ---- models of the Hub -----------------------------------------------------------------------------------------------
def test_a_name_may_end_in_a_revision(tiny, ragged, in_tmp, fails, offline_hub):
    for kind in ("policy", "reward"):
        put_into_cache(f"org/{kind}", tiny / kind), put_into_cache(f"org/{kind}", ragged / kind, "v1")
    for end, folder in (("", tiny), ("@v1", ragged)):
        named = run_rloo(tiny, sft_model_path=f"org/policy{end}", reward_model_path=f"org/reward{end}")
        assert without_times(named) == without_times(run_rloo(folder))
    assert "We couldn't connect to" in fails(run_rloo, tiny, sft_model_path="org/policy@v2")


# ---- the card --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case, held_out", [("rloo", "held_out.jsonl"), ("reward-gain", "comparisons.jsonl")])
def test_every_model_has_a_card_with_data_base_command_and_metrics(tiny, in_tmp, monkeypatch, case, held_out):
    script = CASES[case][0]
    words = ["--exp_name", "my own", "--reward_fn", "/home/me/f.py:f", "--judge_base_url=https://a.b/c/d"]
    monkeypatch.setattr("sys.argv", [f"rlhf_details/{script}.py", *words])
    start(tiny, case, eval_dataset=held_out)
    (_, args), kind = arguments(tiny, case), script.partition("_")[2]
    _, front, body = Path("model/README.md").read_text().split("---\n", 2)
    task = "text-classification" if kind == "reward" else "text-generation"
    # Model and data are on this disk, so the Hub could not link them.
    tags = [kind, "rlhf", "rlhf_details"]
    assert yaml.safe_load(front) == dict(library_name="transformers", pipeline_tag=task, tags=tags)
    told = f"python rlhf_details/{script}.py --exp_name 'my own' --reward_fn f.py:f --judge_base_url=https://a.b/c/d"
    about = json.loads(Path("runs/run/config.json").read_text())
    facts = (
        f"```\n{told}\n```",
        f"`{Path(args.dataset).name}`",
        f"from `{Path(args.sft_model_path).name}`",
        about["commit"],
        "runs/run",
    )
    assert all(fact in body for fact in (*facts, f"torch {torch.__version__}", "arXiv "))
    assert "/tmp" not in body and str(Path.home()) not in body and ("reward_bias" in body) == (kind == "reward")
    exec(re.search(r"```python\n(.*?)```", body, re.S)[1], loaded := {})
    assert loaded["model"].config.model_type == "gpt_neox" and loaded["tokenizer"].eos_token
    *_, last = metrics = read_metrics("runs/run")
    first = next(row for row in metrics if any(name.startswith("eval/") for name in row))
    before = {name: f"{x:.6g}" for name, x in first.items() if name.startswith("eval/")}
    shown = {
        (name, before.get(name, ""), f"{last[name]:.6g}") for name in last if not name.startswith(("time/", "health/"))
    }
    assert {*re.findall(r"^\| `(.*)` \| (.*) \| (.*) \|$", body, re.M)} == shown


@pytest.mark.parametrize("launcher", ["python", "accelerate launch --cpu --num_processes 2", "torchrun --standalone"])
def test_the_command_is_that_which_was_typed(in_tmp, launcher):
    code = "from rlhf_details.plumbing.outputs import hub; open('found', 'w').write(hub.command())"
    Path("page.py").write_text(code)
    start, *words = f"{launcher} page.py --exp_name".split()
    folder = Path(sys.executable).parent
    subprocess.run([folder / start, *words, "my own"], check=True, env=os.environ | ENVIRONMENT, capture_output=True)
    assert Path("found").read_text() == f"{launcher} page.py --exp_name 'my own'"


# ---- the Hub ---------------------------------------------------------------------------------------------------------
def test_the_model_and_its_adapters_are_pushed_as_they_are_on_disk(tiny, in_tmp, server, offline_hub, capsys):
    """The adapters alone, as another tool pushes them, are then a policy to start from as well."""
    pytest.importorskip("peft")
    start(tiny, "rloo", push_to_hub=True, lora_rank=2, learning_rate=0.01)
    sent, out = dict(server.files["someone/model"]), Path("model")
    assert "pushed to someone/model" in capsys.readouterr().out
    assert sent == {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {"model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= sent.keys()
    assert json.loads(Path("runs/run/config.json").read_text())["hub"] == "someone/model"
    put_into_cache("someone/adapters", out / "adapter", "v1")
    absent = Path(constants.HF_HUB_CACHE, "models--someone--adapters", ".no_exist", "v1")
    absent.mkdir(parents=True), (absent / "config.json").touch()  # as a download leaves it
    args = train_rloo.Args()
    here, there = (models.load_policy(path, "--sft_model_path", args) for path in (out, "someone/adapters@v1"))
    assert all(p.requires_grad for p in there.parameters())
    torch.testing.assert_close(here.state_dict(), there.state_dict(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", ["rloo", "reward-gain"])
def test_what_an_earlier_run_has_pushed_and_this_one_does_not_write_is_deleted_and_others_files_stay(
    tiny, in_tmp, server, case
):
    old = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    old += ["adapter/adapter_model.safetensors", "adapter/tokenizer.json", "chat_template.jinja"]
    old += ["generation_config.json", "additional_chat_templates/tools.jinja"]
    mine = {".gitattributes", "LICENSE", "figures/curves.png", "onnx/model.safetensors", "model.gguf"}
    server.files["someone/model"] = dict.fromkeys([*old, *mine], b"old")
    start(tiny, case, push_to_hub=True)
    sent = {name: x for name, x in server.files["someone/model"].items() if name not in mine}
    here = Path("model")
    assert sent == {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert mine <= server.files["someone/model"].keys()


def test_a_push_that_fails_loses_nothing_and_says_how_to_repeat_it(tiny, in_tmp, server, capsys):
    server.api.upload_folder.side_effect = OSError("403 You have no write access\nmore")
    start(tiny, "rloo", output_dir="models/my out", push_to_hub=True, hub_model_id="it")
    error = capsys.readouterr().err
    assert "error: --push_to_hub: 403 You have no write access more; " in error
    assert "hf upload someone/it 'models/my out' --delete 'model.safetensors*'" in error
    assert (Path("models/my out") / "model.safetensors").exists()


def test_a_push_that_cannot_succeed_is_refused_before_anything_is_trained(tiny, in_tmp, server, fails):
    server.api.create_repo.side_effect = OSError("403 You have no write access")
    line = fails(start, tiny, "rloo", push_to_hub=True)
    assert line.startswith("error: --push_to_hub: the repository model cannot be opened (403")
    assert not Path("runs").exists()  # so that the same command may be given again


def test_nothing_speaks_to_the_hub_unless_told(tiny, in_tmp, server, monkeypatch):
    tried = []
    monkeypatch.setattr("socket.socket.connect", lambda *address: tried.append(address))
    start(tiny, "rloo")
    assert not tried and not server.api.mock_calls
