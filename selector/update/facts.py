"""Facts for a task, alone or beside its memory: its training examples as they are, where validation says so.

What follows from a rule, memory has to be trained for; what can only be remembered is stored. A question that no stored
one is close to is left to the memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.bundle import (
    BackboneFingerprint,
    Bundle,
    FactRecord,
    Gate,
    PictureRecord,
    file_content,
    with_metadata,
)
from inducekv_vllm.bundle.metadata import MAX_ID
from inducekv_vllm.errors import CapacityError, InduceKVError
from inducekv_vllm.teaching import fact_of, stored_bytes, taught

from ..backbone.bundled_model import BundledModel
from ..backbone.scoring import Questions, Scorer
from ..data.examples import Example
from .inputs import TaskInputs
from .settings import REFINED

OF_EXAMPLES: Final = "fact/"  # with which the ids begin of facts that a run has made


def fact_of_example(example: Example, id: str, picture: PictureRecord | None = None) -> FactRecord | None:
    """None if it is not one question. Raises TaskDataError: see `fact_of`.

    Args:
        picture: of its pictures; without it they make it no fact.
    """
    turns = [message for message in example.messages if message["role"] != "system"]
    if (example.images and picture is None) or len(turns) != 1:
        return None
    question = "\n".join(part["text"] for part in turns[0]["content"] if part["type"] == "text")
    return fact_of(question, example.answer, example.task, id, picture=picture, also=example.also)


def facts_of_examples(examples: Sequence[Example]) -> list[FactRecord]:
    """Of those that can be facts. Their ids follow from the examples'; a run gives their dates at its end."""
    facts = [fact_of_example(each, f"{OF_EXAMPLES}{each.task}/{each.id}"[-MAX_ID:]) for each in examples]
    return [fact.model_copy(update={"created_at": None}) for fact in facts if fact is not None]


def facts_that_suffice(
    inputs: TaskInputs, gate: Gate, settings: Mapping[str, Any], validation: Questions, scorer: Scorer
) -> tuple[Bundle | None, dict[str, Any]]:
    """The previous memory with the task's examples as facts, if these answer all validation questions; and a report.

    Args:
        gate: of the tasks before and the new one.
        settings: what is recorded of the run.
    """
    report: dict[str, Any] = {"accuracy": None, "facts": 0, "tried": 0}
    facts = facts_of_examples(inputs.training)
    if not facts or not len(validation):
        return None, report
    try:
        bundle = _taught(inputs.previous, facts, scorer, settings["budget"], settings["payload_tokens"])
        bundle = bundle.with_gate(gate, settings)
    except InduceKVError as error:
        return None, report | {"refused": str(error)}
    before = None if inputs.previous is None else inputs.previous.digest
    bundle = with_metadata(bundle, recipe=REFINED, budget=settings["budget"], parent_digest=before)
    accuracy = BundledModel(scorer, bundle).accuracy(validation.examples, validation.keys)
    report |= {"accuracy": {"facts": accuracy}, "tried": len(facts)}
    return (bundle, report | {"facts": len(facts)}) if accuracy == 1.0 else (None, report)


def with_facts_that_help(
    bundle: Bundle, training: Sequence[Example], validation: Questions, scorer: Scorer
) -> tuple[Bundle, dict[str, Any]]:
    """The bundle with the task's examples as facts, if more validation questions are answered right; and a report.

    Args:
        training: of the new task, whose memory the bundle has.
    """
    report: dict[str, Any] = {"accuracy": None, "facts": 0, "tried": 0}
    facts = facts_of_examples(training)
    if not facts or not len(validation):
        return bundle, report
    metadata = bundle.metadata
    try:
        richer = _taught(bundle, facts, scorer, metadata.budget, metadata.settings["payload_tokens"])
    except InduceKVError as error:
        return bundle, report | {"refused": str(error)}
    richer = with_metadata(richer, parent_digest=metadata.parent_digest, settings=metadata.settings)
    accuracy = {
        name: BundledModel(scorer, each).accuracy(validation.examples, validation.keys)
        for name, each in (("memory", bundle), ("memory_and_facts", richer))
    }
    report |= {"accuracy": accuracy, "tried": len(facts)}
    if accuracy["memory_and_facts"] <= accuracy["memory"]:
        return bundle, report
    return richer, report | {"facts": len(facts)}


def _taught(
    bundle: Bundle | None, facts: Sequence[FactRecord], scorer: Scorer, budget: int, payload_tokens: int
) -> Bundle:
    """Those of earlier tasks do not make room for a new one's. Raises InduceKVError: they are too many, or no facts."""
    reader = scorer.backbone.fact_reader
    richer = taught(bundle, facts, reader, when_full="refuse").bundle
    of_runs = [fact for fact in richer.metadata.facts if fact.id.startswith(OF_EXAMPLES)]
    used, most = stored_bytes(None, of_runs), most_bytes(reader.model, budget, payload_tokens)
    if used > most:
        raise CapacityError(f"the facts of runs would take {used} bytes, more than the {most} of {budget} entries")
    file_content(richer)  # more than a file takes are refused now, and not after the training
    return richer


def most_bytes(model: BackboneFingerprint, budget: int, payload_tokens: int) -> int:
    """That the facts of all runs may take together: as many as the budget's entries without maps."""
    sizes = (model.hidden_size, model.num_layers, model.num_kv_heads, payload_tokens, model.head_dim, model.value_dim)
    return footprint_bytes(budget, *sizes)
