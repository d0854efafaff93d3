"""What a user can set, counted from the code: `python -m tests.surface` prints how many things of which kind.

A flag of the server and the key of its configuration that it stands for count once. What vLLM and OpenAI's
API have by themselves does not count.
"""

import argparse
import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args
from unittest import mock

from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

import server
from inducekv_vllm.frontend import request
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from selector.cli import bundle, select
from server import launcher
from server.schemas import ExampleMessage
from tests.imports import ROOT

PRODUCT = ("inducekv_vllm", "selector", "server", "inducekv_serve")
OWN_VARIABLES = ("INDUCEKV_RUN", "INDUCEKV_WARNED_OF_VLLM")  # one process sets them for those that it starts


def surface() -> dict[str, list[str]]:
    """By kind, each thing that a user can set."""
    of_bundle = [each for name, _ in inner_parsers(parser_of(bundle.main)) for each in bundle_command(name)]
    return {
        "inducekv-serve: flags and settings": sorted(serve_settings()),
        "parameters of a request (vllm_xargs)": sorted(request_parameters()),
        "fields of the routes' bodies": sorted(body_fields()),
        "query parameters of the routes": sorted(query_parameters()),
        "inducekv-select: flags": arguments(parser_of(select.main)),
        "inducekv-bundle: subcommands": [" ".join(names) for names, _ in of_bundle],
        "inducekv-bundle: arguments": [
            f"{' '.join(names)} {each}" for names, inner in of_bundle for each in arguments(inner)
        ],
        "environment variables": sorted(environment_variables()),
    }


def serve_settings() -> set[str]:
    """By the name of the setting; and flags that stand for none."""
    ours = argparse.ArgumentParser(add_help=False)
    launcher.add_flags(ours)
    flags = {action.dest.removeprefix(launcher.SETTING) for action in ours._actions}
    known = {"--help", *(flag for action in ours._actions for flag in action.option_strings)}
    by_hand = {text for text in constants("server/launcher.py") if re.fullmatch(r"--[a-z][a-z-]+", text)}
    return flags | set(InduceKVConfig.model_fields) | (by_hand - known)


def request_parameters() -> set[str]:
    return {value for name, value in vars(request).items() if name.endswith("_OPTION")}


def body_fields() -> set[str]:
    return {
        f"{model.__name__}.{field}"
        for route in routes()
        for parameter in route.dependant.body_params
        for model in models_in(parameter.field_info.annotation)
        if model is not ExampleMessage  # a message of OpenAI's
        for field in model.model_fields
    }


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models of a type, and those of their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for inner in get_args(annotation):
        yield from models_in(inner)


def query_parameters() -> set[str]:
    def asked(dependant: Dependant) -> Iterator[str]:
        yield from (parameter.alias for parameter in dependant.query_params)
        for each in dependant.dependencies:
            yield from asked(each)

    return {f"{route.path} {name}" for route in routes() for name in asked(route.dependant)}


def routes() -> Iterator[APIRoute]:
    """Of every router that a module of the server has."""
    for found in pkgutil.iter_modules(server.__path__, "server."):
        router = getattr(importlib.import_module(found.name), "router", None)
        if isinstance(router, APIRouter):
            yield from (route for route in router.routes if isinstance(route, APIRoute))


class _Found(Exception):
    """The parser that a command would have read its arguments with."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(main: Callable[[Sequence[str]], int], *given: str) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise _Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            main(given)
        except _Found as found:
            return found.parser
    raise AssertionError(f"{main.__module__} reads no arguments")


def arguments(parser: argparse.ArgumentParser) -> list[str]:
    own = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return [action.option_strings[0] if action.option_strings else action.dest for action in own]


def bundle_command(name: str) -> list[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """A subcommand, or those beneath it, with their parsers."""
    own = dict(inner_parsers(parser_of(bundle.main, name)))[name]
    return [((name, beneath), inner) for beneath, inner in inner_parsers(own)] or [((name,), own)]


def inner_parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def environment_variables() -> set[str]:
    paths = [str(path.relative_to(ROOT)) for package in PRODUCT for path in (ROOT / package).rglob("*.py")]
    named = {text for path in paths for text in constants(path) if re.fullmatch(r"INDUCEKV_[A-Z_]+", text)}
    return named - set(OWN_VARIABLES)


def constants(path: str) -> Iterator[str]:
    """The texts of a module."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def main() -> None:
    found = surface()
    for kind, things in found.items():
        print(f"{len(things):4}  {kind}")
        if "--all" in sys.argv:
            print("".join(f"        {each}\n" for each in things), end="")
    print(f"{sum(map(len, found.values())):4}  in all")


if __name__ == "__main__":
    main()
