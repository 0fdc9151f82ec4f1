"""
Data: rows are read, become prompts and completions, and go to the updates and the processes.

A prompt is a string, a list of messages or a list of token ids. A completion is of the same kind as its prompt.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_details import toy, utils
from rlhf_details.plumbing import cli, errors
from rlhf_details.plumbing.tokenization import (
    Padded,
    encode,
    encode_prompts,
    is_messages,
    short_enough,
    warn_of_empty,
    what_helps,
)


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
            cli.fail(f"{what}: row {number} has no column 'prompt' or 'messages' (it has {sorted(row)})")
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


def read_rows(spec, flag):
    """Rows of a data set as a list of dicts.

    Args: spec, "NAME", "NAME:PART" or "FILE.py:FUNCTION". NAME is a local .jsonl/.json/.csv/.parquet file, a folder, or
    NAME or NAME@REVISION of a Hub repository, PART a split or a file of it, and FUNCTION returns rows. At the end
    "[A:B]" takes rows A to B, as `datasets` does. Errors count the rows taken from 1.
    """
    whole, taken, *ends = re.fullmatch(r"(.*?)(\[(-?\d+)?:(-?\d+)?\])?", spec).groups()
    taken, in_range = taken or "", slice(*(int(end) if end else None for end in ends))
    name, _, part = whole.partition(":")
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".csv", ".parquet") and not path.is_dir():
        if part or not path.exists():
            cli.fail(f"{flag} {spec}: {'a file has no parts' if part else 'no such file'}")
        rows = read_file(path, flag)[in_range]
    elif path.suffix == ".py":
        function = load_function(whole, flag)
        with imports_of(whole):
            rows = function()
            if not hasattr(rows, "__iter__"):
                cli.fail(f"{flag} {spec}: returned {reprlib.repr(rows)}, which is no list of rows")
            rows = list(rows)[in_range]
    elif "." in part:
        rows = load_dataset(flag, spec, name, data_files=part, split=f"train{taken}")
    else:
        rows = load_dataset(flag, spec, name, split=f"{part or 'train'}{taken}")
    if not rows:
        cli.fail(f"{flag} {spec}: no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            cli.fail(f"{flag} {spec}: row {number} is no object with columns: {reprlib.repr(row)}")
    return rows


def read_file(path, flag):
    """Rows of a local file. A .json file holds one list, or like a .jsonl file one object a line."""
    if path.suffix in (".csv", ".parquet"):
        return load_dataset(flag, path, path.suffix[1:], data_files=str(path), split="train")
    with cli.reading(flag, path):
        text = path.read_text(encoding="utf-8-sig")
    is_list = path.suffix == ".json" and text.lstrip().startswith("[")
    rows = []
    # str.splitlines would also split at the line separators that JSON allows within a string.
    for number, line in enumerate([text] if is_list else text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as e:
            cli.fail(f"{flag} {path}: line {e.lineno if is_list else number} is not JSON ({e.msg}, column {e.colno})")
    return rows[0] if is_list else rows


def load_dataset(flag, spec, name, **options):
    """Rows of what the library `datasets` reads: NAME, or NAME@REVISION of a repository on the Hub."""
    import datasets  # It is slow to import, and most runs do without it.

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    name, revision = errors.split(name)
    options |= {"revision": revision} if revision else {}
    with cli.reading(flag, spec):
        if not os.path.exists(spec):
            errors.announce(name)
        return [dict(row) for row in datasets.load_dataset(name, **options)]


def check_columns(rows, columns, what):
    """Ends with the row's number where a row lacks one of `columns` ({name: type}) or holds another type in it."""
    for number, row in enumerate(rows, 1):
        for column, kind in columns.items():
            if column not in row:
                cli.fail(f"{what}: row {number} has no column {column!r} (it has {sorted(row)})")
            if not isinstance(row[column], kind):
                value = reprlib.repr(row[column])
                cli.fail(f"{what}: row {number}, column {column!r}: {value} is not of type {kind.__name__}")


def load_function(spec, flag):
    """The function that "FILE.py:function" or "package.module:function" names.

    What it imports is searched as `imports_of` says. An error in the user's code keeps its traceback.
    """
    name, _, function = spec.rpartition(":")
    if not name:
        cli.fail(f"{flag} {spec}: must be FILE.py:function or package.module:function")
    if name.endswith(".py") and not Path(name).is_file():
        cli.fail(f"{flag} {spec}: no such file")
    try:
        with imports_of(spec):
            found = getattr(load_module(str(Path(name).resolve()) if name.endswith(".py") else name), function, None)
    except ImportError as e:
        cli.fail(f"{flag} {spec}: cannot be imported ({e})")
    if not callable(found):
        cli.fail(f"{flag} {spec}: {name} has no function {function!r}")
    return found


@functools.cache
def load_module(name):
    """A module of the user's, given as the whole path of a file or by its name."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", name), name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIBRARIES = {name.partition(".")[0] for name in sys.modules}  # No file of the user's takes the place of these.
IMPORTED = {}  # {a folder of the user's: {name: module} of its modules whose names others have as well}


@contextlib.contextmanager
def imports_of(spec):
    """Stands around the user's code. What it imports is searched in its file's folder first, or in the current one.

    So each folder has its own `helpers`. Python has one module of a name at a time, and the others wait meanwhile.
    """
    path = spec.rpartition(":")[0]
    folder = str(Path(path).resolve().parent) if path.endswith(".py") else os.getcwd()

    def is_another(name):
        files = f"{folder}/{name}.py", f"{folder}/{name}/__init__.py"
        return any(map(os.path.exists, files)) and getattr(sys.modules.get(name), "__file__", None) not in files

    names = {name.partition(".")[0] for name in sys.modules} - LIBRARIES
    names = set(filter(is_another, names))

    def taken_out():
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}

    others = taken_out()
    sys.modules.update(IMPORTED.get(folder, {}))
    # Where the user's file stands among ours, a library's `evaluate` still comes before our file.
    sys.path.insert(len(sys.path) if Path(folder) == Path(__file__).resolve().parents[1] else 0, folder)
    try:
        yield
    finally:
        IMPORTED[folder] = taken_out()
        sys.modules.update(others)
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # for the user's threads that go on


# ---- demonstrations, the rows of SFT: a prompt and a completion -----------------------------------------------------
@dataclass(kw_only=True, eq=False)
class Demonstration(Prompt):
    """A prompt and how to go on from it."""

    completion: list  # token ids


def read_demonstrations(args, flag):
    """Rows with `prompt` and `completion` of the data set that args.<flag> names, [] where it names none.

    Where rows have only a `text`, this is the completion of an empty prompt. --take applies to --dataset alone.
    """
    spec, template = getattr(args, flag), args.prompt_template
    if spec is None:
        return []
    take, what = args.take if flag == "dataset" else None, f"--{flag} {spec}"
    name, _, split = spec.partition(":")
    if name in toy.TASKS:
        return with_prompts(toy.rows("sft", split or "train", name)[:take], template, what)
    rows = read_rows(spec, f"--{flag}")[:take]
    if "text" in rows[0] and "completion" not in rows[0] and template is None:
        check_columns(rows, {"text": str}, what)
        return [{"prompt": "", "completion": row["text"]} for row in rows]
    return with_completions(with_prompts(rows, template, what), what)


def encode_demonstrations(rows, what, tokenizer, context, max_prompt_length=None, num_sampled=0):
    """Prompts of one Demonstration for each row. A row that does not fit the context ends with one line.

    Args: what, the rows' name in messages; context, the most tokens of a row; max_prompt_length, drop rows with longer
    prompts; num_sampled, how many tokens must have room behind each prompt.
    """
    pairs = [encode(tokenizer, row["prompt"], row["completion"]) for row in rows]
    kept = short_enough([prompt for prompt, _ in pairs], max_prompt_length or math.inf, what) if rows else []
    result = Prompts()
    for i in kept:
        (prompt, completion), where = pairs[i], f"{what}: row {i + 1}"
        if len(prompt) + len(completion) > context:
            tokens = f"{len(prompt) + len(completion)} tokens, {len(prompt)} of them in its prompt"
            hint = "or with --base_model scratch a larger --context_length"
            hint = "" if what.startswith("--reference") else f"; {what_helps(prompt, completion)}, {hint}"
            cli.fail(f"{where} has {tokens}; the model's context is {context}{hint}")
        if prompt and rows[i]["prompt"] and len(prompt) + num_sampled > context:
            hint = f"--max_prompt_length {context - num_sampled} drops such rows"
            cli.fail(f"{where}: its prompt and --response_length {num_sampled} exceed the context of {context}; {hint}")
        text = as_text(tokenizer, rows[i]["prompt"])
        result.append(Demonstration(prompt, text, rows[i], i + 1, what, completion=completion))
    warn_of_empty(tokenizer, [(row.number, row.completion) for row in result], what, "completion")
    if any(row.ids for row in result):  # Rows that are a `text` have no prompts, and need none.
        warn_of_empty(tokenizer, [(row.number, row.ids) for row in result], what, "prompt")
    return result
