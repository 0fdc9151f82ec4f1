"""A language model as the judge, behind a pretended endpoint: what it is asked, and what goes wrong."""

import asyncio
import csv
import functools
import importlib
import json
import math
import re
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT
from short_runs import contents, write_rows

from rlhf_details import evaluate, toy
from rlhf_details.plumbing.machine import judge as judge_module

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
KEY = "sk-secret-0123456789"


class Server:
    """An endpoint that records all. reply(number of the request, question) -> answer, or a status.

    None in place of an answer is a page of HTML, "gone" no connection, "a byte a second" no end, and bytes are a body.
    """

    def __init__(self, reply):
        self.bodies, self.heads, self.reply = [], [], reply

    async def respond(self, request):
        body, authorization = json.loads(request.content), request.headers["Authorization"]
        answer = self.reply(len(self.bodies), body["messages"][0]["content"])
        self.bodies.append(body)
        self.heads.append((request.url.path, authorization))
        if answer == "gone":
            raise httpx.ConnectError("nobody listens")
        if answer == "a byte a second":  # No read takes too long.
            await asyncio.sleep(1e6)
        if answer is None:
            return httpx.Response(200, html="<html>hello</html>")
        if isinstance(answer, bytes):
            return httpx.Response(200, content=answer, headers={"Content-Type": "application/json"})
        if isinstance(answer, int):
            words = f"Unsupported value: 'temperature' must be 1: {authorization}"
            bad = {"detail": [{"loc": ["body", words]}]} if answer == 422 else {"error": {"message": words}}
            return httpx.Response(answer, json=bad)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
        good = {"id": "1", "object": "chat.completion", "created": 0, "model": "", "choices": [choice]}
        return httpx.Response(200, json=good)


@pytest.fixture
def judge(tiny, in_tmp, monkeypatch):
    """judge(reply, at_once=8): an object with `server` and `run(**flags)`. The client tries twice in all."""
    write_rows("rows.jsonl", toy.rows("sft", "train")[:13])
    monkeypatch.setenv("OPENAI_API_KEY", KEY), monkeypatch.setattr(judge_module, "RETRIES", 1)

    def start(reply, at_once=8):
        monkeypatch.setattr(judge_module, "AT_ONCE", at_once)
        server = Server(reply)
        client = httpx.AsyncClient(transport=httpx.MockTransport(server.respond))
        monkeypatch.setattr(openai, "AsyncOpenAI", functools.partial(openai.AsyncOpenAI, http_client=client))
        options = dict(dataset="rows.jsonl", policy_path=str(tiny / "policy"), response_length=6, output_dir="out")
        options |= dict(judge="llm", judge_model="tiny-judge", judge_base_url="http://judge/v1")

        def run(**flags):
            metrics = evaluate.main(evaluate.Args(**(options | flags)))["metrics"]
            with open(Path(flags.get("output_dir", "out"), "samples.csv"), newline="") as file:
                return metrics["win_rate"], list(csv.DictReader(file))

        questions = lambda: [body["messages"][0]["content"] for body in server.bodies]  # noqa: E731
        return SimpleNamespace(server=server, run=run, questions=questions)

    return start


def taste(text):
    """What the judge below goes by: any function of the text that neither side always wins."""
    return zlib.crc32(text.strip().encode())


def tasteful(number, text):
    """A judge that prefers the same response of a pair in either order."""
    a, b = re.search(r"### Response A\n(.*)\n\n### Response B\n(.*)\n\n### Your", text, re.S).groups()
    return f"Comparison: one has more taste.\nPreferred: {'A' if taste(a) > taste(b) else 'B'}"


# ---- what is asked, and what an answer means -------------------------------------------------------------------------
def test_the_judges_preference_is_mapped_back_to_the_policy(judge, tmp_path):
    asked = judge(tasteful)
    rate, samples = asked.run()
    is_better = [taste(row["response"]) > taste(row["opponent_response"]) for row in samples]
    assert [row["verdict"] for row in samples] == ["won" if x else "lost" for x in is_better]
    assert 0 < sum(is_better) < 13 and rate["value"] == sum(is_better) / 13 and len(asked.server.bodies) == 13
    assert all(row["judge_answer"].startswith("Comparison: one has more taste.") for row in samples)
    assert {(body["model"], body["temperature"]) for body in asked.server.bodies} == {("tiny-judge", 0)}
    assert {*asked.server.heads} == {("/v1/chat/completions", f"Bearer {KEY}")}
    assert all(KEY.encode() not in content for content in contents(tmp_path).values())


@pytest.mark.parametrize("bad", [1, 13])
def test_unparsable_answers_are_not_won(judge, capsys, monkeypatch, bad):
    monkeypatch.delenv("OPENAI_API_KEY")  # A server of one's own needs none.
    w, samples = judge(lambda number, text: "neither" if number < bad else tasteful(number, text)).run()
    assert (w["unparsable"], w["won"] + w["lost"], w["value"]) == (bad, 13 - bad, w["won"] / 13)
    assert [row["verdict"] for row in samples].count("unparsable") == bad
    assert f"lost, {bad} unparsable, mean" in capsys.readouterr().out


def body(choices, **more):
    return json.dumps({"id": "1", "object": "chat.completion", "choices": choices} | more).encode()


def said(**message):
    return {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None} | message}


NO_ANSWER = {
    "choices null": body(None, error={"message": f"Upstream overloaded, {KEY}", "code": 502}),
    "choices empty": body([]),
    "choices missing": b'{"error": {"message": "Upstream overloaded"}}',
    "choice null": body([None]),
    "message null": body([said() | {"message": None}]),
    "content null": body([said()]),
    "refusal": body([said(refusal="No.")], usage=None),
    "no text in parts": body([said(content=[{"type": "image"}, None])]),
    **{
        reason: body([said(content="A") | {"finish_reason": reason}])
        for reason in ("length", "content_filter", "error")
    },
}
PARTS = [{"type": "text", "text": "One is kind.\n"}, {"type": "text", "text": '{"1": true, "2": true, "3": true}\nA'}]


@pytest.mark.parametrize("reply", NO_ANSWER)
def test_a_reply_without_an_answer_is_unparsable_and_asked_for_again(judge, capsys, reply):
    w, samples = judge(
        lambda number, text: NO_ANSWER[reply] if number == 2 else tasteful(number, text), at_once=1
    ).run()
    assert w["unparsable"] == 1 and [row["verdict"] for row in samples].count("unparsable") == 1
    assert len(Path("out/judge_answers.jsonl").read_text().splitlines()) == 12
    assert KEY not in capsys.readouterr().out


def test_an_answer_in_parts_is_read(judge):
    assert judge(lambda *_: body([said(content=PARTS)])).run()[0]["unparsable"] == 0


@pytest.mark.parametrize("reply", [*NO_ANSWER.values(), None, b"[]", b"null", b'{"choices": ['])
def test_a_rubric_abstains_where_a_reply_has_no_answer(judge, monkeypatch, reply):
    judge(lambda number, _: reply if number == 1 else body([said(content=PARTS)]), at_once=1)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "judge"))
    rubric = importlib.import_module("rubric")
    points = asyncio.run(rubric.rubric(["p"] * 3, ["c"] * 3))
    assert points == pytest.approx([0.6, math.nan, 0.6], nan_ok=True)


# ---- what goes wrong -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status, has_temperature", [(500, True), (429, True), (400, False), (422, False)])
def test_what_may_pass_is_tried_again(judge, status, has_temperature):
    """A judge that refuses temperature 0, as models that reason do, is asked without one."""
    asked = judge(lambda number, text: status if number == 0 else tasteful(number, text), at_once=1)
    assert asked.run()[0]["unparsable"] == 0 and len(asked.questions()) == 14
    assert {"temperature" in body for body in asked.server.bodies[1:]} == {has_temperature}


@pytest.mark.parametrize(
    "bad, attempts, words",
    [
        (500, 2, "500"),
        (None, 1, "choices"),
        (401, 1, "401"),
        ("gone", 2, "Connection"),
        ("a byte a second", 1, "no whole answer to a question within 3 s"),
    ],
)
def test_what_does_not_pass_ends_with_one_line_and_paid_answers_are_kept(
    judge, fails, monkeypatch, bad, attempts, words
):
    """A second start asks what is missing. Another judge is asked everything."""
    with monkeypatch.context() as patched:
        patched.setattr(judge_module, "TIMEOUT", 1.0 if bad == "a byte a second" else 60.0)
        asked = judge(lambda number, text: bad if number >= 5 else tasteful(number, text), at_once=1)
        line, kept = fails(asked.run), Path("out/judge_answers.jsonl")
    assert KEY not in line and "--judge_base_url http://judge/v1" in line and words in line
    assert f"{kept} keeps the answers" in line and not Path("out/summary.json").exists()
    paid, first = kept.read_text().splitlines(), asked.questions()
    assert len(paid) == 5 and first[5:] == first[5:6] * attempts
    kept.write_text("\n".join(paid)[:-9] + "\n")  # A kill has torn the last line.
    found = (again := judge(tasteful)).run()
    assert found == (fresh := judge(tasteful)).run(output_dir="fresh")
    assert {*again.questions()} == {*fresh.questions()} - {*first[:4]} and len(again.questions()) == 9
    for flags in (dict(judge_model="other"), dict(judge_base_url="http://other/v1")):
        other = judge(tasteful)
        other.run(overwrite=True, **flags)
        assert len(other.questions()) == 13


def test_after_a_question_that_fails_only_those_under_way_are_asked_and_kept(judge, fails):
    reply = lambda number, text: 401 if number == 4 else tasteful(number, text).replace("taste", "goût")  # noqa: E731
    asked = judge(reply, at_once=2)
    assert "401" in fails(asked.run) and len(asked.questions()) <= 6
    kept = Path("out/judge_answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(kept) == len(asked.questions()) - 1 and all("more goût" in line for line in kept)  # A person reads it.
