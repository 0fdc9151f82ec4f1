"""
What stands between two turns of a trajectory: what the user's environment says, and what a chat template writes.

An environment is a function f(prompts, completions, **columns), called like a reward function (rewards.py), with the
episodes that go on: `completions` are lists of turns, the strings that the policy has said so far. It returns a text
for each, or None where the episode ends. It may be `async`. It is called once for a turn, and keeps nothing of its own.
"""

from accelerate.utils import gather_object

from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import chat, token_ids
from rlhf_details.plumbing.machine import rewards


def check(args):
    """Exits with an error if there is no environment, or flags contradict it; imports the user's code."""
    if not args.env_fn:
        console.fail(f"--env_fn: required with --dataset {args.dataset}: FILE.py:function of your environment")
    if getattr(args, "overlap", False):
        console.fail("--overlap: not with several turns, since an environment answers the newest one")
    if args.stop_token == "none":
        console.fail("--stop_token none: no turn would end, so no environment would be asked")
    function_of(args)


def function_of(args):
    """The function of --env_fn."""
    return rewards.Function(args.env_fn.rpartition(":")[2], args.env_fn, flag="--env_fn")


class Environment:
    """Called with the Prompts of episodes, their turns and the tokens that they have room for, it returns for each
    (what the environment says, the token ids between this turn and the next). The text is None where the episode ends,
    and the ids are None where no turn may follow.
    """

    def __init__(self, args, accelerator, tokenizer, *data_sets):
        self.args, self.accelerator, self.tokenizer = args, accelerator, tokenizer
        self.function = function_of(args)
        for data_set in filter(None, data_sets):
            self.function.find_columns(data_set)
            row = next((row for row in data_set if chat.is_messages(row.columns["prompt"])), None)
            if row is None:
                continue
            try:  # The other rows have the same template.
                self.between(row, "An observation.")
            except Exception as e:  # A template may raise whatever it likes.
                where = f"{row.source}: row {row.number}: the chat template refuses an observation"
                console.fail(f"--env_role {args.env_role}: {where} ({console.in_one_line(e)})")
            self.say_if_rewritten(row)

    def __call__(self, rows, turns, room):
        """Where the function is at fault, all processes end. Call it on every process."""
        said, fault = [], ""
        try:
            said = self.function(rows, turns, None) if rows else []
            if wrong := [x for x in said if not isinstance(x, str | None)]:
                raise rewards.Fault(f"{self.function.what} returned {wrong[0]!r}, which is neither a text nor None")
        except rewards.Fault as e:
            fault = str(e)
        rewards.end_if_any(self.accelerator, gather_object([fault]))
        return [(text, self.observation(*given, text)) for *given, text in zip(rows, room, said, strict=True)]

    def is_over(self, active):
        """Whether no process has an active episode. Call it on every process."""
        return not any(gather_object([bool(active)]))

    def observation(self, row, room, text):
        """`between` of a text, or None where it is None, has too many tokens or leaves no room for a turn.

        Under --long_observation cut it loses its end, but not what the template writes behind it.
        """
        if text is None:
            return None
        ids, limit = self.between(row, text), self.args.max_observation_tokens or room
        while len(ids) > limit < room and text and self.args.long_observation == "cut":
            # The template's closing tokens stay, so the text is cut and not the ids.
            text = text[: min(len(text) - 1, len(text) * limit // len(ids))]
            ids = self.between(row, text)
        return ids if len(ids) <= limit and len(ids) < room else None

    def between(self, row, text):
        """Token ids from the end of a turn to the beginning of the next, of a row's kind of prompt."""
        if not chat.is_messages(row.columns["prompt"]):
            return token_ids.ids_after(self.tokenizer, "a", text)
        # The template is asked of a dummy chat. What it would make of the turns before does not matter, since the ids
        # that were sampled stay.
        written = self.render(row, "An answer.", text).partition("An answer.")[2]
        ids = self.tokenizer(written, add_special_tokens=False).input_ids
        special = chat.special_tokens(self.tokenizer).values()
        # The policy has sampled the end of its turn itself.
        return ids[next((i + 1 for i, token in enumerate(ids) if token in special), 0) :]

    def render(self, row, answer, text):
        """The text of a question, an answer and an observation. A row's tools stand in its prompt alone."""
        said = {"user": "A question.", "assistant": answer}
        turns = [{"role": role, "content": x} for role, x in (*said.items(), (self.args.env_role, text))]
        options = {name: x for name, x in row.options.items() if name not in ("tools", "documents")}
        return chat.render(self.tokenizer, turns, options, add_generation_prompt=True)

    def say_if_rewritten(self, row):
        """Says whether the template drops the reasoning of earlier turns."""
        if "A thought." not in self.render(row, "<think>\nA thought.\n</think>\n\nAn answer.", "An observation."):
            console.say("the chat template drops the reasoning of earlier turns; here the ids that were sampled stay")


def metrics(found, prefix, length):
    """{metric: mean} of a page's Trajectories; length, the name of the number of the policy's own tokens."""
    own = found.action_mask.sum(1)
    means = {length: own, "observation_tokens": found.response_mask.sum(1) - own}
    # A turn begins where the policy writes behind something else. An empty observation does not part two turns.
    begins = found.action_mask[:, 1:] & ~found.action_mask[:, :-1]
    means |= {"turns": 1 + begins.sum(1), "ran_out": ~found.ended}
    return {prefix + name: x.float().mean().item() for name, x in means.items()}
