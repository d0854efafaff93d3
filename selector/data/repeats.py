"""Rows that say the same, or contradict each other."""

from collections import defaultdict
from collections.abc import Sequence

from .examples import Example
from .notes import counted, warn


def distinct(examples: Sequence[Example]) -> list[Example]:
    """The examples of a training, equal ones once: the first stays.

    Issues a TaskDataWarning for equal examples, and one for questions that have several answers, which all stay.
    """
    kept: dict[tuple[str, str, str], Example] = {}
    repeated: list[tuple[Example, Example]] = []
    for example in examples:
        first = kept.setdefault((example.task, example.source_digest, example.answer.strip()), example)
        if first is not example:
            repeated.append((first, example))
    if repeated:
        warn(
            f"{counted(len(repeated), 'row repeats', 'rows repeat')} an earlier one, and equal rows are learned once: "
            f"the first is {_shown(repeated[0][1])}, like {_shown(repeated[0][0])}"
        )
    by_question: dict[str, list[Example]] = defaultdict(list)
    for example in kept.values():
        by_question[example.source_digest].append(example)
    contradicting = [each for each in by_question.values() if len({one.answer.strip() for one in each}) > 1]
    if contradicting:
        first, second, *_ = contradicting[0]
        warn(
            f"{counted(len(contradicting), 'question has', 'questions have')} several answers, which contradict each "
            f"other and are all learned: the first is {_shown(first)} ({first.answer!r:.40}) and {_shown(second)} "
            f"({second.answer!r:.40})"
        )
    return list(kept.values())


def _shown(example: Example) -> str:
    return example.place or repr(example.id)
