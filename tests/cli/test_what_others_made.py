"""Models and data that other programs made: they are read as those programs mean them, or refused in one line, or a
line says what is lost. Every table goes through the `main` of the scripts.
"""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS, edit_json, launch, tiny_model, tiny_reward_model
from safetensors.torch import load_file, save_file
from short_runs import contents, one_step, write_rows
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

from rlhf_details import toy
from rlhf_details.plumbing.inputs import models

ROW = {"prompt": "last friday my sister", "completion": "went ."}
FLAGS = {"policy": "sft_model_path", "reward": "reward_model_path", "teacher": "teacher_model_path"}


def change(folder, **weights):
    """Changes or adds weights of a model folder's file."""
    path = Path(folder, "model.safetensors")
    save_file(load_file(path) | weights, path, metadata={"format": "pt"})


def lost_bias(folder):
    change(folder, **{"gpt_neox.layers.1.attention.dense.bias": torch.ones(32)})
    edit_json(folder / "config.json", attention_bias=False)


def no_bias(folder):
    """All biases of a new GPT-NeoX are 0."""
    edit_json(folder / "config.json", attention_bias=False)


def infinite(folder):
    change(folder, **{"gpt_neox.final_layer_norm.bias": torch.full((32,), float("inf"))})


def of_kind(kind, **sizes):
    """A function that puts a model of another architecture into a folder."""

    def make(folder):
        model = tiny_model(kind, vocab_size=len(toy.tokenizer()), eos_token_id=1, **sizes)
        model.save_pretrained(folder)

    return make


BART = dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, init_std=0.3, pad_token_id=0)
MAMBA = dict(num_heads=8, state_size=8, head_dim=8, n_groups=2)
EXPERTS = dict(num_key_value_heads=2, num_local_experts=2, intermediate_size=64, router_jitter_noise=0.1)
MINIMAX = dict(num_key_value_heads=2, head_dim=8, num_local_experts=2, block_size=16, intermediate_size=64)


def ends(**values):
    """A function that gives a model folder an eos_token_id in generation_config.json."""
    return lambda folder: Path(folder, "generation_config.json").write_text(json.dumps(values))


def adapters_on(base):
    """A function that makes a folder one of adapters which name their base."""

    def make(folder):
        Path(folder, "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))

    return make


def a_classifier(folder):
    shutil.copytree("reward", folder, dirs_exist_ok=True)


def cut_short(folder):
    os.truncate(folder / "model.safetensors", 1000)


def with_a_token_more(folder):
    tokenizer = toy.tokenizer()
    tokenizer.add_tokens("soups")
    tokenizer.save_pretrained(folder)


def without_eos(folder):
    edit_json(folder / "tokenizer_config.json", eos_token=None)


REFUSED = [  # what is spoilt, how, and words of the line
    ("policy", lost_bias, "1 weights in its files have no place", "gpt_neox.layers.1.attention.dense.bias"),
    ("teacher", lost_bias, "1 weights in its files have no place"),
    ("reward", lost_bias, "1 weights in its files have no place"),
    ("policy", lambda x: edit_json(x / "config.json", num_hidden_layers=1), "weights in its files", "layers.1."),
    ("reward", lambda x: change(x, **{"score.bias": torch.ones(1)}), "such as score.bias"),
    ("policy", infinite, "gpt_neox.final_layer_norm.bias holds numbers that are not finite"),
    ("reward", infinite, "gpt_neox.final_layer_norm.bias holds numbers that are not finite"),
    ("policy", of_kind("bart", **BART), "a bart cannot be used here: ", "or padding or a cache changes them"),
    ("policy", of_kind("minimax", **MINIMAX), "cannot be read (MiniMax uses"),
    ("policy", a_classifier, "not a causal language model (it "),
    ("policy", cut_short, "cannot be read ("),
    ("policy", lambda x: edit_json(x / "config.json", vocab_size=40), "the shape [254, 32], and [40, 32] is expected"),
    ("policy", with_a_token_more, "its tokenizer has 255 tokens, and the model 254 embeddings"),
    ("policy", without_eos, "has no EOS token"),
    ("policy", of_kind("mamba2", **MAMBA), "a mamba2 cannot be sampled"),
    ("policy", of_kind("mixtral", **EXPERTS), "router_jitter_noise 0.1"),
    *[("policy", ends(eos_token_id=x), "cannot be read ('") for x in ("</s>", [[2]], {}, [None], [1, "x"], 1.5)],
    ("policy", lambda x: (x / "generation_config.json").write_text("{"), "cannot be read (It looks like"),
    ("policy", adapters_on("./policy/"), "whose base must be the path of another model, not './policy/'"),
]


@pytest.fixture
def run(in_tmp, tiny):
    """run(script, **changes): main with arguments of a run of one step on 16 rows, on copies of the tiny models."""
    for name in FLAGS:
        shutil.copytree(tiny / name, name)
    write_rows("rows.jsonl", [ROW] * 16)

    def start(script, **changes):
        return SCRIPTS[script].main(one_step(script, in_tmp, **changes))

    return start


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, spoil, words", [(a, b, words) for a, b, *words in REFUSED], ids=range(len(REFUSED)))
def test_a_model_that_would_be_another_one_is_refused(run, in_tmp, fails, name, spoil, words):
    spoil(in_tmp / name)
    before = contents(in_tmp)
    line = fails(run, "train_distill" if name == "teacher" else "train_rloo")
    assert f"--{FLAGS[name]} " in line and all(word in line for word in words), line
    assert contents(in_tmp) == before


def test_weights_of_modules_that_a_model_does_not_have_are_named(run, capsys):
    """A value head, and the towers of other senses. A causal head is nothing that a reward model lacks."""
    change("policy", **{f"{x}.weight": torch.ones(2) for x in ("v_head.summary", "vision.0.q")})
    change("reward", **{"embed_out.weight": torch.ones(2), "lm_head.weight": torch.ones(2)})
    run("train_rloo")
    said = f"--sft_model_path {Path.cwd()}/policy: has weights that a gpt_neox does not read, such as v_head.summary"
    assert [x for x in capsys.readouterr().out.splitlines() if "not read" in x] == [f"{said}.weight"]


def padded(folder):
    """A Llama whose padding has an id behind the embeddings."""
    make = tiny_reward_model if folder.name == "reward" else tiny_model
    make("llama", vocab_size=len(toy.tokenizer()), intermediate_size=64, eos_token_id=1).save_pretrained(folder)
    edit_json(folder / "config.json", pad_token_id=len(toy.tokenizer()))


@pytest.mark.parametrize("make", [no_bias, padded, ends(eos_token_id=10**9), ends(eos_token_id=[])])
@pytest.mark.parametrize("name", ["policy", "reward"])
def test_what_does_no_harm_is_taken(run, in_tmp, name, make):
    make(in_tmp / name)
    assert run("train_rloo")["metrics"]["update"] == 1


@pytest.mark.parametrize("kind", ["gpt_neo", "gpt2"])
def test_the_masks_in_old_files_of_gpt2_and_its_kin_are_no_weights(run, kind):
    of_kind(kind, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8)("policy")
    inner = "attn.attention" if kind == "gpt_neo" else "attn"
    mask, lowest = torch.ones(1, 1, 128, 128, dtype=torch.bool), torch.tensor(-1e9)
    change("policy", **{f"transformer.h.0.{inner}.bias": mask, f"transformer.h.0.{inner}.masked_bias": lowest})
    assert run("train_sft")["metrics"]["update"] == 1


@pytest.mark.parametrize("script", ["train_rloo", "train_sft", "train_dpo"])
@pytest.mark.parametrize("says_tied", [True, False])
def test_a_head_of_its_own_stays_one_whatever_the_configuration_says(run, script, says_tied):
    edit_json("policy/config.json", tie_word_embeddings=says_tied)
    write_rows("rows.jsonl", [ROW | {"chosen": "went .", "rejected": "was ."}] * 16)
    run(script, learning_rate=1e-12, output_dir="out", overwrite=True)
    before, after = (AutoModelForCausalLM.from_pretrained(x) for x in ("policy", "out"))
    torch.testing.assert_close(after.get_output_embeddings().weight, before.get_output_embeddings().weight)
    assert not after.config.tie_word_embeddings


def eyes(folder):
    """Puts a Gemma 3 with a vision tower and the toy tokenizer into a folder."""
    vocab = len(toy.tokenizer())
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    more = dict(vocab_size=vocab + 8, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=64)
    ids = dict(image_token_index=vocab + 1, boi_token_index=vocab + 2, eoi_token_index=vocab + 3)
    vision = dict(sizes, image_size=28, patch_size=14)
    text = dict(sizes, **more, pad_token_id=0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    toy.tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("load", [models.load_policy, models.load_scalar_model])
def test_what_text_does_not_use_is_frozen(in_tmp, load, rank):
    eyes("gemma")
    model = models.add_adapters(load("gemma", "--sft_model_path", SCRIPTS["train_rloo"].Args()), rank)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name in trained if "vision" in name or "projector" in name]
    assert rank or {name for name, _ in model.named_parameters() if "language" in name or "score" in name} == trained


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--lora_rank", 2], ["--value_model", "shared"]])
def test_a_model_with_eyes_learns_from_text_under_two_processes(run, more):
    eyes("gemma")
    Path("f.py").write_text("def f(prompts, completions): return [float(len(x)) for x in completions]")
    flags = ["--sft_model_path", "gemma", "--dataset", "rows.jsonl", "--response_length", 4, "--batch_size", 8]
    flags += ["--reward_model_path", None, "--reward_fn", "f.py:f", "--total_episodes", 16, *more]
    done = launch("train_ppo.py" if "--value_model" in more else "train_rloo.py", flags, processes=2)
    assert done.returncode == 0 and "model: " in done.stdout, done.stderr[-2000:]


def gpt2_files(folder):
    """What GPT-2's own repository has: vocab.json and merges.txt."""
    backend.save_model(str(folder))


def tokenizer_json(folder):
    backend.save(str(Path(folder, "tokenizer.json")))


backend = ByteLevelBPETokenizer()
backend.train_from_iterator(["went was my"] * 3, 270, special_tokens=["<|endoftext|>"], show_progress=False)


@pytest.mark.parametrize("save_tokenizer", [gpt2_files, tokenizer_json])
def test_a_tokenizer_without_tokenizer_config_is_used(run, capsys, save_tokenizer):
    """The reward model reads text by its own tokenizer, and not the policy's ids."""
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64, num_labels=1, eos_token_id=0)
    for kind, name in ((GPT2LMHeadModel, "gpt2"), (GPT2ForSequenceClassification, "scorer")):
        kind(config).save_pretrained(name)
        save_tokenizer(name)
    run("train_rloo", sft_model_path="gpt2", reward_model_path="scorer")
    assert "tokenizer of its own" not in capsys.readouterr().out
    run("train_rloo", reward_model_path="scorer", overwrite=True)
    assert "the reward model has a tokenizer of its own" in capsys.readouterr().out


# ---- data ------------------------------------------------------------------------------------------------------------
HEAD, GOOD, OPEN = "prompt,completion\n", "my sister,went .\n", '"my sister,went .\n'
QUOTES = [  # text of a CSV file, and where its fault is
    (HEAD + GOOD * 3 + OPEN + GOOD * 9, "row 4: "),  # to the end of the file
    (HEAD + GOOD + OPEN + GOOD * 9 + '"a",b\n' + GOOD, "row 2: "),  # to the next quotation mark
    (HEAD + GOOD * 12 + OPEN, "row 13: "),
    ('"' + HEAD + GOOD * 16, "the header or row 1: "),
    (HEAD + '"my" sister,went .\n' + GOOD * 15, "the header or row 1: "),
    (HEAD + GOOD * 2 + 'my sister,"went ""." .\n'[:-1] + GOOD * 15, "row 3: "),
]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz"])
@pytest.mark.parametrize("text, where", QUOTES)
def test_a_quotation_mark_that_nobody_closes_takes_no_rows_with_it(run, fails, name, text, where):
    text = text.replace(",", "\t") if "tsv" in name else text
    with (gzip.open if name.endswith("gz") else open)(name, "wt") as file:
        file.write(text)
    line = fails(run, "train_sft", dataset=name)
    assert f"--dataset {name}: cannot be read ({where}a cell begins with a quotation mark and does not" in line


def test_quotation_marks_that_are_right_are_read(run):
    cells = '"my, ""sister""\n",went .\n', '5 " pipe,went .\n', '"",went .\n', '"my\n\nsister","went ."\n'
    Path("rows.csv").write_text(HEAD + "".join(cells) * 4)
    assert run("train_sft", dataset="rows.csv")["metrics"]["update"] == 1


@pytest.mark.parametrize("folder", ["run 12:30:05", "a:b/c:d", "12:30"])
def test_a_path_may_have_colons(run, folder):
    Path(folder, "data").mkdir(parents=True)
    Path(folder, "f.py").write_text(f"def rows(): return [{ROW}] * 16")
    Path(folder, "data/train.jsonl").write_text(Path("rows.jsonl").read_text())
    Path(folder, "rows.json").write_text(json.dumps({"train": [ROW] * 18, "test": [ROW] * 18}))
    for name in ("rows.json", "rows.json[2:]", "rows.json:test", "f.py:rows", "data", "data:train"):
        assert run("train_sft", dataset=f"{folder}/{name}", overwrite=True)["metrics"]["update"] == 1


@pytest.mark.parametrize("scheme", ["https", "http", "s3", "hf", "file"])
def test_an_address_is_refused(run, fails, scheme):
    name = f"{scheme}://example.org/rows.jsonl"
    assert f"--dataset {name}: an address is not read" in fails(run, "train_sft", dataset=name)


def nested(levels):
    return json.loads("[" * levels + "]" * levels)


@pytest.mark.parametrize("value", [nested(900), [{"x": nested(900)}]])
def test_rows_may_be_nested_deep(run, value):
    """A reward function gets a copy of its own."""
    Path("f.py").write_text("def f(prompts, completions, x): return [1.0 * i for i, _ in enumerate(x)]")
    write_rows("rows.jsonl", [ROW, ROW | {"x": value}] * 8)
    assert run("train_rloo", reward_fn=["f.py:f"], reward_model_path=None)["metrics"]["update"] == 1


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '<think>' if m.role == 'assistant' }}{{ m.content }}<|end|>{% endfor %}"
)
TEMPLATE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    "asked, answer, found",
    [
        ("why ?", "yes <|end|> no", "<|end|>"),
        ("what is <|end|> ?", "yes", "<|end|>"),
        ("a <|assistant|>b", "yes", "<|assistant|>"),
        ("why ?", "<|user|>", "<|user|>"),
        ("why ?", "say <eos> now", "<eos>"),
        ("why ?", "<think>so</think> yes", None),
        ("why ?", "end user assistant", None),
        (None, "yes <eos> no", "<eos>"),  # plain text
        (None, "yes <eos>", None),
    ],
)
def test_the_text_of_a_control_token_is_named(run, capsys, asked, answer, found):
    tokenizer = toy.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    tokenizer.add_tokens("<think>")  # The template writes it as well, but it is ordinary text, as in Qwen 3.
    tokenizer.chat_template = TEMPLATE
    eos = tokenizer.eos_token
    tokenizer.save_pretrained("policy")
    model = AutoModelForCausalLM.from_pretrained("policy")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained("policy")
    answer, found = answer.replace("<eos>", eos), found and found.replace("<eos>", eos)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    row = {"messages": turns} if asked else {"prompt": "why ?", "completion": answer}
    fine = {"messages": [turns[0] | {"content": "why ?"}, turns[1] | {"content": "yes"}]} if asked else ROW
    write_rows("rows.jsonl", [fine, row] * 8)
    run("train_sft")
    lines = [line for line in capsys.readouterr().out.splitlines() if "control token" in line]
    what = "8 rows hold the text of a control token, the first one is row 2"
    said = f"warning: --dataset rows.jsonl: {what} with {found!r}."
    assert [line[: len(said)] for line in lines] == [said] * bool(found)
