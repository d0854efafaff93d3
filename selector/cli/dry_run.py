"""`inducekv-select --dry-run`: what a run would read, compute and write, without writing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.bundle import Bundle

from ..backbone.model import Backbone
from ..backbone.scoring import Scorer
from ..document.kinds import ASKED
from ..document.settings import DocumentSettings
from ..document.text import Document
from ..document.update import check_previous, pieces_of, tokens_of, tokens_of_memory
from ..paper.settings import PaperSettings
from ..refined.duration import in_words
from ..refined.estimate import estimate
from ..refined.settings import RefinedSettings
from ..run import CheckedTask
from ..update.inputs import TaskInputs, check_inputs


def dry_run(backbone: Backbone, task: CheckedTask, output: Path) -> None:
    """Print it. Raises what the run itself would raise before it computes anything."""
    inputs, settings, document = task.inputs, task.request.settings, task.request.document
    if isinstance(settings, DocumentSettings):
        assert document is not None
        check_previous(backbone, inputs.previous, settings)
        for name, text in _costs_of_document(backbone, document, settings, inputs.previous).items():
            print(f"{name}: {text}")
        print(f"{output}: not written, this was a dry run")
        return
    scorer = Scorer(backbone)
    if isinstance(settings, PaperSettings) or settings.form == "merged":
        backbone.require_full_attention()
    check_inputs(scorer, inputs, settings, task.identity["recipe"])
    lengths = [
        scorer.prefix(example)["input_ids"].shape[1] + len(scorer.answer_tokens(example))
        for example in (*inputs.training, *inputs.validation)
    ]
    tasks = dict.fromkeys(example.task for example in inputs.training)
    print(f"task: {', '.join(tasks)}; {len(inputs.training)} training and {len(inputs.validation)} validation examples")
    print(f"tokens with the answer: {sum(lengths) / len(lengths):.0f} on average, {max(lengths)} at most")
    for name, text in _costs(backbone, inputs, settings).items():
        print(f"{name}: {text}")
    print(f"{output}: not written, this was a dry run")


def _costs(backbone: Backbone, inputs: TaskInputs, settings: PaperSettings | RefinedSettings) -> dict[str, Any]:
    if isinstance(settings, PaperSettings):
        sizes = (backbone.hidden_size, backbone.num_layers, backbone.num_kv_heads)
        size = footprint_bytes(settings.budget, *sizes, settings.payload_tokens, backbone.head_dim, backbone.value_dim)
        return {"memory": f"{size / 1e6:.2f} MB for all tasks together", "time": "not estimated for the paper's recipe"}
    found = estimate(backbone, inputs, settings)
    earlier = 0 if inputs.previous is None else inputs.previous.num_entries
    kept = f" beside {earlier} earlier entries" if earlier else ""
    costs = {
        "memory": f"{found.new_bytes / 1e6:.2f} MB for this task{kept}, and its part of the gate",
        "training": f"{found.trainings} begun, one of {settings.steps} steps finished, at most "
        f"{in_words(found.seconds)}; less if it ends early, or if the examples suffice as facts",
    }
    if found.without_tails:
        costs["steps"] = "compute whole prompts: the layers without attention keep too much of an example to be stored"
    return costs


def _costs_of_document(
    backbone: Backbone, document: Document, settings: DocumentSettings, previous: Bundle | None
) -> dict[str, str]:
    num_tokens = len(tokens_of(backbone, document))
    m = tokens_of_memory(num_tokens, settings) if previous is None else previous.payload_tokens
    sizes = (backbone.hidden_size, backbone.num_layers, backbone.num_kv_heads)
    size = footprint_bytes(1, *sizes, m, backbone.head_dim, backbone.value_dim)
    pieces = len(pieces_of(backbone, document, settings))
    questions = pieces * (len(ASKED) * settings.asked + bool(settings.asked) + settings.clozes + settings.continuations)
    limit = "" if settings.minutes is None else f", {settings.minutes:g} minutes at most"
    return {
        "document": f"{document.name}: {num_tokens} tokens in {pieces} pieces, {questions} questions at most",
        "memory": f"{m} tokens, {size / 1e6:.2f} MB, and a gate; the document's own keys and values would be "
        f"{num_tokens / m:.1f} times as many",
        "training": f"one of {settings.steps} steps finished at most{limit}; its duration is said before the first one",
    }
