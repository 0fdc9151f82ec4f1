"""
Runs training scripts in processes of their own, for real, on CPUs over gloo: [torchrun] page_worker.py SPEC.json

SPEC.json: {"engine": "one", "ddp", "fsdp2", "zero2" or "zero3"; "out": folder; "runs": [{"script", "args", "precision",
"die_after"}]}. Each process writes out/rank<r>.pt, a list with an entry for each run: the engine as the script saw it,
the world size, which part of the weights this process held (of the policy, before and after it sampled, and of frozen
models), the responses that it sampled, dtypes.

accelerate 1.15 ignores FSDP and DeepSpeed plugins where the device is a CPU, and quietly runs DDP. So `force` sets by
hand what `accelerate launch --config_file` sets on GPUs while `Accelerator(...)` is made, with the plugins built from
the environment that the launcher makes of the shipped configuration. From `accelerator.prepare` on, accelerate's own
code runs.
"""

import importlib
import json
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlhf_details import utils
from rlhf_details.plumbing.machine import engines
from rlhf_details.plumbing.outputs.run import Run

CONFIGS = Path(__file__).parent.parent.parent / "benchmark" / "recipes" / "accelerate"


class Died(BaseException):
    """What a run dies of where the specification says so."""


def is_sharded(module):
    """Whether a process holds only a part of the weights, under FSDP2 or ZeRO-3."""
    return isinstance(module, FSDPModule) or hasattr(next(module.parameters(), None), "ds_id")


def launch_environment(config):
    """What `accelerate launch` with the file benchmark/recipes/accelerate/<config>.yaml adds to the environment."""
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / f"{config}.yaml"), "script.py"])
    args, defaults, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        environment = prepare_deepspeed_cmd_env(args)[1]
    else:
        several = args.multi_gpu or args.use_fsdp
        environment = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


def force(accelerator, engine, environment):
    """Makes a new Accelerator one of an engine that is for GPUs."""
    state, precision = AcceleratorState._shared_state, accelerator.mixed_precision
    if engine not in ("fsdp2", "zero2", "zero3"):
        return accelerator
    kind = DistributedType.FSDP if engine == "fsdp2" else DistributedType.DEEPSPEED
    state["distributed_type"] = PartialState._shared_state["distributed_type"] = kind
    with patch.dict(os.environ, environment):
        if engine == "fsdp2":
            state["fsdp_plugin"] = plugin = FullyShardedDataParallelPlugin()
            if precision != "no":
                plugin.set_mixed_precision(precision)
            return accelerator
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # This takes over torch's gloo group; deepspeed.initialize would ask for the backend "ccl".
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        plugin = DeepSpeedPlugin()
    if engine == "zero3":  # Tiny weights would all be below the default, and stay whole.
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    plugin.set_mixed_precision(precision)
    plugin.select(_from_accelerator_state=True)
    state["deepspeed_plugins"] = plugin
    # Accelerator.__init__ sets these where it is given a plugin, because DeepSpeed casts by itself.
    state["_mixed_precision"], accelerator.native_amp, accelerator.scaler = "no", False, None
    accelerator.deepspeed_engine_wrapped = None
    return accelerator


def held_and_total(weights):
    """(numbers of weights held here, of weights in all). What ZeRO-3 has gathered is held as well."""
    held = total = 0
    for p in weights:
        local = p.to_local() if isinstance(p, DTensor) else p
        held += local.numel() + (p.ds_tensor.numel() if hasattr(p, "ds_tensor") else 0)
        total += getattr(p, "ds_numel", p.numel())
    return held, total


def stepped_here(optimizer):
    """The number of weights that are stepped here."""
    zero = getattr(optimizer, "optimizer", None)
    flats = getattr(zero, "fp32_partitioned_groups_flat", None) or getattr(
        zero, "single_partition_of_fp32_groups", None
    )
    groups = [p for group in optimizer.param_groups for p in group["params"]]
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in flats or groups)


def one_run(spec, engine):
    """Runs main of a script; returns what was seen."""
    AcceleratorState._reset_state()
    if PartialState._shared_state.get("distributed_type") is not None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    script = importlib.import_module(f"rlhf_details.{spec['script']}")
    environment = launch_environment(engine) if engine != "one" else {}
    seen = {"sampled": {}, "products": set(), "died": False}
    prepare, log, sample, sampling, trained = engines.prepare, Run.log, utils.sample, set(), []

    def accelerator(**kwargs):
        return force(Accelerator(mixed_precision=spec.get("precision", "no"), **kwargs), engine, environment)

    def note(layer, inputs, output):
        if torch.is_grad_enabled() or threading.get_ident() in sampling:
            seen["products"].add(str(output.dtype))
            seen["caches"] = torch.is_autocast_cache_enabled()

    def recording_prepare(args, accelerator, module, optimizer, *frozen):
        module, optimizer = prepare(args, accelerator, module, optimizer, *frozen)
        inner = accelerator.unwrap_model(module).model
        held, total = held_and_total(module.parameters())
        trained.append(module)
        seen["trained"] = held_and_total(p for p in module.parameters() if p.requires_grad)[1]
        seen["frozen"] = [held_and_total(m.parameters()) for m in frozen if m is not None]
        seen.update(engine=engines.name(accelerator), world=accelerator.num_processes)
        seen.update(kind=accelerator.distributed_type.value, precision=engines.precision(accelerator))
        seen.update(held=held, stepped=stepped_here(optimizer), total=total)
        seen.update(groups=sum(isinstance(m, FSDPModule) for m in module.modules()))
        seen.update(sharded=is_sharded(module), dtypes={str(p.dtype) for p in module.parameters()})
        next(m for m in inner.modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(note)
        return module, optimizer

    def recording_sample(policy, queries, query_mask, rows, n, response_length, stop_ids, key, *rest, **how):
        sampling.add(threading.get_ident())  # With --overlap a thread of its own samples.
        found = sample(policy, queries, query_mask, rows, n, response_length, stop_ids, key, *rest, **how)
        responses, mask, _ = found
        sampling.discard(threading.get_ident())
        if key[1] == utils.TRAINING:
            seen["sampler_is_sharded"] = is_sharded(policy)
            if threading.current_thread() is threading.main_thread():  # Otherwise training may have gathered some.
                seen["held_after_sampling"] = held_and_total(trained[0].parameters())[0]
            for row, tokens, real in zip(rows.tolist(), responses, mask, strict=True):
                seen["sampled"][*key[2:], row] = tuple(tokens[real].tolist())
        return found

    def dying_log(self, update, *rest, **more):
        log(self, update, *rest, **more)
        if update == spec.get("die_after"):
            raise Died

    with ExitStack() as stack:
        stack.enter_context(patch.object(engines, "Accelerator", accelerator))
        stack.enter_context(patch.object(engines, "prepare", recording_prepare))
        stack.enter_context(patch.object(utils, "sample", recording_sample))
        stack.enter_context(patch.object(Run, "log", dying_log))
        try:
            script.main(script.Args(**spec["args"]))
        except Died:
            seen["died"] = True
    return seen


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    seen = [one_run(run, spec["engine"]) for run in spec["runs"]]
    out = Path(spec["out"])
    out.mkdir(parents=True, exist_ok=True)
    torch.save(seen, out / f"rank{os.environ.get('RANK', 0)}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
