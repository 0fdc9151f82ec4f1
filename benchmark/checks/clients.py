"""
Reads models that were trained here with the programs that people use elsewhere, and compares what these make of them.

    python benchmark/checks/clients.py OUT                    trains small models into OUT, then runs each client
    ENVIRONMENT/bin/python benchmark/checks/clients.py OUT    the clients of another environment, on the same models
    python benchmark/checks/clients.py OUT --table FILE       and writes what all of these calls have found as a table

The first call needs this repository's environment, and takes some three minutes on one core. It also writes what the
scripts here make of the models (expected.json), so the clients import nothing of this repository. A client whose
package is missing is one line.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/5_long_runs.md"
GREEDY = dict(do_sample=False, max_new_tokens=12)
SMALL = {"total_episodes": 512, "output_dir": "models/toy/rloo", "run_name": "rloo"}


# ---- the models, and what they are here ------------------------------------------------------------------------------
def make(out):
    """Trains the toy stages, RLOO, and RLOO with adapters, saves a Llama, and writes expected.json. out: a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_details import toy, train_reward, train_rloo, utils
    from rlhf_details.plumbing import checkpoint, models

    for changes in ({}, {"output_dir": "models/toy/lora", "run_name": "lora", "lora_rank": 4, "learning_rate": 5e-3}):
        words = [str(word) for name, value in (SMALL | changes).items() for word in (f"--{name}", value)]
        subprocess.run([sys.executable, ROOT / "rlhf_details/train_rloo.py", *words], cwd=out, check=True)
    os.chdir(out)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=254, initializer_range=0.2, rope_theta=1e5, **sizes))
    checkpoint.save_folder(train_rloo.Args(output_dir="models/llama"), llama, toy.tokenizer())

    args, rows = train_rloo.Args(), toy.rows("prompts", "test")[:64]
    policy, lora = (models.load_policy(f"models/toy/{x}", "--policy_path", args).eval() for x in ("rloo", "lora"))
    tokenizer = models.load_tokenizer("models/toy/rloo", "--policy_path", args)
    reward_model = models.load_reward_model("models/toy/reward", args)
    reward, bias = train_reward.Reward(reward_model).eval(), reward_model.config.reward_bias
    pairs = [utils.encode(tokenizer, row["prompt"], row["completion"]) for row in rows]
    others = [pairs[i - 1][1] for i in range(len(rows))]
    with torch.no_grad():
        scores = reward(*utils.left_pad([[*query, *answer] for query, answer in pairs]))
        picks = [
            int(logprob(policy, query, a[:-1]) < logprob(policy, query, b[:-1]))
            for (query, a), b in zip(pairs, others, strict=True)
        ]
        texts = models.decode_all(tokenizer, [greedy(policy, query) for query, _ in pairs[:8]])
    expected = {
        "prompts": [row["prompt"] for row in rows],
        "completions": [row["completion"] for row in rows],
        "ids": [list(query) for query, _ in pairs],
        "completion_ids": [list(answer) for _, answer in pairs],
        "scores": (scores + bias).tolist(),
        "picks": picks,  # whether another row's completion is likelier than the row's own
        "texts": [row["prompt"] + text for row, text in zip(rows, texts, strict=False)],
        "logits": {"rloo": logits(policy).tolist(), "lora": logits(lora).tolist(), "llama": logits(llama).tolist()},
    }
    Path("expected.json").write_text(json.dumps(expected))


def logits(model):
    """[50, 254] of the same 50 tokens."""
    with torch.no_grad():
        return model.eval()(torch.arange(3, 53).unsqueeze(0)).logits[0]


def logprob(model, query, answer):
    """The log-prob of an answer as a whole. Args: lists of token ids."""
    table = model(torch.tensor([[*query, *answer]])).logits[0, len(query) - 1 : -1].log_softmax(-1)
    return table[torch.arange(len(answer)), torch.tensor(answer)].sum().item()


def greedy(model, query):
    """Token ids of the likeliest continuation, token by token, up to EOS."""
    found = list(query)
    for _ in range(GREEDY["max_new_tokens"]):
        token = int(model(torch.tensor([found])).logits[0, -1].argmax())
        if token == model.config.eos_token_id:
            break
        found.append(token)
    return found[len(query) :]


# ---- the clients: each returns what it has shown, or raises ----------------------------------------------------------
def gap(x, y):
    """The largest distance of two tables of numbers."""
    return (torch.as_tensor(x) - torch.as_tensor(y)).abs().max().item()


def transformers(expected):
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained("models/toy/rloo")
    assert tokenizer(expected["prompts"]).input_ids == expected["ids"]
    for name, folder in {"rloo": "models/toy/rloo", "llama": "models/llama"}.items():
        assert gap(logits(AutoModelForCausalLM.from_pretrained(folder)), expected["logits"][name]) < 1e-4, name
    write = pipeline("text-generation", "models/toy/rloo")
    texts = [found[0]["generated_text"] for found in write(expected["prompts"][:8], **GREEDY)]
    assert texts == expected["texts"], texts
    judge = pipeline("text-classification", "models/toy/reward")
    pairs = zip(expected["prompts"], expected["completions"], strict=True)
    scores = [found["score"] for found in judge([f"{prompt} {answer}" for prompt, answer in pairs])]
    difference = gap([x + judge.model.config.reward_bias for x in scores], expected["scores"])
    assert difference < 1e-4, difference
    return f"pipelines: greedy texts equal, scores within {difference:.0e}; logits of GPT-NeoX and Llama equal"


def peft(expected):
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    adapter, base = "models/toy/lora/adapter", AutoModelForCausalLM.from_pretrained("models/toy/sft")
    over = PeftModel.from_pretrained(base, adapter), AutoPeftModelForCausalLM.from_pretrained(adapter)
    differences = [gap(logits(model), expected["logits"]["lora"]) for model in over]
    assert max(differences) < 1e-4, differences
    return f"adapters over their base: logits within {max(differences):.0e} of the merged model's"


def trl(expected):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    found = {}
    exec(re.search(r"```python\n((?:(?!```).)*?def score\(.*?)```", GUIDE.read_text(), re.S)[1], found)
    bias = found["model"].config.reward_bias
    ours = [x + bias for x in found["score"](expected["prompts"], expected["completion_ids"])]
    difference = gap(ours, expected["scores"])
    assert difference < 1e-4, difference
    seen = []

    def score(prompts, completions, completion_ids, **columns):
        rewards = found["score"](prompts, completion_ids, **columns)
        seen.extend(zip(prompts, completions, rewards, strict=True))
        return rewards

    options = dict(num_generations=4, per_device_train_batch_size=64, max_completion_length=36, max_steps=2)
    options |= dict(report_to="none", use_cpu=True, save_strategy="no", beta=0.0, output_dir="models/trl")
    args, rows = GRPOConfig(**options), Dataset.from_dict({"prompt": expected["prompts"]})
    GRPOTrainer("models/toy/sft", [score, "models/toy/reward"], args=args, train_dataset=rows).train()
    assert len(seen) == 128 and all(text.startswith(" ") for _, text, _ in seen if text)
    # What TRL gives the model where the folder itself is a reward: the text without EOS.
    texts = [prompt + text for prompt, text, _ in seen]
    inputs = found["tokenizer"](texts, padding=True, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        without = found["model"](**inputs).logits[:, 0]
    pair = torch.stack([without, torch.tensor([reward for *_, reward in seen])])
    related = f"the folder itself as a reward correlates {torch.corrcoef(pair)[0, 1]:.2f} with it"
    return f"GRPOTrainer, the guide's `score`: within {difference:.0e} of ours; {related}"


TASK = """task: toy_choice
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def lm_eval(expected):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    answers = expected["completions"]
    rows = [{"prompt": x, "choices": [answers[i], answers[i - 1]]} for i, x in enumerate(expected["prompts"])]
    Path("choices.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("tasks").mkdir(exist_ok=True)
    Path("tasks/toy_choice.yaml").write_text(TASK)
    manager = TaskManager(include_path="tasks", include_defaults=False)
    model = dict(model="hf", model_args="pretrained=models/toy/rloo", device="cpu", batch_size=8)
    found = simple_evaluate(**model, tasks=["toy_choice"], task_manager=manager)
    accuracy, ours = found["results"]["toy_choice"]["acc,none"], 1 - sum(expected["picks"]) / len(expected["picks"])
    assert abs(accuracy - ours) < 1e-6, (accuracy, ours)
    return f"a local multiple-choice task: accuracy {accuracy:.3f}, as by our log-probs"


CLIENTS = {client.__name__: client for client in (transformers, peft, trl, lm_eval)}


# ---- what they say ---------------------------------------------------------------------------------------------------
def versions(name):
    """A client's version and that of the transformers under it, or None where its package is missing."""
    try:
        under = "" if name == "transformers" else f", transformers {version('transformers')}"
        return f"{name} {version(name)}{under}"
    except PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the models and of what was found")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="these clients alone")
    parser.add_argument("--table", type=Path, help="Markdown file for what has been found in OUT so far")
    args = parser.parse_args()
    out, table = args.out.resolve(), args.table and args.table.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "expected.json").exists():
        make(out)
    os.chdir(out)
    expected = json.loads(Path("expected.json").read_text())
    results = Path("results.json")
    found = json.loads(results.read_text()) if results.exists() else {}
    failed = []
    for name in args.only:
        if not (key := versions(name)):
            print(f"{name}: not installed")
            continue
        try:
            found[key] = CLIENTS[name](expected)
        except Exception:
            traceback.print_exc()
            found[key] = "failed"
            failed.append(name)
        print(f"{key}: {found[key]}", flush=True)
    results.write_text(json.dumps(found, indent=1))
    if table:
        rows = [f"| {key} | {words} |" for key, words in sorted(found.items())]
        head = "`python benchmark/checks/clients.py OUT --table FILE`, in several environments:"
        table.write_text("\n".join([head, "", "| client | what it made of the models |", "|---|---|", *rows, ""]))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
