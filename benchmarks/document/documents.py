"""The documents: what Debian, Python and a package install, and one whose facts are made up. Nothing is fetched."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Final

from inducekv_vllm.errors import ConfigError
from selector.data.document import Document

LICENCE: Final = Path("/usr/share/common-licenses/GPL-1")  # of Debian's base-files
MANUAL: Final = "msgpack"  # a dependency of vLLM; its description is its manual, in Markdown
REFERENCE: Final = "execmodel"  # the topic of Python's language reference, as pydoc has it
MADE_UP_ROWS: Final = 60


def _licence() -> Document:
    try:
        return Document("GNU General Public License, version 1", LICENCE.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{LICENCE}: cannot read it: {error.strerror}; Debian's package base-files has it") from error


def _manual() -> Document:
    text = str(importlib.metadata.metadata(MANUAL).get_payload() or "")
    return Document("MessagePack for Python", re.sub(r"^\[!.*$", "", text, flags=re.MULTILINE))


def _reference() -> Document:
    from pydoc_data.topics import topics

    return Document("Execution model", topics[REFERENCE])


def _made_up() -> Document:
    """Instruments of an observatory that does not exist: nobody has read of them."""
    rng = Random("document")
    syllables = ("ka", "ro", "ve", "lin", "tor", "mi", "sel", "dra", "qu", "fen", "osk", "bel", "zan", "hu", "pri")
    names = list({"".join(rng.sample(syllables, 3)).capitalize() for _ in range(2 * MADE_UP_ROWS)})
    names.sort()
    lines = []
    for name, room in zip(rng.sample(names, MADE_UP_ROWS), rng.sample(range(100, 999), MADE_UP_ROWS), strict=True):
        keeper = rng.choice(names)
        lines.append(
            f"The instrument {name} stands in room {room} and was built in {rng.randrange(1901, 1999)}. "
            f"It measures {rng.choice(('light', 'wind', 'heat', 'salt', 'sound'))}, and its keeper is Mr {keeper}."
        )
    return Document("Register of the observatory", "\n\n".join(lines))


DOCUMENTS: Final[Mapping[str, Callable[[], Document]]] = MappingProxyType(
    {"reference": _reference, "licence": _licence, "manual": _manual, "made-up": _made_up}
)
