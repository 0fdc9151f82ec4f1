"""What the generator of the site promises of the pages that it makes from the code, its notes and the results."""

import html
import re

import pytest


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the scripts that a test may change. Call what it returns after a change."""
    import annotate  # Before the folder is another one: it keeps the folder of the notes.
    import source

    (tmp_path / "rlhf_details").mkdir()
    for script in source.SCRIPTS:
        text = (source.ROOT / "rlhf_details" / f"{script}.py").read_text(encoding="utf-8")
        (tmp_path / "rlhf_details" / f"{script}.py").write_text(text, encoding="utf-8")
    annotate.check()
    monkeypatch.setattr(source, "ROOT", tmp_path)
    source.blocks.cache_clear()
    yield tmp_path / "rlhf_details"
    monkeypatch.undo()
    source.blocks.cache_clear()


def test_a_page_holds_every_line_of_its_script_in_order():
    import annotate
    from source import ROOT, SCRIPTS

    for script in SCRIPTS:
        lines = (ROOT / "rlhf_details" / f"{script}.py").read_text(encoding="utf-8").splitlines()
        code = re.findall(r'<code>(<span class="line".*?)</code></pre>', annotate.page(script), re.S)
        shown = re.findall(r'<span class="line" data-line="(\d+)">(.*)</span>', "\n".join(code))
        numbers = [int(number) for number, _ in shown]
        assert numbers == sorted(numbers)
        assert {i for i, line in enumerate(lines, 1) if line} <= set(numbers)
        for number, line in shown:
            assert html.unescape(re.sub(r"<[^>]*>", "", line)) == lines[int(number) - 1]


def test_every_block_has_a_note_and_every_tag_a_card():
    """The anchor of a card is the tag as the code has it, so details.html#DPO-3 leads to it."""
    import annotate
    import index_pages
    import prices
    from source import SCRIPTS, blocks

    details = index_pages.details_page()
    assert all(details.count(f' id="{tag}"') == 1 for tag in prices.DETAILS)

    for script in SCRIPTS:
        assert [block.key for block in blocks(script) if not annotate.note_of(script, block)] == []
        page = annotate.page(script)
        for block in blocks(script):
            for tag in block.tags:
                assert page.count(f'<article class="card" id="{tag}"') == 1


def test_every_sentence_on_what_a_page_adds_speaks_of_a_block():
    """A block without a sentence ends the build."""
    import annotate
    from source import MINIMAL, blocks

    keys = {block.key for pair in MINIMAL for script in pair for block in blocks(script)}
    assert {part for key in annotate.notes("minimal") for part in key.split(" -> ")} <= keys


def test_moving_a_tagged_line_needs_no_other_change(copied):
    """Neither a note nor the copy of the line in another script has to follow, and the card's link does."""
    import annotate
    import compare
    import prices
    import source

    path = copied / "train_ppo.py"
    text = path.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.endswith("[REW-3]"))
    number = text[: text.index(line)].count("\n") + 1
    assert f'train_ppo.html#at-REW-3">train_ppo.py, line {number}</a>' in prices.card("REW-3")
    path.write_text(text.replace(line, f"\n    # one more line\n{line}"), encoding="utf-8")
    source.blocks.cache_clear()
    annotate.check()
    for left, right in source.DIFFS:
        compare.page(left, right)
    assert f'train_ppo.html#at-REW-3">train_ppo.py, line {number + 2}</a>' in prices.card("REW-3")
    assert f'data-line="{number + 2}"' in re.search(r"<span[^>]*>[^\n]*at-REW-3", annotate.page("train_ppo"))[0]


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("def pack(", "def pack_rows(", "'pack'"),
        ("[RLOO-13]", "", "RLOO-13"),
        ("def logits(self, hidden", "def logits(self, states", r"Policy\.logits"),
    ],
    ids=["code", "tag", "difference"],
)
def test_what_no_note_fits_or_speaks_of_ends_the_build(copied, old, new, words):
    import annotate
    import compare
    import source

    path = copied / "train_rloo.py"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    source.blocks.cache_clear()
    with pytest.raises(source.Mistake, match=words):
        annotate.check(), compare.page("train_ppo", "train_rloo")


def test_the_prices_on_the_cards_are_those_that_the_studies_wrote():
    import prices

    for tag in prices.DETAILS:
        card = prices.card(tag)
        assert f'class="verdict {prices.verdict(tag).replace(" ", "-")}"' in card
        assert ("Not measured" in card) == (prices.verdict(tag) == "not measured") == (tag not in prices.worth()), tag
    for tag, row in prices.worth().items():
        card, gold = prices.card(tag), re.search(r": gold ([+-][\d.]+\d)", row["says"])  # GRPO-8 has sums and no gold
        assert not gold or re.search(rf"gold( at the end)? (<b>)?{re.escape(gold[1])}", card), tag


def test_equations_become_mathml_and_names_become_links():
    from source import Mistake, prose

    shown = prose(r"$\log \pi$ of `pack` and $$a_1$$", {"pack"})
    assert shown.count("<math") == 2 and 'display="block"' in shown
    assert '<a href="#pack"><code>pack</code></a>' in shown
    with pytest.raises(Mistake, match=r"does not know \\arg"):
        prose(r"$\arg\max_v z_v$")
