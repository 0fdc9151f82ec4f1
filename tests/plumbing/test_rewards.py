"""Rewards: how functions are found, called and checked, what they are given, how they are summed and logged."""

import json
import math
import shutil
import textwrap
from math import nan
from pathlib import Path

import accelerate
import pytest
import torch
from helpers import (
    PAGES,
    REWARDED,
    ROOT,
    assert_same_curves,
    launch,
    metaspace_tokenizer,
    record,
    rloo_args,
    run_page,
    run_rloo,
    without_times,
)
from short_runs import write_rows
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf_details import toy, train_rloo, utils
from rlhf_details.plumbing.inputs import data, models, user_code
from rlhf_details.plumbing.machine import engines, rewards

BOTH = pytest.mark.parametrize("page", ["train_rloo", "train_ppo"])


@pytest.fixture
def functions(in_tmp):
    """functions(code): writes it to mine.py in the test's folder."""

    def write(code, name="mine.py"):
        user_code.load_module.cache_clear()
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(textwrap.dedent(code))

    return write


def seen_by(name="mine.py"):
    """The list `seen` of the user's module."""
    return user_code.load_module(str(Path(name).resolve())).seen


# ---- finding functions -----------------------------------------------------------------------------------------------
def test_a_function_is_found_in_a_file_and_in_a_package_and_may_import_its_neighbours(functions, in_tmp):
    functions("WORD = 'kind'", "words.py")
    functions("import words\ndef f(prompts, completions): return words.WORD")
    functions("from words import WORD\ndef g(prompts, completions): return WORD", "pack/inner.py")
    for spec in ("mine.py:f", f"{in_tmp}/mine.py:f", "pack.inner:g"):
        assert user_code.load_function(spec, "--reward_fn")([], []) == "kind"


def test_what_the_users_files_import_is_never_a_file_of_ours(functions, tiny, in_tmp):
    """Python looks first in the folder of the script that was started. `evaluate` is a library's name."""
    for name in ("library/evaluate", "library/toy", "mine/toy", "mine/utils"):
        functions(f"WHOSE = '{name.partition('/')[0]}'", f"{name}.py")
    functions(
        """
        import evaluate, toy
        def f(prompts, completions):
            import utils
            raise SystemError(evaluate.WHOSE, toy.WHOSE, utils.WHOSE)
        """,
        "mine/mine.py",
    )
    rows = write_rows("rows.jsonl", [{"prompt": "we"}])
    flags = f"--dataset {rows} --reward_fn mine/mine.py:f --reward_model_path None --sft_model_path {tiny}/policy"
    flags += " --output_dir out --batch_size 16 --total_episodes 16 --response_length 4"
    end = launch("train_grpo.py", flags.split(), cwd=in_tmp, PYTHONPATH=f"{ROOT}:{in_tmp}/library")
    assert end.stderr.splitlines()[-1] == "SystemError: ('library', 'mine', 'mine')", end.stderr


REFUSED = [  # --reward_fn, the file mine.py, words of the line
    ("mine.py", "", "--reward_fn mine.py: must be FILE.py:function"),
    ("nowhere.py:f", "", "--reward_fn nowhere.py:f: no such file"),
    ("mine.py:f", "import no_such_package", "--reward_fn mine.py:f: cannot be imported (No module named"),
    ("mine.py:f", "def g(): pass", "--reward_fn mine.py:f: mine.py has no function 'f'"),
    ("mine.py:f mine.py:f", "def f(prompts, completions): pass", "mine.py:f: one function is given twice"),
    (
        "mine.py:f",
        "def f(prompts, completions, answer, other=None): pass",
        "f: missing a required argument: 'answer'; the columns of --eval_dataset held_out.jsonl are ['reply']",
    ),
    ("mine.py:f", "def f(prompts, completions, prompt): pass", "missing a required argument: 'prompt'; the columns of"),
    ("mine.py:f", "def f(completions): pass", "got an unexpected keyword argument 'prompts'; the columns of --dataset"),
]


@pytest.mark.parametrize("specs, code, words", REFUSED)
def test_a_function_that_cannot_be_had_or_called_is_one_line(functions, tiny, fails, specs, code, words):
    functions(code)
    options = dict(dataset=write_rows("rows.jsonl", [{"prompt": "we", "answer": 1}]), reward_fn=tuple(specs.split()))
    options |= dict(eval_dataset=write_rows("held_out.jsonl", [{"prompt": "we", "reply": 1}]))
    assert words in fails(run_rloo, tiny, **options)


# ---- calling them ----------------------------------------------------------------------------------------------------
def prompt(columns, number=1):
    return data.Prompt([5], data.as_text(toy.tokenizer(), columns["prompt"]), columns, number, "--dataset x", {}, [])


def make_scorer(names="mine.py:f", **flags):
    """A Scorer of functions, on one process."""
    args = train_rloo.Args(dataset="rows.jsonl", reward_fn=tuple(names.split()), **flags)
    return rewards.Scorer(args, accelerate.Accelerator(cpu=True), toy.tokenizer(), 4, torch.tensor([1]))


def batch_of(texts):
    """A Batch of texts in the words of the toy tokenizer."""
    responses, mask = utils.left_pad([toy.tokenizer()(text).input_ids[::-1] for text in texts])
    return utils.Batch(*utils.left_pad([[5]] * len(texts)), responses.flip(1), mask.flip(1))


ROWS = [prompt({"prompt": f"p{i}", "answer": i, "extra": -i}, i + 1) for i in range(2)]


def call(names="mine.py:f", rows=(ROWS[0], ROWS[0], ROWS[1]), held_out=(), **flags):
    """(Scorer, its values, who is scored) of the responses "a", "b" and so on: two to a prompt and one to another."""
    score, texts = make_scorer(names, **flags), [*"abcd"[: len(rows)]]
    score.take_text_model(None, rows, held_out)
    return score, *score(rows, batch_of(["the room"] * len(rows)), texts=texts)


RETURNED = [  # by f and by g; the values of f, which responses are scored, the rate of what is verified
    ("[1, 2.5, -3]", "[0, 0, 0]", [1, 2.5, -3], [1, 1, 1], None),
    ("[True, False, True]", "[0, 0, 0]", [1, 0, 1], [1, 1, 1], 2 / 3),
    ("[None, None, True]", "[0, 0, 0]", [nan, nan, 1], [1, 1, 1], 1),
    ("(x for x in (True, 1, 0))", "[0, 0, 0]", [1, 1, 0], [1, 1, 1], None),
    ("__import__('numpy').array([True, False, True])", "[0, 0, 0]", [1, 0, 1], [1, 1, 1], 2 / 3),
    ("[__import__('torch').tensor(1.5), __import__('numpy').float32(2), 3]", "[0, 0, 0]", [1.5, 2, 3], [1, 1, 1], None),
    # NaN of a reward that counts takes the response's score away.
    ("[True, nan, False]", "[1, 2, 3]", [1, nan, 0], [1, 0, 1], 0.5),
    ("[nan, 1, None]", "[0, 0, nan]", [nan, 1, nan], [0, 1, 0], None),
]


@pytest.mark.parametrize("f, g, values, scored, rate", RETURNED)
def test_what_a_function_may_return(functions, f, g, values, scored, rate):
    functions(f"""
        from math import nan
        def f(prompts, completions): return {f}
        def g(prompts, completions): return {g}
        def watched(prompts, completions): return [nan] * 3
    """)
    names = "mine.py:f mine.py:g mine.py:watched"
    score, found, is_scored = call(names, reward_fn_weights=(1.0, 0.5, 0.0))
    assert found.dtype == torch.float32 and found[:, 0].tolist() == pytest.approx(values, nan_ok=True)
    assert found[:, 2].isnan().all() and is_scored.tolist() == scored
    metrics, known = score.by_name(found), [x for x in values if not math.isnan(x)]
    assert metrics.get("verifiable_correct_rate") == pytest.approx(rate) and "rewards/watched" not in metrics
    assert metrics["rewards/f"] == pytest.approx(sum(known) / len(known))


FAULTS = [  # the body of f, the report; the responses are "a" and "b" to row 1, "c" to row 2
    ("return [0, 0, float('inf')]", "f returned inf, which is no number within +-1e+15, for row 2 of --dataset x"),
    ("return [float('nan')] * 3", "f abstained from every response of a batch"),
    ("return ['much', 0.0, 0.0]", "f returned 'much', which is no number within +-1e+15, for row 1 of"),
    ("return [0.0, 0.0]", "f returned 2 entries for 3 completions"),
    ("return [0, 0, None]", "no reward applies to row 2 of --dataset x, 'p1', with the response 'c'"),
    ("return [0, None, 0]", "f returned None, but not for each response to this prompt, whose kind decides: row 1 of"),
    ("return {'a': 1.0, 'b': 2.0, 'c': 3.0}", "f returned a dict, and must return a list"),
    ("return frozenset({1.0, 2.0, 3.0})", "f returned a frozenset, and must return a list"),
    ("return b'abc'", "f returned a bytes, and must return a list"),
    ("return [0.0, -3e+38, 0.0]", "f returned -3e+38, which is no number within +-1e+15, for row 1 of"),
    ("return [0.0, 10**30, 0.0]", "f returned 1000000000000000000000000000000, which is no number"),
]


@pytest.mark.parametrize("body, words", FAULTS)
def test_a_function_at_fault_ends_the_run_with_its_name_and_the_row(functions, capsys, body, words):
    functions(f"def f(prompts, completions):\n    {body}")
    with pytest.raises(SystemExit, match=r"^1$"):
        call()
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_raises_shows_its_own_traceback_and_is_not_called_again(functions, capsys, kind):
    functions(f"""
        seen = []
        def longest(texts): return max(map(len, texts[5:]))
        {kind} f(prompts, completions): seen.append(completions); longest(completions)
    """)
    with pytest.raises(SystemExit, match=r"^1$"):
        call()
    first, *trace = capsys.readouterr().err.splitlines()
    assert first == "error: --reward_fn f raised ValueError, called with 3 completions"
    assert trace[0].startswith("Traceback") and trace[-1].startswith("ValueError: ")
    assert "max(map(len, texts[5:]))" in "".join(trace) and seen_by() == [["a", "b", "c"]]


def test_a_function_gets_copies_of_the_columns_that_it_names_or_of_all(functions):
    functions("""
        import functools
        def f(prompts, completions, answer): return [prompts == ["p0", "p0", "p1"] and answer == [0, 0, 1]] * 3
        def g(completions, prompts, **columns):
            return [columns == {"answer": [0, 0, 1], "extra": [0, 0, -1], "rare": [None] * 3}] * 3
        def h(prompts, completions, *, extra=None, other=None): return [extra == [0, 0, -1] and other is None] * 3
        def any(scale, prompts, completions): return [scale * ord(c) for c in completions]
        i = functools.partial(any, 2)
        def greedy(prompts, completions, **columns):  # What it changes is its own.
            prompts.clear(), completions.clear(), columns["extra"].append(9)
            return [0.0] * 3
    """)
    held_out = [prompt({"prompt": "p", "answer": 1, "rare": 1})]
    _, values, _ = call("mine.py:greedy mine.py:f mine.py:g mine.py:h mine.py:i", held_out=held_out)
    assert values[:, 1:].tolist() == [[1, 1, 1, 2 * ord(c)] for c in "abc"]


def test_a_function_gets_text_or_on_request_messages_of_whatever_data(functions):
    functions("""
        seen = []
        def f(prompts, completions): seen.append((prompts, completions)); return [0.0] * len(prompts)
    """)
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "we"}]
    rows = [prompt({"prompt": x}) for x in ("we", turns, toy.tokenizer()("we were").input_ids)]
    call(rows=rows), call(rows=rows, reward_fn_format="messages")
    texts, messages = seen_by()
    assert texts == (["we", "system: be\nuser: we", " we were"], ["a", "b", "c"])
    asked = [turns[1:], turns, [{"role": "user", "content": " we were"}]]
    assert messages == (asked, [[{"role": "assistant", "content": text}] for text in "abc"])


def test_functions_of_one_name_or_of_a_name_of_ours_are_called_as_they_were_given(functions):
    for number, file in enumerate(("a.py", "b.py", "sub/a.py", "pack/inner.py")):
        code = [f"def {name}(prompts, completions): return [{number}.0] * 3" for name in ("f", "g", "gold")]
        functions("\n".join(code), file)
    specs = "a.py:f sub/a.py:f pack.inner:f b.py:g a.py:gold"
    score, values, _ = call(specs)
    assert score.weighted == specs.replace("b.py:g", "g").split() and values[0].tolist() == [0, 2, 3, 1, 0]


# ---- whole runs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", REWARDED)
def test_rew_4_a_reward_that_does_not_apply_to_a_row_is_left_out_of_its_score(functions, tiny, page):
    table = [{"prompt": row["prompt"], "kind": i % 2} for i, row in enumerate(toy.rows("prompts", "train")[:4])]
    functions("""
        def even(prompts, completions, kind): return [None if x else 1.0 for x in kind]
        def odd(prompts, completions, kind): return [3.0 if x else None for x in kind]
    """)
    options = dict(reward_fn=("mine.py:even", "mine.py:odd"), reward_fn_weights=(1.0, 2.0), missing_eos_penalty=None)
    for row in run_page(page, tiny, **options, dataset=write_rows("rows.jsonl", table), total_episodes=32):
        # Half of the rows score 1 * 1 beside the reward model, and the other half 2 * 3.
        expected = row["objective/rewards/reward_model"] + 3.5
        assert row["objective/scores"] == pytest.approx(expected, abs=1e-5)
        assert (row["objective/rewards/even"], row["objective/rewards/odd"]) == (1, 3)
        assert math.isfinite(row["policy/grad_norm"])


def test_a_page_with_a_teacher_watches_functions_and_does_not_train_on_them(functions, tiny, capsys):
    """They may apply to no row at all, and change nothing of what is learnt."""
    functions("""
        def length(prompts, completions): return [float(len(c.split())) for c in completions]
        def none(prompts, completions): return [None for _ in completions]
    """)
    watched = run_page("train_distill", tiny, reward_fn=("mine.py:length", "mine.py:none"))
    assert "rewards: 0 * length + 0 * none" in capsys.readouterr().out
    for row, plain in zip(without_times(watched), without_times(run_page("train_distill", tiny)), strict=True):
        assert 0 < row.pop("objective/rewards/length") <= row["val/sequence_lengths"] and row == plain


@BOTH
def test_each_completion_is_rewarded_with_its_own_row(functions, tiny, monkeypatch, page):
    """The sampler repeats the end of each prompt, so that a completion says which prompt it belongs to."""

    def echo(policy, queries, query_mask, rows, response_length, **options):
        responses = queries[:, -response_length:]
        return responses, torch.ones_like(responses, dtype=torch.bool), torch.zeros(responses.shape)

    monkeypatch.setattr(utils, "sample", echo)
    prompts = [f"{row['prompt']} {row['prompt']}" for row in toy.rows("prompts", "train")[:40]]
    longest = sorted(len(toy.tokenizer()(text).input_ids) for text in prompts[:24])[-3]  # The limit drops some rows.
    for name, part in (("train", prompts[:24]), ("eval", prompts[24:37])):
        write_rows(f"{name}.jsonl", [{"prompt": text, "copy": text} for text in part])
    functions("""
        def f(prompts, completions, copy):
            return [p == q and p.endswith(c) for p, q, c in zip(prompts, copy, completions)]
    """)
    options = dict(dataset="train.jsonl", eval_dataset="eval.jsonl", stop_token="none", rollout_micro_batch_size=4)
    options |= dict(max_prompt_length=longest - 1, num_sample_generations=2, reward_fn=("mine.py:f",))
    for row in run_page(page, tiny, **options):
        rates = [row[name] for name in row if name.endswith("verifiable_correct_rate")]
        assert rates and set(rates) == {1.0}


# ---- a reward model with a tokenizer of its own ----------------------------------------------------------------------
@pytest.fixture
def shifted(ragged, in_tmp):
    """The folder policy, without special tokens but EOS, so that its text says all, and reward, where ids are one more.

    The reward model's scores of a text are the same as before, those of token ids are not.
    """
    V = len(toy.tokenizer())
    for folder, shift in (("policy", 0), ("reward", 1)):
        shutil.copytree(ragged / folder, folder, ignore=shutil.ignore_patterns("*token*"))
        spec = json.loads(toy.tokenizer().backend_tokenizer.to_str())
        spec["model"]["vocab"] = {word: (i + shift) % V for word, i in spec["model"]["vocab"].items()}
        spec["added_tokens"] = [t | {"id": t["id"] + shift} for t in spec["added_tokens"] if t["content"] == "<eos>"]
        backend = Tokenizer.from_str(json.dumps(spec))
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained("reward")
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[:V] = weight[:V].roll(1, 0)
    model.save_pretrained("reward")


@BOTH
def test_a_reward_model_with_other_token_ids_is_given_text_and_scores_the_same(
    ragged, shifted, few_prompts, monkeypatch, page
):
    """The engine and the checksum of a checkpoint know it, as they know one that reads token ids."""
    options = dict(eval_dataset="toy:test", take=30, sft_model_path="policy")
    options |= {"value_model": "shared"} if page == "train_ppo" else {}
    same = run_page(page, ragged, **options)
    prepared = record(monkeypatch, engines, "prepare")["prepare"]
    started = record(monkeypatch, PAGES[page], "Run")["Run"]
    other = run_page(page, ragged, **options, reward_model_path="reward")
    assert_same_curves(same, other)
    assert type(prepared[0][0][-1]) is type(started[0][0][-1][-1]) is rewards.TextModel
    # A model alone is objective/scores already.
    assert not any("objective/rewards/" in name for row in same for name in row)


@pytest.mark.parametrize("asked, seen", [("a.", " b a"), ([{"role": "user", "content": "a."}], "b a")])
def test_text_of_a_sentencepiece_tokenizer_keeps_the_space_behind_a_prompt(asked, seen):
    """Decoding drops it. In a message the chat template says what stands before an answer."""
    scorer, said = make_scorer("", reward_model_path="reward"), []
    scorer.tokenizer, scorer.text_model = metaspace_tokenizer(), lambda rows, texts, _: said.extend(texts) or [0.0]
    ids = torch.tensor([scorer.tokenizer("b a").input_ids])
    scorer([prompt({"prompt": asked})], utils.Batch(ids, ids >= 0, ids, ids >= 0))
    assert said == [[seen]]


def test_only_what_has_ended_is_followed_by_eos(tiny):
    """A text longer than the model's context of 128 loses its beginning."""
    model, tokenizer = models.load_reward_model(tiny / "reward", rloo_args(tiny)).eval(), toy.tokenizer()
    texts, eos = ["the room was lovely .", "the pool", "the room"], [tokenizer.eos_token_id]
    rows = [prompt({"prompt": text}) for text in ("we went", "on monday", " ".join(sorted(toy.NOUN_TOPIC) * 20))]
    ids = [tokenizer(f"{row.text} {text}").input_ids for row, text in zip(rows, texts, strict=True)]
    expected = [model(torch.tensor([x])).logits.item() for x in (ids[0] + eos, ids[1], (ids[2] + eos)[-128:])]
    scores = rewards.TextModel(model, tokenizer, 4)(rows, [[text] for text in texts], [True, False, True])
    assert len(ids[2]) > 128 and scores == pytest.approx(expected, abs=1e-5)
