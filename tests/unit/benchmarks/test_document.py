"""The comparison of documents: its questions can be answered from the documents, and it judges by their values."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from benchmarks.document.__main__ import is_right
from benchmarks.document.documents import DOCUMENTS, QUESTIONS, Asked
from benchmarks.document.late import generate_late, score_late
from benchmarks.document.serving import Way, _body
from inducekv_vllm.backbone.turns import message
from selector.backbone.generation import generate, score
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from tests.tiny_models import TINY_MODELS


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_the_values_that_are_asked_for(name: str) -> None:
    document, asked = DOCUMENTS[name]()
    assert len({each.question for each in asked}) == len(asked) == QUESTIONS
    for each in asked:
        assert is_right(" ".join(document.text.split()), each), each


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It opens at 6 bar.", True),
        ("SIX bar.", True),
        ("(6)", True),
        ("46 bar", False),
        ("6.5 bar", False),
        ("0.6 bar", False),
        ("sixty", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_has_the_value_as_a_word(answer: str, right: bool) -> None:
    assert is_right(answer, Asked("At how many bar?", ("6", "six"))) is right


def test_served_requests_find_nothing_in_the_prefix_cache_but_the_cached_document() -> None:
    salts = count()

    def salt(cached: bool) -> str:
        return str(_body(Way("base", str, cached), "Where?", 2, salts)["body"]["cache_salt"])

    assert len({salt(cached=False) for _ in range(3)}) == 3
    assert len({salt(cached=True) for _ in range(3)}) == 1


def test_memory_that_the_answer_alone_sees_is_one_that_acts_from_the_last_token_of_the_prompt_on(
    tmp_path: Path,
) -> None:
    """Decoupled memory has such a form."""
    backbone = Backbone.load(TINY_MODELS["llava"](tmp_path))
    L, J, D = backbone.num_layers, backbone.num_kv_heads, backbone.head_dim
    keys, values = torch.randn(2, L, 1, J, 3, D, generator=torch.Generator().manual_seed(0))
    ones, retrieval_key = torch.ones(L), torch.ones(1, backbone.hidden_size)
    memory = TensorMemory(
        retrieval_key, keys, 10 * values, torch.tensor(1.0), ones, torch.zeros(L), "uniform", "decoupled"
    )
    prompt = backbone.encode([message("user", "Who keeps the valve?")], [])
    terms = replace(memory.terms(retrieval_key), first_active=torch.tensor([prompt["input_ids"].shape[1] - 1]))
    (expected,) = generate(backbone, [prompt], 5, memory, terms)
    (everywhere,) = generate(backbone, [prompt], 5, memory, memory.terms(retrieval_key))
    found = generate_late(backbone, prompt, 5, memory)
    assert found.token_ids == expected.token_ids != everywhere.token_ids
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)
    answer = [40, 71, 300]
    (scored,) = score(backbone, [prompt], [answer], memory, terms)
    torch.testing.assert_close(score_late(backbone, prompt, answer, memory), scored, rtol=0, atol=1e-4)
