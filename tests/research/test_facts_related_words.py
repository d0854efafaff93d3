"""The table of related English words: what of WordNet is in it, and that it comes with WordNet's licence."""

from __future__ import annotations

import json

from benchmarks.research.facts.related_words import written
from inducekv_vllm.facts.language import RELATED_WORDS, languages


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
