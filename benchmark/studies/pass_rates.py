"""
How often a policy's answers are right, and how often one of several is, on some data sets (study.py calls it):

    python benchmark/studies/pass_rates.py --policy FOLDER --datasets tasks.py:test --checks tasks.py:right --seed 1

It calls evaluate.py for each data set and each check, and writes runs/<run_name>/metrics.jsonl with one row:
{"<data set>/<check>/<figure>": value}, where a figure is pass@1, pass@2, .. or the mean length in tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass
class Args:
    policy: str
    """folder of the policy, which is sampled as it was trained"""
    datasets: tuple[str, ...]
    """FILE.py:FUNCTION, whose rows are the prompts"""
    checks: tuple[str, ...]
    """FILE.py:FUNCTION, rewards that are True or False"""
    flags: str = ""
    """what evaluate.py is told besides, as --flags='--temperature 0.7'"""
    samples: int = 8
    """responses to each prompt"""
    seed: int = 1
    """seed of the samples"""
    run_name: str = "run"
    """folder under runs/"""
    overwrite: bool = True
    """replace it"""


def main(args: Args):
    from rlhf_details import evaluate
    from rlhf_details.plumbing import cli

    folder, row = Path("runs") / args.run_name, {"update": 0}
    for dataset in args.datasets:
        for check in args.checks:
            name = "/".join(text.rpartition(":")[2] for text in (dataset, check))
            words = ["--policy_path", args.policy, "--dataset", dataset, "--reward_fn", check, "--seed", str(args.seed)]
            words += ["--samples_per_prompt", str(args.samples), *args.flags.split(), "--overwrite"]
            words += ["--output_dir", str(folder / name.replace("/", "_"))]
            figures = evaluate.main(cli.parse(evaluate.Args, words))["metrics"]["policy"]
            kept = {figure: x["value"] for figure, x in figures.items() if "pass@" in figure or figure == "length"}
            row |= {f"{name}/{figure}": value for figure, value in kept.items()}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
