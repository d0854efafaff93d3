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
    """What a run trains: the previous memory's layers, or this model's, with the bytes that the settings say."""
    has_entries = previous is not None and previous.num_entries > 0
    layers = previous.metadata.layers if previous is not None and has_entries else layers_of_memory(backbone, settings)
    times = 1 if layers is None else backbone.num_layers // len(layers)
    return EntryShape(layers, settings.payload_tokens * times, settings.map_rank * times)


def sizes_in_settings(memory: BundleMetadata) -> dict[str, int]:
    """`payload_tokens` and `map_rank` of a run whose entries have the shape of this memory's."""
    times = memory.backbone.num_layers // len(memory.memory_layers)
    rank = 0 if memory.output_map is None else memory.output_map.rank
    return {"payload_tokens": memory.payload_tokens // times, "map_rank": rank // times}


def layers_of_memory(backbone: Backbone, settings: RefinedSettings) -> tuple[int, ...] | None:
    """None: all, as merged memory needs."""
    return None if settings.form == "merged" else usual_layers(backbone.num_layers, backbone.hidden_size)
