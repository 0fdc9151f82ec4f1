"""
Data sets: rows of a local file, a folder, a Hub repository or the user's code, checked, and their token ids.
Nothing runs at import.

A prompt is a string, a list of messages ({"role": .., "content": ..}), which the tokenizer's chat template renders, or a list of
token ids. A completion is of the same kind as its prompt.
"""

import functools
import glob
import importlib
import importlib.util
import json
import math
import os
import re
import reprlib
import string
import sys
from pathlib import Path
from typing import NamedTuple

from rlhf_details.utils import fail


def read_rows(spec, columns, default_split="train", flag="--dataset"):
    """Rows of a data set as a list of dicts.

    Args: spec, "NAME[:PART]". NAME is a local .jsonl/.json/.csv/.parquet file, a folder or a Hub repository; PART a split of it,
    or a file in it; or it is FILE.py:FUNCTION, which returns rows. At the end [A:B] may take rows A to B, as `datasets` slices
    splits: "labels.json[:4992]" and "[4992:]".
    columns: {name: type} that each row must have. Errors name the file, the column and the row (from 1, of those taken).
    """
    place = r"(?:-?\d{1,18})?"
    whole, taken = re.fullmatch(rf"(.*?)(\[{place}:{place}\])?", spec, re.DOTALL).groups(default="")
    name, _, part = whole.partition(":")
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet") and not os.path.isdir(path):
        if not os.path.exists(path):  # False also for a name that no file can have, at which path.exists() raises
            fail(f"{flag} {spec}: no such file")
        if part:
            fail(f"{flag} {spec}: a file has no parts")
        start, stop = (int(place) if place else None for place in (taken[1:-1] or ":").split(":"))
        rows = _read_file(path, flag)[start:stop]
    elif path.suffix == ".py":
        start, stop = (int(place) if place else None for place in (taken[1:-1] or ":").split(":"))
        rows = _call(load_function(whole, flag), f"{flag} {spec}")[start:stop]
    else:
        options = dict(data_files=part, split=f"train{taken}") if "." in part else dict(split=f"{part or default_split}{taken}")
        rows = _load_dataset(f"{flag} {spec}", name, **options)
    if not rows:
        fail(f"{flag} {spec}: no rows")
    check_columns(rows, columns, f"{flag} {spec}")
    return rows


def check_columns(rows, columns, what):
    """Ends with the row's number where a row lacks one of `columns` ({name: type}) or holds another type in it."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            fail(f"{what}: row {number} is no object with columns: {reprlib.repr(row)}")
        for column, kind in columns.items():
            if column not in row:
                fail(f"{what}: row {number} has no column {column!r} (it has {sorted(row)})")
            value = row[column]
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                fail(f"{what}: row {number}, column {column!r}: {reprlib.repr(value)} is not of type {kind.__name__}")
            for text in value if kind is list else [value]:
                if isinstance(text, str) and re.search("[\ud800-\udfff]", text):  # "\ud83d" alone, which JSON can write
                    fail(f"{what}: row {number}, column {column!r}: {reprlib.repr(text)} holds half of a surrogate pair")


def load_function(spec, flag):
    """The function that "FILE.py:function" or "package.module:function" names; the file's folder, or the current one, is
    searched for what it imports."""
    name, _, function = spec.rpartition(":")
    if not name:
        fail(f"{flag} {spec}: must be FILE.py:function or package.module:function")
    try:
        found = getattr(_load_module(str(Path(name).resolve()) if name.endswith(".py") else name), function, None)
    except (Exception, SystemExit) as e:  # whatever the user's code raises
        fail(f"{flag} {spec}: cannot be imported ({type(e).__name__}: {e})")
    if not callable(found):
        fail(f"{flag} {spec}: {name} has no function {function!r}")
    return found


@functools.cache
def _load_module(name):
    is_file = name.endswith(".py")
    folder = str(Path(name).resolve().parent) if is_file else os.getcwd()
    sys.path.insert(0, folder)  # before this package's own folder, where a script's start has put that
    try:
        if not is_file:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"{Path(name).stem}_of_the_user", name)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)  # for what it imports later


def _call(function, what):
    try:
        return list(function())
    except (Exception, SystemExit) as e:  # whatever the user's code raises
        fail(f"{what}: {type(e).__name__}: {e}")


def _read_file(path, flag):
    if path.suffix in (".csv", ".parquet"):
        return _load_dataset(f"{flag} {path}", path.suffix[1:], data_files=glob.escape(str(path)), split="train")
    number = None
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            try:
                rows = json.loads(text)
                return rows if isinstance(rows, list) else [rows]
            except json.JSONDecodeError as e:
                if e.msg != "Extra data" or text.lstrip()[0] != "{":
                    raise  # else an object a line, which Hub repositories also call .json
        rows = []
        for number, line in enumerate(text.split("\n"), 1):  # noqa: B007 (read where the error is reported)
            rows += [json.loads(line)] if line.strip() else []
        return rows
    except json.JSONDecodeError as e:
        fail(f"{flag} {path}: line {number or e.lineno} is not JSON ({e.msg}, column {e.colno})")
    except (OSError, UnicodeDecodeError) as e:
        fail(f"{flag} {path}: cannot be read as UTF-8 text ({e})")
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, brackets nested thousands deep
        fail(f"{flag} {path}: {f'line {number}' if number else 'its text'} cannot be read as JSON ({e})")


def _load_dataset(what, name, **options):
    import datasets  # here, since it is slow to import and most runs do without

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return [dict(row) for row in datasets.load_dataset(name, **options)]
    except Exception as e:  # each reader raises a class of its own; the user needs the innermost cause, in one line
        cause = (str(e.__cause__ or e).strip() or repr(e)).splitlines()[0]
        fail(f"{what}: cannot be loaded as a local file or data set ({cause})")


# ---- rows -> prompts, completions ------------------------------------------------------------------------------------
class Padded(list):
    """Token ids that may be filled up at their ends."""


def is_messages(x):
    return isinstance(x, list) and bool(x) and all(isinstance(m, dict) for m in x)


def check_text(value, what, kind=None):
    """Ends where a value is neither a string, nor token ids, nor messages; kind: a value that it must be alike."""
    if is_messages(value):
        if not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value):
            fail(f"{what}: each message must have a string `role` and a string `content`: {reprlib.repr(value)}")
        strings = [m["content"] for m in value]
    else:
        strings = [value] if isinstance(value, str) else []
        if not strings and not (isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)):
            fail(f"{what}: {reprlib.repr(value)} is not of type str, nor a list of messages or of token ids")
    if any(re.search("[\ud800-\udfff]", text) for text in strings):  # "\ud83d" alone, which JSON can write
        fail(f"{what}: {reprlib.repr(value)} holds half of a surrogate pair")
    if kind is not None and (is_messages(value), type(value)) != (is_messages(kind), type(kind)):
        fail(f"{what}: {reprlib.repr(value)} is of another kind than the row's prompt, {reprlib.repr(kind)}")


def fill(template, row, what):
    """A --prompt_template with a row's columns in its {places}; "\\n" in it is a line break, which shells do not pass.

    None, which an empty cell of a CSV file is read as, becomes the empty string.
    """
    try:
        names = {re.split(r"[.[]", name)[0] for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if missing := {name for name in names if name not in row}:
            fail(f"--prompt_template {template!r}: {what} has no column {sorted(missing)[0]!r} (it has {sorted(row)})")
        return template.replace("\\n", "\n").format(**{name: "" if value is None else value for name, value in row.items()})
    except (ValueError, LookupError, AttributeError, TypeError) as e:
        fail(f"--prompt_template {template!r}: {what}: {e}")


def with_prompts(rows, template, what):
    """The rows, each with its `prompt`: a string, messages or token ids.

    It is the filled --prompt_template (None: no template), the column `prompt`, `messages` up to their last answer, N+'s
    `query_token`, or what `chosen` and `rejected` have in common: the first of these that a row has, read as it stands.
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
            fail(f"{what}: row {number} has no column 'prompt' (it has {sorted(row)})")
        check_text(prompt, f"{what}: row {number}, column 'prompt'")
        result.append(row | {"prompt": prompt})
    return result


def with_completions(rows, what, template=None):
    """The rows of `with_prompts`, each with its `completion`: that column, the answer that ends `messages` (then all messages
    before it are the prompt, also where there is a column `prompt`), or N+'s `reference_response_token`.

    template: as given to `with_prompts`.
    """
    result = []
    for number, row in enumerate(rows, 1):
        if "completion" in row:
            completion = row["completion"]
        elif is_messages(row.get("messages")) and template is not None:
            fail(f"--prompt_template {template!r}: {what} holds `messages`, whose answers follow their own prompts")
        elif is_messages(row.get("messages")):
            completion, row = row["messages"][-1:], row | {"prompt": row["messages"][:-1]}
            if completion[0].get("role") != "assistant" or not row["prompt"]:
                fail(f"{what}: row {number}, column 'messages': does not end with an assistant's message, after others")
            check_text(row["prompt"], f"{what}: row {number}, column 'messages'")
        elif "reference_response_token" in row:
            completion = row["reference_response_token"]
            completion = Padded(completion) if isinstance(completion, list) else completion
        else:
            fail(f"{what}: row {number} has no column 'completion' (it has {sorted(row)})")
        check_text(completion, f"{what}: row {number}, column 'completion'", row["prompt"])
        result.append(row | {"completion": completion})
    return result


def split_common(chosen, rejected, what):
    """(prompt, [chosen, rejected] after it) where both begin with the same prompt: whole messages, or text up to a word's end."""
    for column, value in (("chosen", chosen), ("rejected", rejected)):
        check_text(value, f"{what}, column {column!r}", chosen)
    n = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        n = max((m.start() for m in re.finditer(r"\s", chosen[:n])), default=0)  # the space belongs to the answer
    if is_messages(chosen):
        n = max((i + 1 for i in range(n) if chosen[i]["role"] != "assistant"), default=0)
    if not n or n in (len(chosen), len(rejected)):
        fail(f"{what}: there is no column 'prompt', nor do `chosen` and `rejected` begin with the same one and end with answers")
    return chosen[:n], [chosen[n:], rejected[n:]]


# ---- text -> token ids -----------------------------------------------------------------------------------------------
def encode(tokenizer, prompt, completion=None):
    """Token ids of a prompt, or of a prompt and its completion: BOS where the tokenizer has that habit, EOS after the completion.

    Prompt and completion are tokenised apart, always, so that training and scoring see the same ids at the seam.
    Messages are rendered by the chat template, which brings its own BOS and ends of turns: no other is added.
    Lists of token ids are kept as they are, Padded ones without their padding.
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
    answer = tokenizer(completion, add_special_tokens=False).input_ids  # [DATA-1] apart: the sampler's seam is here as well
    if answer[-1:] == [tokenizer.eos_token_id]:  # the text has it already
        return ids, answer
    return ids, [*answer, tokenizer.eos_token_id]  # [DATA-2] else no policy learns to stop


def encode_messages(tokenizer, prompt, completion=None):
    """`encode` for messages. A completion ends with the template's own end of a turn, or else with EOS."""
    if not tokenizer.chat_template:
        fail(f"prompts are messages, but the tokenizer has no chat template: {reprlib.repr(prompt)}")
    goes_on = prompt[-1]["role"] == "assistant"  # the policy is to continue a message that has been begun
    try:
        text = tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        begun = [*prompt, *(completion or [])]
        if goes_on and completion:
            begun = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + completion[0]["content"]}]
        whole = completion and tokenizer.apply_chat_template(begun, tokenize=False)
    except Exception as e:  # the template's own complaints, and jinja's
        fail(f"the chat template refuses the messages {reprlib.repr(prompt)}: {e}")
    ids = tokenizer(text, add_special_tokens=False).input_ids  # [DATA-3] the template has written BOS, if there is one
    if completion is None:
        return ids
    if not whole.startswith(text):
        fail(f"the chat template's generation prompt is not how it begins an answer: {reprlib.repr(begun)}")
    answer = tokenizer(whole[len(text) :], add_special_tokens=False).input_ids
    ends = [i for i, token in enumerate(answer, 1) if token in special_ids(tokenizer)]
    if ends and not tokenizer.decode(answer[ends[-1] :]).strip():
        return ids, answer[: ends[-1]]  # ChatML writes a line break after the end of a turn, which no policy samples
    return ids, [*answer, tokenizer.eos_token_id]


@functools.cache
def special_ids(tokenizer):
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def strip_padding(tokenizer, ids):
    """Token ids without what fills them up on either side: the tokenizer's padding, or ids that it does not have.

    N+'s columns are padded with 50277, the first id that Pythia's tokenizer has not got.
    """
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id != tokenizer.eos_token_id else None
    real = [i for i, token in enumerate(ids) if token != padding and token < len(tokenizer)]
    return ids[real[0] : real[-1] + 1] if real else []


@functools.cache
def puts_bos(tokenizer):
    """Whether the tokenizer puts its BOS before a text; asked once, since it is a habit and not a matter of the text."""
    return tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def as_text(tokenizer, prompt):
    """A prompt as a string to show."""
    if is_messages(prompt):
        return "\n".join(f"{m['role']}: {m['content']}" for m in prompt) if len(prompt) > 1 else prompt[0]["content"]
    return prompt if isinstance(prompt, str) else tokenizer.decode(encode(tokenizer, prompt), skip_special_tokens=True)


def short_enough(ids, limit, what):
    """Numbers, from 0, of the lists of token ids that have at most `limit` tokens; prints how many have more."""
    kept = [i for i, tokens in enumerate(ids) if len(tokens) <= limit]
    if len(kept) < len(ids):
        if os.environ.get("RANK", "0") == "0":
            print(f"{what}: {len(ids) - len(kept)} of {len(ids)} rows dropped, their prompts have more than {limit:g} tokens")
        if not kept:
            fail(f"{what}: no prompt has at most {limit:g} tokens")
    return kept


def encode_prompts(tokenizer, rows, room, what, limit=math.inf):
    """Token ids of the rows' prompts; one that is empty or longer than `room` is an error naming its row.

    limit: longer prompts are dropped, and their number printed. Returns: (numbers of the rows kept, from 0; their ids).
    """
    ids = [encode(tokenizer, row["prompt"]) for row in rows]
    kept = short_enough(ids, limit, what)
    for i in kept:
        if not ids[i]:
            fail(f"{what}: the prompt of row {i + 1} is empty")
        prompt = rows[i]["prompt"]
        unknown = isinstance(prompt, str) and set(ids[i]) == {tokenizer.unk_token_id}
        if unknown and tokenizer.unk_token not in prompt:  # GPT-2's is its EOS, which is a prompt as good as any
            fail(f"{what}: the tokenizer knows no word of the prompt of row {i + 1}, {prompt!r}")
        if max(ids[i]) >= len(tokenizer):
            fail(f"{what}: the prompt of row {i + 1} holds {max(ids[i])}, which is no token ({len(tokenizer)} in the vocabulary)")
        if len(ids[i]) > room:
            fail(f"{what}: the prompt of row {i + 1} has {len(ids[i])} tokens; the model's context leaves room for {room}")
    return kept, [ids[i] for i in kept]


class PromptSet(NamedTuple):
    """The prompts of a data set, each at the same place in four lists."""

    ids: list  # token ids
    texts: list  # strings to show
    rows: list  # with all their columns
    numbers: list  # in the data set, from 1

    def first(self, n):
        return PromptSet(*(x[:n] for x in self))


def prompt_set(tokenizer, rows, room, what, limit=math.inf):
    """The PromptSet of rows with a `prompt`; what the arguments do is said at `encode_prompts`."""
    kept, ids = encode_prompts(tokenizer, rows, room, what, limit)
    rows = [rows[i] for i in kept]
    return PromptSet(ids, [as_text(tokenizer, row["prompt"]) for row in rows], rows, [i + 1 for i in kept])
