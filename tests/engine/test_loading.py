"""A worker's refusal is the same error offline and on a server, and no rank keeps the bundle."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inducekv_vllm.errors import (
    BundleError,
    CapacityError,
    FingerprintMismatch,
    InduceKVError,
    UnsupportedModel,
)
from inducekv_vllm.frontend.loading import load, load_async
from inducekv_vllm.workers.memory_worker import MemoryWorker

GOING_ON = None
DONE = SimpleNamespace(nbytes=7)


class Ranks:
    """Workers whose loads have had these outcomes, or will have at the second question."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = outcomes
        self.calls: list[tuple[str, tuple[str | bool, ...]]] = []

    def rpc(self, method: str, args: tuple[str | bool, ...]) -> list[Any]:
        self.calls.append((method, args))
        if method == "inducekv_unload_bundle":
            return [None for _ in self.outcomes]
        is_first = len(self.calls) == 1
        return [self._answer(GOING_ON if is_first and rank == 0 else each) for rank, each in enumerate(self.outcomes)]

    def _answer(self, outcome: Any) -> Any:
        worker: Any = SimpleNamespace(resident=SimpleNamespace(outcome=lambda _: outcome))
        return MemoryWorker.inducekv_load_outcome(worker, "d")


def offline(ranks: Ranks) -> int:
    return load(ranks.rpc, "/b", "d")


def on_a_server(ranks: Ranks) -> int:
    async def rpc(method: str, args: tuple[str | bool, ...]) -> list[Any]:
        return ranks.rpc(method, args)

    return asyncio.run(load_async(rpc, "/b", "d"))


FACES = pytest.mark.parametrize("face", [offline, on_a_server])


@FACES
def test_all_ranks_are_waited_for(face: Callable[[Ranks], int]) -> None:
    ranks = Ranks(DONE, DONE)
    assert face(ranks) == 7
    assert ranks.calls == [("inducekv_load_bundle", ("/b", "d")), ("inducekv_load_outcome", ("d",))]


@FACES
@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (BundleError("its values are too large"), BundleError),
        (FingerprintMismatch("another backbone"), FingerprintMismatch),
        (UnsupportedModel("no maps here"), UnsupportedModel),
        (CapacityError("the pool is full"), CapacityError),
        (MemoryError("no memory"), CapacityError),
        (FileNotFoundError("no file"), BundleError),
        (KeyError("a fault"), BundleError),
    ],
)
def test_an_error_keeps_its_class(face: Callable[[Ranks], int], outcome: Exception, kind: type[InduceKVError]) -> None:
    ranks = Ranks(DONE, outcome)
    with pytest.raises(InduceKVError) as refusal:
        face(ranks)
    assert type(refusal.value) is kind
    assert str(refusal.value) == f"the engine cannot load /b: rank 1: {outcome}"
    unloads = [call for call in ranks.calls if call[0] == "inducekv_unload_bundle"]
    # What has no room may come again, once others have left. A server loads it again, or unloads it, itself.
    assert unloads == ([("inducekv_unload_bundle", ("d", kind is CapacityError))] if face is offline else [])


@FACES
def test_a_rank_without_room_says_more_than_another(face: Callable[[Ranks], int]) -> None:
    with pytest.raises(CapacityError, match="rank 0: changed; rank 1: full"):
        face(Ranks(BundleError("changed"), CapacityError("full")))
