"""
Where models and data come from: a local path, or NAME or NAME@REVISION on the Hugging Face Hub.

What cannot be read from there ends the program with one line that says why.
"""

import contextlib
import functools
import os

import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import has_file

from rlhf_details.plumbing.exits import fail, say

PICKLES = "pytorch_model.bin", "pytorch_model.bin.index.json"
CONVERSION = (
    'python -c "import transformers as t; [kind.from_pretrained({name!r}, revision={revision!r}).save_pretrained('
    '{folder!r}) for kind in (t.{kind}, t.AutoTokenizer)]"'
)


def split(source):
    """(NAME, REVISION) of NAME@REVISION. REVISION is None where there is none, and for a local path."""
    name, _, revision = str(source).partition("@")
    return (name, revision) if name and revision and not os.path.exists(source) else (str(source), None)


@functools.cache
def announce(source):
    """Says, once for each source, that it is sought on the Hub, because without a network that takes a minute."""
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
    except (MemoryError, torch.OutOfMemoryError, NameError, AssertionError):  # no fault of the file
        raise
    except Exception as e:
        fail(f"{flag} {value}: {why(value, e)}")


def why(value, error):
    """Why a source cannot be read, in words for the user. Args: value, as the user gave it; error, what was raised."""
    # Where `datasets` reads a file, only the cause says what is wrong with it.
    told = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
    words = (str(told).strip() or type(told).__name__).splitlines()[0]
    if os.path.exists(value) or os.path.exists(str(value).partition("[")[0].partition(":")[0]):
        return f"cannot be read ({words})"
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)

    def is_due_to(*kinds):
        return any(isinstance(cause, kinds) for cause in causes)

    if is_due_to(GatedRepoError):
        return f"its owners give access on request ({words})"
    if is_due_to(RevisionNotFoundError):
        return "the Hub has this repository, but no such revision of it"
    if is_due_to(RepositoryNotFoundError) or type(error).__name__ == "DatasetNotFoundError":
        return "no such file or folder here, and no such repository on the Hub (a private one needs `hf auth login`)"
    if is_due_to(LocalEntryNotFoundError, ConnectionError):  # A machine that HF_HUB_OFFLINE keeps off the Hub, too.
        return "no such file or folder here, no copy in the cache, and the Hub cannot be reached from this machine"
    if is_due_to(HFValidationError) or type(error) is FileNotFoundError:
        return "no such file or folder"
    return f"is no local path, and cannot be read from the Hub ({words})"


def refuse_pickles(source, flag, kind):
    """Ends with one line that tells how to convert them, where a model's weights are pickles. kind: an Auto class."""
    name, revision = split(source)
    with contextlib.suppress(OSError, ValueError):  # of a Hub that cannot be reached, or of a name that none can have
        if any(has_file(name, file, revision) for file in PICKLES):
            values = {"name": name, "revision": revision or "main", "kind": kind.__name__}
            command = CONVERSION.format(**values, folder=f"{os.path.basename(name.rstrip('/'))}-safetensors")
            hint = "which can run any code; if you trust its author, convert it once, and give the new folder"
            fail(f"{flag} {source}: its weights exist as pickles alone ({PICKLES[0]}), {hint}: {command}")
