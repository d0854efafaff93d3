"""What a person should know about task data that was read: columns that nobody used, and rows that were left out."""

import warnings
from collections import Counter, defaultdict


class TaskDataWarning(UserWarning):
    """Task data can be used, but perhaps not as it was meant. The commands print it as a line of their own."""


class Notes:
    """Collected while the rows of one source are read."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._unused: Counter[str] = Counter()  # rows with something in the column
        self._skipped: dict[str, list[str]] = defaultdict(list)  # places by reason

    def unused(self, column: str) -> None:
        """A row has something in a column that is not used."""
        self._unused[column] += 1

    def skipped(self, place: str, reason: str) -> None:
        """The row at this place is not learned. The reason goes on from "because"."""
        self._skipped[reason].append(place)

    def lines(self) -> list[str]:
        """What was found, a line each."""
        found = [
            f"{counted(len(places), 'row is', 'rows are')} left out, because {reason}: "
            f"the first is {places[0].removeprefix(f'{self.source}, ')}"
            for reason, places in self._skipped.items()
        ]
        if self._unused:
            names = ", ".join(f"{name!r} ({counted(count, 'row', 'rows')})" for name, count in self._unused.items())
            what = "a column is" if len(self._unused) == 1 else f"{len(self._unused)} columns are"
            found.append(f"{what} not used: {names}")
        return found

    def warn(self) -> None:
        for line in self.lines():
            warn(f"{self.source}: {line}")


def warn(text: str) -> None:
    warnings.warn(text, TaskDataWarning, stacklevel=2)


def counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
