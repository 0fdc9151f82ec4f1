"""
Attacks short runs of RLOO on a tiny model, and counts how often they hold: bits that flip, pools of processes in a
reward, signals, folders that others use, and terminals that go away.

To hold is the same everywhere: the run, or its `--resume`, ends with the weights of the run that was left alone, and
what others have put into its folders is still there.

    python benchmark/checks/attacks.py          # some ten minutes; it writes benchmark/results/attacks/
"""

import contextlib
import filecmp
import itertools
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN, METRICS, OUT = map(Path, ("runs/run", "runs/run/metrics.jsonl", "out"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
FLAGS = (
    "--dataset rows.jsonl --sft_model_path policy --batch_size 8 --response_length 8 --total_episodes 48 "
    "--learning_rate 1e-3 --checkpoint_every 2 --num_sample_generations 0 --output_dir out --run_name run"
).split()
MODELS = """
import json, pathlib, transformers
from rlhf_details import toy
tokenizer = toy.tokenizer()
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
ids = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
transformers.set_seed(1)
transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **ids, bos_token_id=None)).save_pretrained("policy")
tokenizer.save_pretrained("policy")
rows = [json.dumps({"prompt": row["prompt"]}) for row in toy.rows("prompts", "train")[:32]]
pathlib.Path("rows.jsonl").write_text("\\n".join(rows))
"""
REWARDS = """
import multiprocessing, time
def length(text):
    return float(len(text))
def plain(prompts, completions):
    time.sleep(0.3)
    print("a reward may print, too", flush=True)
    return [length(text) for text in completions]
def fork(prompts, completions, kind="fork"):
    with multiprocessing.get_context(kind).Pool(2) as pool:
        return pool.map(length, completions)
def spawn(prompts, completions):
    return fork(prompts, completions, "spawn")
"""


# ---- runs ------------------------------------------------------------------------------------------------------------
def start(*flags, reward="plain", stdout=None):
    """Starts a run of six updates in the current folder. Args: stdout, where it prints, or None: nowhere."""
    words = [sys.executable, ROOT / "rlhf_details/train_rloo.py", *FLAGS, "--reward_fn", f"rewards.py:{reward}", *flags]
    streams = dict(stdout=stdout or subprocess.DEVNULL, stderr=subprocess.STDOUT)
    return subprocess.Popen(words, env=ENVIRONMENT, start_new_session=True, **streams)


def under_way(stdout=None):
    """Starts a run in place of the one before, and returns when it has logged its third row."""
    shutil.rmtree(OUT, ignore_errors=True)
    process = start("--overwrite", stdout=stdout)
    while process.poll() is None and not (METRICS.exists() and METRICS.read_bytes().count(b"\n") == 3):
        time.sleep(0.02)  # another process's file: there is nothing to wait on
    return process


def ended(process, code=0, out=OUT):
    """Whether a run ends with an exit code within three minutes, and with 0 leaves the weights that it should."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        files = out / "model.safetensors", "whole.safetensors"
        return process.wait(180) == code and (code or filecmp.cmp(*files, shallow=False))
    os.killpg(process.pid, signal.SIGKILL)


# ---- attacks: each yields what it did, and whether the run held ------------------------------------------------------
def flips():
    """One bit of a file of the newer one of two checkpoints, and `--resume`."""
    process = under_way()
    process.terminate()
    process.wait()
    shutil.copytree(RUN, "stopped")
    for name in ("policy.pt", "state.pt"):
        for number in range(6):
            shutil.rmtree(RUN), shutil.copytree("stopped", RUN), shutil.rmtree(OUT, ignore_errors=True)
            path = max(RUN.rglob(name))
            content, chance = bytearray(path.read_bytes()), random.Random(number)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            yield f"a bit flips in {name}, and --resume", ended(start("--resume"))


def pools():
    """A pool of two processes in the reward."""
    for kind in ("fork", "spawn"):
        yield f"the reward has a pool, by {kind}", ended(start("--overwrite", reward=kind))


def signals():
    """A signal, and `--resume`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        process = under_way()
        process.send_signal(number)
        yield f"{number.name}, and --resume", ended(process, 128 + number) and ended(start("--resume"))


def folders():
    """What others do to the folders of a run."""
    process = under_way()
    process.send_signal(signal.SIGSTOP)  # so that it has not ended when the second one has loaded its models
    is_refused = ended(start("--resume"), 2)
    process.send_signal(signal.SIGCONT)
    yield "a second start with --resume", is_refused and ended(process)
    process = under_way()
    (RUN / "checkpoints/best").symlink_to("000002")
    yield "a link in checkpoints/", ended(process) and (RUN / "checkpoints/best").is_symlink()
    process = under_way()
    OUT.mkdir()
    (OUT / "mine.txt").touch()
    yield "a file in --output_dir", ended(process, out=Path("out.run")) and (OUT / "mine.txt").exists()


def terminals():
    """Standard output that fails."""
    for what, (reader, writer) in {
        "a terminal that closes": pty.openpty(),
        "a reader that ends": os.pipe(),
        "a full disk": (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)),
    }.items():
        process = under_way(writer)
        os.close(reader), os.close(writer)
        yield what, ended(process)


def main():
    found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("rewards.py").write_text(REWARDS)
        subprocess.run([sys.executable, "-c", MODELS], check=True, env=ENVIRONMENT)
        start().wait()
        (OUT / "model.safetensors").rename("whole.safetensors")
        for what, held in itertools.chain(signals(), folders(), terminals(), flips(), pools()):
            print(f"{what}: {'held' if held else 'LOST'}", flush=True)
            found.setdefault(what, []).append(bool(held))
    describe = "git describe --always --dirty".split()
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    (ROOT / "benchmark/results/attacks/table.md").write_text(
        f"Commit {commit}: `python benchmark/checks/attacks.py`, one thread a run.\n\n"
        "| attack | tries | held |\n|---|---:|---:|\n"
        + "".join(f"| {what} | {len(held)} | {sum(held)} |\n" for what, held in found.items())
    )


if __name__ == "__main__":
    main()
