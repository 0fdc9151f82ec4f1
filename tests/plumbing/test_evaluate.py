"""evaluate.py: whole runs against plain transformers and the training's own evaluation, sampling settings, mistakes.

The equations of its figures are in tests/equations, the language model as a judge is in test_judge.py.
"""

import contextlib
import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers import edit_json, ppo_args, put_into_cache, rloo_args, save_pair, swap_words
from huggingface_hub import constants
from short_runs import contents, write_rows

from rlhf_details import evaluate, toy, train_ppo, train_rloo
from rlhf_details.plumbing.inputs import token_ids, user_code
from rlhf_details.plumbing.outputs import evaluation


def evaluate_tiny(tiny, **changes):
    """Evaluates 13 prompts, 6 tokens of the tiny policy against the references, compared by the reward model.

    Returns: (metrics of summary.json, rows of samples.csv).
    """
    values = dict(dataset="rows.jsonl", policy_path=str(tiny / "policy"), reward_model_path=str(tiny / "reward"))
    values |= dict(judge="reward_model", response_length=6, output_dir="out") | changes
    metrics, folder = evaluate.main(evaluate.Args(**values))["metrics"], Path(values["output_dir"])
    assert json.loads((folder / "summary.json").read_text())["metrics"] == metrics
    with open(folder / "samples.csv", newline="", encoding="utf-8") as file:
        return metrics, list(csv.DictReader(file))


@pytest.fixture
def rows(in_tmp):
    """rows.jsonl with 13 prompts and completions of ragged lengths."""
    table = toy.rows("sft", "train")[:13]
    write_rows("rows.jsonl", table)
    return table


@pytest.fixture
def function(in_tmp):
    """function(body): writes a reward function f, which has a list `seen`, to mine.py. Returns flags that take it."""

    def write(body):
        user_code.load_module.cache_clear()
        Path("mine.py").write_text(f"seen = []\ndef f(prompts, completions):\n    {body}\n")
        return dict(reward_fn=("mine.py:f",))

    return write


# ---- figures ---------------------------------------------------------------------------------------------------------
def test_eval_4_samples_are_greedy_and_scores_are_those_of_plain_transformers(rows, ragged, capsys):
    """At 1e-4 a response is the library's greedy one. Scores and lengths are computed again, row by row.

    The mean lengths stand beside the win rate.
    """
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
    ended, won = sum(int(line["ended"]) for line in table), [line["verdict"] for line in table].count("won")
    assert 0 < ended < 13 and metrics["policy"]["ended"]["value"] == ended / 13 and "ended" not in metrics["opponent"]
    ours, theirs = (sum(int(line[f"{side}length"]) for line in table) / 13 for side in ("", "opponent_"))
    out = capsys.readouterr().out
    assert f"13 pairs: {won} won, 0 tied, {13 - won} lost, mean length {ours:.1f} against {theirs:.1f} tokens, " in out
    assert ours != theirs and f"ended {ended / 13:.1%} against -)" in out and "distinct_3" in out


@pytest.mark.parametrize(
    "file, doubted", [({}, 0), ({"reward_fn": ["mine.py:f"]}, 1), ({"teacher_model_path": "t"}, 0)]
)
def test_the_weighted_sum_of_all_rewards_judges_and_is_doubted_where_it_trained(rows, tiny, function, file, doubted):
    """A run with a teacher has only logged its functions. None counts nothing."""
    shutil.copytree(tiny / "policy", "trained")
    Path("trained/training_args.json").write_text(json.dumps({"reward_fn": ["mine.py:f"]} | file if file else {}))
    options = function("return [len(c.split()) if len(p) % 2 else None for p, c in zip(prompts, completions)]")
    options |= dict(judge="reward_fn", policy_path="trained", opponent_path=str(tiny / "teacher"))
    _, table = evaluate_tiny(tiny, **options, reward_fn_weights=(-2.0,))
    for row in table:
        ours, theirs = (
            float(row[f"{side}rewards/reward_model"]) - 2 * float(row[f"{side}rewards/f"] or 0)
            for side in ("", "opponent_")
        )
        assert (row["rewards/f"] == "") == (len(row["prompt"]) % 2 == 0)
        assert row["verdict"] == ("won" if ours > theirs + 1e-4 else "lost" if theirs > ours + 1e-4 else "tied")
    assert {"won", "lost"} <= {row["verdict"] for row in table}
    line = "mine.py:f says who wins, which is what training optimised, so this win rate cannot show over-optimisation"
    assert json.loads(Path("out/summary.json").read_text())["warnings"] == [line] * doubted


@pytest.mark.parametrize(
    "said, expected",  # of answer i in the first sample of each prompt, the second, and so on; pass@1 and pass@4
    [
        ("False None False None", (0, 0)),
        ("None True None True", (0.5, 1)),
        ("i<6 i<3 False None", (9 / 52, 6 / 13)),
        ("None None None True", (0.25, 1)),  # The first sample says nothing of the others.
        ("[None,True][i%2] [None,False][i%2] [None,True][i%2] [None,False][i%2]", (0.5, 1)),  # Half the prompts count.
        ("0.5 0.5 0.5 0.5", None),
    ],
)
def test_eval_5_pass_at_k_counts_right_answers_among_several_samples(
    rows, tiny, function, capsys, fails, said, expected
):
    """None is never right. The first response to each prompt is the one that everything else is about."""
    body = f"seen.append(completions); return [eval({said.split()}[len(seen) - 1]) for i in range(len(prompts))]"
    options = dict(judge="none", opponent_path=None, samples_per_prompt=4) | function(body)
    if not expected:
        words = "--samples_per_prompt 4: no function of --reward_fn has returned True and False alone"
        assert words in fails(evaluate_tiny, tiny, **options)
        return
    metrics, table = evaluate_tiny(tiny, **options)
    seen = user_code.load_module(str(Path("mine.py").resolve())).seen
    assert seen[0] == [row["response"] for row in table] and len({*map(tuple, seen)}) == 4
    assert [metrics["policy"][f"pass@{k}"]["value"] for k in (1, 4)] == pytest.approx(expected)
    assert ("pass@k: over 6 of 13 prompts" in capsys.readouterr().out) == ("[" in said)


def test_eval_3_the_kl_is_that_of_the_trainings_held_out_evaluation(rows, tiny):
    """It has samples of its own, at the training's temperature, whatever that of those that are scored.

    Responses are of fixed length, read up to the truncating token. Only the folder's training_args.json says all that.
    """
    recipe = dict(stop_token="none", truncate_token="eos", truncate_after=2, response_length=40, temperature=0.8)
    training = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", output_dir="trained", missing_eos_penalty=None)
    after = train_ppo.main(ppo_args(tiny, learning_rate=1e-2, **recipe, **training))["after"]
    assert 0 < after["eval/objective/ended"] < 1 and after["eval/objective/length"] < 40
    options = dict(policy_path="trained", ref_model_path=str(tiny / "policy"), response_length=None, overwrite=True)
    for temperature in (0.1, None):
        metrics, table = evaluate_tiny(tiny, **options, temperature=temperature)
        assert metrics["policy"]["kl"]["value"] == pytest.approx(after["eval/objective/kl"], rel=1e-4)
        assert abs(metrics["policy"]["kl"]["value"]) > 0.05 and "kl" not in table[0]
    assert metrics["policy"]["length"]["value"] < 40 and 0 < metrics["policy"]["ended"]["value"] < 1


def test_slices_change_nothing(rows, tiny):
    options = dict(opponent_path=str(tiny / "teacher"), ref_model_path=str(tiny / "teacher"), overwrite=True)
    whole, parts = (evaluate_tiny(tiny, rollout_micro_batch_size=size, **options) for size in (64, 3))
    for side in ("policy", "opponent"):
        values, others = ({name: x["value"] for name, x in metrics[side].items()} for metrics, _ in (whole, parts))
        assert values == pytest.approx(others, rel=1e-4)
    assert [row["response"] for row in whole[1]] == [row["response"] for row in parts[1]]


# ---- sampling as the policy was trained ------------------------------------------------------------------------------
PPO = dict(temperature=0.7, response_length=3, stop_token="none", truncate_token=".", truncate_after=2, seed=1)
SFT, DPO = (dict(temperature=0.7, response_length=3) | {name: "x"} for name in ("base_model", "sft_model_path"))
SETTINGS = [  # training_args.json, flags, the line
    (PPO, {}, "temperature 0.7, response_length 3, stop_token none, truncate_token ., truncate_after 2, "),
    (PPO, dict(temperature=0.1), "temperature 0.1, response_length 3, stop_token none, truncate_token ., trunc"),
    (
        PPO,
        dict(truncate_token="none", truncate_after=0),
        "temperature 0.7, response_length 3, stop_token none, truncate_token none, truncate_after 0, ",
    ),
    ({}, {}, "temperature 1.0, response_length 53, stop_token eos, truncate_token none, truncate_after 0, "),
    (SFT, {}, "temperature 0.7, response_length 3, stop_token eos, "),
    (SFT, dict(temperature=0.1), "temperature 0.1, response_length 3, stop_token eos, "),
    (DPO, {}, "temperature 1.0, response_length 3, stop_token eos, "),
    (DPO, dict(temperature=0.1), "temperature 0.1, response_length 3, stop_token eos, "),
]
SOURCES = {  # what the line says of values that no flag gives
    "temperature": "as it was trained",
    "base_model": "as its training sampled for ROUGE-L",
    "sft_model_path": "DPO's loss is at temperature 1, and it did not use this response_length",
    "": "no training_args.json was found with it",
}


@pytest.mark.parametrize("file, flags, line", SETTINGS)
def test_each_setting_is_the_flags_or_the_files_or_the_fallback(rows, tiny, capsys, file, flags, line):
    shutil.copytree(tiny / "policy", "trained")
    Path("trained/training_args.json").write_text(json.dumps(file))
    for length in (None, 3):
        options = dict(policy_path="trained", response_length=length, judge="none", overwrite=True)
        metrics, _ = evaluate_tiny(tiny, **options, **flags)
        out = capsys.readouterr().out
        assert f"sampling: {line}" in out or length
        source = next(text for name, text in reversed(SOURCES.items()) if (name in file if name else not file))
        assert f"(flags, and else {source})" in out
        # Training or a flag has chosen the others.
        share, limit = 1 - metrics["policy"].get("ended", {"value": 1})["value"], line.split(", ")[1].split()[1]
        words = f"{share:.0%} of the responses were cut at {limit} tokens, a limit that its training did not set; give"
        assert (words in out) == (length is None and "stop_token" not in file and share > 0.5)


def test_the_kl_of_a_dpo_policy_is_at_the_temperature_of_its_samples(rows, tiny):
    """Its training_args.json has that of the embedded task's comparisons."""
    shutil.copytree(tiny / "policy", "trained")
    Path("trained/training_args.json").write_text(json.dumps(DPO | dict(temperature=0.1)))
    options = dict(ref_model_path=str(tiny / "teacher"), judge="none", overwrite=True)
    paths = str(tiny / "policy"), "trained"
    for temperature in (None, 0.7):
        found = [evaluate_tiny(tiny, policy_path=x, temperature=temperature, **options)[0]["policy"] for x in paths]
        assert found[0]["kl"] == found[1]["kl"]


BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
A_TEMPLATE, OTHERS, CHATS = "a chat template", "end tokens", [{"prompt": [{"role": "user", "content": "soup"}]}]


@pytest.mark.parametrize(
    "flag, template, ends, stop_token, rows, words",
    [
        ("opponent_path", BARE, [1, 5], "eos", CHATS, f"{A_TEMPLATE} and {OTHERS}"),
        ("opponent_path", BARE, [1], "eos", CHATS, A_TEMPLATE),
        ("opponent_path", BARE, [1], "eos", [{"prompt": "soup"}], None),
        ("opponent_path", None, [5], "eos", [{"prompt": "soup"}], OTHERS),
        ("opponent_path", None, [5], ".", [{"prompt": "soup"}], None),
        ("opponent_path", None, [1], "eos", CHATS, None),
        ("ref_model_path", BARE, [1, 5], "eos", CHATS, A_TEMPLATE),
        ("ref_model_path", None, [1, 5], "eos", CHATS, None),
    ],
)
def test_a_line_warns_of_an_opponents_own_template_and_ends(
    tiny, in_tmp, capsys, flag, template, ends, stop_token, rows, words
):
    shutil.copytree(tiny / "policy", "other")
    tokenizer = toy.tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained("other")
    Path("other/generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    args = evaluate.Args(policy_path=str(tiny / "policy"), stop_token=stop_token, **{flag: "other"})
    evaluation.load_models(args, "cpu", rows)
    out = capsys.readouterr().out
    assert (f"warning: --{flag} other: has {words} of its own, but is given the policy's, so" in out) == bool(words)
    assert ("of its own" in out) == bool(words)


@pytest.mark.parametrize("place", ["trained", "trained/adapter", "org/policy", "org/policy@v1"])
def test_a_policy_is_sampled_as_it_was_trained_wherever_its_folder_is(rows, tiny, function, monkeypatch, capsys, place):
    """Its prompts, too, have the template of its training. Code that a repository names does not run."""
    pytest.importorskip("peft")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "cache")
    flags = dict(dataset="rows.jsonl", prompt_template="the {prompt} .", response_length=5, temperature=0.5)
    train_rloo.main(rloo_args(tiny, **flags, total_episodes=16, lora_rank=2, output_dir="trained"))
    if "org" in place:
        edit_json("trained/training_args.json", tools=["os:system"], env_fn="os:system")
        put_into_cache("org/policy", "trained", *place.split("@")[1:])
    options = function("seen.extend(prompts); return [1.0] * len(prompts)")
    options |= dict(policy_path=place, response_length=None, judge="none", reward_model_path=None)
    for template, text in ((None, "the {} ."), ("{prompt}", "{}")):
        evaluate_tiny(tiny, **options, prompt_template=template, overwrite=True)
        out = capsys.readouterr().out
        assert "sampling: temperature 0.5, response_length 5, stop_token eos, " in out and "as it was trained" in out
        seen = user_code.load_module(str(Path("mine.py").resolve())).seen
        assert seen[-13:] == [text.format(row["prompt"]) for row in rows]
        for flag, code in (("env_fn", "os:system"), ("tools", "['os:system']")):
            line = f"warning: --policy_path {place}: was trained with --{flag} {code}; give the flag"
            assert (line in out) == ("org" in place)


# ---- mistakes, and the output folder ---------------------------------------------------------------------------------
LLM = dict(judge="llm", judge_model="m", judge_base_url="http://127.0.0.1:9/v1")
MISTAKES = [  # flags, words of the line
    ({"response_length": 128}, "--response_length 128"),
    ({"stop_token": "nonsense"}, "--stop_token 'nonsense'"),
    ({"truncate_after": 2}, "--truncate_after 2: needs a truncate_token"),
    ({"opponent_path": "no/such"}, "--opponent_path no/such"),
    ({"ref_model_path": "no/such"}, "--ref_model_path no/such"),
    ({"reward_model_path": "no/such"}, "--reward_model_path no/such"),
    ({"reward_model_path": None}, "--judge reward_model: needs --reward_model_path"),
    ({"judge": "gold"}, "--judge gold: only the embedded task has a true reward, not --dataset rows.jsonl"),
    ({"judge": "llm"}, "--judge llm: needs --judge_model"),
    ({"judge_model": "m"}, "--judge_model m: is read by --judge llm alone"),
    (LLM | {"judge_base_url": None}, "--judge llm: needs OPENAI_API_KEY"),
    (LLM | {"judge_base_url": "localhost:8000"}, "--judge_base_url localhost:8000: must begin with http://"),
    ({"output_dir": "rows.jsonl/deeper", "overwrite": True}, "--output_dir rows.jsonl/deeper: is a file"),
    ({"output_dir": "reward", "overwrite": True}, "--output_dir reward: holds other files"),
    ({"opponent_path": "teacher"}, "vocabulary mismatch: --policy_path"),
    ({"ref_model_path": "teacher"}, "vocabulary mismatch: --policy_path"),
    (
        {"output_dir": "done", "temperature": 0.5},
        "--output_dir done holds another evaluation (temperature 1.0 there, 0.5 here); give another",
    ),
]


@pytest.fixture(scope="module")
def evaluated(tiny, tmp_path_factory):
    """A folder with an evaluation in `done`, which the same command has repeated, and a model of other words."""
    folder = save_pair(tmp_path_factory.mktemp("evaluated"))
    swap_words(folder / "teacher", "soup", "hotel")
    with contextlib.chdir(folder):
        write_rows("rows.jsonl", toy.rows("sft", "train")[:13])
        first, again = (evaluate_tiny(tiny, output_dir="done") for _ in range(2))
        assert first == again != evaluate_tiny(tiny, output_dir="done", temperature=0.5, overwrite=True)
        evaluate_tiny(tiny, output_dir="done", overwrite=True)
    return folder


@pytest.mark.parametrize("changes, words", MISTAKES, ids=lambda x: x if isinstance(x, str) else "")
def test_mistakes_are_one_line_and_touch_nothing(evaluated, tiny, fails, monkeypatch, changes, words):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False), monkeypatch.chdir(evaluated)
    before = contents()
    assert words in fails(evaluate_tiny, tiny, **changes) and contents() == before
