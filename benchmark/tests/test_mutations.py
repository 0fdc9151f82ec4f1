"""mutations.py: how mutants are made and judged. tests/cli/test_docs.py has that each can be made, and each tag one."""

import mutations
import pytest


def test_a_comment_speaks_of_the_statement_beside_it_or_below_it_and_may_have_two_tags():
    source = "x = 1  # Beside it. [A-1]\n# Above it.\n# It goes on. [A-2] [A-3]\ny = (\n    2\n)\n"
    assert mutations.tags_in(source) == {"A-1": 1, "A-2": 4, "A-3": 4}
    assert mutations.mutate(source, "A-3", "2", "3").endswith("y = 3\n")
    with pytest.raises(ValueError, match="0 times"):
        mutations.mutate(source, "A-1", "2", "3")


def test_a_mutant_is_killed_only_where_a_test_failed_or_hung():
    assert [mutations.is_killed(code) for code in (1, None, 0, 2, 4, 5)] == [True] * 2 + [False] * 4
