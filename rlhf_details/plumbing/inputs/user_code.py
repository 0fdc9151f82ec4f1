"""The user's own functions, which flags name: they are found and imported here."""

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path

from rlhf_details.plumbing import console


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
    folder = Path(name).resolve().parent if is_file else Path.cwd()
    sys.path[:] = [str(folder), *(x for x in sys.path if x != str(folder))]
    try:
        found = getattr(load_module(str(Path(name).resolve()) if is_file else name), function, None)
    except ImportError as e:
        console.fail(f"{flag} {spec}: cannot be imported ({e})")
    if not callable(found):
        console.fail(f"{flag} {spec}: {name} has no function {function!r}")
    return found


@functools.cache
def load_module(name):
    """A module of the user's, given as the whole path of a file or by its name."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", name), name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
