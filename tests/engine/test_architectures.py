"""Every decoder architecture that both libraries know is served, refused in one line, or listed as not judged.

`docs/families.md` has what is found; a check that raises anything else than its refusal ends the survey.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architectures import PAGE, RECIPES
from tests.pages import ROOT


@pytest.mark.slow  # half a minute for a page; test_plugin.py and selector/backbone/test_model.py have the checks
def test_the_page_has_what_is_found() -> None:
    command = [sys.executable, "-m", "tests.architectures", "--check"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.count("| all |") == 2, (PAGE, RECIPES)
