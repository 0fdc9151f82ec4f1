"""Models and tokenizers: what they are when they have been loaded, and what is saved."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import metaspace_tokenizer, tiny_config, word_tokenizer
from short_runs import contents, start
from transformers import GenerationConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from rlhf_details import toy, train_distill, train_dpo, train_rloo, train_sft
from rlhf_details.plumbing.inputs import data, models, stop_tokens, token_ids
from rlhf_details.plumbing.machine import rewards
from rlhf_details.plumbing.outputs import model_folder

FLAGS = train_rloo.Args()


# ---- tokenizers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ends, expected", [(None, [2]), (3, [2, 3]), ([2, 3, 999], [2, 3])])
def test_what_ends_a_turn_is_found_in_generation_config(in_tmp, ends, expected):
    word_tokenizer().save_pretrained("policy"), tiny_config(vocab_size=8).save_pretrained("policy")
    if ends:
        Path("policy/generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert stop_tokens.end_ids(models.load_tokenizer("policy", "--sft_model_path", FLAGS)) == expected


@pytest.mark.parametrize(
    "stop_token, text",
    [("eos", " soup . <end>"), (".", " soup . <end>"), ("soup", " soup . <end>"), ("<end>", " soup .")],
)
def test_readers_of_a_saved_policys_texts_see_the_ends_that_are_words(in_tmp, stop_token, text):
    """The rewards of the run with --stop_token have seen them, and its model names them as ends."""
    model, tokenizer = GPTNeoXForCausalLM(tiny_config(vocab_size=len(toy.tokenizer()) + 1)), toy.tokenizer()
    tokenizer.add_tokens("<end>")
    save("model", model, tokenizer, stop_token=stop_token)
    tokenizer = models.load_tokenizer("model", "--sft_model_path", FLAGS)
    assert {*stop_tokens.stop_ids(tokenizer, stop_token, "--stop_token").tolist()} <= {*stop_tokens.end_ids(tokenizer)}
    ids = tokenizer.convert_tokens_to_ids(["soup", ".", "<end>", "<eos>"])
    responses, mask = torch.tensor([ids]), torch.ones(1, 4).bool()
    assert token_ids.decode(tokenizer, responses, mask) == [text]  # for rewards, judges and environments
    assert token_ids.decode_turns(tokenizer, responses, mask, mask) == [text]  # for evaluate.py and tables of samples
    assert data.as_text(tokenizer, ids) == text  # of a prompt that is token ids


def without_unknown_token():
    tokenizer = toy.tokenizer()
    tokenizer.unk_token = None
    return tokenizer


@pytest.mark.parametrize(
    "make, text, tokens",
    [
        (toy.tokenizer, "eos", ["<eos>"]),
        (toy.tokenizer, "none", []),
        (toy.tokenizer, "hotel", ["hotel"]),
        *[(make, text, None) for make in (toy.tokenizer, without_unknown_token) for text in ("small hotel", "")],
        (toy.tokenizer, "nonsense", None),
        # Llama 2's tokenizer puts a space before a text, so that "." alone is another token than "." after a word.
        (metaspace_tokenizer, ".", ["."]),
        (metaspace_tokenizer, " b", ["▁b"]),
        (metaspace_tokenizer, "c", None),
    ],
)
def test_a_stop_token_is_eos_none_or_one_token_as_it_stands_within_a_response(fails, make, text, tokens):
    tokenizer = make()
    if tokens is None:
        assert f"--stop_token {text!r}: not one token" in fails(stop_tokens.stop_ids, tokenizer, text, "--stop_token")
    else:
        found = stop_tokens.stop_ids(tokenizer, text, "--stop_token").tolist()
        assert tokenizer.convert_ids_to_tokens(found) == tokens


OWN_TOKENIZERS = {  # the policy's and the reward model's tokenizer, embeddings of the reward model, what it reads
    "the same": ({}, {}, 8, "token ids"),
    "none beside it": ({}, None, 8, "token ids"),
    "it alone pads": (dict(pad_token=None), dict(pad_token="[PAD]"), 9, "token ids"),
    "a token more": ({}, dict(words="a b c d e"), 300, "text"),
    "too small": ({}, None, 7, "--reward_model_path reward: has no tokenizer, and 7 embeddings for the 8 tokens"),
}


@pytest.mark.parametrize("policys, its_own, size, found", OWN_TOKENIZERS.values(), ids=OWN_TOKENIZERS)
def test_a_reward_model_of_the_same_vocabulary_reads_token_ids(in_tmp, fails, policys, its_own, size, found):
    tokenizer, args = word_tokenizer(**policys), train_rloo.Args(reward_model_path="reward")
    tiny_config(vocab_size=size).save_pretrained("reward")
    if its_own is not None:
        word_tokenizer(**its_own).save_pretrained("reward")
    if found in ("token ids", "text"):
        assert rewards.reads_token_ids(args, tokenizer) == (found == "token ids")
    else:
        assert found in fails(rewards.reads_token_ids, args, tokenizer)


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
    assert models.load_reward_model(tiny / "policy", allowed).score.weight.shape == (1, 32)
    saved = GPTNeoXForSequenceClassification.from_pretrained(tiny / "reward")
    assert torch.equal(models.load_reward_model(tiny / "reward", allowed).score.weight, saved.score.weight)


# ---- saving ----------------------------------------------------------------------------------------------------------
def save(folder, model=None, tokenizer=None, page=train_rloo, **flags):
    """Saves a model, or a random one, as a run of the name "run" does; returns the arguments."""
    args = page.Args(output_dir=folder, **flags)
    model, tokenizer = model or GPTNeoXForCausalLM(tiny_config()), tokenizer or toy.tokenizer()
    seen, beside = model_folder.listing(args), model_folder.save_weights(args, model, tokenizer, "run")
    model_folder.save_words(args, tokenizer, "", beside)
    assert model_folder.put(args, beside, seen) == folder
    return args


@pytest.mark.parametrize(
    "case, flags",
    [
        ("sft", {"base_model": "dropping/policy"}),
        *[(case, {}) for case in ("reward-shift", "dpo", "rloo", "grpo-steps", "ppo-shared", "distill", "agent")],
        ("rloo", {"lora_rank": 2}),
    ],
)
def test_a_saved_configuration_has_the_dropout_that_the_model_came_with(tiny, in_tmp, case, flags):
    shutil.copytree(tiny, "dropping")
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
    for path in Path("dropping").glob("*/config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | rates))
    start(in_tmp / "dropping", case, **flags)
    assert rates.items() <= json.loads(Path("model/config.json").read_text()).items()


def test_a_saved_model_replaces_the_old_folder_whole_and_a_save_that_fails_loses_none(in_tmp):
    save("deep/model")
    for name in ("deep/model", "deep/model.run.partial"):  # of the model before, and of a run that was killed
        Path(name).mkdir(exist_ok=True)
        Path(name, "old.txt").touch()
    args = save("deep/model/")
    assert os.listdir("deep") == ["model"] and "old.txt" not in os.listdir("deep/model")
    written = json.loads(Path("deep/model/training_args.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(args)))
    before = contents()
    with pytest.raises(AttributeError):
        save("deep/model", tokenizer=object())
    assert contents() == before


@pytest.mark.parametrize("page, temperature", [(train_rloo, 0.7), (train_distill, 0.7), (train_sft, 1), (train_dpo, 1)])
def test_a_saved_model_generates_by_itself_as_it_was_trained(in_tmp, page, temperature):
    """It samples at the temperature of its log-probs in training, which is the run's where that sampled, without the
    top_k of the published model at the start, and it stops."""
    model, tokenizer = GPTNeoXForCausalLM(tiny_config()), toy.tokenizer()
    model.generation_config.update(temperature=0.9, top_k=3, do_sample=False)
    tokenizer.generation_eos = [7]  # as a chat template's end of a turn
    flags = dict(page=page, temperature=0.7)
    save("model", model, tokenizer, **flags), save("model", model, tokenizer, **flags)
    found = GenerationConfig.from_pretrained("model")
    assert (found.do_sample, found.top_k, found.temperature) == (True, 0, temperature)
    assert found.eos_token_id == [tokenizer.eos_token_id, 7]
