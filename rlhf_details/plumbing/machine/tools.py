"""
Tools as an environment: Python functions that the policy calls.

`--tools FILE.py:f FILE.py:g` gives the chat template the JSON schema of each function, which transformers reads from
its type hints and docstring. A turn that calls tools is answered with a message for each call, in the order of the
calls, and a turn without a call ends the episode. Calls are read by the tokenizer's `parse_response` where it has a
`response_template`, and else as Qwen's and Hermes' templates write them:
<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>.
"""

import contextlib
import inspect
import json
import os
import re
import threading
import time
from concurrent.futures import Future, wait

from transformers.utils import get_json_schema

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat, user_code

ID = "000000000"
AT_ONCE = min(32, (os.cpu_count() or 1) + 4)  # as many threads as concurrent.futures takes


def show(args):
    """Puts the schemas beside the messages that the chat template is given, and imports the user's code."""
    schemas = []
    for spec in args.tools:
        function = user_code.load_function(spec, "--tools")
        try:
            schemas.append(get_json_schema(function))
        except Exception as e:  # It has no docstring, or an argument has no type hint or no line in the docstring.
            console.fail(f"--tools {spec}: {console.in_one_line(e)}")
    with console.reading("--chat_template_kwargs", args.chat_template_kwargs):
        args.chat_template_kwargs = json.dumps(json.loads(args.chat_template_kwargs) | {"tools": schemas})


class Tools:
    """An environment function. Calls run in threads, and those that take too long are left behind.

    Coroutines run all at once. Other functions share one core where they compute, so they then run one by one, or the
    time limit of each would be used up by the others; where they wait for something, AT_ONCE of them run at once.
    """

    def __init__(self, args, tokenizer):
        functions = [user_code.load_function(spec, "--tools") for spec in args.tools]
        self.functions = {f.__name__: f for f in functions}
        self.limit = args.tool_timeout
        self.tokenizer = tokenizer
        self.options = json.loads(args.chat_template_kwargs)
        self.size = 1  # how many functions that are no coroutines begin together
        self.has_warned = False

    def __call__(self, prompts, completions):
        """What the calls in the last turn of each episode return, as messages, or None where it calls nothing."""
        found = [self.calls_in(turns[-1]) for turns in completions]
        calls = [call for calls in found for call in calls]
        answers = dict(self.at_once([x for x in enumerate(calls) if self.is_coroutine(x[1])], []))
        waiting = [x for x in enumerate(calls) if x[0] not in answers]
        while waiting:
            seconds, start = [], (time.monotonic(), time.process_time())
            together, waiting = waiting[: self.size], waiting[self.size :]
            answers |= self.at_once(together, seconds)
            # Of late calls only the whole process's seconds are known, with those of an update under --overlap.
            busy = sum(seconds) if len(seconds) == len(together) else time.process_time() - start[1]
            self.size = 1 if busy > (time.monotonic() - start[0]) / 4 else AT_ONCE
        answers = iter([answers[i] for i in range(len(calls))])
        return [[next(answers) for _ in calls] or None for calls in found]

    def at_once(self, calls, seconds):
        """[(number, the message that answers the call)] of calls that begin together.

        Args: calls, [(number, call)]; seconds, a list that gets the processor seconds of each call that ends in time.
        """
        begun = [self.begin(call, seconds) for _, call in calls]
        wait(begun, self.limit)
        return [(i, self.message(call, future)) for (i, call), future in zip(calls, begun, strict=True)]

    def calls_in(self, text):
        """The calls of a turn, each {"name", "arguments"}, or the text of one."""
        if not getattr(self.tokenizer, "response_template", None):
            return re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)
        prompt = chat.render_without_tools(self.tokenizer, [chat.QUESTION], self.options, add_generation_prompt=True)
        try:
            turn = self.tokenizer.parse_response(text, prefix=prompt, tools=self.options["tools"])
        except Exception:  # A policy may write whatever it likes.
            return [text]
        return [call | call["function"] for call in turn.get("tool_calls", [])]

    def find(self, call):
        """(function, arguments) of a call. Raises whatever is wrong with it."""
        found = json.loads(call) if isinstance(call, str) else call
        if found["name"] not in self.functions:
            raise ValueError(f"there is no tool {found['name']!r}")
        return self.functions[found["name"]], found["arguments"]

    def is_coroutine(self, call):
        """Whether a call is one of an `async` function."""
        with contextlib.suppress(Exception):
            return inspect.iscoroutinefunction(self.find(call)[0])

    def begin(self, call, seconds):
        """The Future of what a call returns. `seconds` gets what it has used of the processor."""
        future = Future()

        def run():
            try:
                function, arguments = self.find(call)
                result = user_code.result_of(function(**arguments))
                said = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
            except BaseException as e:  # The user's code may raise what it likes, and call exit().
                said = f"error: {console.in_one_line(e)}"
            seconds.append(time.thread_time())
            future.set_result(said)

        threading.Thread(target=run, daemon=True).start()
        return future

    def message(self, call, future):
        """What is said of a call. Mistral's template wants the call's id, of nine letters."""
        late = f"no result within {self.limit:g} s"
        is_late = not future.done()
        if is_late and not self.has_warned:
            self.has_warned = True
            console.say(f"warning: a call of a tool had {late}, and the policy reads that; --tool_timeout gives more")
        said = f"error: {late}" if is_late else future.result()
        call_id = call.get("id", ID) if isinstance(call, dict) else ID
        return {"role": "tool", "content": said, "tool_call_id": call_id}

    def check(self, rows):
        """Exits with an error if the policy is told of no tools or of others, or its calls could not be read."""
        call = {"type": "function", "id": ID, "function": {"name": "a_tool", "arguments": {}}}
        turn = chat.ANSWER | {"content": "", "tool_calls": [call]}
        written = chat.render_without_tools(self.tokenizer, [chat.QUESTION, turn], self.options)
        # A template without a form of its own leaves the call out, or has it written as above.
        if "a_tool" in written and not self.calls_in(written):
            hint = "--env_fn takes a function that reads it"
            console.fail(f"--tools: the chat template writes a call in a form that is not known, {written!r}; {hint}")
        for row in rows:
            where = f"--tools: {row.source}: row {row.number}"
            prompt = row.columns["prompt"]
            if not chat.is_messages(prompt):
                console.fail(f"{where}: is no chat; --env_fn takes a function that reads calls in plain text")
            texts = {chat.render(self.tokenizer, prompt, x) for x in (row.options, row.options | {"tools": None})}
            if len(texts) == 1 and prompt[0]["role"] != "system":
                hint = "a system text must say what they are and how to call them"
                console.fail(f"{where}: the chat template does not show tools; {hint}")
            # A row's own schemas stand in the place of those of --tools.
            shown = [tool.get("function", tool).get("name") for tool in row.options["tools"] if isinstance(tool, dict)]
            if len(texts) > 1 and (others := [name for name in shown if name not in self.functions]):
                hint = "name their functions, or leave the column out"
                console.fail(f"{where}: the column `tools` shows others, {', '.join(map(str, others))}; {hint}")
