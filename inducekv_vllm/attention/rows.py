"""The rows of a step that memory acts on, derived once for every platform and form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .slots import RequestMemory

if TYPE_CHECKING:
    from ..vllm_seams.runner import StepRows


class HasMemory(Protocol):
    """A running request."""

    @property
    def memory(self) -> RequestMemory | None:
        """What it reads; None without memory."""
        ...

    @property
    def first_active(self) -> int:
        """The first position that its memory acts on."""
        ...


@dataclass(frozen=True, eq=False)
class ActingRows:
    """The rows of one request that its memory acts on: `first` to `end` of the step's query tensor, at least one."""

    memory: RequestMemory
    request: int  # its number in the step
    first: int
    end: int


def acting_rows(requests: Mapping[str, HasMemory], step: StepRows) -> list[ActingRows]:
    """Those of every request of a step, in the order of the step's rows.

    Args:
        requests: by id; those without memory may be left out.
    """
    found, end = list[ActingRows](), 0
    if not requests:
        return found
    for number, request_id in enumerate(step.request_ids):
        first, end = end, end + step.num_scheduled[number]
        request = requests.get(request_id)
        if request is None or request.memory is None:
            continue
        first += max(0, request.first_active - step.num_computed[number])
        if first < end:
            found.append(ActingRows(request.memory, number, first, end))
    return found
