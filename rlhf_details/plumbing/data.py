"""
Rows of any form become prompts and completions, and go to the updates and the processes.

A prompt is a string, a list of messages or a list of token ids. A completion is of the same kind as its prompt.
"""

import contextlib
import itertools
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


# ---- the forms of rows: what their columns hold -> prompts -----------------------------------------------------------
def with_prompts(rows, args, what):
    """The rows, each with its `prompt`: the filled --prompt_template, or what the first column of FORMS says."""
    columns, result = set().union(*rows), []
    for number, row in enumerate(rows, 1):
        where = f"{what}: row {number}"
        name = column_of(row, *FORMS)
        if args.prompt_template is not None:
            prompt = fill(args.prompt_template, row, columns, where, "--prompt_template")
            row = row | {"prompt": before_answer(prompt, where) if is_messages(prompt) else prompt}
        elif name is None:
            hint = "--prompt_template names others"
            cli.fail(f"{where} has no column 'prompt' or 'messages' (it has {sorted(row)}); {hint}")
        else:
            row = FORMS[name](row, name, where)
        result.append(row)
    return result


def of_column(row, name, where):
    """A column that is the prompt: text, messages, or token ids, which N+ fills up."""
    return row | {"prompt": value_of(row, name, where)}


def of_conversation(row, name, where):
    """Messages, of which the prompt is all up to the last answer."""
    return row | {"prompt": before_answer(value_of(row, name, where), f"{where}, column {name!r}")}


def of_instruction(row, name, where):
    """Alpaca's columns `instruction` and `input`, one question of a chat; a base model needs --prompt_template."""
    question = "\n\n".join(str(row[x]) for x in (name, "input") if row.get(x))
    return row | {"prompt": [{"role": "user", "content": question}]}


def of_pair(row, name, where):
    """`chosen` and `rejected`, whose prompt is what both begin with: the same messages, or the same words of a text."""
    chosen, rejected = (value_of(row, x, where) for x in (name, "rejected"))
    n = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str):
        n = max((m.start() for m in re.finditer(r"\s", chosen[:n])), default=0)  # The space belongs to the answer.
    if is_messages(chosen):
        n = max((i + 1 for i in range(n) if chosen[i]["role"] != "assistant"), default=0)
    if not n or n in (len(chosen), len(rejected)):
        words = "has no column 'prompt', and `chosen` and `rejected` are not one prompt with two answers"
        cli.fail(f"{where} {words}; --prompt_template names others")
    return row | {"prompt": chosen[:n], "chosen": chosen[n:], "rejected": rejected[n:]}


CONVERSATIONS = "messages", "conversations"
# {column: the function of (row, column, where it stands) that gives a row its prompt}. The first column counts.
FORMS = {"prompt": of_column} | dict.fromkeys(CONVERSATIONS, of_conversation)
FORMS |= {"query_token": of_column, "instruction": of_instruction, "chosen": of_pair}
COMPLETIONS = "completion", *CONVERSATIONS, "output", "reference_response_token"


# ---- completions -----------------------------------------------------------------------------------------------------
def with_completions(rows, args, what):
    """The rows of `with_prompts`, each with its `completion`: the filled --completion_template, or what the first
    column of COMPLETIONS says after the prompt.
    """
    template, columns, result = getattr(args, "completion_template", None), set().union(*rows), []
    for number, row in enumerate(rows, 1):
        where, name = f"{what}: row {number}", column_of(row, *COMPLETIONS)
        if template is not None:
            answer = fill(template, row, columns, where, "--completion_template")
        elif name is None:
            hint = "; --completion_template names another" * hasattr(args, "completion_template")
            cli.fail(f"{where} has no column 'completion' (it has {sorted(row)}){hint}")
        else:
            answer, where = value_of(row, name, where), f"{where}, column {name!r}"
        result.append(row | {"completion": after(row["prompt"], answer, where)})
    return result


def after(prompt, answer, where):
    """What an answer says after its prompt, of the prompt's kind. Messages may say the prompt before the answer."""
    is_text = isinstance(prompt, str)
    if is_messages(prompt) and isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    if is_messages(answer) and (is_text or is_messages(prompt)):
        asked = [{"role": "user", "content": prompt}] if is_text else prompt
        rest = answer[len(asked) :] if answer[: len(asked)] == asked else answer
        if rest and rest[0]["role"] == "assistant" and not (is_text and len(rest) > 1):
            return rest[0]["content"] if is_text else rest
    elif is_text == isinstance(answer, str) and is_messages(answer) == is_messages(prompt):
        return answer
    words = f"{reprlib.repr(answer)} does not go on from the prompt, {reprlib.repr(prompt)}, with an answer of its kind"
    cli.fail(f'{where}: {words}; --prompt_template "{{messages}}" takes both from the messages')


# ---- what a column holds ---------------------------------------------------------------------------------------------
ROLES = {"human": "user", "prompter": "user", "observation": "tool"}  # ShareGPT's names, and those of its kin
ROLES |= dict.fromkeys(("gpt", "function_call", "chatgpt", "bot", "model"), "assistant")
AS_JSON = "tool_calls", "arguments", "tools", "documents"  # Many data sets hold them as JSON in a string.
# The two characters \n are a line break, since shells pass one so. But LaTeX has commands that begin like it.
LINE_BREAK = re.compile(r"\\n(?!(abla|e|eq|eg|u|ot|otin|i|leq|geq|cong|onumber|ewline|earrow|warrow)(?![A-Za-z]))")


def column_of(row, *names):
    """The first of the names that is a column, or None. One that is null, as in a joined data set, comes last."""
    return min((name for name in names if name in row), key=lambda name: row[name] is None, default=None)


def value_of(row, name, where):
    """What a column holds: text, token ids or messages. A text in the column `system` begins a conversation."""
    value, system = row.get(name), row.get("system")
    if name not in CONVERSATIONS and isinstance(value, str):
        return value
    if name not in CONVERSATIONS and isinstance(value, list) and all(type(i) is int and i >= 0 for i in value):
        return Padded(value) if name.endswith("_token") else value
    messages = as_messages(value, f"{where}, column {name!r}")
    if isinstance(system, str) and system and messages[0]["role"] == "user":
        return [{"role": "system", "content": system}, *messages]
    return messages


def as_messages(value, where):
    """Messages [{"role", "content", ..}] of a list in this form, or in ShareGPT's: {"from": "human", "value": ..}.

    Content in parts is joined, the null beside a call of a tool becomes "", and keys that are null disappear. Exits
    with an error if it is no conversation.
    """
    value = [value] if isinstance(value, dict) and value else value
    if not is_messages(value):
        state = f"{reprlib.repr(value)} is no list of messages" if value else "is empty"
        cli.fail(f"{where}: {state}; a message is an object with a `role` and a `content`")
    found = []
    for message in plain(value):
        role, calls = message.get("role", message.get("from")), message.get("tool_calls")
        content = message.get("content", message.get("value", "" if calls else None))
        if is_messages(content) and all(isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(role, str) or not isinstance(content, str) or (calls and not is_messages(calls)):
            rule = "each message must have a string `role` and a `content`, a string or a list of texts"
            cli.fail(f"{where}: {rule}; `tool_calls` are a list of objects: {reprlib.repr(message)}")
        rest = {name: x for name, x in message.items() if name not in ("from", "value") and x != []}
        found.append(rest | {"role": ROLES.get(role.lower(), role.lower()), "content": content})
    return found


def plain(value, name=""):
    """A value without nulls, with which Parquet fills objects up. What AS_JSON names is read where it is a string."""
    if isinstance(value, str) and name in AS_JSON:
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict):
        return {key: plain(x, key) for key, x in value.items() if x is not None}
    return [plain(x) for x in value] if isinstance(value, list) else value


def before_answer(messages, where):
    """Messages up to the last answer, all of them where they end with a question."""
    if messages[-1]["role"] != "assistant":
        return messages
    return messages[:-1] or cli.fail(f"{where}: holds an answer and nothing before it")


def fill(template, row, columns, where, flag):
    """A template with the row's columns in its {places}. All other braces mean themselves. None becomes "".

    A template that is one place returns messages as they are.
    Args: columns, the names of all rows' columns; flag, that of the template.
    """
    places = [name for name in re.findall(r"\{([^{}]*)\}", template) if name in columns]
    if not places:
        cli.fail(f"{flag} {template!r}: names no column in braces ({where} has {sorted(row)})")
    if missing := [name for name in places if name not in row]:
        cli.fail(f"{flag} {template!r}: {where} has no column {missing[0]!r} (it has {sorted(row)})")
    if template == f"{{{places[0]}}}" and is_messages(row[places[0]]):
        return value_of(row, places[0], where)
    texts = {name: "" if row[name] is None else str(row[name]) for name in places}
    return re.sub(r"\{([^{}]*)\}", lambda m: texts.get(m[1], m[0]), LINE_BREAK.sub("\n", template))


def options_of(row, args):
    """What the chat template is given beside a row's messages: the options of chat.render."""
    columns = plain({name: row.get(name) for name in ("tools", "documents")})
    found = {"date": args.template_date} | json.loads(args.chat_template_kwargs)
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
    said: list  # the answers to train on: the completion, or K candidates
    answers: list  # their token ids

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


def encode(rows, said, what, tokenizer, context, args, num_sampled=0):
    """Prompts of the rows. Exits with an error if no model can read one. What teaches nothing is counted.

    Args: said, a list of completions for each row, [] where there is nothing to train on; what, the rows' name in
    messages; context, the most tokens of a row; args, whose limits drop longer rows; num_sampled, how many tokens must
    have room behind each prompt.
    """
    found = Prompts()
    for number, (row, own) in enumerate(zip(cli.progress(f"tokenising {what}", rows), said, strict=True), 1):
        prompt, options, where = row["prompt"], options_of(row, args), f"{what}: row {number}"
        pairs = [tokenization.encode(tokenizer, prompt, answer, options, where) for answer in own]
        ids = pairs[0][0] if pairs else tokenization.encode(tokenizer, prompt, None, options, where)
        if not ids and not own:
            cli.fail(f"{what}: the prompt of row {number} is empty")
        answers = [answer for _, answer in pairs]
        found.append(Prompt(ids, as_text(tokenizer, prompt), row, number, what, options, own, answers))
    if not found:
        return found
    nine_tenths = 0.9 * args.response_length if getattr(args, "filter_length", False) else math.inf
    limit, max_length = min(args.max_prompt_length or math.inf, nine_tenths), getattr(args, "max_length", None)
    found = tokenization.short_enough(found, prompt_length, limit, "prompt")
    found = tokenization.short_enough(found, Prompt.length, max_length or math.inf, "row")
    if prompts := [row for row in found if num_sampled and row.columns["prompt"] != ""]:
        limit = f"which --response_length {num_sampled} leaves for a prompt"
        tokenization.check_room(prompts, prompt_length, context - num_sampled, limit, "--max_prompt_length")
    tokenization.check_room(found, Prompt.length, context, "the model's context", "--max_length")
    if any(said):
        tokenization.warn_of_left_out(tokenizer, found)
        tokenization.warn_of_empty(tokenizer, found)
    return Prompts(found)


def read_rows(args, flag, stage, split="train", prefix=""):
    """(The rows of the data set that args.<flag> names, its name in messages). --take is of --dataset alone.

    Args: stage and split, of toy.rows; prefix, of the flag in messages.
    """
    spec, flag_name = getattr(args, flag), f"--{prefix}{flag}"
    name, _, part = spec.partition(":")
    with cli.reading(flag_name, spec) if name in toy.TASKS else contextlib.nullcontext():
        rows = toy.rows(stage, part or split, name) if name in toy.TASKS else files.read_rows(spec, flag_name)
    return rows[: getattr(args, "take", None) if flag == "dataset" else None], f"{flag_name} {spec}"


def read_prompts(args, flag, split="train", prefix=""):
    """The rows of the data set that args.<flag> names, each with its `prompt`."""
    rows, what = read_rows(args, flag, "prompts", split, prefix)
    return with_prompts(rows, args, what)


def as_text(tokenizer, prompt):
    """A prompt as a string to show. A message that does nothing but call tools shows its calls."""
    if isinstance(prompt, str):
        return prompt
    if not is_messages(prompt):
        return models.decode_all(tokenizer, [tokenization.encode(tokenizer, prompt)])[0]
    texts = [m["content"] or (json.dumps(m["tool_calls"]) if "tool_calls" in m else "") for m in prompt]
    pairs = zip(prompt, texts, strict=True)
    return "\n".join(f"{m['role']}: {text}" for m, text in pairs) if len(prompt) > 1 else texts[0]


def load_prompts(args, tokenizer, room):
    """(Prompts of --dataset, Prompts of --eval_dataset or none). room: the most tokens that a prompt may have."""
    flags = "dataset", "eval_dataset"
    rows = [read_prompts(args, flag) if getattr(args, flag) else [] for flag in flags]
    prompts, held_out = (to_prompts(args, tokenizer, *pair, room) for pair in zip(rows, flags, strict=True))
    if getattr(args, "on_policy_share", 1) < 1:  # GKD's other updates take the data set's completions.
        R, what = args.response_length, f"--dataset {args.dataset}"
        rows = read_demonstrations(args, "dataset")
        prompts = encode_demonstrations(rows, what, tokenizer, room + R, args, num_sampled=R)
    return prompts, held_out


def to_prompts(args, tokenizer, rows, flag, room):
    """Prompts of the rows that read_prompts has returned for args.<flag>. room: the most tokens of a prompt."""
    what, R = f"--{flag} {getattr(args, flag)}", args.response_length
    if room <= 0:
        cli.fail(f"--response_length {R}: leaves no room for a prompt in the models' context of {room + R}")
    return encode(rows, [[]] * len(rows), what, tokenizer, room + R, args, R)


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

    Where rows have only a `text`, this is the completion of an empty prompt.
    """
    if getattr(args, flag) is None:
        return []
    rows, what = read_rows(args, flag, "sft")
    if args.prompt_template is None and column_of(rows[0], *FORMS, "text") == "text":
        rows = [row | {"prompt": "", "completion": row.get("text")} for row in rows]
    return with_completions(with_prompts(rows, args, what), args, what)


def encode_demonstrations(rows, what, *settings, **more):
    """`encode` for rows with a `completion`."""
    return encode(rows, [[row["completion"]] for row in rows], what, *settings, **more)
