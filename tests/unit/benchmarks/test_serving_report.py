"""The tables of the serving benchmark: medians, ratios and targets, and what is not counted in them."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import report

BASES = {"idle": {"x": "none"}, "lora_none": {"x": "none"}, "lora": {"x": "none", "x_own": "lora_none"}}


def block(method: str, *ttfts: float, tpot: float = 0.01, seconds: float = 2.0, **more: Any) -> report.Block:
    requests = [[ttft, tpot, 256, 10] for ttft in ttfts]
    return {"cell": "c1_p256", "method": method, "pass": 0, "seconds": seconds, "requests": requests} | more


def test_medians_are_over_requests_and_throughput_over_blocks() -> None:
    row = report.summarize([block("none", 0.1, 0.3, seconds=2.0), block("none", 0.2, 5.0, seconds=4.0)])
    assert (row["requests"], row["prompt_tokens"]) == (4, 256)
    assert row["ttft_ms"] == pytest.approx(250)
    assert row["tpot_ms"] == pytest.approx(10)
    assert row["tokens_per_s"] == pytest.approx((10 + 5) / 2)


def test_a_method_is_compared_with_no_plugin_and_with_its_own_server() -> None:
    blocks = {"none": [block("none", 0.1)], "lora_none": [block("lora_none", 0.2)]}
    blocks["lora"] = [block("lora", 0.3, tpot=0.012, seconds=4.0)]
    rows = report.tabulate(blocks, BASES)
    assert rows["lora"]["x"] == pytest.approx([3, 1.2, 0.5])
    assert rows["lora"]["x_own"] == pytest.approx([1.5, 1.2, 0.5])
    assert rows["lora_none"]["x"] == pytest.approx([2, 1, 1])
    assert "x" not in rows["none"]
    assert "x" not in report.tabulate({"lora": blocks["lora"]}, BASES)["lora"]  # its bases were not measured


@pytest.mark.parametrize(("ttft", "met"), [(0.1019, True), (0.1021, False)])
def test_targets_are_judged_in_the_cells_that_they_are_for(ttft: float, met: bool) -> None:
    rows = report.tabulate({"none": [block("none", 0.1)], "idle": [block("idle", ttft)]}, BASES)
    reached = report.check_targets({"c1_p256": rows, "c8_p256": rows})
    assert [(target["cell"], target["metric"], target["met"]) for target in reached] == [
        ("c1_p256", "ttft_ms", met),
        ("c1_p256", "tpot_ms", True),
    ]


def test_warm_up_and_failed_blocks_are_kept_and_not_counted(tmp_path: Path) -> None:
    record = report.Record(tmp_path / "serving.json", {}, BASES)
    record.keep(block("none", 9.0, **{"pass": -1}))
    record.keep(block("idle", failed=["HTTP 500: a", "HTTP 500: b"]))
    assert record.result["cells"] == {}
    assert record.result["failed_requests"] == 2
    assert record.result["first_failures"] == {"idle": "HTTP 500: a"}
    assert len(record.blocks.read_text().splitlines()) == 2
