"""
What the engines that accelerate launches do differently: one process, DDP, FSDP2, DeepSpeed ZeRO-2 and ZeRO-3.

Under each of them a script computes the same: weights and Adam's moments are fp32, and bf16 is autocast. FSDP2 and
ZeRO-3 gather the weights of a layer when it is called, so all processes must call a model equally often. They sample
from a whole copy. FSDP2 (torch's fully_shard) keeps a part of each weight in a DTensor, ZeRO-3 in an attribute
`ds_tensor`. benchmark/recipes/accelerate/ holds a launch configuration for each.
"""

import contextlib
import copy
import functools
import math
import os
import warnings
from datetime import date, timedelta
from types import MethodType

import torch
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf_details.plumbing import console
from rlhf_details.plumbing.machine import stages

# How long a process waits for the others. The main process may need minutes to write a large checkpoint, and when a
# node has lost its power, the other nodes end after this time.
PATIENCE = timedelta(minutes=15)


# ---- the start -------------------------------------------------------------------------------------------------------
def start(args):
    """Returns an Accelerator for one process, DDP, FSDP2 or DeepSpeed. Trains missing toy stages, and seeds torch.

    It sets args.template_date to this day where no flag gives another one.
    """
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    # DDP would broadcast buffers in each forward, and hang where processes sample for different numbers of steps.
    # torch 2.13 has another name for the switch, which accelerate does not know yet.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = join(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False), patience])
    configure(accelerator, args)
    if args.lora_rank and name(accelerator) == "ZeRO-3":
        console.fail(f"--lora_rank {args.lora_rank}: not under ZeRO-3; take ZeRO-2 or FSDP2")
    if accelerator.is_main_process:
        stages.ensure(args)
    # The main process says which day it is. So all agree on it, and wait until the stages are there.
    (args.template_date,) = broadcast_object_list([args.template_date or str(date.today())])
    console.say("loading rows and models")
    torch.manual_seed(args.seed)
    return accelerator


def join(**options):
    """Returns an Accelerator of all processes that the launcher started, on CPUs where there is nothing else."""
    if console.world_size() > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # Otherwise accelerate takes each for a run of its own.
    accelerator = Accelerator(**options)
    if console.world_size() != (seen := accelerator.num_processes):
        console.fail(f"{console.world_size()} processes, but accelerate sees {seen}: set ACCELERATE_USE_CPU=true")
    asked = [kind for kind in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{kind}") == "true"]
    if asked and accelerator.distributed_type.name not in asked:
        what = "which accelerate starts on several GPUs alone"
        console.say(f"the launch file asks for {asked[0]}, {what}; this is {in_words(accelerator)}")
    return accelerator


def configure(accelerator, args):
    """Settles what a launch configuration leaves open, or would have otherwise. Call it before any model is loaded."""
    accelerator.gradient_accumulation_steps = 1  # The scripts write their micro-batches out.
    if accelerator.distributed_type == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            console.fail("fsdp_version 1: not supported; set fsdp_version: 2 in the launch configuration")
        plugin = accelerator.state.fsdp_plugin
        # FSDP takes a second to import, and most runs do without it.
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin.mixed_precision_policy = MixedPrecisionPolicy()  # accelerate's would round the log-probs to bf16.
        # Otherwise transformers leaves the models that are not sharded empty on all processes but the first.
        plugin.cpu_ram_efficient_loading = False
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        # autocast's cache would keep the whole of all weights in bf16, until the phase of the loop ends.
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    if uses_deepspeed(accelerator):
        configure_deepspeed(accelerator, args)


def configure_deepspeed(accelerator, args):
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # Under ZeRO-3 transformers would split every model, also those that no engine runs.
    plugin = accelerator.deepspeed_plugin
    # train_both.py comes here twice, and the second time accelerate has forgotten what was asked for.
    plugin.asked_precision = kind = getattr(plugin, "asked_precision", accelerator.mixed_precision)
    if kind not in ("no", "bf16"):
        console.fail(f"mixed_precision {kind}: not with DeepSpeed; take bf16 or no")
    config = plugin.deepspeed_config
    # The weights stay fp32 and bf16 is autocast, as under the other engines.
    config["bf16"] = config["fp16"] = {"enabled": False}
    # ZeRO-3 has no cache of weights in bf16, which would keep the whole of them.
    device = accelerator.device.type
    is_on = kind == "bf16"
    is_kept = plugin.zero_stage != 3
    accelerator.autocast = lambda: torch.autocast(device, torch.bfloat16, is_on, is_kept)
    # DeepSpeed clips by itself, where accelerate's "auto" would mean 1. The batch sizes are for its counters alone.
    config |= {
        "gradient_clipping": args.max_grad_norm or 0.0,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "train_batch_size": args.micro_batch_size * accelerator.num_processes,
    }
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # in fp32, which they have here


def shards_weights(accelerator):
    """Whether each process holds a part of the weights."""
    return name(accelerator) in ("FSDP2", "ZeRO-3")


def loading_device(accelerator):
    """Where models are loaded to: the device, or the CPU where the engine shares weights out, for they may be large."""
    return torch.device("cpu") if shards_weights(accelerator) else accelerator.device


def prepare(args, accelerator, module, optimizer, *frozen):
    """Puts a module and its optimizer under the engine, and returns both. So it does with frozen modules (or None).

    Under FSDP2 they come to the device layer by layer. ZeRO-3 first puts the whole of the trained module there. Under
    bf16 autocast frozen modules hold `matrices` in bf16, unless their weights are shared out.
    """
    module._no_split_modules = sorted({type(m).__name__ for m in layers(module)})  # FSDP2 gathers them singly.
    empty = empty_copy(module)
    own = set(module.modules())
    if uses_deepspeed(accelerator) or accelerator.is_fsdp2:  # accelerate does the same for DDP.
        module.forward = MethodType(accelerator.autocast()(type(module).forward), module)
    if name(accelerator) == "ZeRO-3":
        # Each piece of the logits gathers the head, and processes have different numbers of pieces. So it makes one.
        module.logits_at_once = 2**62
    module, optimizer = accelerator.prepare(module, optimizer)
    use_one_thread(module)
    if uses_deepspeed(accelerator):
        # accelerate (1.15) would step inside `backward`, once a micro-batch. `step` does it here.
        accelerator.deepspeed_engine_wrapped.backward = lambda loss, **_: module.backward(loss)
    module.gather = functools.partial(whole_copy, accelerator, module) if shards_weights(accelerator) else None
    module.template = [empty]  # In lists, so that no module sees them as its children.
    module.waiting = []
    for m in filter(None, frozen):
        if m.model in own:  # Under LoRA the reference is the policy without its adapters. FSDP2 gathers only for it.
            m.reads = [module]
            continue
        if shards_weights(accelerator) and not getattr(m, "stays_whole", False):
            shard_frozen(m)
        else:
            m.to(accelerator.device)
            for p in matrices(m) if precision(accelerator) == "bf16" else ():
                p.data = p.data.bfloat16()
        if args.offload_frozen:  # A call after a `rest` brings it back to the device.
            m.register_forward_pre_hook(lambda m, _: m.to(accelerator.device) and None, prepend=True)
            module.waiting.append(m)
    return module, optimizer


# ---- which engine it is ----------------------------------------------------------------------------------------------
def name(accelerator):
    """One of "one process", "DDP", "FSDP2", "ZeRO-2" and "ZeRO-3"."""
    if uses_deepspeed(accelerator):
        return f"ZeRO-{accelerator.deepspeed_plugin.zero_stage}"
    if accelerator.is_fsdp2:
        return "FSDP2"
    return "one process" if accelerator.distributed_type == DistributedType.NO else "DDP"


def precision(accelerator):
    """What matrices are multiplied in: "fp32", or autocast's "bf16" or "fp16"."""
    device = accelerator.device.type
    with accelerator.autocast():
        is_on = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype] if is_on else "fp32"


def in_words(accelerator):
    """Engine, processes and precision, such as "2 processes (FSDP2) in bf16"."""
    count = accelerator.num_processes
    engine = name(accelerator)
    processes = engine if engine == "one process" else f"{count} process{'es' * (count > 1)} ({engine})"
    return f"{processes} in {precision(accelerator)}"


def about(accelerator):
    """What a run's results may depend on beside its arguments: versions, device and number of processes."""
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    return {"versions": versions, "device": str(accelerator.device), "num_processes": accelerator.num_processes}


# ---- sampling and training -------------------------------------------------------------------------------------------
def rest(module):
    """Frees the device of the frozen models that wait in the CPU's memory (--offload_frozen)."""
    for m in getattr(module, "waiting", ()):
        m.to("cpu")


def gathered(policy):
    """What to sample from: the policy, or where an engine has shared its weights out, a whole copy of it as it is now.

    The copy's memory is free again when the caller has forgotten it. Call it on every process.
    """
    rest(policy)
    gather = getattr(policy, "gather", None)
    return gather() if gather else policy


def accumulate(accelerator, module, micro_batches):
    """Yields the micro-batches of an optimiser step, in the context that forward and backward of each need."""
    context = contextlib.nullcontext()
    for number, micro_batch in enumerate(micro_batches, 1):
        rest(module)
        is_last = number == len(micro_batches)
        if uses_deepspeed(accelerator):
            module.set_gradient_accumulation_boundary(is_last)
        elif not shards_weights(accelerator):  # FSDP2 would keep all gradients until the last micro-batch.
            # Processes exchange their gradients once a step, after the last micro-batch. [OPT-7]
            context = contextlib.nullcontext() if is_last else accelerator.no_sync(module)
        with context:
            yield micro_batch


def clip_and_step(accelerator, module, optimizer, max_grad_norm, run, number=None):
    """Clips the gradient's global norm, steps, and forgets the gradient. Returns the norm before clipping, a float.

    A norm that is not finite ends the run before any weight changes. DeepSpeed clips and steps in one call, so there it
    ends the run afterwards. number: the minibatch's in its pass, from 0, for the error message.
    """
    if uses_deepspeed(accelerator):
        module.step()
    # Without a limit the norm is only measured: clipping to infinity changes nothing. [OPT-8]
    norm = float(accelerator.clip_grad_norm_(module.parameters(), max_grad_norm or math.inf))
    # fp16's scaler skips the step of an infinite gradient and lowers the loss's scale.
    if accelerator.scaler is None and not math.isfinite(norm):
        where = f"update {run.update}" + ("" if number is None else f", minibatch {number + 1}")
        run.stop(f"{where}: the gradient's norm is {norm}")
    optimizer.step()  # Under DeepSpeed this and the next line do nothing.
    optimizer.zero_grad()
    return norm


def forget_gradient(accelerator, module, optimizer):
    """Call it in place of `clip_and_step` where a step is skipped."""
    (module.optimizer if uses_deepspeed(accelerator) else optimizer).zero_grad()


def uses_deepspeed(accelerator):
    return accelerator.distributed_type == DistributedType.DEEPSPEED


# ---- parts and wholes ------------------------------------------------------------------------------------------------
def layers(module):
    """FSDP2's units, whose weights are gathered together: transformers lists their classes in `_no_split_modules`."""
    kinds = {kind for m in module.modules() for kind in getattr(m, "_no_split_modules", None) or []}
    return [m for m in module.modules() if type(m).__name__ in kinds]


def shard_frozen(module):
    """Leaves each process its part of a frozen module's weights, on the device. A call gathers them layer by layer."""
    from torch.distributed.fsdp import fully_shard

    for m in [*reversed(layers(module)), module]:  # A layer within a layer comes first.
        fully_shard(m, reshard_after_forward=True)


def whole(x):
    """The whole of a tensor; call it on every process."""
    if hasattr(x, "full_tensor"):  # FSDP2's DTensor
        return x.full_tensor()
    if not hasattr(x, "ds_id"):
        return x
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([x]):
        return x.detach().clone()


def checksum(module):
    """Numbers that tell a module's weights from others, a hash of each; call it on every process."""
    return [torch.hash_tensor(whole(p).detach().cpu()).item() for p in module.parameters()]


def matrices(module):
    """The weights that bf16 autocast rounds in each call, so that to hold them in bf16 changes no number.

    They are those of linear layers, but for a head that is tied to an embedding, and for a reward model's fp32 head.
    """
    kinds = nn.Linear | Conv1D
    linear = {m.weight for name, m in module.named_modules() if isinstance(m, kinds) and not name.endswith("score")}
    return linear - {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}


# ---- a whole copy of a policy, to sample from or to save -------------------------------------------------------------
def empty_copy(module):
    """A copy of a policy for `filled`, whose parameters have shapes and no numbers, and without its critic."""
    # deepcopy takes these for the copies of the weights, so no memory is needed for a second set.
    shapes = {id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in module.parameters()}
    made = copy.deepcopy(module, shapes).eval()
    made.critic = None
    return made


def filled(module, weights):
    """The template of a prepared module with the weights of {name: tensor}."""
    made = copy.deepcopy(module.template[0])
    made.load_state_dict(weights, strict=False, assign=True)
    return made


@torch.no_grad()
def whole_copy(accelerator, module):
    """A copy of a prepared policy with the weights that it has now; call it on every process.

    The peak is a copy and one weight. Where weights are shared out and autocast is bf16, `matrices` are in bf16, to
    which autocast would round them in each call.
    """
    for m in module.modules():
        if hasattr(m, "reshard"):  # FSDP2's
            # A forward without a backward leaves some weights whole, in tensors that the optimizer does not know.
            m.reshard()
    module, policy = accelerator.unwrap_model(module), module
    rounded = matrices(module) if shards_weights(accelerator) and precision(accelerator) == "bf16" else ()
    once = functools.cache(lambda p: whole(p).to(torch.bfloat16 if p in rounded else p.dtype, copy=True))  # if tied
    parameters = module.named_parameters(remove_duplicate=False)
    made = filled(policy, {name: once(p) for name, p in parameters if not name.startswith("critic.")})
    # The weights are on the device already, and only buffers move. On CPUs "cpu:1" would be another device than "cpu".
    return made.to(accelerator.device.type)


# ---- threads on CPUs -------------------------------------------------------------------------------------------------
# Parameters. Below this a second thread gains little, and it costs much where two runs share the cores.
SMALL = 5e6


def use_one_thread(*modules):
    """Takes one CPU thread where all modules are small, and says so. It leaves GPUs and OMP_NUM_THREADS alone.

    Threads spin while they wait for each other, which is most of the time where another run wants the same cores.
    """
    size = max(sum(p.numel() for p in module.parameters()) for module in modules)
    if next(modules[0].parameters()).device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return
    if size < SMALL and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        few = f"{size / 1e6:.1f} M parameters gain little from more"
        console.say(f"one CPU thread, since {few}: OMP_NUM_THREADS sets another")
