"""
Peak memory of training with and without LoRA: SFT, reward model, RLOO and PPO on a random GPT-NeoX of 110 M parameters,
on the CPU.

Each run is a process of its own: two updates of 8 episodes (RLOO, PPO) or two steps of 8 rows; the peak is its resident
set's.

    python benchmark/studies/lora_memory.py      (results/lora_memory.md; some five minutes on two cores)
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT

from benchmark import made_with

FOLDER = ROOT / "runs" / "lora_memory"  # of models, data and runs
RUN = "import resource, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
RUN += "; print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
POLICY = "--sft_model_path base --total_episodes 16 --batch_size 8 --num_mini_batches 1 --response_length 32".split()
STAGES = {
    "train_sft": ["--base_model", "base", "--response_length", 32],
    "train_reward": ["--sft_model_path", "base"],
    "train_rloo": [*POLICY, "--reward_model_path", "reward", "--rloo_k", 4],
    "train_ppo": [*POLICY, "--reward_model_path", "reward"],
}


@dataclass
class Args:
    output: str = "benchmark/results/lora_memory.md"
    """the table"""


def make_models():
    """base and reward: random weights over the embedded task's words."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

    from rlhf_details import toy

    tokenizer = toy.tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    config = GPTNeoXConfig(vocab_size=16384, max_position_embeddings=256, num_labels=1, **sizes, **ids)
    for name, kind in (("base", GPTNeoXForCausalLM), ("reward", GPTNeoXForSequenceClassification)):
        kind(config).save_pretrained(FOLDER / name), tokenizer.save_pretrained(FOLDER / name)
    rows = toy.rows("sft", "train")[:16]
    (FOLDER / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "we ."} for row in rows]
    (FOLDER / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


def peak(script, *flags):
    """Peak resident set of a run, in MB."""
    data = {"train_reward": "pairs.jsonl"}.get(script, "sft.jsonl")
    words = ["--dataset", data, "--checkpoint_every", 0, "--micro_batch_size", 4, "--overwrite"]
    words += ["--output_dir", f"out/{script}"]
    words += ["--num_sample_generations", 0] if script in ("train_rloo", "train_ppo") else ["--batch_size", 8]
    page = ROOT / "rlhf_details" / f"{script}.py"
    command = [sys.executable, "-c", RUN, *map(str, [page, *words, *STAGES[script], *flags])]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=FOLDER, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return int(done.stdout.rsplit("PEAK", 1)[1]) / 1024


def main(args: Args):
    FOLDER.mkdir(parents=True, exist_ok=True)
    make_models()
    head = "| peak MB, 110 M parameters | all weights | `--lora_rank 16` | and `--gradient_checkpointing` "
    lines = [head + "| the latter alone |", "|---|---:|---:|---:|---:|"]
    for script in STAGES:
        lora, less = ["--lora_rank", 16], ["--gradient_checkpointing"]
        found = [peak(script), peak(script, *lora), peak(script, *lora, *less), peak(script, *less)]
        lines.append(f"| `{script}` | {' | '.join(f'{x:,.0f}' for x in found)} |")
    head = f"""# Memory with and without LoRA

Written by `python benchmark/studies/lora_memory.py`: peak of a whole process, fp32 on the CPU, one thread.
{made_with()} peft {version("peft")}.
"""
    path = ROOT / args.output
    path.write_text("\n".join([head, *lines]) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main(tyro.cli(Args))
