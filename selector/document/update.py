"""Documents as memory: read each, ask about it, compact its keys and values, and fit a gate to the questions.

Each document is one entry of merged memory, and a task of the gate. Steps through the model come after compaction, if
they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.bundle import Bundle, facts_of
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError

from ..backbone.model import Backbone
from ..backbone.scoring import Questions, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..data.examples import Example
from ..gate.fit import FittedGate, fit_gate
from ..gate.settings import GateOptions
from ..imported.bundle import untrained_bundle
from ..imported.prefix import require_distances
from ..refined.report import report_update
from ..runtime.progress import note
from ..runtime.running import ALONE, Run
from ..update.inputs import TaskInputs, require_context
from ..update.result import UpdateResult
from .chunks import spread
from .questions import clozes_of, questions_asked
from .settings import DOCUMENT, DocumentSettings
from .text import CompactedText, ReadText, Text, compacted_text, trained_text

SHARES: Final = (2, 4, 8, 16)  # that a dry run tells of
VALIDATED: Final = 16  # sentences with a word left out, at most, that the report asks of each document


def update_document(
    backbone: Backbone, inputs: TaskInputs, settings: DocumentSettings, run: Run = ALONE
) -> UpdateResult:
    """Of what `check_documents` has let through.

    Raises:
        TaskDataError: a document is too short, nothing could be asked about it, or a step's loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model, or numbers are beyond float16.
        ConfigError: the memory would have more tokens than a document; and as `fit_gate` does.
        UnsupportedModel: the model's attention sees more than distances between tokens, or not all of them.
    """
    texts = texts_of(backbone, inputs)
    m = tokens_of_memory(texts, settings)
    clozes = {text.name: _clozes(text, settings.seed) for text in texts}
    with products(backbone, settings):
        found = [_kept(backbone, text, m, settings, run, f"document-{at}") for at, text in enumerate(texts, start=1)]
        if run.progress:
            for each in found:
                note(f"{each.text.name}: {m} of {each.text.tokens} tokens: {each}")
        own = {text.name: _asked(backbone, text, settings, run) + clozes[text.name] for text in texts}
    fitted = fit_gate(backbone, inputs.others.of(own), GateOptions.of(settings), progress=run.progress)
    bundle = bundle_of(backbone, inputs, settings, found, fitted)
    validation = [example for of_one in clozes.values() for example in of_one[:VALIDATED]]
    questions = Questions(validation, bundle.retrieval_keys[:1].float().expand(len(validation), -1))
    with tiled_attention(backbone), products(backbone, settings):
        scorer, measured = Scorer(backbone, batch_size=VALIDATED), replace(inputs, validation=validation, previous=None)
        report = report_update(scorer, measured, questions, bundle, fitted, None, progress=run.progress)
    report |= {"recipe": DOCUMENT, "documents": {each.text.name: each.report for each in found}}
    for callback in run.callbacks:
        callback.on_end(report)
    return UpdateResult(bundle, report)


def texts_of(backbone: Backbone, inputs: TaskInputs) -> list[Text]:
    """The documents as the model reads them. Raises as `update_document` does before it computes anything."""
    require_distances(backbone)
    if inputs.previous is not None:
        inputs.previous.require_backbone(backbone.fingerprint, "the previous bundle")
    require_context(Scorer(backbone), inputs.others.of_no_task, progress=False)
    return [Text.of(backbone, document) for document in inputs.documents]


def tokens_of_memory(texts: Sequence[Text], settings: DocumentSettings) -> int:
    """m, of all documents. Raises ConfigError: no token is left, or one has fewer tokens."""
    longest, shortest = (pick(texts, key=lambda text: text.tokens) for pick in (max, min))
    m = settings.payload_tokens or longest.tokens // settings.share
    if not m:
        raise ConfigError(f"a share of {settings.share} leaves none of the {longest.tokens} tokens of {longest.name!r}")
    if m > shortest.tokens:
        raise ConfigError(
            f"the document {shortest.name!r} has {shortest.tokens} tokens, expected the {m} of the memory at least: "
            "give --payload-tokens, or a bundle of its own"
        )
    return m


def bundle_of(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: DocumentSettings,
    found: Sequence[CompactedText],
    fitted: FittedGate,
) -> Bundle:
    """The memories behind the gate. Raises BundleError: numbers are beyond float16."""
    documents = {each.text.name: each.report for each in found}
    return untrained_bundle(
        backbone,
        torch.stack([each.keys for each in found], dim=1),
        torch.stack([each.values for each in found], dim=1),
        [each.text.document.record for each in found],
        parent_digest=None if inputs.previous is None else inputs.previous.digest,
        recipe=DOCUMENT,
        settings=settings.model_dump() | {"documents": documents, **fitted.recorded},
        gate=fitted.gate,
        **facts_of(inputs.previous),
    )


def sizes(backbone: Backbone, inputs: TaskInputs, settings: DocumentSettings) -> dict[str, str]:
    """What each document would lose at each size, by name. Raises as `update_document` does before it computes."""
    texts, lines = texts_of(backbone, inputs), dict[str, str]()
    asked_for = tokens_of_memory(texts, settings)
    shape = (backbone.hidden_size, backbone.num_layers, backbone.num_kv_heads)
    with products(backbone, settings):
        for text in texts:
            whole = ReadText.of(backbone, text)
            for m in sorted({asked_for, *(text.tokens // share for share in SHARES)}, reverse=True):
                size = footprint_bytes(1, *shape, m, backbone.head_dim, backbone.value_dim)
                found = compacted_text(backbone, whole, m)
                lines[f"{text.name}, {m} of {text.tokens} tokens"] = f"{size / 1e6:.2f} MB; {found}"
    return lines


def check_documents(inputs: TaskInputs) -> None:
    """Refuse what can be refused without the model.

    Raises:
        TaskDataError: two documents have one name.
        BundleError: the previous memory is of a document that is not there.
    """
    names = [document.name for document in inputs.documents]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise TaskDataError(f"two documents have the name {twice!r}, which is a task of the gate")
    ids = {document.record.id for document in inputs.documents}
    for entry in () if inputs.previous is None else inputs.previous.metadata.entries:
        if entry.id not in ids:
            raise BundleError(
                f"the previous bundle has the entry {entry.id!r}, expected documents that are given again: "
                f"found {', '.join(map(repr, names))}"
            )


def _kept(backbone: Backbone, text: Text, m: int, settings: DocumentSettings, run: Run, name: str) -> CompactedText:
    """Raises as `trained_text` does."""
    whole = ReadText.of(backbone, text)
    found = compacted_text(backbone, whole, m)
    return trained_text(backbone, whole, found, settings, run, name) if settings.steps else found


def _asked(backbone: Backbone, text: Text, settings: DocumentSettings, run: Run) -> list[Example]:
    return questions_asked(backbone, spread(text.pieces, settings.asked), text.name, settings.seed, run.progress)


def _clozes(text: Text, seed: int) -> list[Example]:
    """Raises TaskDataError: there are no sentences."""
    if not (found := clozes_of(text.pieces, text.name, seed)):
        raise TaskDataError(f"nothing can be asked about the document {text.name!r}: it has no sentences of six words")
    return found


def products(backbone: Backbone, settings: DocumentSettings) -> torch.autocast:
    return torch.autocast(backbone.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
