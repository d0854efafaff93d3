"""A start of `inducekv-serve` that is refused ends with one line, whichever of its processes has refused it.

The process leaves the reason in the run's folder and ends without vLLM's traceback, and so do those that wait for it.
With VLLM_LOGGING_LEVEL=DEBUG the tracebacks are there. Elsewhere, as in `MemoryLLM`, the error is raised as it is.
"""

import logging
import os
import traceback
from pathlib import Path
from typing import Final

from ..errors import InduceKVError
from .config import RUN_VARIABLE

STATUS: Final = 2  # of a process that ends so
# vLLM's loggers of processes that wait for a worker's start, and what they say with a traceback if it fails.
LOGGERS: Final = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
FAILED: Final = frozenset({"EngineCore failed to start.", "WorkerProc failed to start."})


def reason_of_refusal() -> str | None:
    """Why a process of this run has refused to start; None if none has."""
    try:
        return None if (file := _file()) is None else file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def end_start(error: InduceKVError) -> None:
    """Leave the reason, and end this process; nothing happens outside of `inducekv-serve`, or if it logs for debugging.

    Raises:
        SystemExit: the process ends.
    """
    if (file := _file()) is None:
        return
    file.write_text(str(error), encoding="utf-8")
    if not logging.getLogger("vllm").isEnabledFor(logging.DEBUG):
        raise SystemExit(STATUS)


def watch_start() -> None:
    """Call it in every process, before its start can fail."""
    if RUN_VARIABLE in os.environ:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(_ends_start)


def _ends_start(record: logging.LogRecord) -> bool:
    """A filter: whether a line is logged. Raises SystemExit before vLLM's traceback of a refusal."""
    if record.msg not in FAILED or not record.exc_info:
        return True
    error = record.exc_info[1]
    if type(error) is ValueError and _is_of_vllm(error):  # too little memory is free, a request would not fit, ...
        error = InduceKVError(f"{' '.join(str(error).split())} (vLLM; VLLM_LOGGING_LEVEL=DEBUG shows where)")
    if isinstance(error, InduceKVError):
        end_start(error)
    elif reason_of_refusal() is not None and not logging.getLogger("vllm").isEnabledFor(logging.DEBUG):
        raise SystemExit(STATUS)  # of the process that this one has waited for
    return True


def _is_of_vllm(error: ValueError) -> bool:
    """Whether a line of vLLM's own raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith("vllm.")


def _file() -> Path | None:
    return Path(folder) / "refusal" if (folder := os.environ.get(RUN_VARIABLE)) else None
