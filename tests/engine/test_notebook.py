"""docs/notebook.ipynb runs from top to bottom, in a kernel of its own; it asserts what it claims."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
OURS_AND_THEIRS = ("selector", "inducekv_vllm", "vllm")
SECONDS = 600  # for a cell, on a busy machine


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = [printed(cell) for cell in notebook.cells]
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    again = [printed(cell) for cell in notebook.cells]
    assert any("12 of 12 right with memory, 0 without" in text for text in again)
    assert [bool(text) for text in again] == [bool(text) for text in shown]


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell has printed or returned; logs on standard error are left out."""
    outputs = [each for each in cell.get("outputs", ()) if each.get("name") != "stderr"]
    return "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs)


def test_what_the_notebook_calls_is_there_and_takes_its_arguments() -> None:
    """Of what it imports. Training and serving are tested elsewhere; `make test-nightly` runs the notebook."""
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    tree = ast.parse("\n".join(cells))
    names = dict(imported(tree))
    called = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = resolved(call.func, names)
        if getattr(function, "__module__", "").startswith(OURS_AND_THEIRS):
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
            inspect.signature(function).bind_partial(*call.args, **keywords)
            called.append(ast.unparse(call.func))
    assert {"selector.teach", "selector.evaluate", "LLM", "MemoryLLM", "fact_of"} <= {*called}


def resolved(function: ast.expr, names: dict[str, Any]) -> Any:
    """What is called; None if the notebook has made it itself."""
    if isinstance(function, ast.Name):
        return names.get(function.id)
    if isinstance(function, ast.Attribute) and (owner := resolved(function.value, names)) is not None:
        return getattr(owner, function.attr)
    return None


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, importlib.import_module(alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            yield from ((alias.name, getattr(module, alias.name)) for alias in node.names)
