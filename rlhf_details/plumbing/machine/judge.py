"""A language model as a judge: the question, and the server that answers it through the client `openai`."""

import asyncio
import contextlib
import hashlib
import json
import os
import re

from rlhf_details import utils
from rlhf_details.plumbing import console
from rlhf_details.plumbing.inputs import user_code

PAIR_ORDER = 5  # a coordinate of the random order within a pair, beside the purposes of noise in utils.py
RETRIES = 5  # The client tries again after what may pass.
AT_ONCE = 8
TIMEOUT = 60.0  # seconds
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
            console.fail(f"--judge_model {args.judge_model}: is read by --judge llm alone, not by --judge {args.judge}")
        return
    if not args.judge_model:
        console.fail("--judge llm: needs --judge_model")
    console.check_url("--judge_base_url", args.judge_base_url or "http://", "OPENAI_API_KEY")
    if args.judge_base_url is None and not os.environ.get("OPENAI_API_KEY"):
        console.fail("--judge llm: needs OPENAI_API_KEY in the environment, or --judge_base_url, a server of your own")
    console.need("openai", "judge", "--judge llm")


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


def judge_pairs(args, pairs, path):
    """Asks the judge about each pair (prompt, response, opponent's response), all strings. Equal responses tie unasked.

    Args: path, of the file that keeps each answer as it comes; what it has is not asked again.
    Returns: (verdicts, the judge's answers), one for each. Exits with an error if the client gives a question up.
    """
    judge = f"--judge_model {args.judge_model} at --judge_base_url {args.judge_base_url}"
    api_key = os.environ.get("OPENAI_API_KEY") or "no-key"  # The client demands one, a server of your own reads none.
    try:
        with user_code.fenced(judge):
            return user_code.result_of(ask_all(args, pairs, path, api_key))
    except Exception as e:  # the client's own errors, and replies of other servers that are no chat completions
        words = f"{console.in_one_line(e)} {e.__cause__ or getattr(e, 'body', None) or ''}".replace(api_key, "***")
        console.fail(f"{judge}: {words}; {path} keeps the answers, and the same command asks for the others")


async def ask_all(args, pairs, path, api_key):
    """What judge_pairs returns. Each line of the file is {hash of judge and question: answer}."""
    import openai

    client = openai.AsyncOpenAI(api_key=api_key, base_url=args.judge_base_url, timeout=TIMEOUT, max_retries=RETRIES)
    options = {"model": args.judge_model, "temperature": 0}
    kept = {}
    found = [("tied", "")] * len(pairs)
    limit = TIMEOUT * (RETRIES + 2)  # A server may send a byte now and then.
    waiting = iter(console.progress(f"asking {args.judge_model}", enumerate(pairs), len(pairs)))

    async def work():
        try:
            for number, (prompt, ours, theirs) in waiting:
                if ours.strip() == theirs.strip():
                    continue
                text, letter = question(prompt, ours, theirs, args.seed, number)
                key = hashlib.sha256(f"{args.judge_base_url}\n{args.judge_model}\n{text}".encode()).hexdigest()
                if key not in kept:
                    async with asyncio.timeout(limit):
                        kept[key] = await ask(client, text, options)
                    if kept[key]:  # Where there is no answer, a second start may get one.
                        print(json.dumps({key: kept[key]}, ensure_ascii=False), file=file, flush=True)
                found[number] = verdict_by_answer(kept[key], letter), kept[key]
        except TimeoutError as e:
            raise TimeoutError(f"no whole answer to a question within {limit:g} s") from e
        finally:
            list(waiting)  # After a question that fails, no further one is asked.

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8", errors="backslashreplace") as file:
        file.seek(0)
        for line in file:
            with contextlib.suppress(ValueError):  # A kill may have torn a line.
                kept |= json.loads(line)
        for error in await asyncio.gather(*(work() for _ in range(AT_ONCE)), return_exceptions=True):
            if error:
                raise error
    return tuple(zip(*found, strict=True))


async def ask(client, text, options):
    """The judge's answer to a question, "" where there is none.

    Args: options, of all questions, which lose a temperature that the judge refuses.
    """
    import openai

    given = dict(options)  # Another question may change them meanwhile.
    try:
        completion = await client.chat.completions.create(messages=[{"role": "user", "content": text}], **given)
    except (openai.BadRequestError, openai.UnprocessableEntityError) as e:
        # Models that reason take no temperature but their own, and no list of names would stay complete.
        if "temperature" not in given or "temperature" not in f"{e} {e.body}".lower():
            raise
        if options.pop("temperature", None) is not None:
            console.say(f"judge {given['model']}: refuses temperature 0, so it answers at its own temperature")
        return await ask(client, text, options)
    choice = next(iter(completion.choices or ()), None)
    if not choice or not choice.message:
        # So hosted gateways answer, with status 200, when the model behind them fails.
        why = console.in_one_line(getattr(completion, "error", None) or "no choices").replace(client.api_key, "***")
        console.say(f"judge {given['model']}: a reply without an answer ({why})")
        return ""
    content = choice.message.content or ""
    if isinstance(content, list):  # of parts
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return "" if choice.finish_reason in ("length", "content_filter", "error") else str(content)  # Half of it is none.
