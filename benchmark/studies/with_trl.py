"""
A command of ours carried out by TRL, for the studies trl_*; and TRL on the samples that our script drew.

    python benchmark/studies/with_trl.py VERSION rlhf_details/train_rloo.py [flags]        one run; study.py calls it
    python benchmark/studies/with_trl.py replay trl_replay --seed 4 --runs rloo ppo        results/trl_replay/replay.md

VERSION is 0.21.0, TRL's last release with RLOO and PPO in the form of the N+ paper, or 1.16.0, with RLOO and GRPO.
Models, prompts, rewards and settings are those of our command; trl_side.py translates them, and lists what still
differs. The variable TRL_ENVIRONMENTS names the folder of the environments trl-VERSION (runs/environments), which
speed.py makes where they are missing.

The curves are of the training samples. The figures before and after training are one evaluator's: our sampler on the
held-out prompts, with the noise of (seed, EVALUATION, 0), which is what our scripts' own eval/* are, to the digit.

`replay` takes the samples away as a cause: TRL is given those that our script drew, update by update, and the weights
that both arrive at are compared. Rows of the table that it does not renew stay.
"""

import dataclasses
import importlib
import inspect
import json
import math
import os
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import tyro
from held_out import evaluate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT

THEIRS = "whole_means", "prepared_data"  # what a run of trl_replay may switch on TRL's side alone, see trl_side.py
HEAD = """\
# TRL on our samples

Written by `python benchmark/studies/with_trl.py replay {study}`. How far TRL's weights end from ours, as a share of how
far ours have moved, when both train on the samples that our script drew. {text}

| algorithm | seed | against | updates | distance |
|---|---:|---|---:|---:|
"""


# ---- TRL's side ------------------------------------------------------------------------------------------------------
def parsed(script, words):
    """(our page's module, its Args) of a command."""
    from rlhf_details.plumbing import cli

    page = importlib.import_module(f"rlhf_details.{Path(script).stem}")
    args = cli.parse(page.Args, words)
    return page, page.with_objective(args) if hasattr(page, "with_objective") else args


def spec_of(page, args, folder):
    """What trl_side.py is told of a run, with the training prompts in the folder."""
    from rlhf_details.plumbing import data, models

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = models.load_tokenizer(args.sft_model_path, "--sft_model_path", args)
    prompts, _ = data.load_prompts(dataclasses.replace(args, eval_dataset=None), tokenizer, room=math.inf)
    names = []  # the columns that the reward function takes
    if args.reward_fn:
        path, _, function = args.reward_fn[0].rpartition(":")
        taken = inspect.signature(runpy.run_path(path)[function]).parameters
        names = [name for name in taken if name not in ("prompts", "completions")]
    with open(folder / "prompts.jsonl", "w") as file:
        for prompt in prompts:
            text = tokenizer.decode(prompt.ids)
            if tokenizer(text).input_ids != prompt.ids:
                raise ValueError(f"TRL would read other tokens than ours of {text!r}")
            file.write(json.dumps({"prompt": text} | {name: prompt.columns[name] for name in names}) + "\n")
    spec = {"algorithm": page.__name__.rpartition("_")[2], "policy": args.sft_model_path, "seed": args.seed}
    spec |= {"settings": dataclasses.asdict(args), "output_dir": str(folder / "policy")}
    spec |= {"prompts": str(folder / "prompts.jsonl"), "result": str(folder / "result.json")}
    spec["special_tokens"] = {"eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    return spec | ({"reward_fn": args.reward_fn[0], "columns": names} if names else {"reward": args.reward_model_path})


def run_trl(version, spec, folder):
    """Runs trl_side.py by a TRL version: with none of this process's modules, and no network."""
    from speed import environment_of

    (folder / "spec.json").write_text(json.dumps(spec, indent=1))
    environments = os.environ.get("TRL_ENVIRONMENTS", str(ROOT / "runs" / "environments"))
    (python, _), _ = environment_of(version, SimpleNamespace(wheels=None, environments=environments, work_dir="runs"))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    worker = Path(__file__).resolve().with_name("trl_side.py")
    subprocess.run([python, str(worker), str(folder / "spec.json")], check=True, env=environ)


def train(version, script, *words):
    """Trains in TRL's environment, evaluates in this one; writes runs/<run_name>/metrics.jsonl."""
    page, args = parsed(script, words)
    here = Path.cwd()
    spec = spec_of(page, args, here)
    names = "dataset", "eval_dataset", "temperature", "response_length", "missing_eos_penalty"
    changes = {name: getattr(args, name) for name in names}
    changes |= {"reward_fn": args.reward_fn[0]} if args.reward_fn else {}
    judge = args.sft_model_path, args.reward_model_path, args.seed
    first = {"update": 0, "episode": 0} | evaluate(args.sft_model_path, *judge, **changes)
    run_trl(version, spec, here)
    rows = json.loads(Path(spec["result"]).read_text())["rows"]
    if len(rows) != args.total_episodes // args.batch_size:
        raise RuntimeError(f"TRL made {len(rows)} updates, not {args.total_episodes // args.batch_size}")
    rows[-1] |= evaluate(spec["output_dir"], *judge, **changes)
    folder = here / "runs" / args.run_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [first, *rows]))


# ---- replay ----------------------------------------------------------------------------------------------------------
@dataclass
class ReplayArgs:
    """TRL is trained on our script's samples: how far apart are the two policies?"""

    study: tyro.conf.Positional[str]
    """study whose runs are replayed; a run says by which TRL versions"""
    runs: tuple[str, ...] = ()
    """names of runs; none: all"""
    seed: int = 1
    """seed of the models, which must be there, and of our samples"""


def record(page, args, folder):
    """Trains our policy into folder/ours; folder/samples.json gets its samples: of each update [query, response], both
    token ids.
    """
    from rlhf_details import utils

    kept, sample = {}, utils.sample

    def recorded(policy, queries, query_mask, rows, **options):
        responses, mask, logprobs = sample(policy, queries, query_mask, rows, **options)
        _, purpose, update = options["key"]
        for i, row in enumerate(rows.tolist() if purpose == utils.TRAINING else ()):
            query = queries[i][query_mask[i]].tolist()
            kept.setdefault(update, {})[row] = [query, responses[i][mask[i]].tolist()]
        return responses, mask, logprobs

    rest = {"run_name": f"record_{folder.name}", "overwrite": True, "eval_dataset": None}
    rest |= {"num_sample_generations": 0, "checkpoint_every": 0, "output_dir": str(folder / "ours")}
    utils.sample = recorded
    try:
        page.main(dataclasses.replace(args, **rest))
    finally:
        utils.sample = sample
    samples = [[kept[update][row] for row in sorted(kept[update])] for update in sorted(kept)]
    (folder / "samples.json").write_text(json.dumps(samples))


def distance(a, b, start):
    """|a - b| / |a - start| over all weights of three model folders."""
    from safetensors.torch import load_file

    a, b, start = (load_file(Path(folder) / "model.safetensors") for folder in (a, b, start))
    apart, moved = (sum(((x[name] - y[name]).double() ** 2).sum() for name in start) for x, y in ((a, b), (a, start)))
    return (apart / moved).sqrt().item()


def replay(args: ReplayArgs):
    """Writes the table."""
    from study import Study

    study = Study(args.study)
    path = ROOT / "benchmark" / "results" / study.name / "replay.md"
    rows = replayed(path)
    for name in args.runs or study.said.get("only", study.runs):
        spec = study.runs[name]
        folder = ROOT / "runs" / "benchmark" / study.name / f"{name}_s{args.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        _, script, *words = shlex.split(study.command(name).format(root=ROOT, seed=args.seed))
        page, ours = parsed(script, [*words, "--seed", str(args.seed)])
        record(page, ours, folder)
        for version in spec["trl"].split():
            theirs = folder / version
            told = spec_of(page, ours, theirs) | {x: True for x in THEIRS if x in spec.get("theirs", "").split()}
            run_trl(version, told | {"samples": str(folder / "samples.json")}, theirs)
            apart = distance(folder / "ours", told["output_dir"], ours.sft_model_path)
            updates, key = ours.total_episodes // ours.batch_size, (spec["what"], str(args.seed), f"TRL {version}")
            rows[key] = f"| {' | '.join(key)} | {updates} | {100 * apart:.2g} % |"
            print(rows[key], flush=True)
    order = {spec["what"]: place for place, spec in enumerate(study.runs.values()) if "what" in spec}
    lines = [rows[key] for key in sorted(rows, key=lambda key: (int(key[1]), order[key[0]]))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD.format(study=study.name, text=study.said.get("head", "")) + "\n".join(lines) + "\n")


def replayed(path):
    """{(what, seed, TRL's label): line} of a table of replays that is there already."""
    lines = [line for line in path.read_text().splitlines() if line.endswith(" % |")] if path.exists() else []
    return {tuple(cell.strip() for cell in line.split("|")[1:4]): line for line in lines}


COMMANDS = {"replay": (ReplayArgs, replay)}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1][0].isdigit():
        train(*sys.argv[1:])
    else:
        from benchmark import run_command

        sys.exit(run_command(COMMANDS))
