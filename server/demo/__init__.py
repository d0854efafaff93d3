"""The demo: a small multimodal model, and a memory bundle for it with the eight tasks of the demo stream.

`benchmarks/demo` trains both; `bundles/README.md` has the command that made the bundle.
"""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"  # a folder in Hugging Face's format
BUNDLE: Final = Path(__file__).parent / "bundles" / "demo.safetensors"  # made for CHECKPOINT alone
