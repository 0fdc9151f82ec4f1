"""Claims about the forms of data sets: prompts of every kind, conversations, dropped rows, and the Hub's folders.

What is expected comes from the tokenizer's own chat template and from the library's own models.
"""

import csv
import json
import math
import re
from pathlib import Path

import datasets
import pytest
import torch
from conftest import ppo_args, read_metrics, rloo_args, tiny_config
from test_stages import reward_args, sft_args, write_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_details import data, evaluate, toy, train_ppo, train_reward, train_rloo, train_sft, utils

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
# Llama 3's and Qwen's own way to cut a text into words: line breaks stay together
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REVIEWS = toy.rows("sft", "train")
LONG = " and the soup was cold" * 12


def make_tokenizer(special, template, bos_habit=False, **tokens):
    """A byte-level BPE tokenizer of 480 tokens over the toy reviews."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    texts = [f"system\n\nuser\n\nassistant\n\n{row['prompt']} {row['completion']}\n" for row in REVIEWS[:200]]
    backend.train_from_iterator(texts, trainer)
    if bos_habit:
        bos = tokens["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def llama():
    """BOS by habit and by template; EOS is the end of each turn; no padding token."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return make_tokenizer(special, LLAMA, True, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def chatml():
    """No BOS; EOS is the end of each turn, after which the template breaks the line."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return make_tokenizer(special, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def chatml_base():
    """As a base model has it: turns end with <|im_end|>, and EOS is another token. BOS is a habit that the template has not."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    return make_tokenizer(special, CHATML, True, bos_token="<s>", eos_token="<|endoftext|>")


def plain():
    """A template without special tokens."""
    return make_tokenizer(["<eos>", "<pad>"], PLAIN, eos_token="<eos>", pad_token="<pad>")


MAKERS = {"llama": llama, "chatml": chatml, "chatml_base": chatml_base, "plain": plain}
TEMPLATES = pytest.mark.parametrize("template", ["llama", "chatml"])
ALL_TEMPLATES = pytest.mark.parametrize("template", list(MAKERS))
TURN_END = {"llama": "<|eot_id|>", "chatml": "<|im_end|>", "chatml_base": "<|im_end|>"}


@pytest.fixture(scope="session")
def tokenizers():
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="session")
def chat_models(tmp_path_factory, tokenizers):
    """{template: folder with a random `policy` and a random `reward`}, both with that tokenizer."""
    folders = {}
    for name in ("llama", "chatml"):
        tokenizer, folder = tokenizers[name], tmp_path_factory.mktemp(name)
        ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id)
        config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.2, **ids)
        torch.manual_seed(0)
        GPTNeoXForCausalLM(config).save_pretrained(folder / "policy")
        config.num_labels = 1
        GPTNeoXForSequenceClassification(config).save_pretrained(folder / "reward")
        for kind in ("policy", "reward"):
            tokenizer.save_pretrained(folder / kind)
        folders[name] = folder
    return folders


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No test may wait for the network, or leave anything in the user's cache; files of other tests are forgotten."""
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data._load_module.cache_clear()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def fails(capsys):
    """fails(f, *args): f must end with exit code 2 and one line on stderr; returns the line."""

    def check(function, *args, **kwargs):
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            function(*args, **kwargs)
        line = capsys.readouterr().err
        assert e.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1 and line.endswith("\n"), line
        return line

    return check


@pytest.fixture
def sampled(monkeypatch):
    """sampled(script): from now on the prompts that it trains on, a set of tuples of token ids."""

    def watch(script):
        prompts, real = set(), script.sample

        def sample(policy, queries, query_mask, *rest):
            if next(x for x in rest if isinstance(x, tuple))[1] == train_rloo.TRAINING:
                prompts.update(tuple(q[m].tolist()) for q, m in zip(queries, query_mask, strict=True))
            return real(policy, queries, query_mask, *rest)

        monkeypatch.setattr(script, "sample", sample)
        return prompts

    return watch


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def conversations(n, start=0):
    """n of (prompt, one answer, another): every second one has a system message, every third an earlier turn."""
    result = []
    for i in range(start, start + n):
        prompt = [user(REVIEWS[i]["prompt"])]
        if i % 3 == 0:
            prompt = [user("where to ?"), assistant("to the " + REVIEWS[i + 1]["prompt"]), *prompt]
        if i % 2:
            prompt = [{"role": "system", "content": "you are kind ."}, *prompt]
        result.append((prompt, [assistant(REVIEWS[i]["completion"][:90].strip())], [assistant(REVIEWS[i + 7]["completion"][:60])]))
    return result


def template_ids(tokenizer, messages, **options):
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def whole_ids(tokenizer, messages, end):
    """The template's ids of a conversation, up to and with the last token that ends a turn."""
    ids, end = template_ids(tokenizer, messages), tokenizer.convert_tokens_to_ids(end)
    return ids[: len(ids) - ids[::-1].index(end)]


@torch.no_grad()
def mean_loss(folder, pairs):
    """Mean cross-entropy over the completions' tokens of (prompt, completion) ids, one row at a time."""
    model, losses = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for prompt, completion in pairs:
        logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        losses += [-logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]
    return sum(losses) / len(losses)


@torch.no_grad()
def library_scores(folder, rows):
    """The library's own scores of rows of ids, one at a time, without the normalisation's bias."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return [model(torch.tensor([ids])).logits[0, 0].item() for ids in rows]


def mean_comparison_loss(folder, comparisons):
    """Mean of -log softmax(scores)[best] over ([ids] * K, best)."""
    losses = []
    for candidates, best in comparisons:
        losses.append(-torch.tensor(library_scores(folder, candidates)).log_softmax(-1)[best].item())
    return sum(losses) / len(losses)


def run_sft(folder, **changes):
    """One step without a change of weights, on completions alone; returns the metrics."""
    values = dict(base_model=str(folder / "policy"), learning_rate=0.0, num_train_epochs=1, completion_only=True, eval_dataset=None)
    train_sft.main(sft_args(**(values | changes)))
    return read_metrics("runs/run")


def run_reward(folder, **changes):
    """One step without a change of weights; returns the metrics."""
    values = dict(learning_rate=0.0, normalization="none", eval_dataset=None)
    train_reward.main(reward_args(folder, **(values | changes)))
    return read_metrics("runs/run")


LOOPS = {"rloo": (train_rloo, rloo_args, {"rloo_k": 2}), "ppo": (train_ppo, ppo_args, {})}
BOTH_LOOPS = pytest.mark.parametrize("loop", list(LOOPS))


def loop_args(loop, folder, **changes):
    """Args of a run of one update: 8 prompts, each once."""
    _, make, own = LOOPS[loop]
    values = dict(dataset="rows.jsonl", batch_size=8 * own.get("rloo_k", 1), total_episodes=8 * own.get("rloo_k", 1))
    return make(folder, **(values | own | changes))


def run_loop(loop, folder, **changes):
    return read_metrics(LOOPS[loop][0].main(loop_args(loop, folder, **changes))["run"])


def assert_finite(rows):
    assert rows and all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, int | float))


def only_prompt(row):
    """The prompt that a row is read with."""
    return data.with_prompts([row], None, "--dataset rows.jsonl")[0]["prompt"]


# ---- 1. where a row's prompt comes from ------------------------------------------------------------------------------
PROMPT_FORMS = [
    ({"prompt": "why ?"}, "why ?"),
    ({"prompt": [user("why ?")]}, [user("why ?")]),
    ({"prompt": [5, 6, 7]}, [5, 6, 7]),
    ({"messages": [user("why ?"), assistant("so .")]}, [user("why ?")]),
    ({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}, [user("a"), assistant("b"), user("c")]),
    ({"messages": [user("a"), assistant("b"), user("c")]}, [user("a"), assistant("b"), user("c")]),
    ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, [user("a")]),
    ({"chosen": "Q: why? A: I can", "rejected": "Q: why? A: I cat"}, "Q: why? A: I"),
]


@pytest.mark.parametrize("row, expected", PROMPT_FORMS)
def test_each_form_of_a_row_gives_its_prompt(row, expected):
    assert only_prompt(row) == expected


@pytest.mark.parametrize("first", range(4))
def test_the_forms_take_precedence_in_their_order(tokenizers, first):
    forms = [
        ({"prompt": "p"}, "p"),
        ({"messages": [user("m"), assistant("x")]}, [user("m")]),
        ({"query_token": [600, 600, 5, 6]}, [5, 6]),
        ({"chosen": [user("c"), assistant("x")], "rejected": [user("c"), assistant("y")]}, [user("c")]),
    ]
    row = {column: value for columns, _ in forms[first:] for column, value in columns.items()}
    expected, prompt = forms[first][1], only_prompt(row)
    assert (data.encode(tokenizers["chatml"], prompt) if first == 2 else prompt) == expected


@ALL_TEMPLATES
def test_a_query_token_loses_its_padding_and_nothing_else(tokenizers, template):
    tokenizer = tokenizers[template]
    ids = [300, tokenizer.eos_token_id, 301, 302]
    for filler in {len(tokenizer), 50277, tokenizer.pad_token_id} - {None}:
        for padding in ([], [filler] * 5):
            assert data.encode(tokenizer, only_prompt({"query_token": padding + ids})) == ids


def test_padding_that_is_eos_is_told_from_the_eos_of_a_response():
    tokenizer = make_tokenizer(["<eos>"], None, eos_token="<eos>", pad_token="<eos>")
    row = {"query_token": [len(tokenizer)] * 3 + [300, 301], "reference_response_token": [302, 303, 0] + [len(tokenizer)] * 4}
    (row,) = data.with_completions(data.with_prompts([row], None, ""), "")
    assert tokenizer.eos_token_id == 0 and data.encode(tokenizer, row["prompt"], row["completion"]) == ([300, 301], [302, 303, 0])


TEXT_PAIRS = [
    ("Q: why? A: I can", "Q: why? A: I cat", "Q: why? A: I"),
    ("Q: why? A: yes", "Q: why? A: no", "Q: why? A:"),
    ("Q: why?\nA:\nyes", "Q: why?\nA:\nno", "Q: why?\nA:"),
    ("\n\nHuman: hi\n\nAssistant: I am", "\n\nHuman: hi\n\nAssistant: I'm", "\n\nHuman: hi\n\nAssistant:"),
    ("say Hello world", "say Helloween", "say"),  # one has a space where the other goes on with the word
    ("Q: x A: yes", "Q: x A: yes indeed", "Q: x A:"),  # one begins with the other
    ("A:  two", "A:  three", "A: "),
]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("chosen, rejected, prompt", TEXT_PAIRS)
def test_an_implicit_text_prompt_ends_before_the_last_space_in_common(chosen, rejected, prompt, swapped):
    pair = [rejected, chosen] if swapped else [chosen, rejected]
    assert data.split_common(*pair, "row 1") == (prompt, [text[len(prompt) :] for text in pair])


MESSAGE_PAIRS = [
    ([assistant("x")], [assistant("y")]),
    ([assistant("x"), user("more"), assistant("z")], [assistant("x"), user("less"), assistant("z")]),  # the answers share a start
    ([assistant("x")], [assistant("x"), user("go on"), assistant("z")]),
]


@pytest.mark.parametrize("start", [[user("a")], [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")]])
@pytest.mark.parametrize("chosen, rejected", MESSAGE_PAIRS)
def test_an_implicit_conversation_is_common_up_to_the_last_message_that_is_no_answer(start, chosen, rejected):
    for pair in ([chosen, rejected], [rejected, chosen]):
        assert data.split_common(*([*start, *answer] for answer in pair), "row 1") == (start, pair)


def test_nothing_in_common_is_an_error_that_names_the_row(fails):
    for chosen, rejected in (("yes", "no"), ([assistant("a")], [assistant("b")])):
        rows = [{"chosen": "Q: a", "rejected": "Q: b"}, {"chosen": chosen, "rejected": rejected}]
        assert "row 2" in fails(data.with_prompts, rows, None, "--dataset rows.jsonl")


@pytest.mark.parametrize("value", [5, "text", [[5]], [5.5], [-1], {"a": 1}, [None]])
def test_token_columns_that_hold_no_token_ids_are_a_one_line_error(fails, value):
    rows = [{"query_token": [5], "reference_response_token": [6]}, {"query_token": [5], "reference_response_token": [6]}]
    for column in rows[0]:
        wrong = [rows[0], rows[1] | {column: value}]
        read = lambda rows=wrong: data.with_completions(data.with_prompts(rows, None, "rows.jsonl"), "rows.jsonl")  # noqa: E731
        assert "row 2" in fails(read)


def test_a_row_without_any_prompt_is_an_error_that_names_the_row(fails):
    assert "row 2" in fails(data.with_prompts, [{"prompt": "a"}, {"text": "b"}], None, "--dataset rows.jsonl")


# ---- 2. conversations as token ids -----------------------------------------------------------------------------------
@ALL_TEMPLATES
def test_data_3_a_conversation_is_encoded_as_its_template_does(tokenizers, template):
    tokenizer = tokenizers[template]
    for prompt, _, _ in conversations(6):
        ids = data.encode(tokenizer, prompt)
        assert ids == template_ids(tokenizer, prompt, add_generation_prompt=True)
        assert ids.count(tokenizer.bos_token_id) == (template == "llama")
        assert (ids[0] == tokenizer.bos_token_id) == (template == "llama")


def test_the_tokenizers_with_the_habit_of_a_bos_do_have_it(tokenizers):
    assert {name for name, t in tokenizers.items() if t("a").input_ids[0] == t.bos_token_id} == {"llama", "chatml_base"}


@ALL_TEMPLATES
def test_a_prompt_that_ends_with_an_answer_is_continued(tokenizers, template):
    tokenizer = tokenizers[template]
    for prompt, answer, _ in conversations(3):
        begun = [*prompt, *answer]
        ids = data.encode(tokenizer, begun)
        assert ids == template_ids(tokenizer, begun, continue_final_message=True)
        assert tokenizer.decode(ids).endswith(answer[0]["content"])


@pytest.mark.parametrize("template", list(TURN_END))
def test_the_completion_of_a_begun_answer_goes_on_with_the_same_turn(tokenizers, template):
    tokenizer, end = tokenizers[template], tokenizers[template].convert_tokens_to_ids(TURN_END[template])
    prompt, completion = data.encode(tokenizer, [user("how much ?"), assistant("it was")], [assistant(" cheap .")])
    assert prompt == template_ids(tokenizer, [user("how much ?"), assistant("it was")], continue_final_message=True)
    assert completion.count(end) == 1 and completion[-1] == end and tokenizer.decode(completion[:-1]).strip() == "cheap ."


@pytest.mark.parametrize("template", list(TURN_END))
def test_a_completion_goes_up_to_the_end_of_its_turn(tokenizers, template):
    tokenizer = tokenizers[template]
    for prompt, answer, _ in conversations(6):
        ids, completion = data.encode(tokenizer, prompt, answer)
        assert ids == template_ids(tokenizer, prompt, add_generation_prompt=True)
        assert ids + completion == whole_ids(tokenizer, prompt + answer, TURN_END[template])
        assert tokenizer.decode(completion) == answer[0]["content"] + TURN_END[template]


@pytest.mark.parametrize("last", ["", "\n"])
def test_a_completion_without_an_end_of_its_own_gets_eos(last):
    tokenizer = plain()
    tokenizer.chat_template = PLAIN.replace("message['content'] + '\\n'", "message['content'] + " + repr(last))
    for prompt, answer, _ in conversations(3):
        ids, completion = data.encode(tokenizer, prompt, answer)
        assert completion.count(tokenizer.eos_token_id) == 1 and completion[-1] == tokenizer.eos_token_id
        assert ids + completion[:-1] == template_ids(tokenizer, prompt + answer)


def test_an_answer_that_ends_messages_follows_all_of_them_whatever_the_prompt_is(in_tmp):
    """As in ultrachat: the prompt is the first turn alone."""
    turns = [user("a"), assistant("b"), user("c")]
    rows = [{"prompt": prompt, "messages": [*turns, assistant("d")]} for prompt in ([user("a")], "a")]
    for row in rows:
        (read,) = train_sft.read_rows(write_rows("rows.jsonl", [row]), "--dataset")
        assert (read["prompt"], read["completion"]) == (turns, [assistant("d")])


def test_an_empty_answer_is_the_end_of_its_turn_alone(tokenizers):
    for template, end in TURN_END.items():
        _, completion = data.encode(tokenizers[template], [user("a")], [assistant("")])
        assert completion == [tokenizers[template].convert_tokens_to_ids(end)]


def test_an_answer_that_names_the_end_of_a_turn_is_kept_whole(tokenizers):
    tokenizer, answer = tokenizers["chatml"], [assistant("one <|im_end|> two")]
    prompt, completion = data.encode(tokenizer, [user("a")], answer)
    assert prompt + completion == whole_ids(tokenizer, [user("a"), *answer], "<|im_end|>")


def test_messages_without_a_template_are_a_one_line_error(fails, tiny, in_tmp):
    assert toy.tokenizer().chat_template is None
    assert "template" in fails(data.encode, toy.tokenizer(), [user("a")])
    rows = [{"prompt": p, "completion": a, "chosen": a, "rejected": b} for p, a, b in conversations(8)]
    write_rows("rows.jsonl", rows)
    for function in (run_sft, run_reward, lambda folder: run_loop("rloo", folder), lambda folder: run_loop("ppo", folder)):
        assert "template" in fails(function, tiny)
    args = evaluate.Args(dataset="rows.jsonl", policy_path=str(tiny / "policy"))
    assert "template" in fails(evaluate.main, args)


def test_text_is_encoded_as_ever_where_the_tokenizer_has_a_template(tokenizers):
    for tokenizer in tokenizers.values():
        text, answer = REVIEWS[0]["prompt"], " fine ."
        expected = tokenizer(answer, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
        assert data.encode(tokenizer, text, answer) == (tokenizer(text).input_ids, expected)


@TEMPLATES
@pytest.mark.parametrize("script", [train_rloo, train_ppo])
def test_a_score_is_read_at_the_last_token_though_prompts_hold_eos(tokenizers, chat_models, template, script):
    tokenizer, folder = tokenizers[template], chat_models[template] / "reward"
    pairs = [data.encode(tokenizer, prompt, answer) for prompt, answer, _ in conversations(6)]
    pairs = [(prompt, completion[: None if i % 2 else -1]) for i, (prompt, completion) in enumerate(pairs)]  # half of them ended
    assert all(tokenizer.eos_token_id in prompt for prompt, _ in pairs)
    queries, query_mask = utils.left_pad([prompt for prompt, _ in pairs])
    responses, response_mask = (x.flip(1) for x in utils.left_pad([completion[::-1] for _, completion in pairs]))
    model = script.Reward(utils.load_reward_model(folder, "--reward_model_path"))
    batch = queries, query_mask, responses, response_mask
    with torch.no_grad():
        scores = script.response_scores(model, batch, *([1] if script is train_rloo else []))
    assert scores.tolist() == pytest.approx(library_scores(folder, [p + c for p, c in pairs]), rel=1e-4, abs=1e-4)


@TEMPLATES
@BOTH_LOOPS
def test_the_eos_of_a_prompt_does_not_end_its_response(chat_models, in_tmp, template, loop):
    """Responses of one token hardly ever end, so that almost all must pay."""
    write_rows("rows.jsonl", [{"prompt": prompt} for prompt, _, _ in conversations(8)])
    Path("rewards_zero.py").write_text("def zero(prompts, completions):\n    return [0.0] * len(prompts)\n")
    rewards = dict(reward_model_path=None) if loop == "rloo" else {}
    row = run_loop(loop, chat_models[template], response_length=1, reward_fn=("rewards_zero.py:zero",), kl_coef=0.0, **rewards)[-1]
    without = run_loop(
        loop, chat_models[template], response_length=1, reward_fn=("rewards_zero.py:zero",), missing_eos_penalty=None, **rewards
    )[-1]
    paid = without["objective/scores"] - row["objective/scores"]
    assert row["val/num_eos_tokens"] <= 2 and paid >= 0.75


# ---- 3. training on conversations ------------------------------------------------------------------------------------
@TEMPLATES
def test_sft_learns_the_completions_of_the_template(tokenizers, chat_models, in_tmp, template):
    tokenizer, folder = tokenizers[template], chat_models[template]
    rows = conversations(8)
    whole = [whole_ids(tokenizer, p + a, TURN_END[template]) for p, a, _ in rows]
    prompts = [template_ids(tokenizer, p, add_generation_prompt=True) for p, _, _ in rows]
    expected = mean_loss(folder / "policy", [(p, w[len(p) :]) for p, w in zip(prompts, whole, strict=True)])
    write_rows("rows.jsonl", [{"messages": p + a} for p, a, _ in rows])
    write_rows("others.jsonl", [{"prompt": p, "completion": a} for p, a, _ in rows])
    for name in ("rows.jsonl", "others.jsonl"):
        metrics = run_sft(folder, dataset=name, eval_dataset="rows.jsonl")
        assert_finite(metrics)
        assert metrics[0]["train/sft/loss"] == pytest.approx(expected, rel=1e-4)
        assert metrics[-1]["eval/sft/loss"] == pytest.approx(expected, rel=1e-4)


@TEMPLATES
@pytest.mark.parametrize("form", ["explicit", "implicit", "repeated", "candidates"])
def test_reward_compares_scores_at_the_end_of_the_turn(tokenizers, chat_models, in_tmp, template, form):
    tokenizer, folder = tokenizers[template], chat_models[template]
    rows, comparisons = [], []
    for prompt, a, b in conversations(8):
        row = {"chosen": a, "rejected": b} if form == "explicit" else {"chosen": prompt + a, "rejected": prompt + b}
        row = {"candidates": [a, b], "best": 0} if form == "candidates" else row
        rows.append(row | ({} if form == "implicit" else {"prompt": prompt}))
        comparisons.append(([whole_ids(tokenizer, prompt + x, TURN_END[template]) for x in (a, b)], 0))
    write_rows("rows.jsonl", rows)
    metrics = run_reward(folder, eval_dataset="rows.jsonl")
    assert_finite(metrics)
    expected = mean_comparison_loss("reward", comparisons)  # nothing was trained: the saved head is the drawn one
    assert metrics[0]["train/rm/loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics[-1]["eval/rm/loss"] == pytest.approx(expected, rel=1e-4)


@TEMPLATES
def test_the_samples_that_normalise_scores_of_conversations_may_end(chat_models, in_tmp, template, monkeypatch):
    """As those of prompts in text do; only lm-human-preferences' labels were given to responses that no EOS ends."""
    write_rows("rows.jsonl", [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in conversations(8)])
    stops, real = [], train_rloo.sample
    monkeypatch.setattr(train_rloo, "sample", lambda *args: stops.append(args[6]) or real(*args))
    run_reward(chat_models[template], normalization="gain_bias", normalize_samples=8)
    tokenizer = AutoTokenizer.from_pretrained(chat_models[template] / "policy")
    assert stops and set(stops) == {tokenizer.eos_token_id}


@TEMPLATES
def test_the_stages_follow_each_other_on_conversations(chat_models, in_tmp, template, sampled, tokenizers):
    tokenizer, rows = tokenizers[template], conversations(16)
    write_rows("sft.jsonl", [{"messages": p + a} for p, a, _ in rows])
    write_rows("explicit.jsonl", [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in rows])
    write_rows("implicit.jsonl", [{"chosen": p + a, "rejected": p + b} for p, a, b in rows])
    Path("models").mkdir()
    policy = dict(learning_rate=1e-3, num_train_epochs=1, output_dir="models/policy")
    assert_finite(run_sft(chat_models[template], dataset="sft.jsonl", eval_dataset="sft.jsonl", **policy))
    made = Path("models").resolve()
    options = dict(output_dir="models/reward", learning_rate=1e-3, normalization="gain_bias", normalize_samples=8)
    assert_finite(run_reward(made, dataset="explicit.jsonl", eval_dataset="implicit.jsonl", **options))
    assert_finite(run_reward(made, dataset="implicit.jsonl", **(options | {"normalization": "mean_shift"})))
    expected = {tuple(template_ids(tokenizer, p, add_generation_prompt=True)) for p, _, _ in rows}
    for loop, dataset in (("rloo", "sft.jsonl"), ("ppo", "implicit.jsonl")):
        trained_on = sampled(LOOPS[loop][0])
        args = loop_args(loop, made, dataset=dataset, eval_dataset="explicit.jsonl", output_dir=f"models/{loop}")
        args.total_episodes = 2 * args.batch_size
        metrics = read_metrics(LOOPS[loop][0].main(args)["run"])
        assert_finite(metrics)
        assert metrics[-1]["update"] == 2 and trained_on == expected
        saved = AutoTokenizer.from_pretrained(f"models/{loop}")
        assert template_ids(saved, rows[0][0]) == template_ids(tokenizer, rows[0][0])


@TEMPLATES
@BOTH_LOOPS
def test_reward_functions_are_given_messages(chat_models, in_tmp, template, loop):
    rows = [{"prompt": p, "number": i, "reference": a} for i, (p, a, _) in enumerate(conversations(8))]
    write_rows("rows.jsonl", rows)
    Path("rewards_log.py").write_text(
        "import json\n"
        "def log(prompts, completions, **columns):\n"
        "    with open('calls.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([prompts, completions, columns]) + '\\n')\n"
        "    return [len(c[0]['content']) / 10 for c in completions]\n"
    )
    metrics = run_loop(loop, chat_models[template], reward_fn=("rewards_log.py:log",))
    assert_finite(metrics)
    seen = set()
    for line in Path("calls.jsonl").read_text().splitlines():
        prompts, completions, columns = json.loads(line)
        assert columns.keys() == {"number", "reference"}
        for prompt, completion, number, reference in zip(
            prompts, completions, columns["number"], columns["reference"], strict=True
        ):
            assert prompt == rows[number]["prompt"] and reference == rows[number]["reference"]
            (message,) = completion
            assert message.keys() == {"role", "content"} and message["role"] == "assistant"
            assert isinstance(message["content"], str) and "<|e" not in message["content"] and "<|im" not in message["content"]
            seen.add(number)
    assert seen == set(range(8))


def csv_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def evaluate_args(folder, **changes):
    """Args of an evaluation against the rows' own completions."""
    values = dict(
        dataset="rows.jsonl", policy_path=str(folder / "policy"), reward_model_path=str(folder / "reward"), judge="reward_model",
        response_length=8, output_dir="evaluation", overwrite=True,
    )  # fmt: skip
    return evaluate.Args(**(values | changes))


@TEMPLATES
def test_evaluation_scores_references_as_the_template_writes_them(tokenizers, chat_models, in_tmp, template):
    rows = conversations(8)
    write_rows("rows.jsonl", [{"messages": p + a} for p, a, _ in rows])
    evaluate.main(evaluate_args(chat_models[template]))
    whole = [whole_ids(tokenizers[template], p + a, TURN_END[template]) for p, a, _ in rows]
    found = [float(row["opponent_score"]) for row in csv_rows("evaluation/samples.csv")]
    assert found == pytest.approx(library_scores(chat_models[template] / "reward", whole), rel=1e-3, abs=1e-3)
    assert [row["opponent_response"] for row in csv_rows("evaluation/samples.csv")] == [a[0]["content"] for _, a, _ in rows]


# ---- 4. which rows are taken -----------------------------------------------------------------------------------------
def text_rows(n, long=()):
    """n rows of every text column; the prompts of those in `long` are long."""
    return [
        {
            "prompt": row["prompt"] + (LONG if i in long else ""),
            "completion": " " + row["completion"][:40],
            "chosen": " " + row["completion"][:40],
            "rejected": " " + REVIEWS[i + 1]["completion"][:30],
            "question": row["prompt"],
        }
        for i, row in enumerate(REVIEWS[:n])
    ]


def loss_of(script, folder, **changes):
    """The first loss of SFT or the reward model at learning rate 0: a function of the rows that are read."""
    return run_sft(folder, **changes)[0]["train/sft/loss"] if script == "sft" else run_reward(folder, **changes)[0]["train/rm/loss"]


BOTH_STAGES = pytest.mark.parametrize("script", ["sft", "reward"])


@BOTH_STAGES
def test_take_is_the_first_rows_of_a_stage(chat_models, in_tmp, script, fails):
    write_rows("rows.jsonl", text_rows(24))
    write_rows("first.jsonl", text_rows(8))
    folder = chat_models["chatml"]
    few = loss_of(script, folder, take=8)
    assert few == loss_of(script, folder, dataset="first.jsonl") and few == loss_of(script, folder, dataset="first.jsonl", take=99)
    assert "batch_size" in fails(loss_of, script, folder, take=7)


@BOTH_LOOPS
def test_take_is_the_first_rows_of_a_loop(tokenizers, chat_models, in_tmp, sampled, loop):
    write_rows("rows.jsonl", text_rows(24))
    trained_on = sampled(LOOPS[loop][0])
    run_loop(loop, chat_models["chatml"], take=8, eval_dataset="rows.jsonl")
    assert trained_on == {tuple(tokenizers["chatml"](row["prompt"]).input_ids) for row in text_rows(8)}


TEMPLATE = "Question: {question}\\nAnswer:"


def filled(row):
    return f"Question: {row['question']}\nAnswer:"


@BOTH_STAGES
def test_a_prompt_template_is_filled_in_a_stage(chat_models, in_tmp, script):
    rows = text_rows(8)
    write_rows("columns.jsonl", [{k: v for k, v in row.items() if k != "prompt"} for row in rows])
    write_rows("filled.jsonl", [row | {"prompt": filled(row)} for row in rows])
    folder = chat_models["chatml"]
    assert loss_of(script, folder, dataset="columns.jsonl", prompt_template=TEMPLATE) == loss_of(
        script, folder, dataset="filled.jsonl"
    )


@BOTH_LOOPS
def test_a_prompt_template_is_filled_in_a_loop(tokenizers, chat_models, in_tmp, sampled, loop):
    rows = text_rows(8)
    write_rows("rows.jsonl", rows)
    trained_on = sampled(LOOPS[loop][0])
    run_loop(loop, chat_models["chatml"], prompt_template=TEMPLATE)
    assert trained_on == {tuple(tokenizers["chatml"](filled(row)).input_ids) for row in rows}


def test_a_template_puts_in_what_the_columns_hold_and_reads_nothing_in_it():
    row = {"question": "{a} \\n b", "number": 7, "options": ["x", "y"]}
    assert data.fill("{{Q}} {question}\\n{number} {options[1]}\n", row, "row 1") == "{Q} {a} \\n b\n7 y\n"


def test_a_column_that_a_template_lacks_is_named(chat_models, in_tmp, fails):
    write_rows("rows.jsonl", [row | ({"title": "a"} if i == 0 else {}) for i, row in enumerate(text_rows(8))])
    folder, option = chat_models["chatml"], dict(prompt_template="{question} {title}")
    args = evaluate.Args(dataset="rows.jsonl", policy_path=str(folder / "policy"), **option)
    calls = [lambda: run_sft(folder, **option), lambda: run_reward(folder, **option), lambda: evaluate.main(args)]
    for call in [*calls, *(lambda loop=loop: run_loop(loop, folder, **option) for loop in LOOPS)]:
        line = fails(call)
        assert "title" in line and "row 2" in line


@pytest.mark.parametrize("template", ["{", "{question", "}", "{}", "{0}", "{question!z}", "{question:9q}", "{question.nothing}"])
def test_a_template_that_cannot_be_filled_is_a_one_line_error(fails, template):
    fails(data.with_prompts, [{"question": "a"}], template, "--dataset rows.jsonl")


def limit_of(tokenizer, rows):
    """The tokens of the longest prompt that is not a long one."""
    return max(len(tokenizer(row["prompt"]).input_ids) for row in rows if LONG not in row["prompt"])


def dropped(text):
    """The numbers in what is printed of dropped rows: [{the numbers of a line}]."""
    return [set(re.findall(r"\d+", line)) for line in text.splitlines() if "dropped" in line]


@BOTH_STAGES
def test_long_prompts_are_dropped_from_a_stage_and_counted(tokenizers, chat_models, in_tmp, capsys, script):
    rows, folder = text_rows(11, long=(0, 4, 10)), chat_models["chatml"]
    write_rows("rows.jsonl", rows)
    write_rows("held_out.jsonl", [*rows, *rows])
    write_rows("short.jsonl", [row for row in rows if LONG not in row["prompt"]])
    limit = limit_of(tokenizers["chatml"], rows)
    capsys.readouterr()
    few = loss_of(script, folder, max_prompt_length=limit, eval_dataset="held_out.jsonl")
    lines = dropped(capsys.readouterr().out)
    assert len(lines) == 2 and "3" in lines[0] and "6" in lines[1]
    name = "eval/sft/loss" if script == "sft" else "eval/rm/loss"
    evaluated = read_metrics("runs/run")[-1][name]
    assert few == loss_of(script, folder, dataset="short.jsonl", eval_dataset="short.jsonl")
    assert evaluated == pytest.approx(read_metrics("runs/run")[-1][name], rel=1e-5)
    assert not dropped(capsys.readouterr().out)


@BOTH_LOOPS
def test_long_prompts_are_dropped_from_a_loop_and_counted(tokenizers, chat_models, in_tmp, sampled, capsys, loop):
    rows = text_rows(11, long=(0, 4, 10))
    write_rows("rows.jsonl", rows)
    write_rows("held_out.jsonl", [*rows, *rows])
    tokenizer, trained_on = tokenizers["chatml"], sampled(LOOPS[loop][0])
    capsys.readouterr()
    options = dict(max_prompt_length=limit_of(tokenizer, rows), eval_dataset="held_out.jsonl")
    assert_finite(run_loop(loop, chat_models["chatml"], **options))
    lines = dropped(capsys.readouterr().out)
    assert len(lines) == 2 and "3" in lines[0] and "6" in lines[1]
    assert trained_on == {tuple(tokenizer(row["prompt"]).input_ids) for row in rows if LONG not in row["prompt"]}


def test_long_prompts_are_dropped_from_an_evaluation_and_counted(tokenizers, chat_models, in_tmp, capsys):
    rows = text_rows(11, long=(0, 4, 10))
    write_rows("rows.jsonl", rows)
    evaluate.main(evaluate_args(chat_models["chatml"], max_prompt_length=limit_of(tokenizers["chatml"], rows)))
    (line,) = dropped(capsys.readouterr().out)
    found = csv_rows("evaluation/samples.csv")
    assert "3" in line and [row["prompt"] for row in found] == [row["prompt"] for row in rows if LONG not in row["prompt"]]
    assert [row["opponent_response"] for row in found] == [row["completion"] for row in rows if LONG not in row["prompt"]]


def test_conversations_are_measured_with_their_template(tokenizers, chat_models, in_tmp, sampled):
    rows, tokenizer = conversations(16), tokenizers["llama"]
    write_rows("rows.jsonl", [{"prompt": p} for p, _, _ in rows])
    ids = sorted((template_ids(tokenizer, p, add_generation_prompt=True) for p, _, _ in rows), key=len)
    kept = [i for i in ids if len(i) <= len(ids[9])]
    trained_on = sampled(train_rloo)
    run_loop("rloo", chat_models["llama"], max_prompt_length=len(ids[9]), total_episodes=48)
    assert trained_on == {tuple(i) for i in kept}


@BOTH_LOOPS
@pytest.mark.parametrize("response_length", [10, 13])
def test_filter_length_keeps_nine_tenths_of_the_response_length(
    tokenizers, chat_models, in_tmp, sampled, capsys, loop, response_length
):
    rows = [{"prompt": list(range(300, 300 + n))} for n in range(5, 17)]
    write_rows("rows.jsonl", rows)
    kept = {tuple(row["prompt"]) for row in rows if 10 * len(row["prompt"]) <= 9 * response_length}
    trained_on = sampled(LOOPS[loop][0])
    capsys.readouterr()
    run_loop(loop, chat_models["chatml"], response_length=response_length, filter_length=True)
    (line,) = dropped(capsys.readouterr().out)
    assert trained_on == kept and str(12 - len(kept)) in line
    assert 0 < len(kept) < 8


def test_no_row_left_is_an_error(chat_models, in_tmp, fails):
    write_rows("rows.jsonl", text_rows(8))
    folder = chat_models["chatml"]
    for call in (run_sft, run_reward, *(lambda *a, loop=loop, **b: run_loop(loop, *a, **b) for loop in LOOPS)):
        fails(call, folder, max_prompt_length=1)
    for loop in LOOPS:
        fails(run_loop, loop, folder, response_length=4, filter_length=True)
    fails(evaluate.main, evaluate_args(folder, max_prompt_length=1))


CODE = """
import json
def rows(): return json.load(open("list.json"))
def each(): yield from rows()
def breaks(): raise RuntimeError("no rows\\ntoday")
def stops(): raise SystemExit(3)
def nothing(): return None
def strings(): return ["a", "b"]
number = 3
"""


@pytest.fixture
def functions(in_tmp):
    Path("list.json").write_text(json.dumps(text_rows(8)))
    write_rows("rows.jsonl", text_rows(8))
    Path("my_rows.py").write_text(CODE)
    return in_tmp


@BOTH_STAGES
def test_a_stage_reads_the_rows_that_a_function_returns(chat_models, functions, script):
    folder = chat_models["chatml"]
    expected = loss_of(script, folder)
    for name in ("rows", "each"):
        assert loss_of(script, folder, dataset=f"my_rows.py:{name}", eval_dataset="my_rows.py:rows") == expected


@BOTH_LOOPS
def test_a_loop_reads_the_rows_that_a_function_returns(tokenizers, chat_models, functions, sampled, loop):
    trained_on = sampled(LOOPS[loop][0])
    run_loop(loop, chat_models["chatml"], dataset=f"{functions}/my_rows.py:each", eval_dataset="my_rows.py:rows")
    assert trained_on == {tuple(tokenizers["chatml"](row["prompt"]).input_ids) for row in text_rows(8)}


@pytest.mark.parametrize(
    "spec",
    ["my_rows.py:" + name for name in "breaks stops nothing strings number missing".split()] + ["none.py:rows", "my_rows.py"],
)
def test_a_function_without_rows_is_a_one_line_error(chat_models, functions, fails, spec):
    folder = chat_models["chatml"]
    args = evaluate.Args(dataset=spec, policy_path=str(folder / "policy"))
    calls = [lambda: run_sft(folder, dataset=spec), lambda: run_reward(folder, dataset=spec), lambda: evaluate.main(args)]
    for call in [*calls, *(lambda loop=loop: run_loop(loop, folder, dataset=spec) for loop in LOOPS)]:
        assert spec.partition(":")[0] in fails(call)


@BOTH_STAGES
def test_later_messages_of_a_stage_name_rows_as_the_data_set_has_them(tokenizers, chat_models, in_tmp, fails, script):
    """Rows 1 and 5 are dropped; the answer of row 8 is too long for the model."""
    rows = text_rows(12, long=(0, 4))
    rows[7] |= dict.fromkeys(("completion", "chosen"), REVIEWS[0]["completion"] * 20)
    write_rows("rows.jsonl", rows)
    limit = limit_of(tokenizers["chatml"], rows)
    assert "row 8 " in fails(loss_of, script, chat_models["chatml"], max_prompt_length=limit)


@BOTH_STAGES
def test_the_report_of_a_stage_names_rows_as_the_data_set_has_them(tokenizers, chat_models, in_tmp, capsys, monkeypatch, script):
    """Rows 1 and 5 are dropped, and all others are in the step whose loss is not finite."""
    rows = text_rows(10, long=(0, 4))
    write_rows("rows.jsonl", rows)
    module = train_sft if script == "sft" else train_reward
    owner = module.LanguageModel if script == "sft" else module.Reward
    real = owner.forward
    monkeypatch.setattr(owner, "forward", lambda self, *a, **b: real(self, *a, **b) * math.nan)
    with pytest.raises(SystemExit) as e:
        loss_of(script, chat_models["chatml"], max_prompt_length=limit_of(tokenizers["chatml"], rows))
    assert e.value.code == 1
    names = re.search(r"^  rows ([\d, ]+)$", capsys.readouterr().err, re.MULTILINE)[1]
    assert sorted(map(int, names.split(", "))) == [2, 3, 4, 6, 7, 8, 9, 10]


@BOTH_LOOPS
def test_later_messages_of_a_loop_name_rows_as_the_data_set_has_them(tokenizers, chat_models, in_tmp, fails, capsys, loop):
    """Rows 1 and 5 are dropped; the reward of row 8 is none."""
    rows = text_rows(10, long=(0, 4))
    write_rows("rows.jsonl", [row | {"number": i} for i, row in enumerate(rows, 1)])
    Path("rewards_bad.py").write_text(
        "def bad(prompts, completions, number):\n    return ['x' if n == 8 else 0.0 for n in number]\n"
    )
    limit = limit_of(tokenizers["chatml"], rows)
    with pytest.raises(SystemExit):
        run_loop(loop, chat_models["chatml"], max_prompt_length=limit, reward_fn=("rewards_bad.py:bad",))
    assert "row 8 " in capsys.readouterr().err
    rows = text_rows(13, long=(0, 4))
    write_rows("rows.jsonl", [row | ({"prompt": [300, 999]} if i == 7 else {}) for i, row in enumerate(rows)])
    assert "row 8 " in fails(run_loop, loop, chat_models["chatml"], max_prompt_length=limit)


def test_take_and_row_numbers_agree(chat_models, in_tmp, fails):
    rows = text_rows(12)
    rows[9]["completion"] = 3
    write_rows("rows.jsonl", rows)
    assert "row 10" in fails(run_sft, chat_models["chatml"], take=10)
    run_sft(chat_models["chatml"], take=9)


# ---- 5. folders with the shape of Hub repositories -------------------------------------------------------------------
def save_splits(folder, **splits):
    """A folder as the Hub has it, of {split: rows}."""
    (folder / "data").mkdir(parents=True)
    for name, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"data/{name}-00000-of-00001.parquet")
    return str(folder)


def sft_trl_style(n):
    """n rows with exactly the columns of trl-internal-testing/tldr-preference-sft-trl-style."""
    rows = []
    for i, row in enumerate(REVIEWS[:n]):
        post, summary = row["prompt"], row["completion"][:50].strip()
        text = f"SUBREDDIT: r/{i}\n\nTITLE: x\n\nPOST: {post}\n\nTL;DR:"
        rows.append({
            "prompt": text, "messages": [user(text), assistant(summary)],
            "id": f"t3_{i}", "subreddit": f"{i}", "title": "x", "post": post, "summary": summary,
        })  # fmt: skip
    return rows


@pytest.fixture
def trl_style(in_tmp):
    """(folder, rows of train, rows of validation) like trl-internal-testing/tldr-preference-sft-trl-style."""
    rows = sft_trl_style(12)
    return save_splits(in_tmp / "trl_style", train=rows[:8], validation=rows[8:]), rows[:8], rows[8:]


@pytest.fixture
def trl_style_pairs(in_tmp):
    """(folder, rows of train, rows of validation) of comparisons whose messages begin with the row's prompt."""
    rows = []
    for row, other in zip(REVIEWS[:12], REVIEWS[20:32], strict=True):
        text, good, bad = f"POST: {row['prompt']}\n\nTL;DR:", row["completion"][:50].strip(), other["completion"][:40].strip()
        rows.append({"prompt": text, "chosen": [user(text), assistant(good)], "rejected": [user(text), assistant(bad)]})
    return save_splits(in_tmp / "trl_style_pairs", train=rows[:8], validation=rows[8:]), rows[:8], rows[8:]


def test_sft_reads_the_messages_of_the_trl_style_beside_its_prompts(tokenizers, chat_models, trl_style):
    folder, rows, held_out = trl_style
    tokenizer, pairs = tokenizers["chatml"], []
    for of_split in (rows, held_out):
        prompts = [template_ids(tokenizer, row["messages"][:1], add_generation_prompt=True) for row in of_split]
        whole = [whole_ids(tokenizer, row["messages"], "<|im_end|>") for row in of_split]
        pairs.append([(p, w[len(p) :]) for p, w in zip(prompts, whole, strict=True)])
    (metrics,) = run_sft(chat_models["chatml"], dataset=folder, eval_dataset=f"{folder}:validation")
    assert metrics["train/sft/loss"] == pytest.approx(mean_loss(chat_models["chatml"] / "policy", pairs[0]), rel=1e-4)
    assert metrics["eval/sft/loss"] == pytest.approx(mean_loss(chat_models["chatml"] / "policy", pairs[1]), rel=1e-4)


def test_reward_reads_the_implicit_prompt_of_the_trl_style(tokenizers, chat_models, trl_style_pairs):
    folder, rows, held_out = trl_style_pairs
    (metrics,) = run_reward(chat_models["chatml"], dataset=folder, eval_dataset=f"{folder}:validation")
    for name, of_split in (("train", rows), ("eval", held_out)):
        pairs = [([whole_ids(tokenizers["chatml"], row[c], "<|im_end|>") for c in ("chosen", "rejected")], 0) for row in of_split]
        assert metrics[f"{name}/rm/loss"] == pytest.approx(mean_comparison_loss("reward", pairs), rel=1e-4)


@BOTH_LOOPS
def test_a_loop_reads_the_prompts_of_the_trl_style_as_they_stand(tokenizers, chat_models, trl_style, sampled, loop):
    folder, rows, _ = trl_style
    trained_on = sampled(LOOPS[loop][0])
    assert_finite(run_loop(loop, chat_models["chatml"], dataset=f"{folder}:train", eval_dataset=f"{folder}:validation"))
    assert trained_on == {tuple(tokenizers["chatml"](row["prompt"]).input_ids) for row in rows}


def test_an_evaluation_reads_the_answers_of_the_trl_style(chat_models, trl_style):
    folder, _, held_out = trl_style
    evaluate.main(evaluate_args(chat_models["chatml"], dataset=f"{folder}:validation"))
    found = [row["opponent_response"].strip() for row in csv_rows("evaluation/samples.csv")]
    assert found == [row["messages"][1]["content"] for row in held_out]


@pytest.fixture(params=["unknown", "padding"])
def n_plus(request, in_tmp, tokenizers):
    """(folder of summaries, folder of comparisons, their rows) as N+ has them: token ids, filled up on one side."""
    tokenizer = tokenizers["chatml"]
    filler = len(tokenizer) if request.param == "unknown" else tokenizer.pad_token_id
    rows = []
    for i, row in enumerate(REVIEWS[:12]):
        query = f"SUBREDDIT: r/{i}\n\nTITLE: x\n\nPOST: {row['prompt']}\n\nTL;DR:"
        responses = [f" {REVIEWS[i + k]['completion'][: 40 + 7 * k]}" for k in (0, 1)]
        ids = tokenizer(query).input_ids
        answers = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in responses]
        rows.append({
            "id": f"t3_{i}", "subreddit": "x", "title": "x", "post": row["prompt"], "summary": responses[0].strip(),
            "query": query, "query_token": [filler] * (90 - len(ids)) + ids, "reference_response": responses[0],
            "reference_response_token": answers[0] + [filler] * (60 - len(answers[0])),
            "reference_response_token_len": len(answers[0]), "query_reference_response": query + responses[0],
            "response0": responses[0], "response0_token": answers[0] + [filler] * (60 - len(answers[0])),
            "response1": responses[1], "response1_token": answers[1] + [filler] * (60 - len(answers[1])),
            "choice": i % 2, "ids": (ids, answers),
        })  # fmt: skip
    summaries = [{k: v for k, v in row.items() if k not in ("choice", "ids") and not re.match(r"response\d", k)} for row in rows]
    comparisons = [{k: v for k, v in row.items() if k != "ids" and "reference" not in k} for row in rows]
    folders = [
        save_splits(in_tmp / name, train=of[:8], validation=of[8:])
        for name, of in (("summaries", summaries), ("comparisons", comparisons))
    ]
    return *folders, rows


def test_sft_reads_the_tokens_of_n_plus(chat_models, n_plus):
    folder, _, rows = n_plus
    pairs = [(query, answers[0]) for query, answers in (row["ids"] for row in rows)]
    (metrics,) = run_sft(chat_models["chatml"], dataset=folder, eval_dataset=f"{folder}:validation")
    assert metrics["train/sft/loss"] == pytest.approx(mean_loss(chat_models["chatml"] / "policy", pairs[:8]), rel=1e-4)
    assert metrics["eval/sft/loss"] == pytest.approx(mean_loss(chat_models["chatml"] / "policy", pairs[8:]), rel=1e-4)


def test_reward_reads_the_tokens_of_n_plus(chat_models, n_plus):
    _, folder, rows = n_plus
    (metrics,) = run_reward(chat_models["chatml"], dataset=folder, eval_dataset=f"{folder}:validation")
    pairs = [([row["ids"][0] + answer for answer in row["ids"][1]], row["choice"]) for row in rows]
    assert metrics["train/rm/loss"] == pytest.approx(mean_comparison_loss("reward", pairs[:8]), rel=1e-4)
    assert metrics["eval/rm/loss"] == pytest.approx(mean_comparison_loss("reward", pairs[8:]), rel=1e-4)


@BOTH_LOOPS
def test_a_loop_reads_the_tokens_of_n_plus(chat_models, n_plus, sampled, loop):
    folder, _, rows = n_plus
    trained_on = sampled(LOOPS[loop][0])
    assert_finite(run_loop(loop, chat_models["chatml"], dataset=folder, eval_dataset=f"{folder}:validation"))
    assert trained_on == {tuple(row["ids"][0]) for row in rows[:8]}


def test_an_evaluation_reads_the_tokens_of_n_plus(chat_models, n_plus):
    folder, _, rows = n_plus
    evaluate.main(evaluate_args(chat_models["chatml"], dataset=f"{folder}:validation"))
    found = csv_rows("evaluation/samples.csv")
    whole = [row["ids"][0] + row["ids"][1][0] for row in rows[8:]]
    expected = library_scores(chat_models["chatml"] / "reward", whole)
    assert [float(row["opponent_score"]) for row in found] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert [row["prompt"] for row in found] == [row["query"] for row in rows[8:]]
    assert [row["opponent_response"] for row in found] == [row["reference_response"] for row in rows[8:]]


@pytest.mark.parametrize("form", ["lines", "list"])
def test_reward_reads_a_file_of_a_folder_of_labels(chat_models, in_tmp, form):
    """The padding is 50259, wherever it stands; the file beside has other rows."""
    pad, of_task = 50259, {}
    for task, shift in (("sentiment", 0), ("descriptiveness", 100)):
        real = lambda i, n, shift=shift: [(shift + 17 * i + j) % 470 + 5 for j in range(n)]  # noqa: E731
        rows = []
        for i in range(8):
            row = {"query": [pad] * (3 + i % 4) + real(i, 9 - i % 4), "best": i % 4}
            rows.append(row | {f"sample{k}": real(31 * k + i, 4 + k) + [pad] * (4 - k) for k in range(4)})
        of_task[task] = rows
        (in_tmp / "labels" / task).mkdir(parents=True)
        text = json.dumps(rows) if form == "list" else "".join(json.dumps(row) + "\n" for row in rows)
        (in_tmp / "labels" / task / "offline_5k.json").write_text(text)
    spec = f"{in_tmp}/labels:descriptiveness/offline_5k.json"
    (metrics,) = run_reward(chat_models["chatml"], dataset=spec)
    without = lambda ids: [i for i in ids if i != pad]  # noqa: E731
    comparisons = [
        ([without(row["query"]) + without(row[f"sample{k}"]) for k in range(4)], row["best"]) for row in of_task["descriptiveness"]
    ]
    assert metrics["train/rm/loss"] == pytest.approx(mean_comparison_loss("reward", comparisons), rel=1e-4)
