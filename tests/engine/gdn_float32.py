"""Gated DeltaNet in float32 in the place of vLLM's CPU operator, which takes bfloat16 alone: for tests of parity.

One request and one token after the other: plain, slow, and independent of transformers' form in chunks. `install`
before an engine is made; vLLM takes the operator by its name when it first needs it.

S [H, K, V] is a request's state; for each token, with q and k of length 1, and q over sqrt(K):

    S = exp(g) S;   S = S + k (beta (v - k S));   out = q S
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


def install() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    # vLLM makes the operator's schema of these, and takes no strings.
    kinds = dict.fromkeys(("mixed_qkv", "b", "a", "core_attn_out"), Tensor)
    _core.__annotations__.update(kinds, layer_name=gdn_attention.LayerNameType, **{"return": None})
    gdn_attention.cpu_gdn_attention_core = _core


def _core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: str) -> None:
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    if context.attn_metadata is None:
        return
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    meta: Any = context.attn_metadata[layer.prefix]
    starts, slots = meta.non_spec_query_start_loc.tolist(), meta.non_spec_state_indices_tensor.tolist()
    goes_on = [True] * meta.num_decodes
    if meta.num_prefills:
        goes_on += meta.has_initial_state.tolist()[meta.num_decodes :]
    for number, begun in enumerate(goes_on):
        rows = slice(starts[number], starts[number + 1])
        if rows.start < rows.stop:
            _request(layer, mixed_qkv[rows], b[rows], a[rows], core_attn_out[rows], slots[number], begun)


def _request(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, output: Tensor, slot: int, begun: bool) -> None:
    """Fill in a request's output [t, H, V], and its states in `slot`.

    Args:
        mixed_qkv: [t, channels]; b, a: [t, H].
        begun: whether the slot holds its states.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv, states = layer.kv_cache
    if not is_conv_state_dim_first():
        conv = conv.transpose(-1, -2)  # [slots, channels, width - 1]
    weight = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], 1, -1).float()  # [channels, 1, width]
    past = weight.shape[-1] - 1
    before = conv[slot, :, :past].float() if begun else torch.zeros(len(weight), past)
    seen = torch.cat([before, mixed_qkv.float().T], dim=1)  # [channels, width - 1 + t]
    conv[slot, :, :past] = seen[:, -past:].to(conv.dtype)
    convolved = silu(conv1d(seen[None], weight, layer.conv1d.bias, groups=len(weight)))[0].T  # [t, channels]
    q, k, v = (each[0].float() for each in layer.rearrange_mixed_qkv(convolved.to(mixed_qkv.dtype).contiguous()))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q * q.shape[-1] ** -0.5, k))  # [t, H, K]
    decay = (-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())).exp()  # [t, H]
    beta = b.float().sigmoid()  # [t, H]
    H, V, K = states.shape[1:]
    S = states[slot].view(H, K, V).float().clone() if begun else torch.zeros(H, K, V)
    for t in range(len(q)):
        S = S * decay[t][:, None, None]
        read = torch.einsum("hk,hkv->hv", k[t], S)
        S = S + k[t][:, :, None] * ((v[t] - read) * beta[t][:, None])[:, None]
        output[t] = torch.einsum("hk,hkv->hv", q[t], S).to(output.dtype)
    states[slot] = S.reshape(H, V, K).to(states.dtype)
