"""What is left of a text acts like all of it, as transformers sees it, for queries that have seen what is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from selector.backbone.generation import score
from selector.backbone.model import Backbone
from selector.document.compaction import Part, attention, compacted, memory_of, plain_attention
from selector.document.matching import kept
from selector.document.references import about, references, repeat, turns_about
from selector.document.text import Block, read

MANY = 10**6  # tokens of references
TEXT = "The kestrel valve opens at 37 bar. It is checked every 12 days by the north team. The plover valve is new."


def ids_of(llama: Backbone, text: str) -> Tensor:
    ids: Tensor = llama.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    return ids


def asking(llama: Backbone, text: str, most: int = MANY) -> list[Tensor]:
    return references(llama, *turns_about(llama, text, most))


def test_all_tokens_are_the_text_before_the_request(folder: Path, llama: Backbone) -> None:
    """Transformers' log-probabilities behind the text, in float64."""
    ids = ids_of(llama, TEXT)
    (text,) = read(llama, [Block(ids, TEXT, [])])
    found = compacted(llama, [Part(text, asking(llama, TEXT), len(ids))])
    memory = memory_of(found.keys, found.values, llama.hidden_size)
    prompt, answer = llama.encode([{"role": "user", "content": [{"type": "text", "text": "When?"}]}], []), [5, 9, 13]
    (ours,) = score(llama, [prompt], [answer], memory, memory.terms(memory.retrieval_keys))
    whole = torch.cat([ids, prompt["input_ids"][0], torch.tensor(answer)])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logprobs = plain(input_ids=whole[None]).logits[0].log_softmax(-1)
    theirs = [logprobs[len(whole) - 4 + at, token] for at, token in enumerate(answer)]
    torch.testing.assert_close(ours, torch.stack(theirs).float(), rtol=0, atol=1e-4)


def test_later_layers_are_asked_by_what_has_seen_the_earlier_ones(
    llama: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries of a plain forward pass with the memory that was found are those that it was fitted to."""
    seen: list[Tensor] = []

    def watched(queries: object, *rest: object) -> object:
        seen.append(queries.queries)  # type: ignore[attr-defined]
        return kept(queries, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("selector.document.compaction.kept", watched)
    (text,) = read(llama, [Block(ids_of(llama, TEXT), TEXT, [])])
    asked = asking(llama, TEXT)[:1]
    found = compacted(llama, [Part(text, asked, 9)])
    asked_first = list(seen)
    seen.clear()
    memory = memory_of(found.keys, found.values, llama.hidden_size)
    compacted(llama, [Part(memory, asked, 9)])  # of which all is kept
    for before, again in zip(asked_first, seen, strict=True):
        torch.testing.assert_close(again, before, rtol=0, atol=1e-3)
    assert len(asked_first) == llama.num_layers
    seen.clear()
    compacted(llama, [Part(text, asked, len(ids_of(llama, TEXT)))])  # behind the whole text they are others
    assert not torch.allclose(seen[-1], asked_first[-1], atol=1e-3)


def test_blocks_are_read_behind_one_another(llama: Backbone) -> None:
    first, second = (ids_of(llama, text) for text in ("The kestrel valve opens.", " The plover valve is new."))
    (whole,) = read(llama, [Block(torch.cat([first, second]), "", [])])
    parts = read(llama, [Block(first, "", []), Block(second, "", [])])
    for name in ("payload_keys", "payload_values"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=3)
        torch.testing.assert_close(joined, getattr(whole, name))


def test_blocks_are_compacted_as_if_each_were_alone(llama: Backbone) -> None:
    """In one pass, each for its own references, behind one another."""
    texts = ["The kestrel valve opens at 37 bar.", "It is checked every 12 days by the north team."]
    memories = read(llama, [Block(ids_of(llama, text), text, []) for text in texts])
    parts = [
        Part(memory, asking(llama, text), tokens) for memory, text, tokens in zip(memories, texts, (5, 8), strict=True)
    ]
    together, alone = compacted(llama, parts), [compacted(llama, [part]) for part in parts]
    for name in ("keys", "values"):
        joined = torch.cat([getattr(each, name) for each in alone], dim=2)
        torch.testing.assert_close(getattr(together, name), joined, rtol=0, atol=1e-3)


def test_what_asks(llama: Backbone) -> None:
    """Parts are repeated to their ends, sentences are asked about by how they begin, each in a conversation."""
    assert repeat(TEXT) == 'Repeat the part of the text that begins with "The kestrel valve opens at 37 bar.".'
    assert about("The plover valve is new and green.") == "What does the text say about The plover valve is new?"
    texts = [llama.tokenizer.decode(ids) for ids in asking(llama, TEXT)]
    repeated = [text for text in texts if "Repeat the part" in text]
    asked = [text for text in texts if "What does the text say about" in text]
    assert len(texts) == len(repeated) + len(asked)
    assert sum(text.count("What does the text say about") for text in asked) == 3
    assert all(any(sentence in text for text in repeated) for sentence in TEXT.split(". ")[:1])


def test_less_is_asked_about_a_text_if_there_is_no_room_and_all_is_repeated(llama: Backbone) -> None:
    sentences = [f"The valve number {at} opens at {at} bar." for at in range(60)]
    found = []
    for most in (MANY, 1200, 400):
        texts = [llama.tokenizer.decode(ids) for ids in asking(llama, " ".join(sentences), most)]
        repeated = "".join(text for text in texts if "Repeat the part" in text)
        assert all(sentence in repeated for sentence in sentences)
        found.append(sum(text.count("What does the text say") for text in texts))
    assert found[0] == 60 > found[1] > found[2] > 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_fused_kernel_and_the_formula_of_other_devices_agree(is_causal: bool) -> None:
    torch.manual_seed(3)
    query, keys, values = torch.randn(4, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    of_heads, of_values = (each.repeat_interleave(2, dim=0)[None] for each in (keys, values))
    fused = attention(query, keys, values, 0.3, is_causal)
    plain = plain_attention(query[None], of_heads, of_values, None, 0.3, is_causal)
    for found, expected in zip(fused, plain, strict=True):
        assert torch.allclose(found, expected[0], atol=1e-5)
