"""The shape of a task's entries: which layers they are in, and with how many tokens and rows of maps.

Each layer with memory costs a token a launch on a GPU, whatever it reads there. So entries of wide and deep models are
in a third of the layers, and have three times as many tokens and rows of maps there: they take as many bytes, and tasks
are learned as well (`benchmarks.research.fewer_layers`).
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
    """What a run trains: entries as the previous memory's, or in this model's usual layers with the settings' bytes."""
    if previous is not None and previous.num_entries:
        metadata = previous.metadata
        return EntryShape(metadata.layers, metadata.payload_tokens, _rank(metadata))
    layers = None if settings.form == "merged" else usual_layers(backbone.num_layers, backbone.hidden_size)
    times = 1 if layers is None else backbone.num_layers // len(layers)
    return EntryShape(layers, settings.payload_tokens * times, settings.map_rank * times)


def sizes_in_settings(memory: BundleMetadata) -> dict[str, int]:
    """`payload_tokens` and `map_rank` of a run whose entries have the shape of this memory's."""
    times = memory.backbone.num_layers // len(memory.memory_layers)
    return {"payload_tokens": memory.payload_tokens // times, "map_rank": _rank(memory) // times}


def _rank(memory: BundleMetadata) -> int:
    return 0 if memory.output_map is None else memory.output_map.rank
