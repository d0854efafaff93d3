"""What users import is one flat list: nothing joins or leaves it unnoticed, and it costs nothing until it is used."""

import subprocess
import sys

import inducekv_vllm
import selector
from tests.pages import DOCS, code

PUBLIC = [
    "inducekv_vllm.BundleError",
    "inducekv_vllm.CapacityError",
    "inducekv_vllm.ConfigError",
    "inducekv_vllm.FingerprintMismatch",
    "inducekv_vllm.InduceKVError",
    "inducekv_vllm.MemoryAnswer",
    "inducekv_vllm.MemoryLLM",
    "inducekv_vllm.SUPPORTED_VLLM",
    "inducekv_vllm.ServedBundle",
    "inducekv_vllm.TaskDataError",
    "inducekv_vllm.UnknownBundle",
    "inducekv_vllm.UnknownFact",
    "inducekv_vllm.UnsupportedModel",
    "inducekv_vllm.VersionConflict",
    "inducekv_vllm.__version__",
    "selector.Accuracy",
    "selector.Answer",
    "selector.Backbone",
    "selector.Callback",
    "selector.Columns",
    "selector.Document",
    "selector.Example",
    "selector.Server",
    "selector.ServerError",
    "selector.TaskDataWarning",
    "selector.Taught",
    "selector.evaluate",
    "selector.teach",
    "selector.teach_document",
]


def test_the_list_is_complete() -> None:
    assert [
        f"{package.__name__}.{name}" for package in (inducekv_vllm, selector) for name in sorted(package.__all__)
    ] == PUBLIC


def test_everything_is_where_it_is_said_to_be() -> None:
    """What needs vLLM is imported by the tests of the engine."""
    assert all(callable(getattr(selector, name)) for name in selector.__all__)
    assert all(
        issubclass(getattr(inducekv_vllm, name), ValueError) for name in inducekv_vllm.__all__ if "Error" in name
    )


def test_the_documentation_names_it() -> None:
    said = " ".join(code((DOCS / "python.md").read_text()))
    assert [name for name in PUBLIC if name.partition(".")[2] not in said] == []


def test_an_import_waits_for_no_library() -> None:
    program = "import sys, inducekv_vllm, selector; print({'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
