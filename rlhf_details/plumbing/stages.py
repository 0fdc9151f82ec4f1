"""The embedded task's stages: what each script has as defaults for it, and the training of models that are missing."""

import contextlib
import re
import subprocess
import sys
from os import environ
from pathlib import Path

from rlhf_details.plumbing import progress
from rlhf_details.toy import RESPONSE_LENGTH

# What the embedded tasks need in place of the published recipes' values.
DEFAULTS = {
    "train_sft": dict(
        dataset="toy", eval_dataset="toy:test", base_model="scratch", output_dir="models/toy/sft", context_length=128,
        hidden_size=64, num_layers=2, num_heads=4, learning_rate=5e-3, warmup_ratio=0.05, batch_size=32,
        num_train_epochs=3, response_length=RESPONSE_LENGTH, temperature=1.0, micro_batch_size=128,
    ),
    "train_reward": dict(
        dataset="toy", eval_dataset="toy:test", sft_model_path="models/toy/sft", output_dir="models/toy/reward",
        learning_rate=2e-3, warmup_ratio=0.05, batch_size=16, max_grad_norm=1.0, response_length=RESPONSE_LENGTH,
        temperature=1.0, micro_batch_size=128,
    ),
    "train_dpo": dict(
        dataset="toy", eval_dataset="toy:test", sft_model_path="models/toy/sft", output_dir="models/toy/dpo",
        learning_rate=1e-3, warmup_ratio=0.05, batch_size=16, beta=0.5, max_grad_norm=1.0,
        response_length=RESPONSE_LENGTH, temperature=1.0, micro_batch_size=128,
    ),
    "train_rloo": dict(
        dataset="toy", eval_dataset="toy:test", sft_model_path="models/toy/sft", reward_model_path="models/toy/reward",
        output_dir="models/toy/rloo", total_episodes=25_600, batch_size=256, rloo_k=4, learning_rate=5e-4, kl_coef=0.1,
        num_ppo_epochs=1, num_mini_batches=1, missing_eos_penalty=3.0, response_length=RESPONSE_LENGTH, temperature=1.0,
        micro_batch_size=256, rollout_micro_batch_size=256,
    ),
    "train_grpo": dict(
        dataset="toy", eval_dataset="toy:test", sft_model_path="models/toy/sft", reward_model_path="models/toy/reward",
        output_dir="models/toy/grpo", total_episodes=25_600, batch_size=256, group_size=4, learning_rate=5e-4,
        kl_coef=0.1, missing_eos_penalty=3.0, response_length=RESPONSE_LENGTH, micro_batch_size=256,
        rollout_micro_batch_size=256,
    ),
    "train_ppo": dict(
        dataset="toy", eval_dataset="toy:test", sft_model_path="models/toy/sft", reward_model_path="models/toy/reward",
        output_dir="models/toy/ppo", total_episodes=10_240, batch_size=256, learning_rate=5e-4, kl_coef=0.1,
        missing_eos_penalty=3.0, response_length=RESPONSE_LENGTH, temperature=1.0, max_grad_norm=1.0,
        micro_batch_size=256, rollout_micro_batch_size=256,
    ),
    "evaluate": dict(
        dataset="toy:test", policy_path=["models/toy/rloo"], opponent_path="models/toy/sft",
        ref_model_path="models/toy/sft", reward_model_path="models/toy/reward", judge="gold",
        rollout_micro_batch_size=256,
    ),
}  # fmt: skip
SUM_DEFAULTS = {  # what differs for "toy-sum": arithmetic, rewarded by a function and not by a model
    "train_sft": dict(
        dataset="toy-sum", eval_dataset="toy-sum:test", output_dir="models/toy-sum/sft", completion_only=True,
        num_train_epochs=6, response_length=3,
    ),
    "train_rloo": dict(
        dataset="toy-sum", eval_dataset="toy-sum:test", sft_model_path="models/toy-sum/sft", reward_model_path=None,
        reward_fn=["rlhf_details.toy:right_sum"], output_dir="models/toy-sum/rloo", response_length=3,
        missing_eos_penalty=1.0, kl_coef=0.01, learning_rate=2e-3, total_episodes=307_200,
    ),
    "train_grpo": dict(
        dataset="toy-sum", eval_dataset="toy-sum:test", sft_model_path="models/toy-sum/sft", reward_model_path=None,
        reward_fn=["rlhf_details.toy:right_sum"], output_dir="models/toy-sum/grpo", response_length=3,
        missing_eos_penalty=1.0, learning_rate=2e-3, total_episodes=307_200,
    ),
    "train_ppo": dict(
        dataset="toy-sum", eval_dataset="toy-sum:test", sft_model_path="models/toy-sum/sft", reward_model_path=None,
        reward_fn=["rlhf_details.toy:right_sum"], output_dir="models/toy-sum/ppo", response_length=3,
        missing_eos_penalty=1.0, kl_coef=0.01, learning_rate=1e-3, total_episodes=76_800,
    ),
    "evaluate": dict(
        dataset="toy-sum:test", policy_path=["models/toy-sum/rloo"], opponent_path="models/toy-sum/sft",
        ref_model_path="models/toy-sum/sft", reward_model_path=None, reward_fn=["rlhf_details.toy:right_sum"],
        judge="reward_fn",
    ),
}  # fmt: skip


def defaults(page, script=None):
    """{task: {flag: value}}: the defaults of a page for each embedded task, {} of a page that is not known.

    script: the name of a variant or a copy, which takes the page's defaults but for the output folder.
    """
    found = {"toy": DEFAULTS.get(page, {})}
    found |= {"toy-sum": DEFAULTS[page] | SUM_DEFAULTS[page]} if page in SUM_DEFAULTS else {}
    for task, values in found.items():
        if values and script not in (None, page):
            found[task] = values | {"output_dir": f"models/{task}/{script.removeprefix('train_')}"}
    return found


def ensure(args):
    """Trains the models of the embedded task that args name and that do not exist yet, each in a process of its own.

    A folder other than the task's own is never made up. Call it on the main process only.
    """
    task = args.dataset.partition(":")[0]
    # The child is a launch of its own, so it must not see the process group and ranks of this one.
    launcher = r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE|NAME)$|(MASTER|TORCHELASTIC|OMPI|PMI)_|ACCELERATE_(?!USE_CPU)"
    environment = {name: value for name, value in environ.items() if not re.match(launcher, name)}
    for stage, flag in (("train_sft", "sft_model_path"), ("train_reward", "reward_model_path")):
        folder = getattr(args, flag, None)
        own_folder = defaults(stage).get(task, {}).get("output_dir")
        if folder is None or folder != own_folder or (Path(folder) / "config.json").exists():
            continue
        print(f"{folder} does not exist yet: running {stage}.py first", flush=True)
        flags = ["--dataset", task, "--output_dir", folder]
        flags += ["--sft_model_path", args.sft_model_path] if stage == "train_reward" else []
        script = Path(__file__).parent.parent / f"{stage}.py"
        with progress.doing(None):  # The child speaks for itself.
            code = run([sys.executable, str(script), *flags], environment)
        progress.heard()
        if code:
            sys.exit(code if code > 0 else 128 - code)  # The child has said why.


def run(command, environment):
    """Runs a command and returns its exit code. A Ctrl-C reaches the command as well, and it may end by itself."""
    child = subprocess.Popen(command, env=environment)
    try:
        return child.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if code := child.wait(30):
                return code
        child.kill()
        raise
