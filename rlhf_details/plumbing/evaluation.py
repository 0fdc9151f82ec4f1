"""
What evaluate.py reads, writes and prints: how a policy sampled in training, the prompts and the completions that it is
compared with, the folder with summary.json and samples.csv, the table of figures, and --interactive.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import platform
import re
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
import transformers

from rlhf_details import utils
from rlhf_details.plumbing import checkpoint, cli, data, engines, judge, models, rewards, tokenization

# How a policy is sampled where neither a flag nor its folder says it.
FALLBACKS = dict(temperature=1.0, response_length=53, stop_token="eos", truncate_token="none", truncate_after=0)
FALLBACKS |= {"kl_temperature": 1.0, "chat_template_kwargs": "{}"}
NEAR_GREEDY = 0.01  # the temperature of --near_greedy


def as_trained(args):
    """{path of a policy: its args}, where each setting that no flag gives (None) is the training's, or the fallback.

    The training's settings stand in training_args.json in the policy's folder. A printed line says which settings hold
    and where they come from.
    """
    if not args.policy_path:
        cli.fail(f"--policy_path: required with --dataset {args.dataset}: a trained model's folder or Hub name")
    if len(set(args.policy_path)) < len(args.policy_path):
        cli.fail(f"--policy_path {' '.join(args.policy_path)}: names a policy twice")
    if args.near_greedy and args.temperature is not None:
        cli.fail(f"--near_greedy: means --temperature {NEAR_GREEDY}, and contradicts --temperature {args.temperature}")
    args = replace(args, temperature=NEAR_GREEDY) if args.near_greedy else args
    return {path: of_policy(args, path) for path in args.policy_path}


def of_policy(args, folder):
    """`as_trained` for one policy."""
    path, trained, values, words = Path(folder, "training_args.json"), training_args(folder), {}, {}
    layers = {"flags": vars(args), f"from {path}": {"kl_temperature": trained.get("temperature")} | trained}
    layers[f"not in {path}"] = FALLBACKS
    for name in FALLBACKS:
        source = next(source for source, layer in layers.items() if layer.get(name) is not None)
        values[name] = layers[source][name]
        words.setdefault(source, []).append(f"{name} {values[name]}")
    cli.say("sampling: " + "; ".join(f"{', '.join(found)} ({source})" for source, found in words.items()))
    today = str(datetime.now().date())
    return replace(args, **values, template_date=args.template_date or trained.get("template_date") or today)


def training_args(folder):
    """{flag: value} of the run that made a policy, {} where its folder does not say it."""
    path = Path(folder, "training_args.json")
    with cli.reading("--policy_path", path):
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def sampling(args):
    """The settings that a policy is sampled with, ((name, value), ..)."""
    return tuple((name, getattr(args, name)) for name in FALLBACKS)


def end_ids(tokenizer, args, device):
    """The ids [S] of the tokens that stop the sampler, and of those that a complete response may end with."""
    stop_ids = models.stop_ids(tokenizer, args.stop_token, "--stop_token", device)
    ids = models.stop_ids(tokenizer, args.truncate_token, "--truncate_token", device)
    return stop_ids, ids if len(ids) else stop_ids


def check(args, settings):
    """Exits with an error (exit code 2) if arguments are wrong or contradict each other. settings: of as_trained."""
    for own in settings.values():
        cli.check_template(own)
        cli.check_numbers(own)
        cli.check_sampler(own)
        if own.truncate_after and (own.truncate_token == "none" or own.truncate_after >= own.response_length):
            rule = "needs a truncate_token, and must be below response_length"
            cli.fail(f"--truncate_after {own.truncate_after}: {rule}")
    if len({own.chat_template_kwargs for own in settings.values()}) > 1:
        rule = "the policies were trained with different ones, and need one for this comparison"
        cli.fail(f"--chat_template_kwargs: {rule}")
    rewards.check_functions(args)
    if args.samples_per_prompt > 1 and not args.reward_fn:
        rule = "needs --reward_fn, with rewards that are True or False"
        cli.fail(f"--samples_per_prompt {args.samples_per_prompt}: {rule}")
    needed = {"reward_fn": "reward_fn", "reward_model": "reward_model_path"}.get(args.judge)
    if needed and not getattr(args, needed):
        cli.fail(f"--judge {args.judge}: needs --{needed}")
    if args.judge == "gold" and args.dataset.partition(":")[0] != "toy":
        cli.fail(f"--judge gold: only the embedded task has a true reward, not --dataset {args.dataset}")
    judge.check(args)


def read_rows(args, use_references):
    """The rows of --dataset, each with its `prompt` and, where use_references says so, its `completion`."""
    rows = data.read_prompts(args, "dataset", args.num_examples, "test")
    return data.with_completions(rows, args, f"--dataset {args.dataset}") if use_references else rows


def points(args, score, table, side):
    """What --judge compares, [N]: gold, the reward model's score, or the weighted sum of all rewards that apply.

    Args: score, a Scorer; table, {column: list of N}, whose columns of one side's responses begin with `side`.
    """
    if args.judge != "reward_fn":
        return table[side + {"gold": "gold", "reward_model": "rewards/reward_model"}[args.judge]]
    pairs = zip(score.names[: score.num_weighted], score.weights.tolist(), strict=False)
    columns = [[weight * (x or 0) for x in table[f"{side}rewards/{name}"]] for name, weight in pairs]
    return list(map(sum, zip(*columns, strict=True)))


def encode_references(args, tokenizer, prompts, context, device):
    """The completions of the prompts' rows: (their N texts; tokens, mask [N, longest], right-padded).

    Args: context, the most tokens that a prompt and its completion may have, because the reward model reads both.
    """
    for row in prompts:
        answer = row.columns["completion"]
        row.answers = [tokenization.encode(tokenizer, row.columns["prompt"], answer, row.options)[1]]
    limit, hint = "the reward model's context", "shorten their prompts or completions"
    tokenization.check_room(prompts, data.Prompt.length, context, limit, hint)
    tokenization.warn_of_empty(tokenizer, prompts)
    tokens, mask = (x.flip(1) for x in utils.left_pad([row.completion[::-1] for row in prompts], device))
    return [data.as_text(tokenizer, row.columns["completion"]) for row in prompts], tokens, mask


def load_models(args, device):
    """Returns (tokenizer, {path: causal language model}, reward), where all models are transformers' and in fp32.

    reward: (the model, its own tokenizer or None), or () without a reward model. A model that does not read the token
    ids that the policies and the opponent write ends with one line. But a reward model of another vocabulary is given
    text, as in training.
    """
    tokenizer = models.load_tokenizer(args.policy_path[0], "--policy_path", args)
    named = [("--policy_path", path) for path in args.policy_path]
    named += [(f"--{flag}", path) for flag in ("opponent_path", "ref_model_path") if (path := getattr(args, flag))]
    loaded, reward = {}, ()
    for flag, path in named:
        if path not in loaded:
            loaded[path] = models.load_policy(path, flag, args).to(device).eval()
    readers = [(flag, path, loaded[path]) for flag, path in named]
    if path := args.reward_model_path:
        torch.manual_seed(args.seed)  # for a head that is drawn at random
        reward = models.load_reward_model(path, args).to(device).eval(), None
        readers.append(("--reward_model_path", path, reward[0]))
    # A model may have more embeddings than its tokenizer has tokens, and these it never writes.
    written = max(models.num_tokens(loaded[path]) for flag, path in named if flag != "--ref_model_path")
    for flag, path, model in readers:
        size, theirs = model.get_input_embeddings().num_embeddings, models.find_tokenizer(path, flag, args)
        one, other = models.vocabularies(tokenizer, theirs or tokenizer)
        if flag == "--reward_model_path" and one != other:
            reward = reward[0], theirs
        elif one != other or size < written:
            first = f"--policy_path {args.policy_path[0]} ({written} tokens)"
            cli.fail(f"vocabulary mismatch: {first} and {flag} {path} ({size} embeddings, {len(other)} tokens)")
    engines.use_one_thread(*(model for *_, model in readers))
    return tokenizer, loaded, reward


# These arguments may differ when an evaluation is repeated into its folder, since the figures are the same.
MAY_DIFFER = "exp_name config output_dir overwrite judge_base_url rollout_micro_batch_size attn_implementation"
MAY_DIFFER = [*MAY_DIFFER.split(), "template_date", "vllm_memory", "vllm_server", "vllm_folder"]
# A line warns of fewer ended responses, of lengths with a larger ratio, and of a larger share of unreadable answers.
FEW_ENDED, FAR_APART, UNREADABLE = 0.9, 2.0, 0.05
UNITS = {"length": "length (tokens)", "kl": "kl (nats per response)"}


# ---- the folder ------------------------------------------------------------------------------------------------------
def folder_of(args):
    """The output folder, with the policies' paths in their place, of which a file system takes some 200 letters."""
    names = "__".join(path.strip("/").replace("/", "_") for path in args.policy_path)
    return Path(args.output_dir.replace("{policy}", names[:200]))


def arguments(args, settings):
    """{"args": as they were given, "sampling": {path of a policy: {setting: value}}}. settings: of as_trained."""
    drawn = {path: dict(sampling(own)) for path, own in settings.items()}
    return json.loads(json.dumps({"args": dataclasses.asdict(args), "sampling": drawn}))


def deciding(summary):
    """{name: value} of what decides the figures. A setting of the sampler counts as it is for each policy."""
    found = {name: x for name, x in summary["args"].items() if name not in (*MAY_DIFFER, *FALLBACKS)}
    return found | {f"{path}: {name}": x for path, own in summary["sampling"].items() for name, x in own.items()}


def check_folder(args, settings):
    """Exits with an error if the output folder holds other results or foreign files and --overwrite is not given."""
    folder = folder_of(args)
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            cli.fail(f"--output_dir {folder}: {part} is a file")
    if (folder / "config.json").exists():
        cli.fail(f"--output_dir {folder}: holds a model or a training run")
    if args.overwrite or not folder.exists() or not any(folder.iterdir()):
        return
    try:
        before = deciding(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        cli.fail(f"--output_dir {folder} holds something that is no evaluation; give another folder or --overwrite")
    for name, value in deciding(arguments(args, settings)).items():
        if before.get(name) != value:
            there = f"{name} {before.get(name)!r} there, {value!r} here"
            cli.fail(f"--output_dir {folder} holds another evaluation ({there}); give another folder or --overwrite")


def open_folder(args, settings, accelerator, num_examples):
    """Makes the output folder, with a summary that has no figures yet. Returns (folder, summary)."""
    versions = {"python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (torch, transformers)}
    summary = arguments(args, settings) | {"versions": versions, "device": str(accelerator.device)}
    summary |= {"num_processes": accelerator.num_processes, "num_examples": num_examples}
    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    return folder, summary


def write(folder, summary, metrics, tables, warnings):
    """Writes samples.csv and then summary.json, each whole or not at all. Returns the summary.

    Args: metrics, {path: {"policy": {name: figure}, "opponent": .., "win_rate": ..}}; tables, {path: {column: list of
    N}}; warnings, lines. Where there is one policy, neither file names it: metrics and columns are its own.
    """
    import pandas

    columns = {}
    for path, table in tables.items():
        is_shared = len(tables) == 1
        columns |= {name if is_shared or name == "prompt" else f"{path}: {name}": x for name, x in table.items()}
    checkpoint.write_text(folder / "samples.csv", pandas.DataFrame(columns).to_csv(index=False))
    summary = summary | {"metrics": metrics[path] if len(metrics) == 1 else metrics, "warnings": warnings}
    checkpoint.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    return summary


# ---- what is printed -------------------------------------------------------------------------------------------------
def columns_of(args, metrics, tables):
    """{label: (figures, its responses, whether they ended)}, a column of the printed table each.

    The policies come first. Then comes the opponent, once for all policies whose settings it was sampled with.
    """
    columns = {path: (metrics[path]["policy"], table["response"], table.get("ended")) for path, table in tables.items()}
    opponent, seen = args.opponent_path or "references", [(path, table["response"]) for path, table in tables.items()]
    for path, table in tables.items():
        if "opponent" in metrics[path] and (opponent, texts := table["opponent_response"]) not in seen:
            label = f"{opponent}, as {path}" if opponent in dict(seen) else opponent
            seen.append((opponent, texts))
            columns[label] = metrics[path]["opponent"], texts, table.get("opponent_ended")
    return columns


def show(args, summary, metrics, tables):
    """Prints a table of all figures, the first four samples, and each policy's win rate, with what makes it doubtful.

    Args: summary, metrics and tables as of `write`.
    """
    import pandas

    columns, prompts = columns_of(args, metrics, tables), next(iter(tables.values()))["prompt"]
    cli.say(f"{args.exp_name}: {len(prompts)} prompts of {args.dataset}")
    shown = []
    for label, (found, *_) in columns.items():
        won = metrics.get(label, {}).get("win_rate")
        figures = found | ({"win rate": won} if won else {})
        shown.append({"": label} | {UNITS.get(name, name): as_text(x) for name, x in figures.items()})
    for line in pandas.DataFrame(shown).T.fillna("-").to_string(header=False).splitlines():
        cli.say(line)
    for i, prompt in enumerate(prompts[:4]):
        words = [f"prompt: {prompt.strip()}"]
        for label, (_, responses, ended) in columns.items():
            words.append(f"{label}: {responses[i].strip()}" + " [did not end]" * (ended is not None and not ended[i]))
        cli.say(" | ".join(words).replace("\n", "⏎"))
    for path, own in metrics.items():
        if "win_rate" in own:
            whose = f" of {path}" * (len(metrics) > 1)
            cli.say(f"Model win rate{whose}: {win_rate_line(own, args.judge == 'llm')}")
    for line in summary["warnings"]:
        cli.say(f"warning: {line}")


def as_text(figure):
    """A figure as a number and its interval where it has one."""
    interval = f"  ({figure['low']:z.3f} .. {figure['high']:z.3f})" if "low" in figure else ""
    return f"{figure['value']:z.3f}{interval}"


def win_rate_line(metrics, is_read):
    """The win rate in words. is_read: whether the verdicts were read from answers, which may be unparsable."""
    w, sides = metrics["win_rate"], (metrics["policy"], metrics["opponent"])
    counts = f"{w['won']} won, {w['tied']} tied, {w['lost']} lost" + f", {w['unparsable']} unparsable" * is_read
    # Judges like long responses, so the mean lengths stand beside every win rate. [EVAL-4]
    ours, theirs = (f"{side['length']['value']:.1f}" for side in sides)
    # A response that was cut off is compared as it stands.
    ended = " against ".join(f"{side['ended']['value']:.1%}" if "ended" in side else "-" for side in sides)
    interval = f"{w['low']:.2%} .. {w['high']:.2%}, {w['pairs']} pairs"
    line = f"{w['value']:.2%}  ({interval}: {counts}, mean length {ours} against {theirs} tokens, ended {ended})"
    if not w["unparsable"]:
        return line
    if "readable" not in w:
        return f"{line}; no verdict could be read"
    readable = "{value:.2%}  ({low:.2%} .. {high:.2%})".format(**w["readable"])
    return f"{line}; {readable} of the {w['pairs'] - w['unparsable']} pairs whose verdict could be read"


def doubts(args, settings, metrics):
    """Lines on what makes figures doubtful.

    They are: training's own judge, a judge that cannot be read, responses without an end, lengths far apart.
    """
    lines = []
    for path, own in metrics.items():
        trained, judges = training_args(path), []
        if args.judge in ("reward_model", "reward_fn"):
            judges = [args.reward_model_path, *(args.reward_fn if args.judge == "reward_fn" else ())]
        watched = "teacher_model_path" in trained  # Such a run has only logged its functions.
        optimised = () if watched else (trained.get("reward_model_path"), *trained.get("reward_fn", ()))
        if judges := [reward for reward in judges if reward and reward in optimised]:
            what = f"{' and '.join(judges)} says who wins, which is what training optimised"
            lines.append(f"{path}: {what}, so this win rate cannot show over-optimisation")
        w = own.get("win_rate", {"unparsable": 0})
        if w["unparsable"] and (share := w["unparsable"] / (w["pairs"] - w["tied"])) > UNREADABLE:
            what = f"{w['unparsable']} answers of the judge ({share:.1%}) name neither response where they should"
            lines.append(f"{path}: {what}, and count as not won; judge_answer in samples.csv has them")
        lengths = []
        for side, name in (("policy", path), ("opponent", args.opponent_path)):
            lengths += [own[side]["length"]["value"]] if side in own else []
            share = own.get(side, {}).get("ended", {"value": 1})["value"]
            if share < FEW_ENDED:
                what = f"only {share:.1%} of its responses ended within {settings[path].response_length} tokens"
                lines.append(f"{name}: {what}, and the others are scored and compared as they were cut off")
        if max(lengths) > FAR_APART * min(lengths):
            what = " against ".join(f"{length:.1f}" for length in lengths)
            lines.append(f"{path}: mean length {what} tokens: rewards and judges may pay for the length alone")
    return list(dict.fromkeys(lines))  # Policies may share an opponent.


# ---- --interactive: each policy answers a line that is typed ---------------------------------------------------------
class Speaker:
    """A policy that answers, sampled as evaluate.py samples it. Its memory is the conversation so far."""

    def __init__(self, path, args, device):
        self.path, self.args, self.memory = path, args, []
        self.tokenizer = models.load_tokenizer(path, "--policy_path", args)
        self.model = models.load_policy(path, "--policy_path", args).to(device).eval()
        self.ids = end_ids(self.tokenizer, args, device)
        self.room = models.context_of(self.model) - args.response_length  # tokens that a prompt may have
        if self.room <= 0:
            cli.fail(f"--response_length {args.response_length}: leaves no room for a prompt in the context of {path}")

    def answer(self, line, number, respond):
        """The answer to a line. Its noise depends on the line's number, so that a question may be asked again."""
        is_chat, device = bool(self.tokenizer.chat_template), self.model.device
        prompt = [*self.memory, {"role": "user", "content": line}] if is_chat else line
        query = tokenization.encode(self.tokenizer, prompt, options=data.options_of({}, self.args))
        if not 0 < len(query) <= self.room:
            self.memory = []
            return f"[{len(query)} tokens, and a prompt may have 1 to {self.room}: the conversation begins anew]"
        queries, query_mask = utils.left_pad([query], device)
        numbers = torch.tensor([number], device=device)
        response, mask, ended = respond(self.model, queries, query_mask, numbers, self.ids, self.args)
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
    device = engines.join().device
    speakers = [Speaker(path, args, device) for path, args in settings.items()]
    cli.say("type a prompt; an empty line, Ctrl-D or Ctrl-C ends the conversation")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        for number in itertools.count():
            if not (line := input("> " if sys.stdin.isatty() else "").strip()):
                break
            for speaker in speakers:
                cli.say(f"{speaker.path}: {speaker.answer(line, number, respond)}")
    cli.say("the conversation is over")


# ---- figures ---------------------------------------------------------------------------------------------------------
def rouge_l(response, reference):
    """ROUGE-L F1 of two strings, in [0, 1], on their lower-case words of ASCII letters and digits.

    Source: Lin 2004, section 3.1.
    """
    a, b = (re.findall(r"[a-z0-9]+", text.lower()) for text in (response, reference))
    longest = [0] * (len(b) + 1)  # entry j: length of the longest common subsequence of b[:j] and the words of a so far
    for word in a:
        above, longest = longest, [0]
        for j, other in enumerate(b):
            longest.append(above[j] + 1 if word == other else max(above[j + 1], longest[j]))
    common = longest[-1]
    return 2 * common / (len(a) + len(b)) if common else 0.0


def wilson_interval(wins, n, z=1.96):
    """Wilson's score interval (low, high) of a rate of `wins` (ties may count half) out of n; z = 1.96: 95%.

    Unlike p +- z sqrt(p (1 - p) / n) it stays within [0, 1] and has a width at p = 0 and p = 1.
    Source: E. B. Wilson, 1927.
    """
    p = wins / n
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (center - half) / (1 + z * z / n)), min(1.0, (center + half) / (1 + z * z / n))


def rate(hits):
    """{"value", "low", "high"}: the mean of numbers in [0, 1], with its Wilson interval."""
    low, high = wilson_interval(sum(hits), len(hits))
    return {"value": sum(hits) / len(hits), "low": low, "high": high}


def pass_rates(verdicts, pass_at_k):
    """{"pass@k": average over the prompts} for k = 1, 2, 4, .. up to the n responses to a prompt.

    Args: verdicts, n lists of N tuples, a prompt's rewards (1, 0 or None where one does not apply); a response is right
    where all that apply are 1. pass_at_k, the function of (n, how many are right, k).
    """
    prompts = [[row for row in rows if any(x is not None for x in row)] for rows in zip(*verdicts, strict=True)]
    counts = [sum(all(row_x != 0 for row_x in row) for row in rows) for rows in prompts if rows]
    n = len(verdicts)
    ks = [k for k in range(1, n + 1) if k == n or k.bit_count() == 1] if counts else []
    return {f"pass@{k}": share([pass_at_k(n, right, k) for right in counts]) for k in ks}


def share(values):
    """average() of numbers in [0, 1], one a prompt, with an interval that has a width where all of them are equal.

    The interval is that of the numbers with two zeros and two ones beside them, within [0, 1].
    Source: Agresti and Coull, "Approximate Is Better than 'Exact' for Interval Estimation of Binomial Proportions".
    """
    wider = average([*values, 0, 0, 1, 1])
    return {"value": sum(values) / len(values), "low": max(0.0, wider["low"]), "high": min(1.0, wider["high"])}


def average(values):
    """{"value", "low", "high"}: the mean of numbers +- 1.96 standard errors. A single number has no interval."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return {"value": mean}
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
    return {"value": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}
