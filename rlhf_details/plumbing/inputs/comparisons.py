"""
Comparisons, the rows that train_reward.py and train_dpo.py train on: a prompt, K candidates, and which of them a human
found the best.

They are read from `prompt`, `chosen`, `rejected`; from `prompt`, `candidates`, `best`; from the token ids of
lm-human-preferences (`query`, `sample0` .., `best`) and of N+ (`query_token`, `chosen_token`, `rejected_token`).
Those of the embedded task are made up: the SFT policy writes the candidates, and an imaginary human chooses.
"""

import re

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import data, models
from rlhf_details.plumbing.inputs.chat import RowError, is_messages

LABEL_PAD = 50259  # fills up the rows of lm-human-preferences; it is no id of GPT-2, whose vocabulary has 50257 tokens


def check(args):
    """Exits with an error if a data set is an embedded task whose reward is a function, or a flag would do nothing."""
    for flag in ("dataset", "eval_dataset"):
        if (getattr(args, flag) or "").startswith("toy-"):
            console.fail(f"--{flag} {getattr(args, flag)}: has no comparisons; its reward is a function")
    for flag in ("prompt_template", "max_prompt_length"):
        if getattr(args, flag) is not None and args.dataset.partition(":")[0] == "toy":
            console.fail(f"--{flag} {getattr(args, flag)}: not for the embedded task, whose comparisons are sampled")


def load(args, tokenizer, model, of_toy):
    """(Comparisons of --dataset, those of --eval_dataset or none), both as data.Prompts, all with K candidates.

    Args: model, the page's module, whose `model` limits tokens and context; of_toy, candidates.of_toy's function.
    """

    def load_one(flag, num, purpose):
        name, _, split = (getattr(args, flag) or "").partition(":")
        if name == "toy":
            asked = f"the SFT policy answers {num:,} prompts four times, and an imaginary human chooses"
            console.say(f"--{flag} {getattr(args, flag)}: {asked}")
            rows = of_toy(split or "train", num, purpose)[: args.take if flag == "dataset" else None]
        else:
            rows = data.read_rows(args, flag, "") if name else []
        rows = data.complete(rows, args, flag, candidates_of)
        return data.encode(args, flag, rows, tokenizer, models.context(model), "candidates")

    train = load_one("dataset", args.num_comparisons, utils.TRAINING)
    held_out = load_one("eval_dataset", 512, utils.EVALUATION)
    K = len(train[0].answers)
    for row in (*train, *held_out):
        if len(row.answers) != K:
            what = f"{row.source}: row {row.number} has {len(row.answers)} candidates"
            console.fail(f"{what}, and row {train[0].number} of --dataset {args.dataset} has {K}")
    return train, held_out


def load_references(args, tokenizer, reward, train):
    """Lists of token ids whose mean score "mean_shift" sets to 0: the rows of --reference_dataset, each a prompt with
    its completion, or else the training candidates. Exits with an error if "gain_bias" cannot sample from prompts.
    """
    context = models.context(reward)
    if args.normalization == "gain_bias":
        first = train[: 2 * args.normalize_samples]
        for row in first:
            if not row.ids:
                console.fail(f"{row.source}: the prompt of row {row.number} is empty, and gain_bias samples from it")
        problem = f"--response_length {args.response_length} leaves no more for a prompt (--normalization gain_bias)"
        data.fitting(first, "prompt", context - args.response_length, f"{problem}; --max_prompt_length drops such rows")
    flag = "reference_dataset"
    rows = data.read(args, flag, "sft", with_answers=True)
    references = data.encode(args, flag, rows, tokenizer, context, "completion") if rows else train
    return [ids for row in references for ids in row.candidates]


def are_token_ids(rows):
    """Whether rows hold token ids that are trained on as they are, without EOS: the labels of lm-human-preferences."""
    prompt = rows[0].columns["prompt"]
    return type(prompt) is list and not is_messages(prompt)


def end_with_eos(rows, tokenizer):
    """Whether a text must be given EOS to be read as these rows are. A chat template writes its own end of a turn."""
    first = rows[0]
    return not is_messages(first.columns["prompt"]) and first.answers[0][-1:] == [tokenizer.eos_token_id]


# ---- rows -> candidates, best ----------------------------------------------------------------------------------------
PAIRS = {"chosen_token": ("chosen_token", "rejected_token"), "chosen": ("chosen", "rejected")}  # the best one first


def candidates_of(row, args, columns):
    """The `candidates` of a row with its `prompt`, and the number from 0 of the `best` of them.

    Source of the labels' form: lm-human-preferences, label_types.py (PickBest) and language/encodings.py (padding).
    """
    kind = data.column_of(row, "candidates", "sample0", *PAIRS)
    best = row.get("best")
    if kind == "candidates":
        found = row[kind] if isinstance(row[kind], list) else []
        cells = {f"candidates[{k}]": x for k, x in enumerate(found)}
    elif kind == "sample0":
        cells = {name: row[name] for name in sorted(row) if re.fullmatch(r"sample\d", name)}
    else:
        cells = {name: row.get(name) for name in PAIRS.get(kind, PAIRS["chosen"])}
        best = 0
    if len(cells) < 2:
        raise RowError(f"column {kind!r}: must be a list of at least 2 candidates")
    if best not in range(len(cells)):
        raise RowError(f"column 'best': {best!r} is no index of its candidates")
    prompt = row["prompt"]
    candidates = [data.after(row["prompt"], data.value_of(cells, name)) for name in cells]
    if kind == "sample0":  # Padding is dropped wherever it stands, because it is no token of the model. [DATA-4]
        prompt, *candidates = ([i for i in ids if i != LABEL_PAD] for ids in (prompt, *candidates))
    return {"prompt": prompt, "candidates": candidates, "best": best}
