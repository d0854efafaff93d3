"""Metrics of the loaded bundles and their changes; vLLM's route `/metrics` exports them.

The names that are asked for the most have series of their own; all others share those of the name "(other)".

`inducekv_vllm/frontend/observation.py` has those of the requests.
"""

import time
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import vllm
from prometheus_client import Counter, Gauge, Histogram

import inducekv_vllm
from inducekv_vllm.frontend.observation import OTHER, BundleMetrics, end_series, several_processes

from .pool import Version
from .schemas import Change

OUTCOMES: Final = ("done", "refused")
EXPORTED: Final = 64  # names with series of their own
COUNTED: Final = 4096  # names whose requests are counted for that
CHANGE_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

BUILD_INFO = Gauge(
    "inducekv:build_info", "1, with the versions in labels.", ["version", "vllm_version"], multiprocess_mode="max"
)
BUNDLE_INFO = Gauge(
    "inducekv:bundle_info",
    "1 for each loaded bundle, with the digest of the version that its name stands for.",
    ["bundle", "digest"],
    multiprocess_mode="mostrecent",
)
LOADED_AT = Gauge(
    "inducekv:bundle_loaded_timestamp_seconds",
    "When a name began to stand for its version, in seconds since 1970.",
    ["bundle"],
    multiprocess_mode="max",
)
ENTRIES = Gauge("inducekv:bundle_entries", "Entries of a bundle.", ["bundle"], multiprocess_mode="mostrecent")
RESIDENT_BYTES = Gauge(
    "inducekv:resident_bytes",
    "Bytes of a bundle in the pool of one rank.",
    ["bundle"],
    multiprocess_mode="mostrecent",
)
POOL_BYTES = Gauge("inducekv:pool_bytes", "Bytes of the memory pool of one rank.", multiprocess_mode="max")
POOL_USED_BYTES = Gauge(
    "inducekv:pool_used_bytes",
    "Bytes of the pool of one rank that loaded and draining versions take.",
    multiprocess_mode="mostrecent",
)
POOL_PINNED_BYTES = Gauge(
    "inducekv:pool_pinned_bytes",
    "Bytes of the pool of one rank that pinned names take: they do not leave it.",
    multiprocess_mode="mostrecent",
)
DRAINING_VERSIONS = Gauge(
    "inducekv:draining_versions",
    "Versions without a name, kept until their last request ends.",
    multiprocess_mode="livesum",
)
DRAINING_REQUESTS = Gauge(
    "inducekv:draining_requests", "Requests that run on a version without a name.", multiprocess_mode="livesum"
)
BUNDLE_CHANGES = Counter(
    "inducekv:changes",
    "Loads, rollbacks, unloads, forgotten versions, changes of facts, by their outcome.",
    ["change", "outcome"],
)
CHANGE_SECONDS = Histogram(
    "inducekv:change_seconds",
    "Seconds of a change that was done, its wait for others included.",
    ["change"],
    buckets=CHANGE_BUCKETS,
)
COLD_SECONDS = Histogram(
    "inducekv:cold_seconds",
    "Seconds that a request has waited for the bundle of a cold name.",
    buckets=(0.001, 0.0025, 0.005, *CHANGE_BUCKETS[:11]),
)
EVICTIONS = Counter("inducekv:evictions", "Versions that have left the pool for others.")
LOOKS = Counter("inducekv:resolver_looks", "Names looked up with the resolver, by what came of it.", ["outcome"])
FOUND, SAME, MISSING, FAILED = LOOK_OUTCOMES = ("found", "same", "missing", "failed")
_OF_A_NAME: Final = (BUNDLE_INFO, LOADED_AT, ENTRIES, RESIDENT_BYTES)


class RegistryMetrics:
    """Keeps the metrics of one registry; it belongs to the server's event loop."""

    def __init__(self, *, is_first: bool = True) -> None:
        """`is_first`: of the API process that counts for all what the workers hold."""
        self._is_first = is_first
        self._digests: dict[str, str] = {}  # by name, of the exported series
        self._series: dict[str, BundleMetrics] = {}  # by name
        self._asked: Counts[str] = Counts()  # requests, by name
        BUILD_INFO.labels(inducekv_vllm.__version__, vllm.__version__).set(1)
        for outcome in LOOK_OUTCOMES:
            LOOKS.labels(outcome)
        for change in Change:
            CHANGE_SECONDS.labels(change)
            for outcome in OUTCOMES:
                BUNDLE_CHANGES.labels(change, outcome)

    @property
    def exported(self) -> list[str]:
        """The names with series of their own."""
        return list(self._series)

    def of_requests(self, name: str, version: Version) -> BundleMetrics:
        """The series that a request to a name counts in."""
        self._asked[name] += 1
        if len(self._asked) > COUNTED:
            self._asked = Counts(dict(self._asked.most_common(EXPORTED)))
        self.pointed(name, version)
        return self._series.get(name) or BundleMetrics(name, label=OTHER)

    def pointed(self, name: str, version: Version) -> None:
        """`name` now stands for this version."""
        digest = version.digest
        if self._digests.get(name) == digest or not self._has_series(name):
            return
        self._series[name].begin(version.memory)
        self._end_digest(name)
        self._digests[name] = digest
        BUNDLE_INFO.labels(name, digest).set(1)
        LOADED_AT.labels(name).set(time.time())
        ENTRIES.labels(name).set(version.memory.num_entries)
        RESIDENT_BYTES.labels(name).set(version.nbytes)

    def _has_series(self, name: str) -> bool:
        """Whether a name has series; it may begin some, in the place of a name that is asked for half as often."""
        if name not in self._series:
            if len(self._series) >= EXPORTED:
                least = min(self._series, key=lambda each: self._asked[each])
                if self._asked[name] <= 2 * self._asked[least]:
                    return False
                self._end(least)
            self._series[name] = BundleMetrics(name)
        return True

    def _end(self, name: str) -> None:
        self._series.pop(name).end()
        self._end_digest(name)
        for metric in _OF_A_NAME:
            end_series(metric, name)

    def _end_digest(self, name: str) -> None:
        digest = self._digests.pop(name, None)
        if digest is None:
            return
        if several_processes():
            BUNDLE_INFO.labels(name, digest).set(0)
        else:
            BUNDLE_INFO.remove(name, digest)

    def follow(self, names: Mapping[str, str | None], versions: Mapping[str, Version]) -> None:
        """
        Args:
            names: what those stand for that were exported a moment ago; None for nothing.
            versions: those that are resident, by digest.
        """
        for name, digest in names.items():
            if name not in self._series:  # another has taken its place since
                continue
            if digest is None:
                self._end(name)
                continue
            if digest in versions:
                self.pointed(name, versions[digest])
            RESIDENT_BYTES.labels(name).set(versions[digest].nbytes if digest in versions else 0)
        unnamed = [version for version in versions.values() if not version.is_named]
        if self._is_first:
            POOL_USED_BYTES.set(sum(version.nbytes for version in versions.values()))
            POOL_PINNED_BYTES.set(sum(version.nbytes for version in versions.values() if version.is_pinned))
            DRAINING_VERSIONS.set(len(unnamed))
        DRAINING_REQUESTS.set(sum(version.leases for version in unnamed))

    @contextmanager
    def change(self, change: Change) -> Iterator[None]:
        """Count a change, and time it if it is done."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            BUNDLE_CHANGES.labels(change, "refused").inc()
            raise
        BUNDLE_CHANGES.labels(change, "done").inc()
        CHANGE_SECONDS.labels(change).observe(time.perf_counter() - began)
