"""What is measured of one request: its outcome, and series that end with their bundle."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError

from inducekv_vllm.frontend.observation import OF_A_BUNDLE, BundleMetrics, observing
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.protocol import Decided, Decision, InjectionSpec
from tests.bundles import random_bundle

MEMORY = ServedBundle.from_bundle(random_bundle(), __file__)
INJECTED = InjectionSpec("digest", (0,), (1.0,))
OPEN = Decided((Decision(INJECTED, "computed", "a", (-8.0, 6.3), similarity=0.42),))


@pytest.fixture
def metrics() -> Iterator[BundleMetrics]:
    metrics = BundleMetrics("observed")
    metrics.begin(MEMORY)
    yield metrics
    metrics.end()
    assert series() == set()


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"inducekv:{name}", {"bundle": "observed", **labels})


def series() -> set[str]:
    samples = (sample for metric in OF_A_BUNDLE for family in metric.collect() for sample in family.samples)
    return {sample.name for sample in samples if sample.labels.get("bundle") == "observed"}


@pytest.mark.parametrize(
    ("error", "is_counted"),
    [
        (GenerationError("the engine"), True),
        (RetryableRequestError("shutting down"), True),
        (VLLMValidationError("too long"), False),
        (asyncio.CancelledError(), False),
        (GeneratorExit(), False),
    ],
    ids=lambda case: type(case).__name__,
)
@pytest.mark.parametrize("is_decided", [False, True])
def test_a_request_that_fails(metrics: BundleMetrics, error: BaseException, is_counted: bool, is_decided: bool) -> None:
    def fail() -> None:
        with observing([metrics]) as observed:
            if is_decided:
                observed.decided(OPEN)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert value("request_failures_total") == is_counted
    assert value("decisions_total", source="computed") == is_decided
    assert value("active_requests") == 0


def test_a_request_that_outlives_its_name_begins_no_series(metrics: BundleMetrics) -> None:
    with observing([metrics]) as observed:
        metrics.end()
        following = BundleMetrics("observed")  # loaded again
        following.begin(MEMORY)
        observed.decided(OPEN)
        observed.finished(SimpleNamespace(metrics=None))  # type: ignore[arg-type]
    assert value("active_requests") == 0
    assert value("decisions_total", source="computed") == value("request_seconds_count") == 0
