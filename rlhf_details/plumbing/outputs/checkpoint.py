"""
Checkpoints, which a run goes on from.

    checkpoints/000040/policy.pt   the trained weights and the optimizer's state, whole and by name; under DeepSpeed a
                                   folder `deepspeed`, which has a part for each process
                       state.pt    the state of the loop, and what the run remembers: see `write`

A checkpoint appears whole or not at all: it is written to `000040.partial`, synced to the disk and then renamed. One
process, DDP and FSDP2 read each other's, with any number of processes. DeepSpeed reads those of as many processes.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
import time
import zipfile
import zlib

import torch
from accelerate.utils import broadcast_object_list, gather_object

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import flags
from rlhf_details.plumbing.machine import engines
from rlhf_details.plumbing.outputs import atomic

VERSION = 6  # of the layout of state.pt; checkpoints of another one are refused
OURS = re.compile(r"\d{6}(\.partial|\.before)*")  # Whatever else is in checkpoints/ is the user's.


# ---- writing and reading ---------------------------------------------------------------------------------------------
def write(run, update, policy, optimizer, state):
    """Writes a checkpoint whole or not at all, and removes all but the two newest ones. Call it on every process.

    Args: policy, optimizer, as prepared; state, what the loop takes to the next update, as JSON holds it. Returns: the
    checkpoint's folder.
    """
    accelerator = run.accelerator
    scaler = run.accelerator.scaler
    folder = run.folder / "checkpoints" / f"{update:06d}"
    saved = run.kept | {
        "update": update,
        "state": state,
        "seconds": time.monotonic() - run.start,
        "tensors": run.sampled_ahead(),
        "scaler": scaler and scaler.state_dict(),  # of fp16
    }
    partial = atomic.beside(folder, "partial")
    with atomic.replacing(folder) if run.is_main else contextlib.nullcontext():
        accelerator.wait_for_everyone()  # The folder is there.
        for path in run.logs if run.is_main else ():  # Their rows last as long as the checkpoint.
            atomic.sync(path)
        try:
            save_policy(accelerator, policy, optimizer, partial)
            if run.is_main:
                save(saved | {"logs": [fingerprint(path) for path in run.logs]}, partial / "state.pt")
        except RuntimeError as e:  # torch's or DeepSpeed's, such as "unexpected pos", while they handle the cause
            raise OSError(str(e.__context__ or e)) from e
        accelerator.wait_for_everyone()
    if run.is_main:  # A later one than this was damaged, or `find` would have taken it.
        clean(run.folder, [other for other in all_of(run.folder) if int(other.name) <= update][:2])
    accelerator.wait_for_everyone()
    return folder


def save(content, path):
    """torch.save, into a file of Python's, whose errors say what happened. With a path torch would hide a full disk."""
    with open(path, "wb") as file:
        torch.save(content, file)


def clean(run_folder, kept=()):
    """Removes the checkpoints of a run but for those that are kept. What cannot be removed stays."""
    for path in run_folder.glob("checkpoints/*"):
        if OURS.fullmatch(path.name) and path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def fingerprint(path):
    """[number of rows, checksum] of a file of JSON lines."""
    content = path.read_bytes()
    return [content.count(b"\n"), zlib.crc32(content)]


def read(run, policy, optimizer):
    """The inverse of `write`. Returns: what it has saved beside the policy, with tensors on the device."""
    with console.reading("--resume", run.checkpoint):
        # Not on the device at once: torch.load does not know "cpu:0", where several processes on CPUs are.
        saved = torch.load(run.checkpoint / "state.pt", map_location="cpu", weights_only=True)
        saved["tensors"] = {name: x.to(run.accelerator.device) for name, x in saved["tensors"].items()}
        load_policy(run.accelerator, policy, optimizer, run.checkpoint)
        if saved["scaler"]:
            run.accelerator.scaler.load_state_dict(saved["scaler"])
    for path, known in zip(run.logs, saved["logs"], strict=True) if run.is_main else ():
        if (found := fingerprint(path)) != known:
            console.say(f"warning: --resume: {path} was damaged: {found[0]} of its {known[0]} rows can be read")
    run.accelerator.wait_for_everyone()  # All processes have read it.
    return saved


# ---- finding --------------------------------------------------------------------------------------------------------
def all_of(run_folder):
    """Folders of a run's checkpoints, the newest one first."""
    return sorted(run_folder.glob("checkpoints/" + "[0-9]" * 6), reverse=True)


def find(run_folder, before, now):
    """The checkpoint to continue from, the same on all processes, or None. Call it on every process.

    It ends with one line where it is of another run. Args: before, its config.json, {} where there is none; now, the
    identity of this run.
    """
    found = all_of(run_folder)
    if len(set(gather_object([str(found)]))) > 1:
        hint = "runs/ must be on a file system that all of them share"
        console.fail(f"--resume: not every process sees the checkpoints of {run_folder}; {hint}")
    if before and (changed := differences(before, now)):
        hint = "start anew, with --overwrite in place of --resume"
        console.fail(f"--resume: {[*found, run_folder][0]} is of another run: {'; '.join(changed)}; {hint}")
    (newest,) = broadcast_object_list([next(filter(is_whole, found), None) if console.is_main() else None])
    if found and not newest:
        console.fail(f"--resume: no checkpoint in {run_folder} is whole; start anew, with --overwrite in its place")
    return newest


def is_whole(folder):
    """Whether a checkpoint has its files, which are zip archives, and their checksums hold, which torch never reads."""
    for path in (folder / "state.pt", *folder.rglob("*.pt")):
        with contextlib.suppress(Exception):  # A damaged archive may raise anything.
            if zipfile.ZipFile(path).testzip() is None:
                continue
        console.say(f"warning: --resume: {path} is damaged, so an older checkpoint is taken")
        return False
    return True


# ---- weights and optimizer -------------------------------------------------------------------------------------------
WHOLE = dict(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


def save_policy(accelerator, module, optimizer, folder):
    """Writes the trained weights and Adam's moments of a prepared module to a folder; call it on every process.

    torch names both by parameter and gathers them, so that the file is the same on one process, under DDP and under
    FSDP2. DeepSpeed writes files of its own, a part for each process.
    """
    if engines.uses_deepspeed(accelerator):
        module.save_checkpoint(folder, tag="deepspeed", save_latest=False, exclude_frozen_parameters=True)
        return
    # It takes a second to import, which --help would wait for.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, moments = get_state_dict(module, optimizer.optimizer, options=StateDictOptions(**WHOLE))
    if accelerator.is_main_process:
        save({"model_state_dict": weights, "optim_state_dict": moments}, folder / "policy.pt")


def load_policy(accelerator, module, optimizer, folder):
    """The inverse of save_policy."""
    if engines.uses_deepspeed(accelerator):
        module.load_checkpoint(folder, tag="deepspeed", load_module_strict=False)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    on_gpu = accelerator.device.type != "cpu"  # There the moments are copies. Here they would stay a map of the file.
    state = torch.load(folder / "policy.pt", map_location="cpu", mmap=on_gpu, weights_only=True)
    set_state_dict(module, optimizer.optimizer, **state, options=StateDictOptions(**WHOLE))


# ---- which run it is -------------------------------------------------------------------------------------------------
def identity(args, accelerator, inputs):
    """What a run must share with the checkpoint that it continues from.

    Args: inputs, what it learns from: data.Prompts (token ids and columns) and modules (weights and `bias`), or None.
    DeepSpeed reads only what the same stage wrote on as many processes.
    """

    def plain(x):
        if isinstance(x, torch.nn.Module):
            return engines.checksum(x), getattr(x, "bias", None)
        if hasattr(x, "identity"):  # a data.Prompt
            return x.identity()
        return type(x).__name__  # The text of another value may be another one in each process.

    seen = hashlib.sha256(json.dumps(inputs, default=plain).encode()).hexdigest()
    if len(set(gather_object([seen]))) > 1:
        console.fail(
            "--dataset: the processes read other rows; a function that returns rows must return the same on each"
        )
    return {
        "version of the layout": VERSION,
        "args": dataclasses.asdict(args),
        "mixed_precision": engines.precision(accelerator),
        "checksum of rows and models": seen,
        "written by": engines.in_words(accelerator) if engines.uses_deepspeed(accelerator) else "torch",
    }


def differences(before, now):
    """Texts that name what differs between two identities and would change a number of the curve."""
    before, now = (run | run.get("args", {}) for run in (before, now))
    may_change = {"args", *flags.MEMORY_KNOBS, *flags.OUTPUTS}
    if not flags.differences(before, now, {"template_date", *may_change}):
        return []  # Where a chat template writes the day, the checksum differs as well.
    return flags.differences(before, now, may_change)
