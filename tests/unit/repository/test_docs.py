"""The documentation is true: its links, paths, commands and examples, and its tables of options and fields."""

import argparse
import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path

from inducekv_vllm.bundle import BundleMetadata
from inducekv_vllm.bundle.tensors import DTYPES
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server import launcher
from tests.pages import (
    DOCS,
    README,
    RESULTS,
    ROOT,
    code,
    commands,
    fences,
    names,
    options,
    pages,
    prose,
    rows,
    section,
    subcommands,
)

OUR_PACKAGES = ("inducekv_vllm", "selector", "server", "benchmarks", "tests")
OUR_PATH = re.compile(rf"(?:{'|'.join(OUR_PACKAGES)}|docs|docker)/[\w./-]*")
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# What `selector.cli.entry` runs has the parser.
SCRIPT_MODULES = {name: target.replace("entry:", "").partition(":")[0] for name, target in SCRIPTS.items()}
NESTED = ("audit",)  # commands with subcommands of their own
WITH_SUBCOMMANDS = (
    "selector.cli.bundle",
    "benchmarks.research.continual",
    "benchmarks.research.continual.diagnostics",
)
SERVER = "server.launcher"  # its parser is that of vLLM, with our flags
FOREIGN_PROGRAMS = (
    *("curl", "docker", "export", "guidellm", "helm", "kubectl", "locust", "openssl", "pip", "prometheus", "promtool"),
    *("source", "vllm", "vllm-router"),
)
FOREIGN_FLAGS_AFTER = "--serve-args"


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


def test_every_file_of_results_is_named() -> None:
    named = re.findall(r"`([\w.-]+\.json)` *[|,]", (RESULTS / "README.md").read_text())
    assert sorted(named) == sorted(path.name for path in RESULTS.glob("*.json"))


def test_a_list_of_modules_is_complete() -> None:
    """Of a package that lists its modules, `name.py` and what is in it."""
    wrong = []
    for package in (ROOT / name for name in OUR_PACKAGES):
        for path in package.rglob("__init__.py"):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            listed = set(re.findall(r"^ *(\w+)\.py ", text, re.M))
            modules = {each.stem for each in path.parent.glob("*.py")} - {"__init__", "__main__"}
            if listed and not listed <= modules <= set(re.findall(r"\b(\w+)\.py\b", text)):
                wrong.append(str(path.relative_to(ROOT)))
    assert not wrong


def test_every_test_module_says_what_it_promises() -> None:
    silent = [path for path in (ROOT / "tests").rglob("test_*.py") if not path.read_text().startswith('"""')]
    assert not silent


# ------------------------------------------------------------------------------------------------------- commands


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


# ------------------------------------------------------------------------------------------------------- examples


@pages
def test_python_blocks_compile_and_import_what_is_there(page: Path) -> None:
    for text in fences(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OUR_PACKAGES):
                spec = importlib.util.find_spec(node.module)
                assert spec, node.module
                assert spec.origin, node.module
                module = ast.parse(Path(spec.origin).read_text())
                defined = {getattr(child, "name", None) for child in module.body} | public_names(module)
                assert {alias.name for alias in node.names} <= defined


def public_names(module: ast.Module) -> set[str]:
    """Of `__all__`."""
    lists = [
        each.value for each in module.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"
    ]
    return {name for each in lists for name in ast.literal_eval(each)}


@pages
def test_json_and_toml_blocks_parse(page: Path) -> None:
    for text in fences(page, "json"):
        json.loads(text)
    for text in fences(page, "toml"):
        tomllib.loads(text)


# -------------------------------------------------------------------------------------------------- tables of names


def test_selecting_lists_every_option() -> None:
    listed = {row[0].strip("`") for row in rows(section(DOCS / "selecting.md", "## Options"))}
    assert listed == options("selector.cli.select") - {"--help"}


def test_serving_lists_every_setting_and_route() -> None:
    page = DOCS / "serving.md"
    assert {row[0].strip("`") for row in rows(section(page, "## Settings"))} == set(InduceKVConfig.model_fields)
    listed = set(re.findall(r"`(?:GET|POST|PATCH|DELETE) (/v1/[^` ]*)`", section(page, "## HTTP routes"))) - {
        "/v1/models"
    }
    source = "".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    routes = re.findall(r'@router\.\w+\(\s*"([^"]+)"', source)
    assert listed == {route.replace(":path}", "}") for route in routes} - {"/memory"}  # a page: it has a section
    assert "/memory`" in section(page, "### The page")


def test_the_bundle_format_lists_every_tensor_and_field() -> None:
    page = DOCS / "bundle-format.md"
    tensors, _, rest = page.read_text().partition("\n## Metadata\n")
    assert names(tensors) == set(DTYPES)
    assert names(rest.partition("\n## ")[0]) == set(BundleMetadata.model_fields)
