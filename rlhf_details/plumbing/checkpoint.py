"""
Checkpoints: whole weights and Adam's moments by name, so a run continues under any engine and any number of processes.

    checkpoints/000040/weights.safetensors, exp_avg.safetensors, exp_avg_sq.safetensors   whole tensors in fp32, by name
                       tensors.safetensors   what else the loop keeps as tensors, where it keeps any
                       state.json            arguments, the state of the loop, and what the run remembers
                       manifest.json         size in bytes and SHA-256 of each of these files

A checkpoint appears whole or not at all: it is written to `000040.partial`, synced to the disk and then renamed.
"""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlhf_details.plumbing import cli, data, engines, models, saving

VERSION = 3  # of the layout of state.json; checkpoints of another one are refused


# ---- writing and reading ---------------------------------------------------------------------------------------------
def write(folder, state, tensors):
    """Writes a checkpoint whole or not at all, and removes all but the two newest ones of its run.

    Args: folder, e.g. runs/<run_name>/checkpoints/000040; state, a dictionary that JSON can hold; tensors, {file name
    without its ending: {name: tensor on the CPU}}.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, content in tensors.items():
            save_file(content, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(json.dumps({"version": VERSION} | state, indent=1))
        files = {file.name: [file.stat().st_size, digest(file)] for file in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(files, indent=1))
        for path in (*partial.iterdir(), partial):
            saving.sync(path)
    except (OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)  # On a full disk this frees room for the logs.
        raise
    shutil.rmtree(folder, ignore_errors=True)  # A damaged checkpoint may have the same number.
    partial.rename(folder)
    saving.sync(folder.parent)
    for old in all_of(folder.parent.parent)[2:]:
        shutil.rmtree(old)


def read_state(folder):
    """The dictionary that `write` was given as `state`. A checkpoint of another layout ends the run with one line."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("version") != VERSION:
        hint = "start anew, with --overwrite in place of --resume"
        cli.fail(f"--resume: another version of this code wrote {folder}; {hint}")
    return state


def read_tensors(folder):
    """The tensors that `write` was given: {file name without its ending: {name: tensor on the CPU}}."""
    return {file.stem: load_file(file) for file in folder.glob("*.safetensors")}


def cut(run_folder, update):
    """Removes what a run left unfinished and sets aside the checkpoints after an update. Update 0 removes them all."""
    for unfinished in Path(run_folder).glob("checkpoints/*.partial"):
        shutil.rmtree(unfinished)
    for later in all_of(run_folder):
        if update == 0:
            shutil.rmtree(later)
        elif int(later.name) > update:  # It is damaged, but a person may want to save parts of it.
            shutil.rmtree(f"{later}.damaged", ignore_errors=True)
            later.rename(f"{later}.damaged")


# ---- finding --------------------------------------------------------------------------------------------------------
def all_of(run_folder):
    """Folders of a run's checkpoints, the newest one first."""
    folders = [folder for folder in Path(run_folder).glob("checkpoints/*") if folder.name.isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name), reverse=True)


def choose(run_folder):
    """Returns (folder of the newest whole checkpoint or None, a line of text on each newer one that is damaged)."""
    lines = []
    for folder in all_of(run_folder):
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            damaged = [name for name, (size, sha256) in manifest.items() if not is_whole(folder / name, size, sha256)]
        except (FileNotFoundError, ValueError, TypeError, AttributeError):  # The manifest is missing or torn.
            damaged = ["manifest.json"]
        if not damaged:
            return folder, lines
        lines.append(f"--resume: {folder} is damaged ({', '.join(damaged)}): passed over")
    return None, lines


def find(run_folder, now, overwrite, accelerator, say):
    """The checkpoint to continue from, the same on all processes, or None. Call it on every process.

    It ends with one line where that checkpoint, or a log without one, is of another run. Args: now, its identity;
    overwrite, whether to start anew where no checkpoint is whole; say, which prints a line.
    """
    found = [None, [], []]
    if accelerator.is_main_process:
        found = [*choose(run_folder), changed_since_log(run_folder, now)]
    folder, damaged, changed = broadcast_object_list(found)
    for line in damaged:
        say(line)
    if folder is None:
        if damaged and not overwrite:
            cli.fail(f"--resume: no checkpoint in {run_folder} is whole; --overwrite starts anew")
        if changed and not overwrite:  # The log would be lost.
            problem = f"{run_folder} has no checkpoint and other arguments: {'; '.join(changed)}"
            cli.fail(f"--resume: {problem}; --overwrite starts anew")
        return None
    is_missing = torch.tensor([not folder.exists()], device=accelerator.device)
    if accelerator.gather(is_missing).any():
        cli.fail(f"--resume: not every process sees {folder}; runs/ must be on a file system that all of them share")
    check_same_run(folder, now)
    return folder


def digest(file):
    """SHA-256 of a file, as a hexadecimal text."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def is_whole(file, size, sha256):
    """Whether a file has this size in bytes and this hash."""
    return file.is_file() and file.stat().st_size == size and digest(file) == sha256


# ---- which run it is -------------------------------------------------------------------------------------------------
def identity(args, accelerator, inputs):
    """What a run must share with the checkpoint that it continues from, as JSON returns it. inputs: of fingerprint."""
    seen = fingerprint(inputs)
    if len(set(gather_object([seen]))) > 1:
        hint = "a function that returns rows must return the same on each"
        cli.fail(f"--dataset: the processes read other rows; {hint}")
    values = json.loads(json.dumps(dataclasses.asdict(args)))
    return {"args": values, "mixed_precision": engines.precision(accelerator), "inputs": seen}


def fingerprint(inputs):
    """SHA-256 of what a run learns from, so that it is continued with the same.

    inputs: data.Prompts (token ids and columns), modules (weights and `bias`), and values that JSON can hold.
    """
    total = hashlib.sha256()
    for x in inputs:
        if isinstance(x, torch.nn.Module):
            x = models.checksum(x), getattr(x, "bias", None)
        elif isinstance(x, data.Prompts):
            x = [(prompt.ids, prompt.columns) for prompt in x]
        # A value that JSON cannot hold counts as its type, since its text may be another in each process.
        total.update(json.dumps(x, default=lambda value: type(value).__name__).encode())
    return total.hexdigest()


def differences(before, now):
    """Texts that name the arguments that changed and that would change a number of the curve.

    Args: before, now, {"args": {name: value}, "mixed_precision": text, ..}, as JSON returns them.
    """
    before, now = ({"mixed_precision": run["mixed_precision"]} | run["args"] for run in (before, now))
    may_change = {*cli.MEMORY_KNOBS, *cli.OUTPUTS}
    changed = [key for key in before | now if key not in may_change and before.get(key) != now.get(key)]
    return [f"{key} {before.get(key)!r} there, {now.get(key)!r} here" for key in changed]


def changed_since_log(run_folder, now):
    """`differences` to the run whose log is in the folder, and [] where there is no log."""
    log, config = (Path(run_folder) / name for name in ("metrics.jsonl", "config.json"))
    has_log = log.exists() and log.stat().st_size and config.exists()
    return differences(json.loads(config.read_text()), now) if has_log else []


def check_same_run(folder, now):
    """Ends with one line where a checkpoint is of other arguments, rows or models, or of another layout."""
    before = read_state(folder)
    if changed := differences(before, now):
        cli.fail(f"--resume: {folder} has other arguments: {'; '.join(changed)}")
    if before["inputs"] != now["inputs"]:
        dataset = now["args"]["dataset"]
        cli.fail(f"--resume: {folder} had other rows than --dataset {dataset} holds now, or started from other weights")
