"""evaluate.py: whole runs against plain transformers and the training's own evaluation, sampling settings, mistakes.

The equations of its figures are in tests/equations, the language model as a judge is in test_judge.py.
"""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers import ppo_args, rloo_args, swap_words, tiny_config
from short_runs import contents, write_rows

from rlhf_details import evaluate, toy, train_ppo, train_rloo
from rlhf_details.plumbing.inputs import token_ids, user_code
from rlhf_details.plumbing.outputs import evaluation


def evaluate_args(tiny, **changes):
    """13 prompts, 6 tokens of the tiny policy against the references, compared by the reward model."""
    values = dict(
        dataset="rows.jsonl", policy_path=str(tiny / "policy"), reward_model_path=str(tiny / "reward"),
        judge="reward_model", response_length=6, output_dir="out",
    )  # fmt: skip
    return evaluate.Args(**(values | changes))


def evaluate_tiny(tiny, **changes):
    """Runs evaluate.main in this process; returns (metrics of summary.json, rows of samples.csv)."""
    metrics, folder = evaluate.main(evaluate_args(tiny, **changes))["metrics"], changes.get("output_dir", "out")
    assert json.loads(Path(folder, "summary.json").read_text())["metrics"] == metrics
    with open(Path(folder, "samples.csv"), newline="", encoding="utf-8") as file:
        return metrics, list(csv.DictReader(file))


@pytest.fixture
def rows(in_tmp):
    """rows.jsonl with 13 prompts and completions of ragged lengths."""
    table = toy.rows("sft", "train")[:13]
    write_rows("rows.jsonl", table)
    return table


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """The folder of another random policy over the toy vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    torch.manual_seed(1)
    transformers.GPTNeoXForCausalLM(tiny_config(initializer_range=0.2)).save_pretrained(folder)
    toy.tokenizer().save_pretrained(folder)
    return str(folder)


# ---- figures ---------------------------------------------------------------------------------------------------------
def test_samples_are_greedy_and_scores_are_those_of_plain_transformers(rows, ragged):
    """At 1e-4 a response is the library's greedy one. Scores and lengths are computed again, row by row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ragged / "policy")
    model = transformers.AutoModelForCausalLM.from_pretrained(ragged / "policy")
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(ragged / "reward")
    metrics, table = evaluate_tiny(ragged, temperature=1e-4)

    @torch.no_grad()
    def score(ids):
        return pytest.approx(reward(input_ids=torch.tensor([ids])).logits[0, 0].item() + 0.7, abs=1e-4)

    for row, line in zip(rows, table, strict=True):
        prompt, reference = token_ids.encode(tokenizer, row["prompt"], row["completion"])
        output = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        response = output[0, len(prompt) :].tolist()
        assert line["response"] == tokenizer.decode(response, skip_special_tokens=True)
        assert (int(line["length"]), int(line["ended"])) == (len(response), response[-1] == tokenizer.eos_token_id)
        assert reference[-1] == tokenizer.eos_token_id and int(line["opponent_length"]) == len(reference)
        assert line["opponent_response"] == row["completion"] and line["prompt"] == row["prompt"]
        ours, theirs = (float(line[f"{side}rewards/reward_model"]) for side in ("", "opponent_"))
        assert (ours, theirs) == (score(prompt + response), score(prompt + reference))
        assert line["verdict"] == ("won" if ours > theirs else "lost")
    ended = [int(line["ended"]) for line in table]
    assert 0 < sum(ended) < 13 and metrics["policy"]["ended"]["value"] == sum(ended) / 13
    assert "ended" not in metrics["opponent"]


def test_eval_4_the_mean_lengths_stand_beside_the_win_rate(rows, tiny, capsys):
    _, table = evaluate_tiny(tiny)
    won = [row["verdict"] for row in table].count("won")
    lengths = [sum(int(row[column]) for row in table) / 13 for column in ("length", "opponent_length")]
    assert lengths[0] != lengths[1] and 0 < won < 13
    ended = sum(int(row["ended"]) for row in table) / 13
    out = capsys.readouterr().out
    assert f"13 pairs: {won} won, 0 tied, {13 - won} lost, mean length " in out
    assert f"{lengths[0]:.1f} against {lengths[1]:.1f} tokens, ended {ended:.1%} against -)" in out
    assert "rewards/reward_model" in out and "distinct_3" in out  # the table of all figures


def test_the_weighted_sum_of_all_rewards_judges(rows, tiny, other):
    Path("mine.py").write_text(
        "def words(prompts, completions): return [len(c.split()) for c in completions]\n"
        "def some(prompts, completions):\n"
        "    return [None if len(p) % 2 else len(c) for p, c in zip(prompts, completions)]\n"
    )
    options = dict(judge="reward_fn", opponent_path=other, reward_fn=("mine.py:words", "mine.py:some"))
    options |= dict(reward_fn_weights=(2.0, -0.5))
    metrics, table = evaluate_tiny(tiny, **options)
    counts = [len(row["response"].split()) for row in table]
    assert metrics["policy"]["rewards/words"]["value"] == pytest.approx(sum(counts) / 13)
    assert {row["rewards/some"] == "" for row in table} == {True, False}
    for row in table:
        ours, theirs = (
            float(row[f"{side}rewards/reward_model"]) + 2 * len(row[f"{side}response"].split())
            - (0.5 * len(row[f"{side}response"]) if row["rewards/some"] else 0)
            for side in ("", "opponent_")
        )  # fmt: skip
        assert row["verdict"] == ("won" if ours > theirs + 1e-4 else "lost" if theirs > ours + 1e-4 else "tied")
    assert {"won", "lost"} <= {row["verdict"] for row in table}


def test_eval_5_pass_at_k_counts_right_answers_among_several_samples(rows, tiny, fails):
    """The first response to each prompt is the one that everything else is about, and all responses differ."""
    Path("mine.py").write_text(
        "calls = []\n"
        "def even(prompts, completions):\n"
        "    calls.append((completions, [len(c.split()) % 2 == 0 for c in completions]))\n"
        "    return calls[-1][1]\n"
    )
    options = dict(judge="none", opponent_path=None, reward_fn=("mine.py:even",), samples_per_prompt=4)
    metrics, table = evaluate_tiny(tiny, **options)
    calls = user_code.load_module(str(Path("mine.py").resolve())).calls
    assert calls[0][0] == [row["response"] for row in table]
    assert len({tuple(texts) for texts, _ in calls}) == len(calls) == 4
    counts = [sum(verdicts) for verdicts in zip(*(right for _, right in calls), strict=True)]
    assert {*counts} - {0, 4}  # Some are right and some are not.
    assert metrics["policy"]["pass@4"]["value"] == pytest.approx(sum(x > 0 for x in counts) / 13)
    Path("mine.py").write_text("def even(prompts, completions): return [0.5 for c in completions]\n")
    user_code.load_module.cache_clear()
    line = fails(evaluate.main, evaluate_args(tiny, **options | dict(output_dir="none")))
    assert "--samples_per_prompt 4: no function of --reward_fn has returned True and False alone" in line


@pytest.mark.parametrize(
    "said, expected",  # of all answers in the first sample of each prompt, the second, and so on; pass@1 and pass@4
    [
        ("False None False None", (0, 0)),
        ("None True None True", (0.5, 1)),
        ("None None None True", (0.25, 1)),  # The first sample says nothing of the others.
        ("[None,True][i%2] [None,False][i%2] [None,True][i%2] [None,False][i%2]", (0.5, 1)),  # Half the prompts count.
    ],
)
def test_eval_5_none_is_never_right(rows, tiny, capsys, said, expected):
    code = f"calls = {said.split()!r}\ndef f(prompts, completions):\n    now = calls.pop(0)\n"
    Path("mine.py").write_text(code + "    return [eval(now, dict(i=i)) for i in range(len(prompts))]\n")
    user_code.load_module.cache_clear()
    options = dict(judge="none", opponent_path=None, reward_fn=("mine.py:f",), samples_per_prompt=4)
    policy = evaluate_tiny(tiny, **options)[0]["policy"]
    assert tuple(policy[f"pass@{k}"]["value"] for k in (1, 4)) == expected
    assert ("pass@k: over 6 of 13 prompts" in capsys.readouterr().out) == ("[" in said)


def test_eval_3_the_kl_is_that_of_the_trainings_held_out_evaluation(rows, tiny):
    """It has samples of its own, at the training's temperature, whatever that of those that are scored."""
    training = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", temperature=0.7, response_length=6)
    after = train_rloo.main(rloo_args(tiny, learning_rate=1e-2, output_dir="trained", **training))["after"]
    options = dict(policy_path="trained", ref_model_path=str(tiny / "policy"))
    for temperature in (0.7, 0.1):
        metrics, table = evaluate_tiny(tiny, **options, temperature=temperature, overwrite=True)
        assert metrics["policy"]["kl"]["value"] == pytest.approx(after["eval/objective/kl"], rel=1e-4)
        assert abs(metrics["policy"]["kl"]["value"]) > 0.05 and "kl" not in table[0]


def test_a_policy_of_fixed_length_is_read_up_to_its_truncating_token_as_in_training(rows, tiny):
    """No flag says how it samples: that is in the folder's training_args.json."""
    recipe = dict(stop_token="none", truncate_token="eos", truncate_after=2, response_length=40, temperature=0.8)
    training = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", output_dir="trained", missing_eos_penalty=None)
    after = train_ppo.main(ppo_args(tiny, learning_rate=1e-2, **recipe, **training))["after"]
    assert 0 < after["eval/objective/ended"] < 1 and after["eval/objective/length"] < 40
    paths = dict(policy_path="trained", ref_model_path=str(tiny / "policy"), response_length=None)
    metrics, _ = evaluate_tiny(tiny, **paths)
    assert json.loads(Path("out/summary.json").read_text())["sampling"].items() > recipe.items()
    assert metrics["policy"]["kl"]["value"] == pytest.approx(after["eval/objective/kl"], rel=1e-4)
    assert metrics["policy"]["length"]["value"] < 40 and 0 < metrics["policy"]["ended"]["value"] < 1


def test_slices_change_nothing(rows, tiny, other):
    options = dict(opponent_path=other, ref_model_path=other)
    whole, parts = (evaluate_tiny(tiny, rollout_micro_batch_size=size, overwrite=True, **options) for size in (64, 3))
    for side in ("policy", "opponent"):
        values, others = ({name: x["value"] for name, x in metrics[side].items()} for metrics, _ in (whole, parts))
        assert values == pytest.approx(others, rel=1e-4)
    assert [row["response"] for row in whole[1]] == [row["response"] for row in parts[1]]


# ---- sampling as the policy was trained ------------------------------------------------------------------------------
PPO = dict(temperature=0.7, response_length=24, stop_token="none", truncate_token=".", truncate_after=16, seed=1)
PPO |= dict(chat_template_kwargs="{}")
FALLBACKS, WHOLE = dict(evaluation.FALLBACKS), dict(truncate_token="none", truncate_after=0)


@pytest.fixture
def trained(tiny, in_tmp):
    """trained(object or None): a folder `trained` with the tiny policy and this training_args.json."""

    def make(content):
        shutil.copytree(tiny / "policy", "trained", dirs_exist_ok=True)
        if content is not None:
            Path("trained/training_args.json").write_text(json.dumps(content))

    return make


@pytest.mark.parametrize(
    "file, flags, expected",
    [
        (PPO, {}, PPO),
        (PPO, dict(temperature=0.01), dict(PPO, temperature=0.01)),
        (PPO, WHOLE, PPO | WHOLE),
        (dict(temperature=1, response_length=36), {}, dict(FALLBACKS, temperature=1.0, response_length=36)),  # of SFT
        (None, dict(response_length=7), dict(FALLBACKS, response_length=7)),
    ],
)
def test_each_setting_is_the_flags_or_the_files_or_the_fallback(trained, file, flags, expected):
    trained(file)
    args = evaluation.as_trained(evaluate.Args(policy_path="trained", **flags))
    assert {name: getattr(args, name) for name in FALLBACKS} == {name: expected[name] for name in FALLBACKS}


@pytest.mark.parametrize("file, doubted", [({}, 0), ({"reward_fn": ["f"]}, 1), ({"teacher_model_path": "t"}, 0)])
def test_a_win_rate_by_trainings_own_functions_is_doubted_unless_a_teacher_trained(trained, file, doubted):
    trained({"reward_fn": ["f"] if "teacher_model_path" in file else []} | file)
    args = evaluate.Args(policy_path="trained", judge="reward_fn", reward_fn=("f",))
    lines = ["f says who wins, which is what training optimised, so this win rate cannot show over-optimisation"]
    assert evaluation.doubts(args, {}) == lines * doubted


# ---- the output folder -----------------------------------------------------------------------------------------------
def test_the_same_command_may_be_repeated_and_another_needs_overwrite(rows, tiny, fails):
    evaluate_tiny(tiny)
    _, first = evaluate_tiny(tiny)
    before = contents()
    line = fails(evaluate_tiny, tiny, temperature=0.5)
    assert contents() == before
    assert all(part in line for part in ("--output_dir out", "temperature 1.0 there", "0.5 here", "--overwrite"))
    _, second = evaluate_tiny(tiny, temperature=0.5, overwrite=True)
    assert first != second
    Path("out/thesis.txt").touch()
    assert "holds other files" in fails(evaluate_tiny, tiny, temperature=0.5, overwrite=True)


# ---- mistakes --------------------------------------------------------------------------------------------------------
@pytest.fixture
def refused(rows, tiny, fails, monkeypatch):
    """A function: main ends with one line that holds all the parts, and writes nothing."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def refuse(*parts, **changes):
        before = contents()
        line = fails(evaluate.main, evaluate_args(tiny, **changes))
        assert contents() == before and all(part in line for part in parts), line

    return refuse


LLM = dict(judge="llm", judge_model="m", judge_base_url="http://127.0.0.1:9/v1")
MISTAKES = [
    ({"response_length": 128}, ["--response_length 128", "128"]),
    ({"stop_token": "nonsense"}, ["--stop_token 'nonsense'"]),
    ({"truncate_after": 2}, ["--truncate_after 2", "truncate_token"]),
    *[({name: "no/such"}, [f"--{name} no/such"]) for name in ("opponent_path", "ref_model_path", "reward_model_path")],
    ({"reward_model_path": None}, ["--judge reward_model", "--reward_model_path"]),
    ({"judge": "gold"}, ["--judge gold", "--dataset rows.jsonl"]),
    ({"judge": "llm"}, ["--judge llm", "--judge_model"]),
    (LLM | {"judge_base_url": None}, ["--judge llm", "OPENAI_API_KEY"]),
    (LLM | {"judge_base_url": "localhost:8000"}, ["--judge_base_url localhost:8000", "http://"]),
    ({"output_dir": "rows.jsonl/deeper", "overwrite": True}, ["--output_dir rows.jsonl/deeper", "is a file"]),
]


@pytest.mark.parametrize("changes,parts", MISTAKES, ids=lambda x: " ".join(map(str, x)) if isinstance(x, dict) else "")
def test_mistakes_in_the_arguments_are_one_line(refused, changes, parts):
    refused(*parts, **changes)


@pytest.mark.parametrize("flag", ["opponent_path", "ref_model_path"])
def test_models_of_another_vocabulary_are_one_line(refused, tiny, flag):
    shutil.copytree(tiny / "policy", "bad")
    swap_words("bad", "soup", "hotel")
    refused("vocabulary mismatch", "--policy_path", f"--{flag} ", **{flag: "bad"})
