"""
The folder of a run: how it is called, and what its config.json says beside the arguments.

    runs/<run_name>/config.json      arguments, versions, git commit and device, and from where the run was resumed
                    metrics.jsonl    one object an update
                    samples.jsonl    sample responses
                    events.out.*     TensorBoard
                    checkpoints/     see checkpoint.py
"""

import glob
import json
import platform
import time
from pathlib import Path

import torch
import transformers

from rlhf_details.plumbing import engines, trackers


def experiment(args):
    """What the runs of all seeds share in their names."""
    return f"{args.dataset.split('/')[-1].split('[')[0]}__{args.exp_name}"


def choose_name(args):
    """The run's name: as given, with --resume the newest of this data set, experiment and seed, or a new one."""
    if args.run_name is not None:
        return args.run_name
    prefix = f"{experiment(args)}__{args.seed}__"
    started = [folder for folder in Path("runs").glob(f"{glob.escape(prefix)}[0-9]*") if any(folder.iterdir())]
    if args.resume and started:
        return max(started).name
    name = prefix + time.strftime("%Y%m%d-%H%M%S")
    while True:
        try:
            (Path("runs") / name).mkdir(parents=True)
            return name
        except FileExistsError:  # Another run of a sweep started in the same second.
            name += "_"


def describe(args, accelerator, folder):
    """Versions, git commit, device and engine of a run, and from where it is resumed, as a dictionary."""
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    about = {"versions": {"python": platform.python_version()} | versions}
    about |= {"commit": trackers.git("rev-parse", "HEAD")}
    about |= {"device": str(accelerator.device), "num_processes": accelerator.num_processes}
    about |= {"engine": engines.name(accelerator), "resumed": [], "run": str(folder)}
    config = folder / "config.json"
    if args.resume and config.exists():
        before = json.loads(config.read_text())
        about["resumed"] = [*before["resumed"], {key: before[key] for key in ("commit", "num_processes")}]
        about["wandb_id"] = before.get("wandb_id")
    return about
