"""
One evaluator for policies that other code has trained: held-out prompts of the embedded task, in the words of train_rloo.py.

    python benchmark/held_out.py --policy FOLDER --sft FOLDER --reward FOLDER --seed 1 --run_name run      (what the studies call)

It gives our scripts' own last eval/objective/{scores,gold,kl,ended,length} to the digit, since the noise is that of
(seed, EVALUATION, 0). Writes runs/<run_name>/metrics.jsonl, a row.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import tyro


@dataclass
class Args:
    policy: str
    """folder of the policy"""
    sft: str
    """folder of the policy that the KL is measured to, with the tokenizer"""
    reward: str
    """folder of the reward model"""
    seed: int = 1
    """seed of the samples"""
    run_name: str = "run"
    """folder under runs/"""
    overwrite: bool = True
    """replace it"""


def evaluate(policy_folder, sft, reward, seed):
    """{eval/objective/NAME: mean over the held-out prompts} of a policy: one response to each, with the task's own settings."""
    import torch
    from accelerate import Accelerator

    from rlhf_details import toy, train_rloo, utils

    args = SimpleNamespace(**toy.DEFAULTS["train_rloo"])
    tokenizer = utils.load_tokenizer(str(sft), "sft")
    models = (utils.load_policy(str(folder), "policy") for folder in (policy_folder, sft))
    policy, reference = (train_rloo.Policy(model, args.temperature).eval() for model in models)
    reward = train_rloo.Reward(utils.load_reward_model(str(reward), "reward")).eval()
    texts = [row["prompt"] for row in toy.rows("prompts", "test")]

    def score_slice(numbers, batch, ended):
        scores = train_rloo.response_scores(reward, batch, 1)
        return (train_rloo.missing_eos_scores(scores, ended, args.missing_eos_penalty, "subtract"),)

    ids, coordinates = [tokenizer(text).input_ids for text in texts], (seed, train_rloo.EVALUATION, 0)
    responses, mask, ended, kl, scores = train_rloo.one_response_each(
        policy, reference, score_slice, ids, args, tokenizer.eos_token_id, coordinates, Accelerator(cpu=True)
    )
    answers = [tokenizer.decode(r[m], skip_special_tokens=True) for r, m in zip(responses, mask, strict=True)]
    gold = torch.tensor([toy.gold(text, answer) for text, answer in zip(texts, answers, strict=True)])
    result = {"scores": scores, "gold": gold, "kl": kl, "ended": ended.float(), "length": mask.sum(1).float()}
    return {f"eval/objective/{name}": value.mean().item() for name, value in result.items()}


def main(args: Args):
    folder = Path("runs") / args.run_name
    folder.mkdir(parents=True, exist_ok=True)
    row = evaluate(args.policy, args.sft, args.reward, args.seed)
    (folder / "metrics.jsonl").write_text(json.dumps({"update": 0} | row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
