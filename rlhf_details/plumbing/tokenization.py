"""Rows -> token ids by `utils.encode`, and what is said of rows that are too long, empty or not wholly trained on."""

import functools
import itertools
import reprlib

from rlhf_details import utils
from rlhf_details.plumbing import chat, cli
from rlhf_details.plumbing.chat import is_messages


class Padded(list):
    """Token ids that may be filled up at their ends."""


def encode(tokenizer, prompt, completion=None, options=None, what="the prompt"):
    """`utils.encode`, where Padded ids lose their padding. Exits with an error about `what` if it cannot be encoded."""
    is_chat = is_messages(prompt)
    if is_chat and not tokenizer.chat_template:
        problem = "prompts are messages, but the tokenizer has no chat template"
        cli.fail(f"{what}: {problem}: {reprlib.repr(prompt)}; --prompt_template makes a text of columns")
    prompt, completion = (strip_padding(tokenizer, x) if isinstance(x, Padded) else x for x in (prompt, completion))
    for ids in (prompt, completion):
        if isinstance(ids, list) and not is_messages(ids) and max(ids, default=0) >= vocabulary(tokenizer):
            cli.fail(f"{what}: {max(ids)} is no token (the vocabulary has {vocabulary(tokenizer)})")
    try:
        rendered = chat.render_pair(tokenizer, prompt, completion, options) if is_chat else (prompt, completion)
        return utils.encode(tokenizer, *rendered)
    except Exception as e:  # A template may raise whatever it likes.
        problem = "the chat template refuses the messages" if is_chat else "cannot be tokenised:"
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


# ---- rows (data.Prompt) that are too long, empty, or of which a template leaves something out ------------------------
def short_enough(rows, length, limit, name):
    """The rows whose length(row) is at most `limit`; says how many are not. name: what is as long."""
    kept = [row for row in rows if length(row) <= limit]
    if not kept:
        cli.fail(f"{rows[0].source}: no {name} has at most {limit:g} tokens")
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} rows dropped"
        cli.say(f"{rows[0].source}: {dropped}, their {name}s have more than {limit:g} tokens")
    return kept


def check_room(rows, length, room, limit, flag):
    """Exits with an error if length(row) is more than `room`. limit: what room is, in words; flag: what drops rows."""
    if wrong := [row for row in rows if length(row) > room]:
        first = f"the first one is row {wrong[0].number} with {length(wrong[0])}"
        counted = f"{len(wrong)} of {len(rows)} rows have more than {room} tokens, {limit}; {first}"
        cli.fail(f"{rows[0].source}: {counted}; {flag} {room} drops such rows")


def warn_of(rows, words, more=""):
    """Says how many rows something is wrong with, if any."""
    if rows:
        cli.say(f"warning: {rows[0].source}: {words}: {len(rows)}, the first one is row {rows[0].number}{more}")


def warn_of_empty(tokenizer, rows):
    """Says how many rows have an answer of no token but special ones, or answers that are all the same."""
    special = {*tokenizer.all_special_ids, *chat.end_ids(tokenizer)}
    warn_of([row for row in rows if any(map(special.issuperset, row.answers))], "rows with an empty answer")
    same = [row for row in rows if len(row.answers) > 1 and all(ids == row.answers[0] for ids in row.answers)]
    warn_of(same, "rows whose candidates are all the same", "; they teach nothing")


def warn_of_left_out(tokenizer, rows):
    """Says in how many rows the chat template leaves out some of an answer's text, such as what stands in <think>."""
    chats = [row for row in rows if is_messages(row.columns["prompt"])]
    cut = [row for row in chats if any(map(leaves_out, itertools.repeat(tokenizer), row.said, row.answers))]
    shown = f", of which is trained: {reprlib.repr(tokenizer.decode(cut[0].answers[0]))}" if cut else ""
    warn_of(cut, "rows whose answer the chat template does not wholly write", shown)


def leaves_out(tokenizer, completion, ids):
    """Whether some of what an answer says does not stand in the ids that are trained on."""
    text = tokenizer.decode(ids)
    parts = [m["content"].strip() for m in completion if m["role"] == "assistant"]
    # A tokenizer may change a text, such as its case. Then it changes the part in the same way.
    again = (tokenizer.decode(tokenizer(x, add_special_tokens=False).input_ids).strip() for x in parts if x not in text)
    return any(part not in text for part in again)
