"""What users import is one flat list: nothing joins or leaves it unnoticed, and it costs nothing until it is used."""

import subprocess
import sys

import inducekv_vllm
import selector
from tests.pages import DOCS, code

PUBLIC = {
    "inducekv_vllm": (
        *("BundleError", "CapacityError", "ConfigError", "FingerprintMismatch", "InduceKVError", "MemoryAnswer"),
        *("MemoryLLM", "SUPPORTED_VLLM", "ServedBundle", "TaskDataError", "UnknownBundle", "UnknownFact"),
        *("UnsupportedModel", "VersionConflict", "__version__"),
    ),
    "selector": (
        *("Accuracy", "Answer", "Backbone", "Callback", "Columns", "Document", "Example", "Server", "ServerError"),
        *("TaskDataWarning", "Taught", "evaluate", "teach", "teach_document"),
    ),
}


def test_the_list_is_complete() -> None:
    assert {package.__name__: tuple(sorted(package.__all__)) for package in (inducekv_vllm, selector)} == PUBLIC


def test_everything_is_where_it_is_said_to_be() -> None:
    """What needs vLLM is imported by the tests of the engine."""
    assert all(callable(getattr(selector, name)) for name in selector.__all__)
    assert all(
        issubclass(getattr(inducekv_vllm, name), ValueError) for name in inducekv_vllm.__all__ if "Error" in name
    )


def test_the_documentation_names_it() -> None:
    said = " ".join(code((DOCS / "python.md").read_text()))
    assert [name for names in PUBLIC.values() for name in names if name not in said] == []


def test_an_import_waits_for_no_library() -> None:
    program = "import sys, inducekv_vllm, selector; print({'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
