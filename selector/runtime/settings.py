"""The base of all settings: validated when they are made.

A field with a `Flag` is also a command-line flag; `selector.cli.flags` reads the type, the bounds, the default and the
help text from the field.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inducekv_vllm.errors import ConfigError, problems_in


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
            raise ConfigError(problems_in(error)) from error
