"""A plugin for pytest (`make test-fast`): an import of vLLM fails."""

from __future__ import annotations

import sys

sys.modules["vllm"] = None  # type: ignore[assignment]
