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

from rlhf_details.plumbing import cli, saving

# These arguments may differ when an evaluation is repeated into its folder, since the figures are the same.
MAY_DIFFER = "exp_name config output_dir overwrite judge_base_url rollout_micro_batch_size attn_implementation".split()


# ---- the folder ------------------------------------------------------------------------------------------------------
def folder_of(args):
    """The output folder, with the policy's path in its place."""
    return Path(args.output_dir.replace("{policy}", args.policy_path.strip("/").replace("/", "_")))


def check_folder(args):
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
        before = dict(json.loads((folder / "summary.json").read_text())["args"])
    except (OSError, ValueError, TypeError, LookupError):
        cli.fail(f"--output_dir {folder} holds something that is no evaluation; give another folder or --overwrite")
    for name, value in json.loads(json.dumps(dataclasses.asdict(args))).items():
        if name not in MAY_DIFFER and before.get(name) != value:
            there = f"{name} {before.get(name)!r} there, {value!r} here"
            cli.fail(f"--output_dir {folder} holds another evaluation ({there}); give another folder or --overwrite")


def open_folder(args, accelerator, num_examples):
    """Makes the output folder, with a summary that has no figures yet. Returns (folder, summary)."""
    versions = {"python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (torch, transformers)}
    summary = {"args": dataclasses.asdict(args), "versions": versions, "device": str(accelerator.device)}
    summary |= {"num_processes": accelerator.num_processes, "num_examples": num_examples}
    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    saving.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    return folder, summary


def write(folder, summary, table):
    """Writes samples.csv and then summary.json, each whole or not at all. table: {column: list of N}."""
    partial = folder / "samples.csv.partial"
    with open(partial, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    partial.replace(folder / "samples.csv")
    saving.write_text(folder / "summary.json", json.dumps(summary, indent=1))


# ---- what is printed -------------------------------------------------------------------------------------------------
def show(args, metrics, table):
    """Prints all figures, the policy's beside the opponent's, then the first four samples and the win rate.

    Args: metrics, {"policy": {name: figure}, "opponent": .., "win_rate": ..}; table, as `write` has it.
    """
    cli.say(f"{args.exp_name}: {args.policy_path} on {len(table['prompt'])} prompts of {args.dataset}")
    end = args.stop_token if args.truncate_token == "none" else args.truncate_token
    labels = {"score": "score (reward model)", "gold": "gold", "parses": "parses", "length": "length (tokens)"}
    labels |= {"ended": f"ended ({end})", "distinct_1": "distinct-1", "distinct_2": "distinct-2"}
    labels |= {"distinct_3": "distinct-3", "kl": f"KL (nats, T = {args.kl_temperature:g})"}
    sides = [metrics[side] for side in ("policy", "opponent") if side in metrics]
    names = [*labels, *(name for name in sides[0] if name not in labels)]  # reward functions come last
    lines = [["", args.policy_path, args.opponent_path or "references"][: len(sides) + 1]]
    for name in names:
        if any(name in side for side in sides):
            lines.append([labels.get(name, name), *(as_text(side.get(name)) for side in sides)])
    for label, *cells in lines:
        cli.say(f"  {label:22}" + "".join(f" {cell:34}" for cell in cells))
    for i in range(min(4, len(table["prompt"]))):
        columns = {"prompt": "prompt", "response": "response", "opponent": "opponent_response"}
        texts = [f"{name}: {table[column][i].strip()}" for name, column in columns.items() if column in table]
        cli.say(" | ".join(texts).replace("\n", "⏎"))
    if "win_rate" in metrics:
        cli.say(win_rate_line(metrics, args.judge == "llm"))


def as_text(figure):
    """A figure as a number and its interval where it has one, or nothing where there is no figure."""
    if figure is None:
        return ""
    interval = f"  ({figure['low']:.3f} .. {figure['high']:.3f})" if "low" in figure else ""
    return f"{figure['value']:.3f}{interval}"


def win_rate_line(metrics, is_read):
    """The win rate as a line. is_read: whether the verdicts were read from answers, which may be unparsable."""
    w = metrics["win_rate"]
    counts = f"{w['won']} won, {w['tied']} tied, {w['lost']} lost" + f", {w['unparsable']} unparsable" * is_read
    # Judges like long responses, so the mean lengths stand beside every win rate. [EVAL-4]
    ours, theirs = (f"{metrics[side]['length']['value']:.1f}" for side in ("policy", "opponent"))
    interval = f"{w['low']:.2%} .. {w['high']:.2%}, {w['pairs']} pairs"
    return f"Model win rate: {w['value']:.2%}  ({interval}: {counts}, mean length {ours} against {theirs} tokens)"
