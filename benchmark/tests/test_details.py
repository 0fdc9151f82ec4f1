"""The catalogue of published details has its verdicts, and sizes.py counts. tests/cli/test_docs.py has the index."""

import re

import details
import sizes

DETAILS, CATALOGUE = (details.read(f"{name}.toml") for name in ("details", "catalogue"))


def test_every_entry_of_the_catalogue_has_one_verdict_and_tagged_ones_a_tag():
    tagged = {entry for detail in DETAILS["tags"].values() for entry in detail["entries"].split()}
    assert tagged <= CATALOGUE.keys()
    for entry, row in CATALOGUE.items():
        assert row["verdict"] in ("tagged", "different", "not ours"), entry
        assert (row["verdict"] == "tagged") == (entry in tagged), entry
        assert row["what"] and (row["why"] or row["verdict"] == "tagged"), entry


def test_sizes_count_code_and_not_words():
    source = 'class Args:\n    """Words."""\n\n    a: int = 1  # words\n    """help"""\n\n\ndef f():\n    return 1\n'
    # class Args : | a : int = 1 | def f ( ) : | return 1
    assert sizes.measure(source) == {"lines": 9, "tokens": 15, "nesting": 1, "longest function": "f", "its lines": 2}
    page = "class Args(cli.PolicyArgs):\n    a: int = 1\n    b: int = 2\n"
    flags = "class RunArgs:\n    c: int = 1\nclass PolicyArgs(RunArgs):\n    a: int = 0\n"
    assert sizes.flags_of({"page.py": page, "flags.py": flags}) == {"page.py": {"a", "b", "c"}}
    lines = sizes.table({"data.py": "x = 1\n"}, {"plumbing/data.py": "x = 12\ny = 2\n"})
    assert lines[2].startswith("| plumbing/data.py | 1 → 2 | 3 → 6 |") and re.match(r"\| all \| 1 → 2 ", lines[3])
