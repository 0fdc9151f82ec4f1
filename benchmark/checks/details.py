"""
Writes details.md: the index of details, and the verdicts on the published catalogue and on known faults.

    python benchmark/checks/details.py            writes it
    python benchmark/checks/details.py --check    writes nothing and counts verdicts; exit code 1 where it is stale, or
                                                  where more than one detail in five was not measured

All that is said of a detail is its row in details/NUMBER_FAMILY.toml:

    what      the detail, in a line
    source    who does it like this: SYSTEM FILE:LINES, the systems as in details/systems.toml; or a paper; or "own"
    mutants   [[file, old, new], ...]: what breaks it, for mutations.py, the studies' `break` and the exercises
    note      for the site: why it is so, and what goes wrong without it
    unpriced  why no study measures it
    entries   of the catalogue of published details, which it covers. What the systems do, and how far it is done here,
              stands in the same file under [published.ENTRY]; entries that no tag covers are in details/not_tagged.toml
    faults    of details/faults.toml, which its tests would catch

Where it stands, and which tests are its own, is read from the code: the comments [RM-4], and the names test_rm_4_...
What it is worth stands in results/<study>/worth.toml, as far as it has been measured.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

from mutations import DETAILS, FAMILIES, sources, tags_in, tests_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = "train_rloo.py train_grpo.py train_distill.py train_agent.py train_ppo.py train_reward.py".split()
PAGES += ["train_dpo.py", "train_sft.py", "evaluate.py", "utils.py"]


def read(name):
    """A file of details/, or of another folder."""
    return tomllib.loads((Path(__file__).parent / "details" / name).read_text(encoding="utf-8"))


def catalogue():
    """{entry: (verdict, row)} of the catalogue of published details, in its order."""
    found = {entry: ("tagged", row) for family in FAMILIES for entry, row in family.get("published", {}).items()}
    found |= {entry: (verdict, row) for verdict, rows in read("not_tagged.toml").items() for entry, row in rows.items()}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], int(item[0][1:]))))


def tags_with(kind, name):
    """The tags whose row names an entry or a fault, "DATA-1, DATA-2". kind: "entries" or "faults"."""
    return ", ".join(tag for tag, row in DETAILS.items() if name in row.get(kind, "").split())


def worth():
    """{tag: {"says": its price}}, of the ablations and of the studies of GRPO, DPO and samplers that differ."""
    results = Path(__file__).parents[1] / "results"
    files = sorted(results.glob("*/worth.toml"))
    return {tag: price for file in files for tag, price in read(file).items()}


def measured():
    """{tag: {"TRL 1.16.0": "7 equal, 2 differ"}}, of the vectors that have the tag and the results of each library."""
    folder, found = ROOT / "benchmark" / "vectors", {}
    tagged = [v for path in sorted(folder.glob("*.json")) for v in json.loads(path.read_text())["vectors"]]
    names = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
    for path in sorted((folder / "results").glob("*.json")):
        result = json.loads(path.read_text())
        package, version = next(iter(result["versions"].items()))
        for tag in {tag for vector in tagged for tag in vector["tags"]} if package in names else ():
            outcomes = [result["outcomes"][v["name"]][0] for v in tagged if tag in v["tags"]]
            faults, equal = outcomes.count("fault"), outcomes.count("equal")
            differ = sum("difference" in outcome for outcome in outcomes)
            said = [f"{n} {what}" for n, what in ((equal, "equal"), (differ, "differ"), (faults, "at fault")) if n]
            if said:
                found.setdefault(tag, {})[f"{names[package]} {version}"] = ", ".join(said)
    return found


def count_verdicts():
    """{"matters": number of tags, "perhaps": .., "nothing shows": .., "not measured": ..}."""
    said = {tag: price["says"].rpartition("; ")[2] for tag, price in worth().items()}
    kinds = [said.get(tag, "not measured") for tag in DETAILS]
    kinds = [kind if kind in ("matters", "perhaps", "not measured") else "nothing shows" for kind in kinds]
    return {kind: kinds.count(kind) for kind in ("matters", "perhaps", "nothing shows", "not measured")}


def files_with(tag, code):
    """The files below rlhf_details whose comments have a tag, the pages first. code: {file: source}."""
    found = [file for file, source in code.items() if tag in tags_in(source)]
    return sorted(found, key=lambda file: (file not in PAGES, PAGES.index(file) if file in PAGES else 0, file))


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
    """Lines of the index of details: a table for each family of tags. Line numbers would change with every edit."""
    systems, prices, code, vectors = read("systems.toml"), worth(), sources(), measured()
    lines = [
        "Each detail has a tag. `grep -rn GEN-4 rlhf_details` finds it in the code, and `pytest -k gen_4` runs its "
        "tests, whose names begin with it. The tests of several details name them in their docstrings. The price is "
        "what the studies in benchmark/studies have measured. 'Measured elsewhere' says how many of its vectors "
        "(benchmark/vectors) come out equal in a library that is called with them, and how many do not.",
    ]
    for family in FAMILIES:
        lines += [
            "",
            f"### {family['title']}",
            "",
            "| tag | detail | where | source | tests | price | measured elsewhere |",
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for tag, detail in family["tags"].items():
            places = ", ".join(f"`{file}`" for file in files_with(tag, code))
            source = "; ".join("ours" if s == "own" else source_link(s, systems) for s in detail["source"])
            tests = ", ".join(f"`{file}`" for file in sorted({test.split("::")[0] for test in tests_of(tag)}))
            price = prices.get(tag, {}).get("says", "")
            elsewhere = "; ".join(f"{library}: {said}" for library, said in vectors.get(tag, {}).items())
            lines.append(f"| {tag} | {detail['what']} | {places} | {source} | {tests} | {price} | {elsewhere} |")
    return lines


def verdicts():
    """Lines on what became of every entry of the catalogue of published details, and of every known fault."""
    entries = catalogue()
    count = {v: sum(verdict == v for verdict, _ in entries.values()) for v in ("tagged", "different", "not ours")}
    lines = [
        "## The catalogue",
        "",
        "What the published systems do, entry by entry, and what is done here: under a tag, differently or not at all. "
        + ", ".join(f"{n} {v}" for v, n in count.items())
        + f"; {len(entries)} in all.",
        "",
        "| entry | what | verdict | tag, or why |",
        "|---|---|---|---|",
    ]
    for entry, (verdict, row) in entries.items():
        why = "; ".join(filter(None, (tags_with("entries", entry), row.get("why"))))
        lines.append(f"| {entry} | {row['what']} | {verdict} | {why} |")
    lines += [
        "",
        "## Faults that shipped elsewhere",
        "",
        "Each with the tests that fail where this code has it: those of the tags that name it, and others.",
        "",
        "| | fault | tags | tests | note | reported in |",
        "|---:|---|---|---|---|---|",
    ]
    for number, fault in read("faults.toml").items():
        tags = tags_with("faults", number)
        tests = "<br>".join(f"`{test}`" for test in fault["tests"])
        lines.append(f"| {number} | {fault['what']} | {tags} | {tests} | {fault['note']} | {threads(fault)} |")
    return lines


def threads(fault):
    """Links to the threads in which a fault was reported."""
    pairs = [(thread, *thread.split("#")) for thread in fault.get("threads", [])]
    return "<br>".join(f"[{name}](https://github.com/{place}/issues/{number})" for name, place, number in pairs)


def main():
    path = Path(__file__).with_name("details.md")
    by = "Written by `python benchmark/checks/details.py`."
    head = ["# Details of the implementation", "", by, "", "## The index", ""]
    text = "\n".join([*head, *index(), "", *verdicts()]) + "\n"
    is_stale = not path.exists() or path.read_text(encoding="utf-8") != text
    if "--check" in sys.argv[1:]:
        print(f"{path.name} is {'stale: run python benchmark/checks/details.py' if is_stale else 'fresh'}")
        counts = count_verdicts()
        print(f"{sum(counts.values())} details: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
        return int(is_stale or counts["not measured"] > sum(counts.values()) / 5)
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
