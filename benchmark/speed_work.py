"""What speed.py and engines.py measure: the work, counted, models and prompts of random weights and words, reports."""

import dataclasses
import json
import platform
import random
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from machine import processor
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
SIZES = {  # name: hidden size, layers, heads, vocabulary; 160m and 1b are Pythia's
    "0.9m": (128, 4, 4, 512),
    "27m": (512, 6, 8, 8192),
    "160m": (768, 12, 12, 50304),
    "1b": (2048, 16, 8, 50304),
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


# ---- reports ---------------------------------------------------------------------------------------------------------
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
