"""bf16 in one process, and an error in one of two. What two processes compute is in test_engines.py."""

import os
import time
from pathlib import Path

import pytest
import torch
from chat_templates import CHATML, OF_QWEN, bytes_and_words
from helpers import ROOT, assert_same_curves, launch, page_args, read_metrics, tiny_model
from processes import run_under, spec_of, words_of
from safetensors.torch import load_file
from short_runs import write_rows

from rlhf_details import train_agent, train_sft

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("overlap", [False, True])
def test_model_3_under_bf16_weights_and_log_probs_are_fp32(ragged, tmp_path, overlap):
    """Fault 13. accelerate wraps the policy's forward for bf16; the copy of --overlap must call its own weights."""
    args = page_args("train_ppo", ragged, total_episodes=64, num_ppo_epochs=2, learning_rate=1e-2, overlap=overlap)
    (((seen),),) = run_under("one", [spec_of(args, "bf16", precision="bf16")], tmp_path, processes=1)
    assert (seen["precision"], seen["products"], seen["dtypes"]) == ("bf16", {"torch.bfloat16"}, {"torch.float32"})
    rows = read_metrics(tmp_path / "runs/bf16")
    assert all(abs(value) < 1e9 for row in rows for value in row.values())
    assert overlap or 0 < rows[0]["val/logprob_gap"] < 0.5
    kl = [abs(row["objective/kl"]) for row in rows]
    fresh = 2 if overlap else 1
    assert max(kl[:fresh]) < 0.1 and min(kl[fresh:]) > 2 * max(kl[:fresh])
    assert all(x.dtype == torch.float32 for x in load_file(tmp_path / "models/bf16/model.safetensors").values())


def test_a_reward_function_that_fails_on_one_process_alone_ends_both(tiny, in_tmp):
    Path("mine.py").write_text(
        "import os\ndef f(prompts, completions):\n"
        "    if os.environ['RANK'] == '1': raise KeyError('only here')\n    return [0.0] * len(completions)\n"
    )
    args = page_args("train_rloo", tiny, reward_fn=("mine.py:f",))
    done = launch("train_rloo.py", words_of(args), 2, cwd=in_tmp)
    assert done.returncode == 1 and done.stderr.count("error: --reward_fn f raised KeyError") == 1, done.stderr[-2000:]
    assert "mine.py" in done.stderr and "only here" in done.stderr


@pytest.mark.parametrize("at_fault", [False, True])
def test_a_pool_that_a_reward_keeps_ends_with_its_run(tiny, in_tmp, at_fault):
    """None of its workers is left, also where both runs end by a fault while their workers are still busy."""
    Path("mine.py").write_text(
        "import multiprocessing as m, os, time\nfrom pathlib import Path\nkept = []\n"
        "def one(c):\n    Path(f'worker{os.getpid()}').touch()\n    return float(len(c))\n"
        "def f(prompts, completions):\n    kept or kept.append(m.get_context('fork').Pool(1))\n"
        "    found = kept[0].map(one, completions)\n"
        + ("    kept[0].map_async(time.sleep, [60])\n    return found[1:]\n" if at_fault else "    return found\n")
    )
    args = page_args("train_rloo", tiny, reward_fn=("mine.py:f",))
    done = launch("train_rloo.py", words_of(args), 2, cwd=in_tmp)
    ended = time.time()
    assert done.returncode == at_fault, done.stderr[-2000:]
    workers = [path.name.removeprefix("worker") for path in Path().glob("worker*")]
    assert len(workers) == 2 and ended - max(os.path.getmtime(f"worker{number}") for number in workers) < 45
    for _ in range(100):  # A process is there until the system has cleared it away.
        if not any(Path("/proc", number).exists() for number in workers):
            return
        time.sleep(0.1)
    raise AssertionError("a worker is left after ten seconds")


def test_a_pool_that_ends_before_its_workers_have_begun_keeps_no_run_waiting(tiny, in_tmp):
    """As on a busy machine: a worker that is told to end begins only then."""
    page = ROOT / "rlhf_details" / "train_rloo.py"
    Path("late.py").write_text(
        "import os, runpy, time\nos.register_at_fork(after_in_child=lambda: time.sleep(1))\n"
        f"runpy.run_path({str(page)!r}, run_name='__main__')\n"
    )
    Path("mine.py").write_text(
        "import multiprocessing as m\ndef f(prompts, completions):\n    pool = m.get_context('fork').Pool(2)\n"
        "    pool.terminate()\n    pool.join()\n    return [0.0] * len(completions)\n"
    )
    args = page_args("train_rloo", tiny, reward_fn=("mine.py:f",), total_episodes=16)
    done = launch(in_tmp / "late.py", words_of(args), cwd=in_tmp)  # It hung.
    assert done.returncode == 0 and "SIGTERM" not in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_run_that_calls_tools_is_the_same_on_two_processes_and_after_its_death(in_tmp):
    """The policy has learnt one call by heart, and the tool fails on one number in four."""
    tokenizer = bytes_and_words(CHATML, OF_QWEN, "<|im_end|>")
    tokenizer.save_pretrained("start")
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=400, initializer_range=0.05).save_pretrained(
        "start"
    )
    Path("mine.py").write_text(
        "import os, signal\nfrom pathlib import Path\n\n\ndef half(x: int) -> int:\n"
        '    """\n    Halves a number.\n\n    Args:\n        x: the number\n    """\n'
        "    if x == 4:\n        raise ValueError('not four')\n    return x // 2\n\n\n"
        "def length(prompts, completions, turns):\n"
        "    if Path('dies').exists() and Path('runs/two/metrics.jsonl').read_text().count('lr') == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [len(said) + 0.1 * len(said[-1]) for said in turns]\n"
    )
    rows = []
    for x in (2, 4, 6, 8):
        call = {"type": "function", "function": {"name": "half", "arguments": {"x": x}}}
        said = [
            ("system", "<tool_call>"),
            ("user", f"hello {x}"),
            ("assistant", ""),
            ("tool", str(x // 2)),
            ("assistant", f"the answer {x // 2}"),
        ]
        rows.append({"messages": [{"role": role, "content": text} for role, text in said]})
        rows[-1]["messages"][2]["tool_calls"] = [call]
    data = write_rows("rows.jsonl", rows)
    sft = dict(base_model="start", dataset=data, completion_only=True, batch_size=4, num_train_epochs=100)
    train_sft.main(train_sft.Args(**sft, learning_rate=1e-2, lr_schedule="constant", output_dir="sft", run_name="sft"))
    asked = write_rows("asked.jsonl", [{"prompt": row["messages"][:2]} for row in rows])
    given = dict(dataset=asked, sft_model_path="sft", reward_fn=("mine.py:length",), tools=("mine.py:half",))
    given |= dict(response_length=120, max_turns=3, batch_size=8, rloo_k=2, total_episodes=24, temperature=0.3)
    given |= dict(learning_rate=1e-3, checkpoint_every=1, num_sample_generations=4)
    given |= dict(adam_eps=1e-3)  # The rounding of gradients that are 0 stays below it, or it would become steps.
    train_agent.main(train_agent.Args(**given, output_dir="one", run_name="one"))
    one = read_metrics("runs/one")
    assert max(row["val/turns"] for row in one) > 1.5
    samples = Path("runs/one/samples.jsonl").read_text()
    assert "error: not four" in samples and r"tool\n3\n" in samples
    args = train_agent.Args(**given, output_dir="two", run_name="two")
    Path("dies").touch()
    done = launch("train_agent.py", words_of(args), 2, cwd=in_tmp)
    assert done.returncode and 2 <= len(read_metrics("runs/two")) < len(one)
    Path("dies").unlink()
    args.resume = True
    done = launch("train_agent.py", words_of(args), 2, cwd=in_tmp)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same_curves(one, read_metrics("runs/two"), near=1e-5)
