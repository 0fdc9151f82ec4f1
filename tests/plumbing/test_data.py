"""Rows of every kind become prompts, completions, comparisons and token ids.

What is expected comes from the tokenizer's own chat template and from plain loops.
"""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas
import pytest
import torch
from helpers import tiny_config, word_tokenizer
from tokenizers import ByteLevelBPETokenizer, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_details import evaluate, toy, train_distill, train_dpo, train_reward, train_rloo, train_sft
from rlhf_details.plumbing import chat, comparisons, data, files
from rlhf_details.plumbing.models import decode_all

LLAMA = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# This is how Llama 3 and Qwen cut a text into words: line breaks stay together.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REVIEWS = toy.rows("sft", "train")


# ---- tokenizers and rows ---------------------------------------------------------------------------------------------
def make_tokenizer(special, template, bos_habit=False, **tokens):
    """A byte-level BPE tokenizer of 480 tokens over the toy reviews."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([split, bytes_of]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    texts = [f"system\n\nuser\n\nassistant\n\n{row['prompt']} {row['completion']}\n" for row in REVIEWS[:200]]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=480, **options))
    if bos_habit:
        bos = tokens["bos_token"]
        special = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    tokenizer.chat_template = template
    return tokenizer


TURN_END = {"llama": "<|eot_id|>", "chatml": "<|im_end|>", "chatml_base": "<|im_end|>"}


@pytest.fixture(scope="session")
def tokenizers():
    """{name: a tokenizer with a chat template}."""
    of_llama = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    of_chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        # The tokenizer and the template put a BOS. EOS is the end of each turn.
        "llama": make_tokenizer(of_llama, LLAMA, True, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"),
        # There is no BOS. EOS is the end of each turn, after which the template breaks the line.
        "chatml": make_tokenizer(of_chatml, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        # A base model's: turns do not end with EOS, and the tokenizer puts a BOS that the template has not.
        "chatml_base": make_tokenizer([*of_chatml, "<s>"], CHATML, True, bos_token="<s>", eos_token="<|endoftext|>"),
        # The template writes no special tokens.
        "plain": make_tokenizer(["<eos>", "<pad>"], PLAIN, eos_token="<eos>", pad_token="<pad>"),
    }


BOS, EOS, A, B, C = 1, 2, 4, 5, 6


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """No test may leave anything in the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


QUESTION, ANSWER = [user("a")], [assistant("b")]
BOTH = QUESTION + ANSWER
ASKED = [[system("you are kind ."), user("how was it ?")], [user("where to ?"), *ANSWER, user(REVIEWS[0]["prompt"])]]


def template_ids(tokenizer, messages, **options):
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def write(path, table):
    """Writes a list of rows to a file, in the format of its suffix; returns the path as a string."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.partition(".")[2].removesuffix(".gz")
    if kind == "parquet":
        pandas.DataFrame(table).to_parquet(path)
        return str(path)
    if kind in ("csv", "tsv"):
        text = pandas.DataFrame(table).to_csv(index=False, sep="\t" if kind == "tsv" else ",")
    elif kind == "json":
        text = json.dumps(table, indent=1)
    else:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
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
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=context, num_labels=1)
    reward = SimpleNamespace(model=GPTNeoXForSequenceClassification(config))
    args = train_reward.Args(dataset=spec, **flags)
    train, held_out = comparisons.load(args, tokenizer, reward, None)
    return [(row.candidates, row.best) for row in [*train, *held_out]]


# ---- files, folders, functions ---------------------------------------------------------------------------------------
ROWS = [{"prompt": "a b", "n": 1}, {"prompt": 'c, "d"\ne', "n": 2}, {"prompt": "é ∞ ", "n": 3}]


def as_texts(table):
    """The rows as a CSV file holds them."""
    return [{name: str(cell) for name, cell in row.items()} for row in table]


FILES = [".jsonl", ".jsonl.gz", ".ndjson", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".parquet"]


@pytest.mark.parametrize("suffix", FILES)
def test_rows_of_a_file_come_in_order_with_their_types(in_tmp, suffix, capsys):
    kept = as_texts if suffix[:4] in (".csv", ".tsv") else list
    for table in ROWS, [{"prompt": "new", "n": 4}]:  # The rows are not those of a cache.
        assert files.read_rows(write(f"rows{suffix}", table), "--dataset") == kept(table)
    assert capsys.readouterr() == ("", "")


CELLS = "None N/A null nan 007 5 2024-01-02 True".split()


@pytest.mark.parametrize(
    "name, content, texts",
    [
        ("a.csv", "\n".join(["w", *CELLS]), CELLS),
        ("a.csv", '\ufeffw,x\n"a ""b"",\nc",\n,y\n', ['a "b",\nc', ""]),
        ("a.json", '{"version": "1", "data": [{"w": 1}, {"w": 2}]}', [1, 2]),
        ("a.json:test", '{"train": [{"w": 1}], "test": [{"w": 2}, {"w": 3}]}', [2, 3]),
    ],
)
def test_what_the_text_of_a_file_means(in_tmp, name, content, texts):
    """A CSV file's cell is its text. A .json file may hold lines, and line separators in a string mean nothing."""
    Path(name.partition(":")[0]).write_text(content, encoding="utf-8")
    assert [row["w"] for row in files.read_rows(name, "--dataset")] == texts


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
        assert len(files.read_rows(spec, "--dataset")) == (2 if "[:2]" in spec else 5)
        assert asked.pop() == (name, config, {"revision": None} | options), spec


@pytest.mark.parametrize(
    "spec, words",
    [
        ("user/no-such-data-set", "cannot be read ("),
        ("a.json[5:]", "no rows"),
        ("lines.json", "line 3 column"),
        ("latin.jsonl", "'utf-8' codec can't decode byte 0xe9"),
        ("lists.json", "has no list 'train'; name one of lists.json:a, lists.json:b"),
        ("wide.csv", "row 1 has more cells than there are columns"),
        ("none.py:rows", "no such file"),
        ("mine.py:missing", "no function 'missing'"),
        ("mine.py:numbers", "row 1 is no object with columns: 5"),
    ],
)
def test_rows_that_cannot_be_read_are_one_line(in_tmp, fails, spec, words):
    write("a.json", [{"n": i} for i in range(5)])
    Path("lines.json").write_text('{"n": 1}\n\n{"n": 2} x\n'), Path("wide.csv").write_text("n\n1,2\n")
    Path("latin.jsonl").write_bytes(b'{"n": 1}\n{"n": "\xe9"}\n')
    Path("lists.json").write_text('{"a": [{"n": 1}], "b": [{"n": 2}]}')
    Path("mine.py").write_text("def numbers(): return [5]\n")
    files.load_module.cache_clear()
    line = fails(files.read_rows, spec, "--eval_dataset")
    assert line.startswith(f"error: --eval_dataset {spec.partition(':missing')[0].partition('[')[0]}")
    assert words.lower() in line.lower()


def test_an_error_in_the_users_own_rows_keeps_its_traceback(in_tmp):
    Path("mine.py").write_text("def breaks(): raise KeyError('no rows today')\n")
    files.load_module.cache_clear()
    with pytest.raises(KeyError, match="no rows today"):
        files.read_rows("mine.py:breaks", "--dataset")


# ---- rows -> prompts and completions ---------------------------------------------------------------------------------
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
# Parquet has all keys in all rows, and fills them with nulls.
CALLS_FILLED = CALLS | {"tool_calls": [{"id": None, "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]}
PARTS_FILLED = [{"type": "text", "text": "a!", "image": None}]

CALLED = [CALLS | {"content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    "row, prompt, answer",
    [
        ({"prompt": [5, 6], "completion": [7]}, [5, 6], [7]),
        # A column `prompt` is read as it stands, whatever stands beside it.
        ({"prompt": "Hi? ", "query_token": [5], "messages": [user("Hi? "), assistant("c")]}, "Hi? ", "c"),
        ({"messages": BOTH, "query_token": [5], "text": "<user>a<assistant>b"}, QUESTION, ANSWER),
        # Beside a prompt that is a string, an answer in messages is its content.
        ({"prompt": "a", "completion": BOTH}, "a", "b"),
        ({"prompt": QUESTION, "completion": [assistant("a")]}, QUESTION, [assistant("a")]),  # It may say the prompt.
        ({"prompt": QUESTION, "completion": "b", "system": "s"}, [system("s"), *QUESTION], ANSWER),
        ({"conversations": [{"from": "Human", "value": "a"}, {"from": "gpt", "value": "b"}]}, QUESTION, ANSWER),
        # Where data sets of several shapes are joined, the columns of the others are null.
        ({"messages": BOTH, "prompt": None, "completion": None}, QUESTION, ANSWER),
        ({"messages": [user(PARTS_FILLED), *ANSWER]}, [user("a!")], ANSWER),
        ({"messages": [*QUESTION, CALLS_FILLED]}, QUESTION, CALLED),
        ({"instruction": "a", "input": "x", "output": "b"}, [user("a\n\nx")], ANSWER),
        ({"text": "a b", "messages": None}, "", "a b"),
    ],
)
def test_the_forms_of_rows_that_people_bring(in_tmp, row, prompt, answer):
    write("rows.jsonl", [row])
    (read,) = data.read(train_sft.Args(dataset="rows.jsonl"), "dataset", "sft", with_answers=True)
    assert (read["prompt"], read["completion"]) == (prompt, answer)
    if answer is CALLED:
        assert data.as_text(None, answer) == json.dumps([CALL])


BEGIN, LONGER = [system("s"), *BOTH, user("c")], [*ANSWER, user("more"), assistant("z")]


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"messages": [*BOTH, user("c")]}, dict(prompt=[*BOTH, user("c")])),
        ({"query_token": [5, 6], "chosen": "p a", "rejected": "p b"}, dict(prompt=[5, 6])),
        ({"chosen": "Q: why?\nA:\nyes", "rejected": "Q: why?\nA:\nno"}, dict(prompt="Q: why?\nA:", rejected="\nno")),
        # An implicit conversation ends with the last common message that is no answer.
        (
            {"chosen": BEGIN + LONGER, "rejected": BEGIN + ANSWER},
            dict(prompt=BEGIN, chosen=LONGER, rejected=ANSWER),
        ),
    ],
)
def test_rows_without_an_answer_have_a_prompt(row, expected):
    assert data.with_prompt(row, train_rloo.Args(), row).items() >= expected.items()


@pytest.mark.parametrize(
    "row, words",
    [
        ({"messages": []}, "column 'messages': is empty"),
        ({"messages": [user([{"type": "image", "text": None}])]}, "a string or a list of texts"),
        ({"messages": ANSWER}, "an answer and nothing before it"),
        ({"messages": [*BOTH, user("c")]}, "does not go on from the prompt"),
        ({"prompt": "a"}, "has no column 'completion'"),
        # UltraChat's rows, whose `prompt` is the first message alone.
        ({"prompt": "a", "messages": [*BOTH, user("c"), assistant("d")]}, '--prompt_template "{messages}"'),
        ({"question": "a", "answer": "b"}, "--prompt_template names others"),
        ({"chosen": "yes", "rejected": "no"}, "not one prompt with two answers"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(in_tmp, fails, row, words):
    write("rows.jsonl", [{"prompt": "a", "completion": "b"}, row])
    line = fails(data.read, train_sft.Args(dataset="rows.jsonl"), "dataset", "sft", with_answers=True)
    assert "--dataset rows.jsonl: row 2" in line and words in line


# ---- prompt templates ------------------------------------------------------------------------------------------------
def test_a_template_puts_in_what_the_columns_hold_and_reads_nothing_in_it(in_tmp):
    row = {"question": "{a} \\n b", "number": 7, "empty": None}  # Another row has a column `rare`.
    for template, text in (
        ("{Q} {question}\\n{number}{empty}{rare}\n", "{Q} {a} \\n b\n7\n"),
        (r"{number}: \boxed{} or {\"answer\": ..}", r"7: \boxed{} or {\"answer\": ..}"),
        (r"{number} $x \neq \nu$, \nabla f\nAnswer: \not", "7 $x \\neq \\nu$, \\nabla f\nAnswer: \\not"),
    ):
        assert data.fill("--prompt_template", template, row, {*row, "rare"}) == text


def test_every_stage_fills_the_template(in_tmp):
    tokenizer, flags = word_tokenizer(), {"prompt_template": "b {question}"}
    write("rows.jsonl", [{"question": "a", "number": "b", "chosen": "c", "rejected": "d"}])
    assert prompts_of("rows.jsonl", tokenizer, **flags)[0][0].ids == [B, A]
    assert comparisons_of("rows.jsonl", tokenizer, **flags) == [([[B, A, C, EOS], [B, A, 7, EOS]], 0)]
    flags |= {"completion_template": "{chosen} {number}"}
    assert demonstrations_of("rows.jsonl", tokenizer, **flags) == [([B, A], [C, B, EOS])]


@pytest.mark.parametrize("template", ["{", "{}", "{question!z}", "{title}"])
def test_a_template_that_cannot_be_filled_is_one_line(in_tmp, fails, template):
    write("rows.jsonl", [{"question": "a"}])
    line = fails(prompts_of, "rows.jsonl", word_tokenizer(), prompt_template=template)
    assert "--dataset rows.jsonl: row 1: --prompt_template" in line and "names no column" in line


# ---- text -> token ids -----------------------------------------------------------------------------------------------
def test_data_1_prompt_and_completion_are_tokenised_apart():
    """So they are also where a token of the whole text would stand across the seam."""
    backend = ByteLevelBPETokenizer()
    options = dict(vocab_size=300, min_frequency=1, special_tokens=["<eos>"], show_progress=False)
    backend.train_from_iterator(["hello hello hello"], **options)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, eos_token="<eos>")
    prompt, completion = tokenizer("hel").input_ids, tokenizer("lo").input_ids
    assert tokenizer("hello").input_ids != prompt + completion, "no token crosses the seam: nothing is tested"
    assert chat.encode(tokenizer, "hel", "lo") == (prompt, [*completion, tokenizer.eos_token_id])


@pytest.mark.parametrize("template, bos", [(None, []), ("<s> $A", [BOS]), ("<s> $A </s>", [BOS]), ("$A </s>", [])])
def test_data_2_a_completion_ends_with_eos_and_a_prompt_begins_with_the_tokenizers_bos(template, bos):
    tokenizer = word_tokenizer(template)
    pairs = {("a b", "c a"): ([A, B], [C, A, EOS]), ("a", ""): ([A], [EOS]), ("", "c </s>"): ([], [C, EOS])}
    for texts, (prompt, completion) in pairs.items():
        assert chat.encode(tokenizer, *texts) == ([*bos, *prompt], completion)
        assert chat.encode(tokenizer, texts[0]) == [*bos, *prompt]
    if bos:
        assert chat.encode(tokenizer, "<s> a") == [BOS, A]
    assert chat.encode(word_tokenizer(bos_token=None), "a", "b") == ([A], [B, EOS])


# ---- conversations -> token ids --------------------------------------------------------------------------------------
@pytest.mark.parametrize("template", ["llama", "chatml", "chatml_base", "plain"])
def test_data_3_a_conversation_is_encoded_as_its_template_does(tokenizers, template):
    """A completion goes up to the end of its turn, or gets EOS. A prompt that ends with an answer is continued."""
    tokenizer, end = tokenizers[template], TURN_END.get(template, "\n<eos>")
    puts_bos = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    assert puts_bos == (template in ("llama", "chatml_base"))  # These would put a BOS, the first one a second one.
    begun = [user("how much ?"), assistant("it was")]
    for prompt, answer in [*((asked, [assistant("cheap .")]) for asked in ASKED), (QUESTION, [assistant("")])]:
        ids, completion = chat.encode(tokenizer, prompt, answer)
        assert ids == chat.encode(tokenizer, prompt)
        assert ids == template_ids(tokenizer, prompt, add_generation_prompt=True)
        assert ids.count(tokenizer.bos_token_id) == (template == "llama")
        whole = template_ids(tokenizer, prompt + answer)
        assert ids + completion[:-1] == whole[: len(ids) + len(completion) - 1]
        assert tokenizer.decode(completion) == f"{' ' * (template == 'plain')}{answer[0]['content']}{end}"
    ids, completion = chat.encode(tokenizer, begun, [assistant(" cheap .")])
    assert ids == chat.encode(tokenizer, begun) == template_ids(tokenizer, begun, continue_final_message=True)
    assert tokenizer.decode(ids).endswith("it was") and tokenizer.decode(completion).strip() == f"cheap .{end}"


# What published templates write, in the parts that matter here: what opens and closes a turn.
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}CLOSE{% endfor %}" + ASK
ENDS = {
    "gemma": TURN.replace("CLOSE", "<|end|>\n"),
    "phi-3.5": TURN.replace("CLOSE", "<|end|>\n") + "{% if not add_generation_prompt %}<eos>{% endif %}",
    "eos": TURN.replace("CLOSE", "{% if m.role == 'assistant' %}<eos>{% endif %}"),
    "r1": TURN.replace("CLOSE", "{% if m.role == 'assistant' %}<eos>{% endif %}")
    .replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    .replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}"),
    "none": TURN.replace("CLOSE", "\n"),
    "refuses": "{{ raise_exception('no') }}",
    None: None,
}  # fmt: skip


def chat_tokenizer(template):
    special = ["<eos>", "<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
    return make_tokenizer(special, ENDS[template], eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize(
    "template, trained, ends",
    [
        ("gemma", "cheap .<|end|>", ["<eos>", "<|end|>"]),
        ("phi-3.5", "cheap .<|end|>", ["<eos>", "<|end|>"]),
        ("eos", "cheap .<eos>", ["<eos>"]),
        ("r1", "cheap .<eos>", ["<eos>"]),
        ("none", "cheap .\n<eos>", ["<eos>"]),
        ("refuses", None, ["<eos>"]),
        (None, None, ["<eos>"]),
    ],
)
def test_gen_16_a_turn_ends_as_its_template_ends_it(template, trained, ends):
    """Rows are trained on up to that token, the sampler stops at it, and readers see all other special tokens."""
    tokenizer = chat_tokenizer(template)
    assert tokenizer.convert_ids_to_tokens(chat.end_ids(tokenizer)) == ends
    tokenizer.generation_eos = [5]
    assert chat.end_ids(tokenizer) == [*tokenizer.convert_tokens_to_ids(ends), 5]
    if trained:
        prompt, answer = chat.encode(tokenizer, [user("the hotel")], [assistant("cheap .")])
        assert tokenizer.decode(answer) == trained
        assert (
            tokenizer.decode(prompt)
            == "<|user|>the hotel"
            + ENDS[template].count("<|end|>") * "<|end|>\n"
            + ("\n" if template == "none" else "")
            + "<|assistant|>"
        )
        del tokenizer.generation_eos
        ids = tokenizer("<think>cheap</think>" + trained, add_special_tokens=False).input_ids
        assert decode_all(tokenizer, [ids]) == ["<think>cheap</think>" + trained.replace(ends[-1], "")]


@pytest.mark.parametrize("earlier", [[], [user("the hotel"), assistant("fine .")]])
def test_a_prompt_is_trained_on_as_it_is_asked_where_an_answer_changes_what_stands_before_it(earlier):
    """Mistral's template writes the system's message into the last message, if this one is the user's."""
    tokenizer = chat_tokenizer("gemma")
    system_last = "{{ messages[0].content if loop.last and m.role == 'user' }}{{ m.content }}"
    tokenizer.chat_template = ENDS["eos"].replace("{{ m.content }}", system_last)
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages", "in messages[1:]")
    turns = [system("kind ."), *earlier, user("the hotel")]
    prompt, answer = chat.encode(tokenizer, turns, [assistant("cheap .")])
    assert prompt == chat.encode(tokenizer, turns)
    assert tokenizer.decode(prompt).endswith("<|user|>kind .the hotel<|assistant|>")
    assert tokenizer.decode(answer) == "cheap .<eos>"


def test_a_template_gets_what_the_row_and_the_user_have(in_tmp):
    template = "{{ tools }} {{ documents }} {{ mode }} {{ strftime_now('%d %b %Y') }}" + TURN.replace(
        "CLOSE", "<|end|>"
    )
    tokenizer = chat_tokenizer("gemma")
    tokenizer.chat_template = template
    tools = '[{"name": "add"}]', [{"name": "add", "city": None}]  # The null is Parquet's.
    write("rows.jsonl", [{"prompt": [user("a")], "tools": x, "documents": [{"text": "b"}]} for x in tools])
    flags = dict(chat_template_kwargs='{"mode": "loud"}', template_date="2024-02-03")
    for row in prompts_of("rows.jsonl", tokenizer, **flags)[0]:
        text = tokenizer.decode(row.ids)
        assert "[{'name': 'add'}]" in text and "[{'text': 'b'}]" in text and "loud 03 Feb 2024" in text


# ---- N+'s columns of padded token ids --------------------------------------------------------------------------------


def test_padding_that_is_eos_is_told_from_the_eos_of_a_response():
    tokenizer, filler = word_tokenizer(pad_token="</s>"), [8, 8]  # an id that the tokenizer does not have
    assert chat.encode(tokenizer, [*filler, A, B], [C, EOS, *filler]) == ([A, B], [C, EOS])


# ---- prompts: limits, order, shares ----------------------------------------------------------------------------------
def number_rows(lengths):
    """Rows whose prompts are so many token ids, each row another id."""
    return [{"prompt": [300 + i] * n, "answer": i} for i, n in enumerate(lengths)]


def test_long_prompts_are_dropped_and_counted_and_rows_keep_their_numbers(in_tmp, tokenizers, capsys, fails):
    """--take is of the training rows alone, and --filter_length means nine tenths of --response_length."""
    path, tokenizer = write("rows.jsonl", number_rows([9, 3, 4, 5, 9, 5, 1])), tokenizers["chatml"]
    prompts, held_out = prompts_of(path, tokenizer, max_prompt_length=5, eval_dataset=path, take=5)
    assert [prompt.number for prompt in prompts] == [2, 3, 4]
    assert [prompt.number for prompt in held_out] == [2, 3, 4, 6, 7]
    dropped = "2 of 5 prompts have more than 5 tokens, the first one is row 1 with 9: dropped"
    assert f"--dataset rows.jsonl: {dropped}" in capsys.readouterr().out
    assert len(prompts_of(path, tokenizer, response_length=5, filter_length=True)[0]) == 3
    line = fails(prompts_of, path, tokenizer, response_length=1, filter_length=True)
    assert "7 of 7 prompts have more than 0.9 tokens, the first one is row 1 with 9: none is left" in line


@pytest.mark.parametrize(
    "prompt, words",
    [([4, 8, 4], "row 2: 8 is no token (the vocabulary has 8)"), ("\ud83d", "row 2: cannot be tokenised: '\\ud83d'")],
)
def test_a_prompt_that_no_model_can_read_is_one_line(in_tmp, fails, prompt, words):
    Path("rows.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": prompt}]))
    assert words in fails(prompts_of, "rows.json", word_tokenizer())


def test_gkds_share_of_the_data_sets_completions_reads_the_rows_once(in_tmp):
    """A completion that is longer than the context is cut at --response_length."""
    Path("mine.py").write_text("calls = []\ndef rows(): calls.append(1); return [{'prompt': 'a', 'completion': 'b c'}]")
    files.load_module.cache_clear()
    args = train_distill.Args(dataset="mine.py:rows", divergence="jsd", on_policy_share=0.5, response_length=1)
    (prompt,), held_out = data.load_prompts(args, word_tokenizer(), 1)
    assert (prompt.ids, prompt.completion, held_out) == ([A], [B, C, EOS], [])
    assert data.completions([prompt], 1, "cpu")[0].tolist() == [[B]]
    assert files.load_module(str(Path("mine.py").resolve())).calls == [1]


# ---- demonstrations --------------------------------------------------------------------------------------------------


def test_demonstrations_have_limits(in_tmp, fails):
    tokenizer = word_tokenizer()
    write("rows.jsonl", [{"prompt": "a " * n, "completion": "b " * m} for n, m in ((9, 1), (2, 1), (3, 1), (2, 8))])
    assert [len(ids) for ids, _ in demonstrations_of("rows.jsonl", tokenizer, max_length=10)] == [2, 3]
    line = fails(demonstrations_of, "rows.jsonl", tokenizer, context=10, max_prompt_length=3)
    assert "1 of 3 rows have more than 10 tokens, the first one is row 4 with 11: the model's context" in line


# ---- comparisons -----------------------------------------------------------------------------------------------------
def test_comparisons_of_text_are_the_prompt_and_each_candidate(in_tmp, fails):
    write("rows.jsonl", [{"prompt": "a b", "candidates": ["c", "a", "b"], "best": best} for best in (2, 1)])
    expected = [[A, B, C, EOS], [A, B, A, EOS], [A, B, B, EOS]]
    assert comparisons_of("rows.jsonl", word_tokenizer()) == [(expected, 2), (expected, 1)]
    write("two.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    line = fails(comparisons_of, "two.jsonl", word_tokenizer(), eval_dataset="rows.jsonl")
    assert "--eval_dataset rows.jsonl: 3 candidates a row, but 2 in --dataset two.jsonl" in line
    write("one.jsonl", [{"prompt": "a", "candidates": ["b"], "best": 0}])
    assert "must hold 2 strings" in fails(comparisons_of, "one.jsonl", word_tokenizer())


# ---- the labels of lm-human-preferences ------------------------------------------------------------------------------
PAD, NUM_WORDS = 50259, 40  # the labels' padding; tokens of the tokenizer
WORDS_OF_LABELS = " ".join(f"w{i}" for i in range(4, NUM_WORDS))


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


LABEL = {f"sample{k}": [5, 6] for k in range(4)} | {"query": [7], "best": 0}
CHOICE, TOO_LONG = {"prompt": "w2 w3", "candidates": ["w4", "w5"], "best": 0}, "rows have more than 32 tokens, the"


@pytest.mark.parametrize(
    "row, change, words",
    [
        (CHOICE, {"candidates": ["w4"]}, "must hold 2 strings, in every row alike"),
        (CHOICE, {"candidates": "w4"}, "must hold 2 strings, in every row alike"),
        (CHOICE, {"candidates": ["w4", "w4 " * 40]}, f"1 of 2 {TOO_LONG} first one is row 2 with 43: "),
        (LABEL, {"best": 4}, "column 'best': 4 is no index of its candidates"),
        (LABEL, {"sample1": [3, NUM_WORDS, 3]}, "row 2: 40 is no token (the vocabulary has 40)"),
    ],
)
def test_a_comparison_that_cannot_be_read_is_named(in_tmp, fails, row, change, words):
    tokenizer = word_tokenizer(words=WORDS_OF_LABELS)
    line = fails(comparisons_of, write("rows.jsonl", [row, row | change]), tokenizer, context=32)
    assert "--dataset rows.jsonl: " in line and "row 2" in line and words in line


# ---- folders with the shape of repositories of the Hub ---------------------------------------------------------------
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


# ---- whole stages on conversations -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_policy_whose_turns_do_not_end_with_eos_ends_in_every_stage(in_tmp, tokenizers, capsys):
    """SFT, DPO, RLOO, the evaluation, and plain `generate` of the policy that was saved."""
    tokenizer, answer = tokenizers["chatml_base"], [assistant(REVIEWS[0]["completion"][:90].strip())]
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), max_position_embeddings=256, hidden_size=64)
    config = tiny_config(**sizes, eos_token_id=tokenizer.eos_token_id)
    GPTNeoXForCausalLM(config).save_pretrained("base"), tokenizer.save_pretrained("base")
    write("rows.jsonl", [{"messages": ASKED[0] + answer, "chosen": answer, "rejected": ANSWER}] * 16)
    Path("mine.py").write_text("def f(prompts, completions): return [len(c) for c in completions]")
    flags = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", batch_size=16, response_length=48, overwrite=True)
    sft = dict(num_train_epochs=80, learning_rate=5e-3, completion_only=True)
    train_sft.main(train_sft.Args(base_model="base", output_dir="sft", **sft, **flags))
    flags["sft_model_path"] = "sft"
    train_dpo.main(train_dpo.Args(output_dir="dpo", learning_rate=1e-5, **flags))
    rl = flags | dict(reward_fn=("mine.py:f",), total_episodes=16, num_mini_batches=1, learning_rate=1e-6)
    after = train_rloo.main(train_rloo.Args(output_dir="rloo", **rl))["after"]
    assert after["eval/objective/ended"] > 0.8  # sampled at temperature 1
    assert "a response ends with <|endoftext|> or <|im_end|>" in capsys.readouterr().out
    options = dict(policy_path="rloo", dataset="rows.jsonl", num_examples=4, judge="none")
    assert evaluate.main(evaluate.Args(**options))["metrics"]["policy"]["ended"]["value"] > 0.7
    ids = torch.tensor([template_ids(tokenizer, ASKED[0], add_generation_prompt=True)])
    for folder in ("sft", "dpo", "rloo"):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert model.generation_config.eos_token_id == chat.end_ids(tokenizer)
        text = tokenizer.decode(model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.size(1) :])
        assert text == answer[0]["content"] + "<|im_end|>"
