"""What a machine with a GPU may lack."""

from __future__ import annotations

ABSENT = (
    *("vllm", "faiss", "pydantic", "transformers", "safetensors", "fastapi", "jinja2", "matplotlib", "PIL", "rich"),
    *("cachetools", "inducekv_vllm.bundle", "inducekv_vllm.attention.resident_bundle", "selector", "server"),
)
