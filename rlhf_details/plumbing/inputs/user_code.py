"""The user's own functions, which flags name: found, imported, and called behind a fence that protects the run."""

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from rlhf_details.plumbing import console

PATIENCE = 60.0  # seconds after which a line says what the run waits for


# ---- finding functions -----------------------------------------------------------------------------------------------
def load_function(spec, flag):
    """The function that "FILE.py:function" or "package.module:function" names.

    What it imports is searched in its file's folder first, or in the current one, and Python has one module of a name.
    An error in the user's code keeps its traceback.
    """
    name, _, function = spec.rpartition(":")
    if not name:
        console.fail(f"{flag} {spec}: must be FILE.py:function or package.module:function")
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        console.fail(f"{flag} {spec}: no such file")
    whole = Path(name).resolve()  # of a module a path in the current folder
    sys.path[:] = dict.fromkeys([str(whole.parent), *sys.path])
    try:
        with fenced(f"{flag} {spec}"):
            found = getattr(load_module(str(whole) if is_file else name), function, None)
    except ImportError as e:
        console.fail(f"{flag} {spec}: cannot be imported ({e})")
    if not callable(found):
        console.fail(f"{flag} {spec}: {name} has no function {function!r}")
    return found


@functools.cache
def load_module(name):
    """A module of the user's, given as the whole path of a file, whose folder is the first in sys.path, or by its name.

    A process that the user's code spawns finds a file's functions by its plain name alone, so that is the module's name
    where no other module has it.
    """
    if not name.endswith(".py"):
        return importlib.import_module(name)
    plain = Path(name).stem
    is_free = plain not in sys.modules and getattr(PathFinder.find_spec(plain, sys.path[1:]), "origin", name) == name
    spec = importlib.util.spec_from_file_location(plain if is_free else re.sub(r"\W", "_", name), name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- calling them ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def fenced(what):
    """Stands around the user's code, undoes what it changes for the whole process, and makes its exit() an error, as
    GeneratorExit and CancelledError, which `except Exception` would not see.

    Undone are the current folder, torch's grad mode, default type and device, seed, number of threads and precision of
    matrix products, and the order of sys.path:
    folders that the user's code has added stay, but behind all others. After a minute a line says what the run waits
    for, so a judge and what other processes do stand here as well.
    """
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    path = sys.path[:]
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
    reminder = threading.Timer(PATIENCE, console.say, [f"still waiting for {what}, after {PATIENCE:g} s"])
    reminder.start()
    try:
        with contextlib.chdir("."), torch.random.fork_rng([]), grad_mode:
            yield
    except SystemExit as e:
        raise RuntimeError(f"{what} called exit({e})") from e
    except (GeneratorExit, asyncio.CancelledError) as e:
        raise RuntimeError(f"{what} raised {type(e).__name__}") from e
    finally:
        reminder.cancel()
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device.type == "cpu" else device)
        sys.path[:] = dict.fromkeys(path + sys.path)


def result_of(found):
    """What a function has returned, or where that is a coroutine, what the coroutine returns."""
    if not inspect.iscoroutine(found):
        return found
    pending = asyncio.run_coroutine_threadsafe(found, event_loop())
    try:
        return pending.result()
    finally:
        pending.cancel()  # It has ended, unless the user has pressed Ctrl-C.


@functools.cache
def event_loop():
    """The loop of all coroutines, since a client of a server belongs to the loop of its first call.

    It has a thread of its own, because in a notebook the main thread runs a loop already.
    """
    loop = asyncio.new_event_loop()

    def serve():
        torch.set_grad_enabled(False)  # as where other functions are called
        while True:
            with contextlib.suppress(BaseException):  # A task that calls exit() stops the loop.
                loop.run_forever()

    threading.Thread(target=serve, daemon=True).start()
    return loop
