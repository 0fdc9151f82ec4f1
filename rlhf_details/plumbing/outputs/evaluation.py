"""
What evaluate.py reads, writes and prints: how a policy was sampled in training, the models, the completions that it is
compared with, the folder with summary.json and samples.csv, and the table of figures.
"""

import dataclasses
import json
import os
import platform
from datetime import date
from pathlib import Path

import torch
from transformers.utils import cached_file

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat, cli, flags, models, stop_tokens
from rlhf_details.plumbing.machine import engines, environments, judge, rewards
from rlhf_details.plumbing.outputs import atomic, trackers

# How a policy is sampled where neither a flag nor its folder says it.
FALLBACKS = dict(
    temperature=1.0,
    response_length=53,
    stop_token="eos",
    truncate_token="none",
    truncate_after=0,
    chat_template_kwargs="{}",
    prompt_template=None,
)
# How an environment was asked, where there was one.
TURNS = dict(
    env_fn=None,
    tools=(),
    tool_timeout=10.0,
    env_role="user",
    max_turns=8,
    max_observation_tokens=None,
    long_observation="cut",
)
ANSWERS = "judge_answers.jsonl"  # what a language model has answered, also of an evaluation that was not finished


def as_trained(args):
    """The args, where each setting that no flag gives (None) is the training's, or the fallback. A line names them all.

    The training's settings stand in training_args.json in the policy's folder or repository.
    """
    if not args.policy_path:
        console.fail(f"--policy_path: required with --dataset {args.dataset}: a trained model's folder or Hub name")
    trained = training_args(args.policy_path)
    if not os.path.exists(args.policy_path):  # A stranger's file does not say which code runs here.
        for name in {"env_fn", "tools"} & trained.keys():
            if (code := trained.pop(name)) and not getattr(args, name):
                console.say(
                    f"warning: --policy_path {args.policy_path}: was trained with --{name} {code}; give the flag"
                )
    values = FALLBACKS | TURNS
    for layer in (trained, vars(args)):
        values |= {name: layer[name] for name in values if layer.get(name) is not None}
    if not (values["env_fn"] or values["tools"]):
        values |= dict.fromkeys(TURNS)
    source = "as it was trained" if trained else "no training_args.json was found with it"
    if "base_model" in trained:
        source = "as its training sampled for ROUGE-L"
    elif is_dpos(trained):
        source = "DPO's loss is at temperature 1, and it did not use this response_length"
    named = ", ".join(f"{name} {x}" for name, x in values.items() if x is not None)
    console.say(f"sampling: {named} (flags, and else {source})")
    day = args.template_date or trained.get("template_date") or str(date.today())
    return dataclasses.replace(args, **values, template_date=day)


def training_args(path):
    """{flag: value} of the run that made a policy (a folder or Hub name), {} where nothing there says it."""
    name, revision = console.split(path)
    with console.reading("--policy_path", path):
        console.announce(path)
        file = cached_file(
            name,
            "training_args.json",
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,  # Without a network the rest may be in the cache.
        )
    trained = console.read_json(Path(file), "--policy_path") if file else {}
    if is_dpos(trained):  # Its temperature is that of the embedded task's comparisons, and its loss is at 1.
        trained.pop("temperature", None)
    return trained


def is_dpos(trained):
    """Whether the flags of a training are those of DPO, the one that starts from a policy and samples nothing."""
    return "sft_model_path" in trained and "stop_token" not in trained


def check(given, args):
    """Exits with an error if arguments are wrong or contradict each other. args: what as_trained makes of `given`."""
    cli.check_template(args)
    cli.check_numbers(args)
    cli.check_sampler(args)
    if args.truncate_after and (args.truncate_token == "none" or args.truncate_after >= args.response_length):
        rule = "needs a truncate_token, and must be below response_length"
        console.fail(f"--truncate_after {args.truncate_after}: {rule}")
    rewards.check_functions(args)
    if args.max_turns:
        environments.check(args)
        if args.truncate_token != "none":
            console.fail(
                f"--truncate_token {args.truncate_token}: not with --env_fn, whose trajectories are read whole"
            )
    if args.samples_per_prompt > 1 and not args.reward_fn:
        rule = "needs --reward_fn, with rewards that are True or False"
        console.fail(f"--samples_per_prompt {args.samples_per_prompt}: {rule}")
    needed = {"reward_fn": "reward_fn", "reward_model": "reward_model_path"}.get(args.judge)
    if needed and not getattr(args, needed):
        console.fail(f"--judge {args.judge}: needs --{needed}")
    if args.judge == "gold" and args.dataset.partition(":")[0] != "toy":
        console.fail(f"--judge gold: only the embedded task has a true reward, not --dataset {args.dataset}")
    judge.check(args)
    check_folder(args, settings(given, args))


def load_models(args, device, rows):
    """Returns (tokenizer, {path: causal language model}, the reward model that reads token ids, or None).

    All models are transformers' and in fp32. Exits with an error if opponent or reference do not read the token ids
    that the policy writes. A line warns of a chat template or end tokens of their own, since they are not used.
    Args: rows, those with the prompts.
    """
    has_chats = any(chat.is_messages(row["prompt"]) for row in rows)
    tokenizer = models.load_tokenizer(args.policy_path, "--policy_path", args)
    loaded = {}
    for flag in ("policy_path", "opponent_path", "ref_model_path"):
        path = getattr(args, flag)
        if path is None or path in loaded:
            continue
        loaded[path] = models.load_policy(path, f"--{flag}", args).to(device).eval()
        own = models.find_tokenizer(path, f"--{flag}", args) or tokenizer
        ours, theirs = models.vocabularies(tokenizer, own)
        if ours != theirs:
            console.fail(f"vocabulary mismatch: --policy_path {args.policy_path} and --{flag} {path} have other tokens")
        if own is not tokenizer:
            warn_of_own_words(args, flag, own, tokenizer, has_chats)
    engines.use_one_thread(*loaded.values())
    torch.manual_seed(args.seed)  # for a reward model's head that is drawn at random
    if not rewards.reads_token_ids(args, tokenizer):
        return tokenizer, loaded, None
    return tokenizer, loaded, models.load_reward_model(args.reward_model_path, args).to(device).eval()


def warn_of_own_words(args, flag, own, tokenizer, has_chats):
    """Says where opponent or reference have a chat template or end tokens of their own, since the policy's are used.

    Args: own, tokenizer, theirs and the policy's; has_chats, whether a chat template is used at all.
    """
    path = getattr(args, flag)
    kept = ["a chat template"] * (has_chats and own.chat_template not in (None, tokenizer.chat_template))
    told = "so the KL is from a model that reads a foreign template"
    if flag == "opponent_path":
        models.find_ends(own, path, f"--{flag}")
        others = {*stop_tokens.end_ids(own)} - {*stop_tokens.end_ids(tokenizer)}
        kept += ["end tokens"] * (args.stop_token == "eos" and bool(others))
        told = f"so it may answer worse or not end, and the win rate be too high; --policy_path {path} shows it alone"
    if kept:
        console.say(f"warning: --{flag} {path}: has {' and '.join(kept)} of its own, but is given the policy's, {told}")


# ---- the folder, and what is printed ---------------------------------------------------------------------------------
def settings(given, args):
    """{"args": as they were given, "sampling": what the policy is sampled with}."""
    sampling = {name: getattr(args, name) for name in FALLBACKS | TURNS}
    return {"args": dataclasses.asdict(given) | {"overwrite": False}, "sampling": sampling}


def folder_of(args):
    """The output folder, with the policy's path in its place, of which a file system takes some 200 letters."""
    return Path(args.output_dir.replace("{policy}", args.policy_path.strip("/").replace("/", "_")[:200]))


def check_folder(args, now):
    """Exits with an error if the output folder holds other results without --overwrite, or other files.

    now: what `settings` says of this evaluation.
    """
    folder = folder_of(args)
    if any(part.is_file() for part in (folder, *folder.parents)):
        console.fail(f"--output_dir {folder}: is a file, or in one")
    if {file.name for file in folder.glob("*")} - {"summary.json", "samples.csv", ANSWERS}:
        console.fail(f"--output_dir {folder}: holds other files, so it is no evaluation; give another folder")
    before = {} if args.overwrite else console.read_json(folder / "summary.json", "--output_dir")
    there, here = (x.get("args", {}) | x.get("sampling", {}) for x in (before, now))
    if before and (changed := flags.differences(there, here)):
        console.fail(
            f"--output_dir {folder} holds another evaluation ({changed[0]}); give another folder or --overwrite"
        )


def report(args, given, metrics, table, accelerator):
    """Writes samples.csv and then summary.json, each whole or not at all, and prints them. Returns the summary.

    Args: metrics, {"policy": {name: figure}, "opponent": .., "win_rate": ..}; table, {column: list of N}.
    """
    import pandas

    folder = folder_of(args)
    samples = pandas.DataFrame(table)
    summary = settings(given, args) | engines.about(accelerator)
    summary["versions"]["python"] = platform.python_version()
    summary |= {"num_examples": len(samples), "metrics": metrics, "warnings": doubts(args, given, metrics)}
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / "samples.csv", samples.to_csv(index=False))
    atomic.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    sides = {"policy": args.policy_path, "opponent": args.opponent_path or "references"}
    names = {sides[side]: {name: as_text(x) for name, x in metrics[side].items()} for side in sides if side in metrics}
    console.say(f"{args.exp_name}: {len(samples)} prompts of {args.dataset}; length in tokens, kl in nats per response")
    console.say(pandas.DataFrame(names).fillna("-").to_string())
    texts = [name for name in ("prompt", "response", "opponent_response") if name in table]
    trackers.print_rows("samples", samples[texts].head(4).to_dict("records"))
    if "win_rate" in metrics:
        console.say(f"Model win rate: {win_rate_line(metrics)}")
    for line in summary["warnings"]:
        console.say(f"warning: {line}")
    return summary


def as_text(figure):
    """A figure as a number and its interval where it has one."""
    interval = f"  ({figure['low']:z.3f} .. {figure['high']:z.3f})" if "low" in figure else ""
    return f"{figure['value']:z.3f}{interval}"


def win_rate_line(metrics):
    """The win rate in words."""
    w = metrics["win_rate"]
    sides = (metrics["policy"], metrics["opponent"])
    counts = f"{w['won']} won, {w['tied']} tied, {w['lost']} lost"
    counts += "".join(f", {w[name]} {name}" for name in ("unparsable", "unscored") if w[name])
    # Judges like long responses, so the mean lengths stand beside every win rate. [EVAL-4]
    ours, theirs = (f"{side['length']['value']:.1f}" for side in sides)
    # A response that was cut off is compared as it stands.
    ended = " against ".join(f"{side['ended']['value']:.1%}" if "ended" in side else "-" for side in sides)
    interval = f"{w['low']:.2%} .. {w['high']:.2%}, {w['pairs']} pairs"
    return f"{w['value']:.2%}  ({interval}: {counts}, mean length {ours} against {theirs} tokens, ended {ended})"


def doubts(args, given, metrics):
    """Lines where training's own judge says who wins, and where most responses were cut at a length that nobody chose.

    Args: those of `report`.
    """
    trained = training_args(args.policy_path)
    judges = {"reward_model": [args.reward_model_path], "reward_fn": [args.reward_model_path, *args.reward_fn]}
    # A run with a teacher has only logged its functions.
    functions = [] if "teacher_model_path" in trained else trained.get("reward_fn", [])
    optimised = {trained.get("reward_model_path"), *functions} - {None}
    judges = [x for x in judges.get(args.judge, ()) if x in optimised]
    what = f"{' and '.join(judges)} says who wins, which is what training optimised"
    lines = [f"{what}, so this win rate cannot show over-optimisation"] if judges else []
    ended = metrics["policy"].get("ended", {"value": 1.0})["value"]
    # A training with a stop token has sampled with this length.
    if ended < 0.5 and given.response_length is None and "stop_token" not in trained:
        length = f"{1 - ended:.0%} of the responses were cut at {args.response_length} tokens"
        lines.append(f"{length}, a limit that its training did not set; give a larger --response_length")
    return lines
