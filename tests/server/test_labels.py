"""However many names are asked for, `/metrics` has series for few of them: the ones that are asked for the most."""

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, generate_latest

from inducekv_vllm.frontend.observation import OTHER
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.protocol import Decision, Untouched
from server import metrics
from server.metrics import RegistryMetrics
from server.pool import Phase, Version
from tests.server.registries import BUNDLES

VERSION = Version(BUNDLES["a"].digest, phase=Phase.RESIDENT, nbytes=1)
VERSION.memory = ServedBundle(BUNDLES["a"].metadata, "a.safetensors", 1)


def labels() -> set[str]:
    lines = generate_latest().decode().splitlines()
    return {line.split('bundle="')[1].split('"')[0] for line in lines if line.startswith("inducekv:decisions_total{")}


def requests_of(label: str) -> float:
    lines = generate_latest().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f'inducekv:decisions_total{{bundle="{label}"')
    )


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryMetrics]:
    monkeypatch.setattr(metrics, "EXPORTED", 3)
    monkeypatch.setattr(metrics, "COUNTED", 50)
    made = RegistryMetrics()
    yield made
    made.follow(dict.fromkeys(made.exported), {})
    assert not made.exported


def test_names_that_are_asked_for_the_most_have_series(exported: RegistryMetrics) -> None:
    before = labels()

    def ask(name: str) -> None:
        series = exported.of_requests(name, VERSION)
        assert series.bundle == name
        series.decided(Decision(Untouched()))

    for number in range(100):
        ask(f"rare-{number}")
    assert labels() - before - {OTHER} == {f"rare-{number}" for number in range(3)}
    others = requests_of(OTHER)
    assert others >= 97
    for _ in range(3):
        ask("busy")
    assert "busy" in labels()
    assert len(labels() - before - {OTHER}) == 3
    assert requests_of("busy") == 1
    assert requests_of(OTHER) == others + 2


def test_a_name_that_stands_for_nothing_any_more_has_no_series(exported: RegistryMetrics) -> None:
    exported.pointed("gone", VERSION)
    exported.pointed("kept", VERSION)
    assert {"gone", "kept"} <= labels()
    named = dict(zip(("gone", "kept"), (None, VERSION.memory.digest), strict=True))
    exported.pointed("new", VERSION)  # since it was looked up what the others stand for
    exported.follow(named, {VERSION.memory.digest: VERSION})
    assert "gone" not in labels()
    assert {"kept", "new"} <= labels()


def test_what_is_cold_takes_nothing_of_the_pool(exported: RegistryMetrics) -> None:
    def resident_bytes() -> float | None:
        return REGISTRY.get_sample_value("inducekv:resident_bytes", {"bundle": "m"})

    exported.pointed("m", VERSION)
    digest, seen = VERSION.memory.digest, []
    for versions in ({digest: VERSION}, {}, {digest: VERSION}):
        exported.follow({"m": digest}, versions)
        seen.append(resident_bytes())
    assert seen == [1, 0, 1]
