"""The parts an HTML page is put together from: text that stays text, numbers for people, tables, figures, the page.

Every string passes through `text`, which escapes it; nothing on a page loads or runs anything.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from .plots import plain

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
.summary { font-size: 1.05rem; padding: .8rem 1rem; border-left: .4rem solid #777; background: #f4f4f4; }
.better { border-color: #009e73; } .worse { border-color: #d55e00; }
figure { margin: 1rem 0; } figure img { max-width: 100%; } figcaption { color: #444; font-size: .92rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #999; }
tr.chosen { font-weight: bold; background: #eef6fb; } td.marked { font-weight: bold; background: #eef6fb; }
.wide { overflow-x: auto; width: min(96vw, 90rem); margin-left: calc(50% - min(48vw, 45rem)); }
.wide table { margin: 1rem auto; font-size: .85rem; } .wide td, .wide th { white-space: nowrap; padding: .2rem .5rem; }
.prose td, .prose th { text-align: left; }
.gallery { display: flex; flex-wrap: wrap; gap: 1rem; } .gallery figure { flex: 1 1 13rem; margin: 0; }
.gallery img { width: 7rem; image-rendering: pixelated; } pre { overflow-x: auto; background: #f4f4f4; padding: .6rem; }
"""
# Whatever the page holds, a browser that shows it asks nobody for anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, verdict: str, summary: str | Sequence[str], sections: Mapping[str, Sequence[str]]) -> str:
    """A whole page: its first paragraph, set off by the class `verdict`, then the parts of each section by heading.

    Args:
        summary: a paragraph, or its lines.
    """
    lines = [summary] if isinstance(summary, str) else summary
    body: list[str] = []
    for heading, parts in sections.items():
        anchor = text(heading.lower().replace(" ", "-"))
        body += [f'<section id="{anchor}">', f"<h2>{text(heading)}</h2>", *parts, "</section>"]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            f'<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>{STYLE}</style></head>",
            f"<body>\n<h1>{text(title)}</h1>",
            f'<p class="summary {verdict}">{"<br>".join(map(text, lines))}</p>',
            *body,
            "</body>\n</html>\n",
        ]
    )


def figure(svg: str, title: str, said: str) -> str:
    """A plot, its title and a sentence that explains it."""
    return _figure("image/svg+xml", svg.encode(), title, said)


def picture(png: bytes, title: str, said: str) -> str:
    """The same of a picture in pixels."""
    return _figure("image/png", png, title, said)


def _figure(media_type: str, content: bytes, title: str, said: str) -> str:
    image = f'<img alt="{text(title)}" src="data:{media_type};base64,{base64.b64encode(content).decode()}">'
    return f"<figure>{image}<figcaption><strong>{text(title)}.</strong> {text(said)}</figcaption></figure>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    chosen: Sequence[bool] | None = None,
    marked: Collection[tuple[int, int]] = (),
) -> str:
    """A table; cells may be text or numbers; `chosen` rows and `marked` cells (row, column) are set off."""
    cells = "".join(f"<th>{text(name)}</th>" for name in head)
    lines = [f"<table><thead><tr>{cells}</tr></thead><tbody>"]
    for place, row in enumerate(rows):
        mark = ' class="chosen"' if chosen is not None and chosen[place] else ""
        opened = ['<td class="marked">' if (place, column) in marked else "<td>" for column in range(len(row))]
        shown = [f"{tag}{text(_cell(value))}</td>" for tag, value in zip(opened, row, strict=True)]
        lines.append(f"<tr{mark}>{''.join(shown)}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def text(value: str) -> str:
    """`value` as HTML text or attribute."""
    return html.escape(plain(value))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, int | float):
        return number(value)
    return json.dumps(value)


def number(value: Any, digits: int = 4) -> str:
    """A number for people; a dash for what there is not, and words for what is none."""
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.{digits}g}" if math.isfinite(value) else ("not a number" if math.isnan(value) else "infinite")
    return str(value)


def percent(value: Any) -> float | None:
    """A share as a percentage; None where it is no number."""
    return 100 * value if is_number(value) else None


def counted(amount: int, one: str, more: str) -> str:
    """An amount with the noun that belongs to it."""
    return f"{amount:,} {one if amount == 1 else more}"


def byte_size(amount: float) -> str:
    """Bytes in the largest binary unit that there is one of."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount} bytes"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number, and a finite one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
