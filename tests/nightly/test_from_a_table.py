"""`benchmarks.from_a_table` asks two real servers, one with memory and one with LoRA."""

from pathlib import Path

import pytest

from benchmarks.from_a_table import __main__ as command
from benchmarks.from_a_table import learned
from benchmarks.from_a_table.asked import WITHOUT_ADAPTER, ask_all
from selector.data.examples import read_task
from selector.data.records import Columns
from server.demo import CHECKPOINT

pytestmark = pytest.mark.slow
FEW = {"steps": 2, "batch_size": 4, "learning_rate": 0.1, "activation": "generation"}


def test_both_servers_answer(tmp_path: Path) -> None:
    columns = Columns("ticket", "team", task="support")
    rows = learned.Rows(CHECKPOINT, read_task(command.TABLES / "train.csv", columns)[:20], ())
    made = {
        "untouched": learned.untouched,
        "memory": learned.by_memory(FEW),
        "retrieved rows in the prompt": learned.by_retrieval,
        "LoRA, rank 2": learned.by_lora(2, steps=2),
    }
    ways = [learned.learned(name, learn, rows, tmp_path) for name, learn in made.items()]
    found, times = ask_all(
        *(CHECKPOINT, ways, rows.rows[:3], rows.rows[:1], (100, 200), 1, tmp_path), serve_args=("--enforce-eager",)
    )
    assert found.keys() == made.keys()
    assert all(each.keys() == {"right", "base_right"} for each in found.values())
    assert {row["way"] for row in times} == {*made, WITHOUT_ADAPTER}
    assert all(row["ttft_ms"] > 0 and row["requests"] == 1 for row in times)
    tokens = {(row["way"], row["length"]): row["prompt_tokens"] for row in times}
    retrieved = "retrieved rows in the prompt"
    for way in {*made, WITHOUT_ADAPTER} - {retrieved}:  # each has questions of its own, alike but for a sentence
        assert 100 <= tokens[way, 100] < 200 <= tokens[way, 200]
        assert all(tokens[retrieved, length] > tokens[way, length] for length in (100, 200))
    assert all(("opened" in row) == (row["way"] == "memory") for row in times)
