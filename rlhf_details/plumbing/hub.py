"""
What others need in order to use a trained model: its card, always, and its place on the Hugging Face Hub, on request.
This module speaks to the Hub under --push_to_hub only.
"""

import contextlib
import dataclasses
import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import huggingface_hub

from rlhf_details import toy
from rlhf_details.plumbing import cli, errors

PAPERS = {  # of each script: title and arXiv number
    "sft": ("Training language models to follow instructions with human feedback", "2203.02155"),
    "reward": ("Learning to summarize from human feedback", "2009.01325"),
    "dpo": ("Direct Preference Optimization: Your Language Model is Secretly a Reward Model", "2305.18290"),
    "ppo": ("The N+ Implementation Details of RLHF with PPO: A Case Study on TL;DR Summarization", "2403.17031"),
    "rloo": (
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "2402.14740",
    ),
    "distill": (
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "2306.13649",
    ),
    "grpo": ("DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "2402.03300"),
}
OF_A_POLICY = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r})
inputs = {inputs}
plain = dict(top_k=0, top_p=1.0, repetition_penalty=1.0)  # samples from the policy as it was trained
tokens = model.generate(**inputs, do_sample=True, temperature={temperature}, max_new_tokens={length}, **plain)
print(tokenizer.decode(tokens[0]))"""
OF_A_REWARD_MODEL = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForSequenceClassification.from_pretrained({name!r})
inputs = {inputs}
print(model(**inputs).logits[0, 0].item() + model.config.reward_bias)"""

CARD = """\
---
{facts}
---

# {title}

{what} (commit `{commit}`), {data}.
{adapter}Licence: {terms}.
{run}

## Use

```python
{snippet}
```

## Training

```
{command}
```

| metric | before | last update |
|---|---:|---:|
{rows}

Versions: {versions}.

All arguments:

```json
{arguments}
```

{paper}
"""


def script_of(args):
    """The script's file name, e.g. "train_rloo.py"."""
    return Path(inspect.getfile(type(args))).name


def inputs_of(prompt, is_reward):
    """Python code that makes a model's inputs from a prompt, a string or messages."""
    if not isinstance(prompt, str):
        if is_reward:  # It has learnt to score at the end of a turn, which ChatML follows with a line break.
            turns = [*prompt, {"role": "assistant", "content": "An answer."}]
            text = f"tokenizer.apply_chat_template({turns!r}, tokenize=False).rstrip()"
            return f'tokenizer({text}, add_special_tokens=False, return_tensors="pt")'
        options = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        return f"tokenizer.apply_chat_template({prompt!r}, {options})"
    return f'tokenizer({prompt!r}, return_tensors="pt")'


def licence(start, args, repository):
    """The licence that the card of the model at the start names, or None. The Hub is asked only before a push."""
    if start == "scratch":
        return "mit" if args.dataset.partition(":")[0] in toy.TASKS else None  # That of this repository, and its data.
    name, _ = errors.split(start)
    card = Path(name) / "README.md"
    with contextlib.suppress(Exception):  # It need not have a card, and a card need not name a licence.
        if card.exists() or (repository and on_the_hub(name)):
            return huggingface_hub.ModelCard.load(str(card) if card.exists() else name).data.license


def on_the_hub(name):
    """Whether the name of a model or data set can be one on the Hub, and is no path on this disk."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists()


def model_card(args, repository, before, metrics, link, about):
    """Text of a model card (README.md).

    Args: repository, the model's name on the Hub or None; before, metrics, {name: number} of the first evaluation and
    of the last update; link, the address of the tracked run or None; about, the run's config.json as a dictionary, and
    beside it a `prompt`.
    """
    name, script = repository or args.output_dir, script_of(args)
    kind = script.removesuffix(".py").removeprefix("train_")
    is_reward = kind == "reward"
    start = getattr(args, "sft_model_path", None) or getattr(args, "base_model", None)
    base, _ = errors.split(start)
    dataset, _ = errors.split(args.dataset.partition(":")[0].partition("[")[0])
    own = licence(start, args, repository)
    facts = huggingface_hub.ModelCardData(
        library_name="transformers",
        tags=[kind, "rlhf", "rlhf_details", *["lora"] * bool(args.lora_rank)],
        pipeline_tag="text-classification" if is_reward else "text-generation",
        base_model=base if base != "scratch" and on_the_hub(base) else None,
        datasets=[dataset] if "/" in dataset and on_the_hub(dataset) else None,
        license=own,
    )
    snippet = (OF_A_REWARD_MODEL if is_reward else OF_A_POLICY).format(
        name=name,
        inputs=inputs_of(about["prompt"], is_reward),
        temperature=args.temperature,
        length=args.response_length,
    )
    # Seconds say nothing of a model, nor does a bad sign that did not show.
    shown = [x for x in metrics if not x.startswith("time/") and (metrics[x] or not x.startswith("health/"))]
    shown.sort(key=lambda name: name not in before)  # the held-out figures first
    earlier = {x: f"{value:.6g}" for x, value in before.items() if before.items() - metrics.items()}
    title, number = PAPERS.get(kind, (None, None))  # A page of the user's own has no paper here.
    return CARD.format(
        facts=facts.to_yaml().strip(),
        title=name.rstrip("/").rpartition("/")[2],
        what=f"{'Reward' if is_reward else 'Language'} model trained with `{script}` of rlhf_details",
        commit=about["commit"][:12] or "unknown",
        data=f"from `{start}` on the data `{args.dataset}`, held-out data: `{args.eval_dataset}`",
        adapter="The folder `adapter` holds the LoRA adapters, which are merged into the weights.\n"
        * bool(args.lora_rank),
        terms=f"`{own}`, if that of the data allows it" if own else f"as of `{start}`, and as of the data",
        run=f"Tracked run: {link}" if link else f"Run: `{about['run']}`, not tracked online.",
        snippet=snippet,
        command=shlex.join(["python", *sys.argv]),
        rows="\n".join(f"| `{x}` | {earlier.get(x, '')} | {metrics[x]:.6g} |" for x in shown),
        versions=", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        arguments=json.dumps(dataclasses.asdict(args), indent=1),
        paper=f"[{title}](https://arxiv.org/abs/{number})" if title else "",
    )


def open_repository(args):
    """Creates the repository to push to, or finds it. Returns "owner/name". Only the main process calls this."""
    name = args.hub_model_id or re.sub(r"[^\w.-]+", "-", args.output_dir).strip("-.")
    if not huggingface_hub.get_token():
        cli.fail("--push_to_hub: no login; run `hf auth login`, or set HF_TOKEN")
    try:
        return huggingface_hub.HfApi().create_repo(name, exist_ok=True).repo_id
    except Exception as e:  # Each layer of the library raises errors of its own classes.
        cli.fail(f"--push_to_hub: the repository {name} cannot be opened ({errors.in_one_line(e)})")


def push(args, repository):
    """Uploads output_dir, and says so. Returns its address, or None where that failed. The model on the disk stays."""
    options = {"folder_path": args.output_dir, "commit_message": f"Trained with {script_of(args)}"}
    try:
        address = huggingface_hub.HfApi().upload_folder(repo_id=repository, **options).commit_url
    except Exception as e:  # The run is over, and no error of the network may spoil it.
        again = shlex.join(["hf", "upload", repository, args.output_dir])
        what = f"the model is whole in {args.output_dir}; to repeat: {again}"
        print(f"error: --push_to_hub: {errors.in_one_line(e)}; {what}", file=sys.stderr, flush=True)
        return None
    cli.say(f"pushed to {repository}: {address}")
    return str(address)
