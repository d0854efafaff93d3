"""InduceKV for vLLM: fixed-footprint continual adaptation with an external memory of key/value blocks."""

__version__ = "0.2.0"

# The vLLM releases whose internals this plugin was written and tested against; checked when the plugin is registered.
SUPPORTED_VLLM = ">=0.32,<0.33"
