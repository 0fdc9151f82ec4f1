"""Claims about what goes wrong in the middle of a run: it stops before harm is done, says where, and leaves what can go on."""

import errno
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from conftest import read_metrics
from safetensors import SafetensorError
from test_resume import (
    Death,
    arguments,
    assert_same_run,
    checkpoints,
    everything,
    model_of,
    start,
    the_error,
    whole,
    written,
)
from transformers import PreTrainedModel

from rlhf_details import runs, train_ppo, train_reward, train_rloo, train_sft, utils

BOTH = pytest.mark.parametrize("case, script", [("rloo", train_rloo), ("ppo", train_ppo)], ids=["rloo", "ppo"])
ALL = pytest.mark.parametrize("case", ["rloo", "ppo", "reward-shift", "sft"])


@pytest.fixture
def steps(monkeypatch):
    """A list that grows by one with each step that AdamW takes."""
    taken, real = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, **k: taken.append(1) or real(self, *a, **k))
    return taken


def spoiled(function, call, spoil):
    """The function, whose result of one call (from 1) goes through `spoil`."""
    calls = []

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls.append(1)
        result = function(*args, **kwargs)
        return spoil(result, *args) if len(calls) == call else result

    return wrapper


def assert_stops(capsys, tiny, case, *parts, **changes):
    """The run ends with exit code 1 and one report that has these parts and names the last checkpoint; returns the report."""
    with pytest.raises(SystemExit) as error:
        start(tiny, case, **changes)
    text = the_error(capsys, 1, error)
    assert all(part in text for part in parts), text
    left = [name for name in checkpoints() if name.isdecimal()]
    last = f"runs/run/checkpoints/{left[-1]}; --run_name run --resume goes on from it" if left else "none"
    assert f"last good checkpoint: {last}" in text, text
    assert left == checkpoints() and not Path("model").exists()
    if left:
        assert runs.newest_checkpoint("runs/run") == (Path("runs/run/checkpoints") / left[-1], [])
    return text


# ---- 1. to 3. numbers that are not finite -----------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_stops_before_any_step(tiny, in_tmp, capsys, monkeypatch, steps, case, script, value):
    """The report is checked against the prompts' order, computed here, and the response that was scored."""
    seen = {}

    def spoil(scores, model, batch, *rest):
        queries, query_mask, responses, response_mask = (x[3] for x in batch)
        seen.update(query=queries[query_mask].tolist(), response=responses[response_mask].tolist())
        scores[3] = value
        return scores

    call = 3 if case == "ppo" else 5  # RLOO scores twice before, to see whether responses can share a row
    monkeypatch.setattr(script, "response_scores", spoiled(script.response_scores, call, spoil))
    text = assert_stops(capsys, tiny, case, f"update 3: the score is {value}", num_sample_generations=0)
    assert len(steps) == 2 and [row["update"] for row in read_metrics("runs/run")] == [1, 2] and checkpoints() == ["000002"]
    episode, row = map(int, re.search(r"\n  episodes (\d+)\n  episode \1: row (\d+) of --dataset, ", text).groups())
    args, tokenizer = arguments(tiny, case)[1], utils.load_tokenizer(tiny / "policy", "")
    prompts = [json.loads(line)["prompt"] for line in Path(args.dataset).read_text().splitlines()]
    place = 2 * 16 + episode if case == "ppo" else (2 * 16 + episode) // 4
    order = [number for epoch in range(3) for number in utils.permutation(20, 1, epoch)]
    assert order[place] == row - 1 and tokenizer(prompts[row - 1]).input_ids == seen["query"]
    response = tokenizer.decode(seen["response"], skip_special_tokens=True)
    assert f"{prompts[row - 1]!r}, with the response {response!r}" in text


@BOTH
def test_a_loss_that_is_not_finite_stops_before_its_step(tiny, in_tmp, capsys, monkeypatch, steps, case, script):
    """In the second minibatch of update 3, in the first of its two micro-batches."""

    def spoil(result, *args):
        losses = result[0].clone()
        losses[2] = losses[2] * math.nan
        return losses, *result[1:]

    name = f"{case}_policy_loss"
    monkeypatch.setattr(script, name, spoiled(getattr(script, name), 2 * 4 + 3, spoil))
    options = dict(num_mini_batches=2, micro_batch_size=4)
    text = assert_stops(capsys, tiny, case, "update 3: the loss is nan", " of --dataset, ", "with the response", **options)
    assert len(re.search(r"\n  episodes ([\d, ]+)\n", text)[1].split(",")) == 1
    assert len(steps) == 5 and checkpoints() == ["000002"]


@pytest.mark.parametrize("case", ["reward-shift", "sft"])
def test_a_forward_that_is_not_finite_stops_before_its_step(tiny, in_tmp, capsys, monkeypatch, steps, case):
    """In step 3, in the first of its two micro-batches."""

    def spoil(result, *args):
        return torch.where(torch.arange(result.numel()).reshape(result.shape) == 0, math.nan, result)

    cls = train_sft.LanguageModel if case == "sft" else train_reward.Reward
    monkeypatch.setattr(cls, "forward", spoiled(cls.forward, 2 * 2 + 1, spoil))
    what = "loss" if case == "sft" else "score"
    text = assert_stops(capsys, tiny, case, f"update 3: the {what} is nan", "\n  row ", micro_batch_size=4)
    assert len(steps) == 2 and checkpoints() == ["000002"]
    named, first = re.search(r"\n  rows ([\d, ]+)\n  row (\d+): ", text).groups()
    numbers = [i + 1 for i in utils.permutation(27, 1, 0)[16:24]]
    assert [int(i) for i in named.split(",")] == (numbers if case == "sft" else numbers[:1]) and int(first) == numbers[0]
    line = json.loads(Path(arguments(tiny, case)[1].dataset).read_text().splitlines()[int(first) - 1])
    assert (repr(line["completion"]) if case == "sft" else line["candidates"][0][-20:]) in text


@ALL
def test_a_gradient_that_is_not_finite_stops_before_its_step(tiny, in_tmp, capsys, monkeypatch, steps, case):
    """One number of one gradient, by a hook; losses and scores are finite."""
    real, calls = Accelerator.backward, []

    def backward(self, loss, **kwargs):
        calls.append(1)
        real(self, loss, **kwargs)
        if len(calls) == 5:
            optimizer = self._optimizers[0]
            optimizer.param_groups[0]["params"][2].grad.view(-1)[1] = math.inf

    monkeypatch.setattr(Accelerator, "backward", backward)
    assert_stops(capsys, tiny, case, "update 5: the gradient's norm is", ": ", max_grad_norm=1.0)
    assert len(steps) == 4 and checkpoints() == ["000002", "000004"]


# ---- 4. a full disk ---------------------------------------------------------------------------------------------------
FULL = "No space left on device"


def full(*_, **__):
    raise OSError(errno.ENOSPC, FULL)


def full_from_rust(*_, **__):
    raise SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")


def full_checkpoint(raises):
    """A patch: no room for the weights' second moments in the second checkpoint."""
    real = runs.save_file

    def save_file(content, path, *rest):
        if path.name == "exp_avg_sq.safetensors" and path.parent.name == "000004.partial":
            path.write_bytes(b"what still had room")
            raises()
        real(content, path, *rest)

    return patch.object(runs, "save_file", save_file)


def full_log(name, method, update):
    """A patch: from an update on a log of the run is on a device that is really full."""
    real = getattr(runs.Run, method)

    def replaced(self, first, second, *rest):
        if (second if method == "log" else rest[0]) == update:
            setattr(self, name, open("/dev/full", "a"))
        return real(self, first, second, *rest)

    return patch.object(runs.Run, method, replaced)


FULL_DISKS = {
    "checkpoint": (lambda: full_checkpoint(full), ["000002"], "runs/run/checkpoints"),
    "checkpoint, as safetensors says it": (lambda: full_checkpoint(full_from_rust), ["000002"], "runs/run/checkpoints"),
    "metrics": (lambda: full_log("metrics_file", "log", 5), ["000002", "000004"], "runs/run/metrics.jsonl"),
    "samples": (lambda: full_log("samples_file", "table", 6), ["000002", "000004"], "runs/run/samples.jsonl"),
    "model": (lambda: patch.object(PreTrainedModel, "save_pretrained", full), ["000004", "000006"], "--output_dir model"),
}


@pytest.mark.parametrize("what", FULL_DISKS)
def test_a_full_disk_ends_the_run_and_no_checkpoint(tiny, in_tmp, capsys, what):
    make_full, left, named = FULL_DISKS[what]
    if what in ("metrics", "samples") and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with make_full():
        text = assert_stops(capsys, tiny, "rloo", f"{named} cannot be written ({'' if 'safetensors' not in what else 'Error'}")
    assert FULL in text.splitlines()[0] and checkpoints() == left
    assert not list(Path(".").rglob("*.partial"))
    start(tiny, "rloo", resume=True)
    assert_same_run(".", whole(tiny, "rloo"))


# ---- 5. folders that cannot be written ----------------------------------------------------------------------------------
def test_runs_may_be_a_file(tiny, in_tmp, capsys):
    Path("runs").write_text("in the way")
    text = assert_stops(capsys, tiny, "rloo", "runs/run cannot be written")
    assert text.splitlines()[0].startswith("error: runs/run cannot be written (") and everything() == {"runs": b"in the way"}


@pytest.mark.parametrize("name", ["run", "above"])
@pytest.mark.parametrize("run_name", ["run", None])
def test_a_folder_may_be_forbidden(tiny, in_tmp, capsys, monkeypatch, name, run_name):
    """By a patch, since root may write anywhere: the run's folder, or the one above the model's."""
    real = Path.mkdir

    def mkdir(self, *rest, **kwargs):
        if self.name == name or (name == "run" and self.parent.name == "runs"):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        real(self, *rest, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(SystemExit) as error:
        start(tiny, "rloo", run_name=run_name, output_dir="above/model")
    line = the_error(capsys, 1, error).splitlines()[0]
    assert "cannot be written (Permission denied)" in line and ("runs/" if name == "run" else "above") in line
    assert not Path("above").exists() and not list(Path(".").rglob("metrics.jsonl"))


# ---- 6. the model's folder ------------------------------------------------------------------------------------------------
def test_a_failing_save_leaves_the_older_model(tiny, in_tmp, capsys):
    start(tiny, "rloo", total_episodes=16)
    before = everything("model")
    with patch.object(PreTrainedModel, "save_pretrained", full), pytest.raises(SystemExit) as error:
        start(tiny, "rloo", overwrite=True)
    assert "--output_dir model cannot be written (No space" in the_error(capsys, 1, error)
    assert everything("model") == before and not list(Path(".").glob("model?*")) and checkpoints() == ["000004", "000006"]
    start(tiny, "rloo", overwrite=True, resume=True)
    assert_same_run(".", whole(tiny, "rloo"))


@pytest.mark.parametrize("next_fails", [False, True])
def test_dying_between_the_renames_loses_no_model(tiny, in_tmp, next_fails):
    """The older one is brought back by the next save, also where that one fails."""
    start(tiny, "rloo", total_episodes=16)
    before, real = model_of("."), Path.rename

    def rename(self, target):
        if self.name == "model.partial":
            raise Death
        return real(self, target)

    with patch.object(Path, "rename", rename), pytest.raises(Death):
        start(tiny, "rloo", overwrite=True)
    assert not Path("model").exists() and Path("model.before").is_dir()
    failing = patch.object(PreTrainedModel, "save_pretrained", full) if next_fails else nullcontext()
    with failing, pytest.raises(SystemExit) if next_fails else nullcontext():
        start(tiny, "rloo", overwrite=True, resume=True)
    assert not list(Path(".").glob("model?*"))
    if next_fails:
        assert model_of(".") == before
    else:
        assert_same_run(".", whole(tiny, "rloo"))


# ---- 7. the actor's thread ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case, script", [("rloo-async", train_rloo), ("ppo-async", train_ppo)], ids=["rloo", "ppo"])
@pytest.mark.parametrize("update", [4, 5])
def test_what_fails_in_the_actors_thread_comes_out_at_once(tiny, in_tmp, monkeypatch, case, script, update):
    """Where the batch is taken, and where a checkpoint waits for it (batch 5, after update 4)."""
    real = script.sample

    def broken(policy, *rest):
        if (script.TRAINING, update) in [x[1:] for x in rest if isinstance(x, tuple)]:
            raise ArithmeticError(f"sampler of update {update}")
        return real(policy, *rest)

    began = time.time()
    with monkeypatch.context() as change:
        change.setattr(script, "sample", broken)
        with pytest.raises(ArithmeticError, match=f"sampler of update {update}"):
            start(tiny, case)
    assert time.time() - began < 60 and checkpoints() == ["000002"]
    if update == 5:
        start(tiny, case, resume=True)
        assert_same_run(".", whole(tiny, case))


# ---- 8. one of two processes ----------------------------------------------------------------------------------------------
BROKEN = """
import json, os, signal, sys
import torch
from rlhf_details import train_ppo, train_rloo, utils
script, values = json.loads(open(sys.argv[1]).read())
script = dict(train_ppo=train_ppo, train_rloo=train_rloo)[script]
step, taken = torch.optim.AdamW.step, []
def broken(self, *rest, **kwargs):
    taken.append(1)
    if len(taken) == 2 and os.environ["RANK"] == sys.argv[2]:
        if sys.argv[3] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the step of update 2")
    return step(self, *rest, **kwargs)
torch.optim.AdamW.step = broken
script.main(script.Args(**values))
utils.leave_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rloo", "ppo-async"])
@pytest.mark.parametrize("rank, how", [(1, "kill"), (0, "kill"), (1, "raise"), (0, "raise")])
def test_when_one_of_two_processes_ends_the_other_does(tiny, tmp_path, case, rank, how):
    _, values = written(tmp_path, tiny, case, total_episodes=16 * 1000, checkpoint_every=1, num_mini_batches=1)
    (tmp_path / "broken.py").write_text(BROKEN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "broken.py")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(
            [*command, values, str(rank), how], cwd=tmp_path, env=environment, stdout=out, stderr=err, start_new_session=True
        )
        try:
            metrics, end = tmp_path / "runs/run/metrics.jsonl", time.time() + 120
            while not (metrics.exists() and metrics.read_text()) and process.poll() is None:
                assert time.time() < end
                time.sleep(0.1)
            code = process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()
    text = (tmp_path / "err").read_text()
    assert code not in (0, None) and [row["update"] for row in read_metrics(tmp_path / "runs/run")] == [1]
    assert ("ArithmeticError: the step of update 2" in text) == (how == "raise"), text
    if how == "kill":
        assert signal.Signals.SIGKILL.name in text or "exitcode: -9" in text, text
    assert runs.newest_checkpoint(tmp_path / "runs/run")[0].name == "000001"


# ---- 9. memory ------------------------------------------------------------------------------------------------------------
SIZES = """
import json, os, sys
from rlhf_details import runs, train_ppo, train_rloo
script, values = json.loads(open(sys.argv[1]).read())
sizes, log = {}, runs.Run.log
def recording(self, metrics, step):
    log(self, metrics, step)
    sizes[step] = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
runs.Run.log = recording
script = dict(train_ppo=train_ppo, train_rloo=train_rloo)[script]
script.main(script.Args(**values))
open("sizes.json", "w").write(json.dumps(sizes))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@pytest.mark.parametrize("case", ["rloo", "ppo", "rloo-async"])
def test_two_hundred_updates_need_no_more_memory_than_twenty(tiny, tmp_path, case):
    """Responses of all lengths, so that hardly two batches have the same shapes (utils.keep_memory_flat).

    The first checkpoint comes before the first look: where DeepSpeed is installed, accelerate imports it then, 20 MB once.
    """
    options = dict(total_episodes=16 * 200, checkpoint_every=10, num_sample_generations=10)
    _, values = written(tmp_path, tiny, case, **options)
    (tmp_path / "sizes.py").write_text(SIZES)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "sizes.py"), values]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    sizes = {int(step): size for step, size in json.loads((tmp_path / "sizes.json").read_text()).items()}
    assert sizes[200] < 1.05 * sizes[20], {step: round(size / 2**20, 1) for step, size in sizes.items() if step % 20 == 0}
