"""The base of all settings: validated when they are made, with errors in one wording.

A field with a `Flag` is also a command-line flag; `selector.cli.flags` reads the type, the bounds, the default and the
help text from the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from inducekv_vllm.errors import ConfigError


@dataclass(frozen=True)
class Flag:
    """How a field appears on the command line; goes into the field's `Annotated` type."""

    help: str
    metavar: str | None = None
    name: str | None = None  # of the flag, where it is not the field's


Seed = Annotated[int, Field(ge=0, lt=2**63), Flag("seed of all random choices")]  # as torch takes it


class Settings(BaseModel):
    """Immutable values. Raises `ConfigError` if a name is unknown, or a value has the wrong type or is out of range."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(describe_error(detail) for detail in error.errors())) from error


def describe_error(detail: ErrorDetails) -> str:
    """One problem of a `ValidationError`: the field, what was expected, what was found."""
    name, value, context = ".".join(map(str, detail["loc"])), detail["input"], detail.get("ctx", {})
    match detail["type"]:
        case "greater_than_equal":
            return f"{name} must be at least {_bound(context['ge'])}, found {value}"
        case "greater_than":
            return f"{name} must be above {_bound(context['gt'])}, found {value}"
        case "less_than_equal":
            return f"{name} must be at most {_bound(context['le'])}, found {value}"
        case "less_than":
            return f"{name} must be below {_bound(context['lt'])}, found {value}"
        case "finite_number":
            return f"{name} must be a finite number, found {value}"
        case "literal_error":
            return f"{name} must be {context['expected'].replace(chr(39), '')}, found {value!r}"
        case "extra_forbidden":
            return f"unknown setting {name!r}"
        case "value_error":
            return str(context["error"])
    return f"{name}: {detail['msg']} (found {value!r})"


def _bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
