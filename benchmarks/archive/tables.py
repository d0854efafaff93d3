"""A file of results as Markdown: streams and serving as their own tables, everything else by its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.research.continual.report.names import title

Json = Any
ABOUT = ("machine", "command", "versions", "environment", "weights", "digest", "data", "benchmark", "diagnostic")
LONGEST = 40  # rows of a table
WIDEST = 16  # columns
NOTHING = ({}, [], None)
FEW = 8  # rows whose own tables are shown, too


def tables_of(content: Json) -> Iterator[str]:
    """Blocks of Markdown, without the machine and the command."""
    if isinstance(content, dict) and _is_stream(content):
        yield from stream(content)
    elif isinstance(content, dict) and isinstance(content.get("concurrency"), dict):
        yield from serving(content)
    else:
        yield from anything(content)


def _is_stream(content: Mapping[str, Json]) -> bool:
    results = content.get("results")
    return bool(results) and all("metrics" in row for row in results)


def stream(content: Mapping[str, Json]) -> Iterator[str]:
    """AP, AF, base questions, bytes and seconds of each method, and its accuracy by task after the last one."""
    rows = content["results"]
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    yield f"Tasks: {', '.join(content['order'])}. Seeds: {', '.join(map(str, seeds))}."
    measured = {"AP": "AP", "AF": "AF", "base questions": "base_final"}
    yield table(
        ["", "entries", *measured, "bytes", "learning, s"],
        [
            [
                *(title(row["method"]), row["budget"]),
                *(_mean(row["metrics"].get(key)) for key in measured.values()),
                *(row.get("stored_bytes", ""), _mean(row.get("learn_seconds"), 0)),
            ]
            for row in rows
        ],
    )
    tasks = content["order"]
    by_task = [
        [title(row["method"]), row["budget"], *(_mean(row["tasks"].get(task)) for task in tasks)]
        for row in rows
        if row.get("tasks")
    ]
    if by_task:
        yield table(["after the last task", "entries", *tasks], by_task)


def serving(content: Mapping[str, Json]) -> Iterator[str]:
    """Medians, in brackets relative to what the method is compared with."""
    for concurrency, methods in content["concurrency"].items():
        yield f"Requests at the same time: {concurrency}."
        yield table(
            ["", "requests", "time to first token, ms", "time per output token, ms", "output tokens a second"],
            [
                [
                    *(name, row.get("requests", "")),
                    *(_with_ratio(row, "ttft"), _with_ratio(row, "tpot"), _number(row.get("tokens_per_s"), 3)),
                ]
                for name, row in methods.items()
            ],
        )
    rest = {key: value for key, value in content.items() if key not in ("concurrency", "targets")}
    yield from anything(rest)


def anything(content: Json, name: str = "") -> Iterator[str]:
    """Numbers as a table, a list of alike rows as a table, and what is inside of them below."""
    if isinstance(content, list):
        if content and all(isinstance(each, dict) for each in content):
            yield from _rows(name, [(None, each) for each in content])
        elif content and not name:
            yield _cell(content)
        return
    if not isinstance(content, dict):
        return
    kept = {key: value for key, value in content.items() if key not in ABOUT}
    plain = {key: value for key, value in kept.items() if not _has_rows(value)}
    if plain:
        if name:
            yield f"*{name}*"
        yield table(["", ""], [[key, _cell(value)] for key, value in plain.items()])
    for key, value in kept.items():
        if key in plain:
            continue
        label = f"{name}, {key}" if name else key
        if isinstance(value, dict) and all(isinstance(each, dict) for each in value.values()):
            yield from _rows(label, list(value.items()))
        else:
            yield from anything(value, label)


def _rows(name: str, rows: Sequence[tuple[str | None, Mapping[str, Json]]]) -> Iterator[str]:
    """One table of the values of all rows that are no tables themselves, and those that are below."""
    columns = dict.fromkeys(
        key
        for _, row in rows
        for key, value in row.items()
        if key not in ABOUT and value not in NOTHING and not _has_rows(value)
    )
    keyed = rows[0][0] is not None
    if name:
        yield f"*{name}*"
    if columns:
        names = list(columns)[:WIDEST]
        heads = [*([""] if keyed else []), *names]
        shown = [[*([label] if keyed else []), *(_cell(row.get(key, "")) for key in names)] for label, row in rows]
        yield table(heads, shown[:LONGEST])
        if len(shown) > LONGEST:
            yield f"{len(shown) - LONGEST} more rows are in the file."
    if len(rows) > FEW:
        return
    for number, (label, row) in enumerate(rows, start=1):
        for key, value in row.items():
            if key not in ABOUT and _has_rows(value):
                own = label if label is not None else str(number)
                yield from anything({key: value}, f"{name}, {own}" if name else own)


def _has_rows(value: Json) -> bool:
    """Whether it takes a table of its own: a list of objects, or an object with more than a few values."""
    if isinstance(value, list):
        return any(isinstance(each, dict) for each in value)
    if not isinstance(value, dict) or _is_mean(value):
        return False
    return len(value) > 6 or any(isinstance(each, dict | list) and not _is_mean(each) for each in value.values())


def _is_mean(value: Json) -> bool:
    """Of several seeds."""
    return isinstance(value, dict) and "mean" in value


def _cell(value: Json) -> str:
    if _has_rows(value):
        return "see the file"
    if _is_mean(value):
        return _mean(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) if len(value) <= 8 else f"{len(value)} numbers"
    if isinstance(value, float):
        return _number(value)
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def _mean(value: Mapping[str, float] | None, decimals: int = 3) -> str:
    if value is None:
        return ""
    error = value.get("standard_error")
    return f"{value['mean']:.{decimals}f}" + (f" ± {error:.{decimals}f}" if error else "")


def _with_ratio(row: Mapping[str, Json], name: str) -> str:
    value, ratio = row.get(f"{name}_ms"), row.get(f"{name}_ratio")
    return "" if value is None else f"{_number(value, 3)}" + ("" if ratio is None else f" ({_number(ratio, 2)})")


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines: list[Sequence[object]] = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
