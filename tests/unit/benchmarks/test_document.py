"""The comparison of documents asks for the word that is missing, and counts gains as its page says."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from benchmarks.document.asked import HeldOut, missing_places, recovered
from benchmarks.document.serving import Way, _body
from inducekv_vllm.backbone.turns import message
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.document.study import Studied
from selector.document.teacher import Lesson
from tests.tiny_models import save_tiny_llama


def cloze(sentence: str, missing: str) -> Studied:
    asked = f'Write this sentence of "A" and fill in the blank: {sentence.replace(missing, "____", 1)}'
    example = Example("1", "A", (message("user", asked),), (), sentence, asked)
    return Studied(example, Lesson(torch.zeros(0, 0), torch.zeros(0, 0)), "cloze", missing, True, True)


def test_the_missing_word_is_found_among_the_tokens(tmp_path: Path) -> None:
    scorer = Scorer(Backbone.load(save_tiny_llama(tmp_path / "llama")))
    for sentence, missing in (("Opens at 37 bar.", "37"), ("Anna keeps it.", "Anna"), ("It is in Ondal", "Ondal")):
        found = cloze(sentence, missing)
        tokens = scorer.answer_tokens(found.example)
        text = scorer.backbone.tokenizer.decode(tokens[missing_places(scorer, found)])
        assert missing in text
        assert len(text) <= len(missing) + 1  # a token may have the blank before
        said = torch.full((len(tokens), len(scorer.backbone.tokenizer)), -9.0)
        said[range(len(tokens)), tokens] = 0.0
        held_out = HeldOut({"cloze": [found]})
        assert held_out.measured(scorer, [said])["cloze"] == {"questions": 1, "nll": 0.0, "right": 1.0, "filled": 1.0}
        said[missing_places(scorer, found)] = said[0].roll(7)
        assert held_out.measured(scorer, [said])["cloze"]["right"] == 0.0


def test_the_share_is_of_the_gain_that_the_prompt_has() -> None:
    def row(nll: float) -> dict[str, dict[str, float]]:
        return {"cloze": {"nll": nll}}

    assert recovered(row(12.0), row(20.0), row(10.0)) == pytest.approx({"cloze": 0.8})
    assert recovered(row(12.0), row(10.0), row(20.0)) == {}


def test_served_requests_find_nothing_in_the_prefix_cache_but_the_cached_document() -> None:
    salts = count()

    def salt(cached: bool) -> str:
        asked = cloze("Opens at 37 bar.", "37").example
        return str(_body(Way("base", lambda each: each, cached), asked, 2, salts)["body"]["cache_salt"])

    assert len({salt(cached=False) for _ in range(3)}) == 3
    assert len({salt(cached=True) for _ in range(3)}) == 1
