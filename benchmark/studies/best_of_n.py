"""
Best-of-n of one seed's SFT and reward model, which the study `overoptimisation` runs (arXiv 2210.10760).

Of n responses of the SFT policy to a held-out prompt the one with the highest learned score; its KL is at most
log n - (n - 1) / n.
"""

import math
from dataclasses import dataclass

import numpy as np
import tyro
from called import Called, responses_to


@dataclass
class Args(Called):
    sft_model_path: str
    """folder of the policy"""
    reward_model_path: str
    """folder of the reward model"""
    responses: int = 64
    """to each prompt: the largest n"""
    prompts: int = 256
    """held-out prompts"""


def best_of_shares(number, n):
    """In which share of all subsets of n each of so many responses, in ascending order of score, is the best: [number].

    Number i (from 0) is the best of C(i, n - 1) of the C(number, n) subsets.
    """
    return np.array([math.comb(i, n - 1) / math.comb(number, n) for i in range(number)])


def main(args: Args):
    """Writes mean score and gold of the best of n, n = 1, 2, 4, ..: means over all subsets of n responses, exactly."""
    import torch

    from rlhf_details import toy, train_rloo, utils
    from rlhf_details.plumbing.inputs import cli, token_ids

    n, golds = args.responses, []
    words = ["--sft_model_path", args.sft_model_path, "--reward_model_path", args.reward_model_path]
    settings = cli.parse(train_rloo.Args, words)
    tokenizer, policy, _, reward = train_rloo.load_models(settings, "cpu")
    texts = [row["prompt"] for row in toy.rows("prompts", "test")[: args.prompts]]
    stop_ids = torch.tensor([tokenizer.eos_token_id])
    key, penalty, size = (args.seed, utils.EVALUATION, 0), settings.missing_eos_penalty, 8 * n
    ids = [tokenizer(text).input_ids for text in texts]
    batch = responses_to(ids, n, policy, settings.response_length, stop_ids, key, size)
    responses, mask = batch.responses, batch.response_mask
    with torch.no_grad():
        (scores,) = utils.in_slices(train_rloo.response_scores, reward, batch, size, 1)
    ended = train_rloo.has_stopped(responses, mask, stop_ids)
    scores = train_rloo.missing_eos_scores(scores, ended, penalty, "subtract").reshape(-1, n).numpy()
    grouped = (x.reshape(-1, n, x.size(1)) for x in (responses, mask))
    for text, responses, mask in zip(texts, *grouped, strict=True):
        golds.append([toy.gold(text, answer) for answer in token_ids.decode(tokenizer, responses, mask)])
    order = np.argsort(scores, 1)  # the worst one first
    scores, golds = (np.take_along_axis(np.array(x), order, 1).mean(0) for x in (scores, golds))  # [responses]
    found = []
    for exponent in range(int(math.log2(n)) + 1):
        best_of = 2**exponent
        share = best_of_shares(n, best_of)
        row = {"update": best_of, "objective/gold": float(golds @ share), "objective/scores": float(scores @ share)}
        found.append(row | {"objective/kl": math.log(best_of) - (best_of - 1) / best_of})
    args.log(*found)


if __name__ == "__main__":
    main(tyro.cli(Args))
