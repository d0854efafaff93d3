"""A frozen language model in transformers, text-only or multimodal, and the encoding of prefixes.

Shapes: n requests, T prompt tokens, L layers, J KV heads, D head size, V size of a head's values, d hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from inducekv_vllm.backbone.chat import chat_text, picture_mark, takes_parts
from inducekv_vllm.backbone.checkpoints import Kind, kind_of
from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.backbone.latents import is_latent
from inducekv_vllm.backbone.memory_layers import memory_heads, memory_layers
from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.bundle import BackboneFingerprint
from inducekv_vllm.errors import ConfigError, TaskDataError, UnsupportedModel

from ..data.examples import Example
from .injection import ATTENTION_NAME
from .loading import (
    FULL,
    attention_layers,
    has_states,
    has_windows,
    kinds_of_attention,
    load_checkpoint,
    merged_refusal,
    tokenizer_of,
)

# A processor's outputs with one value per token; all others belong to images.
TOKEN_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
# The processor's output for one prefix: input_ids and attention_mask [1, T] int64, and the model's own image inputs.
Inputs = dict[str, Tensor]
PICTURE_MARKS = ("image_token", "boi_token", "video_token", "audio_token")  # as processors name them


@dataclass(frozen=True)
class Backbone:
    """A model in evaluation mode without parameter gradients, and its processor."""

    model: Any  # a PreTrainedModel for causal language modelling or image-text-to-text
    processor: Any  # its ProcessorMixin; its tokenizer, if the model is text-only
    num_layers: int  # L, with attention
    num_heads: int  # H
    num_kv_heads: int  # J
    head_dim: int  # D
    value_dim: int  # V, which is D but for latents (MLA)
    hidden_size: int  # d

    @classmethod
    def load(
        cls, model: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Backbone:
        """Load a model folder or Hugging Face id; remote code is never run.

        Raises:
            UnsupportedModel: it cannot be loaded, or its attention is of a kind memory cannot be injected into.
            ConfigError: there is no such device.
        """
        network, processor = load_checkpoint(model, dtype)
        try:
            network.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"cannot use the device {str(device)!r}: {str(error).splitlines()[0]}") from error
        text = network.config.get_text_config(decoder=True)
        # Only the language model; the vision tower keeps its own attention.
        text._attn_implementation = ATTENTION_NAME
        for number, attention in enumerate(attention_layers(network)):
            attention.memory_layer = number  # read in `injection.attention`
        return cls.of(network, processor)

    @classmethod
    def of(cls, network: Any, processor: Any) -> Backbone:
        """With the sizes that the model's configuration names; raises UnsupportedModel as `memory_layers` does."""
        text = network.config.get_text_config(decoder=True)
        heads = memory_heads(text)
        return cls(
            model=network,
            processor=processor,
            num_layers=len(memory_layers(text)),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            value_dim=heads.value_dim,
            hidden_size=text.hidden_size,
        )

    @property
    def kind(self) -> Kind:
        return kind_of(self.model.config, self.model.config.name_or_path)

    @property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.processor)

    @property
    def fact_reader(self) -> FactReader:
        return FactReader.made(self.model.config, self.processor, self.fingerprint)

    @cached_property
    def picture_marks(self) -> frozenset[str]:
        """What stands for a picture in a prompt, as text; none for a text-only model."""
        if self.kind == "text":
            return frozenset()
        named = (getattr(self.processor, name, None) for name in PICTURE_MARKS)
        placeholders = self.tokenizer.convert_ids_to_tokens(sorted(placeholder_ids(self.model.config)))
        return frozenset(mark for mark in (*named, *placeholders) if isinstance(mark, str) and mark)

    def refuse_marks(self, texts: Iterable[str]) -> None:
        """Raises TaskDataError: the processor would take such a text for a picture that is not there."""
        for text in texts:
            if found := next((mark for mark in sorted(self.picture_marks) if mark in text), None):
                raise TaskDataError(f"the text holds {found!r}, which stands for a picture in this model's prompts")

    @cached_property
    def template_takes_parts(self) -> bool:
        """Whether the chat template takes a message's content as a list of parts, rather than as a string."""
        return takes_parts(self.processor)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @cached_property
    def fingerprint(self) -> BackboneFingerprint:
        return backbone_fingerprint(self.model.config.name_or_path)

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The layers whose attention sees all of a prompt, ascending; the others have a sliding window."""
        return tuple(layer for layer, kind in enumerate(kinds_of_attention(self.model)) if kind == FULL)

    @property
    def is_latent(self) -> bool:
        """Whether its attention has one latent for all heads (MLA), of which memory consists then."""
        return is_latent(self.model.config.get_text_config(decoder=True))

    @property
    def has_states(self) -> bool:
        """Whether the language model has layers that keep a state in place of keys and values."""
        return has_states(self.model.config)

    @property
    def has_windows(self) -> bool:
        """Whether some layers, with memory or without, do not see all of a prompt."""
        return has_windows(self.model.config)

    @property
    def merged_refusal(self) -> str | None:
        """What it has in the place of full attention in every layer, whose softmax merged memory shares."""
        sinks = any(hasattr(attention, "sinks") for attention in self.attention_layers())
        return merged_refusal(self.model.config) or ("sinks" if sinks else None)

    def require_full_attention(self) -> None:
        """For merged memory, which shares the softmax of self-attention.

        Raises:
            UnsupportedModel: it has windows, a soft cap, sinks or latents, or layers without attention.
        """
        if (found := self.merged_refusal) is not None:
            raise UnsupportedModel(
                f"merged memory needs full attention in every layer, found {found}: make decoupled memory, with "
                "`inducekv-select --form decoupled`"
            )

    def attention_layers(self) -> list[torch.nn.Module]:
        """The self-attention module of each of the L layers of the language model that have one."""
        return attention_layers(self.model)

    def encode(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Image.Image]) -> Inputs:
        """The prefix of one request: chat template, image tokens, generation prompt; never an answer.

        Args:
            messages: in chat-template form, see `selector.data.examples.Example.messages`.
            images: in the order of the image parts.

        Raises:
            TaskDataError: more or fewer images than image parts, images for a text-only model, a text that holds what
                stands for one, or messages that the model's chat template or processor refuses.
        """
        places = sum(part["type"] == "image" for message in messages for part in message["content"])
        if places != len(images):
            raise TaskDataError(f"the messages have {places} places for images, found {len(images)} images")
        if places and self.kind == "text":
            raise TaskDataError(
                f"{type(self.model).__name__} is a text-only model, found {places} images in the messages"
            )
        if places and not self.template_takes_parts and picture_mark(self.processor) is None:
            raise TaskDataError("the model's chat template takes text alone, so it has no place for images")
        parts = (part for message in messages for part in message["content"])
        self.refuse_marks(part["text"] for part in parts if part["type"] == "text")
        # Chat templates contain the special tokens; vLLM adds none either.
        return self.encode_text(self.chat_text(messages, generation_prompt=True), images, add_special_tokens=False)

    def encode_text(self, text: str, images: Sequence[Image.Image], *, add_special_tokens: bool) -> Inputs:
        """A text as it is, with the mark of each picture as the chat template writes it.

        Raises:
            TaskDataError: the model's processor refuses it, or the tokens of a picture see each other in the model.
        """
        options: dict[str, Any] = {"text": [text], "add_special_tokens": add_special_tokens, "return_tensors": "pt"}
        try:
            if self.kind == "text":
                inputs = self.tokenizer(**options, return_token_type_ids=False)
            else:
                inputs = self.processor(**options, images=list(images) or None)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise TaskDataError(f"the model's processor refuses the messages: {error}") from error
        if images and self._sees_pictures_whole(inputs):
            raise TaskDataError(
                f"the tokens of a picture see each other in {type(self.model).__name__}, which memory's attention does "
                "not have: text alone can be taught"
            )
        return {name: self._as_read(value) for name, value in inputs.items()}

    def _sees_pictures_whole(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether the tokens of a picture see each other: Gemma 3's, and those of Gemma 4's larger models."""
        text = self.model.config.get_text_config(decoder=True)
        kinds = inputs.get("token_type_ids")
        return getattr(text, "use_bidirectional_attention", None) == "vision" or (
            kinds is not None and bool(kinds.any())
        )

    def _as_read(self, value: Tensor) -> Tensor:
        """An input on the model's device, and in its precision if the processor's is lower (Llama 4's pictures)."""
        dtype = torch.promote_types(value.dtype, self.model.dtype) if value.is_floating_point() else value.dtype
        return value.to(self.device, dtype)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> str:
        """Messages as the model's chat template writes them, a picture as its mark.

        Raises:
            TaskDataError: the template refuses the messages.
        """
        as_parts = self.template_takes_parts
        return chat_text(self.processor, messages, as_parts=as_parts, generation_prompt=generation_prompt)

    def encode_example(self, example: Example) -> Inputs:
        """The prefix of a training example."""
        try:
            return self.encode(example.messages, example.load_images())
        except (OSError, TaskDataError) as error:
            raise TaskDataError(f"example {example.id!r} of task {example.task!r}: {error}") from error

    def collate(self, batch: Sequence[Inputs], side: Literal["left", "right"] = "right") -> Inputs:
        """Pad n prefixes to one length T and stack them: [n, T] for tokens, images one after the other.

        On the right, causal attention hides the padding and positions do not change. Generation appends tokens on the
        right and needs padding on the left.
        """
        longest = max(inputs["input_ids"].shape[1] for inputs in batch)
        collated: Inputs = {}
        for name in dict.fromkeys(name for inputs in batch for name in inputs):
            values = [inputs[name] for inputs in batch if name in inputs]
            if name in TOKEN_INPUTS:
                fill = self.tokenizer.pad_token_id or 0 if name == "input_ids" else 0
                values = [_pad(value, longest, side, fill) for value in values]
            elif len({value.shape[1:] for value in values}) > 1:
                values = _with_equal_tiles(values)
            collated[name] = torch.cat(values)
        return collated

    @torch.no_grad()
    def hidden_states(self, inputs: Inputs) -> Tensor:
        """Last hidden states after the final norm: [n, T, d], in the model's dtype."""
        base = self.model.base_model
        if base is not self.model:
            hidden: Tensor = base(**inputs, use_cache=False).last_hidden_state
        else:  # Llama 4 with pictures
            hidden = base(**inputs, use_cache=False, output_hidden_states=True).hidden_states[-1]
        return hidden

    def retrieval_keys(self, inputs: Inputs) -> Tensor:
        """r(x) of each prefix (paper, Eq. key_rewrite): [n, d] float32, unit norm."""
        return pool_retrieval_keys(self.hidden_states(inputs), inputs["attention_mask"])


@contextlib.contextmanager
def attention_named(backbone: Backbone, name: str) -> Iterator[None]:
    """Inside, the backbone's language model uses the attention that is registered under `name` in transformers."""
    text = backbone.model.config.get_text_config(decoder=True)
    before = text._attn_implementation
    text._attn_implementation = name
    try:
        yield
    finally:
        text._attn_implementation = before


def pool_retrieval_keys(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean over the unmasked tokens of each prefix, L2-normalised.

    Args:
        hidden: [n, T, d], any float type; summed in float32.
        attention_mask: [n, T], 1 for tokens and 0 for padding.

    Returns:
        [n, d] float32 (float64 for a float64 model); zeros for a prefix without unmasked tokens.
    """
    mask = attention_mask[:, :, None].bool()  # [n, T, 1]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.to(dtype).masked_fill(~mask, 0).sum(dim=1)  # [n, d]
    return torch.nn.functional.normalize(total / mask.sum(dim=1).clamp(min=1), dim=1)


def _with_equal_tiles(pictures: Sequence[Tensor]) -> list[Tensor]:
    """Pictures cut into different numbers of tiles, [n, tiles, ...], padded as their processor pads those of a batch.

    The model computes as many tiles of each as its size says.
    """
    most = max(picture.shape[1] for picture in pictures)
    padded = [picture.new_zeros(len(picture), most, *picture.shape[2:]) for picture in pictures]
    for target, picture in zip(padded, pictures, strict=True):
        target[:, : picture.shape[1]] = picture
    return padded


def _pad(value: Tensor, length: int, side: Literal["left", "right"], fill: int) -> Tensor:
    missing = length - value.shape[1]
    return torch.nn.functional.pad(value, (missing, 0) if side == "left" else (0, missing), value=fill)
