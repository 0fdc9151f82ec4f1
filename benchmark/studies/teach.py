"""
SFT on responses that a teacher samples, the off-policy relative of distillation (study.py calls it):

    python benchmark/studies/teach.py --teacher FOLDER --sft FOLDER --output_dir FOLDER --seed 1

The prompts are those of the embedded task, in the order in which train_distill.py of this seed takes them, so both have
seen the same ones after as many episodes. A response that does not end within the task's length teaches nothing.
"""

from dataclasses import dataclass

import tyro
from called import Called, responses_to


@dataclass
class Args(Called):
    teacher: str
    """folder of the teacher"""
    sft: str
    """folder of the student to start from"""
    output_dir: str
    """where the trained student goes"""
    total_episodes: int = 6400
    """responses of the teacher"""
    learning_rate: float = 1e-3
    """peak learning rate of SFT, which takes one pass over them"""


def responses(args):
    """Rows with `prompt` and `completion`: the teacher's responses that ended."""
    from rlhf_details import train_distill, utils
    from rlhf_details.plumbing.inputs import cli, data, models, stop_tokens, token_ids

    words = ["--sft_model_path", args.teacher, "--teacher_model_path", args.teacher, "--seed", str(args.seed)]
    own = cli.parse(train_distill.Args, words)
    tokenizer, teacher, _ = train_distill.load_models(own, "cpu")
    stop_ids = stop_tokens.stop_ids(tokenizer, own.stop_token, "--stop_token")
    prompts, _ = data.load_prompts(own, tokenizer, room=models.context(teacher) - own.response_length)
    for update in range(1, args.total_episodes // own.batch_size + 1):
        rows = prompts.of_update(update, own.batch_size, args.seed)
        ids, key = [row.ids for row in rows], (args.seed, utils.TRAINING, update)
        batch = responses_to(ids, 1, teacher, own.response_length, stop_ids, key, len(rows))
        found, real = batch.responses, batch.response_mask
        ended = train_distill.has_stopped(found, real, stop_ids)
        for row, text, has_end in zip(rows, token_ids.decode(tokenizer, found, real), ended.tolist(), strict=True):
            if has_end:
                yield {"prompt": row.text, "completion": text}


def main(args: Args):
    from rlhf_details import train_sft
    from rlhf_details.plumbing.inputs import cli

    file = args.log(*responses(args), file="teacher.jsonl")
    words = ["--dataset", str(file), "--base_model", args.sft, "--completion_only", "--num_train_epochs", "1"]
    words += ["--learning_rate", str(args.learning_rate), "--batch_size", "256", "--micro_batch_size", "256"]
    words += ["--output_dir", args.output_dir, "--run_name", args.run_name, "--seed", str(args.seed), "--overwrite"]
    train_sft.main(cli.parse(train_sft.Args, words))


if __name__ == "__main__":
    main(tyro.cli(Args))
