"""What a script prints is never its undoing: the terminal may be gone, full, or without a character."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, ROOT

SPEAK = """
import sys, warnings
from rlhf_details.plumbing import console
console.keep_printing()
sys.stdin.readline()
sys.stdout.close(), sys.stderr.close()  # as the user's code might
console.say("⏎ \\ud800")
print("a print of the user's code: é", flush=True)
print("without a flush: é" * 10000)
sys.stderr.write("é\\n")
warnings.warn("a library's é")
for _ in console.progress("bar é", range(3)):
    pass
bar = console.tqdm(range(3))
bar.update(3)
console.fail("é")
"""


def nobody_reads():
    reader, writer = os.pipe()
    return writer, lambda: os.close(reader)


def terminal_closes():
    ours, theirs = pty.openpty()
    return theirs, lambda: os.close(ours)


def is_full():
    return os.open("/dev/full", os.O_WRONLY), lambda: None


def lacks_a_character():
    return os.open("said.txt", os.O_WRONLY | os.O_CREAT), lambda: None


STREAMS = [nobody_reads, terminal_closes, is_full, lacks_a_character]


@pytest.mark.parametrize("kind", STREAMS)
def test_no_print_ends_the_program(in_tmp, kind):
    stream, goes_away = kind()
    environment = os.environ | ENVIRONMENT | {"PYTHONIOENCODING": "ascii" if kind is lacks_a_character else "utf-8"}
    options = dict(env=environment, stdin=subprocess.PIPE, stdout=stream, stderr=stream)
    with subprocess.Popen([sys.executable, "-c", SPEAK], **options) as process:
        os.close(stream), goes_away()
        process.communicate(b"\n")
    assert process.returncode == 2
    if kind is lacks_a_character:
        said = (in_tmp / "said.txt").read_text()
        assert said.startswith("\\u23ce \\ud800\na print of the user's code: \\xe9\n") and "error: \\xe9" in said


@pytest.mark.parametrize("script,flag", [("train_rloo.py", "--batch_size"), ("train_both.py", "--policy.batch_size")])
def test_the_scripts_end_with_their_own_exit_code_though_standard_error_is_full(in_tmp, script, flag):
    words = [sys.executable, ROOT / "rlhf_details" / script, flag, "0"]
    with open("/dev/full", "w") as full:
        options = dict(env=os.environ | ENVIRONMENT, stdout=full, stderr=full)
        assert subprocess.run(words, **options).returncode == 2


def test_a_signal_in_the_middle_of_a_print_is_heard(in_tmp):
    """A terminal that waits (Ctrl-S) holds a print, and Python allows no other one inside of it."""
    reader, writer = os.pipe()
    program = (
        "import signal, types\n"
        "from rlhf_details.plumbing import console\n"
        "from rlhf_details.plumbing.outputs.run import Run\n"
        "run = types.SimpleNamespace(heard=0)\n"
        "signal.signal(signal.SIGTERM, lambda *given: Run.hear(run, *given))\n"
        "console.keep_printing()\n"
        "print('ready', flush=True)\n"
        "print('x' * 1000000, flush=True)\n"
        "raise SystemExit(run.heard)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | ENVIRONMENT, stdout=writer) as process:
        os.close(writer)
        assert os.read(reader, 6) == b"ready\n"
        assert os.read(reader, 1) == b"x"  # The long print has begun, and nobody reads the rest of it yet.
        process.send_signal(signal.SIGTERM)
        while os.read(reader, 1 << 20):
            pass
        assert process.wait() == signal.SIGTERM
    os.close(reader)


@pytest.mark.slow
def test_deepspeed_does_not_say_that_a_cpu_is_one():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    code = "from rlhf_details.plumbing.inputs import cli\n"
    code += "cli.parse = print; cli.main(lambda args: __import__('deepspeed').logger.warning('another line'), None)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert "another line" in done.stdout and "accelerator" not in done.stdout, done.stdout + done.stderr
