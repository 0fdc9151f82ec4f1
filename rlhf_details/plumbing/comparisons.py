"""
Comparisons, the rows that train_reward.py and train_dpo.py train on: a prompt, K candidates, and which of them a human
found the best.

They are read from `prompt`, `chosen`, `rejected`; from `prompt`, `candidates`, `best`; from the token ids of
lm-human-preferences (`query`, `sample0` .., `best`) and of N+ (`query_token`, `chosen_token`, `rejected_token`).
Those of the embedded task are made up: the SFT policy writes the candidates, and an imaginary human chooses.
"""

from dataclasses import dataclass

import torch

from rlhf_details import toy
from rlhf_details.plumbing import cli, data, engines, models, tokenization
from rlhf_details.plumbing.files import check_columns, read_rows
from rlhf_details.utils import is_messages

TRAIN, EVAL, BEFORE, AFTER = range(4)  # what responses are sampled for, a coordinate of their noise
LABEL_PAD = 50259  # fills up the rows of lm-human-preferences; it is no id of GPT-2, whose vocabulary has 50257 tokens


@dataclass(kw_only=True, eq=False)
class Comparison(data.Prompt):
    """A prompt, its candidates and the choice between them."""

    candidates: list  # K lists of token ids, each of the prompt and a response
    best: int  # 0 .. K - 1


def check(args):
    """Exits with an error if the data flags contradict each other."""
    for flag in ("dataset", "eval_dataset"):
        name = (getattr(args, flag) or "").partition(":")[0]
        if name in toy.TASKS and name != "toy":
            cli.fail(f"--{flag} {getattr(args, flag)}: has no comparisons; its reward is a function")
    for flag in ("take", "prompt_template", "max_prompt_length"):
        if getattr(args, flag) is not None and args.dataset.partition(":")[0] == "toy":
            hint = "not for the embedded task, whose comparisons are sampled; --num_comparisons"
            cli.fail(f"--{flag} {getattr(args, flag)}: {hint}")


def load(args, tokenizer, model, sample):
    """(Comparisons of --dataset, those of --eval_dataset or none), both as data.Prompts.

    Args: model, the page's module, whose `model` limits tokens and context; sample, the page's function of (P prompts
    as token ids, n, purpose, stop_ids), which returns P * n responses as token ids, the n of a prompt adjacent.
    """

    def load_one(spec, flag, take, num, purpose):
        name, _, split = spec.partition(":")
        if name == "toy":
            engines.use_one_thread(model)  # before it samples, which may take longer than training
            cli.say(f"{flag} {spec}: the SFT policy answers {num:,} prompts four times, and an imaginary human chooses")
            rows = toy.comparisons(split or "train", num, lambda texts: four_texts(texts, tokenizer, sample, purpose))
            return encode([(*row, {}) for row in rows], f"{flag} {spec}", tokenizer, model, args)
        return encode(read_comparisons(spec, flag, args, take), f"{flag} {spec}", tokenizer, model, args)

    train, held_out = load_one(args.dataset, "--dataset", args.take, args.num_comparisons, TRAIN), data.Prompts()
    if args.eval_dataset:
        held_out = load_one(args.eval_dataset, "--eval_dataset", None, 512, EVAL)
    K, eval_K = len(train[0].candidates), len((held_out or train)[0].candidates)
    if eval_K != K:
        cli.fail(f"--eval_dataset {args.eval_dataset}: {eval_K} candidates a row, but {K} in --dataset {args.dataset}")
    return train, held_out


def load_references(args, tokenizer, reward, train):
    """Lists of token ids whose mean score "mean_shift" sets to 0: the rows of --reference_dataset, each a prompt with
    its completion, or else the training candidates. Prompts that "gain_bias" cannot sample from end the script here.
    """
    if args.normalization == "gain_bias":
        engines.use_one_thread(reward)
        room, first = models.context(reward) - args.response_length, train[: 2 * args.normalize_samples]
        limit = f"which --response_length {args.response_length} leaves for a prompt (--normalization gain_bias)"
        if empty := [row.number for row in first if not row.ids]:
            cli.fail(f"--dataset {args.dataset}: the prompt of row {empty[0]} is empty, and gain_bias samples from it")
        hint = f"--max_prompt_length {room} drops such rows"
        tokenization.check_room(
            {row.number: len(row.ids) for row in first}, room, f"--dataset {args.dataset}", limit, hint
        )
    rows, what = data.read_demonstrations(args, "reference_dataset"), f"--reference_dataset {args.reference_dataset}"
    references = data.encode_demonstrations(rows, what, tokenizer, models.context(reward), args)
    return [row.ids + row.completion for row in references] or [ids for row in train for ids in row.candidates]


def four_texts(prompts, tokenizer, sample, purpose):
    """Four responses of the SFT policy to each prompt, all as strings."""
    prompts = [tokenization.encode(tokenizer, prompt) for prompt in prompts]
    responses = sample(prompts, 4, purpose, torch.tensor([tokenizer.eos_token_id]))
    texts = models.texts_of(tokenizer, responses)
    return [texts[i : i + 4] for i in range(0, len(texts), 4)]


def are_token_ids(rows):
    """Whether rows hold token ids that are trained on as they are, without EOS: the labels of lm-human-preferences."""
    prompt = rows[0].columns["prompt"]
    return type(prompt) is list and not is_messages(prompt)


def end_with_eos(rows, tokenizer):
    """Whether a text must be given EOS to be read as these rows are. A chat template writes its own end of a turn."""
    first = rows[0]
    return not is_messages(first.columns["prompt"]) and first.candidates[0][-1:] == [tokenizer.eos_token_id]


# ---- rows -> prompt, candidates, best --------------------------------------------------------------------------------
def read_comparisons(spec, flag, args, take=None):
    """The first `take` rows (None: all) of a data set in any of the formats: [(prompt, candidates, best, row)]."""
    rows, what, template = read_rows(spec, flag)[:take], f"{flag} {spec}", args.prompt_template
    if "sample0" in rows[0]:
        if template is not None:
            cli.fail(f"--prompt_template {template!r}: {what} holds token ids")
        triples, names = label_rows(rows, what)
    elif "chosen_token" in rows[0]:
        names = ["chosen_token", "rejected_token"]
        check_columns(rows, dict.fromkeys(names, list), what)
        rows = data.with_prompts(rows, args, what)
        triples = [(row["prompt"], [tokenization.Padded(row[name]) for name in names], 0) for row in rows]
    elif "candidates" in rows[0]:
        check_columns(rows, {"candidates": list, "best": int}, what)
        rows = data.with_prompts(rows, args, what)
        triples = [(row["prompt"], row["candidates"], row["best"]) for row in rows]
        names = ["candidates"] * max(2, len(rows[0]["candidates"]))
    else:
        names = ["chosen", "rejected"]
        check_columns(rows, dict.fromkeys(names, object), what)
        rows = data.with_prompts(rows, args, what)
        triples = [(row["prompt"], [row[name] for name in names], 0) for row in rows]
    found = []
    for number, (row, (prompt, candidates, best)) in enumerate(zip(rows, triples, strict=True), 1):
        if len(candidates) != len(names):
            cli.fail(f"{what}: row {number}, column 'candidates': must hold {len(names)} strings, in every row alike")
        where = [f"{what}: row {number}, column {name!r}" for name in names]
        if not 0 <= best < len(candidates):
            cli.fail(f"{what}: row {number}, column 'best': {best} is no index of its candidates")
        candidates = [data.after(prompt, *pair) for pair in zip(candidates, where, strict=True)]
        found.append((prompt, candidates, best, row))
    return found


def label_rows(rows, what):
    """Rows of token ids `query`, `sample0`, .. and `best` -> (list of ([ids], [[ids]] * K, best), the samples' names).

    The padding is gone.
    Source: lm-human-preferences, label_types.py (PickBest) and language/encodings.py (the padding token).
    """
    K = len({column for row in rows for column in row if column.startswith("sample") and column[6:].isdigit()})
    samples = [f"sample{k}" for k in range(max(2, K))]
    check_columns(rows, {"query": list, **dict.fromkeys(samples, list), "best": int}, what)

    def real(ids):
        # Padding is dropped wherever it stands, because it is no token of the model. [DATA-4]
        return [i for i in ids if i != LABEL_PAD]

    return [(real(row["query"]), [real(row[column]) for column in samples], row["best"]) for row in rows], samples


# ---- text -> token ids -----------------------------------------------------------------------------------------------
def encode(rows, what, tokenizer, reward, args):
    """data.Prompts of one Comparison for each (prompt, candidates, best, row). Rows that do not fit the model are an
    error, or dropped by args.max_prompt_length and args.max_length. what: the rows' name in messages.
    """
    context, vocabulary = models.context(reward), reward.model.get_input_embeddings().num_embeddings
    found, left = data.Prompts(), []
    for number, (prompt, candidates, best, row) in enumerate(cli.progress(f"tokenising {what}", rows), 1):
        where, options = f"{what}: row {number}", data.options_of(row, args)
        pairs = [tokenization.encode(tokenizer, prompt, candidate, options, where) for candidate in candidates]
        query = pairs[0][0]
        if isinstance(prompt, list) and not is_messages(prompt):
            for column, ids in [("query", query), *((f"sample{k}", ids) for k, (_, ids) in enumerate(pairs))]:
                # The library reads no score at its own padding, so this token may not occur in a text either.
                unknown = [i for i in ids if not 0 <= i < vocabulary or i == tokenizer.pad_token_id]
                if unknown:
                    known = f"the labels' padding {LABEL_PAD} nor a token of the model, less its own padding"
                    cli.fail(f"{where}, column {column!r}: id {unknown[0]} is neither {known}")
        left += [(number, candidate, ids) for candidate, (_, ids) in zip(candidates, pairs, strict=True)]
        columns, joined = {"prompt": prompt, "candidates": candidates, "best": best}, [query + ids for _, ids in pairs]
        text = data.as_text(tokenizer, prompt)
        made = Comparison(query, text, columns, number, what, options=options, candidates=joined, best=best)
        found.append(made)
    kept = tokenization.short_enough([len(row.ids) for row in found], args.max_prompt_length, what)
    longest = [max(map(len, found[i].candidates)) for i in kept]
    result = data.Prompts(found[kept[j]] for j in tokenization.short_enough(longest, args.max_length, what, "row"))
    limit, hint = "the model's context", f"--max_length {context} drops such rows"
    tokenization.check_room({row.number: max(map(len, row.candidates)) for row in result}, context, what, limit, hint)
    numbers = {row.number for row in result}
    left = [entry for entry in left if entry[0] in numbers]
    first = result[0]
    tokenization.warn_of_left_out(tokenizer, left, what, first.columns["prompt"], first.ids, first.options)
    tokenization.warn_of_empty(tokenizer, [(number, ids) for number, _, ids in left], what, "candidate")
    tokenization.warn_of_empty(tokenizer, [(row.number, row.ids) for row in result], what, "prompt")
    if same := [row.number for row in result if all(ids == row.candidates[0] for ids in row.candidates)]:
        counted = f"{len(same)}, the first one is row {same[0]}; they teach nothing"
        cli.say(f"warning: {what}: rows whose candidates are all the same: {counted}")
    return result
