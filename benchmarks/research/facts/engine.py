"""The engine that is asked about facts."""

from __future__ import annotations

from pathlib import Path

from vllm import LLM

from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS


def facts_engine(model: Path, context: int) -> LLM:
    """In float32, with memory; `context` is in tokens."""
    return LLM(
        str(model),
        dtype="float32",
        max_model_len=context,
        max_num_seqs=16,
        worker_cls=WORKER_CLS,
        scheduler_cls=SCHEDULER_CLS,
        additional_config={"inducekv": {}},
    )
