"""The pages on a device that is not the CPU: nothing mixes the two, and the numbers are the CPU's."""

import contextlib
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from unittest.mock import patch

import pretended_device
import pytest
import torch
from accelerate import Accelerator
from helpers import assert_same_curves, read_metrics, tiny_model
from short_runs import PLACES, dead, rows_of, short_evaluation, short_run, start, whole

from rlhf_details import train_rloo, utils
from rlhf_details.plumbing.inputs import models
from rlhf_details.plumbing.machine import engines

pytestmark = pytest.mark.skipif(not pretended_device.IS_POSSIBLE, reason="this torch lets no Python code be a device")


class OnDevice(Accelerator):
    device = property(lambda self: pretended_device.DEVICE)


@pytest.fixture(scope="module")
def other_process():
    """A process for the device, which torch would not forget in this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def on_device(folder, function, *args, **kwargs):
    """Calls it in a folder with an Accelerator of the device: (what it returns, number of operations, waits)."""
    patched = patch.object(engines, "Accelerator", OnDevice)
    with contextlib.chdir(folder), patched, pretended_device.counting() as (operations, waits):
        return function(*args, **kwargs), operations.total(), waits


@pytest.fixture
def both(other_process, tmp_path):
    """both(function, ...): calls it on the CPU and, in the other process, on the device. Gives what it returns."""

    def call(function, *args, **kwargs):
        (tmp_path / "cpu").mkdir(), (tmp_path / "device").mkdir()
        there = other_process.submit(on_device, tmp_path / "device", function, *args, **kwargs)
        with contextlib.chdir(tmp_path / "cpu"):
            here = function(*args, **kwargs)
        there, operations, _ = there.result()
        assert operations > 1000  # so this is no test of the CPU against itself
        return here, there

    return call


@pytest.mark.parametrize("name", PLACES)
def test_a_page_has_the_numbers_of_the_cpu(name, ragged, both, tmp_path):
    rows_of(ragged)
    both(short_run, ragged, name)
    curves = [read_metrics(tmp_path / folder / "runs/run") for folder in ("cpu", "device")]
    assert_same_curves(*curves, near=1e-5)  # Before the first step the KL is rounding alone.


def test_an_evaluation_has_the_numbers_of_the_cpu(ragged, both):
    rows_of(ragged)
    here, there = both(short_evaluation, ragged)
    assert here == pytest.approx(there, rel=1e-4, abs=1e-6)


def sampled(prompts, n, num_stops):
    """(responses, mask, how often the host waits meanwhile) of two responses of 64 tokens to each prompt."""
    model = models.set_up_for_training(tiny_model("llama"), SimpleNamespace())
    device = engines.join().device
    policy, stop_ids = train_rloo.Policy(model, 1.0).to(device), torch.arange(num_stops, device=device)
    batch = [*utils.left_pad([ids for ids in prompts for _ in range(2)], device), torch.arange(4, device=device)]
    before = pretended_device.waits.total()
    responses, mask, _ = utils.sample(policy, *batch, n, 64, stop_ids, (1, 0, 1), size=4)
    number = pretended_device.waits.total() - before
    return responses.tolist(), mask.tolist(), number


@pytest.mark.parametrize("num_stops,longest", [(1, 64), (20, 6)])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompts", [[[3, 4, 5], [6, 7, 8]], [[3, 4, 5], [6]]], ids=["one-length", "padded"])
def test_sampling_waits_once_for_16_tokens(prompts, n, num_stops, longest, both):
    here, there = both(sampled, prompts, n, num_stops)
    assert here[:2] == there[:2]
    assert max(map(sum, here[1])) == longest
    assert there[2] <= max(2, longest / 16)  # once at the start, and then where it asks whether all rows have ended


@pytest.mark.parametrize("name", ["rloo-plain", "ppo"])
def test_no_micro_batch_makes_the_host_wait(name, ragged, other_process, tmp_path):
    rows_of(ragged)
    found = []
    for size in (16, 4):
        run = other_process.submit(on_device, tmp_path, short_run, ragged, name, micro_batch_size=size)
        found.append(run.result())
        shutil.rmtree(tmp_path / "model"), shutil.rmtree(tmp_path / "runs")
    (_, operations, waits), (_, more_operations, as_many_waits) = found
    assert more_operations > 1.5 * operations and as_many_waits == waits


def test_a_run_that_died_on_the_cpu_goes_on_with_the_same_numbers(tiny, other_process, tmp_path):
    shutil.copytree(dead(tiny, "ppo"), tmp_path, dirs_exist_ok=True)
    _, operations, _ = other_process.submit(on_device, tmp_path, start, tiny, "ppo", resume=True).result()
    assert operations > 1000
    assert_same_curves(read_metrics(whole(tiny, "ppo") / "runs/run"), read_metrics(tmp_path / "runs/run"))
