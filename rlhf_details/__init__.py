"""RLHF in single-file scripts; each script holds its whole algorithm and is meant to be read from top to bottom."""

import sys
from pathlib import Path

from rlhf_details.plumbing import usage

# `python rlhf_details/train_rloo.py --help` is answered here, because what the script imports next takes seconds.
if {"-h", "--help"} & {*sys.argv[1:]} and Path(sys.argv[0]).resolve() in Path(__file__).resolve().parent.glob("*.py"):
    usage.show(sys.argv[0], sys.argv[1:])
