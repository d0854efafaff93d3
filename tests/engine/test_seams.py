"""A vLLM that was never tried: its names and methods are looked for, and what is missing is named."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from inducekv_vllm import SUPPORTED_VLLM, plugin
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.vllm_seams import seams

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def test_nothing_is_missing_here() -> None:
    assert seams.missing_seams() == []


@pytest.mark.parametrize(
    ("place", "parameters", "missing"),
    [
        ("vllm.nothing:Scheduler.schedule", (), "vllm.nothing.Scheduler.schedule"),
        (f"{SCHEDULER}.nothing", (), "vllm.v1.core.sched.scheduler.Scheduler.nothing"),
        (f"{SCHEDULER}.add_request", ("request", "other"), "Scheduler.add_request: the parameter other"),
    ],
)
def test_missing_methods(place: str, parameters: tuple[str, ...], missing: str) -> None:
    (found,) = seams._missing_methods({place: parameters})
    assert found.endswith(missing)


class Base:
    declared: int

    def __init__(self) -> None:
        self.of_base = 1


@dataclass
class Open(Base):
    of_instances: int

    def set(self) -> None:
        self.of_method: int = 1

    @property
    def computed(self) -> int:
        return 1


@dataclass(frozen=True)
class Frozen:
    of_instances: int


@dataclass(slots=True)
class Slotted:
    of_instances: int


def test_missing_attributes() -> None:
    names = ("declared", "of_base", "of_instances", "of_method", "computed")
    places = {f"{__name__}:Open": (*names, "nothing"), f"{__name__}:Gone": ("of_instances",)}
    assert list(seams._missing_attributes(places)) == [f"{__name__}.Open.nothing", f"{__name__}.Gone"]


def test_outputs_that_take_no_new_attribute() -> None:
    found = list(seams._closed([f"{__name__}:{name}" for name in ("Open", "Frozen", "Slotted", "Gone")]))
    reason = "it takes no attribute of another name"
    assert found == [f"{__name__}.Frozen: {reason}", f"{__name__}.Slotted: {reason}", f"{__name__}.Gone"]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("vllm.v1.request:Request", "next_decode_eligible_step"),
        ("vllm.v1.core.sched.scheduler:Scheduler", "encoder_cache_mismatch_reqs"),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "execute_model_state"),
    ],
)
def test_a_missing_attribute_is_named_at_start(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = seams._attributes_of
    dotted = place.replace(":", ".")

    def without(kind: type) -> set[str]:
        return known(kind) - ({name} if f"{kind.__module__}.{kind.__qualname__}" == dotted else set())

    monkeypatch.setenv(plugin.WARNED_VARIABLE, "")
    monkeypatch.setattr(seams, "_attributes_of", without)
    with pytest.raises(UnsupportedModel, match=rf"lacks 1 of the names .* the first is {dotted}\.{name}"):
        plugin.check_vllm_version("0.99.0")


def test_missing_names(tmp_path: Path) -> None:
    """Of imports that are tried, none is missing."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(
        "from vllm.sampling_params import SamplingParams, Nothing\n"
        "from vllm.nowhere import Something\n"
        "from vllm import sampling_params\n"
        "import vllm.elsewhere\n"
        "try:\n    from vllm.old import Place\nexcept ImportError:\n    from vllm.new import Place\n"
        "def late():\n    from vllm.config import Missing\n"
    )
    assert list(seams._missing_names(tmp_path / "package")) == [
        "vllm.sampling_params.Nothing (package/module.py)",
        "vllm.nowhere.Something (package/module.py)",
        "vllm.config.Missing (package/module.py)",
    ]


def test_a_newer_version_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(plugin.WARNED_VARIABLE, "")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    looked = []
    monkeypatch.setattr(seams, "missing_seams", lambda: looked.append(1) or [])
    for _ in range(2):
        plugin.check_vllm_version("0.99.0")
    # By id: where vLLM's own handlers are there, a record reaches the fixture twice.
    warned = {id(record): record.getMessage() for record in caplog.records if "is newer than" in record.getMessage()}
    assert (len(warned), len(looked)) == (1, 1)
    (text,) = warned.values()
    assert f"vLLM 0.99.0 is newer than the versions that InduceKV was tried with ({SUPPORTED_VLLM})" in text


def test_a_newer_version_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.WARNED_VARIABLE, "")
    monkeypatch.setattr(seams, "missing_seams", lambda: ["vllm.a.B.c", "vllm.d"])
    with pytest.raises(
        UnsupportedModel, match=r"found 0\.99\.0, which lacks 2 of the names .* the first is vllm\.a\.B\.c"
    ):
        plugin.check_vllm_version("0.99.0")


def test_an_older_version() -> None:
    plugin.check_vllm_version("0.32.1+cpu")
    with pytest.raises(UnsupportedModel, match=r"supports vLLM >=.*, found 0\.31\.9$"):
        plugin.check_vllm_version("0.31.9")
