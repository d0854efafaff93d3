"""Dates and ages on the command line."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from inducekv_vllm.errors import ConfigError

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE: Final = re.compile(r"(\d{1,6})([mhdw])")


def age(text: str) -> timedelta | None:
    """ "90d" is 90 days; None for anything that is not an age."""
    found = _AGE.fullmatch(text)
    return None if found is None else timedelta(**{_UNITS[found[2]]: int(found[1])})


def read_date(text: str, flag: str) -> datetime:
    """A date (its beginning) or a time in ISO 8601, in UTC unless it says otherwise; in whole seconds.

    Raises:
        ConfigError: it is neither.
    """
    try:
        when = datetime.fromisoformat(text)
        return (when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)).replace(microsecond=0)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{flag} must be a date such as 2027-01-31 or 2027-01-31T12:00:00Z, or an age such as 90d, found {text!r}"
        ) from error


def read_date_after(text: str, begin: datetime, flag: str) -> datetime:
    """A date, or an age from `begin` on. Raises ConfigError: it is neither, or not after `begin`."""
    after = age(text)
    try:
        when = read_date(text, flag) if after is None else begin + after
    except OverflowError as error:
        raise ConfigError(f"{flag} {text} is too far away") from error
    if when <= begin:
        raise ConfigError(f"{flag} {text} is not after {begin:%Y-%m-%dT%H:%M:%SZ}, when the entries are made")
    return when
