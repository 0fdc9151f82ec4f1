"""
What a response is worth: the reward model's score, the user's reward functions, and the embedded task's known reward.

A reward function is called as f(prompts, completions, **columns) and returns a list with one entry for each completion:
a number; True or False, which count 1 and 0, for a reward that can be verified; None, where it does not apply to the
kind of row; or NaN, where it abstains from one response, as a judge that failed does. `prompts` and `completions` are
strings, also for conversations, or under --reward_fn_format messages lists of messages, also for plain text. `columns`
are the data set's other columns, each a list as long, with None where a row lacks it. A function gets those that it
names, or all of them where it takes **columns. It may be `async`. Source: the convention of TRL's GRPOTrainer and
RLOOTrainer, which pass messages where the prompts are messages.

Here `said` is what each response says: a list that holds its text, or of a trajectory the texts of all turns and,
between them, of all observations.
"""

import copy
import inspect
import math
import numbers
import reprlib
import sys
import traceback

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import AutoConfig

from rlhf_details import toy, utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import models, token_ids, user_code
from rlhf_details.plumbing.inputs.chat import RowError, is_messages
from rlhf_details.plumbing.machine import engines

LARGEST = 1e15  # Sums of squares of rewards must be numbers in fp32.


class Fault(Exception):
    """Something wrong with a reward, in words for the user."""


def check(args):
    """Exits with an error if no reward is named or a function cannot be had."""
    if not args.reward_model_path and not args.reward_fn:
        console.fail(f"--reward_model_path or --reward_fn: one of them is required with --dataset {args.dataset}")
    check_functions(args)


def check_functions(args):
    """Exits with an error if a function of --reward_fn cannot be had or weighted; imports the user's code."""
    functions = functions_of(args)
    if len(functions) < len(args.reward_fn):
        console.fail(f"--reward_fn {' '.join(args.reward_fn)}: one function is given twice")
    if len(getattr(args, "reward_fn_weights", ())) not in (0, len(functions)):
        console.fail(f"--reward_fn_weights: {len(args.reward_fn_weights)} weights for {len(functions)} functions")


def functions_of(args):
    """{name in metrics and messages: Function}. One whose name is not its own there is called FILE.py:function."""
    names = [spec.rpartition(":")[2] for spec in args.reward_fn]
    taken = ["reward_model", *WATCHED["toy"], *names]
    specs = {name if taken.count(name) == 1 else spec: spec for name, spec in zip(names, args.reward_fn, strict=True)}
    return {name: Function(name, spec, "--reward_fn") for name, spec in specs.items()}


# ---- rewards of text -------------------------------------------------------------------------------------------------
def gold_of_tools(row, texts):
    """The true reward of "toy-tools", which pays for an answer and charges for each question."""
    return toy.right_code([], texts[-1:], [row.columns["answer"]])[0] - 0.05 * toy.questions([], [], [texts[::2]])[0]


# An embedded task's true reward, and whether its grammar allows the text: functions of (row, what a response says).
# They are watched and never trained on.
WATCHED = {
    "toy": {
        "gold": lambda row, texts: toy.gold(row.text, texts[-1]),
        "parses": lambda row, texts: toy.parses(f"{row.text} {texts[-1].lstrip()}"),
    },
    "toy-tools": {"gold": gold_of_tools},
}


class Function:
    """A function of the user's, which is called on rows. Args: spec, what names it, or the function; flag, its flag."""

    def __init__(self, name, spec, flag):
        self.what = f"{flag} {name}"
        self.names = set()  # of what it is given
        self.function = spec if callable(spec) else user_code.load_function(spec, flag)
        self.signature = inspect.signature(self.function)

    def find_columns(self, data_set, more=()):
        """Exits with an error if Prompts lack a column that it needs. Args: more, names of what is no column."""
        parameters = self.signature.parameters
        own = {"prompts", "completions"}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        found = {*more, *(column for row in data_set for column in row.columns)} - {"prompt", *own}
        names = own | {name for name in found if takes_all or name in parameters}
        try:
            self.signature.bind(**dict.fromkeys(names))
        except TypeError as e:
            console.fail(f"{self.what}: {e}; the columns of {data_set[0].source} are {sorted(found)}")
        self.names |= names

    def __call__(self, rows, **given):
        """It is called once, and never again for these rows. Args: given, lists for `prompts`, `completions`, and of
        what else is no column.
        """
        given = {name: given.get(name) or [row.columns.get(name) for row in rows] for name in self.names}
        try:
            with user_code.fenced(self.what):  # The function gets copies, which it may change.
                said = user_code.result_of(self.function(**copy.deepcopy(given)))
                entries = [x.item() if hasattr(x, "item") else x for x in said]
        except Exception as e:  # The user's code may raise whatever it likes. Nothing says which row is to blame.
            raised = f"{self.what} raised {type(e).__name__}, called with {len(rows)} completions"
            raise Fault(f"{raised}\n{traceback.format_exc().rstrip()}") from e
        if isinstance(said, dict | set | frozenset | bytes | bytearray):  # Nothing says which of them is whose.
            raise Fault(f"{self.what} returned a {type(said).__name__}, and must return a list")
        if len(entries) != len(rows):
            raise Fault(f"{self.what} returned {len(entries)} entries for {len(rows)} completions")
        return entries


def as_messages(row):
    """A Prompt's messages, which of plain text are one of the user's."""
    prompt = row.columns["prompt"]
    return prompt if is_messages(prompt) else [{"role": "user", "content": row.text}]


def said_as_messages(texts, role):
    """What a response says as messages. Args: role, of observations."""
    return [{"role": ("assistant", role)[i % 2], "content": text} for i, text in enumerate(texts)]


def abstains(x):
    """Whether an entry is NaN."""
    return isinstance(x, float) and math.isnan(x)


class TextModel(nn.Module):
    """A reward model that reads text, by its own tokenizer.

    Args: model, transformers'; size, the rows of a forward; role, of observations.
    """

    def __init__(self, model, tokenizer, size, role=None):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.size = size
        self.role = role

    def encode(self, row, texts):
        """(token ids of a row's prompt, those of a response) in the words of the reward model's own tokenizer."""
        prompt = row.columns["prompt"]
        pair = (prompt, said_as_messages(texts, self.role)) if is_messages(prompt) else (row.text, "".join(texts))
        return token_ids.encode(self.tokenizer, *pair, row.options)

    def forward(self, rows, said, ended):
        """Scores. A text longer than the model's context loses its beginning.

        Only where a response ended is its text followed by EOS, or by the chat template's end of the turn.
        """
        ids = []
        scores = []
        context = min(models.context(self.model), sys.maxsize)
        for row, texts, is_complete in zip(rows, said, ended, strict=True):
            query, response = self.encode(row, texts)
            whole = query + (response if is_complete else response[:-1])
            ids.append([i for i in whole if i is not None][-context:])  # A tokenizer without EOS has put None there.
        for part in utils.slices(len(ids), self.size):
            tokens, mask = utils.left_pad(ids[part], self.model.device)
            hidden = models.hidden_states(self.model, tokens, mask, utils.positions_from_mask(mask))[:, -1]
            with torch.autocast(hidden.device.type, enabled=False):  # as the pages' Reward
                found = self.model.score(hidden.float()).squeeze(-1) + getattr(self.model.config, "reward_bias", 0.0)
            scores += found.tolist()
        return scores


def reads_token_ids(args, tokenizer):
    """Whether there is a reward model, and it reads the token ids of `tokenizer`, the policy's."""
    return bool(args.reward_model_path) and own_tokenizer(args, tokenizer) is None


def own_tokenizer(args, tokenizer, has_chats=False):
    """The reward model's own tokenizer, or None where the reward model reads the policy's token ids.

    It reads them where both vocabularies are the same, but for the padding token, and with has_chats also both chat
    templates. A model without a tokenizer, or without a template, has the policy's, and one that is too small for it
    ends the program with one line.
    """
    path = args.reward_model_path
    flag = "--reward_model_path"
    own = models.find_tokenizer(path, flag, args)
    ours, theirs = models.vocabularies(tokenizer, own or tokenizer)
    if own is None:
        own = tokenizer
        tokens = max(ours.values()) + 1
        size = models.read(AutoConfig, path, flag, args).get_text_config().vocab_size
        if size < tokens:
            console.fail(
                f"{flag} {path}: has no tokenizer, and {size} embeddings for the {tokens} tokens of the policy's"
            )
    templates = {str(t.chat_template).strip() for t in (tokenizer, own) if has_chats and own.chat_template}
    return own if ours != theirs or len(templates) > 1 else None


def end_if_any(accelerator, faults):
    """Ends all processes if any of these texts says something. Call it on every process, with the same texts."""
    if faults := list(filter(None, faults)):
        console.complain(faults[0])
        accelerator.wait_for_everyone()  # The launcher would end the main process before it has printed.
        console.leave(1)


# ---- all rewards of a run --------------------------------------------------------------------------------------------
class Scorer:
    """Called with responses, and what the page's reward model says of them, it returns what each reward says.

    `names` and `weights` [F] are those of the reward model (weight 1), the functions, and what is watched (weight 0).
    `text_model` is a reward model that is given text, or None.
    Args: size, the rows of a forward; stop_ids [S], the tokens that may end a response.
    """

    def __init__(self, args, accelerator, tokenizer, size, stop_ids):
        self.args = args
        self.accelerator = accelerator
        self.tokenizer = tokenizer
        self.size = size
        self.stop_ids = stop_ids
        self.text_model = None
        self.role = args.env_role if getattr(args, "max_turns", None) else None  # of observations
        self.functions = functions_of(args)
        tasks = {(spec or "").partition(":")[0] for spec in (args.dataset, getattr(args, "eval_dataset", None))}
        self.task = next((task for task in WATCHED if task in tasks), None)
        self.watched = WATCHED.get(self.task, {})
        self.boolean = []  # names of the functions that returned nothing but True, False and None in the last call
        # A page without weights watches the functions.
        factors = getattr(args, "reward_fn_weights", [0.0] * len(self.functions)) or [1.0] * len(self.functions)
        weights = {"reward_model": 1.0} if getattr(args, "reward_model_path", None) else {}
        weights |= dict(zip(self.functions, factors, strict=True))
        if weights:
            console.say(f"rewards: {' + '.join(f'{weight:g} * {name}' for name, weight in weights.items())}")
        self.weighted = list(weights)
        self.counted = [name for name, weight in weights.items() if weight]
        weights |= dict.fromkeys(self.watched, 0.0)
        self.names = list(weights)
        self.weights = torch.tensor(list(weights.values()), device=accelerator.device)

    def take_text_model(self, reward_model, prompts, held_out=()):
        """Exits with an error if a data set lacks a column that a function needs, or messages cannot be scored.

        Args: reward_model, the page's, which reads token ids, or None. Returns: the same, or None where it has to read
        text, for its chat template is another one and there are messages, or it is to read trajectories; then
        `text_model` holds it.
        """
        args = self.args
        chats = [row for row in (*prompts, *held_out) if is_messages(row.columns["prompt"])]
        own = None
        if "reward_model" in self.names:
            own = own_tokenizer(args, self.tokenizer, bool(chats)) or (self.role and self.tokenizer)
        if own:
            kind = "chat template" if reward_model else "tokenizer"
            what = "reads whole trajectories" if self.role else f"has a {kind} of its own"
            console.say(f"the reward model {what}, so it reads decoded text")
            if reward_model:
                model = reward_model.model
                reward_model = None
            else:
                model = utils.disable_dropout(models.load_reward_model(args.reward_model_path, args))
                model = model.requires_grad_(False).to(engines.loading_device(self.accelerator))
            self.text_model = TextModel(model, own, self.size, self.role).eval()
            for row in chats:
                try:
                    self.text_model.encode(row, ["."])
                except RowError as e:
                    console.fail(f"--reward_model_path {args.reward_model_path}: {row.source}: row {row.number}: {e}")
        for data_set in filter(None, (prompts, held_out)):
            for function in self.functions.values():
                function.find_columns(data_set, ["turns"] if self.role else [])
        return reward_model

    @torch.no_grad()
    def __call__(self, rows, batch, model_scores=None, texts=None, ended=None, said=None):
        """(Values [M, F] fp32, NaN where a reward does not apply or abstains; whether each response has a score [M]).

        A response has none where a reward that counts abstains from it. Where a reward is at fault, or no response on
        any process has a score, all processes end.
        Args: rows, the Prompt of each response, where the k copies of a prompt are one object and adjacent; batch:
        queries, query_mask, responses, response_mask [M, ..] of this process; model_scores [M], the scores of the
        page's reward model, if it has one; texts, the responses as strings, if they are not to be decoded; ended [M],
        whether each text is complete, if not its last token says so; said, of trajectories. Call it on every process.
        """
        fault = ""
        kinds = set()
        scored = []
        try:
            if not said:
                texts = texts or token_ids.decode(self.tokenizer, batch.responses, batch.response_mask)
                said = [[text] for text in texts]
            entries = self.entries_of(rows, batch, model_scores, ended, said)
            scored = [not any(abstains(entries[name][i]) for name in self.counted) for i in range(len(rows))]
            for name in self.functions:
                kinds |= {(name, type(x) is bool) for x in entries[name] if not (x is None or abstains(x))}
        except Fault as e:
            fault = str(e)
        with user_code.fenced("a reward on another process"):
            # of all processes, so that they go on, or end, together
            faults, kinds, has_score = zip(*gather_object([(fault, kinds, any(scored))]), strict=True)
        none = "" if any(has_score) else f"{' and '.join(self.weighted)} abstained from every response of a batch"
        end_if_any(self.accelerator, [*faults, none])
        kinds = set().union(*kinds)
        self.boolean = [name for name in self.functions if (name, True) in kinds and (name, False) not in kinds]
        values = [[math.nan if x is None else x for x in entries[name]] for name in self.names]  # [F][M]
        values = torch.tensor(values, dtype=torch.float32).reshape(len(self.names), len(rows)).T
        return values.to(self.accelerator.device), torch.tensor(scored, device=self.accelerator.device)

    def entries_of(self, rows, batch, model_scores, ended, said):
        """{name: what it says of each of my responses, a number, a bool or None}. Raises a Fault."""
        given = {"prompts": [row.text for row in rows], "completions": [texts[-1] for texts in said]}
        if self.args.reward_fn_format == "messages":
            given["prompts"] = [as_messages(row) for row in rows]
            given["completions"] = [said_as_messages(texts, self.role) for texts in said]
        if self.role:
            given["turns"] = [texts[::2] for texts in said]
        with torch.autocast(self.accelerator.device.type, enabled=False):
            entries = {name: function(rows, **given) for name, function in self.functions.items()}
        for name, function in self.watched.items():
            pairs = zip(rows, said, strict=True)
            entries[name] = [function(row, texts) if row.task == self.task else None for row, texts in pairs]
        if self.text_model:
            if ended is None:
                last = batch.responses.gather(1, batch.response_mask.sum(1, keepdim=True) - 1).squeeze(1)  # [M]
                ended = torch.isin(last, self.stop_ids)
            read = said
            if not self.role:
                firsts = zip(rows, batch.responses[:, 0].tolist(), said, strict=True)
                read = [[token_ids.with_space(self.tokenizer, row, i, *texts)] for row, i, texts in firsts]
            entries["reward_model"] = self.text_model(rows, read, ended)
        elif model_scores is not None:
            entries["reward_model"] = model_scores.tolist()
        for words, i in self.faults(rows, entries):
            where = f"row {rows[i].number} of {rows[i].source}, {rows[i].text!r}, with the response {said[i][-1]!r}"
            raise Fault(f"{words} {where}")
        return entries

    def faults(self, rows, entries):
        """What is wrong with what the rewards say, {name: entries}: pairs of words and the number of the response."""
        for name in self.weighted:
            for i, x in enumerate(entries[name]):
                is_number = isinstance(x, numbers.Real) and abs(x) < LARGEST
                if not (x is None or is_number or (abstains(x) and name in self.functions)):
                    yield f"{name} returned {reprlib.repr(x)}, which is no number within +-{LARGEST:g}, for", i
                if i and rows[i] is rows[i - 1] and (x is None) != (entries[name][i - 1] is None):
                    yield f"{name} returned None, but not for each response to this prompt, whose kind decides:", i
        # evaluate.py adds rewards up where they are to judge, and only there. A page with a teacher never does.
        if getattr(self.args, "judge", "reward_fn") == "reward_fn" and hasattr(self.args, "reward_fn_weights"):
            for i in range(len(rows)):
                if all(entries[name][i] is None for name in self.weighted):
                    yield "no reward applies to", i

    def by_name(self, values, prefix=""):
        """{metric: mean} of gathered values [N, F], over the responses that each reward applies to.

        Metrics: rewards/<name> where there are functions, verifiable_correct_rate of the functions that return bools,
        and the watched rewards.
        """
        columns = self.columns(values)
        # A reward model alone is not repeated, since its mean is objective/scores.
        found = {f"rewards/{name}": columns[name] for name in self.weighted if self.functions}
        if self.boolean:
            found["verifiable_correct_rate"] = torch.cat([columns[name] for name in self.boolean])
        found |= {name: columns[name] for name in self.watched}
        return {prefix + name: x.mean().item() for name, x in found.items() if len(x)}

    def metrics(self, values, scores, scored, ended, batch, k):
        """{metric: figure} that pages share, of a gathered batch: what each reward says, and counts of responses.

        Args: values [B, F]; scores, scored, ended [B]; batch, whose response_mask says what the policy wrote; k.
        """
        is_equal = utils.in_equal_group(scores, k if k > 1 else len(scores), scored)  # k = 1: one group
        return self.by_name(values, "objective/") | {
            "val/abstained": 1 - scored.float().mean(),
            "val/equal_scores": is_equal.float().mean(),
            "val/num_eos_tokens": (batch.response_mask & (batch.responses == self.tokenizer.eos_token_id)).sum(),
            "val/num_stop_token_ids": ended.sum() if len(self.stop_ids) else 0,
            "val/sequence_lengths": batch.response_mask.sum(1).float().mean(),
        }

    def columns(self, values):
        """{name: entries, on the CPU} of values [N, F], where a reward applies and does not abstain."""
        return {name: x[~x.isnan()] for name, x in zip(self.names, values.cpu().unbind(1), strict=True)}

    def held_out(self, prompts, *found):
        """What a page's `evaluate` returns: ({"eval/objective/..": mean over the prompts}, the episodes as Run.log's).

        Args: prompts, a list of N; found, of data.my_share on this process: values [.., F]; scored [..]; responses,
        mask [.., R]; ended, scores, kl [..]; perhaps action_mask [.., R]. All processes' are gathered here.
        """
        gathered = (x[: len(prompts)] for x in self.accelerator.gather(found))  # without the filler
        values, scored, responses, mask, ended, scores, kl, *more = gathered
        found = {"kl": kl, "length": mask.sum(1).float(), "ended": ended.float()}
        spread = {"gold_std": self.columns(values).get("gold", ())}
        if hasattr(self.args, "reward_fn_weights"):  # A page with a teacher has no scores.
            found, spread = {"scores": scores[scored]} | found, spread | {"scores_std": scores[scored]}
        metrics = {name: x.mean().item() for name, x in found.items()} | self.by_name(values)
        metrics |= {name: x.std(correction=0).item() for name, x in spread.items() if len(x)}
        shown = prompts, responses, mask, ended, scores.masked_fill(~scored, math.nan), kl, *more
        return {f"eval/objective/{name}": x for name, x in metrics.items()}, shown
