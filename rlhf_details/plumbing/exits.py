"""How a script ends, and what it says: lines of the main process, exit codes, and the group of processes."""

import importlib.util
import os
import sys

import torch


def fail(message):
    """Prints one line, "error: ...", on the main process and ends the program with exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def need(package, extra, what):
    """Ends with one line where the package of an extra is not installed. what: the flag that needs it."""
    if importlib.util.find_spec(package) is None:
        fail(f'{what}: needs the package {package}: pip install -c constraints.txt -e ".[{extra}]"')


def say(line):
    """Prints a line on the main process."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def world_size():
    """The number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def leave_group():
    """Leaves the group of processes. Otherwise a process can abort while the group's threads still run."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(exit_code):
    """Ends this process. Exit code 1 says that something went wrong, and that the others do not know of it."""
    if exit_code == 1 and world_size() > 1:
        sys.stdout.flush()
        # The others may wait in a collective, and leaving their group would be one more. The launcher ends them.
        os._exit(1)
    leave_group()
    raise SystemExit(exit_code)
