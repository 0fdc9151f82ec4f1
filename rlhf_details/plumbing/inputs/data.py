"""
Rows of any form become prompts and completions, and go to the updates and the processes.

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
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat, data_files, stop_tokens, token_ids
from rlhf_details.plumbing.inputs.chat import RowError, is_messages


# ---- data sets -> rows with `prompt`, and for training with `completion` ---------------------------------------------
def read(args, flag, stage, split="train", with_answers=False):
    """The rows of the data set that args.<flag> names, each with its `prompt`, and with_answers also its `completion`;
    [] where it names none.
    """
    if getattr(args, flag) is None:
        return []
    return complete(read_rows(args, flag, stage, split), args, flag, completion_of if with_answers else None)


def complete(rows, args, flag, answers_of=None):
    """The rows, each with its `prompt`, and with what answers_of(row, args, columns of all rows) adds to this."""
    columns = set().union(*rows)

    def whole(row):
        row = with_prompt(row, args, columns)
        return row | answers_of(row, args, columns) if answers_of else row

    return of_each(whole, rows, args, flag)


def read_rows(args, flag, stage, split="train"):
    """The rows of a data set as they are. --take is of --dataset alone. stage, split: of toy.rows."""
    spec = getattr(args, flag)
    data_files.check_dataset(f"--{flag}", spec)
    name, _, part = spec.partition(":")
    rows = toy.rows(stage, part or split, name) if name in toy.TASKS else data_files.read_rows(spec, f"--{flag}")
    return rows[: getattr(args, "take", None) if flag == "dataset" else None]


def of_each(function, rows, args, flag):
    """[function(row), ..]. A row that is wrong ends the program with its number."""
    found = []
    what = f"--{flag} {getattr(args, flag)}"
    for number, row in enumerate(console.progress(what, rows), 1):
        try:
            found.append(function(row))
        except RowError as e:
            console.fail(f"{what}: row {number}: {e}")
    return found


def with_prompt(row, args, columns):
    """A row with its `prompt`: the filled --prompt_template, or what the first column of FORMS says.

    Args: columns, the names of all rows' columns.
    """
    name = column_of(row, *FORMS)
    if args.prompt_template is not None:
        prompt = fill("--prompt_template", args.prompt_template, row, columns)
        return row | {"prompt": before_answer(prompt) if is_messages(prompt) else prompt}
    if name is None:
        raise RowError(f"has no column 'prompt' or 'messages' (it has {sorted(row)}); --prompt_template names others")
    return row | FORMS[name](row, name)


def completion_of(row, args, columns):
    """The `completion` of a row with its `prompt`: the filled --completion_template, or what the first column of
    COMPLETIONS says after the prompt.
    """
    name = column_of(row, *COMPLETIONS)
    template = getattr(args, "completion_template", None)
    if template is not None:
        answer = fill("--completion_template", template, row, columns)
    elif name is None:
        hint = "; --completion_template names another" * hasattr(args, "completion_template")
        raise RowError(f"has no column 'completion' (it has {sorted(row)}){hint}")
    else:
        answer = value_of(row, name)
    return {"completion": after(row["prompt"], answer)}


# ---- the forms of rows: functions of (row, name of a column), which return the columns that the row says -------------
def of_column(row, name):
    """A column that is the prompt: text, messages, or token ids, which N+ fills up."""
    return {"prompt": value_of(row, name)}


def of_conversation(row, name):
    """Messages, of which the prompt is all up to the last answer."""
    return {"prompt": before_answer(value_of(row, name))}


def of_instruction(row, name):
    """Alpaca's columns `instruction` and `input`, one question of a chat; a base model needs --prompt_template."""
    question = "\n\n".join(str(row[x]) for x in (name, "input") if row.get(x))
    return {"prompt": [{"role": "user", "content": question}]}


def of_pair(row, name):
    """`chosen` and `rejected`, whose prompt is what both begin with: the same messages, or the same words of a text."""
    chosen, rejected = (value_of(row, x) for x in (name, "rejected"))
    n = chat.shared_length(chosen, rejected)
    if isinstance(chosen, str):
        n = max((m.start() for m in re.finditer(r"\s", chosen[:n])), default=0)  # The space belongs to the answer.
    if is_messages(chosen):
        n = max((i + 1 for i in range(n) if chosen[i]["role"] != "assistant"), default=0)
    if not n or n in (len(chosen), len(rejected)):
        words = "has no column 'prompt', and `chosen` and `rejected` are not one prompt with two answers"
        raise RowError(f"{words}; --prompt_template names others")
    return {"prompt": chosen[:n], "chosen": chosen[n:], "rejected": rejected[n:]}


def of_text(row, name):
    """A text alone, which is the completion of an empty prompt."""
    return {"prompt": "", "completion": row[name]}


CONVERSATIONS = "messages", "conversations"
BESIDE = *CONVERSATIONS, "chosen"  # what may hold messages where the prompt is a text
FORMS = {  # The first of the columns counts.
    "prompt": of_column,
    "messages": of_conversation,
    "conversations": of_conversation,
    "query_token": of_column,
    "query": of_column,
    "instruction": of_instruction,
    "chosen": of_pair,
    "text": of_text,
}
COMPLETIONS = "completion", *CONVERSATIONS, "output", "reference_response_token", "chosen", "chosen_token"


def before_answer(messages):
    """Messages up to the last answer, all of them where they end with a question."""
    prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not prompt:
        raise RowError("holds an answer and nothing before it")
    return prompt


def after(prompt, answer):
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
    raise RowError(f'{words}; --prompt_template "{{messages}}" takes both from the messages')


# ---- what a column holds ---------------------------------------------------------------------------------------------
ROLES = {"human": "user", "prompter": "user", "observation": "tool"}  # ShareGPT's names, and those of its kin
ROLES |= dict.fromkeys(("gpt", "function_call", "chatgpt", "bot", "model"), "assistant")
AS_JSON = "tool_calls", "arguments", "tools", "documents"  # Many data sets hold them as JSON in a string.


def column_of(row, *names):
    """The first of the names that is a column, or None. One that is null, as in a joined data set, comes last."""
    return min((name for name in names if name in row), key=lambda name: row[name] is None, default=None)


def value_of(row, name):
    """What a column holds: text, token ids or messages. A text in the column `system` begins a conversation."""
    value = row.get(name)
    system = row.get("system")
    is_ids = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
    if name not in CONVERSATIONS and (isinstance(value, str) or is_ids):
        return value
    messages = as_messages(value, name)
    if isinstance(system, str) and system and messages[0]["role"] == "user":
        return [{"role": "system", "content": system}, *messages]
    return messages


def as_messages(value, name):
    """Messages [{"role", "content", ..}] of a list in this form, or in ShareGPT's: {"from": "human", "value": ..}.

    Content in parts is joined, the null beside a call of a tool becomes "", and keys that are null disappear.
    Args: name, of the column.
    """
    value = [value] if isinstance(value, dict) and value else value
    if not is_messages(value):
        state = f"{reprlib.repr(value)} is no list of messages" if value else "is empty"
        raise RowError(f"column {name!r}: {state}; a message is an object with a `role` and a `content`")
    found = []
    for message in plain(value):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value", "" if message.get("tool_calls") else None))
        if is_messages(content) and all(isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            rule = "each message must have a string `role` and a `content`, a string or a list of texts"
            raise RowError(f"column {name!r}: {rule}: {reprlib.repr(message)}")
        rest = {key: x for key, x in message.items() if key not in ("from", "value") and x != []}
        if role == "function_call":  # ShareGPT's, a call or a list of them as JSON
            content, rest["tool_calls"] = "", calls_of(content)
        found.append(rest | {"role": ROLES.get(role.lower(), role.lower()), "content": content})
    return found


def calls_of(text):
    """The `tool_calls` of a message of ShareGPT's role function_call."""
    calls = plain(text, "tool_calls")
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise RowError(f"a function_call is no JSON of a `name` and `arguments`: {reprlib.repr(text)}")
    return [{"type": "function", "function": call} for call in calls]


def plain(value, name=""):
    """A value without nulls, with which Parquet fills objects up. What AS_JSON names is read where it is a string."""
    if isinstance(value, str) and name in AS_JSON:
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict):
        return {key: plain(x, key) for key, x in value.items() if x is not None}
    return [plain(x) for x in value] if isinstance(value, list) else value


def fill(flag, template, row, columns):
    """A template with the row's columns in its {places}. All other braces mean themselves. None becomes "".

    The two characters \\n are a line break, since shells pass one so. A template that is one place returns messages as
    they are. Args: columns, the names of all rows' columns.
    """
    places = [name for name in re.findall(r"\{([^{}]*)\}", template) if name in columns]
    if not places:
        raise RowError(f"{flag} {template!r}: names no column in braces (the row has {sorted(row)})")
    if template == f"{{{places[0]}}}" and is_messages(row.get(places[0])):
        return value_of(row, places[0])
    texts = {name: "" if row.get(name) is None else str(row[name]) for name in places}
    return re.sub(r"\{([^{}]*)\}", lambda m: texts.get(m[1], m[0]), template.replace("\\n", "\n"))


def options_of(row, args):
    """What the chat template is given beside a row's messages: the options of chat.render."""
    columns = plain({name: row.get(name) for name in ("tools", "documents")})
    found = {"date": args.template_date} | json.loads(args.chat_template_kwargs)
    return found | {name: value for name, value in columns.items() if value and isinstance(value, list)}


# ---- rows -> token ids -----------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Prompt:
    """A prompt of a data set, with its answers where the rows are trained on."""

    ids: list  # token ids
    text: str  # to show
    columns: dict  # the whole row
    number: int  # of the row in the data set, from 1
    source: str  # the flag and the data set, for error messages
    options: dict  # of chat.render
    answers: list  # token ids of the answers to train on: the completion, or K candidates
    turns: list = ()  # where all answers of a chat are trained on, which ids of prompt and completion are theirs, bools
    teacher_ids: list = ()  # token ids of the prompt that a teacher reads

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
    def is_own(self):
        """Which ids of prompt and completion the policy is to say, bools."""
        return self.turns or [False] * len(self.ids) + [True] * len(self.completion)

    @property
    def candidates(self):
        """K lists of token ids, each of the prompt and an answer."""
        return [self.ids + answer for answer in self.answers]

    def identity(self):
        """What a run that is resumed must find again."""
        return self.ids, self.columns

    @property
    def best(self):
        """Which candidate a human found the best, 0 .. K - 1."""
        return self.columns["best"]


class Prompts(list):
    """The prompts of a data set."""

    def of_update(self, update, count, seed):
        """The `count` prompts of an update (from 1): pass after pass over the data, each in an order of its own."""
        return [self[i] for i in utils.rows_of_update(update, count, len(self), seed)]


def load_prompts(args, tokenizer, room):
    """(Prompts of --dataset, Prompts of --eval_dataset or none). room: the most tokens that a prompt may have."""
    # GKD's other updates take the data set's completions.
    stage, column = ("sft", "completion") if getattr(args, "on_policy_share", 1) < 1 else ("prompts", None)
    rows = read(args, "dataset", stage, with_answers=bool(column)), read(args, "eval_dataset", "prompts")
    prompts = to_prompts(args, "dataset", rows[0], tokenizer, room, column)
    return prompts, to_prompts(args, "eval_dataset", rows[1], tokenizer, room)


def to_prompts(args, flag, rows, tokenizer, room, column=None):
    """`encode` for prompts that are sampled from. room: the most tokens that a prompt may have."""
    R = args.response_length
    if room <= 0:
        console.fail(f"--response_length {R}: leaves no room for a prompt in the models' context of {room + R}")
    prompts = encode(args, flag, rows, tokenizer, room + R, column, R)
    for row in prompts:
        if [] in (row.ids, *row.answers):  # An empty answer has been given as token ids, since a text ends with EOS.
            console.fail(f"{row.source}: the prompt or the completion of row {row.number} is empty")
    return prompts


def encode(args, flag, rows, tokenizer, context, column=None, num_sampled=0):
    """Prompts of the rows of args.<flag>. Exits with an error if no model can read one.

    Args: context, the most tokens of a row; column, what is trained on, "completion", "candidates" or None;
    num_sampled, how many tokens must have room behind each prompt.
    """

    template, columns = getattr(args, "teacher_prompt_template", None), set().union(*rows)
    trains_all = column == "completion" and getattr(args, "train_on", "last") == "all"
    marked_otherwise = []  # one entry for each row whose template marks other tokens than the answers

    def to_prompt(row):
        options, prompt, turns = options_of(row, args), row["prompt"], []
        if trains_all and is_messages(prompt) and prompt[-1]["role"] != "assistant":
            messages = prompt + row["completion"]
            row = row | {"prompt": messages[:-1], "completion": messages[-1:]}
            ids, answer, turns = token_ids.encode_turns(tokenizer, messages, options)
            answers, (whole, marks) = [answer], token_ids.marked(tokenizer, messages, options)
            if whole[: len(turns)] == ids + answer:
                marked_otherwise.extend([row] * (marks[: len(turns)] != turns))
                turns = marks[: len(turns)]
        else:
            pairs = [token_ids.encode(tokenizer, prompt, answer, options) for answer in said(row, column)]
            ids = pairs[0][0] if pairs else token_ids.encode(tokenizer, prompt, None, options)
            answers = [answer for _, answer in pairs]
        text, source = as_text(tokenizer, row["prompt"]), f"--{flag} {getattr(args, flag)}"
        theirs = ids if template is None else read_by_teacher(tokenizer, template, row, columns, options)
        return Prompt(ids, text, row, 0, source, options, answers, turns, theirs)

    found = of_each(to_prompt, rows, args, flag)
    for number, row in enumerate(found, 1):
        row.number = number
    if not found:
        return Prompts()
    nine_tenths = 0.9 * args.response_length if getattr(args, "filter_length", False) else math.inf
    found = fitting(found, "prompt", min(args.max_prompt_length or math.inf, nine_tenths))
    found = fitting(found, "row", getattr(args, "max_length", None) or math.inf)
    if prompts := [row for row in found if num_sampled and row.columns["prompt"] != ""]:
        problem = f"--response_length {num_sampled} leaves no more for a prompt; --max_prompt_length drops such rows"
        fitting(prompts, "prompt", context - num_sampled, problem)
        fitting(prompts, "teacher's prompt", context - num_sampled, f"--response_length {num_sampled} leaves no more")
    hint = "; --max_length drops such rows" * hasattr(args, "max_length")
    if getattr(args, "on_policy_share", 1) == 1:  # Otherwise the completions are cut at --response_length.
        fitting(found, "row", context, f"the model's context has no more{hint}")

    if template is not None:
        read = token_ids.decode_all(tokenizer, [found[0].teacher_ids])[0]
        console.say(f"{found[0].source}: what the teacher reads ends, in the first row, with {read[-120:]!r}")
    if marked_otherwise:
        what = f"in {len(marked_otherwise)} rows the generation marks of the chat template train other tokens than"
        console.say(f"--{flag}: {what} the answers with the tokens that end them; its marks are used")
    if tokenizer.chat_template and args.prompt_template is None:
        texts = [row for row in found if isinstance(row.columns["prompt"], str)]
        if bare := [row for row in texts if any(is_messages(row.columns.get(name)) for name in BESIDE)]:
            of_first = (name for name in BESIDE if is_messages(x := bare[0].columns.get(name)) and len(x) > 1)
            whole = next(of_first, None)
            hint = f'--prompt_template "{{{whole}}}" reads the messages' if whole else "give the prompts as messages"
            what = counted(bare, "prompts are texts with messages beside them")
            console.say(f"{what}; texts are read without the chat template; {hint}")
    chats = [row for row in found if is_messages(row.columns["prompt"])]
    calling = [row for row in chats if any(m.get("tool_calls") for m in row.columns["prompt"])]
    templates = [tokenizer.get_chat_template(tools=row.options.get("tools")) for row in calling]
    if calling := [row for row, x in zip(calling, templates, strict=True) if not chat.writes_calls(x)]:
        console.say(f"{counted(calling, 'rows call tools')}; the chat template writes no calls, so Qwen's form is used")
    control = stop_tokens.control_tokens(tokenizer)
    tokens_in = {row: [x for text in texts_of(row, column) for x in control if x in text] for row in found}
    if held := [row for row, tokens in tokens_in.items() if tokens]:
        what = f"{counted(held, 'rows hold the text of a control token')} with {tokens_in[held[0]][0]!r}"
        console.say(f"warning: {what}. It is read as the token itself, which ends or begins a turn")
    if cut := [row for row in chats if any(is_cut(tokenizer, row, answer) for answer in said(row.columns, column))]:
        what = counted(cut, "rows whose answer the chat template does not wholly write")
        console.say(f"warning: {what}, of which is trained: {reprlib.repr(tokenizer.decode(cut[0].answers[0]))}")
    return Prompts(found)


def read_by_teacher(tokenizer, template, row, columns, options):
    """Token ids of what a teacher reads in the place of a row's prompt: the filled --teacher_prompt_template."""
    flag, prompt = "--teacher_prompt_template", row["prompt"]
    is_text = isinstance(prompt, str)
    if not is_text and not is_messages(prompt):
        raise RowError(f"{flag}: the prompt is token ids, beside which no text can stand")
    said = prompt if is_text else prompt[-1]["content"]
    read = fill(flag, template, row | {"prompt": said}, columns | {"prompt"})
    if not is_text and isinstance(read, str):
        read = [*prompt[:-1], prompt[-1] | {"content": read}]
    return token_ids.encode(tokenizer, read, None, options)


def counted(rows, what):
    """Words that say how many rows are like this, and which is the first."""
    return f"{rows[0].source}: {len(rows)} {what}, the first one is row {rows[0].number}"


def texts_of(row, column):
    """What a row's messages say, or its answers where they are texts, which may end with a control token."""
    prompt = row.columns["prompt"]
    answers = said(row.columns, column)
    if is_messages(prompt):
        return [message["content"] for turns in (prompt, *answers) for message in turns]
    return [answer.rstrip()[:-1] for answer in answers if isinstance(answer, str) and prompt]


def said(row, column):
    """The answers of a row that are trained on, as texts, messages or token ids."""
    if column is None:
        return []
    return row[column] if column == "candidates" else [row[column]]


def as_text(tokenizer, prompt):
    """A prompt as a string to show. A message that does nothing but call tools shows its calls."""
    if isinstance(prompt, str):
        return prompt
    if not is_messages(prompt):
        return token_ids.decode_all(tokenizer, [token_ids.encode(tokenizer, prompt)])[0]
    texts = [
        m["content"] or (json.dumps(m["tool_calls"], ensure_ascii=False) if "tool_calls" in m else "") for m in prompt
    ]
    pairs = zip(prompt, texts, strict=True)
    return "\n".join(f"{m['role']}: {text}" for m, text in pairs) if len(prompt) > 1 else texts[0]


def fitting(rows, part, limit, problem=""):
    """The rows of which a part, the "prompt", the "teacher's prompt" or the "row" with its longest answer, has at most
    `limit` tokens.

    It says how many have more. Where there is a `problem`, which says what the limit is, they end the program.
    """

    def length(row):
        ids = row.teacher_ids if part == "teacher's prompt" else row.ids
        return len(ids) + max(map(len, row.answers if part == "row" else ()), default=0)

    if long := [row for row in rows if length(row) > limit]:
        words = counted(long, f"of {len(rows)} {part}s have more than {limit:g} tokens") + f" with {length(long[0])}"
        if problem or len(long) == len(rows):
            console.fail(f"{words}: {problem or 'none is left'}")
        console.say(f"{words}: dropped")
    return [row for row in rows if length(row) <= limit]


def is_cut(tokenizer, row, answer):
    """Whether the chat template leaves out some of what an answer in messages says, such as what stands in <think>."""
    text = token_ids.render_pair(tokenizer, row.columns["prompt"], answer, row.options)[1]
    return any(m["role"] == "assistant" and m["content"].strip() not in text for m in answer)


# ---- updates and processes -------------------------------------------------------------------------------------------
def completions(rows, length, device):
    """The completions of M rows as responses [M, length] and their mask, cut where they are longer."""
    padded = utils.left_pad([row.completion[:length][::-1] for row in rows], device)
    return [torch.nn.functional.pad(x.flip(1), (0, length - x.size(1))) for x in padded]


def my_share(rows, accelerator):
    """(numbers, rows): this process's share of N rows, the numbers as int64 [ceil(N / processes)].

    All processes get as many. Numbers from N on are filler, which stands at the end of what is gathered: those rows are
    the first ones again.
    """
    N = len(rows)
    world = accelerator.num_processes
    device = accelerator.device
    numbers = torch.arange(N + -N % world, device=device).chunk(world)[accelerator.process_index]
    return numbers, [rows[i % N] for i in numbers.tolist()]
