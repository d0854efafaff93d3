"""Shares of the budget by task."""

from __future__ import annotations

import pytest

from inducekv_vllm.errors import ConfigError
from selector.refined.entries import quotas


def test_every_task_gets_its_entries_while_the_budget_holds_them() -> None:
    assert quotas({}, "a", budget=32, entries_per_task=8) == {"a": 8}
    assert quotas({"a": 8, "b": 8, "c": 8}, "d", budget=32, entries_per_task=8) == dict.fromkeys("abcd", 8)


def test_one_task_too_many_halves_all_shares() -> None:
    assert quotas(dict.fromkeys("abcd", 8), "e", budget=32, entries_per_task=8) == dict.fromkeys("abcde", 4)


def test_a_task_that_holds_less_than_its_share_keeps_what_it_holds() -> None:
    assert quotas({"a": 2, "b": 8}, "c", budget=12, entries_per_task=8) == {"a": 2, "b": 4, "c": 4}
    assert quotas({"a": 2, "b": 2}, "c", budget=8, entries_per_task=4) == {"a": 2, "b": 2, "c": 4}


@pytest.mark.parametrize("entries_per_task", [1, 2, 3, 5, 8, 13])
def test_a_stream_never_exceeds_the_budget_and_shares_only_shrink(entries_per_task: int) -> None:
    budget, held = 21, {}
    for task in range(21):
        after = quotas(held, str(task), budget=budget, entries_per_task=entries_per_task)
        assert sum(after.values()) <= budget
        assert all(1 <= after[name] <= count for name, count in held.items())
        held = after


def test_a_budget_below_one_entry_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget of 2 is below one entry for each of 3 tasks"):
        quotas({"a": 1, "b": 1}, "c", budget=2, entries_per_task=4)
    with pytest.raises(ConfigError, match="at least one entry"):
        quotas({}, "a", budget=4, entries_per_task=0)
