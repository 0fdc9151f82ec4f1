"""LoRA: what is trained, what the reference is, what is saved and what comes back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    PAGES,
    assert_same_curves,
    page_args,
    ppo_args,
    read_metrics,
    rloo_args,
    run_page,
    without_times,
    word_tokenizer,
)
from short_runs import write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3MoeConfig,
)

from rlhf_details import toy, train_reward, train_rloo, train_sft, utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, models
from rlhf_details.plumbing.machine import engines

peft = pytest.importorskip("peft")
BOTH = pytest.mark.parametrize("page", ["train_rloo", "train_ppo"])
FLAGS = train_rloo.Args()
SMALL = dict(vocab_size=64, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
CONFIGS = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, **SMALL),
    "llama": LlamaConfig(**SIZES, **SMALL),
    # peft adapts the experts of the first kind, which are parameters and no layers, and leaves those of the second.
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **SMALL, **EXPERTS, num_key_value_heads=2, head_dim=16),
    "gpt_oss": GptOssConfig(**SIZES, **SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=4),
}
TOKENS = torch.arange(24).reshape(2, 12)


def load(folder):
    return models.load_policy(str(folder), "--sft_model_path", FLAGS)


def logits_of(model):
    """Logits of a model, or of a folder's model as the scripts load it."""
    model = load(model) if isinstance(model, str | Path) else model
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.fixture(params=CONFIGS)
def base(request, in_tmp):
    """The name of a saved model's folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained("base")
    return "base"


def disturb(model):
    """Gives the adapters a random B in place of 0."""
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


# ---- adapters --------------------------------------------------------------------------------------------------------
def test_adapters_off_is_exactly_the_base_and_saved_reloaded_and_merged_logits_are_equal(base):
    expected, model = logits_of(base), models.add_adapters(load(base), 4)
    assert torch.equal(logits_of(model), expected)  # B is zero at first.
    disturb(model)
    reference, adapted = models.frozen_copy(train_rloo.Policy(model, 1.0)), logits_of(model)
    assert (adapted - expected).abs().max() > 0.1
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    inputs = TOKENS, mask, utils.positions_from_mask(mask), torch.arange(12)
    with torch.no_grad():
        assert torch.equal(reference(*inputs), expected)
        assert torch.equal(train_rloo.Policy(model, 1.0)(*inputs), adapted)
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    models.save_adapter(model, "adapter", base)
    assert json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"] == base
    by_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapter")
    for again in ("adapter", AutoModelForCausalLM.from_pretrained("adapter"), by_peft, models.merge_adapters(model)):
        assert (logits_of(again) - adapted).abs().max() < 1e-5
    assert model.state_dict().keys() == load(base).state_dict().keys()
    assert all(p.requires_grad for p in load("adapter").parameters())


# ---- adapters of other libraries -------------------------------------------------------------------------------------
OTHERS = {
    "embeddings are trained": dict(modules_to_save=["embed_tokens", "lm_head"]),
    "new tokens are trained": dict(trainable_token_indices=[64, 65]),
    "embeddings have adapters": dict(target_modules=["embed_tokens", "q_proj", "lm_head"]),
}


def save_others(kind, head, rows=66, **options):
    """Saves adapters by peft alone, over a base of 64 tokens, for a model of `rows` tokens. Returns that model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained("base")
    model = kind.from_pretrained("base", **head)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model = peft.get_peft_model(model, peft.LoraConfig(**dict(target_modules="all-linear") | options))
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    model.save_pretrained("adapter")
    word_tokenizer(words=" ".join(f"w{i}" for i in range(rows - 4))).save_pretrained("adapter")
    return model.eval()


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@torch.no_grad()
def test_adapters_with_tokens_that_the_base_lacks_are_loaded(in_tmp, options):
    expected, tokens = save_others(AutoModelForCausalLM, {}, task_type="CAUSAL_LM", **options), TOKENS + 42  # to 65
    assert (load("adapter").eval()(tokens).logits - expected(tokens).logits).abs().max() < 1e-5
    trunk = models.load_reward_model("adapter", FLAGS, "--sft_model_path", True).base_model
    states = load("adapter").eval().base_model(tokens).last_hidden_state
    assert torch.equal(trunk.eval()(tokens).last_hidden_state, states)


@torch.no_grad()
def test_adapters_of_a_reward_model_are_merged_with_their_head_and_refused_without_one(in_tmp, fails):
    expected = save_others(AutoModelForSequenceClassification, dict(num_labels=1), task_type="SEQ_CLS")
    model, tokens = models.load_reward_model("adapter", FLAGS).eval(), TOKENS[1:] + 42
    assert (model(tokens).logits - expected(tokens).logits).abs().max() < 1e-5
    save_others(AutoModelForCausalLM, {}, task_type="CAUSAL_LM")
    assert "not a trained reward model" in fails(models.load_reward_model, "adapter", FLAGS)


# ---- runs ------------------------------------------------------------------------------------------------------------
@BOTH
def test_a_resumed_run_is_the_same_and_its_checkpoints_hold_the_adapters_alone(tiny, in_tmp, few_prompts, page):
    """So it is with gradient checkpointing and in small micro-batches, to rounding. A merged model is saved, too."""
    options = dict(lora_rank=4, checkpoint_every=1, learning_rate=1e-2, num_ppo_epochs=2)
    begun, *_, ended = run_page(page, tiny, **options, run_name="whole", output_dir="whole")
    assert abs(begun["objective/kl"]) < 1e-4 < 1e-3 < abs(ended["objective/kl"])  # The reference has no adapters.
    written = json.loads(Path("whole/adapter/adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (4, 8, 0.0)
    assert written["base_model_name_or_path"] == str(tiny / "policy")
    assert (logits_of("whole") - logits_of("whole/adapter")).abs().max() < 1e-5
    cli.check_output_dir(page_args(page, tiny, **options, output_dir="whole", overwrite=False))  # It may be repeated.
    files = [f"runs/whole/checkpoints/00000{i}/policy.pt" for i in (2, 3)]
    first, last = (torch.load(file, weights_only=True)["model_state_dict"] for file in files)
    assert len(first) > 8 and all("lora_" in name or "score" in name for name in first)
    of_critic = {"lora_" in name for name in first if "critic" in name}  # PPO's value model has a whole head as well.
    assert of_critic == ({True, False} if page == "train_ppo" else set())
    assert not any(torch.equal(first[name], last[name]) for name in first)  # So both policy and critic learn.
    shutil.copytree("runs/whole", "runs/run")
    shutil.rmtree("runs/run/checkpoints/000003")
    resumed, rows = run_page(page, tiny, **options, resume=True, output_dir="resumed"), read_metrics("runs/whole")
    assert without_times(resumed) == without_times(rows)
    for name in ("adapter/adapter_model.safetensors", "model.safetensors"):
        assert Path("whole", name).read_bytes() == Path("resumed", name).read_bytes()
    small = dict(gradient_checkpointing=True, micro_batch_size=4, rollout_micro_batch_size=4)
    assert_same_curves(rows, run_page(page, tiny, **options, **small))


def test_a_policy_that_starts_from_adapters_has_them_in_its_reference(tiny, in_tmp):
    """The reference is the model that the run starts from, not the base below it. So is a reward model's trunk."""
    model = disturb(models.add_adapters(load(tiny / "policy"), 4))
    models.save_adapter(model, "sft", tiny / "policy")
    of_base = models.load_tokenizer("sft", "--sft_model_path", FLAGS)  # There is none beside the adapters.
    assert of_base.get_vocab() == toy.tokenizer().get_vocab()
    toy.tokenizer().save_pretrained("sft")
    start = logits_of("sft")
    options = dict(sft_model_path="sft", lora_rank=4, output_dir="out", learning_rate=0.0, total_episodes=16)
    train_rloo.main(rloo_args(tiny, **options))
    assert abs(read_metrics("runs/run")[0]["objective/kl"]) < 1e-4
    assert (logits_of("out") - start).abs().max() < 1e-5
    trunk = models.load_reward_model("sft", FLAGS, "--sft_model_path", True).eval().base_model
    with torch.no_grad():
        expected = load("sft").eval().base_model(TOKENS).last_hidden_state
        assert torch.equal(trunk(TOKENS).last_hidden_state, expected)


def test_a_reward_model_trains_its_whole_head_and_is_saved_merged(tiny, in_tmp):
    pairs = [row | {"chosen": row["completion"], "rejected": "we ."} for row in toy.rows("sft", "train")[:32]]
    args = train_reward.Args(
        dataset=write_rows("rows.jsonl", pairs), eval_dataset="rows.jsonl", sft_model_path=str(tiny / "policy"),
        lora_rank=4, learning_rate=1e-2, num_train_epochs=3, batch_size=8, output_dir="reward", run_name="run",
    )  # fmt: skip
    metrics = train_reward.main(args)["metrics"]
    model = models.load_reward_model("reward", FLAGS).eval()
    assert getattr(model.config, "reward_bias", 0.0) != 0.0  # the shift that normalisation found
    adapted = models.load_reward_model("reward/adapter", FLAGS).eval()  # It has head and shift as well.
    assert adapted.config.reward_bias == model.config.reward_bias
    with torch.no_grad():
        assert (adapted(TOKENS).logits - model(TOKENS).logits).abs().max() < 1e-5
    assert metrics["eval/rm/accuracy"] > 0.9


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_what_lora_is_not_for_is_refused(tiny, in_tmp, monkeypatch, fails):
    assert "scratch" in fails(train_sft.check, train_sft.Args(base_model="scratch", lora_rank=2))
    assert "--lora_rank 0" in fails(PAGES["train_ppo"].check, ppo_args(tiny, lora_rank=0))
    save_others(AutoModelForCausalLM, {}, task_type="CAUSAL_LM")
    with monkeypatch.context() as patch:
        patch.setattr(console, "find_spec", lambda name: None)
        for line in (fails(train_rloo.check, rloo_args(tiny, lora_rank=2)), fails(load, "adapter")):
            assert line.endswith('needs the package peft: pip install -c constraints.txt -e ".[peft]"\n')
    monkeypatch.setattr(engines, "name", lambda accelerator: "ZeRO-3")
    assert "--lora_rank 2: not under ZeRO-3" in fails(train_rloo.main, rloo_args(tiny, lora_rank=2))
