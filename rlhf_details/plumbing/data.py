"""
From the rows of a data set to prompts and completions, and to their token ids.

A prompt is a string, a list of messages ({"role": .., "content": ..}) that the tokenizer's chat template renders, or a
list of token ids. A completion is of the same kind as its prompt.
"""

import functools
import math
import re
import reprlib
from dataclasses import dataclass

import torch

from rlhf_details import toy, utils
from rlhf_details.plumbing import cli
from rlhf_details.plumbing.rows import check_columns, load_function, read_rows  # noqa: F401 (pages take them from here)


# ---- rows -> prompts and completions ---------------------------------------------------------------------------------
class Padded(list):
    """Token ids that may be filled up at their ends."""


def is_messages(x):
    """Whether x is a list of messages, and not a string or a list of token ids."""
    return isinstance(x, list) and bool(x) and all(isinstance(m, dict) for m in x)


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

    It is the filled --prompt_template where there is one. Else it is the column `prompt` as it stands, or `messages` up
    to their last answer, or N+'s `query_token`, or what `chosen` and `rejected` have in common.
    """
    result = []
    for number, row in enumerate(rows, 1):
        if template is not None:
            prompt = fill(template, row, f"{what}: row {number}")
        elif "prompt" in row:
            prompt = row["prompt"]
        elif is_messages(row.get("messages")):
            prompt = row["messages"][: -1 if row["messages"][-1].get("role") == "assistant" else None]
        elif "query_token" in row:
            prompt = Padded(row["query_token"]) if isinstance(row["query_token"], list) else row["query_token"]
        elif {"chosen", "rejected"} <= row.keys():
            prompt, _ = split_common(row["chosen"], row["rejected"], f"{what}: row {number}")
        else:
            cli.fail(f"{what}: row {number} has no column 'prompt' (it has {sorted(row)})")
        check_text(prompt, f"{what}: row {number}, column 'prompt'")
        result.append(row | {"prompt": prompt})
    return result


def with_completions(rows, what, template=None):
    """The rows of `with_prompts`, each with its `completion`.

    It is the column `completion`, or the answer that ends `messages` (all messages before it are then the prompt), or
    N+'s `reference_response_token`. template: as given to `with_prompts`.
    """
    result = []
    for number, row in enumerate(rows, 1):
        if "completion" in row:
            completion = row["completion"]
        elif is_messages(row.get("messages")) and template is not None:
            cli.fail(f"--prompt_template {template!r}: {what} holds `messages`, whose answers follow their own prompts")
        elif is_messages(row.get("messages")):
            completion, row = row["messages"][-1:], row | {"prompt": row["messages"][:-1]}
            if completion[0].get("role") != "assistant" or not row["prompt"]:
                cli.fail(
                    f"{what}: row {number}, column 'messages': does not end with an assistant's message, after others"
                )
            check_text(row["prompt"], f"{what}: row {number}, column 'messages'")
        elif "reference_response_token" in row:
            completion = row["reference_response_token"]
            completion = Padded(completion) if isinstance(completion, list) else completion
        else:
            cli.fail(f"{what}: row {number} has no column 'completion' (it has {sorted(row)})")
        check_text(completion, f"{what}: row {number}, column 'completion'", row["prompt"])
        result.append(row | {"completion": completion})
    return result


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


# ---- text -> token ids -----------------------------------------------------------------------------------------------
def encode(tokenizer, prompt, completion=None):
    """Token ids of a prompt, or of a prompt and its completion, with BOS where the tokenizer puts one, and with EOS.

    Messages are rendered by the chat template, which writes its own BOS and ends of turns. Lists of token ids are kept
    as they are, Padded ones without their padding.
    """
    if is_messages(prompt):
        return encode_messages(tokenizer, prompt, completion)
    if isinstance(prompt, list):
        prompt, completion = (strip_padding(tokenizer, x) if isinstance(x, Padded) else x for x in (prompt, completion))
        return prompt if completion is None else (prompt, completion)
    ids, bos = tokenizer(prompt, add_special_tokens=False).input_ids, tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos] and puts_bos(tokenizer):
        ids = [bos, *ids]
    if completion is None:
        return ids
    # Prompt and completion are tokenised apart, because the sampler also starts anew after the prompt. [DATA-1]
    answer = tokenizer(completion, add_special_tokens=False).input_ids
    if answer[-1:] == [tokenizer.eos_token_id]:  # The text has it already.
        return ids, answer
    return ids, [*answer, tokenizer.eos_token_id]  # Without EOS in its data no policy learns to stop. [DATA-2]


def encode_messages(tokenizer, prompt, completion=None):
    """`encode` for messages. A completion ends with the template's own end of a turn, or else with EOS."""
    if not tokenizer.chat_template:
        cli.fail(f"prompts are messages, but the tokenizer has no chat template: {reprlib.repr(prompt)}")
    goes_on = prompt[-1]["role"] == "assistant"  # The policy is to continue an answer that has been begun.
    conversation = [*prompt, *(completion or [])]
    if goes_on and completion:
        conversation = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + completion[0]["content"]}]
    options = {"tokenize": False, "add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    try:
        text = tokenizer.apply_chat_template(prompt, **options)
        whole = tokenizer.apply_chat_template(conversation, tokenize=False) if completion else None
    except Exception as e:  # A template may raise whatever it likes.
        cli.fail(f"the chat template refuses the messages {reprlib.repr(prompt)}: {e}")
    # The template has written BOS, if there is one, so the tokenizer adds none. [DATA-3]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if completion is None:
        return ids
    if not whole.startswith(text):
        cli.fail(f"the chat template's generation prompt is not how it begins an answer: {reprlib.repr(conversation)}")
    answer = tokenizer(whole[len(text) :], add_special_tokens=False).input_ids
    ends = [i for i, token in enumerate(answer, 1) if token in special_ids(tokenizer)]
    if ends and not tokenizer.decode(answer[ends[-1] :]).strip():
        return ids, answer[: ends[-1]]  # ChatML writes a line break after the end of a turn, which no policy samples.
    return ids, [*answer, tokenizer.eos_token_id]


@functools.cache
def special_ids(tokenizer):
    """The ids of all special tokens, those included that only the chat template uses."""
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def strip_padding(tokenizer, ids):
    """Token ids without what fills them up on either side: the tokenizer's padding, or ids that it does not have.

    N+'s columns are padded with 50277, the first id that Pythia's tokenizer does not have.
    """
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id != tokenizer.eos_token_id else None
    real = [i for i, token in enumerate(ids) if token != padding and token < len(tokenizer)]
    return ids[real[0] : real[-1] + 1] if real else []


@functools.cache
def puts_bos(tokenizer):
    """Whether the tokenizer puts its BOS before a text."""
    return tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def as_text(tokenizer, prompt):
    """A prompt as a string to show."""
    if is_messages(prompt):
        return "\n".join(f"{m['role']}: {m['content']}" for m in prompt) if len(prompt) > 1 else prompt[0]["content"]
    return prompt if isinstance(prompt, str) else tokenizer.decode(encode(tokenizer, prompt), skip_special_tokens=True)


def short_enough(ids, limit, what):
    """Numbers, from 0, of the lists of token ids that have at most `limit` tokens; says how many have more."""
    kept = [i for i, tokens in enumerate(ids) if len(tokens) <= limit]
    if not kept:
        cli.fail(f"{what}: no prompt has at most {limit:g} tokens")
    if len(kept) < len(ids):
        cli.say(
            f"{what}: {len(ids) - len(kept)} of {len(ids)} rows dropped, their prompts have more than {limit:g} tokens"
        )
    return kept


def encode_prompts(tokenizer, rows, room, what, limit=math.inf):
    """Token ids of the rows' prompts. It is an error where one is empty, cannot be read or has more than `room` tokens.

    limit: longer prompts are dropped. Returns: (numbers of the rows kept, from 0; the token ids of each).
    """
    ids = [encode(tokenizer, row["prompt"]) for row in rows]
    kept = short_enough(ids, limit, what)
    for i in kept:
        prompt, where = rows[i]["prompt"], f"{what}: the prompt of row {i + 1}"
        if not ids[i]:
            cli.fail(f"{where} is empty")
        # GPT-2's unknown token is its EOS, which is a prompt like any other.
        if isinstance(prompt, str) and set(ids[i]) == {tokenizer.unk_token_id} and tokenizer.unk_token not in prompt:
            cli.fail(f"{where} has no word that the tokenizer knows: {prompt!r}")
        if max(ids[i]) >= len(tokenizer):
            cli.fail(f"{where} holds {max(ids[i])}, which is no token (the vocabulary has {len(tokenizer)})")
        if len(ids[i]) > room:
            cli.fail(f"{where} has {len(ids[i])} tokens; the model's context leaves room for {room}")
    return kept, [ids[i] for i in kept]


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
        rows = read_rows(spec, {}, flag)
    return with_prompts(rows[:take], template, f"{flag} {spec}")


def load_prompts(args, tokenizer, room):
    """(Prompts of --dataset, Prompts of --eval_dataset or none). room: the most tokens that a prompt may have."""
    if room <= 0:
        context = room + args.response_length
        cli.fail(
            f"--response_length {args.response_length}: leaves no room for a prompt in the models' context of {context}"
        )
    limit = min(args.max_prompt_length or math.inf, 0.9 * args.response_length if args.filter_length else math.inf)

    def load(spec, flag, take=None):
        what, task = f"{flag} {spec}", spec.partition(":")[0]
        rows = read_prompts(spec, flag, args.prompt_template, take)
        kept, ids = encode_prompts(tokenizer, rows, room, what, limit)
        task = task if task in toy.TASKS else None
        texts = [as_text(tokenizer, rows[i]["prompt"]) for i in kept]
        return Prompts(
            Prompt(tokens, text, rows[i], i + 1, what, task) for i, tokens, text in zip(kept, ids, texts, strict=True)
        )

    prompts = load(args.dataset, "--dataset", args.take)
    return prompts, load(args.eval_dataset, "--eval_dataset") if args.eval_dataset else Prompts()


def my_share(num, accelerator):
    """This process's numbers of 0 .. num - 1, as int64 [ceil(num / processes)].

    All processes get as many. Numbers from `num` on are filler, which stands at the end of what is gathered.
    """
    world, device = accelerator.num_processes, accelerator.device
    return torch.arange(num + -num % world, device=device).chunk(world)[accelerator.process_index]
