"""
All studies. What a study trains, compares and draws is said by its file, benchmark/studies/<study>.toml:

    python benchmark/studies/study.py list
    python benchmark/studies/study.py run grpo --runs part_scale_none --seeds 1       trains what is missing
    python benchmark/studies/study.py draw grpo               writes table, figure and prices; `all`: of all

Results are in benchmark/results/<study>/: runs.csv, env.json, table.md, and worth.toml where a study prices details.
`draw all` also writes benchmark/results/README.md. A file outside of this folder is named by its path, mine.toml.

    question, answer        what results/README.md says
    title, head             of table.md
    seeds, columns, every   those that `run` trains; metrics beyond the usual ones; only every so manyth row is kept
    of                      another study whose runs these are, too: `only` some of them, `times` as long
    parts                   files <study>/<part>.toml with more runs
    [words]                 NAME = "text", for {NAME} in the commands, flags and edits of the file
    [stage.NAME]            a model that runs start from. Its folder is @NAME, and what names that folder needs it
    [run.NAME]              a run of every seed:
      command               a script of rlhf_details with its flags; or else
      like, flags           another run's command, with these flags in the place of its own
      base, flags           the same; and tables compare the two, seed by seed
      break                 tags of details that are broken as mutations.py does it, in a copy of the code
      edit                  [[file, tag, old, new], ...] the like, in the tag's statement; tag "": anywhere, once
      launch                in the place of "python"
      measure               flags of held_out.py, by which unchanged code then measures the policy (as NAME_measured)
      runs                  the run that is this one: it has another name here, and is not trained twice
      label, what, tags, note, option, own_batches, on_request      for tables.py; trained only where --runs names it
    [[table]]               kind = a function of tables.py, and what that reads
    [[figure]]              kind = a function of figures.py
"""

import hashlib
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in (".", "checks", "studies"))
import figures
import tables
import tyro
from intervals import ROOT, by_commit
from mutations import MUTATIONS, mutate

from benchmark import COLUMNS, MODELS, Run, StudyArgs, code_hash, fail, git_tag, run_command, run_study

STAGES = {"sft": {"command": "train_sft.py"}, "reward": {"command": "train_reward.py --sft_model_path @sft"}}


@dataclass(kw_only=True)
class RunArgs(StudyArgs):
    """Trains what is missing."""

    study: tyro.conf.Positional[str]
    """name of the study, or the path of its file"""
    runs: tuple[str, ...] = ()
    """names of runs, which are trained with what they are compared with; none: all"""
    seeds: tuple[int, ...] = ()
    """seeds; none: those of the study"""
    columns: tyro.conf.Suppress[tuple[str, ...]] = ()
    every: tyro.conf.Suppress[int] = 1


@dataclass
class DrawArgs:
    """Tables, figures and prices, from runs.csv."""

    study: tyro.conf.Positional[str]
    """name of the study, or all"""


@dataclass
class ListArgs:
    """The studies, with their questions and runs."""


def studies():
    """The names of all studies."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


class Study:
    """A study's file, its commands and its results."""

    def __init__(self, name):
        path = Path(name) if name.endswith(".toml") else Path(__file__).with_name(f"{name}.toml")
        if not path.exists():
            fail(f"{name}: no such study; there are {', '.join(studies())}")
        said = tomllib.loads(path.read_text(encoding="utf-8"))
        for part in said.get("parts", []):
            of_part = tomllib.loads((path.with_suffix("") / f"{part}.toml").read_text(encoding="utf-8"))
            for kind in ("run", "stage"):
                said[kind] = said.get(kind, {}) | of_part.get(kind, {})
        own = Study(said["of"]) if "of" in said else None
        self.name, self.said = path.stem, said
        self.words = (own.words if own else {}) | said.get("words", {})
        self.runs = (own.runs if own else {}) | said.get("run", {})
        self.stages = (own.stages if own else STAGES) | said.get("stage", {})
        self.folder, self.prices = ROOT / "benchmark" / "results" / self.name, ""

    @cached_property
    def found(self):
        """{run: {commit: {seed: {column: array}}}} of the results."""
        return by_commit(self.folder)

    def fill(self, text):
        """A text with the study's words in it."""
        while text != (text := re.sub(r"\{([A-Z][A-Z0-9_]*)\}", lambda found: self.words[found[1]], text)):
            pass
        return text

    def inherited(self, name, key, default=None):
        """What a run says, or else the run that it is made like."""
        spec, above = self.spec(name)
        return spec[key] if key in spec else self.inherited(above, key, default) if above else default

    def spec(self, name):
        """(what the file says of a run or stage, the name of the run that it is made like, if any)."""
        spec = self.stages[name] if name in self.stages else self.runs[name]
        return spec, spec.get("like") or spec.get("base")

    def flags(self, name):
        """A script and its flags, those of a later word in the place of earlier ones: {script or flag: its words}."""
        spec, above = self.spec(name)
        text = " ".join(self.fill(f"{spec.get('command', '')} {spec.get('flags', '')}").split())
        parts = re.split(r"\s+(?=--)", text) if text else []
        own = {re.sub("^--no_", "--", part.split()[0]) if part.startswith("--") else "": part for part in parts}
        return (self.flags(above) if above and "command" not in spec else {}) | own

    def command(self, name):
        """What is run, with {root} and {seed} in it. A stage's model goes where @NAME says."""
        script, *flags = self.flags(name).values()
        flags += [f"--output_dir @{name}"] if name in self.stages else []
        if times := self.said.get("times"):
            flags = [re.sub(r"(?<=--total_episodes )\d+", lambda n: str(times * int(n[0])), flag) for flag in flags]
        place = "" if "/" in script.split()[0] else "rlhf_details/"
        return self.located(
            f"{self.fill(self.inherited(name, 'launch', 'python'))} {place}{' '.join([script, *flags])}"
        )

    def located(self, text):
        """A text with the folders of stages for @NAME."""

        def folder(found):
            seed = self.stages[found[1]].get("seed", "{seed}")
            return f"{MODELS.replace('{seed}', str(seed))}/{found[1]}"

        return re.sub(r"@(\w+)", folder, text)

    def edits(self, name):
        """[(file, tag, old, new)]: what is changed in the copy of the code that a run or stage is made with."""
        (spec, above), page = self.spec(name), self.flags(name)[""].split()[0]
        found = self.edits(above) if above else []
        for tag in spec.get("break", "").split():
            of = [edit for edit in MUTATIONS if edit[0] == tag]
            tag, file, old, new = next((edit for edit in of if edit[1] == page), of[0])
            found = [*found, (file, tag, old, new)]
        return found + [tuple(map(self.fill, edit)) for edit in spec.get("edit", [])]

    def make(self, name, seed, commit):
        """The run of a name and a seed; of a stage, too."""
        edits, is_stage = self.edits(name), name in self.stages
        code = code_of(f"{self.name}_{name}", edits, commit) if edits else None
        columns = [*COLUMNS, *self.said.get("columns", "").split()]
        every = self.inherited(name, "every", self.said.get("every", 1))
        place = self.name if not is_stage or self.stages[name].get("keep") else "stages"
        run = Run(name, self.command(name), seed, commit, place, code, columns, every)
        if is_stage:
            run.makes, run.kept = ROOT / "models" / "bench" / str(seed) / name, place != "stages"
        return run

    def needed(self, names):
        """[[stage, ...], ...]: those that the runs or stages of these names start from, each after what it needs."""
        texts = [" ".join([*self.flags(name).values(), self.inherited(name, "measure", "")]) for name in names]
        first = sorted({found for text in texts for found in re.findall(r"@(\w+)", text)})
        if not first:
            return []
        earlier = self.needed(first)
        done = {name for batch in earlier for name in batch}
        return [*earlier, [name for name in first if name not in done]]


def code_of(name, edits, commit):
    """A copy of the scripts with the edits in it."""
    digest = hashlib.sha256(repr(edits).encode()).hexdigest()[:8]
    folder = ROOT / "runs" / "benchmark" / commit / "code" / f"{name}_{code_hash()}_{digest}"
    if folder.exists():  # a run of it may be on its way
        return folder
    shutil.copytree(ROOT / "rlhf_details", folder / "rlhf_details", ignore=shutil.ignore_patterns("__pycache__"))
    for file, tag, old, new in edits:
        path = folder / "rlhf_details" / file
        source = path.read_text(encoding="utf-8")
        if not tag and source.count(old) != 1:
            raise ValueError(f"{old!r} is there {source.count(old)} times in {file}")
        path.write_text(mutate(source, tag, old, new) if tag else source.replace(old, new), encoding="utf-8")
    return folder


def wanted(study, names):
    """The runs to train: the named ones with what they are compared with, or all."""
    if unknown := [name for name in names if name not in study.runs]:
        fail(f"--runs {' '.join(unknown)}: {study.name} has no such run")
    chosen = list(
        names or study.said.get("only", [name for name, run in study.runs.items() if not run.get("on_request")])
    )
    chosen += [study.runs[name]["base"] for name in chosen if "base" in study.runs[name]]
    return list(dict.fromkeys(study.runs[name].get("runs", name) for name in chosen))


def run(args: RunArgs):
    """Returns the names of the runs that failed."""
    study, commit = Study(args.study), args.tag or git_tag()
    names, seeds, runs, measured = wanted(study, args.runs), args.seeds or study.said["seeds"], [], []
    for seed in seeds:
        for name in names:
            runs.append(study.make(name, seed, commit))
            if (flags := study.inherited(name, "measure")) is not None:
                policy = f"{{root}}/runs/benchmark/{commit}/{study.name}/{name}_s{{seed}}/policy"
                words = f"python benchmark/studies/held_out.py --policy {policy} {study.fill(flags)}"
                command = study.located(" ".join(words.split()))
                measured.append(Run(f"{name}_measured", command, seed, commit, study.name, columns=COLUMNS))
                runs[-1].makes = None if measured[-1].is_done() else runs[-1].folder / "policy"
    batches = []
    for batch in study.needed(names):
        pairs = {(name, study.stages[name].get("seed", seed)) for name in batch for seed in seeds}
        batches.append([study.make(name, seed, commit) for name, seed in sorted(pairs)])
    return run_study(batches, runs, args, commit) + (run_study([], measured, args, commit) if measured else [])


def draw(args: DrawArgs):
    """Writes table.md, worth.toml and the figures."""
    for name in studies() if args.study == "all" else [args.study]:
        study = Study(name)
        if not study.found:
            print(f"{name}: no runs, and nothing to draw")
            continue
        blocks = [f"# {study.said.get('title', name)}", ""]
        blocks += [f"Written by `python benchmark/studies/study.py draw {study.name}`."]
        blocks += [study.said["head"].strip()] if "head" in study.said else []
        for said in study.said.get("table", []):
            text = [said["text"].strip(), ""] if "text" in said else []
            blocks += ["", *text, *tables.KINDS[said["kind"]](study, said)]
        if "table" in study.said:
            (study.folder / "table.md").write_text("\n".join(blocks) + "\n", encoding="utf-8")
        if study.prices:
            text = f"# Written by `python benchmark/studies/study.py draw {study.name}`.\n{study.prices}"
            (study.folder / "worth.toml").write_text(text, encoding="utf-8")
        for said in study.said.get("figure", []):
            figures.KINDS[said["kind"]](study, said)
        print(f"{name}: {', '.join(sorted(path.name for path in study.folder.iterdir()))}")


def show(args: ListArgs):
    """Prints a line for each study."""
    for name in studies():
        study = Study(name)
        print(f"{name:18} {study.said['question']}\n{'':18} {', '.join(study.said.get('only', study.runs))}\n")


COMMANDS = {"run": (RunArgs, run), "draw": (DrawArgs, draw), "list": (ListArgs, show)}

if __name__ == "__main__":
    sys.exit(run_command(COMMANDS))
