"""Measures of a memory, against what they are by hand."""

from __future__ import annotations

import math

import pytest
import torch

from inducekv_vllm.bundle import EntryRecord
from selector.update.measures import composition, diversity


def test_diversity_of_orthogonal_and_of_equal_keys() -> None:
    apart, alike = diversity(torch.eye(4)), diversity(torch.eye(4)[[0, 0, 0, 0]])
    assert apart["cosine_mean"] == 0
    assert alike["cosine_quantiles"]["0.5"] == 1
    assert apart["logdet"] == pytest.approx(4 * math.log(1 / 4 + 1e-3))
    assert apart["logdet"] > alike["logdet"]
    assert sum(apart["cosine_histogram"]["counts"]) == sum(alike["cosine_histogram"]["counts"]) == 6
    assert set(diversity(torch.eye(4)[:1])) == {"logdet"}


def test_composition_counts_tasks() -> None:
    records = [EntryRecord(id=str(i), task=task, source_digest="x") for i, task in enumerate("aabca")]
    assert composition(records) == {"a": 3, "b": 1, "c": 1}
