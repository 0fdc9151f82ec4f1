"""
What evaluate.py reads: how a policy sampled in training, the prompts, and the completions that it is compared with.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from rlhf_details import utils
from rlhf_details.plumbing import cli, data, engines, judge, models, rewards, tokenization

# How a policy is sampled where neither a flag nor its folder says it.
FALLBACKS = dict(temperature=1.0, response_length=53, stop_token="eos", truncate_token="none", truncate_after=0)
FALLBACKS |= {"kl_temperature": 1.0}
NEAR_GREEDY = 0.01  # the temperature of --near_greedy


def as_trained(args):
    """{path of a policy: its args}, where each setting that no flag gives (None) is the training's, or the fallback.

    The training's settings stand in training_args.json in the policy's folder. A printed line says which settings hold
    and where they come from.
    """
    if not args.policy_path:
        cli.fail(f"--policy_path: required with --dataset {args.dataset}: a trained model's folder or Hub name")
    if len(set(args.policy_path)) < len(args.policy_path):
        cli.fail(f"--policy_path {' '.join(args.policy_path)}: names a policy twice")
    if args.near_greedy and args.temperature is not None:
        cli.fail(f"--near_greedy: means --temperature {NEAR_GREEDY}, and contradicts --temperature {args.temperature}")
    return {path: of_policy(args, path) for path in args.policy_path}


def of_policy(args, folder):
    """`as_trained` for one policy."""
    path, trained, values, sources = Path(folder, "training_args.json"), training_args(folder), {}, {}
    trained["kl_temperature"] = trained.get("temperature")
    for name, fallback in FALLBACKS.items():
        near_greedy = NEAR_GREEDY if name == "temperature" and args.near_greedy else None
        found = {f"--{name}": getattr(args, name), "--near_greedy": near_greedy}
        found |= {f"from {path}": trained.get(name), f"not in {path}": fallback}
        source, value = next((source, value) for source, value in found.items() if value is not None)
        values[name] = value
        sources.setdefault(source, []).append(f"{name} {value}")
    cli.say("sampling: " + "; ".join(f"{', '.join(words)} ({source})" for source, words in sources.items()))
    return replace(args, **values)


def training_args(folder):
    """{flag: value} of the run that made a policy, {} where its folder does not say it."""
    path = Path(folder, "training_args.json")
    with cli.reading("--policy_path", path):
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def sampling(args):
    """The settings that a policy is sampled with, ((name, value), ..)."""
    return tuple((name, getattr(args, name)) for name in FALLBACKS)


def end_ids(tokenizer, args):
    """The ids (or None) of the token that stops the sampler and of the one that a complete response ends with."""
    stop_id = models.token_id(tokenizer, args.stop_token, "--stop_token")
    end_id = models.token_id(tokenizer, args.truncate_token, "--truncate_token")
    return stop_id, stop_id if end_id is None else end_id


def check(args, settings):
    """Ends with one line (exit code 2) where arguments are wrong or contradict each other. settings: of as_trained."""
    for own in settings.values():
        cli.check_numbers(own)
        if own.truncate_after and (own.truncate_token == "none" or own.truncate_after >= own.response_length):
            rule = "needs a truncate_token, and must be below response_length"
            cli.fail(f"--truncate_after {own.truncate_after}: {rule}")
    rewards.check_functions(args)
    if args.judge == "reward_fn" and not args.reward_fn:
        cli.fail("--judge reward_fn: needs --reward_fn")
    if args.judge == "reward_model" and not args.reward_model_path:
        cli.fail("--judge reward_model: needs --reward_model_path")
    if args.judge == "gold" and args.dataset.partition(":")[0] != "toy":
        cli.fail(f"--judge gold: only the embedded task has a true reward, not --dataset {args.dataset}")
    judge.check(args)


def read_rows(args, use_references):
    """The rows of --dataset, each with its `prompt` and, where use_references says so, its `completion`."""
    rows = data.read_prompts(args.dataset, "--dataset", args.prompt_template, args.num_examples, "test")
    return data.with_completions(rows, f"--dataset {args.dataset}") if use_references else rows


def points(args, score, table, side):
    """What --judge compares, [N]: gold, the reward model's score, or the weighted sum of all rewards that apply.

    Args: score, a Scorer; table, {column: list of N}, whose columns of one side's responses begin with `side`.
    """
    if args.judge == "gold":
        return table[f"{side}gold"]
    weights = dict(zip(score.names[: score.num_weighted], score.weights.tolist(), strict=False))
    weights = weights if args.judge == "reward_fn" else {"reward_model": 1.0}
    columns = [[weight * (x or 0) for x in table[f"{side}rewards/{name}"]] for name, weight in weights.items()]
    return list(map(sum, zip(*columns, strict=True)))


def trained_rewards(args, path):
    """Those of the judge's rewards, flags' values, that the policy at a path was trained on."""
    judges = {"reward_model": [args.reward_model_path], "reward_fn": [args.reward_model_path, *args.reward_fn]}
    trained = training_args(path)
    trained = [trained.get("reward_model_path"), *trained.get("reward_fn", ())]
    return [reward for reward in judges.get(args.judge, ()) if reward and reward in trained]


def encode_references(args, tokenizer, prompts, context, device):
    """The completions of the prompts' rows: (their N texts; tokens, mask [N, longest], right-padded).

    Args: context, the most tokens that a prompt and its completion may have, because the reward model reads both.
    """
    ids = [tokenization.encode(tokenizer, row.columns["prompt"], row.columns["completion"])[1] for row in prompts]
    for row, reference in zip(prompts, ids, strict=True):
        if (length := len(row.ids + reference)) > context:
            tokens = f"{length} tokens; the reward model's context is {context}"
            hint = tokenization.what_helps(row.ids, reference)
            cli.fail(f"{row.source}: prompt and completion of row {row.number} have {tokens}; {hint}")
    pairs = [(row.number, reference) for row, reference in zip(prompts, ids, strict=True)]
    tokenization.warn_of_empty(tokenizer, pairs, f"--dataset {args.dataset}", "completion")
    tokens, mask = (x.flip(1) for x in utils.left_pad([reference[::-1] for reference in ids], device))
    return [data.as_text(tokenizer, row.columns["completion"]) for row in prompts], tokens, mask


def load_models(args, device):
    """Returns (tokenizer, {path: causal language model}, reward), where all models are transformers' and in fp32.

    reward: (the model, its own tokenizer or None), or () without a reward model.
    """
    tokenizer = models.load_tokenizer(args.policy_path[0], "--policy_path", args)
    named = [("policy_path", path) for path in args.policy_path]
    named += [(flag, path) for flag in ("opponent_path", "ref_model_path") if (path := getattr(args, flag))]
    loaded = {}
    for flag, path in named:
        if path not in loaded:
            loaded[path] = models.load_policy(path, f"--{flag}", args).to(device).eval()
    readers = [(flag, path, loaded[path]) for flag, path in named]
    if path := args.reward_model_path:
        torch.manual_seed(args.seed)  # for a head that is drawn at random
        readers.append(("reward_model_path", path, models.load_reward_model(path, args).to(device).eval()))
    own_tokenizer = check_vocabularies(args, tokenizer, readers)
    engines.use_one_thread(*(model for *_, model in readers))
    return tokenizer, loaded, (readers[-1][2], own_tokenizer) if args.reward_model_path else ()


def check_vocabularies(args, tokenizer, readers):
    """Ends with one line where a model does not read the token ids that the policies and the opponent write.

    Args: tokenizer, the first policy's; readers, [(flag, path, model), ..], of which the first is that policy.
    Returns: the tokenizer of a reward model of another vocabulary, which is given text as in training, or None.
    """
    own_tokenizer = None
    # Numbers of embeddings, because a model may have more of them than its tokenizer has tokens.
    sizes = [(flag, path, model.config.get_text_config().vocab_size) for flag, path, model in readers]
    writers = {"ref_model_path": ["policy_path"], "reward_model_path": ["policy_path", "opponent_path"]}
    for flag, path, size in sizes:
        with cli.reading(f"--{flag}", path):
            both = tokenizer, models.find_tokenizer(path, args) or tokenizer
        ours, theirs = models.vocabularies(*both)
        if flag == "reward_model_path" and ours != theirs:
            own_tokenizer = both[1]
        elif ours != theirs or any(other > size for writer, _, other in sizes if writer in writers.get(flag, [])):
            first = f"--policy_path {sizes[0][1]} ({sizes[0][2]} embeddings, {len(ours)} tokens)"
            cli.fail(f"vocabulary mismatch: {first} and --{flag} {path} ({size} embeddings, {len(theirs)} tokens)")
    return own_tokenizer
