"""Self-study: the frozen model asks itself questions about each piece of a document, and answers them beside the piece.

What it says then, with the log-probabilities of its most likely tokens, is what a memory is trained to say without the
piece (Cartridges, arXiv 2506.06266). Each piece is kept on disk when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle.source import source_digest_of

from ..backbone.model import Backbone
from ..backbone.scoring import Scorer
from ..data.examples import Example
from ..runtime.checkpoint import Checkpoint
from ..runtime.progress import track
from ..runtime.running import ALONE, Run
from .kinds import ASKED, SHOWN, SHOWN_TEXT, Kind, MadeQuestion, asking, clozes, continuations, question_in, summaries
from .settings import DocumentSettings
from .teacher import Lesson, logprobs_beside

ASKED_TOKENS: Final = 40  # of a question, at most
TEMPERATURE: Final = 0.7
AT_ONCE: Final = 8  # pieces that are studied together, and kept on disk
SAMPLED: Final = 16  # prompts of a batch
TOP: Final = 20  # most likely tokens that are kept of each of the teacher's distributions


@dataclass(frozen=True)
class Studied:
    """One question of the self-study."""

    example: Example  # without the piece
    lesson: Lesson
    kind: Kind
    missing: str  # the word that a cloze leaves out
    exact: bool  # that is a number, a name or a code
    right: bool  # with the piece in its context the model says the answer, token by token

    @property
    def key(self) -> tuple[str, str]:
        return self.example.source_digest, self.example.answer


def self_study(
    backbone: Backbone,
    chunks: Sequence[str],
    title: str,
    settings: DocumentSettings,
    run: Run = ALONE,
) -> list[Studied]:
    """All questions about all pieces, none of them twice. Raises ConfigError: the progress cannot be written."""
    studied: dict[str, Studied] = {}
    for first in track(range(0, len(chunks), AT_ONCE), "Studying the document", run.progress):
        name = f"study-{first}"
        found = _read(run.checkpoint, name, title)
        if found is None:
            found = _study(backbone, chunks[first : first + AT_ONCE], title, first, settings, run.progress)
            _write(run.checkpoint, name, found)
        studied |= {each.example.source_digest: each for each in found}
    return list(studied.values())


def _study(
    backbone: Backbone, chunks: Sequence[str], title: str, first: int, settings: DocumentSettings, progress: bool
) -> list[Studied]:
    """Ask about some pieces, answer, and keep what the teacher says. `first`: the number of the first piece."""
    rng = Random(f"document {settings.seed} {first}")
    asked = _asked(backbone, chunks, title, settings, rng, progress)
    answered = _answered(backbone, chunks, asked, settings.answer_tokens, rng, progress)
    scorer = Scorer(backbone, batch_size=2 * settings.batch_size)
    studied = []
    for at, chunk in enumerate(chunks):
        made = answered[at] + clozes(chunk, title, settings.clozes, rng)
        made += continuations(chunk, title, settings.continuations, rng)
        if not made:
            continue
        beside = [_example(f"{chunk}\n\n{each.text}", each.answer, title, "") for each in made]
        precision = torch.autocast(backbone.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
        with precision:
            lessons = [Lesson.of(logprobs, TOP) for logprobs in logprobs_beside(scorer, beside)]
        for row, (each, lesson) in enumerate(zip(made, lessons, strict=True)):
            example = _example(each.text, each.answer, title, f"{each.kind}/{first + at}/{row}")
            right = lesson.says(scorer.answer_tokens(example))
            studied.append(Studied(example, lesson, each.kind, each.missing, each.exact, right))
    return studied


def _asked(
    backbone: Backbone, chunks: Sequence[str], title: str, settings: DocumentSettings, rng: Random, progress: bool
) -> list[list[MadeQuestion]]:
    """What the model asks about each piece, and summaries: without their answers."""
    places = [(at, kind) for at in range(len(chunks)) for kind in ASKED for _ in range(settings.asked)]
    prompts = [
        _prompt(
            backbone,
            message("user", asking(kind, SHOWN_TEXT)),
            message("assistant", SHOWN[kind]),
            message("user", asking(kind, chunks[at])),
        )
        for at, kind in places
    ]
    found: list[dict[str, MadeQuestion]] = [{} for _ in chunks]
    all_said = _sampled(backbone, prompts, ASKED_TOKENS, rng, "Asking", progress)
    for (at, kind), said in zip(places, all_said, strict=True):
        text = question_in(said)
        if text is not None and text not in SHOWN.values():
            found[at][text] = MadeQuestion(kind, text, "")
    return [
        [*of_chunk.values(), *(summaries(chunk, title) if settings.asked else ())]
        for chunk, of_chunk in zip(chunks, found, strict=True)
    ]


def _answered(
    backbone: Backbone,
    chunks: Sequence[str],
    asked: Sequence[Sequence[MadeQuestion]],
    tokens: int,
    rng: Random,
    progress: bool,
) -> list[list[MadeQuestion]]:
    """With the answers of the model, which has the piece in its context; without those that are empty."""
    places = [(at, question) for at, of_chunk in enumerate(asked) for question in of_chunk]
    prompts = [_prompt(backbone, message("user", f"{chunks[at]}\n\n{each.text}")) for at, each in places]
    answered: list[list[MadeQuestion]] = [[] for _ in chunks]
    all_said = _sampled(backbone, prompts, tokens, rng, "Answering", progress)
    for (at, each), said in zip(places, all_said, strict=True):
        if said.strip():
            answered[at].append(replace(each, answer=said.strip()))
    return answered


def _prompt(backbone: Backbone, *messages: dict[str, Any]) -> Any:
    return backbone.encode(messages, [])


@torch.no_grad()
def _sampled(
    backbone: Backbone, prompts: Sequence[Any], tokens: int, rng: Random, title: str, progress: bool
) -> list[str]:
    """What the model says to each prompt."""
    said: list[str] = []
    for start in track(range(0, len(prompts), SAMPLED), title, progress):
        batch = backbone.collate(prompts[start : start + SAMPLED], side="left")
        with torch.random.fork_rng():
            torch.manual_seed(rng.getrandbits(32))
            ids = backbone.model.generate(
                **batch,
                max_new_tokens=tokens,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                repetition_penalty=1.0,
                pad_token_id=backbone.tokenizer.pad_token_id or 0,
            )
        new = ids[:, batch["input_ids"].shape[1] :]
        said += backbone.tokenizer.batch_decode(new, skip_special_tokens=True)
    return said


def _example(text: str, answer: str, task: str, identity: str) -> Example:
    messages = (message("user", text),)
    return Example(
        id=identity,
        task=task,
        messages=messages,
        images=(),
        answer=answer,
        source_digest=source_digest_of(messages, []),
    )


def _write(checkpoint: Checkpoint | None, name: str, studied: Sequence[Studied]) -> None:
    if checkpoint is None:
        return
    tensors: dict[str, Tensor] = {}
    rows = []
    for row, each in enumerate(studied):
        tensors |= {f"{row}.token_ids": each.lesson.token_ids, f"{row}.logprobs": each.lesson.logprobs}
        text = each.example.messages[0]["content"][0]["text"]
        rows.append(
            {"id": each.example.id, "text": text, "answer": each.example.answer, "kind": each.kind}
            | {"missing": each.missing, "exact": each.exact, "right": each.right}
        )
    checkpoint.write(name, tensors, {"studied": rows})


def _read(checkpoint: Checkpoint | None, name: str, task: str) -> list[Studied] | None:
    """What `_write` has kept, if anything. Raises ConfigError: the file is damaged."""
    if checkpoint is None or (saved := checkpoint.read(name)) is None:
        return None
    tensors, progress = saved
    try:
        return [
            Studied(
                example=_example(each["text"], each["answer"], task, each["id"]),
                lesson=Lesson(tensors[f"{row}.token_ids"], tensors[f"{row}.logprobs"]),
                kind=each["kind"],
                missing=each["missing"],
                exact=each["exact"],
                right=each["right"],
            )
            for row, each in enumerate(progress["studied"])
        ]
    except (KeyError, TypeError) as error:
        raise checkpoint.damaged(name, error) from error
