"""Bad input ends with one clear line on stderr and exit code 2, and nothing has been written or changed by then.

Every case starts from arguments that do run (the first test) and spoils one thing, which the line must then be about.
"""

import json
import math
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import accelerate
import huggingface_hub
import pytest
from conftest import launch, ppo_args, rloo_args, tiny_config
from transformers import GPTNeoXForSequenceClassification

from rlhf_details import toy, train_ppo, train_reward, train_rloo, train_sft, utils

SCRIPTS = {"rloo": train_rloo, "ppo": train_ppo, "reward": train_reward, "sft": train_sft}
MODEL = {
    "rloo": "sft_model_path",
    "ppo": "sft_model_path",
    "reward": "sft_model_path",
    "sft": "base_model",
}  # where each script starts from
ROW = {"prompt": "last friday my sister", "completion": "went .", "chosen": "we went .", "rejected": "the soup was ."}
LONG = " ".join(["soup"] * 200)  # 200 tokens; the context of the tiny models is 128
NAN, INF = math.nan, math.inf
DROP = object()  # as a value: the column is left out


def jsonl(change=(), rows=16):
    """A file of good rows, the second of them changed."""
    table = [dict(ROW) for _ in range(rows)]
    if change:
        table[1] = {k: v for k, v in (ROW | change).items() if v is not DROP}
    return "\n".join(map(json.dumps, table)) + "\n"


def picks(change):
    """A file of comparisons of two candidates, the second of them changed."""
    table = [{"prompt": "we went", "candidates": ["we went .", "soup ."], "best": i % 2} for i in range(16)]
    table[1] |= change
    return "\n".join(map(json.dumps, table)) + "\n"


def contents(folder):
    """{path: bytes, or None for a folder} of everything below a folder."""
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in sorted(folder.rglob("*"))}


def good_args(script, tiny, **changes):
    """Arguments of a run of one step on rows.jsonl."""
    if script in ("rloo", "ppo"):
        values = dict(dataset="rows.jsonl", output_dir="out", total_episodes=16, response_length=4, overwrite=False)
        return {"rloo": rloo_args, "ppo": ppo_args}[script](tiny, **(values | changes))
    values = dict(dataset="rows.jsonl", output_dir="out", batch_size=16, response_length=4, run_name="run")
    return SCRIPTS[script].Args(**(values | {MODEL[script]: str(tiny / "policy")} | changes))


def assert_one_line(text, parts):
    """stderr is a single line that starts with "error:" and names every one of `parts`."""
    lines = text.splitlines()
    assert len(lines) == 1, f"{len(lines)} lines on stderr: {lines}"
    assert lines[0].startswith("error: ") and all(str(part) in lines[0] for part in parts), (lines[0], parts)


@pytest.fixture
def refused(in_tmp, tiny, capsys, monkeypatch):
    """A function: main(good arguments, changed) must end as this file says, in a folder with rows.jsonl."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (in_tmp / "rows.jsonl").write_text(jsonl())

    def refuse(script, *parts, start=None, **changes):
        before = contents(in_tmp)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            start() if start else SCRIPTS[script].main(good_args(script, tiny, **changes))
        after = contents(in_tmp)
        assert end.value.code == 2
        assert after == before, f"written: {sorted(p for p in before | after if before.get(p, 0) != after.get(p, 0))}"
        assert_one_line(capsys.readouterr().err, parts)

    return refuse


def cases(*rows):
    """Parameters and their names from rows (scripts, ...), one for each script."""
    flat = [(script, *rest) for scripts, *rest in rows for script in scripts.split()]
    names = ["-".join(str(x) for x in row if isinstance(x, int | float | str) and len(str(x)) < 30) for row in flat]
    return dict(argvalues=flat, ids=names)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_arguments_that_are_spoilt_below_do_run(script, tiny, in_tmp):
    (in_tmp / "rows.jsonl").write_text(jsonl())
    SCRIPTS[script].main(good_args(script, tiny, eval_dataset="rows.jsonl"))
    assert (in_tmp / "out" / "config.json").exists()


# ---- numbers ---------------------------------------------------------------------------------------------------------
ALL, RL = "rloo ppo reward sft", "rloo ppo"
PPO_FLOATS = (
    "kl_target kl_horizon score_clip cliprange_value vf_coef gamma lam target_kl ratio_threshold kl_coef cliprange "
    "missing_eos_penalty adam_eps weight_decay"
).split()


@pytest.mark.parametrize(
    "script, name, value",
    **cases(
        *[(ALL, "temperature", value) for value in (0.0, -1.0, NAN, INF)],
        *[(ALL, "learning_rate", value) for value in (-1e-3, NAN, INF)],
        *[(ALL, "warmup_ratio", value) for value in (-0.1, 1.5, NAN)],
        *[(ALL, name, 0) for name in ("response_length", "micro_batch_size", "batch_size")],
        *[("rloo", "rloo_k", value) for value in (0, -2)],
        *[(RL, name, 0) for name in "rollout_micro_batch_size num_mini_batches num_ppo_epochs".split()],
        *[(RL, name, -1) for name in ("total_episodes", "num_sample_generations", "eval_every")],
        *[("rloo", name, NAN) for name in ("kl_coef", "cliprange", "missing_eos_penalty", "reward_clip_range")],
        *[("rloo", name, -0.1) for name in ("cliprange", "missing_eos_penalty", "reward_clip_range")],
        *[("ppo", name, value) for name in PPO_FLOATS for value in (NAN, INF, -0.1)],
        *[("ppo", name, value) for name in ("gamma", "lam") for value in (1.001, 2)],
        *[("ppo", name, 0) for name in ("kl_target", "kl_horizon")],
        ("ppo", "truncate_after", -1),
        ("rloo", "kl_coef", INF),
        ("reward sft", "num_train_epochs", 0),
        (ALL, "seed", -1),
        *[(ALL, name, -1.0) for name in ("adam_eps", "weight_decay", "max_grad_norm")],
    ),
)
def test_numbers_out_of_range(refused, script, name, value):
    refused(script, f"--{name} ", value, **{name: value})


@pytest.mark.parametrize(
    "script, changes, parts",
    [
        ("rloo", dict(batch_size=18), ("--batch_size 18", "rloo_k 4")),
        ("rloo", dict(num_mini_batches=3), ("--batch_size 16", "num_mini_batches")),
        ("ppo", dict(num_mini_batches=3), ("--batch_size 16", "--num_mini_batches 3")),
        ("ppo", dict(batch_size=2, num_mini_batches=4), ("--batch_size 2", "num_mini_batches")),
        ("ppo", dict(ratio_threshold=1.0), ("--ratio_threshold 1.0", "above 1")),
        ("ppo", dict(kl_coef=0.0, adaptive_kl=True), ("--kl_coef 0", "--adaptive_kl")),
        ("ppo", dict(kl_target=0.0), ("--kl_target 0", "above 0")),
        ("ppo", dict(kl_horizon=0.0), ("--kl_horizon 0", "above 0")),
        ("ppo", dict(truncate_after=2), ("--truncate_after 2", "--truncate_token")),
        ("ppo", dict(truncate_after=4, truncate_token="eos"), ("--truncate_after 4", "--response_length 4")),
        ("ppo", dict(truncate_token="no such token"), ("--truncate_token", "'no such token'")),
        ("ppo", dict(truncate_token="the soup"), ("--truncate_token", "'the soup'")),
        ("ppo", dict(truncate_token=""), ("--truncate_token", "''")),
        ("ppo", dict(response_length=128), ("--response_length 128", "128")),
        ("ppo", dict(stop_token="no such token"), ("--stop_token", "'no such token'")),
        ("ppo", dict(sft_model_path=None), ("--sft_model_path",)),
        ("ppo", dict(reward_model_path=None), ("--reward_model_path",)),
        ("reward", dict(batch_size=64), ("--batch_size 64", "16 rows", "rows.jsonl")),
        ("sft", dict(batch_size=64), ("--batch_size 64", "16 rows", "rows.jsonl")),
        ("rloo", dict(rloo_k=1), ("--rloo_k 1",)),
        ("rloo", dict(rloo_k=1, token_level_kl=True), ("--rloo_k 1", "--normalize_advantage")),
        ("rloo", dict(rloo_k=1, normalize_advantage=True), ("--rloo_k 1", "--token_level_kl")),
        ("rloo", dict(response_length=128), ("--response_length 128", "128")),
        ("sft", dict(base_model="scratch", hidden_size=30), ("--hidden_size 30", "--num_heads 4")),
        ("rloo", dict(stop_token="no such token"), ("--stop_token", "'no such token'")),
        ("rloo", dict(sft_model_path=None), ("--sft_model_path",)),
        ("rloo", dict(reward_model_path=None), ("--reward_model_path",)),
        ("reward", dict(sft_model_path=None), ("--sft_model_path",)),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(f"{k}={v}" for k, v in x.items()) if type(x) is dict else "",
)
def test_arguments_that_contradict_each_other(refused, script, changes, parts):
    refused(script, *parts, **changes)


@pytest.mark.parametrize("script, batch_size, k", [("rloo", 12, 4), ("ppo", 15, 1), ("reward", 15, 1), ("sft", 15, 1)])
def test_batch_that_two_processes_cannot_share(refused, monkeypatch, script, batch_size, k):
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    monkeypatch.setattr(utils, "check_processes", lambda accelerator: None)  # these two were never launched
    changes = dict(rloo_k=k) if script == "rloo" else {}
    refused(script, f"--batch_size {batch_size}", "2", "processes", batch_size=batch_size, **changes)


def test_minibatches_that_two_processes_cannot_share(refused, monkeypatch):
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    monkeypatch.setattr(utils, "check_processes", lambda accelerator: None)  # these two were never launched
    refused("ppo", "--batch_size 12", "4 * 2", batch_size=12, num_mini_batches=4)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed here")
@pytest.mark.parametrize("script", SCRIPTS)
def test_attention_kernel_that_is_not_installed(refused, script):
    refused(script, "flash_attention_2", attn_implementation="flash_attention_2")


@pytest.mark.parametrize("name", ["a/b", "../escaped", "..", ".", "/absolute"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_run_name_that_is_no_plain_folder_name(refused, script, name, tmp_path):
    name = f"{tmp_path}/absolute" if name == "/absolute" else name
    refused(script, "--run_name", name, run_name=name)


# ---- data ------------------------------------------------------------------------------------------------------------
WRONG = {"dropped": DROP, "number": 7, "null": None, "list": ["a"]}  # what may stand where a string is due


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(
    "script, label, text, parts",
    **cases(
        (ALL, "missing", None, ("no such file",)),
        (ALL, "empty", "", ("no rows",)),
        (ALL, "blank lines", "\n\n  \n", ("no rows",)),
        (ALL, "broken JSON", jsonl(rows=2) + '{"prompt": \n' + jsonl(rows=13), ("line 3",)),
        (ALL, "row 1 is a number", "3\n" + jsonl(rows=15), ("row 1",)),
        (ALL, "row 2 is a number", jsonl(rows=1) + "3\n" + jsonl(rows=14), ("row 2",)),
        (ALL, "not UTF-8", b"\xff" + jsonl().encode(), ("UTF-8",)),
        *[(ALL, f"prompt {kind}", jsonl({"prompt": x}), ("row 2", "'prompt'")) for kind, x in WRONG.items()],
        *[("reward", f"chosen {kind}", jsonl({"chosen": x}), ("row 2", "'chosen'")) for kind, x in WRONG.items()],
        *[("reward", f"rejected {kind}", jsonl({"rejected": x}), ("row 2", "'rejected'")) for kind, x in WRONG.items()],
        *[("sft", f"completion {kind}", jsonl({"completion": x}), ("row 2", "'completion'")) for kind, x in WRONG.items()],
        ("sft", "text null", '{"text": "we went ."}\n{"text": null}\n', ("row 2", "'text'")),
        (RL, "prompt empty", jsonl({"prompt": ""}), ("row 2", "empty")),
        (RL, "prompt long", jsonl({"prompt": LONG}), ("row 2", "200 tokens")),
        ("reward", "prompt long", jsonl({"prompt": LONG}), ("row 2", "205 tokens", "128")),
        ("reward", "rejected long", jsonl({"rejected": LONG}), ("row 2", "205 tokens", "128")),
        ("sft", "completion long", jsonl({"completion": LONG}), ("row 2", "205 tokens", "128")),
        ("reward", "candidates fewer", picks({"candidates": ["we ."], "best": 0}), ("row 2", "'candidates'")),
        ("reward", "candidates more", picks({"candidates": ["we .", "we .", "."]}), ("row 2", "'candidates'")),
        ("reward", "candidates number", picks({"candidates": ["we .", 3]}), ("row 2", "'candidates'")),
        ("reward", "candidates string", picks({"candidates": "we"}), ("row 2", "'candidates'")),
        ("reward", "candidates long", picks({"candidates": ["we .", LONG]}), ("row 2", "203 tokens", "128")),
        (
            "reward",
            "one candidate",
            '{"prompt": "we", "candidates": ["."], "best": 0}\n' * 16,
            ("row 1", "'candidates'"),
        ),
        ("reward", "no candidate", '{"prompt": "we", "candidates": [], "best": 0}\n' * 16, ("row 1",)),
        *[("reward", f"best {x!r}", picks({"best": x}), ("row 2", "'best'", repr(x))) for x in (2, -1, True, 0.5, "0")],
        ("reward", "best null", picks({"best": None}), ("row 2", "'best'")),
    ),
)
def test_data_files(refused, script, label, text, parts, flag):
    if text is not None:
        Path("bad.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(script, f"--{flag} bad.jsonl", *parts, **{flag: "bad.jsonl"})


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
@pytest.mark.parametrize("name", ["rows.csv", "bad.json", "bad.parquet", "folder", "rows.txt"])
@pytest.mark.parametrize("script", RL.split())
def test_files_that_the_datasets_library_reads(refused, script, name, flag):
    Path("folder").mkdir()
    Path("rows.csv").write_text("question\nwe went\n")
    for file in ("bad.json", "bad.parquet", "rows.txt"):
        Path(file).write_text('{"prompt": ')
    refused(script, f"--{flag} {name}", "'prompt'" if name == "rows.csv" else "", **{flag: name})


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_split_that_the_embedded_task_does_not_have(refused, script, flag):
    refused(script, "toy:validation", **{flag: "toy:validation"})


def test_held_out_comparisons_with_another_number_of_candidates(refused):
    row = json.dumps({"prompt": "we", "candidates": ["we .", "soup .", "we went ."], "best": 0}) + "\n"
    Path("three.jsonl").write_text(row * 16)
    refused("reward", "--eval_dataset three.jsonl", "3", "2", eval_dataset="three.jsonl")


@pytest.mark.parametrize(
    "text, part",
    [
        (None, "no such file"),
        (jsonl({"completion": 7}), "row 2"),
        (jsonl({"completion": LONG}), "row 2"),
    ],
    ids=["missing", "number", "long"],
)
def test_reference_responses_of_the_reward_model(refused, text, part):
    if text is not None:
        Path("bad.jsonl").write_text(text)
    refused("reward", "--reference_dataset bad.jsonl", part, reference_dataset="bad.jsonl")


@pytest.mark.parametrize("prompt, part", [("", "empty"), (" ".join(["soup"] * 100), "100 tokens")], ids=["empty", "long"])
def test_prompts_that_normalisation_cannot_sample_from(refused, prompt, part):
    Path("bad.jsonl").write_text(jsonl({"prompt": prompt}))
    changes = dict(dataset="bad.jsonl", normalization="gain_bias", response_length=53)
    refused("reward", "--dataset bad.jsonl", "row 2", part, **changes)


def test_held_out_prompt_that_leaves_no_room_for_the_response_of_rouge(refused):
    Path("bad.jsonl").write_text(jsonl({"prompt": " ".join(["soup"] * 100)}))
    refused("sft", "--eval_dataset bad.jsonl", "row 2", "--response_length 53", eval_dataset="bad.jsonl", response_length=53)


# ---- models ----------------------------------------------------------------------------------------------------------
def without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def without_eos(folder):
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / file).exists():
            table = json.loads((folder / file).read_text())
            (folder / file).write_text(json.dumps({k: v for k, v in table.items() if k != "eos_token"}))


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": ')


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def truncated_header(folder):
    (folder / "model.safetensors").write_bytes(b"\x10")


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def removed(folder):
    shutil.rmtree(folder)


SPOILERS = [without_tokenizer, without_eos, broken_config, truncated, truncated_header, without_weights, removed]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("script", SCRIPTS)
def test_policy_folder(refused, tiny, script, spoil):
    spoil(Path(shutil.copytree(tiny / "policy", "policy")))
    part = "tokenizer" if "tokenizer" in spoil.__name__ else "EOS" if "eos" in spoil.__name__ else ""
    refused(script, f"--{MODEL[script]} policy: ", part, **{MODEL[script]: "policy"})


@pytest.mark.parametrize("spoil", SPOILERS[2:], ids=lambda f: f.__name__)
@pytest.mark.parametrize("script", RL.split())
def test_reward_folder(refused, tiny, script, spoil):
    spoil(Path(shutil.copytree(tiny / "reward", "reward")))
    refused(script, "--reward_model_path reward: ", reward_model_path="reward")


@pytest.mark.parametrize("script", SCRIPTS)
def test_model_path_that_no_hub_name_can_be(refused, script, tmp_path):
    missing = str(tmp_path / "no" / "such" / "folder")
    refused(script, f"--{MODEL[script]} {missing}", **{MODEL[script]: missing})


@pytest.mark.parametrize("script", RL.split())
def test_language_model_as_reward_model(refused, script, tiny):
    folder = tiny / "policy"
    refused(script, f"--reward_model_path {folder}", "not a trained reward model", reward_model_path=str(folder))


@pytest.mark.parametrize("script", RL.split())
def test_reward_model_with_two_labels(refused, script, tiny):
    GPTNeoXForSequenceClassification(tiny_config(num_labels=2)).save_pretrained("reward")
    refused(script, "--reward_model_path reward", "num_labels", reward_model_path="reward")


@pytest.mark.parametrize("script", RL.split())
def test_reward_model_of_a_smaller_vocabulary(refused, script, tiny):
    GPTNeoXForSequenceClassification(tiny_config(num_labels=1, vocab_size=50)).save_pretrained("reward")
    toy.tokenizer().save_pretrained("reward")
    parts = ("vocabulary", f"--sft_model_path {tiny / 'policy'}", "--reward_model_path reward", 50)
    refused(script, *parts, reward_model_path="reward")


@pytest.mark.parametrize("script", RL.split())
def test_reward_model_of_fewer_tokens_without_a_tokenizer(refused, script, tiny):
    GPTNeoXForSequenceClassification(tiny_config(vocab_size=16, num_labels=1)).save_pretrained("reward")
    refused(script, "vocabulary", "--reward_model_path reward", reward_model_path="reward")


# ---- the output folder -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("holds", ["another model", "foreign files", "foreign arguments", "broken arguments"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_output_folder_that_is_not_ours(refused, tiny, script, holds):
    other = vars(good_args(script, tiny, learning_rate=0.123))
    about = {"another model": json.dumps(other), "foreign arguments": "[1]", "broken arguments": "{"}.get(holds)
    Path("out").mkdir()
    Path("out/model.safetensors").write_bytes(b"precious")
    if about:
        Path("out/training_args.json").write_text(about)
    refused(script, "--output_dir out", *(["learning_rate", 0.123] if holds == "another model" else []))


@pytest.mark.parametrize("folder", ["file", "file/out", "file/deeper/out"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_output_folder_where_there_is_a_file(refused, script, folder):
    Path("file").write_text("precious")
    refused(script, f"--output_dir {folder}", output_dir=folder)


@pytest.mark.parametrize("script", SCRIPTS)
def test_output_folder_that_is_a_file_is_not_overwritten(refused, script):
    Path("file").write_text("precious")
    refused(script, "--output_dir file", output_dir="file", overwrite=True)


# ---- TOML and the command line ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, parts",
    [
        (None, ()),
        ("batch_sise = 3", ("'batch_sise'",)),
        ("[optimiser]\nlearning_rate = 1e-3", ("'optimiser'",)),
        ("batch_size = = 3", ("line 1",)),
        (b"# \xff", ()),
        ('learning_rate = "fast"', ("learning_rate", "fast")),
        ("batch_size = 1.5", ("batch_size", "1.5")),
        ("batch_size = [16, 32]", ("batch_size", "16")),
        ("learning_rate = true", ("learning_rate",)),
        ('overwrite = "yes"', ("overwrite", "yes")),
        ("[batch_size]\na = 1", ("batch_size",)),
        ('lr_schedule = "square"', ("lr_schedule", "square")),
    ],
    ids=lambda x: repr(x) if isinstance(x, str | bytes | None) else "",
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_toml_file(refused, script, text, parts):
    if text is not None:
        Path("run.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    argv = ["--dataset", "rows.jsonl", "--config", "run.toml"]
    defaults = toy.defaults(f"train_{script}")
    refused(script, "--config run.toml", *parts, start=lambda: utils.parse_args(SCRIPTS[script].Args, defaults, argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["--no_such_flag", "1"],
        ["--batch_size", "many"],
        ["--batch_size", "1.5"],
        ["--learning_rate"],
        ["--lr_schedule", "square"],
        ["stray"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_command_line(in_tmp, capsys, script, argv):
    """Here tyro explains itself, in a box of several lines."""
    with pytest.raises(SystemExit) as end:
        utils.parse_args(SCRIPTS[script].Args, toy.defaults(f"train_{script}"), ["--dataset", "rows.jsonl", *argv])
    assert end.value.code == 2 and not contents(in_tmp)
    text = capsys.readouterr().err
    assert argv[0].lstrip("-") in text.replace("-", "_") and "Traceback" not in text


# ---- the embedded task: nothing is trained before everything that can be checked has been ----------------------------
@pytest.mark.parametrize(
    "script, changes",
    [
        ("rloo", dict(eval_dataset="missing.jsonl")),
        ("reward", dict(eval_dataset="missing.jsonl")),
        ("rloo", dict(batch_size=18)),
        ("ppo", dict(eval_dataset="missing.jsonl")),
        ("ppo", dict(batch_size=18, num_mini_batches=4)),
        ("ppo", dict(gamma=1.5)),
        ("ppo", dict(truncate_after=1)),
    ],
    ids=str,
)
def test_embedded_task_is_checked_before_its_stages_are_trained(refused, monkeypatch, script, changes):
    monkeypatch.setattr(toy.subprocess, "run", lambda *a, **k: pytest.fail("a stage was started"))
    models = dict(sft_model_path="models/sft") | (dict(reward_model_path="models/rm") if script in RL else {})
    name, value = next(iter(changes.items()))
    refused(script, f"--{name} ", value, dataset="toy", **models, **changes)


@pytest.mark.parametrize("script", RL.split())
def test_stage_that_fails_leaves_the_message_to_itself(in_tmp, tiny, monkeypatch, script):
    monkeypatch.setattr(toy.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2))
    with pytest.raises(SystemExit) as end:
        SCRIPTS[script].main(good_args(script, tiny, dataset="toy", sft_model_path="models/toy/sft"))
    assert end.value.code == 2 and not contents(in_tmp)


# ---- plain python ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "script, flags, parts",
    [
        pytest.param(
            "train_sft.py", ["--dataset", "missing.jsonl"], ["--dataset missing.jsonl", "no such file"], marks=pytest.mark.slow
        ),
        pytest.param("train_reward.py", ["--dataset", "bad.jsonl"], ["--dataset bad.jsonl", "line 3"], marks=pytest.mark.slow),
        ("train_rloo.py", ["--dataset", "bad.jsonl", "--batch_size", "18"], ["--batch_size 18", "rloo_k 4"]),
        ("train_ppo.py", ["--dataset", "bad.jsonl", "--gamma", "1.5"], ["--gamma 1.5", "at most 1"]),
    ],
    ids=["missing", "json", "batch", "gamma"],
)
def test_plain_python(in_tmp, tiny, script, flags, parts):
    (in_tmp / "bad.jsonl").write_text(jsonl(rows=2) + "{\n")
    if script != "train_sft.py":
        flags = [*flags, "--sft_model_path", tiny / "policy", "--output_dir", "out"]
    if script in ("train_rloo.py", "train_ppo.py"):
        flags = [*flags, "--reward_model_path", tiny / "reward", *(["--rloo_k", 4] if script == "train_rloo.py" else [])]
    before = contents(in_tmp)
    result = launch(script, flags, cwd=in_tmp, HF_HUB_OFFLINE="1")
    assert result.returncode == 2 and "Traceback" not in result.stderr + result.stdout
    assert contents(in_tmp) == before
    assert_one_line(result.stderr, parts)


# ---- what --overwrite must never take with it --------------------------------------------------------------------------
@pytest.mark.parametrize("script", RL.split())
def test_output_folder_that_holds_folders(refused, script):
    Path("precious/inner").mkdir(parents=True)
    refused(script, "--output_dir precious", output_dir="precious", overwrite=True)


@pytest.mark.parametrize("folder", [".", "..", "own/policy", "own"])
@pytest.mark.parametrize("script", RL.split())
def test_output_folder_that_is_or_holds_an_input(refused, tiny, script, folder):
    shutil.copytree(tiny, "own")
    refused(script, f"--output_dir {folder}", output_dir=folder, sft_model_path="own/policy", overwrite=True)


@pytest.mark.parametrize("script", RL.split())
def test_run_name_that_exists(refused, script):
    Path("runs/mine").mkdir(parents=True)
    refused(script, "--run_name mine", run_name="mine")


@pytest.mark.parametrize("script", RL.split())
def test_a_model_folder_of_the_users_own_is_never_made_up(in_tmp, tiny, capsys, monkeypatch, script):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as end:
        SCRIPTS[script].main(good_args(script, tiny, dataset="toy", sft_model_path="models/mistyped"))
    assert end.value.code == 2 and not contents(in_tmp) and "models/mistyped" in capsys.readouterr().err


@pytest.mark.parametrize("script", RL.split())
def test_prompt_longer_than_the_reward_models_context(refused, script, tiny):
    shutil.copytree(tiny, "own")
    config = json.loads(Path("own/reward/config.json").read_text()) | {"max_position_embeddings": 20}
    Path("own/reward/config.json").write_text(json.dumps(config))
    Path("bad.jsonl").write_text(jsonl({"prompt": " ".join(["soup"] * 13)}))
    refused(script, "--dataset bad.jsonl", "row 2", "12", dataset="bad.jsonl", response_length=8, reward_model_path="own/reward")
