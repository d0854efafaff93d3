"""Models that InduceKV teaches and transformers does not know: LLaVA-OneVision-1.5, DeepSeek-VL2.

If transformers knows a model, its own is taken. vLLM knows DeepSeek-VL2. Importing this package imports no model.
"""

from importlib import import_module
from typing import Any, Final

# By the model type of a checkpoint's config.json, the architecture that it names, and the module of this package.
ARCHITECTURES: Final = {
    "llavaonevision1_5": "LLaVAOneVision1_5_ForConditionalGeneration",
    "deepseek_vl_v2": "DeepseekVLV2ForCausalLM",
}
# By the model type, what stands for a picture in the prompts of models whose published settings do not say it.
IMAGE_TOKENS: Final = {"deepseek_vl_v2": 128815}
_MODULES: Final = {"llavaonevision1_5": "llava_onevision1_5", "deepseek_vl_v2": "deepseek_vl2"}


def register_configurations() -> None:
    """Let `AutoConfig` read these models' settings."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type in _unknown():
        if model_type not in CONFIG_MAPPING:
            _module(model_type, "_config").register()


def register_model(model_type: str) -> None:
    """Let transformers' `Auto` classes make this model and its processor.

    vLLM registers settings of its own for DeepSeek-VL2 when it loads one; these replace them.
    """
    if model_type in _unknown():
        _module(model_type, "_config").register()
        _module(model_type).register()


def chat_template(model_type: str) -> str | None:
    """The chat template of a model that is published without one, as vLLM writes its prompts."""
    return getattr(_module(model_type, "_config"), "CHAT_TEMPLATE", None) if model_type in _unknown() else None


def _unknown() -> list[str]:
    """The model types of this package that transformers itself does not know."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    return [model_type for model_type in _MODULES if model_type not in CONFIG_MAPPING_NAMES]


def _module(model_type: str, part: str = "") -> Any:
    return import_module(f".{_MODULES[model_type]}{part}", __package__)
