"""Models that InduceKV serves and neither transformers nor vLLM knows: LLaVA-OneVision-1.5.

A library that knows the model keeps its own. Importing this package imports no model.
"""

from __future__ import annotations

from typing import Final

# By the model type of a checkpoint's config.json, the architecture that it names.
ARCHITECTURES: Final = {"llavaonevision1_5": "LLaVAOneVision1_5_ForConditionalGeneration"}


def register_configurations() -> None:
    """Let `AutoConfig` read these models' settings."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if any(model_type not in CONFIG_MAPPING for model_type in ARCHITECTURES):
        from .llava_onevision1_5_config import register

        register()


def register_models() -> None:
    """Let transformers' `Auto` classes make these models and their processors."""
    from transformers import CONFIG_MAPPING

    from .llava_onevision1_5_config import LlavaOnevision15Config

    register_configurations()
    if CONFIG_MAPPING[LlavaOnevision15Config.model_type] is LlavaOnevision15Config:
        from .llava_onevision1_5 import register

        register()
