"""The embedded tasks' stages: models that are missing are trained before they are needed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rlhf_details.plumbing import console

# Names of environment variables. A child is a launch of its own, and must not see the group and the ranks of this one.
LAUNCHER = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE|NAME)$|(MASTER|TORCHELASTIC|OMPI|PMI)_|ACCELERATE_(?!USE_CPU)"
)
# The scripts that make the folders of an embedded task, those first that others need.
MADE_BY = {"toy": ("sft", "reward", "rloo"), "toy-sum": ("sft", "rloo"), "toy-tools": ("sft",)}


def ensure(args):
    """Trains the models of the embedded task that args name and that do not exist yet, each in a process of its own.

    A folder other than the task's own is never made up. Call it on the main process only.
    """
    task = args.dataset.partition(":")[0]
    environment = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    needed = {getattr(args, name, None) for name in ("sft_model_path", "reward_model_path", "teacher_model_path")}
    for stage in MADE_BY.get(task, ()):
        folder = f"models/{task}/{stage}"
        if folder not in needed or Path(folder, "config.json").exists():
            continue
        script = console.path_of(f"train_{stage}.py")  # as the model's card will show it
        console.say(f"{folder} does not exist yet: running train_{stage}.py first")
        flags = ["--dataset", task, "--output_dir", folder]
        flags += ["--sft_model_path", args.sft_model_path] if stage == "reward" else []
        if code := subprocess.run([sys.executable, script, *flags], env=environment).returncode:
            sys.exit(code)  # The child has said why.
