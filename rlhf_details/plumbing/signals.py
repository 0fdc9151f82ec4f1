"""SIGTERM and SIGINT (Ctrl-C): a run ends after the update under way. A second SIGINT ends it at once."""

import signal
import threading


class Signals:
    """Remembers the last signal in `heard` (0: none), until `restore` gives the signals their former meaning."""

    def __init__(self, say):
        self.say, self.heard = say, 0
        is_main_thread = threading.current_thread() is threading.main_thread()  # Python allows handlers there alone.
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main_thread else ()
        self.before = {number: signal.signal(number, self.hear) for number in numbers}

    def hear(self, number, frame):
        if number == signal.SIGINT:  # SIGTERM may come twice by itself, from a scheduler and from the launcher.
            signal.signal(number, self.before[number])
        self.heard = number
        self.say(f"{signal.Signals(number).name}: will stop after this update, with a checkpoint")

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
