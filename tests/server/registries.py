"""A registry of bundles without an engine: its workers take everything."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server.engines import Engines
from server.pool import PoolSize
from server.registry import BundleRegistry
from server.state import ServerState
from server.versions import TURN, Turn
from tests.bundles import FINGERPRINT, random_bundle

NAMES = ("a", "b", "c")
BUNDLES = {name: random_bundle(seed=seed) for seed, name in enumerate(NAMES)}
DIGEST = {name: bundle.digest for name, bundle in BUNDLES.items()}
RUN = "this one"  # of a server


class Workers:
    """What the workers hold, by digest, with the file that it was read from."""

    def __init__(self, room: int = 1000) -> None:
        """`room`: so many bundles fit."""
        self.resident: dict[str, str] = {}
        self.kept: set[str] = set()  # in host memory: what has left the pool and may come back
        self.room = room
        self.loads: list[str] = []  # digests, in the order in which they became resident
        self.calls: list[str] = []
        self.held: dict[str, asyncio.Event] = {}  # by method: it is called, and goes on once the event is set
        self.failing: set[str] = set()  # digests whose loads are refused
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.errored = False

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        await asyncio.sleep(0)
        self.calls.append(method)
        if (going_on := self.held.get(method)) is not None:
            await going_on.wait()
        if method == "inducekv_is_erased":
            return [args[0] not in self.resident and args[0] not in self.kept]
        if method == "inducekv_load_bundle":
            path, digest = args
            if (wrong := _wrong_with(path, digest)) is not None:
                return [{"ok": False, "error": wrong, "kind": "BundleError"}]
            if digest in self.failing:
                return [{"ok": False, "error": "it is not to be", "kind": "BundleError"}]
            if digest not in self.resident and len(self.resident) < self.room:
                self.resident[digest] = path
                self.loads.append(digest)
            if digest not in self.resident:
                return [{"ok": False, "error": "no room", "kind": "CapacityError"}]
        else:
            assert method == "inducekv_unload_bundle"
            digest, keep = args
            if self.resident.pop(digest, None) is not None and keep:
                self.kept.add(digest)
            elif not keep:
                self.kept.discard(digest)
        return [{"ok": True, "resident_bytes": 1}]


def _wrong_with(path: str, digest: str) -> str | None:
    """As the workers, which read the file."""
    try:
        found = read_bundle(path).digest
    except BundleError as error:
        return str(error)
    return None if found == digest else f"{path} changed while it was loaded"


def models() -> Any:
    """Names of models, as vLLM has them."""
    count = iter(range(1, 1000))
    return SimpleNamespace(
        lora_requests={},
        lora_id_counter=SimpleNamespace(inc=lambda by: next(count)),
        base_model_paths=[SimpleNamespace(name="base")],
        is_base_model=lambda name: name == "base",
    )


def begin(
    config: InduceKVConfig, workers: Any, temporary: Path | None = None, pool: PoolSize | None = None
) -> BundleRegistry:
    """The registry of a server that starts; without a state file in the settings it has a temporary one."""
    path = config.state or temporary
    assert path is not None
    state = ServerState(path, keeps_bundles=config.state is not None)
    return BundleRegistry(Engines(workers, pool), models(), FINGERPRINT, state, config)


def write_all(folder: Path, bundles: Mapping[str, Bundle]) -> Path:
    """The bundles as files of their names; returns the folder."""
    for name, bundle in bundles.items():
        write_bundle(bundle, folder / f"{name}.safetensors")
    return folder


@contextmanager
def in_turn(turn: Turn) -> Iterator[None]:
    """Inside, what is asked is asked by the HTTP request whose turn it is."""
    token = TURN.set(turn)
    try:
        yield
    finally:
        TURN.reset(token)


async def end(registry: BundleRegistry) -> None:
    """As the end of its process does, by whatever signal."""
    loads = [load for version in registry.versions.pool for load in version.coming.values()]
    following = registry.versions.following
    tasks = [*loads, *registry.versions.background, *([] if following is None else [following])]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    registry.state.close()
