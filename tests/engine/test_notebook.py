"""docs/notebook.ipynb runs from top to bottom, in a kernel of its own; it asserts what it claims."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
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
