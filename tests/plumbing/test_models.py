"""Models and tokenizers: what is loaded, what is refused in one line, and what is saved."""

import copy
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import metaspace_tokenizer, rloo_args, tiny_config, word_tokenizer
from short_runs import contents
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PreTrainedTokenizerFast,
)

from rlhf_details import toy, train_rloo, utils
from rlhf_details.plumbing import checkpoint, cli, engines, errors, models

FLAGS = train_rloo.Args()
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(toy.tokenizer()))
IDS = dict(bos_token_id=None, eos_token_id=toy.tokenizer().eos_token_id)


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def test_a_tokenizer_is_loaded_and_must_have_an_eos_token(tiny, in_tmp, fails):
    assert models.load_tokenizer(tiny / "policy", "--base_model", FLAGS).get_vocab() == toy.tokenizer().get_vocab()
    word_tokenizer(eos_token=None).save_pretrained("no_eos")
    assert "--base_model no_eos: has no EOS token" in fails(models.load_tokenizer, "no_eos", "--base_model", FLAGS)
    line = fails(models.load_tokenizer, "models/nope", "--base_model", FLAGS)  # It is not sought on the Hub.
    assert "--base_model models/nope: no such file or folder" in line


@pytest.mark.parametrize("file, ends, found", [
    ("generation_config.json", [2, 3], [2, 3]), ("generation_config.json", 3, [2, 3]),
    ("config.json", [2, 3], [2, 3]), ("config.json", 3, [2]),
])  # fmt: skip
def test_what_ends_a_turn_is_found_in_generation_config_or_else_as_a_list_in_config(in_tmp, file, ends, found):
    """A single id in config.json may be the library's default, which is not the tokenizer's."""
    folder = vocabulary_folder("policy", word_tokenizer(), 8)
    config = json.loads(Path("policy/config.json").read_text())
    Path("policy", file).write_text(json.dumps(config | {"eos_token_id": ends}))
    assert utils.end_ids(models.load_tokenizer(folder, "--sft_model_path", FLAGS)) == found


@pytest.mark.parametrize("unk", ["<unk>", None])
def test_a_stop_token_is_eos_none_or_one_token(unk, fails):
    tokenizer = toy.tokenizer()
    tokenizer.unk_token = unk  # Many tokenizers have none.
    assert models.stop_ids(tokenizer, "eos", "--stop_token").tolist() == [tokenizer.eos_token_id]
    assert models.stop_ids(tokenizer, "none", "--stop_token").tolist() == []
    assert models.stop_ids(tokenizer, "hotel", "--stop_token").item() == tokenizer.convert_tokens_to_ids("hotel")
    for text in ("small hotel", "", *(["nonsense"] if unk else [])):
        assert f"--stop_token {text!r}: not one token" in fails(models.stop_ids, tokenizer, text, "--stop_token")


def test_a_stop_token_is_read_as_it_stands_within_a_response(fails):
    """Llama 2's tokenizer puts a space before a text, so that "." alone is another token than "." after a word."""
    tokenizer = metaspace_tokenizer()
    response = tokenizer("the cat.").input_ids
    assert tokenizer.convert_ids_to_tokens(response) == ["▁the", "▁cat", "."]
    assert models.stop_ids(tokenizer, ".", "--stop_token").item() == response[2] != tokenizer(".").input_ids[0]
    assert models.stop_ids(tokenizer, " cat", "--stop_token").item() == response[1]
    fails(models.stop_ids, tokenizer, "dog", "--stop_token")


def vocabulary_folder(folder, tokenizer, size):
    """A folder with a tokenizer (or none) and a configuration of `size` embeddings."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    tiny_config(vocab_size=size).save_pretrained(folder)
    return folder


def own_tokenizer(policy, reward_model, tokenizer):
    args = train_rloo.Args(sft_model_path=policy, reward_model_path=reward_model)
    return models.own_tokenizer(args, tokenizer)


def test_a_reward_model_of_the_same_vocabulary_reads_token_ids(in_tmp):
    tokenizer, pads_with_eos, trained_from_it = (word_tokenizer(pad_token=x) for x in ("<pad>", "</s>", "</s>"))
    trained_from_it.add_special_tokens({"pad_token": "[PAD]"})  # as train_reward.py does
    policy = vocabulary_folder("policy", tokenizer, 8)
    for name, ours, theirs, size in (
        ("same", tokenizer, tokenizer, 8),
        ("rounded_up", tokenizer, tokenizer, 64),
        ("no_tokenizer", tokenizer, None, 8),
        ("padded", word_tokenizer(pad_token=None), word_tokenizer(pad_token="[PAD]"), 9),
        ("trained", pads_with_eos, trained_from_it, 9),
    ):
        assert own_tokenizer(policy, vocabulary_folder(name, theirs, size), ours) is None, name


def test_a_reward_model_of_another_vocabulary_has_a_tokenizer_of_its_own(in_tmp, fails):
    tokenizer, more = word_tokenizer(), word_tokenizer()
    more.add_tokens(["e"])
    policy = vocabulary_folder("policy", tokenizer, 8)
    for name, other in {"toy": toy.tokenizer(), "more": more, "other_ids": word_tokenizer(words="b a c d")}.items():
        folder = vocabulary_folder(name, other, 300)
        assert own_tokenizer(policy, folder, tokenizer).get_vocab() == other.get_vocab()
    for other in (tokenizer, None):
        line = fails(own_tokenizer, policy, vocabulary_folder(f"fewer_{other is None}", other, 7), tokenizer)
        assert "vocabulary mismatch" in line and "8 tokens" in line and "7 embeddings" in line


def test_embeddings_that_stand_for_no_token_are_no_other_vocabulary(in_tmp):
    """Qwen2.5's policy of 7 B has 128 embeddings more than a reward model of 3 B, of the same tokenizer."""
    folders = vocabulary_folder("policy", word_tokenizer(), 128), vocabulary_folder("reward", word_tokenizer(), 64)
    assert own_tokenizer(*folders, word_tokenizer()) is None


@pytest.mark.parametrize("template, is_own", [(None, False), (" {{ messages }}\n", False), ("[{{ messages }}]", True)])
def test_a_reward_model_reads_its_own_chat_template_where_it_is_another_one(in_tmp, template, is_own):
    ours, theirs = word_tokenizer(), word_tokenizer()
    ours.chat_template, theirs.chat_template = "{{ messages }}", template
    theirs.save_pretrained("reward")
    own = models.own_template(train_rloo.Args(reward_model_path="reward"), ours)
    assert bool(own) == is_own and (own is None or own.chat_template == template)


# ---- models ----------------------------------------------------------------------------------------------------------
def test_model_3_weights_are_fp32_whatever_the_folder_holds(in_tmp):
    model = GPTNeoXForCausalLM(tiny_config()).bfloat16()
    model.save_pretrained("policy")
    reward_model = GPTNeoXForSequenceClassification(tiny_config(num_labels=1)).bfloat16()
    reward_model.save_pretrained("reward")
    loaded = models.load_policy("policy", "--sft_model_path", dataclasses.replace(FLAGS, attn_implementation="eager"))
    for found, saved in ((loaded, model), (models.load_reward_model("reward", FLAGS), reward_model)):
        assert {p.dtype for p in found.parameters()} == {torch.float32}
        for (name, p), (_, q) in zip(found.named_parameters(), saved.named_parameters(), strict=True):
            assert torch.equal(p, q.float()), name
    assert loaded.config._attn_implementation == "eager"


def test_model_5_a_reward_model_without_a_trained_head_is_refused_unless_allowed(tiny, in_tmp, fails):
    line = fails(models.load_reward_model, tiny / "policy", FLAGS)
    assert "score.weight" in line and "train_reward.py" in line and "--allow_untrained_reward_model" in line
    GPTNeoXForCausalLM(tiny_config(num_labels=1)).save_pretrained("one_label")
    assert "score.weight" in fails(models.load_reward_model, "one_label", FLAGS)
    GPTNeoXForSequenceClassification(tiny_config(num_labels=2)).save_pretrained("two_labels")
    assert "score.weight has the shape [2, 32]" in fails(models.load_reward_model, "two_labels", FLAGS)
    allowed = dataclasses.replace(FLAGS, allow_untrained_reward_model=True)
    for folder in (tiny / "policy", "two_labels"):
        model = models.load_reward_model(folder, allowed)
        assert model.config.num_labels == 1 and model.score.weight.shape == (1, 32)
    saved = GPTNeoXForSequenceClassification.from_pretrained(tiny / "reward")
    for args in (FLAGS, allowed):
        assert torch.equal(models.load_reward_model(tiny / "reward", args).score.weight, saved.score.weight)


def mamba():
    return Mamba2ForCausalLM(Mamba2Config(**SMALL | {"num_heads": 8}, **IDS, state_size=8, head_dim=8, n_groups=2))


def own_base():
    sizes = SMALL | dict(num_key_value_heads=2, num_local_experts=2, intermediate_size=64, intermediate_size_mlp=64)
    return Llama4ForCausalLM(Llama4TextConfig(**sizes, **IDS, head_dim=8))


def experts():
    sizes = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
    return MixtralForCausalLM(MixtralConfig(**SMALL, **IDS, **sizes, router_jitter_noise=0.1))


@pytest.mark.parametrize(
    "make, words",
    [
        (mamba, "a mamba2 cannot be sampled: it has no cache of keys and values"),
        (experts, "a mixtral draws random numbers in training mode"),
        (own_base, "a llama4_text has no trunk without its head"),
        (lambda: GPTNeoXForSequenceClassification(tiny_config(num_labels=1)), "not a causal language model"),
        (None, "cannot be read"),
    ],
    ids=["no cache", "jitter", "its own base", "classifier", "cut short"],
)
def test_a_policy_that_cannot_be_trained_is_one_line(in_tmp, tiny, fails, make, words):
    if make:
        make().save_pretrained("policy")
    else:
        shutil.copytree(tiny / "policy", "policy")
        os.truncate("policy/model.safetensors", 1000)
    line = fails(models.load_policy, "policy", "--sft_model_path", FLAGS)
    assert line.startswith("error: --sft_model_path policy: ") and words in line


def copy_with(folder, **changes):
    """Copies a model folder into the current one and changes its configuration; None drops a value."""
    shutil.copytree(folder, folder.name)
    config = json.loads(Path(folder.name, "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    Path(folder.name, "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change", [dict(id2label=None, label2id=None), dict(id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})], ids=str
)
def test_a_reward_model_is_read_whatever_its_configuration_says_of_labels(tiny, in_tmp, change):
    copy_with(tiny / "reward", **change)
    model, saved = models.load_reward_model("reward", FLAGS), models.load_reward_model(tiny / "reward", FLAGS)
    assert model.config.num_labels == 1 and torch.equal(model.score.weight, saved.score.weight)


def test_weights_that_do_not_fit_the_configuration_are_one_line(tiny, in_tmp, fails):
    copy_with(tiny / "policy", vocab_size=40), copy_with(tiny / "reward", vocab_size=40)
    for line in (
        fails(models.load_policy, "policy", "--sft_model_path", FLAGS),
        fails(models.load_reward_model, "reward", FLAGS, allow_untrained=True),
    ):
        assert "weight has the shape [254, 32]" in line and "config.json asks for [40, 32]" in line


def test_a_tokenizer_with_more_tokens_than_embeddings_is_one_line_unless_the_last_is_padding(tiny, in_tmp, fails):
    shutil.copytree(tiny / "policy", "policy"), shutil.copytree(tiny / "reward", "reward")
    tokenizer = toy.tokenizer()
    size = GPTNeoXForCausalLM.from_pretrained("policy").config.vocab_size
    for new, is_fine in ((dict(pad_token="[PAD]"), True), (dict(additional_special_tokens=["<|im_end|>"]), False)):
        tokenizer.add_special_tokens(new)
        tokenizer.save_pretrained("policy"), tokenizer.save_pretrained("reward")
        if is_fine:
            assert models.num_tokens(models.load_policy("policy", "--base_model", FLAGS)) == size
            continue
        for line in (fails(models.load_policy, "policy", "--base_model", FLAGS),
                     fails(models.load_reward_model, "reward", FLAGS)):  # fmt: skip
            assert f"its tokenizer has {size + 2} tokens, and the model {size} embeddings" in line


def test_the_tokens_are_counted_by_their_largest_id(in_tmp):
    """A vocabulary may have gaps, and then its length is less than that."""
    GPTNeoXForCausalLM(tiny_config(vocab_size=64)).save_pretrained("policy")
    tokenizer = word_tokenizer()
    table = json.loads(tokenizer.backend_tokenizer.to_str())
    table["model"]["vocab"]["d"] = 40
    Path("table.json").write_text(json.dumps(table))
    PreTrainedTokenizerFast(tokenizer_file="table.json", eos_token="</s>").save_pretrained("policy")
    assert models.num_tokens(models.load_policy("policy", "--base_model", FLAGS)) == 41


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed here")
def test_an_attention_kernel_that_is_not_installed_is_one_line(tiny, fails):
    args = dataclasses.replace(FLAGS, attn_implementation="flash_attention_2")
    line = fails(models.load_policy, tiny / "policy", "--sft_model_path", args)
    assert "--attn_implementation flash_attention_2 with --sft_model_path" in line


def test_gradient_checkpointing_is_switched_on_where_it_is_asked_for(tiny):
    for wanted in (False, True):
        model = models.load_policy(tiny / "policy", "x", dataclasses.replace(FLAGS, gradient_checkpointing=wanted))
        older = "is_activation_checkpointing" not in dir(model)  # The library has given it another name.
        assert (model.is_gradient_checkpointing if older else model.is_activation_checkpointing) == wanted


def test_the_context_is_the_smallest_of_the_models_that_read_the_same_tokens():
    long, short = (SimpleNamespace(model=GPTNeoXForCausalLM(tiny_config(max_position_embeddings=n))) for n in (128, 64))
    reads_text = SimpleNamespace(model=short.model, tokenizer=toy.tokenizer())
    assert models.context(long, short) == 64 and models.context(long, None, reads_text) == 128


def test_a_checksum_tells_weights_apart_and_changes_with_a_single_one(tiny):
    one, other = (models.load_policy(tiny / "policy", "x", FLAGS) for _ in range(2))
    assert models.checksum(one) == models.checksum(other)
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-6
    assert models.checksum(one) != models.checksum(other)


# ---- saving ----------------------------------------------------------------------------------------------------------
def save(folder, seed=0, tokenizer=None, **flags):
    """Saves a random model with the arguments of a run; returns (arguments, model)."""
    torch.manual_seed(seed)
    args = train_rloo.Args(output_dir=str(folder), sft_model_path="x", **flags)
    model = GPTNeoXForCausalLM(tiny_config(initializer_range=0.2)).eval()
    checkpoint.save_folder(args, model, tokenizer or toy.tokenizer(), None)
    return args, model


def test_a_saved_model_reloads_with_identical_logits_and_replaces_the_old_folder(in_tmp):
    save("deep/model")
    Path("deep/model/old.txt").write_text("of the model before")
    Path("deep/model.partial").mkdir()
    Path("deep/model.partial/rest.txt").write_text("of a run that was killed")
    args, model = save("deep/model/", seed=1)
    assert os.listdir("deep") == ["model"] and not {"old.txt", "rest.txt"} & set(os.listdir("deep/model"))
    again, tokens = models.load_policy(args.output_dir, "x", FLAGS).eval(), torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        assert torch.equal(AutoModelForCausalLM.from_pretrained("deep/model")(tokens).logits, model(tokens).logits)
    assert models.load_tokenizer(args.output_dir, "x", FLAGS).get_vocab() == toy.tokenizer().get_vocab()
    written = json.loads(Path("deep/model/training_args.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(args)))


SMALL_300 = SMALL | dict(vocab_size=300, intermediate_size=64)
ROPE_3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "config, names",
    [
        (tiny_config(vocab_size=300, rotary_pct=0.5, rotary_emb_base=5e3), {"rotary_pct": 0.5, "rotary_emb_base": 5e3}),
        (LlamaConfig(**SMALL_300, rope_theta=1e5), {"rope_theta": 1e5}),
        (
            LlamaConfig(**SMALL_300, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **ROPE_3}),
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "rope_theta": 5e5, **ROPE_3}},
        ),
        (PhiConfig(**SMALL_300, partial_rotary_factor=0.5), {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        (GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=300), {}),
    ],
    ids=["gpt_neox", "llama", "llama 3", "phi", "gpt2"],
)
def test_what_is_saved_has_the_names_of_transformers_4_and_everybody_may_read_it(in_tmp, config, names):
    """benchmark/checks/clients.py loads such folders with transformers 4.57."""
    model, tokenizer = AutoModelForCausalLM.from_config(config).eval(), toy.tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<a>"]})
    args = train_rloo.Args(output_dir="model", sft_model_path="x")
    checkpoint.save_folder(args, model, tokenizer, None)
    saved, words = (json.loads(Path("model", f"{name}.json").read_text()) for name in ("config", "tokenizer_config"))
    assert names.items() <= saved.items()
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast" and words["additional_special_tokens"] == ["<a>"]
    assert "extra_special_tokens" not in words and "token_type_ids" not in words["model_input_names"]
    again, text = AutoTokenizer.from_pretrained("model"), "we <a> went"
    assert again(text) == tokenizer(text) and again.all_special_tokens == tokenizer.all_special_tokens
    with torch.no_grad():
        ids = torch.arange(60).unsqueeze(0)
        assert torch.equal(models.load_policy("model", "x", FLAGS).eval()(ids).logits, model(ids).logits)
    assert len({file.stat().st_mode for file in Path("model").iterdir()}) == 1


@pytest.mark.parametrize("values", [dict(temperature=0.9), dict(do_sample=False, top_p=0.6), dict(early_stopping=True)])
def test_generation_values_that_the_library_refuses_to_save_are_saved(in_tmp, values):
    """Published models have them, and the run is over when they are saved."""
    model = GPTNeoXForCausalLM(tiny_config())
    model.generation_config.update(**values)
    args = train_rloo.Args(output_dir="model", sft_model_path="x")
    for _ in range(2):
        checkpoint.save_folder(args, model, toy.tokenizer(), None)
    found = GenerationConfig.from_pretrained("model").to_dict()
    assert values.items() <= found.items() and found["eos_token_id"] == toy.tokenizer().eos_token_id


def test_a_policy_with_several_chat_templates_may_be_trained_again(in_tmp):
    """The library saves all but the first one in a folder."""
    tokenizer = toy.tokenizer()
    tokenizer.chat_template = {"default": "a", "rag": "b"}
    args, _ = save("model", tokenizer=tokenizer)
    cli.check_output_dir(args)


@pytest.mark.parametrize("folder", ["model", "model.before"], ids=["before", "between its renames"])
def test_a_save_that_fails_or_was_killed_between_its_renames_loses_no_model(in_tmp, folder):
    save("model")
    before = contents("model")
    os.rename("model", folder)
    with pytest.raises(AttributeError):
        save("model", seed=1, tokenizer=object())
    assert os.listdir() == ["model"] and contents("model") == before


# ---- linear layers by oneDNN -----------------------------------------------------------------------------------------
needs_onednn = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN is used with AVX-512 alone"
)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (3, 7, 24), (2, 3, 1, 24), (1, 24), (0, 24)])
def test_onednn_layers_equal_the_float64_layer_forward_and_backward(shape, bias):
    torch.manual_seed(0)
    layer = engines.use_onednn(torch.nn.Sequential(torch.nn.Linear(24, 10, bias=bias)))[0]
    assert type(layer) is engines.OneDNNLinear
    slow = torch.nn.Linear(24, 10, bias=bias).double()
    slow.load_state_dict(layer.state_dict())
    x, weights = torch.randn(shape), torch.randn(*shape[:-1], 10)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    ours, theirs = layer(a), slow(b)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=0)
    (ours * weights).sum().backward(), (theirs * weights).sum().backward()
    pairs = [(a.grad, b.grad), *((p.grad, q.grad) for p, q in zip(layer.parameters(), slow.parameters(), strict=True))]
    for p, q in pairs:
        torch.testing.assert_close(p.double(), q, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "size, variable, device, threads",
    [(1, None, "cpu", 1), (6e6, None, "cpu", 2), (1, "2", "cpu", 2), (1, None, "meta", 2)],
)
def test_small_models_take_one_thread_and_say_so(monkeypatch, capsys, size, variable, device, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(2)
    modules = [torch.nn.Embedding(int(n), 1, device=device) for n in (1, size)]
    try:
        engines.use_one_thread(*modules)
        assert torch.get_num_threads() == threads
        engines.use_one_thread(*modules)
    finally:
        torch.set_num_threads(1)
    assert capsys.readouterr().out.count("OMP_NUM_THREADS") == (threads == 1)


@needs_onednn
def test_onednn_keeps_few_kernels_so_that_memory_stays_flat():
    """After 199 batches of other shapes the first shape is compiled again: oneDNN, left alone, keeps 1024 kernels."""
    words = """if True:
        import torch
        from rlhf_details.plumbing import engines
        model = engines.use_onednn(torch.nn.Sequential(torch.nn.Linear(8, 8)))
        for rows in [*range(1, 200), 1]:
            model(torch.ones(rows, 8))
    """
    ours = {name: text for name, text in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    for capacity, last in (({}, "cache_miss"), ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"}, "cache_hit")):
        environment = ours | capacity | {"ONEDNN_VERBOSE": "2"}  # It prints where each kernel comes from.
        printed = subprocess.check_output([sys.executable, "-c", words], env=environment, text=True)
        assert re.findall(r"create:(cache_\w+),cpu,inner_product", printed)[-1] == last


@needs_onednn
def test_onednn_layers_are_linear_layers_under_autocast_in_bf16_and_when_copied():
    layer = engines.use_onednn(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    twin = copy.deepcopy(layer)
    assert twin.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32  # The copy has weights of its own.
    layer.requires_grad_(False)(x).sum().backward()
    assert x.grad is not None and layer[0].weight.grad is None and layer[0].bias.grad is None


def test_what_is_loaded_uses_onednn_where_the_processor_gains_by_it(tiny, monkeypatch):
    for capability, kind in (("AVX512", engines.OneDNNLinear), ("AVX2", torch.nn.Linear)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        args = rloo_args(tiny)
        loaded = models.load_policy(tiny / "policy", "", args), models.load_reward_model(tiny / "reward", args)
        layers = [m for model in loaded for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert len(layers) == 18 and all(type(m) is kind for m in layers)


@pytest.mark.parametrize(
    "error, words",
    [
        (ValueError("Config name is missing.\nPlease pick one:\n\t['main']"), "missing. Please pick one: ['main']"),
        (ValueError("for AutoModelForCausalLM.\nModel type should be one of GPT2Config, .."), "AutoModelForCausalLM."),
        (KeyError("weight_map"), "KeyError: 'weight_map'"),
        (ValueError(), "ValueError"),
        (ValueError("begin\n" + "x" * 9000 + "\nbecause"), f"begin {'x' * 389} ... {'x' * 192} because"),
    ],
)
def test_the_words_of_a_library_are_whole_and_in_one_line(tiny, fails, error, words):
    @errors.reading("--base_model", tiny)
    def read():
        raise error

    line = fails(read)
    assert line.endswith(f"{words})\n") and len(line) < 800
