"""
Writes tables into README.md and docs/, between markers that name them: <!-- table grpo 0 --> is the first
table of benchmark/results/grpo/table.md, and <!-- table dpo/replay 0 --> that of dpo/replay.md.

    python benchmark/checks/readme.py            writes
    python benchmark/checks/readme.py --check    writes nothing; exit code 1 where a table is stale

The tables come from benchmark/results/<study>/table.md, which `study.py draw` has written from the CSV files beside
them, from other files there, which name their programs, and, those of starting values, from the scripts.
"""

import importlib
import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [path for folder in ("guides", "evidence") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]


def tables(name):
    """The tables in results/<name>.md, or of a study in results/<name>/table.md, each a list of lines."""
    path = ROOT / "benchmark" / "results" / name
    path = path / "table.md" if path.is_dir() else path.with_name(f"{path.name}.md")
    return [block.strip().splitlines() for block in re.findall(r"(?:^\|.*\n)+", path.read_text(encoding="utf-8"), re.M)]


def cells(lines):
    """The cells of each of the lines of a table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def ablations():
    """The rows of the ablations that matter, the worst for gold first, without the verdict."""
    head, rule, *rows = cells(tables("ablations")[2])
    gold, verdict = head.index("gold at the end"), head.index("verdict")
    rows = sorted(
        (row for row in rows if row[verdict] == "matters"), key=lambda row: float(row[gold].strip("*").split()[0])
    )
    return ["| " + " | ".join(row[:verdict]) + " |" for row in (head, rule, *rows)]


def ablations_long():
    """The rows of the longer runs whose effect is another there than in the short runs, without the verdicts."""
    return ["| " + " | ".join(row[:-3]) + " |" for row in cells(tables("ablations")[3]) if row[-1]]


# The columns of the table of starting values: the scripts whose `presets` it shows.
COLUMNS = {"SFT, new model": "sft", "SFT": "sft", "reward model": "reward", "DPO": "dpo", "RLOO": "rloo"}
COLUMNS |= {"GRPO": "grpo", "PPO": "ppo", "distillation": "distill"}
SIZES = {20e6: " (20 M)", 500e6: " (500 M)", 5e9: " (5 B)", float("inf"): ""}


def starting_values():
    """What the scripts take by the size of the model. "16 (20 M), 64": 16 for a model below 20 M, and else 64."""
    found = {}  # {flag: {column: its value for each of SIZES}}
    for column, name in COLUMNS.items():
        script = importlib.import_module(f"rlhf_details.train_{name}")
        table = script.presets["scratch"] if column == "SFT, new model" else script.presets
        rows = [vars(script.Args()) | table.get(size, {}) for size in SIZES]
        for flag in rows[0]:
            found.setdefault(flag, {})[column] = [row[flag] for row in rows]
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for flag, values in sorted(found.items(), key=lambda item: (item[0] != "learning_rate", item[0])):
        if any(len(set(row)) > 1 for row in values.values()):
            lines.append(f"| `--{flag}` | " + " | ".join(by_size(values.get(column, [])) for column in COLUMNS) + " |")
    return lines


def by_size(values):
    """The values of a flag for SIZES, each once: "5e-5 (500 M), 3e-6"."""
    neighbours = zip(values, [*values[1:], "the end"], SIZES.values(), strict=False)
    return ", ".join(number(value) + size for value, following, size in neighbours if value != following)


def number(value):
    """A value of a flag: 2e-3, 0.05, 10,000, none."""
    if value is None:
        return "none"
    mantissa, exponent = f"{value:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if 0 < value < 0.01 else f"{value:,}".removesuffix(".0")


def studies():
    """A line for each study: its question, answer, files, figures and command."""
    lines = ["| study | question | answer | files | figure | one command |", "|---|---|---|---|---|---|"]
    results, static = ROOT / "benchmark" / "results", ROOT / "static"
    for path in sorted((ROOT / "benchmark" / "studies").glob("*.toml")):
        said, folder = tomllib.loads(path.read_text(encoding="utf-8")), results / path.stem
        files = sorted(file.name for file in folder.glob("*.*")) if folder.exists() else []
        figures = [file.name for file in sorted(static.glob(f"{path.stem}.svg"))]
        kinds = {"symptom": "symptom_{name}.svg", "run": "curves.png"}
        figures += [kinds[x["kind"]].format(**x) for x in said.get("figure", []) if x["kind"] in kinds]
        links = [", ".join(f"[{name}]({path.stem}/{name})" for name in files)]
        links += [", ".join(f"[{name}](../../static/{name})" for name in figures)]
        command = f"`python benchmark/studies/study.py run {path.stem}`"
        lines.append(f"| {' | '.join([path.stem, said['question'], said['answer'], *links, command])} |")
    return lines


MADE = {
    "studies": studies,
    "starting_values": starting_values,
    "ablations": ablations,
    "ablations_long": ablations_long,
}


def table(name):
    """Lines of a table that a document names: one of MADE, or "FILE NUMBER" of a table in results/."""
    if name in MADE:
        return MADE[name]()
    file, place = name.split()
    return tables(file)[int(place)]


def written(text):
    """A document with the tables in place."""

    def fill(match):
        return f"{match[1]}\n" + "\n".join(table(match[2])) + f"\n{match[1]}"

    return re.sub(r"(<!-- table ([\w./ ]+) -->)\n.*?\1", fill, text, flags=re.S)


def main():
    documents = [*DOCUMENTS, *(ROOT / "benchmark/results" / name for name in ("README.md", "speed.md"))]
    stale = {path: written(path.read_text(encoding="utf-8")) for path in documents}
    stale = {path: text for path, text in stale.items() if text != path.read_text(encoding="utf-8")}
    if "--check" in sys.argv[1:]:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"stale: {names}; run python benchmark/checks/readme.py" if stale else "all tables are fresh")
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
