"""InduceKV for vLLM: fixed-footprint continual adaptation with an external memory of key/value blocks."""

__version__ = "0.1.0"
