"""The catalogue of published details has its verdicts. tests/cli/test_docs.py has the index."""

import details


def test_every_entry_of_the_catalogue_has_one_verdict_and_tagged_ones_a_tag():
    tagged = {entry for row in details.DETAILS.values() for entry in row.get("entries", "").split()}
    entries = details.catalogue()
    assert len(entries) == sum(len(rows) for rows in details.read("not_tagged.toml").values()) + len(tagged)
    for entry, (verdict, row) in entries.items():
        assert verdict in ("tagged", "different", "not ours"), entry
        assert (verdict == "tagged") == (entry in tagged), entry
        assert row["what"] and (row.get("why") or verdict == "tagged"), entry
