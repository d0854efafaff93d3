"""Imports, read from the source: nothing is imported for it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Import:
    name: str  # absolute and dotted: a module, or a name in one
    type_only: bool = False  # under `if TYPE_CHECKING`
    deferred: bool = False  # in a function, until that is called


def name_of(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a module's file; a package's name stands for its `__init__`."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, root: Path = ROOT) -> tuple[Import, ...]:
    """At any depth of the file."""
    return tuple(_imports(ast.parse(path.read_text(), str(path)), path.relative_to(root).parent.parts))


def _imports(
    tree: ast.AST, package: tuple[str, ...], type_only: bool = False, deferred: bool = False
) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(node.body, []), package, type_only=True, deferred=deferred)
            yield from _imports(ast.Module(node.orelse, []), package, type_only, deferred)
        elif isinstance(node, ast.Import):
            yield from (Import(alias.name, type_only, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, node.module) if node.module else base)
            yield from (Import(f"{prefix}.{alias.name}", type_only, deferred) for alias in node.names)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(node, package, type_only, deferred or is_function)
