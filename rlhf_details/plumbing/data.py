"""
Rows of any shape become prompts and completions, and go to the updates and the processes.

A prompt is a string, a list of messages or a list of token ids. A completion is of the same kind as its prompt.
"""

import contextlib
import functools
import json
import math
import re
import reprlib
from dataclasses import dataclass, field

import torch

from rlhf_details import toy, utils
from rlhf_details.plumbing import cli, models
from rlhf_details.plumbing.files import check_columns, read_rows
from rlhf_details.plumbing.tokenization import (
    Padded,
    check_room,
    encode,
    encode_prompts,
    short_enough,
    warn_of_empty,
    warn_of_left_out,
)
from rlhf_details.utils import is_messages

# ---- rows of any shape -> prompts and completions --------------------------------------------------------------------
CONVERSATIONS = "messages", "conversations", "conversation"  # columns that hold one
ROLES = {"human": "user", "prompter": "user", "observation": "tool"}  # ShareGPT's names, and those of its kin
ROLES |= dict.fromkeys(("gpt", "function_call", "chatgpt", "bot", "model"), "assistant")
# The two characters \n are a line break, since shells pass one so. But LaTeX has commands that begin like it.
LINE_BREAK = re.compile(r"\\n(?!(abla|e|eq|eg|u|ot|otin|i|leq|geq|cong|onumber|ewline|earrow|warrow)(?![A-Za-z]))")


def as_messages(value, what):
    """Messages [{"role", "content", ..}] of a list in this form, or in ShareGPT's: {"from": "human", "value": ..}.

    Content in parts is joined, the null beside a call of a tool becomes "", and keys that are null or [] disappear.
    What is no conversation ends with one line.
    """
    value = [value] if isinstance(value, dict) and isinstance(value.get("role", value.get("from")), str) else value
    if not is_messages(value):
        state = "is empty" if value in (None, [], "", {}) else f"{reprlib.repr(value)} is no list of messages"
        cli.fail(f"{what}: {state}; a message is an object with a `role` and a `content`")
    found = []
    for message in value:
        rest = {name: x for name, x in message.items() if x is not None and x != []}
        role = rest.pop("role", None) or rest.pop("from", None)
        content = rest.pop("content", rest.pop("value", None))
        if is_messages(content) and all(isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        calls = parsed(rest.pop("tool_calls", []))
        content = "" if content is None and calls else content
        if not isinstance(role, str) or not isinstance(content, str) or (calls and not is_messages(calls)):
            rule = "each message must have a string `role` and a `content`, a string or a list of texts"
            cli.fail(f"{what}: {rule}; `tool_calls` are a list of objects: {reprlib.repr(message)}")
        rest |= {"tool_calls": [with_arguments(call) for call in calls]} if calls else {}
        found.append({"role": ROLES.get(role.lower(), role.lower()), "content": content, **rest})
    return found


def with_arguments(call):
    """A call of a tool, whose arguments are an object and not its text: templates write them out as JSON."""
    function = call.get("function", call)
    if "arguments" in function:
        function = function | {"arguments": parsed(function["arguments"])}
    return call | {"function": function} if "function" in call else function


def parsed(value):
    """What JSON in a string says, or a value without its keys that are null, with which parquet fills objects up."""
    with contextlib.suppress(ValueError, TypeError):
        if isinstance(value, str):
            return json.loads(value)
        return json.loads(json.dumps(value), object_hook=lambda x: {k: y for k, y in x.items() if y is not None})
    return value


def text_or_messages(value, what):
    """A string or token ids as they are, or messages. Anything else ends with one line."""
    if isinstance(value, str) or (isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)):
        return value
    if not is_messages(value) and not isinstance(value, dict):
        cli.fail(f"{what}: {reprlib.repr(value)} is not of type str, nor a list of messages or of token ids")
    return as_messages(value, what)


def fill(template, row, columns, what, flag):
    """A template with the row's columns in its {places}. All other braces mean themselves. None becomes "".

    A template that is one place returns messages as they are.
    Args: columns, the names of all rows' columns; flag, that of the template.
    """
    places = re.findall(r"\{([^{}]*)\}", template)
    if places == [template[1:-1]] and is_messages(row.get(places[0])):
        return as_messages(row[places[0]], what)
    if missing := [name for name in places if name in columns and name not in row]:
        cli.fail(f"{flag} {template!r}: {what} has no column {missing[0]!r} (it has {sorted(row)})")
    if not columns.intersection(places):
        cli.fail(f"{flag} {template!r}: names no column in braces ({what} has {sorted(row)})")
    texts = {name: "" if row[name] is None else str(row[name]) for name in places if name in columns}
    return re.sub(r"\{([^{}]*)\}", lambda m: texts.get(m[1], m[0]), LINE_BREAK.sub("\n", template))


def with_prompts(rows, args, what):
    """The rows, each with its `prompt`: a string, messages or token ids.

    It is the filled --prompt_template where there is one. Else it is the column `prompt`, or a conversation up to its
    last answer, N+'s `query_token`, Alpaca's `instruction` and `input`, or what `chosen` and `rejected` have in common.
    The template "messages" passes a column `prompt` over.
    """
    template, columns, result = args.prompt_template, set().union(*rows), []
    is_chat = "instruction" in columns and has_chat_template(args)
    if template == "messages":
        rows, template = [{name: row[name] for name in row if name != "prompt"} for row in rows], None
    for number, row in enumerate(rows, 1):
        where, name = f"{what}: row {number}", column_of(row, *CONVERSATIONS)
        if template is not None:
            prompt = fill(template, row, columns, where, "--prompt_template")
        elif column_of(row, "prompt", *CONVERSATIONS) == "prompt":
            prompt = text_or_messages(row["prompt"], f"{where}, column 'prompt'")
        elif name:
            prompt = as_messages(row[name], f"{where}, column {name!r}")
            prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
            if not prompt:
                cli.fail(f"{where}, column {name!r}: holds an answer and nothing before it")
        elif "query_token" in row:
            prompt = text_or_messages(Padded(row["query_token"]), f"{where}, column 'query_token'")
        elif "instruction" in row:
            prompt = instruction(row, is_chat, where)
        elif {"chosen", "rejected"} <= row.keys():
            prompt, answers = split_common(row["chosen"], row["rejected"], where)
            row = row | dict(zip(("chosen", "rejected"), answers, strict=True))
        else:
            hint = "--prompt_template names others"
            cli.fail(f"{where} has no column 'prompt' or 'messages' (it has {sorted(row)}); {hint}")
        is_chat_without = is_messages(prompt) and prompt[0]["role"] != "system"
        if is_chat_without and isinstance(row.get("system"), str) and row["system"]:
            prompt = [{"role": "system", "content": row["system"]}, *prompt]
        result.append(row | {"prompt": prompt})
    texts = [row for row in result if isinstance(row["prompt"], str) and args.prompt_template is None]
    if any(is_messages(row.get(name)) for row in texts for name in ("chosen", *CONVERSATIONS)):  # UltraFeedback
        hint = "--prompt_template messages takes the messages beside it"
        cli.say(f"note: {what}: the column `prompt` is text, so no chat template is used; {hint}")
    return result


def column_of(row, *names):
    """The first of the names that is a column, or None. One that is null, as in a joined data set, comes last."""
    return min((name for name in names if name in row), key=lambda name: row[name] is None, default=None)


def instruction(row, is_chat, what):
    """The prompt of Alpaca's columns `instruction` and `input`, after `system` and `history` where a row has them.

    Dolly's name for `input` is `context`.

    It is messages where the tokenizer has a chat template, and else text.
    """
    question = [row["instruction"], row.get("input") or row.get("context")]
    past = [text for pair in row.get("history") or [] for text in pair]
    texts = [*past, "\n\n".join(str(text) for text in question if text)]
    if not texts[-1]:
        cli.fail(f"{what}, column 'instruction': is empty")
    system = [row["system"]] if row.get("system") else []
    if not is_chat:
        return "\n\n".join([*system, *texts, ""])
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [*({"role": "system", "content": text} for text in system), *turns]


def has_chat_template(args):
    """Whether the tokenizer of the model that is trained or evaluated has a chat template."""
    paths = {name: getattr(args, name, None) for name in ("base_model", "sft_model_path", "policy_path")}
    flag, path = next((name, path) for name, path in paths.items() if path)
    path = path if isinstance(path, str) else path[0]
    found = None if path == "scratch" else models.find_tokenizer(path, f"--{flag}", args)
    return bool(found and found.chat_template)


def with_completions(rows, args, what):
    """The rows of `with_prompts`, each with its `completion`.

    It is the filled --completion_template, or else what the column `completion`, a conversation, Alpaca's `output` or
    Dolly's `response` say after the prompt, or N+'s `reference_response_token`.
    """
    template, columns, result = getattr(args, "completion_template", None), set().union(*rows), []
    for number, row in enumerate(rows, 1):
        where = f"{what}: row {number}"
        name = column_of(row, "completion", *CONVERSATIONS, "output", "response")
        if template is not None:
            completion = after(row["prompt"], fill(template, row, columns, where, "--completion_template"), where)
        elif name:
            answer = as_messages(row[name], f"{where}, column {name!r}") if name in CONVERSATIONS else row[name]
            if name in CONVERSATIONS and answer[-1]["role"] != "assistant":
                cli.fail(
                    f"{where}, column {name!r}: ends with a message of {answer[-1]['role']!r}, and not with an answer"
                )
            completion = after(row["prompt"], answer, f"{where}, column {name!r}")
        elif "reference_response_token" in row:
            completion = Padded(row["reference_response_token"])
        else:
            cli.fail(f"{where} has no column 'completion' (it has {sorted(row)}); --completion_template names another")
        result.append(row | {"completion": completion})
    return result


def after(prompt, answer, what):
    """What an answer says after its prompt, as text where the prompt is a string, and else as messages.

    Messages may say the prompt before the answer.
    """
    answer = text_or_messages(answer, what)
    if is_messages(prompt) and isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    if not is_messages(answer):
        if is_messages(prompt) or isinstance(answer, str) != isinstance(prompt, str):
            cli.fail(f"{what}: {reprlib.repr(answer)} is of another kind than the prompt, {reprlib.repr(prompt)}")
        return answer
    if is_messages(prompt):
        turns = [(m["role"], m["content"]) for m in prompt]
        starts = [i for i in (0, 1) if turns[i:] == [(m["role"], m["content"]) for m in answer[: len(turns) - i]]]
        rest = answer[len(turns) - starts[0] :] if starts else answer  # A column `system` may stand before the prompt.
    else:
        rest = answer[1:] if len(answer) > 1 and answer[0]["content"] == prompt else answer
    is_pair = is_messages(prompt) or (isinstance(prompt, str) and len(rest) < 2)
    if not is_pair or not rest or rest[0]["role"] != "assistant":
        words = f"{reprlib.repr(answer)} does not go on from the prompt, {reprlib.repr(prompt)}, with an answer"
        hint = "; --prompt_template messages takes both from the messages" if isinstance(prompt, str) else ""
        cli.fail(f"{what}: {words}{hint}")
    return rest[0]["content"] if isinstance(prompt, str) else rest


def split_common(chosen, rejected, what):
    """(prompt, [chosen, rejected] after it), where both begin with the same messages, or the same words of a text."""
    pair = {"chosen": chosen, "rejected": rejected}
    chosen, rejected = (text_or_messages(value, f"{what}, column {name!r}") for name, value in pair.items())
    if is_messages(chosen) != is_messages(rejected):
        cli.fail(f"{what}: `chosen` is of another kind than `rejected`")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    n = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        n = max((m.start() for m in re.finditer(r"\s", chosen[:n])), default=0)  # The space belongs to the answer.
    if is_messages(chosen):
        n = max((i + 1 for i in range(n) if chosen[i]["role"] != "assistant"), default=0)
    if not n or n in (len(chosen), len(rejected)):
        words = "has no column 'prompt', and `chosen` and `rejected` are not one prompt with two answers"
        cli.fail(f"{what}: {words}; --prompt_template names others")
    return chosen[:n], [chosen[n:], rejected[n:]]


def options_of(row, args):
    """What the chat template is given beside a row's messages: the options of utils.render."""
    found = {"date": args.template_date} | json.loads(args.chat_template_kwargs)
    for name in ("tools", "documents"):
        value = parsed(row.get(name))  # Many data sets hold them as JSON in a string.
        found |= {name: value} if value and isinstance(value, list) else {}
    return found


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
    options: dict = field(default_factory=dict)  # of utils.render


class Prompts(list):
    """The prompts of a data set."""

    def of_update(self, update, count, seed):
        """The `count` prompts of an update (from 1): pass after pass over the data, each in an order of its own."""
        stream = range((update - 1) * count, update * count)
        # Prompts come round again, each time in another order, which only the seed and the pass decide. [DATA-7]
        orders = {epoch: utils.permutation(len(self), seed, epoch) for epoch in {i // len(self) for i in stream}}
        return [self[orders[i // len(self)][i % len(self)]] for i in stream]


def read_prompts(args, flag, take=None, default_split="train", prefix=""):
    """The first `take` rows (None: all) of the data set that args.<flag> names, each with its `prompt`.

    prefix: of the flag in error messages.
    """
    spec = getattr(args, flag)
    name, _, split = spec.partition(":")
    if name in toy.TASKS:
        with cli.reading(f"--{prefix}{flag}", spec):
            rows = toy.rows("prompts", split or default_split, name)
    else:
        rows = read_rows(spec, f"--{prefix}{flag}")
    return with_prompts(rows[:take], args, f"--{prefix}{flag} {spec}")


def as_text(tokenizer, prompt):
    """A prompt as a string to show. A message that does nothing but call tools shows its calls."""
    if is_messages(prompt):
        texts = [m["content"] or (json.dumps(m["tool_calls"]) if "tool_calls" in m else "") for m in prompt]
        pairs = zip(prompt, texts, strict=True)
        return "\n".join(f"{m['role']}: {text}" for m, text in pairs) if len(prompt) > 1 else texts[0]
    return prompt if isinstance(prompt, str) else models.texts_of(tokenizer, [encode(tokenizer, prompt)])[0]


def load_prompts(args, tokenizer, room):
    """(Prompts of --dataset, Prompts of --eval_dataset or none). room: the most tokens that a prompt may have."""
    prompts = to_prompts(args, tokenizer, read_prompts(args, "dataset", args.take), "dataset", room)
    if not args.eval_dataset:
        return prompts, Prompts()
    return prompts, to_prompts(args, tokenizer, read_prompts(args, "eval_dataset"), "eval_dataset", room)


def to_prompts(args, tokenizer, rows, flag, room):
    """Prompts of the rows that read_prompts has returned for args.<flag>. Too long ones are dropped or end with a line.

    room: the most tokens that the models' context leaves for a prompt.
    """
    spec, R = getattr(args, flag), args.response_length
    what, task = f"--{flag} {spec}", spec.partition(":")[0]
    if room <= 0:
        cli.fail(f"--response_length {R}: leaves no room for a prompt in the models' context of {room + R}")
    limit = 0.9 * R if getattr(args, "filter_length", False) else math.inf
    options = functools.partial(options_of, args=args)
    limit = min(args.max_prompt_length or math.inf, limit)
    kept, ids = encode_prompts(tokenizer, rows, room, what, options, limit)
    task = task if task in toy.TASKS else None
    return Prompts(
        Prompt(x, as_text(tokenizer, rows[i]["prompt"]), rows[i], i + 1, what, task, options(rows[i]))
        for i, x in zip(kept, ids, strict=True)
    )


def my_share(num, accelerator):
    """This process's numbers of 0 .. num - 1, as int64 [ceil(num / processes)].

    All processes get as many. Numbers from `num` on are filler, which stands at the end of what is gathered.
    """
    world, device = accelerator.num_processes, accelerator.device
    return torch.arange(num + -num % world, device=device).chunk(world)[accelerator.process_index]


# ---- demonstrations, the rows of SFT: a prompt and a completion -----------------------------------------------------
@dataclass(kw_only=True, eq=False)
class Demonstration(Prompt):
    """A prompt and how to go on from it."""

    completion: list  # token ids


def read_demonstrations(args, flag):
    """Rows with `prompt` and `completion` of the data set that args.<flag> names, [] where it names none.

    Where rows have only a `text`, this is the completion of an empty prompt. --take applies to --dataset alone.
    """
    spec = getattr(args, flag)
    if spec is None:
        return []
    take, what = args.take if flag == "dataset" else None, f"--{flag} {spec}"
    name, _, split = spec.partition(":")
    if name in toy.TASKS:
        return with_prompts(toy.rows("sft", split or "train", name)[:take], args, what)
    rows = read_rows(spec, f"--{flag}")[:take]
    has_others = any(rows[0].get(name) is not None for name in ("prompt", "completion", "instruction", *CONVERSATIONS))
    if isinstance(rows[0].get("text"), str) and args.prompt_template is None and not has_others:
        check_columns(rows, {"text": str}, what)
        return [{"prompt": "", "completion": row["text"]} for row in rows]
    return with_completions(with_prompts(rows, args, what), args, what)


def encode_demonstrations(rows, what, tokenizer, context, args, num_sampled=0):
    """Prompts of one Demonstration for each row. Rows that do not fit the context end with one line.

    Args: what, the rows' name in messages; context, the most tokens of a row; args, whose max_prompt_length and
    max_length drop longer rows; num_sampled, how many tokens must have room behind each prompt.
    """
    result, options = Prompts(), [options_of(row, args) for row in rows]
    pairs = [
        encode(tokenizer, row["prompt"], row["completion"], own, f"{what}: row {i}")
        for i, (row, own) in enumerate(zip(cli.progress(f"tokenising {what}", rows), options, strict=True), 1)
    ]
    kept = short_enough([len(prompt) for prompt, _ in pairs], args.max_prompt_length, what)
    fits = short_enough([len(pairs[i][0]) + len(pairs[i][1]) for i in kept], args.max_length, what, "row")
    for i in (kept[j] for j in fits):
        text = as_text(tokenizer, rows[i]["prompt"])
        made = Demonstration(pairs[i][0], text, rows[i], i + 1, what, options=options[i], completion=pairs[i][1])
        result.append(made)
    limit, hint = "the model's context", f"--max_length {context} drops such rows"
    hint += ", a larger --context_length keeps them" * (getattr(args, "base_model", "") == "scratch")
    check_room({row.number: len(row.ids + row.completion) for row in result}, context, what, limit, hint)
    room = {row.number: len(row.ids) for row in result if row.columns["prompt"]}
    limit, hint = f"which --response_length {num_sampled} leaves for a prompt", "--max_prompt_length drops such rows"
    check_room(room, context - num_sampled, what, limit, hint)
    answers = [(row.number, row.columns["completion"], row.completion) for row in result]
    for row in result[:1]:
        warn_of_left_out(tokenizer, answers, what, row.columns["prompt"], row.ids, row.options)
    warn_of_empty(tokenizer, [(row.number, row.completion) for row in result], what, "completion")
    if any(row.ids for row in result):  # Rows that are a `text` have no prompts, and need none.
        warn_of_empty(tokenizer, [(row.number, row.ids) for row in result], what, "prompt")
    return result
