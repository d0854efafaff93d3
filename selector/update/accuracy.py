"""How many questions are answered right, by task."""

from collections.abc import Sequence
from dataclasses import dataclass

from inducekv_vllm.bundle import Bundle

from ..backbone.bundled_model import BundledModel
from ..backbone.model import Backbone
from ..backbone.scoring import Scorer
from ..data.examples import Example


@dataclass(frozen=True)
class Accuracy:
    """Of the questions of one task."""

    task: str
    questions: int
    without: int  # that the untouched model answers right
    with_memory: int


def accuracies(examples: Sequence[Example], without: Sequence[str], with_memory: Sequence[str]) -> list[Accuracy]:
    """By task, in the order in which they are asked: word for word, but for white space at the ends."""
    rows = []
    for task in dict.fromkeys(example.task for example in examples):
        own = [row for row, example in enumerate(examples) if example.task == task]
        right = [
            sum(said[row].strip() == examples[row].answer.strip() for row in own) for said in (without, with_memory)
        ]
        rows.append(Accuracy(task, len(own), *right))
    return rows


def accuracies_of(backbone: Backbone, bundle: Bundle, examples: Sequence[Example], max_tokens: int) -> list[Accuracy]:
    """Of greedy answers in transformers. Raises FingerprintMismatch: the bundle was made for another model."""
    bundle.require_backbone(backbone.fingerprint, "the bundle")
    scorer = Scorer(backbone)
    answers = [BundledModel(scorer, each).answers(examples, max_tokens) for each in (None, bundle)]
    return accuracies(examples, *answers)
