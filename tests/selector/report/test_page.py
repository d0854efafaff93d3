"""The page, taken apart by a parser: what is on it, what is left out, and that nothing on it runs or loads."""

from __future__ import annotations

import base64
import copy
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from selector.report.page import render_html
from tests.selector.stream import PAPER, REFINED, Stream, without_plots

HISTOGRAM = {"counts": [0, 3, 7, 0], "edges": [-1.0, -0.5, 0.0, 0.5, 1.0]}
DIVERSITY = {
    "logdet": -12.5,
    "cosine_mean": 0.1,
    "cosine_quantiles": {"0.05": -0.2, "0.5": 0.1, "0.95": 0.4},
    "cosine_histogram": HISTOGRAM,
}
CALIBRATION = {"temperature": 0.07, "value_gate": 0.5}
ITERATION = CALIBRATION | {"anchors": 3.0, "coverage": 20.0, "support": 30, "effective": 20.5}
STEP = CALIBRATION | {"anchors": None, "distillation": 0.5}
# Every section the refined recipe can report; the numbers are told apart by their digits.
FULL: dict[str, Any] = {
    "recipe": "refined",
    "digest": "d" * 64,
    "parent_digest": "e" * 64,
    "settings": {"budget": 8, "beta": 0.3, "gamma": 0.05, "weighting": "prior"},
    "pool": {"training_examples": 40, "candidates": 30, "validation_examples": 16, "anchors": 4},
    "grid": [
        {"beta": 0.3, "gamma": 0.0, "validation_nll": 2.25},
        {"beta": 0.3, "gamma": 0.05, "validation_nll": 2.125},
    ],
    "history": [ITERATION | {"objective": 9.0 - step, "current": 5.0 - step} for step in range(3)],
    "calibration": {"temperature": 0.0625, "value_gates": [0.5, 0.75], "layer_bias": [-1.0, 0.0]},
    "rounding": {
        "selected": 8,
        "support": 30,
        "effective_entries": 20.5,
        "mass_captured": 0.375,
        "selected_without_weight": 0,
        "collapsed": False,
        "retrieval_divergence_nats": 0.4375,
    },
    "diversity": {"selected": DIVERSITY, "random": DIVERSITY, "selected_with_gamma_0": DIVERSITY},
    "composition": {"before": {"colours": 8}, "after": {"colours": 5, "counts": 3}},
    "gate": {
        "tasks": ["colours", "counts"],
        "thresholds": [0.8125, 0.6875],
        "openings": [
            {"task": "counts", "split": "validation", "questions": 16, "opened": 1.0, "routed_to_own_task": 0.9375},
            {"task": "colours", "split": "anchors", "questions": 4, "opened": 0.75, "routed_to_own_task": 0.5},
            {"task": "base", "split": "base", "questions": 64, "opened": 0.015625, "routed_to_own_task": None},
        ],
    },
    "refinement": {
        "search": [
            {"learning_rate": 0.001, "validation_nll": 1.75, "validation_accuracy": 0.3125},
            {"learning_rate": 0.01, "validation_nll": 1.5, "validation_accuracy": None},
        ],
        "history": [STEP | {"step": 10 * s, "current": 4.0 - s, "layer_bias": -0.1 * s} for s in range(3)],
    },
    "memory_bytes": 2048,
    "validation_nll": {"no_memory": 4.0, "relaxed": 2.5, "deployed": 3.0, "rounding_gap": 0.5},
    "validation_accuracy": {"no_memory": 0.25, "deployed": 0.5},
    "phases": [
        {"name": "extract", "seconds": 1.25, "peak_bytes": 3 * 2**20},
        {"name": "select", "seconds": 2.5, "peak_bytes": 5 * 2**20},
    ],
    "storage": {"memory_bytes": 2048, "anchor_bytes": 1024, "anchors": 4},
}
# The page's sections, and the parts of the report each is made from.
SECTIONS = {
    "entries-by-task": ("composition",),
    "relevance-gate": ("gate",),
    "selection-losses": ("history",),
    "calibration": ("history", "calibration"),
    "rounding": ("history", "rounding", "validation_nll"),
    "refinement": ("refinement",),
    "diversity": ("diversity",),
    "search": ("grid", "refinement"),
    "storage": ("storage",),
    "time-and-memory": ("phases",),
    "provenance": ("digest", "parent_digest", "pool", "settings"),
}


class Page:
    """A page, read as XML once its void tags are closed: this fails where another tag is not closed in its place."""

    def __init__(self, html: str) -> None:
        root = ElementTree.fromstring(re.sub(r"<((?:meta|img) [^>]*)>", r"<\1/>", html))
        nodes = list(root.iter())
        assert not any(name.startswith("on") for node in nodes for name in node.attrib), "no scripts"
        self.tags = {node.tag for node in nodes}
        # Figures, tables, the paragraph and sections, in their order.
        self.blocks = [node.tag for node in nodes if node.tag in ("figure", "table", "p", "section")]
        self.sections = [node.attrib["id"] for node in root.iter("section")]
        # Of anything a browser could fetch.
        fetching = ("src", "href", "srcset", "action", "data")
        self.addresses = [node.attrib[name] for node in nodes for name in fetching if name in node.attrib]
        self.rows = [[text(cell) for cell in row] for row in root.iter("tr")]
        self.chosen = [[text(cell) for cell in row] for row in root.iter("tr") if row.get("class") == "chosen"]
        self.text = text(root.find("body"))
        summary = next(node for node in root.iter("p") if "summary" in node.get("class", ""))
        self.summary, self.verdict = text(summary), summary.attrib["class"].removeprefix("summary ")
        # By their alternative text.
        self.plots = {node.attrib["alt"]: ElementTree.fromstring(image(node)) for node in root.iter("img")}
        assert len(self.plots) == len(list(root.iter("img")))


def text(node: ElementTree.Element) -> str:
    return "".join(node.itertext())


def image(node: ElementTree.Element) -> bytes:
    kind, data = node.attrib["src"].split(",", 1)
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(data)


def page(report: dict[str, Any]) -> Page:
    return Page(render_html(report))


def words(plot: ElementTree.Element) -> list[str]:
    """The texts of a plot: labels of axes, series and bars."""
    return [text(node) for node in plot.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(FULL)


@pytest.fixture(scope="module")
def full(html: str) -> Page:
    return Page(html)


def test_the_page_opens_with_a_chart_a_table_and_a_short_paragraph(full: Page, html: str) -> None:
    assert full.blocks[:4] == ["figure", "table", "p", "section"]
    assert len(full.summary) < 6 * 105
    assert len(html) < 1_000_000


def test_a_full_report_has_every_section_and_explains_every_plot(full: Page) -> None:
    assert full.sections == list(SECTIONS)
    assert len(full.plots) == 12
    assert all(f"{title}." in full.text for title in full.plots)
    for title, plot in full.plots.items():
        drawn = words(plot)
        measured = ("(nats)", "(%)", "entries", "temperature", "candidates", "MiB", "(s)", "gate")
        assert any(unit in word for word in drawn for unit in measured), title


@without_plots()
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_without_numbers_is_left_out(section: str) -> None:
    used = SECTIONS[section]
    only = {name: FULL[name] for name in used}
    expected = [name for name, sources in SECTIONS.items() if set(sources) & set(used)]
    assert section in expected
    assert page(only).sections == expected
    assert page(dict.fromkeys(FULL) | only).sections == expected


def test_a_report_of_almost_nothing() -> None:
    bare = page({"recipe": "paper"})
    assert (bare.sections, bare.blocks, bare.verdict) == ([], ["p"], "open")
    assert "does not compare" in bare.summary


def test_the_summary_states_whether_the_memory_helps_and_by_how_much(full: Page) -> None:
    assert full.verdict == "better"
    assert "refined recipe" in full.text
    assert "8 entries of 2 tasks in 2.00 KiB" in full.summary
    assert "16 validation questions the memory is better than no memory" in full.summary
    assert "3.000 nats with it, 4.000 without, 1.000 (25.0%) lower" in full.summary
    assert "answered right: 50.0% with it, 25.0% without, 25.0 percentage points more" in full.summary


@without_plots()
def test_the_summary_admits_that_the_memory_does_not_help() -> None:
    def with_losses(without: float, bundled: float, **more: Any) -> Page:
        return page({"recipe": "paper", "validation_nll": {"no_memory": without, "deployed": bundled}} | more)

    worse = with_losses(2.0, 2.5, validation_accuracy={"no_memory": 1, "deployed": 0})
    assert worse.verdict == "worse"
    assert "no better than no memory" in worse.summary
    assert "0.5000 (25.0%) higher" in worse.summary
    assert "100.0 percentage points fewer" in worse.summary
    equal = with_losses(2.0, 2.0)
    assert equal.verdict == "worse"
    assert "the same" in equal.summary
    assert with_losses(2.0, math.nan).verdict == "open"


def test_tables_hold_the_reports_numbers(full: Page) -> None:
    for row in (
        ["no memory", "4", "25"],
        ["relaxed memory", "2.5", "–"],
        ["bundled memory", "3", "50"],
        ["colours", "8", "5"],
        ["counts", "0", "3"],
        ["counts", "validation", "16", "100", "93.75"],
        ["base", "base", "64", "1.562", "–"],
        ["counts", "0.6875"],
        ["weight held by the selected entries (%)", "37.5"],
        ["Jensen-Shannon divergence of relaxed and bundled retrieval (nats, 0 to 0.693)", "0.4375"],
        ["NLL of the bundled memory minus that of the relaxed one (nats)", "0.5"],
        ["selected with gamma = 0", "-12.5", "0.1", "-0.2", "0.1", "0.4"],
        ["memory", "2,048", "2.00 KiB", "8"],
        ["anchors", "1,024", "1.00 KiB", "4"],
        ["training examples", "40"],
        ["weighting", "prior"],
    ):
        assert row in full.rows
    assert full.chosen == [["0.3", "0.05", "2.125"], ["0.01", "1.5"]]


def test_plots_show_the_reports_numbers(full: Page) -> None:
    plots = full.plots
    validation = words(plots["Does it help: the validation questions"])
    assert {"no memory", "relaxed memory", "bundled memory", "4", "2.5", "3", "25.0", "50.0", "–"} <= set(validation)
    assert {"37.5", "62.5"} <= set(words(plots["Share of the selection weight that the selected entries hold"]))
    gate = words(plots["Share of questions that open the relevance gate, by task"])
    assert {"counts (validation)", "base (base)", "100.0", "93.8", "1.6", "–"} <= set(gate)
    assert "target for base tasks: at most 2%" in gate
    refined = words(plots["Losses and calibration in each step of the refinement"])
    assert "distillation loss (nats)" in refined
    assert "anchors, NLL (nats)" not in refined  # there were none


@without_plots()
def test_a_collapse_is_reported() -> None:
    assert "Collapsed" not in page({"rounding": FULL["rounding"]}).text
    assert "Collapsed" in page({"rounding": FULL["rounding"] | {"collapsed": True}}).text


NAMES = (
    "<script>alert(1)</script>",
    '"><img src=http://example.com/x onerror=alert(1)>',
    "&amp; ' \" </table>",
    r"$\frac{$ x_1^2",  # would be a formula, and a wrong one
    "任务 🙂",
    "a\x00b\x1b\ud800c\nd",  # none of these may stand in XML; a surrogate cannot be encoded
    "x" * 5000,
)


@pytest.mark.parametrize("name", NAMES, ids=["script", "attribute", "entities", "formula", "signs", "controls", "long"])
def test_names_are_text_wherever_they_stand(name: str, full: Page) -> None:
    report = copy.deepcopy({part: FULL[part] for part in ("gate", "phases", "settings", "pool")})
    report["recipe"] = name
    report["composition"] = {"before": {}, "after": {name: 8}}
    report["gate"]["tasks"][0] = name
    report["gate"]["openings"][0] |= {"task": name, "split": name}
    report["phases"][0]["name"] = name
    report["settings"]["weighting"] = name
    report["pool"][name] = 3
    rendered = render_html(report)
    parsed = Page(rendered)
    expected = name.replace("a\x00b\x1b\ud800c\nd", "a\ufffdb\ufffd\ufffdc\ufffdd")
    assert rendered.encode()
    assert [expected, "0", "8"] in parsed.rows
    assert ["weighting", expected] in parsed.rows
    assert f"Memory report: {expected} recipe" in parsed.text
    assert parsed.tags <= full.tags
    assert len(parsed.plots) == 3
    start = expected[:31]
    assert any(word.startswith(start) for word in words(parsed.plots["Time and peak memory of each phase"]))


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, -math.inf], ids=str)
def test_numbers_that_are_none(wrong: float | None) -> None:
    """Wherever a number may stand."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: inner if key == "edges" else spoilt(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [spoilt(inner) for inner in value]
        return wrong if isinstance(value, float) else value

    spoilt_page = page(spoilt(FULL))
    assert spoilt_page.verdict == "open"
    assert "storage" in spoilt_page.sections
    assert "selection-losses" not in spoilt_page.sections  # of the history only `support` is left, a whole number
    cell = {None: "–", math.inf: "infinite", -math.inf: "infinite"}.get(wrong, "not a number")
    assert ["counts", cell] in spoilt_page.rows


def test_a_gap_in_a_history_is_a_gap() -> None:
    history = [dict(one) for one in FULL["history"]]
    whole = page({"history": history})
    history[1]["current"] = math.nan
    broken = page({"history": history})
    assert list(broken.plots) == list(whole.plots)
    losses = "Losses in each iteration of the selection"
    assert words(broken.plots[losses]).count("current task, NLL (nats)") == 1
    assert ElementTree.tostring(broken.plots[losses]) != ElementTree.tostring(whole.plots[losses])


def test_nothing_is_fetched_and_nothing_runs(full: Page, html: str) -> None:
    assert full.addresses
    assert all(address.startswith("data:image/svg+xml;base64,") for address in full.addresses)
    assert not full.tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert "default-src 'none'" in html
    assert not [text for text in ("http://", "https://", "url(") if text in html]
    for plot in full.plots.values():
        for node in plot.iter():
            assert not node.tag.endswith(("script", "image", "foreignObject"))
            links = [value for name, value in node.attrib.items() if name.endswith("href")]
            assert all(link.startswith("#") for link in links)


def test_the_same_report_gives_the_same_page_in_another_process(html: str) -> None:
    code = "import json, sys; from selector.report.page import render_html; print(render_html(json.load(sys.stdin)))"
    again = subprocess.run([sys.executable, "-c", code], input=json.dumps(FULL), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == html.strip()
    assert not again.stderr


def real_page(stream: Stream, *options: str) -> tuple[Page, dict[str, Any]]:
    """The page that an update writes, and its report."""
    replace(stream, options=options, plots=True).update("colours")
    html = (stream.folder / "colours.report.html").read_text()
    assert html.startswith("<!DOCTYPE html>")
    return Page(html), stream.report("colours")


def test_the_page_of_a_real_run(stream: Stream) -> None:
    real, report = real_page(stream, *PAPER, "--beta", "0.5")
    missing = {"relevance-gate", "refinement"}
    assert real.sections == [section for section in SECTIONS if section not in missing]
    assert "3 entries of 1 task" in real.summary
    assert ["colours", "0", "3"] in real.rows
    loss = report["validation_nll"]
    assert real.verdict == ("better" if loss["deployed"] < loss["no_memory"] else "worse")
    assert [row[1] for row in real.chosen] == [f"{report['settings']['gamma']:.4g}"]
    assert ["digest", report["digest"]] in real.rows


def test_the_page_of_a_real_refined_run(stream: Stream) -> None:
    real, report = real_page(stream, *REFINED)
    missing = {"selection-losses", "rounding", "search"}
    assert real.sections == [section for section in SECTIONS if section not in missing]
    assert ["colours", "0", "4"] in real.rows
    assert ["digest", report["digest"]] in real.rows
