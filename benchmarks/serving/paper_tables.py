"""The serving times in the layout of the paper's tables "Compute-Matched" and "Budget-Latency-Quality".

Their quality columns are left out: the models of this benchmark are untrained, or have not learned its task;
`benchmarks.continual` measures quality. Prefill is the time to first token, which includes both passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from benchmarks.serving.methods import (
    BASE_METHOD,
    DECOUPLED_BUDGET,
    LONGER_PROMPT,
    LORA,
    LORA_BASE,
    PAYLOAD_TOKENS,
    PROMPT_REPLAY,
    bundle_name,
    decoupled_name,
)
from inducekv_vllm.activation import ACTIVATIONS

TIERS = {64: "S", 128: "M", 256: "L", 512: "XL"}  # of the paper, by entries
TIMES = ("Prefill ms", "Decode tok/s", "E2E s")

Row = dict[str, Any]


def compute_matched(rows: Mapping[str, Mapping[str, float]], stored_bytes: Mapping[str, int]) -> list[Row]:
    """The methods of one request at a time: what they add to the model and to the context, and their times.

    Args:
        rows: those of concurrency 1, by method.
        stored_bytes: of the bundles and the adapter, by method.
    """
    base = rows[BASE_METHOD]["prompt_tokens"]
    methods = [(BASE_METHOD, "no memory", "none"), (LORA_BASE, "no adapter, LoRA server", "none")]
    methods += [(LORA, "LoRA", "learned low-rank weights"), (LONGER_PROMPT, "longer prompt", "text")]
    methods += [(PROMPT_REPLAY, "PromptReplay", "exemplars as prompt tokens")]
    for budget in _budgets(rows):
        methods.append((f"{bundle_name(budget)}_all", f"InduceKV, merged, {budget} entries", "precomputed K/V"))
    for activation in ACTIVATIONS:
        title = f"InduceKV, decoupled, {DECOUPLED_BUDGET} entries, {activation}"
        methods.append((decoupled_name(activation), title, "precomputed K/V"))
    return [
        {
            "method": title,
            "evidence": evidence,
            "extra_bytes": stored_bytes.get(method, 0),
            "added_prompt_tokens": round(rows[method]["prompt_tokens"] - base),
            "added_kv_tokens": _entries(method) * PAYLOAD_TOKENS,
            **_times(rows[method]),
        }
        for method, title, evidence in methods
        if method in rows
    ]


def budget_latency(rows: Mapping[str, Mapping[str, float]], stored_bytes: Mapping[str, int]) -> list[Row]:
    """Merged memory of every budget, all entries in attention; the arguments are those of `compute_matched`."""
    return [
        {
            "tier": TIERS.get(budget, ""),
            "entries": budget,
            "kv_tokens": budget * PAYLOAD_TOKENS,
            "bytes": stored_bytes.get(f"{bundle_name(budget)}_all", 0),
            **_times(rows[f"{bundle_name(budget)}_all"]),
        }
        for budget in _budgets(rows)
    ]


def tables(matched: Sequence[Row], budgets: Sequence[Row]) -> list[Table]:
    """Both as tables to print; those without rows are left out."""
    columns = ("Evidence", "Extra state", "Added inference context", *TIMES)
    first = Table("Method", *(Column(name, justify="right") for name in columns), title="Compute-Matched")
    for row in matched:
        first.add_row(row["method"], row["evidence"], _mib(row["extra_bytes"]), _context(row), *_shown(row))
    second = Table("Tier", *(Column(name, justify="right") for name in ("B", "Bm", "Memory", *TIMES)))
    second.title = "Budget-Latency"
    for row in budgets:
        second.add_row(row["tier"], str(row["entries"]), str(row["kv_tokens"]), _mib(row["bytes"]), *_shown(row))
    return [table for table in (first, second) if table.row_count]


def _budgets(rows: Mapping[str, Any]) -> list[int]:
    return sorted(_entries(name) for name in rows if name.startswith("memory_B") and name.endswith("_all"))


def _entries(method: str) -> int:
    """Of a method's name; 0 if it is not that of a bundle."""
    parts = [part[1:] for part in method.split("_") if part.startswith("B") and part[1:].isdigit()]
    return int(parts[0]) if parts else 0


def _times(row: Mapping[str, float]) -> Row:
    return {"prefill_ms": row["ttft_ms"], "decode_tokens_per_s": 1000 / row["tpot_ms"], "e2e_s": row["e2e_s"]}


def _shown(row: Row) -> tuple[str, str, str]:
    return f"{row['prefill_ms']:.0f}", f"{row['decode_tokens_per_s']:.1f}", f"{row['e2e_s']:.2f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size else "none"


def _context(row: Row) -> str:
    if row["added_kv_tokens"]:
        return f"{row['added_kv_tokens']} KV tokens/layer"
    return f"+{row['added_prompt_tokens']} prompt tokens" if row["added_prompt_tokens"] else "none"
