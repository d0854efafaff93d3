"""A worker of which the second rank cannot load some bundles; a server of the tests starts it by its path."""

from __future__ import annotations

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.worker import InduceKVWorker

REFUSED_ENTRY = "refused-by-the-second-rank"  # id of an entry


class HalfBrokenWorker(InduceKVWorker):  # type: ignore[valid-type, misc]
    def _check(self, bundle: Bundle, path: str, digest: str) -> None:
        if self.rank == 1 and any(entry.id == REFUSED_ENTRY for entry in bundle.metadata.entries):
            raise CapacityError(f"{path}: refused by the test")
        super()._check(bundle, path, digest)
