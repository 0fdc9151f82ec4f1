"""
What a script says while it works: after eight seconds of silence a line tells what is under way, and how far it is.

Most of what takes long is one call of a library, so a thread looks at the clock. It runs in the scripts and in their
copies, and not where other code calls their functions. Nothing slow is imported here, because the first step that may
take long is the import of the libraries.
"""

import contextlib
import functools
import os
import threading
import time

SILENCE = 8.0  # seconds


class Step:
    """What is under way since when, and of how many parts how many are done. `what` None is nothing to speak of."""

    def __init__(self, what, total=0, patience=0.0):
        """Args: total, the number of parts, 0 where it is not known; patience, seconds in which it says nothing."""
        self.what, self.total, self.patience = what, total, patience
        self.done, self.start = 0, time.monotonic()

    def line(self):
        seconds = time.monotonic() - self.start
        if not self.done:
            return f"{self.what}: {seconds:.0f} s so far" if seconds >= 1 else self.what
        left = seconds / self.done * (self.total - self.done)
        return f"{self.what}: {self.done:,} of {self.total:,}, eta {left:.0f}s"

    def is_due(self, silence):
        """Whether a line is due after so many seconds without one. The longer a step takes, the rarer lines become."""
        seconds = time.monotonic() - self.start
        share = 1 / 20 if self.total else 1 / 4
        wait = max(SILENCE, share * (seconds - silence))
        return self.what is not None and seconds >= self.patience and silence >= wait


STEPS = [Step(None)]  # The last one is part of those before it.
LAST = [time.monotonic()]  # when a line was printed


def heard():
    """Tells the clock that a line has been printed."""
    LAST[0] = time.monotonic()


# ---- what is under way -----------------------------------------------------------------------------------------------
def now(what, patience=0.0):
    """Names what a script does from now on. Args: as Step's."""
    STEPS[0] = Step(what, patience=patience)


@contextlib.contextmanager
def doing(what, total=0):
    """Names what is done within it. It gives the Step, whose `done` the caller may raise. Args: as Step's."""
    step = Step(what, total)
    STEPS.append(step)
    try:
        yield step
    finally:
        STEPS.remove(step)


def each(items, what):
    """Yields the items of a list, and names what is done with them."""
    with doing(what, len(items)) as step:
        for item in items:
            yield item
            step.done += 1


# ---- the clock -------------------------------------------------------------------------------------------------------
@functools.cache
def watch():
    """Starts the clock, once, and on the main process alone."""
    if os.environ.get("RANK", "0") == "0":
        threading.Thread(target=speak, daemon=True).start()


def speak():
    """Prints the line of the innermost step whenever it is due."""
    while True:
        time.sleep(0.5)
        step = STEPS[-1]
        if step.is_due(time.monotonic() - LAST[0]):
            try:
                print(step.line(), flush=True)
            except (OSError, ValueError):  # The reader is gone, as in `| head`.
                return
            heard()
