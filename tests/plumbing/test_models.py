"""Models and tokenizers: what is loaded, what is refused in one line, and what is saved."""

import dataclasses
import inspect
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import edit_json, metaspace_tokenizer, tiny_config, tiny_model, word_tokenizer
from short_runs import contents
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from rlhf_details import toy, train_rloo, utils
from rlhf_details.plumbing.inputs import models, stop_tokens
from rlhf_details.plumbing.machine import rewards
from rlhf_details.plumbing.outputs import model_folder

FLAGS = train_rloo.Args()
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(toy.tokenizer()))
IDS = dict(bos_token_id=None, eos_token_id=toy.tokenizer().eos_token_id)


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def test_a_tokenizer_is_loaded_and_must_have_an_eos_token(tiny, in_tmp, fails):
    assert models.load_tokenizer(tiny / "policy", "--base_model", FLAGS).get_vocab() == toy.tokenizer().get_vocab()
    word_tokenizer(eos_token=None).save_pretrained("no_eos")
    assert "--base_model no_eos: has no EOS token" in fails(models.load_tokenizer, "no_eos", "--base_model", FLAGS)
    line = fails(models.load_tokenizer, "models/nope", "--base_model", FLAGS)  # It is not sought on the Hub.
    assert "--base_model models/nope: cannot be read (no such folder)" in line


@pytest.mark.parametrize("ends", [[2, 3], 3])
def test_what_ends_a_turn_is_found_in_generation_config(in_tmp, ends):
    word_tokenizer().save_pretrained("policy"), tiny_config(vocab_size=8).save_pretrained("policy")
    assert stop_tokens.end_ids(models.load_tokenizer("policy", "--sft_model_path", FLAGS)) == [2]
    Path("policy/generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert stop_tokens.end_ids(models.load_tokenizer("policy", "--sft_model_path", FLAGS)) == [2, 3]


@pytest.mark.parametrize("unk", ["<unk>", None])
def test_a_stop_token_is_eos_none_or_one_token(unk, fails):
    tokenizer = toy.tokenizer()
    tokenizer.unk_token = unk  # Many tokenizers have none.
    assert stop_tokens.stop_ids(tokenizer, "eos", "--stop_token").tolist() == [tokenizer.eos_token_id]
    assert stop_tokens.stop_ids(tokenizer, "none", "--stop_token").tolist() == []
    assert stop_tokens.stop_ids(tokenizer, "hotel", "--stop_token").item() == tokenizer.convert_tokens_to_ids("hotel")
    for text in ("small hotel", "", *(["nonsense"] if unk else [])):
        assert f"--stop_token {text!r}: not one token" in fails(stop_tokens.stop_ids, tokenizer, text, "--stop_token")


def test_a_stop_token_is_read_as_it_stands_within_a_response(fails):
    """Llama 2's tokenizer puts a space before a text, so that "." alone is another token than "." after a word."""
    tokenizer = metaspace_tokenizer()
    response = tokenizer("a b.").input_ids
    assert tokenizer.convert_ids_to_tokens(response) == ["▁a", "▁b", "."]
    assert stop_tokens.stop_ids(tokenizer, ".", "--stop_token").item() == response[2] != tokenizer(".").input_ids[0]
    assert stop_tokens.stop_ids(tokenizer, " b", "--stop_token").item() == response[1]
    fails(stop_tokens.stop_ids, tokenizer, "c", "--stop_token")


OWN_TOKENIZERS = {  # the policy's and the reward model's tokenizer, embeddings of the reward model, what is found
    "the same": ({}, {}, 8, "token ids"),
    "none beside it": ({}, None, 8, "token ids"),
    "it alone pads": (dict(pad_token=None), dict(pad_token="[PAD]"), 9, "token ids"),
    "a token more": ({}, dict(words="a b c d e"), 300, "its own"),
}


@pytest.mark.parametrize("policys, its_own, size, found", OWN_TOKENIZERS.values(), ids=OWN_TOKENIZERS)
def test_a_reward_model_reads_token_ids_of_its_own_vocabulary_and_else_text(in_tmp, policys, its_own, size, found):
    tokenizer, args = word_tokenizer(**policys), train_rloo.Args(reward_model_path="reward")
    tiny_config(vocab_size=size).save_pretrained("reward")
    if its_own is not None:
        word_tokenizer(**its_own).save_pretrained("reward")
    own = rewards.own_tokenizer(args, tokenizer)
    assert (found == "token ids") == (own is None) == rewards.reads_token_ids(args, tokenizer)
    assert own is None or own.get_vocab() != tokenizer.get_vocab()


@pytest.mark.parametrize("size", [4, 7])
def test_a_reward_model_too_small_for_the_policys_tokens_is_one_line(in_tmp, fails, size):
    tokenizer, args = word_tokenizer(), train_rloo.Args(reward_model_path="reward")
    tiny_config(vocab_size=size).save_pretrained("reward")
    line = fails(rewards.reads_token_ids, args, tokenizer)
    assert f"--reward_model_path reward: has no tokenizer, and {size} embeddings for the 8 tokens" in line


# ---- models ----------------------------------------------------------------------------------------------------------
def test_model_3_weights_are_fp32_whatever_the_folder_holds(in_tmp):
    model = GPTNeoXForCausalLM(tiny_config()).bfloat16()
    model.save_pretrained("policy")
    loaded = models.load_policy("policy", "--sft_model_path", dataclasses.replace(FLAGS, attn_implementation="eager"))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(p, q.float()) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))
    assert loaded.config._attn_implementation == "eager"


def test_model_5_a_reward_model_without_a_trained_head_is_refused_unless_allowed(tiny, in_tmp, fails):
    line = fails(models.load_reward_model, tiny / "policy", FLAGS)
    assert "score.weight" in line and "train_reward.py" in line and "--allow_untrained_reward_model" in line
    GPTNeoXForSequenceClassification(tiny_config(num_labels=2)).save_pretrained("two_labels")
    assert "score.weight has the shape [2, 32]" in fails(models.load_reward_model, "two_labels", FLAGS)
    allowed = dataclasses.replace(FLAGS, allow_untrained_reward_model=True)
    model = models.load_reward_model(tiny / "policy", allowed)
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 32)
    saved = GPTNeoXForSequenceClassification.from_pretrained(tiny / "reward")
    assert torch.equal(models.load_reward_model(tiny / "reward", allowed).score.weight, saved.score.weight)


def mamba(tiny):
    return Mamba2ForCausalLM(Mamba2Config(**SMALL | {"num_heads": 8}, **IDS, state_size=8, head_dim=8, n_groups=2))


def experts(tiny):
    sizes = dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
    return MixtralForCausalLM(MixtralConfig(**SMALL, **IDS, **sizes, router_jitter_noise=0.1))


def cut_short(tiny):
    shutil.copytree(tiny / "policy", "model")
    os.truncate("model/model.safetensors", 1000)


def with_a_token_more(tiny):
    shutil.copytree(tiny / "policy", "model")
    tokenizer = toy.tokenizer()
    tokenizer.add_tokens("soups")
    tokenizer.save_pretrained("model")


def with_another_shape(tiny):
    shutil.copytree(tiny / "policy", "model")
    edit_json("model/config.json", vocab_size=40)


OTHER_SHAPE = "weight has the shape [254, 32], and [40, 32] is expected"
MORE_TOKENS = "its tokenizer has 255 tokens, and the model 254 embeddings"


@pytest.mark.parametrize(
    "make, words",
    [
        (mamba, "a mamba2 cannot be sampled: it has no cache of keys and values"),
        (lambda tiny: GPTNeoXForSequenceClassification(tiny_config(num_labels=1)), "not a causal language"),
        (experts, "router_jitter_noise 0.1"),
        (cut_short, "cannot be read"),
        (with_another_shape, OTHER_SHAPE),
        (with_a_token_more, MORE_TOKENS),
    ],
    ids="cache classifier jitter cut shape tokens".split(),
)
def test_a_model_that_cannot_be_used_is_one_line(in_tmp, tiny, fails, make, words):
    if model := make(tiny):
        model.save_pretrained("model")
    line = fails(models.load_policy, "model", "--sft_model_path", FLAGS)
    assert "--sft_model_path model: " in line and words in line


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_the_cache_has_the_name_that_a_model_gives_it(name):
    """transformers 5.24 says cache. Before it said past_key_values, and took an unknown cache without an error."""
    model = tiny_model("llama")
    trunk, real, seen = model.base_model, model.base_model.forward, []
    ours = utils.name_of_cache(trunk)

    def forward(input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **inputs):
        seen.append(inputs.pop(name, None))
        assert not any(x is not None for x in inputs.values())
        return real(input_ids, attention_mask, position_ids, use_cache=use_cache, **{ours: seen[-1]})

    parameters = [*inspect.signature(forward).parameters.values()]
    parameters.insert(3, inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None))
    forward.__signature__ = inspect.Signature(parameters)
    trunk.forward = forward
    tokens, cache = torch.arange(12).view(2, 6), DynamicCache(config=model.config)
    positions = torch.arange(6).expand(2, 6)
    parts = [models.hidden_states(model, tokens[:, m], None, positions[:, m], cache) for m in ([0, 1, 2, 3], [4], [5])]
    whole = models.hidden_states(model, tokens, None, positions)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)
    assert seen == [cache, cache, cache, None] and models.lm_head(model)


# ---- saving ----------------------------------------------------------------------------------------------------------
def save(folder, model=None, tokenizer=None):
    """Saves a model, or a random one, as a run of the name "run" does; returns the arguments."""
    args = train_rloo.Args(output_dir=folder, sft_model_path="x")
    model, tokenizer = (
        model or GPTNeoXForCausalLM(tiny_config(initializer_range=0.2)).eval(),
        tokenizer or toy.tokenizer(),
    )
    seen, beside = model_folder.listing(args), model_folder.save_weights(args, model, tokenizer, "run")
    model_folder.save_words(args, tokenizer, "", beside)
    assert model_folder.put(args, beside, seen) == folder
    return args


def test_a_saved_model_replaces_the_old_folder_whole(in_tmp):
    save("deep/model")
    for name in ("deep/model", "deep/model.run.partial"):  # of the model before, and of a run that was killed
        Path(name).mkdir(exist_ok=True)
        Path(name, "old.txt").touch()
    args = save("deep/model/")
    assert os.listdir("deep") == ["model"] and "old.txt" not in os.listdir("deep/model")
    written = json.loads(Path("deep/model/training_args.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(args)))


def test_a_saved_model_generates_by_itself_as_it_was_trained(in_tmp):
    """It samples at the run's temperature, without the top_k of the published model at the start, and it stops."""
    model, tokenizer = GPTNeoXForCausalLM(tiny_config()), toy.tokenizer()
    model.generation_config.update(temperature=0.9, top_k=3, do_sample=False)
    tokenizer.generation_eos = [7]  # as a chat template's end of a turn
    save("model", model, tokenizer), save("model", model, tokenizer)
    found = GenerationConfig.from_pretrained("model")
    assert (found.do_sample, found.top_k, found.temperature) == (True, 0, train_rloo.Args.temperature)
    assert found.eos_token_id == [tokenizer.eos_token_id, 7]


def test_a_save_that_fails_loses_no_model(in_tmp):
    save("model")
    before = contents("model")
    with pytest.raises(AttributeError):
        save("model", tokenizer=object())
    assert os.listdir() == ["model"] and contents("model") == before
