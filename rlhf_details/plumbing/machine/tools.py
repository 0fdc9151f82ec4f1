"""
Tools as an environment: Python functions that the policy calls.

`--tools FILE.py:f FILE.py:g` gives the chat template the JSON schema of each function, which transformers reads from its
type hints and docstring. A turn that calls tools is answered with a message for each call, in the order of the calls,
and a turn without a call ends the episode. Calls are read by the tokenizer's `parse_response` where it has a
`response_template`, and else as Qwen and Hermes write them: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>.
"""

import json
import re
import threading
from concurrent.futures import Future, wait

from transformers.utils import get_json_schema

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat, user_code

QUESTION = {"role": "user", "content": "A question."}


def show(args):
    """Puts the schemas beside the messages that the chat template is given, and imports the user's code."""
    schemas = []
    for spec in args.tools:
        function = user_code.load_function(spec, "--tools")
        try:
            schemas.append(get_json_schema(function))
        except Exception as e:  # It has no docstring, or an argument has no type hint or no line in the docstring.
            console.fail(f"--tools {spec}: {console.in_one_line(e)}")
    args.chat_template_kwargs = json.dumps(json.loads(args.chat_template_kwargs) | {"tools": schemas})


class Tools:
    """An environment function. Calls run in threads, all at once, and those that take too long are left behind."""

    def __init__(self, args, tokenizer):
        functions = [user_code.load_function(spec, "--tools") for spec in args.tools]
        self.functions, self.limit = {f.__name__: f for f in functions}, args.tool_timeout
        self.tokenizer, self.options = tokenizer, json.loads(args.chat_template_kwargs)

    def __call__(self, prompts, completions):
        """What the calls in the last turn of each episode return, as messages, or None where it calls nothing."""
        begun = [[self.begin(call) for call in self.calls_in(turns[-1])] for turns in completions]
        wait([future for futures in begun for future in futures], self.limit)
        return [[self.message(*pair) for pair in enumerate(futures)] or None for futures in begun]

    def calls_in(self, text):
        """The calls of a turn, each {"name", "arguments"}, or the text of one."""
        if not getattr(self.tokenizer, "response_template", None):
            return re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
        prompt = chat.render(self.tokenizer, [QUESTION], add_generation_prompt=True)
        try:
            turn = self.tokenizer.parse_response(text, prefix=prompt, tools=self.options["tools"])
        except Exception:  # A policy may write whatever it likes.
            return [text]
        return [call["function"] for call in turn.get("tool_calls", [])]

    def begin(self, call):
        """The Future of what a call returns."""
        future = Future()

        def run():
            try:
                found = json.loads(call) if isinstance(call, str) else call
                if found["name"] not in self.functions:
                    raise ValueError(f"there is no tool {found['name']!r}")
                result = user_code.result_of(self.functions[found["name"]](**found["arguments"]))
                future.set_result(result if isinstance(result, str) else json.dumps(result, default=str))
            except BaseException as e:  # The user's code may raise what it likes, and call exit().
                future.set_result(f"error: {console.in_one_line(e)}")

        threading.Thread(target=run, daemon=True).start()
        return future

    def message(self, number, future):
        """What is said of the call of this number in its turn. Some templates want an id of nine letters."""
        said = future.result() if future.done() else f"error: no result within {self.limit:g} s"
        return {"role": "tool", "content": said, "tool_call_id": f"{number:09}"}

    def check(self, rows):
        """Exits with an error if the policy is not told of the tools, or its calls could not be read."""
        call = {"type": "function", "id": "000000000", "function": {"name": "a_tool", "arguments": {}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        written = chat.render(self.tokenizer, [QUESTION, turn])
        # A template that leaves the call out has no form of its own, so the rows' system text gives one.
        if "a_tool" in written and not self.calls_in(written):
            hint = "--env_fn takes a function that reads it"
            console.fail(f"--tools: the chat template writes a call in a form that is not known, {written!r}; {hint}")
        for row in rows:
            prompt = row.columns["prompt"]
            if chat.render(self.tokenizer, prompt, row.options | {"tools": None}) == chat.render(
                self.tokenizer, prompt, row.options
            ) and prompt[0]["role"] != "system":
                hint = "its system text must say what they are and how to call them"
                console.fail(f"--tools: {row.source}: row {row.number}: the chat template does not show tools; {hint}")
