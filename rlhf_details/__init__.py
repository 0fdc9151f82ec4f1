"""RLHF in single-file scripts; each script holds its whole algorithm and is meant to be read from top to bottom."""

import sys
from pathlib import Path

# Python has put the script's folder first, where the user's `import evaluate` or `import utils` would find our files.
HERE = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p).name != HERE.name or not Path(p, "plumbing", "__init__.py").exists()]
