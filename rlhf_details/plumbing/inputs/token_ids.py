"""How text and messages become token ids, and ids text again."""

import itertools
import re
import reprlib

from rlhf_details.plumbing.inputs import chat, stop_tokens


def encode(tokenizer, prompt, completion=None, options=None):
    """`encode_texts` of strings, messages or token ids, which lose their padding. Raises RowError where it cannot be.

    Args: options, of `render`.
    """
    is_chat = chat.is_messages(prompt)
    pair = [without_padding(tokenizer, x) if isinstance(x, list) and not is_chat else x for x in (prompt, completion)]
    try:
        return encode_texts(tokenizer, *(render_pair(tokenizer, *pair, options) if is_chat else pair))
    except Exception as e:  # A template may raise whatever it likes.
        problem = "the chat template refuses the messages" if is_chat else "cannot be tokenised:"
        raise chat.RowError(f"{problem} {reprlib.repr(prompt)}: {e}") from e


def encode_texts(tokenizer, prompt, completion=None, end=None):
    """Token ids of a prompt; with a completion the pair (the prompt's, the completion's with the token that ends it).

    Args: prompt, completion: strings, or lists of token ids, which are kept as they are; end: None where they are plain
    strings, and for chats the ids that the chat template writes after a turn, the stop token first. A chat's prompt is
    the string `tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)`, and its completion
    what the template adds to this string when it is given the answer as well (`render_pair`).
    """
    if isinstance(prompt, list):
        return prompt if completion is None else (prompt, completion)
    # A chat template has written BOS, if there is one, so the tokenizer adds none. [DATA-3]
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    bos = tokenizer.bos_token_id
    if end is None and bos is not None and ids[:1] != [bos] and tokenizer("a").input_ids[:1] == [bos]:
        ids = [bos, *ids]  # This tokenizer begins plain texts with BOS.
    if completion is None:
        return ids
    # Prompt and completion are tokenised apart, because the sampler also starts anew after the prompt. [DATA-1]
    answer = chat.ids_after(tokenizer, prompt, completion)
    if end:  # Keep only its first id. ChatML adds a line break, and Phi-3.5 EOS as well. No policy samples these.
        return ids, answer[: len(answer) - len(end) + 1]
    if answer[-1:] == [tokenizer.eos_token_id]:  # The text has it already.
        return ids, answer
    return ids, [*answer, tokenizer.eos_token_id]  # Without an end in its data no policy learns to stop. [DATA-2]


def without_padding(tokenizer, ids):
    """Token ids without what fills them up on either side: the tokenizer's padding, or ids that it does not have.

    N+'s columns are padded with 50277, the first id that Pythia's tokenizer does not have.
    """
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id != tokenizer.eos_token_id else None
    real = [i for i, token in enumerate(ids) if token != padding and token < chat.vocabulary(tokenizer)]
    ids = ids[real[0] : real[-1] + 1] if real else []
    if max(ids, default=0) >= chat.vocabulary(tokenizer):
        raise chat.RowError(f"{max(ids)} is no token (the vocabulary has {chat.vocabulary(tokenizer)})")
    return ids


def render_pair(tokenizer, prompt, completion, options):
    """(text of a prompt in messages, text of its completion or None, ids from the end of the last turn on or []).

    The completion's text is what the chat template writes after the prompt's.
    """
    goes_on = prompt[-1]["role"] == "assistant"  # The policy is to continue an answer that has been begun.
    text = chat.render(tokenizer, prompt, options, add_generation_prompt=not goes_on, continue_final_message=goes_on)
    if completion is None:
        return text, None, []
    turns = [*prompt, *completion]
    if goes_on:
        joined = prompt[-1]["content"] + completion[0]["content"]
        turns = [*prompt[:-1], prompt[-1] | {"content": joined}, *completion[1:]]
    whole = chat.render(tokenizer, turns, options)
    begin = len(text)
    if not whole.startswith(text):
        shared = text[: chat.shared_length(text, whole)]
        question = prompt[-1]["content"].strip()
        asked = "" if goes_on or not question else "".join(text.rpartition(question)[1:])
        if asked and asked in whole[len(shared) :]:  # Mistral's writes the system's message where a question is last.
            begin = whole.rindex(asked) + len(asked)
        else:  # DeepSeek-R1's prompt goes on with <think>, and its answers begin without it.
            special = (token.content for token in tokenizer.added_tokens_decoder.values())
            begin = max((shared.rfind(x) + len(x) for x in special if x in shared), default=0)
            text = shared[:begin]
    closing, end = stop_tokens.end_of_turn(tokenizer, options)
    if end and not whole.endswith(closing):  # A turn that calls a tool may end with a token of its own.
        ids, special = chat.with_special(tokenizer, whole)
        end = ids[special[-1] :]
    return text, whole[begin:], end


def encode_turns(tokenizer, messages, options):
    """Token ids of a chat that ends with an answer: (those before this answer, its own, which of all are of an answer).

    They are those that train_agent.py would have sampled and written: an answer is what the chat template writes where
    it is the last one, with the token that ends it, and no later message changes it.
    """
    ids = []
    is_own = []
    answer = []
    end = stop_tokens.end_of_turn(tokenizer, options)[1]
    starts = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    for last, i in itertools.pairwise([-1, *starts]):
        before, next_answer = encode(tokenizer, messages[:i], [messages[i]], options)
        if ids:
            # A prompt may begin an answer that it does not have, as DeepSeek-R1's with <think>.
            begun = len(encode(tokenizer, messages[:i], None, options)) - len(before)
            head, before = between_turns(tokenizer, messages[last + 1 : i], options)
            before = before[: len(before) - max(begun, 0)]
            if head and not end:  # The template ends an answer with the head of the next message.
                answer = [*answer[:-1], *head]
        ids, is_own = ids + answer + before, is_own + [True] * len(answer) + [False] * len(before)
        answer = next_answer
    return ids, answer, is_own + [True] * len(answer)


def marked(tokenizer, messages, options):
    """(Token ids, which of them it marks) of a chat whose template has {% generation %} marks, else ([], [])."""
    if not re.search(r"{%-?\s*generation\s*-?%}", str(tokenizer.get_chat_template(tools=options.get("tools")))):
        return [], []
    found = chat.render(
        tokenizer, messages, options, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], [bool(x) for x in found["assistant_masks"]]


def between_turns(tokenizer, messages, options):
    """What the chat template writes between an answer and the next one, where these messages are said there.

    Returns: the token ids that end the answer, and those behind them, up to where the next answer begins.
    """
    # The template is asked of a dummy chat. What it would make of the turns before does not matter, because these keep
    # the ids that they have.
    written = render_between(tokenizer, chat.ANSWER, messages, options).partition("An answer.")[2]
    ids, special = chat.with_special(tokenizer, written)
    end = special[0] + 1 if special else 0
    return ids[:end], ids[end:]


def render_between(tokenizer, answer, messages, options):
    """The text of a question, an answer and more messages."""
    chat_of_dummies = [chat.QUESTION, answer, *messages]
    return chat.render_without_tools(tokenizer, chat_of_dummies, options, add_generation_prompt=True)


def decode(tokenizer, responses, mask):
    """The texts of responses [N, R] with their mask, a list of N strings."""
    return decode_all(tokenizer, [r[m].tolist() for r, m in zip(responses.cpu(), mask.cpu(), strict=True)])


def decode_turns(tokenizer, responses, mask, action_mask):
    """As `decode`, of trajectories: what action_mask leaves out, the observations, stands in \u27e8 \u27e9."""
    texts = []
    for r, m, own in zip(responses.cpu(), mask.cpu(), action_mask.cpu(), strict=True):
        parts = itertools.groupby(zip(r[m].tolist(), own[m].tolist(), strict=True), lambda pair: pair[1])
        parts = [(is_own, decode_all(tokenizer, [[i for i, _ in pairs]])[0]) for is_own, pairs in parts]
        texts.append("".join(text if is_own else f" \u27e8{text.strip()}\u27e9" for is_own, text in parts))
    return texts


def decode_all(tokenizer, rows):
    """The texts of lists of token ids, without the tokens that end a response, padding, BOS and the unknown token.

    All else is read by rewards, judges and people, because <think> may be a special token as well. An end that is an
    ordinary word, such as the "." of --stop_token, is part of the text.
    """
    ends = {i for i in stop_tokens.end_ids(tokenizer) if i in tokenizer.added_tokens_decoder}
    silent = ends | {getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad", "bos", "unk")}
    return [tokenizer.decode([i for i in ids if i not in silent]) for ids in rows]


def with_space(tokenizer, row, first, text):
    """A decoded text as it stands behind a prompt of plain text: with the space that SentencePiece's decoder drops from
    its first token, an id. Args: row, the Prompt.
    """
    token = str(tokenizer.convert_ids_to_tokens(first))
    is_lost = token.startswith("\u2581") and not text.startswith(" ") and not chat.is_messages(row.columns["prompt"])
    return " " * is_lost + text
