"""The programs of guide 9, as they stand there: what their SFT rows say is what a trajectory of the same turns holds.

An SFT row that lacks a stop token between two turns trained without any error, and cost a third of the game.
"""

import importlib.util
import json
import re

import pytest
from chat_templates import CHATML, OF_QWEN, bytes_and_words
from helpers import ROOT
from test_tools import chats, sft_row
from test_turns import play, rows_of

GUIDE = (ROOT / "docs" / "guides" / "9_tools_and_environments.md").read_text()


@pytest.fixture
def program(in_tmp):
    """program(name, beginning): the guide's program that begins so, written to `name` and imported."""

    def write(name, beginning):
        (code,) = (code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if code.startswith(beginning))
        (in_tmp / name).write_text(code)
        spec = importlib.util.spec_from_file_location(name, in_tmp / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return write


def test_the_games_sft_rows_are_its_trajectories(program):
    guess, tokenizer = program("guess.py", "import random"), bytes_and_words()
    rows = [row for row in guess.games() if row["prompt"].count("<eos>") == 3][:5]
    assert len(rows) == 5
    for row in rows:
        said = [*re.findall(r" \d(?=<eos>)", row["prompt"]), row["completion"]]
        turns = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in said]
        prompts = rows_of(tokenizer, [guess.ASK] * 9, number=[*range(1, 10)])
        flags = dict(env_fn="guess.py:env", max_turns=4, response_length=60)
        found, _, _ = play(tokenizer, prompts, [turns] * 9, **flags)
        played = [prompts[0].ids + x[m].tolist() for x, m in zip(found.responses, found.response_mask, strict=True)]
        assert tokenizer(row["prompt"] + row["completion"] + "<eos>").input_ids in played
    assert [guess.answer(text, 5) for text in ("3", "7", "x")] == [" higher", " lower", " That is no number."]
    assert guess.found(["?"] * 2, [" 5", "5x"], [[" 3", " 5"], ["5x"]], [5, 5]) == [0.8, -0.1]


def test_the_shops_sft_rows_are_its_trajectories(program):
    """The template is SmolLM2's, which shows no tools and writes no calls."""
    stock, tokenizer = program("stock.py", "import itertools"), bytes_and_words(CHATML, OF_QWEN, "<|im_end|>")
    for row in stock.written()[:3]:
        written = sft_row(tokenizer, row)
        call, result, answer = row["messages"][2:]
        asked = json.dumps({"name": "stock", "arguments": {"item": row["item"] + "s"}})
        called = tokenizer.decode(written.ids).rpartition("assistant\n<tool_call>")  # the last one, behind the example
        called = "<tool_call>" + called[2].partition("<|im_end|>")[0]
        assert json.loads(called.split("\n")[1]) == call["tool_calls"][0]["function"]
        for item, text in ((row["item"], called), (row["item"] + "s", f"<tool_call>\n{asked}\n</tool_call>")):
            messages = row["messages"][:2]
            args, prompts = chats(tokenizer, messages, tools=("stock.py:stock",))
            turns = [[*tokenizer(x).input_ids, tokenizer.eos_token_id] for x in (text, answer["content"])]
            found, said, _ = play(tokenizer, prompts, [turns], **vars(args))
            assert said[0] == [text, result["content"], answer["content"]] and found.ended.all()
            ids = prompts[0].ids + found.responses[0][found.response_mask[0]].tolist()
            assert (ids == written.ids + written.completion) == (item == row["item"])
        assert stock.right(["?"] * 2, [answer["content"], "There are 1."], [row["item"]] * 2) == [True, False]
    assert [row["messages"][1]["content"] for row in stock.rows()[:1]] == ["How many small locks do you have?"]
