"""Whose a request is: traces belong to their owner."""

from contextvars import ContextVar
from typing import Final

# Set by the server for each HTTP request: a digest of its API key, or "" for a request without one.
OWNER: Final[ContextVar[str]] = ContextVar("inducekv_owner", default="")
