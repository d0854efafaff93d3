"""Load the network and the processor of a checkpoint, text-only or multimodal, and refuse what memory does not fit."""

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from inducekv_vllm.backbone.checkpoints import Kind, load_config, load_tokenizer, summary
from inducekv_vllm.backbone.fingerprint import fingerprint_of
from inducekv_vllm.backbone.latents import is_latent
from inducekv_vllm.backbone.memory_layers import layer_kinds, layers_with_attention, memory_heads, memory_layers
from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.backbone.quantization import require_known_weights, require_plain_names, taught_method
from inducekv_vllm.backbone.weights import weights_digest
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.models import ARCHITECTURES, IMAGE_TOKENS, register_model

from .dequantized import dequantized, is_nvfp4
from .fused import take_apart

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"  # each token sees those of its chunk of the prompt: Llama 4
MTP_LAYERS: Final = "num_nextn_predict_layers"
_MODELS: dict[Kind, Any] = {"text": AutoModelForCausalLM, "multimodal": AutoModelForImageTextToText}


def load_checkpoint(model: str | Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The network, in evaluation mode on the CPU, and its processor; that of a text-only model is its tokenizer.

    Raises:
        UnsupportedModel: a part is missing or cannot be loaded, or memory cannot be injected into its attention.
    """
    config, kind = load_config(model)
    if config.model_type in ARCHITECTURES:
        register_model(config.model_type)
        config, kind = load_config(model)  # before, another library's settings may have been read
    processor = load_tokenizer(model) if kind == "text" else _load_processor(model)
    if not any(getattr(part, "chat_template", None) for part in (processor, tokenizer_of(processor))):
        raise UnsupportedModel(f"{model}: the tokenizer has no chat template, and examples are chat messages")
    _require_one_image_token(config, processor, model)
    try:
        network, loading = _load_network(config, kind, model, dtype)
    except UnsupportedModel:
        raise
    except Exception as error:  # the model's own code computes with settings that nobody has checked
        raise UnsupportedModel(f"{model}: cannot load the model: {summary(error)}") from error
    require_plain_names(loading["unexpected_keys"], model)  # of weights that are not safetensors, and have no header
    require_known_weights(config, model)  # again: a model of the hub may have been fetched only now
    fingerprint_of(config, tokenizer_of(processor), weights_digest(model))  # a bundle needs one
    for weight, found, expected in sorted(loading["mismatched_keys"]):
        raise UnsupportedModel(
            f"{model}: by its configuration the weight {weight} has the shape {list(expected)}, found {list(found)}"
        )
    if missing := sorted(loading["missing_keys"]):
        raise UnsupportedModel(
            f"{model}: {len(missing)} weights of {type(network).__name__} are missing, the first is {missing[0]}"
        )
    _require_no_further_layers(config, loading["unexpected_keys"], model)
    fit_memory(network, str(model))
    return network.eval().requires_grad_(False), processor


def _require_one_image_token(config: Any, processor: Any, model: str | Path) -> None:
    """Check that the processor writes for a picture what the model looks for, which published settings may not say."""
    if config.model_type not in IMAGE_TOKENS:
        return
    written, expected = processor.image_token_id, placeholder_ids(config)
    if written not in expected:
        raise UnsupportedModel(
            f"{model}: its processor writes token {written} for a picture, expected one of {sorted(expected)}, which "
            "its configuration names"
        )


def _load_network(config: Any, kind: Kind, model: str | Path, dtype: torch.dtype) -> Any:
    """The network, with plain weights whatever the checkpoint has, and what transformers says of its weights."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refused by name
    }
    method, plain = taught_method(config), copy.deepcopy(config)
    if method is None:
        return _MODELS[kind].from_pretrained(str(model), trust_remote_code=False, **options)
    settings = dict(plain.quantization_config)
    if method in ("compressed-tensors", "mxfp4") and not is_nvfp4(settings):
        plain.quantization_config = {**settings, "dequantize": True}
        network, loading = _MODELS[kind].from_pretrained(str(model), trust_remote_code=False, config=plain, **options)
        return network.to(dtype), loading  # MXFP4 comes in bfloat16
    del plain.quantization_config
    weights = dequantized(model, settings, dtype)
    network_class = _MODELS[kind]._model_mapping[type(config)]
    network, loading = network_class.from_pretrained(None, config=plain, state_dict=weights, **options)
    network.config.name_or_path = str(model)
    return network, loading


def tokenizer_of(processor: Any) -> Any:
    """A processor's tokenizer; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def decoder(network: Any) -> Any:
    """The module that holds the language model's layers and its final norm."""
    inner = getattr(network, "model", network)
    found = getattr(inner, "language_model", None) or getattr(inner, "text_model", None) or inner
    return found if hasattr(found, "layers") else getattr(found, "model", found)  # Llama 4's has a head of its own


def kinds_of_attention(network: Any) -> list[str]:
    """Of each of the L layers of the language model with attention, as transformers names them."""
    kinds = _kinds(network.config)
    return [kinds[number] for number in memory_layers(network.config.get_text_config(decoder=True))]


def _kinds(config: Any) -> list[str]:
    """Of every layer."""
    text = config.get_text_config(decoder=True)
    # Mistral's layers are not told apart by name.
    usual = FULL if getattr(text, "sliding_window", None) is None else SLIDING
    return layer_kinds(text) or [usual] * text.num_hidden_layers


def merged_refusal(config: Any) -> str | None:
    """What a model has by its configuration in the place of full attention, whose softmax merged memory shares."""
    text = config.get_text_config(decoder=True)
    layers, kinds = text.num_hidden_layers, _kinds(config)
    if is_latent(text):
        return "multi-head latent attention (MLA)"
    if has_windows(config):
        full = sum(kinds[number] == FULL for number in memory_layers(text))
        return f"a sliding window in {layers - full} of {layers}"
    if has_states(config):
        return f"it in {len(_with_attention(config))} of {layers}"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "a soft cap on its logits"
    return None


def has_states(config: Any) -> bool:
    """Whether the language model has other layers than those with attention, too: it is a hybrid."""
    return len(_with_attention(config)) < int(config.get_text_config(decoder=True).num_hidden_layers)


def has_windows(config: Any) -> bool:
    """Whether some of the language model's layers, with memory or without, do not see all of a prompt."""
    kinds = _kinds(config)
    return any(kinds[number] != FULL for number in _with_attention(config))


def _with_attention(config: Any) -> tuple[int, ...]:
    text = config.get_text_config(decoder=True)
    return layers_with_attention(layer_kinds(text), text.num_hidden_layers)


def attention_layers(network: Any) -> list[Any]:
    """The attention of each of the L layers; None of a layer that has none, or that is not where it is expected."""
    layers = getattr(decoder(network), "layers", None)
    numbers = memory_layers(network.config.get_text_config(decoder=True))
    return [None if layers is None else _attention_of(layers[number]) for number in numbers]


def key_norm(attention: Any) -> Any:
    """The norm of a layer's keys before RoPE; None: it has none."""
    return getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None)


def value_projection(attention: Any) -> Any:
    """What a layer's values come from: in Gemma 4's global layers, of some sizes, that of its keys; None: nothing."""
    if getattr(attention, "use_alternative_attention", False):
        return attention.k_proj
    return getattr(attention, "v_proj", None)


def output_projection(attention: Any) -> Any:
    """What the heads' outputs go through; None: it has another name."""
    names = ("o_proj", "out_proj", "dense")
    return next((found for name in names if (found := getattr(attention, name, None)) is not None), None)


def _attention_of(layer: Any) -> Any:
    parts = (getattr(layer, name, None) for name in ("self_attn", "mixer"))  # a mixer may be of any kind
    projections = ("q_proj", "qkv_proj", "kv_b_proj")
    return next((part for part in parts if any(hasattr(part, name) for name in projections)), None)


def fit_memory(network: Any, name: str) -> None:
    """Give every layer the projections that entries are read from, in place; see `require_trainable_attention`."""
    text, found = network.config.get_text_config(decoder=True), decoder(network)
    if not getattr(found, "_can_set_attn_implementation", bool)():
        raise UnsupportedModel(f"{name}: transformers has the attention of {text.model_type} in a form of its own")
    if not hasattr(found, "layers"):
        raise UnsupportedModel(f"{name}: memory needs decoder layers called layers, found {type(found).__name__}")
    if len(found.layers) != text.num_hidden_layers:
        raise UnsupportedModel(
            f"{name}: by its configuration it has {text.num_hidden_layers} decoder layers, found {len(found.layers)}"
        )
    _take_apart(network)
    require_trainable_attention(network, name)


def require_trainable_attention(network: Any, name: str) -> None:
    """Check that memory can be trained in every layer with attention.

    Raises:
        UnsupportedModel: names what its attention has.
    """
    text, kinds = network.config.get_text_config(decoder=True), set(kinds_of_attention(network))
    if others := sorted(kinds - {FULL, SLIDING, CHUNKED}):
        raise UnsupportedModel(f"{name}: memory is not trained in layers with {', '.join(others)}")
    if FULL not in kinds:
        raise UnsupportedModel(
            f"{name}: every layer has a sliding window, of {text.sliding_window} tokens: "
            "a relevance gate looks at layers that keep all of a prompt"
        )
    if is_latent(text) and has_states(network.config):  # Kimi-Linear
        raise UnsupportedModel(
            f"{name}: memory needs latent attention (MLA) in every layer: vLLM has the delta attention (KDA) of the "
            "others on GPUs alone, and memory beside it was never tried"
        )
    for attention in attention_layers(network):
        if is_latent(text):
            _require_latents(attention, name)
        elif getattr(attention, "k_proj", None) is None or value_projection(attention) is None:
            raise UnsupportedModel(f"{name}: memory needs attention with k_proj and v_proj in every decoder layer")
    numbers = _with_attention(network.config)
    for number, layer in enumerate(decoder(network).layers):
        if number not in numbers and _attention_of(layer) is not None:
            raise UnsupportedModel(
                f"{name}: by layer_types layer {number} has no attention, found {type(layer).__name__} with it"
            )
    if not is_latent(text):
        _require_one_size(network, name)


def _require_latents(attention: Any, name: str) -> None:
    if not all(hasattr(attention, part) for part in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")):
        raise UnsupportedModel(
            f"{name}: memory needs latent attention (MLA) with kv_a_proj_with_mqa, kv_a_layernorm and kv_b_proj in "
            f"every decoder layer, found {type(attention).__name__}"
        )
    if hasattr(attention, "indexer"):
        raise UnsupportedModel(f"{name}: sparse latent attention (DSA): memory beside its selection was never tried")


def _require_one_size(network: Any, name: str) -> None:
    """Check that every layer has the heads that the configuration names: a bundle has one size for all of them."""
    text = network.config.get_text_config(decoder=True)
    heads = memory_heads(text)
    width, groups = heads.num_kv_heads * heads.head_dim, heads.num_heads // heads.num_kv_heads
    for number, attention in zip(memory_layers(text), attention_layers(network), strict=True):
        widths = [projection.weight.shape[0] for projection in (attention.k_proj, value_projection(attention))]
        if widths != [width, width]:
            raise UnsupportedModel(
                f"{name}: memory needs keys and values of one size in all layers, by the configuration of {width} "
                f"numbers a token, found {widths[0]} and {widths[1]} in layer {number}"
            )
        if (found := getattr(attention, "num_key_value_groups", groups)) != groups:
            raise UnsupportedModel(
                f"{name}: memory needs {groups} query heads for each KV head in all layers, as its configuration has "
                f"them, found {found} in layer {number}"
            )


def _take_apart(network: Any) -> None:
    """See `take_apart`: of every layer of the language model."""
    text = network.config.get_text_config(decoder=True)
    if not is_latent(text):
        heads = memory_heads(text)
        take_apart(attention_layers(network), heads.num_heads, heads.num_kv_heads, heads.head_dim)


def _require_no_further_layers(config: Any, unexpected: Iterable[str], model: str | Path) -> None:
    """Check that no layer with attention was left out.

    A component that is left out as a whole, such as one for speech, has its layer 0 among the unexpected weights too.
    The layers that make drafts (multi-token prediction) come behind the model's, and are none of it.
    """
    names, text = set(unexpected), config.get_text_config(decoder=True)
    drafting = range(text.num_hidden_layers, text.num_hidden_layers + (getattr(text, MTP_LAYERS, None) or 0))
    for name in sorted(names):
        layer = re.fullmatch(r"(.*\.layers\.)(\d+)(\.self_attn\.(?:k_proj|kv_b_proj)\.weight)", name)
        if layer is not None and int(layer[2]) not in drafting and f"{layer[1]}0{layer[3]}" not in names:
            raise UnsupportedModel(f"{model}: by its configuration there is no layer {layer[2]}, found {name}")


def _load_processor(model: str | Path) -> Any:
    try:
        processor: Any = AutoProcessor.from_pretrained(str(model), trust_remote_code=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, TypeError) as error:
        load_tokenizer(model)  # says what is wrong if it is the tokenizer
        raise UnsupportedModel(f"{model}: cannot load the processor of its pictures: {summary(error)}") from error
    if not hasattr(processor, "tokenizer"):
        raise UnsupportedModel(f"{model}: a multimodal model needs a processor of pictures, found a tokenizer alone")
    return processor
