"""The budget conversion against the numbers the paper prints."""

import json

import pytest

from benchmarks.research.continual.__main__ import main
from benchmarks.research.continual.footprint_table import (
    CONVERSION_TIERS,
    PAPER_BACKBONES,
    PAPER_QUERY_HEADS,
    RESULT_TIERS,
    conversions,
    with_query_heads,
)
from server.demo import CHECKPOINT

BACKBONE_4B, BACKBONE_8B = PAPER_BACKBONES.values()
# Paper, Table "Budget conversion for fair comparison", as printed:
# tier, B, Bm, MiB 4B, MiB 8B, millions of parameters, text exemplars.
PRINTED = [
    ("XS", 4, 32, 18.02, 18.03, 9.45, 9_232),
    ("S", 8, 64, 36.04, 36.06, 18.91, 18_464),
    ("M", 16, 128, 72.08, 72.13, 37.81, 36_928),
    ("L", 32, 256, 144.16, 144.25, 75.63, 73_856),
]


@pytest.mark.parametrize(("tier", "B", "tokens", "mib_4b", "mib_8b", "millions", "texts"), PRINTED)
def test_counting_every_query_head_gives_the_printed_conversion(tier, B, tokens, mib_4b, mib_8b, millions, texts):
    assert CONVERSION_TIERS[tier] == B
    (small,) = conversions(with_query_heads(BACKBONE_4B, PAPER_QUERY_HEADS), [B])
    (large,) = conversions(with_query_heads(BACKBONE_8B, PAPER_QUERY_HEADS), [B])
    assert small.kv_tokens == large.kv_tokens == tokens
    assert small.mebibytes == pytest.approx(mib_4b, abs=0.005)
    assert large.mebibytes == pytest.approx(mib_8b, abs=0.005)
    assert round(large.peft_parameters / 1e6, 2) == millions
    assert large.text_exemplars == texts


@pytest.mark.parametrize(("backbone", "printed"), [(BACKBONE_4B, 72.31), (BACKBONE_8B, 72.50)])
def test_stored_kv_heads_give_the_printed_system_overhead_and_not_the_conversion(backbone, printed):
    """The paper's two tables disagree on what an entry takes; a bundle stores KV heads, as the second one says."""
    stored = conversions(backbone, RESULT_TIERS.values())
    assert [row.mebibytes for row in stored] == pytest.approx([printed * k for k in (1, 2, 4, 8)], abs=0.02)
    (sixteen,) = conversions(backbone, [16])
    assert sixteen.mebibytes == pytest.approx(printed / 4, abs=0.005)  # the conversion prints 72.08 or 72.13 for it


def test_the_command_prints_any_models_table(capsys):
    config = CHECKPOINT / "config.json"
    assert main(["footprint", "--config", str(config), "--budget", "32", "--text-tokens", "128"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    (row,) = found["models"][str(config)]
    assert row["bytes"] == 32 * (2 * 256 + 4 * 5 * 2 * 8 * 64) == 671_744
    assert (row["kv_tokens"], row["text_exemplars"]) == (256, 671_744 // 512)
    assert len(found["models"]) == 5
    assert "0.64" in printed.err
