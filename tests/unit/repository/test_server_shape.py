"""The shape of the server's code: what belongs together is in one object, not handed about in functions."""

import ast

from tests.imports import ROOT

FILES = sorted((ROOT / "server").rglob("*.py"))
CLASSES = [node for file in FILES for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
MOST_PARAMETERS, MOST_LINES = 6, 300


def constructors() -> dict[str, list[ast.arg]]:
    """Of each class, what it is made with."""
    found = {}
    for each in CLASSES:
        for member in each.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                found[each.name] = [*member.args.args[1:], *member.args.kwonlyargs]
    return found


def test_no_constructor_takes_many_things() -> None:
    made_with = constructors()
    assert len(made_with) > 15
    assert not {name: len(given) for name, given in made_with.items() if len(given) > MOST_PARAMETERS}


def test_no_object_is_made_with_functions_of_another() -> None:
    functions = ("Callable", "Awaitable", "Coroutine")
    found = [
        f"{name}.{parameter.arg}"
        for name, given in constructors().items()
        for parameter in given
        if parameter.annotation is not None and ast.unparse(parameter.annotation).startswith(functions)
    ]
    assert not found


def test_no_class_and_not_the_registry_is_long() -> None:
    lengths = {each.name: (each.end_lineno or 0) - each.lineno + 1 for each in CLASSES}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert len((ROOT / "server" / "registry.py").read_text().splitlines()) <= MOST_LINES
