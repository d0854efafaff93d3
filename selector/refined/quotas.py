"""How many entries each task of a memory may keep: a fixed number, halved for all when the budget does not hold them.

Halved, and not cut to the last entry: a share of 8 becomes 4 once for all tasks, instead of 7, 6 and 5 on the way, and
each time a task's share shrinks its entries have to be consolidated.
"""

from __future__ import annotations

from collections.abc import Mapping

from inducekv_vllm.errors import ConfigError


def quotas(before: Mapping[str, int], arriving: str, *, budget: int, entries_per_task: int) -> dict[str, int]:
    """Entries by task once the task `arriving` has its own, in the order of the stream.

    Args:
        before: entries by task as they are; the arriving task is not among them.
        budget: B, of all tasks together.
        entries_per_task: the most that any task gets.

    Raises:
        ConfigError: the budget is below one entry a task, or a number is below 1.
    """
    if entries_per_task < 1 or budget < 1:
        raise ConfigError(f"a task needs at least one entry: found {entries_per_task} a task, and a budget of {budget}")
    assert arriving not in before
    share = entries_per_task
    while share + sum(min(count, share) for count in before.values()) > budget:
        share //= 2
        if share == 0:
            raise ConfigError(f"the budget of {budget} is below one entry for each of {len(before) + 1} tasks")
    return {task: min(count, share) for task, count in before.items()} | {arriving: share}
