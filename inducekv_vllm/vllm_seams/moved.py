"""What vLLM 0.33 has in other places than 0.32. With 0.32 the second half goes, and its users import vLLM's names."""

try:
    from vllm.entrypoints.common.startup import cli_env_setup  # type: ignore[import-not-found]
    from vllm.renderers.chat_utils.chat_message import MM_PARSER_MAP  # type: ignore[import-not-found]
except ImportError:
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.renderers.chat_utils import MM_PARSER_MAP

__all__ = ["MM_PARSER_MAP", "cli_env_setup"]
