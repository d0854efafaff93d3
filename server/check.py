"""`inducekv-serve --check [MODEL] [flags]`: what is installed, and whether the server would start; no weight is read.

What is known without vLLM is printed at once: its import takes seconds.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from inducekv_vllm import SUPPORTED_VLLM, __version__
from inducekv_vllm.errors import InduceKVError
from inducekv_vllm.plugin import check_vllm_version, installed_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REPORT: Final = """\
A bug report has all of this, the command, what you expected and what happened, the log from its first line on, and what
GET /v1/memory_server answers, if a server runs."""


def report(judge: Callable[[], VllmConfig | None]) -> int:
    """Print it. The status of the command: 0, or 2 if `judge` refuses the start.

    Args:
        judge: makes vLLM's configuration, as a start does; None if the model's files are not here.

    Raises:
        UnsupportedModel: there is no vLLM.
    """
    _say("inducekv", __version__)
    _say("vLLM", f"{installed_vllm()}; supported is {SUPPORTED_VLLM}")
    for package in ("torch", "transformers", "triton", "faiss-cpu"):
        _say(package, _version(package))
    _say("Python", f"{platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs")
    names = sorted(name for name in os.environ if name.startswith(("VLLM_", "INDUCEKV_", "TRITON_", "CUDA_")))
    _say("environment", ", ".join(names) or "nothing of vLLM's is set")  # without the values: some are keys
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        check_vllm_version(installed_vllm())
        _say_model(judge())
    except InduceKVError as error:
        _say("refused", str(error))
        return 2
    finally:  # also where vLLM lacks what it takes to judge
        _say("seams", _seams())
        print(REPORT)
    return 0


def _say_model(config: VllmConfig | None) -> None:
    from vllm.platforms import current_platform

    _say("platform", f"{current_platform.device_type} ({current_platform.get_device_name()})")
    if config is None:
        _say("model", "an id of the hub: the engine will judge it when it has the files")
        return
    model = config.model_config
    _say("model", f"{model.model}: {', '.join(model.architectures)}, {model.dtype}, {model.max_model_len} tokens")
    _say("runner", "V2" if config.use_v2_model_runner else "V1")
    _say("flags", "none is refused")


def _seams() -> str:
    from inducekv_vllm.vllm_seams.seams import missing_seams

    missing = missing_seams()
    return f"missing: {'; '.join(missing)}" if missing else "all that InduceKV needs of vLLM is there"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _say(what: str, text: str) -> None:
    print(f"{what:12} {text}", flush=True)
