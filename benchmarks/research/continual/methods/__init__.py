"""Methods by name or "module:CLASS", with their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from benchmarks.research.continual.methods import paper_memory, refined_memory
from benchmarks.research.continual.methods.built_memory import Built
from benchmarks.research.continual.methods.der import DerPlusPlus
from benchmarks.research.continual.methods.ewc import Ewc
from benchmarks.research.continual.methods.gated import GatedLoraReplay, GatedTaskLora
from benchmarks.research.continual.methods.lora import ErReplay, Lora, LoraReplay
from benchmarks.research.continual.methods.lwf import Lwf
from benchmarks.research.continual.methods.mas import Mas
from benchmarks.research.continual.methods.matched_memory import Matched
from benchmarks.research.continual.methods.method import Artifact, Kind, Method, RunContext
from benchmarks.research.continual.methods.mixture import MoeLora
from benchmarks.research.continual.methods.neighbours import KnnCopier, NoMemory, PromptReplay
from benchmarks.research.continual.methods.paper_memory import Paper
from benchmarks.research.continual.methods.refined_memory import Refined
from benchmarks.research.continual.methods.sliced import OLora, RegLora
from benchmarks.research.continual.methods.smolora import SmoLora
from benchmarks.research.continual.named import is_outside, outside
from inducekv_vllm.errors import ConfigError

METHODS: Mapping[str, Any] = {
    method.name: method
    for method in (
        NoMemory(),
        PromptReplay(),
        Lora(),
        LoraReplay(),
        ErReplay(),
        Ewc(),
        Lwf(),
        Mas(),
        DerPlusPlus(),
        OLora(),
        RegLora(),
        MoeLora(),
        SmoLora(),
        GatedLoraReplay(),
        GatedTaskLora(),
        KnnCopier(),
        Built("random_memory", "random"),
        Built("kcenter_memory", "k-center"),
        Matched(),
        Paper(),
        *paper_memory.ABLATIONS,
        Refined(),
        *refined_memory.ABLATIONS,
    )
}

__all__ = ["METHODS", "Artifact", "Method", "RunContext", "choose_methods", "parsed_value", "with_setting"]


def choose_methods(names: Sequence[str], settings: Sequence[str] = ()) -> list[Method]:
    """The methods of `names`, with `settings` ("steps=100", the value in JSON) in all of them that have such a setting.

    "lora.steps=100" sets it in that method alone, if it is among `names`; a preset may name more methods than are run.
    Raises ConfigError: an unknown method or setting.
    """
    chosen = {method.name: method for method in map(named_method, names)}
    for setting in settings:
        left, equals, text = setting.partition("=")
        only, _, key = left.rpartition(".") if equals else ("", "", left)
        require_known([only] if only and only not in chosen else [])
        candidates = [chosen[only] if only in chosen else METHODS[only]] if only else list(chosen.values())
        users = [method for method in candidates if key in changeable(method)]
        if not equals or not users:
            raise ConfigError(
                f"none of {only or ', '.join(names)} has the setting {setting!r}; it must read KEY=VALUE or "
                "METHOD.KEY=VALUE, and what makes an ablation cannot be set"
            )
        changed = {method.name: with_setting(method, key, parsed_value(text)) for method in users}
        chosen |= {name: method for name, method in changed.items() if name in chosen}
    return list(chosen.values())


def named_method(name: str) -> Any:
    """One of `METHODS`, or "module:CLASS": a class with all settings by default. Raises ConfigError: there is none."""
    if not is_outside(name):
        require_known([name])
        return METHODS[name]
    try:
        method = outside(name)()
        if method.name in METHODS or not callable(method.learn) or method.kind not in get_args(Kind):
            raise TypeError(f"its name must be new and its kind one of {', '.join(get_args(Kind))}")
        fields(method)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name}: no method as in benchmarks/research/continual/methods/method.py: {error}"
        ) from error
    return method


def require_known(names: Sequence[str]) -> None:
    """Raises ConfigError: there is no method of a name."""
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ConfigError(f"there is no method {unknown[0]!r}, there are: {', '.join(METHODS)}")


def parsed_value(text: str) -> Any:
    """JSON if it is that, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def changeable(method: Any) -> set[str]:
    """The names of the settings that leave a method what it is: of an ablation, all but those that make it one.

    What only the ablation has is its own to set.
    """
    settings = {field.name for field in fields(method)} - {"name"}
    whole = next((family() for family in (Paper, Refined) if isinstance(method, family)), None)
    registered = METHODS.get(method.name)
    if whole is None or registered is None:
        return settings
    return {name for name in settings if getattr(registered, name) == getattr(whole, name, getattr(registered, name))}


def with_setting(method: Any, key: str, value: Any) -> Any:
    """`method` with another value of one setting. Raises ConfigError: it is of another type.

    An int may stand for a float, and None where the setting may be None.
    """
    old = getattr(method, key)
    value = tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value
    value = float(value) if isinstance(old, float) and type(value) is int else value
    optional = value is None and type(None) in get_args(get_type_hints(type(method))[key])
    if old is not None and not optional and type(value) is not type(old):
        raise ConfigError(f"{method.name}: {key} must be like {old!r}, found {value!r}")
    return replace(method, **{key: value})
