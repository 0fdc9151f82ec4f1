"""What tests share and import by name: tiny models on disk, short runs of the pages, and comparisons of runs.

Everything is offline and on the CPU. Fixtures are in conftest.py.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel

from rlhf_details import toy, utils
from rlhf_details.plumbing.inputs import cli

ROOT = Path(__file__).parent.parent
REWARDED = "train_rloo", "train_grpo", "train_ppo"  # the pages that train on rewards
OWN = "train_distill", "train_agent"  # those that take one optimiser step for each rollout
PAGES = {name: importlib.import_module(f"rlhf_details.{name}") for name in (*REWARDED, *OWN)}
STAGES = "train_sft", "train_reward", "train_dpo", "evaluate"
SCRIPTS = PAGES | {name: importlib.import_module(f"rlhf_details.{name}") for name in STAGES}
SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
LM_HUMAN_PREFERENCES = dict(
    stop_token="none", truncate_token="eos", truncate_after=2, missing_eos_mode="replace", value_model="shared",
    adaptive_kl=True, kl_coef=0.15, whiten_rewards=True, tf_adam=True,
)  # fmt: skip


def flags_shown(text):
    """{flag: its name, type and text} of what --help has printed."""
    parts = re.split(r"^\W{2,3}--(?=\w)", text, flags=re.M)[1:]
    return {re.match(r"\w+", part)[0]: " ".join(part.replace("│", " ").split()) for part in parts}


def shown_by_help(kind, words=()):
    """What --help prints of a page's Args, beside these words."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit, match=r"^0$"):
        cli.parse(kind, [*words, "--help"])
    return out.getvalue()


# ---- tiny models -----------------------------------------------------------------------------------------------------
def tiny_config(**changes):
    """A GPT-NeoX configuration over the toy vocabulary, small enough for a run of ten updates in a second or two."""
    sizes = SIZES | dict(intermediate_size=64, vocab_size=len(toy.tokenizer()), bos_token_id=None)
    ids = dict(eos_token_id=toy.tokenizer().eos_token_id, pad_token_id=toy.tokenizer().pad_token_id)
    return transformers.GPTNeoXConfig(**(sizes | ids | changes))


def save_pair(folder, **changes):
    """Writes `folder`/policy, /reward and /teacher, with weights so large that responses and scores differ."""
    torch.manual_seed(0)
    config = tiny_config(initializer_range=0.2, **changes)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    transformers.GPTNeoXForSequenceClassification(config).save_pretrained(folder / "reward")
    torch.manual_seed(1)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder / "teacher")
    for name in ("policy", "reward", "teacher"):
        toy.tokenizer().save_pretrained(folder / name)
    return folder


def save_ragged(folder):
    """save_pair, but the policy often says EOS, so that lengths differ, and the reward model's bias is 0.7."""
    save_pair(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    with torch.no_grad():
        eos = model.get_output_embeddings().weight[model.config.eos_token_id]
        model.gpt_neox.final_layer_norm.bias += 3.5 * eos / eos.square().sum()  # The logit of EOS gains 3.5.
    model.save_pretrained(folder / "policy")
    edit_json(folder / "reward/config.json", reward_bias=0.7)
    return folder


def edit_json(path, **changes):
    """Changes entries of the object that a JSON file holds."""
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | changes))


def swap_words(folder, a, b):
    """Gives two words of the tokenizer of a model folder each other's id."""
    model = json.loads((path := Path(folder, "tokenizer.json")).read_text())["model"]
    model["vocab"] |= {a: model["vocab"][b], b: model["vocab"][a]}
    edit_json(path, model=model)


def tiny_model(kind, **changes):
    """A random causal language model of an architecture, 97 tokens, with weights large enough to tell tokens apart."""
    torch.manual_seed(0)
    options = SIZES | dict(num_key_value_heads=4, initializer_range=0.2) | changes
    config = transformers.AutoConfig.for_model(kind, **options)
    return utils.disable_dropout(transformers.AutoModelForCausalLM.from_config(config)).eval()


def tiny_reward_model(kind, **changes):
    """A random model of an architecture that gives a score, 97 tokens."""
    torch.manual_seed(0)
    options = SIZES | dict(num_key_value_heads=4, initializer_range=0.2, num_labels=1) | changes
    config = transformers.AutoConfig.for_model(kind, **options)
    return utils.disable_dropout(transformers.AutoModelForSequenceClassification.from_config(config)).eval()


def random_batch(groups=3, k=4, Q=9, R=6):
    """Ragged queries, query_mask [groups * k, Q], responses and response_mask [groups * k, R] over 97 tokens."""
    g = torch.Generator().manual_seed(1)
    queries, query_mask = utils.left_pad([torch.randint(97, (n,), generator=g).tolist() for n in (Q, 2, 5)[:groups]])
    responses = torch.randint(97, (groups * k, R), generator=g)
    lengths = torch.randint(1, R + 1, (groups * k, 1), generator=g)
    return [queries.repeat_interleave(k, 0), query_mask.repeat_interleave(k, 0), responses, torch.arange(R) < lengths]


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def word_tokenizer(template=None, words="a b c d", **special):
    """A tokenizer of four special tokens and whole words; template, what it puts around a text, e.g. "<s> $A"."""
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words.split()])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        pair = [(w, vocabulary[w]) for w in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=pair)
    names = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>") | special
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def metaspace_tokenizer(scheme="always"):
    """As Llama 2's: a text begins with a space, so that "." alone is another token than "." after a word.

    scheme: "always" also behind a special token, "first" at the beginning alone, "never", or a "normalizer" does it.
    """
    merges = [("▁", x) for x in ".ab"]
    vocabulary = ["<unk>", "</s>", "▁", *".ab", *map("".join, merges)]
    backend = Tokenizer(BPE(vocab={w: i for i, w in enumerate(vocabulary)}, merges=merges, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    if scheme == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


# ---- runs in this process --------------------------------------------------------------------------------------------
# Flags of train_agent.py: episodes have one to four turns.
CHATTY = dict(env_fn=f"{ROOT}/tests/environments.py:chatty", response_length=24, max_turns=4)


def page_args(page, tiny, **changes):
    """Args of a short run of a page on the models in the folder `tiny`.

    3 updates of 16 episodes (RLOO and GRPO: 4 for each prompt), responses of 8 tokens, one optimiser step for each
    rollout. train_distill has no reward model, and it and train_agent never more steps, so they are not given what
    changes say of them. The environment of train_agent says nothing.
    """
    values = dict(
        sft_model_path=str(tiny / "policy"), reward_model_path=str(tiny / "reward"), total_episodes=48, batch_size=16,
        response_length=8, temperature=1.0, num_ppo_epochs=1, num_mini_batches=1, learning_rate=1e-3, take=256,
        num_sample_generations=0, run_name="run", overwrite=True,
    )  # fmt: skip
    values |= {"train_rloo": dict(rloo_k=4), "train_grpo": dict(group_size=4)}.get(page, {})
    if page == "train_agent":
        values |= dict(dataset="toy", rloo_k=4, env_fn=f"{ROOT}/tests/environments.py:silent")
    values |= changes
    if page == "train_distill":
        values = {"teacher_model_path": str(tiny / "teacher")} | values
        values.pop("reward_model_path", None)
    if page in OWN:
        for name in ("num_ppo_epochs", "num_mini_batches", "cliprange"):
            values.pop(name, None)
    return PAGES[page].Args(**values)


def responses_per_prompt(args):
    """k of a page's arguments, 1 where a page has none."""
    return getattr(args, "rloo_k", getattr(args, "group_size", getattr(args, "responses_per_prompt", 1)))


def rloo_args(tiny, **changes):
    """page_args of train_rloo."""
    return page_args("train_rloo", tiny, **changes)


def ppo_args(tiny, **changes):
    """page_args of train_ppo."""
    return page_args("train_ppo", tiny, **changes)


def read_metrics(run_folder):
    """Rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_folder) / "metrics.jsonl").read_text().splitlines()]


def run_page(page, tiny, **changes):
    """Runs main of a page in this process; returns its rows of metrics."""
    return read_metrics(PAGES[page].main(page_args(page, tiny, **changes))["run"])


def run_rloo(tiny, **changes):
    """Runs train_rloo.main in this process; returns its rows of metrics."""
    return run_page("train_rloo", tiny, **changes)


def record(monkeypatch, module, *names):
    """{name: [(arguments, result), ...]} of every later call of these functions of a module.

    The arguments are a tuple in the order of the function's parameters, however they were given.
    """
    calls = {name: [] for name in names}

    def replace(name, real, seen):
        def recording(*args, **kwargs):
            bound = inspect.signature(real).bind(*args, **kwargs)
            bound.apply_defaults()
            seen.append((bound.args, real(*args, **kwargs)))
            return seen[-1][1]

        monkeypatch.setattr(module, name, recording)

    for name in names:
        replace(name, getattr(module, name), calls[name])
    return calls


def record_steps(monkeypatch, look):
    """[look(optimizer) before every later step of AdamW]."""
    seen, step = [], torch.optim.AdamW.step

    def recording(self, *args, **kwargs):
        seen.append(look(self))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    return seen


def fake_hub(monkeypatch):
    """Puts a stand-in in the place of huggingface_hub.HfApi: an object with the repositories' `files`, {name: {path:
    bytes}}. `api` has the methods of a real one, with their signatures, and a test may give them a `side_effect`."""
    files, api = {}, create_autospec(huggingface_hub.HfApi, instance=True)

    def create_repo(name, **options):
        files.setdefault(name := name if "/" in name else f"someone/{name}", {})
        return SimpleNamespace(repo_id=name)

    def upload_folder(repo_id, folder_path, delete_patterns=(), **options):
        for old in list(filter_repo_objects(files[repo_id], allow_patterns=delete_patterns)):
            del files[repo_id][old]
        paths = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        files[repo_id] |= {str(path.relative_to(folder_path)): path.read_bytes() for path in paths}
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    api.create_repo.side_effect, api.upload_folder.side_effect = create_repo, upload_folder
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_dummy")
    return SimpleNamespace(files=files, api=api)


# ---- other processes -------------------------------------------------------------------------------------------------
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def put_into_cache(name, folder, revision="main"):
    """Makes a folder a revision of a repository that has been downloaded."""
    kept = Path(huggingface_hub.constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    shutil.copytree(folder, kept / "snapshots" / revision)
    (kept / "refs").mkdir(exist_ok=True)
    (kept / "refs" / revision).write_text(revision)


def launch(script, flags, processes=1, cwd=None, **env):
    """Runs a script (a path, or a name in rlhf_details/) on CPU processes: a CompletedProcess."""
    command = [str(ROOT / "rlhf_details" / script), *map(str, flags)]
    if processes > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *command]
    options = dict(cwd=cwd, env=os.environ | ENVIRONMENT | env, capture_output=True, text=True, timeout=1800)
    return subprocess.run([sys.executable, *command], **options)


# ---- comparisons -----------------------------------------------------------------------------------------------------
def without_times(rows):
    """Rows of metrics without what a clock decides."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "eps"))} for row in rows]


def assert_same_curves(a, b, tolerance=1e-4, near=1e-6, apart=("val/logprob_gap",)):
    """Every metric without times within `tolerance` of the larger number plus `near`, in every update.

    apart: metrics that may be nothing but rounding error: below 1e-4 they are not compared. Before DPO's first step all
    scores are 0 up to rounding, which decides who is ahead: that accuracy is not compared, while the margins are.
    """
    assert len(a) == len(b) > 0
    for x, y in zip(without_times(a), without_times(b), strict=True):
        assert x.keys() == y.keys()
        for name in x.keys() - ({"rewards/accuracies"} if x.get("update") == 1 else set()):
            if name not in apart or max(x[name], y[name]) > 1e-4:
                allowed = tolerance * max(abs(x[name]), abs(y[name])) + near
                assert abs(x[name] - y[name]) <= allowed, (x["update"], name, x[name], y[name])
