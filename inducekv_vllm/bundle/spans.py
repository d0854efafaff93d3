"""Spans of bytes of a file, read into memory of the caller's."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence

from ..errors import BundleError
from ..pace import rest

READ_BYTES = 2**20  # at once
GAP_BYTES = 2**15  # that are read along with what lies before and behind them
MOST_SPANS = 256  # at once; the system allows 1024 buffers (IOV_MAX), and each span may have a gap before it

Span = tuple[int, memoryview]  # a byte of the file, and the memory to fill from there on


def read_spans(file: io.FileIO, spans: Iterable[Span], source: str) -> None:
    """Fill each memory from its byte of the file on. The spans are in order.

    What lies between two spans is read along if it is little: that takes less time than another call.

    Raises:
        BundleError: the file ends before; `source` is its name.
    """
    gap = memoryview(bytearray(GAP_BYTES))
    for group in _groups(spans):
        if len(group) == 1 or not _read_at_once(file, group, gap):
            for start, content in group:
                _read_span(file, start, content, source)
        rest()


def _read_at_once(file: io.FileIO, spans: Sequence[Span], gap: memoryview) -> bool:
    """Fill near spans with one call; return whether it read them whole. `gap` takes what lies between them."""
    vectors, (place, _) = [], spans[0]
    for start, content in spans:
        vectors += [gap[: start - place], content]
        place = start + content.nbytes
    return os.preadv(file.fileno(), vectors, spans[0][0]) == place - spans[0][0]


def _groups(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The spans in groups that one call reads."""
    group: list[Span] = []
    for start, content in spans:
        if group:
            (first, _), (last, before) = group[0], group[-1]
            is_near = start - last - before.nbytes <= GAP_BYTES and start + content.nbytes - first <= READ_BYTES
            if not is_near or len(group) == MOST_SPANS:
                yield group
                group = []
        group.append((start, content))
    if group:
        yield group


def _read_span(file: io.FileIO, start: int, content: memoryview, source: str) -> None:
    """Fill `content` from byte `start` of the file on."""
    while content.nbytes:
        if not (count := os.preadv(file.fileno(), [content[:READ_BYTES]], start)):
            raise BundleError(f"{source}: the file became shorter while it was read")
        start, content = start + count, content[count:]
        rest()
