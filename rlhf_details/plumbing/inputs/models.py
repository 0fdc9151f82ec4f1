"""Models and tokenizers: they are loaded or made, refused where they do not fit, and given adapters (LoRA)."""

import copy
import inspect
import json
import math
import operator
import os
import re
from pathlib import Path

import torch
import transformers  # Its models are named with it, and so imported when they are needed: --help needs none.
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file, has_file
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_details import toy, utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat


def read(kind, path, flag, args, **options):
    """What an Auto class (kind) reads from a folder or Hub name. What cannot be read ends the program with one line."""
    name, revision = console.split(path)
    with console.reading(flag, path):
        return kind.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code, **options)


# ---- tokenizers ------------------------------------------------------------------------------------------------------
# A tokenizer has one of these at least. The second line holds those of byte-level BPE, WordPiece and SentencePiece.
TOKENIZER_FILES = (
    "tokenizer_config.json tokenizer.json tekken.json "
    "vocab.json vocab.txt tokenizer.model spiece.model sentencepiece.bpe.model"
).split()


def load_tokenizer(path, flag, args):
    """The tokenizer of a model folder or Hub repository, which must have an EOS token."""
    tokenizer = find_tokenizer(path, flag, args)
    if tokenizer is None or tokenizer.eos_token_id is None:
        console.fail(f"{flag} {path}: has no {'tokenizer' if tokenizer is None else 'EOS token'}")
    find_ends(tokenizer, path, flag)
    return tokenizer


def find_ends(tokenizer, path, flag):
    """Gives a tokenizer the end tokens of its model's generation_config, for stop_tokens.end_ids."""
    name, revision = console.split(base_of(path, flag) or path)
    tokenizer.generation_eos = []
    with console.reading(flag, path):
        if has_file(name, "generation_config.json", revision):  # Many models have none.
            ends = transformers.GenerationConfig.from_pretrained(name, revision=revision).eos_token_id
            ends = ends if isinstance(ends, list) else [ends] * (ends is not None)
            tokenizer.generation_eos = [i for i in map(operator.index, ends) if 0 <= i < chat.vocabulary(tokenizer)]


def find_tokenizer(path, flag, args):
    """The tokenizer of a model, or None for a folder without one, for which the library would make up an empty one.

    Adapters that come without one have that of their base.
    """
    name, revision = console.split(path)
    base = base_of(path, flag)
    if base or os.path.isdir(path):
        with console.reading(flag, path):
            has_one = any(has_file(name, file, revision) for file in TOKENIZER_FILES)
        if not has_one:
            return base and find_tokenizer(base, flag, args)
    # Adapters have no configuration. transformers 5.17 does not do without.
    known = {"config": read(transformers.AutoConfig, base, flag, args)} if base else {}
    return read(transformers.AutoTokenizer, path, flag, args, **known)


def vocabularies(*tokenizers):
    """[{token: id}, ..] of some tokenizers, without the tokens that any of them pads with."""
    padding = {t.pad_token for t in tokenizers if t.pad_token != t.eos_token}
    return [{token: i for token, i in t.get_vocab().items() if token not in padding} for t in tokenizers]


def append_eos(tokenizer):
    """Lets a tokenizer end each text with EOS where it adds special tokens. The code here never asks it to add any."""
    eos = tokenizer.eos_token
    i = tokenizer.eos_token_id
    if tokenizer.is_fast and tokenizer("a").input_ids[-1:] != [i]:  # It may come from a model that was saved so.
        last = processors.TemplateProcessing(single=["$A", eos], special_tokens=[(eos, i)])
        steps = [tokenizer.backend_tokenizer.post_processor, last]
        tokenizer.backend_tokenizer.post_processor = processors.Sequence(list(filter(None, steps)))


# ---- models ----------------------------------------------------------------------------------------------------------
def hidden_states(model, tokens, mask, positions, cache=None):
    """Last hidden states [M, L, H] of a model's trunk.

    Args: tokens, positions [M, L]; mask [M, L] bool or [M, 1, L, L'] additive, None where nothing is padding; cache, a
    transformers cache, which is extended.
    """
    trunk = model.base_model
    inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": cache is not None}
    inputs[utils.name_of_cache(trunk)] = cache
    if "position_ids" in inspect.signature(trunk.forward).parameters:  # Bloom, for example, knows no positions.
        inputs["position_ids"] = positions
    return trunk(**inputs).last_hidden_state


def load_policy(path, flag, args):
    """A causal language model (folder or Hub name) in fp32. Adapters are merged into the model that they belong to."""
    model, missing, unexpected = load(transformers.AutoModelForCausalLM, path, flag, args)
    wrong = [f"lacks {name}" for name in missing]
    wrong += [f"has {name}" for name in unexpected if name.startswith("score.")]
    if wrong:
        console.fail(f"{flag} {path}: not a causal language model (it {', '.join(sorted(wrong))})")
    config = model.config.get_text_config()
    for name, value in vars(config).items():
        if "jitter" in name and value:  # A router with jitter would put noise into the log-probs.
            what = "draws random numbers in training mode"
            console.fail(f"{flag} {path}: a {config.model_type} {what} ({name} {value})")
    if set(getattr(config, "layer_types", None) or []) == {"linear_attention"}:
        console.fail(f"{flag} {path}: a {config.model_type} cannot be sampled: it has no cache of keys and values")
    return model


def load_teacher(args, tokenizer, head):
    """The causal language model at --teacher_model_path. Exits with an error unless it has the student's tokens, each
    with the same number and with a logit. A line warns of a chat template of its own, since it is not used.

    Args: tokenizer, head, the student's.
    """
    path = args.teacher_model_path
    flag = "--teacher_model_path"
    theirs = load_tokenizer(path, flag, args)
    if different := theirs.get_vocab().items() ^ tokenizer.get_vocab().items():
        differ = sorted(dict(different))
        console.fail(f"{flag} {path}: {len(differ)} tokens are not those of --sft_model_path, such as {differ[0]!r}")
    if theirs.chat_template and theirs.chat_template != tokenizer.chat_template:
        console.say(f"{flag} {path}: has a chat template of its own, and reads what that of --sft_model_path writes")
    model = load_policy(path, flag, args)
    if num_tokens(model) != head.vocab_size:
        console.fail(
            f"{flag} {path}: has logits of {num_tokens(model)} tokens, and --sft_model_path of {head.vocab_size}"
        )
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
    model, missing, _ = load(transformers.AutoModelForSequenceClassification, path, flag, args, num_labels=1)
    if not hasattr(model, "score"):
        console.fail(f"{flag} {path}: {type(model).__name__} has no linear head `score` on a causal model")
    # The library only warns of a head without trained weights, and the rewards would be noise. [MODEL-5]
    if missing and not (allow_untrained or args.allow_untrained_reward_model):
        hint = "train_reward.py trains one, --allow_untrained_reward_model lets a dummy run continue"
        console.fail(f"{flag} {path}: not a trained reward model (it lacks {', '.join(sorted(missing))}); {hint}")
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
        config = read(transformers.AutoConfig, path, flag, args, **options)
        text = config.get_text_config()
        if (text.pad_token_id or 0) >= text.vocab_size:  # It has no embedding, and nothing reads padding.
            text.pad_token_id = None
        kernel = f"--attn_implementation {args.attn_implementation} with " if args.attn_implementation else ""
        model, info = read(
            kind,
            path,
            f"{kernel}{flag}",  # The kernel may be what cannot be had.
            args,
            config=config,
            dtype=torch.float32,  # A bf16 weight would swallow a step of 3e-6. [MODEL-3]
            use_safetensors=True,  # The older kind of files are pickles, which can run any code.
            attn_implementation=args.attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused below, since the library's error does not name them.
        )
        for name, found, expected in info["mismatched_keys"]:
            console.fail(f"{flag} {path}: {name} has the shape {list(found)}, and {list(expected)} is expected")
        missing = set(info["missing_keys"])
        unexpected = info["unexpected_keys"]
        refuse_lost_weights(model, unexpected, path, flag)
        if model.get_output_embeddings() and not model.all_tied_weights_keys:  # whatever the configuration says
            model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    if tokenizer := find_tokenizer(path, flag, args):
        size = model.get_input_embeddings().num_embeddings
        (tokens,) = vocabularies(tokenizer)
        if max(tokens.values()) >= size:
            what = f"its tokenizer has {max(tokens.values()) + 1} tokens, and the model {size} embeddings"
            console.fail(f"{flag} {path}: {what}; model.resize_token_embeddings adds the others")
        model.num_tokens = min(size, chat.vocabulary(tokenizer))
    for name, p in model.named_parameters():
        if not p.detach().sum().isfinite():  # A sum is finite only if all numbers are.
            console.fail(f"{flag} {path}: {name} holds numbers that are not finite")
    if model.config.get_text_config() is not model.config:
        # Text gives no gradient to what a model has for images and sounds, for which DDP would wait in vain.
        heads = filter(None, (model.get_output_embeddings(), getattr(model, "score", None)))
        text = {p for m in (model.get_decoder(), *heads) for p in m.parameters()}
        for p in set(model.parameters()) - text:
            p.requires_grad_(False)
    model.source = flag, str(path)  # for lm_head
    # What the pages set to 0, for the configuration of the model that is saved.
    model.rates = {name: x for name, x in vars(model.config).items() if isinstance(x, float) and "drop" in name}
    return set_up_for_training(model, args), missing, unexpected


def refuse_lost_weights(model, names, path, flag):
    """Exits with an error if a model has no place for a weight in its files that belongs to its modules or layers, and
    is not 0. A line names modules in the files that it does not have at all.
    """
    # Old files hold the buffers of GPT-2 and its kin, which are no weights.
    names = {x for x in names - dict(model.named_buffers()).keys() if not x.endswith("masked_bias")}
    name, revision = console.split(path)
    for file in Path(cached_file(name, "config.json", revision=revision)).parent.glob("*.safetensors") if names else ():
        with safe_open(file, "pt") as saved:
            names = names - {x for x in names & {*saved.keys()} if not saved.get_tensor(x).any()}
    modules = dict(model.named_modules())
    owners = {x: re.sub(r"\.(\d+\..*|\w+)$", "", x) for x in sorted(names)}  # A layer belongs to the list of layers.
    if lost := [x for x in owners if owners[x] in modules]:
        what = f"{len(lost)} weights in its files have no place in the model of its config.json, such as {lost[0]}"
        console.fail(f"{flag} {path}: {what}")
    # A causal model has a head of its own in the place of `score`.
    if strangers := [x for x in owners if "." in owners[x] or not hasattr(model, "score")]:
        console.say(
            f"{flag} {path}: has weights that a {model.config.model_type} does not read, such as {strangers[0]}"
        )


def set_up_for_training(model, args):
    """Returns a model as training needs it: with gradient checkpointing where args ask for it.

    From then on transformers makes masks by `sdpa_mask_unread`.
    """
    transformers.AttentionMaskInterface.register("sdpa", sdpa_mask_unread)
    if getattr(args, "gradient_checkpointing", False):
        # transformers 5.24 has another name for it.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def sdpa_mask_unread(*args, attention_mask=None, allow_is_causal_skip=True, **options):
    """transformers' sdpa_mask, which does without a mask where none of its tokens is padding.

    On a GPU it makes every mask. To read one, the host would wait for the GPU in each forward.
    """
    skip = allow_is_causal_skip and (attention_mask is None or attention_mask.device.type == "cpu")
    make = transformers.masking_utils.sdpa_mask
    return make(*args, attention_mask=attention_mask, allow_is_causal_skip=skip, **options)


def num_tokens(model):
    """How many of a model's logits stand for a token of its tokenizer. Some models have a few more, as filler."""
    return getattr(model, "num_tokens", model.config.get_text_config().vocab_size)


def context(*modules):
    """The most tokens that all modules can read, math.inf where none has a limit. None does not count.

    A module is a transformers model, or holds one as `model`.
    """
    configs = [getattr(m, "model", m).config.get_text_config() for m in modules if m is not None]
    return min((getattr(c, "max_position_embeddings", None) or math.inf for c in configs), default=math.inf)


# ---- hidden states -> logits -----------------------------------------------------------------------------------------
class Head:
    """From last hidden states to logits: the output embedding, and what a model does with it afterwards.

    It looks the embedding up in the model at each call, so that it is no second owner of its weights. Logits that stand
    for no token are cut off, so that none of them is sampled or takes part in a softmax.
    """

    def __init__(self, model):
        config = model.config.get_text_config()
        # The model stands in a list, so that no module sees it as its child.
        self.model = [model]
        self.vocab_size = num_tokens(model)
        # Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, and Gemma 2 caps.
        self.scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        self.cap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden):
        """Args: hidden [.., H]. Returns: logits [.., V]."""
        logits = self.model[0].get_output_embeddings()(hidden)[..., : self.vocab_size]
        logits = logits * self.scale if self.scale != 1 else logits
        return self.cap * (logits / self.cap).tanh() if self.cap else logits


@torch.no_grad()
def lm_head(model):
    """The Head of a causal model. It is shown to give the model's own logits from `hidden_states` behind padding and
    with a cache, or the program ends with one line.
    """
    head = Head(model)
    training = model.training
    source = getattr(model, "source", ("--base_model", "scratch"))
    tokens = torch.arange(16, device=model.device).view(2, 8) % head.vocab_size
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False  # A decoder that counts its own positions would count the padding.
    positions = utils.positions_from_mask(mask)
    parts = (slice(0, 7), slice(7, 8))
    with console.reading(*source):  # A model may fail in any way, and one from the Hub brings code of its own.
        cache = transformers.DynamicCache(config=model.config)
        logits = model.eval()(input_ids=tokens[:1, 4:], use_cache=False).logits
        found = [hidden_states(model, tokens[:, m], mask[:, : m.stop], positions[:, m], cache) for m in parts]
        ours = head(torch.cat(found, 1)[:1, 4:])
        is_same = torch.allclose(ours, logits[..., : head.vocab_size], rtol=1e-3, atol=1e-3)
    model.train(training)
    if not is_same:
        why = "its output embedding alone does not give its logits, or padding or a cache changes them"
        console.fail(f"{' '.join(source)}: a {model.config.model_type} cannot be used here: {why}")
    return head


# ---- a small model of one's own --------------------------------------------------------------------------------------
def make_small(args, rows):
    """Returns (tokenizer, model): byte-level BPE trained on the rows' text, and a GPT-NeoX of the sizes that args give.

    An embedded task brings its own tokenizer. Args: rows, dictionaries with the strings `prompt` and `completion`.
    """
    if not all(isinstance(row["prompt"], str) for row in rows):
        console.fail("--base_model scratch: makes its tokenizer from text, and knows no messages and no token ids")
    task = args.dataset.partition(":")[0]
    if task in toy.TASKS:
        tokenizer = toy.tokenizer(task)
    else:
        backend = ByteLevelBPETokenizer()
        texts = [row["prompt"] + row["completion"] for row in rows]
        backend.train_from_iterator(
            texts, args.vocab_size, min_frequency=2, special_tokens=["<pad>", "<eos>"], show_progress=False
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, pad_token="<pad>", eos_token="<eos>")
    config = transformers.GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.context_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation=args.attn_implementation,
    )
    return tokenizer, set_up_for_training(transformers.GPTNeoXForCausalLM(config), args)


# ---- LoRA (arXiv 2106.09685) by the library peft, whose layers take the place of a model's linear layers -------------
def add_adapters(model, rank):
    """Freezes a model and adds adapters to train: W x becomes W x + 2 B A x, with A [rank, in], B [out, rank].

    A is random and B is 0, so the model starts as it was. A new head (`score`) is trained as a whole. A rank of 0
    changes nothing. Returns the model, whose `lora[0]` is peft's LoraModel. It stands in a list, so that it is not the
    model's child.
    """
    if not rank:
        return model
    from peft import LoraConfig, LoraModel

    config = LoraConfig(
        task_type="SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=[name.rpartition(".")[0] for name, p in model.named_parameters() if not p.requires_grad],
    )
    try:
        model.lora = [LoraModel(model, config, "default")]
    except ValueError as e:
        console.fail(f"--lora_rank {rank}: peft cannot adapt a {model.config.model_type} ({console.in_one_line(e)})")
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    console.say(f"LoRA: {model.num_parameters(True):,} of {model.num_parameters():,} parameters are trained")
    return model


def frozen_copy(policy):
    """A policy that stays as this one is before its training. With adapters it shares the model and leaves them out."""
    if hasattr(policy.model, "lora"):
        return WithoutAdapters(policy)
    return copy.deepcopy(policy).requires_grad_(False)


class WithoutAdapters(torch.nn.Module):
    """Calls what `reads` holds, the policy or what an engine has made of it, without PPO's critic."""

    def __init__(self, policy):
        super().__init__()
        self.model = policy.model
        self.policy = [policy]
        self.reads = [policy]

    def forward(self, *args, **kwargs):
        (lora,) = self.model.lora
        (policy,) = self.policy
        critic = getattr(policy, "critic", None)
        policy.critic = None  # A reference has no values.
        lora.disable_adapter_layers()
        outputs = self.reads[0](*args, **kwargs)
        lora.enable_adapter_layers()
        policy.critic = critic
        return outputs


def merge_adapters(model):
    """Adds the adapters to the weights and removes them, in place. Returns the model, an ordinary one again."""
    return model.__dict__.pop("lora")[0].merge_and_unload()


def save_adapter(model, folder, base_model):
    """Writes a folder that PeftModel.from_pretrained loads over base_model, the path that the model was loaded from."""
    from peft import get_peft_model_state_dict

    config = model.peft_config["default"]
    # A path stays as it was given: another machine has no folder of this one, but may have the same ones below its own.
    config.base_model_name_or_path, config.revision = console.split(str(base_model))
    config.inference_mode = True
    config.save_pretrained(folder)
    weights = get_peft_model_state_dict(model)
    metadata = {"format": "pt"}
    if hasattr(model, "score"):  # A new head belongs to the adapters, as in peft's own SEQ_CLS, and so does its bias.
        weights["score.weight"] = model.score.weight
        metadata["reward_bias"] = str(getattr(model.config, "reward_bias", 0.0))
    weights = {f"base_model.model.{name}": x for name, x in weights.items()}
    save_file(weights, Path(folder) / "adapter_model.safetensors", metadata=metadata)


def base_of(path, flag):
    """The model that adapters (a folder or Hub name) belong to, or None where the path holds no adapters."""
    with console.reading(flag, path):
        base = find_base(path)
    if base and os.path.realpath(base) == os.path.realpath(path):
        console.fail(f"{flag} {path}: holds adapters whose base must be the path of another model, not {base!r}")
    return base


def find_base(path):
    """As base_of. What cannot be read raises an error."""
    console.announce(path)
    name, revision = console.split(path)
    file = find_adapter_config_file(name, revision=revision)
    config = json.loads(Path(file).read_text()) if file else {}
    return "@".join(filter(None, (config.get("base_model_name_or_path"), config.get("revision")))) or None


def merged(model, path, flag, args):
    """(a base model with the adapters of a path merged into its weights, whether they have the head of a reward model).

    As peft's AutoPeftModel does, it gives the model the tokens of the tokenizer that stands beside the adapters.
    """
    console.need("peft", "peft", f"{flag} {path}, which holds adapters")
    from peft import PeftConfig, PeftModel

    name, revision = console.split(path)
    tokenizer = find_tokenizer(path, flag, args)
    with console.reading(flag, path):
        # The older adapter_model.bin is a pickle, and is not read.
        file = Path(cached_file(name, "adapter_model.safetensors", revision=revision))
        if tokenizer and len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        config = PeftConfig.from_pretrained(file.parent)
        has_head = config.task_type == "SEQ_CLS"
        if not has_head:  # As a causal model it could not take the trunk of a reward model.
            config.task_type = None
        model = PeftModel.from_pretrained(model, file.parent, config=config).merge_and_unload()
        with safe_open(file, "pt") as saved:
            metadata = saved.metadata() or {}
        if "reward_bias" in metadata:
            model.config.reward_bias = float(metadata["reward_bias"])
    return model.requires_grad_(True), has_head
