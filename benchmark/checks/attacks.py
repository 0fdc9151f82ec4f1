"""
Attacks short runs of RLOO on a tiny model, and counts how often they hold: bits that flip, pools of processes in a
reward, signals, folders that others use, and terminals that go away.

To hold is the same everywhere. The run, or its `--resume`, ends with the weights and metrics of the run that was left
alone, or it says which file was damaged, and what others have put into its folders is still there.

    python benchmark/checks/attacks.py          # some ten minutes; it writes benchmark/results/attacks/
"""

import contextlib
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmark/results/attacks"
RUN, METRICS, LOG, OUT, WHOLE = map(Path, "runs/run runs/run/metrics.jsonl log.txt out whole".split())
FLIPS = 8  # in each of three files
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
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
rows = [json.dumps({"prompt": row["prompt"] + " é"}) for row in toy.rows("prompts", "train")[:32]]
pathlib.Path("rows.jsonl").write_text("\\n".join(rows))
"""
REWARDS = """
import multiprocessing, time
def length(text):
    return float(len(text))
def plain(prompts, completions):
    time.sleep(0.3)
    print("a reward may print, too: é", flush=True)
    return [length(text) for text in completions]
def fork(prompts, completions, kind="fork"):
    with multiprocessing.get_context(kind).Pool(2) as pool:
        return pool.map(length, completions)
def spawn(prompts, completions):
    return fork(prompts, completions, "spawn")
"""


# ---- runs ------------------------------------------------------------------------------------------------------------
def start(*flags, reward="plain", stdout=None, encoding="utf-8"):
    """Starts a run of six updates in the current folder. What it prints goes to log.txt, or to a descriptor."""
    words = [sys.executable, ROOT / "rlhf_details/train_rloo.py", *FLAGS, "--reward_fn", f"rewards.py:{reward}", *flags]
    environment = os.environ | ENVIRONMENT | {"PYTHONIOENCODING": encoding}
    with open(LOG, "w") as log:
        return subprocess.Popen(words, env=environment, stdout=stdout or log, stderr=log, start_new_session=True)


def under_way(**how):
    """Starts a run in place of the one before, and returns when it has logged its third row."""
    shutil.rmtree(OUT, ignore_errors=True)
    process = start("--overwrite", **how)
    while process.poll() is None and not (METRICS.exists() and METRICS.read_bytes().count(b"\n") == 3):
        time.sleep(0.02)  # another process's file: there is nothing to wait on
    return process


def ended(process, code=0, out=OUT):
    """Whether a run ends with an exit code, within ten minutes and, where it is 0, with the result of the whole one."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(600) == code and (code or result(out) == result(WHOLE, WHOLE))
    os.killpg(process.pid, signal.SIGKILL)


def result(out=OUT, run=RUN):
    """What must be equal: the weights, and the metrics without times."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rows = [{name: x for name, x in row.items() if name != "eps" and "time/" not in name} for row in rows]
    return (out / "model.safetensors").read_bytes(), rows


# ---- attacks: each yields what it did, and whether the run held ------------------------------------------------------
def flips():
    """One bit of a file of the newest of two checkpoints, or of the metrics, and `--resume`."""
    process = under_way()
    process.terminate()
    process.wait()
    stopped = shutil.copytree(RUN, "stopped")
    for name in ("policy.pt", "state.pt", "metrics.jsonl"):
        for number in range(FLIPS):
            shutil.rmtree(RUN), shutil.rmtree(OUT, ignore_errors=True)
            path = max(Path(shutil.copytree(stopped, RUN)).rglob(name))
            content, chance = bytearray(path.read_bytes()), random.Random(number)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            held = ended(start("--resume"))
            yield f"a bit of {name}", held or (name == METRICS.name and f"{path} was damaged" in LOG.read_text())


def pools():
    """A pool of two processes in the reward."""
    for kind in ("fork", "spawn"):
        yield f"a pool by {kind}", ended(under_way(reward=kind))


def signals():
    """A signal, and `--resume`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        process = under_way()
        process.send_signal(number)
        yield number.name, ended(process, 128 + number) and ended(start("--resume"))


def folders():
    """What others do to the folders of a run."""
    process = under_way()
    yield "a second start", ended(start("--resume"), 2) and ended(process)
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
        process = under_way(stdout=writer)
        os.close(reader), os.close(writer)
        yield what, ended(process)
    yield "a terminal without é", ended(under_way(encoding="ascii"))


def main():
    tries, held = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("rewards.py").write_text(REWARDS)
        subprocess.run([sys.executable, "-c", MODELS], check=True, env=os.environ | ENVIRONMENT)
        start().wait()
        shutil.copytree(OUT, WHOLE), shutil.copy(METRICS, WHOLE)
        for attack in (flips, pools, signals, folders, terminals):
            for what, is_held in attack():
                print(f"{attack.__name__}: {what}: {'held' if is_held else 'LOST'}", flush=True)
                tries[attack.__name__, what] += 1
                held[attack.__name__, what] += bool(is_held)
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    text = f"Commit {commit}: `python benchmark/checks/attacks.py`, one thread a run.\n\n"
    text += "| attack | with | tries | held |\n|---|---|---:|---:|\n"
    text += "".join(f"| {key[0]} | {key[1]} | {tries[key]} | {held[key]} |\n" for key in tries)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "table.md").write_text(text)
    (RESULTS / "README.md").write_text(f"# What does a run withstand?\n{__doc__}\nThe counts: [table.md](table.md).\n")
    sys.exit(tries != held)


if __name__ == "__main__":
    main()
