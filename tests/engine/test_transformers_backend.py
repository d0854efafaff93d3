"""Models that vLLM serves through its Transformers backend."""

from functools import partial
from pathlib import Path

from transformers import HeliumConfig

from inducekv_vllm import MemoryLLM
from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from tests.engine.parity import FEWER_PROCESSES, engine
from tests.tiny_families import TEXT_SIZES
from tests.tiny_models import save_tiny_text_model


def test_their_fingerprint_is_the_checkpoints(tmp_path: Path) -> None:
    """Of a family that no other test has: the backend changes the classes of the model in its process for good."""
    model = save_tiny_text_model(tmp_path, partial(HeliumConfig, **TEXT_SIZES))
    before = backbone_fingerprint(model)
    with engine(model, environment=FEWER_PROCESSES, model_impl="transformers", enforce_eager=True) as llm:
        assert MemoryLLM(llm)._backbone == backbone_fingerprint(model) == before
