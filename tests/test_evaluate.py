"""Claims about evaluate.py: figures against slow oracles, whole runs by their invariants, the judge against a local server."""

import csv
import itertools
import json
import math
import random
import re
import shutil
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from conftest import launch, ppo_args, rloo_args, tiny_config
from test_bad_input import INF, NAN, assert_one_line, contents
from test_stages import write_rows

from rlhf_details import data, evaluate, toy, train_ppo, train_rloo, utils

KEY = "sk-secret-0123456789"


# ---- equations -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 3])
def test_distinct_n_counts_ngrams_within_responses(n):
    rng = random.Random(0)
    responses = [[rng.randrange(5) for _ in range(rng.randrange(8))] for _ in range(30)]
    seen, total = [], 0
    for response in responses:
        for start in range(len(response)):
            if start + n <= len(response):
                total += 1
                if response[start : start + n] not in seen:
                    seen.append(response[start : start + n])
    assert evaluate.distinct_n(responses, n) == len(seen) / total
    assert evaluate.distinct_n([[7, 7, 7, 7]], n) == 1 / (5 - n) and evaluate.distinct_n([[]], n) == 0


@pytest.mark.parametrize(
    "wins, n, low, high", [(5, 10, 0.236593, 0.763407), (0, 10, 0, 0.277533), (10, 10, 0.722467, 1), (324, 512, 0.590214, 0.673433)]
)
def test_wilson_interval_has_the_published_values(wins, n, low, high):
    assert evaluate.wilson_interval(wins, n) == pytest.approx((low, high), abs=2e-5)  # they use 1.959964, we 1.96


@pytest.mark.parametrize("wins, n", [(1, 7), (3.5, 7), (310, 512)])
def test_wilson_interval_ends_where_the_test_of_that_rate_just_rejects(wins, n):
    for p in evaluate.wilson_interval(wins, n, z=1.3):
        assert abs(wins / n - p) == pytest.approx(1.3 * math.sqrt(p * (1 - p) / n))


def test_means_come_with_1_96_standard_errors():
    x = torch.randn(50, dtype=torch.float64)
    half = 1.96 * x.std().item() / math.sqrt(50)
    figure = evaluate.average(x.tolist())
    assert figure["value"] == pytest.approx(x.mean().item())
    assert (figure["low"], figure["high"]) == pytest.approx((x.mean().item() - half, x.mean().item() + half))
    assert evaluate.average([2.0]) == {"value": 2.0}  # one number says nothing of its spread


def test_eval_2_win_rate_a_tie_is_half_a_win_and_an_unparsable_answer_none():
    w = evaluate.win_rate(["won"] * 3 + ["tied"] * 2 + ["lost"] * 4 + ["unparsable"])
    assert (w["value"], w["pairs"], w["won"], w["tied"], w["lost"], w["unparsable"]) == (0.4, 10, 3, 2, 4, 1)
    assert (w["low"], w["high"]) == evaluate.wilson_interval(4, 10)


def test_verdict_by_score():
    assert [evaluate.verdict_by_score(*pair) for pair in ((1, 0), (0, 1), (1, 1), (1, 1 + 1e-6))] == ["won", "lost", "tied", "tied"]


@pytest.mark.parametrize(
    "answer, letter",
    [
        ("A", "A"), ("B\n", "B"), ("Comparison: A is dull.\nPreferred: B", "B"), ('Preferred: "A".', "A"),
        ("**Preferred:** **B**", "B"), ("preferred:(A)", "A"), ("Preferred: A\nPreferred: B", "B"), ("Comparison: B.\n\n A ", "A"),
        ("", None), ("\n", None), ("a", "A"), ("AB", None), ("A or B", None), ("Preferred: A and B", None), ("Preferred:", None),
        ("Comparison: A is dull. Preferred: b", "B"), ("Response A", "A"), ("Preferred: Response B.", "B"), ("Vitamin A", None),
        ("I prefer A", None), ("Preferred: A\nI hope this helps.", None), ("Answer: A", None), ("C", None),
    ],
)  # fmt: skip
def test_only_a_last_line_that_is_a_letter_is_an_answer(answer, letter):
    for ours in "AB":
        expected = "unparsable" if letter is None else "won" if letter == ours else "lost"
        assert evaluate.verdict_by_answer(answer, ours) == expected


def test_eval_1_a_judge_that_always_says_the_first_is_better_gives_one_half():
    letters = [evaluate.question("p", "ours", "theirs", 1, number)[1] for number in range(2000)]
    rate = evaluate.win_rate([evaluate.verdict_by_answer("A", letter) for letter in letters])
    assert abs(rate["value"] - 0.5) < 0.04
    assert 900 < sum(a != b for a, b in itertools.pairwise(letters)) < 1100  # no pattern from pair to pair


def test_the_order_is_a_function_of_seed_and_number_and_the_letter_is_that_of_the_response():
    orders = {seed: [evaluate.question("the {prompt}", "ours {a}", "theirs", seed, i) for i in range(64)] for seed in (1, 2)}
    assert orders[1] == [evaluate.question("the {prompt}", "ours {a}", "theirs", 1, i) for i in range(64)]
    assert [letter for _, letter in orders[1]] != [letter for _, letter in orders[2]]
    for text, letter in orders[1]:
        assert re.search(rf"### Response {letter}\nours {{a}}\n", text) and "\nthe {prompt}\n" in text and "\ntheirs\n" in text
    other = [evaluate.question("another", "longer ours", "x", 1, i)[1] for i in range(64)]
    assert other == [letter for _, letter in orders[1]]


def test_waits_double_up_to_a_minute():
    assert [evaluate.backoff(i) for i in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


# ---- whole runs ------------------------------------------------------------------------------------------------------
def evaluate_args(tiny, **changes):
    """Arguments of an evaluation of 13 prompts: 6 tokens of the tiny policy against the references, by the reward model."""
    values = dict(
        dataset="rows.jsonl", policy_path=str(tiny / "policy"), reward_model_path=str(tiny / "reward"), judge="reward_model",
        response_length=6, output_dir="out",
    )  # fmt: skip
    return evaluate.Args(**(values | changes))


def evaluate_tiny(tiny, **changes):
    """Runs evaluate.main in this process; returns (summary["metrics"], rows of samples.csv)."""
    metrics = evaluate.main(evaluate_args(tiny, **changes))["metrics"]
    folder = changes.get("output_dir", "out")
    assert json.loads(Path(folder, "summary.json").read_text())["metrics"] == metrics
    return metrics, read_samples(folder)


def read_samples(folder):
    with open(Path(folder, "samples.csv"), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def rows(in_tmp):
    """rows.jsonl with 13 prompts and completions of ragged lengths (an odd number: two processes get unequal shares)."""
    table = toy.rows("sft", "train")[:13]
    write_rows("rows.jsonl", table)
    return table


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """Folder of another random policy over the toy vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    torch.manual_seed(1)
    transformers.GPTNeoXForCausalLM(tiny_config(initializer_range=0.2)).save_pretrained(folder)
    toy.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def peaked(tiny, tmp_path_factory):
    """The tiny models, the policy with logits 30 times as large, the reward model with a bias of 0.7."""
    folder = tmp_path_factory.mktemp("peaked")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    policy = transformers.AutoModelForCausalLM.from_pretrained(tiny / "policy")
    policy.get_output_embeddings().weight.data.mul_(30)
    policy.save_pretrained(folder / "policy")
    config = json.loads((folder / "reward/config.json").read_text())
    (folder / "reward/config.json").write_text(json.dumps(config | {"reward_bias": 0.7}))
    return folder


def library_score(folder, ids):
    """Score of one row of token ids by plain transformers, without padding, plus the bias."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item() + model.config.reward_bias


def test_samples_are_greedy_and_figures_are_those_of_plain_transformers(rows, peaked):
    """At 0.01 a response is the library's greedy one; score, length, share ended and distinct-n are recomputed row by row."""
    tokenizer = utils.load_tokenizer(peaked / "policy", "")
    model = transformers.AutoModelForCausalLM.from_pretrained(peaked / "policy")
    greedy = []
    for row in rows:
        prompt = torch.tensor([tokenizer(row["prompt"]).input_ids])
        output = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        greedy.append(output[0, prompt.size(1) :].tolist())
    tokens = [t for response in greedy for t in response[:-1]]
    stop = max(set(tokens), key=tokens.count)
    greedy = [r[: r.index(stop) + 1] if stop in r else r for r in greedy]
    ended = [r[-1] == stop for r in greedy]
    assert 0 < sum(ended) < len(rows)

    metrics, table = evaluate_tiny(peaked, stop_token=tokenizer.decode([stop]), temperature=0.01)
    assert [row["response"] for row in table] == [tokenizer.decode(r) for r in greedy]
    assert [int(row["length"]) for row in table] == [len(r) for r in greedy]
    assert [row["ended"] for row in table] == [str(int(x)) for x in ended]
    assert metrics["policy"]["ended"]["value"] == sum(ended) / len(rows)
    assert metrics["policy"]["distinct_2"]["value"] == evaluate.distinct_n(
        [r[:-1] if x else r for r, x in zip(greedy, ended, strict=True)], 2
    )
    for row, response, line in zip(rows, greedy, table, strict=True):
        prompt, reference = data.encode(tokenizer, row["prompt"], row["completion"])
        assert reference[-1] == tokenizer.eos_token_id and int(line["opponent_length"]) == len(reference)
        assert line["opponent_response"] == row["completion"] and line["prompt"] == row["prompt"]
        assert float(line["score"]) == pytest.approx(library_score(peaked / "reward", prompt + response), abs=1e-4)
        assert float(line["opponent_score"]) == pytest.approx(library_score(peaked / "reward", prompt + reference), abs=1e-4)
        assert line["verdict"] == ("won" if float(line["score"]) > float(line["opponent_score"]) else "lost")
    references = [tokenizer(row["completion"]).input_ids for row in rows]  # without the stop token
    assert metrics["opponent"]["distinct_1"]["value"] == evaluate.distinct_n(references, 1)
    assert "ended" not in metrics["opponent"] and metrics["policy"]["score"] == evaluate.average([float(x["score"]) for x in table])


def test_eval_4_the_win_rate_line_and_the_files_agree(rows, tiny, capsys):
    metrics, table = evaluate_tiny(tiny)
    w, verdicts = metrics["win_rate"], [row["verdict"] for row in table]
    won, tied, lost = (verdicts.count(v) for v in ("won", "tied", "lost"))
    low, high = evaluate.wilson_interval(won + tied / 2, 13)
    lengths = [sum(int(row[c]) for row in table) / 13 for c in ("length", "opponent_length")]
    assert w["value"] == (won + tied / 2) / 13 and 0 < won < 13
    line = f"Model win rate: {100 * w['value']:.2f}%  ({100 * low:.2f}% .. {100 * high:.2f}%, 13 pairs: {won} won, {tied} tied, "
    line += f"{lost} lost, mean length {lengths[0]:.1f} against {lengths[1]:.1f} tokens)"
    assert line in capsys.readouterr().out.splitlines()


def test_gold_judges_the_embedded_task(in_tmp, tiny, other, capsys):
    metrics, table = evaluate_tiny(tiny, dataset="toy", judge="gold", opponent_path=other, num_examples=20, reward_model_path=None)
    assert [row["prompt"] for row in table] == [row["prompt"] for row in toy.rows("prompts", "test")[:20]]
    for row in table:
        ours, theirs = toy.gold(row["prompt"], row["response"]), toy.gold(row["prompt"], row["opponent_response"])
        assert (float(row["gold"]), float(row["opponent_gold"])) == (ours, theirs)
        assert row["verdict"] == ("tied" if ours == theirs else "won" if ours > theirs else "lost")
    assert {"won", "lost"} <= {row["verdict"] for row in table} and "score" not in table[0]
    assert metrics["policy"]["parses"] == evaluate.rate([toy.parses(f"{r['prompt']} {r['response']}") for r in table])
    assert "Model win rate" in capsys.readouterr().out


def test_references_of_the_embedded_task_parse(in_tmp, tiny):
    metrics, _ = evaluate_tiny(tiny, dataset="toy:train", judge="gold", num_examples=8, reward_model_path=None)
    assert metrics["opponent"]["parses"]["value"] == 1 and metrics["opponent"]["gold"]["value"] > 0


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_a_policy_against_itself_ties_everywhere(rows, tiny, temperature):
    metrics, table = evaluate_tiny(tiny, opponent_path=str(tiny / "policy"), temperature=temperature)
    assert (metrics["win_rate"]["value"], metrics["win_rate"]["tied"]) == (0.5, 13)
    assert metrics["policy"] == metrics["opponent"] and len({row["response"] for row in table}) > 5


def test_without_a_judge_rows_need_no_completion(in_tmp, tiny, other, capsys):
    write_rows("rows.jsonl", [{"prompt": row["prompt"]} for row in toy.rows("sft", "train")[:4]])
    metrics, table = evaluate_tiny(tiny, judge="none", reward_model_path=None, stop_token="none")
    assert metrics.keys() == {"policy"} and table[0].keys() == {"prompt", "response", "length"}
    metrics, table = evaluate_tiny(tiny, judge="none", opponent_path=other, output_dir="two")
    assert metrics["policy"]["score"] != metrics["opponent"]["score"] and "ended" in metrics["opponent"]
    assert "verdict" not in table[0] and "win rate" not in capsys.readouterr().out


def test_kl_of_a_policy_to_itself_is_zero_and_to_another_is_not(rows, tiny, other):
    same, _ = evaluate_tiny(tiny, ref_model_path=str(tiny / "policy"))
    far, _ = evaluate_tiny(tiny, ref_model_path=other, output_dir="far")
    assert abs(same["policy"]["kl"]["value"]) < 1e-5 and far["policy"]["kl"]["low"] > 1
    assert far["policy"]["score"] == same["policy"]["score"]  # the pass for the KL has nothing to do with the samples


def test_eval_3_the_kl_is_that_of_the_trainings_held_out_evaluation(rows, tiny):
    training = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", temperature=0.7, response_length=6, output_dir="trained")
    after = train_rloo.main(rloo_args(tiny, learning_rate=1e-2, **training))["after"]
    metrics, table = evaluate_tiny(tiny, policy_path="trained", ref_model_path=str(tiny / "policy"), kl_temperature=0.7)
    assert metrics["policy"]["kl"]["value"] == pytest.approx(after["eval/objective/kl"], rel=1e-4)
    assert abs(metrics["policy"]["kl"]["value"]) > 0.05 and "kl" not in table[0]


def test_a_policy_of_fixed_length_is_read_up_to_its_truncating_token_as_in_training(rows, tiny):
    recipe = dict(stop_token="none", truncate_token="eos", truncate_after=2, response_length=40)
    training = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", output_dir="trained", missing_eos_penalty=None)
    after = train_ppo.main(ppo_args(tiny, learning_rate=1e-2, **recipe, **training))["after"]
    assert 0 < after["eval/objective/ended"] < 1 and after["eval/objective/length"] < 40
    measured = dict(recipe, policy_path="trained", ref_model_path=str(tiny / "policy"))
    metrics, _ = evaluate_tiny(tiny, **measured, temperature=1.0)
    assert metrics["policy"]["kl"]["value"] == pytest.approx(after["eval/objective/kl"], rel=1e-4)
    lengths = metrics["policy"]["length"]["value"]
    assert lengths < 40 and 0 < metrics["policy"]["ended"]["value"] < 1
    whole, table = evaluate_tiny(
        tiny, **(measured | dict(truncate_token="none", truncate_after=0, output_dir="w")), temperature=1.0
    )
    assert whole["policy"]["length"]["value"] == 40 and "ended" not in whole["policy"] and "ended" not in table[0]
    assert whole["policy"]["kl"] == metrics["policy"]["kl"]  # paid for every sampled token
    assert whole["policy"]["score"]["value"] != pytest.approx(metrics["policy"]["score"]["value"], abs=1e-3)


def assert_same_samples(a, b):
    """Equal texts and verdicts, scores equal to float error."""
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        scores = {"score", "opponent_score"}
        assert {k: v for k, v in x.items() if k not in scores} == {k: v for k, v in y.items() if k not in scores}
        assert all(float(x[k]) == pytest.approx(float(y[k]), abs=1e-4) for k in scores & x.keys())


def test_slices_change_nothing(rows, tiny, other):
    options = dict(opponent_path=other, ref_model_path=other, temperature=1.0)
    whole, ours = evaluate_tiny(tiny, **options)
    parts, theirs = evaluate_tiny(tiny, rollout_micro_batch_size=3, **options)
    assert_same_samples(ours, theirs)
    assert parts["policy"]["kl"]["value"] == pytest.approx(whole["policy"]["kl"]["value"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_change_nothing(rows, tiny, other, in_tmp):
    """Also the command line: the flags are those of evaluate_args."""
    options = dict(opponent_path=other, ref_model_path=other, temperature=1.0)
    one, ours = evaluate_tiny(tiny, **options)
    args = evaluate_args(tiny, **options, output_dir="two")
    names = (
        "dataset policy_path reward_model_path judge response_length output_dir opponent_path ref_model_path temperature".split()
    )
    done = launch("evaluate.py", [w for name in names for w in (f"--{name}", getattr(args, name))], 2, cwd=in_tmp)
    assert done.returncode == 0 and done.stdout.count("Model win rate:") == 1, done.stderr[-3000:]
    summary = json.loads(Path("two/summary.json").read_text())
    assert summary["num_processes"] == 2
    assert_same_samples(ours, read_samples("two"))
    for side in ("policy", "opponent"):
        for name, figure in summary["metrics"][side].items():
            assert figure == pytest.approx(one[side][name], rel=1e-4, abs=1e-4), name
    assert summary["metrics"]["win_rate"] == one["win_rate"]


def test_a_terminal_shows_a_table_of_all_figures(rows, tiny, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1"), monkeypatch.setenv("COLUMNS", "150")
    evaluate_tiny(tiny, ref_model_path=str(tiny / "policy"), num_examples=2)
    text = capsys.readouterr().out
    assert "┃" in text and "Model win rate" in text
    assert all(x in text for x in ("score (reward model)", "length (tokens)", "ended (eos)", "distinct-3", "KL (nats, T = 1)"))


# ---- sampling as the policy was trained ------------------------------------------------------------------------------
AS_TRAINED = dict.fromkeys(evaluate.FALLBACKS)  # what no flag gives


@pytest.fixture
def trained(tiny, in_tmp):
    """trained(text or object): a folder `trained` with the tiny policy and this training_args.json."""

    def make(content):
        shutil.copytree(tiny / "policy", "trained", dirs_exist_ok=True)
        Path("trained/training_args.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return "trained"

    return make


def resolved(**changes):
    """(the settings of sampling, the line that says them) of flags."""
    args, line = evaluate.as_trained(evaluate.Args(**({"policy_path": "trained"} | changes)))
    return {name: getattr(args, name) for name in evaluate.FALLBACKS}, line


def test_a_policy_is_sampled_as_it_was_trained(rows, tiny, other, trained, capsys):
    policy = trained(dict(temperature=1.0, response_length=24, stop_token="eos"))
    metrics, table = evaluate_tiny(tiny, **AS_TRAINED, policy_path=policy, opponent_path=other, ref_model_path=other)
    line = "sampling: temperature 1, 24 tokens, stop token eos, KL at temperature 1 (from trained/training_args.json)"
    assert [text for text in capsys.readouterr().out.splitlines() if text.startswith("sampling")] == [line]
    args = json.loads(Path("out/summary.json").read_text())["args"]
    assert (args["temperature"], args["response_length"], args["kl_temperature"]) == (1, 24, 1)
    assert (args["stop_token"], args["truncate_token"], args["truncate_after"]) == ("eos", "none", 0)
    assert max(int(row[side]) for row in table for side in ("length", "opponent_length")) == 24
    flags = dict(temperature=1.0, response_length=24, kl_temperature=1.0, policy_path=policy, opponent_path=other)
    assert evaluate_tiny(tiny, **flags, ref_model_path=other, output_dir="by_flags") == (metrics, table)


def test_the_kl_without_flags_is_that_of_the_trainings_held_out_evaluation(rows, tiny):
    """Also of a policy of fixed length, whose training wrote the file."""
    recipe = dict(stop_token="none", truncate_token="eos", truncate_after=2, response_length=40, temperature=0.8)
    training = dict(dataset="rows.jsonl", eval_dataset="rows.jsonl", output_dir="trained", missing_eos_penalty=None)
    after = train_ppo.main(ppo_args(tiny, learning_rate=1e-2, **recipe, **training))["after"]
    metrics, _ = evaluate_tiny(tiny, **AS_TRAINED, policy_path="trained", ref_model_path=str(tiny / "policy"))
    args = json.loads(Path("out/summary.json").read_text())["args"]
    assert recipe | {"kl_temperature": 0.8} == {name: args[name] for name in evaluate.FALLBACKS}
    assert metrics["policy"]["kl"]["value"] == pytest.approx(after["eval/objective/kl"], rel=1e-4)


PPO_ARGS = dict(temperature=0.7, response_length=24, stop_token="none", truncate_token=".", truncate_after=16, seed=1)
FROM, FALLBACKS = "(from trained/training_args.json)", dict(evaluate.FALLBACKS)


@pytest.mark.parametrize(
    "file, flags, expected, line",
    [
        (PPO_ARGS, {}, dict(PPO_ARGS, kl_temperature=0.7), "temperature 0.7, 24 tokens, stop token none, truncate token '.', "
         f"truncate after 16 {FROM}"),
        (PPO_ARGS, dict(temperature=0.01, ref_model_path="x"), dict(PPO_ARGS, temperature=0.01, kl_temperature=0.7),
         f"24 tokens, stop token none, truncate token '.', truncate after 16, KL at temperature 0.7 {FROM}; "
         "temperature 0.01 (--temperature)"),
        (PPO_ARGS, dict(truncate_token="none", truncate_after=0), dict(PPO_ARGS, truncate_token="none", truncate_after=0,
         kl_temperature=0.7), f"temperature 0.7, 24 tokens, stop token none {FROM}; truncate token none, truncate after 0 "
         "(--truncate_token, --truncate_after)"),
        (dict(temperature=1, response_length=36), {}, dict(FALLBACKS, temperature=1, response_length=36),  # of train_sft.py
         f"temperature 1, 36 tokens {FROM}; stop token eos (the fallback, not in trained/training_args.json)"),
        ({}, dict(kl_temperature=0.5), dict(FALLBACKS, kl_temperature=0.5), "KL at temperature 0.5 (--kl_temperature); temperature "
         "1, 53 tokens, stop token eos (the fallback, not in trained/training_args.json)"),
        (None, {}, FALLBACKS, "temperature 1, 53 tokens, stop token eos (the fallback, trained has no training_args.json)"),
        (None, dict(temperature=0.3), dict(FALLBACKS, temperature=0.3), "temperature 0.3 (--temperature); 53 tokens, stop token "
         "eos (the fallback, trained has no training_args.json)"),
        ("{", {**FALLBACKS, "truncate_token": "eos"}, dict(FALLBACKS, truncate_token="eos"), "temperature 1, 53 tokens, stop token "
         "eos, truncate token eos, truncate after 0, KL at temperature 1 (--temperature, --response_length, --stop_token, "
         "--truncate_token, --truncate_after, --kl_temperature)"),
    ],
    ids=["all", "temperature", "truncation", "sft", "empty", "foreign folder", "foreign folder, flag", "flags alone"],
)  # fmt: skip
def test_each_setting_is_the_flags_or_the_files_or_the_fallback(trained, file, flags, expected, line):
    trained(file or {})
    if file is None:
        Path("trained/training_args.json").unlink()
    values, said = resolved(**flags)
    assert values == {name: expected[name] for name in evaluate.FALLBACKS} and said == f"sampling: {line}"


def test_a_hub_model_has_the_fallbacks(in_tmp):
    assert resolved(policy_path="EleutherAI/pythia-160m")[0] == evaluate.FALLBACKS


def test_the_line_can_be_printed_whatever_the_name_is(in_tmp):
    resolved(policy_path="a\n\udcff\0")[1].encode("ascii")


@pytest.mark.parametrize(
    "content, parts",
    [
        ("{", ("cannot be read as JSON",)), ("", ("cannot be read as JSON",)), 
        ("[1]", ("holds no object",)), ("null", ("holds no object",)),
        ('{"temperature": "warm"}', ("temperature", "'warm'")), ('{"response_length": 24.5}', ("response_length", 24.5)),
        ('{"response_length": true}', ("response_length", True)), ('{"stop_token": 3}', ("stop_token", 3)),
        ('{"temperature": 1' + "0" * 400 + "}", ("temperature",)),
    ],
    ids=["half", "empty", "list", "null", "text", "float", "bool", "number", "huge"],
)  # fmt: skip
def test_a_broken_file_of_the_training_is_one_line(trained, refused, content, parts):
    trained(content)
    refused("--policy_path trained", "trained/training_args.json", *parts, **AS_TRAINED, policy_path="trained")


@pytest.mark.parametrize(
    "file, flags, parts",
    [
        (PPO_ARGS, dict(response_length=16), ("--truncate_after 16", "--response_length 16")),
        (dict(PPO_ARGS, truncate_after=0), dict(truncate_after=24), ("--truncate_after 24", "--response_length 24")),
        (PPO_ARGS, dict(truncate_token="none"), ("--truncate_after 16", "--truncate_token")),
        (dict(temperature=0.0), {}, ("--temperature 0.0",)),
        (dict(temperature=NAN), {}, ("--temperature nan",)),
        (dict(response_length=0), {}, ("--response_length 0",)),
        (dict(stop_token="nonsense"), {}, ("--stop_token 'nonsense'",)),
    ],
)
def test_the_checks_hold_for_what_the_file_says(trained, refused, file, flags, parts):
    trained(file)
    refused(*parts, **(AS_TRAINED | flags), policy_path="trained")


# ---- the output folder -----------------------------------------------------------------------------------------------
def test_the_same_command_may_be_repeated_and_another_needs_overwrite(rows, tiny, capsys):
    evaluate_tiny(tiny)
    Path("out/judge_cache.jsonl").write_text("paid for\n")
    _, first = evaluate_tiny(tiny, rollout_micro_batch_size=8)
    before = contents(Path("."))
    with pytest.raises(SystemExit) as end:
        evaluate_tiny(tiny, temperature=0.5)
    assert end.value.code == 2 and contents(Path(".")) == before
    assert_one_line(capsys.readouterr().err, ["--output_dir out", "temperature 1.0 there", "0.5 here", "--overwrite"])
    _, second = evaluate_tiny(tiny, temperature=0.5, overwrite=True)
    assert first != second and Path("out/judge_cache.jsonl").read_text() == "paid for\n"
    assert sorted(p.name for p in Path("out").iterdir()) == ["judge_cache.jsonl", "samples.csv", "summary.json"]


# ---- the language model as a judge -----------------------------------------------------------------------------------
class Server:
    """An endpoint /v1/chat/completions: reply(number of the request, question) -> answer, or an HTTP status; it records all."""

    def __init__(self, reply):
        self.reply, self.bodies, self.headers, self.answered, lock = reply, [], [], [], threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(server.bodies)
                    server.bodies.append(body)
                    server.headers.append({"path": self.path, "Authorization": self.headers["Authorization"]})
                    reply = server.reply(number, body["messages"][0]["content"])
                    if isinstance(reply, str):
                        server.answered.append(body["messages"][0]["content"])
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
                good = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
                bad = {"error": {"message": f"no: {self.headers['Authorization']}"}}
                text = json.dumps(bad if isinstance(reply, int) else good) if reply is not None else "<html>hello</html>"
                self.send_response(reply if isinstance(reply, int) else 200)
                self.send_header("Content-Type", "application/json" if reply is not None else "text/html")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def close(self):
        self.http.shutdown(), self.http.server_close(), self.thread.join()


@pytest.fixture
def judge(rows, tiny, monkeypatch):
    """judge(reply, **changes): a server, and a function that evaluates with it; `waits` are the back-offs asked for."""
    pytest.importorskip("openai")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1"), monkeypatch.setenv("OPENAI_API_KEY", KEY)
    waits, servers = [], []
    monkeypatch.setattr(evaluate, "sleep", waits.append)

    def start(reply, **changes):
        servers.append(Server(reply))
        options = dict(judge="llm", judge_model="tiny-judge", judge_base_url=servers[-1].url, reward_model_path=None)
        return SimpleNamespace(
            server=servers[-1], waits=waits, run=lambda **more: evaluate_tiny(tiny, **(options | changes | more))
        )

    yield start
    for server in servers:
        server.close()


def taste(text):
    """What the judge below goes by: any function of the text that neither side always wins."""
    return zlib.crc32(text.strip().encode())


def tasteful(number, text):
    """A judge that prefers the same response of a pair in either order."""
    a, b = re.search(r"### Response A\n(.*)\n\n### Response B\n(.*)\n\n### Your", text, re.S).groups()
    return f"Comparison: one has more taste.\nPreferred: {'A' if taste(a) > taste(b) else 'B'}"


def test_the_judges_preference_is_mapped_back_to_the_policy(judge, capsys):
    asked = judge(tasteful)
    metrics, table = asked.run()
    better = [taste(row["response"]) > taste(row["opponent_response"]) for row in table]
    assert [row["verdict"] for row in table] == ["won" if x else "lost" for x in better] and 0 < sum(better) < 13
    assert metrics["win_rate"]["value"] == sum(better) / 13 and len(asked.server.bodies) == 13
    assert all(row["judge_answer"].startswith("Comparison: one has more taste.") for row in table)
    assert "0 unparsable, mean length" in capsys.readouterr().out
    for body, headers in zip(asked.server.bodies, asked.server.headers, strict=True):
        assert (body["model"], body["temperature"], headers["path"]) == ("tiny-judge", 0, "/v1/chat/completions")
        assert headers["Authorization"] == f"Bearer {KEY}"


def test_a_judge_that_says_a_judges_by_the_order_alone(judge):
    metrics, table = judge(lambda *_: "A").run()
    letters = [evaluate.question("", "", "", 1, i)[1] for i in range(13)]
    assert [row["verdict"] for row in table] == ["won" if letter == "A" else "lost" for letter in letters]
    assert 0 < metrics["win_rate"]["won"] < 13


def test_unparsable_answers_are_counted_and_not_won(judge, capsys):
    replies = ["A", "I cannot decide.", "B", "A or B", ""]
    metrics, table = judge(lambda number, _: replies[number % 5]).run()
    unparsable = [row["judge_answer"] for row in table if row["verdict"] == "unparsable"]
    assert sorted(unparsable) == sorted(["I cannot decide."] * 3 + ["A or B"] * 2 + [""] * 2)
    w = metrics["win_rate"]
    assert (w["unparsable"], w["pairs"], w["won"] + w["lost"], w["value"]) == (7, 13, 6, w["won"] / 13)
    assert "lost, 7 unparsable, mean" in capsys.readouterr().out


@pytest.mark.parametrize("status", [500, 503, 429, 408, 409, None])
def test_what_may_pass_is_tried_again_after_a_longer_and_longer_wait(judge, status, monkeypatch):
    monkeypatch.setattr(evaluate, "JUDGE_THREADS", 1)
    asked = judge(lambda number, text: status if number < 3 else tasteful(number, text))
    metrics, _ = asked.run()
    assert asked.waits == [1, 2, 4] and len(asked.server.bodies) == 16 and metrics["win_rate"]["unparsable"] == 0


@pytest.mark.parametrize("status, attempts", [(500, 6), (None, 6), (401, 1), (404, 1)])
def test_what_does_not_pass_ends_with_one_line_that_has_no_key(judge, capsys, monkeypatch, status, attempts):
    monkeypatch.setattr(evaluate, "JUDGE_THREADS", 1)
    asked = judge(lambda *_: status)
    with pytest.raises(SystemExit) as end:
        asked.run()
    seen = capsys.readouterr()
    part = "no chat completion" if status is None else str(status)
    assert end.value.code == 2 and KEY not in seen.err + seen.out
    assert_one_line(seen.err, [f"--judge_model tiny-judge at --judge_base_url {asked.server.url}", part, "0 of 13"])
    assert len(asked.server.bodies) == attempts  # and no second question
    assert asked.waits == [1, 2, 4, 8, 16][: attempts - 1]


def test_a_server_that_is_not_there(judge, capsys):
    asked = judge(tasteful)
    asked.server.close()
    asked.server.close = lambda: None
    with pytest.raises(SystemExit) as end:
        asked.run()
    assert end.value.code == 2
    assert_one_line(capsys.readouterr().err, ["--judge_base_url", "Connection error", "0 of 13"])


def test_an_interrupted_judging_goes_on_and_asks_nothing_twice(judge, capsys):
    dying = judge(lambda number, text: tasteful(number, text) if number < 5 else 500)
    with pytest.raises(SystemExit) as end:
        dying.run()
    seen = capsys.readouterr().err
    assert end.value.code == 2 and not Path("out/samples.csv").exists()
    assert "metrics" not in json.loads(Path("out/summary.json").read_text())
    assert_one_line(seen, ["5 of 13 answers came and are kept"])
    assert len(evaluate.read_cache(Path("out/judge_cache.jsonl"))) == len(dying.server.answered) == 5

    healthy = judge(tasteful)  # another port, the same folder
    metrics, table = healthy.run()
    assert len(healthy.server.bodies) == 8 and not set(dying.server.answered) & set(healthy.server.answered)
    assert "13 questions, 8 to ask" in capsys.readouterr().out
    whole = judge(tasteful, output_dir="whole")
    assert whole.run() == (metrics, table)

    again = judge(lambda *_: pytest.fail("asked again"))
    assert again.run() == (metrics, table) and not again.server.bodies


def test_every_answer_is_on_disk_before_the_next_question(judge, monkeypatch):
    """So that even a kill loses no more than the answers under way."""
    monkeypatch.setattr(evaluate, "JUDGE_THREADS", 1)
    kept = []
    judge(lambda *_: kept.append(len(evaluate.read_cache(Path("out/judge_cache.jsonl")))) or "A").run()
    assert kept == list(range(13))


def test_a_line_that_a_crash_cut_short_is_asked_again_and_spoils_no_other(judge):
    first = judge(tasteful)
    result = first.run()
    cache = Path("out/judge_cache.jsonl")
    lines = cache.read_bytes().splitlines(keepends=True)
    cache.write_bytes(b"[1]\nnonsense\n\xff\n" + b"".join(lines)[:-20])
    second = judge(tasteful)
    assert second.run() == result and len(second.server.bodies) == 1
    third = judge(tasteful)
    assert third.run() == result and not third.server.bodies


def test_the_cache_belongs_to_judge_prompt_pair_and_order(judge):
    judge(tasteful).run()
    for changes, low, high in (
        (dict(seed=2, temperature=1e-6), 1, 12),  # the same responses: only pairs in another order are asked again
        (dict(judge_model="other"), 13, 13),
        (dict(response_length=5), 13, 13),
    ):
        asked = judge(tasteful, temperature=1e-6)
        asked.run(overwrite=True), asked.server.bodies.clear()
        asked.run(overwrite=True, **changes)
        assert low <= len(asked.server.bodies) <= high, changes


def test_equal_responses_tie_unasked_and_equal_questions_are_asked_once(judge, tiny):
    same = judge(tasteful)
    metrics, _ = same.run(opponent_path=str(tiny / "policy"))
    assert metrics["win_rate"]["tied"] == 13 and not same.server.bodies
    write_rows("rows.jsonl", toy.rows("sft", "train")[:1] * 20)
    repeated = judge(tasteful)
    _, table = repeated.run(output_dir="repeated", temperature=1e-6)
    assert len(table) == 20 and len(repeated.server.bodies) == 2  # one pair in its two orders
    assert len({row["verdict"] for row in table}) == 1


@pytest.mark.parametrize("key", [KEY, None])
def test_the_key_is_never_written_and_an_own_server_needs_none(judge, monkeypatch, capsys, tmp_path, key):
    if key is None:
        monkeypatch.delenv("OPENAI_API_KEY")
    asked = judge(tasteful)
    asked.run()
    seen = capsys.readouterr()
    assert KEY not in seen.out + seen.err
    assert all(KEY.encode() not in (content or b"") for content in contents(tmp_path).values())
    assert asked.server.headers[0]["Authorization"] == f"Bearer {key or 'none'}"


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.fixture
def refused(rows, tiny, capsys, monkeypatch, tmp_path):
    """A function: main(good arguments, changed) ends with one line on stderr, exit code 2, and nothing written."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def refuse(*parts, **changes):
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as end:
            evaluate.main(evaluate_args(tiny, **changes))
        assert end.value.code == 2 and contents(tmp_path) == before
        assert_one_line(capsys.readouterr().err, parts)

    return refuse


LLM = dict(judge="llm", judge_model="m", judge_base_url="http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    "changes, parts",
    [
        *[({name: x}, (f"--{name} {x}",)) for name in ("temperature", "kl_temperature") for x in (0.0, -1.0, NAN, INF)],
        *[({name: 0}, (f"--{name} 0",)) for name in ("num_examples", "response_length", "rollout_micro_batch_size")],
        ({"seed": -1}, ("--seed -1",)),
        ({"response_length": 128}, ("--response_length 128", 128)),
        ({"stop_token": "nonsense"}, ("--stop_token 'nonsense'",)),
        ({"policy_path": None}, ("--policy_path",)),
        *[({name: "no/such/folder"}, (f"--{name} no/such/folder",)) for name in ("policy_path", "opponent_path", "ref_model_path")],
        ({"reward_model_path": "no/such/folder"}, ("--reward_model_path no/such/folder",)),
        ({"reward_model_path": None}, ("--judge reward_model", "--reward_model_path")),
        ({"judge": "gold"}, ("--judge gold", "--dataset rows.jsonl")),
        ({"dataset": "toy:validation", "judge": "gold"}, ("toy:validation",)),
        ({"dataset": "missing.jsonl"}, ("--dataset missing.jsonl", "no such file")),
        ({"judge": "llm"}, ("--judge llm", "--judge_model")),
        ({**LLM, "judge_base_url": None}, ("--judge llm", "OPENAI_API_KEY")),
        ({**LLM, "judge_base_url": "localhost:8000"}, ("--judge_base_url localhost:8000", "http://")),
        ({"judge_model": "m"}, ("--judge_model m", "--judge reward_model")),
        ({"output_dir": "rows.jsonl"}, ("--output_dir rows.jsonl", "is a file")),
        ({"output_dir": "rows.jsonl/deeper", "overwrite": True}, ("--output_dir rows.jsonl/deeper", "is a file")),
        ({"output_dir": "."}, ("--output_dir .", "no evaluation")),
        ({"truncate_token": "nonsense"}, ("--truncate_token 'nonsense'",)),
        ({"truncate_after": 2}, ("--truncate_after 2", "--truncate_token")),
        ({"truncate_after": 6, "truncate_token": "eos"}, ("--truncate_after 6", "--response_length 6")),
    ],
    ids=lambda x: "-".join(f"{k} {v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_bad_arguments(refused, changes, parts):
    refused(*parts, **changes)


@pytest.mark.parametrize(
    "row, parts",
    [
        ({"prompt": "we"}, ("row 14", "'completion'")),
        ({"completion": "we"}, ("row 14", "'prompt'")),
        ({"prompt": "we", "completion": 7}, ("row 14", "'completion'", "7")),
        ({"prompt": "", "completion": "we"}, ("row 14", "empty")),
        ({"prompt": " ".join(["soup"] * 123), "completion": "we"}, ("row 14", "123", "122")),
        ({"prompt": "we", "completion": " ".join(["soup"] * 127)}, ("row 14", "129", "128")),
    ],
    ids=["no completion", "no prompt", "number", "empty", "long prompt", "long completion"],
)
def test_bad_rows(refused, rows, row, parts):
    write_rows("rows.jsonl", [*rows, row])
    refused("--dataset rows.jsonl", *parts)


@pytest.mark.parametrize("flag", ["opponent_path", "ref_model_path", "reward_model_path"])
@pytest.mark.parametrize("change", ["fewer embeddings", "another order"])
def test_models_of_another_vocabulary(refused, tiny, flag, change):
    if change == "another order":
        shutil.copytree(tiny / ("reward" if flag == "reward_model_path" else "policy"), "bad")
        table = json.loads(Path("bad/tokenizer.json").read_text())
        words = table["model"]["vocab"]
        words["soup"], words["hotel"] = words["hotel"], words["soup"]
        Path("bad/tokenizer.json").write_text(json.dumps(table))
    else:
        kind = transformers.GPTNeoXForSequenceClassification if flag == "reward_model_path" else transformers.GPTNeoXForCausalLM
        size = 1000 if flag == "opponent_path" else 50  # an opponent may have fewer; more than the reward model reads it may not
        kind(tiny_config(num_labels=1, vocab_size=size)).save_pretrained("bad")
        toy.tokenizer().save_pretrained("bad")
    flag_of_line = "reward_model_path" if (flag, change) == ("opponent_path", "fewer embeddings") else flag
    refused("vocabulary mismatch", "--policy_path", f"--{flag_of_line} ", **{flag: "bad"})


def test_a_model_folder_is_not_written_into(refused):
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    refused("--output_dir model", "holds a model", output_dir="model", overwrite=True)


def test_without_the_package_openai(refused, monkeypatch):
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    refused("--judge llm", "pip install 'rlhf_details[judge]'", **LLM)


def test_each_policy_has_a_folder_of_its_own_by_default():
    for path, folder in (("models/toy/ppo", "runs/evaluate__models_toy_ppo"), ("/abs/x/", "runs/evaluate__abs_x")):
        assert evaluate.results_folder(evaluate.Args(policy_path=path)) == Path(folder)
    assert evaluate.results_folder(evaluate.Args(policy_path="x", output_dir="mine")) == Path("mine")


def test_command_line_of_the_embedded_task():
    args = utils.parse_args(evaluate.Args, toy.defaults("evaluate"), [])
    assert (args.dataset, args.policy_path, args.judge, args.temperature) == ("toy:test", "models/toy/rloo", "gold", None)
    args = utils.parse_args(evaluate.Args, toy.defaults("evaluate"), ["--opponent_path", "None", "--policy_path", "models/mine"])
    assert (args.policy_path, args.opponent_path, args.ref_model_path) == ("models/mine", None, "models/toy/sft")
    args = utils.parse_args(evaluate.Args, toy.defaults("evaluate"), ["--dataset", "rows.jsonl", "--policy_path", "models/mine"])
    assert args == evaluate.Args(dataset="rows.jsonl", policy_path="models/mine")
