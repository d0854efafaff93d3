"""What is answered with a memory and without: some right and some wrong answers, and the share that is right."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from ..backbone.bundled_model import BundledModel
from ..data.examples import Example

SHOWN: Final = 10  # right answers, and as many wrong ones
MOST_BASE: Final = 64  # base questions that are asked


@dataclass(frozen=True)
class Answer:
    """A question that was asked twice."""

    question: str
    expected: str
    without: str
    with_memory: str

    @property
    def right(self) -> bool:
        return self.with_memory == self.expected

    @property
    def right_without(self) -> bool:
        return self.without == self.expected


def answers_of(
    with_memory: BundledModel, without: BundledModel, examples: Sequence[Example], *, progress: bool = False
) -> list[Answer]:
    """Greedy answers, no longer than the longest that is expected."""
    longest = max((len(without.scorer.answer_tokens(example)) for example in examples), default=1)
    said = [model.answers(examples, max(1, longest), progress=progress) for model in (without, with_memory)]
    return [
        Answer(last_text(example), example.answer.strip(), *both)
        for example, *both in zip(examples, *said, strict=True)
    ]


def last_text(example: Example) -> str:
    """The words of the last turn; a picture as "[image]"."""
    parts = example.messages[-1]["content"]
    return " ".join(part["text"] if part["type"] == "text" else "[image]" for part in parts)


def shares(answers: Sequence[Answer]) -> dict[str, float]:
    """Of right ones, without memory and with it."""
    return {
        "no_memory": sum(each.right_without for each in answers) / len(answers),
        "deployed": sum(each.right for each in answers) / len(answers),
    }


def some(answers: Sequence[Answer]) -> dict[str, list[dict[str, str]]]:
    """The first right and the first wrong ones."""
    return {
        kind: [asdict(each) for each in answers if each.right == (kind == "right")][:SHOWN]
        for kind in ("right", "wrong")
    }
