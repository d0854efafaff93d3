"""What vLLM 0.33 has elsewhere than vLLM 0.32."""

from __future__ import annotations

try:
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
except ImportError:
    from vllm.entrypoints.common.startup import cli_env_setup  # type: ignore[no-redef,import-not-found]
try:
    from vllm.renderers.chat_utils import MM_PARSER_MAP
except ImportError:
    from vllm.renderers.chat_utils.chat_message import MM_PARSER_MAP  # type: ignore[no-redef,import-not-found]

__all__ = ["MM_PARSER_MAP", "cli_env_setup"]
