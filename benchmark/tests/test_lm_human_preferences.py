"""The commands of lm-human-preferences' experiment: they parse, and a policy reads its own reward model."""

import os
import shlex
import subprocess

from intervals import ROOT

from rlhf_details import train_ppo, train_reward
from rlhf_details.plumbing import cli

HUMAN = ROOT / "benchmark/recipes/lm_human_preferences.sh"
TASKS = ("sentiment", "descriptiveness")


def printed(script, *words, **env):
    """The commands, as lists of words, that a script prints in a dry run."""
    environment = os.environ | {"DRY_RUN": "1"} | env
    done = subprocess.run(["bash", script, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_the_seeds_of_lm_human_preferences_parse_and_read_their_reward_model(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {}
    for words in printed(HUMAN, "train", ENTITY="someone", SEEDS="7 8"):
        assert words[:4] == ["accelerate", "launch", "--num_processes", "8"]
        module = {"rlhf_details/train_reward.py": train_reward, "rlhf_details/train_ppo.py": train_ppo}[words[4]]
        args = cli.parse(module.Args, words[5:])
        module.check(args)
        assert args.track and args.wandb_entity == "someone" and f"/{args.seed}/" in args.output_dir
        (task,) = (task for task in TASKS if f"_{task}.toml" in args.config)
        found[module, task, args.seed] = args
    assert len(found) == 8
    for task, seed in ((task, seed) for task in TASKS for seed in (7, 8)):
        reward, policy = found[train_reward, task, seed], found[train_ppo, task, seed]
        assert policy.reward_model_path == reward.output_dir
