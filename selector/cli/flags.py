"""Command-line flags from the fields of `Settings`.

A field with a `Flag` becomes `--its-name`; its type, choices, default and help text come from the field.
"""

import argparse
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from inducekv_vllm.errors import ConfigError, InduceKVError

from ..runtime.settings import Flag, Settings


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def flag_fields(model: type[Settings]) -> dict[str, tuple[FieldInfo, Flag]]:
    """The fields of `model` that are flags, by name."""
    return {
        name: (field, flag)
        for name, field in model.model_fields.items()
        for flag in field.metadata
        if isinstance(flag, Flag)
    }


def option_of(name: str, flag: Flag) -> str:
    """As it is given on the command line."""
    return f"--{(flag.name or name).replace('_', '-')}"


def add_flags(
    parser: argparse._ActionsContainer, models: Mapping[str, type[Settings]], names: Sequence[str] | None = None
) -> None:
    """Add a flag for each field; a flag that is not given leaves no attribute behind.

    Args:
        models: by the name that help texts give them; they share the fields.
        names: of the fields, or None for all flags of the first model.
    """
    first = next(iter(models.values()))
    for name in flag_fields(first) if names is None else names:
        field, flag = flag_fields(first)[name]
        option, kind = option_of(name, flag), _plain_type(field.annotation)
        defaults = {label: model.model_fields[name].default for label, model in models.items()}
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": flag.help + _shown(defaults)}
        if kind is bool and field.default is True:
            parser.add_argument(f"--no-{option[2:]}", action="store_false", **options)
        elif kind is bool:
            parser.add_argument(option, action="store_true", **options)
        elif get_origin(kind) is Literal:
            choices = dict.fromkeys(
                c for model in models.values() for c in get_args(_plain_type(model.model_fields[name].annotation))
            )
            parser.add_argument(option, choices=tuple(choices), **options)
        else:
            parser.add_argument(option, type=kind, metavar=flag.metavar, required=field.is_required(), **options)


def error_line(program: str, error: InduceKVError) -> str:
    """The error as a command prints it: one line, and one for each example that is wrong if there are several."""
    lines = [f"{program}: error: {' '.join(str(error).split())}"]
    lines += [f"  {' '.join(str(each).split())}" for each in getattr(error, "problems", ())]
    return "\n".join(lines)


def _plain_type(annotation: Any) -> Any:
    """The type without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(kind for kind in get_args(annotation) if kind is not type(None))
    return annotation


def _shown(defaults: Mapping[str, Any]) -> str:
    """The defaults as a help text shows them; None and flags without a value have none."""
    shown = {label: value for label, value in defaults.items() if isinstance(value, int | float | str)}
    if not shown or any(isinstance(value, bool) for value in shown.values()):
        return ""
    if len(set(shown.values())) == 1 and len(shown) == len(defaults):
        return f" (default: {next(iter(shown.values()))})"
    return f" (default: {', '.join(f'{label} {value}' for label, value in shown.items())})"
