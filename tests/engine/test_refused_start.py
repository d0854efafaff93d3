"""A start that is refused ends with one line, whichever process has refused it; tracebacks are for debugging."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.cli import serve

from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.vllm_seams import refused_start
from inducekv_vllm.vllm_seams.config import RUN_VARIABLE
from inducekv_vllm.vllm_seams.refused_start import LOGGERS, end_start, reason_of_refusal, watch_start
from server import launcher


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run, and vLLM's loggers as in one of its processes."""
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    watch_start()
    yield tmp_path
    for name in LOGGERS:
        logging.getLogger(name).removeFilter(refused_start._ends_start)


def fail(logger: str, line: str, error: Exception | Callable[[], None]) -> None:
    """As a process of vLLM does."""
    try:
        if not isinstance(error, Exception):
            error()
        else:
            raise error
    except Exception:
        logging.getLogger(logger).exception(line)


def test_the_process_that_refuses_and_those_that_wait_for_it_end_without_a_traceback(run: Path) -> None:
    engine, worker = LOGGERS
    fail(engine, "EngineCore failed to start.", RuntimeError("something else"))
    assert reason_of_refusal() is None
    with pytest.raises(SystemExit) as end:
        fail(worker, "WorkerProc failed to start.", UnsupportedModel("it would be wrong"))
    assert (end.value.code, reason_of_refusal()) == (2, "it would be wrong")
    with pytest.raises(SystemExit):
        fail(engine, "EngineCore failed to start.", RuntimeError("a worker has failed"))
    fail(worker, "WorkerProc hit an exception.", UnsupportedModel("of a request"))  # it has started


@pytest.mark.parametrize("logger", LOGGERS)
def test_what_vllm_refuses_itself_ends_with_its_reason_in_one_line(run: Path, logger: str) -> None:
    """Too little memory that is free, for instance. Other errors are shown with their tracebacks."""
    line = "EngineCore failed to start." if logger == LOGGERS[0] else "WorkerProc failed to start."
    for error in (RuntimeError("a bug"), KeyError("a bug"), UnicodeError("not text"), ValueError("of another module")):
        fail(logger, line, error)
    refuses: dict[str, Any] = {"__name__": "vllm.v1.worker"}
    exec("def start(): raise ValueError('Available memory is less than desired.\\nTo resolve: decrease it.')", refuses)
    with pytest.raises(SystemExit):
        fail(logger, line, refuses["start"])
    reason = "Available memory is less than desired. To resolve: decrease it."
    assert reason_of_refusal() == f"{reason} (vLLM; VLLM_LOGGING_LEVEL=DEBUG shows where)"


def test_for_debugging_they_are_shown(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "vllm")
    fail(LOGGERS[0], "EngineCore failed to start.", UnsupportedModel("it would be wrong"))
    assert reason_of_refusal() == "it would be wrong"


def test_elsewhere_the_error_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    end_start(UnsupportedModel("it would be wrong"))
    assert reason_of_refusal() is None


def test_the_command_says_what_other_processes_have_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own folder of a run is there while vLLM runs."""

    class Serve:
        def validate(self, args: object) -> None:
            pass

        def cmd(self, args: object) -> None:
            with pytest.raises(SystemExit):
                end_start(UnsupportedModel("it would be wrong"))
            raise RuntimeError("Engine core initialization failed.")

    monkeypatch.setattr(serve, "ServeSubcommand", Serve)
    monkeypatch.setenv(RUN_VARIABLE, "")
    monkeypatch.setattr(launcher, "parsed", lambda given: SimpleNamespace())
    monkeypatch.setattr(launcher, "prepare", lambda args, environment: None)
    monkeypatch.setattr("vllm.logger.configure_logging_from_args", lambda args: None)
    monkeypatch.setattr("inducekv_vllm.vllm_seams.moved.cli_env_setup", lambda: None)
    with pytest.raises(SystemExit) as end:
        launcher.main([])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "inducekv-serve: error: it would be wrong"
