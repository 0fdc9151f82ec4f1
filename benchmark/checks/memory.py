"""
Resident size of toy runs over 200 updates, in a minute or two. It needs the stages in models/toy.

    python benchmark/checks/memory.py

It prints the size after some updates, and fails where it has grown by more than 5 % from the 20th to the 199th. (The
200th comes with a held-out evaluation, which takes more.) The learning rate is 0, so that responses are as long at the
end as at the beginning. Their lengths vary from batch to batch.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

POINTS = (20, 50, 100, 150, 199, 200)


@dataclass
class Args:
    algorithm: Literal["rloo", "ppo"] | None = None
    """run this one in this process; None: both, each in one of its own"""


def one(algorithm):
    """Runs 200 updates of 64 episodes in this process; prints {update: MB} as JSON."""
    from rlhf_details import train_ppo, train_rloo
    from rlhf_details.plumbing.inputs import cli
    from rlhf_details.plumbing.outputs.run import Run

    sizes, log, script = {}, Run.log, {"rloo": train_rloo, "ppo": train_ppo}[algorithm]

    def recording(self, step, *rest, **more):
        log(self, step, *rest, **more)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes[step] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    Run.log = recording
    flags = ["--batch_size", "64", "--total_episodes", str(64 * 200), "--learning_rate", "0", "--overwrite"]
    flags += ["--run_name", f"memory_{algorithm}", "--output_dir", f"models/memory_{algorithm}"]
    script.main(cli.parse(script.Args, flags))
    print(json.dumps({step: round(sizes[step], 1) for step in POINTS}))


def main():
    grown = False
    for algorithm in ("rloo", "ppo"):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        words = [sys.executable, __file__, "--algorithm", algorithm, *sys.argv[1:]]
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        sizes = json.loads(done.stdout.splitlines()[-1])
        growth = sizes["199"] / sizes["20"] - 1
        grown |= growth > 0.05
        shown = " ".join(f"{step}: {size} MB" for step, size in sizes.items())
        print(algorithm, shown, f"growth {growth:+.1%}", flush=True)
    sys.exit(grown)


if __name__ == "__main__":
    args = tyro.cli(Args)
    one(args.algorithm) if args.algorithm else main()
