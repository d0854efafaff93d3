"""Where the extra `teach` is not installed, the commands name it; with it they are themselves."""

import subprocess
import sys

import pytest

from tests.imports import ROOT

WITHOUT = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refused())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {missing!r} else found(name, package)
sys.argv = [{program!r}, "--help"]
from selector.cli import entry
sys.exit(entry.{function}())
"""


def run(program: str, *missing: str) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(missing=missing, program=program, function=program.removeprefix("inducekv-"))
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", ["inducekv-bundle", "inducekv-select"])
def test_a_command_names_the_extra_that_it_lacks(program: str) -> None:
    done = run(program, "rich")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{program}: needs rich: pip install 'inducekv[teach]'\n"
