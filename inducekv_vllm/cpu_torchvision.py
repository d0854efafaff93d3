"""Make PyPI's torchvision importable beside a CPU-only torch.

PyPI's torchvision links CUDA. Beside a CPU torch its C++ operators never load, and its Python half fails to import
because it registers fake kernels for operators that do not exist ("operator torchvision::nms does not exist").
vLLM's LLaVA and Qwen3-VL import torchvision but call none of those operators, so it is enough to declare their schemas.

Every process must do this before it imports torchvision. `python -m inducekv_vllm.cpu_torchvision` writes a `.pth` file
into the environment, which installs an import hook at interpreter start. The hook costs nothing until torchvision is
imported, and does nothing on a CUDA torch.
"""

import importlib.abc
import importlib.machinery
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

# The name sorts last, so an editable install's .pth file has already put this package on the path.
PTH_NAME = "zz_inducekv_cpu_torchvision.pth"
PTH_LINE = (
    "import importlib.util as u; u.find_spec('inducekv_vllm')"
    " and __import__('inducekv_vllm.cpu_torchvision').cpu_torchvision.install_hook()\n"
)

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # a torch.library.Library removes its definitions when it is garbage-collected


def declare_operators() -> None:
    """Declare torchvision's operator schemas on a CPU-only torch; do nothing on a CUDA torch or on a second call."""
    import torch

    if torch.version.cuda is not None or _libraries:
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _libraries.append(library)


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


def install_hook() -> None:
    """Declare the operators just before the first import of torchvision in this process."""
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


def write_pth(site_packages: Path) -> Path:
    """Install the hook for every process of the environment that owns `site_packages`; return the file written."""
    path = site_packages / PTH_NAME
    path.write_text(PTH_LINE)
    return path


if __name__ == "__main__":
    print(write_pth(Path(sysconfig.get_paths()["purelib"])))
