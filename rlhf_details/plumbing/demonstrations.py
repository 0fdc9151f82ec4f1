"""Demonstrations, the rows that train_sft.py trains on: a prompt and a completion, and their token ids."""

import math
from dataclasses import dataclass

from rlhf_details import toy
from rlhf_details.plumbing import cli, data, encoding
from rlhf_details.plumbing.data import check_columns, read_rows


@dataclass(kw_only=True, eq=False)
class Demonstration(data.Prompt):
    """A prompt and how to go on from it."""

    completion: list  # token ids


def read(args, flag):
    """Rows with `prompt` and `completion` of the data set that args.<flag> names, [] where it names none.

    Where rows have only a `text`, this is the completion of an empty prompt. --take applies to --dataset alone.
    """
    spec, template = getattr(args, flag), args.prompt_template
    if spec is None:
        return []
    take, what = args.take if flag == "dataset" else None, f"--{flag} {spec}"
    name, _, split = spec.partition(":")
    if name in toy.TASKS:
        return data.with_prompts(toy.rows("sft", split or "train", name)[:take], template, what)
    rows = read_rows(spec, f"--{flag}")[:take]
    if "text" in rows[0] and "completion" not in rows[0] and template is None:
        check_columns(rows, {"text": str}, what)
        return [{"prompt": "", "completion": row["text"]} for row in rows]
    return data.with_completions(data.with_prompts(rows, template, what), what)


def encode(rows, what, tokenizer, context, max_prompt_length=None, num_sampled=0):
    """data.Prompts of one Demonstration for each row. A row that does not fit the context ends with one line.

    Args: what, the rows' name in messages; context, the most tokens of a row; max_prompt_length, drop rows with longer
    prompts; num_sampled, how many tokens must have room behind each prompt.
    """
    pairs = [encoding.encode(tokenizer, row["prompt"], row["completion"]) for row in rows]
    kept = encoding.short_enough([prompt for prompt, _ in pairs], max_prompt_length or math.inf, what) if rows else []
    result = data.Prompts()
    for i in kept:
        (prompt, completion), where = pairs[i], f"{what}: row {i + 1}"
        if len(prompt) + len(completion) > context:
            tokens = f"{len(prompt) + len(completion)} tokens, {len(prompt)} of them in its prompt"
            hint = "or with --base_model scratch a larger --context_length"
            hint = "" if what.startswith("--reference") else f"; {encoding.what_helps(prompt, completion)}, {hint}"
            cli.fail(f"{where} has {tokens}; the model's context is {context}{hint}")
        if prompt and rows[i]["prompt"] and len(prompt) + num_sampled > context:
            hint = f"--max_prompt_length {context - num_sampled} drops such rows"
            cli.fail(f"{where}: its prompt and --response_length {num_sampled} exceed the context of {context}; {hint}")
        text = data.as_text(tokenizer, rows[i]["prompt"])
        result.append(Demonstration(prompt, text, rows[i], i + 1, what, completion=completion))
    encoding.warn_of_empty(tokenizer, [(row.number, row.completion) for row in result], what, "completion")
    if any(row.ids for row in result):  # Rows that are a `text` have no prompts, and need none.
        encoding.warn_of_empty(tokenizer, [(row.number, row.ids) for row in result], what, "prompt")
    return result
