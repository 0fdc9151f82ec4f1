"""
Reward model, then PPO, RLOO or GRPO on it, in one command whose processes are launched once.

1. `--reward.NAME` is a flag of train_reward.py and `--policy.NAME` one of train_ppo.py, or with `--algorithm rloo` or
   `grpo` of that script. Defaults, `--reward.config FILE.toml`, texts in --help and errors are those of the scripts.
2. The policy learns from the reward model just trained. Where --policy.sft_model_path is not given, the policy starts
   from the model that the reward model started from.
3. The flags of both, and the policy's prompts, are checked before anything is trained.

One process:   python rlhf_details/train_both.py --policy.kl_coef 0.05
N processes:   accelerate launch --num_processes N rlhf_details/train_both.py --reward.track --policy.track
Your data:     python rlhf_details/train_both.py --reward.dataset pairs.jsonl --policy.dataset prompts.jsonl
               --reward.sft_model_path gpt2
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rlhf_details import toy, train_grpo, train_ppo, train_reward, train_rloo
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import cli, data


@dataclass
class Both:
    # algorithm
    algorithm: Literal["ppo", "rloo", "grpo"] = "ppo"
    """what trains the policy, from the model at --reward.sft_model_path and on the reward model just trained"""


def parse(argv):
    """Command line -> (arguments of the reward model, the policy's script as a module, its arguments)."""
    words, group, is_help = {"": [], "reward": [], "policy": []}, "", not set(cli.HELP).isdisjoint(argv)
    for word in argv:
        if word in cli.HELP:
            continue
        if word.startswith("--"):  # A value may be a negative number.
            prefix, _, name = word[2:].partition(".")
            group = prefix if name and prefix in words else ""
            word = f"--{name}" if group else word
        words[group].append(word)  # A value belongs to the flag before it.
    both = tyro.cli(Both, args=words[""], **cli.OPTIONS)
    module = {"ppo": train_ppo, "rloo": train_rloo, "grpo": train_grpo}[both.algorithm]
    reward = cli.parse(train_reward.Args, words["reward"], is_help=is_help)
    start = {"sft_model_path": reward.sft_model_path} if reward.sft_model_path else {}
    start["reward_model_path"] = reward.output_dir
    policy = cli.parse(module.Args, words["policy"], start, is_help)
    if is_help:
        cli.show_help(sys.modules[__name__], {"": both, "reward.": reward, "policy.": policy})
    return reward, module, policy


def check(reward, module, policy):
    """Exits with an error (exit code 2) if the arguments of either, or of both together, make no sense."""
    if policy.reward_model_path != reward.output_dir:
        which = f"it is the reward model just trained, {reward.output_dir}; --reward.output_dir says where it goes"
        console.fail(f"--policy.reward_model_path {policy.reward_model_path}: {which}")
    written = Path(reward.output_dir).resolve()
    for name in ("sft_model_path", "output_dir"):
        path = Path(getattr(policy, name) or "").resolve()
        if written in (path, *path.parents):
            other = f"--policy.{name} {getattr(policy, name)}"
            console.fail(f"--reward.output_dir {reward.output_dir}: {other} would collide with it")
    train_reward.check(reward), module.check(policy)
    task = policy.dataset.partition(":")[0]
    if task in toy.TASKS and task != "toy":
        console.fail(f"--policy.dataset {policy.dataset}: its reward is a function; run {policy.exp_name}.py on it")
    if reward.run_name is not None and reward.run_name == policy.run_name:
        console.fail(f"--policy.run_name {policy.run_name}: is the reward model's as well")
    for name in ("dataset", "eval_dataset"):
        if getattr(policy, name):
            data.read(policy, name, "prompts")


def main(argv):
    """Trains both; returns what the policy's script returns."""
    reward, module, policy = parse(argv)
    check(reward, module, policy)
    train_reward.main(reward)
    policy.reward_model_path = reward.output_dir  # the folder beside it, where another run has taken that one
    return module.main(policy)


if __name__ == "__main__":
    console.keep_printing()
    main(sys.argv[1:])
    console.leave_group()
