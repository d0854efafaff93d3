"""The errors that a user of InduceKV can cause.

They derive from `ValueError`, so callers that only know vLLM or the standard library treat them as bad input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_MESSAGE: Final = 2000  # characters; what is longer quotes bad input at length


class InduceKVError(ValueError):
    """Base class of all errors raised for bad input.

    Its message can be printed, logged and sent as it is: what it quotes of the input, lone surrogates and line breaks
    among it, is escaped, and cut to `MAX_MESSAGE`.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("".join(_printable(character) for character in message[:MAX_MESSAGE])[:MAX_MESSAGE])


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def problems_in(error: ValidationError) -> str:
    """What is wrong with settings, in pydantic's words: of each where, what is expected and what was found."""
    found = [
        (".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, "), each["input"])
        for each in error.errors()
    ]
    return "; ".join(f"{place}: {said} (found {value!r})" if place else said for place, said, value in found)


class BundleError(InduceKVError):
    """A bundle is missing, damaged or inconsistent; the message names the file and the problem."""


class FingerprintMismatch(BundleError):
    """A bundle was extracted from a different backbone; the message lists every difference."""


class TaskDataError(InduceKVError):
    """Task data or its images cannot be read; the message names the file and, if known, the line.

    `problems` has those of several examples, one each, if there are several.
    """

    problems: tuple[InduceKVError, ...] = ()


class UnsupportedModel(InduceKVError):
    """A model, or a feature it runs with, cannot be combined with a memory."""


class ConfigError(InduceKVError):
    """A setting is unknown, out of range, or contradicts another one."""


class UnknownBundle(InduceKVError):
    """No bundle of this name is loaded."""


class UnknownFact(InduceKVError):
    """A bundle has no fact of this id."""


class VersionConflict(InduceKVError):
    """A name does not stand for the version that a change expects."""


class CapacityError(InduceKVError):
    """A bundle or a request does not fit into the available resources."""


class TooManyChanges(CapacityError):
    """Too many changes of bundles wait for the running one."""


class LoadTimeout(CapacityError):
    """A bundle could not be loaded in time."""
