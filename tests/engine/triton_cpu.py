"""A Triton backend named `cpu`, which vLLM's V2 runner on the CPU asks for. Its kernels run in Triton's interpreter.

Triton finds backends by the entry points of distributions: see `install` in `test_gpu_attention.py`.
"""

from typing import Any

import torch
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class InterpreterBackend(BaseBackend):
    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}

    def get_codegen_implementation(self, options: object) -> dict[str, Any]:
        return {}
