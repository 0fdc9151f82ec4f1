"""
Writes the index of details into README.md, and the verdicts on the published catalogue and known faults into benchmark/details.md.

    python benchmark/details.py            writes both
    python benchmark/details.py --check    writes nothing; exit code 1 where one of them is stale

Where a detail stands, and which tests are its own, is read from the code: the comments [RM-4], and the names test_rm_4_...
What it is, and who does it, stands in details.toml; the verdicts in catalogue.toml; the faults in faults.toml; what a detail is
worth in results/worth.toml, as far as it has been measured.
"""

import re
import sys
import tomllib
from itertools import groupby
from pathlib import Path

from mutations import tags_in, tests_of

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {
    "DATA": "Data",
    "MODEL": "Models",
    "SFT": "Supervised fine-tuning",
    "RM": "Reward model",
    "GEN": "Rollout: responses and their log-probs",
    "REW": "Scores and KL",
    "PPO": "PPO",
    "RLOO": "RLOO",
    "OPT": "Optimisation",
    "LOG": "Metrics",
    "EVAL": "Evaluation",
}
SCRIPTS = ["train_ppo", "train_rloo", "train_reward", "train_sft", "evaluate"]  # these first, then what they share


def read(name):
    path = ROOT / "benchmark" / name
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def places():
    """{tag: [(file, line of the tag's comment), ...]}, the scripts first."""
    found = {}
    files = sorted((ROOT / "rlhf_details").glob("*.py"), key=lambda p: (p.stem not in SCRIPTS, p.stem != "train_ppo", p.stem))
    for path in files:
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for tag in tags_in(source):
            line = next(i for i, text in enumerate(lines, 1) if f"[{tag}]" in text)
            found.setdefault(tag, []).append((path.name, line))
    return found


def source_link(source, systems):
    """A source as markdown: "N+ ppo.py:10-12" -> a link to those lines at that system's commit."""
    if match := re.fullmatch(r"(\S+/\S+)#(\d+)", source):
        return f"[{source}](https://github.com/{match[1]}/issues/{match[2]})"
    system, _, place = source.partition(" ")
    if system == "arXiv":
        number, _, rest = place.partition(", ")
        return f"[arXiv {number}](https://arxiv.org/abs/{number})" + (f", {rest}" if rest else "")
    if system not in systems:
        return source
    name, repository, commit, folder = systems[system]
    file, _, lines = place.partition(":")
    path = file[1:] if file.startswith("/") else f"{folder}/{file}"
    first, _, last = lines.split(",")[0].partition("-")
    anchor = f"#L{first}" + (f"-L{last}" if last else "") if first else ""
    if "~" in commit:  # a commit's parent, which GitHub shows no page of
        return f"{name}, `{path}` at `{commit}`"
    return f"[{name}, {file.rpartition('/')[2]}](https://github.com/{repository}/blob/{commit}/{path}{anchor})"


def index():
    """The README's part between its two markers: a table for each family of tags."""
    details, worth, where = read("details.toml"), read("results/worth.toml"), places()
    lines = []
    for family, tags in groupby(details["tags"].items(), key=lambda item: item[0].partition("-")[0]):
        lines += [
            "",
            f"### {FAMILIES[family]}",
            "",
            "| tag | detail | where | source | test | worth |",
            "|---|---|---|---|---|---|",
        ]
        for tag, detail in tags:
            stands = ", ".join(f"[{f}:{n}](rlhf_details/{f}#L{n})" for f, n in where[tag])
            source = "; ".join("ours" if s == "own" else source_link(s, details["systems"]) for s in detail["source"])
            files = sorted({test.split("::")[0] for test in tests_of(tag)})
            tests = ", ".join(f"[{Path(f).name}]({f})" for f in files)
            lines.append(f"| {tag} | {detail['what']} | {stands} | {source} | {tests} | {worth.get(tag, {}).get('says', '')} |")
    return "\n".join(lines) + "\n"


def verdicts():
    """benchmark/details.md: what became of every entry of the catalogue of published details, and of every known fault."""
    details, catalogue, faults = read("details.toml")["tags"], read("catalogue.toml"), read("faults.toml")
    count = {v: sum(x["verdict"] == v for x in catalogue.values()) for v in ("tagged", "different", "not ours")}
    lines = ["# Published details, known faults", "", "Written by `python benchmark/details.py`.", "", "## The catalogue", ""]
    lines += [
        "What the published systems do, entry by entry, and what is done here: under a tag in the code (the README's index says "
        "where), differently, or not at all. " + ", ".join(f"{n} {v}" for v, n in count.items()) + f"; {len(catalogue)} in all.",
        "",
        "| entry | what | verdict | tag, or why |",
        "|---|---|---|---|",
    ]
    for entry, row in catalogue.items():
        tags = ", ".join(tag for tag, detail in details.items() if entry in detail["entries"].split())
        lines.append(f"| {entry} | {row['what']} | {row['verdict']} | {'; '.join(x for x in (tags, row['why']) if x)} |")
    lines += [
        "",
        "## Faults that shipped elsewhere",
        "",
        "Each with the tests that fail where this code has it: those of the tags that name it, and others.",
        "",
        "| | fault | tags | tests | note |",
        "|---:|---|---|---|---|",
    ]
    for number, fault in faults.items():
        tags = ", ".join(tag for tag, detail in details.items() if number in detail["faults"].split())
        tests = "<br>".join(f"`{test}`" for test in fault["tests"])
        lines.append(f"| {number} | {fault['what']} | {tags} | {tests} | {fault['note']} |")
    return "\n".join(lines) + "\n"


def main():
    readme, table = ROOT / "README.md", ROOT / "benchmark" / "details.md"
    before = readme.read_text(encoding="utf-8")
    head, _, tail = before.partition("<!-- details -->\n")
    _, _, tail = tail.partition("<!-- details -->\n")
    after = f"{head}<!-- details -->\n{index()}<!-- details -->\n{tail}"
    stale = [
        p.name for p, text in ((readme, after), (table, verdicts())) if not p.exists() or p.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        print(
            f"stale: {', '.join(stale)}; run python benchmark/details.py"
            if stale
            else "README.md and benchmark/details.md are fresh"
        )
        return int(bool(stale))
    readme.write_text(after, encoding="utf-8")
    table.write_text(verdicts(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
