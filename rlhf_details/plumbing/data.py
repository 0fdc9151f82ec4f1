"""
From the rows of a data set to prompts and completions, and the prompts of each update and of each process.

A prompt is a string, a list of messages or a list of token ids. A completion is of the same kind as its prompt.
"""

import math
import re
import reprlib
from dataclasses import dataclass

import torch

from rlhf_details import toy, utils
from rlhf_details.plumbing import cli
from rlhf_details.plumbing.encoding import Padded, encode, encode_prompts, is_messages
from rlhf_details.plumbing.rows import read_rows


# ---- rows -> prompts and completions ---------------------------------------------------------------------------------
def check_text(value, what, example=None):
    """Ends where a value is no string, no token ids and no messages, or is not of the same kind as `example`."""
    if is_messages(value):
        if not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value):
            cli.fail(f"{what}: each message must have a string `role` and a string `content`: {reprlib.repr(value)}")
    elif not isinstance(value, str) and not (isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)):
        cli.fail(f"{what}: {reprlib.repr(value)} is not of type str, nor a list of messages or of token ids")
    if example is not None and (is_messages(value), type(value)) != (is_messages(example), type(example)):
        cli.fail(f"{what}: {reprlib.repr(value)} is of another kind than the row's prompt, {reprlib.repr(example)}")


def fill(template, row, what):
    """A --prompt_template with the row's columns in its {places}. An empty cell, None, becomes the empty string."""
    try:
        columns = {name: "" if value is None else value for name, value in row.items()}
        return template.replace("\\n", "\n").format(**columns)  # Shells pass a line break as the two characters \n.
    except KeyError as e:
        cli.fail(f"--prompt_template {template!r}: {what} has no column {e} (it has {sorted(row)})")
    except (ValueError, IndexError, AttributeError, TypeError) as e:
        cli.fail(f"--prompt_template {template!r}: {what}: {e}")


def with_prompts(rows, template, what):
    """The rows, each with its `prompt`: a string, messages or token ids.

    It is the filled --prompt_template where there is one. Else it is the column `prompt`, as it stands. Where there is
    none it is `messages` up to their last answer, N+'s `query_token`, or what `chosen` and `rejected` have in common.
    The template "messages" passes a column `prompt` over.
    """
    if template == "messages":
        rows, template = [{name: row[name] for name in row if name != "prompt"} for row in rows], None
    result = []
    for number, row in enumerate(rows, 1):
        if template is not None:
            prompt = fill(template, row, f"{what}: row {number}")
        elif "prompt" in row:
            prompt = row["prompt"]
        elif is_messages(row.get("messages")):
            prompt = row["messages"][: -1 if row["messages"][-1].get("role") == "assistant" else None]
        elif "query_token" in row:
            prompt = Padded(row["query_token"])
        elif {"chosen", "rejected"} <= row.keys():
            prompt, _ = split_common(row["chosen"], row["rejected"], f"{what}: row {number}")
        else:
            cli.fail(f"{what}: row {number} has no column 'prompt' (it has {sorted(row)})")
        check_text(prompt, f"{what}: row {number}, column 'prompt'")
        result.append(row | {"prompt": prompt})
    return result


def with_completions(rows, what):
    """The rows of `with_prompts`, each with its `completion`.

    It is what the column `completion`, or else `messages`, say after the prompt, or N+'s `reference_response_token`.
    """
    result = []
    for number, row in enumerate(rows, 1):
        column = "completion" if "completion" in row or not is_messages(row.get("messages")) else "messages"
        where = f"{what}: row {number}, column {column!r}"
        if column in row:
            completion = after(row["prompt"], row[column], where)
        elif "reference_response_token" in row:
            completion = Padded(row["reference_response_token"])
        else:
            cli.fail(f"{what}: row {number} has no column 'completion' (it has {sorted(row)})")
        check_text(completion, where, row["prompt"])
        result.append(row | {"completion": completion})
    return result


def after(prompt, answer, what):
    """What an answer says after its prompt, because messages may say the prompt before it.

    Beside a prompt that is a string, an answer in messages is its content, as plain text.
    """
    if not is_messages(answer):
        return answer
    check_text(answer, what)
    if is_messages(prompt):
        turns = [(m["role"], m["content"]) for m in prompt]
        repeats = [(m["role"], m["content"]) for m in answer[: len(prompt)]] == turns
        rest = answer[len(prompt) :] if repeats else answer
    else:
        rest = answer[1:] if len(answer) > 1 and answer[0]["content"] == prompt else answer
    if not rest or rest[0]["role"] != "assistant" or (isinstance(prompt, str) and len(rest) > 1):
        words = f"{reprlib.repr(answer)} does not go on from the prompt, {reprlib.repr(prompt)}, with an answer"
        cli.fail(f"{what}: {words}; --prompt_template messages takes both from the messages")
    return rest[0]["content"] if isinstance(prompt, str) else rest


def split_common(chosen, rejected, what):
    """(prompt, [chosen, rejected] after it), where both begin with the same messages, or the same words of a text."""
    for column, value in (("chosen", chosen), ("rejected", rejected)):
        check_text(value, f"{what}, column {column!r}", chosen)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    n = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        n = max((m.start() for m in re.finditer(r"\s", chosen[:n])), default=0)  # The space belongs to the answer.
    if is_messages(chosen):
        n = max((i + 1 for i in range(n) if chosen[i]["role"] != "assistant"), default=0)
    if not n or n in (len(chosen), len(rejected)):
        cli.fail(f"{what}: has no column 'prompt', and `chosen` and `rejected` are not one prompt with two answers")
    return chosen[:n], [chosen[n:], rejected[n:]]


# ---- prompts ---------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Prompt:
    """A prompt of a data set."""

    ids: list  # token ids
    text: str  # to show
    columns: dict  # the whole row
    number: int  # of the row in the data set, from 1
    source: str = ""  # the flag and the data set, for error messages
    task: str | None = None  # the embedded task that the row belongs to


class Prompts(list):
    """The prompts of a data set."""

    def of_update(self, update, count, seed):
        """The `count` prompts of an update (from 1): pass after pass over the data, each in an order of its own."""
        stream = range((update - 1) * count, update * count)
        # Prompts come round again, each time in another order, which only the seed and the pass decide. [DATA-7]
        orders = {epoch: utils.permutation(len(self), seed, epoch) for epoch in {i // len(self) for i in stream}}
        return [self[orders[i // len(self)][i % len(self)]] for i in stream]


def read_prompts(spec, flag, template=None, take=None, default_split="train"):
    """The first `take` rows (None: all) of an embedded task or of a data set, each with its `prompt`."""
    name, _, split = spec.partition(":")
    if name in toy.TASKS:
        with cli.reading(flag, spec):
            rows = toy.rows("prompts", split or default_split, name)
    else:
        rows = read_rows(spec, flag)
    return with_prompts(rows[:take], template, f"{flag} {spec}")


def as_text(tokenizer, prompt):
    """A prompt as a string to show."""
    if is_messages(prompt):
        return "\n".join(f"{m['role']}: {m['content']}" for m in prompt) if len(prompt) > 1 else prompt[0]["content"]
    return prompt if isinstance(prompt, str) else tokenizer.decode(encode(tokenizer, prompt), skip_special_tokens=True)


def load_prompts(args, tokenizer, room):
    """(Prompts of --dataset, Prompts of --eval_dataset or none). room: the most tokens that a prompt may have."""
    rows = read_prompts(args.dataset, "--dataset", args.prompt_template, args.take)
    prompts, held_out = to_prompts(args, tokenizer, rows, "dataset", room), Prompts()
    if args.eval_dataset:
        rows = read_prompts(args.eval_dataset, "--eval_dataset", args.prompt_template)
        held_out = to_prompts(args, tokenizer, rows, "eval_dataset", room)
    return prompts, held_out


def to_prompts(args, tokenizer, rows, flag, room):
    """Prompts of the rows that read_prompts has returned for args.<flag>. Too long ones are dropped or end with a line.

    room: the most tokens that the models' context leaves for a prompt.
    """
    spec, R = getattr(args, flag), args.response_length
    what, task = f"--{flag} {spec}", spec.partition(":")[0]
    if room <= 0:
        cli.fail(f"--response_length {R}: leaves no room for a prompt in the models' context of {room + R}")
    limit = 0.9 * R if getattr(args, "filter_length", False) else math.inf
    kept, ids = encode_prompts(tokenizer, rows, room, what, min(args.max_prompt_length or math.inf, limit))
    texts, task = [as_text(tokenizer, rows[i]["prompt"]) for i in kept], task if task in toy.TASKS else None
    return Prompts(Prompt(x, text, rows[i], i + 1, what, task) for i, x, text in zip(kept, ids, texts, strict=True))


def my_share(num, accelerator):
    """This process's numbers of 0 .. num - 1, as int64 [ceil(num / processes)].

    All processes get as many. Numbers from `num` on are filler, which stands at the end of what is gathered.
    """
    world, device = accelerator.num_processes, accelerator.device
    return torch.arange(num + -num % world, device=device).chunk(world)[accelerator.process_index]
