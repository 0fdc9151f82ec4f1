"""RLHF in single-file scripts; each script holds its whole algorithm and is meant to be read from top to bottom."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from rlhf_details.plumbing import progress


def end_in_one_line(kind, error, traceback, show=sys.excepthook):
    """Shows what ends the program: Ctrl-C as one line of the main process, everything else as before."""
    if not issubclass(kind, KeyboardInterrupt):
        return show(kind, error, traceback)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Another Ctrl-C must not interrupt the end.
    if os.environ.get("RANK", "0") == "0":
        print("error: stopped by Ctrl-C", file=sys.stderr, flush=True)


# Python has put the script's folder first, where the user's `import evaluate` or `import utils` would find our files.
HERE = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p).name != HERE.name or not Path(p, "plumbing", "__init__.py").exists()]
# The scripts import this package before the libraries, which take seconds, so that it holds there as well.
sys.excepthook = end_in_one_line
if Path(sys.argv[0]).resolve() in HERE.glob("*.py") and not multiprocessing.parent_process():
    progress.now("loading the libraries"), progress.watch()
