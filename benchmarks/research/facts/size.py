"""How long a decision takes beside many facts, and how much memory these need.

python -m benchmarks.research.facts.size

The facts are codes of things whose names are made of ten syllables, so that many names are alike. A quarter of the
questions ask for one of them in other words, the others for something else. Times are of the processor; each size has
a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.machine import describe_machine
from inducekv_vllm.facts import QuestionIndex

SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "ta", "vo", "zi", "pe", "su")
SPREAD = 379_721  # without a common divisor with the number of names: neighbours are unlike
NAMES = 10**6
ASKED = 200  # of each kind
OTHERS = (
    "How do I bake bread with walnuts and honey?",
    "Could you tell me the wifi password of the Lyon office?",
    "What is the access code of Kalimo Zuta Station?",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=int, nargs="+", default=[100, 10_000, 100_000, NAMES])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/facts_size.json"))
    args = parser.parse_args()
    if not all(1 <= count <= NAMES for count in args.facts):
        parser.error(f"--facts must be from 1 to {NAMES}, found {args.facts}")
    rows = []
    for count in args.facts:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # its memory is that of these facts
            rows.append(pool.apply(measured, (count,)))
        print(json.dumps(rows[-1]), flush=True)
    args.output.write_text(json.dumps({"machine": describe_machine(), "sizes": rows}, indent=2) + "\n")
    return 0


def measured(count: int) -> dict[str, Any]:
    """Of so many facts: seconds to read them and one more, milliseconds of a decision, MB."""
    QuestionIndex(["What is the access code of Lima?"]).near("Which code has Lima?")  # the languages' files are read
    questions = [f"What is the access code of {name(number)}?" for number in range(count)]
    before = psutil.Process().memory_info().rss
    index, reads = timed(lambda: QuestionIndex(questions))
    megabytes = (psutil.Process().memory_info().rss - before) / 1e6
    _, more = timed(lambda: QuestionIndex([*questions, "What is the access code of Novaria Prime?"]))
    numbers = random.Random(0).choices(range(count), k=ASKED)
    known, found = [], 0
    for number in numbers:
        near, seconds = timed(partial(index.near, f"Tell me which access code {name(number)} has, please"))
        known.append(1e3 * seconds)
        found += [each.number for each in near if each.comparison.differs is None][:1] == [number]
    others = [1e3 * timed(partial(index.near, text))[1] for text in OTHERS * ASKED]
    return {
        "facts": count,
        "seconds_to_read": round(reads, 2),
        "seconds_with_one_more": round(more, 2),
        "found": found / ASKED,
        "ms_median": round(float(np.median(known + others)), 2),
        "ms_p99": round(float(np.percentile(known + others, 99)), 2),
        "megabytes": round(megabytes),
    }


def name(number: int) -> str:
    digits = f"{number * SPREAD % NAMES:06d}"
    first, last = ("".join(SYLLABLES[int(digit)] for digit in half) for half in (digits[:3], digits[3:]))
    return f"{first.title()} {last.title()}"


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


if __name__ == "__main__":
    raise SystemExit(main())
