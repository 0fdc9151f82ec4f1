"""
Text and messages -> token ids, each as the tokenizer or its chat template would write it.

A prompt is a string, a list of messages ({"role": .., "content": ..}) or a list of token ids. A completion is of the
same kind as its prompt.
"""

import functools
import math
import reprlib

from rlhf_details.plumbing import cli


class Padded(list):
    """Token ids that may be filled up at their ends."""


def is_messages(x):
    """Whether x is a list of messages, and not a string or a list of token ids."""
    return isinstance(x, list) and bool(x) and all(isinstance(m, dict) for m in x)


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


def short_enough(ids, limit, what):
    """Numbers, from 0, of the lists of token ids that have at most `limit` tokens; says how many have more."""
    kept = [i for i, tokens in enumerate(ids) if len(tokens) <= limit]
    if not kept:
        cli.fail(f"{what}: no prompt has at most {limit:g} tokens")
    if len(kept) < len(ids):
        dropped = f"{len(ids) - len(kept)} of {len(ids)} rows dropped"
        cli.say(f"{what}: {dropped}, their prompts have more than {limit:g} tokens")
    return kept


def what_helps(prompt, answer):
    """What helps where a prompt and its answer, lists of token ids, do not fit the context together."""
    return "--max_prompt_length drops rows of long prompts" if len(prompt) > len(answer) else "shorten the row"


def warn_of_empty(tokenizer, texts, what, name):
    """Says how many rows have a text of no token but special ones. texts: a list of (row's number, token ids)."""
    numbers = sorted({number for number, ids in texts if special_ids(tokenizer).issuperset(ids)})
    if numbers:
        cli.say(f"warning: {what}: rows with an empty {name}: {len(numbers)}, the first one is row {numbers[0]}")


def encode_prompts(tokenizer, rows, room, what, limit=math.inf):
    """Token ids of the rows' prompts. It is an error where one is empty, has unknown ids or more than `room` tokens.

    limit: longer prompts are dropped. Returns: (numbers of the rows kept, from 0; the token ids of each).
    """
    ids = [encode(tokenizer, row["prompt"]) for row in rows]
    kept = short_enough(ids, limit, what)
    for i in kept:
        where = f"{what}: the prompt of row {i + 1}"
        if not ids[i]:
            cli.fail(f"{where} is empty")
        if max(ids[i]) >= len(tokenizer):
            cli.fail(f"{where} holds {max(ids[i])}, which is no token (the vocabulary has {len(tokenizer)})")
        if len(ids[i]) > room:
            hint = f"--max_prompt_length {room} drops such rows"
            cli.fail(f"{where} has {len(ids[i])} tokens; the model's context leaves room for {room}; {hint}")
    return kept, [ids[i] for i in kept]
