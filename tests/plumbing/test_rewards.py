"""Rewards: how functions are found, called and checked, what they are given, how they are summed and logged."""

import json
import math
import shutil
import textwrap
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
    without_times,
)
from short_runs import write_rows
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf_details import toy, train_rloo, utils
from rlhf_details.plumbing.inputs import data, models, token_ids, user_code
from rlhf_details.plumbing.machine import engines, rewards

BOTH = pytest.mark.parametrize("page", ["train_rloo", "train_ppo"])


@pytest.fixture
def functions(in_tmp):
    """functions(code): writes it to mine.py in the test's folder."""

    def write(code, name="mine.py"):
        user_code.load_module.cache_clear()
        Path(name).write_text(textwrap.dedent(code))

    return write


# ---- finding functions -----------------------------------------------------------------------------------------------
def test_a_function_is_found_in_a_file_and_in_a_package_and_may_import_its_neighbours(functions, in_tmp):
    (in_tmp / "pack").mkdir()
    functions("WORD = 'kind'", "words.py")
    functions("import words\ndef f(prompts, completions):\n    return words.WORD")
    functions("from words import WORD\ndef g(prompts, completions):\n    return WORD", "pack/inner.py")
    for spec in ("mine.py:f", f"{in_tmp}/mine.py:f", "pack.inner:g"):
        assert user_code.load_function(spec, "--reward_fn")([], []) == "kind"


def test_what_the_users_files_import_is_never_a_file_of_ours(functions, tiny, in_tmp):
    """Python looks first in the folder of the script that was started. `evaluate` is a library's name."""
    (in_tmp / "library").mkdir(), (in_tmp / "mine").mkdir()
    functions("WHOSE = 'library'", "library/evaluate.py"), functions("WHOSE = 'library'", "library/toy.py")
    functions("WHOSE = 'mine'", "mine/toy.py"), functions("WHOSE = 'mine'", "mine/utils.py")
    functions(
        """
        import evaluate, toy
        def f(prompts, completions):
            import utils
            raise SystemError(evaluate.WHOSE, toy.WHOSE, utils.WHOSE)
        """,
        "mine/mine.py",
    )
    flags = ["--dataset", write_rows("rows.jsonl", [{"prompt": "we"}]), "--reward_fn", "mine/mine.py:f"]
    flags += ["--reward_model_path", "None", "--sft_model_path", tiny / "policy", "--output_dir", "out"]
    flags += ["--batch_size", 16, "--total_episodes", 16, "--response_length", 4]
    end = launch("train_grpo.py", flags, cwd=in_tmp, PYTHONPATH=f"{ROOT}:{in_tmp}/library")
    assert end.stderr.splitlines()[-1] == "SystemError: ('library', 'mine', 'mine')", end.stderr


@pytest.mark.parametrize(
    "spec, code, words",
    [
        ("mine.py", "", "FILE.py:function"),
        ("nowhere.py:f", "", "no such file"),
        ("mine.py:f", "import no_such_package", "No module named"),
        ("mine.py:f", "def g(): pass", "no function 'f'"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_line(functions, tiny, fails, spec, code, words):
    functions(code)
    line = fails(rewards.check, rloo_args(tiny, reward_fn=(spec,)))
    assert f"--reward_fn {spec}" in line and words in line


@pytest.mark.parametrize(
    "specs, names",
    [
        ("a.py:f b.py:g", "f g"),
        ("a.py:f b.py:f", "a.f b.f"),
        ("a.py:f b.py:f a.py:g", "a.f b.f g"),
        ("a.py:f sub/a.py:f", "a.f sub/a.py:f"),  # Files of one name as well.
        ("a.py:gold b.py:reward_model", "a.gold b.reward_model"),  # names of ours
        ("namesakes.inner:f a.py:f", "namesakes.inner.f a.f"),
    ],
)
def test_functions_of_one_name_are_told_apart(functions, in_tmp, tiny, specs, names):
    (in_tmp / "namesakes").mkdir(), (in_tmp / "sub").mkdir()
    for number, file in enumerate(("a.py", "b.py", "sub/a.py", "namesakes/inner.py")):
        for name in ("f", "g", "gold", "reward_model"):
            with open(file, "a") as written:
                written.write(f"def {name}(prompts, completions): return [{number}.0] * len(prompts)\n")
    user_code.load_module.cache_clear()
    rewards.check(rloo_args(tiny, reward_fn=tuple(specs.split())))
    score, values = call([{"prompt": "we"}], ["a"], specs.split())
    assert score.weighted == names.split()
    files = ["a.py", "b.py", "sub/a.py", "namesakes.inner"]
    assert values[0, : len(score.weighted)].tolist() == [files.index(x.rpartition(":")[0]) for x in specs.split()]


def test_a_function_given_twice_is_one_line(functions, tiny, fails):
    functions("def f(prompts, completions): pass")
    assert "one function is given twice" in fails(rewards.check, rloo_args(tiny, reward_fn=("mine.py:f", "mine.py:f")))


# ---- calling them ----------------------------------------------------------------------------------------------------
def prompt(columns, number=1, task=None):
    text, source = data.as_text(toy.tokenizer(), columns["prompt"]), f"--dataset {task or 'x'}"
    return data.Prompt([5], text, columns, number, source, {}, [])


def make_scorer(names=("mine.py:f",), dataset="rows.jsonl", stop_ids=(1,), **flags):
    """A Scorer of functions, on one process."""
    args = train_rloo.Args(dataset=dataset, reward_fn=names, **flags)
    return rewards.Scorer(args, accelerate.Accelerator(cpu=True), toy.tokenizer(), 4, torch.tensor(stop_ids))


def batch_of(texts):
    """A Batch of texts in the words of the toy tokenizer."""
    tokenizer = toy.tokenizer()
    responses, mask = utils.left_pad([tokenizer(text).input_ids[::-1] for text in texts])
    queries, query_mask = utils.left_pad([[5]] * len(texts))
    return utils.Batch(queries, query_mask, responses.flip(1), mask.flip(1))


def call(table, texts, names=("mine.py:f",), held_out=(), **flags):
    """(Scorer, its values) for one response to each row of columns."""
    score = make_scorer(names, **flags)
    prompts = [prompt(columns, number) for number, columns in enumerate(table, 1)]
    score.take_text_model(None, prompts, held_out)
    return score, score(prompts, batch_of(["the room"] * len(texts)), texts=texts)[0]


ROWS = [{"prompt": f"p{i}", "answer": i, "extra": -i} for i in range(3)]
NAN = math.nan


@pytest.mark.parametrize(
    "returned, values, is_boolean",
    [
        ("[1, 2.5, -3]", [1, 2.5, -3], False),
        ("[True, False, True]", [1, 0, 1], True),
        ("[None, True, None]", [NAN, 1, NAN], True),
        ("(x for x in (1, True, None))", [1, 1, NAN], False),
        ("__import__('numpy').array([True, False, True])", [1, 0, 1], True),
        ("[__import__('torch').tensor(1.5), __import__('numpy').float32(2), 3]", [1.5, 2, 3], False),
    ],
)
def test_what_a_function_may_return(functions, returned, values, is_boolean):
    functions(f"""
        def f(prompts, completions): return {returned}
        def other(prompts, completions): return [0.0] * 3
    """)
    score, got = call(ROWS, ["a", "b", "c"], ("mine.py:f", "mine.py:other"))
    assert got.dtype == torch.float32 and got[:, 0].tolist() == pytest.approx(values, nan_ok=True)
    assert score.boolean == ["f"] * is_boolean


@pytest.mark.parametrize(
    "body, words",
    [
        ("return [0.0, float('inf'), 0.0]", ["f returned inf", "row 2 of --dataset x, 'p1', with the response 'b'"]),
        ("return [float('nan')] * 3", ["f abstained from every response of a batch"]),
        ("return ['much', 0.0, 0.0]", ["returned 'much'", "row 1"]),
        ("return [0.0, 0.0]", ["returned 2 entries for 3 completions"]),
        ("return [None, 0.0, None]", ["no reward applies to row 1"]),
        *[
            (f"return {x}", [f"f returned a {kind}, and must return a list"])
            for kind, x in {
                "dict": "{'a': 1.0, 'b': 2.0, 'c': 3.0}",
                "set": "{1.0, 2.0, 3.0}",
                "frozenset": "frozenset({1.0, 2.0, 3.0})",
                "bytes": "b'abc'",
                "bytearray": "bytearray(3)",
            }.items()
        ],
        *[(f"return [0.0, {x}, 0.0]", [f"f returned {x}", "row 2"]) for x in ("3e+38", "-3e+38", "1e+16", 10**30)],
    ],
)
def test_a_function_at_fault_ends_the_run_with_its_name_and_the_row(functions, capsys, body, words):
    functions(f"def f(prompts, completions):\n    {body}")
    with pytest.raises(SystemExit) as end:
        call(ROWS, ["a", "b", "c"])
    report = capsys.readouterr().err
    assert end.value.code == 1 and all(word in report for word in words), report


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_raises_shows_its_own_traceback_and_blames_no_row(functions, capsys, kind):
    functions(f"""
        calls = []
        def longest(texts): return max(map(len, texts[5:]))
        {kind} f(prompts, completions): calls.append(completions); longest(completions)
    """)
    with pytest.raises(SystemExit) as end:
        call(ROWS, ["a", "b", "c"])
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and first == "error: --reward_fn f raised ValueError, called with 3 completions"
    assert "Traceback" in second and trace[-1].startswith("ValueError: ")
    trace = "\n".join(trace)
    assert f'File "{Path("mine.py").resolve()}"' in trace and "max(map(len, texts[5:]))" in trace
    # The guilty row is not searched by more calls.
    assert user_code.load_module(str(Path("mine.py").resolve())).calls == [["a", "b", "c"]]


def test_none_is_for_all_responses_to_a_prompt_or_for_none_of_them(functions, capsys):
    functions("""
        def f(prompts, completions): return [1.0 if 'a' in c else None for c in completions]
        def g(prompts, completions): return [0.0] * len(prompts)
    """)
    score = make_scorer(("mine.py:f", "mine.py:g"))
    first, second = prompt(ROWS[0], 1), prompt(ROWS[1], 2)
    values, _ = score([first, first, second, second], batch_of(["."] * 4), texts=["a", "a", "b", "b"])
    assert values[:, 0].tolist() == pytest.approx([1, 1, NAN, NAN], nan_ok=True)
    with pytest.raises(SystemExit) as end:
        score([first, first, second, second], batch_of(["."] * 4), texts=["a", "a", "a", "b"])
    report = capsys.readouterr().err
    assert end.value.code == 1 and "f returned None, but not for each response" in report
    assert "row 2 of --dataset x" in report


@pytest.mark.parametrize(
    "f, g, scored, is_boolean",
    [
        ("[True, nan, False]", "[1, 2, 3]", [True, False, True], True),
        ("[None, 1, nan]", "[nan, 0, 0]", [False, True, False], False),
        ("[None, None, None]", "[0, nan, 0]", [True, False, True], False),
        ("[1, 1, 1]", "[1, 1, 1]", [True, True, True], False),
    ],
)
def test_a_response_from_which_a_reward_that_counts_abstains_has_no_score(functions, f, g, scored, is_boolean):
    functions(f"""
        from math import nan
        def f(prompts, completions): return {f}
        def g(prompts, completions): return {g}
        def watched(prompts, completions): return [nan] * 3
    """)
    score = make_scorer(("mine.py:f", "mine.py:g", "mine.py:watched"), reward_fn_weights=(1.0, 0.5, 0.0))
    values, found = score([prompt(row) for row in ROWS], batch_of(["."] * 3), texts=["a", "b", "c"])
    assert found.tolist() == scored and values[:, 2].isnan().all() and score.boolean == ["f"] * is_boolean
    assert "objective/rewards/watched" not in score.by_name(values, "objective/")


def test_a_function_gets_copies_of_the_columns_that_it_names_or_of_all(functions):
    functions("""
        import functools
        def f(prompts, completions, answer): return [prompts == ["p0", "p1", "p2"] and answer == [0, 1, 2]] * 3
        def g(completions, prompts, **columns):
            return [columns == {"answer": [0, 1, 2], "extra": [0, -1, -2], "rare": [None] * 3}] * 3
        def h(prompts, completions, *, extra=None, other=None): return [extra == [0, -1, -2] and other is None] * 3
        def any(scale, prompts, completions): return [scale * len(c) for c in completions]
        i = functools.partial(any, 2)
        def greedy(prompts, completions, **columns):  # What it changes is its own.
            prompts.clear(), completions.clear(), columns["extra"].append(9)
            return [0.0] * 3
    """)
    held_out = [prompt({"prompt": "p", "answer": 1, "rare": 1})]
    score, values = call(ROWS, ["", "b", "cc"], tuple(f"mine.py:{name}" for name in ["greedy", *"fghi"]), held_out)
    assert values[:, 1:].tolist() == [[1, 1, 1, 0], [1, 1, 1, 2], [1, 1, 1, 4]]
    assert score.boolean == ["f", "g", "h"]


def test_a_function_gets_text_or_on_request_messages_of_whatever_data(functions):
    functions("""
        seen = []
        def f(prompts, completions): seen.append((prompts, completions)); return [0.0] * len(prompts)
    """)
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "we"}]
    table = [{"prompt": "we"}, {"prompt": turns}, {"prompt": toy.tokenizer()("we were").input_ids}]
    call(table, ["a", "b", "c"]), call(table, ["a", "b", "c"], reward_fn_format="messages")
    texts, messages = user_code.load_module(str(Path("mine.py").resolve())).seen
    assert texts == (["we", "system: be\nuser: we", " we were"], ["a", "b", "c"])
    asked = [turns[1:], turns, [{"role": "user", "content": " we were"}]]
    assert messages == (asked, [[{"role": "assistant", "content": text}] for text in "abc"])


@pytest.mark.parametrize(
    "parameters, words",
    [
        ("prompts, completions, answer, other=None", "missing a required argument: 'answer'"),
        ("prompts, completions, prompt", "missing a required argument: 'prompt'"),
        ("completions", "got an unexpected keyword argument 'prompts'"),
    ],
)
def test_what_a_function_needs_and_a_data_set_has_not_is_named(functions, fails, parameters, words):
    functions(f"def f({parameters}): return [1.0]")
    asked, without = prompt({"prompt": "p", "answer": 1}), prompt({"prompt": "p", "reply": 1})
    words = f"--reward_fn f: {words}; the columns of --dataset x are ['reply']"
    assert words in fails(make_scorer().take_text_model, None, [without])
    if "answer" in parameters:
        make_scorer().take_text_model(None, [asked], [asked])
        assert words in fails(make_scorer().take_text_model, None, [asked], [without])


# ---- names, weights, means -------------------------------------------------------------------------------------------
def test_means_are_over_the_responses_that_a_reward_applies_to(functions):
    functions("""
        def is_even(prompts, completions, answer): return [(True, None, False)[n] for n in answer]
        def is_odd(prompts, completions, answer): return [(None, True, None)[n] for n in answer]
        def never(prompts, completions): return [None] * 3
    """)
    score, values = call(ROWS, ["a", "b", "c"], ("mine.py:is_even", "mine.py:is_odd", "mine.py:never"))
    rate = pytest.approx(2 / 3)
    assert score.by_name(values) == {"rewards/is_even": 0.5, "rewards/is_odd": 1, "verifiable_correct_rate": rate}


# ---- whole runs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", REWARDED)
def test_rew_4_a_reward_that_does_not_apply_to_a_row_is_left_out_of_its_score(functions, tiny, page):
    table = [{"prompt": row["prompt"], "kind": i % 2} for i, row in enumerate(toy.rows("prompts", "train")[:4])]
    functions("""
        def even(prompts, completions, kind): return [None if x else 1.0 for x in kind]
        def odd(prompts, completions, kind): return [3.0 if x else None for x in kind]
    """)
    options = dict(reward_fn=("mine.py:even", "mine.py:odd"), reward_fn_weights=(1.0, 2.0))
    options |= dict(missing_eos_penalty=None, dataset=write_rows("rows.jsonl", table))
    for row in run_page(page, tiny, **options, total_episodes=32):
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
def test_text_of_a_sentencepiece_tokenizer_keeps_the_space_behind_a_prompt(tiny, asked, seen):
    """Decoding drops it. In a message the chat template says what stands before an answer."""
    tokenizer, said = metaspace_tokenizer(), []
    scorer, ids = make_scorer((), reward_model_path="reward"), tokenizer("b a").input_ids
    scorer.tokenizer, scorer.stop_ids = tokenizer, torch.tensor([1])
    scorer.text_model = rewards.TextModel(models.load_reward_model(tiny / "reward", rloo_args(tiny)), tokenizer, 4)
    scorer.text_model.encode = lambda row, text: said.append(text) or ([5], [6])
    batch = batch_of(["the"])._replace(responses=torch.tensor([ids]), response_mask=torch.ones(1, 2, dtype=torch.bool))
    scorer([data.Prompt([5], "a.", {"prompt": asked}, 1, "--dataset x", {}, [])], batch)
    assert said == [seen] and token_ids.decode_all(tokenizer, [ids]) == ["b a"]


def test_only_what_has_ended_is_followed_by_eos(tiny):
    """A text longer than the model's context of 128 loses its beginning."""
    model, tokenizer = models.load_reward_model(tiny / "reward", rloo_args(tiny)).eval(), toy.tokenizer()
    scorer, eos = make_scorer((), reward_model_path="reward"), [tokenizer.eos_token_id]
    scorer.text_model = rewards.TextModel(model, tokenizer, 4)
    long = " ".join(sorted(toy.NOUN_TOPIC) * 20)
    prompts, texts = ["last night we went", "on monday", long], ["the room was lovely .", "the pool", "the room"]
    batch, ids = batch_of(texts), [tokenizer(f"{a} {b}").input_ids for a, b in zip(prompts, texts, strict=True)]
    batch.responses[:, -1], batch.response_mask[:] = torch.tensor([*eos, 7, *eos]), True
    scores = scorer([prompt({"prompt": text}) for text in prompts], batch, texts=texts)[0][:, 0].tolist()
    expected = [model(torch.tensor([x])).logits.item() for x in (ids[0] + eos, ids[1], (ids[2] + eos)[-128:])]
    assert len(ids[2]) > 128 and scores == pytest.approx(expected, abs=1e-5)
