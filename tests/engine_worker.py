"""
Runs training scripts under an engine, for real, on CPU processes over gloo: torchrun engine_worker.py SPEC.json

SPEC.json: {"engine": "ddp", "fsdp2", "zero2" or "zero3", the name of a launch configuration in benchmark/accelerate/, or "one";
"out": folder; "runs": [{"script", "args", "precision", "patches"}]}. Each process writes out/rank<r>.json, a list with an entry a
run: the engine as the script saw it, the world size, which part of weights and moments this process held, dtypes.

accelerate 1.15 ignores FSDP and DeepSpeed plugins where the device is a CPU, and quietly runs DDP: AcceleratorState enables them
for GPUs only. `force` therefore sets by hand what `accelerate launch --config_file` sets on GPUs while `Accelerator(...)` is
constructed, with the plugins built from the very environment that the launcher makes of the shipped configuration. From
`accelerator.prepare` on, accelerate's own code runs unchanged.
"""

import importlib
import json
import os
import sys
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

from rlhf_details import engines, runs, train_ppo, train_rloo, utils

CONFIGS = Path(__file__).parent.parent / "benchmark" / "accelerate"


class Died(BaseException):
    """What a run dies of where the specification says so."""


def launch_environment(config):
    """What `accelerate launch --config_file benchmark/accelerate/<config>.yaml` adds to the environment of the processes."""
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
    """To be called right after Accelerator(...)."""
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

        # takes over torch's gloo group; deepspeed.initialize would ask for the backend of its CPU accelerator, "ccl"
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        plugin = DeepSpeedPlugin()
    if engine == "zero3":  # tiny weights would all be below the default, and stay whole
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    plugin.set_mixed_precision(precision)
    plugin.select(_from_accelerator_state=True)
    state["deepspeed_plugins"] = plugin
    # Accelerator.__init__ sets these where it is given a plugin: DeepSpeed casts by itself
    state["_mixed_precision"], accelerator.native_amp, accelerator.scaler = "no", False, None
    accelerator.deepspeed_engine_wrapped = None
    return accelerator


def parts(module, optimizer):
    """(numbers of weights held here, of moments to be held here, of weights in all)."""
    held = total = 0
    for p in module.parameters():
        shard = p.to_local() if isinstance(p, DTensor) else getattr(p, "ds_tensor", p)
        held += shard.numel()
        total += getattr(p, "ds_numel", p.numel())
    zero = getattr(optimizer, "optimizer", None)
    flats = getattr(zero, "fp32_partitioned_groups_flat", None) or getattr(zero, "single_partition_of_fp32_groups", None)
    groups = [p for group in optimizer.param_groups for p in group["params"]]
    stepped = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in flats or groups)
    return held, stepped, total


def one_run(spec, engine):
    """Runs main of a script; what was seen."""
    AcceleratorState._reset_state()
    if PartialState._shared_state.get("distributed_type") is not None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    script, environment = importlib.import_module(f"rlhf_details.{spec['script']}"), {}
    if engine != "one":
        environment = launch_environment(engine)
        assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    seen, prepare, log, patches = {}, engines.prepare, runs.Run.log, spec.get("patches", {})

    def accelerator(**kwargs):
        return force(Accelerator(mixed_precision=spec.get("precision", "no"), **kwargs), engine, environment)

    def recording_prepare(accelerator, module, optimizer):
        module, optimizer = prepare(accelerator, module, optimizer)
        inner = accelerator.unwrap_model(module).model
        held, stepped, total = parts(module, optimizer)
        seen.update(engine=engines.name(accelerator), world=accelerator.num_processes, precision=engines.precision(accelerator))
        seen.update(held=held, stepped=stepped, total=total, architecture=inner.config.model_type, products=[])
        seen.update(groups=sum(isinstance(m, FSDPModule) for m in module.modules()))
        seen.update(sharded=engines.is_sharded(module), dtypes=sorted({str(p.dtype) for p in module.parameters()}))

        def note(layer, inputs, output):
            if module.training and len(seen["products"]) < 50:
                seen["products"].append(str(output.dtype))

        linear = next(m for m in inner.modules() if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D")
        linear.register_forward_hook(note)
        return module, optimizer

    def dying_log(self, metrics, step):
        log(self, metrics, step)
        if step == patches.get("die_after"):
            raise Died

    with ExitStack() as stack:
        stack.enter_context(patch.object(script, "Accelerator", accelerator))
        stack.enter_context(patch.object(engines, "prepare", recording_prepare))
        stack.enter_context(patch.object(runs.Run, "log", dying_log))
        if "pieces" in patches:
            for module in (train_rloo, train_ppo):
                stack.enter_context(patch.object(module, "LOGITS_AT_ONCE", patches["pieces"]))
        try:
            script.main(script.Args(**spec["args"]))
        except Died:
            seen["died"] = True
    seen["products"] = sorted(set(seen["products"]))
    return seen


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    seen = [one_run(run, spec["engine"]) for run in spec["runs"]]
    out = Path(spec["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
    utils.leave_process_group()


if __name__ == "__main__":
    main()
