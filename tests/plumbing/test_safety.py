"""Nothing that comes with a model or a data set is unpickled, and its code runs only where the user asks for that."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import edit_json, page_args
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_details.plumbing.inputs import data_files, models


class Trap:
    """Unpickling it leaves a file behind."""

    def __reduce__(self):
        return (Path.touch, (Path("unpickled").absolute(),))


def test_pickled_weights_are_not_read(tiny, in_tmp, fails):
    folder, args = shutil.copytree(tiny / "policy", in_tmp / "model"), page_args("train_rloo", tiny)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"trap": Trap()}, folder / "pytorch_model.bin")
    line = fails(models.load_policy, str(folder), "--sft_model_path", args)
    assert "model.safetensors" in line and not Path("unpickled").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert Path("unpickled").exists()  # The trap works.


@pytest.mark.parametrize("spec", ["rows", "rows:train.pkl"])
def test_pickled_data_sets_are_not_read(in_tmp, fails, spec):
    Path("rows").mkdir()
    Path("rows/train.pkl").write_bytes(pickle.dumps([Trap()]))
    assert spec in fails(data_files.read_rows, spec, "--dataset") and not Path("unpickled").exists()


def test_code_that_comes_with_a_model_runs_only_where_it_is_asked_for(tiny, in_tmp, fails, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(in_tmp / "cache"))
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("with_code")
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    edit_json("with_code/config.json", model_type="own", architectures=["Own"], auto_map=auto_map)
    Path("with_code/own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(in_tmp / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    line = fails(models.load_policy, "with_code", "--sft_model_path", page_args("train_rloo", tiny))
    assert "--sft_model_path with_code" in line and not Path("ran").exists()
    args = page_args("train_rloo", tiny, trust_remote_code=True)
    assert type(models.load_policy("with_code", "--sft_model_path", args)).__name__ == "Own" and Path("ran").exists()
