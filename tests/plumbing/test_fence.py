"""Whatever the user's code does to the process that it is called in, and whatever is printed, the run stays its own."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers import read_metrics, run_rloo, without_times
from short_runs import write_rows

from rlhf_details import evaluate, toy, train_sft
from rlhf_details.plumbing.inputs import user_code

GOOD = "return [float(len(c)) for c in completions]"
TOY_ROWS = [{"prompt": row["prompt"], "completion": row["completion"]} for row in toy.rows("sft", "train")[:16]]


def write(text):
    """Writes the user's file anew."""
    user_code.load_module.cache_clear(), sys.modules.pop("mine", None)
    Path("mine.py").write_text(text)


def state():
    """What the user's code may not change for the run, beside the seed."""
    numbers = torch.get_num_threads(), torch.get_float32_matmul_precision()
    return os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), *numbers


def rewarded(tiny, text, **changes):
    """The rows of a run of RLOO, which draws LoRA's first weights, on the reward function f in this text of a file."""
    write(text)
    write_rows("rows.jsonl", TOY_ROWS)
    options = dict(dataset="rows.jsonl", reward_model_path=None, reward_fn=("mine.py:f",), total_episodes=32)
    return run_rloo(tiny, **(options | changes))


def trained_on(text):
    """The rows of a run of SFT from scratch, whose weights are drawn after the rows are read, on the function f."""
    write(text)
    small = dict(vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, context_length=256, response_length=8)
    small |= dict(base_model="scratch", batch_size=8, run_name="run", output_dir="out", overwrite=True)
    return read_metrics(train_sft.main(train_sft.Args(dataset="mine.py:f", **small))["run"])


def evaluated(tiny, text):
    """What evaluate.py finds of the tiny policy by the reward function f."""
    write(text)
    options = dict(policy_path=str(tiny / "policy"), dataset=write_rows("rows.jsonl", TOY_ROWS), response_length=8)
    options |= dict(reward_fn=("mine.py:f",), judge="reward_fn", output_dir="out", overwrite=True)
    return [evaluate.main(evaluate.Args(**options))["metrics"]]


DOORS = {
    "reward": (lambda tiny, text: rewarded(tiny, text), "def f(prompts, completions):"),
    "async reward": (lambda tiny, text: rewarded(tiny, text), "async def f(prompts, completions):"),
    "rows": (lambda tiny, text: trained_on(text), "def f():"),
    "evaluation": (evaluated, "def f(prompts, completions):"),
}
RESULTS = dict.fromkeys(DOORS, GOOD) | {"rows": f"return {TOY_ROWS!r}"}
at_doors = pytest.mark.parametrize("door", DOORS)


# ---- what it changes -------------------------------------------------------------------------------------------------
CHANGES = {
    "grad mode": "torch.set_grad_enabled(False)",
    "default type": "torch.set_default_dtype(torch.bfloat16)",
    "default device": "torch.set_default_device('meta')",
    "seed": "torch.manual_seed(7)",
    "threads": "torch.set_num_threads(3)",
    "precision": "torch.set_float32_matmul_precision('medium')",
    "current folder": "os.chdir('/')",
    "a removed folder": "os.mkdir('gone'), os.chdir('gone'), os.rmdir(os.getcwd())",
    "sys.path": "sys.path.insert(0, '/elsewhere')",
    "an empty sys.path": "sys.path.clear()",
}


@at_doors
def test_nothing_that_it_changes_for_the_whole_process_reaches_the_run(door, tiny, in_tmp):
    """All are made at once, at the import and in each call: one that is left over shows."""
    run, head = DOORS[door]
    good = without_times(run(tiny, f"{head}\n    {RESULTS[door]}\n"))
    changes = "".join(f"    {change}\n" for name, change in CHANGES.items())
    before, path = state(), sys.path[:]
    text = f"import os, sys, torch\ndef change():\n{changes}change()\n{head}\n    change()\n    {RESULTS[door]}\n"
    assert without_times(run(tiny, text)) == good
    assert state() == before and sys.path[: len(path)] == path


def test_what_it_adds_to_sys_path_serves_its_own_later_imports(tiny, in_tmp):
    Path("lib").mkdir(), Path("lib/mine_too.py").write_text("def length(text): return float(len(text))\n")
    text = "import sys\nsys.path.insert(0, 'lib')\ndef f(prompts, completions):\n    import mine_too\n"
    assert rewarded(tiny, text + "    return [mine_too.length(c) for c in completions]\n")


# ---- exit() ----------------------------------------------------------------------------------------------------------
EXITS = {
    "exit()": "exit()",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "the completion's code": "try: exec('exit()')\n    except Exception: pass",
}


@at_doors
@pytest.mark.parametrize("exit", [*EXITS, "at import", "a task"])
def test_its_exit_is_a_fault(door, exit, tiny, in_tmp, capsys):
    """Python ends a program that leaves with another exception than SystemExit with exit code 1."""
    run, head = DOORS[door]
    text = f"{head}\n    {EXITS.get(exit, '')}\n    {RESULTS[door]}\n"
    if exit == "at import":
        text = f"import sys\nsys.exit(0)\n{text}"
    if exit == "a task":
        text = f"import asyncio\nasync def leave(): exit()\nasync {head.removeprefix('async ')}\n"
        text += "    await asyncio.gather(asyncio.sleep(0), leave())\n"
    with pytest.raises((SystemExit, RuntimeError)) as end, limit(60):
        run(tiny, text)
    words = capsys.readouterr().err if isinstance(end.value, SystemExit) else str(end.value)
    assert re.search(r"(--reward_fn|--dataset) \S+ called exit\((None|0)\)", words), words
    assert not isinstance(end.value, SystemExit) or end.value.code == 1
    assert not Path("out/model.safetensors").exists()


@at_doors
@pytest.mark.parametrize("name", ["GeneratorExit", "CancelledError"])
def test_an_exception_that_is_no_exception_is_a_fault(door, name, tiny, in_tmp, capsys):
    run, head = DOORS[door]
    text = f"from asyncio import CancelledError\n{head}\n    raise {name}\n    {RESULTS[door]}\n"
    with pytest.raises((SystemExit, RuntimeError)) as end, limit(60):
        run(tiny, text)
    words = capsys.readouterr().err if isinstance(end.value, SystemExit) else str(end.value)
    assert re.search(rf"(--reward_fn|--dataset) \S+ raised ({name}|RuntimeError)", words), words


# ---- notebooks -------------------------------------------------------------------------------------------------------
def test_an_async_reward_works_where_a_loop_runs_and_its_loop_stays(tiny, in_tmp):
    """In a notebook main is called in a running loop. A background task of the first call lives until the second."""
    text = (
        "import asyncio\nloops, beats = [], []\nasync def beat():\n    while True:\n        beats.append(1)\n"
        "        await asyncio.sleep(0)\nasync def f(prompts, completions):\n"
        "    loops.append((asyncio.get_running_loop(), loops or asyncio.create_task(beat())))\n"
        f"    assert len(loops) == 1 or len(beats) > 100, beats\n    {GOOD}\n"
    )

    async def cell():
        return rewarded(tiny, text, total_episodes=48)

    found = asyncio.run(cell())
    assert len({loop for loop, _ in sys.modules["mine"].loops}) == 1
    sync = f"def f(prompts, completions):\n    {GOOD}\n"
    assert without_times(found) == without_times(rewarded(tiny, sync, total_episodes=48))


# ---- pools of processes ----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def limit(seconds):
    """A hang is an error after so many seconds."""

    def end(*_):
        raise RuntimeError("it hangs")  # `join` would swallow a TimeoutError.

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0), signal.signal(signal.SIGALRM, before)


POOLS = {
    "Pool, fork": "with m.get_context('fork').Pool(2) as p: return p.map(one, completions)",
    "Pool, spawn": "with m.get_context('spawn').Pool(1) as p: return p.map(one, completions)",
    "Pool, forkserver": "with m.get_context('forkserver').Pool(1) as p: return p.map(one, completions)",
    "Pool, new workers": "with m.get_context('fork').Pool(1, None, (), 1) as p: return p.map(one, completions, 8)",
    "executor, spawn": "with P(1, mp_context=m.get_context('spawn')) as p: return list(p.map(one, completions))",
    "a process": "p = m.get_context('fork').Process(target=time.sleep, args=[1e6], daemon=True)\n"
    "    p.start(), p.join(0.5), p.terminate(), p.join()\n    return list(map(one, completions))",
}
POOL = "import multiprocessing as m, time\nfrom concurrent.futures import ProcessPoolExecutor as P\n"
POOL += "def one(c): return float(len(c))\ndef f(prompts, completions):\n    "


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_of_processes_works_by_any_method(pool, tiny, in_tmp):
    with limit(120):
        assert rewarded(tiny, POOL + POOLS[pool] + "\n", total_episodes=16)


# ---- what takes long -------------------------------------------------------------------------------------------------
@at_doors
def test_after_a_while_the_run_says_what_it_waits_for(door, tiny, in_tmp, monkeypatch, capsys):
    run, head = DOORS[door]
    monkeypatch.setattr(user_code, "PATIENCE", 0.2)
    wait = "await __import__('asyncio')" if "async" in head else "__import__('time')"
    run(tiny, f"{head}\n    {wait}.sleep(0.4)\n    {RESULTS[door]}\n")
    what = "--dataset mine.py:f" if door == "rows" else "--reward_fn f"
    assert f"still waiting for {what}, after 0.2 s\n" in capsys.readouterr().out


# ---- what is printed -------------------------------------------------------------------------------------------------
HOSTILE = "red\x1b[31m title\x1b]0;x\x07 over\rwritten \x9b2J back\b\x7f \u202egnirts \u2066x\u2069 line\u2028 tab\t"
PRINTED = {
    "samples": dict(num_sample_generations=2),
    "fault": dict(reward="return [None] * len(completions)"),
    "raised": dict(reward="raise ValueError(prompts[0])"),
    "column": dict(head="def f(prompts, completions, other):"),
    "name": dict(run_name="run\x1b[2J"),
    "evaluation": {},
}


@pytest.mark.parametrize("case", PRINTED)
def test_what_a_terminal_would_act_on_is_spelt_out(case, tiny, in_tmp, capfd, monkeypatch):
    rows = [{"prompt": f"{HOSTILE} {i}", "completion": HOSTILE, f"column{HOSTILE}": 1} for i in range(16)]
    monkeypatch.setattr(sys.modules[__name__], "TOY_ROWS", rows)
    options = dict(PRINTED[case])
    text = f"{options.pop('head', 'def f(prompts, completions):')}\n    {options.pop('reward', GOOD)}\n"
    with contextlib.suppress(SystemExit):
        evaluated(tiny, text) if case == "evaluation" else rewarded(tiny, text, **options)
    printed = "".join(capfd.readouterr())
    assert "\\x1b" in printed, printed
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", printed), printed
