"""
`evaluate.py --interactive`: a line that is typed is a prompt, and each policy answers it, one after the other.

Where the tokenizer has a chat template the line is a message, and each policy remembers its own conversation. Where it
has none each line is a text to go on with, and nothing is remembered.
"""

import sys

import torch

from rlhf_details import utils
from rlhf_details.plumbing import cli, engines, evaluation, models, tokenization


class Speaker:
    """A policy that answers, sampled as evaluate.py samples it. Its memory is the conversation so far."""

    def __init__(self, path, args, device, respond):
        self.path, self.args, self.device, self.respond, self.memory = path, args, device, respond, []
        self.tokenizer = models.load_tokenizer(path, "--policy_path", args)
        self.model = models.load_policy(path, "--policy_path", args).to(device).eval()
        self.ids = evaluation.end_ids(self.tokenizer, args)
        self.room = models.context_of(self.model) - args.response_length  # tokens that a prompt may have

    def answer(self, line, number):
        """The answer to a line. Its noise depends on the line's number, so that a question may be asked again."""
        is_chat = bool(self.tokenizer.chat_template)
        prompt = [*self.memory, {"role": "user", "content": line}] if is_chat else line
        query = tokenization.encode(self.tokenizer, prompt)
        if not 0 < len(query) <= self.room:
            self.memory = []
            return f"[{len(query)} tokens, and a prompt may have 1 to {self.room}: the conversation begins anew]"
        batch = [*utils.left_pad([query], self.device), torch.tensor([number], device=self.device)]
        response, mask, ended = self.respond(self.model, batch, self.ids, self.args)
        (text,) = models.decode(self.tokenizer, response, mask)
        self.memory = [*prompt, {"role": "assistant", "content": text}] if is_chat else []
        return text if ended else f"{text} [did not end within {self.args.response_length} tokens]"


@torch.no_grad()
def talk(settings, respond):
    """Reads lines and prints answers until an empty line, Ctrl-D or Ctrl-C.

    Args: settings, {path: args with the settings to sample it with}; respond, evaluate.py's function of that name.
    """
    if cli.world_size() > 1:
        cli.fail(f"--interactive: runs in one process, not in {cli.world_size()}")
    device, number = engines.join().device, 0
    speakers = [Speaker(path, args, device, respond) for path, args in settings.items()]
    cli.say("type a prompt; an empty line, Ctrl-D or Ctrl-C ends the conversation")
    try:
        while line := input("> " if sys.stdin.isatty() else "").strip():
            for speaker in speakers:
                cli.say(f"{speaker.path}: {speaker.answer(line, number)}")
            number += 1
    except (EOFError, KeyboardInterrupt):
        pass
    cli.say(f"the conversation is over after {number} prompt{'s' * (number != 1)}")
