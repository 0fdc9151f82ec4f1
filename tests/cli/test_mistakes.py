"""A typical mistake ends with one line on stderr and exit code 2, and nothing has been written or changed by then.

Every case starts from arguments that do run (the first test) and spoils one thing, which the line must be about.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import PAGES, REWARDED, SCRIPTS, edit_json, launch, swap_words, tiny_config
from short_runs import MODEL, contents, one_step
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForSequenceClassification

from rlhf_details import toy

RL, TRAIN = list(PAGES), [*PAGES, "train_reward", "train_dpo", "train_sft"]
ROW = {"prompt": "last friday my sister", "completion": "went .", "chosen": "we went .", "rejected": "the soup was ."}
CHAT = [{"role": "user", "content": "hi"}]
SOUPS, LONG = (" ".join(["soup"] * n) for n in (100, 200))  # The context of the tiny models is 128 tokens.


def jsonl(change=(), rows=16):
    """The text of a file of good rows, the second of them changed. None drops a column."""
    table = [dict(ROW) for _ in range(rows)]
    table[1] = {k: v for k, v in (ROW | dict(change)).items() if v is not None}
    return "\n".join(map(json.dumps, table)) + "\n"


@pytest.fixture
def refused(in_tmp, tiny, fails):
    """refused(script, *words, **changes): main with good arguments, changed, must end as this file says."""
    Path("rows.jsonl").write_text(jsonl())

    def refuse(script, *words, **changes):
        before = contents(in_tmp)
        line = fails(SCRIPTS[script].main, one_step(script, tiny, **changes))
        assert contents(in_tmp) == before and all(str(word) in line for word in words), (line, words)
        return line

    return refuse


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_arguments_that_are_spoilt_below_do_run(script, tiny, in_tmp):
    Path("rows.jsonl").write_text(jsonl())
    SCRIPTS[script].main(one_step(script, tiny))
    assert any(Path("out", name).exists() for name in ("summary.json", "config.json"))


# ---- arguments that contradict each other ----------------------------------------------------------------------------
PPO, SHARE = ["train_ppo"], dict(divergence="jsd", on_policy_share=0.5)


def cases(*rows):
    """Parameters of (script or scripts, ...), one for each script."""
    return [(x, *rest) for scripts, *rest in rows for x in ([scripts] if isinstance(scripts, str) else scripts)]


@pytest.mark.parametrize(
    "script, changes, words",
    cases(
        (SCRIPTS, dict(dataset="missing.jsonl"), ["--dataset missing.jsonl: no such file"]),
        ("train_rloo", dict(batch_size=18), ["--batch_size 18: not divisible by", "rloo_k"]),
        (PPO, dict(num_mini_batches=3), ["--batch_size 16: not divisible by", "num_mini_batches"]),
        (
            ["train_reward", "train_dpo", "train_sft"],
            dict(batch_size=64),
            ["--batch_size 64: more than the 16 rows", "rows.jsonl"],
        ),
        (["train_reward", "train_dpo"], dict(dataset="toy-sum"), ["--dataset toy-sum: has no comparisons"]),
        (
            ["train_reward", "train_dpo"],
            dict(dataset="toy", prompt_template="{prompt}"),
            ["--prompt_template {prompt}: not for the embedded task"],
        ),
        ("train_rloo", dict(rloo_k=1), ["--rloo_k 1", "--token_level_kl", "--normalize_advantage"]),
        ("train_rloo", dict(rloo_k=1, token_level_kl=True), ["--rloo_k 1", "--normalize_advantage"]),
        (
            "evaluate",
            dict(chat_template_kwargs="[1]"),
            ["--chat_template_kwargs [1]: cannot be read"],
        ),
        ("evaluate", dict(template_date="tomorrow"), ["--template_date tomorrow: cannot be read (Invalid isoformat"]),
        ("train_grpo", dict(group_size=1), ["--group_size 1", "at least 2"]),
        ("train_grpo", dict(soft_overlong=300), ["--soft_overlong 300", "--response_length"]),
        ("train_grpo", dict(kl_times_ratio=True, objective="gspo"), ["--kl_times_ratio", "--objective gspo"]),
        ("train_grpo", dict(entropy_target=0.3), ["--entropy_target 0.3", "--entropy_coef"]),
        ("train_grpo", dict(cliprange=0.2, objective="cispo"), ["--cliprange 0.2", "--cliprange_high"]),
        ("train_sft", dict(base_model="scratch", hidden_size=30), ["--hidden_size 30", "--num_heads 4"]),
        (PPO, dict(gamma=1.5), ["--gamma 1.5: must be at most 1"]),
        ("train_distill", dict(gamma=1.5), ["--gamma 1.5: must be at most 1"]),
        ("train_distill", dict(beta=1.5), ["--beta 1.5: must be at most 1"]),
        ("train_distill", dict(on_policy_share=2.0), ["--on_policy_share 2.0: must be at most 1"]),
        ("train_distill", dict(beta=1.0), ["--beta 1.0: needs --divergence jsd"]),
        ("train_distill", dict(on_policy_share=0.5), ["--on_policy_share 0.5: needs --divergence jsd"]),
        ("train_distill", SHARE | dict(overlap=True), ["--on_policy_share 0.5", "no --overlap"]),
        ("train_distill", SHARE | dict(responses_per_prompt=2), ["--on_policy_share 0.5", "no --overlap"]),
        ("train_distill", dict(gamma=0.5, divergence="jsd"), ["--gamma 0.5: needs --divergence sampled"]),
        ("train_dpo", dict(label_smoothing=0.2, loss="ipo"), ["--label_smoothing 0.2: IPO has none"]),
        (RL, dict(sampler_cap=0.5), ["--sampler_cap 0.5: must be at least 1"]),
        ([*RL, "evaluate"], dict(sampler="vllm", vllm_server="localhost:8000"), ["--vllm_server localhost:8000: must"]),
        ("train_distill", dict(responses_per_prompt=3), ["--batch_size 16: not divisible by responses_per_prompt"]),
        (PPO, dict(ratio_threshold=1.0), ["--ratio_threshold 1.0: must be above 1"]),
        (PPO, dict(kl_coef=0.0, adaptive_kl=True), ["--adaptive_kl"]),
        (PPO, dict(kl_horizon=3.0, adaptive_kl=True), ["--adaptive_kl", "kl_horizon"]),
        (PPO, dict(truncate_after=2), ["--truncate_after 2: needs a truncate_token"]),
        (PPO, dict(truncate_token="the soup"), ["--truncate_token 'the soup': not one token"]),
        (RL, dict(stop_token="no such token"), ["--stop_token 'no such token': not one token"]),
        (RL, dict(response_length=128), ["--response_length 128: leaves no room for a prompt"]),
        ([*RL, "train_reward", "train_dpo"], dict(sft_model_path=None), ["--sft_model_path: required"]),
        (REWARDED, dict(reward_model_path=None), ["--reward_model_path or --reward_fn: one of them is required"]),
    ),
    ids=str,
)
def test_arguments_that_contradict_each_other(refused, script, changes, words):
    refused(script, *words, **changes)


@pytest.mark.parametrize("url", ["http://me:SECRET@host:1/v1", "https://SECRET@host", "http://host/v1?key=SECRET"])
@pytest.mark.parametrize("script", [*RL, "evaluate"])
def test_a_url_with_a_secret_is_refused_without_showing_it(refused, script, url):
    for flag, variable, more in (
        ("vllm_server", "VLLM_API_KEY", dict(sampler="vllm")),
        ("judge_base_url", "OPENAI_API_KEY", dict(judge="llm", judge_model="m")),
    ):
        if flag == "vllm_server" or script == "evaluate":
            line = refused(script, f"--{flag}: its URL", variable, **{flag: url}, **more)
            assert "SECRET" not in line


@pytest.mark.parametrize("script", TRAIN)
def test_a_batch_that_two_processes_cannot_share(refused, monkeypatch, script):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(script, "--batch_size 15: not divisible by", "processes", batch_size=15)


# ---- data ------------------------------------------------------------------------------------------------------------
REWARDING, GAIN = ["train_reward", "train_dpo"], dict(normalization="gain_bias", response_length=53)


@pytest.mark.parametrize(
    "script, text, changes, words",
    cases(
        (SCRIPTS, "\n\n  \n", {}, ["no rows"]),
        (TRAIN, jsonl(rows=2) + '{"prompt": \n', {}, ["line 4 column 1"]),
        (SCRIPTS, jsonl({"prompt": 7}), {}, ["row 2", "'prompt'"]),
        ("train_sft", jsonl({"completion": None, "chosen": None}), {}, ["row 2", "'completion'"]),
        (REWARDING, jsonl({"rejected": None}), {}, ["row 2", "'rejected'"]),
        ([*RL, "evaluate"], jsonl({"prompt": ""}), {}, ["row 2", "empty"]),
        ([*RL, "evaluate"], jsonl({"prompt": LONG}), {}, ["row 2 with 200: ", "124"]),
        (REWARDING, jsonl({"rejected": LONG}), {}, ["row 2 with 205: ", "128", "--max_length"]),
        ("train_sft", jsonl({"completion": LONG}), {}, ["row 2 with 205: ", "128", "--max_length"]),
        ("train_rloo", jsonl({"prompt": CHAT}), {}, ["row 2: the chat template refuses", "chat_template is not set"]),
        ("train_distill", jsonl(dict(prompt=[4, 5], completion=[])), SHARE, ["completion of row 2 is empty"]),
        ("train_distill", jsonl({"completion": None, "chosen": None}), SHARE, ["row 2: has no column 'completion'"]),
        ("train_reward", jsonl({"prompt": ""}), GAIN, ["row 2", "empty"]),
        ("train_reward", jsonl({"prompt": SOUPS}), GAIN, ["row 2 with 100: "]),
        (REWARDED, jsonl({"prompt": SOUPS}), dict(reward_model_path="short"), ["row 2 with 100: ", "16"]),
    ),
)
def test_a_row_that_is_wrong_is_named(refused, tiny, script, text, changes, words):
    shutil.copytree(tiny / "reward", "short")
    edit_json("short/config.json", max_position_embeddings=20)
    Path("bad.jsonl").write_text(text)
    refused(script, *words, dataset="bad.jsonl", **changes)
    if script != "evaluate" and not changes:
        refused(script, *words, eval_dataset="bad.jsonl")


@pytest.mark.parametrize(
    "script, flag, change, words",
    [
        ("train_reward", "reference_dataset", dict(completion=LONG), ["row 2"]),
        ("train_sft", "eval_dataset", dict(prompt=SOUPS), ["row 2", "--response_length 53"]),  # ROUGE needs room.
    ],
)
def test_a_row_of_another_data_set_is_named_as_well(refused, script, flag, change, words):
    Path("bad.jsonl").write_text(jsonl(change))
    refused(script, f"--{flag} bad.jsonl", *words, **{flag: "bad.jsonl"}, response_length=53)
    refused(script, f"--{flag} none.jsonl: no such file", **{flag: "none.jsonl"})


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_that_is_not_there_or_has_no_tokenizer(refused, tiny, script):
    flag = MODEL[script]
    refused(script, f"--{flag} no/such/folder: cannot be read (", **{flag: "no/such/folder"})
    shutil.copytree(tiny / "policy", "policy", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(script, f"--{flag} policy: has no tokenizer", **{flag: "policy"})


@pytest.mark.parametrize("script", REWARDED)
def test_a_reward_model_that_is_none(refused, tiny, script):
    folder = str(tiny / "policy")
    refused(script, f"--reward_model_path {folder}: not a trained reward model", reward_model_path=folder)
    config = tiny_config(num_labels=1, vocab_size=50)
    GPTNeoXForSequenceClassification(config).save_pretrained("small"), toy.tokenizer().save_pretrained("small")
    refused(
        script, "--reward_model_path small: its tokenizer has", "the model 50 embeddings", reward_model_path="small"
    )


def test_a_teacher_that_is_none(refused, tiny):
    """It is missing, no model, without a tokenizer, or has other tokens. [DISTILL-5]"""
    refused("train_distill", "--teacher_model_path: required with --dataset rows.jsonl", teacher_model_path=None)
    refused("train_distill", "--teacher_model_path no/such: cannot be read (", teacher_model_path="no/such")
    folder = str(tiny / "reward")
    refused("train_distill", f"--teacher_model_path {folder}: not a causal language", teacher_model_path=folder)
    shutil.copytree(tiny / "teacher", "teacher")
    swap_words("teacher", "soup", "menu")
    said = "--teacher_model_path teacher: 2 tokens are not those of --sft_model_path, such as 'menu'"
    refused("train_distill", said, teacher_model_path="teacher")
    for name in ("padded", "student"):  # Both tokenizers have a token to pad with, and one model has its embedding.
        shutil.copytree(tiny / "teacher", name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        tokenizer.save_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained("student")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained("student")
    said = f"--teacher_model_path padded: has logits of {len(tokenizer) - 1} tokens"
    refused("train_distill", said, sft_model_path="student", teacher_model_path="padded")


def test_what_a_teacher_cannot_read(refused, tiny):
    """A template of --teacher_prompt_template without a column, one that is too long, and prompts of token ids."""
    ours = dict(teacher_model_path=str(tiny / "teacher"))
    said = "--dataset rows.jsonl: row 1: --teacher_prompt_template 'right: {anwser}': names no column in braces"
    refused("train_distill", said, teacher_prompt_template="right: {anwser}", **ours)
    said = "--dataset rows.jsonl: ", "teacher's prompts have more than"
    refused("train_distill", *said, teacher_prompt_template="the soup " * 200 + "{prompt}", **ours)
    Path("ids.jsonl").write_text(json.dumps({"prompt": [5, 6, 7]}) + "\n")
    said = "--dataset ids.jsonl: row 1: --teacher_prompt_template: the prompt is token ids"
    refused("train_distill", said, dataset="ids.jsonl", teacher_prompt_template="{prompt} .", **ours)


# ---- the embedded task: nothing is trained before everything that can be checked has been ----------------------------
@pytest.mark.parametrize(
    "script, changes",
    cases(
        ([*RL, "train_reward", "train_dpo"], dict(eval_dataset="missing.jsonl")),
        ("train_rloo", dict(eval_dataset=__file__.replace("test_mistakes.py", "../../LICENSE"))),
    ),
    ids=str,
)
def test_arguments_are_checked_before_the_embedded_tasks_stages_are_trained(refused, monkeypatch, script, changes):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a stage was started"))
    name, value = next(iter(changes.items()))
    refused(script, f"--{name} {value}", dataset="toy", sft_model_path="models/toy/sft", **changes)


# ---- from the shell --------------------------------------------------------------------------------------------------
def test_the_script_itself_ends_with_the_line_and_the_exit_code(in_tmp, tiny):
    flags = ["--sft_model_path", tiny / "policy", "--reward_model_path", tiny / "reward", "--rloo_k", 4]
    done = launch("train_rloo.py", [*flags, "--batch_size", 18], cwd=in_tmp)
    assert done.returncode == 2 and not contents(in_tmp)
    assert done.stderr.startswith("error: --batch_size 18: ") and done.stderr.count("\n") == 1, done.stderr
