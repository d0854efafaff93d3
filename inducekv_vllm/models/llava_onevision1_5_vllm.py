"""LLaVA-OneVision-1.5 in vLLM, through its backend for models of transformers."""

from vllm.model_executor.models.transformers import TransformersMultiModalForCausalLM
from vllm.model_executor.models.transformers.multimodal import (
    MultiModalDummyInputsBuilder,
    MultiModalProcessingInfo,
    MultiModalProcessor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from . import register_model

register_model("llavaonevision1_5")
PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


@MULTIMODAL_REGISTRY.register_processor(
    MultiModalProcessor, info=MultiModalProcessingInfo, dummy_inputs=MultiModalDummyInputsBuilder
)
class LLaVAOneVision1_5_ForConditionalGeneration(TransformersMultiModalForCausalLM):
    """The name is that of published checkpoints."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return f"<|vision_start|>{PLACEHOLDERS[modality]}<|vision_end|>"
