"""The paper's tables as data: each row whole, and what the text says about them."""

import pytest

from benchmarks.research.published.paper import MIXED, TABLES
from benchmarks.research.published.suites import SUITES


def test_rows_are_whole() -> None:
    assert TABLES.keys() <= SUITES.keys()
    for tables in TABLES.values():
        for table in tables:
            assert len({row[:2] for row in table.rows}) == len(table.rows)
            assert all(len(row) == 2 + len(table.columns) for row in table.rows)


def test_the_overall_column_is_the_mean_of_three_domains() -> None:
    (table,) = TABLES["domain"]
    for _, _, *domains, overall in table.rows:
        assert sum(domains) / 3 == pytest.approx(overall, abs=0.0051)


def test_figures_contradict_the_words_on_last() -> None:
    """A fine-tuned model cannot be worse on the task that it has just learned than on average over the stream."""
    (table,) = TABLES["ucit"]
    assert next(row[2:] for row in table.rows if row[0] == "FineTune") == (57.52, 48.12)


def test_the_mixed_column_is_marked() -> None:
    (table,) = TABLES["vqa10"]
    assert MIXED in table.notes
    assert min(row[3] for row in table.rows) == -0.02
