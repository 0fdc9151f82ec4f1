"""
What evaluate.py reads: how the policy sampled in training, the prompts, and the completions that it is compared with.
"""

import json
from dataclasses import replace
from pathlib import Path

from rlhf_details import utils
from rlhf_details.plumbing import cli, data, encoding, models


def as_trained(args, fallbacks):
    """The arguments, where each setting that no flag gives (None) is the training's, or else the fallback.

    The training's settings stand in training_args.json in the policy's folder. A printed line says which settings hold
    and where they come from. Args: fallbacks, {setting: value}.
    """
    if not args.policy_path:
        hint = "only --dataset toy from the command line has a default"
        cli.fail(f"--policy_path: required, a model folder or Hub name ({hint})")
    path, values, sources = Path(args.policy_path, "training_args.json"), {}, {}
    with cli.reading("--policy_path", path):
        trained = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    trained["kl_temperature"] = trained.get("temperature")
    for name, fallback in fallbacks.items():
        found = {f"--{name}": getattr(args, name), f"from {path}": trained.get(name), f"not in {path}": fallback}
        source, value = next((source, value) for source, value in found.items() if value is not None)
        value = float(value) if type(fallback) is float and type(value) is int else value
        if type(value) is not type(fallback):
            cli.fail(f"--policy_path {path}: {name} {value!r} is not of type {type(fallback).__name__}")
        values[name] = value
        sources.setdefault(source, []).append(f"{name} {value}")
    cli.say("sampling: " + "; ".join(f"{', '.join(words)} ({source})" for source, words in sources.items()))
    return replace(args, **values)


def read_rows(args, use_references):
    """The rows of --dataset, each with its `prompt` and, where use_references says so, its `completion`."""
    rows = data.read_prompts(args.dataset, "--dataset", args.prompt_template, args.num_examples, "test")
    return data.with_completions(rows, f"--dataset {args.dataset}") if use_references else rows


def encode_references(args, tokenizer, prompts, context, device):
    """The completions of the prompts' rows: (their N texts; tokens, mask [N, longest], right-padded)."""
    ids = [encoding.encode(tokenizer, row.columns["prompt"], row.columns["completion"])[1] for row in prompts]
    for row, reference in zip(prompts, ids, strict=True):
        if args.reward_model_path and (length := len(row.ids + reference)) > context:
            tokens = f"{length} tokens; the models' context is {context}"
            cli.fail(f"{row.source}: prompt and completion of row {row.number} have {tokens}")
    tokens, mask = (x.flip(1) for x in utils.left_pad([reference[::-1] for reference in ids], device))
    return [data.as_text(tokenizer, row.columns["completion"]) for row in prompts], tokens, mask


def check_vocabularies(args, tokenizer, loaded):
    """Ends with one line where a model does not read the token ids that the policy and the opponent write.

    Args: tokenizer, the policy's; loaded, {flag: model}.
    """
    sizes = {flag: model.config.get_text_config().vocab_size for flag, model in loaded.items()}  # numbers of embeddings
    writers = {"ref_model_path": ["policy_path"], "reward_model_path": ["policy_path", "opponent_path"]}
    for flag, size in sizes.items():
        with cli.reading(f"--{flag}", getattr(args, flag)):
            both = tokenizer, models.find_tokenizer(getattr(args, flag), args) or tokenizer
        ours, theirs = models.vocabularies(*both)
        if ours != theirs or any(sizes.get(writer, 0) > size for writer in writers.get(flag, [])):
            named = f"--policy_path {args.policy_path} ({sizes['policy_path']} embeddings, {len(ours)} tokens)"
            other = f"--{flag} {getattr(args, flag)} ({size} embeddings, {len(theirs)} tokens)"
            cli.fail(f"vocabulary mismatch: {named} and {other}")
