"""A new task's entries before training: which examples they start from, and their tensors."""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle, EntryRecord
from inducekv_vllm.errors import ConfigError

from ..backbone.extraction import extract, extract_keys
from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone
from ..backbone.scoring import Questions
from ..data.choice import some_rows
from ..data.examples import Example, entry_records
from ..update.inputs import TaskInputs
from ..update.parametrization import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE
from .settings import RefinedSettings
from .shape import EntryShape, shape_of_entries

UNTYING: Final = 0.1  # of the root mean square of a head's keys


def initial_entries(
    backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings, shape: EntryShape | None = None
) -> tuple[TensorMemory, tuple[EntryRecord, ...]]:
    """The new task's K entries as extracted, in float32.

    New values of decoupled memory are 0, so that untrained entries change nothing (LLaMA-Adapter, arXiv 2303.16199).
    So are the outer halves of maps; the inner ones are drawn from N(0, 1 / width). Calibration is that of the previous
    memory, if there is one.

    Args:
        shape: None for that of `shape_of_entries`.
    """
    shape = shape or shape_of_entries(backbone, settings, inputs.previous)
    rows = some_rows(len(inputs.training), number_of_entries(inputs, settings), (settings.seed, 6))
    examples = [inputs.training[row] for row in rows]
    extraction = extract(backbone, examples, shape.payload_tokens, batch_size=settings.batch_size)
    numbers = list(range(backbone.num_layers) if shape.layers is None else shape.layers)
    payload_keys, payload_values = extraction.payload_keys[numbers], extraction.payload_values[numbers]
    decoupled = settings.form == "decoupled"
    temperature: Tensor = torch.tensor(INITIAL_TEMPERATURE)
    value_gates = torch.full((len(numbers),), 1.0 if decoupled else INITIAL_VALUE_GATE)
    layer_bias = torch.zeros(len(numbers))
    if inputs.previous is not None:
        temperature = inputs.previous.temperature
        if inputs.previous.num_entries:  # a bundle without entries may be in other layers
            value_gates, layer_bias = inputs.previous.value_gates, inputs.previous.layer_bias
    map_in, map_out = initial_maps(backbone, settings.seed, shape, len(examples))
    memory = TensorMemory(
        retrieval_keys=extraction.keys.half().float(),  # a bundle rounds its keys; train with rounded ones
        payload_keys=untied(payload_keys, settings.seed) if decoupled else payload_keys,
        payload_values=torch.zeros_like(payload_values) if decoupled else payload_values,
        temperature=temperature,
        value_gates=value_gates,
        layer_bias=layer_bias,
        weighting=settings.weighting,
        form=settings.form,
        map_in=map_in,
        map_out=map_out,
        layers=shape.layers,
    )
    return memory, entry_records(examples)


def untied(keys: Tensor, seed: int) -> Tensor:
    """Keys [L, K, J, m, D] of which a little of N(0, 1) is added to those that are as the one before.

    A prompt of fewer than m tokens has such. Equal tokens have equal gradients, and would be trained to one end.
    """
    repeated = torch.zeros(keys.shape[:-1], dtype=torch.bool)
    repeated[..., 1:] = (keys[..., 1:, :] == keys[..., :-1, :]).all(dim=-1)
    scale = UNTYING * keys.square().mean(dim=(-2, -1), keepdim=True).sqrt()  # [L, K, J, 1, 1]
    noise = torch.randn(keys.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(repeated[..., None], keys + scale * noise, keys)


def questions_of(
    backbone: Backbone, examples: Sequence[Example], settings: RefinedSettings, *, progress: bool = False
) -> Questions:
    """Examples with the keys they retrieve with. Those of uniform weighting, where retrieval weights nothing, are 0."""
    if settings.weighting == "uniform":
        return Questions(examples, torch.zeros(len(examples), backbone.hidden_size))
    return Questions(examples, extract_keys(backbone, examples, batch_size=settings.batch_size, progress=progress))


def number_of_entries(inputs: TaskInputs, settings: RefinedSettings) -> int:
    """Of the new task. Raises ConfigError: the budget does not hold as many beside those of the earlier tasks."""
    count = min(settings.entries_per_task, len(inputs.training))
    earlier = sum(inputs.entries_by_task.values())
    if earlier + count > settings.budget:
        raise ConfigError(
            f"the budget of {settings.budget} entries does not hold {count} of a new task beside {earlier} of the "
            "earlier ones: give a larger --budget, or take tasks out with `inducekv-bundle forget`"
        )
    return count


def initial_maps(
    backbone: Backbone, seed: int, shape: EntryShape, num_entries: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """map_in [L, entries, J, r, G D] and map_out [L, entries, J, G D, r] float32, or nothing for rank 0."""
    if not shape.map_rank:
        return None, None
    J, width = backbone.num_kv_heads, _map_width(backbone)
    generator = torch.Generator().manual_seed(seed)
    L = backbone.num_layers if shape.layers is None else len(shape.layers)
    inner = torch.randn(L, num_entries, J, shape.map_rank, width, generator=generator) / math.sqrt(width)
    return inner, torch.zeros_like(inner).transpose(-1, -2).contiguous()


def settings_for(backbone: Backbone, settings: RefinedSettings, previous: Bundle | None = None) -> RefinedSettings:
    """The settings for this model: without maps of the attention output where memory consists of latents (MLA).

    Raises:
        ConfigError: maps were asked for there, or would have a higher rank than their width.
    """
    if backbone.is_latent and settings.map_rank:
        if "map_rank" in settings.model_fields_set:
            raise ConfigError(
                "a model with latent attention (MLA) takes no maps of the attention output: expected map_rank 0, found "
                f"{settings.map_rank}"
            )
        return settings.model_copy(update={"map_rank": 0})
    if (rank := shape_of_entries(backbone, settings, previous).map_rank) > (width := _map_width(backbone)):
        raise ConfigError(f"a map of width {width} has at most that rank, found {rank} (map_rank {settings.map_rank})")
    return settings


def _map_width(backbone: Backbone) -> int:
    """G D: the outputs of the query heads that share a KV head."""
    return backbone.num_heads // backbone.num_kv_heads * backbone.head_dim
