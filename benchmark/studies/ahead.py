"""
What does it cost to sample one update ahead (--overlap)? RLOO, GRPO and PPO on the embedded task, over seeds.

    python benchmark/studies/ahead.py run --tag TAG --workers 2
    python benchmark/studies/ahead.py draw --tag TAG

Each algorithm runs without the flag, with it, and with the other's rule for what is one update old: RLOO and GRPO with
a ratio against the policy that sampled, PPO with a ratio against the newest weights and a weight of each action, at
most 2. A row is the run less the one without the flag, paired by seed. `draw` writes results/TAG/ahead.md.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in (".", "checks", "studies"))
from ablations import RUN, code_of, outcome
from intervals import ROOT, mean_interval, read_seeds, words
from mutations import GRPO, PPO, RLOO

from benchmark import COLUMNS, STAGES, Run, StudyArgs, git_tag, run_command, run_study, stage_runs

EPISODES = {"rloo": 3200, "grpo": 3200, "ppo": 1536}


def as_ppo(file):
    """Mutations with which a page takes the ratio against the policy that sampled, and weighs nothing."""
    return (
        (file, "GEN-15", "old_logprobs - sampled_logprobs", "old_logprobs - old_logprobs"),
        (file, "RLOO-7", "logprobs.detach() if one_step else old_logprobs[m]", "sampled_logprobs[m]"),
    )


OTHER = {"rloo": as_ppo(RLOO), "grpo": as_ppo(GRPO)}
OTHER["ppo"] = ((PPO, "GEN-11", "old_logprobs = sampled_logprobs", "old_logprobs = old_logprobs"),)
ROWS = {"overlap": "`--overlap`", "other": "`--overlap`, the other rule"}
MEASURES = {
    "gold": "gold at the end",
    "course": "gold over the run",
    "kl": "KL at the end",
    "kl_course": "KL over the run",
}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    columns: tuple[str, ...] = tuple(COLUMNS)
    every: int = 1


@dataclass
class DrawArgs:
    """The table."""

    tag: str
    """folder of the results"""


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    tag, runs = args.tag or git_tag(), []
    for seed in args.seeds:
        for algorithm, episodes in EPISODES.items():
            command = f"python rlhf_details/train_{algorithm}.py {RUN} --total_episodes {episodes} {STAGES}"
            runs.append(Run(algorithm, command, seed, tag, "ahead"))
            command += " --overlap"
            runs.append(Run(f"{algorithm}_overlap", command, seed, tag, "ahead"))
            code = code_of(f"ahead_{algorithm}", OTHER[algorithm], tag)
            runs.append(Run(f"{algorithm}_other", command, seed, tag, "ahead", code))
    return run_study(stage_runs(args.seeds, tag), runs, args, tag)


def measured(folder, name):
    """{seed: {measure: number}} of a run."""
    return {
        number: outcome(seed) | {"kl_course": seed["objective/kl"][1:].mean()}
        for number, seed in read_seeds(folder, name).items()
    }


def draw(args: DrawArgs):
    """Writes the table."""
    folder = ROOT / "benchmark" / "results" / args.tag
    head = ["run", "seeds", *MEASURES.values()]
    lines = [f"| {' | '.join(head)} |", "|---|---:" + "|---:" * (len(head) - 2) + "|"]
    for algorithm in EPISODES:
        plain = measured(folder / "ahead", algorithm)
        cells = [words(mean_interval([x[m] for x in plain.values()])) for m in MEASURES]
        lines.append(f"| {algorithm.upper()} | {len(plain)} | {' | '.join(cells)} |")
        for kind, title in ROWS.items():
            found = measured(folder / "ahead", f"{algorithm}_{kind}")
            pairs = [(found[n], plain[n]) for n in sorted(found.keys() & plain.keys())]
            cells = [words(mean_interval([x[m] - y[m] for x, y in pairs]), "+.2f") for m in MEASURES]
            lines.append(f"| {algorithm.upper()}, {title}, less without | {len(pairs)} | {' | '.join(cells)} |")
    text = (
        f"Written by `python benchmark/studies/ahead.py draw --tag {args.tag}`: means and 95 % intervals, by seed.\n\n"
    )
    (folder / "ahead.md").write_text(text + "\n".join(lines) + "\n")
    print("\n".join(lines))


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
