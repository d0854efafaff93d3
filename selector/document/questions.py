"""The questions about a document: what the model asks itself, and its sentences with a word left out.

The gate is fitted to them, and the memory measured by the sentences, whose answers are known. A small model asks badly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import torch

from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle.source import source_digest_of

from ..backbone.model import Backbone
from ..data.examples import Example
from ..runtime.progress import track
from .chunks import sentences_of

ASK: Final = "Write one short question of somebody who wants to use what the text above says. Write the question alone."
# What is shown before, as a turn of its own: without it a small model answers in place of asking.
SHOWN_TEXT: Final = "The ferry to Tarn leaves at 7:40 from the north quay. Bicycles cost two crowns."
SHOWN: Final = "I want to take my bicycle to Tarn. What do I have to pay for it?"
EACH: Final = 2  # questions about a piece
BLANK: Final = "____"
CLOZES: Final = 6  # sentences of a piece with a word left out, at most
WORDS: Final = 6  # of a sentence, at least, that a question is made of
EXACT: Final = re.compile(r"(?<![\w.])(?:\d[\w.,:/-]*\w|\d|\w+[_.:/-]\w[\w_.:/-]*\w|\w*\d\w*|[A-Z]{2,})(?!\w)")
LONG: Final = re.compile(r"\b[^\W\d_]{6,}\b")
ASKED_TOKENS: Final = 40  # of a question, at most
TEMPERATURE: Final = 0.7
SAMPLED: Final = 32  # prompts of a batch


def questions_asked(
    backbone: Backbone, pieces: Sequence[str], task: str, seed: int, progress: bool = False
) -> list[Example]:
    """What the model asks about pieces of a document, nothing twice; without answers."""
    rng, found = Random(f"document {seed}"), dict[str, Example]()
    places = [piece for piece in pieces for _ in range(EACH)]
    for start in track(range(0, len(places), SAMPLED), "Asking", progress):
        for said in _sampled(backbone, places[start : start + SAMPLED], rng.getrandbits(32)):
            text = question_in(said)
            if text is not None and text != SHOWN:
                found.setdefault(text, question(text, "", task, f"question/{len(found)}"))
    return list(found.values())


def question_in(said: str) -> str | None:
    """The first question in what the model said; None if there is none."""
    found = re.match(r"\s*(?:Question:\s*)?([^\n?]{12,300}\?)", said)
    return found[1] if found else None


def clozes_of(pieces: Sequence[str], task: str, seed: int) -> list[Example]:
    """Sentences without one of their words, in random order: an exact value, else a long word.

    The answer is the whole sentence, which is how models answer.
    """
    rng = Random(f"clozes {seed}")
    found: dict[str, Example] = {}
    for piece in pieces:
        sentences = [each for each in sentences_of(piece) if len(each.split()) >= WORDS]
        for sentence in rng.sample(sentences, min(CLOZES, len(sentences))):
            words = next((words for kind in (EXACT, LONG) if (words := list(kind.finditer(sentence)))), [])
            if words:
                word = rng.choice(words)
                blank = f"{sentence[: word.start()]}{BLANK}{sentence[word.end() :]}"
                text = f'Write this sentence of "{task}" and fill in the blank: {blank}'
                found.setdefault(text, question(text, sentence, task, f"cloze/{len(found)}"))
    return rng.sample(list(found.values()), len(found))


@torch.no_grad()
def _sampled(backbone: Backbone, pieces: Sequence[str], seed: int) -> list[str]:
    """What the model says when it is to ask about each piece."""
    shown = (message("user", f"{SHOWN_TEXT}\n\n{ASK}"), message("assistant", SHOWN))
    prompts = [backbone.encode([*shown, message("user", f"{piece}\n\n{ASK}")], []) for piece in pieces]
    batch = backbone.collate(prompts, side="left")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = backbone.model
        ids = model.generate(
            **batch,
            max_new_tokens=ASKED_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            pad_token_id=backbone.tokenizer.pad_token_id or 0,
        )
    said: list[str] = backbone.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def question(text: str, answer: str, task: str, identity: str) -> Example:
    """As a request of one turn. An answer of a question that has none is empty."""
    messages = (message("user", text),)
    digest = source_digest_of(messages, [])
    return Example(id=identity, task=task, messages=messages, images=(), answer=answer, source_digest=digest)
