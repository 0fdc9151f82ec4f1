"""LoRA: what is trained, what the reference is, what is saved and what comes back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import launch, ppo_args, read_metrics, rloo_args, tiny_config
from safetensors.torch import load_file
from test_rloo import assert_same_curves, without_times
from test_stages import reward_args, sft_args, write_rows
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXForCausalLM, LlamaConfig

from rlhf_details import engines, lora, toy, train_ppo, train_reward, train_rloo, train_sft, utils

peft = pytest.importorskip("peft")
MAINS = pytest.mark.parametrize("script, args", [(train_rloo, rloo_args), (train_ppo, ppo_args)], ids=["rloo", "ppo"])
SMALL = dict(vocab_size=64, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "gpt_neox": tiny_config(initializer_range=0.2),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, initializer_range=0.2, **SMALL),
    "llama": LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2, **SMALL
    ),
}


def logits_of(folder_or_model, tokens=None):
    """fp32 logits of a folder's model, as the scripts load it."""
    model = utils.load_policy(folder_or_model, "--sft_model_path") if isinstance(folder_or_model, str) else folder_or_model
    tokens = torch.arange(24).reshape(2, 12) if tokens is None else tokens
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.fixture(params=CONFIGS)
def base(request, in_tmp):
    """A saved model, its folder's name."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained("base")
    toy.tokenizer().save_pretrained("base")
    return "base"


def disturb(model):
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def test_adapters_off_is_exactly_the_base_and_on_again_afterwards(base):
    expected, model = logits_of(base), lora.add_adapters(utils.load_policy(base, ""), 4)
    assert torch.equal(logits_of(model), expected)  # B is zero at first
    disturb(model)
    reference = lora.without_adapters(train_rloo.Policy(model, 1.0))
    adapted = logits_of(model)
    assert (adapted - expected).abs().max() > 0.1
    tokens = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    inputs = tokens, mask, utils.positions_from_mask(mask), slice(None)
    with torch.no_grad():
        assert torch.equal(reference(*inputs), expected) and torch.equal(train_rloo.Policy(model, 1.0)(*inputs), adapted)
    with pytest.raises(IndexError):
        reference(tokens + 10**6, *inputs[1:])
    assert torch.equal(logits_of(model), adapted)  # also after an error
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_saved_reloaded_and_merged_logits_are_equal(base):
    model = disturb(lora.add_adapters(utils.load_policy(base, ""), 4))
    expected = logits_of(model)
    lora.save_adapter(model, "adapter", base)
    for again in (
        logits_of("adapter"),  # as our scripts load it
        logits_of(AutoModelForCausalLM.from_pretrained("adapter")),  # as transformers does
        logits_of(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapter")),  # as peft does
        logits_of(lora.merge(model)),
    ):
        assert (again - expected).abs().max() < 1e-5
    assert model.state_dict().keys() == utils.load_policy(base, "").state_dict().keys()
    assert all(p.requires_grad for p in utils.load_policy("adapter", "").parameters())


@MAINS
@pytest.mark.parametrize("merge", [False, True], ids=["adapters", "merged"])
def test_a_run_trains_adapters_alone_and_saves_them(tiny, in_tmp, script, args, merge):
    script.main(args(tiny, lora_rank=4, lora_merge=merge, learning_rate=1e-2, output_dir="out", num_ppo_epochs=2))
    rows = read_metrics("runs/run")
    assert abs(rows[0]["objective/kl"]) < 1e-4 and abs(rows[-1]["objective/kl"]) > 1e-3  # the reference has no adapters
    assert abs(rows[0]["val/first_ratio"] - 1) < 1e-4
    adapter, before = Path("out/adapter" if merge else "out"), logits_of(str(tiny / "policy"))
    assert (adapter / "adapter_config.json").exists() and (adapter / "adapter_model.safetensors").exists()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny / "policy")
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (4, 8, 0.0)
    after = logits_of(str(adapter))
    assert (after - before).abs().max() > 1e-2
    assert (Path("out/model.safetensors").exists(), Path("out/config.json").exists()) == (merge, merge)
    if merge:
        assert (logits_of("out") - after).abs().max() < 1e-5
    again = args(tiny, lora_rank=4, lora_merge=merge, learning_rate=1e-2, output_dir="out", num_ppo_epochs=2)
    again.overwrite, again.run_name = False, None
    utils.check_output_dir(again)  # a run may be repeated


@MAINS
def test_gradient_checkpointing_and_micro_batches_change_nothing(tiny, in_tmp, script, args):
    script.main(args(tiny, lora_rank=4))
    plain = read_metrics("runs/run")
    script.main(args(tiny, lora_rank=4, gradient_checkpointing=True, micro_batch_size=4, rollout_micro_batch_size=4))
    assert_same_curves(plain, read_metrics("runs/run"))


@MAINS
def test_a_resumed_run_is_the_same_and_its_checkpoints_hold_the_adapters_alone(tiny, in_tmp, script, args):
    options = dict(lora_rank=4, checkpoint_every=1)
    script.main(args(tiny, **options, run_name="whole", output_dir="whole"))
    weights = load_file("runs/whole/checkpoints/000003/weights.safetensors")
    assert all("lora_" in name or "score" in name for name in weights) and len(weights) > 8
    shutil.copytree("runs/whole", "runs/run")
    shutil.rmtree("runs/run/checkpoints/000003")
    script.main(args(tiny, **options, resume=True))
    assert without_times(read_metrics("runs/run")) == without_times(read_metrics("runs/whole"))
    name = "adapter_model.safetensors"
    assert Path(f"whole/{name}").read_bytes() == (Path(args(tiny).output_dir) / name).read_bytes()


@pytest.mark.slow
def test_two_processes_train_the_same_adapters(tiny, in_tmp):
    train_rloo.main(rloo_args(tiny, lora_rank=4))
    flags = [f"--{name}={value}" for name, value in dict(
        sft_model_path=tiny / "policy", reward_model_path=tiny / "reward", total_episodes=48, batch_size=16, response_length=8,
        learning_rate=1e-3, num_sample_generations=0, run_name="two", output_dir="two", lora_rank=4, missing_eos_penalty=1.0,
        eval_dataset=None, kl_coef=0.03, micro_batch_size=16, rollout_micro_batch_size=64, take=256,
    ).items()]  # fmt: skip
    done = launch("train_rloo.py", flags, 2, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same_curves(read_metrics("runs/run"), read_metrics("runs/two"))


def test_ppos_critic_keeps_its_whole_head_and_both_learn(tiny, in_tmp):
    train_ppo.main(ppo_args(tiny, lora_rank=4, checkpoint_every=1, learning_rate=1e-2))
    first, last = (load_file(f"runs/run/checkpoints/00000{i}/weights.safetensors") for i in (2, 3))
    assert any("critic" in name and "lora_" in name for name in first) and "critic.model.score.weight" in first
    assert {name for name in first if not torch.equal(first[name], last[name])} == first.keys()


def test_a_policy_that_starts_from_adapters_has_them_in_its_reference(tiny, in_tmp):
    """The reference is the model that the run starts from, and not the base below it."""
    write_rows("rows.jsonl", toy.rows("sft", "train")[:32])
    train_sft.main(sft_args(base_model=str(tiny / "policy"), lora_rank=4, output_dir="sft", learning_rate=1e-2))
    assert (Path("sft") / "adapter_config.json").exists()
    start, base = logits_of("sft"), logits_of(str(tiny / "policy"))
    assert (start - base).abs().max() > 1e-2
    train_rloo.main(rloo_args(tiny, sft_model_path="sft", lora_rank=4, lora_merge=True, output_dir="out", learning_rate=0.0))
    assert all(abs(row["objective/kl"]) < 1e-4 for row in read_metrics("runs/run"))
    assert (logits_of("out") - start).abs().max() < 1e-5
    trunk = utils.load_reward_model("sft", "--sft_model_path", True).eval().base_model
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        states = utils.load_policy("sft", "").eval().base_model(tokens).last_hidden_state
        assert torch.equal(trunk(tokens).last_hidden_state, states)  # a reward model starts from them as well


def test_a_reward_model_keeps_its_head_and_is_saved_whole(tiny, in_tmp):
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "we ."} for r in toy.rows("sft", "train")[:32]]
    write_rows("rows.jsonl", pairs)
    options = dict(
        lora_rank=4, eval_dataset="rows.jsonl", learning_rate=1e-2, num_train_epochs=3, sft_model_path=str(tiny / "policy")
    )
    metrics = train_reward.main(reward_args(tiny, **options))
    folder = reward_args(tiny, **options).output_dir
    base, saved = load_file(tiny / "policy" / "model.safetensors"), load_file(Path(folder) / "model.safetensors")
    changed = {name for name in base.keys() & saved.keys() if not torch.equal(base[name], saved[name])}
    assert changed and all(name.endswith("weight") and ("attention" in name or "mlp" in name) for name in changed)
    assert not any("lora" in name for name in saved) and "score.weight" in saved
    model = utils.load_reward_model(folder, "--reward_model_path").eval()
    tokenizer, correct = utils.load_tokenizer(folder, ""), 0
    for pair in pairs:
        text = [f"{pair['prompt']} {pair[kind]}" for kind in ("chosen", "rejected")]
        tokens = [torch.tensor([tokenizer(t).input_ids + [tokenizer.eos_token_id]]) for t in text]
        with torch.no_grad():
            chosen, rejected = (model(t).logits.item() for t in tokens)
        correct += chosen > rejected
    assert metrics["eval/rm/accuracy"] == correct / len(pairs) > 0.9


def test_what_lora_is_not_for_is_refused(tiny, in_tmp, monkeypatch, capsys):
    def line(function, *args):
        with pytest.raises(SystemExit) as end:
            function(*args)
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "--lora_merge" in line(train_rloo.check, rloo_args(tiny, lora_merge=True))
    assert "scratch" in line(train_sft.check, sft_args(base_model="scratch", lora_rank=2))
    assert "--lora_rank 0" in line(train_ppo.check, ppo_args(tiny, lora_rank=0))
    with monkeypatch.context() as patch:
        patch.setattr(engines, "name", lambda accelerator: "FSDP2")
        for main, args in ((train_rloo.main, rloo_args), (train_ppo.main, ppo_args)):
            assert "--lora_rank: for one process or DDP, not for FSDP2" in line(main, args(tiny, lora_rank=2))
    base = "a/folder/base"  # its slashes make it no name on the Hub, which would be asked for long
    GPTNeoXForCausalLM(tiny_config()).save_pretrained(base)
    lora.save_adapter(lora.add_adapters(utils.load_policy(base, ""), 2), "adapter", base)
    with monkeypatch.context() as patch:
        patch.setattr(lora.importlib.util, "find_spec", lambda name: None)
        assert "pip install" in line(train_rloo.check, rloo_args(tiny, lora_rank=2))
        assert "pip install" in line(utils.load_policy, "adapter", "--sft_model_path")
    shutil.rmtree("a")
    assert "--sft_model_path adapter" in line(utils.load_policy, "adapter", "--sft_model_path")
