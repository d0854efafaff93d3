"""What the first API process of a server does for the others, on behalf of those who ask them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .access import Access
from .audit import AuditLog
from .peers import Handler
from .registry import BundleRegistry


def handlers(registry: BundleRegistry, access: Access, audit: AuditLog) -> Callable[[int], Mapping[str, Handler]]:
    """What the process of a rank may call here; `PeerRegistry` is who calls."""

    async def change(change: str, name: str, asked: dict[str, Any]) -> Any:
        if change == "load":
            return (await registry.load(name, **asked, access=access)).model_dump(mode="json")
        if change == "rollback":
            return (await registry.rollback(name, **asked)).model_dump(mode="json")
        if change == "forget":
            return (await registry.forget(name, **asked)).model_dump(mode="json")
        assert change == "unload", change
        return await registry.unload(name, **asked)

    async def show(is_admin: bool) -> Any:
        return (await registry.show(is_admin=is_admin)).model_dump(mode="json")

    async def show_one(name: str, is_admin: bool) -> Any:
        return (await registry.show_one(name, is_admin=is_admin)).model_dump(mode="json")

    async def released(rank: int, digest: str) -> None:
        registry.released_by(rank, digest)

    async def refusal(**facts: Any) -> None:
        audit.refusal(**facts)

    async def answer(**facts: Any) -> None:
        await audit.answer(**facts)

    def of(rank: int) -> Mapping[str, Handler]:
        return {
            "change": change,
            "show": show,
            "show_one": show_one,
            "traces": partial(registry.traces, asker=rank),
            "released": partial(released, rank),
            "refusal": refusal,
            "answer": answer,
        }

    return of
