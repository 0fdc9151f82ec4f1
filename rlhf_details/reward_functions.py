"""
Rewards that are given to text: Python functions of the user's own, and reward models that have a tokenizer of their own.

A function is called as f(prompts, completions, **columns), once for all responses that a process has of an update (evaluations: of
a slice), and returns a list with an entry for each: a number; True or False, for a reward that can be verified, which count 1
and 0; or None, where it has nothing to say. `prompts` and `completions` are strings; of rows whose prompts are messages, lists of
messages; a prompt of token ids is decoded. `columns` are the data set's other columns, each a list as long, None where a row
lacks it; a function gets those that it names, or all where it takes **columns.
Source: the convention of TRL's GRPOTrainer and RLOOTrainer. Nothing runs at import.
"""

import copy
import inspect
import numbers
import reprlib
from collections.abc import Iterable

import numpy as np
import torch
from accelerate.utils import gather_object

from rlhf_details import data, utils

NOTHING, NUMBER, VERDICT, FAILED = range(4)  # kinds of an entry


def check(args):
    """Ends with one line where no reward is named, or a function cannot be had; imports the user's code."""
    if not args.reward_model_path and not args.reward_fn:
        utils.fail(
            "--reward_model_path or --reward_fn: one is required (only --dataset toy from the command line has a default reward)"
        )
    if len(args.reward_fn_weights) not in (0, len(args.reward_fn)):
        utils.fail(f"--reward_fn_weights: {len(args.reward_fn_weights)} weights of {len(args.reward_fn)} functions")
    for weight in args.reward_fn_weights:
        if not abs(weight) <= torch.finfo(torch.float32).max:
            utils.fail(f"--reward_fn_weights {weight}: must be finite, in fp32")
    if twice := {spec for spec in args.reward_fn if args.reward_fn.count(spec) > 1}:
        utils.fail(f"--reward_fn {min(twice)}: named twice")
    for spec in args.reward_fn:
        parameters_of(data.load_function(spec, "--reward_fn"), spec)


def parameters_of(function, spec):
    """The parameters of a reward function but for prompts and completions; ends where it cannot be called by those names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        utils.fail(f"--reward_fn {spec}: its parameters are not known to Python; wrap it in a function")
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    needed = [p for p in parameters if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
    if needed or not (takes_all or {"prompts", "completions"} <= by_name) or inspect.isclass(function):
        utils.fail(f"--reward_fn {spec}: must be a function f(prompts, completions, **columns)")
    if inspect.iscoroutinefunction(function):
        utils.fail(f"--reward_fn {spec}: is async; rewards are waited for")
    return [p for p in parameters if p.name not in ("prompts", "completions")]


class RewardFunctions:
    """The functions of --reward_fn, and the names and weights of all rewards; the reward model's (weight 1) is the first."""

    def __init__(self, args, device, tokenizer):
        self.functions = {}  # {name: (function, the columns that it takes, or None for all)}
        self.required, self.columns = {}, set()  # {column that a function cannot do without: its spec}; those of the data
        names = [spec.rpartition(":")[2] for spec in args.reward_fn]
        for spec, name in zip(args.reward_fn, names, strict=True):
            function = data.load_function(spec, "--reward_fn")
            columns = parameters_of(function, spec)
            takes_all = any(p.kind == p.VAR_KEYWORD for p in columns)
            name = name if names.count(name) == 1 and name != "reward_model" else spec.replace("/", ".")
            self.functions[name] = function, (None if takes_all else {p.name for p in columns})
            kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
            self.required |= {p.name: spec for p in columns if p.default is p.empty and p.kind in kinds}
        self.tokenizer = tokenizer
        weights = getattr(args, "reward_fn_weights", ()) or (1.0,) * len(args.reward_fn)
        self.names = ["reward_model"] * bool(args.reward_model_path) + list(self.functions)
        self.weights = [1.0] * bool(args.reward_model_path) + list(weights)
        self.device, self.error = device, ""

    def check_columns(self, rows, what):
        """Takes note of the columns of a data set (what), and ends with one line where a function needs one that no row has."""
        found = {column for row in rows for column in row} - {"prompt", "prompts", "completions"}
        self.columns |= found
        for column, spec in self.required.items():
            if rows and column not in found:
                utils.fail(f"--reward_fn {spec}: needs a column {column!r}, and {what} has {sorted(found)}")

    def __call__(self, rows, completions, scores):
        """What each reward says: values [N, F] fp32 and kinds [N, F] int64.

        Args: rows, N rows of the data set; completions, N strings (read by functions alone); scores [N] of the reward model, or
        None. What a function does wrong is a kind, FAILED, and not raised: all processes stop together, in `stop_if_failed`.
        """
        values, kinds = torch.zeros(len(rows), len(self.functions)), torch.full((len(rows), len(self.functions)), NOTHING)
        prompts, are_messages = [row["prompt"] for row in rows], [data.is_messages(row["prompt"]) for row in rows]
        pairs = list(zip(prompts, completions, are_messages, strict=True)) if self.functions else []
        completions = [[{"role": "assistant", "content": text}] if messages else text for _, text, messages in pairs]
        prompts = [prompt if messages else data.as_text(self.tokenizer, prompt) for prompt, _, messages in pairs]
        for i, (name, (function, wanted)) in enumerate(self.functions.items()):
            columns = {key: [row.get(key) for row in rows] for key in self.columns if wanted is None or key in wanted}
            given = copy.deepcopy({"prompts": prompts, "completions": completions, **columns})  # which it may change
            try:
                with torch.autocast(torch.device(self.device).type, enabled=False):
                    self.read(name, function(**given), completions, values[:, i], kinds[:, i])
            except (Exception, SystemExit) as e:  # whatever the user's code raises
                self.error = f"--reward_fn {name} raised {type(e).__name__}: {' '.join(str(e).split())}{last_line(e)}"
                kinds[:, i] = FAILED
        if scores is None:
            return values.to(self.device), kinds.to(self.device)
        scores = scores.unsqueeze(1)
        of_model = torch.full_like(scores, NUMBER, dtype=torch.int64)
        return torch.cat([scores, values.to(scores)], 1), torch.cat([of_model, kinds.to(scores.device)], 1)

    def read(self, name, entries, completions, values, kinds):
        """Puts a function's entries into one column of values and kinds."""
        if isinstance(entries, dict | set | str | bytes) or not isinstance(entries, Iterable):
            self.error = f"--reward_fn {name} returned {reprlib.repr(entries)}, which is no list"
            kinds.fill_(FAILED)
            return
        entries = entries.tolist() if isinstance(entries, np.ndarray | torch.Tensor) else list(entries)
        if len(entries) != len(completions):
            self.error = f"--reward_fn {name} returned {len(entries)} entries for {len(completions)} completions"
            kinds.fill_(FAILED)
            return
        for row, entry in enumerate(entries):
            entry = entry.item() if isinstance(entry, np.generic | torch.Tensor) else entry
            if entry is None:
                continue
            if not isinstance(entry, numbers.Real) or not abs(entry) <= torch.finfo(torch.float32).max:
                said = f"--reward_fn {name} returned {reprlib.repr(entry)} for the completion {completions[row]!r}"
                self.error = self.error or said
                kinds[row] = FAILED
                continue
            values[row], kinds[row] = float(entry), VERDICT if isinstance(entry, bool) else NUMBER

    def stop_if_failed(self, run, when, kinds, show):
        """Stops the run where a function failed on any process.

        Args: when, e.g. "update 7"; kinds [B, F], gathered; show(i), episode i as text. Call it on every process.
        """
        failed = (kinds == FAILED).any(1)
        if failed.any():
            (error, *_) = [message for message in gather_object([self.error]) if message]
            episodes = failed.nonzero().flatten().tolist()
            run.stop(f"{when}: {error}", f"{len(episodes)} episode(s), the first is {episodes[0]}: {show(episodes[0])}")

    def by_name(self, values, kinds):
        """{"rewards/<name>": values given [N']} of each reward, and of all verdicts {"verifiable_correct_rate": 0 or 1 [N']}."""
        found = {f"rewards/{name}": values[:, i][kinds[:, i] != NOTHING] for i, name in enumerate(self.names)}
        found = found if self.functions else {}  # a reward model alone is objective/scores
        verdicts = values[kinds == VERDICT]
        return {name: x for name, x in (found | {"verifiable_correct_rate": verdicts}).items() if len(x)}


def last_line(error):
    """Where in the user's code an exception was raised, as " (file, line 7)"."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})" if trace else ""


def check_prompts(tokenizer, *prompt_sets):
    """Ends where a reward model's tokenizer, say its chat template, cannot take a prompt that it will be given."""
    for row in (row for prompt_set in prompt_sets for row in prompt_set.rows):
        if data.is_messages(row["prompt"]):
            data.encode(tokenizer, row["prompt"], [{"role": "assistant", "content": "."}])


@torch.no_grad()
def score_text(reward_model, tokenizer, prompts, answers, ended, size):
    """Scores [N] fp32 of responses by a reward model that has a tokenizer of its own: it reads their text.

    Args: reward_model, called with (tokens [M, L], mask, positions, columns to read [M, 1]); prompts, strings or messages; answers,
    strings; ended [N] bool: only such a response is followed by EOS, or by the chat template's end of the turn; size, M.
    Longer texts than its context lose their beginning.
    """
    context = getattr(reward_model.model.config.get_text_config(), "max_position_embeddings", None) or 10**9
    device, ids = reward_model.model.device, []
    for prompt, answer, whole in zip(prompts, answers, ended.tolist(), strict=True):
        completion = [{"role": "assistant", "content": answer}] if data.is_messages(prompt) else answer
        query, response = data.encode(tokenizer, prompt, completion)
        row = [i for i in query + (response if whole else response[:-1]) if i is not None]  # None: there is no EOS
        ids.append(row[-context:])
    scores, order = torch.zeros(len(ids), device=device), sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(ids), size):
        rows = order[start : start + size]
        tokens, mask = utils.left_pad([ids[i] for i in rows], device)
        last = torch.full((len(rows), 1), tokens.size(1) - 1, device=device)
        scores[rows] = reward_model(tokens, mask, utils.positions_from_mask(mask), last).squeeze(1).float()
    return scores
