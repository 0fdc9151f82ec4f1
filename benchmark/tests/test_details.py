"""The catalogue of published details has its verdicts. tests/cli/test_docs.py has the index."""

import details

DETAILS, CATALOGUE = (details.read(f"{name}.toml") for name in ("details", "catalogue"))


def test_every_entry_of_the_catalogue_has_one_verdict_and_tagged_ones_a_tag():
    tagged = {entry for detail in DETAILS["tags"].values() for entry in detail["entries"].split()}
    assert tagged <= CATALOGUE.keys()
    for entry, row in CATALOGUE.items():
        assert row["verdict"] in ("tagged", "different", "not ours"), entry
        assert (row["verdict"] == "tagged") == (entry in tagged), entry
        assert row["what"] and (row["why"] or row["verdict"] == "tagged"), entry
