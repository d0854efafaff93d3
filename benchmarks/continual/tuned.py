"""The best settings of a search: their file, and how a run takes them.

{"search": the configuration of all trials, "digest": of it, "machine": where the file was last written,
 "methods": {NAME: {"settings": the winner's, "trials": every trial's settings and scores,
                    "searched": names of settings, "unsearched": digest of the others}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.continual.methods import Method, choose_methods, with_setting
from benchmarks.continual.results import read_json
from benchmarks.continual.stream import write_json
from benchmarks.machine import describe_machine
from inducekv_vllm.errors import ConfigError

TUNED = "tuned.json"
Settings = Mapping[str, Any]


def trials_of(method: Method) -> tuple[Settings, ...]:
    """The settings to try, in order; none for a method that has none to search."""
    return tuple(getattr(method, "trials", ()))


def write_tuned(path: Path, configuration: dict[str, Any], records: Mapping[str, dict[str, Any]]) -> None:
    """Adds records of methods to the file, or makes it. Raises ConfigError: another configuration was searched."""
    digest = _digest(configuration)
    earlier = read_tuned(path) if path.exists() else {"digest": digest, "methods": {}}
    if earlier["digest"] != digest:
        raise ConfigError(f"{path}: the winners there are of a search of another configuration; choose another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    methods = {**earlier["methods"], **records}
    content = {"search": configuration, "digest": digest, "machine": describe_machine()}
    write_json(path, content | {"methods": dict(sorted(methods.items()))})


def read_tuned(path: Path) -> dict[str, Any]:
    """The content of a file of `write_tuned`. Raises ConfigError: there is no such file, or it is something else."""

    def is_tuned(content: Any) -> bool:
        records = content["methods"].values()
        return isinstance(content["digest"], str) and all("settings" in record for record in records)

    return read_json(path, "not a file of searched settings", is_tuned)


def tuned_settings(path: Path, method: Method) -> Method:
    """The method with its searched settings. Raises ConfigError: there are none, or its other settings have changed."""
    methods = read_tuned(path)["methods"]
    if method.name not in methods:
        raise ConfigError(f"{path}: there are no searched settings of {method.name}, only of: {', '.join(methods)}")
    record = methods[method.name]
    if record.get("unsearched") != unsearched_digest(method, record.get("searched", ())):
        raise ConfigError(f"{path}: {method.name} was searched with other settings than it has now; search it again")
    return apply_settings(method, record["settings"])


def tuned_methods(path: Path, names: Sequence[str], settings: Sequence[str]) -> list[Method]:
    """The methods of `names` with `settings` (see `choose_methods`) and, for the rest, their searched settings."""
    chosen = choose_methods(names, settings)
    return choose_methods(names, settings, {method.name: tuned_settings(path, method) for method in chosen})


def apply_settings(method: Method, settings: Settings) -> Method:
    """The method with other settings. Raises ConfigError: it has no such setting, or one of another type."""
    for key, value in settings.items():
        names = [field.name for field in fields(method) if field.name != "name"]  # type: ignore[arg-type]
        if key not in names:
            raise ConfigError(f"{method.name} has no setting {key!r}, it has: {', '.join(names) or 'none'}")
        method = with_setting(method, key, value)
    return method


def unsearched_digest(method: Method, searched: Collection[str]) -> str:
    """sha256 of the settings that are not `searched`: the winner belongs to them."""
    rest = {key: value for key, value in asdict(method).items() if key not in searched}  # type: ignore[call-overload]
    return _digest(rest)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
