"""
Exercises: find what is broken, or write what is missing.

    python exercises/break_it.py 7               a copy of the scripts with one detail taken out, and what to run
    python exercises/break_it.py 7 --hint        a push in the right direction
    python exercises/break_it.py 7 --solution    the line, its tag, what it costs, and the test that fails
    python exercises/break_it.py 13              a function without a body, for you to fill
    python exercises/break_it.py 13 --check      compares yours with the one of this repository

exercises/README.md has the list. Everything is written to runs/exercise_N_code.
"""

import argparse
import difflib
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmark" / "checks"))
import details
import mutations

ROOT = mutations.ROOT

SKELETON = '''import torch


def {signature}:
    """{task}
    """
    raise NotImplementedError("your turn")
'''


def exercises():
    """{number: exercise}, as in exercises.toml."""
    text = Path(__file__).with_name("exercises.toml").read_text(encoding="utf-8")
    return {int(number): exercise for number, exercise in tomllib.loads(text).items()}


# ---- one detail taken out --------------------------------------------------------------------------------------------
def broken(exercise):
    """The source of the exercise's file with its detail taken out; ValueError unless its text is there once."""
    source = (ROOT / "rlhf_details" / exercise["file"]).read_text(encoding="utf-8")
    if source.count(exercise["old"]) != 1:
        raise ValueError(f"{exercise['old']!r} is there {source.count(exercise['old'])} times in {exercise['file']}")
    return source.replace(exercise["old"], exercise["new"])


def make(number, exercise, folder):
    """Writes the broken copy and says what to do with it."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "rlhf_details", folder / "rlhf_details", dirs_exist_ok=True, ignore=ignored)
    (folder / "rlhf_details" / exercise["file"]).write_text(broken(exercise), encoding="utf-8")
    page, _, flags = exercise["run"].partition(" ")
    same = f"--num_sample_generations 2 {flags}"
    print(f"Exercise {number}: {exercise['task']}\n\nRun the broken copy, and then a healthy run to compare it with:\n")
    for name, code in (("exercise", f"PYTHONPATH={folder} python {folder}/"), ("healthy", "python ")):
        print(f"  {code}rlhf_details/{page} --run_name {name}_{number} \\")
        print(f"      --output_dir models/toy/{name}_{number} {same}")
    print(f"  python benchmark/plot.py runs/healthy_{number} runs/exercise_{number}\n")
    print(f"What the broken run prints at its end needs PYTHONPATH={folder} as well. --hint and --solution help.")


def measured(exercise):
    """What this break was measured to cost: its own row of the ablations, or else that of its tag."""
    if "row" not in exercise:
        return details.worth().get(exercise["tag"], {"says": "not measured"})["says"]
    table = (ROOT / "benchmark" / "results" / "ablations" / "table.md").read_text(encoding="utf-8")
    line = next(line for line in table.splitlines() if f"| {exercise['row']} |" in line)
    _, _, what, base, _, gold, course, kl, _, verdict = [cell.strip(" *") for cell in line.split("|")[:10]]
    return f"{what}, {base}: gold {gold}, gold over the run {course}, KL {kl}; {verdict}"


def solve(exercise):
    """Prints the line, its tag, what it costs and the tests that fail without it."""
    before = (ROOT / "rlhf_details" / exercise["file"]).read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(before, broken(exercise).splitlines(), "healthy", "broken", lineterm="", n=2)
    print("\n".join(lines), "\n")
    tag = exercise["tag"]
    print(f"[{tag}] {mutations.DETAILS[tag]['what']}")
    print("measured, ten seeds: " + measured(exercise))
    print("tests: " + ", ".join(mutations.tests_of(tag)))


# ---- one function to write -------------------------------------------------------------------------------------------
def answer(number):
    """(arguments of the function, what it must return, {what is wrong: what it returns then}) on random numbers."""
    from rlhf_details import train_distill, train_ppo, train_rloo

    x = torch.Generator().manual_seed(number)
    first, second = torch.randn(12, 9, generator=x), torch.randn(12, 9, generator=x)
    u = torch.rand(12, 9, generator=x, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    if number == 13:
        groups, columns = first[:, 0].reshape(-1, 3), first[:, 0].reshape(3, -1)
        mistakes = {"the mean has the response's own reward in it": groups - groups.mean(1, keepdim=True)}
        mistakes["the k of a prompt are adjacent"] = 1.5 * (columns - columns.mean(0))
        mistakes = {what: x.flatten() for what, x in mistakes.items()}
        return (
            (first[:, 0], 3),
            train_rloo.rloo_advantages(first[:, 0], 3, torch.ones_like(first[:, 0], dtype=torch.bool)),
            mistakes,
        )
    if number == 14:
        mistakes = {"lam is missing": train_ppo.compute_gae(first, second, 0.98, 1.0)[0]}
        mistakes["A_{t+1} is missing"] = train_ppo.compute_gae(first, second, 0.98, 0.0)[0]
        mistakes["these are the returns, A + V"] = train_ppo.compute_gae(first, second, 0.98, 0.95)[1]
        return (first, second, 0.98, 0.95), train_ppo.compute_gae(first, second, 0.98, 0.95)[0], mistakes
    if number == 15:
        mistakes = {"d has the other sign": train_ppo.kl_penalty(first - second, first, "k3")}
        mistakes["this is k1"] = train_ppo.kl_penalty(first, first - second, "kl")
        return (first, first - second), train_ppo.kl_penalty(first, first - second, "k3"), mistakes
    if number == 16:
        mistakes = {"there is no noise": first.argmax(-1), "a log is missing": (first - u.log()).argmax(-1)}
        return (first, u), (first - (-u.log()).log()).argmax(-1), mistakes
    mask = torch.arange(9) < torch.arange(1, 13).unsqueeze(1)  # The last four responses fill all columns.
    rewards = (second - first) * mask
    mistakes = {"the student and the teacher have changed places": train_distill.distill_advantages(-rewards, 0.5)}
    mistakes["gamma is missing"] = train_distill.distill_advantages(rewards, 1.0)
    mistakes["these are the rewards of single tokens"] = rewards
    mistakes["what stands behind the end counts"] = train_distill.distill_advantages(second - first, 0.5)
    inputs = first.clone().requires_grad_(), second, mask, 0.5
    return inputs, train_distill.distill_advantages(rewards, 0.5), mistakes


def check(number, exercise, folder):
    """Whether the student's function is right; prints a line, which names a mistake that is often made."""
    path = folder / f"{exercise['name']}.py"
    arguments, expected, mistakes = answer(number)
    try:
        found = runpy.run_path(str(path))[exercise["signature"].partition("(")[0]](*arguments).to(expected.dtype)
    except Exception as e:  # The student's code may fail in any way.
        print(f"{path}: not yet. {type(e).__name__}: {e}")
        return False
    if found.requires_grad:
        print(f"{path}: not yet: a gradient flows through it")
        return False
    try:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    except AssertionError as e:
        close = (what for what, x in mistakes.items() if found.shape == x.shape and torch.allclose(found, x, atol=1e-5))
        print(f"{path}: not yet: {next(close, e)}")
        return False
    print(f"{path}: right")
    return True


def main(words=None):
    """Returns the exit code."""
    found = exercises()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, choices=sorted(found))
    parser.add_argument("--hint", action="store_true", help="a push in the right direction")
    parser.add_argument(
        "--solution", action="store_true", help="the line, its tag, its price and its test, but for 13 to 17"
    )
    parser.add_argument("--check", action="store_true", help="of 13 to 17: compare your function with ours")
    args = parser.parse_args(words)
    exercise, folder = found[args.number], Path(f"runs/exercise_{args.number}_code")
    if args.hint:
        print(exercise["hint"])
    elif "tag" in exercise:
        if args.check:
            parser.error("--check is for exercises 13 to 17; --solution tells here whether you are right")
        solve(exercise) if args.solution else make(args.number, exercise, folder)
    elif args.check:
        return int(not check(args.number, exercise, folder))
    elif args.solution:
        print("Write it yourself: --hint helps, and --check says whether it is right.")
    else:
        path = folder / f"{exercise['name']}.py"
        if path.exists():
            parser.error(f"{path} exists; remove it to begin again")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(SKELETON.format(**exercise), encoding="utf-8")
        print(f"Write the function in {path}, and then: python exercises/break_it.py {args.number} --check")
    return 0


if __name__ == "__main__":
    sys.exit(main())
