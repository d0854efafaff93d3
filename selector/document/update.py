"""A document's memory: study it, fit the gate to the questions, train one entry to answer them without the document.

A document has a bundle of its own, with one entry behind a gate. A new version starts from the memory of the last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.bundle import ENTRY_AXES, Bundle, facts_of
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError, UnsupportedModel

from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone
from ..backbone.scoring import EVALUATION_BATCHES, Questions, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..data.document import Document
from ..data.examples import Example
from ..gate.fit import FittedGate, fit_gate
from ..gate.settings import GateOptions
from ..refined.candidates import LEARNING_RATES, Candidate, Search, best_of
from ..refined.report import report_update
from ..refined.training import Training, TrainingProblem
from ..runtime.progress import note
from ..runtime.running import ALONE, Run
from ..update.facts import OF_EXAMPLES, with_facts_that_help
from ..update.inputs import TaskInputs, require_context
from ..update.result import UpdateResult
from .chunks import chunks_of
from .language import warn_of_strange_language
from .settings import DOCUMENT, FORMS, SHARE, STARTS, DocumentSettings
from .start import initial_memory
from .study import Studied, self_study
from .teacher import Distilling

LEAST_TOKENS: Final = 128  # of a document: less is a prompt, or a fact
HELD_OUT: Final = 8  # one question in so many is for validation, or in more
MOST_VALIDATION: Final = 64


def update_document(
    backbone: Backbone, inputs: TaskInputs, settings: DocumentSettings, run: Run = ALONE
) -> UpdateResult:
    """Of what `check_document` has let through.

    Raises:
        TaskDataError: the document is too short, nothing could be asked about it, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model.
        ConfigError: the settings contradict the model or the previous memory.
        UnsupportedModel: the model keeps no keys and values that a memory could start from.
    """
    document = document_of(inputs)
    token_ids = tokens_of(backbone, document)
    warn_of_strange_language(backbone, token_ids, document.name)
    check_previous(backbone, inputs.previous, settings)
    require_context(Scorer(backbone), inputs.others.of_no_task, run.progress)
    chunks = pieces_of(backbone, document, settings)
    if run.progress:
        note(f"studying {len(chunks)} pieces of {document.name}; the gate and the training follow")
    with tiled_attention(backbone):
        studied = self_study(backbone, chunks, document.name, settings, run)
    training, validation = divided(studied, settings.seed)
    fitted = gate_of(backbone, studied, inputs, settings, progress=run.progress)
    right = [each.example for each in validation if each.right] or [each.example for each in validation]
    scorer = Scorer(backbone, batch_size=EVALUATION_BATCHES * settings.batch_size)
    with tiled_attention(backbone):
        questions = StudiedQuestions(training, validation)
        begun = candidates(backbone, token_ids, questions, settings, inputs.previous)
        found = best_of(begun, run)
        bundle, facts = bundle_of(backbone, inputs, settings, found, fitted, len(token_ids)), dict[str, Any]()
        asked = questions_of(right, found.memory)
        if settings.facts == "search":
            exact = [each.example for each in training if each.exact and each.right]
            bundle, facts = with_facts_that_help(bundle, exact, asked, scorer)
        measured = replace(inputs, training=[each.example for each in training], validation=right, previous=None)
        report = report_update(scorer, measured, asked, bundle, fitted, found, progress=run.progress)
        divergence = _divergences(begun[0].training.problem, found.memory)
    report["document"] = {
        "tokens": len(token_ids),
        "chunks": len(chunks),
        "training": Counter(each.kind for each in training),
        "validation": Counter(each.kind for each in validation),
        "form": found.memory.form,
        "start": found.start,
        "divergence": divergence,
    }
    report |= {"recipe": DOCUMENT, "facts": facts}
    for callback in run.callbacks:
        callback.on_end(report)
    return UpdateResult(bundle, report)


def document_of(inputs: TaskInputs) -> Document:
    assert inputs.document is not None  # `check_document` has seen it
    return inputs.document


def check_document(inputs: TaskInputs) -> None:
    """Raises BundleError: the previous memory is none of this document."""
    document, previous = document_of(inputs), inputs.previous
    found = [entry.id for entry in previous.metadata.entries] if previous is not None else [document.record.id]
    if found != [document.record.id]:
        raise BundleError(
            f"the previous bundle is no memory of the document {document.name!r}: expected the one entry "
            f"{document.record.id!r}, found {', '.join(map(repr, found)) or 'none'}"
        )


def tokens_of(backbone: Backbone, document: Document) -> Tensor:
    """[N] int64. Raises TaskDataError: they are too few."""
    ids = _ids(backbone, document.text)
    if len(ids) < LEAST_TOKENS:
        raise TaskDataError(
            f"the document {document.name!r} has {len(ids)} tokens, expected {LEAST_TOKENS} at least: put it into the "
            "prompt, or teach it as facts"
        )
    return torch.tensor(ids)


def tokens_of_memory(num_tokens: int, settings: DocumentSettings) -> int:
    """Of a document of so many tokens. Raises ConfigError: more are asked for than it has."""
    m = settings.payload_tokens
    if m is not None and m > num_tokens:
        raise ConfigError(f"the document has {num_tokens} tokens, found payload_tokens {m} in the settings")
    return m or num_tokens // SHARE


def pieces_of(backbone: Backbone, document: Document, settings: DocumentSettings) -> list[str]:
    """What is studied at once."""
    return chunks_of(document.text, lambda text: len(_ids(backbone, text)), settings.chunk_tokens)


def check_previous(backbone: Backbone, previous: Bundle | None, settings: DocumentSettings) -> None:
    """Raises FingerprintMismatch, ConfigError: it is of another model, size or form."""
    if previous is None:
        return
    previous.require_backbone(backbone.fingerprint, "the previous bundle")
    if settings.payload_tokens not in (None, previous.payload_tokens):
        raise ConfigError(
            f"the previous bundle has {previous.payload_tokens} tokens, found payload_tokens "
            f"{settings.payload_tokens} in the settings"
        )
    if settings.form not in ("search", previous.metadata.form):
        raise ConfigError(
            f"the previous bundle has the form {previous.metadata.form!r}, found {settings.form!r} in the settings"
        )


def divided(studied: Sequence[Studied], seed: int) -> tuple[list[Studied], list[Studied]]:
    """Training and validation questions, with their share of each kind. Raises TaskDataError: there are too few."""
    order = Random(f"validation {seed}").sample(studied, len(studied))
    order.sort(key=lambda each: each.kind)
    held_out = order[:: max(HELD_OUT, math.ceil(len(order) / MOST_VALIDATION))]
    training = [each for each in studied if each not in held_out]
    if not training or not held_out:
        raise TaskDataError(
            f"{len(studied)} questions could be asked about the document, expected 2 at least: it has no sentences of "
            "six words"
        )
    return training, held_out


@dataclass(frozen=True)
class StudiedQuestions:
    """Of the self-study."""

    training: Sequence[Studied]
    validation: Sequence[Studied]


def candidates(
    backbone: Backbone,
    token_ids: Tensor,
    studied: StudiedQuestions,
    settings: DocumentSettings,
    previous: Bundle | None = None,
) -> list[Candidate]:
    """The trainings that are begun: each form with each start, or the previous memory's, at each rate."""
    training, validation = studied.training, studied.validation
    lessons = {each.key: each.lesson for each in (*training, *validation)}
    scorer = Distilling(backbone, lessons, batch_size=EVALUATION_BATCHES * settings.batch_size)
    begun = []
    for start, memory in starts(backbone, token_ids, settings, previous):
        problem = TrainingProblem(
            scorer,
            memory,
            questions_of([each.example for each in training], memory),
            torch.zeros(len(training), 1),
            questions_of([each.example for each in validation], memory),
            calibrate=False,
        )
        for rate in LEARNING_RATES if settings.learning_rate is None else (settings.learning_rate,):
            begun.append(Candidate("prompt", Training(problem, settings, rate), start))
    return begun


def starts(
    backbone: Backbone, token_ids: Tensor, settings: DocumentSettings, previous: Bundle | None
) -> list[tuple[str, TensorMemory]]:
    """What trainings start from, by name."""
    if previous is not None:
        return [(f"{previous.metadata.form}, previous", TensorMemory.from_bundle(previous))]
    tokens = tokens_of_memory(len(token_ids), settings)
    context = Scorer(backbone).context
    forms = FORMS if settings.form == "search" else (settings.form,)
    found = []
    for form in forms:
        if form == "merged":
            try:
                backbone.require_full_attention()
            except UnsupportedModel:
                if settings.form == "merged":
                    raise
                continue
        for start in STARTS if settings.start == "search" else (settings.start,):
            memory = initial_memory(backbone, token_ids[:context], tokens, form, start)
            found.append((f"{form}, {start}", memory))
    return found


def gate_of(
    backbone: Backbone,
    studied: Sequence[Studied],
    inputs: TaskInputs,
    settings: DocumentSettings,
    *,
    progress: bool = False,
) -> FittedGate:
    """Fitted to the questions of the self-study. Raises ConfigError, TaskDataError: see `fit_gate`."""
    asked = [each.example for each in studied if each.kind != "continuation"]
    own = {document_of(inputs).name: asked or [each.example for each in studied]}
    return fit_gate(backbone, inputs.others.of(own), GateOptions.of(settings), progress=progress)


def bundle_of(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: DocumentSettings,
    found: Search,
    fitted: FittedGate,
    num_tokens: int,
) -> Bundle:
    """The memory that was found, behind the gate. `num_tokens`: of the document."""
    document = document_of(inputs)
    memory = found.memory
    counts = {"document_tokens": num_tokens, **fitted.recorded}
    chosen = {"learning_rate": found.learning_rate, "form": memory.form, "start": found.start}
    calibration: dict[str, Any] = {name: getattr(memory, name) for name in ("temperature", "value_gates", "layer_bias")}
    tensors: dict[str, Any] = {name: getattr(memory, name) for name in ENTRY_AXES}
    return Bundle.create(
        **calibration,
        **tensors,
        backbone=backbone.fingerprint,
        budget=1,
        parent_digest=None if inputs.previous is None else inputs.previous.digest,
        entries=(document.record,),
        weighting=memory.weighting,
        form=memory.form,
        recipe=DOCUMENT,
        settings=settings.model_dump() | chosen | counts,
        gate=fitted.gate,
        activations={document.name: found.activation} if memory.form == "decoupled" else {},
        **_facts_taught(inputs.previous, document),
    )


def _facts_taught(previous: Bundle | None, document: Document) -> dict[str, Any]:
    """What `Bundle.create` takes to keep the facts that people have taught; those of the study are made anew."""
    found, made = facts_of(previous), f"{OF_EXAMPLES}{document.name}/"
    return found and found | {"facts": tuple(fact for fact in found["facts"] if not fact.id.startswith(made))}


def _divergences(problem: TrainingProblem, memory: TensorMemory) -> dict[str, float]:
    """Mean KL(teacher || model) of a validation answer, without memory and with it."""
    return {
        "no_memory": problem.scorer.mean_loss(problem.validation),
        "with_memory": problem.scorer.mean_loss(problem.validation, memory),
    }


def questions_of(examples: Sequence[Example], memory: TensorMemory) -> Questions:
    """All of them retrieve the one entry, whatever their keys are."""
    return Questions(examples, memory.retrieval_keys.expand(len(examples), -1))


def _ids(backbone: Backbone, text: str) -> list[int]:
    ids: list[int] = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
