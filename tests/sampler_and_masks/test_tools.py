"""Tools: what a chat template shows of them, how calls are read and answered, and SFT on chats with calls and results.

The policy is a stand-in, as in test_turns.py.
"""

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_templates import (
    CHATML,
    HERMES_3_TOOLS,
    LLAMA_3,
    MISTRAL_3,
    OF_LLAMA,
    OF_MISTRAL,
    OF_QWEN,
    QWEN_3,
    QWEN_25,
    bytes_and_words,
)
from helpers import ROOT, tiny_model
from test_turns import FLAGS, HEADS, play

from rlhf_details import evaluate, show_tokens, train_agent, train_sft
from rlhf_details.plumbing.inputs import data
from rlhf_details.plumbing.machine import environments, tools

HERE = f"{ROOT}/tests/environments.py"
TOOLS = FLAGS | dict(env_fn=None, tools=(f"{HERE}:add", f"{HERE}:double"), tool_timeout=5.0, overlap=False)
TOOLS |= dict(stop_token="eos", dataset="rows", max_prompt_length=None, response_length=600)
ADD, DOUBLE = (json.dumps({"name": n, "arguments": x}) for n, x in (("add", {"x": 2, "y": 3}), ("double", {"x": 4})))
HERMES = f"<tool_call>\n{DOUBLE}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>"
RESULTS = '{"twice": 8}', "5"
OF_QWEN_3 = (
    "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response>\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
)
OF_CHATML = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
CALLS = f'[TOOL_CALLS] [{DOUBLE[:-1]}, "id": "abcdefghi"}}, {ADD[:-1]}, "id": "jklmnopqr"}}]'
SYSTEM = {"role": "system", "content": "Call tools so: <tool_call>"}
# How transformers is told to read Mistral's calls, of which no parser is known without it.
OF_MISTRALS_CALLS = {"open_pattern": r"\[TOOL_CALLS\]\s*", "close_pattern": "</s>|$", "content": "json"}
OF_MISTRALS_CALLS |= {"transform_each": True}
OF_MISTRALS_CALLS["transform"] = {"id": "{id}", "function": {"name": "{name}", "arguments": "{arguments}"}}
RESPONSES = {"start_anchor": "[/INST]", "defaults": {"role": "assistant"}, "fields": {"tool_calls": OF_MISTRALS_CALLS}}
RESPONSES["fields"]["content"] = {"close": "</s>", "content": "text"}
# name: (template, its special tokens, the end of a turn, first messages, a turn that calls, what stands behind it)
TEMPLATES = {
    "chatml": (CHATML, OF_QWEN, "<|im_end|>", [SYSTEM], HERMES, OF_CHATML),
    "llama 3": (
        *(LLAMA_3, OF_LLAMA, "<|eot_id|>", [SYSTEM], HERMES),
        "".join(HEADS.format("tool") + "{}<|eot_id|>" for _ in RESULTS) + HEADS.format("assistant"),
    ),
    "qwen 2.5": (QWEN_25, OF_QWEN, "<|im_end|>", [], HERMES, OF_QWEN_3 + "<|im_start|>assistant\n"),
    "qwen 3": (QWEN_3, OF_QWEN, "<|im_end|>", [], HERMES, OF_QWEN_3 + "<|im_start|>assistant\n"),
    "mistral 0.3": (
        *(MISTRAL_3, OF_MISTRAL, "</s>", [], CALLS),
        '[TOOL_RESULTS] {{"content": {}, "call_id": "abcdefghi"}}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {{"content": {}, "call_id": "jklmnopqr"}}[/TOOL_RESULTS]',
    ),
    "hermes 3": (
        *({"default": CHATML, "tool_use": HERMES_3_TOOLS}, OF_QWEN, "<|im_end|>", [], HERMES),
        "\n<|im_start|>tool\n<tool_response>\n{}\n</tool_response>\n<tool_response>\n{}\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
}
# Of two templates, the one for tools writes the same as where there is no other.
TEMPLATES["mistral 0.3, two"] = ({"default": CHATML, "tool_use": MISTRAL_3}, *TEMPLATES["mistral 0.3"][1:])


def tokenizer_of(name):
    template, special, end, *_ = TEMPLATES[name]
    tokenizer = bytes_and_words(template, special, end)
    if name.startswith("mistral"):
        tokenizer.response_template = RESPONSES
    return tokenizer


def chats(tokenizer, messages, columns=None, **flags):
    """(args, Prompts) of one row, after the checks of a run with tools."""
    args = SimpleNamespace(**TOOLS | flags)
    environments.check(args)
    return args, data.encode(args, "dataset", [{"prompt": messages} | (columns or {})], tokenizer, 10_000)


def ask(tokenizer, turns, messages=(SYSTEM,), **flags):
    """(Prompt, Trajectories, said) of an episode in which the policy says `turns`, texts."""
    messages = [*messages, {"role": "user", "content": "hello?"}]
    args, rows = chats(tokenizer, messages, **flags)
    ids = [[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for text in turns]
    found, said, _ = play(tokenizer, rows, [ids], **vars(args))
    return rows[0], found, said[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_schemas_are_shown_calls_read_and_results_placed(name):
    """Two calls, of which the first is slow and awaited: results stand in the order of the calls."""
    _, _, end, first, calls, between = TEMPLATES[name]
    tokenizer = tokenizer_of(name)
    row, found, said = ask(tokenizer, [calls, "the answer"], first)
    shown = tokenizer.decode(row.ids)
    assert first or all(words in shown for words in ('"name": "add"', "Doubles a number", '"required": ["x", "y"]'))
    assert said == [calls, "\n".join(RESULTS), "the answer"] and found.ended.all()
    written = found.responses[0][found.response_mask[0] & ~found.action_mask[0]]
    assert tokenizer.decode(written) == between.format(*RESULTS)
    whole = f"{calls}{end}{between.format(*RESULTS)}the answer{end}"
    assert tokenizer.decode(found.responses[0][found.response_mask[0]]) == whole


@pytest.mark.parametrize(
    "call, said",
    [
        ("{no json", "error: Expecting property name"),
        ("[1]", "error: list indices"),
        ('{"name": "add"}', "error: KeyError: 'arguments'"),
        ('{"name": "divide", "arguments": {}}', "error: there is no tool 'divide'"),
        ('{"name": "add", "arguments": {"x": 1}}', "error: add() missing 1 required positional argument: 'y'"),
        ('{"name": "add", "arguments": {"x": 1, "z": 1}}', "error: add() got an unexpected keyword argument 'z'"),
        ('{"name": "add", "arguments": {"x": 1, "y": "2"}}', "error: unsupported operand type"),
        ('{"name": "fragile", "arguments": {"how": "box"}}', "error: KeyError: 'box'"),
        ('{"name": "fragile", "arguments": {"how": "exit"}}', "error: 3"),
        ('{"name": "fragile", "arguments": {"how": "hang"}}', "error: no result within 0.3 s"),
        ('{"name": "add", "arguments": {"x": 1, "y": 2}}', "3"),
        ('{"name": "double", "arguments": {"x": "Zürich 北京"}}', '{"twice": "Zürich 北京Zürich 北京"}'),
        ('{"name": "double", "arguments": {"x": "\\ud83d"}}', '{"twice": "??"}'),  # half a pair, no character
    ],
)
def test_a_call_that_goes_wrong_is_an_observation(call, said):
    """And so it is beside one that is right. A turn may also stop short of the closing tag."""
    flags = dict(tools=(f"{HERE}:add", f"{HERE}:double", f"{HERE}:fragile"), tool_timeout=0.3)
    texts = [f"I ask. <tool_call>{call}</tool_call><tool_call>{ADD}", "the answer"]
    _, found, (_, observed, last) = ask(tokenizer_of("chatml"), texts, **flags)
    assert observed.startswith(said) and observed.endswith("\n5") and last == "the answer" and found.ended.all()


@pytest.mark.parametrize(
    "name, flags, messages, words",
    [
        ("chatml", {}, [], "row 1: the chat template does not show tools; a system text must say"),
        ("llama 3", {}, [], "row 1: the chat template does not show tools; a system text must say"),
        ("mistral 0.3", {}, [], "the chat template writes a call in a form that is not known"),
        ("qwen 2.5", dict(tools=(f"{HERE}:undescribed",)), [], "undescribed: "),
        ("qwen 2.5", dict(tools=(f"{HERE}:nothing",)), [], "has no function 'nothing'"),
        ("qwen 2.5", dict(env_fn=f"{HERE}:silent"), [], "--env_fn or --tools: one of them is required, and not both"),
        ("qwen 2.5", dict(tools=()), [], "--env_fn or --tools: one of them is required, and not both"),
        ("qwen 2.5", {}, None, "row 1: is no chat; --env_fn takes a function"),
    ],
)
def test_what_a_policy_could_not_know_or_say_is_one_line(name, flags, messages, words, fails):
    template, special, end, *_ = TEMPLATES[name]
    tokenizer = bytes_and_words(template, special, end)
    prompt = "hello?" if messages is None else [*messages, {"role": "user", "content": "hello?"}]

    def start():
        args, rows = chats(tokenizer, prompt, **flags)
        environments.Environment(args, None, tokenizer, rows)

    line = fails(start)
    assert "--tools" in line and words in line
    assert ("--env_fn takes a function that reads it" in line) == (name == "mistral 0.3")


COUNTED = """
import asyncio, time
running, peak = [], [0]

def count(f):
    running.append(f)
    peak[0] = max(peak[0], len(running))

def computes(x):
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    return x

def waits(x):
    count(waits)
    time.sleep(0.1)
    running.pop()
    return x

async def is_awaited(x):
    count(is_awaited)
    await asyncio.sleep(0.1)
    running.pop()
    return x

def hangs(x):
    return waits(x) if x % 12 else time.sleep(30)
"""


def spin(is_over):
    """Computes until an event."""
    while not is_over.is_set():
        pass


@pytest.mark.parametrize(
    "name, count, limit, peak, overlap",
    [
        ("computes", 60, 5, 0, False),  # All at once they would take 6 s.
        ("waits", 40, 1, tools.AT_ONCE, False),
        ("waits", 40, 1, tools.AT_ONCE, True),
        ("is_awaited", 40, 1, 40, False),
        ("hangs", 40, 0.5, tools.AT_ONCE, False),
    ],
)
def test_the_time_limit_is_one_of_a_call(in_tmp, capsys, name, count, limit, peak, overlap):
    """As many episodes call in one turn. Calls that hang never hold up the next ones. With `overlap` another thread
    computes, as one that trains does.
    """
    Path("counted.py").write_text(COUNTED)
    args = SimpleNamespace(tools=(f"counted.py:{name}",), tool_timeout=limit, chat_template_kwargs='{"tools": []}')
    calls = [json.dumps({"name": name, "arguments": {"x": x}}) for x in range(count)]
    environment, expected = tools.Tools(args, None), [str(x) for x in range(count)]
    if name == "hangs":
        expected[::12] = ["error: no result within 0.5 s"] * 4
    is_over = threading.Event()
    if overlap:
        threading.Thread(target=spin, args=(is_over,), daemon=True).start()
    found = environment(["hello?"] * count, [[f"<tool_call>{call}</tool_call>"] for call in calls])
    is_over.set()
    assert [message["content"] for (message,) in found] == expected
    assert environment.functions[name].__globals__["peak"] == [peak]
    assert capsys.readouterr().out.count("--tool_timeout gives more") == (name == "hangs")


@pytest.mark.parametrize("seconds, peak", [(1.0, 1), (0.0, tools.AT_ONCE)])
def test_functions_that_compute_run_one_by_one(in_tmp, monkeypatch, seconds, peak):
    """`seconds` of the processor are what each call has used, while no time passes."""
    Path("counted.py").write_text(COUNTED)
    args = SimpleNamespace(tools=("counted.py:waits",), tool_timeout=30, chat_template_kwargs='{"tools": []}')
    clocks = {name: lambda x=x: x for name, x in dict(monotonic=0, process_time=0, thread_time=seconds).items()}
    environment = tools.Tools(args, None)
    monkeypatch.setattr(tools, "time", SimpleNamespace(**clocks))
    call = json.dumps({"name": "waits", "arguments": {"x": 1}})
    for _ in range(2):  # What was seen is remembered in the next turn.
        environment(["hello?"] * 34, [[f"<tool_call>{call}</tool_call>"]] * 34)
        assert environment.functions["waits"].__globals__["peak"] == [peak] and environment.size == peak


def test_a_long_result_is_cut_and_the_other_one_stays():
    tokenizer = tokenizer_of("chatml")
    long = json.dumps({"name": "double", "arguments": {"x": "9" * 200}})
    texts = [f"<tool_call>{long}</tool_call><tool_call>{ADD}</tool_call>", "the answer"]
    _, found, said = ask(tokenizer, texts, max_observation_tokens=60)
    shown = tokenizer.decode(found.responses[0][found.response_mask[0] & ~found.action_mask[0]])
    assert re.fullmatch(
        r'\n<\|im_start\|>tool\n\{"twice": "9+<\|im_end\|>\n<\|im_start\|>tool\n5<\|im_end\|>\n.*\n', shown
    )
    assert re.fullmatch(r'\{"twice": "9+\n5', said[1]) and said[1].partition("\n")[0] in shown


@pytest.mark.parametrize("name", ["qwen 2.5", "hermes 3", "chatml"])
@pytest.mark.parametrize("names", [["add", "send_mail"], ["send_mail"], ["add"], ["double", "add"], []])
@pytest.mark.parametrize("bare", [False, True])
def test_schemas_of_a_data_set_are_those_of_tools_or_one_line(name, names, bare, fails):
    """They replace those of --tools in the prompt, so a policy would call what nobody answers."""
    schemas = [{"name": x, "description": "Mine.", "parameters": {"type": "object", "properties": {}}} for x in names]
    schemas = schemas if bare else [{"type": "function", "function": x} for x in schemas]
    tokenizer = tokenizer_of(name)

    def start(tools):
        args, rows = chats(tokenizer, [SYSTEM, {"role": "user", "content": "hello?"}], {"tools": tools})
        environments.Environment(args, None, tokenizer, rows)
        return tokenizer.decode(rows[0].ids)

    if "send_mail" in names and name != "chatml":  # ChatML shows no schemas.
        line = fails(start, schemas)
        assert "--tools: --dataset rows: row 1: the column `tools` shows others, send_mail; name their" in line
    else:
        assert start(schemas).count("Mine.") == len(names) * (name != "chatml")


# ---- SFT on several turns --------------------------------------------------------------------------------------------
def call_of(name, arguments, call_id):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


QUESTION = {"role": "user", "content": "hello?"}
CALL = {"role": "assistant", "content": "", "tool_calls": []}
CALL["tool_calls"] = [call_of("double", {"x": 4}, "abcdefghi"), call_of("add", {"x": 2, "y": 3}, "jklmnopqr")]
GIVEN = [
    {"role": "tool", "content": text, "tool_call_id": call["id"]}
    for call, text in zip(CALL["tool_calls"], RESULTS, strict=True)
]
ANSWER, MORE = {"role": "assistant", "content": "the answer"}, {"role": "user", "content": "again?"}
CHAT = [QUESTION, CALL, *GIVEN, ANSWER, MORE, {"role": "assistant", "content": "hello again"}]


def sft_row(tokenizer, row, **flags):
    """The Prompt of a row that SFT trains on."""
    args = SimpleNamespace(**TOOLS | dict(train_on="all", prompt_template=None, on_policy_share=1) | flags)
    rows = data.complete([row], args, "dataset", data.completion_of)
    return data.encode(args, "dataset", rows, tokenizer, 10_000, "completion")[0]


def drawn(tokenizer, row, completion_only=True):
    """The texts of the pieces that are trained on, as train_sft.py's masks say."""
    tokens, mask, is_target = train_sft.tokens_and_targets([row, row], completion_only, "cpu")
    assert mask.all() and (is_target[0] == is_target[1]).all()
    pieces, before = [], False
    for i, is_trained in zip(tokens[0].tolist(), is_target[0].tolist(), strict=True):
        if is_trained:
            pieces = pieces + [[i]] if not before else [*pieces[:-1], [*pieces[-1], i]]
        before = is_trained
    return [tokenizer.decode(piece) for piece in pieces]


@pytest.mark.parametrize("name", TEMPLATES)
def test_sft_trains_on_all_turns_with_their_ends(name, capsys):
    """The ids are those of a trajectory in which a policy says the same, and of a chat that goes on."""
    template, _, end, first, calls, _ = TEMPLATES[name]
    tokenizer = tokenizer_of(name)
    tools = json.loads(chats(tokenizer, [SYSTEM, QUESTION])[0].chat_template_kwargs)["tools"]
    row = {"messages": first + CHAT} | ({"tools": tools} if isinstance(template, dict) else {})
    space = " " * name.startswith("mistral")  # It writes one before an answer in words.
    thought = "<think>\n\n</think>\n\n" * (name == "qwen 3")  # It writes one where an answer is the last.
    turns = [thought + calls, space + thought + "the answer", space + thought + "hello again"]
    last = sft_row(tokenizer, row, train_on="last")
    row = sft_row(tokenizer, row)
    assert drawn(tokenizer, row) == [turn + end for turn in turns]
    assert tokenizer.decode(row.ids).count("Doubles a number") == isinstance(template, dict)  # It is said once.
    assert ("the chat template writes no calls" in capsys.readouterr().out) == (name in ("chatml", "llama 3"))
    assert drawn(tokenizer, row, completion_only=False) == [tokenizer.decode((row.ids + row.completion)[1:])]
    prompt, found, _ = ask(tokenizer, turns[:2], first, chat_template_kwargs="{}")
    shown = sft_row(tokenizer, {"messages": first + CHAT[:5], "tools": json.dumps(tools)})
    assert shown.ids + shown.completion == prompt.ids + found.responses[0][found.response_mask[0]].tolist()
    assert drawn(tokenizer, last) == [turns[2] + end]
    assert tokenizer.decode(last.ids).endswith(tokenizer.decode(row.ids)[-20:])


@pytest.mark.parametrize(
    "row",
    [
        dict(messages=[*CHAT[:5]]),
        dict(prompt=[QUESTION], completion=CHAT[1:5]),
        dict(messages=[QUESTION, CALL | {"content": None, "tool_calls": json.dumps(CALL["tool_calls"])}, *CHAT[2:5]]),
        dict(
            conversations=[
                {"from": "human", "value": "hello?"},
                {"from": "function_call", "value": json.dumps([x["function"] for x in CALL["tool_calls"]])},
                *({"from": "observation", "value": x} for x in RESULTS),
                {"from": "gpt", "value": "the answer"},
            ]
        ),
    ],
    ids=["messages", "prompt and completion", "nulls and JSON", "ShareGPT"],
)
def test_calls_and_results_in_the_forms_of_data_sets_are_the_same_row(row):
    tokenizer = tokenizer_of("qwen 2.5")
    expected = sft_row(tokenizer, {"messages": CHAT[:5]})
    found = sft_row(tokenizer, row)
    assert (found.ids, found.completion, found.is_own) == (expected.ids, expected.completion, expected.is_own)
    assert drawn(tokenizer, found) == [HERMES + "<|im_end|>", "the answer<|im_end|>"]


def test_a_function_call_that_is_no_json_is_one_line(fails):
    said = [{"from": "human", "value": "hello?"}, {"from": "function_call", "value": "add 2 3"}]
    line = fails(sft_row, tokenizer_of("qwen 2.5"), {"conversations": [*said, {"from": "gpt", "value": "five"}]})
    assert "row 1: a function_call is no JSON of a `name` and `arguments`: 'add 2 3'" in line


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_written_and_shown_in_its_own_letters(name):
    """SFT's targets and prompts, as transformers' tojson writes them, and the prompt that a sample shows."""
    call = CALL | {"tool_calls": [call_of("double", {"x": "Zürich 北京"}, "abcdefghi")]}
    tokenizer = tokenizer_of(name)
    row = sft_row(tokenizer, {"messages": [SYSTEM, QUESTION, call, *GIVEN[:1], ANSWER]})
    assert '"Zürich 北京"' in tokenizer.decode(row.ids) and '"Zürich 北京"' in row.text


GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_an_end_that_stands_at_the_head_of_the_next_message_is_trained():
    """As GLM's. Behind the last answer nothing stands, so EOS ends it."""
    tokenizer = bytes_and_words(GLM, "<|endoftext|> <|user|> <|assistant|> <|tool|>".split(), "<|endoftext|>")
    chat = [QUESTION, ANSWER, GIVEN[1], ANSWER, MORE, ANSWER]
    row = sft_row(tokenizer, {"messages": chat})
    whole = "<|user|>\nhello?<|assistant|>\nthe answer<|tool|>\n5<|assistant|>\nthe answer<|user|>\nagain?"
    whole += "<|assistant|>\nthe answer<|endoftext|>"
    assert tokenizer.decode(row.ids + row.completion) == whole
    assert drawn(tokenizer, row) == [f"the answer{end}" for end in ("<|tool|>", "<|user|>", "<|endoftext|>")]


BEGUN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_an_answer_is_not_behind_a_thought_that_the_template_begins_for_it():
    """As DeepSeek-R1's. Its answers stand without a thought in each turn."""
    tokenizer = bytes_and_words(BEGUN, OF_QWEN, "<|im_end|>")
    row = sft_row(tokenizer, {"messages": [QUESTION, ANSWER, MORE, ANSWER]})
    assert "think" not in tokenizer.decode(row.ids + row.completion)
    assert len(drawn(tokenizer, row)) == 2 and tokenizer.decode(row.ids).count("<|im_end|>") == 3


MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("end", [" + '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"])
def test_generation_marks_are_used_and_compared(end, capsys):
    """A template whose marks leave the end of a turn out is one by which no policy learns to stop."""
    has_end = end.startswith(" +")
    tokenizer = bytes_and_words(MARKED.replace(" + '<|im_end|>' }}{% endgeneration %}", end), OF_QWEN, "<|im_end|>")
    row = sft_row(tokenizer, {"messages": [QUESTION, ANSWER, MORE, ANSWER]})
    assert drawn(tokenizer, row) == ["the answer" + "<|im_end|>" * has_end] * 2
    assert ("in 1 rows the generation marks" in capsys.readouterr().out) != has_end


# ---- whole runs ------------------------------------------------------------------------------------------------------
def test_a_run_with_tools_is_evaluated_as_it_was_trained_and_sft_reads_its_rows(in_tmp, capsys, fails):
    """A random policy calls nothing; what its chat template shows and its folder keeps is the run's."""
    tokenizer = tokenizer_of("qwen 2.5")
    tokenizer.save_pretrained("start")
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2000).save_pretrained("start")
    rows = [{"messages": [{"role": "user", "content": f"hello {i}?"}, *CHAT[1:5]]} for i in range(4)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mine.py").write_text("def f(prompts, completions):\n    return [float(len(text)) for text in completions]\n")
    given = dict(dataset="rows.jsonl", batch_size=4, num_train_epochs=1, completion_only=True, base_model="start")
    train_sft.main(train_sft.Args(**given, output_dir="sft", run_name="sft"))
    given = dict(dataset="rows.jsonl", sft_model_path="sft", reward_fn=("mine.py:f",), response_length=4, batch_size=4)
    given |= dict(tools=TOOLS["tools"], tool_timeout=2.0, total_episodes=4, output_dir="agent", run_name="agent")
    row = train_agent.main(train_agent.Args(**given))["metrics"]
    assert row["val/turns"] == 1 and row["health/one_turn"] == 1
    # The same command may be given again, and show_tokens.py shows the prompts of this run.
    train_agent.check(again := train_agent.Args(**given | dict(run_name="again")))
    train_agent.check(again)
    assert "holds another model (chat_template_kwargs" in fails(
        train_agent.check, train_agent.Args(**given | dict(run_name="again", tools=TOOLS["tools"][:1]))
    )
    assert "--chat_template_kwargs [1]: cannot be read" in fails(
        train_agent.check, train_agent.Args(**given | dict(run_name="again", chat_template_kwargs="[1]"))
    )
    capsys.readouterr()
    show_tokens.main(
        ["train_agent.py", "--dataset", "rows.jsonl", "--sft_model_path", "sft", "--tools", *TOOLS["tools"]]
    )
    ids = [int(i) for i in re.findall(r"^    +(\d+)  '", capsys.readouterr().out, re.M)]
    prompts, _ = data.load_prompts(again, tokenizer, 10_000)
    assert ids == prompts[0].ids + prompts[1].ids and "Doubles a number" in tokenizer.decode(ids)
    summary = evaluate.main(evaluate.Args(policy_path="agent", dataset="rows.jsonl", reward_fn=("mine.py:f",)))
    sampling, samples = summary["sampling"], Path("runs/evaluate__agent/samples.csv").read_text()
    assert (
        sampling["tools"] == list(TOOLS["tools"]) and sampling["tool_timeout"] == 2 and sampling["env_role"] == "tool"
    )
    assert "Doubles a number" in sampling["chat_template_kwargs"] and "hello 3?" in samples
