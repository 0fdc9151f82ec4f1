"""
What RLOO changed, to read: the responses of two policies to the same prompts, each with its reward-model score.

    python benchmark/studies/movies_samples.py --sft models/movies/sft --policy models/movies/rloo \
        --reward models/movies/reward --prompts data/movies/prompts_test.jsonl \
        --output benchmark/results/movies_samples.md

The scores are the reward model's own: no penalty for a response that did not end. Both policies draw with one noise.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from rlhf_details import utils
from rlhf_details.plumbing import data, encoding, models
from rlhf_details.train_rloo import Args as RlooArgs
from rlhf_details.train_rloo import Policy, Reward, response_scores


@dataclass
class Args:
    sft: str
    """folder of the policy before RLOO"""
    policy: str
    """folder of the policy after RLOO"""
    reward: str
    """folder of the reward model"""
    prompts: str
    """rows of `prompt`; the first ones are taken"""
    output: str
    """Markdown file to write"""
    num_prompts: int = 10
    """how many prompts"""
    response_length: int = 32
    """most tokens of a response"""
    temperature: float = 0.7
    """sampling temperature"""
    seed: int = 1
    """seed of the sampling noise"""


def cell(text):
    """Text that cannot break a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


@torch.no_grad()
def main(args: Args):
    """Samples, scores and writes the table."""
    loading = RlooArgs()  # how models are loaded
    prompts = [row["prompt"] for row in data.read_prompts(args.prompts, "--prompts")]
    prompts = prompts[: args.num_prompts]
    tokenizer = models.load_tokenizer(args.sft, "--sft", loading)
    queries, query_mask = utils.left_pad([encoding.encode(tokenizer, prompt) for prompt in prompts])
    reward = Reward(models.load_reward_model(args.reward, loading, "--reward")).eval()

    def answers(folder, flag):
        """(text, whether it ended, score) of one response to each prompt."""
        policy = Policy(models.load_policy(folder, flag, loading), args.temperature).eval()
        batch, stop_id = (queries, query_mask, torch.arange(len(prompts))), tokenizer.eos_token_id
        key = (args.seed, utils.EVALUATION, 0)
        responses, mask, _ = utils.sample(policy, batch, 1, args.response_length, stop_id, key)
        scores = response_scores(reward, (queries, query_mask, responses, mask), 1).tolist()
        texts = models.decode(tokenizer, responses, mask)
        ended = (mask & (responses == stop_id)).any(1).tolist()
        return list(zip(texts, ended, scores, strict=True))

    before, after = answers(args.sft, "--sft"), answers(args.policy, "--policy")
    lines = [
        "# Movie reviews: before and after RLOO",
        "",
        f"The first {len(prompts)} prompts of `{Path(args.prompts).name}`, one response of each policy to each, "
        f"drawn at temperature {args.temperature} with seed {args.seed}.",
        f"The number is the reward model's score; `[...]` marks a response cut off at {args.response_length} tokens.",
        "Written by `benchmark/studies/movies_samples.py`; nothing was selected.",
        "",
        "| prompt | SFT policy | score | after RLOO | score |",
        "|---|---|---:|---|---:|",
    ]
    for prompt, *pair in zip(prompts, before, after, strict=True):
        cells = [part for text, end, score in pair for part in (cell(text) + ("" if end else " [...]"), f"{score:.2f}")]
        lines.append("| " + " | ".join([cell(prompt), *cells]) + " |")
    means = [sum(score for *_, score in side) / len(side) for side in (before, after)]
    lines.append(f"| mean | | {means[0]:.2f} | | {means[1]:.2f} |")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.output}: {len(prompts)} prompts, mean score {means[0]:.2f} -> {means[1]:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
