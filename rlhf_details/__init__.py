"""RLHF in single-file scripts; each script holds its whole algorithm and is meant to be read from top to bottom."""

import sys
from pathlib import Path

# `python rlhf_details/train_rloo.py --help` is answered here, because the imports of a page take seconds.
script = Path(sys.argv[0]).resolve()
if {"-h", "--help"} & {*sys.argv[1:]} and script.parent == Path(__file__).resolve().parent and script.suffix == ".py":
    from rlhf_details.plumbing import usage

    usage.show(sys.argv[0], sys.argv[1:])
