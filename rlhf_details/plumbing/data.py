"""
Rows of any shape become prompts and completions, and go to the updates and the processes.

A prompt is a string, a list of messages or a list of token ids. A completion is of the same kind as its prompt.
"""

import contextlib
import json
import math
import re
import reprlib
from dataclasses import dataclass

import torch

from rlhf_details import toy, utils
from rlhf_details.plumbing import cli, files, models, tokenization
from rlhf_details.plumbing.chat import is_messages
from rlhf_details.plumbing.tokenization import Padded

# ---- rows of any shape -> prompts and completions --------------------------------------------------------------------
CONVERSATIONS = "messages", "conversations", "conversation"  # columns that hold one
ROLES = {"human": "user", "prompter": "user", "observation": "tool"}  # ShareGPT's names, and those of its kin
ROLES |= dict.fromkeys(("gpt", "function_call", "chatgpt", "bot", "model"), "assistant")
# The two characters \n are a line break, since shells pass one so. But LaTeX has commands that begin like it.
LINE_BREAK = re.compile(r"\\n(?!(abla|e|eq|eg|u|ot|otin|i|leq|geq|cong|onumber|ewline|earrow|warrow)(?![A-Za-z]))")


def as_messages(value, what, or_text=False):
    """Messages [{"role", "content", ..}] of a list in this form, or in ShareGPT's: {"from": "human", "value": ..}.

    Content in parts is joined, the null beside a call of a tool becomes "", and keys that are null or [] disappear.
    What is no conversation ends with one line. Args: or_text, whether a string and token ids may stay as they are.
    """
    is_ids = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
    if or_text and (isinstance(value, str) or is_ids):
        return value
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
    is_chat, is_text_beside = "instruction" in columns and has_chat_template(args), False
    if template == "messages":
        rows, template = [{name: row[name] for name in row if name != "prompt"} for row in rows], None
    for number, row in enumerate(rows, 1):
        where = f"{what}: row {number}"
        name = column_of(row, "prompt", *CONVERSATIONS, "query_token", "instruction")
        if template is not None:
            prompt = fill(template, row, columns, where, "--prompt_template")
        elif name == "instruction":
            prompt = instruction(row, is_chat, where)
        elif name:
            prompt = value_of(row, name, where)
            if name in CONVERSATIONS and prompt[-1]["role"] == "assistant" and not (prompt := prompt[:-1]):
                cli.fail(f"{where}, column {name!r}: holds an answer and nothing before it")
        elif {"chosen", "rejected"} <= row.keys():
            prompt, *answers = split_common(*(value_of(row, name, where) for name in ("chosen", "rejected")), where)
            row = row | dict(zip(("chosen", "rejected"), answers, strict=True))
        else:
            hint = "--prompt_template names others"
            cli.fail(f"{where} has no column 'prompt' or 'messages' (it has {sorted(row)}); {hint}")
        if is_messages(prompt) and prompt[0]["role"] != "system" and isinstance(row.get("system"), str):
            prompt = [{"role": "system", "content": row["system"]}, *prompt] if row["system"] else prompt
        others = ("chosen", *CONVERSATIONS) if isinstance(prompt, str) else ()
        is_text_beside |= any(is_messages(row.get(name)) for name in others)  # as UltraFeedback's
        result.append(row | {"prompt": prompt})
    if is_text_beside and args.prompt_template is None:
        hint = "--prompt_template messages takes the messages beside it"
        cli.say(f"note: {what}: the column `prompt` is text, so no chat template is used; {hint}")
    return result


def value_of(row, name, what):
    """What a column holds: text, token ids or messages. A conversation has messages, and N+'s ids are Padded."""
    if name not in row:
        cli.fail(f"{what} has no column {name!r} (it has {sorted(row)})")
    value = as_messages(row[name], f"{what}, column {name!r}", or_text=name not in CONVERSATIONS)
    return Padded(value) if name.endswith("_token") else value


def column_of(row, *names):
    """The first of the names that is a column, or None. One that is null, as in a joined data set, comes last."""
    return min((name for name in names if name in row), key=lambda name: row[name] is None, default=None)


def instruction(row, is_chat, what):
    """The prompt of Alpaca's columns `instruction` and `input`, after `history` where a row has one.

    Dolly's name for `input` is `context`. It is messages where the tokenizer has a chat template. Else it is text,
    after `system` where a row has one.
    """
    past = [text for pair in row.get("history") or [] for text in pair]
    question = row["instruction"], row.get("input") or row.get("context")
    texts = [*past, "\n\n".join(str(text) for text in question if text)]
    if not texts[-1]:
        cli.fail(f"{what}, column 'instruction': is empty")
    if is_chat:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return "\n\n".join([*filter(None, [row.get("system")]), *texts, ""])


def has_chat_template(args):
    """Whether the tokenizer of the model that is trained or evaluated has a chat template."""
    flag = next(name for name in ("base_model", "sft_model_path", "policy_path") if getattr(args, name, None))
    path = getattr(args, flag)
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
        where = at = f"{what}: row {number}"
        name = column_of(row, "completion", *CONVERSATIONS, "output", "response", "reference_response_token")
        if template is not None:
            answer = fill(template, row, columns, where, "--completion_template")
        elif name:
            answer, at = value_of(row, name, where), f"{where}, column {name!r}"
            if name in CONVERSATIONS and answer[-1]["role"] != "assistant":
                cli.fail(f"{at}: ends with a message of {answer[-1]['role']!r}, and not with an answer")
        else:
            hint = "; --completion_template names another" * hasattr(args, "completion_template")
            cli.fail(f"{where} has no column 'completion' (it has {sorted(row)}){hint}")
        result.append(row | {"completion": after(row["prompt"], answer, at)})
    return result


def after(prompt, answer, what):
    """What an answer says after its prompt, as text where the prompt is a string, and else as messages.

    Messages may say the prompt before the answer.
    """
    if is_messages(prompt) and isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    if not is_messages(answer):
        if is_messages(prompt) or isinstance(answer, str) != isinstance(prompt, str):
            cli.fail(f"{what}: {reprlib.repr(answer)} is of another kind than the prompt, {reprlib.repr(prompt)}")
        return answer
    is_text = isinstance(prompt, str)
    asked = [{"role": "user", "content": prompt}] if is_text else prompt
    asked, said = ([(m["role"], m["content"]) for m in x if isinstance(m, dict)] for x in (asked, answer))
    # A column `system` may stand before a prompt that the answer says without it.
    rest = answer[next((len(own) for own in (asked, asked[1:]) if said[: len(own)] == own), 0) :]
    is_too_long = len(rest) > 1 if is_text else not is_messages(prompt)
    if is_too_long or not rest or rest[0]["role"] != "assistant":
        words = f"{reprlib.repr(answer)} does not go on from the prompt, {reprlib.repr(prompt)}, with an answer"
        hint = "; --prompt_template messages takes both from the messages" * is_text
        cli.fail(f"{what}: {words}{hint}")
    return rest[0]["content"] if is_text else rest


def split_common(chosen, rejected, what):
    """(prompt, chosen and rejected after it), where both begin with the same messages, or the same words of a text."""
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
    return chosen[:n], chosen[n:], rejected[n:]


def options_of(row, args):
    """What the chat template is given beside a row's messages: the options of chat.render."""
    found = {"date": args.template_date} | json.loads(args.chat_template_kwargs)
    columns = {name: parsed(row.get(name)) for name in ("tools", "documents")}  # Many hold them as JSON in a string.
    return found | {name: value for name, value in columns.items() if value and isinstance(value, list)}


# ---- prompts ---------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Prompt:
    """A prompt of a data set, with its answers where the rows are trained on."""

    ids: list  # token ids
    text: str  # to show
    columns: dict  # the whole row
    number: int  # of the row in the data set, from 1
    source: str  # the flag and the data set, for error messages
    options: dict  # of chat.render
    answers: list  # lists of token ids: the completion, or K candidates

    @property
    def task(self):
        """The embedded task that the row belongs to, or None."""
        name = self.source.partition(" ")[2].partition(":")[0]
        return name if name in toy.TASKS else None

    @property
    def completion(self):
        """Token ids of the answer to train on."""
        return self.answers[0]

    @property
    def candidates(self):
        """K lists of token ids, each of the prompt and an answer."""
        return [self.ids + answer for answer in self.answers]

    @property
    def best(self):
        """Which candidate a human found the best, 0 .. K - 1."""
        return self.columns["best"]

    def length(self):
        """The tokens of the prompt and its longest answer."""
        return len(self.ids) + max(map(len, self.answers), default=0)


def prompt_length(row):
    """The tokens of a prompt alone."""
    return len(row.ids)


class Prompts(list):
    """The prompts of a data set."""

    def of_update(self, update, count, seed):
        """The `count` prompts of an update (from 1): pass after pass over the data, each in an order of its own."""
        stream = range((update - 1) * count, update * count)
        # Prompts come round again, each time in another order, which only the seed and the pass decide. [DATA-7]
        orders = {epoch: utils.permutation(len(self), seed, epoch) for epoch in {i // len(self) for i in stream}}
        return [self[orders[i // len(self)][i % len(self)]] for i in stream]


def encode(rows, answers, what, tokenizer, context, args, num_sampled=0):
    """Prompts of the rows. What no model can read ends with one line, and what teaches nothing is counted.

    Args: answers, a list of completions for each row, [] where there is nothing to train on; what, the rows' name in
    messages; context, the most tokens of a row; args, whose limits drop longer rows; num_sampled, how many tokens must
    have room behind each prompt.
    """
    if not rows:
        return Prompts()
    found = []
    for number, (row, own) in enumerate(zip(cli.progress(f"tokenising {what}", rows), answers, strict=True), 1):
        prompt, options, where = row["prompt"], options_of(row, args), f"{what}: row {number}"
        pairs = [tokenization.encode(tokenizer, prompt, answer, options, where) for answer in own]
        ids = pairs[0][0] if pairs else tokenization.encode(tokenizer, prompt, None, options, where)
        if not ids and not own:
            cli.fail(f"{what}: the prompt of row {number} is empty")
        text = as_text(tokenizer, prompt)
        found.append(Prompt(ids, text, row, number, what, options, [answer for _, answer in pairs]))

    nine_tenths = 0.9 * args.response_length if getattr(args, "filter_length", False) else math.inf
    limit, max_length = min(args.max_prompt_length or math.inf, nine_tenths), getattr(args, "max_length", None)
    found = tokenization.short_enough(found, prompt_length, limit, "prompt")
    found = tokenization.short_enough(found, Prompt.length, max_length or math.inf, "row")
    if prompts := [row for row in found if num_sampled and row.columns["prompt"] != ""]:
        room, flag = context - num_sampled, f"--response_length {num_sampled}"
        if room <= 0:
            cli.fail(f"{flag}: leaves no room for a prompt in the models' context of {context}")
        hint = f"--max_prompt_length {room} drops such rows"
        tokenization.check_room(prompts, prompt_length, room, f"which {flag} leaves for a prompt", hint)
    hint = f"--max_length {context} drops such rows"
    hint += ", a larger --context_length keeps them" * (getattr(args, "base_model", "") == "scratch")
    tokenization.check_room(found, Prompt.length, context, "the model's context", hint)
    if any(answers):
        tokenization.warn_of_left_out(tokenizer, found, answers)
        tokenization.warn_of_empty(tokenizer, found)
    return Prompts(found)


def read_rows(args, flag, stage, split="train", prefix=""):
    """(The rows of the data set that args.<flag> names, its name in messages).

    Args: stage and split, of toy.rows; prefix, of the flag in messages.
    """
    spec, flag = getattr(args, flag), f"--{prefix}{flag}"
    name, _, part = spec.partition(":")
    if name not in toy.TASKS:
        return files.read_rows(spec, flag), f"{flag} {spec}"
    with cli.reading(flag, spec):
        return toy.rows(stage, part or split, name), f"{flag} {spec}"


def read_prompts(args, flag, take=None, split="train", prefix=""):
    """The first `take` rows (None: all) of the data set that args.<flag> names, each with its `prompt`."""
    rows, what = read_rows(args, flag, "prompts", split, prefix)
    return with_prompts(rows[:take], args, what)


def as_text(tokenizer, prompt):
    """A prompt as a string to show. A message that does nothing but call tools shows its calls."""
    if is_messages(prompt):
        texts = [m["content"] or (json.dumps(m["tool_calls"]) if "tool_calls" in m else "") for m in prompt]
        pairs = zip(prompt, texts, strict=True)
        return "\n".join(f"{m['role']}: {text}" for m, text in pairs) if len(prompt) > 1 else texts[0]
    return (
        prompt if isinstance(prompt, str) else models.decode_all(tokenizer, [tokenization.encode(tokenizer, prompt)])[0]
    )


def load_prompts(args, tokenizer, room):
    """(Prompts of --dataset, Prompts of --eval_dataset or none). room: the most tokens that a prompt may have."""
    if getattr(args, "on_policy_share", 1) < 1:  # GKD's other updates take the data set's completions.
        rows, context = read_demonstrations(args, "dataset"), room + args.response_length
        prompts = encode_demonstrations(
            rows, f"--dataset {args.dataset}", tokenizer, context, args, num_sampled=args.response_length
        )
    else:
        prompts = to_prompts(args, tokenizer, read_prompts(args, "dataset", args.take), "dataset", room)
    if not args.eval_dataset:
        return prompts, Prompts()
    return prompts, to_prompts(args, tokenizer, read_prompts(args, "eval_dataset"), "eval_dataset", room)


def to_prompts(args, tokenizer, rows, flag, room):
    """Prompts of the rows that read_prompts has returned for args.<flag>. room: the most tokens of a prompt."""
    what, R = f"--{flag} {getattr(args, flag)}", args.response_length
    return encode(rows, [[] for _ in rows], what, tokenizer, room + R, args, R)


def completions(rows, length, device):
    """The completions of M rows as responses [M, length] and their mask, cut where they are longer."""
    filler = [0] * length
    responses = [[*row.completion, *filler][:length] for row in rows]
    mask = [[i < len(row.completion) for i in range(length)] for row in rows]
    return torch.tensor(responses, device=device), torch.tensor(mask, device=device)


def my_share(num, accelerator):
    """This process's numbers of 0 .. num - 1, as int64 [ceil(num / processes)].

    All processes get as many. Numbers from `num` on are filler, which stands at the end of what is gathered.
    """
    world, device = accelerator.num_processes, accelerator.device
    return torch.arange(num + -num % world, device=device).chunk(world)[accelerator.process_index]


# ---- demonstrations, the rows of SFT: a prompt and a completion -----------------------------------------------------
def read_demonstrations(args, flag):
    """Rows with `prompt` and `completion` of the data set that args.<flag> names, [] where it names none.

    Where rows have only a `text`, this is the completion of an empty prompt. --take applies to --dataset alone.
    """
    if getattr(args, flag) is None:
        return []
    rows, what = read_rows(args, flag, "sft")
    rows = rows[: args.take if flag == "dataset" else None]
    others = "prompt", "completion", "instruction", *CONVERSATIONS
    if args.prompt_template is None and "text" in rows[0] and all(rows[0].get(name) is None for name in others):
        rows = [row | {"prompt": "", "completion": row.get("text")} for row in rows]
    return with_completions(with_prompts(rows, args, what), args, what)


def encode_demonstrations(rows, what, *settings, **more):
    """`encode` for rows with a `completion`."""
    return encode(rows, [[row["completion"]] for row in rows], what, *settings, **more)
