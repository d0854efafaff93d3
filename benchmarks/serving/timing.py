"""The times of a streamed answer, from the lines of its events."""

from __future__ import annotations

import json
from typing import NamedTuple


class Timing(NamedTuple):
    """Of one request."""

    ttft: float  # seconds to the first token
    tpot: float  # seconds for each one after it
    prompt_tokens: int
    output_tokens: int


class Streamed(NamedTuple):
    """An answer as it came."""

    start: float  # when it was asked for, time.perf_counter()
    lines: list[tuple[float, bytes]]  # of server-sent events, and when each was there


class RequestFailed(RuntimeError):
    """The server refused a request, or did not answer it in full."""


def timing(streamed: Streamed, asked: int) -> Timing:
    """The times of a request for `asked` tokens.

    Raises:
        RequestFailed: there are fewer, or an error came instead.
    """
    arrivals, usage = list[float](), dict[str, int]()
    for at, line in streamed.lines:
        chunk = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
        if "error" in chunk:
            raise RequestFailed(str(chunk["error"])[:300])
        if any(choice.get("token_ids") for choice in chunk.get("choices", ())):
            arrivals.append(at)
        usage = chunk.get("usage") or usage
    tokens = usage.get("completion_tokens", len(arrivals))
    if tokens < asked or not arrivals:
        raise RequestFailed(f"asked for {asked} tokens, got {tokens}")
    tpot = (arrivals[-1] - arrivals[0]) / max(tokens - 1, 1)
    return Timing(round(arrivals[0] - streamed.start, 6), round(tpot, 7), usage.get("prompt_tokens", 0), tokens)
