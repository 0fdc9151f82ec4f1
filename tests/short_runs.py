"""Short runs of every training page that stop, die and are resumed: 6 updates of 16 episodes or of 8 rows."""

import contextlib
import functools
import json
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers import CHATTY, PAGES, SCRIPTS, page_args, read_metrics, without_times

from rlhf_details import evaluate, toy
from rlhf_details.plumbing.outputs.run import Run

MODEL = dict.fromkeys(SCRIPTS, "sft_model_path") | {"train_sft": "base_model", "evaluate": "policy_path"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STEPS = dict(num_ppo_epochs=2, num_mini_batches=2, eval_dataset="held_out.jsonl")
MOMENTS = dict(adaptive_kl=True, kl_horizon=50.0, kl_coef=0.2, score_scaling=True, score_norm=True, tf_adam=True)
CASES = {  # name: (page, flags)
    "rloo": ("train_rloo", {}),
    "rloo-steps": ("train_rloo", STEPS | dict(eval_every=2, warmup_ratio=0.5)),
    "grpo-steps": ("train_grpo", STEPS | dict(entropy_coef=0.2, entropy_target=9.0)),
    "ppo": ("train_ppo", {}),
    "ppo-moments": ("train_ppo", STEPS | MOMENTS),
    "ppo-shared": ("train_ppo", dict(value_model="shared", whiten_rewards=True, num_ppo_epochs=2)),
    "ppo-overlap": ("train_ppo", dict(num_mini_batches=2, overlap=True)),
    "rloo-overlap": ("train_rloo", dict(overlap=True)),
    "distill": ("train_distill", dict(gamma=0.5, eval_dataset="held_out.jsonl")),
    "distill-jsd": ("train_distill", dict(divergence="jsd", eval_dataset="held_out.jsonl", eval_every=2)),
    "agent": ("train_agent", CHATTY | dict(eval_dataset="held_out.jsonl")),
    "reward-gain": ("train_reward", dict(normalization="gain_bias", tf_adam=True, normalize_samples=16)),
    "reward-shift": ("train_reward", dict(normalization="mean_shift", lr_schedule="linear")),
    "dpo": ("train_dpo", {}),
    "sft": ("train_sft", {}),
}


PLACES = {  # name: (case, flags), all that decides where tensors are
    "sft": ("sft", {}),
    "reward": ("reward-gain", {}),
    "dpo": ("dpo", {}),
    "ppo": ("ppo", {}),
    "ppo-shared": ("ppo-shared", {}),
    "rloo-packed": ("rloo", {}),
    "rloo-plain": ("rloo", dict(share_prompts=False)),
    "rloo-lora": ("rloo", dict(lora_rank=2)),
    "rloo-offloaded": ("rloo", dict(offload_frozen=True)),
    "grpo": ("grpo-steps", {}),
    "agent": ("agent", {}),
    "distill": ("distill", {}),
    "distill-jsd": ("distill-jsd", dict(offload_frozen=True)),
}


class Death(BaseException):
    """What nothing catches: it stands for SIGKILL in this process."""


def write_rows(path, rows):
    """Writes a JSON Lines file and returns its path as a string."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def comparisons(count):
    """Comparisons of four reviews, of which the best one has the highest gold."""
    reviews, rows = toy.rows("sft", "train"), []
    for i in range(count):
        prompt, candidates = reviews[i]["prompt"], [row["completion"] for row in reviews[4 * i : 4 * i + 4]]
        scores = [toy.gold(prompt, candidate) for candidate in candidates]
        rows.append({"prompt": prompt, "candidates": candidates, "best": scores.index(max(scores))})
    return rows


@functools.cache
def rows_of(tiny):
    """A folder with prompts.jsonl (20 rows), held_out.jsonl (6), texts.jsonl (27) and comparisons.jsonl (27)."""
    folder = tiny / "rows"
    if folder.exists():  # The test that started this process has written them.
        return folder
    folder.mkdir()
    prompts = list({row["prompt"]: row for row in toy.rows("prompts", "train")[:60]}.values())
    parts = dict(prompts=prompts[:20], held_out=prompts[20:26], comparisons=comparisons(27))
    for name, rows in (parts | dict(texts=toy.rows("sft", "train")[:27])).items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def arguments(tiny, case, **changes):
    """(page, its Args) of a case: a checkpoint after every second update, the folders runs/run and model."""
    (page, flags), rows = CASES[case], rows_of(tiny)
    values = dict(checkpoint_every=2, run_name="run", output_dir="model", overwrite=False) | flags | changes
    if values.get("eval_dataset"):
        values["eval_dataset"] = str(rows / values["eval_dataset"])
    if page in PAGES:
        short = dict(dataset=str(rows / "prompts.jsonl"), total_episodes=96, num_sample_generations=3)
        return PAGES[page], page_args(page, tiny, **(short | values))
    few = dict(batch_size=8, micro_batch_size=8, num_train_epochs=2, learning_rate=1e-3, response_length=8)
    if page == "train_sft":
        few |= dict(vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, context_length=256)
        few["dataset"] = str(rows / "texts.jsonl")
    else:
        few |= dict(dataset=str(rows / "comparisons.jsonl"), sft_model_path=str(tiny / "policy"))
    return SCRIPTS[page], SCRIPTS[page].Args(**(few | values))


def start(tiny, case, **changes):
    """Runs a case in this process and the current folder. Afterwards the signals mean what they meant before."""
    page, args = arguments(tiny, case, **changes)
    before, has_died = [signal.getsignal(number) for number in SIGNALS], False
    try:
        return page.main(args)
    except (Death, KeyboardInterrupt):
        has_died = True
        raise
    finally:
        after = [signal.getsignal(number) for number in SIGNALS]
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        assert has_died or after == before  # a process that has died is gone


def one_step(script, folder, **changes):
    """Args of a run of one step on rows.jsonl and the models in a folder, or of an evaluation."""
    values = dict(dataset="rows.jsonl", output_dir="out", response_length=4, overwrite=False)
    if script in PAGES:
        return page_args(script, folder, **(values | dict(total_episodes=16) | changes))
    values[MODEL[script]] = str(folder / "policy")
    values |= {} if script == "evaluate" else dict(batch_size=16, run_name="run")
    return SCRIPTS[script].Args(**(values | changes))


def short_run(tiny, name, **changes):
    """Two updates of an entry of PLACES, or two epochs of 24 rows."""
    case, flags = PLACES[name]
    page, _ = CASES[case]
    start(tiny, case, **(dict(total_episodes=32) if page in PAGES else {}) | flags | changes)


def short_evaluation(tiny):
    """{metric: value} of the tiny policy, beside the references, and its KL from itself."""
    args = evaluate.Args(
        dataset=str(rows_of(tiny) / "texts.jsonl"), policy_path=str(tiny / "policy"), output_dir="out",
        reward_model_path=str(tiny / "reward"), ref_model_path=str(tiny / "policy"), judge="reward_model",
        response_length=6,
    )  # fmt: skip
    return {name: figure["value"] for name, figure in evaluate.main(args)["metrics"]["policy"].items()}


@contextlib.contextmanager
def after_row(update, act):
    """Within it act(run) happens once the row of an update has been written."""
    real = Run.log

    def log(self, number, *args, **more):
        real(self, number, *args, **more)
        if number == update:
            act(self)

    with patch.object(Run, "log", log):
        yield


def die(run):
    """Death, in a process that lives on: TensorBoard's thread must not write into the folder of the next test."""
    run.accelerator.get_tracker("tensorboard").finish()
    raise Death


@functools.cache
def whole(tiny, case):
    """The folder in which a case ran to its end."""
    folder = tiny / "whole" / case
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        start(tiny, case)
    return folder


@functools.cache
def dead(tiny, case):
    """The folder in which a case died after the row of update 5. Its checkpoints are of updates 2 and 4."""
    folder = tiny / "dead" / case
    folder.mkdir(parents=True)
    with contextlib.chdir(folder), after_row(5, die), pytest.raises(Death):
        start(tiny, case)
    return folder


def copy_of_dead(tiny, case="rloo"):
    """Copies it into the current folder; returns the run's folder."""
    shutil.copytree(dead(tiny, case), ".", dirs_exist_ok=True)
    return Path("runs/run")


def model_of(folder):
    """{name: bytes} of the model's files but for its arguments, in which a resumed run differs."""
    differ = "training_args.json", "README.md"
    return {file.name: file.read_bytes() for file in (Path(folder) / "model").iterdir() if file.name not in differ}


def assert_same_run(folder, other, run="run"):
    """Metrics but for times, sample tables and model are equal, bit for bit."""
    ours, theirs = Path(folder) / "runs" / run, Path(other) / "runs/run"
    assert without_times(read_metrics(ours)) == without_times(read_metrics(theirs))
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()
    ours, theirs = model_of(folder), model_of(other)
    assert ours.keys() == theirs.keys() and "model.safetensors" in ours
    assert [name for name in ours if ours[name] != theirs[name]] == []


def updates(run="runs/run"):
    """The updates that a run's metrics.jsonl has rows of."""
    return [row["update"] for row in read_metrics(run)]


def checkpoints(run="runs/run"):
    """The names in a run's folder of checkpoints, unfinished ones too."""
    return sorted(path.name for path in Path(run).glob("checkpoints/*"))


def contents(folder="."):
    """{path: bytes} of everything below a folder, where folders have none."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in Path(folder).rglob("*")}


def error_line(capsys, end, code=2):
    """The line "error: ..." that a run ended with, and what follows it on stderr. Checks the exit code."""
    text = capsys.readouterr().err
    assert end.value.code == code, text
    assert len(re.findall("^error: ", text, re.MULTILINE)) == 1 and "Traceback" not in text, text
    return text[text.index("error: ") :]
