"""Which weights of a LoRA adapter vLLM uses: it leaves out those without a module, and says nothing."""

import itertools
from collections.abc import Sequence

from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name
from vllm.model_executor.models.utils import WeightsMapper


def unmet_tensors(manager: LoRAModelManager, names: Sequence[str]) -> list[str]:
    """Those whose module is none that the served model adapts, by the names that vLLM gives to both.

    Args:
        names: of an adapter's tensors, as its file has them.
    """
    mapper: WeightsMapper | None = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    adapted = {*manager.modules, *itertools.chain.from_iterable(manager.packed_modules.values())}
    skipped = tuple(getattr(manager.model, "lora_skip_prefixes", ()))  # of drafts, which no answer is made of

    def is_met(name: str) -> bool:
        if is_base_embedding_weights(name) or any(f".{prefix}" in f".{name}" for prefix in skipped):
            return True
        try:
            module, _ = parse_fine_tuned_lora_name(name, renames)
        except ValueError:
            return False
        return module.removesuffix(".base_layer") in adapted  # of experts in one tensor

    return [name for name in names if not is_met(name)]
