"""What the pages say of research is true: commands begin, tables are complete, plots are those of the files."""

import itertools
from pathlib import Path

import pytest

from benchmarks.research.continual import __main__ as continual
from benchmarks.research.continual import run as stream_run
from benchmarks.research.continual import search
from benchmarks.research.figures import FIGURES, forgotten
from benchmarks.research.figures import main as draw
from benchmarks.research.published.slips import tables
from inducekv_vllm.errors import InduceKVError
from tests.pages import DOCS, RESEARCH, ROOT, commands, names, pages, section, subcommands


def begin_stream_benchmark(arguments: list[str]) -> None:
    """Up to where its work starts: read arguments and preset, and resolve the settings of its methods and trials."""
    subcommand, *rest = arguments
    shown = [*itertools.dropwhile(lambda word: not word.startswith("--"), rest)]
    if shown != rest and "--out" not in shown:  # RUN: options that the page spells out, --out among them
        shown += ["--out", "DIR"]
    options = continual.parse([subcommand, *shown])
    if options.command is continual.run_and_report:
        assert stream_run.methods_of(options)
    elif options.command is search.command:
        assert search.methods_of_trials(options)


@pages
def test_commands_of_the_stream_benchmark_begin(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    for words in commands(page):
        if words[:3] == ["python", "-m", "benchmarks.research.continual"]:
            try:
                begin_stream_benchmark(words[3:])
            except (SystemExit, InduceKVError) as ended:
                pytest.fail(f"{page}: {' '.join(words)}: {ended}")


def test_every_diagnostic_is_listed() -> None:
    listed = names(section(RESEARCH / "README.md", "### Diagnostics"))
    assert listed == set(subcommands("benchmarks.research.continual.diagnostics"))


def test_the_slips_of_published_scripts_are_quoted() -> None:
    assert tables() in (DOCS / "suites.md").read_text()


def test_the_page_of_results_shows_every_plot_of_the_files(tmp_path: Path) -> None:
    text = (DOCS / "results.md").read_text()
    assert draw(["--out", str(tmp_path)]) == 0
    for name in FIGURES:
        assert f"(images/{name}.svg)" in text
        drawn, kept = (tmp_path / f"{name}.svg").read_text(), (DOCS / "images" / f"{name}.svg").read_text()
        assert labels(drawn) == labels(kept), f"{name}: draw it again with python -m benchmarks.research.figures"


def labels(svg: str) -> list[str]:
    """The texts of a plot."""
    return [line.partition(">")[2].partition("</text>")[0] for line in svg.splitlines() if "</text>" in line]


def test_what_is_forgotten_by_hand() -> None:
    matrix = [[0.9, 0.0, 0.0], [0.5, 0.8, 0.0], [0.7, 0.6, 1.0]]
    assert forgotten(matrix, 1) == pytest.approx(0.4)
    assert forgotten(matrix, 2) == pytest.approx((0.2 + 0.2) / 2)
