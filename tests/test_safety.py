"""No foreign code runs, nothing is unpickled, and no secret of the environment reaches what a run leaves behind."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch, ppo_args, rloo_args
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_details import data, train_ppo, train_rloo, utils


class Trap:
    """Unpickling it leaves a file behind."""

    def __reduce__(self):
        return (Path.touch, (Path("unpickled").absolute(),))


def refused(capsys, function, *args, **kwargs):
    """The one line of a refusal."""
    with pytest.raises(SystemExit) as end:
        function(*args, **kwargs)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1, line
    return line


@pytest.mark.parametrize("load", [utils.load_policy, utils.load_reward_model])
def test_pickled_weights_are_not_read(tiny, in_tmp, capsys, load):
    folder = shutil.copytree(tiny / ("policy" if load is utils.load_policy else "reward"), in_tmp / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"trap": Trap()}, folder / "pytorch_model.bin")
    assert "model" in refused(capsys, load, str(folder), "--sft_model_path")
    assert not Path("unpickled").exists()
    pickle.loads(pickle.dumps(Trap()))  # the trap works
    assert Path("unpickled").exists()


@pytest.mark.slow
def test_pickled_data_sets_are_not_read(in_tmp, capsys):
    Path("rows").mkdir()
    Path("rows/train.pkl").write_bytes(pickle.dumps([Trap()]))
    for spec in ("rows", "rows:train.pkl", "rows/train.pkl"):
        refused(capsys, data.read_rows, spec, {"prompt": str})
    assert not Path("unpickled").exists()


@pytest.fixture
def with_code(in_tmp):
    """A policy that brings code of its own, which leaves a file behind when it runs."""
    folder, small = in_tmp / "with_code", dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **small)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "its_own", "architectures": ["Own"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(in_tmp / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'its_own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return str(folder)


def test_code_that_comes_with_a_model_runs_only_where_it_is_asked_for(with_code, in_tmp, capsys, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(in_tmp / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(in_tmp / "cache"))
    refused(capsys, utils.load_policy, with_code, "--sft_model_path")
    assert not Path("ran").exists()
    assert type(utils.load_policy(with_code, "--sft_model_path", trust_remote_code=True)).__name__ == "Own"
    assert Path("ran").exists()


@pytest.mark.parametrize("script, make", [(train_rloo, rloo_args), (train_ppo, ppo_args)])
def test_every_model_is_loaded_with_the_flags_choice(tiny, in_tmp, monkeypatch, script, make):
    asked = []
    for name in ("load_policy", "load_reward_model", "load_tokenizer", "find_own_tokenizer"):
        load = getattr(utils, name)
        given = lambda *args, load=load, **kwargs: asked.append(kwargs.get("trust_remote_code", args[-1])) or load(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(utils, name, given)
    script.main(make(tiny, total_episodes=16, trust_remote_code=True))
    assert len(asked) == 5 and all(choice is True for choice in asked)


SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "deadbeef",
    "HF_TOKEN": "hf_SECRETSECRETSECRET",
    "OPENAI_API_KEY": "sk-SECRETSECRET",
}


@pytest.mark.slow
def test_no_key_of_the_environment_is_written_down(tiny, in_tmp):
    flags = ["--sft_model_path", tiny / "policy", "--reward_model_path", tiny / "reward", "--dataset", "toy", "--track"]
    flags += ["--total_episodes", 16, "--batch_size", 16, "--response_length", 8, "--run_name", "run", "--output_dir", "model"]
    result = launch("train_rloo.py", flags, cwd=in_tmp, WANDB_MODE="offline", **SECRETS)
    assert result.returncode == 0, result.stderr[-2000:]
    written = [path for path in in_tmp.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written) and len(written) > 10
    for text in [result.stdout.encode(), result.stderr.encode(), *(path.read_bytes() for path in written)]:
        assert not any(secret.encode() in text for secret in SECRETS.values())


def test_checkpoints_hold_tensors_and_json_alone(tiny, in_tmp):
    train_ppo.main(ppo_args(tiny, checkpoint_every=1))
    files = {path.suffix for path in Path("runs/run/checkpoints").rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json"}


def test_nothing_in_the_package_unpickles_or_runs_text():
    for path in (ROOT / "rlhf_details").glob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bpickle\b|torch\.load\(|\beval\(\s*[\"'a-z_]*args|\bexec\(|shell=True|os\.system", text), path
