"""Which tests run in one process, because they share a server or an engine, and how long each group takes.

`make test PYTEST_ARGS="-p tests.groups"` records the seconds anew.
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

# Files whose tests share a server or an engine are a group: those of `tests/server` without these, and ENGINE.
NO_SHARED_SERVER = ("api_key", "audit", "check", "launcher", "memory_helps", "pins", "registry", "several_processes")
NO_SHARED_SERVER += ("versions", "wheel")
ENGINE = ("tests/engine/test_memory_engine.py", "tests/server/test_registry.py")
SERVERS = ("tests/research/test_continual_http.py",)  # one more that shares their server
RECORDED = Path(__file__).with_name("durations.json")
LEAST = 5  # seconds that are worth a line


def group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if file in ENGINE:
        return "engine"
    if file in SERVERS:
        return "servers"
    test = file.removeprefix("tests/server/test_").removesuffix(".py")
    return file if "/" in test or test in NO_SHARED_SERVER else "servers"


@cache
def seconds_of() -> dict[str, int]:
    """By group, as they were recorded; a group that is not there is short."""
    return dict(json.loads(RECORDED.read_text()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[group_of(report.nodeid)] += report.duration
    longest = sorted(((round(took), group) for group, took in seconds.items() if took >= LEAST), reverse=True)
    RECORDED.write_text(json.dumps({group: took for took, group in longest}, indent=2) + "\n")
