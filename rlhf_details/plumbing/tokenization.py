"""Rows -> token ids by `utils.encode`, and what is said of rows that are too long, empty or not wholly trained on."""

import functools
import reprlib

from rlhf_details import utils
from rlhf_details.plumbing import chat, cli
from rlhf_details.plumbing.chat import is_messages

say_once = functools.cache(cli.say)


class Padded(list):
    """Token ids that may be filled up at their ends."""


def encode(tokenizer, prompt, completion=None, options=None, what="the prompt"):
    """`utils.encode`, where Padded ids lose their padding. What cannot be encoded ends with one line about `what`."""
    if is_messages(prompt) and not tokenizer.chat_template:
        cli.fail(f"{what}: prompts are messages, but the tokenizer has no chat template: {reprlib.repr(prompt)}")
    prompt, completion = (strip_padding(tokenizer, x) if isinstance(x, Padded) else x for x in (prompt, completion))
    for ids in (prompt, completion):
        is_known = isinstance(ids, str) or is_messages(ids) or max(ids or [0]) < vocabulary(tokenizer)
        if not is_known:
            cli.fail(f"{what}: {max(ids)} is no token (the vocabulary has {vocabulary(tokenizer)})")
    try:
        if is_messages(prompt):
            return utils.encode(tokenizer, *chat.render_pair(tokenizer, prompt, completion, options))
        return utils.encode(tokenizer, prompt, completion)
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


# ---- rows (data.Prompt) that are too long ----------------------------------------------------------------------------
def short_enough(rows, length, limit, name):
    """The rows whose length(row) is at most `limit`; says how many are not. name: what is as long."""
    kept = [row for row in rows if length(row) <= limit]
    if not kept:
        cli.fail(f"{rows[0].source}: no {name} has at most {limit:g} tokens")
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} rows dropped"
        cli.say(f"{rows[0].source}: {dropped}, their {name}s have more than {limit:g} tokens")
    return kept


def check_room(rows, length, room, limit, hint):
    """Ends with one line that counts the rows where length(row) is more than `room`. limit: what room is, in words."""
    if wrong := [row for row in rows if length(row) > room]:
        first = f"the first one is row {wrong[0].number} with {length(wrong[0])}"
        counted = f"{len(wrong)} of {len(rows)} rows have more than {room} tokens, {limit}; {first}"
        cli.fail(f"{rows[0].source}: {counted}; {hint}")


# ---- rows that are empty, or of which a template leaves something out ------------------------------------------------
def warn_of(rows, words, more=""):
    """Says how many rows something is wrong with, if any."""
    if rows:
        cli.say(f"warning: {rows[0].source}: {words}: {len(rows)}, the first one is row {rows[0].number}{more}")


def warn_of_empty(tokenizer, rows):
    """Says how many rows have a prompt or an answer of no token but special ones, or teach nothing."""
    special = {*tokenizer.all_special_ids, *chat.end_ids(tokenizer)}
    are_many = len(rows[0].answers) > 1
    answers = [row for row in rows if any(map(special.issuperset, row.answers))]
    warn_of(answers, f"rows with an empty {'candidate' if are_many else 'completion'}")
    if any(row.columns["prompt"] != "" for row in rows):  # Rows that are a `text` have no prompts, and need none.
        warn_of([row for row in rows if special.issuperset(row.ids)], "rows with an empty prompt")
    same = [row for row in rows if are_many and all(ids == row.answers[0] for ids in row.answers)]
    warn_of(same, "rows whose candidates are all the same", "; they teach nothing")


def warn_of_left_out(tokenizer, rows, answers):
    """Says in how many rows the chat template leaves out some of an answer's text, such as what stands in <think>.

    It also says where the template asks for an answer with other words than it begins answers with. Args: answers, what
    `rows` were made of, a list of completions for each row of the data set.
    """
    first = rows[0]
    asked = encode(tokenizer, first.columns["prompt"], None, first.options)
    if asked != first.ids:
        asked, begun = (repr(tokenizer.decode(ids[-8:])) for ids in (asked, first.ids))
        words = f"the chat template asks for an answer with {asked}, and begins its own with {begun}"
        cli.say(f"warning: {first.source}: {words}")
    texts = {}  # {row: what is trained of an answer}
    for row in rows:
        for completion, ids in zip(answers[row.number - 1], row.answers, strict=True):
            if is_messages(completion) and leaves_out(tokenizer, completion, text := tokenizer.decode(ids)):
                texts.setdefault(row, text)
    shown = "".join(f", of which is trained: {reprlib.repr(text)}" for text in list(texts.values())[:1])
    warn_of(list(texts), "rows whose answer the chat template does not wholly write", shown)


def leaves_out(tokenizer, completion, text):
    """Whether some of what an answer says, thinks or calls does not stand in the text that is trained on."""
    keys = "content", "reasoning_content", "reasoning", "thinking"
    parts = [m[key].strip() for m in completion if m["role"] == "assistant" for key in keys if m.get(key)]
    calls = [call for m in completion for call in m.get("tool_calls", ())]
    parts += [call.get("function", call).get("name", "") for call in calls]
    missing = [part for part in parts if part not in text]
    # A tokenizer may change a text, such as its case. Then it changes the part in the same way.
    again = [tokenizer.decode(tokenizer(part, add_special_tokens=False).input_ids).strip() for part in missing]
    return any(part not in text for part in again)
