"""The checks that settings share."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from inducekv_vllm.errors import ConfigError
from selector.runtime.checks import require_at_least, require_choice, require_positive


def test_what_is_in_range_passes() -> None:
    require_at_least(1, a=1, b=2.5, c=None)
    require_positive(a=1e-9, b=None)
    require_choice(Literal["one", "two"], a="two")


@pytest.mark.parametrize(
    ("value", "message"),
    [(0, "b must be at least 1, found 0"), (math.nan, "b must be a finite number"), (math.inf, "found inf")],
)
def test_the_first_that_is_not_is_named(value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_at_least(1, a=1, b=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_zero_and_what_is_not_finite_is_not_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=f"rate must be a positive number, found {value}"):
        require_positive(rate=value)


def test_a_choice_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match="way must be one, two or three, found 'four'"):
        require_choice(Literal["one", "two", "three"], way="four")
