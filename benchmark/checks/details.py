"""
Writes details.md: the index of details, and the verdicts on the published catalogue and on known faults.

    python benchmark/checks/details.py            writes it
    python benchmark/checks/details.py --check    writes nothing and counts verdicts; exit code 1 where it is stale, or
                                                  where more than one detail in five was not measured

Where a detail stands, and which tests are its own, is read from the code: the comments [RM-4], and the names
test_rm_4_... What it is, and who does it, stands in details.toml, the verdicts in catalogue.toml, and the faults in
faults.toml. What a detail is worth stands in results/<study>/worth.toml, as far as it has been measured.
"""

import re
import sys
import tomllib
from itertools import groupby
from pathlib import Path

from mutations import sources, tags_in, tests_of

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {
    "DATA": "Data",
    "MODEL": "Models",
    "SFT": "Supervised fine-tuning",
    "RM": "Reward model",
    "DPO": "DPO",
    "GEN": "Rollout: responses and their log-probs",
    "REW": "Scores and KL",
    "PPO": "PPO",
    "RLOO": "RLOO",
    "GRPO": "GRPO",
    "DISTILL": "On-policy distillation",
    "OPT": "Optimisation",
    "LOG": "Metrics",
    "EVAL": "Evaluation",
}
PAGES = "train_rloo.py train_grpo.py train_distill.py train_ppo.py train_reward.py".split()
PAGES += ["train_dpo.py", "train_sft.py", "evaluate.py", "utils.py"]


def read(name):
    path = Path(__file__).parent / name
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def worth():
    """{tag: {"says": its price}}, of the ablations and of the studies of GRPO, DPO and samplers that differ."""
    results = Path(__file__).parents[1] / "results"
    files = sorted(results.glob("*/worth.toml"))
    return {tag: price for file in files for tag, price in read(file).items()}


def count_verdicts():
    """{"matters": number of tags, "perhaps": .., "nothing shows": .., "not measured": ..}."""
    said = {tag: price["says"].rpartition("; ")[2] for tag, price in worth().items()}
    kinds = [said.get(tag, "not measured") for tag in read("details.toml")["tags"]]
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
    details, prices, code = read("details.toml"), worth(), sources()
    lines = [
        "Each detail has a tag. `grep -rn GEN-4 rlhf_details` finds it in the code, and `pytest -k gen_4` runs its "
        "tests, whose names begin with it. The tests of several details name them in their docstrings. The price is "
        "what the studies in benchmark/studies have measured.",
    ]
    for family, tags in groupby(details["tags"].items(), key=lambda item: item[0].partition("-")[0]):
        lines += ["", f"### {FAMILIES[family]}", "", "| tag | detail | where | source | tests | price |"]
        lines += ["|---|---|---|---|---|---|"]
        for tag, detail in tags:
            places = ", ".join(f"`{file}`" for file in files_with(tag, code))
            source = "; ".join("ours" if s == "own" else source_link(s, details["systems"]) for s in detail["source"])
            tests = ", ".join(f"`{file}`" for file in sorted({test.split("::")[0] for test in tests_of(tag)}))
            price = prices.get(tag, {}).get("says", "")
            lines.append(f"| {tag} | {detail['what']} | {places} | {source} | {tests} | {price} |")
    return lines


def verdicts():
    """Lines on what became of every entry of the catalogue of published details, and of every known fault."""
    details, catalogue, faults = read("details.toml")["tags"], read("catalogue.toml"), read("faults.toml")
    count = {v: sum(x["verdict"] == v for x in catalogue.values()) for v in ("tagged", "different", "not ours")}
    lines = [
        "## The catalogue",
        "",
        "What the published systems do, entry by entry, and what is done here: under a tag, differently or not at all. "
        + ", ".join(f"{n} {v}" for v, n in count.items())
        + f"; {len(catalogue)} in all.",
        "",
        "| entry | what | verdict | tag, or why |",
        "|---|---|---|---|",
    ]
    for entry, row in catalogue.items():
        tags = ", ".join(tag for tag, detail in details.items() if entry in detail["entries"].split())
        lines.append(
            f"| {entry} | {row['what']} | {row['verdict']} | {'; '.join(x for x in (tags, row['why']) if x)} |"
        )
    lines += [
        "",
        "## Faults that shipped elsewhere",
        "",
        "Each with the tests that fail where this code has it: those of the tags that name it, and others.",
        "",
        "| | fault | tags | tests | note | reported in |",
        "|---:|---|---|---|---|---|",
    ]
    for number, fault in faults.items():
        tags = ", ".join(tag for tag, detail in details.items() if number in detail["faults"].split())
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
