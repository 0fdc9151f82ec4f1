"""
How a script speaks and ends, on one process or on many. It imports nothing heavy, so a line can be printed at once.

Models and data come from a local path, or from NAME or NAME@REVISION on the Hugging Face Hub. A script exits with an
error, one line that says why, if it cannot read them.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from tqdm.auto import tqdm


def is_main():
    """Whether this is the main process, also before it has met the others."""
    return os.environ.get("RANK", "0") == "0"


def complain(message):
    """Prints "error: ..." on the main process."""
    if is_main():
        print("error:", visible(message), file=sys.stderr, flush=True)


def fail(message):
    """Prints one line, "error: ...", on the main process and ends the program with exit code 2."""
    complain(" ".join(message.splitlines()))
    raise SystemExit(2)


def need(package, extra, what):
    """Exits with an error if the package of an extra is not installed. what: the flag that needs it."""
    if find_spec(package) is None:
        is_clone = (Path(__file__).parents[2] / "constraints.txt").exists()  # not in a wheel
        command = f'-c constraints.txt -e ".[{extra}]"' if is_clone else package
        fail(f"{what}: needs the package {package}: pip install {command}")


def say(line):
    """Prints a line on the main process."""
    if is_main():
        print(visible(line), flush=True)


class Lasting(io.FileIO):
    """Standard output or error, where what cannot be written is lost: the terminal is gone, the reader, or the room."""

    def write(self, data):
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def keep_printing():
    """From now on no print ends the program, neither ours nor one of the user's code or of a library.

    A character that the terminal's encoding lacks is printed as its number. Streams of a notebook or a test stay.
    """
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(Lasting(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
            lasting.close = lasting.flush  # The user's code may close it, and the run goes on printing.
            setattr(sys, name, lasting)


def visible(text):
    """A text that may be a stranger's, with what would steer the terminal spelt out: escapes, and orders of reading."""
    return re.sub(r"[\0-\b\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", lambda found: ascii(found[0])[1:-1], text)


def progress(what, items, total=None):
    """The items, `total` of them, and a bar that says how far it is where they take longer than eight seconds."""
    # accelerate's tqdm would settle how many processes there are, and rows are read before the engine is chosen.
    return tqdm(items, desc=what, total=total, delay=8, mininterval=8, leave=False, disable=not is_main())


def world_size():
    """The number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def leave_group():
    """Leaves the group of processes. Otherwise a process can abort while the group's threads still run."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(exit_code):
    """Ends this process. Exit code 1 says that something went wrong, and that the others do not know of it."""
    if exit_code == 1 and world_size() > 1:
        sys.stdout.flush()
        for child in multiprocessing.active_children():  # A pool of the user's would live on.
            child.terminate()
        # The others may wait in a collective, and leaving their group would be one more. The launcher ends them.
        os._exit(1)
    leave_group()
    raise SystemExit(exit_code)


def path_of(script):
    """The path of one of the package's scripts, as it is typed in the current folder."""
    return os.path.relpath(Path(__file__).parents[1] / script)


def split(source):
    """(NAME, REVISION) of NAME@REVISION. REVISION is None where there is none, and for a local path."""
    name, _, revision = str(source).partition("@")
    return (name, revision) if name and revision and not os.path.exists(source) else (str(source), None)


@functools.cache
def announce(source):
    """Says, once for each source, that it is sought on the Hub, because without a network that takes a minute.

    The scripts write into the folder models/, so a path below it is a folder here, and an error where there is none.
    """
    if str(source).startswith("models/") and not os.path.exists(source):
        raise FileNotFoundError("no such folder")
    if not os.path.exists(source):
        say(f"{source}: no such file or folder here, so it is read from the Hugging Face Hub")


@contextlib.contextmanager
def reading(flag, value):
    """Stands around library calls that read `value` from outside. Their errors end the program with one line.

    Libraries raise many kinds of errors on a bad file, so this catches all but those that no file can cause. Run the
    user's own code outside of this block, so that its errors keep their tracebacks.
    """
    try:
        yield
    except (MemoryError, NameError, AssertionError):  # no fault of the file
        raise
    except Exception as e:  # Each library has errors of its own, and models from the Hub bring code of their own.
        if type(e).__name__ == "OutOfMemoryError":  # torch's, of a GPU
            raise
        # Where `datasets` reads a file, only the cause says what is wrong with it.
        told = e.__cause__ if type(e).__name__ == "DatasetGenerationError" and e.__cause__ else e
        fail(f"{flag} {value}: cannot be read ({in_one_line(told)})")


def read_json(path, flag):
    """The object that a JSON file holds, {} where there is none. A damaged file ends the program with one line."""
    with reading(flag, path):
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def in_one_line(error):
    """An exception's own words in one line. A long message loses its middle: its beginning says what, its end why."""
    words = " ".join(str(error).split())
    if not words or isinstance(error, KeyError):  # The words of a KeyError are nothing but the key.
        words = f"{type(error).__name__}: {words}".removesuffix(": ")
    return words if len(words) <= 600 else f"{words[:395]} ... {words[-200:]}"


def check_url(flag, url, variable):
    """Exits with an error if a URL is none, or holds a password or a key, since files and trackers show all flags."""
    if set("@?#") & set(url):
        shown = "has a user, a password or a query, which would be published with the run's flags"
        fail(f"{flag}: its URL {shown}; give the bare address, and the key in the environment as {variable}")
    if not url.startswith(("http://", "https://")):
        fail(f"{flag} {url}: must begin with http:// or https://")
