"""
One evaluator for policies that other code has trained: the embedded task's held-out prompts, as train_rloo.py does it.

    python benchmark/studies/held_out.py --policy FOLDER --sft FOLDER --reward FOLDER --seed 1 --run_name run

It gives our scripts' own last eval/objective/{scores,gold,kl,ended,length} to the digit, since the noise is that of
(seed, EVALUATION, 0). The studies call it. It writes runs/<run_name>/metrics.jsonl, which has one row.
"""

import shlex
import types
from dataclasses import dataclass

import tyro
from called import Called

FIGURES = "scores", "gold", "kl", "ended", "length", "rewards/obeys"


@dataclass
class Args(Called):
    policy: str
    """folder of the policy"""
    sft: str
    """folder of the policy that the KL is measured to, with the tokenizer"""
    reward: str
    """folder of the reward model"""
    temperature: float = 1.0
    """temperature of the samples and of the log-probs in the KL"""
    response_length: int = 36
    """most tokens of a response"""
    flags: str = ""
    """what train_rloo.py is told of another task, as --flags='--dataset FILE --eval_dataset FILE'"""


def evaluate(policy_folder, sft, reward, seed, flags="", **changes):
    """{eval/objective/NAME: mean over the held-out prompts} of a policy. flags, changes: what is not as in the task."""
    import math

    from accelerate import Accelerator

    from rlhf_details import train_rloo, utils
    from rlhf_details.plumbing import console
    from rlhf_details.plumbing.inputs import cli, data, models, stop_tokens
    from rlhf_details.plumbing.machine import rewards, samplers

    words = ["--sft_model_path", str(sft), "--reward_model_path", str(reward), "--seed", str(seed)]
    words += [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    words += shlex.split(flags)
    args, accelerator = cli.parse(train_rloo.Args, words), Accelerator(cpu=True)
    tokenizer, _, reference, reward_model = train_rloo.load_models(args, accelerator.device)
    model = utils.disable_dropout(models.load_policy(str(policy_folder), "--policy", args))
    policy, stop_ids = (
        train_rloo.Policy(model, args.temperature),
        stop_tokens.stop_ids(tokenizer, "eos", "--stop_token"),
    )
    rows, prompts = data.load_prompts(args, tokenizer, room=math.inf)
    score = rewards.Scorer(args, accelerator, tokenizer, args.micro_batch_size, stop_ids)
    reward_model = score.take_text_model(reward_model, rows, prompts)
    run = types.SimpleNamespace(accelerator=accelerator, stop=console.fail)
    sample = samplers.choose(args, run, prompts, None, stop_ids)
    metrics, _ = train_rloo.evaluate(
        policy, sample, reference, reward_model, score, prompts, stop_ids, args, accelerator
    )
    names = (f"eval/objective/{name}" for name in FIGURES)
    return {name: metrics[name] for name in names if name in metrics}


def main(args: Args):
    changes = dict(temperature=args.temperature, response_length=args.response_length)
    args.log({"update": 0} | evaluate(args.policy, args.sft, args.reward, args.seed, args.flags, **changes))


if __name__ == "__main__":
    main(tyro.cli(Args))
