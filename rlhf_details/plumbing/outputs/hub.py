"""
What others need in order to use a trained model: its card, always, and its place on the Hugging Face Hub, on request.
This module speaks to the Hub under --push_to_hub only.
"""

import contextlib
import inspect
import re
import shlex
import sys
from pathlib import Path

import huggingface_hub
import psutil

from rlhf_details.plumbing import console

MAY_BE_OLD = (  # what one run writes and the next one may not; the Hub would keep it beside the new model
    "model.safetensors*",
    "model-*-of-*.safetensors",
    "adapter/*",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*",
)


def script_of(args):
    """The script's file name, e.g. "train_rloo.py"."""
    return Path(inspect.getfile(type(args))).name


def on_the_hub(name):
    """Whether the name of a model or data set can be one on the Hub, and is no path on this disk."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists()


def command():
    """The command of this run as it was typed, such as `accelerate launch --num_processes 2 train_rloo.py`."""
    with contextlib.suppress(psutil.Error, AttributeError):  # Another user's process does not say what its command is.
        words = psutil.Process().parent().cmdline()
        if words[-len(sys.argv) :] == sys.argv:  # It has launched this one.
            program = words[1:] if Path(words[0]).name.startswith("python") and words[1][0] != "-" else words
            return shlex.join([Path(program[0]).name, *program[1:]])
    return shlex.join(["python", *sys.argv])


def model_card(args, before, metrics, about, link):
    """Text of a model card (README.md).

    Args: before, metrics, {name: number} of the first evaluation and of the last update; about, the run's config.json;
    link, the address of the tracked run, or None.
    """
    script = script_of(args)
    start = getattr(args, "sft_model_path", None) or getattr(args, "base_model", None)
    kind = script.removesuffix(".py").removeprefix("train_")
    base, _ = console.split(start)
    dataset, _ = console.split(args.dataset.partition(":")[0].partition("[")[0])
    is_reward = kind == "reward"
    has_adapters = bool(args.lora_rank)
    facts = huggingface_hub.ModelCardData(
        library_name="transformers",
        tags=[kind, "rlhf", "rlhf_details", *["lora"] * has_adapters],
        pipeline_tag="text-classification" if is_reward else "text-generation",
        base_model=base if base != "scratch" and on_the_hub(base) else None,
        datasets=[dataset] if "/" in dataset and on_the_hub(dataset) else None,
    )
    place = (about["hub"] or args.output_dir).rstrip("/")
    title = place.rpartition("/")[2]
    auto = f"AutoModelFor{'SequenceClassification' if is_reward else 'CausalLM'}"
    papers = (
        ", ".join(dict.fromkeys(re.findall(r"arXiv \d+\.\d+", inspect.getmodule(type(args)).__doc__))) or "its method"
    )
    note = "The folder `adapter` holds the LoRA adapters, which are merged into the weights.\n" * has_adapters
    note += "A score is the logit plus the `reward_bias` of config.json.\n" * is_reward
    rows = ""
    for name, value in metrics.items():
        if not name.startswith(("time/", "health/")):  # They say nothing of the model.
            first = f"{before[name]:.6g}" if name in before else ""
            rows += f"| `{name}` | {first} | {value:.6g} |\n"
    text = f"""\
---
{facts.to_yaml().strip()}
---

# {title}

{"Reward" if is_reward else "Language"} model trained with `{script}` of rlhf_details from `{start}`, on the data \
`{args.dataset}`; held-out data: `{args.eval_dataset}`.
{note}
{f"Tracked run: {link}" if link else f"Run: `{about['run']}`"}; rlhf_details, commit `{about["commit"] or "unknown"}`, \
{", ".join(f"{name} {version}" for name, version in about["versions"].items())}.

```
{command()}
```

It is loaded by

```python
from transformers import {auto}, AutoTokenizer

model, tokenizer = ({auto}.from_pretrained({place!r}), AutoTokenizer.from_pretrained({place!r}))
```

| metric | first evaluation | last update |
|---|---:|---:|
{rows}
`training_args.json` has all arguments. To cite: {papers}, and rlhf_details, whose `CITATION.cff` says how.
"""
    return re.sub(r"(?<![\w:/.~-])/([^\s/'\"`]+/)+", "", text)  # of whole paths the names: others have no such folders


def open_repository(args):
    """Creates the repository to push to, or finds it. Returns "owner/name". Only the main process calls this."""
    name = args.hub_model_id or re.sub(r"[^\w.-]+", "-", args.output_dir).strip("-.")
    try:
        return huggingface_hub.HfApi().create_repo(name, exist_ok=True).repo_id
    except Exception as e:  # Each layer of the library raises errors of its own classes.
        hint = "`hf auth login` or HF_TOKEN logs you in"
        console.fail(f"--push_to_hub: the repository {name} cannot be opened ({console.in_one_line(e)}); {hint}")


def push(args, repository):
    """Uploads output_dir, and says where it is, or that this failed. The model on the disk stays."""
    options = dict(commit_message=f"Trained with {script_of(args)}", delete_patterns=list(MAY_BE_OLD))
    try:
        pushed = huggingface_hub.HfApi().upload_folder(repo_id=repository, folder_path=args.output_dir, **options)
        console.say(f"pushed to {repository}: {pushed.commit_url}")
    except Exception as e:  # The run is over, and no error of the network may spoil it.
        deleting = (word for pattern in MAY_BE_OLD for word in ("--delete", pattern))
        again = shlex.join(["hf", "upload", repository, args.output_dir, *deleting])
        what = f"the model is whole in {args.output_dir}; to repeat: {again}"
        console.complain(f"--push_to_hub: {console.in_one_line(e)}; {what}")
