"""Plots for a report, as `data:` addresses of images: the same numbers and matplotlib version give the same bytes.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines and bars differ in stroke or hatch
too. Numbers that are missing or not finite leave a gap.
"""

from __future__ import annotations

import base64
import io
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
STROKES = ("-", "--", "-.", ":")
LEVEL_STROKES = (":", "--")
HATCHES = ("", "///", "...", "xxx")
WIDTH = 9.0  # inches, of every figure
LONGEST_LABEL = 56  # characters
FEW_POINTS = 30  # up to here a line shows its points
DOTS_PER_INCH = 100
PALETTE = 64  # colours of a plot in pixels

Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what is measured, in which unit, and up to four series of it by name."""

    label: str
    series: Mapping[str, Numbers]
    levels: Mapping[str, float] = field(default_factory=dict)  # lines to compare with, by name
    limits: tuple[float, float] | None = None  # of the measured axis
    errors: Mapping[str, Numbers] = field(default_factory=dict)  # half the length of whiskers, by series; bars only
    digits: str = ".4g"  # the format of the number at a bar's end


def curves(positions: Sequence[float], position_label: str, panels: Sequence[Panel]) -> str:
    """Lines over `positions`, two panels in a row."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with _figure(height=0.4 + 2.4 * rows) as figure:
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            marker = "o" if len(positions) <= FEW_POINTS else ""
            for (name, values), colour, stroke in zip(panel.series.items(), COLOURS, STROKES, strict=False):
                axes.plot(
                    positions, finite(values), color=colour, linestyle=stroke, marker=marker, markersize=3, label=name
                )
            for (name, level), stroke in zip(panel.levels.items(), LEVEL_STROKES, strict=False):
                axes.axhline(level, color="black", linewidth=1, linestyle=stroke, label=name)
            axes.set(xlabel=position_label, ylabel=panel.label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if panel.limits:
                axes.set_ylim(panel.limits)
            _legend(axes, panel)
        return svg(figure)


def bars(names: Sequence[str], panels: Sequence[Panel], encode: Callable[[Figure], str] | None = None) -> str:
    """Horizontal bars, a group for each of `names` from the top down; panels stand side by side.

    Args:
        encode: `svg` (default) or `png`.
    """
    most = max(len(panel.series) for panel in panels)
    explained = max(_explained(panel) for panel in panels)
    with _figure(height=0.9 + len(names) * (0.16 + 0.24 * most) + 0.2 * math.ceil(explained / 2)) as figure:
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), number + 1)
            thickness = 0.8 / len(panel.series)
            for row, (name, values) in enumerate(panel.series.items()):
                centres = [place - 0.4 + (row + 0.5) * thickness for place in range(len(names))]
                lengths = finite(values)
                drawn = axes.barh(
                    centres,
                    [0.0 if math.isnan(length) else length for length in lengths],
                    height=0.9 * thickness,
                    xerr=[value or 0.0 for value in panel.errors[name]] if name in panel.errors else None,
                    error_kw={"elinewidth": 1, "capsize": 2},
                    color=COLOURS[row % len(COLOURS)],
                    hatch=HATCHES[row % len(HATCHES)],
                    edgecolor="white",
                    label=name,
                )
                ends = ["–" if math.isnan(length) else format(length, panel.digits) for length in lengths]
                axes.bar_label(drawn, ends, padding=3, fontsize=8)
            for (name, level), stroke in zip(panel.levels.items(), LEVEL_STROKES, strict=False):
                axes.axvline(level, color="black", linewidth=1, linestyle=stroke, label=name)
            axes.set_yticks(range(len(names)), [plain(name, LONGEST_LABEL) for name in names] if number == 0 else [])
            axes.set(xlabel=panel.label)
            axes.invert_yaxis()
            axes.margins(x=0.12, y=0.02)
            if panel.limits:
                axes.set_xlim(panel.limits)
            _legend(axes, panel)
        return (encode or svg)(figure)


def histogram(edges: Sequence[float], panel: Panel, value_label: str) -> str:
    """Outlines over the bins between `edges`, one for each series."""
    with _figure(height=2.9) as figure:
        axes = figure.add_subplot()
        for (name, values), colour, stroke in zip(panel.series.items(), COLOURS, STROKES, strict=False):
            axes.stairs(finite(values), edges, color=colour, linestyle=stroke, linewidth=1.6, label=name)
        axes.set(xlabel=value_label, ylabel=panel.label)
        _legend(axes, panel)
        return svg(figure)


def finite(values: Numbers) -> list[float]:
    """The values, with NaN for what is missing or not finite."""
    return [float(value) if value is not None and math.isfinite(value) else math.nan for value in values]


def plain(text: str, longest: int | None = None) -> str:
    """`text` without the characters that have no place in a document (controls, lone surrogates), and not too long."""
    clean = text
    if not text.isprintable():
        clean = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign)[0] == "C" else sign for sign in text)
    return clean if longest is None or len(clean) <= longest else clean[: longest - 1] + "…"


@contextmanager
def style() -> Iterator[None]:
    """Inside, whatever is drawn and saved has this module's fonts, grid and spines."""
    with (
        mpl.rc_context(
            {
                "font.family": ["sans-serif"],
                "font.size": 9,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "grid.alpha": 0.3,
                "axes.axisbelow": True,
                "axes.formatter.useoffset": False,
                "text.parse_math": False,  # names may hold a dollar sign
                "svg.fonttype": "none",  # the reader's fonts may have signs that ours has not
                "svg.hashsalt": "inducekv",  # ids of a drawing are random otherwise
            }
        ),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def svg(figure: Figure) -> str:
    """A figure as the address of an SVG image; inside `style`."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _address("image/svg+xml", text.getvalue().encode())


def png(figure: Figure) -> str:
    """A figure as the address of a PNG with few colours, which is smaller for many marks; inside `style`."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DOTS_PER_INCH)
    image = Image.open(data).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return _address("image/png", data.getvalue())


def _address(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


@contextmanager
def _figure(height: float) -> Iterator[Figure]:
    with style():
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def _explained(panel: Panel) -> int:
    """How many things a legend must tell apart; one alone needs none."""
    count = len(panel.series) + len(panel.levels)
    return count if count > 1 else 0


def _legend(axes: Axes, panel: Panel) -> None:
    if _explained(panel):
        # Above the axes, where nothing is drawn.
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
