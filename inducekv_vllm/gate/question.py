"""Which tokens of a prompt decide: those of the question, without system prompt, earlier turns and template.

The last user turn asks the question. Its text decides, and the media of the latest turn that has any: a conversation
may be about a picture that was sent with its first turn. A prompt without user turns, as of the completions route,
decides with all of its tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class TurnMarks:
    """The tokens by which a chat template marks the turns of a user."""

    begin: tuple[int, ...]  # in front of every user turn, and nowhere else; empty if the template has no such mark
    end: int | None  # the token that follows a user turn; None if it has none of its own


class Deciding(NamedTuple):
    """The ascending positions of the tokens that decide; not both are empty."""

    text: list[int]
    media: list[int]


def deciding_tokens(token_ids: Sequence[int], marks: TurnMarks, placeholders: Collection[int]) -> Deciding:
    """The tokens of a prompt that decide.

    Args:
        token_ids: [T], the whole prompt, at least one token.
        placeholders: the ids of tokens that stand for media.
    """
    starts = turn_starts(token_ids, marks)
    question = _turn(token_ids, starts[-1], marks)
    media = [at for at, token in enumerate(token_ids) if token in placeholders]
    if media:
        latest = max(start for start in starts if start <= media[-1]) if media[-1] >= starts[0] else 0
        media = [at for at in media if at >= latest]
    text = [at for at in question if token_ids[at] not in placeholders]
    return Deciding(text, media) if text or media else Deciding([len(token_ids) - 1], [])


def turn_starts(token_ids: Sequence[int], marks: TurnMarks) -> list[int]:
    """The positions at which user turns begin, after their marks; [0] for a prompt without marks."""
    length = len(marks.begin)
    if length == 0:
        return [0]
    ids = tuple(token_ids)
    first = marks.begin[0]
    found = [at + length for at, token in enumerate(ids) if token == first and ids[at : at + length] == marks.begin]
    return found or [0]


def _turn(token_ids: Sequence[int], start: int, marks: TurnMarks) -> range:
    """The positions of the turn that begins at `start`."""
    end = next((at for at in range(start, len(token_ids)) if token_ids[at] == marks.end), len(token_ids))
    return range(start, end)
