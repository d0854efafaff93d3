"""Files that are damaged at random."""

from random import Random


def damaged(rng: Random, content: bytes) -> bytes:
    """With one change of its bytes, most of them near the beginning."""
    place = rng.randrange(min(len(content), rng.choice((64, 4000, 10**9))))
    before, after, size = content[:place], content[place:], rng.randint(1, 400)
    new = rng.choice((b"", b"\0", b"\n", b"\xff\xfe", rng.randbytes(8), after[:size], bytes([after[0] ^ 1])))
    return rng.choice((before + new + after, before + new + after[len(new) :], before + after[size:], before))
