"""Plots of a report, as `data:` addresses of SVG images: with one matplotlib, the same numbers give the same bytes."""

from __future__ import annotations

import base64
import io
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS: Final = ("#0072B2", "#D55E00")  # of Okabe and Ito, which colour-blind readers can tell apart
LONGEST_LABEL: Final = 56  # characters
STYLE: Final[Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # names may hold a dollar sign
    "svg.fonttype": "none",  # the reader's fonts may have signs that ours has not
    "svg.hashsalt": "inducekv",  # ids of a drawing are random otherwise
}


def curve(values: Sequence[float], label: str, position: str) -> str:
    """A line over the numbers of the `values`; what is not finite leaves a gap."""

    def draw(axes: Axes) -> None:
        axes.plot(values, color=COLOURS[0], marker="." if len(values) <= 30 else "")
        axes.set(xlabel=position, ylabel=label)
        axes.grid(alpha=0.3)

    return _svg(draw, height=2.6)


def bars(names: Sequence[str], series: Mapping[str, Sequence[float]], label: str) -> str:
    """Horizontal bars, a group for each of `names` from the top down, with one or two series."""

    def draw(axes: Axes) -> None:
        height = 0.8 / len(series)
        for row, ((name, lengths), colour) in enumerate(zip(series.items(), COLOURS, strict=False)):
            centres = [place + (row + 0.5) * height - 0.4 for place in range(len(names))]
            drawn = axes.barh(
                centres, lengths, 0.9 * height, color=colour, hatch="/" * 3 * row, edgecolor="white", label=name
            )
            axes.bar_label(drawn, fmt="{:.4g}", padding=3, fontsize=8)
        axes.set_yticks(range(len(names)), [plain(name, LONGEST_LABEL) for name in names])
        axes.set(xlabel=label)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        if len(series) > 1:
            axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))

    return _svg(draw, height=0.9 + 0.4 * len(names))


def plain(text: str, longest: int | None = None) -> str:
    """`text` without the characters that have no place in a document (controls, lone surrogates), and not too long."""
    clean = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign)[0] == "C" else sign for sign in text)
    return clean if longest is None or len(clean) <= longest else clean[: longest - 1] + "…"


def _svg(draw: Callable[[Axes], None], height: float) -> str:
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(9.0, height), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(text.getvalue().encode()).decode()}"
