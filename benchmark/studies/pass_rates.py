"""
How often a policy's answers are right, and how often one of several is, on some data sets (study.py calls it):

    python benchmark/studies/pass_rates.py --policy FOLDER --datasets tasks.py:test --check tasks.py:right --seed 1

The answers to a prompt share its computation, as in training. It writes runs/<run_name>/metrics.jsonl with one row:
{"<data set>/<figure>": value}, where a figure is pass@1, pass@2, .. or the mean length in tokens.
"""

import shlex
from dataclasses import dataclass

import tyro
from accelerate import Accelerator
from called import Called, responses_to


@dataclass
class Args(Called):
    policy: str
    """folder of the policy"""
    datasets: tuple[str, ...]
    """FILE.py:FUNCTION, whose rows are the prompts"""
    check: str
    """FILE.py:FUNCTION, a reward that is True or False"""
    flags: str = ""
    """what train_grpo.py is told besides, as --flags='--temperature 0.7 --response_length 16'"""
    samples: int = 8
    """responses to each prompt"""


def figures(args, dataset):
    """{figure: value} of the policy on one data set."""
    from rlhf_details import evaluate, train_grpo, utils
    from rlhf_details.plumbing.inputs import cli, data, models, stop_tokens
    from rlhf_details.plumbing.machine import rewards

    words = ["--sft_model_path", args.policy, "--dataset", dataset, "--reward_model_path", "None"]
    own = cli.parse(train_grpo.Args, [*words, "--reward_fn", args.check, *shlex.split(args.flags)])
    tokenizer, policy, *_ = train_grpo.load_models(own, "cpu")
    stop_ids = stop_tokens.stop_ids(tokenizer, own.stop_token, "--stop_token")
    prompts, _ = data.load_prompts(own, tokenizer, room=models.context(policy) - own.response_length)
    n, key = args.samples, (args.seed, utils.EVALUATION, 1)  # other noise than that of the training's evaluation
    rows = [prompt for prompt in prompts for _ in range(n)]
    ids = [prompt.ids for prompt in prompts]
    batch = responses_to(ids, n, policy, own.response_length, stop_ids, key, 8 * n)
    score = rewards.Scorer(own, Accelerator(cpu=True), tokenizer, 8 * n, stop_ids)
    score.take_text_model(None, prompts)
    values = score(rows, batch)[0].reshape(len(prompts), n, -1).transpose(0, 1)  # [n, N, 1]
    rates = {name: rate["value"] for name, rate in evaluate.pass_rates(values).items()}
    return rates | {"length": batch.response_mask.sum(1).float().mean().item()}


def main(args: Args):
    row = {"update": 0}
    for dataset in args.datasets:
        name = dataset.rpartition(":")[2]
        row |= {f"{name}/{figure}": value for figure, value in figures(args, dataset).items()}
    args.log(row)


if __name__ == "__main__":
    main(tyro.cli(Args))
