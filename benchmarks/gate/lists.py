"""The lists that the gate is measured with, read from the TOML files beside this module."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
FLAT: Final = (
    "wrappers",
    "systems",
    "sentences",
    "everyday",
    "everyday_picture",
    "languages",
    "lorem",
    "nonsense",
)


@dataclass(frozen=True)
class Lists:
    """Texts of no training data. `wrappers` have the place "{question}"; `turns` are (user, assistant)."""

    wrappers: tuple[str, ...]
    systems: tuple[str, ...]
    turns: tuple[tuple[str, str], ...]
    sentences: tuple[str, ...]
    everyday: tuple[str, ...]
    everyday_picture: tuple[str, ...]
    languages: tuple[str, ...]
    lorem: tuple[str, ...]
    nonsense: tuple[str, ...]
    near_misses: Mapping[str, Mapping[str, tuple[str, ...]]]  # stream to task to questions that are not the task's
    rewordings: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]  # task to its templates and to other wordings


@functools.cache
def read_lists() -> Lists:
    found, near_misses = _read("lists.toml"), _read("near_misses.toml")
    return Lists(
        **{name: tuple(found[name]) for name in FLAT},
        turns=tuple((turn["user"], turn["assistant"]) for turn in found["turns"]),
        near_misses={
            stream: {task: tuple(questions) for task, questions in tasks.items()}
            for stream, tasks in near_misses.items()
        },
        rewordings={task: (tuple(r["asked"]), tuple(r["wordings"])) for task, r in found["rewordings"].items()},
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))
