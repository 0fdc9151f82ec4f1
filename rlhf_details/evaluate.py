"""
Evaluation of a policy: samples as it was trained, what they score, how far they are from a reference, how often they win.

1. The policy gives one response to each prompt, sampled as it was trained: temperature, length and the tokens that end a
   response come from its folder's training_args.json, unless a flag says otherwise. The opponent is another policy, sampled with
   the same settings and noise (a policy against itself ties everywhere), or the rows' `completion`. Scores are the reward
   model's own, bias included: nothing is taken off where a response did not end.
2. Win rate = (won + tied / 2) / pairs. Who wins a pair is said by the reward model, by the embedded task's true reward, or by a
   language model that reads both responses in a random order. An answer of it that names neither counts as a pair not won.
3. KL(policy || reference) is estimated by the mean over responses of sum_t (log p - log p_ref), which is unbiased only for
   responses drawn from p itself. Those of 1. may come from another policy, say from softmax(logits / 0.01), whose own KL is huge
   and says little. So the KL has a pass of its own, sampled and computed at `kl_temperature`, with the noise of the training
   scripts' held-out evaluation: without flags it is that evaluation's KL, given the training's seed and prompts.
4. Every rate has its Wilson 95% interval (with many ties wider than it need be), every mean has mean +- 1.96 standard errors.
   Both are over prompts: they do not know of the luck of the seed that the policy was trained with.
5. Answers of the judge are kept on disk one by one: an interrupted judging goes on with the same command.

It writes to `output_dir`: summary.json (arguments, versions, all figures), samples.csv (a row a prompt), judge_cache.jsonl.
Left out on purpose: ties from the language model, and a prompt of the user's own for it.

Shapes    N: prompts   R: response tokens, right-padded   M: responses of a slice

One process:   python rlhf_details/evaluate.py
N processes:   accelerate launch --num_processes N rlhf_details/evaluate.py
"""

import csv
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from time import sleep
from typing import Literal

import torch
import transformers
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from rlhf_details import data, reward_functions, toy, utils
from rlhf_details.train_ppo import truncate_response
from rlhf_details.train_rloo import EVALUATION, Policy, Reward, in_slices, response_logprobs, response_scores, sample


@dataclass
class Args:
    # run
    exp_name: str = "evaluate"
    """name of the evaluation, the title of its table"""
    seed: int = 1
    """seed of the samples and of the order in which the judge reads a pair"""
    config: str | None = None
    """TOML file of defaults for these arguments; the command line wins"""
    output_dir: str = "runs/evaluate__{policy}"
    """folder of summary.json, samples.csv and judge_cache.jsonl; {policy} stands for policy_path, with _ for /"""
    overwrite: bool = False
    """replace the results of other arguments; answers of the judge are kept all the same"""

    # data and models: all models share the policy's vocabulary
    dataset: str = "toy"
    """prompts: "toy" (its test split), a .jsonl/.json/.csv/.parquet file, a folder or a Hub data set, with :PART for a split"""
    num_examples: int | None = None
    """evaluate on the first so many prompts; None: on all"""
    prompt_template: str | None = None
    """the prompt, with the row's columns in their places: "Question: {question}\\nAnswer:"; None: the column `prompt`"""
    max_prompt_length: int | None = None
    """drop rows whose prompt has more tokens than this; the number dropped is printed"""
    policy_path: str | None = None
    """the policy that is evaluated, a folder or a Hub model"""
    opponent_path: str | None = None
    """the policy it is compared with; None: the rows' `completion`, where a judge needs an opponent"""
    ref_model_path: str | None = None
    """the policy to which the KL is measured; None: no KL"""
    reward_model_path: str | None = None
    """reward model, a sequence-classification folder with one label; None: no scores"""
    allow_untrained_reward_model: bool = False
    """accept a reward model whose head would be newly initialised (dummy runs)"""
    reward_fn: tuple[str, ...] = ()
    """functions f(prompts, completions, **columns) -> rewards, FILE.py:function or package.module:function; reported by name"""
    trust_remote_code: bool = False
    """run the Python code that comes with a model; for models whose authors you trust"""

    # sampling; None: as the policy was trained, says its folder's training_args.json, or else what FALLBACKS says
    response_length: int | None = None
    """most tokens a response may have (R); None: as the policy was trained, or 53"""
    temperature: float | None = None
    """sampling temperature of the responses that are scored and compared; None: as the policy was trained, or 1"""
    kl_temperature: float | None = None
    """temperature of both policies in the KL; None: as the policy was trained, or 1, comparable with training's `objective/kl`"""
    stop_token: str | None = None
    """sampling ends with this token: "eos", "none", or a text that is one token; None: as the policy was trained, or eos"""
    truncate_token: str | None = None
    """as in train_ppo.py: what is read of a response ends with this token: "eos", "none" (all of it), or a text; None: as the
    policy was trained, or none"""
    truncate_after: int | None = None
    """tokens before this place of the response (from 0) do not truncate it; None: as the policy was trained, or 0"""

    # judging
    judge: Literal["none", "reward_model", "gold", "llm"] = "none"
    """who says which response of a pair is better; gold: the embedded task's true reward, llm: a language model"""
    judge_model: str | None = None
    """name of the language model, as its server knows it"""
    judge_base_url: str | None = None
    """OpenAI-compatible endpoint, e.g. http://localhost:8000/v1 of a local vLLM; None: OpenAI's. The key is $OPENAI_API_KEY"""

    # memory and speed: never changes the result
    rollout_micro_batch_size: int = 64
    """responses a device samples or scores at once"""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """attention kernel; None: the library's choice for the model"""


MAY_DIFFER = "exp_name config output_dir overwrite judge_base_url rollout_micro_batch_size attn_implementation".split()
COMPARED, JUDGE_ORDER = 4, 5  # purposes of noise, beside those of train_rloo: the responses that are compared, and the pairs
FALLBACKS = dict(  # how a policy is sampled where neither a flag nor its folder says it
    temperature=1.0, response_length=53, stop_token="eos", truncate_token="none", truncate_after=0, kl_temperature=1.0
)  # fmt: skip
JUDGE_ATTEMPTS, JUDGE_THREADS, JUDGE_TIMEOUT = 6, 8, 60.0  # the time limit is in seconds
JUDGE_TEMPLATE = """\
Below are a prompt and two responses to it. Say which response is better. If the prompt asks for a summary, the better one says \
what matters most in the text, briefly, and nothing that the text does not say. If it asks for something else, or is the beginning \
of a text, the better one does what is asked, or continues the text, fluently, to the point and without repeating itself. \
Neither the order of the responses nor their length counts by itself.

### Prompt
{prompt}

### Response A
{a}

### Response B
{b}

### Your answer
First compare the two in one sentence. Then name the better one, A or B, on a line of its own. Write exactly two lines:
Comparison: <one sentence>
Preferred: <A or B>"""


# ---- equations -------------------------------------------------------------------------------------------------------
def wilson_interval(wins, n, z=1.96):
    """Wilson's score interval (low, high) of a rate of `wins` (ties may count half) out of n; z = 1.96: 95%.

    Unlike p +- z sqrt(p (1 - p) / n) it stays within [0, 1] and has a width at p = 0 and p = 1. Source: E. B. Wilson, 1927.
    """
    p = wins / n
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (center - half) / (1 + z * z / n)), min(1.0, (center + half) / (1 + z * z / n))


def rate(hits):
    """{"value", "low", "high"}: share of a list of numbers in [0, 1] that hit, with its Wilson interval."""
    low, high = wilson_interval(sum(hits), len(hits))
    return {"value": sum(hits) / len(hits), "low": low, "high": high}


def average(values):
    """{"value", "low", "high"}: mean of a list of numbers +- 1.96 standard errors; one number has no interval."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return {"value": mean}
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
    return {"value": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}


def distinct_n(responses, n):
    """Different n-grams over all n-grams of all responses (lists of token ids); 0 where there is none.

    It falls as there are more tokens: compare like with like. Source: Li et al., arXiv 1510.03055.
    """
    ngrams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    return len(set(ngrams)) / max(1, len(ngrams))


def verdict_by_score(score, opponent_score):
    """ "won", "tied" or "lost"; within 1e-4 is a tie, since the same response in another slice differs by float error."""
    difference = score - opponent_score
    return "tied" if abs(difference) < 1e-4 else "won" if difference > 0 else "lost"


def verdict_by_answer(answer, ours):
    """ "won", "lost" or "unparsable" from the judge's text; ours: the letter that the evaluated policy's response had.

    Only the last line counts. It must end with A or B, alone, as "Response A", or after "Preferred:"; quotes, brackets and
    asterisks may stand around, and letters may be small.
    """
    last = (answer.strip().splitlines() or [""])[-1]
    match = re.fullmatch(r"(?:.*preferred[\W_]*:)?[\W_]*(?:response[\W_]*)?([ab])[\W_]*", last, re.IGNORECASE)
    return "unparsable" if match is None else "won" if match[1].upper() == ours else "lost"


def win_rate(verdicts):
    """rate() of the verdicts, a tie being half a win and an unparsable answer none, and how many there are of each."""
    counts = {name: verdicts.count(name) for name in ("won", "tied", "lost", "unparsable")}
    # [EVAL-2] what cannot be read is not won
    return rate([{"won": 1.0, "tied": 0.5}.get(v, 0.0) for v in verdicts]) | {"pairs": len(verdicts)} | counts


def backoff(attempt):
    """Seconds to wait after the failed attempt number 0, 1, ...: 1, 2, 4, ... and never more than 60."""
    return min(2.0**attempt, 60.0)


# ---- the language model as a judge -----------------------------------------------------------------------------------
def question(prompt, response, opponent, seed, number):
    """(text for the judge, letter of `response` in it); the order is a function of (seed, number of the prompt) alone."""
    first = utils.permutation(2, seed, JUDGE_ORDER, number)[0] == 0  # [EVAL-1] judges like what comes first
    a, b = (response, opponent) if first else (opponent, response)
    return JUDGE_TEMPLATE.format(prompt=prompt.strip(), a=a.strip(), b=b.strip()), "A" if first else "B"


def cache_key(judge_model, text):
    """What an answer is kept under: a hash of the judge's name and of all that it reads (template, prompt, pair, order)."""
    return hashlib.sha256(json.dumps([judge_model, text]).encode()).hexdigest()


def read_cache(path):
    """{key: answer} of a cache file; a line that a crash cut short, or that is something else, is skipped."""
    answers = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            answers[row["key"]] = row["answer"]
        except (ValueError, TypeError, LookupError):
            continue
    return answers


def ask(client, judge_model, text):
    """The judge's answer to one question. What may pass is tried again: no connection, 408, 409, 429, 5xx, no chat completion."""
    import openai

    for attempt in range(JUDGE_ATTEMPTS):
        try:
            messages = [{"role": "user", "content": text}]
            completion = client.chat.completions.create(model=judge_model, messages=messages, temperature=0)
            if not getattr(completion, "choices", None):
                raise ValueError("the endpoint's reply is no chat completion")
            return completion.choices[0].message.content or ""
        except (openai.APIError, ValueError) as e:  # ValueError: also a body that is no JSON
            status = getattr(e, "status_code", 500)
            if attempt + 1 == JUDGE_ATTEMPTS or not (status in (408, 409, 429) or status >= 500):
                raise
            sleep(backoff(attempt))


def ask_all(args, texts, cache_file, say):
    """The judge's answer to each of `texts`, from the cache where it is there, else asked for and appended to it."""
    import openai

    answers = read_cache(cache_file)
    missing = {key: text for text in texts if (key := cache_key(args.judge_model, text)) not in answers}
    say(f"judge {args.judge_model}: {len(texts)} questions, {len(missing)} to ask, the others are in {cache_file}")
    api_key = os.environ.get("OPENAI_API_KEY")
    # the client wants a key; check() has made sure that only a server of the user's own gets the dummy
    client = openai.OpenAI(api_key=api_key or "none", base_url=args.judge_base_url, timeout=JUDGE_TIMEOUT, max_retries=0)
    lock, stopped = threading.Lock(), threading.Event()
    with open(cache_file, "a+b") as file, ThreadPoolExecutor(JUDGE_THREADS) as pool:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
            file.write(b"\n")  # the last line was cut short: the next one must not be glued to it

        def ask_and_keep(key, text):
            if stopped.is_set():
                return
            try:
                answer = ask(client, args.judge_model, text)
            except (openai.APIError, ValueError):
                stopped.set()  # at once: no further question is asked
                raise
            with lock:
                answers[key] = answer
                file.write(json.dumps({"key": key, "judge_model": args.judge_model, "answer": answer}).encode() + b"\n")
                file.flush()

        try:
            for future in [pool.submit(ask_and_keep, *item) for item in missing.items()]:
                future.result()
        except (openai.APIError, ValueError) as e:
            error = f"{e} ({e.__cause__})" if e.__cause__ else str(e)
        else:
            return [answers[cache_key(args.judge_model, text)] for text in texts]
        finally:
            pool.shutdown(cancel_futures=True)  # waits for the answers under way, which are kept as well
    error = " ".join((error.replace(api_key, "***") if api_key else error).split())  # one line, and never the key
    kept = sum(key in answers for key in missing)
    where = f"--judge_model {args.judge_model} at --judge_base_url {args.judge_base_url}"
    utils.fail(f"{where}: {error}; {kept} of {len(missing)} answers came and are kept: the same command goes on from there")


# ---- main ------------------------------------------------------------------------------------------------------------
def as_trained(args):
    """Resolves the settings of sampling: the flag's value, else that of the policy's training_args.json, else the fallback.

    Returns: (the arguments, none of these settings None; a line that says them, and where each group of them comes from).
    A file that cannot be read, or that holds a value of another type, ends with one line (exit code 2).
    """
    if not args.policy_path:
        utils.fail("--policy_path: required, a model folder or Hub name (only --dataset toy from the command line has a default)")
    flags = {name: getattr(args, name) for name in FALLBACKS if getattr(args, name) is not None}
    path, trained = Path(args.policy_path, "training_args.json"), {}
    has_file = os.path.isfile(path)
    if has_file and len(flags) < len(FALLBACKS):
        trained = read_training_args(path)
        trained["kl_temperature"] = trained.get("temperature")
    found = {name: trained[name] for name in FALLBACKS if name not in flags and trained.get(name) is not None}
    for name, value in found.items():
        kind = type(FALLBACKS[name])
        if kind is float and type(value) is int and abs(value) < 2**63:
            found[name] = value = float(value)
        if type(value) is not kind:
            utils.fail(f"--policy_path {args.policy_path}: {path}: {name}: {value!r} is not of type {kind.__name__}")
    others = {name: value for name, value in FALLBACKS.items() if name not in flags | found}
    values = flags | found | others
    silent = set() if values["truncate_token"] != "none" or values["truncate_after"] else {"truncate_token", "truncate_after"}
    silent |= set() if args.ref_model_path else {"kl_temperature"}  # what changes nothing is named only where a flag gives it
    text = lambda x: x if x in ("eos", "none") else repr(x)  # noqa: E731
    words = dict(
        temperature=f"temperature {values['temperature']:g}", response_length=f"{values['response_length']} tokens",
        stop_token=f"stop token {text(values['stop_token'])}", truncate_token=f"truncate token {text(values['truncate_token'])}",
        truncate_after=f"truncate after {values['truncate_after']}",
        kl_temperature=f"KL at temperature {values['kl_temperature']:g}",
    )  # fmt: skip
    why = f"the fallback, not in {path}" if has_file else f"the fallback, {args.policy_path} has no training_args.json"
    groups = []
    for names, source in ((found, f"from {path}"), (flags, ", ".join(f"--{name}" for name in flags)), (others, why)):
        if said := [words[name] for name in FALLBACKS if name in names and (name in flags or name not in silent)]:
            groups.append(f"{', '.join(said)} ({source})")
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in f"sampling: {'; '.join(groups)}")  # as utils.fail has it
    return replace(args, **values), line


def read_training_args(path):
    """The object that a policy's training_args.json holds; anything else ends with one line."""
    try:
        trained = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:  # a wrong encoding and a wrong JSON are ValueErrors
        utils.fail(f"--policy_path {path.parent}: {path} cannot be read as JSON ({e})")
    if not isinstance(trained, dict):
        utils.fail(f"--policy_path {path.parent}: {path} holds no object with the arguments of a training")
    return trained


def check(args):
    """Ends with one line (exit code 2) where arguments are wrong or contradict each other; nothing has been written by then.

    Args: args, as `as_trained` returns them.
    """
    for name, lowest in dict(
        num_examples=1, max_prompt_length=1, response_length=1, rollout_micro_batch_size=1, seed=0, truncate_after=0
    ).items():
        if getattr(args, name) is not None and getattr(args, name) < lowest:
            utils.fail(f"--{name} {getattr(args, name)}: must be at least {lowest}")
    for name in ("seed", "num_examples", "max_prompt_length", "response_length", "rollout_micro_batch_size"):
        if (getattr(args, name) or 0) >= 2**63:
            utils.fail(f"--{name} {getattr(args, name)}: must be below 2**63")
    for name in ("temperature", "kl_temperature"):
        if not 0 < getattr(args, name) < math.inf:
            utils.fail(f"--{name} {getattr(args, name)}: must be finite and above 0")
    if args.truncate_after and args.truncate_token == "none":
        utils.fail(f"--truncate_after {args.truncate_after}: needs a --truncate_token")
    if args.truncate_after >= args.response_length:
        utils.fail(f"--truncate_after {args.truncate_after}: not below --response_length {args.response_length}")
    for spec in args.reward_fn:
        data.load_function(spec, "--reward_fn")
    if args.judge == "reward_model" and not args.reward_model_path:
        utils.fail("--judge reward_model: needs --reward_model_path")
    if args.judge == "gold" and args.dataset.partition(":")[0] != "toy":
        utils.fail(f"--judge gold: only the embedded task has a true reward, not --dataset {args.dataset}")
    if args.judge == "llm":
        url = args.judge_base_url
        if not args.judge_model:
            utils.fail("--judge llm: needs --judge_model")
        if url is not None and not url.startswith(("http://", "https://")):
            utils.fail(f"--judge_base_url {url}: must begin with http:// or https://")
        if url is None and not os.environ.get("OPENAI_API_KEY"):
            utils.fail("--judge llm: needs OPENAI_API_KEY in the environment, or the --judge_base_url of a server of your own")
        if importlib.util.find_spec("openai") is None:
            utils.fail("--judge llm: needs the package openai: pip install 'rlhf_details[judge]'")
    elif args.judge_model:
        utils.fail(f"--judge_model {args.judge_model}: is read by --judge llm alone, not by --judge {args.judge}")
    check_results(args)


def results_folder(args):
    """The output folder, with the policy's path in its place."""
    return Path(args.output_dir.replace("{policy}", args.policy_path.strip("/").replace("/", "_")))


def check_results(args):
    """Refuses an output folder that holds results of other arguments, or none of ours, unless `--overwrite`."""
    folder = results_folder(args)
    utils.check_path(str(folder), "--output_dir")
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            utils.fail(f"--output_dir {folder}: {part} is a file")
    if (folder / "config.json").exists():
        utils.fail(f"--output_dir {folder}: holds a model or a training run")
    if args.overwrite or not folder.exists() or not any(folder.iterdir()):
        return
    try:
        before = dict(json.loads((folder / "summary.json").read_text())["args"])
    except (OSError, ValueError, TypeError, LookupError):
        utils.fail(f"--output_dir {folder} holds something that is no evaluation; give another folder or --overwrite")
    for name, value in json.loads(json.dumps(asdict(args))).items():
        if name not in MAY_DIFFER and before.get(name) != value:
            utils.fail(
                f"--output_dir {folder} holds another evaluation ({name} {before.get(name)!r} there, {value!r} here); "
                "give another folder or --overwrite"
            )


def check_vocabulary(args, tokenizer, sizes, flag):
    """All models read and write the policy's token ids: the same vocabulary but for the padding, and enough embeddings.

    Args: tokenizer, the policy's; sizes, {flag: embeddings}; flag, whose model is compared with the policy's.
    """
    other = utils.find_tokenizer(getattr(args, flag), args.trust_remote_code) or tokenizer  # a reward model may come without one
    padding = {t.pad_token for t in (tokenizer, other) if t.pad_token != t.eos_token}
    ours, theirs = ({word: i for word, i in t.get_vocab().items() if word not in padding} for t in (tokenizer, other))
    readers = {"ref_model_path": ["policy_path"], "reward_model_path": ["policy_path", "opponent_path"]}  # ... of whose tokens
    if ours != theirs or any(sizes.get(writer, 0) > sizes[flag] for writer in readers.get(flag, [])):
        utils.fail(
            f"vocabulary mismatch: --policy_path {args.policy_path} ({sizes['policy_path']} embeddings, {len(ours)} tokens) and "
            f"--{flag} {getattr(args, flag)} ({sizes[flag]} embeddings, {len(theirs)} tokens)"
        )


@torch.no_grad()
def on_every_prompt(function, ids, args, accelerator):
    """Applies function(queries [M, Q], query_mask [M, Q], rows [M]) -> tuple of tensors [M, ..] to all prompts in slices.

    Each process does its share. Args: ids, N lists of token ids. Returns: the tensors, [N, ..], the same on every process.
    """
    world, device = accelerator.num_processes, accelerator.device
    rows = torch.arange(len(ids) + -len(ids) % world, device=device) % len(ids)  # filled up to whole shares ...
    mine = rows.chunk(world)[accelerator.process_index]
    queries, query_mask = utils.left_pad([ids[i] for i in mine.tolist()], device)
    with accelerator.autocast():
        outputs = in_slices(function, [queries, query_mask, mine], args.rollout_micro_batch_size)
    return [accelerator.gather(x)[: len(ids)] for x in outputs]  # ... and cut again


def main(args: Args):
    """Evaluates; returns the contents of summary.json on the main process, None on the others."""
    start_time = time.time()
    transformers_logging.set_verbosity_error(), transformers_logging.disable_progress_bar()
    args, sampling = as_trained(args)
    if os.environ.get("RANK", "0") == "0":
        print(sampling)  # before the checks, whose errors may speak of a value that no flag has given
    check(args)
    accelerator = Accelerator()
    utils.check_processes(accelerator)
    device, R = accelerator.device, args.response_length
    name, _, split = args.dataset.partition(":")
    is_toy, use_references = name == "toy", args.judge != "none" and not args.opponent_path
    rows = toy.rows("prompts", split or "test", name) if name in toy.TASKS else data.read_rows(args.dataset, {})
    rows = data.with_prompts(rows[: args.num_examples], args.prompt_template, f"--dataset {args.dataset}")
    rows = data.with_completions(rows, f"--dataset {args.dataset}", args.prompt_template) if use_references else rows

    # ---- models, each folder once
    loading = {"attn_implementation": args.attn_implementation, "trust_remote_code": args.trust_remote_code}
    tokenizer = utils.load_tokenizer(args.policy_path, "--policy_path", args.trust_remote_code)
    paths = {"policy_path": args.policy_path, "opponent_path": args.opponent_path, "ref_model_path": args.ref_model_path}
    models, sizes, contexts = {}, {}, [math.inf]
    for flag, path in paths.items():
        if path and path not in models:
            models[path] = utils.load_policy(path, f"--{flag}", **loading).to(device).eval()
    found = {flag: models[path] for flag, path in paths.items() if path}
    reward_model = None
    if args.reward_model_path:
        untrained = args.allow_untrained_reward_model
        torch.manual_seed(args.seed)  # before such a model's head is drawn
        head = utils.load_reward_model(args.reward_model_path, "--reward_model_path", untrained, **loading).to(device).eval()
        reward_model, found["reward_model_path"] = Reward(head), head
    for flag, model in found.items():
        sizes[flag] = model.config.get_text_config().vocab_size
        contexts.append(getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf)
        check_vocabulary(args, tokenizer, sizes, flag)
    stop_id = utils.token_id(tokenizer, args.stop_token, "--stop_token")
    end_id = utils.token_id(tokenizer, args.truncate_token, "--truncate_token")
    end_id = stop_id if end_id is None else end_id  # the token that a complete response ends with

    # ---- prompts and references as token ids
    if min(contexts) <= R:
        utils.fail(f"--response_length {R}: leaves no room for a prompt in the models' context of {min(contexts)}")
    limit = args.max_prompt_length or math.inf
    kept, ids = data.encode_prompts(tokenizer, rows, min(contexts) - R, f"--dataset {args.dataset}", limit)
    rows = [rows[i] for i in kept]
    functions = reward_functions.RewardFunctions(replace(args, reward_model_path=None), "cpu", tokenizer)
    functions.check_columns(rows, f"--dataset {args.dataset}")
    texts = [data.as_text(tokenizer, row["prompt"]) for row in rows]
    references = []
    if use_references:
        references = [data.encode(tokenizer, row["prompt"], row["completion"])[1] for row in rows]  # EOS at the end
    for number, (prompt, reference) in enumerate(zip(ids, references, strict=False), 1):
        if reward_model and len(prompt + reference) > min(contexts):
            length = f"{len(prompt + reference)} tokens; the models' context is {min(contexts)}"
            utils.fail(f"--dataset {args.dataset}: prompt and completion of row {kept[number - 1] + 1} have {length}")

    # ---- responses: the policy's and the opponent's, with the same noise
    def sample_all(path, temperature, purpose, reference=None):
        """Responses, mask [N, R] of a policy; with a reference also each response's KL estimate [N]."""
        policy = Policy(models[path], temperature)

        def one_slice(queries, query_mask, rows):
            coordinates = (args.seed, purpose, 0)
            responses, mask, logprobs = sample(policy, queries, query_mask, rows, 1, R, stop_id, coordinates)
            if reference is None:
                return responses, mask
            ref_logprobs, _ = response_logprobs(reference, (queries, query_mask, responses, mask), 1)
            return responses, mask, (logprobs - ref_logprobs).sum(1)

        return on_every_prompt(one_slice, ids, args, accelerator)

    def measure(responses, mask, answers=None):
        """{what: list of N} of responses [N, R]; answers: their texts, where they are not samples but the rows' references."""
        if answers is None:
            mask, ended = truncate_response(responses, mask, end_id, args.truncate_after)
        tokens = [r[m].tolist() for r, m in zip(responses.cpu(), mask.cpu(), strict=True)]
        texts_of = answers or [tokenizer.decode(r, skip_special_tokens=True) for r in tokens]
        side = {"response": texts_of, "length": list(map(len, tokens))}  # with the stop token, as val/sequence_lengths
        if answers is None and end_id is not None:
            side["ended"] = [int(x) for x in ended.tolist()]
        if reward_model:

            def one_slice(queries, query_mask, rows):
                return (response_scores(reward_model, (queries, query_mask, responses[rows], mask[rows]), 1),)

            (scores,) = on_every_prompt(one_slice, ids, args, accelerator)
            side["score"] = scores.tolist()
        if is_toy:
            side["gold"] = [toy.gold(q, a) for q, a in zip(texts, texts_of, strict=True)]
            side["parses"] = [int(toy.parses(f"{q} {a}")) for q, a in zip(texts, texts_of, strict=True)]
        values, kinds = functions(rows, texts_of, None)
        if (kinds == reward_functions.FAILED).any():
            utils.fail(f"{functions.error}; row {kept[int((kinds == reward_functions.FAILED).any(1).nonzero()[0])] + 1}")
        said = [r[:-1] if r[-1:] in ([end_id], [tokenizer.eos_token_id]) else r for r in tokens]
        figures = {what: average(side[what]) for what in ("score", "gold", "length") if what in side}
        figures |= {what: rate(side[what]) for what in ("ended", "parses") if what in side}
        for name, x in functions.by_name(values, kinds).items():
            figures[name] = rate(x.tolist()) if name == "verifiable_correct_rate" else average(x.tolist())
        return side, figures | {f"distinct_{n}": {"value": distinct_n(said, n)} for n in (1, 2, 3)}

    policy, figures = measure(*sample_all(args.policy_path, args.temperature, COMPARED))
    metrics, opponent = {"policy": figures}, None
    if args.opponent_path:
        opponent, metrics["opponent"] = measure(*sample_all(args.opponent_path, args.temperature, COMPARED))
    elif use_references:
        lengths = torch.tensor(list(map(len, references)), device=device)
        mask = torch.arange(max(map(len, references)), device=device) < lengths.unsqueeze(1)  # [N, R]
        tokens = torch.zeros(mask.shape, dtype=torch.long, device=device)
        tokens[mask] = torch.tensor(list(chain(*references)), device=device)
        answers = [data.as_text(tokenizer, row["completion"]) for row in rows]
        opponent, metrics["opponent"] = measure(tokens, mask, answers)
    if args.ref_model_path:
        reference = Policy(models[args.ref_model_path], args.kl_temperature)
        # [EVAL-3] unbiased only for draws from the policy that it is about
        _, _, kl = sample_all(args.policy_path, args.kl_temperature, EVALUATION, reference)
        metrics["policy"]["kl"] = average(kl.tolist())
    utils.leave_process_group()  # all at once, no collective follows: judging may take longer than a process group waits
    if not accelerator.is_main_process:
        return None

    # ---- judging
    console, folder = Console(), results_folder(args)

    def say(line):
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    summary = {"args": asdict(args), "versions": versions, "device": str(device)}
    summary |= {"num_processes": accelerator.num_processes, "num_examples": len(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "summary.json", summary)  # without figures until there are all
    verdicts, answers = [], [""] * len(rows)
    if args.judge == "llm":
        pairs = list(zip(texts, policy["response"], opponent["response"], strict=True))
        asked = [i for i, (_, ours, theirs) in enumerate(pairs) if ours.strip() != theirs.strip()]
        questions = [question(*pairs[i], args.seed, i) for i in asked]
        verdicts = ["tied"] * len(rows)  # what is the same ties unasked
        given = ask_all(args, [text for text, _ in questions], folder / "judge_cache.jsonl", say)
        for i, answer, (_, letter) in zip(asked, given, questions, strict=True):
            verdicts[i], answers[i] = verdict_by_answer(answer, letter), answer
    elif args.judge != "none":
        what = "gold" if args.judge == "gold" else "score"
        verdicts = [verdict_by_score(a, b) for a, b in zip(policy[what], opponent[what], strict=True)]
    if verdicts:
        metrics["win_rate"] = win_rate(verdicts)

    # ---- files, table, samples
    table = {"prompt": texts} | policy | ({f"opponent_{what}": x for what, x in opponent.items()} if opponent else {})
    table |= ({"verdict": verdicts} if verdicts else {}) | ({"judge_answer": answers} if args.judge == "llm" else {})
    partial = folder / "samples.csv.partial"
    with open(partial, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    partial.replace(folder / "samples.csv")
    write_json(folder / "summary.json", summary | {"metrics": metrics})

    show_table(console, say, f"{args.exp_name}: {args.policy_path} on {len(rows)} prompts of {args.dataset}", metrics, args)
    for i in range(min(4, len(rows))):
        shown = {"prompt": texts[i], "response": policy["response"][i]}
        shown |= {"opponent": opponent["response"][i]} if opponent else {}
        say(" | ".join(f"{what}: {text.strip()}" for what, text in shown.items()).replace("\n", "⏎"))
    if verdicts:
        # [EVAL-4] judges like long responses
        w, lengths = metrics["win_rate"], [metrics[side]["length"]["value"] for side in ("policy", "opponent")]
        unparsable = f", {w['unparsable']} unparsable" if args.judge == "llm" else ""
        say(
            f"Model win rate: {w['value']:.2%}  ({w['low']:.2%} .. {w['high']:.2%}, {w['pairs']} pairs: {w['won']} won, "
            f"{w['tied']} tied, {w['lost']} lost{unparsable}, mean length {lengths[0]:.1f} against {lengths[1]:.1f} tokens)"
        )
    say(f"results: {folder}   {time.time() - start_time:.0f} s")
    return summary | {"metrics": metrics}


def write_json(path, value):
    """Writes a JSON file, complete or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1))
    partial.replace(path)


def show_table(console, say, title, metrics, args):
    """One line a figure, the policy's beside the opponent's, with intervals: a rich table on a terminal, else plain lines."""
    labels = {
        "score": "score (reward model)", "gold": "gold", "parses": "parses", "length": "length (tokens)",
        "ended": f"ended ({args.stop_token if args.truncate_token == 'none' else args.truncate_token})",
        "distinct_1": "distinct-1", "distinct_2": "distinct-2",
        "distinct_3": "distinct-3", "kl": f"KL (nats, T = {args.kl_temperature:g})",
    }  # fmt: skip
    sides = [side for side in ("policy", "opponent") if side in metrics]
    opponent = args.opponent_path or "references"
    header = ["", args.policy_path, opponent][: len(sides) + 1]

    def cell(figure):
        """The number, and its interval where it has one."""
        if figure is None:
            return ""
        interval = f"  ({figure['low']:.3f} .. {figure['high']:.3f})" if "low" in figure else ""
        return f"{figure['value']:.3f}{interval}"

    labels |= {w: w for side in sides for w in metrics[side] if w not in labels}  # reward functions, by name
    lines = [[labels[w], *(cell(metrics[s].get(w)) for s in sides)] for w in labels if any(w in metrics[s] for s in sides)]
    if console.is_terminal:
        table = Table(title=Text(title))  # a Text: brackets in a path are no markup
        for column in header:
            table.add_column(Text(column), overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)
        return
    say("\n".join([title, *(f"  {a:22}" + "".join(f" {x:34}" for x in rest) for a, *rest in [header, *lines])]))


if __name__ == "__main__":
    main(utils.parse_args(Args, toy.defaults("evaluate")))
