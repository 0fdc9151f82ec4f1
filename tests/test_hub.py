"""The model card, and what --push_to_hub sends to a stand-in for the Hub; what fails there loses nothing."""

import contextlib
import dataclasses
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import ppo_args, rloo_args
from hub_server import Hub, point_at
from test_stages import reward_args, sft_args, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_details import hub, toy, train_ppo, train_reward, train_rloo, train_sft, utils


@pytest.fixture
def server(monkeypatch):
    with Hub() as server:
        point_at(monkeypatch, server)
        yield server


def stage_rows(kind):
    rows = toy.rows("sft", "train")[:16]
    if kind == "reward":
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "we ."} for row in rows]
    write_rows("rows.jsonl", rows)


def start(kind, tiny, **changes):
    """Trains with one of the four scripts; returns its arguments."""
    script = {"rloo": train_rloo, "ppo": train_ppo, "sft": train_sft, "reward": train_reward}[kind]
    stage_rows(kind)
    make = {"rloo": rloo_args, "ppo": ppo_args, "reward": reward_args}
    args = sft_args(**changes) if kind == "sft" else make[kind](tiny, **changes)
    script.main(args)
    return args


def read_card(text):
    """(front matter, body) of a model card."""
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


KINDS = pytest.mark.parametrize("kind", ["rloo", "ppo", "sft", "reward"])


@KINDS
def test_every_model_has_a_card_whose_snippet_runs_and_whose_command_parses(tiny, in_tmp, kind):
    args = start(kind, tiny, output_dir="models/out")
    facts, body = read_card(Path("models/out/README.md").read_text())
    assert {kind, "rlhf", "rlhf_details"} == set(facts["tags"]) and facts["library_name"] == "transformers"
    assert facts["pipeline_tag"] == ("text-classification" if kind == "reward" else "text-generation")
    assert "base_model" not in facts and "datasets" not in facts  # both are on this disk
    snippet, arguments, citation = (re.search(rf"```{kind}\n(.*?)```", body, re.S)[1] for kind in ("python", "json", "bibtex"))
    (command,) = re.findall(r"```\n(accelerate.*?)\n```", body)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(snippet, {})
    assert printed.getvalue().strip()
    if kind == "reward":
        float(printed.getvalue())
    words = shlex.split(command)
    assert words[:5] == ["accelerate", "launch", "--num_processes", "1", f"rlhf_details/train_{kind}.py"]
    parsed = utils.parse_args(type(args), toy.defaults(f"train_{kind}"), words[5:])
    assert dataclasses.replace(args, overwrite=False, resume=False, config=None) == parsed
    assert json.loads(arguments) == json.loads(json.dumps(dataclasses.asdict(args)))
    last = json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[-1])
    for name, value in last.items():
        assert name.startswith("time/") or f"| `{name}` | {value:.6g} |" in body, name
    number = {"rloo": "2402.14740", "ppo": "2403.17031", "sft": "2203.02155", "reward": "2009.01325"}[kind]
    assert f"arXiv:{number}" in citation and args.dataset in body and "not tracked online" in body


def test_the_cards_command_says_what_the_embedded_tasks_would_have_otherwise(in_tmp):
    for values in (
        dict(reward_model_path=None, reward_fn=("toy:f",), kl_coef=0.03),
        dict(share_prompts=False, track=True, wandb_tags=("a b", "c"), reward_fn_weights=(-1.0, 2.0), stop_token="it's"),
        dict(dataset="toy-sum"),
        dict(dataset="a.jsonl"),
    ):
        args = train_rloo.Args(sft_model_path="models/toy/sft", **values)
        words = shlex.split(hub.command_of(args, 1))[5:]
        assert utils.parse_args(train_rloo.Args, toy.defaults("train_rloo"), words) == args


def test_snippets_of_conversations_use_the_chat_template():
    prompt = [{"role": "user", "content": 'say "it\'s"'}]
    assert "add_generation_prompt=True" in hub.inputs_of(prompt, False) and repr(prompt)[1:-1] in hub.inputs_of(prompt, True)
    assert "eos_token" in hub.inputs_of("a", True) and "assistant" in hub.inputs_of(prompt, True)
    for line in (hub.inputs_of(p, r) for p in ("it's", prompt) for r in (False, True)):
        compile(line, "snippet", "eval")


def test_a_card_names_what_is_on_the_hub_and_nothing_else(in_tmp):
    Path("models/sft").mkdir(parents=True)
    about = {"commit": "a" * 40, "versions": {"torch": "2"}, "num_processes": 8, "prompt": "it's", "run": "runs/x"}
    card = lambda **changes: read_card(hub.model_card(train_rloo.Args(**changes), "me/it", {}, "https://x/y", about))  # noqa: E731
    facts, body = card(sft_model_path="EleutherAI/pythia-1b", dataset="trl-lib/tldr:train[:100]", lora_rank=8)
    assert facts["base_model"] == "EleutherAI/pythia-1b" and facts["datasets"] == ["trl-lib/tldr"] and "lora" in facts["tags"]
    assert "# it\n" in body and "Tracked run: https://x/y" in body and "'me/it'" in body and "--num_processes 8" in body
    for path, dataset in (("models/sft", "toy"), ("models/toy/deep/sft", "rows.jsonl"), ("/abs/sft", "a/b/c.parquet")):
        assert not {"base_model", "datasets"} & card(sft_model_path=path, dataset=dataset)[0].keys()


@KINDS
def test_a_pushed_model_comes_back_from_the_hub_as_it_is_on_disk(tiny, in_tmp, server, capsys, kind):
    start(kind, tiny, output_dir="models/out", push_to_hub=True)
    assert server.created == ["someone/models-out"] and "pushed to someone/models-out" in capsys.readouterr().out
    on_disk = {path.name: path.read_bytes() for path in Path("models/out").iterdir()}
    sent = {name: content for name, content in server.files["someone/models-out"].items() if name != ".gitattributes"}
    assert sent == on_disk and {"model.safetensors", "README.md", "tokenizer.json", "config.json"} <= sent.keys()
    assert "someone/models-out" in sent["README.md"].decode()
    assert json.loads(Path("runs/run/config.json").read_text())["hub"] == "someone/models-out"
    if kind == "rloo":
        there, here = (AutoModelForCausalLM.from_pretrained(name) for name in ("someone/models-out", "models/out"))
        assert all((a == b).all() for a, b in zip(there.parameters(), here.parameters(), strict=True))
        assert AutoTokenizer.from_pretrained("someone/models-out").get_vocab() == toy.tokenizer().get_vocab()


def test_a_repository_that_is_there_already_is_pushed_to_again(tiny, in_tmp, server):
    start("sft", tiny, output_dir="out", push_to_hub=True)
    start("sft", tiny, output_dir="out", push_to_hub=True, learning_rate=0.5)
    assert (
        len(server.messages) == 2 and server.files["someone/out"]["model.safetensors"] == Path("out/model.safetensors").read_bytes()
    )


def test_adapters_and_the_merged_model_are_pushed_together(tiny, in_tmp, server):
    pytest.importorskip("peft")
    start("rloo", tiny, output_dir="out", push_to_hub=True, hub_model_id="team/it", lora_rank=2, lora_merge=True)
    assert {"model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= server.files[
        "team/it"
    ].keys()


@pytest.mark.parametrize("fault", ["commit", "upload"])
def test_a_push_that_fails_loses_nothing_and_says_how_to_repeat_it(tiny, in_tmp, server, capsys, fault):
    server.fail_on = fault
    start("rloo", tiny, output_dir="models/my out", push_to_hub=True, hub_model_id="it")
    error = capsys.readouterr().err
    assert "error: --push_to_hub: " in error and "hf upload someone/it 'models/my out'" in error
    assert (Path("models/my out") / "model.safetensors").exists() and not server.files["someone/it"]
    utils.load_policy("models/my out", "")


def test_a_push_that_cannot_succeed_is_refused_before_anything_is_trained(tiny, in_tmp, server, capsys, monkeypatch):
    def line():
        with pytest.raises(SystemExit) as end:
            start("rloo", tiny, push_to_hub=True, run_name="new")
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("error: --push_to_hub: ") and error.count("\n") == 1, error
        assert not Path("runs/new/metrics.jsonl").exists()
        return error

    server.fail_on = "create"
    assert "models-rloo" in line()
    server.fail_on = None
    assert not Path("runs/new").exists()  # so that the same command may be given again
    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: None)
    assert "hf auth login" in line()


def test_nothing_speaks_to_the_hub_unless_told(tiny, in_tmp, server):
    start("rloo", tiny, output_dir="models/out")
    assert server.requests == []


def test_adapters_on_the_hub_are_merged_into_their_base_and_trained_on(tiny, in_tmp, server):
    """As a policy to start from, and as one with which a reward model shares its vocabulary."""
    pytest.importorskip("peft")
    start("rloo", tiny, output_dir="out", push_to_hub=True, hub_model_id="adapters", lora_rank=2, learning_rate=1e-2)
    assert "model.safetensors" not in server.files["someone/adapters"]
    here, there = utils.load_policy("out", ""), utils.load_policy("someone/adapters", "")
    assert here.state_dict().keys() == there.state_dict().keys() and all(p.requires_grad for p in there.parameters())
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-6
    start("ppo", tiny, sft_model_path="someone/adapters", output_dir="next", total_episodes=16)
    assert json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[0])["policy/grad_norm"] > 0
