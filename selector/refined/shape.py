"""The shape of a task's entries: which layers they are in, and with how many tokens and rows of maps.

Each layer with memory costs a token a launch on a GPU, whatever it reads there. So memory that acts on the generation
of a wide and deep model is in a third of the layers, and has three times as many tokens and rows of maps there: it
takes as many bytes, and tasks are learned as well (`benchmarks.research.fewer_layers`). Memory on the prompt is not
learned as well, so where the activation is searched, all layers are taken.
"""

from dataclasses import dataclass

from inducekv_vllm.backbone.memory_layers import usual_layers
from inducekv_vllm.bundle import Bundle, BundleMetadata

from ..backbone.model import Backbone
from .settings import RefinedSettings


@dataclass(frozen=True)
class EntryShape:
    """Of every entry of a memory."""

    layers: tuple[int, ...] | None  # ascending; None: all
    payload_tokens: int  # m, in each of them
    map_rank: int  # r


def shape_of_entries(backbone: Backbone, settings: RefinedSettings, previous: Bundle | None = None) -> EntryShape:
    """What a run trains: entries like the previous memory's, or else with the settings' bytes."""
    if previous is not None and previous.num_entries:
        metadata = previous.metadata
        return EntryShape(metadata.layers, metadata.payload_tokens, _rank(metadata))
    on_generation = settings.activation == "generation"  # merged memory never is
    layers = usual_layers(backbone.num_layers, backbone.hidden_size) if on_generation else None
    times = 1 if layers is None else backbone.num_layers // len(layers)
    return EntryShape(layers, settings.payload_tokens * times, settings.map_rank * times)


def sizes_in_settings(memory: BundleMetadata) -> dict[str, int]:
    """`payload_tokens` and `map_rank` of a run whose entries have the shape of this memory's."""
    times = memory.backbone.num_layers // len(memory.memory_layers)
    return {"payload_tokens": memory.payload_tokens // times, "map_rank": _rank(memory) // times}


def _rank(memory: BundleMetadata) -> int:
    return 0 if memory.output_map is None else memory.output_map.rank
