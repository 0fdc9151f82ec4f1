"""Trajectories of several turns: which ids stand in them, which masks they have, and what a chat template writes.

The sampler is a stand-in that says what a test wants, so that every row can be drawn.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from chat_templates import CHATML, LLAMA_3, MISTRAL_3, OF_LLAMA, OF_MISTRAL, OF_QWEN, QWEN_3, QWEN_25, bytes_and_words
from helpers import ROOT, tiny_model

from rlhf_details import noise, toy, train_agent, utils
from rlhf_details.plumbing.inputs import data, stop_tokens
from rlhf_details.plumbing.machine import environments

FLAGS = dict(env_fn=f"{ROOT}/tests/environments.py:by_row", env_role="user", max_turns=8, max_observation_tokens=None)
FLAGS |= dict(
    prompt_template=None,
    long_observation="cut",
    response_length=40,
    template_date=None,
    chat_template_kwargs="{}",
    tools=(),
)
WORDS = toy.tokenizer("toy-tools")


def rows_of(tokenizer, prompts, **columns):
    """Prompts of a data set. columns: a list for each."""
    rows = [{"prompt": prompt} | {name: x[i] for name, x in columns.items()} for i, prompt in enumerate(prompts)]
    flags = dict(dataset="rows", max_prompt_length=None)
    return data.encode(SimpleNamespace(**FLAGS | flags), "dataset", rows, tokenizer, 10_000)


def play(tokenizer, rows, turns, **flags):
    """(Trajectories, said, [(queries, key, episodes, room) of each call]) where the policy of a row says `turns`[row]:
    a list of ids for each turn. A turn without room for all of its ids is cut.
    """
    args, calls, said_by = SimpleNamespace(**FLAGS | flags), [], [iter(x) for x in turns]
    env = environments.Environment(args, Accelerator(cpu=True), tokenizer, rows)

    def sample(policy, queries, query_mask, episodes, n, key, room):
        calls.append(([q[m].tolist() for q, m in zip(queries, query_mask, strict=True)], key, episodes.tolist(), room))
        ids = [next(said_by[i])[:most] for i, most in zip(episodes.tolist(), room.tolist(), strict=True)]
        padded = [x + [0] * (args.response_length - len(x)) for x in ids]
        mask = torch.arange(args.response_length) < torch.tensor([[len(x)] for x in ids])
        return torch.tensor(padded), mask, -0.5 * mask.float()

    stop_ids = stop_tokens.stop_ids(tokenizer, "eos", "--stop_token")
    numbers = torch.arange(len(rows))
    found, said = train_agent.rollout(object(), sample, env, rows, numbers, (1, 0, 7), stop_ids, args)
    return found, said, calls


def ids(text):
    return WORDS(text).input_ids


def drawn(found, row):
    """A row of Trajectories: its words, and under each 1 where the policy wrote it."""
    words = [WORDS.decode([i]).strip() for i in found.responses[row][found.response_mask[row]].tolist()]
    return " ".join(words), "".join(map(str, found.action_mask[row][found.response_mask[row]].int().tolist()))


def test_agt_1_and_3_the_mask_is_of_what_the_policy_wrote_with_the_end_of_each_turn():
    rows = rows_of(WORDS, ["the red box ?", "the blue box ?"], said=[["red is 3 4 ;", "error ;"], []])
    turns = [[ids("ask red ;"), ids("ask 3 ;"), ids("say 3 4 ;")], [ids("say 1 ;")]]
    found, said, _ = play(WORDS, rows, turns)
    assert drawn(found, 0) == (
        "ask red ; red is 3 4 ; ask 3 ; error ; say 3 4 ;",
        "1 1 1 0 0 0 0 0 1 1 1 0 0 1 1 1 1".replace(" ", ""),
    )
    assert drawn(found, 1) == ("say 1 ;", "111")
    assert found.ended.tolist() == [True, True]
    assert said == [[" ask red", "red is 3 4 ;", " ask 3", "error ;", " say 3 4"], [" say 1"]]
    # Behind the end there is nothing, and observations have no log-prob.
    assert not found.responses[~found.response_mask].any() and not found.logprobs[~found.action_mask].any()
    assert (found.logprobs[found.action_mask] == -0.5).all()
    metrics = environments.metrics(*found[1:3], found.ended, "val/", "sequence_lengths")
    assert metrics["val/turns"] == 2 and metrics["val/sequence_lengths"] == (10 + 3) / 2
    assert metrics["val/observation_tokens"] == 7 / 2 and metrics["val/ran_out"] == 0


def test_agt_4_sampled_ids_are_never_made_of_text_again():
    """A tokenizer may write the same text with fewer ids. The query of a turn has those that were sampled."""
    tokenizer = bytes_and_words()
    one = tokenizer("hello").input_ids
    split = [tokenizer.convert_tokens_to_ids(x) for x in "hello"]
    assert tokenizer.decode(split) == tokenizer.decode(one) and len(one) < len(split)
    end = [tokenizer.eos_token_id]
    rows = rows_of(tokenizer, ["say it"], said=[["again"]])
    found, _, calls = play(tokenizer, rows, [[split + end, one + end]])
    between = tokenizer("again").input_ids
    assert calls[1][0] == [rows[0].ids + split + end + between]
    assert found.responses[0][found.response_mask[0]].tolist() == split + end + between + one + end


def test_gen_4_the_turn_is_a_coordinate_of_the_noise_from_the_second_one_on():
    rows = rows_of(WORDS, ["the red box ?"], said=[["error ;"] * 2])
    _, _, calls = play(WORDS, rows, [[ids("ask 3 ;")] * 3])
    assert [key for _, key, _, _ in calls] == [(1, 0, 7), (1, 0, 7, 2), (1, 0, 7, 3)]
    episodes = torch.arange(1000)
    keys = torch.cat([noise.keys_of_episodes(key, episodes) for _, key, _, _ in calls])
    assert len(keys.unique()) > 2990  # The keys of two turns are not the same.


def test_an_episode_that_has_no_room_or_no_turn_left_has_not_ended():
    """No observation stands last in a row: nothing could follow it."""
    said = [["red is 3 4 ;"] * 9]
    turns = [[ids("ask red ;")] * 9]
    rows = rows_of(WORDS, ["the red box ?"], said=said)
    found, _, calls = play(WORDS, rows, turns, max_turns=2)
    assert drawn(found, 0) == ("ask red ; red is 3 4 ; ask red ;", "11100000111") and not found.ended.any()
    for R, words in ((8, 3), (9, 9), (10, 10), (11, 11), (15, 11), (17, 17)):  # A turn that is cut stays.
        found, _, calls = play(WORDS, rows, turns, response_length=R)
        assert found.response_mask.sum() == words and not found.ended.any(), R
        assert bool(found.action_mask[0, words - 1]) and max(room.max() for *_, room in calls) == R
    assert environments.metrics(*found[1:3], found.ended, "", "length")["ran_out"] == 1
    # Who ends the episode while the last turn stands has ended it.
    rows = rows_of(WORDS, ["the red box ?"], said=[["red is 3 4 ;"]])
    assert play(WORDS, rows, [[ids("ask red ;"), ids("say 3 4 ;")]], max_turns=2)[0].ended.all()


@pytest.mark.parametrize("mode, tokens", [("cut", 4), ("end", 0)])
def test_a_long_observation_loses_its_end_or_ends_the_episode(mode, tokens):
    rows = rows_of(WORDS, ["the red box ?"], said=[["red is same as blue ;"]])
    turns = [[ids("ask red ;"), ids("say 1 ;")]]
    found, said, _ = play(WORDS, rows, turns, max_observation_tokens=4, long_observation=mode)
    between = found.response_mask & ~found.action_mask
    assert 0 <= tokens - between.sum() <= 1 and found.ended.tolist() == [mode == "cut"]
    # Rewards read what the policy has read.
    assert "".join(said[0][1:2]) == WORDS.decode(found.responses[0][between[0]]).strip()


def test_a_process_without_an_active_episode_samples_for_a_dummy_row(monkeypatch):
    """The other one has episodes for three turns: so many calls make both."""
    over, gather = iter([False, False, True]), []
    monkeypatch.setattr(environments.Environment, "is_over", lambda self, active: gather.append(active) or next(over))
    rows = rows_of(WORDS, ["the red box ?"], said=[[]])
    found, _, calls = play(WORDS, rows, [[ids("say 1 ;")] * 3])
    assert len(calls) == 3 and gather == [[], [], []]
    assert drawn(found, 0) == ("say 1 ;", "111") and found.ended.all()


def test_an_empty_turn_is_a_turn():
    rows = rows_of(WORDS, ["the red box ?"], said=[["error ;"]])
    found, said, _ = play(WORDS, rows, [[ids(";"), ids("say 1 ;")]])
    assert drawn(found, 0) == ("; error ; say 1 ;", "100111") and said == [["", "error ;", " say 1"]]


# ---- the sampler's room ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_room_cuts_a_row_and_leaves_the_others_as_they_are(kind):
    """Also where the positions of a row that is cut would soon lie beyond the model's context."""
    policy = train_agent.Policy(tiny_model(kind, max_position_embeddings=24), 1.0)
    queries, query_mask = utils.left_pad([[5] * 20, [6] * 4, [7] * 9])
    given = queries, query_mask, torch.arange(3), 1
    more = torch.tensor([], dtype=torch.long), (1, 0, 1), 3
    room = torch.tensor([4, 12, 7])
    short = utils.sample(policy, *given, 12, *more, room)
    assert short[1].sum(1).tolist() == room.tolist()
    for i in (1, 2):
        alone = utils.sample(policy, *(x[i : i + 1] for x in given[:3]), 1, int(room[i]), *more)
        assert short[0][i, : room[i]].tolist() == alone[0][0].tolist()
        torch.testing.assert_close(short[2][i, : room[i]], alone[2][0])


# ---- what chat templates write between turns -------------------------------------------------------------------------
TOOL = "\n<|im_start|>user\n<tool_response>\nTEXT\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
SAID = "\n<|im_start|>user\nTEXT<|im_end|>\n<|im_start|>assistant\n"
HEADS = "<|start_header_id|>{}<|end_header_id|>\n\n"
# name: (template, its special tokens, what ends a turn, EOS, flags, what it writes between two turns)
TEMPLATES = {
    "chatml": (CHATML, OF_QWEN, "<|im_end|>", "<|endoftext|>", {}, SAID),
    "llama 3": (
        *(LLAMA_3, OF_LLAMA, "<|eot_id|>", "<|end_of_text|>", {}),
        HEADS.format("user") + "TEXT<|eot_id|>" + HEADS.format("assistant"),
    ),
    "qwen 2.5": (QWEN_25, OF_QWEN, "<|im_end|>", "<|im_end|>", {}, SAID),
    "qwen 2.5, a tool": (QWEN_25, OF_QWEN, "<|im_end|>", "<|im_end|>", dict(env_role="tool"), TOOL),
    "qwen 3": (QWEN_3, OF_QWEN, "<|im_end|>", "<|im_end|>", {}, SAID),
    "qwen 3, a tool": (QWEN_3, OF_QWEN, "<|im_end|>", "<|im_end|>", dict(env_role="tool"), TOOL),
    "qwen 3, no thinking": (
        *(QWEN_3, OF_QWEN, "<|im_end|>", "<|im_end|>"),
        dict(chat_template_kwargs='{"enable_thinking": false}'),
        SAID + "<think>\n\n</think>\n\n",
    ),
    "mistral 0.3": (MISTRAL_3, OF_MISTRAL, "</s>", "</s>", {}, "[INST] TEXT[/INST]"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_between_sampled_ids_stand_those_of_the_template(name, monkeypatch):
    """A trajectory of four turns, whose turns the tokenizer would write with other ids."""
    template, special, end, eos, flags, between = TEMPLATES[name]
    tokenizer = bytes_and_words(template, special, eos)
    monkeypatch.setitem(FLAGS, "chat_template_kwargs", flags.get("chat_template_kwargs", "{}"))
    texts = ["again hello", " the answer is <four>\n", "An answer."]
    rows = rows_of(tokenizer, [[{"role": "user", "content": "hello?"}]], said=[texts])
    stop = tokenizer.convert_tokens_to_ids(end)
    turn = [*map(tokenizer.convert_tokens_to_ids, "hello"), stop]
    turns = [turn, [stop], tokenizer("hello again").input_ids + [stop], turn]
    found, said, calls = play(tokenizer, rows, [turns], response_length=400, **flags)
    shown = [text.strip() if name == "llama 3" else text for text in texts]  # Llama 3's strips what is said.
    written = [tokenizer(between.replace("TEXT", text), add_special_tokens=False).input_ids for text in shown]
    expected = turns[0] + written[0] + turns[1] + written[1] + turns[2] + written[2] + turns[3]
    assert found.responses[0][found.response_mask[0]].tolist() == expected
    assert found.responses[0][found.action_mask[0]].tolist() == [i for turn in turns for i in turn]
    assert [query for call in calls for query in call[0]][-1] == rows[0].ids + expected[: -len(turns[3])]
    assert said[0][1::2] == texts and said[0][::2] == ["hello", "", "hello again", "hello"]


@pytest.mark.parametrize("role, drops", [("user", True), ("tool", False)])
def test_a_template_that_drops_reasoning_is_named_and_the_sampled_ids_stay(capsys, role, drops):
    """Qwen 3's forgets what was thought before the last question, and not before the last tool's answer."""
    tokenizer = bytes_and_words(QWEN_3, OF_QWEN, "<|im_end|>")
    rows = rows_of(tokenizer, [[{"role": "user", "content": "hello?"}]], said=[["again"]])
    turn = tokenizer("<think>\nthe answer\n</think>\n\nfour<|im_end|>").input_ids
    found, _, _ = play(tokenizer, rows, [[turn, turn]], env_role=role, response_length=400)
    assert found.responses[0][: len(turn)].tolist() == turn
    assert ("drops the reasoning of earlier turns" in capsys.readouterr().out) == drops


def test_a_cut_observation_keeps_what_the_template_writes_behind_it():
    tokenizer = bytes_and_words(CHATML, OF_QWEN, "<|im_end|>")
    text = "hello again " * 30
    rows = rows_of(tokenizer, [[{"role": "user", "content": "hello?"}]], said=[[text]])
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    flags = dict(max_observation_tokens=40, response_length=200)
    found, said, _ = play(tokenizer, rows, [[[stop], [stop]]], **flags)
    shown = tokenizer.decode(found.responses[0][found.response_mask[0] & ~found.action_mask[0]])
    head, tail = SAID.split("TEXT")
    assert shown.startswith(head) and shown.endswith(tail) and text.startswith(shown[len(head) : -len(tail)])
    assert said[0][1] == shown[len(head) : -len(tail)]
    assert 20 < (found.response_mask & ~found.action_mask).sum() <= 40


def test_a_template_that_refuses_a_tool_is_one_line(fails):
    tokenizer = bytes_and_words(MISTRAL_3, OF_MISTRAL, "</s>")
    rows = rows_of(tokenizer, [[{"role": "user", "content": "hello?"}]], said=[[]])
    line = fails(play, tokenizer, rows, [[]], env_role="tool")
    assert "--env_role tool" in line and "Tool call IDs" in line
