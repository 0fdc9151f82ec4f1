"""
What a response is worth: the reward model's score, the user's reward functions, and the embedded task's known reward.

A reward function is called as f(prompts, completions, **columns) and returns a list with one entry for each completion:
a number; True or False, which count 1 and 0, for a reward that can be verified; or None, where it does not apply to the
kind of row. `prompts` and `completions` are strings, also for conversations, or under --reward_fn_format messages lists
of messages, also for plain text. `columns` are the data set's other columns, each a list as long, with None where a row
lacks it. A function gets those that it names, or all of them where it takes **columns. It may be `async`. Source: the
convention of TRL's GRPOTrainer and RLOOTrainer, which pass messages where the prompts are messages.
"""

import asyncio
import copy
import inspect
import math
import numbers
import reprlib
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate.utils import gather_object

from rlhf_details import toy, utils
from rlhf_details.plumbing import cli, models
from rlhf_details.plumbing.files import imports_of, load_function
from rlhf_details.plumbing.tokenization import encode
from rlhf_details.utils import is_messages

# The embedded task's true reward, and whether its grammar allows the text. They are watched and never trained on.
WATCHED = {"gold": toy.gold, "parses": lambda prompt, response: toy.parses(f"{prompt} {response.lstrip()}")}


ASYNCIO = str(Path(asyncio.__file__).parent)


class Fault(Exception):
    """Something wrong with a reward, in words for the user."""


async def result_of(awaitable):
    """What a coroutine, or whatever else can be awaited, returns."""
    return await awaitable


def check(args):
    """Exits with an error if no reward is named or a function cannot be had."""
    if not args.reward_model_path and not args.reward_fn:
        cli.fail(f"--reward_model_path or --reward_fn: one of them is required with --dataset {args.dataset}")
    check_functions(args)


def check_functions(args):
    """Exits with an error if a function of --reward_fn cannot be had or weighted; imports the user's code."""
    if len(args.reward_fn_weights) not in (0, len(args.reward_fn)):
        cli.fail(f"--reward_fn_weights: {len(args.reward_fn_weights)} weights for {len(args.reward_fn)} functions")
    for spec in args.reward_fn:
        parameters_of(load_function(spec, "--reward_fn"), spec)


def parameters_of(function, spec):
    """(whether a reward function takes all columns, {the column that it names: whether it needs it})."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not (takes_all or {"prompts", "completions"} <= named.keys()):
        cli.fail(f"--reward_fn {spec}: must be a function f(prompts, completions, **columns)")
    return takes_all, {name: needed for name, needed in named.items() if name not in ("prompts", "completions")}


class Scorer:
    """Called with responses, it returns what each reward says of them.

    `names` and `weights` [F] are those of the reward model (weight 1), the functions, and what is watched (weight 0).
    Args: reward_model, a page's Reward or None; response_scores, that page's function of (reward_model, batch, n);
    size, the rows of a forward; stop_ids [S], the tokens that may end a response.
    """

    def __init__(self, args, accelerator, tokenizer, reward_model, response_scores, size, stop_ids):
        self.args, self.accelerator, self.tokenizer = args, accelerator, tokenizer
        self.reward_model, self.response_scores = reward_model, response_scores
        self.size, self.stop_ids = size, stop_ids
        self.functions, self.specs = {}, {}  # {name: function}, {name: its spec}
        self.columns = set()  # the columns that the data sets have
        self.loop = asyncio.Runner()  # one for all calls, because a client of a server belongs to the loop of its first
        names = [spec.rpartition(":")[2] for spec in args.reward_fn]
        for spec, name in zip(args.reward_fn, names, strict=True):
            is_taken = names.count(name) > 1 or name in ("reward_model", *WATCHED)
            name = spec.replace("/", ".") if is_taken else name
            self.functions[name], self.specs[name] = load_function(spec, "--reward_fn"), spec
        tasks = {(spec or "").partition(":")[0] for spec in (args.dataset, getattr(args, "eval_dataset", None))}
        self.watched = list(WATCHED) if "toy" in tasks else []
        self.boolean = []  # names of the functions that returned nothing but True, False and None in the last call
        self.seconds = {}  # {"time/rewards/<name>": seconds of the last call}, of this process
        self.names = ["reward_model"] * bool(reward_model) + list(self.functions) + self.watched
        weights = args.reward_fn_weights or (1.0,) * len(self.functions)
        weights = [1.0] * bool(reward_model) + list(weights) + [0.0] * len(self.watched)
        self.weights = torch.tensor(weights, device=accelerator.device)
        self.num_weighted = len(self.names) - len(self.watched)
        # Where evaluate.py does not add rewards up, none need apply.
        self.must_score = getattr(args, "judge", "reward_fn") == "reward_fn"
        terms = [f"{weight:g} * {name}" for weight, name in zip(weights, self.names[: self.num_weighted], strict=False)]
        penalty, unended = getattr(args, "missing_eos_penalty", None), ""
        if penalty and len(stop_ids):
            pays = f"pays {penalty:g}" if args.missing_eos_mode == "subtract" else f"gets {-penalty:g} instead"
            unended = f"; a response that does not end {pays}"
        if terms:
            cli.say(f"rewards: {' + '.join(terms)}{unended}")
        if not len(stop_ids) and penalty:
            cli.say(f"note: --missing_eos_penalty {penalty:g} does nothing, since --stop_token none asks for no end")
        if reward_model and reward_model.tokenizer:
            sizes = f"{len(reward_model.tokenizer)} tokens, the policy's {len(tokenizer)}"
            cli.say(f"the reward model has a tokenizer of its own ({sizes}), so it reads decoded text")

    def check_columns(self, prompts, held_out=()):
        """Exits with an error if a data set lacks a column that a function needs, or messages cannot be scored."""
        are_messages = any(is_messages(row.columns["prompt"]) for row in (*prompts, *held_out))
        if self.reward_model and not self.reward_model.tokenizer and are_messages:
            self.reward_model.tokenizer = models.own_template(self.args, self.tokenizer)
            if self.reward_model.tokenizer:
                cli.say("the reward model has a chat template of its own, so it reads decoded text")
        for rows in filter(None, (prompts, held_out)):
            found = {column for row in rows for column in row.columns} - {"prompt", "prompts", "completions"}
            self.columns |= found
            for name, function in self.functions.items():
                for column, needed in parameters_of(function, name)[1].items():
                    if needed and column not in found:
                        has = f"has {sorted(found)}" if found else "has no other columns than its prompts"
                        cli.fail(f"--reward_fn {name}: needs a column {column!r}, and {rows[0].source} {has}")
            for row in rows if self.reward_model and self.reward_model.tokenizer else ():
                if is_messages(prompt := row.columns["prompt"]):  # Its chat template must take each prompt.
                    answer = [{"role": "assistant", "content": "."}]
                    where = f"--reward_model_path {self.args.reward_model_path}: {row.source}: row {row.number}"
                    encode(self.reward_model.tokenizer, prompt, answer, row.options, where)

    @torch.no_grad()
    def __call__(self, rows, batch, *n, texts=None, ended=None):
        """Values [M, F] fp32, NaN where a reward does not apply. Where a reward is at fault, all processes end.

        Args: rows, the Prompt of each response, where the k copies of a prompt are one object and adjacent; batch:
        queries, query_mask, responses, response_mask [M, ..] of this process; n, how many adjacent responses share a
        row of a forward, where the page packs rows; texts, the responses as strings, if they are not to be decoded;
        ended [M], whether each text is complete, if not its last token says so. Call it on every process.
        """
        values, kinds, fault = None, set(), ""
        try:
            values, kinds = self.values_of(rows, batch, n, texts, ended)
        except Fault as e:
            fault = str(e)
        everywhere = gather_object([(fault, kinds)])  # of all processes, so that they go on, or end, together
        if faults := [fault for fault, _ in everywhere if fault]:
            self.stop(faults[0])
        kinds = set().union(*(kinds for _, kinds in everywhere))
        self.boolean = [name for name in self.functions if (name, True) in kinds and (name, False) not in kinds]
        return values.to(self.accelerator.device)

    def values_of(self, rows, batch, n, texts, ended):
        """(values [M, F] on the CPU, {(name of a function, whether an entry is a bool)}) of my responses."""
        reads_ids = self.reward_model and not self.reward_model.tokenizer
        if texts is None and len(self.names) > bool(reads_ids):  # Something needs the text.
            texts = models.decode(self.tokenizer, *batch[2:])
        entries, start = {}, time.time()  # {name: a number, a bool or None for each response}
        if reads_ids:
            slices = utils.slices(batch, self.size)
            scores = [self.response_scores(self.reward_model, part, *n) for part in slices]
            entries["reward_model"] = torch.cat(scores).tolist()
        elif self.reward_model:
            if ended is None:
                last = batch[2].gather(1, batch[3].sum(1, keepdim=True) - 1).squeeze(1)  # [M]
                ended = torch.isin(last, self.stop_ids).tolist()
            entries["reward_model"] = self.scores_of_text(rows, texts, ended)
        if self.reward_model:
            self.seconds["time/rewards/reward_model"] = time.time() - start
        for name in self.functions:
            start = time.time()
            entries[name] = self.call(name, rows, texts)
            self.seconds[f"time/rewards/{name}"] = time.time() - start
        self.check_entries(entries, rows, batch)
        for name in self.watched:
            pairs = zip(rows, texts, strict=True)
            entries[name] = [WATCHED[name](row.text, text) if row.task == "toy" else None for row, text in pairs]
        kinds = {(name, type(entry) is bool) for name in self.functions for entry in entries[name] if entry is not None}
        values = [[math.nan if entry is None else entry for entry in column] for column in entries.values()]  # [F][M]
        return torch.tensor(values, dtype=torch.float32).reshape(len(self.names), len(rows)).T, kinds

    def check_entries(self, entries, rows, batch):
        """Raises a Fault where {name: entries} are not what rewards may be."""

        def show(i):
            (response,) = models.decode(self.tokenizer, *(x[i : i + 1] for x in batch[2:]))
            return f"row {rows[i].number} of {rows[i].source}, {rows[i].text!r}, with the response {response!r}"

        for name, column in entries.items():
            says = f"--reward_fn {name} returned" if name in self.functions else "the reward model's score is"
            for i, entry in enumerate(column):
                is_number = isinstance(entry, numbers.Real) and abs(entry) <= torch.finfo(torch.float32).max
                if entry is not None and not is_number:
                    raise Fault(f"{says} {reprlib.repr(entry)} for {show(i)}")
                if i and rows[i] is rows[i - 1] and (entry is None) != (column[i - 1] is None):
                    rule = "None, but not for each response to this prompt; None means that a row is of another kind"
                    raise Fault(f"{says} {rule}: {show(i if entry is None else i - 1)}")
        for i, given in enumerate(zip(*entries.values(), strict=True)):
            if self.must_score and all(entry is None for entry in given):
                raise Fault(f"no reward applies to {show(i)}")

    def call(self, name, rows, texts):
        """The entries that a function returns, one for each row. It is called once, and never again for these texts."""
        prompts, completions = [row.text for row in rows], texts
        if self.args.reward_fn_format == "messages":
            pairs = [(row.columns["prompt"], row.text) for row in rows]
            prompts = [x if is_messages(x) else [{"role": "user", "content": text}] for x, text in pairs]
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        takes_all, named = parameters_of(self.functions[name], name)
        columns = {key: [row.columns.get(key) for row in rows] for key in self.columns if takes_all or key in named}
        # The function gets copies, which it may change.
        given = copy.deepcopy({"prompts": prompts, "completions": completions, **columns})
        try:
            with torch.autocast(self.accelerator.device.type, enabled=False), imports_of(self.specs[name]):
                entries = self.functions[name](**given)
                entries = self.loop.run(result_of(entries)) if inspect.isawaitable(entries) else entries
                entries = entries.tolist() if hasattr(entries, "tolist") else entries
                is_list = isinstance(entries, Iterable) and not isinstance(entries, dict | set | str)
                entries = list(entries) if is_list else entries
        except Exception as e:  # The user's code may raise whatever it likes. Nothing says which row is to blame.
            trace = e.__traceback__
            while trace and trace.tb_frame.f_code.co_filename.startswith((__file__, ASYNCIO)):
                trace = trace.tb_next
            trace = traceback.format_exception(type(e), e, trace)  # It begins in the user's code.
            what = f"--reward_fn {name} raised {type(e).__name__}, called with {len(rows)} completions"
            is_chat = any(is_messages(row.columns["prompt"]) for row in rows)
            if isinstance(e, TypeError | AttributeError) and completions is texts and is_chat:
                what += " in text; --reward_fn_format messages passes messages"
            raise Fault(f"{what}\n{''.join(trace).rstrip()}") from e
        if not is_list or len(entries) != len(rows):
            what = f"{len(entries)} entries" if is_list else f"{reprlib.repr(entries)}, which is no list,"
            raise Fault(f"--reward_fn {name} returned {what} for {len(rows)} completions")
        return [entry.item() if hasattr(entry, "item") else entry for entry in entries]

    def scores_of_text(self, rows, texts, ended):
        """Scores by a reward model that has a tokenizer of its own. A text longer than its context loses its beginning.

        Only where a response ended is its text followed by EOS, or by the chat template's end of the turn.
        """
        model, device = self.reward_model, self.accelerator.device
        context = getattr(model.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        ids, scores = [], []
        for row, text, is_complete in zip(rows, texts, ended, strict=True):
            is_chat = is_messages(row.columns["prompt"])
            prompt, completion = row.text, text
            if is_chat:
                prompt, completion = row.columns["prompt"], [{"role": "assistant", "content": text}]
            query, response = encode(model.tokenizer, prompt, completion, row.options)
            whole = query + (response if is_complete else response[:-1])
            ids.append([i for i in whole if i is not None][-context:])  # A tokenizer without EOS has put None there.
        for start in range(0, len(ids), self.size):
            tokens, mask = utils.left_pad(ids[start : start + self.size], device)
            index = torch.full((len(tokens), 1), tokens.size(1) - 1, device=device)
            scores += model(tokens, mask, utils.positions_from_mask(mask), index).squeeze(1).tolist()
        return scores

    def stop(self, message):
        """Ends the run on all processes, which are all here, with exit code 1."""
        if self.accelerator.is_main_process:
            print(f"error: {message}", file=sys.stderr, flush=True)
        self.accelerator.wait_for_everyone()  # The launcher would end the main process before it has printed.
        cli.leave(1)

    def by_name(self, values, prefix="", spread=False):
        """{metric: mean} of gathered values [N, F], over the responses that each reward applies to.

        Metrics: rewards/<name> where there are functions, verifiable_correct_rate of the functions that return bools,
        the watched rewards, and with spread=True the standard deviation of gold.
        """
        columns = {name: x[~x.isnan()] for name, x in zip(self.names, values.cpu().unbind(1), strict=True)}
        # A reward model alone is not repeated, since its mean is objective/scores.
        found = {f"rewards/{name}": columns[name] for name in self.names[: self.num_weighted] if self.functions}
        if self.boolean:
            found["verifiable_correct_rate"] = torch.cat([columns[name] for name in self.boolean])
        found |= {name: columns[name] for name in self.watched}
        means = {prefix + name: x.mean().item() for name, x in found.items() if len(x)}
        if spread and len(found.get("gold", ())):
            means[f"{prefix}gold_std"] = found["gold"].std(correction=0).item()
        return means
