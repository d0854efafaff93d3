"""The documentation is true: its links, paths, commands, examples, tables of names and tables of numbers."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import itertools
import json
import re
import runpy
import shlex
import statistics
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.from_a_table.table import table
from benchmarks.research.continual import __main__ as continual
from benchmarks.research.continual import run as stream_run
from benchmarks.research.continual import search
from benchmarks.research.continual.report.names import title
from inducekv_vllm.bundle import Bundle, BundleMetadata
from inducekv_vllm.errors import InduceKVError
from inducekv_vllm.host.config import InduceKVConfig
from server import launcher

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
ARCHIVE = [DOCS / "archive" / name for name in ("README.md", "commands.md")]  # the others are tables of numbers
PAGES = [README, *sorted(DOCS.glob("*.md")), *ARCHIVE]

OUR_PACKAGES = ("inducekv_vllm", "selector", "server", "benchmarks", "tests")
TREE_LISTS = ("inducekv_vllm", "selector", "server")  # every module of these stands in the tree
OUR_PATH = re.compile(rf"(?:{'|'.join(OUR_PACKAGES)}|docs|docker)/[\w./-]*")
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
SCRIPT_MODULES = {name: target.partition(":")[0] for name, target in SCRIPTS.items()}
NESTED = ("audit",)  # commands with subcommands of their own
WITH_SUBCOMMANDS = ("selector.cli.bundle", "benchmarks.research.continual", "benchmarks.research.continual.diagnostics")
SERVER = "server.launcher"  # its parser is that of vLLM, with our flags
FOREIGN_PROGRAMS = (
    "curl",
    "docker",
    "export",
    "guidellm",
    "helm",
    "kubectl",
    "locust",
    "openssl",
    "pip",
    "prometheus",
    "promtool",
    "source",
    "vllm",
    "vllm-router",
)
FOREIGN_FLAGS_AFTER = "--serve-args"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fences(page: Path, language: str) -> list[str]:
    """The text of the page's fenced blocks in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert all(of for of, _ in found), f"{page.name}: a fenced block names no language"
    return [text for of, text in found if of == language]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def section(page: Path, heading: str) -> str:
    """What stands below a heading, up to the next one of its level or above; without fenced blocks."""
    level = len(heading.partition(" ")[0])
    below = prose(page).partition(f"\n{heading}\n")[2]
    assert below, f"{page.name} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", below, flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, without their headers."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rulers = {number for number, line in enumerate(lines) if set(line) <= set("|- ")}
    kept = [line for number, line in enumerate(lines) if number not in rulers and number + 1 not in rulers]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


# ------------------------------------------------------------------------------------------------ links and paths


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_resolve(page: Path) -> None:
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not re.match(r"https?://", t)]
    for target in targets:
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}: no such file"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}: no such heading"
    assert targets or page != README


@pages
def test_paths_exist(page: Path) -> None:
    words = [*code(prose(page)), *(word for text in fences(page, "sh") for word in text.split())]
    missing = [word for word in words if OUR_PATH.fullmatch(word) and not (ROOT / word).exists()]
    assert not missing


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", README.read_text()))
    assert linked == {f"docs/{page.name}" for page in DOCS.glob("*.md")}


def tree() -> Iterator[str]:
    """The paths of the tree in development.md."""
    folders: list[str] = []
    for line in fences(DOCS / "development.md", "text")[0].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        yield "".join(folders)


def test_the_tree_and_the_ten_questions_name_what_is_there() -> None:
    paths = list(tree())
    assert len(paths) == len(set(paths)) > 50
    assert not [path for path in paths if not (ROOT / path).exists()]
    modules = {str(path.relative_to(ROOT)) for package in TREE_LISTS for path in (ROOT / package).rglob("*.py")}
    assert not {path for path in modules if not path.endswith("__init__.py")} - set(paths)
    questions = rows(section(DOCS / "development.md", "## Ten questions"))
    assert len(questions) == 10
    for question, answer in questions:
        assert code(answer)[0] in paths, question


# ------------------------------------------------------------------------------------------------------- commands


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


def unknown_flags(module: str, arguments: list[str]) -> set[str]:
    subcommand: tuple[str, ...] = ()
    if module in WITH_SUBCOMMANDS:
        name = arguments[0]
        subcommand = (subcommands(module)[0] if name == "NAME" else name,)
        assert subcommand[0] in subcommands(module), f"{module} has no command {name!r}"
        if name in NESTED:
            subcommand += (arguments[1],)
    if FOREIGN_FLAGS_AFTER in arguments:
        arguments = arguments[: arguments.index(FOREIGN_FLAGS_AFTER) + 1]
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if module == SERVER:
        ours = argparse.ArgumentParser()
        launcher.add_flags(ours)
        return {flag for flag in flags if "memory" in flag or "demo" in flag} - {
            "--print-demo-model",
            *ours._option_string_actions,
        }
    return flags - options(module, *subcommand) if flags else set()


def module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def check(words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in arguments:
            variable, given, _ = word.partition("=")
            assert re.search(rf"^{variable} \?=" if given else rf"^{word}:", makefile, re.M), f"make knows no {word}"
        return
    if program in FOREIGN_PROGRAMS:
        return
    module = SCRIPT_MODULES.get(program)
    if program in ("python", "torchrun"):
        at = arguments.index("-m")
        module, arguments = arguments[at + 1], arguments[at + 2 :]
    assert module, f"there is no command {program}"
    assert module_exists(module), f"there is no module {module}"
    if module.partition(".")[0] in OUR_PACKAGES:
        assert not (unknown := unknown_flags(module, arguments)), f"{module} does not know {sorted(unknown)}"


@pages
def test_commands_are_known(page: Path) -> None:
    for words in commands(page):
        check(words)


def begin_stream_benchmark(arguments: list[str]) -> None:
    """Up to where its work starts: read arguments and preset, and resolve the settings of its methods and trials."""
    subcommand, *rest = arguments
    shown = [*itertools.dropwhile(lambda word: not word.startswith("--"), rest)]
    if shown != rest and "--out" not in shown:  # RUN: options that stand in a file of results, --out among them
        shown += ["--out", "DIR"]
    options = continual.parse([subcommand, *shown])
    if options.command is continual.run_and_report:
        assert stream_run.methods_of(options)
    elif options.command is search.command:
        assert search.methods_of_trials(options)


@pages
def test_commands_of_the_stream_benchmark_begin(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    for words in commands(page):
        if words[:3] == ["python", "-m", "benchmarks.research.continual"]:
            try:
                begin_stream_benchmark(words[3:])
            except (SystemExit, InduceKVError) as ended:
                pytest.fail(f"{page.name}: {' '.join(words)}: {ended}")


# ------------------------------------------------------------------------------------------------------- examples


@pages
def test_python_blocks_compile_and_import_what_is_there(page: Path) -> None:
    for text in fences(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OUR_PACKAGES):
                spec = importlib.util.find_spec(node.module)
                assert spec, node.module
                assert spec.origin, node.module
                defined = {getattr(child, "name", None) for child in ast.parse(Path(spec.origin).read_text()).body}
                assert {alias.name for alias in node.names} <= defined


@pages
def test_json_and_toml_blocks_parse(page: Path) -> None:
    for text in fences(page, "json"):
        json.loads(text)
    for text in fences(page, "toml"):
        tomllib.loads(text)


# -------------------------------------------------------------------------------------------------- tables of names


def names(text: str, column: int = 0) -> set[str]:
    return {name for row in rows(text) for name in code(row[column])}


def test_selecting_lists_every_option() -> None:
    listed = {row[0].strip("`") for row in rows(section(DOCS / "selecting.md", "## Options"))}
    assert listed == options("selector.cli.select") - {"--help"}


def test_serving_lists_every_setting_and_route() -> None:
    page = DOCS / "serving.md"
    assert {row[0].strip("`") for row in rows(section(page, "## Settings"))} == set(InduceKVConfig.model_fields)
    listed = set(re.findall(r"`(?:GET|POST|PATCH|DELETE) (/v1/[^` ]*)`", section(page, "## HTTP routes"))) - {
        "/v1/models"
    }
    source = "".join(path.read_text() for path in (ROOT / "server").glob("*.py"))
    routes = re.findall(r'@router\.\w+\(\s*"([^"]+)"', source)
    assert listed == {route.replace(":path}", "}") for route in routes} - {"/memory"}  # a page: it has a section
    assert "/memory`" in section(page, "### The page")


def test_the_bundle_format_lists_every_tensor_and_field() -> None:
    page = DOCS / "bundle-format.md"
    tensors, _, rest = page.read_text().partition("\n## Metadata\n")
    assert names(tensors) == set(Bundle.__dataclass_fields__) - {"metadata", "signature", "rows"}
    assert names(rest.partition("\n## ")[0]) == set(BundleMetadata.model_fields)


def test_the_benchmarks_list_every_diagnostic() -> None:
    listed = names(section(DOCS / "benchmarks.md", "### Diagnostics"))
    assert listed == set(subcommands("benchmarks.research.continual.diagnostics"))


# ------------------------------------------------------------------------------------------------ tables of numbers


def test_the_slips_of_published_scripts_are_quoted() -> None:
    from benchmarks.research.published.slips import tables

    assert tables() in (DOCS / "suites.md").read_text()


def test_results_name_every_file_of_numbers() -> None:
    named = set(re.findall(r"[\w.-]+\.json\b", (DOCS / "archive" / "commands.md").read_text()))
    assert named == {path.name for path in RESULTS.glob("*.json")}


TABLE_PAGES = [(DOCS / "results.md", "## A table of 80 rows"), (DOCS / "tutorial.md", "## Evaluate")]
DECOUPLED_RUN = "continual_decoupled.json"
GATE_RUNS = {
    "demo": "gate_demo.json",
    "SmolLM2": "gate_real_text.json",
    "real pictures": "gate_real_pictures.json",
}
RATES_RUN = "continual_decoupled_lora_rates.json"  # one gated LoRA a task, with a rate for each task


@cache
def run(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / file).read_text())
    return content


def metrics_if_run(file: str, method_title: str, budget: int) -> dict[str, Any] | None:
    """Of the method that a run's page gives this title; None if it was not run with this budget."""
    run_with = {title(r["method"]) for r in run(file)["results"] if r["budget"] == budget}
    return metrics(file, method_title, budget) if method_title in run_with else None


def metrics(file: str, method_title: str, budget: int) -> dict[str, Any]:
    """Of the method that a run's page gives this title."""
    found = [r for r in run(file)["results"] if r["budget"] == budget and title(r["method"]) == method_title]
    assert len(found) == 1, method_title
    measured: dict[str, Any] = found[0]["metrics"]
    return measured


def mean(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f}"


def mean_and_error(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['standard_error']:.3f}"


def test_the_comparison_with_lora_is_quoted() -> None:
    text = section(DOCS / "results.md", "## Against LoRA")
    quoted = plain_rows(text[text.index("| no memory") :].partition("\n\n")[0])
    assert {name.partition(", ")[0] for name, *_ in quoted} == {
        title(row["method"]) for row in run(DECOUPLED_RUN)["results"]
    }
    for row, *cells in quoted:
        name, _, rate = row.partition(", ")
        file = RATES_RUN if rate == "a rate for each task" else DECOUPLED_RUN
        small = metrics(file, name, 32)
        large = metrics_if_run(file, name, 64)
        both = [f"{mean(small[of])} / {mean(large[of])}" if large else mean(small[of]) for of in ("AF", "base_final")]
        assert cells == [mean_and_error(small["AP"]), mean_and_error(large["AP"]) if large else "not run", *both], row


@pytest.mark.parametrize(("page", "heading"), [(README, "## Why not a LoRA, or retrieval?"), *TABLE_PAGES])
def test_the_table_of_80_rows_is_quoted(page: Path, heading: str) -> None:
    """All of it, or some columns of some rows."""
    head, _, *measured = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table(run("from_a_table.json")).splitlines()
    ]
    by_way = {row[0]: dict(zip(head, row, strict=True)) for row in measured}
    text = section(page, heading)
    header = next(line for line in text.splitlines() if line.startswith("| |"))
    columns = [cell.strip() for cell in header.strip("|").split("|")][1:]
    quoted = plain_rows(text[text.index(header) :].partition("\n\n")[0])
    assert len(quoted) >= 4
    for way, *cells in quoted:
        assert cells == [by_way[way][column] for column in columns], way


def test_what_opens_the_gate_is_quoted() -> None:
    """Each suite's column."""
    measured = {
        name: {row["kind"]: row for row in run(file)["rows"]}
        for name, file in GATE_RUNS.items()
        if (RESULTS / file).exists()
    }
    text = section(DOCS / "gate.md", "## Measured")
    header = next(line for line in text.splitlines() if line.startswith("| routed"))
    assert [name.strip() for name in header.split("|")[3:-1]] == list(measured)
    quoted = {kind: (goal, cells) for kind, goal, *cells in rows(text)}
    assert quoted.keys() == {kind for kinds in measured.values() for kind in kinds}
    for kind, (goal, cells) in quoted.items():
        for cell, kinds in zip(cells, measured.values(), strict=True):
            assert cell == (share_of(kinds[kind]) if kind in kinds else ""), kind
        goals = {row["goals"].get(of_interest(row)) for kinds in measured.values() if (row := kinds.get(kind))}
        assert goals == {float(goal) if goal else None}, kind


def of_interest(row: dict[str, Any]) -> str:
    return "routed" if "routed" in row["shares"] else "opened"


def share_of(row: dict[str, Any]) -> str:
    return f"{row['shares'][of_interest(row)]['mean']:.3f}"


def lead(rival_file: str) -> str:
    """Of InduceKV over one gated LoRA a task with 32 entries, in points of AP, paired over the seeds."""
    ours, rival = (
        [
            statistics.mean(each["accuracy"][-1])
            for each in run(file)["runs"]
            if (each["method"], each["budget"]) == (method, 32)
        ]
        for file, method in ((DECOUPLED_RUN, "refined_decoupled"), (rival_file, "gated_task_lora"))
    )
    points = [100 * (a - b) for a, b in zip(ours, rival, strict=True)]
    return f"{statistics.mean(points):.1f} ± {statistics.stdev(points) / len(points) ** 0.5:.1f}"


def test_the_lead_over_one_gated_lora_a_task_is_quoted() -> None:
    text = " ".join((DOCS / "results.md").read_text().split())
    assert f"{lead(RATES_RUN)} points of AP ahead of a LoRA that" in text
    assert f"{lead(DECOUPLED_RUN)} ahead of one with one rate for all" in text


def plain_rows(text: str) -> list[list[str]]:
    """Without bold type."""
    return [[cell.strip("*") for cell in row] for row in rows(text)]


def test_every_promise_names_its_tests_and_every_test_a_promise() -> None:
    rows = re.findall(
        r"^\| (.+) \| (.+) \|$", (DOCS / "development.md").read_text().split("## Promises")[1], re.MULTILINE
    )
    named = [re.findall(r"`([\w/]+\.py)`", tests) for _, tests in rows if not tests.startswith(("test", "---"))]
    assert all(named), "a promise without a test"
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(itertools.chain(*named)) == files
