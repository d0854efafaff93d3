"""The clauses of a question, and the runs of them that a gate's classifiers see.

What is asked is often a part of what is said: a greeting stands before it, or a sentence of the user's day. So
classifiers see all of a question and every run of a few clauses, and the run that is most like a task counts, if it is
more like it than the best of so many is by chance.

A clause ends behind a punctuation mark and behind a line. The places that are counted here are words or tokens.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Final

MOST: Final = 12  # clauses, half of them from the beginning of a longer text, half from its end
LONGEST: Final = 3  # clauses of a run
SHORTEST: Final = 3  # words, or tokens, of a run
CHANCE: Final = 0.5  # log-odds that a run loses for each factor of e that there are more of
_CLOSED: Final = r"[\"'”’»)\]*_]*"  # what may stand between a mark and the space behind it
_MARKS: Final = ".!?;:,؟،؛।"
_UNSPACED_MARKS: Final = "。！？；：，、"  # behind which no space stands
BETWEEN: Final = re.compile(rf"(?<=[{_MARKS}]){_CLOSED}\s+|(?<=[{_UNSPACED_MARKS}]){_CLOSED}|\s*\n\s*")
_END: Final = re.compile(rf"[{_MARKS}{_UNSPACED_MARKS}]{_CLOSED}\s*\Z|\n")


def ends_clause(token: str) -> bool:
    """Whether a clause ends with this token, or in it."""
    return _END.search(token) is not None


def runs(ends: Sequence[int]) -> Iterator[range]:
    """All places, then those of every run.

    Args:
        ends: the place behind each clause, ascending; the last one is the number of all places.
    """
    starts, count = [0, *ends[:-1]], len(ends)
    yield range(ends[-1])
    for first in range(count):
        for last in range(first, min(first + LONGEST, count)):
            is_seen = count <= MOST or last < MOST // 2 or first >= count - MOST // 2
            is_all = last - first == count - 1
            if is_seen and not is_all and ends[last] - starts[first] >= SHORTEST:
                yield range(starts[first], ends[last])


def runs_of_tokens(token_ids: Sequence[int], clause_ends: Collection[int]) -> list[range]:
    """Those of a question's tokens, at least one. Several tokens in a row that end a clause end the same one.

    Args:
        clause_ends: the tokens that end a clause.
    """
    is_end = [token in clause_ends for token in token_ids]
    ends = [at for at, (ended, goes_on) in enumerate(pairwise(is_end), start=1) if ended and not goes_on]
    return list(runs([*ends, len(token_ids)]))
