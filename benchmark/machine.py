"""Which processor this is. A name is not enough: one "AMD EPYC" multiplies matrices twice as fast as another."""

import platform
from pathlib import Path


def processor():
    """ "AMD EPYC (family 25, model 17)", or what Python knows where /proc/cpuinfo names no model."""
    path = Path("/proc/cpuinfo")
    first = path.read_text().split("\n\n")[0] if path.exists() else ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return "{model name} (family {cpu family}, model {model})".format_map(fields)
