"""
What stands between two turns of a trajectory: what the user's environment says, and what a chat template writes.

An environment is a function f(prompts, completions, **columns), called like a reward function (rewards.py), with the
episodes that go on: `completions` are lists of turns, the strings that the policy has said so far. It returns a text
for each, or messages where the prompt is a chat, or None where the episode ends. It may be `async`. It is called once
for a turn, and keeps nothing of its own. The functions of --tools are such an environment (tools.py).
"""

from accelerate.utils import gather_object

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat, token_ids
from rlhf_details.plumbing.machine import rewards, tools


def check(args):
    """Exits with an error if there is no environment, or flags contradict it; imports the user's code.

    It puts what --tools says into the args, so it stands before cli.check, which compares them with an earlier run's.
    """
    if bool(args.env_fn) == bool(args.tools):
        which = "one of them is required, and not both"
        console.fail(
            f"--env_fn or --tools: {which}, with --dataset {args.dataset}: FILE.py:function of your environment"
        )
    if getattr(args, "overlap", False):
        console.fail("--overlap: not with several turns, since an environment answers the newest one")
    if args.stop_token == "none":
        console.fail("--stop_token none: no turn would end, so no environment would be asked")
    if args.tools:
        tools.show(args)
        args.env_role = "tool"
    else:
        function_of(args)


def function_of(args, tokenizer=None):
    """The function of --env_fn, or that of --tools."""
    if args.tools:
        return rewards.Function(" ".join(args.tools), tools.Tools(args, tokenizer), "--tools")
    return rewards.Function(args.env_fn.rpartition(":")[2], args.env_fn, "--env_fn")


class Environment:
    """Called with the Prompts of episodes, their turns and the tokens that they have room for, it returns for each
    (what the environment says, the token ids between this turn and the next). The text is None where the episode ends,
    and the ids are None where no turn may follow.
    """

    def __init__(self, args, accelerator, tokenizer, *data_sets):
        self.args = args
        self.accelerator = accelerator
        self.tokenizer = tokenizer
        self.function = function_of(args, tokenizer)
        observation = self.messages("An observation.")
        thought = chat.ANSWER | {"content": "<think>\nA thought.\n</think>\n\nAn answer."}
        for data_set in filter(None, data_sets):
            self.function.find_columns(data_set)
            if args.tools:
                self.function.function.check(data_set)
            row = next((row for row in data_set if chat.is_messages(row.columns["prompt"])), None)
            if row is None:
                continue
            try:  # The other rows have the same template.
                self.between(row, observation)
            except Exception as e:  # A template may raise whatever it likes.
                where = f"{row.source}: row {row.number}: the chat template refuses an observation"
                console.fail(f"--env_role {args.env_role}: {where} ({console.in_one_line(e)})")
            if "A thought." not in token_ids.render_between(tokenizer, thought, observation, row.options):
                console.say(
                    "the chat template drops the reasoning of earlier turns; here the ids that were sampled stay"
                )

    def __call__(self, rows, turns, room):
        """Where the function is at fault, all processes end. Call it on every process."""
        said = []
        fault = ""
        try:
            found = self.function(rows, prompts=[row.text for row in rows], completions=turns) if rows else []
            said = [None if x is None else self.messages(x) for x in found]
        except rewards.Fault as e:
            fault = str(e)
        rewards.end_if_any(self.accelerator, gather_object([fault]))
        ids = [self.observation(*given) for given in zip(rows, room, said, strict=True)]
        return list(zip(map(as_text, said), ids, strict=True))  # after `observation`, which cuts what is said

    def is_over(self, active):
        """Whether no process has an active episode. Call it on every process."""
        return not any(gather_object([bool(active)]))

    def observation(self, row, room, messages):
        """`between` of messages, or None where there are none, they have too many tokens or leave no turn room.

        Under --long_observation cut the longest text loses its end, but not what the template writes behind it.
        """
        if messages is None:
            return None
        ids = self.between(row, messages)
        limit = self.args.max_observation_tokens or room
        while len(ids) > limit < room and self.args.long_observation == "cut":
            # The template's closing tokens stay, so a text is cut and not the ids.
            longest = max(messages, key=lambda message: len(message["content"]))
            if not (text := longest["content"]):
                break
            longest["content"] = text[: min(len(text) - 1, len(text) * limit // len(ids))]
            ids = self.between(row, messages)
        return ids if len(ids) <= limit and len(ids) < room else None

    def messages(self, said):
        """What an environment says, a text or messages, as messages of their own. Raises a Fault if it is neither."""
        if isinstance(said, str):
            more = {"tool_call_id": tools.ID} if self.args.tools else {}
            said = [{"role": self.args.env_role, "content": said} | more]
        if not (chat.is_messages(said) and all(isinstance(message.get("content"), str) for message in said)):
            kinds = "neither a text, nor messages with a text as content, nor None"
            raise rewards.Fault(f"{self.function.what} returned {said!r}, which is {kinds}")
        # A tool may return half a pair of UTF-16, which JSON can say and a tokenizer cannot read.
        return [message | {"content": message["content"].encode(errors="replace").decode()} for message in said]

    def between(self, row, messages):
        """Token ids from the end of a turn to the beginning of the next, of a row's kind of prompt."""
        if not chat.is_messages(row.columns["prompt"]):
            return chat.ids_after(self.tokenizer, "a", as_text(messages))
        # The policy has sampled the end of its turn itself.
        return token_ids.between_turns(self.tokenizer, messages, row.options)[1]


def as_text(messages):
    """What an environment says as one text, or None."""
    return messages and "\n".join(message["content"] for message in messages)


def metrics(response_mask, action_mask, ended, prefix, length):
    """{metric: mean} of a page's Trajectories; length, the name of the number of the policy's own tokens."""
    own = action_mask.sum(1)
    # A turn begins where the policy writes behind something else. An empty observation does not part two turns.
    begins = action_mask[:, 1:] & ~action_mask[:, :-1]
    means = {
        length: own,
        "observation_tokens": response_mask.sum(1) - own,
        "turns": 1 + begins.sum(1),
        "ran_out": ~ended,
    }
    return {prefix + name: x.float().mean().item() for name, x in means.items()}
