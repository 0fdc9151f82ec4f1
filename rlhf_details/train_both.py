"""
Reward model, then PPO or RLOO on it, in one command whose processes are launched once.

1. `--reward.NAME` is an argument of train_reward.py, `--policy.NAME` one of train_ppo.py, or of train_rloo.py with
   `--algorithm rloo`. Defaults, `--reward.config FILE.toml` and errors are those of the scripts.
2. The policy's reward model is the one just trained; where no policy is named, it starts from what the reward model
   started from.
3. Numbers, folders and the policy's prompts are checked for both before anything is trained; what only the models can
   tell, such as a stop token that is none, is found when they are loaded.

One process:   python rlhf_details/train_both.py --policy.kl_coef 0.05
N processes:   accelerate launch --num_processes N rlhf_details/train_both.py --reward.track --policy.track
"""

import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Literal

import tyro

from rlhf_details import toy, train_ppo, train_reward, train_rloo, utils


@dataclass
class Both:
    algorithm: Literal["ppo", "rloo"] = "ppo"
    """what trains the policy"""


def parse(argv):
    """Command line -> (arguments of the reward model, the policy's script as a module, its arguments)."""
    words, group = {"": [], "reward": [], "policy": []}, ""
    for word in argv:
        if word.startswith("--"):
            prefix, _, name = word[2:].partition(".")
            group = prefix if name and prefix in words else ""
            word = f"--{name}" if group else word
        words[group].append(word)  # a value belongs to the flag before it
    wants_help = bool({"-h", "--help"} & {word for group in words.values() for word in group})
    rest = [word for word in words[""] if word not in ("-h", "--help")]
    module = {"ppo": train_ppo, "rloo": train_rloo}[tyro.cli(Both, args=rest).algorithm]
    of_policy = module.__name__.rpartition(".")[2]
    defaults = toy.DEFAULTS["train_reward"], toy.DEFAULTS[of_policy]
    if wants_help:
        pairs = zip(("reward", "policy"), (train_reward.Args, module.Args), defaults, strict=True)
        groups = [(name, kind, field(default_factory=lambda k=kind, d=values: k(**d))) for name, kind, values in pairs]
        tyro.cli(make_dataclass("Help", groups, bases=(Both,)), args=["--help"])
    reward = utils.parse_args(train_reward.Args, toy.defaults("train_reward"), words["reward"])
    start = {"sft_model_path": reward.sft_model_path} if reward.sft_model_path else {}
    start = {"toy": toy.DEFAULTS[of_policy] | start | {"reward_model_path": reward.output_dir}}
    policy = utils.parse_args(module.Args, start, words["policy"])
    if policy.reward_model_path not in (None, reward.output_dir):
        utils.fail(
            f"--policy.reward_model_path {policy.reward_model_path}: it is the reward model just trained, {reward.output_dir}; "
            "--reward.output_dir says where it goes"
        )
    policy.reward_model_path, policy.sft_model_path = reward.output_dir, policy.sft_model_path or reward.sft_model_path
    return reward, module, policy


def check(reward, module, policy):
    """Ends with one line (exit code 2) where the arguments of either, or of both together, make no sense."""
    train_reward.check(reward), module.check(policy)
    if (task := policy.dataset.partition(":")[0]) in toy.TASKS and task != "toy":
        utils.fail(
            f"--policy.dataset {policy.dataset}: its reward is a function; run {module.__name__.rpartition('.')[2]}.py on it"
        )
    written = Path(reward.output_dir).resolve()
    for name in ("sft_model_path", "output_dir"):
        path = Path(getattr(policy, name)).resolve()
        if written == path or written in path.parents or path in written.parents:
            utils.fail(f"--reward.output_dir {reward.output_dir}: --policy.{name} {getattr(policy, name)} would collide with it")
    if reward.run_name is not None and reward.run_name == policy.run_name:
        utils.fail(f"--policy.run_name {policy.run_name}: is the reward model's as well")
    for name in ("dataset", "eval_dataset"):
        if getattr(policy, name):
            module.read_prompts(getattr(policy, name), f"--policy.{name}", policy.prompt_template)


def main(argv):
    """Trains both; returns what the policy's script returns."""
    reward, module, policy = parse(argv)
    check(reward, module, policy)
    train_reward.main(reward)
    return module.main(policy)


if __name__ == "__main__":
    main(sys.argv[1:])
    utils.leave_process_group()
