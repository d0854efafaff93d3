"""The page, taken apart by a parser: what is on it, and that nothing on it runs or loads."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from selector.report.page import render_html
from tests.unit.selector.stream import Stream

REPORT: dict[str, Any] = {
    "recipe": "refined",
    "digest": "d" * 64,
    "pool": {"validation_examples": 16},
    "composition": {"before": {"colours": 8}, "after": {"colours": 5, "counts": 3}},
    "gate": {
        "openings": [
            {"task": "counts", "split": "validation", "questions": 16, "opened": 1.0, "routed_to_own_task": 0.9375},
            {"task": "base", "split": "base", "questions": 64, "opened": 0.015625, "routed_to_own_task": None},
        ],
    },
    "refinement": {"history": [{"step": step, "current": 4.0 - step} for step in range(3)]},
    "memory_bytes": 2048,
    "validation_nll": {"no_memory": 4.0, "relaxed": 2.5, "deployed": 3.0, "rounding_gap": 0.5},
    "validation_accuracy": {"no_memory": 0.25, "deployed": 0.5, "most_frequent_answer": 0.375},
}
ANSWERS = {
    "right": [{"question": "red?", "expected": "yes", "without": "no", "with_memory": "yes"}],
    "wrong": [{"question": "<b>blue?", "expected": "yes", "without": "no", "with_memory": "x" * 999}],
}
SEARCH = [
    {"activation": "generation", "first_layer": 2, "learning_rate": 0.1, "steps": 200, "nll": 0.5},
    {"activation": "text", "first_layer": 0, "learning_rate": 0.3, "steps": 13, "nll": 1.25},
]
LOSS, OPENINGS = "Loss of each step", "Questions that open the relevance gate"


class Page:
    """A page, read as XML once its void tags are closed: this fails where another tag is not closed in its place."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.html = render_html(report)
        root = ElementTree.fromstring(re.sub(r"<((?:meta|img) [^>]*)>", r"<\1/>", self.html))
        nodes = list(root.iter())
        assert not any(name.startswith("on") for node in nodes for name in node.attrib), "no scripts"
        self.tags = {node.tag for node in nodes}
        # Of anything a browser could fetch.
        fetching = ("src", "href", "srcset", "action", "data")
        self.addresses = [node.attrib[name] for node in nodes for name in fetching if name in node.attrib]
        self.rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
        (summary,) = root.iter("p")
        self.summary, self.verdict = "".join(summary.itertext()), summary.attrib["class"].removeprefix("summary ")
        # By the beginning of their alternative text.
        self.plots = {node.attrib["alt"].split(",")[0].split(":")[0]: plot(node) for node in root.iter("img")}


def plot(node: ElementTree.Element) -> ElementTree.Element:
    kind, data = node.attrib["src"].split(",", 1)
    assert kind == "data:image/svg+xml;base64"
    return ElementTree.fromstring(base64.b64decode(data))


def words(drawn: ElementTree.Element) -> list[str]:
    """The texts of a plot: labels of axes and bars."""
    return ["".join(node.itertext()) for node in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_a_paragraph_a_table_and_two_plots() -> None:
    page = Page(REPORT)
    assert page.verdict == "better"
    assert "16 validation questions the memory is better than no memory" in page.summary
    assert "3 nats with it and 4 without" in page.summary
    assert "50.0% with it and 25.0% without" in page.summary
    assert "colours (5), counts (3)" in page.summary
    assert page.rows[1:] == [
        ["without memory", "4", "25"],
        ["relaxed memory", "2.5", "–"],
        ["bundled memory", "3", "50"],
        ["always the most frequent answer", "–", "37.5"],
    ]
    assert list(page.plots) == [LOSS, OPENINGS]
    assert "loss (nats)" in words(page.plots[LOSS])
    assert {"counts (validation)", "base (base)", "1.562"} <= set(words(page.plots[OPENINGS]))


def test_the_model_the_trainings_and_some_answers() -> None:
    base = {"questions": 48, "no_memory": 0.75, "deployed": 0.5}
    page = Page(REPORT | {"model": "m/x", "activation": {"search": SEARCH}, "answers": ANSWERS, "base_accuracy": base})
    assert "Model: m/x." in page.summary
    assert "Of 48 base questions, to which the gate was fitted, 50% are answered right with it and 75%" in page.summary
    assert page.rows[6:8] == [["generation from layer 2", "0.1", "200", "0.5"], ["text", "0.3", "13", "1.25"]]
    assert page.rows[9] == ["red?", "yes", "yes", "no"]
    assert page.rows[11][0] == "<b>blue?"
    assert len(page.rows[11][2]) == 300


def test_the_summary_admits_that_the_memory_does_not_help() -> None:
    worse = Page({"validation_nll": {"no_memory": 2.0, "deployed": 2.5}})
    assert worse.verdict == "worse"
    assert "no better than no memory" in worse.summary
    assert not worse.plots


def test_a_report_of_almost_nothing() -> None:
    for report in ({"recipe": "paper"}, dict.fromkeys(REPORT)):
        bare = Page(report)
        assert (bare.verdict, bare.rows, bare.plots) == ("open", [], {})
        assert "does not compare" in bare.summary


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf], ids=str)
def test_a_number_that_is_none_is_a_dash_and_a_gap(wrong: float | None) -> None:
    history = [{"current": 4.0}, {"current": wrong}, {"current": 2.0}]
    losses = {"no_memory": wrong, "deployed": 3.0}
    page = Page({"refinement": {"history": history}, "validation_nll": losses, "memory_bytes": wrong})
    assert page.verdict == "open"
    assert ["without memory", "–", "–"] in page.rows
    assert list(page.plots) == [LOSS]


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
def test_names_are_text_wherever_they_stand(name: str) -> None:
    opening = {"task": name, "split": name, "opened": 0.5}
    composition = {"before": {"other": 8}, "after": {name: 8}}
    for gate in ({"openings": [opening, opening]}, None):
        page = Page(REPORT | {"recipe": name, "composition": composition, "gate": gate})
        expected = name.replace("a\x00b\x1b\ud800c\nd", "a\ufffdb\ufffd\ufffdc\ufffdd")
        assert page.html.encode()
        assert f"{expected} (8)" in page.summary
        assert page.tags == Page(REPORT).tags
        assert any(word.startswith(expected[:31]) for word in words(list(page.plots.values())[-1]))


def test_nothing_is_fetched_and_nothing_runs() -> None:
    page = Page(REPORT)
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert "default-src 'none'" in page.html
    assert not [text for text in ("http://", "https://", "url(") if text in page.html]
    for drawn in page.plots.values():
        for node in drawn.iter():
            assert not node.tag.endswith(("script", "image", "foreignObject"))
            links = [value for name, value in node.attrib.items() if name.endswith("href")]
            assert all(link.startswith("#") for link in links)


def test_the_page_of_a_real_run(stream: Stream) -> None:
    replace(stream, plots=True).update("colours")
    html, report = (stream.folder / "colours.report.html").read_text(), stream.report("colours")
    assert html == render_html(report)
    page = Page(report)
    loss = report["validation_nll"]
    assert page.verdict == ("better" if loss["deployed"] < loss["no_memory"] else "worse")
    assert "colours (3)" in page.summary
    assert report["digest"] in page.summary
    assert list(page.plots) == [LOSS]
