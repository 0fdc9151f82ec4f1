"""Models and tokenizers: they are loaded or made, refused where they do not fit, and given adapters (LoRA)."""

import contextlib
import copy
import inspect
import json
import math
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import (
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import sdpa_mask
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_details import toy
from rlhf_details.plumbing import chat, cli, engines


def read(kind, path, flag, args, **options):
    """What an Auto class (kind) reads from a folder or Hub name. What cannot be read ends the program with one line."""
    name, revision = cli.split(path)
    with cli.reading(flag, path):
        return kind.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code, **options)


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def load_tokenizer(path, flag, args):
    """The tokenizer of a model folder or Hub repository, which must have an EOS token."""
    tokenizer = find_tokenizer(path, flag, args)
    if tokenizer is None or tokenizer.eos_token_id is None:
        cli.fail(f"{flag} {path}: has no {'tokenizer' if tokenizer is None else 'EOS token'}")
    model = base_of(path, flag) or path
    name, revision = cli.split(model)
    ends = None
    with cli.reading(flag, path), contextlib.suppress(OSError):  # Many models have no generation_config.json.
        ends = GenerationConfig.from_pretrained(name, revision=revision).eos_token_id
    tokenizer.generation_eos = ends if isinstance(ends, list) else [ends] * (ends is not None)  # for chat.end_ids
    return tokenizer


def find_tokenizer(path, flag, args):
    """The tokenizer of a model, or None for a folder without one, for which the library would make up an empty one.

    Adapters that come without one have that of their base.
    """
    (name, revision), base = cli.split(path), base_of(path, flag)
    try:
        cached_file(name, "tokenizer_config.json", revision=revision)
    except OSError:
        if base:
            return find_tokenizer(base, flag, args)
        if os.path.isdir(path):
            return None
    # Adapters have no configuration. transformers 5.17 does not do without.
    known = {"config": read(AutoConfig, base, flag, args)} if base else {}
    return read(AutoTokenizer, path, flag, args, **known)


def check_same_tokens(path, flag, tokenizer, args):
    """Exits with an error unless the tokenizer of a model has the tokens of another one, each with the same number."""
    theirs, ours = load_tokenizer(path, flag, args).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        first = min(dict(theirs.items() ^ ours.items()))
        cli.fail(f"{flag} {path}: its tokens are not those of --sft_model_path; {first!r} is one that differs")


def vocabularies(*tokenizers):
    """[{token: id}, ..] of some tokenizers, without the tokens that any of them pads with."""
    padding = {t.pad_token for t in tokenizers if t.pad_token != t.eos_token}
    return [{token: i for token, i in t.get_vocab().items() if token not in padding} for t in tokenizers]


def stop_ids(tokenizer, text, flag, device=None):
    """The ids [S] of the tokens that a flag means by "eos" (all of chat.end_ids), "none" (no token), or a text that is
    one token. Other texts end with one line. Where "eos" means several tokens, it says which.

    The text is read as it stands within a response. At the start of a text, SentencePiece's tokenizers put a space
    before it. That is another token, and no response would end with it.
    """
    ids = []
    if text == "eos":
        ids = chat.end_ids(tokenizer)
        if len(ids) > 1:
            cli.say(f"{flag} eos: a response ends with {' or '.join(map(tokenizer.decode, ids))}")
    elif text != "none":
        ids = [tokenizer.get_vocab().get(text)]
        if ids == [None]:
            before, (*others, i) = (tokenizer(words, add_special_tokens=False).input_ids for words in ("a", f"a{text}"))
            if others != before or i == tokenizer.unk_token_id:
                cli.fail(f"{flag} {text!r}: not one token of the vocabulary")
            ids = [i]
    return torch.tensor(ids, dtype=torch.long, device=device)


def append_eos(tokenizer):
    """Lets a tokenizer end each text with EOS where it adds special tokens. The code here never asks it to add any."""
    eos, i = tokenizer.eos_token, tokenizer.eos_token_id
    if tokenizer.is_fast and tokenizer("a").input_ids[-1:] != [i]:  # It may come from a model that was saved so.
        last = processors.TemplateProcessing(single=["$A", eos], special_tokens=[(eos, i)])
        steps = [tokenizer.backend_tokenizer.post_processor, last]
        tokenizer.backend_tokenizer.post_processor = processors.Sequence(list(filter(None, steps)))


def decode(tokenizer, responses, mask):
    """The texts of responses [N, R] with their mask, a list of N strings."""
    return decode_all(tokenizer, [r[m].tolist() for r, m in zip(responses.cpu(), mask.cpu(), strict=True)])


def decode_all(tokenizer, rows):
    """The texts of lists of token ids, without the tokens that end a response, padding, BOS and the unknown token.

    All else is read by rewards, judges and people, because <think> may be a special token as well.
    """
    silent = {*chat.end_ids(tokenizer), tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    return [tokenizer.decode([i for i in ids if i not in silent]) for ids in rows]


# ---- models ----------------------------------------------------------------------------------------------------------
def accepts(model, *names):
    """For each name, whether the model's forward takes a parameter of that name: a list of bools."""
    parameters = inspect.signature(model.forward).parameters
    return [name in parameters for name in names]


def hidden_states(model, tokens, mask, positions, cache=None):
    """Last hidden states [M, L, H] of a model's trunk.

    Args: tokens, positions [M, L]; mask [M, L] bool or [M, 1, L, L'] additive, None where nothing is padding; cache, a
    transformers cache, which is extended.
    """
    trunk = model.base_model
    inputs = {"input_ids": tokens, "attention_mask": mask, name_of_cache(trunk): cache, "use_cache": cache is not None}
    if accepts(trunk, "position_ids")[0]:  # Bloom, for example, knows no positions.
        inputs["position_ids"] = positions
    return trunk(**inputs).last_hidden_state


def name_of_cache(model):
    """The name of the parameter of a model's forward that is the cache. Older models call it past_key_values."""
    return "cache" if accepts(model, "cache")[0] else "past_key_values"  # so does transformers before 5.24


def load_policy(path, flag, args):
    """A causal language model (folder or Hub name) in fp32. Adapters are merged into the model that they belong to."""
    model, missing, unexpected = load(AutoModelForCausalLM, path, flag, args)
    wrong = [f"lacks {name}" for name in missing]
    wrong += [f"has {name}" for name in unexpected if name.startswith("score.")]
    if wrong:
        cli.fail(f"{flag} {path}: not a causal language model (it {', '.join(sorted(wrong))})")
    config = model.config.get_text_config()
    for name, value in vars(config).items():
        if "jitter" in name and value:  # A router with jitter would put noise into the log-probs.
            kind = config.model_type
            cli.fail(f"{flag} {path}: a {kind} draws random numbers in training mode ({name} {value})")
    takes_cache = any(accepts(m, name_of_cache(m))[0] for m in (model, model.base_model))
    if not takes_cache or set(getattr(config, "layer_types", None) or []) == {"linear_attention"}:
        cli.fail(f"{flag} {path}: a {config.model_type} cannot be sampled: it has no cache of keys and values")
    return model


def load_scalar_model(path, flag, args):
    """A model with one number for each token, to train it: as `load_reward_model`, but its head may be random."""
    return load_reward_model(path, args, flag, allow_untrained=True)


def load_reward_model(path, args, flag="--reward_model_path", allow_untrained=False):
    """A sequence-classification model with one label, in fp32. A head that would be made up here is refused.

    allow_untrained, or the flag of that name, accepts a model without a head and draws one at random, for dummy runs
    and for training to start from.
    """
    # Some configurations do not say that there is one label, and the library would take them to mean two.
    model, missing, _ = load(AutoModelForSequenceClassification, path, flag, args, num_labels=1)
    if not hasattr(model, "score"):
        cli.fail(f"{flag} {path}: {type(model).__name__} has no linear head `score` on a causal model")
    # The library only warns of a head without trained weights, and the rewards would be noise. [MODEL-5]
    if missing and not (allow_untrained or args.allow_untrained_reward_model):
        hint = "train_reward.py trains one, --allow_untrained_reward_model lets a dummy run continue"
        cli.fail(f"{flag} {path}: not a trained reward model (it lacks {', '.join(sorted(missing))}); {hint}")
    return model


def load(kind, path, flag, args, **options):
    """(model, names of weights that it needs and the files lack, names that they have in addition).

    The model must have an embedding for each token of its tokenizer but the padding token, since nothing reads padding.
    Args: kind, an Auto class; path, a folder or Hub name, where adapters are merged into the model below them.
    """
    if base := base_of(path, flag):
        model, missing, unexpected = load(kind, base, f"{flag} {path}: base model", args, **options)
        model, has_head = merged(model, path, flag, args)
        missing = missing - {"score.weight"} if has_head else missing
    else:
        kernel = f"--attn_implementation {args.attn_implementation} with " if args.attn_implementation else ""
        model, info = read(
            kind,
            path,
            f"{kernel}{flag}",  # The kernel may be what cannot be had.
            args,
            dtype=torch.float32,  # A bf16 weight would swallow a step of 3e-6. [MODEL-3]
            use_safetensors=True,  # The older kind of files are pickles, which can run any code.
            attn_implementation=args.attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused below, since the library's error does not name them.
            **options,
        )
        for name, found, expected in info["mismatched_keys"]:
            cli.fail(f"{flag} {path}: {name} has the shape {list(found)}, and {list(expected)} is expected")
        missing, unexpected = set(info["missing_keys"]), info["unexpected_keys"]
    if tokenizer := find_tokenizer(path, flag, args):
        size, (tokens,) = model.get_input_embeddings().num_embeddings, vocabularies(tokenizer)
        if max(tokens.values()) >= size:
            what = f"its tokenizer has {max(tokens.values()) + 1} tokens, and the model {size} embeddings"
            cli.fail(f"{flag} {path}: {what}; model.resize_token_embeddings adds the others")
        model.num_tokens = min(size, chat.vocabulary(tokenizer))
    return prepare(model, args)
    return prepare(model, args), missing, unexpected
