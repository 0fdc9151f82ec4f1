"""
Speed and memory, measured on this machine: our scripts against TRL, and our sampler against `generate`.

    python benchmark/speed.py compare --algorithm rloo --size 27m --prompts 96 128
    python benchmark/speed.py compare --size 27m --against --variants "plain:--no_share_prompts"    ours, a flag off
    python benchmark/speed.py decode --size 27m

The models have random weights and the shape of a name in SIZES, and the prompts are random words. So nothing is
downloaded, except that the environment of a TRL version of TRL_VERSIONS is created from PyPI where --environments has
none.

`compare` runs the systems in turn, A B C A B C ..., each time in a process of its own that makes one update to warm up
and --updates that count. Every process says what it really did. Unless that is the work asked for (episodes, distinct
prompts, responses a prompt, tokens, optimiser steps), nothing is printed. The prompts are as many as an update takes,
so every update of every system works on the same ones. Ratios are taken within an alternation. Their median and range
are printed, and written after every alternation. Beside the seconds stands the fraction of the bound: work_flops at the
rate of a matrix product, which is measured on the spot, in a fresh process, once an alternation.
"""

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import types
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro
from accelerate import Accelerator
from speed_trl import memory, now
from speed_work import (
    ROOT,
    Work,
    build,
    check_work,
    describe,
    model_config,
    publish,
    spread,
    table,
    work_flops,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

TRL_VERSIONS = {  # The exact versions of an environment. Torch is installed first, so that nothing else chooses it.
    "0.21.0": (
        *("torch==2.13.0", "trl==0.21.0", "transformers==4.56.2"),
        *("tokenizers==0.22.2", "huggingface_hub==0.36.2", "datasets==5.0.1"),  # the last that go with it
    ),
    "1.16.0": ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"),
}


@dataclass
class Compare(Work):
    """Our script and TRL's on the same work, alternating."""

    against: tuple[str, ...] | None = None
    """versions of TRL; None: all that have the algorithm"""
    variants: tuple[str, ...] = ()
    """further runs of ours, "name:--flag value --flag": with the flags of train_rloo.py or train_ppo.py"""
    micro_batch_size: int | None = None
    """ours: episodes of a training forward; None: the script's default"""
    rollout_micro_batch_size: int | None = None
    """ours: episodes sampled or scored at once; None: the script's default"""
    trl_micro_batch_size: int = 16
    """TRL: per_device_train_batch_size; the rest of the batch is accumulated"""
    environments: str | None = None
    """folder of the environments trl-VERSION; None: in work_dir"""
    wheels: str | None = None
    """folder of wheels, for machines without a network: TRL is unpacked beside this Python's own torch"""


@dataclass
class Decode(Work):
    """Our sampler against model.generate: the same model, prompts and number of tokens."""

    model: str | None = None
    """folder of a causal model in the place of random weights of --size"""


# ---- processes -------------------------------------------------------------------------------------------------------
def ours(spec):
    """Runs in a process of its own: main of the training script, with the clock and the memory read when it logs."""
    script = importlib.import_module(f"rlhf_details.train_{spec['algorithm']}")
    module = importlib.import_module("rlhf_details.plumbing.run")
    record, steps = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}, []
    clock = []  # the time at the beginning, and at the end of every update, with all that belongs to it
    register_optimizer_step_post_hook(lambda *_: steps.append(len(clock)))

    class Run(module.Run):
        def __init__(self, *args):
            super().__init__(*args)
            record["loaded"] = memory()[0]
            clock.append(now())

        def log(self, *args):
            super().log(*args)
            record["peak"] = memory()[1]  # of the updates: what saving the model would add does not count here
            if args[1]:  # Without held-out rows there is nothing to log before the first update.
                clock.append(now())

        def save(self, *args):
            pass

    module.Run = script.Run = Run
    if torch.cuda.is_available():  # A phase ends when the GPU is done with it.
        module.time = types.SimpleNamespace(
            time=lambda: (torch.cuda.synchronize(), time.time())[1], strftime=time.strftime
        )
    names = "batch_size", "response_length", "micro_batch_size", "rollout_micro_batch_size"
    flags = {name: spec[name] for name in names}
    flags |= {"sft_model_path": spec["policy"], "reward_model_path": spec["reward"], "dataset": spec["prompts"]}
    flags |= {"num_ppo_epochs": spec["epochs"], "num_mini_batches": spec["mini_batches"], "kl_coef": 0.05}
    flags |= {"total_episodes": spec["updates"] * spec["batch_size"], "num_sample_generations": 0}
    flags |= {"learning_rate": 3e-6, "temperature": 0.7, "stop_token": "eos", "missing_eos_penalty": 1.0}
    flags |= {"run_name": "ours", "checkpoint_every": 0, "output_dir": spec["output_dir"]}
    flags |= {"rloo_k": spec["k"]} if spec["algorithm"] == "rloo" else {}
    given = [str(part) for name, value in flags.items() if value is not None for part in (f"--{name}", value)]
    run = script.main(tyro.cli(script.Args, args=[*given, "--overwrite", *spec["flags"]]))["run"]
    record["updates"], before = [], {"epoch": 0, "episode": 0}
    for i, row in enumerate(map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines()), 1):
        episodes = row["episode"] - before["episode"]
        prompts = round((row["epoch"] - before["epoch"]) * spec["batch_size"] / spec["k"])  # An epoch is all prompts.
        update = {phase: row[f"time/{phase}"] for phase in ("rollout", "scores", "optimise")}
        update |= {"update": clock[i] - clock[i - 1], "optimizer_steps": steps.count(i)}
        update |= {"episodes": episodes, "prompts": prompts, "completions_a_prompt": [episodes / prompts]}
        update |= {"response_tokens": round(row["val/sequence_lengths"] * episodes)}
        record["updates"].append(update)
        before = row
    Path(spec["result"]).write_text(json.dumps(record))


def peak(spec):
    """Runs in a process of its own: FLOP/s of a matrix product."""
    n, device = (8192, "cuda") if torch.cuda.is_available() else (2048, "cpu")
    dtype = torch.bfloat16 if spec["precision"] == "bf16" else torch.float32
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        start = now()
        torch.mm(a, b)
        best = min(best, now() - start)
    Path(spec["result"]).write_text(json.dumps({"flops_per_second": 2 * n**3 / best}))


def launch(work, name, command, spec, **environment):
    """Runs `command SPEC.json` in a process of its own.

    Returns: what it wrote. RuntimeError, with the last line of its log, where it fails.
    """
    folder = Path(work.work_dir).resolve() / "processes" / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    result, log = folder / "result.json", folder / "log.txt"
    result.unlink(missing_ok=True)
    spec = spec | {"result": str(result), "output_dir": str(folder / "model")}
    (folder / "spec.json").write_text(json.dumps(spec))
    threads = {name: str(work.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    settings |= {"ACCELERATE_MIXED_PRECISION": "bf16" if work.precision == "bf16" else "no"}
    settings |= {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}
    with open(log, "w") as f:
        environment = os.environ | threads | settings | environment
        command = [*command, str(folder / "spec.json")]
        code = subprocess.run(command, cwd=folder, env=environment, stdout=f, stderr=subprocess.STDOUT).returncode
    if code or not result.exists():
        lines = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{name}: {lines[-1] if lines else f'exit code {code}'}")
    return json.loads(result.read_text())


def environment_of(version, args):
    """(command, environment variables) of a process in TRL `version`; creates its environment if there is none.

    RuntimeError, with pip's last line, where that fails.
    """
    worker = str(Path(__file__).resolve().with_name("speed_trl.py"))

    def pip(*command):
        done = subprocess.run([*command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"TRL {version}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")

    if args.wheels:  # trl and the packages that this version needs otherwise; torch is this Python's own
        site, present = Path(args.work_dir).resolve() / f"site-{version}", os.listdir(args.wheels)
        packages = [p for p in TRL_VERSIONS[version] if any(w.startswith(p.replace("==", "-") + "-") for w in present)]
        offline = "--no-index", "--no-deps", "--upgrade", "--find-links", args.wheels, "--target", str(site)
        pip(sys.executable, "-m", "pip", "install", "-q", *offline, *(packages or TRL_VERSIONS[version][1:2]))
        return [sys.executable, worker], {"PYTHONPATH": str(site)}
    folder = Path(args.environments or Path(args.work_dir) / "environments").resolve() / f"trl-{version}"
    python = str(folder / "bin" / "python")
    script = "from importlib.metadata import version as v; print(*(f'{n}=={v(n)}' for n in ('trl', 'transformers')))"
    found = ""
    if Path(python).exists():
        found = subprocess.run([python, "-c", script], capture_output=True, text=True).stdout
    if not set(found.split()) <= set(TRL_VERSIONS[version]) or not found:
        print(f"creating the environment {folder.name}", flush=True)
        pip(sys.executable, "-m", "venv", str(folder))
        pip(python, "-m", "pip", "install", "-q", TRL_VERSIONS[version][0])
        pip(python, "-m", "pip", "install", "-q", *TRL_VERSIONS[version])
    return [python, worker], {}


# ---- compare ---------------------------------------------------------------------------------------------------------
def spec_of(work, paths, **more):
    """What a worker process is told, as one JSON object."""
    names = "algorithm", "batch_size", "response_length", "mini_batches", "precision"
    spec = {name: getattr(work, name) for name in names} | paths
    spec |= {"k": work.k, "epochs": work.passes, "updates": work.updates + 1}
    spec |= {"micro_batch_size": None, "rollout_micro_batch_size": None, "flags": []}
    return spec | more


OURS, PEAK = ([sys.executable, str(Path(__file__).resolve()), worker] for worker in ("ours", "peak"))


def seconds(record, phase="update"):
    """Mean seconds of a phase over the counted updates; the first one warms up."""
    return statistics.mean(update[phase] for update in record["updates"][1:])


def systems_of(args, paths):
    """({name: (command, spec, environment variables)}, {name: why it cannot run}), ours first."""
    own = {"micro_batch_size": args.micro_batch_size, "rollout_micro_batch_size": args.rollout_micro_batch_size}
    systems, errors = {"ours": (OURS, spec_of(args, paths, **own), {})}, {}
    for variant in args.variants:
        name, _, flags = variant.partition(":")
        systems[f"ours, {name}"] = OURS, spec_of(args, paths, **own, flags=flags.split()), {}
    having = [v for v in TRL_VERSIONS if args.algorithm == "rloo" or v.startswith("0.")]  # TRL 1.x has no PPO
    minibatch = args.batch_size // args.mini_batches
    micro = min(args.trl_micro_batch_size, minibatch)
    if minibatch % micro:
        of = f"the {minibatch} episodes of a minibatch"
        raise SystemExit(f"error: --trl_micro_batch_size {micro}: does not divide {of}")
    for version in having if args.against is None else args.against:
        frozen = "bfloat16" if args.precision == "bf16" else "float32"
        try:
            if version not in TRL_VERSIONS:
                raise RuntimeError(f"TRL {version}: not one of {', '.join(TRL_VERSIONS)}")
            spec = spec_of(args, paths, trl_micro_batch_size=micro, frozen_dtype=frozen)
            command, environment = environment_of(version, args)
            systems[f"TRL {version}"] = command, spec, environment
        except RuntimeError as e:
            errors[f"TRL {version}"] = str(e)
    return systems, errors


def compare(args):
    config, (paths, prompts) = model_config(args), build(args)
    systems, errors = systems_of(args, paths)
    records, peaks = {name: [] for name in systems}, []
    for alternation in range(1, args.alternations + 1):
        peaks.append(launch(args, "peak", PEAK, {"precision": args.precision}))
        for name in [name for name in systems if name not in errors]:
            command, spec, environment = systems[name]
            try:
                record = launch(args, name, command, spec, **environment)
            except RuntimeError as e:
                if name == "ours":
                    raise
                errors[name] = str(e)
                continue
            check_work(name, record, args, config)
            records[name].append(record)
            speed = args.batch_size / seconds(record)
            print(f"alternation {alternation} of {args.alternations}, {name}: {speed:.2f} episodes/s", flush=True)
        done = {name: runs for name, runs in records.items() if name not in errors}
        text, flops = comparison(args, config, list(map(len, prompts)), done, peaks, errors)
        publish(args, "compare", text, {"flops": flops, "peaks": peaks, "errors": errors, "runs": records})
    print(text)


def comparison(args, config, prompt_lengths, records, peaks, errors):
    """(the table and its legend, work_flops of an update) of what has run so far."""
    rates, first = [run["flops_per_second"] for run in peaks], records["ours"]
    rate = statistics.median(rates)
    lengths = [update["response_tokens"] / args.batch_size for run in first for update in run["updates"][1:]]
    lengths = [statistics.mean(lengths)] * args.batch_size
    flops = work_flops(config, prompt_lengths, lengths, args.algorithm, args.passes, args.mini_batches)
    rows = []
    for name, runs in records.items():
        pairs = [seconds(b) / seconds(a) for a, b in zip(first, runs, strict=True)]  # of one alternation
        names = "rollout", "scores", "optimise", "update"
        phases = {p: statistics.median(seconds(run, p) for run in runs) for p in names}
        loaded, top = (statistics.median(run[key] for run in runs) for key in ("loaded", "peak"))
        row = [name, spread([args.batch_size / seconds(run) for run in runs]), "1" if runs is first else spread(pairs)]
        row += [f"{phases[p]:.2f}" for p in ("rollout", "scores", "optimise")]
        row += [f"{top / 1e9:.2f} ({loaded / 1e9:.2f})", f"{statistics.median(run['peak'] for run in first) / top:.2f}"]
        rows.append([*row, f"{sum(flops.values()) / rate / phases['update']:.2f}"])
        rows[-1].append(f"{flops['optimise'] / rate / phases['optimise']:.2f}")
    header = ["system", "episodes/s", "times as fast", "rollout s", "scores s", "optimise s"]
    header += ["peak GB (loaded)", "memory share", "of the bound", "optimise"]
    text = f"{args.algorithm.upper()}, k = {args.k}, epochs {args.passes}, minibatches {args.mini_batches}, "
    text += f"{describe(args)}\n"
    text += table(header, rows)
    work = ", ".join(f"{phase} {value / 1e9:.1f}" for phase, value in flops.items())
    text += f"\n\nMedian (lowest .. highest) of {len(first)} alternations of {args.updates} counted updates. "
    text += "Times as fast and memory share: ours to that system. Of the bound: the work's seconds at the rate of "
    text += "matrix products to all seconds, then the same in the optimise phase. "
    text += f"Work of an update: {work} GFLOP. A matrix product runs at "
    text += f"{spread([r / 1e9 for r in rates], '{:.0f}')} GFLOP/s."
    return text + "".join(f"\nNot measured: {message}." for message in errors.values()), flops


# ---- decode ----------------------------------------------------------------------------------------------------------
def decode(args):
    from rlhf_details import train_rloo, utils
    from rlhf_details.plumbing import vllm  # It imports vLLM's own package only when an engine starts.

    torch.set_num_threads(args.threads)
    paths, prompts = build(args)
    device, bf16 = "cuda" if torch.cuda.is_available() else "cpu", args.precision == "bf16"
    path = args.model or paths["policy"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    policy, k, R = train_rloo.Policy(model, 0.7).eval(), args.k, args.response_length
    queries, mask = utils.left_pad(prompts, device)
    rows = torch.arange(len(prompts) * k, device=device)

    def sampled(n):
        batch = queries.repeat_interleave(k, 0), mask.repeat_interleave(k, 0), rows
        never, key = torch.tensor([], dtype=torch.long), (1, utils.TRAINING, 1)
        return utils.sample(policy, *batch, n, R, never, key, size=len(rows))[0]

    def generated(model):
        model.generation_config.eos_token_id = None  # always R tokens, as ours without a stop token
        inputs = {"input_ids": queries.repeat_interleave(k, 0), "attention_mask": mask.repeat_interleave(k, 0)}
        how = dict(do_sample=True, temperature=0.7, top_k=0, top_p=1.0, min_new_tokens=R, max_new_tokens=R)
        return model.generate(**inputs, **how, pad_token_id=0)[:, queries.size(1) :]

    systems = {f"ours, {n} responses a prompt": lambda n=n: sampled(n) for n in dict.fromkeys((k, 1))}
    systems["generate"] = lambda: generated(model)
    if bf16:
        copy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
        systems["generate, bf16 weights"] = lambda: generated(copy)
    if importlib.util.find_spec("vllm"):
        flags = dict(sampler="vllm", vllm_server=None, vllm_memory=0.3, vllm_folder="/dev/shm", response_length=R)
        accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if bf16 else "no")
        rows_of_ids = [types.SimpleNamespace(ids=ids) for ids in prompts]
        engine = vllm.sampler(types.SimpleNamespace(**flags), accelerator, rows_of_ids, sys.exit)
        batch = queries.repeat_interleave(k, 0), mask.repeat_interleave(k, 0), rows
        systems["vLLM, its push included"] = lambda: engine(
            policy, *batch, 1, R, None, (1, utils.TRAINING, 1), len(rows)
        )[0]
    times = {name: [] for name in systems}
    for turn in range(args.alternations + 1):  # the first turn warms up
        for name, function in systems.items():
            cast = bf16 and not name.endswith("weights")
            with torch.no_grad(), torch.autocast(device, torch.bfloat16) if cast else nullcontext():
                begin = now()
                responses = function()
                passed = now() - begin
            if tuple(responses.shape) != (len(rows), R):
                raise ValueError(f"{name}: responses {tuple(responses.shape)}, {(len(rows), R)} were asked for")
            times[name] += [passed] if turn else []
    tokens, mine = len(rows) * R, next(iter(times.values()))
    lines = []
    for name, own in times.items():
        ratios = [b / a for a, b in zip(mine, own, strict=True)]
        lines.append([name, spread([tokens / t for t in own], "{:.0f}"), "1" if own is mine else spread(ratios)])
    text = f"Decoding, k = {k}, {describe(args)}\n" + table(["system", "tokens/s", "first row / that"], lines)
    publish(args, "decode", text, {"seconds": times, "tokens": tokens})
    print(text)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("ours", "peak"):  # a process that this script started
        {"ours": ours, "peak": peak}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
        raise SystemExit
    transformers.utils.logging.disable_progress_bar()
    args = tyro.cli(Compare | Decode)
    {Compare: compare, Decode: decode}[type(args)](args)
