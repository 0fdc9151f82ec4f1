"""
Speed and memory, measured on this machine: our scripts against TRL or against themselves at another commit, our sampler
against `generate`, and growth with the size of the work.

    python benchmark/speed.py compare --algorithm rloo --size 27m --prompts 96 128
    python benchmark/speed.py compare --size 27m --against COMMIT                      ours, and ours at that commit
    python benchmark/speed.py compare --size 27m --against --variants "plain:--no_share_prompts"    ours, a flag off
    python benchmark/speed.py compare --size 27m --against --without packed_sampling        ours, a speed-up taken out
    python benchmark/speed.py decode --size 27m
    python benchmark/speed.py scaling

The models have random weights and the shape of a name in SIZES, and the prompts are random words. So nothing is
downloaded, except that the environment of a TRL version of TRL_VERSIONS is created from PyPI where --environments has
none. A commit of ours is unpacked from this repository, and runs with the packages of this Python.

`compare` runs the systems in turn, A B C A B C ..., each time in a process of its own that makes one update to warm up
and --updates that count. Every process says what it really did. Unless that is the work asked for (episodes, distinct
prompts, responses a prompt, tokens, optimiser steps), nothing is printed. The prompts are as many as an update takes,
so every update of every system works on the same ones. Ratios are taken within an alternation. Their median and range
are printed, and written after every alternation. Beside the seconds stands the fraction of the bound: work_flops at the
rate of a matrix product, which is measured on the spot, in a fresh process, once an alternation.
"""

import dataclasses
import importlib
import importlib.util
import io
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
import tyro
from accelerate import Accelerator
from machine import processor
from speed_trl import memory, now
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parent.parent
SIZES = {  # name: hidden size, layers, heads, vocabulary; 160m and 1b are Pythia's
    "0.9m": (128, 4, 4, 512),
    "27m": (512, 6, 8, 8192),
    "160m": (768, 12, 12, 50304),
    "1b": (2048, 16, 8, 50304),
}
TRL_VERSIONS = {  # The exact versions of an environment. Torch is installed first, so that nothing else chooses it.
    "0.21.0": (
        *("torch==2.13.0", "trl==0.21.0", "transformers==4.56.2"),
        *("tokenizers==0.22.2", "huggingface_hub==0.36.2", "datasets==5.0.1"),  # the last that go with it
    ),
    "1.16.0": ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"),
}


@dataclass
class Work:
    """What is asked for: the same for all systems."""

    algorithm: str = "rloo"
    """rloo or ppo"""
    size: str = "27m"
    """shape of the models, a name in SIZES"""
    vocab_size: int | None = None
    """another vocabulary than the size's"""
    prompts: tuple[int, int] = (8, 24)
    """shortest and longest prompt, tokens; lengths are drawn uniformly"""
    response_length: int = 32
    """tokens a response may have (R)"""
    batch_size: int = 64
    """episodes an update (B)"""
    rloo_k: int = 4
    """RLOO: responses a prompt (k)"""
    epochs: int | None = None
    """passes over the batch; None: 1 for RLOO, 4 for PPO"""
    mini_batches: int = 1
    """optimiser steps a pass"""
    precision: str = "fp32"
    """fp32, or bf16 autocast"""
    updates: int = 2
    """updates that are counted, after one that is not"""
    alternations: int = 3
    """times that every system runs"""
    threads: int = field(default_factory=torch.get_num_threads)
    """CPU threads of every process"""
    work_dir: str = "runs/speed"
    """models, prompts, logs and environments"""
    output: str | None = None
    """where the table (.md) and every single run (.json) go, without the ending; None: into work_dir"""

    @property
    def k(self):
        return self.rloo_k if self.algorithm == "rloo" else 1

    @property
    def passes(self):
        return self.epochs or {"rloo": 1, "ppo": 4}[self.algorithm]


@dataclass
class Compare(Work):
    """Our script and TRL's on the same work, alternating."""

    against: tuple[str, ...] | None = None
    """versions of TRL, or commits of this repository; None: all versions of TRL that have the algorithm"""
    variants: tuple[str, ...] = ()
    """further runs of ours, "name:--flag value --flag": with the flags of train_rloo.py or train_ppo.py"""
    without: tuple[str, ...] = ()
    """further runs of ours, each with one speed-up taken out: names in WITHOUT"""
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


@dataclass
class Scaling(Work):
    """Seconds of an update over batch sizes and response lengths; peak memory over vocabulary, response and batch."""

    size: str = "0.9m"
    alternations: int = 1
    batch_sizes: tuple[int, ...] = (32, 64, 128, 256)
    """batch sizes of the first table"""
    response_lengths: tuple[int, ...] = (16, 32, 64, 128)
    """response lengths of the second table"""


# ---- the work, counted -----------------------------------------------------------------------------------------------
def forward_flops(config, prompt_lengths, response_lengths):
    """FLOPs (2 a multiply-add) of a forward over prompts [P] and their responses [B], the B / P of a prompt adjacent.

    Returns: (linear layers of the blocks, attention). A prompt's tokens count once for all its responses, and padding
    does not count. Linear layers: q, k, v and output 4 h^2, MLP 2 h i. Attention: scores and weighted values, h
    multiply-adds each, for each key that a query sees, which are its own response's tokens up to itself and the
    prompt's.
    """
    h, i, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    k = len(response_lengths) // len(prompt_lengths)
    pairs = sum(p * (p + 1) / 2 for p in prompt_lengths)
    pairs += sum(r * prompt_lengths[j // k] + r * (r + 1) / 2 for j, r in enumerate(response_lengths))
    tokens = sum(prompt_lengths) + sum(response_lengths)
    return 2 * layers * (4 * h * h + 2 * h * i) * tokens, 4 * layers * h * pairs


def work_flops(config, prompt_lengths, response_lengths, algorithm="rloo", epochs=1, mini_batches=1):
    """FLOPs of one update, {"rollout", "scores", "optimise"}: the matrix products that were asked for, each once.

    Each forward takes every real token once (forward_flops), so RLOO's k responses share their prompt in all phases,
    training too. PPO has one response a prompt. The LM head (2 h V) and the critic's head (2 h) count at response
    positions alone, R an episode. Rollout: prefill and decoding, one forward in all. Scores: the reference, the reward
    model (its head once an episode), the policy once more where a ratio needs old log-probs (more than one optimiser
    step), and PPO's critic. Optimise: forward and backward, 3 forwards, of the policy (and PPO's critic) an epoch. Left
    out: embeddings, norms, softmax, sampling and the optimiser.
    """
    h, critics = config.hidden_size, int(algorithm == "ppo")
    trunk = sum(forward_flops(config, prompt_lengths, response_lengths))
    policy = trunk + 2 * h * config.vocab_size * sum(response_lengths)
    reward, critic = trunk + 2 * h * len(response_lengths), trunk + 2 * h * sum(response_lengths)
    scores = policy + reward + (epochs * mini_batches > 1) * policy + critics * critic
    return {"rollout": policy, "scores": scores, "optimise": 3 * epochs * (policy + critics * critic)}


def expected_length(work, config):
    """Mean response length, tokens, of a model that draws EOS like any other token: its weights are random."""
    V = config.vocab_size
    return V * (1 - (1 - 1 / V) ** work.response_length)


def check_work(name, record, work, config):
    """ValueError unless a process did, in every update, what was asked for. record: {"updates": [{...}]}."""
    want = {"episodes": work.batch_size, "prompts": work.batch_size // work.k, "completions_a_prompt": [work.k]}
    want |= {"optimizer_steps": work.passes * work.mini_batches}
    if len(record["updates"]) != work.updates + 1:
        raise ValueError(f"{name}: {len(record['updates'])} updates, {work.updates + 1} were asked for")
    for update in record["updates"]:
        for key, value in want.items():
            if update[key] != value:
                raise ValueError(f"{name}: {key} {update[key]}, {value} was asked for")
        length, expected = update["response_tokens"] / update["episodes"], expected_length(work, config)
        if abs(length / expected - 1) > 0.1:
            raise ValueError(f"{name}: {length:.1f} tokens a response, {expected:.1f} were expected")


# ---- models and prompts ----------------------------------------------------------------------------------------------
def model_config(work):
    hidden, layers, heads, vocab = SIZES[work.size]
    vocab = work.vocab_size or vocab
    ids = dict(vocab_size=vocab, bos_token_id=None, eos_token_id=vocab - 2, pad_token_id=vocab - 1)
    shape = dict(hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads)
    rest = dict(max_position_embeddings=2048, rotary_pct=0.25, use_parallel_residual=True, tie_word_embeddings=False)
    return GPTNeoXConfig(**ids, **shape, **rest)


def build(work):
    """Writes models and prompts where missing.

    Returns: ({"policy", "reward", "prompts": path}, token ids of the prompts).
    """
    config, folder = model_config(work), Path(work.work_dir).resolve() / f"{work.size}_{work.vocab_size or 'own'}"
    paths = {"policy": folder / "policy", "reward": folder / "reward"}
    if not (folder / "complete").exists():
        words = {f"w{i}": i for i in range(config.vocab_size - 2)}
        words |= {"<eos>": config.eos_token_id, "<pad>": config.pad_token_id}
        tokenizer = Tokenizer(models.WordLevel(words))
        # spaces or none between the words: the same tokens, so that TRL 1.x may glue texts together
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"w\d+"), "removed", invert=True)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
        torch.manual_seed(0)
        for kind, model_class in (("policy", GPTNeoXForCausalLM), ("reward", GPTNeoXForSequenceClassification)):
            config.num_labels = 1 if kind == "reward" else 2
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                model_class(config).to(torch.bfloat16).save_pretrained(paths[kind])  # all systems load it in fp32
            tokenizer.save_pretrained(paths[kind])
        (folder / "complete").touch()
    rng, P = random.Random(0), work.batch_size // work.k
    rows = [[rng.randrange(config.vocab_size - 2) for _ in range(rng.randint(*work.prompts))] for _ in range(P)]
    paths["prompts"] = folder / f"prompts_{P}_{'_'.join(map(str, work.prompts))}.jsonl"
    paths["prompts"].write_text("".join(json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows))
    return {name: str(path) for name, path in paths.items()}, rows


# ---- what a speed-up is worth: ours with one of them taken out -------------------------------------------------------
def one_response_a_row(script):
    real = script.utils.sample
    script.utils.sample = lambda *rows, **options: real(*rows, **options | {"n": 1})


WITHOUT = {"packed_sampling": one_response_a_row}


# ---- processes -------------------------------------------------------------------------------------------------------
def ours(spec):
    """Runs in a process of its own: main of the training script, with the clock and the memory read when it logs."""
    script = importlib.import_module(f"rlhf_details.train_{spec['algorithm']}")  # of the commit that PYTHONPATH names
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
    for name in spec["without"]:
        WITHOUT[name](script)
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


def others_seconds():
    """CPU seconds that all processes but this one and its children have used since the start; 0 if unknown."""
    path = Path("/proc/stat")
    ticks = path.read_text().split("\n")[0].split()[1:] if path.exists() else [0] * 8
    everything = sum(int(ticks[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(0.0, everything - sum(usage.ru_utime + usage.ru_stime for usage in mine))


def launch(work, name, command, spec, **environment):
    """Runs `command SPEC.json` in a process of its own.

    Returns: what it wrote, and the cores that other processes kept busy meanwhile. RuntimeError, with the last line of
    its log, where it fails.
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
    before, begin = others_seconds(), time.time()
    with open(log, "w") as f:
        environment = os.environ | threads | settings | environment
        command = [*command, str(folder / "spec.json")]
        code = subprocess.run(command, cwd=folder, env=environment, stdout=f, stderr=subprocess.STDOUT).returncode
    others = (others_seconds() - before) / (time.time() - begin)
    if code or not result.exists():
        lines = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{name}: {lines[-1] if lines else f'exit code {code}'}")
    return json.loads(result.read_text()) | {"others": others}


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
    spec |= {"micro_batch_size": None, "rollout_micro_batch_size": None, "flags": [], "without": []}
    return spec | more


def unpack(commit, args):
    """The folder with our scripts as they were at a commit; RuntimeError, with git's last line, where there is none."""
    folder = Path(args.work_dir).resolve() / "commits" / commit.replace("/", "_")
    done = subprocess.run(["git", "archive", commit, "rlhf_details"], capture_output=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{commit}: {done.stderr.decode().strip().splitlines()[-1]}")
    shutil.rmtree(folder, ignore_errors=True)
    tarfile.open(fileobj=io.BytesIO(done.stdout)).extractall(folder, filter="data")
    return folder


OURS, PEAK = ([sys.executable, str(Path(__file__).resolve()), worker] for worker in ("ours", "peak"))


def seconds(record, phase="update"):
    """Mean seconds of a phase over the counted updates; the first one warms up."""
    return statistics.mean(update[phase] for update in record["updates"][1:])


def spread(values, form="{:.2f}"):
    """Median and range in words."""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} .. {form.format(max(values))})"


def table(header, rows):
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def about(work):
    """Machine, versions and commit, without names of hosts or users."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    gpu, commit = torch.cuda.get_device_name() if torch.cuda.is_available() else None, git.stdout.strip() or "unknown"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    about = {"cpu": processor(), "threads": work.threads, "gpu": gpu, "commit": commit}
    return about | {"python": platform.python_version()} | versions


def publish(work, kind, text, data):
    """Writes the text, and beside it every number."""
    output = Path(work.output or Path(work.work_dir) / f"{kind}_{work.algorithm}_{work.size}")
    output.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{output}.md").write_text(text + "\n")
    folders = {"work_dir", "output", "environments", "wheels"}  # this machine's own
    asked = {name: value for name, value in dataclasses.asdict(work).items() if name not in folders}
    Path(f"{output}.json").write_text(json.dumps({"args": asked, "about": about(work)} | data, indent=1))


def describe(work):
    """The work and the machine, for the head of a table."""
    machine = about(work)
    model = Path(getattr(work, "model", None) or f"{work.size} parameters").name
    asked = f"{model}, prompts of {work.prompts[0]}-{work.prompts[1]} tokens"
    asked += f", {work.response_length} new tokens"
    where = machine["gpu"] or f"{machine['cpu']}, {work.threads} threads"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, commit {machine['commit']}"
    return f"{asked}, batch {work.batch_size}, {work.precision}\n{where}; {versions}\n"


def systems_of(args, paths):
    """({name: (command, spec, environment variables)}, {name: why it cannot run}), ours first."""
    own = {"micro_batch_size": args.micro_batch_size, "rollout_micro_batch_size": args.rollout_micro_batch_size}
    systems, errors = {"ours": (OURS, spec_of(args, paths, **own), {})}, {}
    for variant in args.variants:
        name, _, flags = variant.partition(":")
        systems[f"ours, {name}"] = OURS, spec_of(args, paths, **own, flags=flags.split()), {}
    for name in args.without:
        systems[f"without {name}"] = OURS, spec_of(args, paths, **own, without=[name]), {}
    having = [v for v in TRL_VERSIONS if args.algorithm == "rloo" or v.startswith("0.")]  # TRL 1.x has no PPO
    minibatch = args.batch_size // args.mini_batches
    micro = min(args.trl_micro_batch_size, minibatch)
    if minibatch % micro:
        of = f"the {minibatch} episodes of a minibatch"
        raise SystemExit(f"error: --trl_micro_batch_size {micro}: does not divide {of}")
    for version in having if args.against is None else args.against:
        name = f"TRL {version}" if version in TRL_VERSIONS else f"ours at {version}"
        frozen = "bfloat16" if args.precision == "bf16" else "float32"
        try:
            if version in TRL_VERSIONS:
                spec = spec_of(args, paths, trl_micro_batch_size=micro, frozen_dtype=frozen)
                command, environment = environment_of(version, args)
                systems[name] = command, spec, environment
            else:
                systems[name] = OURS, spec_of(args, paths, **own), {"PYTHONPATH": str(unpack(version, args))}
        except RuntimeError as e:
            errors[name] = str(e)
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
    text += f"{spread([r / 1e9 for r in rates], '{:.0f}')} GFLOP/s. "
    others = [run["others"] for runs in (peaks, *records.values()) for run in runs]
    text += f"Other processes kept {spread(others)} cores busy meanwhile."
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
        flags = types.SimpleNamespace(sampler="vllm", vllm_server=None, vllm_memory=0.3, response_length=R)
        accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if bf16 else "no")
        engine = vllm.sampler(flags, accelerator, [types.SimpleNamespace(ids=ids) for ids in prompts], sys.exit)
        batch = queries.repeat_interleave(k, 0), mask.repeat_interleave(k, 0), rows
        systems["vLLM, its push included"] = lambda: engine(
            policy, *batch, 1, R, None, (1, utils.TRAINING, 1), len(rows)
        )[0]
    times, before, start = {name: [] for name in systems}, others_seconds(), time.time()
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
    text += f"\n\nOther processes kept {(others_seconds() - before) / (time.time() - start):.2f} cores busy meanwhile."
    publish(args, "decode", text, {"seconds": times, "tokens": tokens})
    print(text)


# ---- scaling ---------------------------------------------------------------------------------------------------------
def scaling(args):
    def measure(**changes):
        """Median seconds of an update, peak bytes and those of them above the loaded models, under changed work."""
        work = dataclasses.replace(args, **changes)
        spec, runs = spec_of(work, build(work)[0]), []
        for _ in range(args.alternations):
            runs.append(launch(work, "scaling", OURS, spec))
            check_work("ours", runs[-1], work, model_config(work))
        top, loaded = (statistics.median(run[key] for run in runs) for key in ("peak", "loaded"))
        return statistics.median(map(seconds, runs)), top, top - loaded, runs

    data, text = {}, f"{args.algorithm.upper()}, k = {args.k}, {describe(args)}"
    for name, values in (("batch_size", args.batch_sizes), ("response_length", args.response_lengths)):
        data[name] = {value: measure(**{name: value}) for value in values}
        base = data[name][values[0]][0]
        rows = [
            [v, f"{t[0]:.2f}", f"{t[0] / base:.2f}", f"{v / values[0]:.2f}", f"{t[1] / 1e9:.2f}"]
            for v, t in data[name].items()
        ]
        text += "\n" + table([name, "seconds an update", "of the first", "if linear", "peak GB"], rows) + "\n"
    now_at = {"vocab_size": args.vocab_size or SIZES[args.size][3]}
    now_at |= {name: getattr(args, name) for name in ("response_length", "batch_size")}
    data["memory"], rows = {}, []
    for name in (None, *now_at):
        point = now_at | ({name: 2 * now_at[name]} if name else {})
        result = data["memory"][name or "base"] = measure(**point)
        logits = 4 * point["vocab_size"] * point["response_length"] * point["batch_size"]
        sizes = (f"{x / 1e9:.3f}" for x in (result[1], result[2], logits))
        rows.append([f"{name} doubled" if name else "base", *point.values(), *sizes])
    header = ["", "vocabulary", "R", "B", "peak GB", "above the models GB", "fp32 logits [B, R, V] GB"]
    text += "\n" + table(header, rows)
    publish(args, "scaling", text, data)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("ours", "peak"):  # a process that this script started
        {"ours": ours, "peak": peak}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
        raise SystemExit
    transformers.utils.logging.disable_progress_bar()
    args = tyro.cli(Compare | Decode | Scaling)
    {Compare: compare, Decode: decode, Scaling: scaling}[type(args)](args)
