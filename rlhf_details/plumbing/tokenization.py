"""Rows -> token ids by `utils.encode`, and what is said of rows that are too long, empty or not wholly trained on."""

import functools
import math
import reprlib

from rlhf_details import utils
from rlhf_details.plumbing import cli
from rlhf_details.utils import is_messages

say_once = functools.cache(cli.say)


class Padded(list):
    """Token ids that may be filled up at their ends."""


def encode(tokenizer, prompt, completion=None, options=None, what="the prompt"):
    """`utils.encode`, where Padded ids lose their padding. What cannot be encoded ends with one line about `what`."""
    if is_messages(prompt) and not tokenizer.chat_template:
        cli.fail(f"{what}: prompts are messages, but the tokenizer has no chat template: {reprlib.repr(prompt)}")
    prompt, completion = (strip_padding(tokenizer, x) if isinstance(x, Padded) else x for x in (prompt, completion))
    try:
        return utils.encode(tokenizer, prompt, completion, options)
    except Exception as e:  # A template may raise whatever it likes.
        if is_messages(prompt) and [m["role"] for m in prompt[:2]] == ["system", "user"]:  # Gemma 2's refuses these.
            question = f"{prompt[0]['content']}\n\n{prompt[1]['content']}"
            ids = encode(tokenizer, [prompt[1] | {"content": question}, *prompt[2:]], completion, options, what)
            say_once(f"the chat template refuses a system's message ({e}), so it begins the first question")
            return ids
        problem = "the chat template refuses the messages" if is_messages(prompt) else "cannot be tokenised:"
        cli.fail(f"{what}: {problem} {reprlib.repr(prompt)}: {e}")


def strip_padding(tokenizer, ids):
    """Token ids without what fills them up on either side: the tokenizer's padding, or ids that it does not have.

    N+'s columns are padded with 50277, the first id that Pythia's tokenizer does not have.
    """
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id != tokenizer.eos_token_id else None
    real = [i for i, token in enumerate(ids) if token != padding and token < vocabulary(tokenizer)]
    return ids[real[0] : real[-1] + 1] if real else []


@functools.cache
def vocabulary(tokenizer):
    """The largest id of a token, plus 1. len(tokenizer) is less where ids are left out."""
    return max(tokenizer.get_vocab().values()) + 1


# ---- rows that are too long ------------------------------------------------------------------------------------------
def short_enough(lengths, limit, what, name="prompt"):
    """Numbers, from 0, of the lengths that are at most `limit` (None: all); says how many are not."""
    limit = math.inf if limit is None else limit
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    if lengths and not kept:
        cli.fail(f"{what}: no {name} has at most {limit:g} tokens")
    if len(kept) < len(lengths):
        dropped = f"{len(lengths) - len(kept)} of {len(lengths)} rows dropped"
        cli.say(f"{what}: {dropped}, their {name}s have more than {limit:g} tokens")
    return kept


def check_room(lengths, room, what, limit, hint):
    """Ends with one line that counts the rows with more than `room` tokens.

    Args: lengths, {row's number: tokens}; limit, what `room` is, in words.
    """
    if wrong := [number for number, length in lengths.items() if length > room]:
        first = f"the first one is row {wrong[0]} with {lengths[wrong[0]]}"
        cli.fail(f"{what}: {len(wrong)} of {len(lengths)} rows have more than {room} tokens, {limit}; {first}; {hint}")


# ---- rows that are empty, or of which a template leaves something out ------------------------------------------------
@functools.cache
def special_ids(tokenizer):
    """The ids of all special tokens, those included that only the chat template uses."""
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def warn_of_empty(tokenizer, texts, what, name):
    """Says how many rows have a text of no token but special ones. texts: a list of (row's number, token ids)."""
    numbers = sorted({number for number, ids in texts if special_ids(tokenizer).issuperset(ids)})
    if numbers:
        cli.say(f"warning: {what}: rows with an empty {name}: {len(numbers)}, the first one is row {numbers[0]}")


def warn_of_left_out(tokenizer, answers, what, prompt, ids, options):
    """Says in how many rows the chat template leaves out some of an answer's text, such as what stands in <think>.

    It also says where the template asks for an answer with other words than it begins answers with. Args: answers, a
    list of (row's number, completion, its token ids); prompt, ids, options, those of one row, as it is trained on.
    """
    if is_messages(prompt) and (asked := encode(tokenizer, prompt, None, options)) != ids:
        asked, begun = (repr(tokenizer.decode(x[-8:])) for x in (asked, ids))
        cli.say(f"warning: {what}: the chat template asks for an answer with {asked}, and begins its own with {begun}")
    keys = "content", "reasoning_content", "reasoning", "thinking"
    numbers, shown = [], ""
    for number, completion, ids in answers:
        turns = completion if is_messages(completion) else []
        parts = [m[key].strip() for m in turns if m["role"] == "assistant" for key in keys if m.get(key)]
        calls = [call for m in turns for call in m.get("tool_calls", ())]
        parts += [call.get("function", call).get("name", "") for call in calls]
        text = tokenizer.decode(ids) if parts else ""
        missing = [part for part in parts if part not in text]
        # A tokenizer may change a text, such as its case. Then it changes the part in the same way.
        again = [tokenizer.decode(tokenizer(part, add_special_tokens=False).input_ids).strip() for part in missing]
        if any(part not in text for part in again):
            numbers, shown = [*numbers, number], shown or reprlib.repr(text)
    if numbers:
        rows = f"{len(set(numbers))}, the first one is row {numbers[0]}, of which is trained: {shown}"
        cli.say(f"warning: {what}: rows whose answer the chat template does not wholly write: {rows}")


def encode_prompts(tokenizer, rows, room, what, options, limit=None):
    """Token ids of the rows' prompts. It is an error where one is empty, has unknown ids or more than `room` tokens.

    Args: options, a function of a row; limit, longer prompts are dropped.
    Returns: (numbers of the rows kept, from 0; the token ids of each).
    """
    numbered = enumerate(cli.progress(f"tokenising {what}", rows), 1)
    ids = [encode(tokenizer, row["prompt"], None, options(row), f"{what}: row {i}") for i, row in numbered]
    kept = short_enough(list(map(len, ids)), limit, what)
    for i in kept:
        if not ids[i]:
            cli.fail(f"{what}: the prompt of row {i + 1} is empty")
        if max(ids[i]) >= vocabulary(tokenizer):
            unknown = f"{max(ids[i])}, which is no token (the vocabulary has {vocabulary(tokenizer)})"
            cli.fail(f"{what}: the prompt of row {i + 1} holds {unknown}")
    limit, hint = "which the models' context leaves for a prompt", f"--max_prompt_length {room} drops such rows"
    check_room({i + 1: len(ids[i]) for i in kept}, room, what, limit, hint)
    return kept, [ids[i] for i in kept]
