"""
An OpenAI-compatible server with the embedded task's judge, to try rubric.py without a language model:

    python examples/judge/server.py --fails 0.2

The flags are the faults of toy.Judge. A response meets the n-th criterion of a rubric if its score is above n points
(the third, which should not be met, if it is below). Where the judge fails, the answer is cut off.
"""

import json
import math
import re
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tyro

from rlhf_details import toy


@dataclass
class Args:
    port: int = 8000
    noise: float = 0.0
    length: float = 0.0
    word: float = 0.0
    first: float = 0.0
    fails: float = 0.0


def answer(judge, question):
    """What the judge says, or None where it fails."""
    prompt, *responses = re.findall(r"### (?:Prompt|Response(?: [AB])?)\n(.*?)(?=\n\n###)", question, re.S)
    if len(responses) == 2:
        x = judge.compare(prompt, *responses)
        return None if math.isnan(x) else f"Comparison: by gold.\nPreferred: {'A' if x > 0 else 'B'}"
    score = judge.score(prompt, *responses)
    numbers = map(int, re.findall(r"^(\d+)\. ", question.rpartition("### Criteria")[2], re.M))
    return None if math.isnan(score) else json.dumps({n: score < n if n == 3 else score > n for n in numbers})


def server(judge, port):
    """A server that is not yet running; port 0: any that is free."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = answer(judge, body["messages"][0]["content"])
            choice = {"index": 0, "finish_reason": "length" if text is None else "stop"}
            choice["message"] = {"role": "assistant", "content": text or '{"1": tr'}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            """Says nothing."""

    return ThreadingHTTPServer(("localhost", port), Handler)


if __name__ == "__main__":
    flags = vars(tyro.cli(Args))
    server(toy.Judge(**{name: x for name, x in flags.items() if name != "port"}), flags["port"]).serve_forever()
