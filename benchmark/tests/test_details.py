"""details.py: code, tests, tables and mutants speak of the same details, and details.md is fresh."""

import re

import details
import mutations
import sizes

DETAILS, CATALOGUE, FAULTS = (details.read(f"{name}.toml") for name in ("details", "catalogue", "faults"))
TESTS = [test.removeprefix("tests/") for test in mutations.all_tests(details.ROOT)]


def test_details_md_is_fresh(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["details.py", "--check"])
    assert details.main() == 0, capsys.readouterr().out


def test_code_table_and_tests_have_the_same_tags():
    tags = set(DETAILS["tags"])
    assert {tag for source in mutations.sources().values() for tag in mutations.tags_in(source)} == tags
    assert [tag for tag in tags if not mutations.tests_of(tag)] == []


def test_every_tag_has_words_and_a_source():
    assert all(detail["what"] and detail["source"] for detail in DETAILS["tags"].values())


def test_every_entry_of_the_catalogue_has_one_verdict_and_tagged_ones_a_tag():
    tagged = {entry for detail in DETAILS["tags"].values() for entry in detail["entries"].split()}
    assert tagged <= CATALOGUE.keys()
    for entry, row in CATALOGUE.items():
        assert row["verdict"] in ("tagged", "different", "not ours"), entry
        assert (row["verdict"] == "tagged") == (entry in tagged), entry
        assert row["what"] and (row["why"] or row["verdict"] == "tagged"), entry


def test_every_fault_has_tests_that_exist_or_a_reason():
    caught = {fault for detail in DETAILS["tags"].values() for fault in detail["faults"].split()}
    assert caught <= FAULTS.keys()
    missing = {f"{number}: {test}" for number, fault in FAULTS.items() for test in fault["tests"] if test not in TESTS}
    assert missing == set()
    assert [n for n, fault in FAULTS.items() if not (fault["tests"] or n in caught or fault["note"])] == []


def test_sizes_count_code_and_not_words():
    source = 'class Args:\n    """Words."""\n\n    a: int = 1  # words\n    """help"""\n\n\ndef f():\n    return 1\n'
    # class Args : | a : int = 1 | def f ( ) : | return 1
    assert sizes.measure(source) == {"lines": 9, "tokens": 15, "nesting": 1, "longest function": "f", "its lines": 2}
    page = "class Args(cli.PolicyArgs):\n    a: int = 1\n    b: int = 2\n"
    flags = "class RunArgs:\n    c: int = 1\nclass PolicyArgs(RunArgs):\n    a: int = 0\n"
    assert sizes.flags_of({"page.py": page, "flags.py": flags}) == {"page.py": {"a", "b", "c"}}
    lines = sizes.table({"data.py": "x = 1\n"}, {"plumbing/data.py": "x = 12\ny = 2\n"})
    assert lines[2].startswith("| plumbing/data.py | 1 → 2 | 3 → 6 |") and re.match(r"\| all \| 1 → 2 ", lines[3])
