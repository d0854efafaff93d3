"""Settings: values out of range and of the wrong kind are refused in one line."""

import math
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from inducekv_vllm.errors import ConfigError
from selector.runtime.settings import Settings


class Example(Settings):
    count: Annotated[int, Field(ge=1)] = 3
    rate: Annotated[float | None, Field(gt=0)] = None
    way: Literal["one", "two", "three"] = "one"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count: Input should be greater than or equal to 1 (found 0)"),
        ({"count": 1.5}, "count: "),
        ({"rate": math.nan}, "rate: Input should be a finite number (found nan)"),
        ({"way": "four"}, "way: Input should be 'one', 'two' or 'three' (found 'four')"),
        ({"speed": 1}, "speed: Extra inputs are not permitted (found 1)"),
        ({"count": 0, "rate": -1}, "(found 0); rate: Input should be greater than 0 (found -1)"),
    ],
)
def test_other_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Example(**values)
    assert message in str(refused.value)
