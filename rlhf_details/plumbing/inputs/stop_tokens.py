"""Which tokens end a turn of a chat, and a response."""

import torch

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat


def end_of_turn(tokenizer, options=None):
    """(the text that the chat template writes after an answer, its ids from the token on that ends the turn).

    The ids are [] where there is no template, or where it ends an answer without a special token.
    """
    closing = example(tokenizer, options).rpartition("An answer.")[2]
    ids, special = chat.with_special(tokenizer, closing)
    return closing, ids[min(special, default=len(ids)) :]


def example(tokenizer, options=None):
    """What the chat template writes of a question and an answer, "" where there is none or it refuses them."""
    try:
        return chat.render(tokenizer, [chat.QUESTION, chat.ANSWER], options)
    except Exception:  # A template may refuse what it likes.
        return ""


def control_tokens(tokenizer):
    """The texts of the special tokens that the chat template writes around messages, and of EOS."""
    written = example(tokenizer) + tokenizer.eos_token
    return [x.content for x in tokenizer.added_tokens_decoder.values() if x.special and x.content in written]


def end_ids(tokenizer):
    """The ids of all tokens that end a response: the tokenizer's EOS, the one that the chat template writes after an
    answer, and those that `load_tokenizer` has found in the model's generation_config.
    """
    ends = [tokenizer.eos_token_id, *end_of_turn(tokenizer)[1][:1], *getattr(tokenizer, "generation_eos", [])]
    return list(dict.fromkeys(ends))


def stop_ids(tokenizer, text, flag, device=None):
    """The ids [S] of the tokens that a flag means by "eos" (all of end_ids), "none" (no token), or a text that is
    one token. Other texts end with one line. Where "eos" means several tokens, it says which.

    The text is read as it stands within a response. At the start of a text, SentencePiece's tokenizers put a space
    before it. That is another token, and no response would end with it.
    """
    ids = []
    if text == "eos":
        ids = end_ids(tokenizer)
        if len(ids) > 1:
            console.say(f"{flag} eos: a response ends with {' or '.join(map(tokenizer.decode, ids))}")
    elif text != "none":
        ids = [tokenizer.get_vocab()[text]] if text in tokenizer.get_vocab() else chat.ids_after(tokenizer, "a", text)
        if len(ids) != 1 or ids == [tokenizer.unk_token_id]:
            console.fail(f"{flag} {text!r}: not one token of the vocabulary")
    return torch.tensor(ids, dtype=torch.long, device=device)
