"""
Stand-ins for the data sets and models that the recipes name: the same columns, splits, file names, architectures and
tokenizers, with made-up text and tiny random weights. recipes.py trains on them.

`write(folder)` makes all of them in a folder under the names that they have on the Hub. A script that runs in this
folder reads them in place of the Hub's, because the libraries look for a local folder of that name first.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import datasets
import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_details import toy

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
import movies_data

WORDS = "The my dog cat boss friend told asked never really wants to a house about is was in for and I so".split()
POST = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
TEXT_END, PAD = "<|endoftext|>", "[PAD]"
LABEL_PAD = 50259  # GPT-2 has no such token; lm-human-preferences fills its rows up with it.


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def text(seed, num_words=12):
    """A sentence of made-up text, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words)) + "."


def tokenizer(first=(), last=(), bos_first=False, template=None, **special):
    """A byte-level BPE tokenizer, as all published ones here are.

    Args: first, last, special tokens at the start and at the end of the vocabulary; bos_first, put BOS before a text;
    template, the chat template or None; special, which tokens are `bos_token`, `eos_token` and so on.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(first), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text(seed) for seed in range(50)], trainer)
    backend.add_special_tokens(list(last))
    if bos_first:
        bos = special["bos_token"]
        pair = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=pair)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


ALL_TEXT_END = dict(bos_token=TEXT_END, eos_token=TEXT_END, unk_token=TEXT_END)
TULU = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pythia():
    return tokenizer(first=[TEXT_END, "<|padding|>"], **ALL_TEXT_END)


def pythia_with_pad():
    return tokenizer(first=[TEXT_END, "<|padding|>"], last=[PAD], pad_token=PAD, **ALL_TEXT_END)


def gpt2():
    return tokenizer(last=[TEXT_END], **ALL_TEXT_END)


def tulu():
    special = dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", pad_token="<pad>")
    return tokenizer(last=special.values(), bos_first=True, template=TULU, **special)


def llama_3():
    special = dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    return tokenizer(last=[*special.values(), *headers], bos_first=True, template=LLAMA_3, **special)


def qwen():
    special = dict(eos_token="<|im_end|>", pad_token=TEXT_END)
    return tokenizer(last=[TEXT_END, "<|im_start|>", "<|im_end|>"], template=CHATML, **special)


def distilbert():
    return tokenizer(first=["[PAD]", "[CLS]"], bos_first=True, bos_token="[CLS]", pad_token="[PAD]")


# ---- models ----------------------------------------------------------------------------------------------------------
@dataclass
class Model:
    """What stands in for a published model."""

    kind: str  # the architecture, `model_type`
    tokenizer: object  # a function that makes it
    positions: int = 2048  # the longest row, the published model's
    spare: int = 0  # rows of the embedding that the tokenizer has no token for
    labels: int = 0  # scores of a classifier; 0: a causal language model


# Where each tokenizer's behaviour is written down. What is not verified is guessed from the model's kin.
MODELS = {
    # TRL v0.11.4 rloo_tldr.py brings a template; EleutherAI/pythia #156
    "EleutherAI/pythia-1b-deduped": Model("gpt_neox", pythia, spare=27),
    # N+ sft.py and reward.py add [PAD] behind the vocabulary and save the tokenizer. TRL v0.11.4 loads the second one
    # as a sequence classifier; N+ saved a class of its own, so what its repository holds is not verified.
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": Model("gpt_neox", pythia_with_pad, spare=26),
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": Model("gpt_neox", pythia_with_pad, spare=26, labels=1),
    # OAI language/encodings.py; N train_policy_accelerate.py adds [PAD]; TRL v0.11.4 gpt2-sentiment.ipynb: pad is EOS
    "openai-community/gpt2": Model("gpt2", gpt2, positions=1024),
    "lvwerra/gpt2-imdb": Model("gpt2", gpt2, positions=1024),
    # not verified; its tokenizer is a WordPiece in truth
    "lvwerra/distilbert-imdb": Model("distilbert", distilbert, 512, labels=2),
    # open-instruct bac939310^ dataset_transformation.py (CHAT_TEMPLATES, tulu_v2_2); BOS not verified
    "allenai/Llama-3.1-Tulu-3-8B-DPO": Model("llama", tulu, 131_072, 7),
    # not verified; the recipe's prompts are plain text
    "llamafactory/tiny-random-Llama-3": Model("llama", llama_3, 8192),
    # not verified; the system message that the template writes is left out
    "Qwen/Qwen2.5-1.5B-Instruct": Model("qwen2", qwen, 32_768, 271),
    "models/toy/sft": Model("gpt_neox", toy.tokenizer, 128),
    "models/toy/reward": Model("gpt_neox", toy.tokenizer, 128, labels=1),
}


def write_model(name, folder):
    """Writes the stand-in for a model, with weights large enough that tokens and scores differ."""
    model, words = MODELS[name], MODELS[name].tokenizer()
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(intermediate_size=64, initializer_range=0.2, max_position_embeddings=model.positions)
    ids = {f"{kind}_token_id": getattr(words, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(model.kind, vocab_size=len(words) + model.spare, **sizes, **ids)
    make = AutoModelForCausalLM
    if model.labels:
        make, config.num_labels = AutoModelForSequenceClassification, model.labels
        config.id2label = {0: "NEGATIVE", 1: "POSITIVE"} if model.labels == 2 else {0: "LABEL_0"}
    torch.manual_seed(0)
    make.from_config(config).save_pretrained(folder)
    words.model_max_length = model.positions
    words.save_pretrained(folder)


# ---- rows of the data sets -------------------------------------------------------------------------------------------
def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def post(i):
    """A row of OpenAI's TL;DR posts."""
    paragraphs = "\n\n".join(text(f"{i} {k}") for k in range(3))
    return dict(id=f"t3_{i}", subreddit="relationships", title=text(i, 6), post=paragraphs, summary=text(-i - 1))


def tldr(i):
    return {"prompt": POST.format(**post(i)), "completion": " " + post(i)["summary"]}


def tldr_trl_style(i):
    prompt, row = POST.format(**post(i)), post(i)
    return {"prompt": prompt, "messages": [user(prompt), assistant(row["summary"])], **row}


def n_plus_comparison(i):
    """Texts, and their token ids: queries filled up on the left, answers and whole rows on the right."""
    words, row, choice = pythia_with_pad(), post(i), i % 2
    answers = [" " + text(f"{i} answer {k}") for k in (0, 1)]
    sides = {"chosen": answers[choice], "rejected": answers[1 - choice]}
    policies = {"chosen": "sup1", "rejected": "ref"}

    def fill(ids, length, left=False):
        filler = [words.pad_token_id] * (length - len(ids))
        return filler + ids if left else ids + filler

    info = {k: row[k] for k in ("id", "post", "title", "subreddit")} | {"site": None, "article": None}
    result = dict(info=info, summaries=[dict(text=x, policy="sup1", note=None) for x in answers], choice=choice)
    result |= dict(worker="w", batch="batch3", split="train", extra={"confidence": None})
    query = POST.format(**row)
    ids = words(query).input_ids
    result |= {"query": query, "query_token": fill(ids, 512, left=True), "query_token_len": len(ids)}
    result["policies"] = "ref--sup1"
    for side, answer in sides.items():
        whole = words(f"{query}{answer}{TEXT_END}").input_ids
        result |= {
            side: answer + TEXT_END,
            f"{side}_policy": policies[side],
            f"query_{side}": query + answer + TEXT_END,
        }
        result[f"{side}_token"] = fill(whole[len(ids) :], 169)
        result[f"{side}_token_len"] = len(whole) - len(ids)
        result[f"query_{side}_token"] = fill(whole, 638)
        result[f"query_{side}_token_len"] = len(whole)
        label = [words.pad_token_id] * len(ids) + whole[len(ids) :]
        result[f"query_{side}_token_response_label"] = fill(label, 638)
    return result


def label_rows(num):
    """Rows of lm-human-preferences' label files: GPT-2's token ids, filled up with an id that GPT-2 does not have."""
    words = gpt2()
    queries = [words(text(i)).input_ids[: 5 + i] for i in range(30)]
    samples = [(words(text(-i)).input_ids * 3)[: 24 - i] for i in range(8)]
    queries, samples = (
        [ids + [LABEL_PAD] * (length - len(ids)) for ids in rows] for rows, length in ((queries, 64), (samples, 24))
    )
    choices = [(random.Random(i).choice(queries), random.Random(-i).sample(samples, 4)) for i in range(num)]
    return [
        {"query": query, **{f"sample{k}": ids for k, ids in enumerate(four)}, "best": i % 4}
        for i, (query, four) in enumerate(choices)
    ]


def book(i):
    """A passage with two continuations."""
    prompt = text(i)
    chosen, rejected = ([user(prompt), assistant(text(f"{i} {k}"))] for k in (0, 1))
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def word_problem(i):
    return {"question": f"{text(i)} What is {i} + {i}?", "answer": f"{text(-i)} <<{i}+{i}={2 * i}>>\n#### {2 * i}"}


def problem(i):
    return {"messages": [user(f"{text(i)} What is {i} + {i}?")], "answer": str(2 * i)}


# ---- data sets -------------------------------------------------------------------------------------------------------
def splits(row, **counts):
    """{split: rows}, each row another one. Args: row, a function of a number; counts, how many rows of each split."""
    starts = dict(zip(counts, range(0, 1000 * len(counts), 1000), strict=True))
    return {split: [row(starts[split] + i) for i in range(count)] for split, count in counts.items()}


GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


def data_sets():
    """{name: {a split, which is then a parquet file as the Hub has it, or the name of a file: a list of rows}}."""
    labels, few = label_rows(5000), dict(train=40, validation=8, test=8)
    return {
        # TRL v0.21.0 examples/datasets/tldr.py
        "trl-lib/tldr": splits(tldr, **few),
        # TRL v0.9.6 examples/datasets/tldr_preference.py; the splits: N+ tldr_dataset.py reads the same posts
        "trl-internal-testing/tldr-preference-sft-trl-style": splits(tldr_trl_style, **few),
        # N+ ee77a9a tldr_dataset.py and README.md; within `info`, `summaries` and `extra`: not verified
        "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144": splits(
            n_plus_comparison, train=40, validation=8, validation_cnndm=2
        ),
        # OAI cbfd210 label_types.py and language/encodings.py; the repository: N ccc1953 train_reward_accelerate.py
        "vwxyzjn/lm-human-preferences": {
            f"{task}/offline_5k.json": labels for task in ("sentiment", "descriptiveness")
        },
        # No builder is public. TRL v0.11.4 examples/scripts/ppo/ppo.py reads `prompt` of the split `descriptiveness`;
        # the other columns after TRL v0.9.6 sentiment_descriptiveness.py, their types not verified.
        "trl-internal-testing/descriptiveness-sentiment-trl-style": splits(book, descriptiveness=40, sentiment=40),
        # the README.md of its repository (`dataset_info` and `configs` of `main`)
        "openai/gsm8k": splits(word_problem, **{"main/train": 40, "main/test": 8}),
        # made by the user from `imdb`, as TRL v0.11.4 examples/scripts/ppo.py says
        "data/imdb_prompts.jsonl": {"": [{"prompt": text(i, 4).rstrip(".")} for i in range(40)]},
        # made by the user from allenai/RLVR-GSM-MATH-IF-Mixed-Constraints; `messages` as in open-instruct bac939310^
        # scripts/data/rlvr/gsm8k_rlvr.py
        "data/rlvr.jsonl": {"": [problem(i) for i in range(40)]},
        # made by the user from training-wizard 152791f examples/data/diverse_sample_100.jsonl, with the column `input`
        "data/paraphrase_prompts.jsonl": {
            "": [{"prompt": f"Only answer with a paraphrase of the input:\n{text(i)}"} for i in range(15)]
        },
        # recipes/movies_data.py makes data/movies of it; on the Hub not verified
        "cornell-movie-review-data/rotten_tomatoes": splits(
            lambda i: {"text": text(i).lower(), "label": i % 2}, train=60, validation=10, test=16
        ),
    }


def write(folder):
    """Writes all data sets and models into a folder, and the code beside them, so that commands can be typed in it."""
    folder, root = Path(folder), Path(__file__).resolve().parents[2]
    for name in ("benchmark", "rlhf_details"):
        (folder / name).symlink_to(root / name)
    for name, files in data_sets().items():
        for part, rows in files.items():
            is_split = "." not in part and part
            start = part if "/" in part else f"data/{part}"
            path = folder / name / (f"{start}-00000-of-00001.parquet" if is_split else part)
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "openai/gsm8k":
                (folder / name / "README.md").write_text(GSM8K_CARD)
            if is_split:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            else:
                lines = "\n".join(map(json.dumps, rows))
                path.write_text(json.dumps(rows) if path.suffix == ".json" else lines + "\n")
    reviews, movies = folder / "cornell-movie-review-data/rotten_tomatoes", folder / "data/movies"
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache")):
        movies_data.main(movies_data.Args(dataset=str(reviews), output_dir=str(movies)))
    for name in MODELS:
        write_model(name, folder / name)
    return folder
