"""
Checkpoints, which a run goes on from.

    checkpoints/000040/policy.pt             the trained weights and the optimizer's state, whole and by name; under
                                             DeepSpeed a folder `deepspeed`, which has a part for each process
                       tensors.safetensors   what else the loop keeps as tensors, where it keeps any
                       state.json            arguments, the state of the loop, and what the run remembers:
                                             `Run.write_checkpoint` in run.py puts it together

A checkpoint appears whole or not at all: it is written to `000040.partial`, synced to the disk and then renamed. One
process, DDP and FSDP2 read each other's, with any number of processes. DeepSpeed reads those of as many processes.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import GenerationConfig

from rlhf_details import utils
from rlhf_details.plumbing import cli, data, engines, models

VERSION = 3  # of the layout of state.json; checkpoints of another one are refused


# ---- writing and reading ---------------------------------------------------------------------------------------------
def write(accelerator, folder, state, tensors, save_policy):
    """Writes a checkpoint whole or not at all, and removes all but the two newest ones. Call it on every process.

    Args: folder, e.g. runs/<run_name>/checkpoints/000040; state, a dictionary that JSON can hold; tensors, {name:
    tensor on the CPU}; save_policy, the function(folder) that writes weights and optimizer, collective as well.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        save_policy(partial)
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return
        if tensors:
            save_file(tensors, partial / "tensors.safetensors")
        (partial / "state.json").write_text(json.dumps({"version": VERSION} | state, indent=1))
        for path in (*partial.rglob("*"), partial):
            sync(path)
    except (OSError, RuntimeError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)  # On a full disk this frees room for the logs.
        raise e if isinstance(e, OSError) else OSError(str(e)) from e  # torch.save raises a RuntimeError.
    partial.rename(folder)
    sync(folder.parent)
    for old in all_of(folder.parent.parent)[2:]:
        shutil.rmtree(old)


def read_state(folder):
    """The dictionary that `write` was given as `state`. A checkpoint of another layout ends the run with one line."""
    with cli.reading("--resume", folder):
        state = json.loads((folder / "state.json").read_text())
    if state.get("version") != VERSION:
        hint = "start anew, with --overwrite in place of --resume"
        cli.fail(f"--resume: another version of this code wrote {folder}; {hint}")
    return state


def read_tensors(folder):
    """The tensors that `write` was given: {name: tensor on the CPU}."""
    file = folder / "tensors.safetensors"
    return load_file(file) if file.exists() else {}


def cut(run_folder, update):
    """Removes what a run left unfinished. Update 0, where a run begins, removes all checkpoints."""
    for unfinished in Path(run_folder).glob("checkpoints/*.partial"):
        shutil.rmtree(unfinished)
    for old in all_of(run_folder) if update == 0 else ():
        shutil.rmtree(old)


# ---- finding --------------------------------------------------------------------------------------------------------
def all_of(run_folder):
    """Folders of a run's checkpoints, the newest one first."""
    folders = [folder for folder in Path(run_folder).glob("checkpoints/*") if folder.name.isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name), reverse=True)


def find(run_folder, now, overwrite, accelerator):
    """The checkpoint to continue from, the same on all processes, or None. Call it on every process.

    It ends with one line where that checkpoint, or a log without one, is of another run. Args: now, its identity;
    overwrite, whether to start anew where there is a log alone.
    """
    found = [None, []]
    if accelerator.is_main_process:
        found = [next(iter(all_of(run_folder)), None), changed_since_log(run_folder, now)]
    folder, changed = broadcast_object_list(found)
    if folder is None:
        if changed and not overwrite:  # The log would be lost.
            problem = f"{run_folder} has no checkpoint and other arguments: {'; '.join(changed)}"
            cli.fail(f"--resume: {problem}; --overwrite starts anew")
        return None
    is_missing = torch.tensor([not folder.exists()], device=accelerator.device)
    if accelerator.gather(is_missing).any():
        cli.fail(f"--resume: not every process sees {folder}; runs/ must be on a file system that all of them share")
    check_same_run(folder, now)
    return folder


# ---- weights and optimizer -------------------------------------------------------------------------------------------
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def save_policy(accelerator, module, optimizer, folder):
    """Writes the trained weights and Adam's moments of a prepared module to a folder; call it on every process.

    torch names both by parameter and gathers them, so that the file is the same on one process, under DDP and under
    FSDP2. DeepSpeed writes files of its own, a part for each process.
    """
    if engines.uses_deepspeed(accelerator):
        module.save_checkpoint(folder, tag="deepspeed", save_latest=False, exclude_frozen_parameters=True)
        return
    state = dict(zip(("weights", "optimizer"), get_state_dict(module, optimizer.optimizer, options=WHOLE), strict=True))
    if accelerator.is_main_process:
        torch.save(state, folder / "policy.pt")


def load_policy(accelerator, module, optimizer, folder):
    """The inverse of save_policy."""
    if engines.uses_deepspeed(accelerator):
        module.load_checkpoint(folder, tag="deepspeed", load_module_strict=False)
        return
    state = torch.load(folder / "policy.pt", map_location="cpu", mmap=True, weights_only=True)
    states = {"model_state_dict": state["weights"], "optim_state_dict": state["optimizer"]}
    set_state_dict(module, optimizer.optimizer, **states, options=StateDictOptions(full_state_dict=True, strict=False))


# ---- which run it is -------------------------------------------------------------------------------------------------
def identity(args, accelerator, inputs):
    """What a run must share with the checkpoint that it continues from, as JSON returns it. inputs: of fingerprint."""
    seen = fingerprint(inputs)
    if len(set(gather_object([seen]))) > 1:
        hint = "a function that returns rows must return the same on each"
        cli.fail(f"--dataset: the processes read other rows; {hint}")
    values = json.loads(json.dumps(dataclasses.asdict(args)))
    engine = engines.name(accelerator)
    parts = f"{engine} on {accelerator.num_processes} processes" if engine.startswith("ZeRO") else "torch"
    return {"args": values, "mixed_precision": engines.precision(accelerator), "inputs": seen, "written_by": parts}


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
    """Exits with an error if a checkpoint is of other arguments, rows or models, or of another layout."""
    before = read_state(folder)
    if changed := differences(before, now):
        cli.fail(f"--resume: {folder} has other arguments: {'; '.join(changed)}")
    if before["inputs"] != now["inputs"]:
        dataset = now["args"]["dataset"]
        cli.fail(f"--resume: {folder} had other rows than --dataset {dataset} holds now, or started from other weights")
    if before["written_by"] != now["written_by"]:
        kinds = f"{before['written_by']} wrote it, and {now['written_by']} cannot read it"
        cli.fail(f"--resume: {folder}: {kinds}; DeepSpeed goes on under the same stage and number of processes alone")


# ---- the saved model, and what else appears whole or not at all ------------------------------------------------------
def sync(path):
    """Returns when a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not Path(path).is_dir():  # Some file systems sync no folders.
            raise
    finally:
        os.close(handle)


def write_text(path, text):
    """Writes a text file to a neighbour, which takes the file's name once it is on the disk."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)


def save_folder(args, model, tokenizer, weights, card=None):
    """Writes --output_dir, whole or not at all: weights, tokenizer, training_args.json and the model card.

    Args: weights, {name: whole tensor} as the model names its parameters, None for the model's own; card, the text of
    README.md. A model with adapters is merged in place, and the adapters go to the folder `adapter` in it.
    """
    folder = Path(args.output_dir).resolve()
    partial, before = (folder.with_name(f"{folder.name}.{kind}") for kind in ("partial", "before"))
    if before.exists() and not folder.exists():  # An earlier save was killed between the two renames below.
        before.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if hasattr(model, "peft_config"):
            model.load_state_dict(weights or {}, strict=False)
            models.save_adapter(model, partial / "adapter", getattr(args, "sft_model_path", None) or args.base_model)
            tokenizer.save_pretrained(partial / "adapter")  # So that the adapters can be loaded by themselves.
            models.write_older_names(partial / "adapter", tokenizer)
            model, weights = models.merge_adapters(model), None
        if weights is not None:  # Buffers are no parameters, but belong to the model.
            parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            buffers = {name: x for name, x in model.state_dict().items() if name not in parameters}
            weights = weights | {name: x.detach().cpu() for name, x in buffers.items()}
        if model.can_generate() and tokenizer.eos_token_id is not None:  # Plain `generate` shall stop where we do.
            text = getattr(args, "stop_token", "eos")
            own = [] if text == "eos" else models.stop_ids(tokenizer, text, "--stop_token").tolist()
            ends = list(dict.fromkeys([*utils.end_ids(tokenizer), *own]))
            model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
        # The library refuses to save some values with which models are published, such as Vicuna's temperature.
        generation, model.generation_config = getattr(model, "generation_config", None), GenerationConfig()
        model.save_pretrained(partial, state_dict=weights)
        model.generation_config = generation
        if model.can_generate():
            generation.to_json_file(partial / "generation_config.json", keys_to_pop=["compile_config"])
        tokenizer.save_pretrained(partial)
        models.write_older_names(partial, tokenizer)
        (partial / "training_args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
        if card is not None:
            (partial / "README.md").write_text(card, encoding="utf-8")
        for file in partial.rglob("*.safetensors"):  # The library lets nobody but the owner read them.
            shutil.copymode(partial / "training_args.json", file)
        for path in (*partial.rglob("*"), partial):
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # On a full disk its room may be needed.
        raise
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    partial.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
