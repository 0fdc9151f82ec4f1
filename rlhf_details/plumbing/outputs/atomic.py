"""Files and folders that appear whole or not at all, such as checkpoints and the saved model."""

import contextlib
import os
import shutil
from pathlib import Path


def sync(path):
    """Returns when a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def beside(path, kind):
    """The path of a neighbour, such as 000040.partial."""
    return path.with_name(f"{path.name}.{kind}")


def write_text(path, text):
    """Writes a text file to a neighbour, which takes the file's name once it is on the disk."""
    partial = beside(path, "partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)


@contextlib.contextmanager
def replacing(folder):
    """Yields a new neighbour, which takes the folder's name once it is on the disk. An error removes it."""
    partial = beside(folder, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        place(partial, folder)
    except Exception:  # whatever it is, since it is raised again
        shutil.rmtree(partial, ignore_errors=True)  # On a full disk its room may be needed.
        raise


def place(new, folder):
    """Gives a folder the name of another one, which goes, once its files are on the disk."""
    mode = new.stat().st_mode & 0o666
    before = beside(new, "before")
    for path in filter(Path.is_file, new.rglob("*")):
        with contextlib.suppress(OSError):  # Some file systems have no modes.
            path.chmod(mode)  # safetensors writes files that their owner alone can read.
        sync(path)
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(before)
    new.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
