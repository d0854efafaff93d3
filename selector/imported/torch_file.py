"""A file of `torch.save`, read without running anything in it and without room for more than the file has."""

import zipfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.serialization import safe_globals

from inducekv_vllm.backbone.checkpoints import summary
from inducekv_vllm.errors import BundleError

MAX_PICKLE: Final = 2**24  # bytes of what describes the tensors; theirs lie beside it


def read_torch_file(path: Path, *allowed: Any) -> Any:
    """What was saved: tensors, parameters, plain containers, and objects of `allowed` classes alone.

    Raises:
        BundleError: it cannot be read, or holds anything else, such as code.
    """
    try:
        _check_size(path)
        with safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except BundleError:
        raise
    except OSError as error:
        raise BundleError(f"{path}: cannot read the file: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise BundleError(f"{path}: not a file of torch.save: {error}") from error
    except Exception as error:  # of many kinds
        if type(error).__name__ == "UnpicklingError":
            raise BundleError(
                f"{path}: holds something else than tensors, which is not run: {_named(error)}"
            ) from error
        raise BundleError(f"{path}: damaged: {summary(error)}") from error


def float_tensor(found: Any, shape: tuple[int, ...], name: str) -> Tensor:
    """A tensor of this shape as float32.

    Raises:
        BundleError: it is something else, or has NaN or infinite values.
    """
    if not isinstance(found, Tensor) or found.layout is not torch.strided or not found.is_floating_point():
        kind = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise BundleError(f"{name}: expected a tensor of floating-point numbers, found {kind}")
    if tuple(found.shape) != shape:
        raise BundleError(f"{name}: expected the shape {list(shape)}, found {list(found.shape)}")
    if found.nbytes > found.untyped_storage().nbytes():  # before a copy: it repeats what it views
        raise BundleError(f"{name}: claims {found.nbytes} bytes, and the file has {found.untyped_storage().nbytes()}")
    tensor = found.detach().float()
    if not tensor.isfinite().all():
        raise BundleError(f"{name} contains NaN or infinite values")
    return tensor


def _check_size(path: Path) -> None:
    """Raises BundleError: the file would unpack to more than it has."""
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED:
                raise BundleError(f"{path}: {part.filename!r} is compressed, which torch.save never does")
            if part.filename.endswith(".pkl") and part.file_size > MAX_PICKLE:
                raise BundleError(
                    f"{path}: {part.filename!r} has {part.file_size} bytes, at most {MAX_PICKLE} are read"
                )


def _named(error: Exception) -> str:
    """The class or function that was refused, of torch's many lines."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "Unsupported" in line or "GLOBAL" in line or "operand" in line), lines[0])
