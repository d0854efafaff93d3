"""The table of `gate_public.json` in Markdown, as docs/gate.md has it.

python -m benchmarks.research.gate.public_table [FILE.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.research.gate.public import GATE, RESULTS, means
from benchmarks.research.gate.public_sets import KINDS, SETS

HEAD: Final = ("routed", "with a phrase", *KINDS, "AUROC")
Cells = Sequence[Mapping[str, Any]]


def table(cells: Cells) -> Iterator[str]:
    """Of bundles of three tasks with 128 examples: each set by the gate, then means over sets by method."""
    shown = [cell for cell in cells if (cell["tasks"], cell["examples"]) == (3, 128) and not any(_given(cell))]
    yield f"| of three tasks with 128 examples | {' | '.join(HEAD)} |"
    yield "|---" * (len(HEAD) + 1) + "|"
    for name in SETS:
        of_set = [cell for cell in shown if cell["set"] == name and GATE in cell["methods"]]
        if of_set:
            yield _row(name, means(of_set, GATE), "opened")
    yield _row("**mean**", means(shown, GATE), "opened")
    # Some rivals may not be measured on all of them: the gate stands beside them on the same.
    rivals = dict.fromkeys(method for cell in shown for method in cell["methods"] if method != GATE)
    places = {rival: tuple(at for at, cell in enumerate(shown) if rival in cell["methods"]) for rival in rivals}
    for common in dict.fromkeys(places.values()):
        of_them = [shown[at] for at in common]
        sets = ", ".join(dict.fromkeys(cell["set"] for cell in of_them))
        for method in (GATE, *(rival for rival in rivals if places[rival] == common)):
            yield _row(f"at 95% recall, {sets}: {method}", means(of_them, method), "opened_at_95")


def others(cells: Cells) -> Iterator[str]:
    """The gate on bundles of other sizes: means over sets."""
    sizes = dict.fromkeys(map(_size, cells))
    yield f"| tasks, examples, `--not`, `--background`, layers | {' | '.join(HEAD)} |"
    yield "|---" * (len(HEAD) + 1) + "|"
    for size in sorted(sizes):
        of_size = [cell for cell in cells if _size(cell) == size]
        sets = ", ".join(dict.fromkeys(cell["set"] for cell in of_size))
        yield _row(f"{', '.join(map(str, size))} ({sets})", means(of_size, GATE), "opened")


def _size(cell: Mapping[str, Any]) -> tuple[int, int, int, int, str]:
    near_misses, traffic, layers = _given(cell)
    return cell["tasks"], cell["examples"], near_misses, traffic, "+".join(map(str, layers)) or "default"


def _given(cell: Mapping[str, Any]) -> tuple[int, int, Sequence[int]]:
    """Near-misses, other traffic, and the layers that the gate looks at if they are not the usual ones."""
    return cell["near_misses"], cell.get("traffic", 0), cell.get("layers") or ()


def _row(name: str, numbers: Mapping[str, float], measure: str) -> str:
    routed = [numbers.get(name) for name in ("routed", "routed_wrapped")] if measure == "opened" else [None, None]
    shares = [*routed, *(numbers.get(f"{measure} {kind}") for kind in KINDS), numbers["auroc"]]
    return f"| {name} | {' | '.join('' if share is None else f'{share:.3f}' for share in shares)} |"


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    print("\n".join([*table(cells), "", *others(cells)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
