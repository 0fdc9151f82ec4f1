"""show_tokens.py shows what the scripts train on."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import PAGES
from short_runs import write_rows
from transformers import AutoTokenizer

from rlhf_details import show_tokens, train_sft
from rlhf_details.plumbing.inputs import data

ROW = {"prompt": "the garden", "completion": "was lovely .", "chosen": "was lovely .", "rejected": "was ugly ."}


def shown(capsys, *words):
    """[(whether it is marked, id, text)] of all lines that show a token, and all that was printed."""
    show_tokens.main(list(words))
    said = capsys.readouterr().out
    return [(star == "*", int(i), text) for star, i, text in re.findall(r"^  ([* ]) +(\d+)  '(.*)'$", said, re.M)], said


@pytest.mark.parametrize("only", [False, True])
def test_sft_marks_the_tokens_that_have_a_loss(tiny, in_tmp, capsys, only):
    rows, model = write_rows("rows.jsonl", [ROW, ROW]), str(tiny / "policy")
    words = [
        "train_sft.py",
        "--dataset",
        rows,
        "--base_model",
        model,
        "--show_rows",
        "1",
        *["--completion_only"] * only,
    ]
    found, _ = shown(capsys, *words)
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = train_sft.Args(dataset=rows, base_model=model, take=1)
    (row,) = data.encode(
        args, "dataset", data.read(args, "dataset", "sft", with_answers=True), tokenizer, 99, "completion"
    )
    tokens, _, is_target = train_sft.tokens_and_targets([row], only, torch.device("cpu"))
    assert [i for _, i, _ in found] == tokens[0].tolist()
    assert [star for star, *_ in found][1:] == is_target[0, 1:].tolist()  # Nothing predicts the first token.
    assert found[0][2].strip() == "the" and found[-1][1] == tokenizer.eos_token_id


def test_candidates_and_prompts(tiny, in_tmp, capsys):
    rows, model = write_rows("rows.jsonl", [ROW]), str(tiny / "policy")
    of_both = ["--dataset", rows, "--sft_model_path", model]
    found, said = shown(capsys, "train_dpo.py", *of_both)
    assert [star for star, *_ in found] == [False] * 2 + [True] * 8 and "candidate 0 (the best): 4 tokens" in said
    found, said = shown(capsys, "train_reward.py", *of_both)
    assert [star for star, *_ in found] == [False] * 2 + ([False] * 3 + [True]) * 2
    for page in PAGES:
        found, said = shown(capsys, f"{page}.py", *of_both)
        assert len(found) == 2 and "a response ends with" in said
    found, said = shown(capsys, "train_distill.py", *of_both, "--teacher_prompt_template", "{prompt} .")
    assert len(found) == 5 and "what the teacher reads: 3 tokens" in said


@pytest.mark.parametrize(
    "words, line",
    [
        ((), "the first word must be train_sft"),
        (("evaluate.py",), "evaluate.py: the first word must be"),
        (
            ("train_sft.py", "--dataset", "rows.jsonl", "--base_model", "scratch"),
            "--base_model scratch: must be a model",
        ),
        (("train_sft.py", "--show_rows", "all"), "--show_rows all: must be a number"),
        (
            ("train_dpo.py", "--dataset", "toy", "--sft_model_path", "MODEL"),
            "--dataset toy: its comparisons are sampled",
        ),
    ],
)
def test_what_cannot_be_shown_is_one_line(tiny, in_tmp, fails, words, line):
    Path("rows.jsonl").write_text(json.dumps(ROW))
    assert line in fails(show_tokens.main, [str(tiny / "policy") if word == "MODEL" else word for word in words])
