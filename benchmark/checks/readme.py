"""
Writes tables into README.md and docs/, between markers that name them: <!-- table NAME -->.

    python benchmark/checks/readme.py            writes
    python benchmark/checks/readme.py --check    writes nothing; exit code 1 where a table is stale

The tables come from benchmark/results/TAG/*.md, which the studies' `draw` has written from the CSV files beside them,
from benchmark/results/*.md, which the scripts of these names write, and, those of starting values, from the scripts.
"""

import importlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from intervals import ROOT

TAG, LENGTHS, GRPO_TRL = "cc51011", "cc6b272", "4d93adb"  # folders: the commits whose scripts were run, but the last
DPO, RELATIVES, SMOLLM, SMOLLM_TRL = "c2d7618", "83c3a19", "5b18bbb", "0feb1d3"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [path for folder in ("guides", "evidence") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]


def tables(name, tag=TAG):
    """The tables in results/<tag>/<name>.md, each a list of lines."""
    text = (ROOT / "benchmark" / "results" / tag / f"{name}.md").read_text(encoding="utf-8")
    return [block.strip().splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.M)]


def ablations():
    """The rows of the ablations that matter, the worst for gold first, without the verdict."""
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in tables("ablations")[2])
    gold, verdict = head.index("gold at the end"), head.index("verdict")
    rows = sorted(
        (row for row in rows if row[verdict] == "matters"), key=lambda row: float(row[gold].strip("*").split()[0])
    )
    return ["| " + " | ".join(row[:verdict]) + " |" for row in (head, rule, *rows)]


def ablations_long():
    """The rows of the longer runs whose effect is another there than in the short runs, without the verdicts."""
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in tables("ablations")[3])
    return ["| " + " | ".join(row[:-3]) + " |" for row in rows if row[-1]]


SPEEDS = "rloo_27m_96", "rloo_27m_8", "rloo_0.9m_8", "ppo_27m_8", "ppo_27m_96"  # speed_*.md
FAST = "b48a4cb"  # the commit whose speed was measured on a faster processor


def work(name, tag="."):
    """What speed_<name>.md measures: "RLOO, 27 M, prompts 96-128"."""
    text = (ROOT / "benchmark" / "results" / tag / f"speed_{name}.md").read_text(encoding="utf-8")
    algorithm, size, prompts = re.match(r"(\w+), .*?, ([\d.]+)m parameters, prompts of (\S+) tokens", text).groups()
    return f"{algorithm}, {size} M, prompts {prompts}"


def speeds(names):
    """The tables of speed_<name>.md as one, with a first column that says of which work a row is."""
    found = [(work(name), tables(f"speed_{name}", ".")[0]) for name in names]
    head, rule, *_ = found[0][1]
    return [f"| work {head}", f"|---{rule}", *(f"| {label} {row}" for label, (_, _, *rows) in found for row in rows)]


def speed(tag):
    """A line for each work: our speed, and for each version of TRL how many times as fast and how much memory."""
    lines = ["| work | ours, episodes/s | times TRL 0.21 | times TRL 1.16 | peak memory, ours to theirs |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name in SPEEDS:
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables(f"speed_{name}", tag)[0]]
        of = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
        trl = [of.get(f"TRL {version}", {}) for version in ("0.21.0", "1.16.0")]
        faster, memory = ([row.get(name, "") for row in trl] for name in ("times as fast", "memory share"))
        cells = work(name, tag), of["ours"]["episodes/s"], *faster, ", ".join(filter(None, memory))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


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


TABLES = {
    "starting_values": starting_values,
    "speed": lambda: speed("."),
    "speed_fast": lambda: speed(FAST),
    "speed_all": lambda: speeds(SPEEDS),
    "speed_without": lambda: speeds(["without", "without_27m_8", "without_0.9m_8"]),
    "speed_batch": lambda: tables("speed_scaling", ".")[0],
    "speed_length": lambda: tables("speed_scaling", ".")[1],
    "speed_memory": lambda: tables("speed_scaling", ".")[2],
    "speed_decode": lambda: tables("speed_decode", ".")[0],
    "toy": lambda: tables("toy", ".")[0],
    "movies": lambda: tables("movies")[0],
    "lora": lambda: tables("lora_memory", ".")[0],
    "style": lambda: tables("reward_functions", ".")[0],
    "sums": lambda: tables("reward_functions", ".")[1],
    "overoptimisation": lambda: tables("overoptimisation")[0],
    "best_of_n": lambda: tables("overoptimisation")[1],
    "ablations_tally": lambda: tables("ablations")[0],
    "ablations": ablations,
    "ablations_long": ablations_long,
    "trl_long": lambda: tables("trl_toy_100x64")[0],
    "trl_long_differences": lambda: tables("trl_toy_100x64")[1],
    "trl_replay": lambda: tables("trl_replay")[0],
    "trl_lengths": lambda: tables("trl_lengths_100x64", LENGTHS)[0],
    "trl_lengths_differences": lambda: tables("trl_lengths_100x64", LENGTHS)[1],
    "trl_replay_lengths": lambda: tables("trl_replay_lengths", LENGTHS)[0],
    "grpo": lambda: tables("grpo")[0],
    "grpo_sums": lambda: tables("grpo")[1],
    "grpo_parts": lambda: tables("grpo")[3],
    "relatives_sums": lambda: tables("grpo")[4],
    "grpo_lengths": lambda: tables("grpo")[5],
    "grpo_trl": lambda: tables("trl", GRPO_TRL)[0],
    "grpo_trl_differences": lambda: tables("trl", GRPO_TRL)[1],
    "relatives_replay": lambda: tables("trl_replay", RELATIVES)[0],
    "dpo": lambda: tables("dpo", DPO)[0],
    "dpo_parts": lambda: tables("dpo", DPO)[1],
    "dpo_replay": lambda: tables("dpo_replay", DPO)[0],
    "mismatch": lambda: tables("mismatch", "2015ca1")[1],
    "speed_sampler": lambda: tables("speed_sampler_27m_40", ".")[0],
    "speed_sampler_smollm": lambda: tables("speed_sampler_smollm_40", ".")[0],
    "vllm": lambda: tables("mismatch", "2015ca1")[-1],
    "overlap": lambda: tables("ahead", "a36e88a")[0],
    "smollm_verified": lambda: tables("smollm", SMOLLM)[0],
    "smollm_course": lambda: tables("smollm", SMOLLM)[1],
    "smollm_base": lambda: tables("smollm", SMOLLM)[2],
    "smollm_details": lambda: tables("smollm", SMOLLM)[3],
    "smollm_learned": lambda: tables("smollm", SMOLLM)[4],
    "smollm_trl": lambda: tables("smollm_trl", SMOLLM_TRL)[0],
    "smollm_trl_differences": lambda: tables("smollm_trl", SMOLLM_TRL)[1],
    "smollm_trl_seconds": lambda: tables("smollm_trl", SMOLLM_TRL)[2],
    "smollm_trl_replay": lambda: tables("smollm_trl_replay", SMOLLM_TRL)[0],
    "smollm_trl_speed": lambda: tables("smollm_trl_speed", SMOLLM_TRL)[0],
    "smollm_products": lambda: tables("smollm_products", SMOLLM)[0],
    "smollm_seconds": lambda: tables("smollm", SMOLLM)[-1],
    "grpo_trl_replay": lambda: tables("trl_replay", GRPO_TRL)[0],
}


def written(text):
    """A document with the tables in place."""

    def fill(match):
        return f"{match[1]}\n" + "\n".join(TABLES[match[2]]()) + f"\n{match[1]}"

    return re.sub(r"(<!-- table (\w+) -->)\n.*?\1", fill, text, flags=re.S)


def main():
    documents = [*DOCUMENTS, ROOT / "benchmark/results/speed.md"]
    stale = {path: written(path.read_text(encoding="utf-8")) for path in documents}
    stale = {path: text for path, text in stale.items() if text != path.read_text(encoding="utf-8")}
    if "--check" in sys.argv[1:]:
        names = ", ".join(path.name for path in stale)
        print(f"stale: {names}; run python benchmark/checks/readme.py" if stale else "all tables are fresh")
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
