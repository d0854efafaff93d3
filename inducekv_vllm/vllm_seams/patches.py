"""Attributes of vLLM's objects that are replaced: a start in which there is nothing to replace ends."""

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import UnsupportedModel


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of an attribute in its place. Raises UnsupportedModel: there is none."""
    patch_some([owner], name, make, of=getattr(owner, "__name__", type(owner).__name__))


def patch_some(owners: Iterable[Any], name: str, make: Callable[[Any], Any], *, of: str) -> None:
    """`patch` of those that have the attribute. Raises UnsupportedModel: none has; `of` says what they are."""
    found = [owner for owner in owners if getattr(owner, name, None) is not None]
    if not found:
        raise UnsupportedModel(
            f"InduceKV replaces {name} of vLLM's {of}, and this vLLM has none: memory would be wrong without a word"
        )
    for owner in found:
        setattr(owner, name, make(getattr(owner, name)))
