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
import shutil
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import flags
from rlhf_details.plumbing.machine import engines
from rlhf_details.plumbing.outputs import atomic

VERSION = 5  # of the layout of state.pt; checkpoints of another one are refused


# ---- writing and reading ---------------------------------------------------------------------------------------------
def write(run, update, policy, optimizer, state):
    """Writes a checkpoint whole or not at all, and removes all but the two newest ones. Call it on every process.

    Args: policy, optimizer, as prepared; state, what the loop takes to the next update, as JSON holds it. Returns: the
    checkpoint's folder.
    """
    accelerator, scaler = run.accelerator, run.accelerator.scaler
    folder = run.folder / "checkpoints" / f"{update:06d}"
    saved = {"update": update, "state": state, "seconds": time.time() - run.start} | run.kept
    saved |= {"tensors": run.sampled_ahead(), "scaler": scaler and scaler.state_dict()}  # the scaler of fp16
    partial = atomic.beside(folder, "partial")
    with atomic.replacing(folder) if run.is_main else contextlib.nullcontext():
        accelerator.wait_for_everyone()  # The folder is there.
        try:
            save_policy(accelerator, policy, optimizer, partial)
            if run.is_main:
                torch.save(saved, partial / "state.pt")
        except RuntimeError as e:  # of torch.save, on a full disk
            raise OSError(str(e)) from e
        accelerator.wait_for_everyone()
        for path in run.logs if run.is_main else ():  # Their rows last as long as the checkpoint.
            atomic.sync(path)
    for other in {*folder.parent.iterdir()} - {*all_of(run.folder)[:2]} if run.is_main else ():
        shutil.rmtree(other)
    accelerator.wait_for_everyone()
    return folder


def read(run, policy, optimizer):
    """The inverse of `write`. Returns: what it has saved beside the policy, with tensors on the device."""
    with console.reading("--resume", run.checkpoint):
        # Not on the device at once: torch.load does not know "cpu:0", where several processes on CPUs are.
        saved = torch.load(run.checkpoint / "state.pt", map_location="cpu", weights_only=True)
        saved["tensors"] = {name: x.to(run.accelerator.device) for name, x in saved["tensors"].items()}
        load_policy(run.accelerator, policy, optimizer, run.checkpoint)
        if saved["scaler"]:
            run.accelerator.scaler.load_state_dict(saved["scaler"])
    run.accelerator.wait_for_everyone()  # All processes have read it.
    return saved


# ---- finding --------------------------------------------------------------------------------------------------------
def all_of(run_folder):
    """Folders of a run's checkpoints, the newest one first."""
    return sorted(Path(run_folder).glob("checkpoints/" + "[0-9]" * 6), reverse=True)


def find(run_folder, now):
    """The checkpoint to continue from, the same on all processes, or None. Call it on every process.

    It ends with one line where the folder's config.json is of another run. Args: now, the identity of this one.
    """
    newest = next(iter(all_of(run_folder)), None)
    if len(set(gather_object([str(newest)]))) > 1:
        hint = "runs/ must be on a file system that all of them share"
        console.fail(f"--resume: not every process sees the checkpoints of {run_folder}; {hint}")
    before = console.read_json(run_folder / "config.json", "--resume")
    if before and (changed := differences(before, now)):
        hint = "start anew, with --overwrite in place of --resume"
        console.fail(f"--resume: {newest or run_folder} is of another run: {'; '.join(changed)}; {hint}")
    return newest


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
        torch.save({"model_state_dict": weights, "optim_state_dict": moments}, folder / "policy.pt")


def load_policy(accelerator, module, optimizer, folder):
    """The inverse of save_policy."""
    if engines.uses_deepspeed(accelerator):
        module.load_checkpoint(folder, tag="deepspeed", load_module_strict=False)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state = torch.load(folder / "policy.pt", map_location="cpu", mmap=True, weights_only=True)
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
    before, now = ({**run, **run.get("args", {})} for run in (before, now))
    may_change = {"args", *flags.MEMORY_KNOBS, *flags.OUTPUTS}
    if not flags.differences(before, now, {"template_date", *may_change}):
        return []  # Where a chat template writes the day, the checksum differs as well.
    return flags.differences(before, now, may_change)
