"""Which entries each test question retrieves, beside whether it was answered rightly, with memory and without.

What a question can retrieve are all entries, or behind a relevance gate those of the task that it is sent to; where the
gate is closed there is no retrieval. Entries are ranked by cosine similarity with the question's full-prefix key.

Letters: n questions, B entries, k of them retrieved, d hidden size.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone.injection import routing


@dataclass(frozen=True)
class Retrieval:
    """What one question finds in the memory."""

    gap: float  # g(x) = s_(1) - s_(2) of the two largest similarities (paper, Eq. sim_gap); NaN where one entry is all
    hits: int  # of the retrieved entries, those of the question's own task
    retrieved: int  # k, or fewer where there are not so many

    @property
    def is_cross_task(self) -> bool:
        """Whether most of what is retrieved is of other tasks."""
        return 2 * self.hits < self.retrieved


@dataclass(frozen=True)
class Judged:
    """A question that got memory, and both answers to it."""

    task: str
    retrieval: Retrieval
    right: bool  # with memory
    right_without: bool  # of the untouched model

    @property
    def gain(self) -> int:
        """Delta(x), of exact match: -1, 0 or 1 (paper, Eq. per_example_gain)."""
        return self.right - self.right_without


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--top-k", type=int, default=8, help="entries that count as retrieved (default %(default)s)")


def retrievals(bundle: Bundle, query_keys: Tensor, task: str, top_k: int) -> list[Retrieval | None]:
    """Of n questions of `task`, by their query keys [n, 2, d]; None where the gate is closed."""
    opened, log_prior = routing(bundle, query_keys)  # [n], [n, B]
    scores = query_keys[:, 0] @ bundle.retrieval_keys.to(query_keys).T + log_prior  # [n, B], -inf for other tasks'
    ranked, entries = scores.sort(dim=1, descending=True, stable=True)
    tasks = [entry.task for entry in bundle.metadata.entries]
    found: list[Retrieval | None] = []
    for is_open, similarities, order in zip(opened.tolist(), ranked.tolist(), entries.tolist(), strict=True):
        available = sum(similarity > -math.inf for similarity in similarities)
        retrieved = order[: min(top_k, available)]
        gap = similarities[0] - similarities[1] if available > 1 else math.nan
        hits = sum(tasks[entry] == task for entry in retrieved)
        found.append(Retrieval(gap, hits, len(retrieved)) if is_open else None)
    return found


def judge(finished: Finished, runs: Sequence[FinishedRun], top_k: int) -> tuple[list[Judged], int]:
    """All test questions of all tasks after the last one, in every run: those that got memory, and how many did not.

    Raises:
        ConfigError: `top_k` below 1, or what is missing in the runs.
    """
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, found {top_k}")
    judged, closed = [], 0
    for run in runs:
        bundle = run.bundle()
        answered = {(mine.task, mine.id): (mine.right, plain.right) for mine, plain in finished.paired(run)}
        for task in finished.suite.tasks:
            found = retrievals(bundle, finished.query_keys(task), task.name, top_k)
            for example, retrieval in zip(task.test, found, strict=True):
                if retrieval is None:
                    closed += 1
                else:
                    judged.append(Judged(task.name, retrieval, *answered[task.name, example.id]))
    return judged, closed
