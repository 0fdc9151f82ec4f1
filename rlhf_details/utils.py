"""
What several scripts share: masks and padding, arguments, model folders. Where it makes a choice, the line has a tag.
Every function here has a test in tests/test_utils.py. Nothing runs at import. Beside it stand data.py (reading data sets),
runs.py (a run's folder, trackers and checkpoints) and engines.py (what DDP, FSDP2 and ZeRO do differently).
"""

import contextlib
import ctypes
import dataclasses
import errno
import inspect
import io
import json
import math
import os
import shutil
import sys
import tomllib
import zlib
from pathlib import Path
from typing import get_origin

import numpy as np
import torch
import tyro
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_details import lora

MEMORY_KNOBS = (
    "micro_batch_size rollout_micro_batch_size gradient_checkpointing share_prompts compile attn_implementation"
).split()
NOT_THE_MODEL = (  # arguments that may differ when a run is repeated into the same output folder
    "exp_name run_name track wandb_project_name wandb_entity wandb_tags output_dir overwrite resume checkpoint_every config "
    "push_to_hub hub_model_id "
    "eval_dataset eval_every num_sample_generations"
).split()


# ---- masks, padding, shuffles ----------------------------------------------------------------------------------------
def masked_mean(x, mask):
    """Mean of x over the True entries of mask (same shape); 0 where there is none."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(x, mask, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8) over the True entries, 0 elsewhere; `shift_mean=False` adds the mean again.

    The variance is the biased one, as in openai/lm-human-preferences, lm_human_preferences/utils/core.py (tf.nn.moments).
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)  # [PPO-11] biased, as tf.nn.moments
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def left_pad(rows, device=None):
    """Lists of token ids -> (tokens [B, L] int64, mask [B, L] bool), padding on the left.

    The filler is token 0 and never read: what is real is said by the mask alone, so pad == eos is no special case.
    """
    width = max(map(len, rows))
    # [DATA-5] on the left: every row ends where its response begins
    tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    return tokens, mask


def positions_from_mask(mask):
    """Position of each token among the real ones, [B, L] int64; padding gets 0. Source: lm-human-preferences, language/model.py."""
    return (mask.cumsum(-1) - 1).clamp(min=0)  # [DATA-6] GPT-2's learnt positions would count the padding


def permutation(n, *coordinates):
    """A shuffle of range(n) as a list; a function of the integer coordinates, e.g. (seed, epoch), and of nothing else."""
    # their number is the first one, since numpy pads with zeros and would take (1, 2) and (1, 2, 0) for the same
    return np.random.default_rng((len(coordinates), *coordinates)).permutation(n).tolist()


def learning_rate_at(step, num_steps, peak, schedule="linear", warmup_ratio=0.0):
    """Learning rate of step 1 .. num_steps: peak * step / w in the first w = ceil(warmup_ratio * num_steps), peak at step w + 1,
    then falling towards 0, which step num_steps + 1 would have: "linear" ends at peak / (num_steps - w).

    schedule: "linear" (as lm-human-preferences), "cosine" or "constant".
    """
    warmup = math.ceil(warmup_ratio * num_steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - 1 - warmup) / max(1, num_steps - warmup)  # [OPT-1] 0 at the first step after warm-up, never 1
    return peak * {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "constant": 1.0}[schedule]


def disable_dropout(model):
    """Sets every dropout of a model to zero and puts it in training mode; returns the model.

    Both the modules and the configuration's numbers: attention that calls the functional form reads the latter or a copy
    taken at construction. Training mode because `.eval()` would also switch gradient checkpointing off.
    """
    for name, value in vars(model.config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(model.config, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # [MODEL-1] noise in log-probs is noise in ratio and KL
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)  # [MODEL-2] functional dropout reads this copy
    return model.train()


# ---- arguments and errors --------------------------------------------------------------------------------------------
def fail(message):
    """One clear line on the main process, exit code 2, nothing written."""
    if os.environ.get("RANK", "0") == "0":
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)  # an echoed value may hold line breaks
        print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


def check_processes(accelerator):
    """Ends where a launcher started several processes and accelerate sees one (its habit on machines without a GPU)."""
    if int(os.environ.get("WORLD_SIZE", 1)) != accelerator.num_processes:
        fail(f"{os.environ['WORLD_SIZE']} processes, but accelerate sees {accelerator.num_processes}: set ACCELERATE_USE_CPU=true")


def leave_process_group():
    """To be called last: a process that ends with its group's threads running was once seen to abort ("terminate called")."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def parse_args(args_class, defaults=None, argv=None):
    """Command line -> Args. Later wins: the class's defaults, the embedded task's, `--config FILE.toml`, the command line.

    Args: args_class, a flat dataclass; defaults, {data set: {field: value}} of the embedded tasks; argv, sys.argv[1:] if None.
    A TOML value becomes command-line tokens, so its type is checked like theirs; an unknown key is an error (exit code 2).
    "--reward_fn A --reward_fn B" is "--reward_fn A B".
    """
    fields = {f.name: f.type for f in dataclasses.fields(args_class)}
    argv = join_lists(sys.argv[1:] if argv is None else argv, {name for name in fields if get_origin(fields[name]) is tuple})
    words = [part for a in argv for part in (a.split("=", 1) if a.startswith("--") else [a])]
    given = {
        flag[2:].replace("-", "_"): value for flag, value in zip(words, words[1:] + [""], strict=False) if flag.startswith("--")
    }
    config = {}
    if given.get("config"):
        try:
            config = tomllib.loads(Path(given["config"]).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:  # tomllib's error and a wrong encoding are ValueErrors
            fail(f"--config {given['config']}: {e}")

    def tokens(key, value):
        if isinstance(value, bool):
            return [f"--{key}" if value else f"--no_{key}"]
        return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]

    for key, value in config.items():
        if key not in fields:
            fail(f"--config {given['config']}: unknown key {key!r}")
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                tyro.cli(args_class, args=tokens(key, value))
        except ValueError as e:  # a hexadecimal integer of more digits than Python prints
            fail(f"--config {given['config']}: {key}: {e}")
        except SystemExit:
            fail(f"--config {given['config']}: {key} = {value!r} is not of that argument's type")
    dataset = str(given.get("dataset") or config.get("dataset") or "toy")
    values = (defaults or {}).get(dataset.partition(":")[0], {}) | config
    return tyro.cli(args_class, args=[token for item in values.items() for token in tokens(*item)] + argv)


def join_lists(argv, names):
    """Command-line words in which each flag of several values (names) stands once, with the values of all its places."""
    found, words, target = {}, [], None
    for word in argv:
        if word.startswith("--"):
            flag, is_joined, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            target = found.setdefault(name, []) if name in names else words
            if name in names:
                target += [value] if is_joined else []
                continue
        (words if target is None else target).append(word)
    return words + [word for name, values in found.items() for word in (f"--{name}", *values)]


def check_numbers(args):
    """Ends with one line where a count is too small, a number not finite or negative, or the run's name no folder name."""
    for name, value in dataclasses.asdict(args).items():
        lowest = 0 if name in ("seed", "eval_every", "num_sample_generations", "truncate_after", "checkpoint_every") else 1
        if type(value) is int and value < lowest:
            fail(f"--{name} {value}: must be at least {lowest}")
        if type(value) is int and value >= 2**63:
            fail(f"--{name} {value}: must be below 2**63")
        above_zero = name in ("temperature", "max_grad_norm")
        if isinstance(value, float) and not (0 < value < math.inf or (value == 0 and not above_zero)):
            fail(f"--{name} {value}: must be finite and {'above 0' if above_zero else 'not negative'}")
    if args.warmup_ratio > 1:
        fail(f"--warmup_ratio {args.warmup_ratio}: must be at most 1")
    if args.run_name is not None and (args.run_name != Path(args.run_name).name or args.run_name in ("", ".", "..")):
        fail(f"--run_name {args.run_name!r}: must be the name of a folder in runs/")


def check_path(path, flag):
    """Ends with one line where no file system could hold a path, at which is_dir(), exists() and mkdir() raise."""
    if "\0" in path or len(path) > 2000 or any(len(part.encode(errors="surrogatepass")) > 240 for part in Path(path).parts):
        fail(f"{flag} {path}: no file can have this name")  # 255 bytes at most, and save_model appends ".partial"


def default_run_name(args):
    """The run's name up to the time."""
    return f"{args.dataset.split('/')[-1].split('[')[0]}__{args.exp_name}__{args.seed}__"


def check_output_dir(args):
    """Refuses an output folder that holds a model trained with other arguments, unless `--overwrite`; repeating a run is fine."""
    if getattr(args, "hub_model_id", None) and not args.push_to_hub:
        fail(f"--hub_model_id {args.hub_model_id}: is read with --push_to_hub alone")
    for name in ("output_dir", "run_name", "base_model", "sft_model_path", "reward_model_path"):
        check_path(getattr(args, name, None) or "", f"--{name}")
    check_path(f"{default_run_name(args)}20000101-000000", "--exp_name")
    if "/" in args.exp_name:
        fail(f"--exp_name {args.exp_name}: must be part of a folder's name")
    folder = Path(args.output_dir).resolve()
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            fail(f"--output_dir {args.output_dir}: {part} is a file")
    inputs = [getattr(args, name, None) for name in ("base_model", "sft_model_path", "reward_model_path")]
    for kept in (Path.cwd(), *(Path(path).resolve() for path in inputs if path and Path(path).exists())):
        if kept == folder or folder in kept.parents:
            fail(f"--output_dir {args.output_dir}: would replace {kept}")
    if folder.is_dir() and any(item.is_dir() and item.name != "adapter" for item in folder.iterdir()):  # that is --lora_merge's
        fail(f"--output_dir {args.output_dir}: holds folders, so it is no model folder; give another one")
    if args.run_name is not None and not (args.overwrite or args.resume) and (Path("runs") / args.run_name).exists():
        fail(f"--run_name {args.run_name}: runs/{args.run_name} exists; give another name, --resume or --overwrite")
    if args.overwrite or not folder.exists() or not any(folder.iterdir()):
        return
    try:
        before = dict(json.loads((folder / "training_args.json").read_text()))
    except (OSError, ValueError, TypeError):
        fail(f"--output_dir {args.output_dir} holds something that no run of this script wrote; give another folder or --overwrite")
    now = json.loads(json.dumps(dataclasses.asdict(args)))
    for key in now:
        if key not in MEMORY_KNOBS + NOT_THE_MODEL and before.get(key) != now[key]:
            fail(
                f"--output_dir {args.output_dir} holds another model ({key} {before.get(key)!r} there, {now[key]!r} here); "
                "give another folder or --overwrite"
            )


def token_id(tokenizer, text, flag):
    """The id that a flag means by "eos", by "none" (None), or by a text that is one token; anything else ends with one line.

    The text is read as it stands within a response: at the start of a text SentencePiece's tokenizers put a space before it,
    another token, which no response would end with.
    """
    if text in ("eos", "none"):
        return tokenizer.eos_token_id if text == "eos" else None
    # the unknown token, too, where it is the text (GPT-2's is its EOS); decoded, since some vocabularies spell bytes as characters
    if (token := tokenizer.get_vocab().get(text)) is not None and tokenizer.decode([token]).strip() == text.strip("▁ "):
        return token
    try:
        before, ids = (tokenizer(words, add_special_tokens=False).input_ids for words in ("a", f"a{text}"))
    except TypeError:  # no UTF-8 text
        before = ids = []
    if ids[:-1] != before or ids[-1:] in ([], [tokenizer.unk_token_id]):
        fail(f"{flag} {text!r}: not one token of the vocabulary")
    return ids[-1]


# ---- models ----------------------------------------------------------------------------------------------------------
def load_tokenizer(folder, flag, trust_remote_code=False):
    """The tokenizer of a model folder or Hub repository; one with an EOS token is required."""
    tokenizer = find_tokenizer(folder, trust_remote_code)
    if tokenizer is None or tokenizer.eos_token_id is None:
        fail(f"{flag} {folder}: no model folder or Hub repository that has a tokenizer with an EOS token")
    return tokenizer


def find_tokenizer(folder, trust_remote_code=False):
    """The tokenizer, or None; the library would make up an empty one for a local folder that has none."""
    if os.path.isdir(folder) and not any(f for kind in ("tokenizer*", "vocab*", "*.model") for f in Path(folder).glob(kind)):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def checksum(model):
    """A number that tells a model's weights from others: the CRC-32 of their bytes, on the CPU."""
    total = 0
    for p in model.parameters():
        total = zlib.crc32(p.detach().cpu().reshape(-1).view(torch.uint8).numpy(), total)
    return total


class OneDNNLinear(nn.Linear):
    """A linear layer whose fp32 products on the CPU are oneDNN's: torch takes MKL's, which use AVX-512 on Intel's processors alone.

    The same numbers to rounding. Elsewhere (a GPU, bf16, autocast, compiled) it is the layer it was.
    """

    def forward(self, x):
        other_kind = x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu") or not x.numel()
        if other_kind or torch.compiler.is_compiling():  # the compiler chooses its own products
            return super().forward(x)
        return OneDNNProduct.apply(x, self.weight, self.bias)


class OneDNNProduct(torch.autograd.Function):
    """x [.., I], weight [O, I], bias [O] or None -> x weight^T + bias [.., O], with its gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, grad):
        (x, weight), product, (of_x, of_weight, of_bias) = ctx.saved_tensors, OneDNNProduct.forward_only, ctx.needs_input_grad
        rows, x = grad.flatten(0, -2), x.flatten(0, -2)  # [N, O], [N, I]
        return (
            product(grad, weight.t()) if of_x else None,
            product(rows.t(), x.t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )

    @staticmethod
    def forward_only(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def use_onednn(model):
    """Lets a model's linear layers use oneDNN where that is at hand and the processor has AVX-512; returns the model."""
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        keep_memory_flat()
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDNNLinear  # not a new module: names, hooks and weights stay
    return model


# weights are read from safetensors files alone: the older kind are pickles, which can run any code
# [MODEL-3] fp32: bf16 weights would swallow a step of 3e-6
LOADING = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}


def keep_memory_flat():
    """For CPU runs of many batches, each of other shapes: caps oneDNN's cache of kernels (1024 by default), and fixes the C
    library's threshold for blocks that go back to the system at once, which else grows to the largest block freed.

    benchmark/memory.py measures a toy run with and without it.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
    with contextlib.suppress(OSError, AttributeError, TypeError):  # other C libraries have no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 3 * 2**20), libc.mallopt(-1, 2**28)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, bytes


def load_policy(folder, flag, attn_implementation=None, trust_remote_code=False):
    """A causal language model in fp32 with every dropout off (and so in training mode); adapters are merged into theirs."""
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if base := lora.base_of(folder):
        return use_onednn(lora.load_merged(load_policy(base, f"{flag} {folder}: base model", **options), folder, flag))
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, **LOADING, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as e:
        kernel = f" with --attn_implementation {attn_implementation}" if attn_implementation else ""
        fail(f"{flag} {folder}: cannot be loaded as a causal language model{kernel} ({str(e).strip().splitlines()[0]})")
    if info["missing_keys"]:
        fail(f"{flag} {folder}: not a causal language model (no {', '.join(sorted(info['missing_keys']))})")
    if hasattr(model, "peft_config"):  # adapters on the Hub, which the library has put beside their base
        model = lora.merge(model).requires_grad_(True)
    if reason := why_unfit(disable_dropout(model)):
        fail(f"{flag} {folder}: a {model.config.model_type} {reason}")
    return use_onednn(model)


@torch.no_grad()
def why_unfit(model):
    """None where a causal model can be sampled with the usual cache and its training mode is free of noise; else the reason."""
    if not (accepts(model.forward, "past_key_values") or accepts(model.base_model.forward, "past_key_values")):
        return "cannot be sampled: its forward takes no past_key_values"
    tokens = torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device).unsqueeze(0)
    first, second = (model(input_ids=tokens, use_cache=False).logits for _ in range(2))
    if not torch.allclose(first, second, atol=1e-4, equal_nan=True):  # a router's jitter, which may be what the model is, too
        return "draws random numbers in training mode, although every dropout is off"
    return None


def load_reward_model(folder, flag, allow_untrained=False, attn_implementation=None, trust_remote_code=False):
    """A sequence-classification model with one label, fp32, dropout off; a head that would be made up here is refused.

    allow_untrained=True: any model will do, its head drawn at random, for dummy runs and for training to start from; of adapters
    the trunk that they make of theirs.
    """
    if allow_untrained and (base := lora.base_of(folder)):
        model = load_reward_model(base, f"{flag} {folder}: base model", True, attn_implementation, trust_remote_code)
        policy = load_policy(folder, flag, attn_implementation, trust_remote_code)
        model.base_model.load_state_dict(policy.base_model.state_dict())
        return model
    try:
        options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
        options |= {"num_labels": 1, "ignore_mismatched_sizes": True} if allow_untrained else {}
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, **LOADING, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as e:
        kernel = f" with --attn_implementation {attn_implementation}" if attn_implementation else ""
        cause = str(e).strip().splitlines()[0]
        fail(f"{flag} {folder}: cannot be loaded as a sequence-classification model{kernel} ({cause})")
    if not hasattr(model, "score"):
        fail(f"{flag} {folder}: {type(model).__name__} has no linear head `score` on a causal model")
    # [MODEL-5] the library would only warn, and the rewards be noise
    if not allow_untrained and (info["missing_keys"] or model.config.num_labels != 1):
        missing = ", ".join(sorted(info["missing_keys"])) or f"num_labels is {model.config.num_labels}, not 1"
        fail(f"{flag} {folder}: not a trained reward model ({missing}); --allow_untrained_reward_model lets a dummy run go on")
    return use_onednn(disable_dropout(model))


def find_own_tokenizer(policy_folder, policy_config, reward_folder, tokenizer, trust_remote_code=False):
    """None where a reward model reads the policy's token ids: both vocabularies are the same, but for the padding token.

    Else the reward model's own tokenizer, which must read the text; a model that has none ends the run.
    """
    configs = policy_config, AutoConfig.from_pretrained(reward_folder, trust_remote_code=trust_remote_code)
    sizes = [config.get_text_config().vocab_size for config in configs]
    found = [t for t in (tokenizer, find_tokenizer(reward_folder, trust_remote_code)) if t is not None]
    padding = {t.pad_token for t in found if t.pad_token != t.eos_token}
    same = [{token: i for token, i in t.get_vocab().items() if token not in padding} for t in found]
    if sizes[0] <= sizes[1] and all(vocabulary == same[0] for vocabulary in same):
        return None
    if len(same) == 2 and same[1] != same[0]:
        return found[1]
    fail(
        f"vocabulary mismatch: --sft_model_path {policy_folder} ({sizes[0]} embeddings, {len(same[0])} tokens) and "
        f"--reward_model_path {reward_folder} ({sizes[1]} embeddings, and no tokenizer of another vocabulary)"
    )


def save_model(args, model, tokenizer, weights=None, write=None):
    """Writes an ordinary model folder: weights, tokenizer, and the arguments that made it; complete, or not at all.

    weights, {name: tensor}; None: the model's own. write(folder, weights) may write the model in place of its `save_pretrained`.
    """
    folder = Path(args.output_dir).resolve()
    partial, before = (folder.with_name(f"{folder.name}.{kind}") for kind in ("partial", "before"))
    if before.exists() and not folder.exists():  # a save was killed between the two renames below
        before.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    if weights is not None:
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        weights = weights | {name: x.detach().cpu() for name, x in model.state_dict().items() if name not in parameters}  # buffers
    try:
        if write is None:
            model.save_pretrained(partial, state_dict=weights)
        else:
            write(partial, weights)
        tokenizer.save_pretrained(partial)
        (partial / "training_args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
        for path in (*partial.rglob("*"), partial):
            sync(path)
    except (OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    partial.rename(folder)
    shutil.rmtree(before, ignore_errors=True)


def sync(path):
    """Returns once a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as e:
        if not (Path(path).is_dir() and e.errno in (errno.EINVAL, errno.ENOTSUP)):  # some file systems cannot sync folders
            raise
    finally:
        os.close(handle)


@torch.no_grad()
def has_plain_head(model):
    """Whether a causal model's logits are its output embedding of the last hidden state: not scaled or capped afterwards."""
    tokens = torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device).unsqueeze(0)
    states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return torch.equal(model.get_output_embeddings()(states), model(input_ids=tokens, use_cache=False).logits)


def why_no_block_mask(model):
    """None where each token of a causal model may be told what it sees and where it stands; else the reason in words."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or [])
    if kinds - {"full_attention", "global"} or getattr(config, "sliding_window", None):
        return f"({config.model_type}) has sliding-window, local or recurrent layers"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"({config.model_type}) runs on {config._attn_implementation}, which cannot take the mask"
    if not accepts(model.base_model.forward, "position_ids"):
        return f"({config.model_type}) takes no positions"
    return None


def accepts(function, name):
    """Whether a function takes a parameter of that name."""
    return name in inspect.signature(function).parameters
