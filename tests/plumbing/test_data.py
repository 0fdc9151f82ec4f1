"""Rows of every kind become prompts, completions, comparisons and token ids, as the tokenizer's own template has it."""

import gzip
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas
import pytest
from helpers import metaspace_tokenizer, tiny_config, word_tokenizer
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import PreTrainedTokenizerFast

from rlhf_details import toy, train_distill, train_reward, train_rloo, train_sft
from rlhf_details.plumbing.inputs import comparisons, data, data_files, stop_tokens, token_ids, user_code

# ---- tokenizers and rows ---------------------------------------------------------------------------------------------
# What published templates write, in the parts that matter here: what opens and closes a turn.
ASK = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
TURN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}CLOSE{% endfor %}" + ASK
CHATML = TURN.replace("CLOSE", "<|end|>\n")
ANSWERS = TURN.replace("CLOSE", "{% if m.role == 'assistant' %}<eos>{% endif %}")
TEMPLATES = {  # name: (template, EOS, tokens that end a response)
    "llama": ("<s>" + TURN.replace("CLOSE", "<|end|>").replace("content", "content | trim"), "<|end|>", ["<|end|>"]),
    "chatml": (CHATML, "<|end|>", ["<|end|>"]),
    "a base model's": (CHATML, "<eos>", ["<eos>", "<|end|>"]),
    "phi-3.5": (CHATML + "{% if not add_generation_prompt %}<eos>{% endif %}", "<eos>", ["<eos>", "<|end|>"]),
    "eos": (ANSWERS, "<eos>", ["<eos>"]),
    "no special tokens": (TURN.replace("CLOSE", "\n"), "<eos>", ["<eos>"]),
}
SPECIAL = ["<eos>", "<s>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<think>", "</think>"]


def chat_tokenizer(template, eos="<eos>"):
    """Byte-level BPE over the toy reviews. It puts a BOS before a plain text, whatever the template writes."""
    texts, backend = [f"{r['prompt']} {r['completion']}\n" for r in toy.rows("sft", "train")], ByteLevelBPETokenizer()
    backend.train_from_iterator(texts[:200], vocab_size=480, special_tokens=SPECIAL, show_progress=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens = dict(eos_token=eos, bos_token="<s>", chat_template=template)
    return PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, **tokens)


BOS, EOS, A, B, C = 1, 2, 4, 5, 6


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """No test may leave anything in the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def speaker(role):
    """A function that makes a message of a text."""
    return lambda text: {"role": role, "content": text}


user, system, assistant = map(speaker, ("user", "system", "assistant"))
QUESTION, ANSWER = [user("a")], [assistant("b")]
BOTH = QUESTION + ANSWER
ASKED = [[system("you are kind ."), user("how was it ?")], [user("where to ?"), *ANSWER, user("and the hotel ?")]]


def template_ids(tokenizer, messages, **options):
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def write(path, table):
    """Writes a list of rows to a file, in the format of its suffix; returns the path as a string."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pandas.DataFrame(table).to_parquet(path)
    elif kind in ("csv", "tsv"):
        pandas.DataFrame(table).to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    else:
        lines = [json.dumps(row, ensure_ascii=kind == "json") for row in table]
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
            file.write(f"[{', '.join(lines)}]" if kind == "json" else "\n".join(lines))
    return str(path)


# ---- what the pages read ---------------------------------------------------------------------------------------------
def prompts_of(spec, tokenizer, room=512, **flags):
    """(Prompts of --dataset, of --eval_dataset) of RLOO, PPO and the evaluation."""
    return data.load_prompts(train_rloo.Args(dataset=spec, **flags), tokenizer, room)


def demonstrations_of(spec, tokenizer, context=512, **flags):
    """(prompt ids, completion ids) of each row that SFT trains on."""
    args = train_sft.Args(dataset=spec, **flags)
    table = data.read(args, "dataset", "sft", with_answers=True)
    found = data.encode(args, "dataset", table, tokenizer, context, "completion")
    return [(row.ids, row.completion) for row in found]


def comparisons_of(spec, tokenizer, context=512, **flags):
    """(candidates, best) of each row that the reward model trains on, the held-out ones last."""
    reward = SimpleNamespace(config=tiny_config(max_position_embeddings=context))
    train, held_out = comparisons.load(train_reward.Args(dataset=spec, **flags), tokenizer, reward, None)
    return [(row.candidates, row.best) for row in [*train, *held_out]]


# ---- files, folders, functions ---------------------------------------------------------------------------------------
ROWS = [{"prompt": "a b", "n": 1}, {"prompt": 'c, "d"\ne', "n": 2}, {"prompt": "é ∞\u2028x", "n": 3}]


@pytest.mark.parametrize("suffix", "jsonl jsonl.gz ndjson json json.gz csv csv.gz tsv parquet".split())
def test_rows_of_a_file_come_in_order_with_their_types(in_tmp, suffix, capsys):
    """Those of a CSV file are texts."""
    kind = str if suffix[:3] in ("csv", "tsv") else int
    for table in ROWS, [{"prompt": "new", "n": 4}]:  # The rows are not those of a cache.
        expected = [row | {"n": kind(row["n"])} for row in table]
        assert data_files.read_rows(write(f"rows.{suffix}", table), "--dataset") == expected
    assert capsys.readouterr() == ("", "")


NAMED = "--eval_dataset lists.json: cannot be read (has no list 'train'; name one of lists.json:a, lists.json:b)"
FILES = [  # name of a file, what stands in it, the data set, and its column `w`, or what is wrong with it
    ("a.csv", "w\nnull\nnan\n007\n2024-01-02\nTrue\n", "a.csv", "null nan 007 2024-01-02 True".split()),
    ("a.csv", '\ufeffx,w\n1,"a ""b"",\nc"\n2\n', "a.csv", ['a "b",\nc', ""]),  # The last row is short.
    ("a.json", '{"version": "1", "data": [{"w": 1}, {"w": 2}]}', "a.json", [1, 2]),
    ("a.json", '{"train": [{"w": 1}], "test": [{"w": 2}, {"w": 3}]}', "a.json:test", [2, 3]),
    ("a.jsonl", '{"w": 1}\n{"w": 2}\n{"w": 3}', "a.jsonl[-2:]", [2, 3]),
    ("a.jsonl", '{"w": 1}', "a.jsonl[5:]", "no rows"),
    ("lines.json", '{"w": 1}\n\n{"w": 2} x\n', "lines.json", "line 3 column"),
    ("latin.jsonl", b'{"w": 1}\n{"w": "\xe9"}\n', "latin.jsonl", "'utf-8' codec can't decode byte 0xe9"),
    ("lists.json", '{"a": [{"w": 1}], "b": [{"w": 2}]}', "lists.json", NAMED),
    ("wide.csv", "w\n1,2\n", "wide.csv", "row 1 has more cells than there are columns"),
    ("mine.py", "def f(): return [{'w': 1}, {'w': 2}]", "mine.py:f[1:]", [2]),
    ("mine.py", "def f(): return [5]", "mine.py:f", "row 1 is no object with columns: 5"),
    ("mine.py", "", "mine.py:f", "no function 'f'"),
    ("mine.py", "def f(): raise KeyError('no rows today')", "mine.py:f", KeyError),  # The user's own error.
    ("mine.py", "", "none.py:f", "no such file"),
    ("mine.py", "", "user/no-such-data-set", "cannot be read ("),
]


@pytest.mark.parametrize("name, content, spec, found", FILES)
def test_what_a_file_means_or_why_it_is_not_read(in_tmp, fails, name, content, spec, found):
    user_code.load_module.cache_clear()
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(found, list):
        assert [row["w"] for row in data_files.read_rows(spec, "--dataset")] == found
    elif isinstance(found, str):
        line = fails(data_files.read_rows, spec, "--eval_dataset")
        assert line.startswith("error: --eval_dataset ") and found in line
    else:
        with pytest.raises(found, match="no rows today"):
            data_files.read_rows(spec, "--dataset")


def test_a_data_set_of_the_hub_is_asked_for_as_datasets_wants_it(monkeypatch):
    asked, found = [], datasets.Dataset.from_list([{"n": i} for i in range(5)])
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda *a, **k: ["main", "en.1"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((*a, k)) or found)
    for spec, name, config, options in [
        ("a/labels:sentiment/5k.json[:2]", "a/labels", None, {"data_files": "sentiment/5k.json", "split": "train"}),
        ("a/tldr@v1:validation", "a/tldr", None, {"revision": "v1", "split": "validation"}),
        ("a/gsm8k:main", "a/gsm8k", "main", {"split": "train"}),
        ("a/gsm8k:en.1:test", "a/gsm8k", "en.1", {"split": "test"}),
    ]:
        assert len(data_files.read_rows(spec, "--dataset")) == (2 if "[:2]" in spec else 5)
        assert asked.pop() == (name, config, {"revision": None} | options), spec


# ---- rows -> prompts and completions ---------------------------------------------------------------------------------
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
# Parquet has all keys in all rows, and fills them with nulls.
CALLS_FILLED = CALLS | {"tool_calls": [{"id": None, "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]}
CALLED = [CALLS | {"content": "", "tool_calls": [CALL]}]


BEGIN, LONGER = [system("s"), *BOTH, user("c")], [*ANSWER, user("more"), assistant("z")]
OPEN = {"chosen": "Q: why?\nA:\nyes", "rejected": "Q: why?\nA:\nno"}


@pytest.mark.parametrize(
    "row, prompt, answer",  # answer: None where there is none
    [
        ({"prompt": [5, 6], "completion": [7]}, [5, 6], [7]),
        # A column `prompt` is read as it stands, whatever stands beside it.
        ({"prompt": "Hi? ", "query_token": [5], "messages": [user("Hi? "), assistant("c")]}, "Hi? ", "c"),
        ({"messages": BOTH, "query_token": [5], "text": "<user>a<assistant>b"}, QUESTION, ANSWER),
        ({"messages": [*BOTH, user("c")]}, [*BOTH, user("c")], None),
        ({"query_token": [5, 6], "query": "shown"}, [5, 6], None),
        # Beside a prompt that is a string, an answer in messages is its content.
        ({"prompt": "a", "completion": BOTH}, "a", "b"),
        ({"prompt": QUESTION, "completion": [assistant("a")]}, QUESTION, [assistant("a")]),  # It may say the prompt.
        ({"prompt": QUESTION, "completion": "b", "system": "s"}, [system("s"), *QUESTION], ANSWER),
        ({"conversations": [{"from": "Human", "value": "a"}, {"from": "gpt", "value": "b"}]}, QUESTION, ANSWER),
        # Where data sets of several shapes are joined, the columns of the others are null.
        ({"messages": BOTH, "prompt": None, "completion": None}, QUESTION, ANSWER),
        ({"messages": [user([{"type": "text", "text": "a!", "image": None}]), *ANSWER]}, [user("a!")], ANSWER),
        ({"messages": [*QUESTION, CALLS_FILLED]}, QUESTION, CALLED),
        ({"instruction": "a", "input": "x", "output": "b"}, [user("a\n\nx")], ANSWER),
        ({"text": "a b", "messages": None}, "", "a b"),
        # SFT on comparisons learns the chosen answer, also where the prompt is what both begin with.
        ({"prompt": "a", "chosen": " b", "rejected": " c"}, "a", " b"),
        (OPEN, "Q: why?\nA:", "\nyes"),
        # An implicit conversation ends with the last common message that is no answer.
        ({"chosen": BEGIN + LONGER, "rejected": BEGIN + ANSWER}, BEGIN, None),
        ({"chosen": BOTH, "rejected": [*QUESTION, assistant("c")]}, QUESTION, ANSWER),
    ],
)
def test_the_forms_of_rows_that_people_bring(in_tmp, row, prompt, answer):
    write("rows.jsonl", [row])
    args = train_sft.Args(dataset="rows.jsonl")
    (read,) = data.read(args, "dataset", "sft", with_answers=answer is not None)
    assert (read["prompt"], read.get("completion")) == (prompt, answer)
    if answer is CALLED:
        assert data.as_text(None, answer) == json.dumps([CALL])
    if row is OPEN:
        assert read["rejected"] == "\nno"


# UltraFeedback's form, with and without its column `messages`, and answers alone.
FEEDBACK = {"prompt": "a", "chosen": BOTH, "rejected": [*QUESTION, assistant("c")]}
READERS = {
    "SFT": lambda *given, **flags: [ids + answer for ids, answer in demonstrations_of(*given, **flags)],
    "comparisons": lambda *given, **flags: [ids for answers, _ in comparisons_of(*given, **flags) for ids in answers],
    "prompts": lambda *given, **flags: [row.ids for row in prompts_of(*given, **flags)[0]],
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "row, remedy",
    [
        (FEEDBACK | {"messages": BOTH}, "{messages}"),
        (
            FEEDBACK | {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "{conversations}",
        ),
        (FEEDBACK, "{chosen}"),
        (FEEDBACK | {"chosen": ANSWER, "rejected": [assistant("c")]}, None),
        (FEEDBACK | {"prompt": QUESTION}, ""),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ""),
    ],
)
def test_a_line_says_that_a_text_beside_messages_has_no_chat_template_and_what_gives_it_one(
    in_tmp, capsys, read, row, remedy
):
    tokenizer, spec, words = chat_tokenizer(CHATML), write("rows.jsonl", [row]), "read without the chat template; "
    READERS[read](spec, tokenizer)
    said = capsys.readouterr().out
    assert said.count(words) == (remedy != "")
    if remedy is None:
        assert "give the prompts as messages" in said
    elif remedy:
        assert f'--prompt_template "{remedy}"' in said
        asked = template_ids(tokenizer, QUESTION, add_generation_prompt=True)
        assert all(ids[: len(asked)] == asked for ids in READERS[read](spec, tokenizer, prompt_template=remedy))
    READERS[read](spec, tokenizer, prompt_template="{prompt}")  # The user has said what the prompt is.
    if isinstance(row["prompt"], str):
        READERS[read](spec, word_tokenizer())  # without a chat template
    assert words not in capsys.readouterr().out


def test_a_template_puts_in_what_the_columns_hold_and_reads_nothing_in_it(in_tmp):
    row = {"question": "{a} \\n b", "number": 7, "empty": None}  # Another row has a column `rare`.
    for template, text in (
        ("{Q} {question}\\n{number}{empty}{rare}\n", "{Q} {a} \\n b\n7\n"),
        (r"{number}: \boxed{} or {\"answer\": ..}", r"7: \boxed{} or {\"answer\": ..}"),
    ):
        assert data.fill("--prompt_template", template, row, {*row, "rare"}) == text


def test_every_stage_fills_the_template(in_tmp):
    tokenizer, flags = word_tokenizer(), {"prompt_template": "b {question}"}
    write("rows.jsonl", [{"question": "a", "number": "b", "chosen": "c", "rejected": "d"}])
    assert comparisons_of("rows.jsonl", tokenizer, **flags) == [([[B, A, C, EOS], [B, A, 7, EOS]], 0)]
    flags |= {"completion_template": "{chosen} {number}"}
    assert demonstrations_of("rows.jsonl", tokenizer, **flags) == [([B, A], [C, B, EOS])]


# ---- text -> token ids -----------------------------------------------------------------------------------------------
def test_data_1_prompt_and_completion_are_tokenised_apart():
    """So they are also where a token of the whole text would stand across the seam."""
    tokenizer, pair = chat_tokenizer(None), ("the ho", "tel")
    whole, *apart = (tokenizer(x, add_special_tokens=False).input_ids for x in ("".join(pair), *pair))
    assert whole != apart[0] + apart[1], "no token crosses the seam: nothing is tested"
    assert token_ids.encode(tokenizer, *pair) == ([1, *apart[0]], [*apart[1], 0])


@pytest.mark.parametrize("template, bos", [(None, []), ("<s> $A", [BOS]), ("<s> $A </s>", [BOS]), ("$A </s>", [])])
def test_data_2_a_completion_ends_with_eos_and_a_prompt_begins_with_the_tokenizers_bos(template, bos):
    tokenizer = word_tokenizer(template)
    pairs = {("a b", "c a"): ([A, B], [C, A, EOS]), ("a", ""): ([A], [EOS]), ("", "c </s>"): ([], [C, EOS])}
    for texts, (prompt, completion) in pairs.items():
        assert token_ids.encode(tokenizer, *texts) == ([*bos, *prompt], completion)
        assert token_ids.encode(tokenizer, texts[0]) == [*bos, *prompt]
    assert token_ids.encode(tokenizer, "<s> a") == [BOS, A]
    assert token_ids.encode(word_tokenizer(bos_token=None), "a", "b") == ([A], [B, EOS])
    assert stop_tokens.end_ids(word_tokenizer(chat_template="{{ raise_exception('no') }}")) == [EOS]


SEAMS = [("a.", " b a"), ("a.", "b a"), ("a", ".b"), ("a. ", "b"), ("a.</s>", "b"), ("", "b"), ("a", " .")]


each_scheme = pytest.mark.parametrize("scheme", ["always", "first", "never", "normalizer"])


@each_scheme
@pytest.mark.parametrize("prompt, answer", SEAMS)
def test_an_answer_has_no_space_that_its_tokenizer_puts_before_a_text(scheme, prompt, answer):
    """It has the ids of the whole text, unless a token of this lies across the seam. A space of its own stays."""
    tokenizer = metaspace_tokenizer(scheme)
    read = partial(tokenizer.__call__, add_special_tokens=False)
    ids, (*answer_ids, end) = token_ids.encode(tokenizer, prompt, answer)
    assert ids == read(prompt).input_ids and end == tokenizer.eos_token_id
    if prompt.endswith(" "):
        assert tokenizer.convert_ids_to_tokens(answer_ids) == ["b"]
    else:
        assert ids + answer_ids == read(prompt + answer).input_ids


@each_scheme
def test_a_chats_answer_has_the_ids_of_the_conversation(scheme):
    tokenizer = metaspace_tokenizer(scheme)
    turn = "{% for m in messages %}..{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}..{% endif %}"
    tokenizer.chat_template = turn
    whole = tokenizer("..a</s>..b a</s>", add_special_tokens=False).input_ids
    ids, answer = token_ids.encode(tokenizer, [user("a")], [assistant("b a")])
    assert ids + answer == whole and tokenizer.convert_ids_to_tokens(answer) == ["b", "▁a", "</s>"]


# ---- conversations -> token ids --------------------------------------------------------------------------------------
@pytest.mark.parametrize("template, eos, ends", TEMPLATES.values(), ids=TEMPLATES)
def test_data_3_a_conversation_is_encoded_as_its_template_does(template, eos, ends, capsys):
    """Rows are trained on up to the token that ends the turn, or get EOS, and the sampler stops at that token.

    A prompt that ends with an answer is continued. Readers see all other special tokens. [GEN-16]
    """
    tokenizer, end = chat_tokenizer(template, eos), ends[-1] if ends[-1] in template else f"\n{eos}"
    for prompt in (*ASKED, QUESTION):
        answer = "" if prompt is QUESTION else "cheap ."
        ids, completion = token_ids.encode(tokenizer, prompt, [assistant(answer)])
        assert ids == token_ids.encode(tokenizer, prompt) == template_ids(tokenizer, prompt, add_generation_prompt=True)
        assert ids.count(tokenizer.bos_token_id) == template.startswith("<s>") and tokenizer("a").input_ids[0] == 1
        whole = template_ids(tokenizer, [*prompt, assistant(answer)])
        assert ids + completion[:-1] == whole[: len(ids) + len(completion) - 1]
        assert tokenizer.decode(completion) == answer + end
    begun = [user("how much ?"), assistant("it was")]
    ids, completion = token_ids.encode(tokenizer, begun, [assistant(" cheap .")])
    assert ids == token_ids.encode(tokenizer, begun) == template_ids(tokenizer, begun, continue_final_message=True)
    assert tokenizer.decode(ids).endswith("it was") and tokenizer.decode(completion).strip() == f"cheap .{end}"
    thought = tokenizer("<think>x</think>", add_special_tokens=False).input_ids
    assert token_ids.decode_all(tokenizer, [thought + completion])[0].strip() == "<think>x</think> cheap ."
    tokenizer.generation_eos = [5]
    expected = [*tokenizer.convert_tokens_to_ids(ends), 5]
    assert stop_tokens.stop_ids(tokenizer, "eos", "--stop_token").tolist() == stop_tokens.end_ids(tokenizer) == expected
    assert f"--stop_token eos: a response ends with {' or '.join(ends)}" in capsys.readouterr().out


R1 = ANSWERS.replace("m.content", "m.content.split('</think>')[-1]").replace(ASK, ASK.replace("\n{%", "<think>\n{%"))
SYSTEM_LAST = "{{ messages[0].content if loop.last and m.role == 'user' }}{{ m.content }}"
MISTRAL = ANSWERS.replace("{{ m.content }}", SYSTEM_LAST).replace("in messages", "in messages[1:]")


@pytest.mark.parametrize("earlier", [[], [user("the hotel"), assistant("fine .")]])
@pytest.mark.parametrize("template, opened", [(MISTRAL, "kind .the hotel<|assistant|>\n"), (R1, "<|assistant|>")])
def test_a_prompt_is_trained_on_as_it_is_asked_where_an_answer_changes_what_stands_before_it(earlier, template, opened):
    """Mistral's template writes the system's message into the last message, if this one is the user's. DeepSeek-R1's
    opens a thought in a prompt, and leaves it out of an answer."""
    tokenizer, turns = chat_tokenizer(template), [system("kind ."), *earlier, user("the hotel")]
    prompt, answer = token_ids.encode(tokenizer, turns, [assistant("cheap .")])
    asked = token_ids.encode(tokenizer, turns)
    assert prompt == asked[: len(prompt)] and (prompt == asked) == (template == MISTRAL)
    assert tokenizer.decode(prompt).endswith(opened) and tokenizer.decode(answer).strip() == "cheap .<eos>"


def test_a_template_gets_what_the_row_and_the_user_have(in_tmp):
    tokenizer = chat_tokenizer("{{ tools }} {{ documents }} {{ mode }} {{ strftime_now('%d %b %Y') }}" + CHATML)
    tools = '[{"name": "add"}]', [{"name": "add", "city": None}]  # The null is Parquet's.
    write("rows.jsonl", [{"prompt": QUESTION, "tools": x, "documents": [{"text": "b"}]} for x in tools])
    flags = dict(chat_template_kwargs='{"mode": "loud"}', template_date="2024-02-03")
    for row in prompts_of("rows.jsonl", tokenizer, **flags)[0]:
        assert "[{'name': 'add'}] [{'text': 'b'}] loud 03 Feb 2024<|user|>" in tokenizer.decode(row.ids)


@pytest.mark.parametrize(
    "prompt, template, read",
    [
        ("a", None, "<s>a"),
        ("a", "{prompt} b {answer}", "<s>a b 7"),
        ([system("kind ."), user("a")], "{prompt} b {answer}", "<|system|>\nkind .<|end|>\n<|user|>\na b 7<|end|>\n"),
        ("a", "{other}", "<|user|>\nb<|end|>\n<|assistant|>\n"),
    ],
)
def test_a_teacher_reads_what_its_template_says_and_the_student_does_not(in_tmp, prompt, template, read):
    """In a chat the last message changes; a column of messages stands for all of them."""
    write("rows.jsonl", [{"prompt": prompt, "answer": 7, "other": [user("b")]}])
    args = train_distill.Args(dataset="rows.jsonl", teacher_prompt_template=template)
    tokenizer = chat_tokenizer(CHATML)
    (row,), _ = data.load_prompts(args, tokenizer, 100)
    assert row.ids == token_ids.encode(tokenizer, prompt)
    end = "<|assistant|>\n" * (read.endswith("<|end|>\n"))
    assert tokenizer.decode(row.teacher_ids) == read + end


# ---- prompts: limits, order, shares ----------------------------------------------------------------------------------
def test_long_prompts_are_dropped_and_counted_and_rows_keep_their_numbers(in_tmp, capsys, fails):
    """--take is of the training rows alone, and --filter_length means nine tenths of --response_length."""
    table = [{"prompt": "a " * n} for n in (9, 3, 4, 5, 9, 5, 1)]
    path, tokenizer = write("rows.jsonl", table), word_tokenizer()
    prompts, held_out = prompts_of(path, tokenizer, max_prompt_length=5, eval_dataset=path, take=5)
    assert [prompt.number for prompt in prompts] == [2, 3, 4]
    assert [prompt.number for prompt in held_out] == [2, 3, 4, 6, 7]
    dropped = "2 of 5 prompts have more than 5 tokens, the first one is row 1 with 9: dropped"
    assert f"--dataset rows.jsonl: {dropped}" in capsys.readouterr().out
    assert len(prompts_of(path, tokenizer, response_length=5, filter_length=True)[0]) == 3
    line = fails(prompts_of, path, tokenizer, response_length=1, filter_length=True)
    assert "7 of 7 prompts have more than 0.9 tokens, the first one is row 1 with 9: none is left" in line


def test_gkds_share_has_the_data_sets_completions(in_tmp):
    """One that is longer than the context is cut at --response_length."""
    write("rows.jsonl", [{"prompt": "a", "completion": "b c"}])
    args = train_distill.Args(dataset="rows.jsonl", divergence="jsd", on_policy_share=0.5, response_length=1)
    (prompt,), held_out = data.load_prompts(args, word_tokenizer(), 1)
    assert (prompt.ids, prompt.completion, held_out) == ([A], [B, C, EOS], [])
    assert data.completions([prompt], 1, "cpu")[0].tolist() == [[B]]


def test_demonstrations_have_limits(in_tmp, fails):
    tokenizer = word_tokenizer()
    write("rows.jsonl", [{"prompt": "a " * n, "completion": "b " * m} for n, m in ((9, 1), (2, 1), (3, 1), (2, 8))])
    assert [len(ids) for ids, _ in demonstrations_of("rows.jsonl", tokenizer, max_length=10)] == [2, 3]
    line = fails(demonstrations_of, "rows.jsonl", tokenizer, context=10, max_prompt_length=3)
    assert "1 of 3 rows have more than 10 tokens, the first one is row 4 with 11: the model's context" in line


def test_comparisons_of_text_are_the_prompt_and_each_candidate(in_tmp, fails):
    write("rows.jsonl", [{"prompt": "a b", "candidates": ["c", "a", "b"], "best": best} for best in (2, 1)])
    expected = [[A, B, C, EOS], [A, B, A, EOS], [A, B, B, EOS]]
    assert comparisons_of("rows.jsonl", word_tokenizer()) == [(expected, 2), (expected, 1)]
    write("two.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    line = fails(comparisons_of, "two.jsonl", word_tokenizer(), eval_dataset="rows.jsonl")
    assert "--eval_dataset rows.jsonl: row 1 has 3 candidates, and row 1 of --dataset two.jsonl has 2" in line
    table = [{"prompt": QUESTION, "chosen": answer, "rejected": ANSWER} for answer in ([assistant("a")], "a")]
    first, second = comparisons_of(write("chats.jsonl", table), tokenizer := chat_tokenizer(CHATML))
    prompt, answer = token_ids.encode(tokenizer, QUESTION, ANSWER)
    assert first == second and first[0][1] == prompt + answer != first[0][0]


PAD = 50259  # the labels' padding
WORDS_OF_LABELS = " ".join(f"w{i}" for i in range(4, 40))


def test_data_4_the_token_ids_of_labels_are_kept_without_their_padding(in_tmp):
    """No EOS is put, whatever the file's form is. Padding may be the tokenizer's, too."""
    tokenizer, pad = word_tokenizer(words=WORDS_OF_LABELS), 0
    first = {"sample2": [3, 4, PAD], "sample3": [5], "sample0": [EOS, 7], "sample1": [8, pad, pad], "best": 2}
    second = {"query": [PAD, PAD], "best": 3} | {f"sample{k}": [9 + k, PAD, 9] for k in range(4)}
    table = [first | {"query": [PAD, 3, 4, PAD, 6, PAD]}, second]
    expected = [([[3, 4, 6, *x] for x in ([EOS, 7], [8], [3, 4], [5])], 2), ([[9 + k, 9] for k in range(4)], 3)]
    write("labels.json", table), write("folder/sentiment/offline_5k.json", table)
    for spec in ("labels.json", "folder:sentiment/offline_5k.json"):
        assert comparisons_of(f"{spec}[:1]", tokenizer, eval_dataset=f"{spec}[1:]") == expected


@pytest.mark.parametrize("filler", [8, 0])  # an id that the tokenizer does not have, and its padding
def test_the_columns_of_n_plus(in_tmp, filler):
    """vwxyzjn/summarize_from_feedback_..: token ids, filled up on one side."""
    tokenizer, prompt, chosen = word_tokenizer(), [A, B], [C, EOS]
    row = {"query": "shown", "query_token": [filler, filler, *prompt], "reference_response_token": [*chosen, filler]}
    write("summaries/data/train-00000-of-00001.parquet", [row])
    pair = {"chosen": "c", "chosen_token": [*chosen, filler], "rejected": "a", "rejected_token": [A, EOS], "choice": 1}
    write("pairs/data/train.parquet", [row | pair])
    assert prompts_of("summaries", tokenizer)[0][0].ids == prompt
    assert demonstrations_of("summaries", tokenizer) == [(prompt, chosen)]
    assert comparisons_of("pairs", tokenizer) == [([prompt + chosen, [*prompt, A, EOS]], 0)]


def test_padding_that_is_eos_is_told_from_the_eos_of_a_response():
    tokenizer, filler = word_tokenizer(pad_token="</s>"), [8, 8]  # an id that the tokenizer does not have
    assert token_ids.encode(tokenizer, [*filler, A, B], [C, EOS, *filler]) == ([A, B], [C, EOS])


# ---- rows that cannot be read ----------------------------------------------------------------------------------------
PAIR, ASKED_TWICE = {"prompt": "a", "completion": "b"}, [*BOTH, user("c")]
LABEL = {f"sample{k}": [5, 6] for k in range(4)} | {"query": [7], "best": 0}
CHOICE = {"prompt": "w5 w6", "candidates": ["w4", "w5"], "best": 0}
NO_LIST, TOO_LONG = "column 'candidates': must be a list of", "1 of 2 rows have more than 32 tokens, the first one is"


@pytest.mark.parametrize(
    "read, good, bad, words",
    [
        (demonstrations_of, PAIR, {"messages": []}, "row 2: column 'messages': is empty"),
        (demonstrations_of, PAIR, {"messages": [user([{"type": "image", "text": 1}])]}, "a string or a list of texts"),
        (demonstrations_of, PAIR, {"messages": ANSWER}, "row 2: holds an answer and nothing before it"),
        (demonstrations_of, PAIR, {"messages": ASKED_TWICE}, "does not go on from the prompt"),
        (demonstrations_of, PAIR, {"prompt": "a"}, "row 2: has no column 'completion'"),
        # UltraChat's rows, whose `prompt` is the first message alone.
        (demonstrations_of, PAIR, {"prompt": "a", "messages": ASKED_TWICE + ANSWER}, '--prompt_template "{messages}"'),
        (demonstrations_of, PAIR, {"question": "a", "answer": "b"}, "--prompt_template names others"),
        (demonstrations_of, PAIR, {"chosen": "yes", "rejected": "no"}, "not one prompt with two answers"),
        *[
            (partial(prompts_of, prompt_template=x), PAIR, PAIR, f"row 1: --prompt_template {x!r}: names no column")
            for x in ("{", "{}", "{prompt!z}", "{title}")
        ],
        (prompts_of, PAIR, {"prompt": [4, 40, 4]}, "row 2: 40 is no token (the vocabulary has 40)"),
        (prompts_of, PAIR, {"prompt": "\ud83d"}, "row 2: cannot be tokenised: '\\ud83d'"),
        (comparisons_of, CHOICE, CHOICE | {"candidates": ["w4"]}, f"row 2: {NO_LIST}"),
        (comparisons_of, CHOICE, CHOICE | {"candidates": "w4"}, f"row 2: {NO_LIST}"),
        (comparisons_of, CHOICE, CHOICE | {"candidates": ["w4"] * 3}, "row 2 has 3 candidates, and row 1 of"),
        (comparisons_of, CHOICE, CHOICE | {"candidates": ["w4", "w4 " * 40]}, f"{TOO_LONG} row 2 with 43"),
        (comparisons_of, LABEL, LABEL | {"best": 4}, "row 2: column 'best': 4 is no index of its candidates"),
        (comparisons_of, LABEL, LABEL | {"sample1": [3, 40, 3]}, "row 2: 40 is no token (the vocabulary has 40)"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(in_tmp, fails, read, good, bad, words):
    line = fails(read, write("rows.json", [good, bad]), word_tokenizer(words=WORDS_OF_LABELS), 32)
    assert "--dataset rows.json: " in line and words in line
