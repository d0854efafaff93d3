"""Models that vLLM serves through its Transformers backend."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from transformers import Qwen3Config

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.frontend.offline import MemoryLLM
from tests.engine.parity import FEWER_PROCESSES, engine
from tests.tiny_families import TEXT_SIZES
from tests.tiny_models import save_tiny_text_model


def test_their_fingerprint_is_the_checkpoints(tmp_path: Path) -> None:
    """Also in the engine's own process. It is a process of its own: the backend changes the model's class for good."""
    model = save_tiny_text_model(tmp_path / "text", partial(Qwen3Config, **TEXT_SIZES))
    served = subprocess.run([sys.executable, "-m", __name__, model], check=True, capture_output=True, text=True)
    assert served.stdout.splitlines()[-1] == backbone_fingerprint(model).model_dump_json()


def print_the_served_fingerprint(model: str) -> None:
    with engine(Path(model), environment=FEWER_PROCESSES, model_impl="transformers", enforce_eager=True) as llm:
        served = MemoryLLM(llm)._backbone
    assert backbone_fingerprint(model) == served
    print(served.model_dump_json())


if __name__ == "__main__":
    print_the_served_fingerprint(sys.argv[1])
