"""
What evaluate.py writes and prints: the folder with summary.json and samples.csv, and a table of the figures.

A figure is {"value", "low", "high"}, or {"value"} where it has no interval.
"""

import csv
import dataclasses
import json
import platform
from pathlib import Path

import torch
import transformers

from rlhf_details.plumbing import checkpoint, cli, evaluation

# These arguments may differ when an evaluation is repeated into its folder, since the figures are the same.
MAY_DIFFER = "exp_name config output_dir overwrite judge_base_url rollout_micro_batch_size attn_implementation".split()
FEW_ENDED, FAR_APART = 0.9, 2.0  # the share of ended responses, and the ratio of lengths, from which on a line warns
UNITS = {"length": "length (tokens)", "kl": "kl (nats a response)"}


# ---- the folder ------------------------------------------------------------------------------------------------------
def folder_of(args):
    """The output folder, with the policies' paths in their place, of which a file system takes some 200 letters."""
    names = "__".join(path.strip("/").replace("/", "_") for path in args.policy_path)
    return Path(args.output_dir.replace("{policy}", names[:200]))


def arguments(args, settings):
    """{"args": as they were given, "sampling": {path of a policy: {setting: value}}}. settings: of as_trained."""
    sampling = {path: dict(evaluation.sampling(own)) for path, own in settings.items()}
    return json.loads(json.dumps({"args": dataclasses.asdict(args), "sampling": sampling}))


def deciding(summary):
    """{name: value} of what decides the figures. A setting of the sampler counts as it is for each policy."""
    found = {f"{path}: {name}": x for path, own in summary["sampling"].items() for name, x in own.items()}
    settings = {name for own in summary["sampling"].values() for name in own}
    return {name: x for name, x in summary["args"].items() if name not in (*MAY_DIFFER, *settings)} | found


def check_folder(args, settings):
    """Ends with one line where the output folder holds other results or foreign files and --overwrite is not given."""
    folder = folder_of(args)
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            cli.fail(f"--output_dir {folder}: {part} is a file")
    if (folder / "config.json").exists():
        cli.fail(f"--output_dir {folder}: holds a model or a training run")
    if args.overwrite or not folder.exists() or not any(folder.iterdir()):
        return
    try:
        before = deciding(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        cli.fail(f"--output_dir {folder} holds something that is no evaluation; give another folder or --overwrite")
    for name, value in deciding(arguments(args, settings)).items():
        if before.get(name) != value:
            there = f"{name} {before.get(name)!r} there, {value!r} here"
            cli.fail(f"--output_dir {folder} holds another evaluation ({there}); give another folder or --overwrite")


def open_folder(args, settings, accelerator, num_examples):
    """Makes the output folder, with a summary that has no figures yet. Returns (folder, summary)."""
    versions = {"python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (torch, transformers)}
    summary = arguments(args, settings) | {"versions": versions, "device": str(accelerator.device)}
    summary |= {"num_processes": accelerator.num_processes, "num_examples": num_examples}
    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    return folder, summary


def write(folder, summary, metrics, tables, warnings):
    """Writes samples.csv and then summary.json, each whole or not at all. Returns the summary.

    Args: metrics, {path: {"policy": {name: figure}, "opponent": .., "win_rate": ..}}; tables, {path: {column: list of
    N}}; warnings, lines. Where there is one policy, neither file names it: metrics and columns are its own.
    """
    columns = {}
    for path, table in tables.items():
        is_shared = {name: name == "prompt" or len(tables) == 1 for name in table}
        columns |= {name if is_shared[name] else f"{path}: {name}": x for name, x in table.items()}
    partial = folder / "samples.csv.partial"
    with open(partial, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    partial.replace(folder / "samples.csv")
    summary = summary | {"metrics": metrics[path] if len(metrics) == 1 else metrics, "warnings": warnings}
    checkpoint.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    return summary


# ---- what is printed -------------------------------------------------------------------------------------------------
def columns_of(args, metrics, tables):
    """[(label, figures, its responses, whether they ended)], a column of the printed table each.

    The policies come first. Then comes the opponent, once for all policies whose settings it was sampled with.
    """
    columns, seen = [], []
    for path, side in [(path, "") for path in metrics] + [(path, "opponent_") for path in metrics]:
        figures, table = metrics[path].get("opponent" if side else "policy"), tables[path]
        model, texts = (args.opponent_path or "references") if side else path, table.get(f"{side}response")
        if figures is None or (model, texts) in seen:
            continue
        label = f"{model}, as {path}" if model in dict(seen) else model
        seen.append((model, texts))
        columns.append((label, figures, texts, table.get(f"{side}ended")))
    return columns


def show(args, summary, metrics, tables):
    """Prints a table of all figures, the first four samples, and each policy's win rate, with what makes it doubtful.

    Args: summary, metrics and tables as of `write`.
    """
    columns, first = columns_of(args, metrics, tables), next(iter(tables.values()))
    cli.say(f"{args.exp_name}: {len(first['prompt'])} prompts of {args.dataset}")
    labels = "rewards/reward_model gold parses length ended distinct_1 distinct_2 distinct_3 kl".split()
    labels += [name for _, figures, *_ in columns for name in figures]  # Reward functions come last.
    lines = [["", *(label for label, *_ in columns)]]
    for name in dict.fromkeys(labels):
        if any(name in figures for _, figures, *_ in columns):
            lines.append([UNITS.get(name, name), *(as_text(figures.get(name)) for _, figures, *_ in columns)])
    if "win_rate" in next(iter(metrics.values())):
        lines.append(["win rate", *(as_text(own["win_rate"]) for own in metrics.values())])
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(lines[0]))]
    for line in lines:
        cli.say("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)).rstrip())
    for i in range(min(4, len(first["prompt"]))):
        words = [f"prompt: {first['prompt'][i].strip()}"]
        for label, _, texts, ended in columns:
            words.append(f"{label}: {texts[i].strip()}" + " [did not end]" * (ended is not None and not ended[i]))
        cli.say(" | ".join(words).replace("\n", "⏎"))
    for path, own in metrics.items():
        if "win_rate" in own:
            whose = f" of {path}" * (len(metrics) > 1)
            cli.say(f"Model win rate{whose}: {win_rate_line(own, args.judge == 'llm')}")
    for line in summary["warnings"]:
        cli.say(f"warning: {line}")


def as_text(figure):
    """A figure as a number and its interval where it has one, or - where there is no figure."""
    if figure is None:
        return "-"
    interval = f"  ({figure['low']:z.3f} .. {figure['high']:z.3f})" if "low" in figure else ""
    return f"{figure['value']:z.3f}{interval}"


def win_rate_line(metrics, is_read):
    """The win rate in words. is_read: whether the verdicts were read from answers, which may be unparsable."""
    w, sides = metrics["win_rate"], (metrics["policy"], metrics["opponent"])
    counts = f"{w['won']} won, {w['tied']} tied, {w['lost']} lost" + f", {w['unparsable']} unparsable" * is_read
    # Judges like long responses, so the mean lengths stand beside every win rate. [EVAL-4]
    ours, theirs = (f"{side['length']['value']:.1f}" for side in sides)
    # A response that was cut off is compared as it stands.
    ended = " against ".join(f"{side['ended']['value']:.1%}" if "ended" in side else "-" for side in sides)
    interval = f"{w['low']:.2%} .. {w['high']:.2%}, {w['pairs']} pairs"
    return f"{w['value']:.2%}  ({interval}: {counts}, mean length {ours} against {theirs} tokens, ended {ended})"


def doubts(args, settings, metrics):
    """Lines on what makes figures doubtful: training's own judge, responses without an end, lengths far apart."""
    lines = []
    for path, own in metrics.items():
        if judges := evaluation.trained_rewards(args, path):
            what = f"{' and '.join(judges)} says who wins, which is what training optimised"
            lines.append(f"{path}: {what}, so this win rate cannot show over-optimisation")
        for side, name in (("policy", path), ("opponent", args.opponent_path)):
            share = own.get(side, {}).get("ended", {"value": 1})["value"]
            if share < FEW_ENDED:
                what = f"only {share:.1%} of its responses ended within {settings[path].response_length} tokens"
                lines.append(f"{name}: {what}, and the others are scored and compared as they were cut off")
        lengths = [own[side]["length"]["value"] for side in ("policy", "opponent") if side in own]
        if max(lengths) > FAR_APART * min(lengths):
            what = " against ".join(f"{length:.1f}" for length in lengths)
            lines.append(f"{path}: mean length {what} tokens: rewards and judges may pay for the length alone")
    return list(dict.fromkeys(lines))  # Policies may share an opponent.
