"""The documentation as its tests read it: pages, their blocks, tables and commands, and what a command's help lists."""

import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
RESEARCH = ROOT / "benchmarks" / "research"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), RESULTS / "README.md", RESEARCH / "README.md"]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fences(page: Path, language: str) -> list[str]:
    """The text of the page's fenced blocks in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert all(of for of, _ in found), f"{page}: a fenced block names no language"
    return [text for of, text in found if of == language]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def section(page: Path, heading: str) -> str:
    """What stands below a heading, up to the next one of its level or above; without fenced blocks."""
    level = len(heading.partition(" ")[0])
    below = prose(page).partition(f"\n{heading}\n")[2]
    assert below, f"{page} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", below, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, without their headers."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rulers = {number for number, line in enumerate(lines) if set(line) <= set("|- ")}
    kept = [line for number, line in enumerate(lines) if number not in rulers and number + 1 not in rulers]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def names(text: str, column: int = 0) -> set[str]:
    return {name for row in rows(text) for name in code(row[column])}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's shell blocks; the brackets of a synopsis are left out."""
    for text in fences(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            for inner in re.findall(r"\$\(([^()]*)\)", line):
                yield shlex.split(inner)
            line = re.sub(r"\$\([^()]*\)", "X", re.sub(r"[\[\]]|\.{3}", " ", line))
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


@cache
def help_text(module: str, *subcommand: str) -> str:
    """What `python -m MODULE SUBCOMMAND --help` prints."""
    printed = io.StringIO()
    argv = [module, *subcommand, "--help"]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the module is imported already
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    assert ended.value.code in (0, None), f"{' '.join(argv)} failed"
    return printed.getvalue()


def options(module: str, *subcommand: str) -> set[str]:
    """The long options that a command's help lists."""
    lines = re.findall(r"^ {2}(-.*)$", help_text(module, *subcommand), re.M)
    return {flag for line in lines for flag in re.findall(r"(?<![\w-])--[\w-]+", re.split(r" {2,}", line)[0])}


def subcommands(module: str) -> list[str]:
    return re.findall(r"^ {4}([\w-]+)", help_text(module), re.M)
