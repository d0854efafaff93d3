"""A vLLM that was never tried: its names and methods are looked for, and what is missing is named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from inducekv_vllm import SUPPORTED_VLLM, plugin
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.host import seams

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
