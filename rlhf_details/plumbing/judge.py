"""
A language model as a judge: the question, the server that answers it, and the file that keeps the answers.

Every answer is on disk before the next question of its thread is asked. The same command therefore goes on after an
interruption and asks nothing twice. An answer is kept under a hash of the judge's name and of all that it reads.
"""

import hashlib
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

from rlhf_details import utils
from rlhf_details.plumbing import cli

PAIR_ORDER = 5  # a coordinate of the random order within a pair, beside the purposes of noise in utils.py
RETRIES, THREADS, TIMEOUT = 5, 8, 60.0  # The time limit is in seconds.
JUDGE_TEMPLATE = """\
Below are a prompt and two responses to it. Say which response is better. If the prompt asks for a summary, the \
better one says what matters most in the text, briefly, and nothing that the text does not say. If it asks for \
something else, or is the beginning of a text, the better one does what is asked, or continues the text, fluently, to \
the point and without repeating itself. Neither the order of the responses nor their length counts by itself.

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


def check(args):
    """Exits with an error if the arguments of the judge are incomplete or contradict --judge."""
    if args.judge != "llm":
        if args.judge_model:
            cli.fail(f"--judge_model {args.judge_model}: is read by --judge llm alone, not by --judge {args.judge}")
        return
    if not args.judge_model:
        cli.fail("--judge llm: needs --judge_model")
    url = args.judge_base_url
    if url is not None and not url.startswith(("http://", "https://")):
        cli.fail(f"--judge_base_url {url}: must begin with http:// or https://")
    if url is None and not os.environ.get("OPENAI_API_KEY"):
        cli.fail("--judge llm: needs OPENAI_API_KEY in the environment, or --judge_base_url, a server of your own")
    cli.need("openai", "judge", "--judge llm")


def question(prompt, response, opponent, seed, number):
    """Returns (text for the judge, letter of `response` in it). Seed and number of the pair alone decide the order."""
    # Judges like the response that comes first, so the order is random. [EVAL-1]
    is_first = utils.permutation(2, seed, PAIR_ORDER, number)[0] == 0
    a, b = (response, opponent) if is_first else (opponent, response)
    return JUDGE_TEMPLATE.format(prompt=prompt.strip(), a=a.strip(), b=b.strip()), "A" if is_first else "B"


def verdict_by_answer(answer, ours):
    """ "won", "lost" or "unparsable", from the judge's text. ours: the letter of the evaluated policy's response.

    Only the last line with a letter counts, after </think> if there is one. It is A or B, in capitals or not: alone, as
    "Response A", or after "Preferred:". Quotes, brackets and asterisks may stand around it.
    """
    last = ([line for line in answer.rpartition("</think>")[2].splitlines() if re.search(r"\w", line)] or [""])[-1]
    match = re.fullmatch(r"(?:.*preferred[\W_]*:)?[\W_]*(?:response[\W_]*)?([ab])[\W_]*", last, re.IGNORECASE)
    return "unparsable" if match is None else "won" if match[1].upper() == ours else "lost"


def judge_pairs(args, pairs, cache_file):
    """Asks the judge about each pair (prompt, response, opponent's response), all strings.

    Responses that are the same tie, and the judge is not asked. It prints how often the judge named A.
    Returns: (verdicts, the judge's answers), one for each.
    """
    verdicts, answers = ["tied"] * len(pairs), [""] * len(pairs)
    asked = [i for i, (_, ours, theirs) in enumerate(pairs) if ours.strip() != theirs.strip()]
    questions = [question(*pairs[i], args.seed, i) for i in asked]
    given = ask_all(args, [text for text, _ in questions], cache_file)
    for i, answer, (_, letter) in zip(asked, given, questions, strict=True):
        verdicts[i], answers[i] = verdict_by_answer(answer, letter), answer
    read = [(verdicts[i], letter) for i, (_, letter) in zip(asked, questions, strict=True)]
    names_a = [(verdict == "won") == (letter == "A") for verdict, letter in read if verdict != "unparsable"]
    if names_a:  # A judge that looks at the texts alone would name A in half of the pairs.
        share = f"{mean(names_a):.1%} of {len(names_a)} pairs"
        cli.say(f"judge {args.judge_model}: named A, the response that it read first, in {share}")
    return verdicts, answers


# ---- the server ------------------------------------------------------------------------------------------------------
def ask(client, args, text, options):
    """The judge's answer to one question.

    The client tries again after what may pass: no connection, and the statuses 408, 409, 429 and 5xx.
    Args: options, what all questions are asked with. This takes the temperature out where the judge refuses it.
    """
    import openai

    given, messages = dict(options), [{"role": "user", "content": text}]  # Another thread may empty options meanwhile.
    try:
        completion = client.chat.completions.create(model=args.judge_model, messages=messages, **given)
    except (openai.BadRequestError, openai.UnprocessableEntityError) as e:
        # Models that reason take no temperature but their own, and no list of names would stay complete.
        if not given or "temperature" not in f"{e} {e.body}".lower():
            raise
        if options.pop("temperature", None) is not None:
            cli.say(f"judge {args.judge_model}: refuses temperature 0, so it answers at its own temperature")
        return ask(client, args, text, options)
    choices = getattr(completion, "choices", None)
    if not choices or not choices[0].message:
        raise ValueError("the endpoint's reply is no chat completion")
    content = choices[0].message.content or ""  # Some servers of models that reason answer in parts.
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def ask_all(args, texts, cache_file):
    """The judge's answer to each of `texts`. Those that the cache file does not have are asked for and appended to it.

    A question that fails for good ends the program with one line, once the answers under way have come.
    """
    import openai

    answers, options, errors, lock = read_cache(cache_file), {"temperature": 0}, [], threading.Lock()
    keys = [hashlib.sha256(json.dumps([args.judge_model, text]).encode()).hexdigest() for text in texts]
    missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in answers}
    cli.say(f"judge {args.judge_model}: {len(texts)} questions, {len(missing)} to ask, the others are in {cache_file}")
    # The client demands a key. Where there is none, the server is the user's own, which reads no key.
    api_key = os.environ.get("OPENAI_API_KEY") or "no-key"
    client = openai.OpenAI(api_key=api_key, base_url=args.judge_base_url, timeout=TIMEOUT, max_retries=RETRIES)
    with open(cache_file, "a", encoding="utf-8") as file, ThreadPoolExecutor(THREADS) as pool:
        if file.tell():
            file.write("\n")  # If a kill has cut the last line short, the next answer must not be joined to it.

        def ask_and_keep(key, text):
            if errors:
                return  # No further question is asked after one has failed.
            try:
                answer = ask(client, args, text, options)
            except (openai.APIError, ValueError) as e:
                errors.append(e)
                return
            with lock:
                answers[key] = answer
                file.write(json.dumps({"key": key, "judge_model": args.judge_model, "answer": answer}) + "\n")
                file.flush()

        asked = pool.map(ask_and_keep, missing, missing.values())
        list(cli.progress(f"asking {args.judge_model}", asked, len(missing)))
    if errors:
        words = str(errors[0])
        if reason := errors[0].__cause__ or (" - " not in words and getattr(errors[0], "body", None)):
            words += f" ({str(reason)[:300]})"
        kept = f"{sum(key in answers for key in missing)} of {len(missing)} answers came and are kept"
        where = f"--judge_model {args.judge_model} at --judge_base_url {args.judge_base_url}"
        cli.fail(f"{where}: {words.replace(api_key, '***')}; {kept}: the same command goes on from there")
    return [answers[key] for key in keys]


def read_cache(path):
    """Returns {key: answer} of a cache file. A line that a kill has cut short is skipped."""
    answers = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            answers[row["key"]] = row["answer"]
        except (ValueError, TypeError, LookupError):
            continue
    return answers
