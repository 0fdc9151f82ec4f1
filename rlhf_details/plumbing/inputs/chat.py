"""Messages, and the text that a chat template makes of them."""

import functools
import json
import re
from datetime import datetime

QUESTION = {"role": "user", "content": "A question."}
ANSWER = {"role": "assistant", "content": "An answer."}


class RowError(Exception):
    """What is wrong with a row, in words for the user."""


def is_messages(x):
    """Whether x is a list of messages, {"role": .., "content": ..}, and not a string or a list of token ids."""
    return isinstance(x, list) and bool(x) and all(isinstance(m, dict) for m in x)


@functools.cache
def vocabulary(tokenizer):
    """The largest id of a token, plus 1. len(tokenizer) is less where ids are left out."""
    return max(tokenizer.get_vocab().values()) + 1


def render(tokenizer, messages, options=None, template=None, **more):
    """The text that the chat template makes of messages.

    Args: options, {name: value} of what the template is given beside the messages: a row's `tools` and `documents`, the
    user's own, such as enable_thinking, and `date`, an ISO string, which it takes for now; template, if it is not what
    the options choose; more, apply_chat_template's.
    Where a template writes no calls of tools, they stand in the content, as Qwen's and Hermes' templates write them.
    """
    options = dict(options or {})
    date = options.pop("date", None)
    template = template or tokenizer.get_chat_template(tools=options.get("tools"))
    if not writes_calls(template):
        messages = [with_calls(message) if message.get("tool_calls") else message for message in messages]
    if date:  # Llama 3.2 writes the day into its prompts. A resumed run must see the same day.
        now = datetime.fromisoformat(date)
        template = re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda m: repr(now.strftime(m[2])), template)
    return tokenizer.apply_chat_template(messages, chat_template=template, **{"tokenize": False} | options | more)


def render_without_tools(tokenizer, messages, options, **more):
    """`render` without the tools and documents of the options, which stand in a chat's first messages alone.

    Of two templates, such as Hermes 3's, it is the one that shows tools: the other one writes no results of calls.
    """
    template = tokenizer.get_chat_template(tools=options.get("tools"))
    options = {name: x for name, x in options.items() if name not in ("tools", "documents")}
    try:
        return render(tokenizer, messages, options, template, **more)
    except TypeError:  # Hermes 3's lists the tools without asking whether there are any.
        return render(tokenizer, messages, options | {"tools": []}, template, **more)


def writes_calls(template):
    """Whether a chat template writes calls of tools."""
    return "tool_calls" in template


def with_calls(message):
    """A message whose calls of tools stand at the end of its content."""
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message["tool_calls"]]
    said = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return message | {"content": "\n".join([message["content"], *said] if message["content"] else said)}


def ids_after(tokenizer, prompt, text):
    """Token ids of a text that stands behind a prompt, without a token across the seam.

    SentencePiece's tokenizers put a space (U+2581) before a text that stands alone. Behind a prompt it has none.
    """
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not "".join(tokenizer.convert_ids_to_tokens(ids[:1])).startswith("\u2581"):
        return ids
    for before in (prompt, "a", "1"):  # If a token lies across the seam, the text is read behind a letter or a digit.
        first, whole = (tokenizer(x, add_special_tokens=False).input_ids for x in (before, before + text))
        if whole[: len(first)] == first:
            return whole[len(first) :]
    return ids


def shared_length(a, b):
    """With how many equal entries two sequences begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def with_special(tokenizer, text):
    """(token ids of a text, the places in them of special tokens, which are no part of ordinary text)."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    special = tokenizer.added_tokens_decoder
    return ids, [place for place, i in enumerate(ids) if i in special]
