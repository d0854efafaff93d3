"""The table of related English words: what of WordNet is in it, and that it comes with WordNet's licence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.research.facts.related_words import main, read_lexicon, related_words, written
from inducekv_vllm.facts.language import RELATED_WORDS, languages

# Offsets, file numbers and pointers as in WordNet: founded is established and has a founder; begun is another sense,
# which was tagged too seldom; Lima the city is no lima bean; tall and short are about height; a father is paternal.
DATA = {
    "noun": [
        "00000001 18 n 02 founder 0 father 1 001 + 00000010 v 0101 | a person who founds",
        "00000002 20 n 01 Lima 0 000 | a capital",
        "00000003 07 n 02 height 0 tallness 0 001 = 00000020 a 0000 | how tall",
        "00000004 20 n 02 lima 0 bean 0 000 | a bean",
        "00000005 04 n 01 zarf 0 000 | a holder for a cup",
    ],
    "verb": [
        "00000010 41 v 02 found 0 establish 0 001 + 00000001 n 0101 00 | set up",
        "00000011 30 v 02 found 0 begin 0 000 00 | start",
        "00000012 30 v 02 zarfing 0 zarf 0 000 00 | hold",
    ],
    "adj": [
        "00000020 00 a 01 tall 0 001 = 00000003 n 0000 | great in height",
        "00000021 01 a 01 paternal 0 001 \\ 00000001 n 0102 | of a father",
        "00000022 00 s 01 towering 0 001 & 00000020 a 0000 | very tall",
    ],
    "adv": [],
}
INDEX = {
    "noun": [
        "founder n 1 1 + 1 1 00000001", "father n 1 1 + 1 1 00000001", "lima n 2 0 2 0 00000002 00000004",
        "height n 1 1 = 1 1 00000003", "tallness n 1 1 = 1 0 00000003", "bean n 1 0 1 1 00000004",
        "zarf n 1 0 1 0 00000005",
    ],
    "verb": [
        "found v 2 1 + 2 2 00000010 00000011", "establish v 1 1 + 1 1 00000010", "begin v 1 0 1 1 00000011",
        "zarfing v 1 0 1 0 00000012", "zarf v 1 0 1 0 00000012",
    ],
    "adj": ["tall a 1 1 = 1 1 00000020", "paternal a 1 1 \\ 1 1 00000021", "towering a 1 1 & 1 0 00000022"],
    "adv": [],
}  # fmt: skip
TAGGED = [
    "founder%1:18:00:: 1 3", "father%1:18:01:: 1 9", "height%1:07:00:: 1 4", "bean%1:20:00:: 1 2",
    "found%2:41:00:: 1 9", "found%2:30:00:: 2 1", "establish%2:41:00:: 1 5", "begin%2:30:00:: 1 8",
    "tall%3:00:00:: 1 5", "paternal%3:01:00:: 1 2",
]  # fmt: skip
LICENCE = "  1 This software and database is being provided"


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    for kind, lines in DATA.items():
        (tmp_path / f"data.{kind}").write_text("\n".join([LICENCE, *lines, ""]))
        (tmp_path / f"index.{kind}").write_text("\n".join([LICENCE, *INDEX[kind], ""]))
    (tmp_path / "cntlist.rev").write_text("\n".join([*TAGGED, ""]))
    return tmp_path


def test_what_is_related(wordnet: Path) -> None:
    found = related_words(read_lexicon(wordnet))
    assert found["related"] == {
        "establish": "father found founder",
        "father": "found founder patern",
        "founder": "patern",
        "found": "founder",
        "height": "tall",
        "tall": "tower",
    }
    assert found["people"] == "father founder"


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == main([str(tmp_path / "missing")]) == 2
    assert "cntlist" in capsys.readouterr().err


def test_the_stored_table() -> None:
    """What the command writes of WordNet itself, which is not in the repository."""
    text = RELATED_WORDS.read_text(encoding="utf-8")
    stored = json.loads(text)
    assert text == written(stored)
    assert len(text) < 1_500_000
    assert all(stem < other for stem, others in stored["related"].items() for other in others.split())
    english = languages()["en"]
    assert english.stem("founder") in english.related(english.stem("found"))
    assert english.stem("found") in english.related(english.stem("founder"))
    assert english.stem("creator") in english.related(english.stem("create"))  # most often it is a name of God
    assert english.stem("architect") in english.people
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in (
        RELATED_WORDS.with_name("WORDNET_LICENSE.txt").read_text(encoding="utf-8")
    )
