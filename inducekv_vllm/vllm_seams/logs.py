"""Loggers that appear in a server's log."""

from logging import Logger

from vllm.logger import init_logger


def logger_of(module: str) -> Logger:
    """The logger of one of our modules. vLLM shows only what is logged below the logger "vllm"."""
    return init_logger(f"vllm.{module}")
