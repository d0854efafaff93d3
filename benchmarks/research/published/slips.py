"""What published scripts do that nobody would expect, and what is done instead: the tables of docs/suites.md.

python -m benchmarks.research.published.slips
"""

from __future__ import annotations

from benchmarks.research.published.suites import SUITES


def tables() -> str:
    """Markdown: a row for each scorer, with its tasks."""
    tasks: dict[int, list[str]] = {}
    rules = {}
    for suite in SUITES.values():
        for task in suite.tasks:
            for publisher, rule in task.rules.items():
                rules[id(rule)] = rule
                tasks.setdefault(id(rule), []).append(f"{suite.name} {task.name} ({publisher})")
    lines = ["| tasks (whose script) | as published | corrected |", "|---|---|---|"]
    for key, rule in rules.items():
        of = tasks[key] if len(tasks[key]) < 6 else [*tasks[key][:2], f"and {len(tasks[key]) - 2} more"]
        lines.append(f"| {', '.join(of)} | {'<br>'.join(rule.slips)} | {'<br>'.join(rule.differences)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
